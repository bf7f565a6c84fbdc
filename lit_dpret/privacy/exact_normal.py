r"""Draw normal variates, rounded to a grid, exactly: with integers, from a cryptographic stream.

A rounded normal of standard deviation :math:`2^b` is the integer nearest to :math:`2^b Z`, Z standard normal: it is k
with probability :math:`\Phi((k + 1/2) / 2^b) - \Phi((k - 1/2) / 2^b)`. What is drawn here has exactly that
distribution, if the bits of SHAKE-256 are taken for coins; no rounding of floating-point numbers enters it.

:math:`|Z| = k + x`, k whole and x in [0, 1), is drawn by rejection (Karney 2016, "Sampling exactly from the normal
distribution", arXiv 1303.6257, algorithm N): k has probability proportional to :math:`\exp(-k^2 / 2)`, x is uniform,
and both are kept with probability :math:`\exp(-x (2 k + x) / 2)`; the product is :math:`\exp(-(k + x)^2 / 2)`. Each of
the three takes one uniform number, of which the first 32 or 63 bits are drawn. Those decide unless the number that they
are compared with is nearer than `np.exp` can be trusted, which is taken to be right to :math:`2^{-32}`, a million times
what it is off; then, once in some hundred million, more bits are drawn and compared in decimal arithmetic of as many
digits as it takes. So no decision is ever made on an inexact number, and a draw is the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
from decimal import Context, Decimal
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

X_BITS = 63
"""Bits of x that are drawn at once; the 64th is the sign."""

MOST_BITS = 52
"""The finest grid: so many bits after the binary point of a standard normal."""

_WORD = 32
_LARGEST_FIRST = 8
_MORE = 256


def _weights(digits: int) -> tuple[list[Decimal], Fraction]:
    """The probabilities that k is below 1, 2, ..., and a bound on what each of them is off."""
    context = Context(prec=digits + 10)
    terms = [context.exp(Decimal(-k * k) / 2) for k in range(math.isqrt(5 * digits) + 4)]
    sums = list(accumulate(terms, context.add))
    below = [context.divide(value, sums[-1]) for value in sums]
    return below, Fraction(1, 10**digits)


# The whole parts of those probabilities times 2^32: a word above one says that k is larger, one below that it is not.
_BELOW = np.array(
    [min(int(value * 2**_WORD), 2**_WORD - 1) for value in _weights(40)[0][:_LARGEST_FIRST]], dtype=np.uint32
)


def rounded_normals(seed: bytes, target: np.ndarray, bits: int) -> None:
    """Fill ``target`` (int64) with normals of standard deviation ``2**bits``, rounded to whole numbers.

    Guarantees:
        - The distribution is exactly that of the module's text.
        - The same seed gives the same numbers, on every machine; fewer numbers of one seed are the first of more.

    Args:
        seed: Of the stream; secret.
        target: To fill.
        bits: From 0 to `MOST_BITS`.
    """
    candidates = int(1.4 * len(target) + 4 * math.sqrt(len(target))) + 64  # 71 of 100 are kept
    found = np.empty(0, dtype=np.int64)
    while len(found) < len(target):
        found = _kept(seed, candidates, bits)
        # From the beginning again: what the seed gives must not depend on how often there were too few.
        candidates *= 2
    target[:] = found[: len(target)]


def _words(seed: bytes, dtype: np.dtype[Any], count: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(seed).digest(dtype.itemsize * count), dtype=dtype)


def _kept(seed: bytes, candidates: int, bits: int) -> np.ndarray:
    """The rounded normals among the first so many candidates of a seed."""
    drawn = _words(b"x" + seed, np.dtype("<u8"), candidates)
    # Streams of their own by a prefix, so that more candidates move none of the earlier ones.
    k, v = (_words(name + seed, np.dtype("<u4"), candidates) for name in (b"k", b"v"))
    x, whole, tie = drawn >> np.uint64(1), np.zeros(candidates, dtype=np.int8), np.zeros(candidates, dtype=bool)
    for value in _BELOW:
        whole += k >= value
        tie |= k == value
    share = x.astype(np.float64) * 2.0**-X_BITS
    ahead = np.exp(-0.5 * share * (2.0 * whole + share)) * 2.0**_WORD - v
    # The number that decides lies between v and v + 1, and `np.exp` is trusted to 1.
    kept = ahead >= 2
    # Where floats or 32 bits cannot tell, once in some hundred million, exact arithmetic decides.
    for place in np.flatnonzero((ahead < 2) & (ahead > -1) | tie):
        found = decide(seed, int(place), x=int(x[place]), k=int(k[place]), v=int(v[place]))
        whole[place], kept[place] = found
    places = np.flatnonzero(kept)
    # x to one bit more than the grid has, and that bit rounded: the bits of x that follow cannot change it.
    size: np.ndarray = (x[places] >> np.uint64(X_BITS - 1 - bits)).astype(np.int64)
    size += 1
    size >>= 1
    size += whole[places].astype(np.int64) << bits
    size *= 1 - 2 * (drawn[places] & np.uint64(1)).astype(np.int64)
    return size


def decide(seed: bytes, place: int, *, x: int, k: int, v: int) -> tuple[int, bool]:
    """Return the integer part of a candidate and whether it is kept, using as many more bits as needed.

    Args:
        seed: Of the stream.
        place: Of the candidate in it.
        x: The first 63 bits of its x.
        k: The first 32 bits of the number that chooses the whole part.
        v: The first 32 bits of the number that keeps it or not.
    """
    more = 0
    while True:
        more += _MORE
        digits = (X_BITS + more) // 3
        (x_low, x_high), (k_low, k_high), (v_low, v_high) = (
            _between(seed, place, name, first, bits, more)
            for name, first, bits in ((b"x", x, X_BITS), (b"k", k, _WORD), (b"v", v, _WORD))
        )
        below, off = _weights(digits)
        whole = sum(Fraction(value) + off <= k_low for value in below)
        # The bits so far do not decide the whole part: take more.
        if whole == len(below) or not k_high <= Fraction(below[whole]) - off:
            continue
        least, most = (_exp_minus(t * (2 * whole + t) / 2, digits) for t in (x_high, x_low))
        if v_high <= least - off:
            return whole, True
        if v_low >= most + off:
            return whole, False


def _between(seed: bytes, place: int, name: bytes, first: int, bits: int, more: int) -> tuple[Fraction, Fraction]:
    """Between what a number in [0, 1) lies, by its ``first`` bits and ``more`` that follow them."""
    key = b"more " + name + place.to_bytes(8, "little") + seed
    following = int.from_bytes(hashlib.shake_256(key).digest(more // 8), "big")  # a longer digest begins with a shorter
    known = (first << more) + following
    return Fraction(known, 1 << (bits + more)), Fraction(known + 1, 1 << (bits + more))


def _exp_minus(exponent: Fraction, digits: int) -> Fraction:
    """The exponential of ``-exponent``, which is not negative, off by less than 10 to the power of ``-digits``."""
    context = Context(prec=digits + 10)
    return Fraction(context.exp(context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))))
