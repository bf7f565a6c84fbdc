"""A frozen encoder, and what it made of the texts it has seen: each text is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dpret.encoders import Side, TextEncoder

Progress = Callable[[int, int], None]
_AT_ONCE = 1024  # texts that are dealt out to places, where each is embedded apart


class FrozenTexts:
    """The encoder and what it made of the texts it has seen; hides both from ``nn.Module``.

    Args:
        tower: The encoder.
        cache_dir: Where embeddings are kept between runs.
        batch_size: Texts per forward pass, of those that are encoded together.
        queries_apart: Whether no query may have a say in another one's embedding.
    """

    def __init__(
        self, tower: TextEncoder, cache_dir: str | Path | None, batch_size: int, *, queries_apart: bool
    ) -> None:
        self._apart = queries_apart
        self.tower = tower.eval().requires_grad_(False)
        self._cache_dir, self._batch_size = cache_dir, batch_size
        self._known: dict[str, tuple[dict[str, int], Tensor]] = {}

    def learn(self, texts: Any, side: Side, progress: Progress | None) -> Tensor:
        """Encode ``texts`` and remember them instead of what was remembered of this side."""
        listed = list(texts)
        found = self._made(listed, side, self._cache_dir, progress)
        self._known[side] = ({text: row for row, text in enumerate(listed)}, found)
        return found

    def encode(self, texts: Sequence[str], side: Side, progress: Progress | None = None) -> Tensor:
        """The embeddings of ``texts``: looked up where they are remembered, else made."""
        rows, known = self._known.get(side, ({}, torch.empty(0, self.tower.dim)))
        new = list(dict.fromkeys(text for text in texts if text not in rows))
        if not new:
            return known[[rows[text] for text in texts]]
        fresh = self._made(new, side, None, progress)
        place = {**rows, **{text: len(known) + row for row, text in enumerate(new)}}
        return torch.cat([known.to(fresh.dtype), fresh])[[place[text] for text in texts]]

    def _made(
        self, texts: Sequence[str], side: Side, cache_dir: str | Path | None, progress: Progress | None
    ) -> Tensor:
        apart = self._apart and side == "query"
        size = max(self._batch_size, _AT_ONCE) if apart else self._batch_size
        if cache_dir is not None:
            return self.tower.encode_cached(texts, side, cache_dir, batch_size=size, progress=progress, apart=apart)
        if apart:
            return self.tower.encode_apart(texts, side)
        return self.tower.encode(texts, side, batch_size=size, progress=progress)
