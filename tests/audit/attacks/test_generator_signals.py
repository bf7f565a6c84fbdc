"""Signals of membership from the log probabilities of a query's tokens."""

from __future__ import annotations

import math
import zlib

import numpy as np

from lit_dpret.audit.attacks.signals import generator_signals
from lit_dpret.modules.token_scores import TokenScores


def scores(*rows: list[float], moments: tuple[float, float] | None = None) -> TokenScores:
    width = max(map(len, rows))
    mask = np.array([[place < len(row) for place in range(width)] for row in rows])
    log_probs = np.array([[*row, *[0.0] * (width - len(row))] for row in rows])
    mean, deviation = (None, None) if moments is None else (np.full(mask.shape, m) for m in moments)
    return TokenScores(log_probs, mask, np.where(mask, 7, -100), mean, deviation)


def test_signals_are_what_their_papers_define() -> None:
    queries = ["a question", "b"]
    own = scores([-1.0, -2.0, -3.0, -0.5, -6.0], [-0.1, -0.3], moments=(-2.0, 0.5))
    found = generator_signals(own, queries, reference=scores([-2.0] * 7, [-1.0]), lowest=0.4)
    np.testing.assert_allclose(found["loss"], [-2.5, -0.2])
    np.testing.assert_allclose(found["logit"], [-2.5 - math.log1p(-math.exp(-2.5)), -0.2 - math.log1p(-math.exp(-0.2))])
    np.testing.assert_allclose(found["reference"], [-12.5 + 14.0, -0.4 + 1.0])
    np.testing.assert_allclose(found["zlib"][0], -2.5 / len(zlib.compress(b"a question")))
    np.testing.assert_allclose(found["min_k"], [(-6.0 - 3.0) / 2, -0.3])
    np.testing.assert_allclose(found["min_k_plus"], [((-6 + 2) + (-3 + 2)) / 0.5 / 2, (-0.3 + 2) / 0.5])


def test_signals_that_lack_their_input_are_left_out() -> None:
    assert set(generator_signals(scores([-1.0]), ["a"])) == {"loss", "logit", "zlib", "min_k"}


def test_a_model_that_is_certain_gives_finite_signals() -> None:
    found = generator_signals(scores([0.0, 0.0], moments=(0.0, 0.0)), ["a"], reference=scores([-1.0]))
    assert all(np.isfinite(value).all() for value in found.values())
