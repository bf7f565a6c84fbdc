"""The formats of matrix products, and what is assumed of a device that adds them up.

A sum of n products is off by at most gamma(n) times the sum of their sizes, with gamma(n) = n u / (1 - n u), in any
order. `check_products` refuses a device on which probes are off by more. Sources: docs/derivations.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.matmul_precision import tf32_products, whole_products

FormatName = Literal["float32", "float64", "tf32", "bf16"]

#: Terms that are added up in one product; further terms are added to its result.
DEPTH = 2048


def gamma(terms: int, roundoff: float) -> float:
    """Return the relative error of a sum of ``terms`` products, in any order; infinite where it may be all of it."""
    size = terms * roundoff
    return size / (1 - size) if size < 0.5 else math.inf


@dataclass(frozen=True)
class Format:
    """The rounding of the inputs of products, and the accuracy of their sums.

    Attributes:
        inputs: The dtype of inputs.
        sums: The dtype of sums, and of all other operations.
        roundoff: The roundoff that is assumed of an addition in a product.
        unit: The roundoff of all other operations, in IEEE arithmetic.
        parts: The number of values whose sum represents a scaled input.
        omega: Relative error of that sum; a factor is also rounded, which `base.CLIP_ROUNDING` covers.
        tiny: Absolute error of a product and of an addition where exponents run out, flushed to zero or not.
    """

    name: FormatName
    inputs: torch.dtype
    sums: torch.dtype
    roundoff: float
    unit: float
    parts: int
    omega: float
    tiny: float = 2.0**-125

    def gamma(self, terms: int) -> float:
        return gamma(terms, self.roundoff)

    def others(self, operations: int) -> float:
        return gamma(operations, self.unit)

    def rounded(self, values: Tensor) -> Tensor:
        """Return the nearest values of the format; not copied if they are already in it. Infinity may become NaN."""
        if self.name != "tf32":
            return values.to(self.inputs)
        if values.dtype in (torch.bfloat16, torch.float16):
            return values
        values = values.float().contiguous()
        # Add half of the last place that stays, then clear the 13 last bits; ties go away from zero.
        nearest = (values.view(torch.int32) + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
        return nearest.add_(values, alpha=0.0)  # adds nothing but NaN, whose bits may have become a number's

    def split(self, values: Tensor) -> Iterator[Tensor]:
        """Yield values of the format whose sum is ``values``, except for ``omega``."""
        for part in range(self.parts):
            found = self.rounded(values)
            yield found
            if part + 1 < self.parts:
                values = values - found  # exact


_U, _V = 2.0**-24, 2.0**-53
FORMATS: Mapping[FormatName, Format] = {
    "float32": Format("float32", torch.float32, torch.float32, _U, _U, 1, _U),
    "float64": Format("float64", torch.float64, torch.float64, _V, _V, 1, _V, 2.0**-1021),
    "tf32": Format("tf32", torch.float32, torch.float32, 2.0**-22, _U, 1, (1 + 2.0**-11) * (1 + _U) - 1),
    "bf16": Format("bf16", torch.bfloat16, torch.float32, 2.0**-22, _U, 2, (1 + 2.0**-17) * (1 + _U) - 1),
}


def product(x: Tensor, y: Tensor, form: Format) -> Tensor:
    """Return ``x @ y``, ``(..., m, k)`` and ``(..., k, n)``, of values of the format, added up in its dtype of sums."""
    if x.device.type != "cuda" or form.name in ("float32", "float64"):
        return x.to(form.sums) @ y.to(form.sums)
    if form.name == "tf32":
        with tf32_products():
            return x.float() @ y.float()
    with _added_in_float32():
        found: Tensor = (torch.bmm if x.dim() == 3 else torch.mm)(x, y, out_dtype=torch.float32)
    return found


@contextmanager
def _added_in_float32() -> Iterator[None]:
    """Keep cuBLAS from adding up parts of a bfloat16 product in bfloat16, as it may by default."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def check_products(device: torch.device, form: Format) -> None:
    """Refuse a device whose sums of products are further off than assumed."""
    draw = torch.Generator().manual_seed(0)
    for depth in (4, DEPTH):  # few terms reveal rounded inputs, many reveal rounded sums
        # One large term among many small ones of its sign: a sum with few digits would lose these.
        x = 2.0**-12 * (1 + torch.rand(1, 32, depth, generator=draw))
        x[0, torch.arange(32), torch.randint(depth, (32,), generator=draw)] = 1 + torch.rand(32, generator=draw)
        x, y = form.rounded(x), form.rounded(1 + torch.rand(1, 32, depth, generator=draw))
        with torch.no_grad(), torch.autocast(device.type, enabled=False), whole_products():
            found = product(x.to(device), y.to(device).mT, form).cpu().double()
        exact = x.double() @ y.double().mT  # terms are positive, so this is the sum of their sizes as well
        if not bool(((found - exact).abs() <= form.gamma(depth) * exact).all()):
            raise UnsupportedModelError(
                f"{device} adds up products of {form.name} values less exactly than privacy.engine assumes, so norms "
                "would have no bound. Choose privacy.engine=loop"
                + (", or unset what shortens products (ONEDNN_DEFAULT_FPMATH_MODE, XLA's matmul precision)."
                   if form.name == "float32" else " or ghost.")
            )  # fmt: skip
