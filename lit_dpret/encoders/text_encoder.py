"""From texts to embeddings: a transformer with everything that decides what comes out.

A `TextEncoder` is weights, a tokenizer and a `Contract`: pooling, normalisation, prefixes, lengths.
It keeps the three together from loading to saving, because a prefix or a cut-off that lives on a
command line is lost with the command line. Queries and passages are told apart by the word *side*.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.encoders.backbones import (
    load_linear,
    load_transformer,
    make_lower_casing,
    position_limit,
    resolve_folder,
    take_pooler,
    vocabulary,
)
from lit_dpret.encoders.embedding_cache import content_hash, load_or_make
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.pooling import get_pooling
from lit_dpret.st_folder import Tower, read_folder

Side = Literal["query", "passage"]
Progress = Callable[[int, int], None]
"""Called with (texts done, texts in all) after every batch."""

_SORTED_AT_ONCE = 65_536
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything besides weights and vocabulary that decides an embedding.

    Args:
        pooling: ``mean``, ``cls`` or ``max``.
        normalise: Whether embeddings are scaled to length 1.
        query_max_length: Tokens of a query that are read, special tokens among them.
        passage_max_length: The same for a passage.
        query_prefix: Put before every query, with its own space at the end.
        passage_prefix: Put before every passage.
        lower_case: Whether texts are lower-cased first, whatever the tokenizer does by itself.
    """

    pooling: str = "mean"
    normalise: bool = True
    query_max_length: int = 512
    passage_max_length: int = 512
    query_prefix: str = ""
    passage_prefix: str = ""
    lower_case: bool = False

    def prefix(self, side: Side) -> str:
        """What is put before a text of this side."""
        return {"query": self.query_prefix, "passage": self.passage_prefix}[side]

    def max_length(self, side: Side) -> int:
        """How many tokens of a text of this side are read."""
        return {"query": self.query_max_length, "passage": self.passage_max_length}[side]


