"""Bounds on a unit's gradient norm, and on what a sum of gradients may miss, that include every rounding.

They follow only from what `arithmetic` assumes of a sum of products; docs/derivations.md has the proof, in the same
notation: positions t, lengths alpha (inputs) and beta (output gradients), spread S, and the missed amount kappa.
Nothing is charged beyond ``max_grad_norm``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_dpret.privacy.clipping import arithmetic
from lit_dpret.privacy.clipping.arithmetic import DEPTH, FORMATS, Format
from lit_dpret.privacy.clipping.contributions import (
    Contribution,
    Dense,
    Lookup,
    Outer,
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


_FACTS = ("estimate", "error", "moved", "sizes")


@dataclass
class Certified:
    """The certain facts about the gradients of some parameters: one value for each slot of a batch, in float64."""

    estimate: Tensor  # the squared norm as it was computed
    error: Tensor  # what to add to the estimate for an upper bound
    moved: Tensor  # upper bound on the squared norm by which norm and sum may also be off, over the factor
    sizes: Tensor  # upper bound on the sizes of terms, which bounds absolute errors
    least: float  # the absolute error of an operation, the largest of all formats in use
    # Numbers, or one for each group of parameters where several are `together`.
    relative: Any = 0.0  # the share of the estimate, and ...
    absolute: Any = 0.0  # ... the absolute amount, that the rounding of lengths may have lost
    pairs: Any = 0.0  # what is to be added to `sizes` where products were added up in pairs ...
    positions: Any = 0.0  # ... and for sums

    @classmethod
    def zeros(cls, units: int, device: torch.device, *, least: float = FORMATS["float32"].tiny) -> Certified:
        estimate, error, moved, sizes = torch.zeros(4, units, dtype=torch.float64, device=device)
        return cls(estimate, error, moved, sizes, least)

    @classmethod
    def together(cls, groups: Sequence[Certified]) -> Certified:
        """Return the facts about several groups of parameters, with values of (groups, slots)."""
        facts = [(each.relative, each.absolute, each.pairs, each.positions) for each in groups]
        numbers: Any = facts[0]
        if len(groups) > 1:
            numbers = torch.tensor(facts, dtype=torch.float64, device=groups[0].estimate.device).T[:, :, None]
        estimate, error, moved, sizes = (_stack([getattr(each, name) for each in groups]) for name in _FACTS)
        return cls(estimate, error, moved, sizes, groups[0].least, *numbers)

    def norms(self) -> Tensor:
        """Return an upper bound on the norm, plus what a sum may miss of factor times gradient, over the factor."""
        tiny = 4 * self.least * (self.sizes + self.pairs).square() + self.absolute
        # Scale both: with the error of a tied weight, whose estimate may be below zero, no part is negative.
        squares = (self.estimate + self.error) * (1 + self.relative) + tiny
        found: Tensor = squares.clamp(min=0).sqrt() + self.moved.sqrt()
        return found

    def tiny(self) -> Tensor:
        """Return what else a sum may miss of factor times gradient, whatever the factor is."""
        found = 4 * self.least * (self.sizes + self.positions)
        whole: Tensor = found.masked_fill(self.sizes > LARGE, math.inf)
        return whole

    def present(self, norms: Tensor) -> Tensor:
        """Return which units have a gradient: whose ``norms`` exceed what absolute errors alone can add up to.

        For a gradient of zero they add up to at most 2^-60 times the sizes: the amount by which lengths are enlarged
        (`_rounding_of_lengths`), times shares that are below one, and what small products may lose.
        """
        least: Tensor = 2.0**-58 * (self.sizes + self.pairs + self.positions) + 2 * self.absolute**0.5
        return norms > least

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


#: Inputs (n x folds, positions, in) of linear weights, and the output gradients (n x folds, positions, out) of each.
Layer = tuple[Tensor, Sequence[Tensor]]
#: Elements of Gram matrices at a time, which wait for those of other layers; small on a CPU, whose caches hold them.
_TOGETHER = {"cpu": 1 << 18}


class Waiting:
    """Linear weights that wait for others, so that one operation bounds the gradients of many.

    Args:
        recorded: The number of elements of inputs and output gradients, of which Gram matrices may take a small part.
    """

    def __init__(self, recorded: int) -> None:
        self._recorded = recorded
        self._layers: dict[tuple[object, ...], tuple[Bounds, int, list[Callable[[], Layer]]]] = {}

    def add(
        self, bounds: Bounds, layer: Callable[[], Layer], positions: int, matrix: tuple[int, int], *, more: int
    ) -> None:
        """Add a layer whose weights, above each other, are a ``matrix`` (out, in), with the sizes of `of_products`."""
        device, pairs = bounds.group.units.device, _prefers_gram(positions, *matrix)
        step = _step(positions, device) if pairs else positions
        key = bounds.form, id(bounds.group), positions, pairs, more
        _, _, layers = self._layers.setdefault(key, (bounds, more, []))
        layers.append(layer)
        # Two matrices for each layer, and once more while they are joined.
        elements = 4 * len(layers) * len(bounds.group.units) * positions * positions if pairs else 0
        room = _TOGETHER.get(device.type) or max(chunk_of(device), self._recorded // 16)
        if step < positions or elements >= room:
            del self._layers[key]
            bounds.of_products((layer() for layer in layers), more=more)

    def add_all(self) -> None:
        """Add what is certain about all layers that still wait."""
        for bounds, more, layers in self._layers.values():
            bounds.of_products((layer() for layer in layers), more=more)
        self._layers.clear()


def certified(
    parameters: Sequence[Sequence[Contribution]],
    shape: torch.Size,
    batch: UnitRows,
    form: Format,
    into: Certified,
    waiting: Waiting | None = None,
) -> None:
    """Add what is certain about the gradients of one parameter, or of linear weights with equal inputs (`by_input`).

    Linear weights may be left ``waiting`` instead; its `add_all` must then be called.
    """
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
        layer = functools.partial(_factors, outers, group, form.inputs)
        # How often a term is added to others, apart from those of its own kind: to a partial sum of each use, and then
        # to those of the other kind.
        more = len(parameters[0]) * group.rows.shape[1]
        positions = sum(use.g.shape[1] for use in outers[0]) * group.rows.shape[1]
        if waiting is not None and not lookups and all(isinstance(use, Outer) for use in outers[0]):
            matrix = sum(uses[0].g.shape[2] for uses in outers), shape[1]
            waiting.add(bounds, layer, positions, matrix, more=more)
            continue
        ids, looked_up = _joined_lookups(lookups, group, form.sums) or (None, None)
        tied = bool(outers[0]) and looked_up is not None
        if outers[0]:
            later = 0 if looked_up is None else looked_up.shape[1]
            factors = layer()
            bounds.of_products([factors], more=more + later, folds=outers[0][0].groups, tied=tied)
        if ids is not None and looked_up is not None:
            bounds.of_lookups(ids, looked_up, shape[0], more=more + positions, fixed=batch.fixed, tied=tied)
        if ids is not None and looked_up is not None and tied:
            bounds.of_cross_terms(factors[0], factors[1][0], ids, looked_up)


def _factors(outers: Sequence[Sequence[Product]], group: RowGroup, dtype: torch.dtype) -> Layer:
    inputs = _cat([use.inputs(group, dtype) for use in outers[0]])
    return inputs, [_cat([use.outputs(group, dtype) for use in uses]) for uses in outers]


@dataclass(frozen=True)
class Bounds:
    """Bounds on gradients of some units, which are added to what is certain about their other gradients."""

    group: RowGroup
    form: Format
    into: Certified

    def of_products(self, layers: Iterable[Layer], *, more: int = 1, folds: int = 1, tied: bool = False) -> None:
        """Bound sums of outer products.

        Values are of the format. The weights of a layer, whose inputs are equal, are bounded as the one weight that
        they are above each other. All layers have equally many positions, and it is faster to compare all pairs of
        positions for each of them or for none; where Gram matrices are not computed whole there is one layer. A
        ``tied`` squared norm is a part of a norm that may cancel.
        """
        form, into = self.form, self.into
        widths = list[tuple[int, list[int]]]()  # of inputs, and of the outputs of each weight
        of_inputs, of_outputs = list[tuple[Tensor, float]](), list[tuple[Tensor, float]]()
        grams, rows_of = list[tuple[Tensor, Tensor]](), list[Tensor]()
        for a, gs in layers:
            positions, width, outs = a.shape[1], a.shape[2], [g.shape[2] for g in gs]
            widths.append((width, outs))
            of_inputs.append((_raw_lengths(a, form), _rounding_of_lengths(width, form)[1]))
            of_outputs += [(_raw_lengths(g, form), _rounding_of_lengths(g.shape[2], form)[1]) for g in gs]
            pairs, step = _prefers_gram(positions, sum(outs), width), _step(positions, a.device)
            if not pairs:
                rows_of += _rows_of(a, gs, form)
            elif step >= positions:
                grams.append(_grams(a, gs, slice(positions), form))
        count, device = len(widths), a.device
        # As many more operations as the lengths of a layer's weights take to be added up.
        up, _ = _rounding_of_lengths(max(max(width, *outs) + len(outs) for width, outs in widths) + 8, form)
        floors = torch.tensor([floor for _, floor in (*of_inputs, *of_outputs)], dtype=form.sums, device=device)
        of_terms = torch.stack([found for found, _ in (*of_inputs, *of_outputs)]).add_(floors[:, None, None])
        # Not scaled up for rounding here, but where they are added.
        alpha, beta = of_terms[:count], of_terms[count:]
        if len(beta) > count:
            member = _member([len(outs) for _, outs in widths], of_terms)
            beta = (member @ beta.square_().flatten(1)).sqrt_().view(alpha.shape)
        spread = (alpha * beta).sum(2, dtype=torch.float64)  # (layers, n x folds)
        squared = spread.square()
        up_spread = up**2 * (1 + form.others(positions + 8))
        missed = _missed(form, positions + more)
        shares = self._shares(widths, positions, device)
        if pairs:
            self._add_layers(into.error, squared, up_spread**2, shares[3], folds=folds)
            alpha, beta = alpha.flatten(0, 1)[:, None], beta.flatten(0, 1)[:, None]
            up_pairs = up**2 * (1 + form.others(2 * positions + 16))  # of the weighted sums
            if grams:
                b_matrix, a_matrix = (each[0] if count == 1 else torch.cat(each) for each in zip(*grams, strict=True))
                grams.clear()
                self._add_pairs(b_matrix, a_matrix, alpha, beta, slice(positions), up_pairs, shares, folds)
            else:
                for start in range(0, positions, step):
                    rows = slice(start, start + step)
                    self._add_pairs(*_grams(a, gs, rows, form), alpha, beta, rows, up_pairs, shares, folds)
        else:
            square = torch.linalg.vector_norm(_cat(rows_of), dim=1, dtype=torch.float64).square_()
            self._add(into.estimate, square, folds=folds)
            share = _gamma_of([positions], form)
            for width, outs in widths:
                up_row, floor = _rounding_of_lengths(width, form)
                up_row *= 1 + sum(len(rows[0]) for rows in rows_of) * 2.0**-52  # of the sums in float64
                rounding = up_row, floor * sum(outs) ** 0.5
                if not tied:
                    into.note_lengths(form, rounding[0], rounding[1] * folds**0.5)
            if tied:
                self._add_as_square(square, squared[0], share * up_spread, *rounding)
            else:
                missed += share
        self._add_layers(into.moved, squared, (missed * up_spread) ** 2, folds=folds)
        self._add_layers(into.sizes, (alpha + beta).view(count, -1, positions).sum(2, dtype=torch.float64), up_spread,
                         shares[2], folds=folds)  # fmt: skip
        for width, outs in widths:
            into.note_terms(positions * folds, width + sum(outs), in_pairs=pairs or tied)

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

    def of_cross_terms(self, a: Tensor, g: Tensor, ids: Tensor, looked_up: Tensor) -> None:
        """Bound twice the product of the gradients of an embedding and of the linear layer that has its weight."""
        form = self.form
        off = form.gamma(looked_up.shape[2]) + 4 * form.unit + ids.shape[1] * g.shape[1] * 2.0**-52
        at_ids = g.to(form.sums).gather(2, ids[:, None, :].expand(-1, g.shape[1], -1))
        cross = (a.to(form.sums) @ looked_up.mT).mul_(at_ids).sum((1, 2), dtype=torch.float64)
        self._add(self.into.estimate, cross, 2.0)
        by_id = (lengths(a, form)[:, None] @ at_ids.abs_())[:, 0].mul_(lengths(looked_up, form))
        up = 1 + form.others(g.shape[1] + 64)
        self._add(self.into.error, by_id.sum(1, dtype=torch.float64), 2 * off * up)

    def of_written(self, uses: Sequence[Contribution], shape: torch.Size) -> None:
        """Bound gradients that are computed in full."""
        form, into, group = self.form, self.into, self.group
        computed, up, floor = norms_of_each(unit_gradients(uses, shape, group, form.sums), form)
        terms = sum((1 if isinstance(use, Dense) else use.g.shape[1]) * group.rows.shape[1] for use in uses)
        of_uses = zip(*(_spread_of(use, group) for use in uses), strict=True)
        spread, sizes = (functools.reduce(torch.add, each) for each in of_uses)
        missed = _missed(form, terms) + form.gamma(terms)
        width = max(1, shape.numel())
        group.add_squares_to(into.estimate, computed)
        into.note_lengths(form, up, floor)
        group.add_squares_to(into.moved, spread, missed**2)
        group.add_to(into.sizes, sizes, width**0.5)
        into.note_terms(terms, width, in_pairs=False)

    def _shares(self, widths: Sequence[tuple[int, list[int]]], positions: int, device: torch.device) -> Tensor:
        """Return the layers' shares, (4, layers).

        These are the relative errors of the Gram matrices of inputs and of output gradients, the root of all widths,
        and the product of both errors.
        """
        # The elementwise product is rounded too, and so is the float64 sum of T^2 of them and of all layers.
        more = 2 * self.form.unit + (positions**2 + len(widths)) * 2.0**-52
        found = []
        for width, outs in widths:
            gamma_a, gamma_g = _gamma_of([width], self.form) + more, _gamma_of(outs, self.form)
            found.append((gamma_a, gamma_g, (width + sum(outs)) ** 0.5, gamma_a * gamma_g * (1 + _FEW)))
        return torch.tensor(found, dtype=torch.float64, device=device).T

    def _add_pairs(
        self, b_matrix: Tensor, a_matrix: Tensor, alpha: Tensor, beta: Tensor, rows: slice, up: float, shares: Tensor,
        folds: int,
    ) -> None:  # fmt: skip
        """Add to the squared norm what these rows of the Gram matrices of all layers give, and its error."""
        into = self.into
        for matrix, weights, share in ((b_matrix, alpha, shares[0]), (a_matrix, beta, shares[1])):
            for weighted, times in _weighted(matrix, weights, rows):
                self._add_layers(into.error, weighted.view(len(share), -1), times * up, share, folds=folds)
        products = b_matrix.mul_(a_matrix)
        square = products[:, :, : products.shape[1]].sum((1, 2), dtype=torch.float64)
        if products.shape[1] < products.shape[2]:  # outside the diagonal block each pair counts twice
            square = products.sum((1, 2), dtype=torch.float64).mul_(2).sub_(square)
        self._add_layers(into.estimate, square.view(shares.shape[1], -1), folds=folds)

    def _add_layers(
        self, slots: Tensor, values: Tensor, scale: float = 1.0, shares: Tensor | None = None, *, folds: int = 1
    ) -> None:
        """Add the sum over layers of ``values``, (layers, n x folds), each times its layer's share if there are any."""
        if shares is None:
            whole = values[0] if len(values) == 1 else values.sum(0)
        else:
            whole = shares @ values.double()
        self._add(slots, whole, scale, folds=folds)

    def _add(self, slots: Tensor, values: Tensor, scale: float = 1.0, *, folds: int = 1) -> None:
        self.group.add_to(slots, values if folds == 1 else values.view(-1, folds).sum(1), scale)

    def _add_as_square(self, square: Tensor, spread: Tensor, share: float, up: float, floor: float) -> None:
        """Add to the error of squared norms what a norm may be off by, a share of the root of ``spread``."""
        above = (square.sqrt() + floor) * up + spread.sqrt() * share
        self._add(self.into.error, above.square() * (1 + _FEW) - square)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


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


