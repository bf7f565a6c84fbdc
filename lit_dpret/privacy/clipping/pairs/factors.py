"""Jacobians of embeddings in factored form, and their products for pair norms.

The inputs of a linear layer are the same for all coordinates of an embedding; its output gradients are not. Blocks and
inner products need no matrix (docs/derivations.md). Where positions are many and matrices small, the matrices are
computed in full. Counted operations decide, so the method depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_dpret.privacy.clipping.contributions import (
    Contribution,
    Convolution,
    Dense,
    Lookup,
    Outer,
    chunk_of,
    unit_gradients,
)
from lit_dpret.privacy.clipping.units import RowGroup

#: The cost of reading and writing one element of a temporary, in multiplications of a large product.
PASS = 100


@dataclass(frozen=True)
class Matrices:
    """A Jacobian computed in full: ``value`` is (rows, columns, parameters)."""

    value: Tensor

    @property
    def width(self) -> int:
        return self.value.shape[2]

    def rows(self, part: slice) -> Matrices:
        return Matrices(self.value[part])

    @property
    def held(self) -> tuple[int, int]:
        """Return the elements in memory for all columns together, and for each column alone."""
        return 0, self.value.numel()

    def parts(self, size: int) -> Iterator[Tensor]:
        """Yield the Jacobian, at most ``size`` parameters at a time."""
        yield from self.value.split(size, dim=2)  # type: ignore[no-untyped-call]

    def energy(self) -> Tensor:
        """Return the squared norm of a row's terms if they were orthogonal, ``(rows,)``."""
        return self.value.square().sum((1, 2), dtype=torch.float64)


