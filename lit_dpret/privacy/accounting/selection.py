"""The privacy cost of training several times on private data and keeping the best run.

If the number of runs is random and only the best is shown, the cost is far smaller than that of all of them (Papernot
and Steinke 2022, arXiv 2110.03620, Theorems 2 and 6); the formulas are dp-accounting's ``RepeatAndSelectDpEvent``.
docs/derivations.md says what rules a search must follow, and whom the theorem does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.accountant import truncation_delta
from lit_dpret.privacy.accounting.composition import (
    LARGEST_EPSILON,
    RELATIONS,
    beyond_reach,
    check_supported,
    composable_parts,
    rdp_event,
    simplest_law,
)
from lit_dpret.privacy.accounting.releases import GaussianRelease, Poisson, Release, TruncatedPoisson
from lit_dpret.privacy.budget import Neighbours, require_delta
from lit_dpret.settings import is_number

_SHAPES: dict[str, float] = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}


@dataclass(frozen=True)
class RandomStopping:
    """The distribution of the number of runs of a search."""

    mean_runs: float  # the mean number of runs, at least 1
    # ``poisson``, ``geometric``, ``logarithmic``, or the shape eta of a truncated negative binomial as a number from 0
    # (0 is logarithmic, 1 geometric). Smaller shapes spread wider and cost less.
    law: str | float = "geometric"

    def __post_init__(self) -> None:
        mean, law = self.mean_runs, self.law
        if not is_number(mean) or not 1 <= mean < math.inf:
            raise ConfigurationError(f"tuning_mean_runs={mean!r} is not a finite number of at least 1.")
        known = law in _SHAPES if isinstance(law, str) else is_number(law)
        if not known or (not isinstance(law, str) and not 0 <= law < math.inf):
            raise ConfigurationError(
                f"tuning_runs_law={law!r} is not one of {', '.join(_SHAPES)}, nor the shape, 0 or more, of a "
                "truncated negative binomial distribution."
            )

    @property
    def shape(self) -> float:
        return _SHAPES[self.law] if isinstance(self.law, str) else float(self.law)

    def describe(self) -> str:
        name = self.law if isinstance(self.law, str) else f"truncated negative binomial (shape {self.law:g})"
        return f"{name} distribution of mean {self.mean_runs:g}"


def selection_epsilon(
    releases: Iterable[Release], stopping: RandomStopping, *, delta: float, neighbours: Neighbours
) -> float:
    """Return the epsilon of the best of a random number of runs, each with these ``releases``.

    A truncated batch is judged as a plain Poisson batch. The probability that truncation reveals a unit in any of the
    runs (`truncation_delta` times the mean number of runs) is subtracted from delta. Truncation is decided by coins
    that are the same on both data sets; given that it did not happen, the number of runs has the same law with a
    smaller mean.

    The result uses Renyi divergences, so it is never below ``epsilon(..., accountant="rdp")``, and infinite where that
    is.
    """
    require_delta(delta)
    releases = list(releases)
    for release in releases:
        if isinstance(release, GaussianRelease):
            law = simplest_law(release.law)
            # RDP judges no truncated law; it is judged as plain Poisson, and truncation is paid for out of delta.
            cut = isinstance(law, TruncatedPoisson) and neighbours == "zero_out"
            check_supported(Poisson(sample_rate=law.sample_rate) if cut else law, "rdp", neighbours)  # type: ignore[attr-defined]
    parts = composable_parts(releases)
    if parts is None or beyond_reach(parts, neighbours):
        return math.inf
    if not parts:
        return 0.0
    lost = [truncation_delta(part.law, part.count) for part in parts if isinstance(part.law, TruncatedPoisson)]
    # By linearity of expectation: each of the mean number of runs may reveal a unit.
    spare = delta - stopping.mean_runs * math.fsum(lost)
    if spare <= 0:
        return math.inf
    uncut = [
        replace(part, law=Poisson(sample_rate=part.law.sample_rate)) if isinstance(part.law, TruncatedPoisson) else part
        for part in parts
    ]
    run = dp_event.ComposedDpEvent(
        [dp_event.SelfComposedDpEvent(rdp_event(part, neighbours), part.count) for part in uncut]
    )
    accountant = RdpAccountant(neighboring_relation=RELATIONS[neighbours])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(run, stopping.mean_runs, stopping.shape))
    value = float(accountant.get_epsilon(spare))
    return value if value <= LARGEST_EPSILON else math.inf
