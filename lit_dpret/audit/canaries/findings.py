"""Turn scores and leaks of planted secrets into a table: ranks, leaked shares, bounds on epsilon, and ceilings.

Canaries of one training run influence each other. So `top_rank_one_training` bounds a cell with several canaries per
training run, `top_rank_bound` and `mean_rank_bound` a cell with one. Intervals of shares count training runs. Ceilings
are checked on the first canary of each training run: those are independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_dpret.audit.statistics.error_rates import rate_at_least, rate_at_most
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.rank_epsilon import (
    mean_rank_bound,
    mean_rank_point,
    top_rank_bound,
    top_rank_one_training,
)
from lit_dpret.errors import DataError
from lit_dpret.privacy.accounting.ceilings import SecretCeiling
from lit_dpret.privacy.budget import Neighbours, show_epsilon
from lit_dpret.retrieval.statistics import Interval, seed_interval

POOLED = "three kinds"
"""The canaries of the papers together."""

PAPER_KINDS = ("digits", "own_passage", "random_passage")

ALARM = 1e-4
"""The total error of all contradictions over the cells of one budget."""

_STATEMENTS = 4
"""Statements of a cell that may contradict a claim: its two shares, and at most two bounds."""

_DIGITS = 10
_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one canary."""

    training: int
    # kind, side, copies: Those of the canary.
    kind: str
    side: str
    copies: int
    rank: int  # among the candidates
    exposure: float  # in bits
    draws: int
    found: int
    chance: float | None  # probability that one draw begins with its query and secret; None if no query holds it

    @classmethod
    def of(cls, training: int, score: Mapping[str, Any], leak: Mapping[str, Any]) -> Outcome:
        """Build the outcome from ``SecretScore.to_dict`` and ``Leak.to_dict`` of one canary."""
        if score["name"] != leak["name"]:
            raise DataError(f"The score of canary {score['name']} was paired with the draws for {leak['name']}.")
        log = score["log_probability"]
        chance = 0.0 if score["never_drawn"] else None if log is None else math.exp(log)
        fields = {name: score[name] for name in ("kind", "side", "copies", "rank", "exposure")}
        return cls(training=training, draws=leak["draws"], found=leak["found"], chance=chance, **fields)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The accountant's limits for secrets with a given number of copies; trivial without a claim."""

    top: float = 1.0  # probability of rank 1
    mean_rank: float = 1.0  # lower limit of the expected rank
    leak: float = 1.0  # probability that a secret of ten digits is in any of the draws
    eps: float | None = None
    delta: float | None = None
    group_eps: float | None = None  # epsilon of this many units together by mixture accounting, at the same delta


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A measurement above what the accounting allows."""

    what: str
    estimate: float
    at_least: float
    ceiling: float
    confidence: float
    evidence: Evidence | None = None

    def __str__(self) -> str:
        if self.evidence is not None:
            return f"CONTRADICTION: the claim is epsilon = {show_epsilon(self.ceiling)}, and there is {self.evidence}"
        return (
            f"CONTRADICTION: {self.what} is at least {self.at_least:.4g} with confidence "
            f"1 - {1 - self.confidence:.1g}, and the accounting allows {show_epsilon(self.ceiling)}."
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table."""

    # side, kind, copies: Those of the canaries; the kind is `POOLED` for the papers' kinds together.
    side: str
    kind: str
    copies: int
    # trainings, canaries, draws: Their numbers; draws are per canary.
    trainings: int
    canaries: int
    draws: int
    mean_rank: Interval  # over canaries, with an interval over training runs (Student's t)
    top: Interval
    leaked: Interval  # share of canaries whose secret was in a draw; NaN if the model draws nothing
    exposure: float
    chance: float | None  # mean probability that a draw begins with query and secret; None if no query holds it
    bounds: tuple[Evidence, ...]  # lower bounds on epsilon at 95 %; the first was chosen beforehand for the table
    alarms: tuple[Evidence, ...]  # the same estimators at the claim's delta and the confidence of a contradiction
    limits: Limits
    excesses: tuple[Excess, ...]

    @property
    def contradictions(self) -> tuple[str, ...]:
        return tuple(map(str, self.excesses))

    def to_dict(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "excesses"}
        facts["contradictions"] = list(self.contradictions)
        for name in ("mean_rank", "top", "leaked"):
            # NaN, for an unknown spread, is not a JSON value.
            facts[name] = {end: None if math.isnan(value) else value for end, value in vars(facts[name]).items()}
        facts["limits"] = vars(self.limits)
        facts["bounds"] = [bound.to_dict() for bound in self.bounds]
        facts["alarms"] = [bound.to_dict() for bound in self.alarms]
        return facts


def secret_limits(ceiling: SecretCeiling, *, candidates: int, draws: int, tokens: int, **claim: float | None) -> Limits:
    """Return the ceilings for secrets with this many copies.

    ``claim`` has ``eps``, ``delta`` and ``group_eps`` of `Limits`; ``tokens`` is the length of the longest draw.
    """
    # The probability that a text contains ten random digits is at most 1e-10 for each position where they could begin.
    prior = min(1.0, draws * tokens * _CHARACTERS_PER_TOKEN * 10.0**-_DIGITS)
    return Limits(
        top=ceiling.success(1 / candidates),
        mean_rank=ceiling.mean_rank(candidates),
        leak=ceiling.success(prior),
        **claim,
    )


