"""Save and load a generator: weights, tokenizer and contract in one folder.

A prompt dropped on the way, or a passage cut at another length, changes what a model writes without
any error. So the prompt, the two lengths and the case folding are saved next to the weights, and
a loaded generator turns texts into tokens exactly as in training.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_dpret.encoders.st_folder import GENERATOR_CONTRACT as CONTRACT_NAME
from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError, unwritten
from lit_dpret.files import file_sha256, meant, settle_modes
from lit_dpret.modules.language_models import load_language_model, load_tokenizer
from lit_dpret.modules.virtual_tokens import drop_virtual_tokens

CONTRACT_FORMAT = 1
PASSAGE = "{passage}"


@dataclass(frozen=True, kw_only=True)
class GeneratorContract:
    """How texts become tokens: everything besides the weights that determines what is generated."""

    prompt: str = "generate_query: "  # a prefix for every passage; or the text around it, marked by ``{passage}``
    max_passage_length: int = 384  # tokens of prompt and passage together, including the end mark
    max_query_length: int = 128  # tokens of a query, including the end mark
    lower_case: bool = False  # lower-case passages (without prompt) and queries before they are tokenised
    # Ids of tuned virtual tokens, put before every passage, in addition to its maximal length.
    virtual_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "virtual_ids", tuple(self.virtual_ids))
        for name in ("max_passage_length", "max_query_length"):
            if getattr(self, name) < 2:
                raise ConfigurationError(
                    f"model.{name}={getattr(self, name)} leaves no room for a token before the end mark. "
                    "Give at least 2."
                )

    @property
    def source_length(self) -> int:
        """The maximum number of tokens before a query: prompt, passage and virtual tokens."""
        return len(self.virtual_ids) + self.max_passage_length

    @property
    def around_passage(self) -> tuple[str, str]:
        """The parts of the prompt before and after the passage."""
        before, _, after = self.prompt.partition(PASSAGE)
        return before, after

    def to_dict(self) -> dict[str, Any]:
        return {"format": CONTRACT_FORMAT, **asdict(self), "virtual_ids": list(self.virtual_ids)}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], *, place: str = CONTRACT_NAME) -> GeneratorContract:
        """Return the contract with these facts from ``place``; refuse another format or an unknown key."""
        found = facts.get("format") if isinstance(facts, Mapping) else None
        if found != CONTRACT_FORMAT or isinstance(found, bool):
            raise UnsupportedModelError(
                f"{place} is of format {found!r}, and this lit-dpret reads format {CONTRACT_FORMAT}."
            )
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(facts) - known - {"format"}):
            raise UnsupportedModelError(f"{place} states {unknown[0]!r}, which this version cannot honour.")
        return cls(**{key: value for key, value in facts.items() if key in known})


@dataclass(frozen=True)
class TextCodec:
    """Convert texts to token ids and back, with one tokenizer under one contract.

    Guarantees:
        - A text that is too long loses its end, but never its end mark or the prompt after it.
        - The tokenizer is unchanged: no truncation setting leaks into its saved files.
    """

    tokenizer: PreTrainedTokenizerBase  # the model's tokenizer
    contract: GeneratorContract  # prompt and lengths
    # Whether the query follows the passage in one sequence, as in decoder-only models: then no mark ends the passage,
    # and a space at the end of the prompt belongs to the query's first token.
    continues: bool = False

    def passages(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of virtual tokens, prompt and passage; ``max_passage_length`` limits the latter two."""
        return [[*self.contract.virtual_ids, *ids] for ids in self.token_ids(texts, "passage")]

    def queries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of the queries, at most ``max_query_length`` each."""
        return self.token_ids(texts, "query")

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]]:
        """Return token ids of texts of one side, truncated at its maximal length unless ``whole``."""
        before, after = self.contract.around_passage
        lead = " " if self.continues and after.endswith(" ") else ""
        cased = [text.lower() if self.contract.lower_case else text for text in texts]
        end = [self.tokenizer.eos_token_id]
        if side == "query":
            inside = [lead + text for text in cased] if self.continues else cased
            return self._ids(inside, end, None if whole else self.contract.max_query_length, marks=not self.continues)
        after = after.removesuffix(lead)
        tail = self.tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"] if after else []
        tail = tail if self.continues else [*tail, *end]
        return self._ids([before + text for text in cased], tail, None if whole else self.contract.max_passage_length)

    def require_room(self) -> None:
        taken, most = len(self.token_ids([""], "passage", whole=True)[0]), self.contract.max_passage_length
        if taken == 0:
            raise ConfigurationError(
                f"model.prompt={self.contract.prompt!r} has no tokens, so nothing would precede the query of an empty "
                "passage. Put a word around the passage."
            )
        if taken >= most:
            raise ConfigurationError(
                f"model.max_passage_length={most} limits prompt and passage together, and model.prompt, with any "
                f"examples of model.few_shot, already has {taken} tokens. Shorten it, or raise the length."
            )

    @cached_property
    def line_breaks(self) -> list[int]:
        """The tokens of a decoder-only model that contain a line break: a query is one line, and ends before it."""
        if not self.continues:
            return []
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        return [token for token, text in enumerate(texts) if "\n" in text]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens, with single spaces."""
        decoded = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return " ".join(str(decoded).split())

    def _ids(self, texts: list[str], tail: list[int], limit: int | None, *, marks: bool = True) -> list[list[int]]:
        """Return the ids of texts, cut so that ``tail`` fits after them; with ``marks``, add the tokenizer's marks."""
        if not texts:
            return []
        rows: list[list[int]] = self.tokenizer(texts, add_special_tokens=marks, verbose=False)["input_ids"]
        eos, kept = self.tokenizer.eos_token_id, None if limit is None else max(limit - len(tail), 0)
        return [[*(ids[:-1] if ids and ids[-1] == eos else ids)[:kept], *tail] for ids in rows]


