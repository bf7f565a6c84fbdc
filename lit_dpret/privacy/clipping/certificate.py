"""Bounds on a unit's gradient norm, and on what a sum of gradients may miss, that include every rounding.

They follow only from what `arithmetic` assumes of a sum of products; docs/derivations.md has the proof, in the same
notation: positions t, lengths alpha (inputs) and beta (output gradients), spread S, and the missed amount kappa.
Nothing is charged beyond ``max_grad_norm``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dpret.privacy.clipping import arithmetic
from lit_dpret.privacy.clipping.arithmetic import DEPTH, FORMATS, Format
from lit_dpret.privacy.clipping.contributions import (
    Contribution,
    Dense,
    Lookup,
    Product,
    _block,
    _cat,
    _joined_lookups,
    _matrix,
    _prefers_gram,
    chunk_of,
    unit_gradients,
)
from lit_dpret.privacy.clipping.units import RowGroup, UnitRows

#: Up to this number of positions, CUDA computes a Gram matrix whole: skipping half would take four times the kernels.
WHOLE = 1024
#: Sizes above which products may overflow in float32.
LARGE = 2.0**60
#: Larger than the error of the few operations here in float64.
_FEW = 1e-11
#: The number of squares added up before a wider type takes over, and the number up to which it adds them directly.
_ROW, _AT_ONCE = 256, 4096


@dataclass
class Certified:
    """The certain facts about the gradients of some parameters: one value for each slot of a batch, in float64."""

    estimate: Tensor  # the squared norm as it was computed
    error: Tensor  # what to add to the estimate for an upper bound
    moved: Tensor  # upper bound on the squared norm by which norm and sum may also be off, over the factor
    sizes: Tensor  # upper bound on the sizes of terms, which bounds absolute errors
    least: float  # the absolute error of an operation, the largest of all formats in use
    relative: float = 0.0  # the share of the estimate, and ...
    absolute: float = 0.0  # ... the absolute amount, that the rounding of lengths may have lost
    pairs: float = 0.0  # what is to be added to `sizes` where products were added up in pairs ...
    positions: float = 0.0  # ... and for sums

    @classmethod
    def zeros(cls, units: int, device: torch.device, *, least: float = FORMATS["float32"].tiny) -> Certified:
        estimate, error, moved, sizes = torch.zeros(4, units, dtype=torch.float64, device=device)
        return cls(estimate, error, moved, sizes, least)

    def norms(self) -> Tensor:
        """Return an upper bound on the norm, plus what a sum may miss of factor times gradient, over the factor."""
        tiny = 4 * self.least * (self.sizes + self.pairs).square() + self.absolute
        # Scale both: with the error of a tied weight, whose estimate may be below zero, no part is negative.
        squares = (self.estimate + self.error) * (1 + self.relative) + tiny
        return squares.clamp(min=0).sqrt() + self.moved.sqrt()

    def tiny(self) -> Tensor:
        """Return what else a sum may miss of factor times gradient, whatever the factor is."""
        found = 4 * self.least * (self.sizes + self.positions)
        return found.masked_fill(self.sizes > LARGE, math.inf)

    def present(self, norms: Tensor) -> Tensor:
        """Return which units have a gradient: whose ``norms`` exceed what absolute errors alone can add up to.

        For a gradient of zero they add up to at most 2^-60 times the sizes: the amount by which lengths are enlarged
        (`_rounding_of_lengths`), times shares that are below one, and what small products may lose.
        """
        return norms > 2.0**-58 * (self.sizes + self.pairs + self.positions) + 2 * math.sqrt(self.absolute)

    def note_lengths(self, form: Format, up: float, floor: float) -> None:
        """Record that (n + floor) times ``up`` bounds a norm whose computed value n goes into the estimate."""
        # (a + b)^2 is at most (1 + e) a^2 + (1 + 1/e) b^2.
        self.relative = max(self.relative, up**2 * (1 + form.unit) - 1)
        self.absolute += up**2 * floor**2 * (1 + 1 / form.unit)

    def note_terms(self, terms: int, width: int, *, in_pairs: bool) -> None:
        """Record what bounds absolute errors in addition to `sizes`.

        These are ``terms`` over all parameters, each with axes of total length ``width``, whose products were added up
        ``in_pairs``.
        """
        self.pairs += 1.5 * terms * width**0.5 if in_pairs else 0.0
        self.positions += width * terms


def certified(
    parameters: Sequence[Sequence[Contribution]], shape: torch.Size, batch: UnitRows, form: Format, into: Certified
) -> None:
    """Add what is certain about the gradients of one parameter, or of linear weights with equal inputs (`by_input`)."""
    outers = [[use for use in uses if isinstance(use, Product)] for uses in parameters]
    lookups = [use for use in parameters[0] if isinstance(use, Lookup)]
    mixed = any(isinstance(use, Dense) for use in parameters[0]) or len({use.groups for use in outers[0]}) > 1
    if mixed:  # rare enough, or small enough, to compute in full
        size = 1 if outers[0] or lookups else batch.units
    else:
        size = _units_at_once(outers, lookups, shape, batch)
    for group in (each for whole in batch.groups for each in whole.split(size)):
        bounds = Bounds(group, form, into)
        if mixed:
            bounds.of_written(parameters[0], shape)
            continue
        inputs = [use.inputs(group, form.inputs) for use in outers[0]]
        outputs = [[use.outputs(group, form.inputs) for use in uses] for uses in outers]
        ids, looked_up = _joined_lookups(lookups, group, form.sums) or (None, None)
        tied = bool(inputs) and looked_up is not None
        # How often a term is added to others, apart from those of its own kind: to a partial sum of each use, and then
        # to those of the other kind.
        more = len(parameters[0]) * group.rows.shape[1]
        if inputs:
            later = 0 if looked_up is None else looked_up.shape[1]
            bounds.of_products(inputs, outputs, more=more + later, folds=outers[0][0].groups, tied=tied)
        if ids is not None and looked_up is not None:
            more += sum(a.shape[1] for a in inputs)
            bounds.of_lookups(ids, looked_up, shape[0], more=more, fixed=batch.fixed, tied=tied)
            bounds.of_cross_terms(inputs, outputs[0], ids, looked_up)


@dataclass(frozen=True)
class Bounds:
    """Bounds on gradients of some units, which are added to what is certain about their other gradients."""

    group: RowGroup
    form: Format
    into: Certified

    def of_products(
        self, inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]],
        *, more: int = 1, folds: int = 1, tied: bool = False,
    ) -> None:  # fmt: skip
        """Bound sums of outer products.

        Values are of the format: inputs (n x folds, positions, in) for each use, outputs (n x folds, positions, out)
        for each parameter and use. A ``tied`` squared norm is a part of a norm that may cancel.
        """
        form, into = self.form, self.into
        a, gs = _cat(list(inputs)), [_cat(list(g)) for g in outputs]
        positions, width, out = a.shape[1], a.shape[2], sum(g.shape[2] for g in gs)
        # Scaled up for rounding where they are added, not one by one, which would start many kernels.
        up, floor = _rounding_of_lengths(max(width, *(g.shape[2] for g in gs)), form)
        of_terms = torch.stack([_raw_lengths(each, form) for each in (a, *gs)], 1).add_(floor)
        alpha, beta = of_terms[:, :1], of_terms[:, 1:]
        spread = torch.linalg.vector_norm(beta @ alpha.mT, dim=(1, 2), dtype=torch.float64).square_()
        up_spread = up**2 * (1 + form.others(positions + 8))
        missed = _missed(form, positions + more)
        if pairs := _prefers_gram(positions, out, width):
            share = self._add_pairs(a, gs, alpha, beta, up=up, folds=folds)
            self._add(into.error, spread, up_spread**2 * share, folds=folds)
        else:
            square, share, *rounding = _written_out(a, gs, form)
            self._add(into.estimate, square, folds=folds)
            if tied:
                self._add_as_square(square, spread, share * up_spread, *rounding)
            else:
                missed += share
                into.note_lengths(form, rounding[0], rounding[1] * folds**0.5)
        self._add(into.moved, spread, (missed * up_spread) ** 2, folds=folds)
        self._add(into.sizes, of_terms.sum((1, 2), dtype=torch.float64), up_spread * len(gs) * (width + out) ** 0.5,
                  folds=folds)  # fmt: skip
        into.note_terms(positions * folds * len(gs), width + out, in_pairs=pairs or tied)

    def of_lookups(self, ids: Tensor, g: Tensor, entries: int, *, more: int, fixed: bool, tied: bool = False) -> None:
        """Bound the gradients of an embedding: ids (n, positions), output gradients (n, positions, dim)."""
        form, into, (n, positions, width) = self.form, self.into, g.shape
        beta = lengths(g, form).double()
        missed = _missed(form, positions + more)
        if fixed:  # all pairs of equal tokens: more work, but no shape depends on the tokens
            equal = ids[:, :, None] == ids[:, None, :]
            spread = torch.where(equal, beta[:, :, None] * beta[:, None, :], 0).sum((1, 2))
            self._add(into.estimate, (g @ g.mT).mul_(equal).sum((1, 2), dtype=torch.float64))
            self._add(into.error, spread, (form.gamma(width) + positions**2 * 2.0**-52) * (1 + _FEW))
        else:
            unit = torch.arange(n, device=ids.device)[:, None]
            # Equal tokens of one unit share one row of its gradient; those of two units have two.
            keys, place = torch.unique(unit * entries + ids, return_inverse=True)
            summed = torch.zeros(len(keys), width, dtype=g.dtype, device=g.device)
            summed.index_add_(0, place.flatten(), g.flatten(0, 1))
            sizes = torch.zeros(len(keys), dtype=torch.float64, device=g.device)
            sizes.index_add_(0, place.flatten(), beta.flatten())
            both = torch.zeros(n, 2, dtype=torch.float64, device=g.device)
            both.index_add_(0, keys // entries, torch.stack([_raw_lengths(summed, form), sizes], 1).square())
            square, spread = both.unbind(1)
            self._add(into.estimate, square)
            up, floor = _rounding_of_lengths(width, form)
            rounding = up * (1 + _FEW), floor * positions**0.5
            if tied:
                self._add_as_square(square, spread, form.gamma(positions), *rounding)
            else:
                missed += form.gamma(positions)
                into.note_lengths(form, *rounding)
        self._add(into.moved, spread, missed**2 * (1 + _FEW))
        self._add(into.sizes, beta.sum(1), (1 + _FEW) * width**0.5)
        into.note_terms(positions, width, in_pairs=True)

    def of_cross_terms(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], ids: Tensor, looked_up: Tensor
    ) -> None:
        form = self.form
        for a, g in zip(inputs, outputs, strict=True):
            off = form.gamma(looked_up.shape[2]) + 4 * form.unit + ids.shape[1] * g.shape[1] * 2.0**-52
            at_ids = g.to(form.sums).gather(2, ids[:, None, :].expand(-1, g.shape[1], -1))
            cross = (a.to(form.sums) @ looked_up.mT).mul_(at_ids).sum((1, 2), dtype=torch.float64)
            self._add(self.into.estimate, cross, 2.0)
            by_id = (lengths(a, form)[:, None] @ at_ids.abs_())[:, 0].mul_(lengths(looked_up, form))
            up = 1 + form.others(g.shape[1] + 64)
            self._add(self.into.error, by_id.sum(1, dtype=torch.float64), 2 * off * up)

    def of_written(self, uses: Sequence[Contribution], shape: torch.Size) -> None:
        """Bound gradients that are computed in full; those of biases and norms are sums over their rows."""
        form, into, group = self.form, self.into, self.group
        computed, up, floor = norms_of_each(unit_gradients(uses, shape, group, form.sums), form)
        norms = (computed + floor) * up
        terms = sum((1 if isinstance(use, Dense) else use.g.shape[1]) * group.rows.shape[1] for use in uses)
        if terms == 1 and isinstance(uses[0], Dense):  # nothing was added to anything
            spread, sizes, missed = norms, norms, _missed(form, 1)
        else:
            of_uses = zip(*(_spread_of(use, group) for use in uses), strict=True)
            spread, sizes = (functools.reduce(torch.add, each) for each in of_uses)
            missed = _missed(form, terms) + form.gamma(terms)
        width = max(1, shape.numel())
        group.add_squares_to(into.estimate, computed)
        into.note_lengths(form, up, floor)
        group.add_squares_to(into.moved, spread, missed**2)
        group.add_to(into.sizes, sizes, width**0.5)
        into.note_terms(terms, width, in_pairs=False)

    def _add_pairs(
        self, a: Tensor, gs: Sequence[Tensor], alpha: Tensor, beta: Tensor, *, up: float, folds: int
    ) -> float:
        """Add the squared norm from pairs, and its error; return the share of the squared spread it lacks."""
        form, into, positions = self.form, self.into, a.shape[1]
        of_a, of_g = _parts([a]), _parts(gs)
        gamma_a, gamma_g = (form.gamma(max(part.shape[2] for part in parts) + len(parts)) for parts in (of_a, of_g))
        # The elementwise product is rounded too, and so is the float64 sum of T^2 of them.
        gamma_a = gamma_a + 2 * form.unit + positions**2 * 2.0**-52
        up = up**2 * (1 + form.others((len(gs) + 1) * positions + 16))  # of the weighted sums
        step = _step(positions, a.device)
        for start in range(0, positions, step):
            rows = slice(start, start + step)
            b_matrix = _added([(part[:, rows], part[:, start:].mT) for part in of_g], form)
            a_matrix = _added([(part[:, rows], part[:, start:].mT) for part in of_a], form)
            for matrix, weights, share in ((b_matrix, alpha, gamma_a), (a_matrix, beta, gamma_g)):
                for weighted, times in _weighted(matrix, weights, rows):
                    self._add(into.error, weighted, times * up * share, folds=folds)
            products = b_matrix.mul_(a_matrix)
            square = products[:, :, : products.shape[1]].sum((1, 2), dtype=torch.float64)
            if products.shape[1] < products.shape[2]:  # outside the diagonal block each pair counts twice
                square = products.sum((1, 2), dtype=torch.float64).mul_(2).sub_(square)
            self._add(into.estimate, square, folds=folds)
        return gamma_a * gamma_g

    def _add(self, slots: Tensor, values: Tensor, scale: float = 1.0, *, folds: int = 1) -> None:
        self.group.add_to(slots, values if folds == 1 else values.view(-1, folds).sum(1), scale)

    def _add_as_square(self, square: Tensor, spread: Tensor, share: float, up: float, floor: float) -> None:
        """Add to the error of squared norms what a norm may be off by, a share of the root of ``spread``."""
        above = (square.sqrt() + floor) * up + spread.sqrt() * share
        self._add(self.into.error, above.square() * (1 + _FEW) - square)


def _rounding_of_lengths(width: int, form: Format) -> tuple[float, float]:
    """Return the factor by which a norm of ``width`` values may be too small, and what to add to the norm first."""
    return 1 + form.others(width + 8), (8 * width * form.tiny) ** 0.5


def _raw_lengths(values: Tensor, form: Format) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=form.sums)
    return found


def lengths(values: Tensor, form: Format) -> Tensor:
    """Return upper bounds on the norms over the last axis, in the dtype of the format's sums."""
    up, floor = _rounding_of_lengths(values.shape[-1], form)
    return _raw_lengths(values, form).add_(floor).mul_(up)


