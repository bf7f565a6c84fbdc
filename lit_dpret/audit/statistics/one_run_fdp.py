"""The one-run audit of a whole trade-off curve: tighter, for a mechanism that has the curve of a Gaussian.

Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-Differential Privacy in One Run", arXiv 2410.22235: the number of
right guesses is bounded by a recursion over its tail (their Algorithm 3) instead of by one Binomial. The recursion
refutes a *curve*. Taken for refuting an (eps, delta), as here and in jax_privacy, it presumes that the
mechanism's curve is that of a Gaussian with this (eps, delta), which composed DP-SGD approaches and no theorem grants.
"""

from __future__ import annotations

from functools import partial

from scipy.special import ndtr, ndtri

from lit_dpret.audit.statistics.checks import check_confidence, check_copies, check_delta
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.gaussian import gaussian_mu
from lit_dpret.audit.statistics.one_run import assumed, check_guesses
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, MultiSplit, Split, Strategy, best_bound
from lit_dpret.privacy.accounting.audit_power import largest_contradicted

METHOD = "one-run audit of a Gaussian curve"
CURVE = "the mechanism's trade-off curve is that of a Gaussian (an assumption, not a theorem, for DP-SGD); and "


def one_run_fdp_audit(
    scores: CanaryScores,
    *,
    delta: float,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """What the scores of coin-flipped canaries prove about a mechanism with a Gaussian curve.

    Guarantees:
        - For a mu-GDP mechanism, ``eps_lower`` above its epsilon has probability at most ``1 - confidence``, under the
          strategies and coins of `one_run_audit`.

    Args:
        scores: Of members and others.
        delta: At which the curve's epsilon is told; above 0.
        confidence: That the bound is true.
        copies: How often each included canary stood in the training data. k units of a mu-GDP mechanism are
            k mu-GDP (Theorem 2.14 of Dong et al.).
        strategy: How the threshold is chosen; ``Bonferroni(over="doubling")`` where nothing is said.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    error = _check(delta, confidence, copies)
    strategy = strategy or Bonferroni(over="doubling")
    found = best_bound(scores, partial(_bound, delta=delta, copies=copies), strategy, error, guessing=True)
    return Evidence(
        method=METHOD, eps_lower=found.eps, delta=delta, confidence=confidence, 
        assumption=CURVE + assumed(strategy) + _unplanned(strategy),
        copies=copies, threshold=found.threshold, tests=found.tests,
    )  # fmt: skip


def one_run_fdp_counts(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95, copies: int = 1
) -> Evidence:
    """The same from counts, as `one_run_counts`.

    Raises:
        ConfigurationError: Not ``0 <= correct <= guesses <= canaries``, or a number is out of its range.
    """
    error = _check(delta, confidence, copies)
    check_guesses(canaries, guesses, correct)
    eps = _epsilon(canaries, guesses, correct, delta, copies, error, 0.0)
    return Evidence(
        method=METHOD, eps_lower=eps, delta=delta, confidence=confidence, assumption=CURVE + assumed(Bonferroni()),
        copies=copies,
    )  # fmt: skip


def _unplanned(strategy: Strategy) -> str:
    """What is not proved where a threshold leaves the number of guesses to the scores."""
    if not isinstance(strategy, Explicit | Split | MultiSplit):
        return ""
    return " NOT PROVED: how many were guessed depended on the scores, and the recursion takes it as fixed."


def refutes_mu(mu: float, *, canaries: int, guesses: int, correct: int, error: float) -> bool:
    """Whether so many right guesses have probability below ``error`` under every mu-GDP mechanism.

    True for all smaller mu where it is for one: the curve falls pointwise with mu, the steps h_k with it, and
    r_k is a sum of them with weights i / (guesses - i) that fall from step to step, so that by Abel's
    summation it falls too. The same argument in ``error`` makes the smallest refuting error a p-value.
    """
    right, wrong = error * correct / canaries, error * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        reached = max(wrong, float(ndtr(ndtri(right) - mu)))
        if reached == wrong:
            break
        right = min(1.0, right + i / (guesses - i) * (reached - wrong))
        wrong = reached
    return right + wrong > guesses / canaries


def _check(delta: float, confidence: float, copies: int) -> float:
    check_delta(delta, above_zero=True)
    check_copies(copies)
    return check_confidence(confidence)


def _bound(counts: Counts, error: float, floor: float, *, delta: float, copies: int) -> float:
    return _epsilon(counts.canaries, counts.guesses, counts.tp, delta, copies, error, floor)


def _epsilon(canaries: int, guesses: int, correct: int, delta: float, copies: int, error: float, floor: float) -> float:
    if correct == 0:
        return floor

    def contradicted(eps: float) -> bool:
        mu = copies * gaussian_mu(eps, delta)
        return refutes_mu(mu, canaries=canaries, guesses=guesses, correct=correct, error=error)

    return largest_contradicted(contradicted, floor)
