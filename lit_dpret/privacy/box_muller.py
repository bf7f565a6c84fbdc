"""Draw normal variates from a ChaCha20 stream, with the same bits on every machine and device.

Logarithm, root and cosine of Box and Muller's transform consist of sums, products and one quotient in float64, each a
separate IEEE operation. A compiler would fuse them, so nothing here may be compiled. Bits and errors:
docs/derivations.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dpret.privacy.chacha import WORDS, keystream
from lit_dpret.threads import in_threads

AT_ONCE = {"cpu": 1 << 13, "cuda": 1 << 19}
"""How many blocks of the stream are drawn at once: on a CPU they stay in a core's cache."""

_MAGIC = 0x5FE6EB50C7B537A9
_LN_2 = 0.6931471805599453
_ROOT_2 = 1.4142135623730951
# atanh(s) / s, in powers of s^2: below 0.03, where the omitted terms are below 1e-15.
_ATANH = tuple(1 / (2 * k + 1) for k in range(9))
# cos(pi g / 4) and sin(pi g / 4) / g, in powers of g^2 up to 1; as literals, since powers of pi are not rounded the
# same way everywhere. The omitted terms are below 1.1e-15.
_COS = (
    1.0, -0.30842513753404244, 0.015854344243815502, -0.00032599188692739, 3.59086044859151e-06, -2.4611369504942e-08,
    1.1501159127974052e-10, -3.8980731712596753e-13,
)  # fmt: skip
_SIN = (
    0.7853981633974483, -0.08074551218828079, 0.0024903945701927202, -3.657620418217725e-05, 3.1336168903781217e-07,
    -1.757247673443401e-09, 6.948453273886629e-12, -2.0410263396641442e-14,
)  # fmt: skip


def normals(key: bytes, count: int, *, start: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ``count`` standard normals from index ``start`` on, each from key and index alone, on all `DEVICES`."""
    first, last = start // WORDS, -(-(start + count) // WORDS)
    drawn = torch.empty(last - first, WORDS, dtype=dtype, device=device)
    step = AT_ONCE[device.type]

    def fill(at: int) -> None:
        part = drawn[at - first : at - first + step]
        words = keystream(key, torch.arange(at, at + len(part), device=device))
        part.copy_(transformed(words).T)

    in_threads(fill, range(first, last, step), device)
    return drawn.view(-1)[start - first * WORDS :][:count]


def transformed(words: Tensor) -> Tensor:
    """Return the normals of blocks of the stream, float64, of the shape of ``words``, (16, blocks)."""
    low, high = words[0::2], words[1::2]
    radius = _root_of_minus_log(low, high)
    # cos(t + pi / 4) and sin(t + pi / 4) are (cos t -+ sin t) / sqrt(2): positive for t within pi / 4 of 0.
    g = ((low >> 1) & 0x3FFFFF).double().mul_(2.0**-21).add_(2.0**-22 - 1)
    square = g * g
    sine, cosine = _polynomial(_SIN, square).mul_(g), _polynomial(_COS, square)
    across = (cosine - sine).mul_(radius).copysign_((low << 31).view(torch.float32))
    along = cosine.add_(sine).mul_(radius).copysign_(low.view(torch.float32))
    return torch.cat([across, along])


def _root_of_minus_log(low: Tensor, high: Tensor) -> Tensor:
    """Return the root of -ln u, where u has the 40 bits of ``high`` and bits 23 to 30 of ``low``."""
    # m + 1/2, exact in float64; ``high`` counts from -2^31.
    value = high.double().mul_(256.0).add_(((low >> 23) & 0xFF).double()).add_(2.0**39 + 0.5)
    bits = value.view(torch.int64)
    # value is f 2^e with f in [1, 2), and ln f = ln(2) / 2 + 2 atanh(s): s is within 0.172 of 0.
    exponent = (bits >> 52).double()
    f = bits.bitwise_and_((1 << 52) - 1).bitwise_or_(1023 << 52).view(torch.float64)
    s = f - _ROOT_2
    s.div_(f.add_(_ROOT_2))
    half = _polynomial(_ATANH, s * s).mul_(s)
    # -ln u = (40 - e - 1/2) ln 2 - 2 atanh(s), with the exponent biased by 1023.
    return _root(exponent.neg_().add_(40 + 1023 - 0.5).mul_(_LN_2).sub_(half.mul_(2.0)))


def _root(x: Tensor) -> Tensor:
    """Return the square root of positive numbers, as x times Newton's approximation to the root's reciprocal."""
    # Half the exponent, by a shift: off by 3.5 percent at most (Lomont 2003), and four steps square that four times.
    found = (_MAGIC - (x.view(torch.int64) >> 1)).view(torch.float64)
    half = x * 0.5
    for _ in range(4):
        found.mul_((found * found).mul_(half).neg_().add_(1.5))
    return found.mul_(x)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Evaluate by Horner's rule, with each product and each sum rounded separately."""
    *others, last = coefficients
    found = x * last
    found.add_(others.pop())
    while others:
        found.mul_(x).add_(others.pop())
    return found
