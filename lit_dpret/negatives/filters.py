"""Which mined passages are hard negatives, and which are more likely answers that nobody marked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lit_dpret.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class MarginFilter:
    """Bounds on the score of a candidate, by itself and against the score of the row's own passage.

    The words are those of ``mine_hard_negatives`` of sentence-transformers. ``relative_margin=0.05`` is
    TopK-PercPos at 95 % (Moreira et al., NV-Retriever, 2407.15831, section 4): a negative scores at most
    95 % of the positive.

    Guarantees:
        - What is kept of a row's candidates is a function of their scores and of that of the row's own
          passage: not of other rows.

    Args:
        absolute_margin: A negative scores at least so much less than the row's own passage.
        relative_margin: A negative scores less by at least this share of it.
        max_score: A negative scores at most so much.
        min_score: A negative scores at least so much.
        range_min: How many of the best candidates that are no answers are passed over.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    range_min: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not math.isfinite(value):
                raise ConfigurationError(f"model.negatives: {each.name}={value} is not a finite number.")
        for name in ("absolute_margin", "relative_margin", "range_min"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(f"model.negatives: {name}={value} must not be negative.")
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ConfigurationError(
                f"model.negatives: min_score={self.min_score} is above max_score={self.max_score}; nothing would pass."
            )

    def keep(self, scores: NDArray[np.float32], positive: float) -> NDArray[np.bool_]:
        """Which candidates pass.

        Example:
            >>> MarginFilter(relative_margin=0.05).keep(np.array([0.99, 0.95, 0.2], dtype=np.float32), 1.0)
            array([False,  True,  True])

        Args:
            scores: Of candidates that are no answers, best first, ``(candidates,)``.
            positive: The score of the row's own passage.

        Returns:
            Booleans of shape ``(candidates,)``.
        """
        kept = np.arange(len(scores)) >= self.range_min
        upper = [
            bound
            for bound in (
                self.max_score,
                None if self.absolute_margin is None else positive - self.absolute_margin,
                None if self.relative_margin is None else positive - abs(positive) * self.relative_margin,
            )
            if bound is not None
        ]
        if upper:
            kept &= scores <= np.float32(min(upper))
        if self.min_score is not None:
            kept &= scores >= np.float32(self.min_score)
        return kept
