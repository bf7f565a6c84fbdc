"""Clip by low-precision products: norms from above, and sums whose rounding is inside the bound.

Inputs and output gradients of linear weights are rounded to TF32 or bfloat16 once, before anything is computed from
them: the unit's gradient *is* that of the rounded values. Everything else stays in float32. Small low-precision
gradients are not computed in full, as elsewhere: padding decides which are small, so one unit would change how others
are rounded. Not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from lit_dpret.privacy.clipping import arithmetic
from lit_dpret.privacy.clipping.arithmetic import FORMATS, Format
from lit_dpret.privacy.clipping.base import ClipSettings, RowLoss, accumulator_dtype
from lit_dpret.privacy.clipping.contributions import Contribution, Outer, Scaled, Written, _kept, add_weighted
from lit_dpret.privacy.clipping.ghost import Contributions, GhostClipping
from lit_dpret.privacy.clipping.units import UnitRows

#: Rows of a sum that are computed by one product.
_AT_ONCE = 8192


def _parts(values: Tensor, weights: Tensor, form: Format) -> Iterator[Tensor]:
    return form.split(values * weights)  # in float32


def add_scaled(
    uses: Sequence[Outer],
    coefficients: Tensor,
    total: Tensor | None,
    shape: torch.Size,
    rows: Tensor | None,
    form: Format,
    scaled: Scaled | None = None,
) -> Tensor:
    """Return ``total`` plus the gradients of ``rows``, each times its coefficient, by products of the format."""
    weights = (coefficients if rows is None else coefficients[rows]).float()[:, None, None]
    for use in uses:
        a, g = _kept(use.a, rows), _kept(use.g, rows)
        scale_inputs = a.shape[2] <= g.shape[2]  # the smaller of the two
        parts = partial(_parts, a if scale_inputs else g, weights, form)
        for part in parts() if scaled is None or not scale_inputs else scaled.of(use.a, coefficients, parts):
            x, y = (g, part) if scale_inputs else (part, a)
            x, y = x.flatten(0, 1), y.flatten(0, 1)
            if total is None and shape[0] <= _AT_ONCE:
                total = arithmetic.product(x.T, y, form)
                continue
            total = torch.zeros(shape, device=coefficients.device) if total is None else total
            for start in range(0, len(total), _AT_ONCE):  # in parts: a second matrix of the vocabulary is large
                total[start : start + _AT_ONCE].add_(arithmetic.product(x[:, start : start + _AT_ONCE].T, y, form))
    return torch.zeros(shape, device=coefficients.device) if total is None else total


class LowPrecisionGhostClipping(GhostClipping):
    """`GhostClipping` whose products of linear weights take low-precision inputs; for batches of any shape."""

    low: ClassVar[Format]
    looser: ClassVar[float]

    def __init__(self, module: nn.Module, *, verify: bool = False, **clipping: Unpack[ClipSettings]) -> None:
        super().__init__(module, verify=verify, **clipping)
        self._rounds = any(accumulator_dtype(p) == torch.float32 for p in self.parameters.values())
        self.loose = self.looser if self._rounds else self.loose

    @property
    def target(self) -> float:
        return super().target / (1 + self.looser) if self._rounds else super().target

    def factors(self, norms: Tensor) -> Tensor:
        """Return factors of 12 binary digits, so that rounding elsewhere changes no digit of what they scale."""
        found = super().factors(norms)
        if not self._rounds:
            return found
        mantissa, exponent = found.frexp()
        return torch.ldexp((mantissa * 4096).floor_() / 4096, exponent)

    def _recorded(self, row_loss: RowLoss, batch: UnitRows) -> tuple[Tensor, Contributions]:
        """Return losses and contributions, after any check, with factors of outer products rounded to the format."""
        losses, contributions = super()._recorded(row_loss, batch)
        rounded: dict[object, tuple[Tensor, Tensor]] = {}  # kept with its source, so that no tensor takes its memory
        with torch.no_grad():
            for name, uses in contributions.items():
                if self._form(name, uses) is self.low:
                    contributions[name] = [Outer(self._shared(use.a, rounded), self._shared(use.g, rounded))
                                           for use in uses if isinstance(use, Outer)]  # fmt: skip
        return losses, contributions

    def _shared(self, values: Tensor, rounded: dict[object, tuple[Tensor, Tensor]]) -> Tensor:
        """Round once the values that several parameters share, so that `by_input` recognises them."""
        place = values.data_ptr(), values.shape, values.stride(), values.dtype
        if not values.data_ptr():
            return self.low.rounded(values)
        if place not in rounded:
            rounded[place] = values, self.low.rounded(values)
        return rounded[place][1]

    def _write_out(self, contributions: Contributions, batch: UnitRows) -> list[Written]:
        low = {name: uses for name, uses in contributions.items() if self._form(name, uses) is self.low}
        for name in low:
            del contributions[name]
        written = super()._write_out(contributions, batch)
        contributions |= low
        return written

    def _form(self, name: str, uses: Sequence[Contribution]) -> Format:
        of_linear = bool(uses) and all(isinstance(use, Outer) for use in uses)
        is_low = of_linear and accumulator_dtype(self.parameters[name]) == torch.float32
        return self.low if is_low else super()._form(name, uses)

    def _add_rows(
        self, uses: Sequence[Contribution], coefficients: Tensor, total: Tensor | None, shape: torch.Size,
        dtype: torch.dtype, *, rows: Tensor | None, fixed: bool = False, scaled: Scaled | None = None,
    ) -> Tensor:  # fmt: skip
        outers = [use for use in uses if isinstance(use, Outer)]
        if len(outers) < len(uses) or dtype != torch.float32:
            return add_weighted(uses, coefficients, total, shape, dtype, rows=rows, fixed=fixed, scaled=scaled)
        return add_scaled(outers, coefficients, total, shape, rows, self.low, scaled)


class Tf32GhostClipping(LowPrecisionGhostClipping):
    """`LowPrecisionGhostClipping` with TF32 inputs; ``privacy.engine=ghost_tf32``."""

    low, looser = FORMATS["tf32"], 2.0**-6
    forms = (FORMATS["float32"], low)


class Bf16GhostClipping(LowPrecisionGhostClipping):
    """`LowPrecisionGhostClipping` with bfloat16 inputs; ``privacy.engine=ghost_bf16``."""

    low, looser = FORMATS["bf16"], 2.0**-7
    forms = (FORMATS["float32"], low)
