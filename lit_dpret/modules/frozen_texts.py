"""A frozen encoder, and what it made of the texts it has seen: each text is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dpret.encoders import Side, TextEncoder

Progress = Callable[[int, int], None]


class FrozenTexts:
    """The encoder and what it made of the texts it has seen; hides both from ``nn.Module``."""

    def __init__(self, tower: TextEncoder, cache_dir: str | Path | None, batch_size: int) -> None:
        self.tower = tower.eval().requires_grad_(False)
        self._cache_dir, self._batch_size = cache_dir, batch_size
        self._known: dict[str, tuple[dict[str, int], Tensor]] = {}

    def learn(self, texts: Any, side: Side, progress: Progress | None) -> Tensor:
        """Encode ``texts`` and remember them instead of what was remembered of this side."""
        listed = list(texts)
        if self._cache_dir is None:
            found = self.tower.encode(listed, side, batch_size=self._batch_size, progress=progress)
        else:
            found = self.tower.encode_cached(
                listed, side, self._cache_dir, batch_size=self._batch_size, progress=progress
            )
        self._known[side] = ({text: row for row, text in enumerate(listed)}, found)
        return found

    def encode(self, texts: Sequence[str], side: Side, progress: Progress | None = None) -> Tensor:
        """The embeddings of ``texts``: looked up where they are remembered, else made."""
        rows, known = self._known.get(side, ({}, torch.empty(0, self.tower.dim)))
        new = list(dict.fromkeys(text for text in texts if text not in rows))
        if not new:
            return known[[rows[text] for text in texts]]
        fresh = self.tower.encode(new, side, batch_size=self._batch_size, progress=progress)
        place = {**rows, **{text: len(known) + row for row, text in enumerate(new)}}
        return torch.cat([known.to(fresh.dtype), fresh])[[place[text] for text in texts]]
