"""Draw normal variates, rounded to a grid, exactly: with integers, from a cryptographic stream.

By rejection (after Karney 2016, arXiv 1303.6257): the first bits of a candidate decide, unless a number is closer than
the accuracy to which `torch.exp` is trusted. Then more bits are drawn and compared in decimal arithmetic. So no
decision depends on an inexact number, and a draw is the same on every machine and device. docs/derivations.md has the
distribution.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from lit_dpret.privacy.chacha import WORDS, keystream
from lit_dpret.threads import in_threads

BLOCK = 1 << 16
"""The number of values with their own candidates: to get one of them, all before it in its block are drawn."""

X_BITS = 56
"""The number of bits of x that are drawn at once; one more of the 64 bits is the sign."""

MOST_BITS = 52
"""The finest grid: the number of bits after the binary point of a standard normal."""

AT_ONCE = {"cpu": 4, "cuda": 32}
"""How many blocks are drawn at once."""

_WORD = 32
_CELLS_BITS = 1
_CELLS = 1 << _CELLS_BITS  # in one deviation
_MORE = 32 * WORDS  # bits of one block of the stream
_X_LOW, _X_HIGH, _W, _MORE_OF_X, _MORE_OF_W = range(5)  # lanes of the stream
_OF_A_BLOCK = 1 << 20  # blocks of the stream for each block of numbers: a hundred times as many as needed
_BLOCKS_OF_MORE = 1 << 10  # of the stream, for each candidate that its first bits leave undecided


@lru_cache
def _weights(digits: int) -> tuple[list[Decimal], Decimal, Fraction]:
    """Return the probabilities that k is below 1, 2, ..., then 1 over S, and a bound on the error of each of them."""
    context = Context(prec=digits + 10)
    last = _CELLS * (math.isqrt(5 * digits) + 4)
    terms = [context.exp(context.divide(Decimal(-k * k), 2 * _CELLS**2)) for k in range(last)]
    sums = list(accumulate(terms, context.add))
    below = [context.divide(value, sums[-1]) for value in sums]
    return below, context.divide(Decimal(1), sums[-1]), Fraction(1, 10**digits)


# The integer parts of those probabilities times 2^32: a word above one means that k is larger, a word below that it is
# not.
_BELOW = sorted({min(int(value * 2**_WORD), 2**_WORD - 1) for value in _weights(40)[0]})
# For each k, 2^32 times the probability of a smaller one; and 2^32 over S.
_SMALLER = [0.0, *(float(value * 2**_WORD) for value in _weights(40)[0][: len(_BELOW)])]
_SHARE = float(_weights(40)[1] * 2**_WORD)


def rounded_normals(key: bytes, count: int, *, start: int, bits: int, device: torch.device) -> Tensor:
    """Return ``count`` exact normals of deviation ``2**bits``, rounded, int64; each depends on key and index alone."""
    found = torch.empty(count, dtype=torch.int64, device=device)
    together, stop = AT_ONCE[device.type], start + count

    def fill(block: int) -> None:
        begin = block * BLOCK
        end = min(begin + together * BLOCK, stop)
        whole = (end - begin) // BLOCK
        parts = [_numbers(key, block, whole, BLOCK, bits, device)] if whole else []
        if end % BLOCK:
            parts.append(_numbers(key, block + whole, 1, end % BLOCK, bits, device))
        drawn = torch.cat(parts)
        # Numbers are drawn by rejection, so a block has no random access: its head is drawn and discarded.
        head = max(start - begin, 0)
        found[begin + head - start : end - start] = drawn[head:]

    in_threads(fill, range(start // BLOCK, -(-stop // BLOCK), together) if count else range(0), device)
    return found


def _numbers(key: bytes, block: int, blocks: int, count: int, bits: int, device: torch.device) -> Tensor:
    """Return the first ``count`` numbers of each of ``blocks`` blocks, concatenated."""
    candidates = int(1.2 * count + 4 * math.sqrt(count)) + 64
    while True:
        sizes, kept = _candidates(key, block, blocks, candidates, bits, device)
        place = kept.cumsum(1) - 1
        if bool((place[:, -1] + 1 >= count).all()):
            break
        # From the beginning again: the result for a key must not depend on how often there were too few.
        candidates *= 2
    # By arithmetic instead of a mask, whose size a GPU would have to report first: unwanted numbers go to the end.
    wanted = kept & (place < count)
    place += count * torch.arange(blocks, device=device).unsqueeze(1)
    place.masked_fill_(~wanted, blocks * count)
    drawn = torch.empty(blocks * count + 1, dtype=torch.int64, device=device)
    return drawn.scatter_(0, place.view(-1), sizes.view(-1))[:-1]


def _candidates(
    key: bytes, block: int, blocks: int, count: int, bits: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the numbers that the first ``count`` candidates of each block would be, and which are kept."""
    x, w = _words(key, block, blocks, count, device)
    negative, x = x & 1, (x >> 1) & ((1 << X_BITS) - 1)
    whole = torch.zeros_like(w, dtype=torch.uint8)
    for value in _BELOW:
        whole += (w >= value).view(torch.uint8)
    whole = whole.long()
    tie = torch.tensor([-1, *_BELOW], device="cpu").to(device)[whole] == w
    ahead = (x.double().mul_(2.0**-X_BITS) + whole).square_().mul_(-0.5 / _CELLS**2).exp_().mul_(_SHARE)
    ahead += torch.tensor(_SMALLER, dtype=torch.float64, device="cpu").to(device)[whole]
    ahead -= w
    # The deciding number is between w and w + 1, and the exponential is trusted to within 1.
    kept = ahead >= 2
    unknown = (ahead < 2) & (ahead > -1) | tie
    # Where floats or 32 bits cannot decide, about once in a billion, exact arithmetic does.
    if bool(unknown.any()):
        for row, column in unknown.nonzero().tolist():
            place = (block + row) * _OF_A_BLOCK * WORDS + column
            found = decide(key, place, x=int(x[row, column]), w=int(w[row, column]))
            whole[row, column], kept[row, column] = found
    # Cut to one bit more than the grid has, and round that bit: later bits of x cannot change it.
    sizes = (
        (whole << X_BITS)
        .bitwise_or_(x)
        .bitwise_right_shift_(X_BITS + _CELLS_BITS - 1 - bits)
        .add_(1)
        .bitwise_right_shift_(1)
    )
    return sizes.mul_(1 - 2 * negative), kept