@dataclass(frozen=True)
class Products:
    """A Jacobian stored as its factors, over positions."""

    # (rows, positions, in), the same for all columns; or token ids (rows, positions), which represent unit vectors of
    # length ``into``.
    inputs: Tensor
    outputs: Tensor  # the output gradients of each column, (rows, columns, positions, out)
    into: int  # the width of the inputs
    turned: bool = False  # whether the parameter is (in, out), as in an embedding, instead of (out, in)

    @property
    def width(self) -> int:
        return self.into * self.outputs.shape[3]

    def rows(self, part: slice) -> Products:
        return replace(self, inputs=self.inputs[part], outputs=self.outputs[part])

    @property
    def held(self) -> tuple[int, int]:
        """Return the elements in memory for all columns together, and for each column alone."""
        return self.inputs.numel(), self.outputs.numel()

    @property
    def looks_up(self) -> bool:
        return not self.inputs.is_floating_point()

    def parts(self, size: int) -> Iterator[Tensor]:
        """Yield the Jacobian, about ``size`` parameters at a time: some rows of the weight."""
        rows, columns, positions, _ = self.outputs.shape
        inputs = torch.nn.functional.one_hot(self.inputs, self.into) if self.looks_up else self.inputs
        inputs = inputs.to(self.outputs.dtype)
        for part in self.outputs.split(max(1, size // self.into), dim=3):  # type: ignore[no-untyped-call]
            stacked = part.transpose(2, 3).reshape(rows, -1, positions)
            yield (stacked @ inputs).view(rows, columns, -1)

    def energy(self) -> Tensor:
        """Return the squared norm of a row's terms if they were orthogonal, ``(rows,)``."""
        outputs = self.outputs.square().sum((1, 3), dtype=torch.float64)
        return (outputs if self.looks_up else outputs * self.inputs.double().square().sum(2)).sum(1)

    def likeness(self) -> Tensor:
        """Return the inner products of each row's inputs at two positions, (rows, positions, positions)."""
        if self.looks_up:
            return (self.inputs[:, :, None] == self.inputs[:, None, :]).to(self.outputs.dtype)
        return self.inputs @ self.inputs.mT


Factors = Matrices | Products


def stacked(
    columns: Sequence[Sequence[Contribution]], shape: torch.Size, rows: int, dtype: torch.dtype
) -> list[Factors]:
    """Return one parameter's Jacobian from each column's gradient contributions (empty sequence: none)."""
    first = next(uses for uses in columns if uses)
    device = (first[0].value if isinstance(first[0], Dense) else first[0].g).device
    whole = RowGroup.build(list(range(rows)), [[row] for row in range(rows)], device)
    if all([type(use) for use in uses] == [type(use) for use in first] for uses in columns):
        found = _looked_up(columns, shape, dtype) or _products(columns, whole, dtype)
        if found is not None:
            return found
    # A column that does not reach this parameter has a gradient of zeros there.
    empty = torch.zeros(rows, *shape, dtype=dtype, device=device)
    values = [unit_gradients(uses, shape, whole, dtype) if uses else empty for uses in columns]
    return [Matrices(torch.stack(values, 1).flatten(2))]


def written_out(factors: Sequence[Factors]) -> Matrices:
    """Return one parameter's materialised Jacobian in the parameter's own order."""
    values = []
    for each in factors:
        value = torch.cat(list(each.parts(each.width)), 2)
        if isinstance(each, Products) and each.turned:
            value = value.reshape(*value.shape[:2], -1, each.into).transpose(2, 3).flatten(2)
        values.append(value)
    return Matrices(torch.cat(values, 2))


def merged(factors: Sequence[Factors]) -> list[Factors]:
    """Return the Jacobian with all materialised parameters merged into one."""
    written = [each.value for each in factors if isinstance(each, Matrices)]
    products: list[Factors] = [each for each in factors if isinstance(each, Products)]
    return [*products, Matrices(torch.cat(written, 2))] if written else products


def _looked_up(
    columns: Sequence[Sequence[Contribution]], shape: torch.Size, dtype: torch.dtype
) -> list[Factors] | None:
    lookups = [[use for use in uses if isinstance(use, Lookup)] for uses in columns]
    if any(len(kept) != len(uses) for kept, uses in zip(lookups, columns, strict=True)):
        return None
    outputs = torch.stack([torch.cat([use.g.to(dtype) for use in uses], 1) for uses in lookups], 1)
    return [Products(torch.cat([use.ids for use in lookups[0]], 1), outputs, shape[0], turned=True)]


def _products(columns: Sequence[Sequence[Contribution]], whole: RowGroup, dtype: torch.dtype) -> list[Factors] | None:
    """Return products, one for each group of channels; None if the columns share no input."""
    uses = [[use for use in each if isinstance(use, (Outer, Convolution))] for each in columns]
    groups = {use.groups for use in uses[0]}
    if any(len(kept) != len(each) for kept, each in zip(uses, columns, strict=True)) or len(groups) != 1:
        return None
    turned = [_is_turned(calls) for calls in zip(*uses, strict=True)]
    if None in turned or len(set(turned)) > 1:
        return None
    inputs = torch.cat([use.outputs(whole, dtype) if turned[0] else use.inputs(whole, dtype) for use in uses[0]], 1)
    outputs = torch.stack(
        [
            torch.cat([use.inputs(whole, dtype) if turned[0] else use.outputs(whole, dtype) for use in each], 1)
            for each in uses
        ],
        1,
    )
    step = groups.pop()
    return [
        Products(inputs[group::step], outputs[group::step], inputs.shape[2], turned=bool(turned[0]))
        for group in range(step)
    ]


def _is_turned(calls: Sequence[Outer | Convolution]) -> bool | None:
    """Return whether all columns share the second factor, as in a transposed linear layer; None: neither factor."""
    first = calls[0]
    if isinstance(first, Convolution):
        return False
    rest = [use for use in calls[1:] if isinstance(use, Outer)]
    if all(_same(first.a, use.a) for use in rest):
        return False
    return True if all(_same(first.g, use.g) for use in rest) else None


def _same(one: Tensor, other: Tensor) -> bool:
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape:
        return True
    # NaN equals nothing, including itself, and a broken row must not look like another input.
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def gram_blocks(factors: Factors) -> Tensor:
    """Return the blocks K of all rows, (rows, columns, columns)."""
    if isinstance(factors, Products):
        columns, positions, out = factors.outputs.shape[1:]
        gram = positions * (positions * factors.into + columns * out * (positions + columns))
        # The cheaper order of multiplication; both give the same block.
        if factors.looks_up or gram <= columns * factors.width * (positions + columns):
            turned = factors.likeness()[:, None] @ factors.outputs
            return turned.flatten(2) @ factors.outputs.flatten(2).mT
        source = factors.outputs
    else:
        source = factors.value
    rows, columns = source.shape[:2]
    total = torch.zeros(rows, columns, columns, dtype=source.dtype, device=source.device)
    for part in factors.parts(max(1, chunk_of(source.device) // (rows * columns))):
        total.baddbmm_(part, part.mT)
    return total


def cheapest(costs: dict[str, float]) -> str:
    """Return the name with the least cost."""
    return min(costs, key=costs.__getitem__)


def alike(query: Sequence[Factors], passage: Sequence[Factors]) -> bool:
    """Return whether two Jacobians of one parameter have the same form."""
    return [_form(each) for each in query] == [_form(each) for each in passage]


def _form(factors: Factors) -> tuple[object, ...]:
    if isinstance(factors, Products):
        return factors.width, factors.into, factors.turned, factors.looks_up
    return (factors.width,)


def inner_products(query: Factors, passage: Factors, e: Tensor, f: Tensor) -> Tensor:
    """Return for every pair the inner product of its query's and its passage's gradient, (queries, passages)."""
    pairs, columns = len(e) * len(f), e.shape[1]
    room = chunk_of(e.device)
    costs = {"matrices": 2 * columns**2 * (query.width + PASS), "streamed": query.width * (4 * columns + 2.5 * PASS)}
    if isinstance(query, Products) and isinstance(passage, Products):
        t, s, out = query.outputs.shape[2], passage.outputs.shape[2], query.outputs.shape[3]
        compare = 0 if query.looks_up else 2 * t * s * query.into
        costs["gram"] = compare + 4 * t * s * out + 2 * (t + s) * out * columns + PASS * (t * s + (t + s) * out)
        if query.looks_up or cheapest(costs) == "gram":
            step = max(1, room // (len(f) * (t * s + (t + s) * out)))
            return torch.cat([_gram(query.rows(part), e[part], passage, f) for part in _slices(len(e), step)])
    if cheapest(costs) == "matrices":
        step = max(1, 4 * room // (len(f) * columns**2))
        return torch.cat([_between_matrices(query.rows(part), e[part], passage, f) for part in _slices(len(e), step)])
    total = e.new_zeros(len(e), len(f))
    for x, y in zip(*(each.parts(max(1, room // pairs)) for each in (query, passage)), strict=True):
        total += (torch.matmul(f, x) * torch.matmul(e, y).transpose(0, 1)).sum(2)
    return total


def _between_matrices(query: Factors, e: Tensor, passage: Factors, f: Tensor) -> Tensor:
    """Multiply all columns of all queries by those of all passages, then contract with the embeddings."""
    size = max(1, chunk_of(e.device) // (e.numel() + f.numel()))
    products = e.new_zeros(e.numel(), f.numel())
    for x, y in zip(query.parts(size), passage.parts(size), strict=True):
        products.addmm_(x.flatten(0, 1), y.flatten(0, 1).T)
    by_pair = products.view(*e.shape, *f.shape)
    return (by_pair.mul_(f.T[None, :, :, None]).sum(1) * e[:, None]).sum(2)


def _gram(query: Products, e: Tensor, passage: Products, f: Tensor) -> Tensor:
    """Multiply, pair by pair, products of inputs by those of output gradients, over all pairs of positions."""
    i, j, t, s = len(e), len(f), query.outputs.shape[2], passage.outputs.shape[2]
    u = (f @ query.outputs.flatten(2)).view(i, j, t, -1)
    v = (e @ passage.outputs.flatten(2)).view(j, i, s, -1).transpose(0, 1)
    if query.looks_up:
        alike = (query.inputs[:, None, :, None] == passage.inputs[None, :, None, :]).to(u.dtype)
    else:
        alike = (query.inputs.flatten(0, 1) @ passage.inputs.flatten(0, 1).T).view(i, t, j, s).transpose(1, 2)
    return ((u @ v.mT) * alike).sum((2, 3))


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