def cells_of(
    outcomes: Sequence[Outcome],
    *,
    candidates: int,
    limits: Mapping[int, Limits],
    delta: float = 0.0,
    neighbours: Neighbours = "zero_out",
    cells: int | None = None,
    tables: int = 1,
) -> list[Cell]:
    """Return rows for each side and number of copies: one for the papers' kinds together, and one for each kind.

    Args:
        outcomes: The outcomes of all canaries, in all training runs with the same settings.
        candidates: R of every canary.
        limits: By number of copies; trivial ones where missing.
        delta: The claim's delta; 0 without a claim.
        neighbours: The meaning of a unit's absence.
        cells: The number of rows that share the error of a contradiction, each for all its statements; None for the
            number of rows returned.
        tables: How many calls share that error.
    """
    if not outcomes:
        raise DataError("There is no canary, so there is no table.")
    groups: dict[tuple[str, int, str], list[Outcome]] = {}
    pools = len({outcome.kind for outcome in outcomes} & set(PAPER_KINDS)) > 1
    for outcome in outcomes:
        for kind in (outcome.kind, *((POOLED,) if pools and outcome.kind in PAPER_KINDS else ())):
            groups.setdefault((outcome.side, outcome.copies, kind), []).append(outcome)
    statements = (cells or len(groups)) * tables * _STATEMENTS
    order = sorted(groups, key=lambda key: (key[0] != "query", key[0], key[1], key[2] != POOLED, key[2]))
    return [
        _cell(groups[key], key, candidates, limits.get(key[1], Limits()), delta, neighbours, ALARM / statements)
        for key in order
    ]


def _cell(
    found: Sequence[Outcome],
    key: tuple[str, int, str],
    candidates: int,
    limits: Limits,
    delta: float,
    neighbours: Neighbours,
    alarm: float,
) -> Cell:
    side, copies, kind = key
    trainings = sorted({one.training for one in found})
    ranks = [one.rank for one in found]
    by_training = [[one for one in found if one.training == training] for training in trainings]
    tops = [float(np.mean([one.rank == 1 for one in group])) for group in by_training]
    leaks = [float(np.mean([one.found > 0 for one in group])) for group in by_training]
    first = [group[0] for group in by_training]
    chances = [one.chance for one in found if one.chance is not None]
    top, leaked, draws = share(tops), share(leaks), found[0].draws

    def bounds(confidence: float, of_shared: float) -> tuple[Evidence, ...]:
        hits = sum(rank == 1 for rank in ranks)
        point = mean_rank_point(float(np.mean(ranks)), candidates=candidates, copies=copies, delta=delta)
        together = top_rank_one_training(
            hits, len(ranks), candidates=candidates, copies=copies, delta=of_shared, neighbours=neighbours,
            confidence=confidence,
        )  # fmt: skip
        if len(found) > len(trainings) or neighbours == "replace_one":
            return together, point
        alone: dict[str, Any] = {"candidates": candidates, "copies": copies, "delta": delta, "confidence": confidence}
        return top_rank_bound(hits, len(ranks), **alone), mean_rank_bound(ranks, **alone), point

    alarms = bounds(1 - alarm, delta)  # a claim with a delta is contradicted only by a bound that holds with that delta
    return Cell(
        side=side,
        kind=kind,
        copies=copies,
        trainings=len(trainings),
        canaries=len(found),
        draws=draws,
        mean_rank=_mean([float(np.mean([one.rank for one in group])) for group in by_training], 1, candidates),
        top=top,
        leaked=leaked if draws else Interval(math.nan, math.nan, math.nan),
        exposure=float(np.mean([one.exposure for one in found])),
        chance=float(np.mean(chances)) if chances else None,
        bounds=bounds(0.95, 0.0),
        alarms=alarms,
        limits=limits,
        excesses=tuple(_excesses(first, alarms, limits, alarm)),
    )


def _excesses(first: Sequence[Outcome], alarms: Sequence[Evidence], limits: Limits, alarm: float) -> Iterator[Excess]:
    """Yield the measurements above their ceiling, with an error of ``alarm`` for each statement."""
    digits = all(one.kind in PAPER_KINDS for one in first)  # the ceiling of leaks has their prior
    for what, hits, ceiling in (
        ("the share of rank 1", sum(one.rank == 1 for one in first), limits.top),
        ("the leaked share", sum(one.found > 0 for one in first), limits.leak if digits else None),
    ):
        at_least = float(rate_at_least(hits, len(first), alarm))
        if ceiling is not None and at_least > ceiling:
            yield Excess(
                what=what, estimate=hits / len(first), at_least=at_least, ceiling=ceiling, confidence=1 - alarm
            )
    for one in alarms:
        if one.confidence is not None and limits.eps is not None and one.eps_lower > limits.eps:
            yield Excess(
                what=one.method, estimate=one.eps_lower, at_least=one.eps_lower, ceiling=limits.eps,
                confidence=one.confidence, evidence=one,
            )  # fmt: skip


def share(shares: Sequence[float]) -> Interval:
    """Return the mean share with Clopper and Pearson's interval, counting each training run as one observation.

    It is exact if each share is 0 or 1; fractions within a training run are rounded to the wider side.
    """
    hits, trials = math.fsum(shares), len(shares)
    low = float(rate_at_least(math.floor(hits + 1e-9), trials, 0.025))
    high = float(rate_at_most(math.ceil(hits - 1e-9), trials, 0.025))
    return Interval(hits / trials, low, high)


def _mean(values: Sequence[float], low: float, high: float) -> Interval:
    """Return the mean with its t-interval over training runs, cut to the possible range; NaN bounds without spread."""
    if len(set(values)) < 2:  # no spread was observed, which says little about the true spread
        return Interval(float(np.mean(values)), math.nan, math.nan)
    found = seed_interval(values)
    return Interval(found.mean, max(low, found.low), min(high, found.high))
