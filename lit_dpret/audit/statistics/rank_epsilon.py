"""Bounds on epsilon from the ranks of planted secrets, by four methods with different assumptions.

A secret is drawn at random from R candidates, planted k times, and ranked among them by the trained model. If it
had not been planted, its rank would be uniform on 1..R. Under (eps, delta)-DP for one unit, planting raises the
probability of an event to at most e^(k eps) times that plus delta_k
(`lit_dpret.audit.statistics.evidence.group_delta`).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import next_fast_len
from scipy.stats import binom

from lit_dpret.audit.statistics.error_rates import rate_at_least
from lit_dpret.audit.statistics.evidence import (
    Evidence,
    Terms,
    check_count,
    check_hits,
    largest_contradicted,
    least_epsilon,
    least_where,
)
from lit_dpret.audit.statistics.exposure import mean_rank
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import show_delta

RANDOM = "each secret was drawn uniformly from its candidates, and ranked among them all with ties against it"
TAKEN_OUT = "a unit is taken out (zero_out or add_or_remove)"
APART = f"{RANDOM}; {TAKEN_OUT}; every canary had a separate training, so that their ranks are independent."
TOGETHER = f"{RANDOM}; the candidates were fixed before training. The canaries may share one training."


def mean_rank_point(
    mean: float, *, candidates: int, copies: int = 1, delta: float = 0.0, chance: float | None = None
) -> Evidence:
    """Return the papers' value, without confidence: the smallest epsilon for an *expected* rank this low.

    E[rank | planted] + delta_k R >= e^(-k eps) E[rank | not planted], so for pure DP
    ln(((R + 1) / 2) / mean) / k. The observed mean replaces the expected one, and luck is ignored.

    >>> paper = mean_rank_point(43, candidates=100, copies=10, chance=50)
    >>> round(paper.eps_lower, 6), paper.confidence
    (0.015082, None)

    ``chance`` is the expected rank of a secret that was not planted, (R + 1) / 2 by default; the papers' 0.015
    uses R / 2.
    """
    check_count("candidates", candidates, least=2)
    terms = Terms(delta=delta, confidence=0.5, copies=copies)  # a point value: its confidence is not used
    if not 1 <= mean <= candidates:
        raise ConfigurationError(
            f"mean={mean} of ranks among {candidates} candidates must be between 1 and {candidates}."
        )
    expected = (candidates + 1) / 2 if chance is None else chance

    def allowed(eps: float) -> bool:
        reached = math.exp(min(700.0, copies * eps)) * mean + terms.group_delta(eps) * candidates
        return reached >= expected

    eps = 0.0 if allowed(0.0) else math.log(expected / mean) / copies
    if eps > 0 and delta > 0:
        eps = least_where(allowed, eps)
    assumption = f"{RANDOM}; {TAKEN_OUT}; and the mean of the observed ranks is the expected rank, without luck."
    return Evidence(
        method="mean rank, point value", eps_lower=eps, delta=delta, confidence=None, assumption=assumption,
        copies=copies,
    )  # fmt: skip


def mean_rank_bound(
    ranks: ArrayLike, *, candidates: int, copies: int = 1, delta: float = 0.0, confidence: float = 0.95
) -> Evidence:
    """Return the bound that the mean rank proves if every canary had a separate training run.

    Under (eps, delta)-DP a rank is stochastically at least as large as one with
    P[rank <= r] = min(1, e^(k eps) r / R + delta_k). The p-value is the probability that the sum of as many
    independent ranks of that law is as low, by exact convolution. It rises with epsilon, since each such rank falls, so
    bisection finds the largest refuted epsilon.
    """
    check_count("candidates", candidates, least=2)
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    trainings = len(np.atleast_1d(np.asarray(ranks)))
    total = round(mean_rank(ranks, candidates) * trainings)

    def contradicted(eps: float) -> bool:
        return _chance_of_sum(eps, total, trainings, candidates, terms) < terms.error

    return terms.evidence("mean rank, independent trainings", largest_contradicted(contradicted), APART)


def top_rank_bound(
    hits: int,
    trials: int,
    *,
    candidates: int,
    top: int = 1,
    copies: int = 1,
    delta: float = 0.0,
    confidence: float = 0.95,
) -> Evidence:
    """Return the bound if ``hits`` of ``trials`` secrets, each in its own training run, rank among the first ``top``.

    The bound is the smallest epsilon with e^(k eps) top / R + delta_k >= L, where L is Clopper and Pearson's lower
    bound on the rate. "Leaked", where a leak is a guess among R, is ``top=1``. For canaries that share a training run
    use `top_rank_one_training`.

    >>> round(top_rank_bound(67, 100, candidates=100, copies=10).eps_lower, 4)
    0.4068
    """
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    check_hits(hits, trials)
    _check_top(top, candidates)
    rate = float(rate_at_least(hits, trials, terms.error))
    eps = least_epsilon(rate, top / candidates, delta=delta, copies=copies)
    return terms.evidence(f"rank {top} or better, independent trainings", eps, APART)


def top_rank_one_training(
    hits: int,
    canaries: int,
    *,
    candidates: int,
    top: int = 1,
    copies: int = 1,
    delta: float = 0.0,
    neighbours: Literal["zero_out", "add_or_remove", "replace_one"] = "zero_out",
    confidence: float = 0.95,
) -> Evidence:
    """Return the same bound if all canaries shared one training run.

    Pure DP (``delta=0``). Given the model and all other secrets, the odds of two candidates differ from their prior
    odds by at most e^(2 k eps) (one secret out, the other in; e^(k eps) under ``replace_one``). So any ``top`` of
    them include the secret with probability at most p = top e^(2 k eps) / (top e^(2 k eps) + R - top). Revealed one by
    one, the hits are stochastically at most Binomial(canaries, p), as in the one-run audit, which has two candidates.
    The tail rises with p and so with epsilon; the bisection relies on that.

    With delta > 0, a second count covers what may leak beyond that. Let t be the delta of the exchange of two secrets:
    delta_k (1 + e^(k eps)), or delta_k under ``replace_one``. Let h be the probability, given the model and the earlier
    secrets, that the guesses include the next one. In E[(h - p)+] every ordered pair of candidates a, b contributes
    P_a - e^(2 k eps) P_b over the outputs that guess a and not b, at most t; so it is at most
    u = (R - 1) t / (top e^(2 k eps) + R - top). Each hit thus belongs to the Binomial or to a count with an expectation
    of at most canaries * u, and nothing is known about their dependence: the p-value is the largest probability of this
    many hits over all such pairs. It rises with epsilon, too: u is t (1 - p) times a constant and t rises, and the
    misses that a larger p turns into hits make up for the falling share of misses 1 - p. (Our own argument, for more
    than two candidates.)

    >>> round(top_rank_one_training(67, 100, candidates=100, copies=10).eps_lower, 4)
    0.2468
    """
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    check_hits(hits, canaries, names=("hits", "canaries"))
    _check_top(top, candidates)
    if neighbours not in ("zero_out", "add_or_remove", "replace_one"):
        raise ConfigurationError(f"neighbours={neighbours!r} must be zero_out, add_or_remove or replace_one.")
    steps = copies if neighbours == "replace_one" else 2 * copies

    def contradicted(eps: float) -> bool:
        odds = math.exp(min(700.0, steps * eps))
        rate = top / (top + (candidates - top) / odds)
        if delta == 0:
            return float(binom.sf(hits - 1, canaries, rate)) < terms.error
        one_way = terms.group_delta(eps)
        swap = one_way if neighbours == "replace_one" else one_way * (1 + math.exp(min(700.0, copies * eps)))
        beyond = (candidates - 1) * min(1.0, swap) / (top * odds + candidates - top)
        return _chance_of_hits(hits, canaries, rate, canaries * beyond) < terms.error

    about = "pure DP, with delta=0," if delta == 0 else f"delta={show_delta(delta)}"
    assumption = f"{TOGETHER} The bound is for {about} under {neighbours}."
    return terms.evidence(f"rank {top} or better, one training", largest_contradicted(contradicted), assumption)


def _check_top(top: int, candidates: int) -> None:
    check_count("candidates", candidates, least=2)
    check_count("top", top, least=1)
    if top >= candidates:
        raise ConfigurationError(f"top={top} must be below candidates={candidates}, or every secret would be a hit.")


def _chance_of_hits(hits: int, canaries: int, rate: float, beyond: float) -> float:
    """Return the largest P[B + G >= hits] of B ~ Bin(canaries, rate) and any count G of mean ``beyond``.

    Where B is j short, G must be j: the expectation pays for those outcomes, the cheapest first.
    """
    chance = float(binom.sf(hits - 1, canaries, rate))
    for short in range(1, hits + 1):
        bought = min(float(binom.pmf(hits - short, canaries, rate)), beyond / short)
        chance, beyond = chance + bought, beyond - short * bought
    return min(1.0, chance)


def _chance_of_sum(eps: float, total: int, trainings: int, candidates: int, terms: Terms) -> float:
    """Return the probability that the lowest ranks that (eps, delta)-DP allows sum to at most ``total``."""
    odds = math.exp(min(700.0, terms.copies * eps))
    reached = np.minimum(1.0, odds * np.arange(1, candidates + 1) / candidates + terms.group_delta(eps))
    chances = np.diff(reached, prepend=0.0)
    # Ranks start at 0, so the sum of N ranks has N (R - 1) + 1 values, and a transform of that length does not wrap.
    length = next_fast_len(trainings * (candidates - 1) + 1, real=True)
    spectrum = np.fft.rfft(chances, length)
    sums = np.fft.irfft(spectrum**trainings, length)
    return float(np.clip(sums[: total - trainings + 1].sum(), 0.0, 1.0))
