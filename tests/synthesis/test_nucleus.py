"""The draw without sorting, against sorting."""

from __future__ import annotations

import numpy as np
import pytest

from lit_dpret.synthesis.sampler import from_nucleus_unsorted


def by_sorting(scores: np.ndarray, log_mass: float, u: float, top_p: float) -> int:
    """The definition, in the plainest words."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    cumulated = np.cumsum(np.exp(scores[order] - log_mass))
    reached = cumulated >= top_p
    size = int(reached.argmax()) + 1 if reached.any() else int(np.isfinite(scores).sum())
    return int(order[min(int((cumulated <= u * cumulated[size - 1]).sum()), size - 1)])


@pytest.mark.parametrize("vocabulary", [1, 2, 300, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 5.0, 1000.0])
@pytest.mark.parametrize("decimals", [1, 12])
def test_it_is_the_token_that_sorting_gives(vocabulary: int, spread: float, decimals: int) -> None:
    """Few decimals make many equal scores; a forbidden token is never drawn."""
    random = np.random.default_rng(vocabulary)
    scores = np.round(spread * random.normal(size=vocabulary), decimals)
    if vocabulary > 2:
        scores[1] = -np.inf
    log_mass = float(np.logaddexp.reduce(scores))
    for top_p in (1e-9, 0.3, 0.8, 0.999, 1.0):
        for u in (0.0, *random.random(10), 0.9999):
            token = from_nucleus_unsorted(scores, log_mass, u, top_p)
            assert token == by_sorting(scores, log_mass, u, top_p), (top_p, u)
            assert token != 1 or vocabulary <= 2


def test_the_largest_number_below_one_does_not_leave_the_nucleus() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        scores = random.normal(size=400)
        log_mass = float(np.logaddexp.reduce(scores))
        order = np.argsort(-scores)
        size = int((np.cumsum(np.exp(scores[order] - log_mass)) < 0.7).sum()) + 1
        assert from_nucleus_unsorted(scores, log_mass, 1 - 2**-53, 0.7) == order[size - 1]
