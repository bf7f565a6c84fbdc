"""A generator is weights, a tokenizer and a contract, and the three travel together.

A prompt dropped on the way, or a passage cut at another length, changes what a model writes without
any error. So the prompt, the two lengths and the case folding are saved beside the weights, and
whoever loads the folder gets texts turned into tokens exactly as training did it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError, first_line
from lit_dpret.modules.fine_tuning import speak_words_only

CONTRACT_NAME = "lit_dpret_generator.json"
CONTRACT_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class GeneratorContract:
    """How texts become tokens: everything beside the weights that changes what is generated.

    Args:
        prompt: Put before every passage.
        max_passage_length: Tokens of prompt and passage together, the end mark included.
        max_query_length: Tokens of a query, the end mark included.
        lower_case: Lower-case prompt-less passages and queries before they are tokenised.
        virtual_ids: Ids of tuned virtual tokens, put before every passage, beyond its maximal length.
    """

    prompt: str = "generate_query: "
    max_passage_length: int = 384
    max_query_length: int = 128
    lower_case: bool = False
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
    def encoder_length(self) -> int:
        """Tokens that the encoder sees at most: those of a passage, and the virtual ones before it."""
        return len(self.virtual_ids) + self.max_passage_length

    def to_dict(self) -> dict[str, Any]:
        """Return the contract as it is written to ``lit_dpret_generator.json``."""
        return {"format": CONTRACT_FORMAT, **asdict(self), "virtual_ids": list(self.virtual_ids)}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], *, place: str = CONTRACT_NAME) -> GeneratorContract:
        """Read it back; another format or an unknown key is refused, not ignored.

        ``place`` is the file, for the message.
        """
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
    """Texts to token ids and back, by one tokenizer under one contract.

    Guarantees:
        - A text that is too long loses its end, never its end mark.
        - The tokenizer is left as it was: no truncation setting leaks into its saved files.
    """

    tokenizer: PreTrainedTokenizerBase
    contract: GeneratorContract

    def passages(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of virtual tokens and of ``prompt + passage``, of which at most ``max_passage_length``."""
        return [[*self.contract.virtual_ids, *ids] for ids in self.token_ids(texts, "passage")]

    def queries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of the queries, at most ``max_query_length`` each."""
        return self.token_ids(texts, "query")

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]]:
        """Return token ids of texts of one side, cut at its maximal length unless ``whole``."""
        of_query = side == "query"
        prompt = "" if of_query else self.contract.prompt
        limit = self.contract.max_query_length if of_query else self.contract.max_passage_length
        return self._ids([prompt + self._cased(text) for text in texts], None if whole else limit)

    def text(self, ids: Sequence[int]) -> str:
        """Return the words of generated ids, without marks, with single spaces."""
        decoded = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return " ".join(str(decoded).split())

    def _cased(self, text: str) -> str:
        return text.lower() if self.contract.lower_case else text

    def _ids(self, texts: list[str], limit: int | None) -> list[list[int]]:
        eos = self.tokenizer.eos_token_id
        if not texts:
            return []
        rows: list[list[int]] = self.tokenizer(texts, verbose=False)["input_ids"]
        kept = None if limit is None else limit - 1
        return [[*(ids[:-1] if ids and ids[-1] == eos else ids)[:kept], eos] for ids in rows]


def is_generator(folder: str | Path) -> bool:
    """Return whether it is the folder of a generator of this package."""
    return (Path(str(folder)) / CONTRACT_NAME).is_file()


@dataclass
class GeneratorModel:
    """What generation needs of a saved generator."""

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
    """Write weights, tokenizer and contract to ``folder``, all of it or nothing.

    The folder is an ordinary Hugging Face model folder with one file more. An older generator
    there is replaced; a folder that holds anything else is left alone.

    Raises:
        StorageError: The folder cannot be written, or holds something else.
    """
    target = Path(folder)
    if target.exists() and not is_generator(target) and (not target.is_dir() or any(target.iterdir())):
        raise StorageError(
            f"{target} holds something that is no generator; it will not be replaced. Choose another folder."
        )
    mark = uuid.uuid4().hex[:8]
    fresh, stale = target.with_name(f".{target.name}.{mark}.new"), target.with_name(f".{target.name}.{mark}.old")
    try:
        fresh.mkdir(parents=True)
        model.save_pretrained(fresh)
        codec.tokenizer.save_pretrained(fresh)
        text = json.dumps(codec.contract.to_dict(), indent=2, ensure_ascii=False, sort_keys=True)
        (fresh / CONTRACT_NAME).write_text(text + "\n", encoding="utf-8")
        for file in fresh.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if target.exists():
            target.rename(stale)
        fresh.rename(target)
    except OSError as error:
        if stale.exists() and not target.exists():
            stale.rename(target)
        raise StorageError(
            f"The generator could not be saved to {target}: {error.strerror or error}. What was there before is kept."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(stale, ignore_errors=True)
    return target


def load_generator(folder: str | Path) -> GeneratorModel:
    """Read what ``save_generator`` wrote; weights in float32, dropout off.

    Raises:
        UnsupportedModelError: The folder is no generator of this package.
    """
    folder = Path(folder)
    contract = read_contract(folder)
    model = load_seq2seq(folder)
    if virtual := contract.virtual_ids:
        rows = model.get_input_embeddings().num_embeddings
        if virtual != tuple(range(rows - len(virtual), rows)):
            raise UnsupportedModelError(
                f"{folder / CONTRACT_NAME} states virtual_ids {virtual[0]} to {virtual[-1]}, which are not the last of "
                f"the {rows} rows of the model's embeddings. The two files do not belong together."
            )
        speak_words_only(model, len(virtual))
    return GeneratorModel(model.eval(), TextCodec(load_tokenizer(folder), contract), folder)


def read_contract(folder: str | Path) -> GeneratorContract:
    """Return the contract of a saved generator.

    Raises:
        UnsupportedModelError: The folder is no generator of this package.
    """
    file = Path(folder) / CONTRACT_NAME
    try:
        return GeneratorContract.from_dict(json.loads(file.read_text(encoding="utf-8")), place=str(file))
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, UnsupportedModelError | ConfigurationError):
            raise
        raise UnsupportedModelError(
            f"{folder} is no saved generator: {CONTRACT_NAME} is missing or unreadable, and without it the prompt and "
            "the lengths of training are unknown. Give the folder that a generator run exported."
        ) from error


def refuse_tuned_prompt(source: str | Path) -> None:
    """Refuse to continue from a generator with a tuned prompt, which would be lost on the way.

    Raises:
        ConfigurationError: It is the folder of a generator with virtual tokens.
    """
    if is_generator(source) and read_contract(source).virtual_ids:
        raise ConfigurationError(
            f"model.pretrained={source} is a generator with a tuned prompt (model.prompt_tuning), which is no model to "
            "train on: its prompt would be left out. Start from the model that it started from; its privacy card "
            "names it."
        )


def weights_hash(folder: str | Path) -> str:
    """Return the SHA-256 of config, weights, tokenizer and contract of a saved generator, by file name."""
    digest = hashlib.sha256()
    names = [CONTRACT_NAME, "config.json", "tokenizer.json", "tokenizer_config.json"]
    files = [Path(folder) / name for name in names] + sorted(Path(folder).glob("*.safetensors"))
    for file in files:
        if file.is_file():
            with open(file, "rb") as handle:
                inner = hashlib.file_digest(handle, "sha256").hexdigest()
            digest.update(f"{file.name}\0{inner}\n".encode())
    return digest.hexdigest()


PUBLIC_T5 = "public_t5"
# Loading never guesses. A folder that is not a sequence-to-sequence model, or lacks some of its weights (Hugging Face
# would fill them with noise and go on), is refused in one line that names it.
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, StrictDataclassError)


def load_tokenizer(source: str | Path | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer by hub name, folder, ``public_t5``, or itself.

    Raises:
        UnsupportedModelError: There is none, or it has no padding or end mark.
    """
    if isinstance(source, PreTrainedTokenizerBase):
        tokenizer = source
    else:
        place = _place(source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=_is_cached(place))
        except _LOADING_ERRORS as error:
            raise _unloadable(source, error, "tokenizer") from error
    for mark in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, mark) is None:
            raise UnsupportedModelError(
                f"The tokenizer of {source} has no {mark}: a generator pads its batches and must learn where to end."
            )
    return tokenizer


