"""What an estimator returns: a lower bound, how sure it is, and what it takes for granted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence of leakage: a lower bound on epsilon. There is no evidence of its absence.

    Attributes:
        method: Which estimator.
        eps_lower: The bound, for one copy of the unit. 0 where nothing is contradicted.
        delta: The delta it goes with; None where the bound is on another curve than (eps, delta).
        confidence: That the bound is true where the assumption holds; None for a point value, which has none.
        assumption: What must hold for that.
        copies: How often each canary stood in the training data; the bound is for one copy all the same.
        threshold: The score from which a canary was taken for a member, where there was one.
        tests: Among how many thresholds the allowed error was divided.
    """

    method: str
    eps_lower: float
    delta: float | None
    confidence: float | None
    assumption: str
    copies: int = 1
    threshold: float | None = None
    tests: int = 1

    def __str__(self) -> str:
        sure = "a point value without confidence" if self.confidence is None else f"confidence {self.confidence:g}"
        at = "" if self.delta is None else f" at delta={self.delta:g}"
        return (
            f"{self.method}: evidence of leakage at least {self.eps_lower:.4g}{at} ({sure}); absence of evidence is no "
            f"guarantee. It assumes: {self.assumption}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)
