"""`TextEncoder`: a transformer with its tokenizer and contract, from texts to embeddings.

It keeps the three together from loading to saving, because a prefix or a length that is only on a command line is lost
with the command line. The word *side* distinguishes queries from passages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.encoders.backbones import (
    hold_rotary_positions,
    make_lower_casing,
    position_limit,
    refuse_if_padding_counts,
    take_pooler,
    vocabulary,
)
from lit_dpret.encoders.bulk import BUFFER, OneSide, Over, Progress, encode_windows
from lit_dpret.encoders.contract import Contract, Side, get_pooling
from lit_dpret.encoders.embedding_cache import Rows, content_hash, encode_to_file, mapped
from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError

_BATCH = 64
_APART_AT_ONCE = 1024  # texts that `embed_apart` distributes over batches together


class TextEncoder(nn.Module):
    """A transformer that maps each text to one vector.

    Guarantees:
        - A text longer than its side's maximal length is truncated, whatever the tokenizer's own limit.
        - An embedding is a function of its own text; changing one text changes one row. All texts are padded on the
          right, whatever the tokenizer says, so a token's position does not depend on other texts of the batch.
        - T5 never runs in float16, where it overflows.

    Args:
        backbone: A transformers encoder. The encoder takes ownership: a pooler that no embedding uses
            is moved out of it, so that no noise is ever added to weights that have no gradient.
        tokenizer: Its tokenizer; copied.
        contract: Pooling, normalisation, prefixes, lengths.
        projection: A linear map after pooling and before normalisation.
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
        self.tokenizer.padding_side = "right"  # also for other programs that load the saved folder
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
                    f"{name}={length} exceeds {limit}. Beyond that, {type(backbone).__name__} has no positions for "
                    "tokens, or positions that depend on the other texts of a batch. Lower it."
                )
        hold_rotary_positions(backbone)
        width: int = backbone.config.hidden_size
        if projection is not None and projection.in_features != width:
            raise ConfigurationError(
                f"A projection from {projection.in_features} dimensions does not fit {width}, those of the backbone."
            )
        self.dim = width if projection is None else projection.out_features
        self._refuse_float16()
        refuse_if_padding_counts(
            backbone,
            self.token_ids(["a text"], "query", whole=True)[0],
            self.tokenizer.pad_token_id,
            lambda features: backbone(**features).last_hidden_state,
            longest=max(contract.query_max_length, contract.passage_max_length),
        )

    @classmethod
    def from_pretrained(
        cls, encoder: str | Path, *, dtype: str = "float32", revision: str | None = None, **contract: Any
    ) -> TextEncoder:
        """Load an encoder for both sides.

        Args:
            encoder: A local folder of transformers or sentence-transformers, ``public_t5``, ``minilm`` for the
                weights of the [quickstart] extra, or a model's name on the hub.
            dtype: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
            revision: The revision of a model on the hub.
            contract: Fields of `Contract`. A field that is missing or None is read from a sentence-transformers
                folder. By default: mean pooling, normalised, no prefixes, truncated at the tokenizer's limit.
        """
        from lit_dpret.encoders.st_folder import load_towers  # which imports this class

        towers = load_towers(encoder, dtype=dtype, revision=revision)
        if towers.query_encoder is not towers.passage_encoder:
            raise UnsupportedModelError(
                f"encoder={str(encoder)!r} holds different towers for queries and passages. Train with "
                "model=dual_encoder model.towers=separate, which starts from both, or name an encoder that both sides "
                "share (model.encoder); to encode with both, use load_towers."
            )
        found = towers.query_encoder
        chosen = {name: value for name, value in contract.items() if value is not None}
        return found.changed(contract=replace(found.contract, **chosen))

    def changed(self, **parts: Any) -> Self:
        """Return an encoder that shares these weights, with another ``backbone``, ``contract`` or ``projection``."""
        kept = {name: getattr(self, name) for name in ("backbone", "tokenizer", "contract", "projection")}
        other = type(self)(**kept | parts)
        other.unused_weights = self.unused_weights
        return other

    def tokenize(self, texts: Sequence[str], side: Side) -> dict[str, Tensor]:
        """Return texts, prefixed, truncated and padded, as ``input_ids`` and ``attention_mask`` on the CPU."""
        return self.padded(self.token_ids(texts, side))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of tokenised texts, ``(rows, dim)``."""
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
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        progress: Progress | None = None,
        apart: bool = False,
        cache_dir: str | Path | None = None,
        over: Over | None = None,
    ) -> Tensor:
        """Return the embeddings of any number of texts, without gradient and without dropout.

        Guarantees:
            - Row i belongs to text i. Equal texts are encoded once and have equal rows.
            - The rows of up to 50,000 texts do not depend on the order in which texts are given.
            - The encoder returns to its previous mode and device.

        Args:
            texts: The texts.
            side: Whether they are queries or passages.
            batch_size: Texts per forward pass, 64 by default; with ``apart``, texts that are distributed together.
            device: Where to compute; by default the encoder's device.
            progress: Called after every batch.
            apart: For private texts, none of which may change another one's embedding (`embed_apart`). Slower:
                otherwise texts of similar length share a batch, and an embedding's last bits depend on the others.
            cache_dir: Keep the result there, and return an earlier result for the same model and texts, found by
                content. An unreadable file is computed again. Embeddings of private texts are private, and so
                is their cache.
            over: Embeds instead of this process, as `embedding_workers` does; not with ``apart``.

        Returns:
            float32 (float64 for a float64 encoder) on the CPU, shape ``(texts, dim)``.
        """
        size = (_APART_AT_ONCE if apart else _BATCH) if batch_size is None else batch_size
        _require_positive(batch_size=size)
        one_side = OneSide(self, side, device, apart=apart)
        if cache_dir is not None:
            return self._cached(one_side, texts, side, Path(cache_dir), size, progress, over)
        found, start = torch.empty(len(texts), self.dim, dtype=self.wide), 0
        for part in encode_windows(one_side, texts, batch_size=size, progress=progress, total=len(texts), over=over):
            found[start : start + len(part)] = part
            start += len(part)
        return found

    def _cached(
        self,
        one_side: OneSide,
        texts: Sequence[str],
        side: Side,
        folder: Path,
        size: int,
        progress: Progress | None,
        over: Over | None,
    ) -> Tensor:
        contract = self.contract
        facts = [contract.pooling, contract.normalise, contract.lower_case, contract.prefix(side)]
        facts += [contract.max_length(side), vocabulary(self.tokenizer), *(["apart"] if one_side.apart else [])]
        key = content_hash(facts, self.state_dict(), texts)
        path = folder / f"{key}.{str(self.wide).removeprefix('torch.')}"
        stored = mapped(path, len(texts), self.dim, self.wide)
        if stored is None:
            rows = Rows(dtype=self.wide, batch_size=size)
            encode_to_file(one_side, texts, path, rows, facts={"key": key}, restart=True, progress=progress, over=over)
            stored = mapped(path, len(texts), self.dim, self.wide)
        if stored is None:
            raise StorageError(f"The cache entry {path} was changed while it was written. Run the same command again.")
        return stored

    def at_full_length(self, features: Mapping[str, Tensor], side: Side) -> dict[str, Tensor]:
        """Return tokenised texts padded to the side's maximal length, which depends on no text."""
        short = self.contract.max_length(side) - features["input_ids"].shape[1]
        filler = {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 0}
        return {name: F.pad(features[name], (0, short), value=value) for name, value in filler.items()}

    def placed(self, features: Mapping[str, Tensor], side: Side, places: Sequence[int], rows: int) -> dict[str, Tensor]:
        """Return tokenised texts at given positions among ``rows`` rows of the side's maximal length.

        All other rows have one token, so that attention is defined and the batch has some padding. Without padding,
        transformers computes attention differently, and that choice would depend on the texts.
        """
        full = self.at_full_length(features, side)
        ids, mask = full["input_ids"], full["attention_mask"]
        found = {"input_ids": ids.new_full((rows, ids.shape[1]), self.tokenizer.pad_token_id)}
        found["attention_mask"] = mask.new_zeros(rows, ids.shape[1])
        found["attention_mask"][:, 0] = 1
        found["input_ids"][list(places)], found["attention_mask"][list(places)] = ids, mask
        return found

    def encode_stream(
        self,
        texts: Iterable[str],
        side: Side,
        *,
        batch_size: int = _BATCH,
        buffer_size: int = BUFFER,
        device: torch.device | str | None = None,
        progress: Progress | None = None,
        over: Over | None = None,
    ) -> Iterator[Tensor]:
        """Yield the embeddings of texts that need not be in memory together, ``buffer_size`` rows at a time.

        The rows are those of `encode`; another buffer size changes only rounding. If the stream has no length,
        ``progress`` is called with the texts read so far as the total. ``over`` embeds instead of this process.
        """
        _require_positive(batch_size=batch_size, buffer_size=buffer_size)
        return encode_windows(
            OneSide(self, side, device),
            texts,
            batch_size=batch_size,
            buffer_size=buffer_size,
            progress=progress,
            total=len(texts) if isinstance(texts, Sized) else None,
            over=over,
        )

    @property
    def wide(self) -> torch.dtype:
        """The dtype of returned embeddings."""
        return torch.promote_types(next(self.parameters()).dtype, torch.float32)

    def fingerprint(self) -> str:
        """Return the SHA-256 of weights, vocabulary and contract: equal exactly for equal models."""
        return content_hash([asdict(self.contract), vocabulary(self.tokenizer)], self.state_dict())

    def token_ids(self, texts: Sequence[str], side: Side, *, whole: bool = False) -> list[list[int]]:
        """Return token ids of texts with their prefix, truncated at the side's maximal length unless ``whole``."""
        prefix = self.contract.prefix(side)
        raw = [prefix + text for text in texts]
        if self.contract.lower_case and not self.tokenizer.is_fast:
            raw = [text.lower() for text in raw]
        if not raw:
            return []
        limit = self.contract.max_length(side)
        cut: dict[str, Any] = {"verbose": False} if whole else {"truncation": True, "max_length": limit}
        ids: list[list[int]] = self.tokenizer(raw, padding=False, **cut)["input_ids"]
        return ids

    def padded(self, ids: Sequence[Any]) -> dict[str, Tensor]:
        """Return token ids padded at the end, and the attention mask, as inputs of `forward`."""
        longest = max((len(row) for row in ids), default=0) or 1
        input_ids = np.full((len(ids), longest), self.tokenizer.pad_token_id, dtype=np.int64)
        mask = np.zeros((len(ids), longest), dtype=np.int64)
        for place, row in enumerate(ids):
            input_ids[place, : len(row)] = row
            mask[place, : len(row)] = 1
        return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask)}

    def _refuse_float16(self) -> None:
        if "t5" not in self.backbone.config.model_type:
            return
        weight = next(self.backbone.parameters())
        kind = weight.device.type
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        if weight.dtype == torch.float16 or cast:
            raise ConfigurationError(
                "T5 overflows in float16; choose bfloat16 (for training, trainer.precision=bf16-mixed) or float32."
            )


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigurationError(f"{name}={value} must be at least 1.")
