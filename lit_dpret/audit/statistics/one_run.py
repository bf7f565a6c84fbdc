"""The one-run audit: a coin for each canary, one training, and guesses of the coins.

Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv 2305.08846. Under
(eps, delta)-DP the number of right guesses is hardly ever above a Binomial with q = e^eps / (1 + e^eps), whatever the
canaries do to each other in that one training. The count's p-value is in `lit_dpret.audit.statistics.right_guesses`,
which the plan of a run uses as well; here are scores, thresholds and copies.

`one_run_fdp_audit` tests a whole trade-off curve: Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-Differential
Privacy in One Run", arXiv 2410.22235, bound the right guesses by a recursion over their tail (Algorithm 3) instead of
by one Binomial. The recursion refutes a *curve*. Taken for refuting an (eps, delta), as here and in jax_privacy, it
presumes that the mechanism's curve is that of a Gaussian with this (eps, delta), which composed DP-SGD approaches and
no theorem grants.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr, ndtri

from lit_dpret.audit.statistics.curves import gaussian_mu
from lit_dpret.audit.statistics.error_rates import CURVE, HULL
from lit_dpret.audit.statistics.evidence import Evidence, Terms, check_count, check_hits
from lit_dpret.audit.statistics.right_guesses import largest_contradicted, one_run_p_value, unplanned_p_value
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, MultiSplit, Split, Strategy, audit
from lit_dpret.errors import ConfigurationError

METHOD = "one-run audit"
METHOD_FDP = "one-run audit of a Gaussian curve"
ASSUMPTION = (
    "a fair coin of its own decided for each canary whether it was trained on, and the guesses were made from what "
    "was released, without the coins."
)


def one_run_audit(
    scores: CanaryScores,
    *,
    delta: float,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """Return what the scores of coin-flipped canaries prove, where the highest are taken for members.

    Guarantees:
        - For a mechanism that is (eps, delta)-DP and coins as assumed, ``eps_lower > eps`` has probability at most
          ``1 - confidence`` under every strategy but ``Bonferroni(over="hull")`` (Theorem 5.2 of the paper).
        - Where the strategy fixes a threshold and so leaves the number of guesses to the scores (``Explicit``,
          ``Split``, ``MultiSplit``), that number is paid for (`unplanned_p_value`), which only a delta makes dear.
        - Ties count for nothing: they are guessed as wrong as they can be, or canaries of equal score alike.

    Args:
        scores: Of members and others.
        delta: Of the claim that is put to the test.
        confidence: Probability that the bound is true.
        copies: How often each included canary stood in the training data.
        strategy: How the threshold is chosen; ``Bonferroni(over="doubling")`` by default.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    strategy = strategy or Bonferroni(over="doubling")
    planned = not _leaves_guesses_to_scores(strategy)

    def bound(counts: Counts, error: float, floor: float, terms: Terms) -> float:
        return _epsilon(counts, error, floor, terms, planned)

    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    return audit(scores, bound, strategy, terms, method=METHOD, assumption=_assumed(strategy), guessing=True)


def one_run_counts(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95, copies: int = 1,
    planned: bool = True,
) -> Evidence:  # fmt: skip
    """Return the same bound from counts: ``correct`` of ``guesses`` guesses about ``canaries`` canaries.

    ``planned`` says that the number of guesses was fixed beforehand. Where what was released decides about it, say
    false: the bound then holds for every number (`lit_dpret.audit.statistics.right_guesses.unplanned_p_value`). It
    serves rare real queries as well as canaries: hold a random half of them out before training, and guess of those
    that the release repeats that they were trained on.

    >>> one_run_counts(canaries=1000, guesses=100, correct=90, delta=1e-5).eps_lower.__round__(4)
    1.6261

    Raises:
        ConfigurationError: Not ``0 <= correct <= guesses <= canaries``, or a number is out of its range.
    """
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    eps = _epsilon(_guessed(canaries, guesses, correct), terms.error, 0.0, terms, planned)
    return terms.evidence(METHOD, eps, ASSUMPTION)


