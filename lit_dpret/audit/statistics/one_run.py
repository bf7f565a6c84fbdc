"""The one-run audit: a coin for each canary, one training, and guesses of the coins.

Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv 2305.08846. Under
(eps, delta)-DP the number of right guesses is hardly ever above a Binomial with q = e^eps / (1 + e^eps), whatever the
canaries do to each other in that one training. The count's p-value is in `lit_dpret.privacy.accounting.audit_power`,
which the plan of a run uses as well; here are scores, thresholds and copies.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from lit_dpret.audit.statistics.checks import check_confidence, check_copies, check_count, check_delta, check_hits
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.group import group_delta
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, MultiSplit, Split, Strategy, best_bound
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.audit_power import largest_contradicted, one_run_p_value, unplanned_p_value

METHOD = "one-run audit"
ASSUMPTION = (
    "a fair coin of its own decided for each canary whether it was trained on, and the guesses were made from what "
    "was released, without the coins."
)
HULL = " The number of thresholds was that of the ROC hull, which no theorem covers."


def one_run_audit(
    scores: CanaryScores,
    *,
    delta: float,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """What the scores of coin-flipped canaries prove, where the highest are taken for members.

    Guarantees:
        - For a mechanism that is (eps, delta)-DP and coins as assumed, ``eps_lower > eps`` has probability at most
          ``1 - confidence`` under every strategy but ``Bonferroni(over="hull")`` (Theorem 5.2 of the paper).
        - Where the strategy fixes a threshold and so leaves the number of guesses to the scores (``Explicit``,
          ``Split``, ``MultiSplit``), that number is paid for (`unplanned_p_value`), which only a delta makes dear.
        - Ties count for nothing: they are guessed as wrong as they can be, or canaries of equal score alike.

    Args:
        scores: Of members and others.
        delta: Of the claim that is put to the test.
        confidence: That the bound is true.
        copies: How often each included canary stood in the training data.
        strategy: How the threshold is chosen; ``Bonferroni(over="doubling")`` where nothing is said.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    error = _check(delta, confidence, copies)
    strategy = strategy or Bonferroni(over="doubling")
    bound = partial(_bound, delta=delta, copies=copies, planned=not isinstance(strategy, Explicit | Split | MultiSplit))
    found = best_bound(scores, bound, strategy, error, guessing=True)
    return Evidence(
        method=METHOD, eps_lower=found.eps, delta=delta, confidence=confidence, assumption=assumed(strategy),
        copies=copies, threshold=found.threshold, tests=found.tests,
    )  # fmt: skip


def one_run_counts(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95, copies: int = 1,
    planned: bool = True,
) -> Evidence:  # fmt: skip
    """The same from counts: ``correct`` of ``guesses`` guesses about ``canaries`` canaries, the rest not guessed.

    ``planned`` says that the number of guesses was fixed beforehand. Where what was released decides about it, say
    false: the bound then holds for every number (`lit_dpret.privacy.accounting.audit_power.unplanned_p_value`). It
    serves rare real queries as well as canaries: hold a random half of them out before training, and guess of those
    that the release repeats that they were trained on.

    >>> one_run_counts(canaries=1000, guesses=100, correct=90, delta=1e-5).eps_lower.__round__(4)
    1.6261

    Raises:
        ConfigurationError: Not ``0 <= correct <= guesses <= canaries``, or a number is out of its range.
    """
    error = _check(delta, confidence, copies)
    check_guesses(canaries, guesses, correct)
    eps = _epsilon(canaries, guesses, correct, delta, copies, error, 0.0, planned)
    return Evidence(
        method=METHOD, eps_lower=eps, delta=delta, confidence=confidence, assumption=ASSUMPTION, copies=copies
    )


def guess_extremes(scores: CanaryScores, *, highest: int, lowest: int) -> tuple[int, int]:
    """Guess ``highest`` canaries in and ``lowest`` out, and count: guesses, and right ones.

    Both numbers are to be fixed beforehand. Where a tie straddles the edge, the guesses are taken to be wrong as far
    as the tie allows, so that no order of input can help.

    Raises:
        ConfigurationError: More guesses than canaries.
    """
    check_count("highest", highest)
    check_count("lowest", lowest)
    if highest + lowest > len(scores):
        raise ConfigurationError(f"highest={highest} and lowest={lowest} are more than {len(scores)} canaries.")
    right = _right_among_highest(scores.in_scores, scores.out_scores, highest)
    right += _right_among_highest(-scores.out_scores[::-1], -scores.in_scores[::-1], lowest)
    return highest + lowest, right


def check_guesses(canaries: int, guesses: int, correct: int) -> None:
    """Refuse counts that are not ``0 <= correct <= guesses <= canaries``."""
    check_count("canaries", canaries, least=1)
    check_count("guesses", guesses)
    check_count("correct", correct)
    check_hits(guesses, canaries, names=("guesses", "canaries"))
    if correct > guesses:
        raise ConfigurationError(f"correct={correct} is more than guesses={guesses}.")


def assumed(strategy: Strategy) -> str:
    """The assumption, and what the strategy adds to it."""
    return ASSUMPTION + (HULL if strategy == Bonferroni(over="hull") else "")


def _right_among_highest(wanted: np.ndarray, others: np.ndarray, count: int) -> int:
    if count == 0:
        return 0
    edge = np.sort(np.concatenate([wanted, others]))[-count]
    wrong = int((others >= edge).sum())
    return max(int((wanted > edge).sum()), count - wrong)


def _check(delta: float, confidence: float, copies: int) -> float:
    check_delta(delta)
    check_copies(copies)
    return check_confidence(confidence)


def _bound(counts: Counts, error: float, floor: float, *, delta: float, copies: int, planned: bool) -> float:
    return _epsilon(counts.canaries, counts.guesses, counts.tp, delta, copies, error, floor, planned)


def _epsilon(
    canaries: int, guesses: int, correct: int, delta: float, copies: int, error: float, floor: float, planned: bool
) -> float:
    counts = {"canaries": canaries, "guesses": guesses, "correct": correct}

    def contradicted(eps: float) -> bool:
        # A delta only raises the p-value; without one it is a single tail, and most thresholds fail by it.
        if one_run_p_value(copies * eps, **counts, delta=0.0) >= error:
            return False
        group = group_delta(eps, delta, copies)
        if planned:
            return one_run_p_value(copies * eps, **counts, delta=group) < error
        return unplanned_p_value(copies * eps, **counts, delta=group, error=error) < error

    return largest_contradicted(contradicted, floor)
