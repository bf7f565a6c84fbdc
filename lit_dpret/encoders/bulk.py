"""Encode many texts: sorted by length for little padding, a buffer at a time for little memory.

Within a *window* of 50,000 texts, equal texts are encoded once and the longest go first. Nearly all texts of a batch
then have its padded length, and a batch that does not fit on the device fails at once. For the lengths in MS MARCO,
padding takes 1 % of the computation; in corpus order it takes more than half.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from lit_dpret.encoders.contract import Side
from lit_dpret.errors import DataError
from lit_dpret.evaluation_mode import evaluation_mode

BUFFER = 50_000
"""The number of texts that are sorted together."""

Progress = Callable[[int, int], None]
"""Called with (texts done, texts in all) after every batch."""

Piece = tuple[int, list[list[bytes]]]
"""The index of a piece's first text among the distinct ones of a `Window`, and their token ids in batches."""

Embedded = tuple[int, Tensor]
"""The index of a piece's first text, and the piece's embeddings, ``(texts, dim)``."""

Over = Callable[[Iterable[Piece]], Iterator[Embedded]]
"""A function that embeds pieces, each by `embed_piece`, in this process or elsewhere, in any order."""

BATCHES_PER_PIECE = 16

T = TypeVar("T")

_TOKENISED_AT_ONCE = 1024


class OneSide:
    """Bulk encoding of one side by a `TextEncoder`, which is on ``device`` inside ``with`` and is moved back after."""

    def __init__(self, encoder: Any, side: Side, device: torch.device | str | None, *, apart: bool = False) -> None:
        self.apart = apart
        self.dim, self._encoder, self._side = encoder.dim, encoder, side
        self._home = next(encoder.parameters()).device
        self._where = self._home if device is None else torch.device(device)

    def __enter__(self) -> None:
        self._encoder.to(self._where)

    def __exit__(self, *_: object) -> None:
        self._encoder.to(self._home)

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, truncated at the side's length."""
        found: list[list[int]] = self._encoder.token_ids(texts, self._side)
        return found

    def embed(self, ids: Sequence[Any]) -> Tensor:
        """Return the embeddings of one batch of token ids, on the CPU, ``(rows, dim)``."""
        encoder = self._encoder
        with torch.no_grad(), evaluation_mode(encoder):
            batch = encoder.padded(ids)
            if not self.apart:
                return self._kept(encoder(_on(batch, self._where)))
            full = encoder.at_full_length(batch, self._side)
            return self._kept(
                embed_apart(lambda part: encoder(_on(part, self._where)), full, encoder.tokenizer.pad_token_id)
            )

    def _kept(self, embeddings: Tensor) -> Tensor:
        return embeddings.to("cpu", self._encoder.wide)


