"""How the numbers of a federation's report are said."""

from __future__ import annotations

import math

from lit_dpret.retrieval.statistics import Interval


def show(interval: Interval) -> str:
    """``0.261 [0.251, 0.271]``, or the mean alone where there is one run."""
    if not math.isfinite(interval.low):
        return f"{interval.mean:.3f}"
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def signed(interval: Interval) -> str:
    """The same of a difference."""
    if not math.isfinite(interval.low):
        return f"{interval.mean:+.3f}"
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def verdict(gain: Interval) -> str:
    """What a difference over seeds says about an order that was claimed."""
    if not math.isfinite(gain.low):
        return "one seed: not known"
    if gain.low > 0:
        return "holds"
    return "the other way round" if gain.high < 0 else "not decided"


def megabytes(count: float) -> str:
    """Bytes as megabytes, with digits where there are few."""
    return f"{count / 1e6:.3f}" if count < 1e6 else f"{count / 1e6:.1f}"


def spent(value: float | None) -> str:
    """An epsilon, rounded up; none is infinite."""
    return "infinite" if value is None else f"{math.ceil(value * 1000) / 1000:.3f}"


def ends(interval: Interval) -> dict[str, float | None]:
    """For JSON, which has no NaN."""
    found = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
