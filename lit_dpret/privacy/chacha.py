"""Compute ChaCha20, the key stream of RFC 8439, by tensor operations: the same words on every CPU and GPU.

Without the 256-bit key, no known method distinguishes its blocks from coins (Bernstein 2008); attacks reach 7 of 20
rounds. A block depends only on the key and its number. Adding, xoring and rotating words is exact on every device.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")
"""Kinds of devices on which streams, and what is drawn from them, are computed."""

KEY_BYTES = 32
WORDS = 16
"""Words of 32 bits in a block."""

ROUNDS = 20

# Shifts and masks of the four rotations, as tensors of the right dtype: numbers would be converted in every call.
_ROTATIONS = {
    by: tuple(torch.tensor(value, dtype=torch.int32, device="cpu") for value in (32 - by, (1 << by) - 1))
    for by in (16, 12, 8, 7)
}
_CONSTANTS = struct.unpack("<4i", b"expand 32-byte k")


def keystream(key: bytes, blocks: Tensor, *, lane: int | Tensor = 0, rounds: int = ROUNDS) -> Tensor:
    """Return the words of blocks of the stream under ``key``, int32, shape (16, blocks), a block in each column.

    In the terms of RFC 8439, section 2.3, the counter is the lower half of a block's number, and the nonce is its upper
    half, the lane, and 0; numbers have the lower byte first.

    The key has `KEY_BYTES` bytes. Blocks are int64, shape (blocks,), on the device that computes. A lane has 31 bits,
    and each lane has its own stream. Fewer than the 20 rounds of the standard are for measurements only.
    """
    halves = blocks.contiguous().view(torch.int32).view(-1, 2).T  # lower, upper
    first = torch.tensor([*_CONSTANTS, *struct.unpack("<8i", key), 0, 0, 0, 0], dtype=torch.int32, device="cpu")
    initial = first.to(blocks.device).unsqueeze(1)
    # Four rows of the square; the last three have room for the ends with which a diagonal begins again.
    a, b, c, d, spare = (halves.new_empty(rows, len(blocks)) for rows in (4, 5, 6, 5, 4))
    a[:], b[:4], c[:4], d[1:3], d[3], d[4] = initial[:4], initial[4:8], initial[8:12], halves, lane, 0
    for _ in range(rounds // 2):
        _quarter_rounds(a, b[:4], c[:4], d[1:], spare)
        b[4], c[4:], d[0] = b[0], c[:2], d[4]
        _quarter_rounds(a, b[1:], c[2:], d[:4], spare)
        b[0], c[:2], d[4] = b[4], c[4:], d[0]
    found = torch.cat([a, b[:4], c[:4], d[1:]]).add_(initial)
    found[12:14] += halves
    found[14] += lane
    return found


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor, spare: Tensor) -> None:
    """Mix the rows of four columns, or of four diagonals, all sums modulo 2^32."""
    a += b
    _xor_and_rotate(d, a, 16, spare)
    c += d
    _xor_and_rotate(b, c, 12, spare)
    a += b
    _xor_and_rotate(d, a, 8, spare)
    c += d
    _xor_and_rotate(b, c, 7, spare)


def _xor_and_rotate(x: Tensor, y: Tensor, by: int, spare: Tensor) -> None:
    x.bitwise_xor_(y)
    # The sign is shifted in from the left, so the bits that are carried round are masked.
    shift, mask = _ROTATIONS[by]
    torch.bitwise_right_shift(x, shift, out=spare)
    spare.bitwise_and_(mask)
    torch.add(spare, x, alpha=1 << by, out=x)