class TextEncoder(nn.Module):
    """A transformer that turns each text into one vector.

    Guarantees:
        - A text longer than its side's maximal length is cut, whatever the tokenizer's own limit.
        - An embedding is a function of its own text; changing one text changes one row.
        - T5 never runs in float16, where it overflows.

    Args:
        backbone: A transformers encoder. The encoder takes it over: a pooler that no embedding uses
            is moved out of it, so that no noise is ever added to weights that have no gradient.
        tokenizer: Its tokenizer; copied.
        contract: Pooling, normalisation, prefixes, lengths.
        projection: A linear map after pooling and before normalisation.

    Raises:
        ConfigurationError: The contract is impossible for this model.
        UnsupportedModelError: The tokenizer cannot pad.
    """

    def __init__(
        self, backbone: Any, tokenizer: Any, contract: Contract | None = None, projection: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.contract = contract = Contract() if contract is None else contract
        self._pool = get_pooling(contract.pooling)
        self.unused_weights: dict[str, Tensor] = take_pooler(backbone)
        self.backbone = backbone
        self.projection = projection
        self.tokenizer: Any = copy.deepcopy(tokenizer)
        if self.tokenizer.pad_token_id is None:
            raise UnsupportedModelError(f"{type(tokenizer).__name__} has no padding token, so it cannot batch texts.")
        if contract.lower_case:
            make_lower_casing(self.tokenizer)
        limit = position_limit(backbone)
        for name, length in (
            ("query_max_length", contract.query_max_length),
            ("passage_max_length", contract.passage_max_length),
        ):
            if length < 1:
                raise ConfigurationError(f"{name}={length} must be at least 1.")
            if limit is not None and length > limit:
                raise ConfigurationError(
                    f"{name}={length} is more than the {limit} tokens this model has positions for."
                )
        width: int = backbone.config.hidden_size
        if projection is not None and projection.in_features != width:
            raise ConfigurationError(f"A projection from {projection.in_features} dimensions does not fit {width}.")
        self.dim = width if projection is None else projection.out_features
        self._refuse_float16()

    @classmethod
    def from_pretrained(
        cls,
        encoder: str | Path,
        *,
        pooling: str | None = None,
        normalise: bool | None = None,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        lower_case: bool | None = None,
        dtype: str = "float32",
        revision: str | None = None,
    ) -> Self:
        """Load an encoder that serves both sides.

        Whatever is left None is taken from the folder, where a sentence-transformers folder says it;
        else it is mean pooling, normalised, without prefixes, cut at the tokenizer's limit.

        Args:
            encoder: A local folder of transformers or sentence-transformers, ``minilm`` for the
                weights of the [quickstart] extra, or a model's name on the hub.
            pooling: ``mean``, ``cls`` or ``max``.
            normalise: Whether to scale embeddings to length 1.
            query_max_length: Tokens of a query to read.
            passage_max_length: Tokens of a passage to read.
            query_prefix: Put before every query.
            passage_prefix: Put before every passage.
            lower_case: Whether to lower-case texts first.
            dtype: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
            revision: Of a model on the hub.

        Raises:
            ConfigurationError: A setting is impossible, or the model cannot be found.
            UnsupportedModelError: The folder holds no model we would compute faithfully.
        """
        towers = load_towers(encoder, dtype=dtype, revision=revision)
        if towers.query_encoder is not towers.passage_encoder:
            raise UnsupportedModelError(
                f"encoder={str(encoder)!r} holds different towers for queries and passages; load it with load_towers."
            )
        found = towers.query_encoder
        given = {
            "pooling": pooling,
            "normalise": normalise,
            "query_max_length": query_max_length,
            "passage_max_length": passage_max_length,
            "query_prefix": query_prefix,
            "passage_prefix": passage_prefix,
            "lower_case": lower_case,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        contract = Contract(**{**asdict(found.contract), **chosen})
        loaded = cls(found.backbone, found.tokenizer, contract, found.projection)
        loaded.unused_weights = found.unused_weights
        return loaded

    def with_projection(self, projection: nn.Linear) -> TextEncoder:
        """The same encoder, sharing its weights, with a linear map before normalisation.

        Raises:
            ConfigurationError: There is one already, or it does not fit.
        """
        if self.projection is not None:
            raise ConfigurationError("The encoder has a projection already; fold the two into one.")
        other = TextEncoder(self.backbone, self.tokenizer, self.contract, projection)
        other.unused_weights = self.unused_weights
        return other

    def tokenize(self, texts: Sequence[str], side: Side) -> dict[str, Tensor]:
        """Texts as model input, prefixed, cut and padded to the longest of them.

        Returns:
            ``input_ids`` and ``attention_mask``, long, shape ``(rows, tokens)``, on the CPU.
        """
        return self._padded(self._token_ids(texts, side))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """The embeddings of tokenised texts.

        Args:
            features: What `tokenize` returned, on the encoder's device.

        Returns:
            Shape ``(rows, dim)``.

        Raises:
            ConfigurationError: T5 would run in float16.
        """
        self._refuse_float16()
        mask = features["attention_mask"]
        hidden = self.backbone(input_ids=features["input_ids"], attention_mask=mask).last_hidden_state
        embeddings = self._pool(hidden, mask)
        if self.projection is not None:
            embeddings = self.projection(embeddings)
        return F.normalize(embeddings, p=2, dim=-1) if self.contract.normalise else embeddings

    def encode(
        self,
        texts: Sequence[str],
        side: Side,
        *,
        batch_size: int = 64,
        device: torch.device | str | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """The embeddings of any number of texts, without gradient and without dropout.

        Texts are sorted by their number of tokens, longest first, so that little is padded and a batch
        that does not fit fails at once; equal texts are encoded once.

        Guarantees:
            - Row i belongs to text i, and equal texts have equal rows.
            - The rows of up to 65,536 texts do not depend on the order in which texts are given.
            - The encoder comes back in the mode and on the device it was.

        Args:
            texts: The texts.
            side: Whether they are queries or passages.
            batch_size: Texts per forward pass.
            device: Where to compute; where the encoder is, by default.
            progress: Called after every batch.

        Returns:
            float32 (float64 for a float64 encoder) on the CPU, shape ``(texts, dim)``.
        """
        if batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size} must be at least 1.")
        home = next(self.parameters()).device
        where = home if device is None else torch.device(device)
        wide = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        result = torch.empty(len(texts), self.dim, dtype=wide)
        with torch.no_grad(), evaluation_mode(self.to(where)):
            for start in range(0, len(texts), _SORTED_AT_ONCE):
                ids = [tuple(row) for row in self._token_ids(texts[start : start + _SORTED_AT_ONCE], side)]
                unique = sorted(set(ids), key=lambda row: (-len(row), row))
                position = {row: place for place, row in enumerate(unique)}
                places = torch.tensor([position[row] for row in ids], dtype=torch.long)
                done = torch.empty(len(unique), self.dim, dtype=wide)
                for row in range(0, len(unique), batch_size):
                    batch = self._padded(unique[row : row + batch_size])
                    done[row : row + batch_size] = self({k: v.to(where) for k, v in batch.items()}).to("cpu", wide)
                    if progress is not None:
                        share = min(1.0, (row + batch_size) / len(unique))
                        progress(start + round(share * len(ids)), len(texts))
                result[start : start + len(ids)] = done[places]
        self.to(home)
        return result

    def encode_cached(
        self,
        texts: Sequence[str],
        side: Side,
        cache_dir: str | Path,
        *,
        batch_size: int = 64,
        device: torch.device | str | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """`encode`, or what it returned the last time for the same weights, contract and texts.

        The cache is found by content: train the encoder a step, change a prefix or a text, and it is
        another entry. A file appears whole or not at all; one that cannot be read is made anew.
        Embeddings of private texts are private: so is a cache that holds them.

        Raises:
            StorageError: The cache cannot be written.
        """
        contract = self.contract
        facts = [contract.pooling, contract.normalise, contract.lower_case, contract.prefix(side)]
        facts += [contract.max_length(side), vocabulary(self.tokenizer)]
        path = Path(cache_dir) / f"{content_hash(facts, self.state_dict(), texts)}.safetensors"

        def make() -> Tensor:
            return self.encode(texts, side, batch_size=batch_size, device=device, progress=progress)

        return load_or_make(path, (len(texts), self.dim), make)

    def fingerprint(self) -> str:
        """SHA-256 of weights, vocabulary and contract: equal if and only if the model is the same."""
        return content_hash([asdict(self.contract), vocabulary(self.tokenizer)], self.state_dict())

    def _token_ids(self, texts: Sequence[str], side: Side) -> list[list[int]]:
        prefix = self.contract.prefix(side)
        raw = [prefix + text for text in texts]
        if self.contract.lower_case and not self.tokenizer.is_fast:
            raw = [text.lower() for text in raw]
        if not raw:
            return []
        limit = self.contract.max_length(side)
        ids: list[list[int]] = self.tokenizer(raw, truncation=True, max_length=limit, padding=False)["input_ids"]
        return ids

    def _padded(self, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        longest = max((len(row) for row in ids), default=0) or 1
        input_ids = torch.full((len(ids), longest), self.tokenizer.pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(ids), longest, dtype=torch.long)
        for place, row in enumerate(ids):
            span = slice(longest - len(row), longest) if self.tokenizer.padding_side == "left" else slice(0, len(row))
            input_ids[place, span] = torch.tensor(row, dtype=torch.long)
            mask[place, span] = 1
        return {"input_ids": input_ids, "attention_mask": mask}

    def _refuse_float16(self) -> None:
        if "t5" not in self.backbone.config.model_type:
            return
        weight = next(self.backbone.parameters())
        kind = weight.device.type
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        if weight.dtype == torch.float16 or cast:
            raise ConfigurationError("T5 overflows in float16; choose bfloat16 (precision=bf16-mixed) or float32.")


class Towers(NamedTuple):
    """The two sides of a dual encoder; the same object twice where one encoder serves both."""

    query_encoder: TextEncoder
    passage_encoder: TextEncoder


def load_towers(encoder: str | Path, *, dtype: str = "float32", revision: str | None = None) -> Towers:
    """Load a dual encoder from any folder that `save_sentence_transformer` can write.

    Args:
        encoder: As for `TextEncoder.from_pretrained`.
        dtype: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
        revision: Of a model on the hub.

    Raises:
        ConfigurationError: A setting is impossible, or the model cannot be found.
        UnsupportedModelError: The folder holds no model we would compute faithfully.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}.")
    found = read_folder(resolve_folder(encoder, revision))
    backbone, tokenizer = load_transformer(found.query.transformer, _DTYPES[dtype])
    pooler = take_pooler(backbone)

    def tower(said: Tower) -> TextEncoder:
        sides = (found.query, found.passage) if found.shared_backbone else (said, said)
        query_length, passage_length = (_length(side, backbone, tokenizer) for side in sides)
        contract = Contract(
            pooling=said.pooling,
            normalise=found.normalise,
            query_max_length=query_length,
            passage_max_length=passage_length,
            query_prefix=found.query_prefix,
            passage_prefix=found.passage_prefix,
            lower_case=said.lower_case,
        )
        projection = None if said.dense is None else load_linear(said.dense, _DTYPES[dtype])
        loaded = TextEncoder(backbone, tokenizer, contract, projection)
        loaded.unused_weights = pooler
        return loaded

    query_encoder = tower(found.query)
    if found.one_encoder:
        return Towers(query_encoder, query_encoder)
    if not found.shared_backbone:
        backbone, tokenizer = load_transformer(found.passage.transformer, _DTYPES[dtype])
        pooler = take_pooler(backbone)
    return Towers(query_encoder, tower(found.passage))


def _length(tower: Tower, backbone: Any, tokenizer: Any) -> int:
    """Where this tower cuts texts: as its folder says, else as tokenizer or model allow, else 512."""
    own = tokenizer.model_max_length if tokenizer.model_max_length < 1_000_000 else None
    limit = position_limit(backbone)
    length = tower.max_length or own or limit or 512
    return length if limit is None else min(length, limit)