def _words(key: bytes, block: int, blocks: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 64 bits for the sign and x, and 32 bits for w, of the first ``count`` candidates of each block."""
    columns = -(-count // WORDS)
    numbers = torch.arange(block, block + blocks, device=device).unsqueeze(1) * _OF_A_BLOCK
    numbers = (numbers + torch.arange(columns, device=device)).view(-1)
    lanes = (
        torch.tensor([_X_LOW, _X_HIGH, _W], dtype=torch.int32, device="cpu").to(device).repeat_interleave(len(numbers))
    )
    words = keystream(key, numbers.repeat(3), lane=lanes).view(WORDS, 3, blocks, columns)
    # A candidate is a word of a block of the stream: more candidates move none of the earlier ones.
    low, high, w = words.permute(1, 2, 3, 0).reshape(3, blocks, -1)[:, :, :count].long()
    mask = 2**_WORD - 1
    return (high << _WORD).bitwise_or_(low.bitwise_and_(mask)), w.bitwise_and_(mask)


def decide(key: bytes, place: int, *, x: int, w: int) -> tuple[int, bool]:
    """Return the integer part of a candidate and whether it is kept, using as many more bits as needed.

    ``place`` is the candidate's position in the stream; ``x`` and ``w`` are its bits that are known.
    """
    more = 0
    while True:
        more += _MORE
        digits = (X_BITS + more) // 3
        (x_low, x_high), (w_low, w_high) = (
            _between(key, place, lane, first, bits, more)
            for lane, first, bits in ((_MORE_OF_X, x, X_BITS), (_MORE_OF_W, w, _WORD))
        )
        below, share, off = _weights(digits)
        whole = sum(Fraction(value) + off <= w_low for value in below)
        # The bits so far do not decide the integer part: take more.
        if whole == len(below) or not w_high <= Fraction(below[whole]) - off:
            continue
        smaller = Fraction(below[whole - 1]) if whole else Fraction(0)
        least, most = (
            smaller + Fraction(share) * _exp_minus(((whole + t) / _CELLS) ** 2 / 2, digits) for t in (x_high, x_low)
        )
        # The two summands and the factor, which is below 1, are each off by at most that much.
        if w_high <= least - 3 * off:
            return whole, True
        if w_low >= most + 3 * off:
            return whole, False


def _between(key: bytes, place: int, lane: int, first: int, bits: int, more: int) -> tuple[Fraction, Fraction]:
    """Return the bounds of a number in [0, 1), from its ``first`` bits and the ``more`` bits that follow them."""
    blocks = place * _BLOCKS_OF_MORE + torch.arange(more // _MORE, device="cpu")
    following = int.from_bytes(keystream(key, blocks, lane=lane).T.contiguous().numpy().tobytes(), "big")
    known = (first << more) + following
    return Fraction(known, 1 << (bits + more)), Fraction(known + 1, 1 << (bits + more))


def _exp_minus(exponent: Fraction, digits: int) -> Fraction:
    """Return the exponential of ``-exponent``, with ``exponent`` at least 0, off by less than 10 ** ``-digits``."""
    context = Context(prec=digits + 10)
    return Fraction(context.exp(context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))))
