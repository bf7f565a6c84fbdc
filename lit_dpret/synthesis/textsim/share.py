"""A count of positives with the interval that its size allows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scipy.special import betaincinv

from lit_dpret.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class Share:
    """``positives`` of ``total``, with an exact interval for the share behind them.

    The interval is Clopper and Pearson's (Biometrika 26, 1934), which holds at least ``level`` for every
    share and every total, also where no positive was found. It is about the choice of the texts that were
    looked at, as an independent draw from many more; where they are all there are, it says nothing.

    Args:
        positives: How many have the property.
        total: How many were looked at; 0 where none could have it.
        level: Confidence.

    Raises:
        DataError: The counts are impossible.
        ConfigurationError: ``level`` does not lie between 0 and 1.
    """

    positives: int
    total: int
    level: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.positives <= self.total:
            raise DataError(f"{self.positives} positives of {self.total} are impossible.")
        if not 0 < self.level < 1:
            raise ConfigurationError(f"level={self.level} must lie strictly between 0 and 1.")

    @property
    def value(self) -> float | None:
        """The share; None of nothing."""
        return self.positives / self.total if self.total else None

    @property
    def low(self) -> float:
        """Lower bound of the interval; 0 where nothing was looked at."""
        k, n = self.positives, self.total
        return 0.0 if k == 0 else float(betaincinv(k, n - k + 1, (1 - self.level) / 2))

    @property
    def high(self) -> float:
        """Upper bound of the interval; 1 where nothing was looked at."""
        k, n = self.positives, self.total
        return 1.0 if k == n else float(betaincinv(k + 1, n - k, (1 + self.level) / 2))

    def to_dict(self) -> dict[str, Any]:
        """Counts, share and bounds as JSON values."""
        return {**asdict(self), "share": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        if self.value is None:
            return "none could be looked at"
        return f"{self.value:.2%} [{self.low:.2%}, {self.high:.2%}] ({self.positives:,} of {self.total:,})"
