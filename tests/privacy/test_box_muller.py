"""Normals from a stream: bit for bit those of a scalar program, and normal as far out as anybody will look."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_dpret.privacy import box_muller
from lit_dpret.privacy.box_muller import normals, transformed
from lit_dpret.privacy.chacha import keystream

KEY, CPU = bytes(range(32)), torch.device("cpu")
mp.dps = 40


def draw(count: int, *, start: int = 0, key: bytes = KEY, dtype: torch.dtype = torch.float64) -> Tensor:
    return normals(key, count, start=start, device=CPU, dtype=dtype)


def words_of(pairs: list[tuple[int, int]]) -> Tensor:
    """Words that hold these pairs (low, high), eight to a block."""
    flat = torch.tensor(pairs, dtype=torch.int64)
    signed = torch.where(flat >= 2**31, flat - 2**32, flat).to(torch.int32)
    return signed.reshape(-1, 16).T.contiguous()


def split(words: Tensor) -> list[tuple[int, int, int, int, int]]:
    """Of each pair of words: m, the angle's number, the two signs, and its place among the pairs of its block."""
    found = []
    for column in words.T.tolist():
        for pair in range(8):
            low, high = (word & 0xFFFFFFFF for word in column[2 * pair : 2 * pair + 2])
            m = (high ^ 0x80000000) << 8 | low >> 23 & 0xFF
            found.append((m, low >> 1 & 0x3FFFFF, low & 1, low >> 31, pair))
    return found


def in_python(m: int, angle: int, first: int, second: int) -> tuple[float, float]:
    """A pair of normals by float operations of Python, one after the other."""

    def polynomial(coefficients: tuple[float, ...], x: float) -> float:
        found = coefficients[-1]
        for coefficient in coefficients[-2::-1]:
            found = found * x
            found = found + coefficient
        return found

    fraction, exponent = math.frexp(m + 0.5)
    f, e = 2 * fraction, exponent - 1
    root = 1.4142135623730951
    s = (f - root) / (f + root)
    half = polynomial(box_muller._ATANH, s * s) * s
    minus_log = (39.5 - e) * 0.6931471805599453 - 2.0 * half
    bits = 0x5FE6EB50C7B537A9 - (struct.unpack("<q", struct.pack("<d", minus_log))[0] >> 1)
    inverse = struct.unpack("<d", struct.pack("<q", bits))[0]
    for _ in range(4):
        inverse = inverse * (1.5 - inverse * inverse * (0.5 * minus_log))
    radius = inverse * minus_log
    g = angle * 2.0**-21 + (2.0**-22 - 1)
    square = g * g
    sine, cosine = polynomial(box_muller._SIN, square) * g, polynomial(box_muller._COS, square)
    across, along = (cosine - sine) * radius, (cosine + sine) * radius
    return math.copysign(across, 0.5 - first), math.copysign(along, 0.5 - second)


def exactly(m: int, angle: int, first: int, second: int) -> tuple[mpf, mpf]:
    """The transform of Box and Muller, to 40 digits."""
    radius = mp.sqrt(-2 * mp.log((m + mpf("0.5")) / 2**40))
    turn = mp.pi / 2 * (angle + mpf("0.5")) / 2**22
    return (1 - 2 * first) * radius * mp.cos(turn), (1 - 2 * second) * radius * mp.sin(turn)


EDGES = [
    (low, high)
    for high in (0x80000000, 0x7FFFFFFF, 0, 0xFFFFFFFF, 0x80000001, 0x1234567)
    for low in (0, 0xFFFFFFFF, 0x7FFFFF, 0xFF800000, 2, 0x7FFFFE, 0x3FFFFF, 0x400000)
]  # the smallest and the largest radius, and angles at the ends and in the middle


@pytest.mark.parametrize("words", [words_of(EDGES), keystream(KEY, torch.arange(500))], ids=["edges", "stream"])
def test_bits_are_those_of_a_scalar_program_and_near_the_exact_transform(words: Tensor) -> None:
    found = transformed(words)
    for place, (m, angle, first, second, pair) in enumerate(split(words)):
        column = place // 8
        drawn = float(found[pair, column]), float(found[pair + 8, column])
        expected = in_python(m, angle, first, second)
        assert struct.pack("<2d", *drawn) == struct.pack("<2d", *expected)
        for one, exact in zip(drawn, exactly(m, angle, first, second), strict=True):
            assert abs(one - exact) < 2e-14 if m < 2**40 - 2**20 else abs(one - exact) < 1e-9


MANY = draw(1 << 22).numpy()


@pytest.mark.costly
def test_they_are_normal_as_four_million_of_them_tell() -> None:
    """The chance of a false alarm is 1e-6; a distribution function that is off by 0.0026 anywhere is found."""
    count = len(MANY)
    assert stats.kstest(MANY, "norm").pvalue > 1e-6
    # Their deviations under normality: 1, 2, 15 and 96 over the root of the count, for the first four even moments.
    for power, variance in ((1, 1), (2, 2), (3, 15), (4, 96), (5, 945), (6, 10_170)):
        expected = 0 if power % 2 else math.prod(range(1, power, 2))
        assert abs((MANY**power).mean() - expected) < 5 * math.sqrt(variance / count)


@pytest.mark.parametrize("beyond", [1.0, 2.0, 3.0, 4.0, 4.5, 5.0])
def test_as_many_lie_in_each_tail_as_should(beyond: float) -> None:
    expected = stats.norm.sf(beyond) * len(MANY)
    for seen in ((beyond < MANY).sum(), (-beyond > MANY).sum()):
        law = stats.poisson(expected)
        assert law.ppf(1e-7) <= seen <= law.ppf(1 - 1e-7)


@pytest.mark.parametrize("apart", [1, 2, 7, 8, 15, 16, 17, 4096, 65_536])
def test_numbers_of_other_places_are_independent(apart: int) -> None:
    """Of values and of squares: a correlation of 0.003 is found."""
    x, y = MANY[:-apart], MANY[apart:]
    for one, other in ((x, y), (x * x - 1, y * y - 1), (x * x - 1, y), (np.abs(x), np.sign(y))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5.5 / math.sqrt(len(x))


def test_any_part_is_that_of_the_whole_whatever_is_drawn_at_once(
    monkeypatch: pytest.MonkeyPatch, set_threads: Callable[[int], None]
) -> None:
    whole = draw(1000)
    for start, count in ((0, 0), (0, 1), (1, 15), (15, 2), (16, 16), (17, 500), (999, 1)):
        assert torch.equal(draw(count, start=start), whole[start : start + count])
    for at_once in (1, 3):
        monkeypatch.setitem(box_muller.AT_ONCE, "cpu", at_once)
        for threads in (1, 3):
            set_threads(threads)
            assert torch.equal(draw(1000), whole)
    far = 2**40 + 5
    assert torch.equal(draw(20, start=far)[11:], draw(9, start=far + 11)) and not torch.equal(
        draw(20), draw(20, start=2**36)
    )


class Reads(TorchDispatchMode):
    """Operations that would have to wait for a GPU: what they give back are numbers, or tensors of unknown size."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_drawing_reads_no_value_so_that_a_gpu_is_not_waited_for() -> None:
    with Reads() as reads:
        draw(200_000, start=5, dtype=torch.float32)
    assert reads.found == []
    with Reads() as reads:
        torch.ones(3).nonzero()
        bool(torch.ones(1).sum())
    assert len(reads.found) == 2


def test_float32_is_float64_rounded_once() -> None:
    assert torch.equal(draw(5000, dtype=torch.float32), draw(5000).float())
