"""Bounds on the attack's error rates, read as a bound on epsilon: many trainings, or one and more faith.

Jagielski, Ullman and Oprea 2020, "Auditing Differentially Private Machine Learning", arXiv 2006.07709; Nasr et al.
2021, arXiv 2101.04535. Under (eps, delta)-DP every test has TPR <= e^eps FPR + delta and TNR <= e^eps FNR + delta.
"""

from __future__ import annotations

from functools import partial

from lit_dpret.audit.statistics.binomial import rate_at_most
from lit_dpret.audit.statistics.checks import check_confidence, check_copies, check_delta
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.group import least_epsilon
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Strategy, best_bound

METHOD = "error rates (Clopper-Pearson)"
ASSUMPTION = (
    "the scores of members are independent of each other, and so are those of the others: one canary to a training, or "
    "canaries that do not touch each other."
)
HULL = " The number of thresholds was that of the ROC hull, which no theorem covers."


def clopper_pearson_audit(
    scores: CanaryScores,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """The largest epsilon that bounds on the false positive and false negative rate contradict.

    Guarantees:
        - Where the assumption holds, ``eps_lower`` is above the mechanism's epsilon with probability at most
          ``1 - confidence``, whatever the mechanism is, under every strategy but ``Bonferroni(over="hull")``.
        - ``Bonferroni(over="all")`` covers every threshold, also one that the scores suggested: beyond the k-th
          highest score of n lies a share of the distribution that is Beta(k, n - k + 1), which has the very
          quantiles of Clopper and Pearson, and there are at most n such shares to be wrong about.

    Args:
        scores: Of members and others.
        delta: Of the claim that is put to the test.
        confidence: That the bound is true.
        copies: How often each member stood in the training data.
        strategy: How the threshold is chosen; ``Bonferroni()`` where nothing is said.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    check_delta(delta)
    check_copies(copies)
    error = check_confidence(confidence)
    strategy = strategy or Bonferroni()
    found = best_bound(scores, partial(_bound, delta=delta, copies=copies), strategy, error, guessing=False)
    return Evidence(
        method=METHOD, eps_lower=found.eps, delta=delta, confidence=confidence, assumption=independent(strategy),
        copies=copies, threshold=found.threshold, tests=found.tests,
    )  # fmt: skip


def clopper_pearson_counts(
    counts: Counts, *, delta: float = 0.0, confidence: float = 0.95, copies: int = 1
) -> Evidence:
    """The same from the counts at one threshold that was chosen beforehand.

    >>> clopper_pearson_counts(Counts(tp=95, fn=5, fp=5, tn=95)).eps_lower.__round__(4)
    2.0621

    Raises:
        ConfigurationError: A number is out of its range.
    """
    check_delta(delta)
    check_copies(copies)
    eps = _bound(counts, check_confidence(confidence), 0.0, delta=delta, copies=copies)
    return Evidence(
        method=METHOD, eps_lower=eps, delta=delta, confidence=confidence, assumption=ASSUMPTION, copies=copies
    )


def independent(strategy: Strategy) -> str:
    """The assumption, and what the strategy adds to it."""
    return ASSUMPTION + (HULL if strategy == Bonferroni(over="hull") else "")


def error_rates_at_most(counts: Counts, error: float) -> tuple[float, float]:
    """Upper bounds on the false positive and the false negative rate, both true but for probability ``error``."""
    return (
        float(rate_at_most(counts.fp, counts.others, error / 2)),
        float(rate_at_most(counts.fn, counts.members, error / 2)),
    )


def _bound(counts: Counts, error: float, floor: float, *, delta: float, copies: int) -> float:
    false_positive, false_negative = error_rates_at_most(counts, error)
    return max(
        floor,
        least_epsilon(1 - false_negative, false_positive, delta=delta, copies=copies),
        least_epsilon(1 - false_positive, false_negative, delta=delta, copies=copies),
    )
