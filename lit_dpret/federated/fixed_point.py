"""Numbers as whole numbers modulo 2^32, in which masks cancel exactly and floating-point sums would not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lit_dpret.errors import ConfigurationError, DataError

Words = NDArray[np.uint32]
Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """Values in [-limit, limit] with so fine a step that the sum of ``clients`` of them cannot wrap.

    Guarantees:
        - ``decode`` of the sum modulo 2^32 of at most ``clients`` encodings is the sum of the rounded values;
          against the sum of the values it is off by at most ``error`` in every coordinate.

    Args:
        limit: The largest absolute value of one coordinate; larger ones are cut, which is counted.
        clients: The most that are summed.
    """

    limit: float
    clients: int

    def __post_init__(self) -> None:
        if not 0 < self.limit < float("inf") or self.clients < 1:
            raise ConfigurationError(
                f"federated.update_limit={self.limit} must be positive and finite, for at least one client "
                f"({self.clients})."
            )

    @property
    def scale(self) -> float:
        """Steps per unit, a power of two."""
        return float(2.0 ** np.floor(np.log2((2**31 - 1) / (self.clients * self.limit) - 1 / self.limit)))

    @property
    def error(self) -> float:
        """The most that rounding moves one coordinate of the sum, values within the limit."""
        return self.clients * 0.5 / self.scale

    def encode(self, values: Values) -> tuple[Words, int]:
        """The values as words, and how many were cut.

        Raises:
            DataError: A value is not finite.
        """
        values = np.asarray(values, dtype=np.float64)
        if not np.isfinite(values).all():
            raise DataError("An update holds values that are not finite; it is not sent.", kind="bad update")
        cut = int((np.abs(values) > self.limit).sum())
        whole = np.rint(np.clip(values, -self.limit, self.limit) * self.scale).astype(np.int64)
        return (whole & 0xFFFFFFFF).astype(np.uint32), cut

    def decode(self, words: Words) -> Values:
        """The values of a sum."""
        return words.astype(np.uint32).view(np.int32).astype(np.float64) / self.scale