def _on(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def in_order(texts: Mapping[str, str]) -> Sequence[str]:
    """Return the texts of a mapping as a sequence; a mapping on disk may read it in parts."""
    values = texts.values()
    return values if isinstance(values, Sequence) else list(values)


class Window:
    """Texts in the order of computation: the longest first, without duplicates.

    The batches are a function of the set of texts, not of their order.
    """

    def __init__(self, encoding: OneSide, texts: Sequence[str]) -> None:
        self._encoding = encoding
        rows: list[bytes] = []
        for start in range(0, len(texts), _TOKENISED_AT_ONCE):
            found = encoding.token_ids(texts[start : start + _TOKENISED_AT_ONCE])
            rows += [np.array(row, dtype=">u4").tobytes() for row in found]  # big-endian bytes sort like the numbers
        self._unique = sorted(set(rows), key=lambda row: (-len(row), row))
        position = {row: place for place, row in enumerate(self._unique)}
        self.places = torch.tensor([position[row] for row in rows], dtype=torch.long)

    def __len__(self) -> int:
        """Return the number of distinct texts to compute."""
        return len(self._unique)

    def piece(self, start: int, batch_size: int) -> Piece:
        """Return up to `BATCHES_PER_PIECE` batches from ``start``, a multiple of ``batch_size``."""
        stop = min(start + batch_size * BATCHES_PER_PIECE, len(self))
        return start, [self._unique[at : min(at + batch_size, stop)] for at in range(start, stop, batch_size)]

    def embed(self, start: int, stop: int, batch_size: int, done: Callable[[int], None] | None = None) -> Tensor:
        """Return embeddings of the distinct texts from ``start``, a multiple of ``batch_size``, up to ``stop``.

        After every batch, ``done`` is called with the number of distinct texts done.
        """
        parts: list[Tensor] = []
        for first in range(start, min(stop, len(self)), batch_size):
            last = min(first + batch_size, stop, len(self))
            parts.append(self._encoding.embed(_ids_of(self._unique[first:last])))
            if done is not None:
                done(last)
        return torch.cat(parts) if parts else torch.empty(0, self._encoding.dim)


def _ids_of(batch: Sequence[bytes]) -> list[Any]:
    return [np.frombuffer(row, dtype=">u4").astype(np.int64) for row in batch]


def embed_piece(encoding: OneSide, dtype: torch.dtype, piece: Piece) -> Embedded:
    """Return the index of a piece, and the embeddings of its batches of token ids."""
    start, batches = piece
    found = torch.cat([encoding.embed(_ids_of(batch)) for batch in batches])
    if broken := int((~found.isfinite()).any(dim=1).sum()):
        raise DataError(
            f"{broken} of {len(found)} embeddings hold a NaN or infinity. The encoder's weights are broken, or the "
            "precision is too low for them: choose float32 or bfloat16."
        )
    return start, found.to(dtype)


def encode_windows(
    encoding: OneSide,
    texts: Iterable[str],
    *,
    batch_size: int,
    buffer_size: int = BUFFER,
    progress: Progress | None = None,
    total: int | None = None,
    over: Over | None = None,
) -> Iterator[Tensor]:
    """Yield the embeddings of a stream of texts, ``buffer_size`` rows at a time, in the order of the texts.

    If given, ``over`` embeds the pieces of each buffer instead of this process.
    """
    source, before = iter(texts), 0
    with encoding if over is None else nullcontext():
        while part := list(islice(source, buffer_size)):
            window, count = Window(encoding, part), len(part)

            def counted(done: int, before: int = before, count: int = count, unique: int = len(window)) -> None:
                if progress is not None:
                    progress(before + round(count * done / unique), before + count if total is None else total)

            if over is None:
                found = window.embed(0, len(window), batch_size, counted)
            else:
                found, unique = torch.empty(len(window), encoding.dim), 0
                starts = range(0, len(window), batch_size * BATCHES_PER_PIECE)
                for start, embedded in over(window.piece(start, batch_size) for start in starts):
                    found = found.to(embedded.dtype)
                    found[start : start + len(embedded)] = embedded
                    counted(unique := unique + len(embedded))
            yield found[window.places]
            before += count


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items, each computed in another thread while the previous one is in use.

    An error is raised in place of its item. If the iterator is abandoned, the thread ends after its current item.
    """
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, "encoding ahead") as thread:
        coming = thread.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, source, end)
            yield cast(T, item)


#: The number of rows for texts in a batch. One short row is added, so that no batch is without padding (transformers
#: computes attention differently without any).
LANES = 7
#: A text is padded to the next multiple of this many tokens, or to the full length.
_STEP = 16


def embed_apart(embed: Callable[[dict[str, Tensor]], Tensor], features: Mapping[str, Tensor], filler: int) -> Tensor:
    """Return embeddings, ``(rows, dim)``, that no other text changes by even a bit; without gradient.

    Matrix products round differently for another number of rows, another length or another position. Every batch
    therefore has the same number of rows, and a text alone decides its padded length and its position in the batch.

    ``features`` are ``input_ids`` and ``attention_mask``, ``(rows, tokens)``, with a number of tokens that depends on
    no text (`TextEncoder.at_full_length`); ``filler`` is the id of the padding token.
    """
    ids, mask = features["input_ids"], features["attention_mask"]
    keys = [row.tobytes() for row in torch.cat([ids, mask], dim=1).cpu().numpy()]
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    ends = (mask * places).amax(dim=1).clamp(min=1).add(_STEP - 1).div(_STEP, rounding_mode="floor").mul(_STEP).tolist()
    lanes: dict[int, list[list[int]]] = {}
    first: dict[bytes, int] = {}
    for row, (key, end) in enumerate(zip(keys, ends, strict=True)):
        if first.setdefault(key, row) == row:  # equal texts once
            lanes.setdefault(end, [[] for _ in range(LANES)])[zlib.crc32(key) % LANES].append(row)
    made: dict[int, Tensor] = {}
    with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
        for end in sorted(lanes, reverse=True):  # the longest first: a batch that does not fit fails at once
            some, seen = ids[:, :end], mask[:, :end]
            for number in range(max(map(len, lanes[end]))):
                batch = {"input_ids": some.new_full((LANES + 1, some.shape[1]), filler)}
                batch["attention_mask"] = seen.new_zeros(LANES + 1, some.shape[1])
                batch["attention_mask"][:, 0] = 1  # one token in every row
                filled = {lane: rows[number] for lane, rows in enumerate(lanes[end]) if number < len(rows)}
                for lane, row in filled.items():
                    batch["input_ids"][lane], batch["attention_mask"][lane] = some[row], seen[row]
                found = embed(batch)
                made |= {row: found[lane] for lane, row in filled.items()}
    return torch.stack([made[first[key]] for key in keys])
