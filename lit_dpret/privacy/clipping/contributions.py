r"""Norms and weighted sums of gradients that are never written out.

A use of a parameter contributes, to the gradient of row r,

* ``Outer``: :math:`\sum_t g_{rt} a_{rt}^\top` (a linear layer: input ``a``, output gradient ``g``),
* ``Lookup``: :math:`\sum_t e_{i_{rt}} g_{rt}^\top` (an embedding: token ``i``, ``e`` a unit vector),
* ``Dense``: a tensor that is small enough to be written out (biases, norms, position bias).

A parameter used several times gets the sum of its uses, so its squared norm has cross terms: uses
of one kind are joined along the positions t, and an embedding tied to a linear layer adds
:math:`2 \sum_{ts} (g_t)_{i_s} (a_t \cdot g'_s)`, a gather instead of a vocabulary-sized matrix
(book-keeping: Bu et al. 2023, 2210.00038; Gram norms: Goodfellow 2015, 1510.01799, and
Li et al. 2022, 2110.05679).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dpret.privacy.clipping.base import RowGroup, UnitRows

#: A Gram matrix also costs two passes over it, so it must save this factor in multiplications.
GRAM_ADVANTAGE = 1.5


@dataclass(frozen=True)
class Outer:
    """``a`` is (rows, positions, in), ``g`` is (rows, positions, out); the gradient is (out, in)."""

    a: Tensor
    g: Tensor


@dataclass(frozen=True)
class Lookup:
    """``ids`` is (rows, positions), ``g`` is (rows, positions, dim); the gradient is (entries, dim)."""

    ids: Tensor
    g: Tensor


@dataclass(frozen=True)
class Dense:
    """``value`` is (rows, *shape of the parameter)."""

    value: Tensor


Contribution = Outer | Lookup | Dense


def squared_norms(
    uses: Sequence[Contribution], shape: torch.Size, batch: UnitRows, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Squared norm of each unit's gradient of one parameter, in float64, ``(units,)``.

    The second result is the *energy* of the norms that were computed as a sum of products of
    either sign: the squared norm that the same terms would have were they orthogonal. The rounding
    error of the first result is about the unit roundoff of ``dtype`` times the energy, so it
    matters only for a unit whose terms cancel, one with a norm far below its energy.
    """
    squares = torch.zeros(batch.units, dtype=torch.float64, device=batch.real.device)
    energy = torch.zeros_like(squares)
    outers = [use for use in uses if isinstance(use, Outer)]
    lookups = [use for use in uses if isinstance(use, Lookup)]
    dense = [use for use in uses if isinstance(use, Dense)]
    size = _units_at_once(outers, lookups, shape, batch)
    if dense:  # a mixture with them is rare enough to be written out, one unit at a time
        size = 1 if outers or lookups else batch.units
    for whole in batch.groups:
        for group in whole.split(size):
            if dense:
                total = unit_gradients(uses, shape, group, dtype)
                squares[group.units] = total.double().flatten(1).square().sum(1)
                continue
            pairs = [(group.join(use.a).to(dtype), group.join(use.g).to(dtype)) for use in outers]
            found = _looked_up(lookups, group, dtype)
            if pairs:
                squares[group.units], energy[group.units] = _outer_squares(pairs, shape, always_energy=bool(found))
            if found:
                ids, g = found
                squares[group.units] += _lookup_squares(ids, g, shape[0])
            if found and pairs:
                squares[group.units] += cross_terms(pairs, ids, g)
                energy[group.units] += g.double().square().sum((1, 2))
    return squares, energy