@dataclass(frozen=True)
class Example:
    """A public passage and query, shown to the model before the passage to write a query for."""

    passage: str
    query: str

    @classmethod
    def read(cls, source: str | Path | Sequence[Mapping[str, str]] | None) -> list[Example]:
        """Return the examples of a file of JSON lines, or of records; each has a ``passage`` and a ``query``."""
        if isinstance(source, str | Path):
            try:
                lines = Path(source).expanduser().read_text(encoding="utf-8").splitlines()
                source = [json.loads(line) for line in lines if line.strip()]
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"model.few_shot={source} is not a file of JSON lines: {error}") from error
        found = []
        for number, record in enumerate(source or (), start=1):
            texts = [record.get(key) for key in ("passage", "query")] if isinstance(record, Mapping) else [None]
            if not all(isinstance(text, str) and text.strip() and PASSAGE not in text for text in texts):
                raise ConfigurationError(
                    f'model.few_shot: example {number} is not of the form {{"passage": "...", "query": "..."}}, with '
                    f"words in both and no {PASSAGE} in either."
                )
            found.append(cls(*map(str, texts)))
        return found


def whole_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, examples: Sequence[Example], *, chat: bool) -> str:
    """Return the text around a passage: the answered examples, and the prompt itself.

    With ``chat`` they are turns of the tokenizer's chat template, up to the start of the last answer; otherwise texts
    separated by blank lines.
    """
    asked = [(prompt.replace(PASSAGE, example.passage), example.query) for example in examples]
    if not chat:
        return "".join(f"{question}{answer}\n\n" for question, answer in asked) + prompt
    if not tokenizer.chat_template:
        raise ConfigurationError(
            "model.chat=true, but the tokenizer has no chat template: the model was not trained to chat. "
            "Set model.chat=false, and write the prompt as text that a query continues."
        )
    turns = [
        turn
        for question, answer in asked
        for turn in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]
    turns.append({"role": "user", "content": prompt})
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    first = tokenizer("", verbose=False)["input_ids"]
    # Remove the begin mark of a template that writes it, if the tokenizer adds it too.
    return text.removeprefix(str(tokenizer.bos_token)) if first and first[0] == tokenizer.bos_token_id else text


def is_generator(folder: str | Path) -> bool:
    """Return whether the folder is a generator of this package."""
    return (Path(str(folder)) / CONTRACT_NAME).is_file()


