"""Gradients of units, written out and kept: the cheapest way wherever they are no larger than what they come from.

A linear layer holds, for every unit, an input and an output gradient of ``positions`` rows. Where the
weight has fewer elements than those two together (long texts, convolutions on large images), each
unit's gradient is written out in their place. The norm and the weighted sum are then read off it,
and the multiplications are those of an ordinary backward pass, no more. Elsewhere
`contributions` computes norms without the gradient (MixOpt of Bu et al. 2022, 2205.10683, decides
between the norms only; keeping the gradient saves the second multiplication as well).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dpret.privacy.clipping.contributions import Contribution, Product, unit_gradients
from lit_dpret.privacy.clipping.convolution import Convolution, chunk_of
from lit_dpret.privacy.clipping.units import UnitRows

#: How much larger than inputs and output gradients together the written gradients may be.
ROOM = 1.25
#: Elements that are squared at a time.
_CACHED = 1 << 18


@dataclass(frozen=True)
class Written:
    """``value`` is (n, *shape of the parameter): the gradients of ``units``, (n,), in a batch of fixed shape or not."""

    units: Tensor
    value: Tensor
    fixed: bool = False

    def add_squares(self, squares: Tensor, dtype: torch.dtype) -> None:
        """Add the squared norms, computed in ``dtype``, to those of all units, ``(units,)`` in float64."""
        flat = self.value.flatten(1)
        if self.fixed:
            squares[self.units] += flat.to(dtype).square().sum(1, dtype=torch.float64)
            return
        step = max(1, _CACHED // max(1, len(flat)))
        products = flat.new_empty(len(flat), min(step, flat.shape[1]), dtype=dtype)
        for part in torch.split(flat, step, dim=1):  # in a buffer that stays in the cache; torch sums pairwise
            part = part.to(dtype)
            squares[self.units] += torch.mul(part, part, out=products[:, : part.shape[1]]).sum(1).double()

    def add_to(self, total: Tensor | None, factors: Tensor) -> Tensor:
        """``total`` plus the gradients, each times its unit's factor; one with factor zero is left out.

        Where shapes are fixed, it is set to zero in place of that.
        """
        weights = factors[self.units].to(self.value.dtype)
        value = self.value
        if self.fixed:
            kept = (weights != 0).view(-1, *[1] * (value.dim() - 1))
            value = torch.where(kept, value, torch.zeros_like(value))
        elif len(keep := weights.nonzero().flatten()) < len(weights):
            value, weights = value[keep], weights[keep]
        if total is None or self.fixed:  # XLA has no addmv, and computes in place whatever it can
            found: Tensor = torch.tensordot(weights, value, dims=1)
            return found if total is None else total.add_(found)
        total.view(-1).addmv_(value.flatten(1).T, weights)
        return total


def are_small(uses: Sequence[Sequence[Contribution]], shapes: Sequence[torch.Size], batch: UnitRows) -> bool:
    """Whether the gradients of parameters that share their inputs take no more room than what they come from."""
    room = 0
    for position, use in ((p, use) for p, each in enumerate(uses) for use in each):
        if not isinstance(use, Product):
            return False
        room += _size(use.g)
        if position == 0:
            room += _size(use.x if isinstance(use, Convolution) else use.a)
    units = sum(len(group.units) for group in batch.groups)
    return units * 4 * sum(shape.numel() for shape in shapes) <= ROOM * room


def write_out(uses: Sequence[Contribution], shape: torch.Size, batch: UnitRows, dtype: torch.dtype) -> list[Written]:
    """Each unit's gradient of one parameter, in ``dtype``."""
    patches = [_patches(use) for use in uses if isinstance(use, Convolution)]
    found: list[Written] = []
    for group in batch.groups:
        each = group.rows.shape[1] * sum(patches)
        size = max(1, chunk_of(batch.real.device) // each) if patches else len(group.units)
        for part in group.split(size):
            found.append(Written(part.units, unit_gradients(uses, shape, part, dtype), batch.fixed))
    return found


def _patches(use: Convolution) -> int:
    """Elements of the patches of one row."""
    return max(1, use.g.shape[1] * use.x.shape[2] * int(torch.Size(use.geometry.kernel).numel()))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