def add_weighted(
    uses: Sequence[Contribution], coefficients: Tensor, total: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """``total`` plus the gradients of all rows, each times its coefficient; in place where there is a total.

    A row with coefficient zero is left out, not multiplied: its gradient may be NaN.
    """
    keep = coefficients.nonzero().flatten()
    rows = None if len(keep) == len(coefficients) else keep
    weights = (coefficients if rows is None else coefficients[rows]).to(dtype)
    for use in sorted(uses, key=lambda use: not isinstance(use, Outer)):
        if isinstance(use, Outer):
            a, g = _kept(use.a, rows), _kept(use.g, rows)
            small = (a if a.shape[2] <= g.shape[2] else g).to(dtype) * weights[:, None, None]
            a, g = (small, g) if a.shape[2] <= g.shape[2] else (a, small)
            a, g = a.flatten(0, 1), g.flatten(0, 1)
            if total is None:
                total = torch.zeros(shape, dtype=dtype, device=a.device) if g.dtype != dtype else None
            if total is None:
                total = g.T @ a.to(dtype)
            else:
                for part, columns in zip(total.split(8192), g.split(8192, 1), strict=True):
                    part.addmm_(columns.to(dtype).T, a.to(dtype))
            continue
        if total is None:
            total = torch.zeros(shape, dtype=dtype, device=coefficients.device)
        if isinstance(use, Lookup):
            g = _kept(use.g, rows).to(dtype) * weights[:, None, None]
            total.index_add_(0, _kept(use.ids, rows).flatten(), g.flatten(0, 1))
        else:
            total += torch.tensordot(weights, _kept(use.value, rows).to(dtype), dims=1)
    return torch.zeros(shape, dtype=dtype, device=coefficients.device) if total is None else total


def unit_gradients(uses: Sequence[Contribution], shape: torch.Size, group: RowGroup, dtype: torch.dtype) -> Tensor:
    """The gradients of a group's units, written out: (n, *shape)."""
    n = len(group.units)
    total = torch.zeros(n, *shape, dtype=dtype, device=group.units.device)
    for use in uses:
        if isinstance(use, Dense):
            total += group.join(use.value[:, None]).to(dtype).sum(1)
        elif isinstance(use, Outer):
            total.baddbmm_(group.join(use.g).to(dtype).mT, group.join(use.a).to(dtype))
        else:
            ids, g = group.join(use.ids), group.join(use.g).to(dtype)
            unit = torch.arange(n, device=ids.device)[:, None].expand_as(ids)
            total.index_put_((unit, ids), g, accumulate=True)
    return total


def cross_terms(pairs: list[tuple[Tensor, Tensor]], ids: Tensor, looked_up: Tensor) -> Tensor:
    """Twice the inner product of a tied weight's linear and embedding gradients, ``(n,)``."""
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for a, g in pairs:
        at_ids = g.gather(2, ids[:, None, :].expand(-1, g.shape[1], -1))
        total += 2 * (a @ looked_up.mT).mul_(at_ids).sum((1, 2), dtype=torch.float64)
    return total


def _kept(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _looked_up(lookups: list[Lookup], group: RowGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    if not lookups:
        return None
    ids = [group.join(use.ids) for use in lookups]
    g = [group.join(use.g).to(dtype) for use in lookups]
    return (ids[0], g[0]) if len(lookups) == 1 else (torch.cat(ids, 1), torch.cat(g, 1))


def _prefers_gram(positions: int, shape: torch.Size) -> bool:
    out, into = shape
    return GRAM_ADVANTAGE * positions * (into + out) < into * out


def _outer_squares(
    pairs: list[tuple[Tensor, Tensor]], shape: torch.Size, always_energy: bool
) -> tuple[Tensor, Tensor]:
    """Squared norms and energy of the sum of outer products, by Gram matrices or written out."""
    positions = sum(a.shape[1] for a, _ in pairs)
    if _prefers_gram(positions, shape):
        a = pairs[0][0] if len(pairs) == 1 else torch.cat([a for a, _ in pairs], 1)
        g = pairs[0][1] if len(pairs) == 1 else torch.cat([g for _, g in pairs], 1)
        gram = (a @ a.mT).mul_(g @ g.mT)
        energy = gram.diagonal(dim1=1, dim2=2).double().sum(1)
        return gram.sum((1, 2), dtype=torch.float64), energy
    total = pairs[0][1].mT @ pairs[0][0]
    for a, g in pairs[1:]:
        total.baddbmm_(g.mT, a)
    squares = torch.linalg.vector_norm(total, dim=2).double().square().sum(1)  # short sums: a long one drifts in fp32
    energy = torch.zeros_like(squares)
    if always_energy:
        for a, g in pairs:
            energy += (a.square().sum(2) * g.square().sum(2)).double().sum(1)
    return squares, energy


def _lookup_squares(ids: Tensor, g: Tensor, entries: int) -> Tensor:
    """Sum the gradients of equal tokens of one unit, then take the norm."""
    n = len(ids)
    unit = torch.arange(n, device=ids.device)[:, None]
    keys, place = torch.unique(unit * entries + ids, return_inverse=True)
    summed = torch.zeros(len(keys), g.shape[2], dtype=g.dtype, device=g.device)
    summed.index_add_(0, place.flatten(), g.flatten(0, 1))
    squares = torch.zeros(n, dtype=torch.float64, device=ids.device)
    return squares.index_add_(0, keys // entries, summed.double().square().sum(1))


def _units_at_once(outers: list[Outer], lookups: list[Lookup], shape: torch.Size, batch: UnitRows) -> int:
    """How many units fit into temporaries of bounded size (small on a CPU, where memory is the bound)."""
    each = max(group.rows.shape[1] for group in batch.groups)
    outer = each * sum(use.g.shape[1] for use in outers)
    lookup = each * sum(use.g.shape[1] for use in lookups)
    elements = lookup * (outer + shape[-1])
    if outer:
        elements += 2 * outer**2 if _prefers_gram(outer, shape) else shape.numel()
    limit = 1 << 22 if batch.real.device.type == "cpu" else 1 << 27
    return max(1, limit // max(1, elements))
