"""Attacks from inside a federation win where they must, and know nothing where there is nothing to know."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from lit_dpret.audit.attacks.federated import (
    identify_requests,
    moved_rows,
    nearness,
    own_texts,
    separate_tokens,
    traces,
)
from lit_dpret.errors import ConfigurationError, DataError

Floats = NDArray[np.float64]
RNG = np.random.default_rng
TOUCHED = list(range(0, 80, 2))
IDS, OTHERS = np.array(TOUCHED), np.arange(1, 500, 2)


def rows(count: int, seed: int, dim: int = 16) -> Floats:
    return RNG(seed).standard_normal((count, dim))


def table(touched: list[int], *, kept: float = 1.0, noise: float = 0.0) -> tuple[Floats, Floats]:
    """A table of 500 rows before and after an update that touches a few of them."""
    before = rows(500, 3)
    after = kept * before + noise * rows(500, 6)
    after[touched] += 0.01 * rows(len(touched), 5)
    return before, after


# -- a silo that matches requests -----------------------------------------------------------------


def test_exact_requests_name_every_query_and_the_control_stays_at_chance() -> None:
    sent, unsent = rows(200, 0), rows(400, 1)
    found = identify_requests(sent, sent, unsent, candidates=50)
    assert found.named[1].value == 1.0 == found.nearness
    assert found.control[1].low <= 1 / 50 <= found.control[1].high
    assert found.control[10].low <= 10 / 50 <= found.control[10].high
    assert found.control[1].trials == 200
    np.testing.assert_allclose(
        nearness(np.array([[2.0, 0.0], [0.0, 5.0]]), np.array([[3.0, 4.0], [-1.0, 0.0]])), [0.8, 0.0], atol=1e-12
    )


def test_rows_of_other_texts_name_nobody_nor_do_no_rows_since_a_tie_is_no_hit() -> None:
    found = identify_requests(rows(200, 9), rows(200, 0), rows(400, 1), candidates=50)
    assert found.named[1].low <= 1 / 50 <= found.named[1].high
    assert found.nearness == pytest.approx(0.5, abs=0.1)
    found = identify_requests(np.empty((0, 16)), rows(20, 0), rows(40, 1), candidates=10, tops=(1, 5))
    assert (found.rows, found.nearness) == (0, 0.5)
    assert {one.hits for one in (*found.named.values(), *found.control.values())} == {0}
    sent = rows(20, 0)  # which the silo sent as well
    found = identify_requests(sent, sent, np.concatenate([sent, sent]), candidates=20, tops=(1,))
    assert found.named[1].value < 0.9


def test_a_query_is_traced_in_a_mean_of_many_that_it_is_not_near_to() -> None:
    dim, unit = 256, lambda found: found / np.linalg.norm(found, axis=1, keepdims=True)
    sent, unsent = unit(rows(90, 0, dim)), unit(rows(120, 1, dim))
    means = np.stack([part.mean(axis=0) for part in np.split(sent, 3)])
    found = identify_requests(means, sent, unsent, means=True, candidates=20, tops=(1,))
    assert found.traced is not None and found.traced > 0.95 and found.named[1].value > 0.7
    assert found.control[1].low <= 1 / 20 <= found.control[1].high
    noised = means + rows(3, 2, dim)
    blind = identify_requests(noised, sent, unsent, means=True, candidates=20, tops=(1,))
    assert blind.traced == pytest.approx(0.5, abs=0.12) and blind.named[1].value < 0.3
    assert not traces(np.empty((0, dim)), sent).any()


def test_own_queries_stand_in_for_those_that_are_asked() -> None:
    texts = [f"word{i} more{i}" for i in range(30)]
    embeddings = rows(30, 0)
    found = own_texts(embeddings, (texts, embeddings), (texts[::-1], embeddings[::-1]))
    assert found is not None and found.similarity == 1.0 == found.equal and found.control < 0.2
    assert own_texts(np.empty((0, 16)), (texts, embeddings), (texts, embeddings)) is None


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: identify_requests(rows(5, 0), rows(5, 0), rows(0, 1), candidates=10, tops=(1,)),
         DataError, r"task\.candidates=10"),
        (lambda: identify_requests(rows(5, 0), rows(5, 0), rows(17, 1), candidates=10, tops=(1,)),
         DataError, r"task\.candidates=10"),
        (lambda: identify_requests(rows(5, 0), rows(5, 0), rows(90, 1), candidates=10, tops=(1, 10)),
         ConfigurationError, r"task\.candidates=10"),
        (lambda: nearness(rows(3, 0, dim=4), rows(3, 0, dim=5)), DataError, "cannot be compared"),
        (lambda: separate_tokens(moved_rows(*table(TOUCHED)), IDS, np.array([500])), DataError, "another tokenizer"),
    ],
)  # fmt: skip
def test_too_few_candidates_and_rows_of_another_space_are_refused(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()


# -- a server that reads word embeddings ------------------------------------------------------------


@pytest.mark.parametrize("kept", [1.0, 0.97])
def test_touched_rows_tell_tokens_whatever_decay_did_to_all_rows_unless_noise_hides_them(kept: float) -> None:
    found = moved_rows(*table(TOUCHED, kept=kept))
    assert found.kept == pytest.approx(kept, abs=1e-4)
    assert np.flatnonzero(found.touched).tolist() == TOUCHED
    told = separate_tokens(found, IDS, OTHERS)
    assert told is not None
    assert told.precision is not None
    assert told.auc == told.recall.value == told.precision.value == 1.0
    assert told.prevalence == pytest.approx(40 / 290)
    hidden = separate_tokens(moved_rows(*table(TOUCHED, kept=kept, noise=1.0)), IDS, OTHERS)
    assert hidden is not None
    assert abs(hidden.auc - 0.5) < 0.12
    assert hidden.recall.value < 0.1
    assert hidden.precision is None or hidden.precision.low < 0.2
    assert separate_tokens(found, np.array([], dtype=int), OTHERS) is None, "nothing to tell apart"


def test_tokens_in_no_text_are_told_apart_by_nothing() -> None:
    absent = np.arange(401, 500, 2)
    told = separate_tokens(moved_rows(*table(TOUCHED, noise=1e-3)), absent, np.arange(101, 400, 2))
    assert told is not None and abs(told.auc - 0.5) < 0.12 and told.recall.value < 0.05


def test_rounding_of_longer_rows_is_no_evidence() -> None:
    before = rows(500, 3).astype(np.float32)
    before[:250] *= 4
    after = (before * np.float32(0.97)).astype(np.float32)
    found = moved_rows(before.astype(np.float64), after.astype(np.float64))
    told = separate_tokens(found, np.arange(250), np.arange(250, 500))
    assert told is not None and told.auc == 0.5 and not found.touched.any()


def test_of_rows_that_stand_out_how_far_they_moved_is_left_to_tell() -> None:
    before, after = table(TOUCHED)
    after[TOUCHED[:20]] += 10 * (after - before)[TOUCHED[:20]]
    found = moved_rows(before, after)
    told = separate_tokens(found, np.array(TOUCHED[:20]), np.array([*TOUCHED[20:], 401]), touched_alone=True)
    assert told is not None and told.auc > 0.95 and (told.tokens, told.others) == (20, 20)
