"""Choose the score threshold for guessing membership, and correct for choosing the best one.

A bound holds for one threshold that was chosen without the labels it is then judged by: named beforehand, the best of
several among which the allowed error is divided (Bonferroni), or chosen by a part of the canaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lit_dpret.audit.statistics.evidence import Evidence, Terms, check_probability
from lit_dpret.audit.statistics.scores import CanaryScores, Counts, roc_hull
from lit_dpret.errors import ConfigurationError, DataError

Bound = Callable[[Counts, float, float], float]


@dataclass(frozen=True, kw_only=True)
class Explicit:
    """One threshold, chosen before the scores were seen."""

    threshold: float


@dataclass(frozen=True, kw_only=True)
class Bonferroni:
    """Divide the allowed error among thresholds, and take the best."""

    # ``all``: among as many as there are canaries, which covers every threshold. ``doubling``: take the 1, 2, 4, ...
    # highest scores for members; for audits that count guesses only, whose guesses may depend on the scores in any way
    # that does not know the labels. ``hull``: among the vertices of the ROC curve's hull, as jax_privacy does. Their
    # number depends on the labels, so that no theorem covers it; for small audits it is checked by enumeration
    # (``docs/audit.md``).
    over: Literal["all", "doubling", "hull"] = "all"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Choose the threshold on a random share of the canaries, and evaluate it on the others.

    The share is drawn without regard to who is a member, so that the coins of the others stay independent.
    """

    share: float = 0.5
    seed: int = 0


Strategy = Explicit | Bonferroni | Split


Found = tuple[float, float | None, int]
"""The best bound, the threshold that gave it (None: none), and among how many the error was divided."""


def audit(
    scores: CanaryScores, bound: Callable[[Counts, float, float, Terms], float], strategy: Strategy, terms: Terms, *,
    method: str, assumption: str, guessing: bool,
) -> Evidence:  # fmt: skip
    """Return the evidence of ``strategy`` from the scores.

    ``bound`` says what the counts at one threshold prove: from counts, an allowed error and a floor to the bound, or
    the floor where that is higher, which lets later thresholds be dismissed early. ``guessing`` says that it allows
    guesses that depend on the scores, as the one-run audits do.
    """

    def of(counts: Counts, error: float, floor: float) -> float:
        return bound(counts, error, floor, terms)

    eps, threshold, tests = _best_bound(scores, of, strategy, terms.error, guessing)
    return terms.evidence(method, eps, assumption, threshold=threshold, tests=tests)


def _best_bound(scores: CanaryScores, bound: Bound, strategy: Strategy, error: float, guessing: bool) -> Found:
    match strategy:
        case Explicit(threshold=threshold):
            if np.isnan(threshold):
                raise ConfigurationError("Explicit(threshold=nan): a threshold must be a number.")
            return bound(scores.counts(threshold), error, 0.0), threshold, 1
        case Bonferroni(over="hull" | "all" as over):
            tests = len(roc_hull(scores)[0]) if over == "hull" else len(scores)
            return *_best(scores, bound, error / tests), tests
        case Bonferroni(over="doubling"):
            if not guessing:
                raise ConfigurationError(
                    "Bonferroni(over='doubling') takes thresholds from scores, which only the one-run audits allow. "
                    "Use over='all'."
                )
            sizes = 2 ** np.arange(len(scores).bit_length())
            return *_doubling(scores, sizes, bound, error / len(sizes)), len(sizes)
        case Split(share=share, seed=seed):
            return *_split(scores, bound, share, error, np.random.default_rng(seed)), 1
        case _:
            raise ConfigurationError(f"{strategy!r} is no way to choose a threshold.")


def _doubling(scores: CanaryScores, sizes: NDArray[np.int64], bound: Bound, error: float) -> tuple[float, float | None]:
    """Return the best of so many highest scores, numbers that do not depend on the scores; ties count as wrong."""
    best, chosen = 0.0, None
    for size in map(int, sizes):
        eps = bound(scores.highest(size), error, best)
        if eps > best:
            best, chosen = eps, float(scores.pooled[-size])
    return best, chosen


def _best(scores: CanaryScores, bound: Bound, error: float) -> tuple[float, float | None]:
    """Return the best bound of the hull's thresholds, which no other threshold beats."""
    thresholds, alone, missed = roc_hull(scores)
    right, wrong = len(scores.in_scores) - missed, len(scores.out_scores) - alone
    # The most promising first, so that the floor dismisses later ones early.
    order = np.argsort(-(right - wrong) / np.sqrt(np.maximum(1, right + wrong)), kind="stable")
    best, chosen = 0.0, None
    for threshold in thresholds[order]:
        eps = bound(scores.counts(threshold), error, best)
        if eps > best:
            best, chosen = eps, float(threshold)
    return best, chosen


def _split(
    scores: CanaryScores, bound: Bound, share: float, error: float, rng: np.random.Generator
) -> tuple[float, float | None]:
    check_probability("share", share)
    first = rng.permutation(len(scores)) < round(share * len(scores))
    of_members, of_others = first[: len(scores.in_scores)], first[len(scores.in_scores) :]
    if min(of_members.sum(), (~of_members).sum(), of_others.sum(), (~of_others).sum()) == 0:
        raise DataError(f"A split of {len(scores)} canaries left a part without members or without others: add more.")
    choosing = CanaryScores(scores.in_scores[of_members], scores.out_scores[of_others])
    judging = CanaryScores(scores.in_scores[~of_members], scores.out_scores[~of_others])
    _, threshold = _best(choosing, bound, error)
    return (0.0, None) if threshold is None else (bound(judging.counts(threshold), error, 0.0), threshold)
