"""Norms and weighted sums of per-row gradients, which are materialised only where that is cheap.

A use of a parameter contributes an ``Outer`` product, a ``Lookup``, a ``Convolution`` or a ``Dense`` tensor; several
uses add up. Where a weight has fewer elements than the input and output gradient of a unit together, each unit's
gradient is computed in full (``Written``), and that of a unit's only ``Dense`` use is taken as it is.
docs/derivations.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.privacy.clipping.units import RowGroup, UnitRows

#: Elements of patches at a time; small on a CPU, where memory is the limit.
CHUNK = {"cpu": 1 << 22}
CHUNK_ELSEWHERE = 1 << 25


def chunk_of(device: torch.device) -> int:
    """Return the maximum number of elements of a temporary."""
    return CHUNK.get(device.type, CHUNK_ELSEWHERE)


@dataclass(frozen=True)
class Geometry:
    """Settings of a convolution under the names of nn.Conv, with the padding in the form that ``F.pad`` takes."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    padding_mode: str
    groups: int

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Geometry:
        """Read the settings of a module, with ``padding="same"`` resolved."""
        return cls(
            kernel=tuple(module.kernel_size),
            stride=tuple(module.stride),
            dilation=tuple(module.dilation),
            padding=tuple(module._reversed_padding_repeated_twice),
            padding_mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
            groups=module.groups,
        )

    def patches(self, x: Tensor) -> Tensor:
        """Unfold (rows, channels, *space) into (rows, positions, groups, channels of a group x kernel)."""
        # Padded explicitly, because a patch at the margin contains what the padding mode puts there.
        x = F.pad(x, self.padding, self.padding_mode)
        for axis, (kernel, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        x = x.reshape(len(x), self.groups, -1, *x.shape[2:])
        last = 3 + len(self.kernel)
        x = x.permute(0, *range(3, last), 1, 2, *range(last, x.dim()))
        return x.flatten(last - 1).flatten(1, last - 3)


@dataclass(frozen=True)
class Convolution:
    """A convolution: ``x`` is (rows, folds, channels, *space), ``g`` is (rows, folds x positions, out).

    The gradient is (out, channels of a group, *kernel). ``inputs`` and ``outputs`` of some units are (units x groups,
    positions, ...): each group of channels has its own matrix.
    """

    x: Tensor
    g: Tensor
    geometry: Geometry

    @property
    def groups(self) -> int:
        """The number of matrices in a unit's gradient."""
        return self.geometry.groups

    def inputs(self, group: RowGroup, dtype: torch.dtype) -> Tensor:
        x = group.join(self.x).to(dtype)
        return self._by_group(self.geometry.patches(x.flatten(0, 1)).reshape(len(x), -1, self.groups, self._width))

    def outputs(self, group: RowGroup, dtype: torch.dtype) -> Tensor:
        g = group.join(self.g).to(dtype)
        return self._by_group(g.reshape(*g.shape[:2], self.groups, -1))

    def add_to(self, total: Tensor, coefficients: Tensor, rows: Tensor | None) -> None:
        """Add the gradients of ``rows``, each times its coefficient, to ``total``; None means all rows."""
        rows = torch.arange(len(coefficients), device=total.device) if rows is None else rows
        if not len(rows):  # patches cannot be made of no rows
            return
        each = self.g.shape[1] * self.groups * self._width
        matrices = total.view(self.groups, -1, self._width)
        for part in torch.split(rows, max(1, chunk_of(total.device) // max(1, each))):  # type: ignore[no-untyped-call]
            a = self.geometry.patches(self.x[part].to(total.dtype).flatten(0, 1)).flatten(0, 1)
            g = self.g[part].to(total.dtype) * coefficients[part].to(total.dtype)[:, None, None]
            g = g.reshape(len(a), self.groups, -1)
            matrices.baddbmm_(g.permute(1, 2, 0), a.transpose(0, 1))

    @property
    def _width(self) -> int:
        return self.x.shape[2] // self.groups * int(torch.Size(self.geometry.kernel).numel())

    def _by_group(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).flatten(0, 1)


#: A Gram matrix costs passes over it in addition to its multiplications, so it must save this factor in those.
GRAM_ADVANTAGE = 1.2


@dataclass(frozen=True)
class Outer:
    """An outer product: ``a`` is (rows, positions, in), ``g`` is (rows, positions, out); the gradient is (out, in)."""

    a: Tensor
    g: Tensor
    groups: ClassVar[int] = 1

    def inputs(self, group: RowGroup, dtype: torch.dtype) -> Tensor:
        return group.join(self.a).to(dtype)

    def outputs(self, group: RowGroup, dtype: torch.dtype) -> Tensor:
        return group.join(self.g).to(dtype)


@dataclass(frozen=True)
class Lookup:
    """A lookup: ``ids`` is (rows, positions), ``g`` is (rows, positions, dim); the gradient is (entries, dim)."""

    ids: Tensor
    g: Tensor


@dataclass(frozen=True)
class Dense:
    """Full gradients: ``value`` is (rows, *shape of the parameter)."""

    value: Tensor  # the gradients
    # In a check of the recording: for each sum in ``value``, the sum of absolute values, in the same shape.
    spread: Tensor | None = None
    terms: int = 1  # the number of terms in each of these sums


Product = Outer | Convolution
Contribution = Product | Lookup | Dense


def changed(use: Contribution, change: Callable[[Tensor], Tensor]) -> Contribution:
    """Return the contribution with changed factors."""
    if isinstance(use, Outer):
        return Outer(change(use.a), change(use.g))
    if isinstance(use, Convolution):
        return Convolution(change(use.x), change(use.g), use.geometry)
    return Lookup(use.ids, change(use.g)) if isinstance(use, Lookup) else Dense(change(use.value))


def joined(uses: Sequence[Contribution], join: Callable[[list[Tensor]], Tensor]) -> Contribution:
    """Return one contribution whose factors are those of several of one kind, joined."""
    if isinstance(uses[0], Dense):
        return Dense(join([use.value for use in uses if isinstance(use, Dense)]))
    names = [each.name for each in fields(uses[0]) if isinstance(getattr(uses[0], each.name), Tensor)]
    factors: dict[str, Any] = {name: join([getattr(use, name) for use in uses]) for name in names}
    return replace(uses[0], **factors)


def silenced(use: Contribution, kept: Tensor) -> Contribution:
    """Return the contribution with all rows except ``kept``, ``(rows,)``, set to zero, NaNs included."""

    def rows(tensor: Tensor) -> Tensor:
        return torch.where(kept.view(-1, *[1] * (tensor.dim() - 1)), tensor, torch.zeros_like(tensor))

    return changed(use, rows)


def rounding_of(uses: Sequence[Contribution], coefficients: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    r"""Bound the rounding error of the weighted sum of ``uses``, in roundoffs, for any order of summation.

    A sum of K products in floating point is off by at most K roundoffs times the sum of their absolute values
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    found = torch.zeros((), dtype=torch.float64, device=coefficients.device)
    whole: Contribution
    for use in uses:
        if isinstance(use, Dense):
            whole, positions = Dense(use.value.abs() if use.spread is None else use.spread), use.terms
        else:
            whole, positions = changed(use, torch.abs), use.g.shape[1]
        found += (
            len(coefficients)
            * positions
            * add_weighted([whole], coefficients.abs(), None, shape, dtype, rows=not_zero(coefficients[None])[0]).norm()
        )
    return found


def by_input(contributions: Mapping[str, Sequence[Contribution]]) -> list[list[str]]:
    """Group the names of parameters whose gradients are outer products with the same inputs."""
    found: dict[object, list[str]] = {}
    for name, uses in contributions.items():
        outers = [use for use in uses if isinstance(use, Outer)]
        inputs = tuple((use.a.data_ptr(), use.a.shape, use.a.stride()) for use in outers)
        known = len(outers) == len(uses) and all(place for place, *_ in inputs)
        found.setdefault(inputs if known else name, []).append(name)
    return list(found.values())


def not_zero(values: Tensor) -> list[Tensor | None]:
    """Return for each row of ``values`` the nonzero indices, in order; None if no value is zero."""
    counts = values.count_nonzero(dim=1).tolist()
    places = (values == 0).int().argsort(dim=1, stable=True)
    return [None if count == values.shape[1] else row[:count] for row, count in zip(places, counts, strict=True)]


class Scaled:
    """The inputs that were scaled last, for weights that share them; for the sums of one batch."""

    def __init__(self) -> None:
        self._key: object = None
        self._source: Tensor | None = None  # kept, so that no other tensor takes its memory
        self._parts: list[Tensor] = []

    def of(self, inputs: Tensor, coefficients: Tensor, scale: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
        """Return what ``scale`` does, which scales ``inputs`` by ``coefficients``."""
        places = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (inputs, coefficients)]
        if places != self._key or not all(place for place, *_ in places):
            self._key, self._source, self._parts = places, inputs, list(scale())
        return self._parts


def add_weighted(
    uses: Sequence[Contribution],
    coefficients: Tensor,
    total: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    rows: Tensor | None,
    fixed: bool = False,
    scaled: Scaled | None = None,
) -> Tensor:
    """Return ``total`` plus the weighted gradients of all rows; in place if there is a total.

    A row with coefficient zero is left out, not multiplied: its gradient may be NaN. So ``rows`` are those of
    `not_zero`. Where shapes are ``fixed``, such a row's gradient is set to zero instead.
    """
    if fixed:
        uses, rows = [silenced(use, coefficients != 0) for use in uses], None
    weights = (coefficients if rows is None else coefficients[rows]).to(dtype)
    # Outer products first: their matrix product creates the total, and the others add to it.
    for use in sorted(uses, key=lambda use: not isinstance(use, Outer)):
        if isinstance(use, Outer):
            a, g = _kept(use.a, rows), _kept(use.g, rows)
            if a.shape[2] <= g.shape[2]:  # scale the smaller of the two
                scale = partial(_times, a, weights)
                (a,) = scale() if scaled is None else scaled.of(use.a, coefficients, scale)
            else:
                a, g = a.to(dtype), g.to(dtype) * weights[:, None, None]
            a, g = a.flatten(0, 1), g.flatten(0, 1)
            if total is None and g.dtype == dtype:
                total = g.T @ a
                continue
            total = torch.zeros(shape, dtype=dtype, device=a.device) if total is None else total
            for start in range(0, len(total), 8192):  # in parts: a cast copy of all logit gradients is large
                total[start : start + 8192].addmm_(g[:, start : start + 8192].to(dtype).T, a)
            continue
        if isinstance(use, Dense):
            found = torch.tensordot(weights, _kept(use.value, rows).to(dtype), dims=1)
            total = found if total is None else total.add_(found)
            continue
        total = torch.zeros(shape, dtype=dtype, device=coefficients.device) if total is None else total
        if isinstance(use, Convolution):
            use.add_to(total, coefficients, rows)
        else:
            g = _kept(use.g, rows).to(dtype) * weights[:, None, None]
            total.index_add_(0, _kept(use.ids, rows).flatten(), g.flatten(0, 1))
    return torch.zeros(shape, dtype=dtype, device=coefficients.device) if total is None else total


def _times(tensor: Tensor, weights: Tensor) -> tuple[Tensor]:
    return (tensor.to(weights.dtype) * weights[:, None, None],)


def unit_gradients(
    uses: Sequence[Contribution], shape: torch.Size, group: RowGroup, dtype: torch.dtype, into: Tensor | None = None
) -> Tensor:
    """Return the materialised gradients of a group's units, (n, *shape), written ``into`` a tensor if there is one."""
    n = len(group.units)
    if into is not None and not all(isinstance(use, Outer) for use in uses):
        return into.copy_(unit_gradients(uses, shape, group, dtype))
    if isinstance(uses[0], Outer):
        total = torch.bmm(uses[0].outputs(group, dtype).mT, uses[0].inputs(group, dtype), out=into)
        uses = uses[1:]
    elif isinstance(uses[0], Dense):
        total, uses = group.join(uses[0].value[:, None]).to(dtype).sum(1), uses[1:]
    else:
        total = torch.zeros(n, *shape, dtype=dtype, device=group.units.device)
    for use in uses:
        if isinstance(use, Dense):
            total += group.join(use.value[:, None]).to(dtype).sum(1)
        elif isinstance(use, Product):
            matrices = total.view(n * use.groups, *_matrix(shape, use.groups))
            matrices.baddbmm_(use.outputs(group, dtype).mT, use.inputs(group, dtype))
        else:
            ids, g = group.join(use.ids), group.join(use.g).to(dtype)
            unit = torch.arange(n, device=ids.device)[:, None].expand_as(ids)
            # A token that occurs twice in a text adds twice.
            total.index_put_((unit, ids), g, accumulate=True)
    return total


def _kept(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def above_each_other(tables: Sequence[tuple[Sequence[Lookup], torch.Size]]) -> tuple[list[Lookup], torch.Size]:
    """Return the lookups in tables of one width as those in one table, which holds them one after the other."""
    found, entries = list[Lookup](), 0
    for uses, shape in tables:
        found += [Lookup(use.ids + entries if entries else use.ids, use.g) for use in uses]
        entries += shape[0]
    return found, torch.Size((entries, tables[0][1][1]))


def _joined_lookups(lookups: list[Lookup], group: RowGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    if not lookups:
        return None
    ids = [group.join(use.ids) for use in lookups]
    return _cat(ids), _cat([group.join(use.g).to(dtype) for use in lookups])


def _matrix(shape: torch.Size, groups: int) -> tuple[int, int]:
    """Return (out, in) of each matrix in a weight of this shape."""
    return shape[0] // groups, shape.numel() // shape[0]


def _block(positions: int) -> int:
    """Return how many positions to take at a time in a Gram matrix, of which only one triangle is computed."""
    # Quarters: the triangle costs 5/8 of the square, in few calls.
    return min(positions, max(64, -(-positions // 4)))


def norm_multiplications(positions: int, out: int, into: int, *, size: int | None, half: bool = True) -> int:
    """Return the multiplications for one unit's squared norm of a linear weight, beyond those of its sum.

    ``size`` is the number of bytes of a value of inputs and output gradients. A gradient that is small enough to
    compute in full (`are_small`) gives both norm and sum; with None, no gradient counts as small. ``half``: only a
    triangle of a Gram matrix is computed.
    """
    if size is not None and 4 * out * into <= ROOM * size * positions * (out + into):
        return 0
    if _prefers_gram(positions, out, into):
        return positions * (positions + (_block(positions) if half else positions)) // 2 * (into + out)
    return positions * into * out


def _prefers_gram(positions: int, out: int, into: int) -> bool:
    triangle = positions * (positions + _block(positions)) // 2
    return GRAM_ADVANTAGE * triangle * (into + out) < positions * into * out


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)


#: How much larger than inputs and output gradients together the full gradients may be.
ROOM = 1.25


@dataclass(frozen=True)
class Written:
    """The gradients of a group's units, of several parameters side by side: ``value`` is (n, all their elements)."""

    group: RowGroup
    value: Tensor
    shapes: Mapping[str, torch.Size]  # of the parameters, in the order of their elements
    fixed: bool = False  # whether the batch has a fixed shape
    # Whether the parameters are so small that their sums may be held twice, to be added by one operation.
    together: bool = False

    def apart(self) -> Iterator[tuple[str, Written]]:
        """Yield the gradients of each parameter, as a view."""
        place = 0
        for name, shape in self.shapes.items():
            yield name, Written(self.group, self.value[:, place : place + shape.numel()], {name: shape}, self.fixed)
            place += shape.numel()

    def add_to(self, sums: dict[str, Tensor], factors: Tensor, *, all_count: bool) -> None:
        """Add the gradients, each times its unit's factor, to the sums by name; zero factors are skipped."""
        weights = self.group.of(factors).to(self.value.dtype)
        value = self.value
        if self.fixed:
            value = torch.where((weights != 0)[:, None], value, torch.zeros_like(value))
        elif not all_count:
            keep = weights.nonzero().flatten()
            value, weights = value[keep], weights[keep]
        block = Written(self.group, value, self.shapes, self.fixed)
        for one in [block] if self.together else [one for _, one in block.apart()]:
            one._add(sums, weights)

    def _add(self, sums: dict[str, Tensor], weights: Tensor) -> None:
        value = self.value
        if not self.fixed and len(self.shapes) == 1 and sums.keys() >= self.shapes.keys():  # XLA has no addmv
            sums[next(iter(self.shapes))].view(-1).addmv_(value.T, weights)
            return
        parts = torch.split(  # type: ignore[no-untyped-call]
            torch.tensordot(weights, value, dims=1), [shape.numel() for shape in self.shapes.values()]
        )
        found = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        old = [name for name in found if name in sums]
        new = [name for name in found if name not in sums]
        if old:
            torch._foreach_add_([sums[name] for name in old], [found[name] for name in old])
        if new:  # copied, so that no sum shares its memory with others
            sums.update((name, torch.empty_like(found[name])) for name in new)
            torch._foreach_copy_([sums[name] for name in new], [found[name] for name in new])


def are_small(uses: Sequence[Sequence[Contribution]], shapes: Sequence[torch.Size], batch: UnitRows) -> bool:
    """Return whether gradients of parameters with shared inputs need no more memory than their factors."""
    room = 0
    for position, use in ((p, use) for p, each in enumerate(uses) for use in each):
        if not isinstance(use, Product):
            return False
        room += _size(use.g)
        if position == 0:
            room += _size(use.x if isinstance(use, Convolution) else use.a)
    units = sum(len(group.units) for group in batch.groups)
    # Full gradients are read once, instead of multiplied twice, for the norm and for the sum.
    return units * 4 * sum(shape.numel() for shape in shapes) <= ROOM * room


def write_out(
    contributions: dict[str, list[Contribution]], shapes: Mapping[str, torch.Size], batch: UnitRows, dtype: torch.dtype
) -> Iterator[Written]:
    """Yield each unit's gradients, in ``dtype``, in blocks of bounded size; the contributions are freed one by one."""
    room = chunk_of(batch.real.device)
    for names in _blocks(shapes, room // max(1, sum(len(group.units) for group in batch.groups))):
        total, place = sum(shapes[name].numel() for name in names), 0
        blocks = [(each, torch.empty(len(each.units), total, dtype=dtype, device=batch.real.device))
                  for each in batch.groups]  # fmt: skip
        for name in names:
            uses, shape = contributions.pop(name), shapes[name]
            patches = sum(
                use.g.shape[1] * use.x.shape[2] * int(torch.Size(use.geometry.kernel).numel())
                for use in uses
                if isinstance(use, Convolution)
            )
            for group, value in blocks:
                size = max(1, room // (group.rows.shape[1] * patches)) if patches else len(value)
                pieces = torch.split(value[:, place : place + shape.numel()], size)  # type: ignore[no-untyped-call]
                for part, into in zip(group.split(size), pieces, strict=True):
                    unit_gradients(uses, shape, part, dtype, into.view(len(into), *shape))
            place += shape.numel()
        for group, value in blocks:
            yield Written(group, value, {name: shapes[name] for name in names}, batch.fixed)


def join_dense(
    contributions: dict[str, list[Dense]], shapes: Mapping[str, torch.Size], batch: UnitRows, dtype: torch.dtype
) -> Iterator[Written]:
    """Yield the same for parameters with one dense use each, where every unit has one row."""
    for names in _blocks(shapes, chunk_of(batch.real.device) // batch.rows):
        uses = [use for name in names for use in contributions.pop(name)]
        value = _cat([use.value.reshape(batch.rows, -1) for use in uses]).to(dtype)
        for group in batch.groups:
            joined = group.join(value[:, None])[:, 0]
            yield Written(group, joined, {name: shapes[name] for name in names}, batch.fixed, together=True)


def _blocks(shapes: Mapping[str, torch.Size], room: int) -> Iterator[list[str]]:
    """Yield the names of parameters that have at most ``room`` elements together, or of a single one."""
    names, left = list[str](), room
    for name, shape in shapes.items():
        if names and shape.numel() > left:
            yield names
            names, left = [], room
        names.append(name)
        left -= shape.numel()
    if names:
        yield names


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
