"""Rounded normals: the distribution that is claimed, by exact comparisons, and the same numbers for the same seed."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from lit_dpret.privacy import exact_normal
from lit_dpret.privacy.exact_normal import decide, rounded_normals


def draw(count: int, bits: int, seed: bytes = b"seed") -> np.ndarray:
    found = np.empty(count, dtype=np.int64)
    rounded_normals(seed, found, bits)
    return found


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


def test_the_same_seed_gives_the_same_numbers_and_fewer_are_the_first_of_more() -> None:
    longer = draw(5000, 20)
    assert np.array_equal(longer[:1000], draw(1000, 20)) and np.array_equal(longer[:1], draw(1, 20))
    assert not np.array_equal(longer, draw(5000, 20, seed=b"another"))
    assert len(draw(0, 20)) == 0


def test_a_seed_with_too_few_kept_candidates_is_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    honest = exact_normal._kept

    def fewer(seed: bytes, count: int, bits: int) -> np.ndarray:
        asked.append(count)
        return honest(seed, count, bits)[: count // 8]

    monkeypatch.setattr(exact_normal, "_kept", fewer)
    drawn = draw(1000, 20)
    assert len(asked) > 1
    monkeypatch.undo()
    assert np.array_equal(drawn, draw(1000, 20))


def words(seed: bytes, count: int) -> list[tuple[int, int, int]]:
    x, k, v = (
        np.frombuffer(hashlib.shake_256(name + seed).digest(size * count), dtype=f"<u{size}")
        for name, size in ((b"x", 8), (b"k", 4), (b"v", 4))
    )
    return [(int(a), int(b), int(c)) for a, b, c in zip(x, k, v, strict=True)]


def test_what_is_decided_fast_is_decided_alike_in_exact_arithmetic() -> None:
    bits, expected = 30, []
    for place, (x, k, v) in enumerate(words(b"seed", 600)):
        whole, kept = decide(b"seed", place, x=x >> 1, k=k, v=v)
        if kept:
            size = (whole << bits) + (((x >> 1 >> (exact_normal.X_BITS - 1 - bits)) + 1) >> 1)
            expected.append(-size if x & 1 else size)
    assert exact_normal._kept(b"seed", 600, bits).tolist() == expected


def test_exactly_the_candidates_that_their_first_bits_leave_open_are_decided_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With x a half and k 0, but for the last two: a candidate is kept below exp(-1/8)."""
    edge, boundary = int(np.exp(-1 / 8) * 2**32), int(exact_normal._BELOW[1])
    given = {
        b"x": np.full(9, 1 << 63, dtype="<u8"),
        b"k": np.array([0] * 7 + [boundary, 2**32 - 1], dtype="<u4"),
        b"v": np.array([0, edge - 2, edge - 1, edge, edge + 1, edge + 2, 2**32 - 1, 0, 0], dtype="<u4"),
    }
    open_ones: list[int] = []

    def seen(seed: bytes, place: int, *, x: int, k: int, v: int) -> tuple[int, bool]:
        open_ones.append(place)
        return 7, True

    monkeypatch.setattr(exact_normal, "_words", lambda seed, dtype, count: given[seed[:1]])
    monkeypatch.setattr(exact_normal, "decide", seen)
    found = exact_normal._kept(b"seed", 9, 1)
    assert open_ones == [2, 3, 4, 7, 8]
    assert found.tolist() == [1, 1, 15, 15, 15, 15, 15], "kept for certain, and as was decided"


def test_bits_that_follow_decide_what_the_first_ones_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    honest = decide

    def counted(seed: bytes, place: int, *, x: int, k: int, v: int) -> tuple[int, bool]:
        places.append(place)
        return honest(seed, place, x=x, k=k, v=v)

    monkeypatch.setattr(exact_normal, "decide", counted)
    draw(200_000, 10)
    assert places == [], "once in some hundred million"
    # A number at its boundary is open: both sides of it are reached, as the bits that follow say.
    boundary = int(exact_normal._BELOW[0])
    sides = {decide(b"seed", place, x=0, k=boundary, v=0)[0] for place in range(40)}
    assert sides == {0, 1}
    found = [decide(b"seed", place, x=1 << 62, k=0, v=int(np.exp(-1 / 8) * 2**32))[1] for place in range(40)]
    assert set(found) == {True, False}


def test_the_probabilities_of_the_whole_part_are_those_of_the_exponentials() -> None:
    below, off = exact_normal._weights(60)
    more, _ = exact_normal._weights(200)
    assert all(abs(Fraction(a) - Fraction(b)) < off for a, b in zip(below, more, strict=False))
    first = float(1 / np.exp(-0.5 * np.arange(30.0) ** 2).sum())
    assert float(below[0]) == pytest.approx(first, rel=1e-14)
    assert [int(value) for value in exact_normal._BELOW[:3]] == [int(Fraction(value) * 2**32) for value in more[:3]]


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(17, 2)])
def test_the_exponential_is_right_to_the_digits_that_are_asked_for(exponent: Fraction) -> None:
    found, better = (exact_normal._exp_minus(exponent, digits) for digits in (40, 120))
    assert abs(found - better) < Fraction(1, 10**40)
    assert float(found) == pytest.approx(float(np.exp(-float(exponent))), rel=1e-14)


def test_numpys_exponential_is_a_million_times_nearer_than_it_is_trusted_to_be() -> None:
    x = np.random.default_rng(0).random(300)
    for k in (0, 1, 5):
        share = 0.5 * x * (2 * k + x)
        exact = [exact_normal._exp_minus(Fraction(value) * (2 * k + Fraction(value)) / 2, 40) for value in x.tolist()]
        off = [abs(Fraction(float(a)) / b - 1) for a, b in zip(np.exp(-share), exact, strict=True)]
        assert max(off) < Fraction(1, 2**32 * 10**4)
