"""Choose the score threshold for guessing membership, and correct for choosing the best one.

A bound holds for one threshold that was chosen without the labels it is evaluated on: fixed beforehand, the best of
several that share the allowed error (Bonferroni), or chosen on a part of the canaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_dpret.audit.statistics.evidence import Evidence, Terms
from lit_dpret.audit.statistics.scores import CanaryScores, Counts, roc_hull
from lit_dpret.errors import ConfigurationError, DataError

# Maps the counts at one threshold, an allowed error and a floor to the bound, or to the floor if that is higher. The
# floor lets later thresholds be dismissed early.
Bound = Callable[[Counts, float, float, Terms], float]


@dataclass(frozen=True, kw_only=True)
class Explicit:
    """One threshold, chosen before the scores were seen."""

    threshold: float


@dataclass(frozen=True, kw_only=True)
class Bonferroni:
    """Divide the allowed error among thresholds, and take the best."""

    # ``all``: among as many as there are canaries, which covers every threshold. ``doubling``: guess the 1, 2, 4, ...
    # highest scores as members; for audits that count only guesses, which may depend on the scores in any way that
    # ignores the labels. ``hull``: among the vertices of the ROC curve's hull, as in jax_privacy. Their number depends
    # on the labels, so no theorem covers it; for small audits it is checked by enumeration (``docs/audit.md``).
    over: Literal["all", "doubling", "hull"] = "all"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Choose the threshold on a random share of the canaries, and evaluate it on the others.

    The share is drawn without regard to membership, so the coins of the others stay independent.
    """

    share: float = 0.5
    seed: int = 0


Strategy = Explicit | Bonferroni | Split


HULL = " The number of thresholds was that of the ROC hull, which no theorem covers."


def audit(
    scores: CanaryScores, bound: Bound, strategy: Strategy, terms: Terms, *, method: str, assumption: str,
    guessing: bool,
) -> Evidence:  # fmt: skip
    """Return the evidence of ``strategy`` from the scores.

    ``guessing`` says that the bound allows guesses that depend on the scores, as the one-run audits do.
    """
    threshold: float | None
    error, tests = terms.error, 1
    match strategy:
        case Explicit(threshold=threshold):
            if np.isnan(threshold):
                raise ConfigurationError("Explicit(threshold=nan): a threshold must be a number.")
            eps = bound(scores.counts(threshold), error, 0.0, terms)
        case Bonferroni(over="hull" | "all" as over):
            tests = len(roc_hull(scores)[0]) if over == "hull" else len(scores)
            assumption += HULL if over == "hull" else ""
            eps, threshold = _best(scores, bound, error / tests, terms)
        case Bonferroni(over="doubling"):
            if not guessing:
                raise ConfigurationError(
                    "Bonferroni(over='doubling') takes thresholds from scores, which only the one-run audits allow. "
                    "Use over='all'."
                )
            # These numbers of guesses do not depend on the scores, and ties count as wrong.
            sizes = [2**power for power in range(len(scores).bit_length())]
            tests, eps, threshold = len(sizes), 0.0, None
            for size in sizes:
                found = bound(scores.highest(size), error / tests, eps, terms)
                if found > eps:
                    eps, threshold = found, float(scores.pooled[-size])
        case Split(share=share, seed=seed):
            eps, threshold = _split(scores, bound, share, terms, np.random.default_rng(seed))
        case _:
            raise ConfigurationError(
                f"{strategy!r} is not a way to choose a threshold: give Explicit, Bonferroni or Split."
            )
    return terms.evidence(method, eps, assumption, threshold=threshold, tests=tests)


def _best(scores: CanaryScores, bound: Bound, error: float, terms: Terms) -> tuple[float, float | None]:
    """Return the best bound over the hull's thresholds; no other threshold gives a better one."""
    thresholds, alone, missed = roc_hull(scores)
    right, wrong = len(scores.in_scores) - missed, len(scores.out_scores) - alone
    # Start with the most promising, so that the floor dismisses later ones early.
    order = np.argsort(-(right - wrong) / np.sqrt(np.maximum(1, right + wrong)), kind="stable")
    best, chosen = 0.0, None
    for threshold in thresholds[order]:
        eps = bound(scores.counts(threshold), error, best, terms)
        if eps > best:
            best, chosen = eps, float(threshold)
    return best, chosen


def _split(
    scores: CanaryScores, bound: Bound, share: float, terms: Terms, rng: np.random.Generator
) -> tuple[float, float | None]:
    if not 0 < share < 1:
        raise ConfigurationError(f"share={share} must lie between 0 and 1, both excluded.")
    first = rng.permutation(len(scores)) < round(share * len(scores))
    of_members, of_others = first[: len(scores.in_scores)], first[len(scores.in_scores) :]
    if min(of_members.sum(), (~of_members).sum(), of_others.sum(), (~of_others).sum()) == 0:
        raise DataError(f"A split of {len(scores)} canaries left a part without members or without others. Plant more.")
    choosing = CanaryScores(scores.in_scores[of_members], scores.out_scores[of_others])
    judging = CanaryScores(scores.in_scores[~of_members], scores.out_scores[~of_others])
    _, threshold = _best(choosing, bound, terms.error, terms)
    return (0.0, None) if threshold is None else (bound(judging.counts(threshold), terms.error, 0.0, terms), threshold)