@dataclass
class GeneratorModel:
    """The interface of a saved generator for generation."""

    model: PreTrainedModel
    codec: TextCodec
    folder: Path

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.codec.tokenizer

    @property
    def contract(self) -> GeneratorContract:
        return self.codec.contract


def save_generator(folder: str | Path, model: PreTrainedModel, codec: TextCodec) -> Path:
    """Write weights, tokenizer and contract to ``folder``, atomically.

    The folder is an ordinary Hugging Face model folder with one additional file. It replaces an older
    generator; a folder that contains anything else is not changed.

    Raises:
        StorageError: The folder cannot be written, or contains something else.
    """
    target = Path(folder)
    if target.exists() and not is_generator(target) and (not target.is_dir() or any(target.iterdir())):
        raise StorageError(
            f"{target} holds something that is not a generator; it will not be replaced. Choose another folder."
        )
    mark = uuid.uuid4().hex[:8]
    fresh, stale = target.with_name(f".{target.name}.{mark}.new"), target.with_name(f".{target.name}.{mark}.old")
    try:
        fresh.mkdir(parents=True)
        model.save_pretrained(fresh)
        codec.tokenizer.save_pretrained(fresh)
        text = json.dumps(codec.contract.to_dict(), indent=2, ensure_ascii=False, sort_keys=True)
        (fresh / CONTRACT_NAME).write_text(text + "\n", encoding="utf-8")
        settle_modes(fresh)
        for file in fresh.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if target.exists():
            target.rename(stale)
        fresh.rename(target)
    except (OSError, SafetensorError) as error:
        if stale.exists() and not target.exists():
            stale.rename(target)
        raise StorageError(
            f"The generator could not be saved to {target}: {unwritten(error)}. What was there before is kept. Free "
            "space, then give the command again, with resume=true if its run had begun."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(stale, ignore_errors=True)
    return target


def load_generator(folder: str | Path) -> GeneratorModel:
    """Load what ``save_generator`` wrote; weights in float32, dropout off."""
    folder = Path(folder)
    contract = read_contract(folder)
    model = load_language_model(folder, knob="")
    if virtual := contract.virtual_ids:
        rows = model.get_input_embeddings().num_embeddings
        if virtual != tuple(range(rows - len(virtual), rows)):
            raise UnsupportedModelError(
                f"{folder / CONTRACT_NAME} states virtual_ids {virtual[0]} to {virtual[-1]}, which are not the last of "
                f"the {rows} rows of the model's embeddings. The files do not belong together: use a whole model "
                "folder."
            )
        drop_virtual_tokens(model, len(virtual))
    codec = TextCodec(load_tokenizer(folder, knob=""), contract, continues=not model.config.is_encoder_decoder)
    return GeneratorModel(model.eval(), codec, folder)


def read_contract(folder: str | Path) -> GeneratorContract:
    """Return the contract of a saved generator."""
    file = Path(folder) / CONTRACT_NAME
    try:
        return GeneratorContract.from_dict(json.loads(file.read_text(encoding="utf-8")), place=str(file))
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, UnsupportedModelError | ConfigurationError):
            raise
        raise UnsupportedModelError(
            f"{folder} is not a saved generator: {CONTRACT_NAME}, which holds its prompt and lengths, is missing or "
            f"unreadable. Give a model folder that a generator run exported.{meant(folder, CONTRACT_NAME)}"
        ) from error


def refuse_tuned_prompt(source: str | Path) -> None:
    """Refuse to continue from a generator with a tuned prompt, which would be lost."""
    if is_generator(source) and read_contract(source).virtual_ids:
        raise ConfigurationError(
            f"model.pretrained={source} is a generator with a tuned prompt (model.prompt_tuning), which would be "
            "lost. Start from the model that it started from; its privacy card names it."
        )


def weights_hash(folder: str | Path) -> str:
    """Return the SHA-256 of config, weights, tokenizer and contract of a saved generator, with their file names."""
    digest = hashlib.sha256()
    names = [CONTRACT_NAME, "config.json", "tokenizer.json", "tokenizer_config.json"]
    files = [Path(folder) / name for name in names] + sorted(Path(folder).glob("*.safetensors"))
    for file in files:
        if file.is_file():
            digest.update(f"{file.name}\0{file_sha256(file)}\n".encode())
    return digest.hexdigest()
