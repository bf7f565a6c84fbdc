"""Rounded normals: the distribution that is claimed, by exact comparisons, and the same numbers for the same key."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lit_dpret.privacy import exact_normal
from lit_dpret.privacy.exact_normal import BLOCK, decide, rounded_normals

KEY, CPU = bytes(range(32)), torch.device("cpu")


def draw(count: int, bits: int, *, key: bytes = KEY, start: int = 0) -> np.ndarray:
    return rounded_normals(key, count, start=start, bits=bits, device=CPU).numpy()


@pytest.mark.parametrize("bits", [0, 1, 2, 5])
def test_each_whole_number_has_the_probability_of_its_cell(bits: int) -> None:
    drawn, deviation = draw(400_000, bits), 2.0**bits
    cells = np.arange(-4 * 2**bits, 4 * 2**bits + 1)
    chances = stats.norm.cdf((cells + 0.5) / deviation) - stats.norm.cdf((cells - 0.5) / deviation)
    seen = np.array([(drawn == cell).sum() for cell in cells])
    seen, chances = np.append(seen, len(drawn) - seen.sum()), np.append(chances, 1 - chances.sum())
    assert stats.chisquare(seen, chances * len(drawn)).pvalue > 1e-4


def test_on_a_fine_grid_they_are_normal_down_to_their_low_bits() -> None:
    drawn = draw(200_000, 40)
    assert stats.kstest(drawn / 2.0**40, "norm").pvalue > 1e-4
    for shift in (0, 1, 8, 20, 30):
        bit = drawn >> shift & 1
        assert abs(bit.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(drawn))
    assert abs(np.corrcoef(drawn & 1, drawn > 0)[0, 1]) < 0.02


def test_the_same_key_gives_the_same_numbers_and_any_part_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3 * BLOCK + 5000
    whole = draw(count, 20)
    assert not np.array_equal(whole[:5000], draw(5000, 20, key=bytes(32)))
    assert not np.array_equal(whole[:5000], whole[BLOCK : BLOCK + 5000])
    parts = [(0, 0), (0, 1), (0, 1000), (BLOCK - 3, 9), (BLOCK, BLOCK), (7, 2 * BLOCK), (3 * BLOCK + 1, 4999)]
    for at_once in (1, 2, 32):
        monkeypatch.setitem(exact_normal.AT_ONCE, "cpu", at_once)
        assert np.array_equal(draw(count, 20), whole)
        for start, size in parts:
            assert np.array_equal(draw(size, 20, start=start), whole[start : start + size])


def test_a_block_with_too_few_kept_candidates_is_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    honest = exact_normal._candidates

    def fewer(key: bytes, block: int, blocks: int, count: int, *rest: object) -> tuple[Tensor, Tensor]:
        asked.append(count)
        return honest(key, block, blocks, count // 8, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(exact_normal, "_candidates", fewer)
    drawn = draw(1000, 20)
    assert len(asked) > 1
    monkeypatch.undo()
    assert np.array_equal(drawn, draw(1000, 20))


@pytest.mark.costly
def test_what_is_decided_fast_is_decided_alike_in_exact_arithmetic() -> None:
    bits, (x, w) = 30, exact_normal._words(KEY, 5, 1, 600, CPU)
    sizes, kept = exact_normal._candidates(KEY, 5, 1, 600, bits, CPU)
    for place, (drawn, word) in enumerate(zip(x[0].tolist(), w[0].tolist(), strict=True)):
        fraction = drawn >> 1 & (2**56 - 1)
        whole, keep = decide(KEY, place, x=fraction, w=word)
        assert bool(kept[0, place]) is keep
        if keep:
            size = math.floor((whole + Fraction(fraction, 2**56)) / 2 * 2**bits + Fraction(1, 2))
            assert int(sizes[0, place]) == (-size if drawn & 1 else size)


def test_exactly_the_candidates_that_their_first_bits_leave_open_are_decided_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With x a half and k 0, but for the last two, at a boundary: a candidate is kept below exp(-1/32) / S."""
    edge, boundary = int(np.exp(-1 / 32) * exact_normal._SHARE), exact_normal._BELOW[1]
    w = torch.tensor(
        [[0, edge - 2, edge - 1, edge, edge + 1, edge + 2, exact_normal._BELOW[0] - 1, boundary, 2**32 - 1]]
    )
    monkeypatch.setattr(exact_normal, "_words", lambda *_: (torch.full_like(w, 2**56), w))
    open_ones: list[int] = []

    def seen(key: bytes, place: int, *, x: int, w: int) -> tuple[int, bool]:
        open_ones.append(place)
        return 7, True

    monkeypatch.setattr(exact_normal, "decide", seen)
    sizes, kept = exact_normal._candidates(KEY, 0, 1, 9, 2, CPU)
    assert open_ones == [2, 3, 4, 7, 8]
    assert sizes[kept].tolist() == [1, 1, 15, 15, 15, 15, 15], "kept for certain, and as was decided"


def test_bits_that_follow_decide_what_the_first_ones_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    honest = decide

    def counted(key: bytes, place: int, *, x: int, w: int) -> tuple[int, bool]:
        places.append(place)
        return honest(key, place, x=x, w=w)

    monkeypatch.setattr(exact_normal, "decide", counted)
    draw(200_000, 10)
    assert places == [], "once in some hundred million"
    # A number at its boundary is open: both sides of it are reached, as the bits that follow say.
    sides = {decide(KEY, place, x=0, w=exact_normal._BELOW[0])[0] for place in range(40)}
    assert sides == {0, 1}
    found = [decide(KEY, place, x=1 << 55, w=int(np.exp(-1 / 32) * exact_normal._SHARE))[1] for place in range(40)]
    assert set(found) == {True, False}


def test_the_probabilities_of_the_whole_part_are_those_of_the_exponentials() -> None:
    below, share, off = exact_normal._weights(60)
    more, better, _ = exact_normal._weights(200)
    assert all(abs(Fraction(a) - Fraction(b)) < off for a, b in zip([share, *below], [better, *more], strict=False))
    first = float(1 / np.exp(-0.5 * (np.arange(60.0) / 2) ** 2).sum())
    assert float(below[0]) == pytest.approx(first, rel=1e-14) and float(share) == pytest.approx(first, rel=1e-14)
    assert exact_normal._BELOW[:3] == [int(Fraction(value) * 2**32) for value in more[:3]]


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(17, 2)])
def test_the_exponential_is_right_to_the_digits_that_are_asked_for(exponent: Fraction) -> None:
    found, better = (exact_normal._exp_minus(exponent, digits) for digits in (40, 120))
    assert abs(found - better) < Fraction(1, 10**40)
    assert float(found) == pytest.approx(float(np.exp(-float(exponent))), rel=1e-14)


def test_torchs_exponential_is_a_million_times_nearer_than_it_is_trusted_to_be() -> None:
    x = torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k in (0, 1, 5, 12):
        found = (x + k).square().mul(-0.125).exp()
        exact = [exact_normal._exp_minus((Fraction(value) + k) ** 2 / 8, 40) for value in x.tolist()]
        off = [abs(Fraction(a) - b) for a, b in zip(found.tolist(), exact, strict=True)]
        assert max(off) < Fraction(1, 2**32 * 10**6)
