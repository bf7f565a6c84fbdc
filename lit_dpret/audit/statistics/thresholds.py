"""From which score on is a canary taken for a member? Whoever picks the best threshold has to pay for the choice.

A bound holds with its confidence for one threshold that was chosen without the labels it is then judged by. Four
ways to have one: name it beforehand, divide the allowed error among all that are tried (Bonferroni), choose by a
part of the canaries and judge by the rest, or do that often and take the median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_dpret.audit.statistics.evidence import Evidence, Terms, check_count, check_probability
from lit_dpret.audit.statistics.scores import CanaryScores, Counts, roc_hull
from lit_dpret.errors import ConfigurationError, DataError

Bound = Callable[[Counts, float, float], float]
"""From counts, an allowed error and a floor to the bound that the counts give, or the floor where that is higher."""


@dataclass(frozen=True, kw_only=True)
class Explicit:
    """One threshold, chosen before the scores were seen."""

    threshold: float


@dataclass(frozen=True, kw_only=True)
class Bonferroni:
    """Divide the allowed error among thresholds, and take the best.

    Attributes:
        over: ``all``: among as many as there are canaries, which covers every threshold. ``doubling``: take the
            1, 2, 4, ... highest scores for members; for audits that count guesses only, whose guesses may depend on
            the scores in any way that does not know the labels. ``hull``: among the vertices of the ROC curve's
            hull, as jax_privacy does. Their number depends on the labels, so that no theorem covers it;
            for small audits it is checked by enumeration (``docs/audit.md``).
    """

    over: Literal["all", "doubling", "hull"] = "all"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Choose the threshold by a random share of the canaries, and judge it by the others alone.

    The share is drawn without regard to who is a member, so that the coins of the others stay independent.
    """

    share: float = 0.5
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class MultiSplit:
    """The median of many splits, each at half the allowed error.

    The median is too high only if half of the splits are, and by Markov's inequality that has at most twice the
    probability that one is. Draws less luck from one seed than `Split`, and pays for it.
    """

    splits: int = 15
    share: float = 0.5
    seed: int = 0


Strategy = Explicit | Bonferroni | Split | MultiSplit


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best bound, the threshold that gave it (None: none, or several), and among how many the error was divided."""

    eps: float
    threshold: float | None
    tests: int


def best_bound(scores: CanaryScores, bound: Bound, strategy: Strategy, error: float, *, guessing: bool) -> Found:
    """Return the bound that ``strategy`` gets out of the scores.

    Args:
        scores: Of all canaries.
        bound: What the counts at one threshold prove.
        strategy: How thresholds are chosen.
        error: Allowed probability that the bound is wrong.
        guessing: Whether ``bound`` allows guesses that depend on the scores, as the one-run audits do.

    Raises:
        ConfigurationError: ``doubling`` for a bound on rates, or a share or number of splits that is none.
        DataError: A split leaves one part without members or without others.
    """
    match strategy:
        case Explicit(threshold=threshold):
            if np.isnan(threshold):
                raise ConfigurationError("Explicit(threshold=nan): a threshold must be a number.")
            return Found(eps=bound(scores.counts(threshold), error, 0.0), threshold=threshold, tests=1)
        case Bonferroni(over="hull"):
            tests = len(roc_hull(scores)[0])
            return _best(scores, _promising(scores), bound, error / tests, tests)
        case Bonferroni(over="all"):
            return _best(scores, _promising(scores), bound, error / len(scores), len(scores))
        case Bonferroni(over="doubling"):
            if not guessing:
                raise ConfigurationError(
                    "Bonferroni(over='doubling') takes thresholds from scores, which only the one-run audits allow. "
                    "Use over='all'."
                )
            sizes = 2 ** np.arange(len(scores).bit_length())
            return _doubling(scores, sizes, bound, error / len(sizes))
        case Split(share=share, seed=seed):
            return _split(scores, bound, share, error, np.random.default_rng(seed))
        case MultiSplit(splits=splits, share=share, seed=seed):
            check_count("splits", splits, least=1)
            rngs = np.random.default_rng(seed).spawn(splits)
            each = [_split(scores, bound, share, error / 2, rng).eps for rng in rngs]
            return Found(eps=float(np.median(each)), threshold=None, tests=1)
        case _:
            raise ConfigurationError(f"{strategy!r} is no way to choose a threshold.")


def audit(
    scores: CanaryScores, bound: Callable[[Counts, float, float, Terms], float], strategy: Strategy, terms: Terms, *,
    method: str, assumption: str, guessing: bool,
) -> Evidence:  # fmt: skip
    """Return the evidence of an estimator whose ``bound`` reads the counts at one threshold under ``terms``."""
    found = best_bound(
        scores,
        lambda counts, error, floor: bound(counts, error, floor, terms),
        strategy,
        terms.error,
        guessing=guessing,
    )
    return terms.evidence(method, found.eps, assumption, threshold=found.threshold, tests=found.tests)


def _doubling(scores: CanaryScores, sizes: np.ndarray, bound: Bound, error: float) -> Found:
    """Return the best of so many highest scores, numbers that do not depend on the scores; ties count as wrong."""
    best, chosen = 0.0, None
    for size in map(int, sizes):
        eps = bound(scores.highest(size), error, best)
        if eps > best:
            best, chosen = eps, float(scores.pooled[-size])
    return Found(eps=best, threshold=chosen, tests=len(sizes))


def _promising(scores: CanaryScores) -> Iterator[float]:
    """Return the hull's thresholds, the most promising first, so that later ones are dismissed early."""
    thresholds, alone, missed = roc_hull(scores)
    right, wrong = len(scores.in_scores) - missed, len(scores.out_scores) - alone
    return iter(thresholds[np.argsort(-(right - wrong) / np.sqrt(np.maximum(1, right + wrong)), kind="stable")])


def _best(scores: CanaryScores, thresholds: Iterator[float], bound: Bound, error: float, tests: int) -> Found:
    best, chosen = 0.0, None
    for threshold in thresholds:
        eps = bound(scores.counts(threshold), error, best)
        if eps > best:
            best, chosen = eps, float(threshold)
    return Found(eps=best, threshold=chosen, tests=tests)


def _split(scores: CanaryScores, bound: Bound, share: float, error: float, rng: np.random.Generator) -> Found:
    check_probability("share", share)
    first = rng.permutation(len(scores)) < round(share * len(scores))
    of_members, of_others = first[: len(scores.in_scores)], first[len(scores.in_scores) :]
    if min(of_members.sum(), (~of_members).sum(), of_others.sum(), (~of_others).sum()) == 0:
        raise DataError(f"A split of {len(scores)} canaries left a part without members or without others: add more.")
    choosing = CanaryScores(scores.in_scores[of_members], scores.out_scores[of_others])
    judging = CanaryScores(scores.in_scores[~of_members], scores.out_scores[~of_others])
    threshold = _best(choosing, _promising(choosing), bound, error, 1).threshold
    if threshold is None:
        return Found(eps=0.0, threshold=None, tests=1)
    return Found(eps=bound(judging.counts(threshold), error, 0.0), threshold=threshold, tests=1)
