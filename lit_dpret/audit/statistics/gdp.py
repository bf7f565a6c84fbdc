"""The same error rates, read as those of a Gaussian mechanism: nearly tight where it is one, worth nothing elsewhere.

Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning", arXiv 2302.07956: under
mu-GDP, FNR >= Phi(Phi^-1(1 - FPR) - mu), so that upper bounds on both rates are a lower bound on mu.
"""

from __future__ import annotations

from functools import partial

from scipy.special import ndtri

from lit_dpret.audit.statistics.checks import check_confidence, check_copies, check_delta
from lit_dpret.audit.statistics.clopper_pearson import error_rates_at_most, independent
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.gaussian import gaussian_epsilon
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Strategy, best_bound

METHOD = "error rates under a Gaussian curve"
CURVE = "the mechanism's trade-off curve is that of a Gaussian (an assumption, not a theorem, for DP-SGD); and "


def gdp_audit(
    scores: CanaryScores,
    *,
    delta: float,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """The epsilon at ``delta`` of the smallest mu that the error rates do not contradict.

    Guarantees:
        - For a mu-GDP mechanism and independent scores, ``eps_lower`` above its epsilon has probability at most
          ``1 - confidence``, under the strategies of `clopper_pearson_audit`.
        - An attack that is worse than chance proves nothing: a negative mu is 0, not its absolute value.

    Args:
        scores: Of members and others.
        delta: At which the curve's epsilon is told; above 0.
        confidence: That the bound is true.
        copies: How often each member stood in the training data; k units of a mu-GDP mechanism are k mu-GDP.
        strategy: How the threshold is chosen; ``Bonferroni()`` where nothing is said.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    check_delta(delta, above_zero=True)
    check_copies(copies)
    error = check_confidence(confidence)
    strategy = strategy or Bonferroni()
    found = best_bound(scores, partial(_bound, delta=delta, copies=copies), strategy, error, guessing=False)
    return Evidence(
        method=METHOD, eps_lower=found.eps, delta=delta, confidence=confidence,
        assumption=CURVE + independent(strategy), copies=copies, threshold=found.threshold, tests=found.tests,
    )  # fmt: skip


def mu_at_least(counts: Counts, *, confidence: float = 0.95) -> float:
    """A lower bound on mu from the counts at one threshold that was chosen beforehand; at least 0."""
    return _mu(counts, check_confidence(confidence))


def _mu(counts: Counts, error: float) -> float:
    false_positive, false_negative = error_rates_at_most(counts, error)
    return max(0.0, float(-ndtri(false_positive) - ndtri(false_negative)))


def _bound(counts: Counts, error: float, floor: float, *, delta: float, copies: int) -> float:
    return max(floor, gaussian_epsilon(_mu(counts, error) / copies, delta))