def load_seq2seq(source: str | Path, *, dropout: float | None = None) -> PreTrainedModel:
    """Return a sequence-to-sequence model by hub name, folder or ``public_t5``, its weights in float32.

    Raises:
        UnsupportedModelError: There is no such model, it is of another kind, or weights are missing.
    """
    place = _place(source)
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=_is_cached(place))
        if dropout is not None:
            _set_dropout(config, dropout)
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            place, config=config, dtype=torch.float32, output_loading_info=True, local_files_only=_is_cached(place)
        )
    except _LOADING_ERRORS as error:
        raise _unloadable(source, error, "sequence-to-sequence model") from error
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModelError(
            f"model.pretrained={source} lacks {len(missing)} of its weights ({missing[0]}, ...): they would be noise. "
            "It may be an encoder only, or a download that broke off."
        )
    return _checked(model, source)


def config_of_new(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> PretrainedConfig:
    """Return the Hugging Face config of a new model from its fields (``model_type`` defaults to ``t5``).

    Special token ids and ``vocab_size`` come from the tokenizer where they are not given.

    Raises:
        ConfigurationError: A field is unknown, or the vocabulary is smaller than the tokenizer's.
    """
    given = dict(config)
    kind = str(given.pop("model_type", "t5"))
    try:
        known = AutoConfig.for_model(kind).to_dict()
    except ValueError as error:
        raise ConfigurationError(f"model.config.model_type={kind!r} is no model that transformers knows.") from error
    if unknown := sorted(set(given) - set(known)):
        raise ConfigurationError(
            f"model.config.{unknown[0]} is no field of a {kind} config. There are: {', '.join(sorted(known))}."
        )
    if tokenizer is not None:
        given.setdefault("vocab_size", len(tokenizer))
        given.setdefault("pad_token_id", tokenizer.pad_token_id)
        given.setdefault("eos_token_id", tokenizer.eos_token_id)
        given.setdefault("decoder_start_token_id", tokenizer.pad_token_id)
        if given["vocab_size"] < len(tokenizer):
            raise ConfigurationError(
                f"model.config.vocab_size={given['vocab_size']} is smaller than the tokenizer's {len(tokenizer)} "
                "tokens."
            )
    try:
        return AutoConfig.for_model(kind, **given)
    except _LOADING_ERRORS as error:
        raise ConfigurationError(f"model.config does not describe a {kind} model: {first_line(error)}") from error


def config_of_stored(source: str | Path, *, known: Mapping[str, Mapping[str, Any]] | None = None) -> PretrainedConfig:
    """Return the config of a model by hub name, folder or ``public_t5``, without its weights.

    Args:
        source: As for `load_seq2seq`.
        known: Fields of configs by hub name, taken where the hub's own is not in the cache.

    Raises:
        UnsupportedModelError: There is no such model.
    """
    place = _place(source)
    if place in (known or {}) and not _is_cached(place):
        facts = dict((known or {})[place])
        return AutoConfig.for_model(facts.pop("model_type"), **facts)
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(place, local_files_only=_is_cached(place))
    except _LOADING_ERRORS as error:
        raise _unloadable(source, error, "sequence-to-sequence model") from error
    return found


def build_seq2seq(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, dropout: float | None = None
) -> PreTrainedModel:
    """Return a new model from the fields of its Hugging Face config (``model_type`` defaults to ``t5``).

    Special token ids and ``vocab_size`` come from the tokenizer where they are not given.

    Raises:
        ConfigurationError: A field is unknown, or the vocabulary is smaller than the tokenizer's.
    """
    full = config_of_new(config, tokenizer)
    try:
        if dropout is not None:
            _set_dropout(full, dropout)
        model = AutoModelForSeq2SeqLM.from_config(full, dtype=torch.float32)
    except _LOADING_ERRORS as error:
        raise ConfigurationError(
            f"model.config does not describe a {full.model_type} model: {first_line(error)}"
        ) from error
    return _checked(model, f"model.config ({full.model_type})")


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; the method was renamed within transformers 5."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _place(source: str | Path) -> str:
    """Return the folder or hub name that Hugging Face is asked for."""
    if str(source) == PUBLIC_T5:
        from lit_dpret.assets import public_t5_path  # here, so that only its users need the asset

        return str(public_t5_path())
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists() or path.is_absolute() or str(source).startswith((".", "~")):
        raise UnsupportedModelError(f"model.pretrained={source} is no folder. Give a model folder or a hub name.")
    return str(source)


def _is_cached(place: str) -> bool:
    """Return whether the hub need not be asked: without a network each question costs half a minute."""
    if Path(place).is_dir():
        return True
    try:
        AutoConfig.from_pretrained(place, local_files_only=True)
    except _LOADING_ERRORS:
        return False
    return True


def _checked(model: PreTrainedModel, source: object) -> PreTrainedModel:
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise UnsupportedModelError(
            f"{source} is a {type(model).__name__}, which cannot shift targets into decoder inputs. "
            "Choose a T5, BART or similar model."
        )
    return model


def _set_dropout(config: Any, dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ConfigurationError(f"model.dropout={dropout} is not in [0, 1).")
    if hasattr(config, "dropout_rate"):
        config.dropout_rate = dropout
    elif hasattr(config, "dropout"):
        config.dropout = dropout
        for name in ("attention_dropout", "activation_dropout"):
            if dropout == 0 and hasattr(config, name):
                setattr(config, name, 0.0)
    else:
        raise ConfigurationError(
            f"model.dropout={dropout} cannot be set: a {config.model_type} config names no dropout rate."
        )


def _unloadable(source: object, error: BaseException, what: str) -> Exception:
    if isinstance(error, ConfigurationError | UnsupportedModelError):
        return error
    if isinstance(source, Path) or Path(str(source)).expanduser().is_dir() or str(source) == PUBLIC_T5:
        return UnsupportedModelError(f"model.pretrained={source} holds no usable {what}: {first_line(error)}")
    return UnsupportedModelError(
        f"model.pretrained={source} is no local folder, is not in the Hugging Face cache, and could not be fetched: "
        f"{first_line(error)} Give a folder, or model.pretrained={PUBLIC_T5}."
    )


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Return the rows filled up at the end, shape ``(rows, longest)``, int64.

    Example:
        >>> padded([[5, 6], [7]], 0).tolist()
        [[5, 6], [7, 0]]
    """
    width = max(len(ids) for ids in rows)
    return torch.tensor([[*ids, *[filler] * (width - len(ids))] for ids in rows], dtype=torch.long)


def placed(tensor: Tensor, places: Sequence[int], shape: tuple[int, int], filler: int) -> Tensor:
    """Return the rows of ``tensor`` at ``places`` of a tensor of that shape, which is otherwise full of ``filler``.

    Example:
        >>> placed(torch.tensor([[5, 6], [7, 0]]), [0, 2], (3, 3), 0).tolist()
        [[5, 6, 0], [0, 0, 0], [7, 0, 0]]
    """
    found = tensor.new_full(shape, filler)
    found[list(places), : tensor.shape[1]] = tensor
    return found