def one_run_fdp_audit(
    scores: CanaryScores,
    *,
    delta: float,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """Return what the scores of coin-flipped canaries prove about a mechanism with a Gaussian curve.

    Guarantees:
        - For a mu-GDP mechanism, ``eps_lower`` above its epsilon has probability at most ``1 - confidence``, under the
          strategies and coins of `one_run_audit`.

    Args:
        scores: Of members and others.
        delta: At which the curve's epsilon is read; above 0.
        confidence: Probability that the bound is true.
        copies: How often each included canary stood in the training data. k units of a mu-GDP mechanism are
            k mu-GDP (Theorem 2.14 of Dong et al.).
        strategy: How the threshold is chosen; ``Bonferroni(over="doubling")`` by default.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    strategy = strategy or Bonferroni(over="doubling")
    terms = Terms(delta=delta, confidence=confidence, copies=copies, gaussian=True)
    assumption = CURVE + _assumed(strategy)
    if _leaves_guesses_to_scores(strategy):
        assumption += " NOT PROVED: how many were guessed depended on the scores, and the recursion takes it as fixed."
    return audit(scores, _epsilon_fdp, strategy, terms, method=METHOD_FDP, assumption=assumption, guessing=True)


def one_run_fdp_counts(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95, copies: int = 1
) -> Evidence:
    """Return the same bound from counts, as `one_run_counts`.

    Raises:
        ConfigurationError: Not ``0 <= correct <= guesses <= canaries``, or a number is out of its range.
    """
    terms = Terms(delta=delta, confidence=confidence, copies=copies, gaussian=True)
    eps = _epsilon_fdp(_guessed(canaries, guesses, correct), terms.error, 0.0, terms)
    return terms.evidence(METHOD_FDP, eps, CURVE + ASSUMPTION)


def refutes_mu(mu: float, *, canaries: int, guesses: int, correct: int, error: float) -> bool:
    """Return whether so many right guesses have probability below ``error`` under every mu-GDP mechanism.

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


def guess_extremes(scores: CanaryScores, *, highest: int, lowest: int) -> tuple[int, int]:
    """Guess ``highest`` canaries in and ``lowest`` out; return the number of guesses and of right ones.

    Both numbers are to be fixed beforehand. Where a tie straddles the edge, the guesses are taken to be wrong as far
    as the tie allows, so that no order of input can help.

    Raises:
        ConfigurationError: More guesses than canaries.
    """
    check_count("highest", highest)
    check_count("lowest", lowest)
    if highest + lowest > len(scores):
        raise ConfigurationError(f"highest={highest} and lowest={lowest} are more than {len(scores)} canaries.")

    def right_among_highest(wanted: np.ndarray, others: np.ndarray, count: int) -> int:
        if count == 0:
            return 0
        edge = np.sort(np.concatenate([wanted, others]))[-count]
        return max(int((wanted > edge).sum()), count - int((others >= edge).sum()))

    right = right_among_highest(scores.in_scores, scores.out_scores, highest)
    right += right_among_highest(-scores.out_scores[::-1], -scores.in_scores[::-1], lowest)
    return highest + lowest, right


def _leaves_guesses_to_scores(strategy: Strategy) -> bool:
    return isinstance(strategy, Explicit | Split | MultiSplit)


def _assumed(strategy: Strategy) -> str:
    return ASSUMPTION + (HULL if strategy == Bonferroni(over="hull") else "")


class _Guesses:
    """Counts of guesses alone: nobody knows how many canaries that were not guessed are members."""

    def __init__(self, canaries: int, guesses: int, right: int) -> None:
        self.canaries, self.guesses, self.tp = canaries, guesses, right


def _guessed(canaries: int, guesses: int, correct: int) -> _Guesses:
    check_hits(guesses, canaries, names=("guesses", "canaries"))
    check_count("correct", correct)
    if correct > guesses:
        raise ConfigurationError(f"correct={correct} is more than guesses={guesses}.")
    return _Guesses(canaries, guesses, correct)


def _epsilon(guessed: Counts | _Guesses, error: float, floor: float, terms: Terms, planned: bool) -> float:
    counts = {"canaries": guessed.canaries, "guesses": guessed.guesses, "correct": guessed.tp}

    def contradicted(eps: float) -> bool:
        # A delta only raises the p-value; without one it is a single tail, and most thresholds fail by it.
        if one_run_p_value(terms.copies * eps, **counts, delta=0.0) >= error:
            return False
        group = terms.group_delta(eps)
        if planned:
            return one_run_p_value(terms.copies * eps, **counts, delta=group) < error
        return unplanned_p_value(terms.copies * eps, **counts, delta=group, error=error) < error

    return largest_contradicted(contradicted, floor)


def _epsilon_fdp(guessed: Counts | _Guesses, error: float, floor: float, terms: Terms) -> float:
    counts = {"canaries": guessed.canaries, "guesses": guessed.guesses, "correct": guessed.tp}
    if guessed.tp == 0:
        return floor
    return largest_contradicted(
        lambda eps: refutes_mu(terms.copies * gaussian_mu(eps, terms.delta), **counts, error=error), floor
    )
