"""Measure how well an attack distinguishes members from others, and compare it with the accountant's ceilings.

AUC, accuracy and true positive rates at few false positives show what the attacker gets. Exact bounds (Clopper and
Pearson), compared with the ceilings, reveal a bug or a false assumption. A one-run audit, where a coin decided for each
query, allows the queries of one training run to influence each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from lit_dpret.audit.statistics.error_rates import rate_at_least, rate_at_most
from lit_dpret.audit.statistics.evidence import Evidence, check_confidence
from lit_dpret.audit.statistics.metrics import Interval, accuracy_at_least, auc, bootstrap, tpr_at_fpr
from lit_dpret.audit.statistics.one_run import one_run_audit
from lit_dpret.audit.statistics.scores import CanaryScores

RATES = (0.1, 0.01, 0.001)
Ceilings = Callable[[Sequence[float]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Exceeded:
    """An attack above what the claim allows."""

    what: str
    at_least: float
    ceiling: float

    def __str__(self) -> str:
        return f"{self.what} is at least {self.at_least:.4g}, above the ceiling {self.ceiling:.4g}"


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """One attack on one model."""

    attack: str
    members: int
    others: int
    auc: Interval
    tpr: Mapping[str, Interval]  # true positive rate by false positive rate, as decimal text
    # Balanced accuracy when the higher half of all scores is guessed as members: a threshold that uses no membership.
    accuracy: Interval
    exceeded: tuple[Exceeded, ...] = ()  # measurements above their ceiling with the requested confidence
    evidence: Evidence | None = None  # from a one-run audit; None if members were not chosen by fair coins

    def to_dict(self) -> dict[str, Any]:
        return {
            "attack": self.attack,
            "members": self.members,
            "others": self.others,
            "auc": asdict(self.auc),
            "tpr_at_fpr": {rate: asdict(value) for rate, value in self.tpr.items()},
            "balanced_accuracy": asdict(self.accuracy),
            "exceeded": [vars(one) for one in self.exceeded],
            "evidence": None if self.evidence is None else self.evidence.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The claim that attacks are compared with."""

    # Upper bounds by false positive rate (``attack_ceilings`` of the accountant, with the releases given); None without
    # a guarantee.
    ceilings: Ceilings | None = None
    # The claim's delta, if a fair coin decided for each query: a one-run audit is then done too.
    delta: float | None = None
    epsilon: float | None = None  # the claim's epsilon; None without a claim


def measure(
    attack: str,
    scores: CanaryScores,
    promise: Promise = Promise(),
    *,
    confidence: float = 0.95,
    alarm: float = 0.9999,
    attacks: int = 1,
    resamples: int = 1000,
) -> AttackResult:
    """Return AUC, accuracy and true positive rates of an attack, and the limits that they contradict.

    Args:
        attack: Its name.
        scores: The scores of members and others.
        promise: The claim to compare with.
        confidence: Confidence level of intervals, and of the evidence, whose error is divided among ``attacks``.
        alarm: Confidence required, over all attacks together, to report a value above its ceiling or evidence above
            the claim.
        attacks: How many attacks were made on the same model.
        resamples: Resamples of the bootstrap.
    """
    error, least = (check_confidence(level) / max(1, attacks) for level in (confidence, alarm))
    ceilings, delta, claimed = promise.ceilings, promise.delta, promise.epsilon
    above = [] if ceilings is None else list(exceeded(scores, ceilings, error=least))
    if delta is not None and claimed is not None:
        proved = one_run_audit(scores, delta=delta, confidence=1 - least).eps_lower
        if proved > claimed:
            above.append(Exceeded(what=f"epsilon at delta={delta}", at_least=proved, ceiling=claimed))
    rates = {f"{rate:g}": partial(tpr_at_fpr, fpr=rate) for rate in RATES}
    intervals = bootstrap(
        {"auc": auc, "accuracy": half_accuracy, **rates}, scores, confidence=confidence, resamples=resamples
    )
    return AttackResult(
        attack=attack,
        members=len(scores.in_scores),
        others=len(scores.out_scores),
        auc=intervals["auc"],
        tpr={rate: intervals[rate] for rate in rates},
        accuracy=intervals["accuracy"],
        exceeded=tuple(above),
        evidence=None if delta is None else one_run_audit(scores, delta=delta, confidence=1 - error),
    )


def half_accuracy(scores: CanaryScores) -> float:
    """Return the balanced accuracy of guessing scores above the median as members; ties count half."""
    middle = float(np.median(scores.pooled))

    def above(values: np.ndarray) -> float:
        return float((values > middle).mean() + (values == middle).mean() / 2)

    return (1 + above(scores.in_scores) - above(scores.out_scores)) / 2


def exceeded(scores: CanaryScores, ceilings: Ceilings, *, error: float) -> tuple[Exceeded, ...]:
    """Return the rates above their ceiling; the probability of any error is at most ``error``.

    The threshold for each rate of `RATES` is the non-member score that it allows. The share of the population beyond
    it has a Beta distribution with Clopper and Pearson's quantiles, so the threshold may come from the same scores.
    Scores are assumed independent, which is not quite true within one training run; the one-run audit does not need it.
    """
    members, others = len(scores.in_scores), len(scores.out_scores)
    share = error / (len(RATES) + 1)
    bounds: dict[float, tuple[str, float]] = {}
    for rate in RATES:
        allowed = int(np.floor(rate * others + 1e-9))
        if allowed >= others:
            continue
        threshold = scores.out_scores[others - 1 - allowed]
        wrong = float(rate_at_most(allowed, others, share / 2))
        right = float(rate_at_least(int((scores.in_scores > threshold).sum()), members, share / 2))
        bounds[wrong] = (f"the true positive rate at a false positive rate of at most {wrong:.4g}", right)
    known = ceilings(sorted(bounds))
    found = [
        Exceeded(what=what, at_least=right, ceiling=known["tpr_at_fpr"][f"{wrong:g}"])
        for wrong, (what, right) in bounds.items()
        if right > known["tpr_at_fpr"][f"{wrong:g}"]
    ]
    accuracy = _accuracy_at_least(scores, share)
    if accuracy > known["membership_accuracy"]:
        found.append(Exceeded(what="the balanced accuracy", at_least=accuracy, ceiling=known["membership_accuracy"]))
    return tuple(found)


def _accuracy_at_least(scores: CanaryScores, error: float) -> float:
    """Bound the accuracy at the median of a random half, measured on the other half; 0 if there are too few scores."""
    rng = np.random.default_rng(len(scores))
    sides = [rng.permutation(side) for side in (scores.in_scores, scores.out_scores)]
    if min(map(len, sides)) < 2:
        return 0.0
    middle = float(np.median(np.concatenate([side[::2] for side in sides])))
    rest = CanaryScores(*(side[1::2] for side in sides))
    return accuracy_at_least(rest.counts(middle), confidence=1 - error)