def norms_of_each(values: Tensor, form: Format) -> tuple[Tensor, float, float]:
    """Return norms over all axes but the first, ``(n,)`` in float64, and their rounding (`_rounding_of_lengths`)."""
    flat = values.reshape(len(values), -1)
    if flat.shape[1] <= _AT_ONCE:
        return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64), 1 + _FEW, 0.0
    size = flat.shape[1] // _ROW * _ROW
    parts = [
        torch.linalg.vector_norm(flat[:, :size].view(len(flat), -1, _ROW), dim=2, dtype=form.sums),
        torch.linalg.vector_norm(flat[:, size:], dim=1, keepdim=True, dtype=form.sums),
    ]
    up, floor = _rounding_of_lengths(_ROW, form)
    found = torch.linalg.vector_norm(torch.cat(parts, 1), dim=1, dtype=torch.float64)
    return found, up, floor * (flat.shape[1] / _ROW + 1) ** 0.5


def norms_from_above(values: Tensor, form: Format) -> Tensor:
    """Return upper bounds on the norms over all axes but the first, ``(n,)`` in float64."""
    found, up, floor = norms_of_each(values, form)
    return (found + floor) * up


def _spread_of(use: Contribution, group: RowGroup) -> tuple[Tensor, Tensor]:
    """Return sums of the lengths of terms, and of their factors, for each unit: ``(n,)`` in float64, from above."""

    def norms(values: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(values, dim=2, dtype=torch.float64)
        return found

    if isinstance(use, Dense):
        terms = factors = norms(group.join(use.value[:, None]).reshape(*group.rows.shape, -1))
    elif isinstance(use, Lookup):
        terms = factors = norms(group.join(use.g))
    else:
        a, g = norms(use.inputs(group, torch.float64)), norms(use.outputs(group, torch.float64))
        terms, factors = a * g, a + g
    spread, sizes = (each.view(len(group.units), -1).sum(1) * (1 + _FEW) for each in (terms, factors))
    return spread, sizes


def _missed(form: Format, terms: int) -> float:
    """Return by how much of its spread a sum of a unit's terms, each times its factor, may be off."""
    return (form.omega + (1 + 2.0**-6) * form.gamma(form.parts * terms)) * (1 + _FEW)


def _written_out(a: Tensor, gs: Sequence[Tensor], form: Format) -> tuple[Tensor, float, float, float]:
    """Return the squared norm, by what share of the spread the norm may be off, and the rounding of its lengths."""
    squares = list[Tensor]()
    positions, width = a.shape[1:]
    parts = -(-positions // DEPTH)
    for g in gs:
        pairs = zip(torch.split(g, DEPTH, 1), torch.split(a, DEPTH, 1), strict=True)  # type: ignore[no-untyped-call]
        total = functools.reduce(torch.add, (arithmetic.product(part.mT, into, form) for part, into in pairs))
        # Short sums, combined in float64: one long sum of squares would drift.
        norms = torch.linalg.vector_norm(torch.linalg.vector_norm(total, dim=2), dim=1, dtype=torch.float64)
        squares.append(norms.square_())
    up, floor = _rounding_of_lengths(width, form)
    rows = sum(g.shape[2] for g in gs)
    up *= 1 + rows * 2.0**-52  # of the sums in float64
    return functools.reduce(torch.add, squares), form.gamma(min(positions, DEPTH) + parts), up, floor * rows**0.5


def _weighted(matrix: Tensor, weights: Tensor, rows: slice) -> Iterator[tuple[Tensor, float]]:
    """Yield sums of absolute values times the weights of row and column, (n,), and how often each counts.

    The matrix is (n, rows, T - first row), weights are (n, sets, T).
    """
    square, columns = matrix.shape[1], weights[:, :, rows.start :]
    # Rows first: a product with one column would be several times slower on a CPU.
    by_column = weights[:, :, rows] @ matrix.abs()
    for part, times in ((slice(square), 1.0), (slice(square, None), 2.0)):
        x, y = by_column[:, :, part].flatten(1), columns[:, :, part].flatten(1)
        if x.shape[1]:  # outside the diagonal block each pair counts twice
            yield (x[:, None] @ y[:, :, None]).view(-1), times


def _step(positions: int, device: torch.device) -> int:
    return positions if device.type == "cuda" and positions <= WHOLE else _block(positions)


def _units_at_once(
    outers: Sequence[Sequence[Product]], lookups: Sequence[Lookup], shape: torch.Size, batch: UnitRows
) -> int:
    """Return how many units fit into temporaries of bounded size (small on a CPU, where memory is the limit)."""
    each = max(group.rows.shape[1] for group in batch.groups)
    outer = each * sum(use.g.shape[1] for use in outers[0])
    lookup = each * sum(use.g.shape[1] for use in lookups)
    elements = lookup * (outer + shape[-1] + (lookup if batch.fixed else 0)) if lookup else 0
    if outer:
        groups = outers[0][0].groups
        out, into = _matrix(shape, groups)
        gram = _prefers_gram(outer, out * len(outers), into)
        elements += groups * (3 * outer * _step(outer, batch.real.device) if gram else 2 * out * into)
        elements += sum(each * use.g.shape[1] * groups * into for use in outers[0] if not hasattr(use, "a"))
    return max(1, chunk_of(batch.real.device) // max(1, elements))


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in torch.split(tensor, DEPTH, 2)]  # type: ignore[no-untyped-call]


def _added(pairs: Sequence[tuple[Tensor, Tensor]], form: Format) -> Tensor:
    total = arithmetic.product(*pairs[0], form)
    for x, y in pairs[1:]:
        total += arithmetic.product(x, y, form)
    return total