def _rows_of(a: Tensor, gs: Sequence[Tensor], form: Format) -> list[Tensor]:
    """Return the norms of the rows of each weight's gradient, written out: (n, out)."""
    found = list[Tensor]()
    for g in gs:
        pairs = zip(torch.split(g, DEPTH, 1), torch.split(a, DEPTH, 1), strict=True)  # type: ignore[no-untyped-call]
        total = functools.reduce(torch.add, (arithmetic.product(part.mT, into, form) for part, into in pairs))
        # Short sums, combined in float64: one long sum of squares would drift.
        found.append(torch.linalg.vector_norm(total, dim=2))
    return found


def _grams(a: Tensor, gs: Sequence[Tensor], rows: slice, form: Format) -> tuple[Tensor, Tensor]:
    """Return these rows of the Gram matrices of output gradients and of inputs, from the first of them on."""
    start = rows.start or 0
    of_g, of_a = (
        _added([(part[:, rows], part[:, start:].mT) for part in _parts(tensors)], form) for tensors in (gs, [a])
    )
    return of_g, of_a


def _gamma_of(widths: Sequence[int], form: Format) -> float:
    """Return the relative error of a sum over these widths, `DEPTH` at a time."""
    return form.gamma(min(max(widths), DEPTH) + sum(-(-width // DEPTH) for width in widths))


def _member(counts: Sequence[int], like: Tensor) -> Tensor:
    """Return which of the weights, in the order of their layers, belong to each layer: (layers, weights)."""
    found, before, total = [], 0, sum(counts)
    for count in counts:
        found.append([0.0] * before + [1.0] * count + [0.0] * (total - before - count))
        before += count
    return torch.tensor(found, dtype=like.dtype, device=like.device)


def _weighted(matrix: Tensor, weights: Tensor, rows: slice) -> Iterator[tuple[Tensor, float]]:
    """Yield sums of absolute values times the weights of row and column, (n,), and how often each counts.

    The matrix is (n, rows, T - first row), weights are (n, sets, T).
    """
    square, columns = matrix.shape[1], weights[:, :, rows.start or 0 :]
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
