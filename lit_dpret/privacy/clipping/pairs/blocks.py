"""Norms of all pairs from one Jacobian per record: d cotangents instead of n.

For two towers, the blocks K = J J^T of each side determine the norms. For shared parameters they give a bound
(``KBlocks``), and together with inner products of both sides the norm (``JacobianNorms``). A linear head has a closed
form (``LinearHead``). docs/derivations.md derives all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping.base import accumulator_dtype
from lit_dpret.privacy.clipping.contributions import Outer, chunk_of
from lit_dpret.privacy.clipping.ghost import GhostClipping
from lit_dpret.privacy.clipping.pairs.batch import TOLERANCE, PairBatch, Side, embed_all, refuse_other_function
from lit_dpret.privacy.clipping.pairs.factors import (
    Factors,
    alike,
    gram_blocks,
    inner_products,
    merged,
    stacked,
    written_out,
)
from lit_dpret.privacy.clipping.pairs.norms import ROWS_AT_ONCE, PairNorms

#: Elements of Jacobian factors to hold for one side: where all records of both sides are needed together, and where a
#: few are enough.
HELD, HELD_FOR_BLOCKS = 1 << 25, 1 << 22
#: Rounding errors, in units of the dtype's roundoff times a row's squared terms, that are added to squared norms.
SLACK = 8


#: Factors by the name of the parameter.
Jacobian = dict[str, list[Factors]]


@dataclass(frozen=True)
class Reach:
    """The parameters that a side's embeddings depend on, and the memory per row."""

    names: frozenset[str]  # the parameters
    inputs: int  # elements to hold for a row, whatever the number of columns
    outputs: int  # elements to hold for a row and a column


class FromJacobians(PairNorms):
    """Base of the strategies that use the Jacobian of each record."""

    held = HELD

    def __init__(self, module: nn.Module, *, shared: bool = True, rows_at_once: int | None = None) -> None:
        super().__init__(module)
        self.shared = shared
        self.rows_at_once = rows_at_once
        self._engine = GhostClipping(module, max_grad_norm=1.0)  # reads Jacobians only: the bound is not used

    def _reach(self, side: Side) -> Reach:
        """Run one row through the encoder, for one column."""
        found = self._factors(side, slice(0, 1), None)
        held = [each.held for factors in found.values() for each in factors]
        return Reach(frozenset(found), sum(inputs for inputs, _ in held), sum(outputs for _, outputs in held))

    def _reaches(self, batch: PairBatch) -> tuple[Reach, Reach]:
        queries, passages = (self._reach(side) for side in batch.sides)
        common = sorted(queries.names & passages.names)
        if common and not self.shared:
            raise UnsupportedModelError(
                f"Parameter {common[0]} is used by queries and passages, which were declared to share none, so a "
                "pair's gradient has cross terms that would be missed. Return shared=True from pair_shape() of the "
                "module."
            )
        if not queries.names and not passages.names:
            raise UnsupportedModelError("The embeddings depend on no trainable parameter: nothing to clip.", trap="T13")
        return queries, passages

    def _size(self, side: Side, reach: Reach, columns: int) -> int:
        return self.rows_at_once or max(1, min(side.count, self.held // max(1, reach.inputs + reach.outputs * columns)))

    def _factors(self, side: Side, rows: slice, before: Tensor | None, names: frozenset[str] | None = None) -> Jacobian:
        """Return the Jacobian of some rows by parameter; without ``before``, that of the sum of their coordinates."""
        count = len(range(side.count)[rows])

        def outputs() -> Tensor:
            embedded = side.embedded(rows)
            if before is None:
                return embedded.sum(1, keepdim=True)
            refuse_other_function(before[rows], embedded)
            return embedded

        _, columns = self._engine.columns(outputs, count)
        found: Jacobian = {}
        with torch.no_grad():
            for name, parameter in self._engine.parameters.items():
                uses = [column.pop(name, []) for column in columns]  # freed as they are stacked
                if not any(uses):
                    continue
                if names is not None and name not in names:
                    raise UnsupportedModelError(
                        f"Parameter {name} is used for some rows and not for others, so what queries and passages "
                        "share is not known. Choose privacy.norms=pair_ghost."
                    )
                found[name] = stacked(uses, parameter.shape, count, accumulator_dtype(parameter))
        return found


class KBlocks(FromJacobians):
    r"""Norms from the blocks K: ``norms=k_blocks``, exact for two towers, an upper bound with shared parameters.

    About d ordinary steps, whatever n is. The bound is :math:`N_{ij}^2 = q_{ij} + q'_{ij} + (\sqrt{s_{ij}} +
    \sqrt{s'_{ij}})^2` with the parts q of one side's own parameters and s of shared ones.
    """

    held = HELD_FOR_BLOCKS

    def __init__(self, module: nn.Module, *, shared: bool = True, rows_at_once: int | None = None) -> None:
        super().__init__(module, shared=shared, rows_at_once=rows_at_once)
        self.exact = not shared

    def _table(self, batch: PairBatch) -> Tensor:
        reaches = self._reaches(batch)
        embeddings = embed_all(batch, rows_at_once=ROWS_AT_ONCE)
        common = reaches[0].names & reaches[1].names
        parts = []
        for side, reach, own, others in zip(batch.sides, reaches, embeddings, reversed(embeddings), strict=True):
            blocks = []
            for rows in side.blocks(self._size(side, reach, own.shape[1])):
                found = self._factors(side, rows, own, reach.names)
                with torch.no_grad():
                    blocks.append(
                        torch.stack([quadratic(each, others, len(own[rows])) for each in _split(found, common)])
                    )
            parts.append(torch.cat(blocks, 1))
        (own_queries, shared_queries), (own_passages, shared_passages) = parts
        # The triangle inequality on the shared parameters makes this a bound instead of the norm.
        both = shared_queries.sqrt() + shared_passages.T.sqrt()
        squares: Tensor = own_queries + own_passages.T + both.square()
        return squares.sqrt()


class JacobianNorms(FromJacobians):
    """Exact norms from Jacobians, also with shared parameters: ``norms=jacobian``."""

    def _table(self, batch: PairBatch) -> Tensor:
        reaches = self._reaches(batch)
        e, f = embed_all(batch, rows_at_once=ROWS_AT_ONCE)
        queries, passages = batch.sides
        common = reaches[0].names & reaches[1].names
        squares = torch.zeros(batch.n, batch.n, dtype=torch.float64, device=e.device)
        columns = list(passages.blocks(self._size(passages, reaches[1], e.shape[1])))
        held: Jacobian | None = None
        for i in queries.blocks(self._size(queries, reaches[0], e.shape[1])):
            of_queries = self._factors(queries, i, e, reaches[0].names)
            with torch.no_grad():
                squares[i] += quadratic(_joined(of_queries), f, len(e[i]))
            # Without shared parameters no inner product is needed, and passages are needed once.
            for j in columns if common or i.start == 0 else ():
                of_passages = held or self._factors(passages, j, f, reaches[1].names)
                held = of_passages if len(columns) == 1 else None
                with torch.no_grad():
                    if i.start == 0:
                        squares[:, j] += quadratic(_joined(of_passages), e, len(f[j])).T
                    for query, passage in _aligned(of_queries, of_passages):
                        squares[i, j] += 2 * inner_products(query, passage, e[i], f[j])
        # Rounding may go slightly below zero; `quadratic` has already added its slack.
        return squares.clamp(min=0).sqrt()


def _split(found: Jacobian, common: frozenset[str]) -> tuple[list[Factors], list[Factors]]:
    """Return the factors of parameters of one side only, and those of shared parameters."""
    own = {name: factors for name, factors in found.items() if name not in common}
    return _joined(own), _joined({name: found[name] for name in found if name in common})


def _joined(found: Jacobian) -> list[Factors]:
    return merged([each for factors in found.values() for each in factors])


def _aligned(queries: Jacobian, passages: Jacobian) -> list[tuple[Factors, Factors]]:
    """Return the factors of shared parameters, paired and in the same form."""
    pairs: tuple[list[Factors], list[Factors]] = [], []
    for name in [name for name in queries if name in passages]:
        both: list[Sequence[Factors]] = [queries[name], passages[name]]
        if not alike(*both):
            both = [[written_out(each)] for each in both]
        for kept, each in zip(pairs, both, strict=True):
            kept.extend(each)
    return list(zip(*map(merged, pairs), strict=True))


def quadratic(factors: Sequence[Factors], vectors: Tensor, rows: int) -> Tensor:
    """Return f_j' K_i f_j for the rows i of the factors and all vectors j, (rows, vectors) in float64.

    A share of the size of rounding errors is added: where a row's terms cancel, the result must not fall below the true
    value, since norms are divisors.
    """
    columns = vectors.shape[1]
    total = torch.zeros(rows, columns, columns, dtype=torch.float64, device=vectors.device)
    slack = torch.zeros(rows, dtype=torch.float64, device=vectors.device)
    for each in factors:
        block = gram_blocks(each)
        size = block.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64) + each.energy()
        slack += SLACK * torch.finfo(block.dtype).eps * size
        total += block
    vectors = vectors.double()
    step = max(1, chunk_of(vectors.device) // vectors.numel())
    parts = [((vectors @ part) * vectors).sum(2) for part in total.split(step)]  # type: ignore[no-untyped-call]
    return torch.cat(parts).clamp(min=0) + slack[:, None]


@dataclass(frozen=True)
class Head:
    """One side of the closed form: the trained weight (None: frozen), ``a`` and the embeddings."""

    weight: str | None
    a: Tensor
    embeddings: Tensor


class LinearHead(PairNorms):
    """The closed form: ``norms=linear_head``, exact, n squared times (features + dim) multiplications.

    Each side is a bias-free nn.Linear on features that no trained parameter affects, normalised to length 1 (or
    frozen). Values and gradients are compared with that form in every batch.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._engine = GhostClipping(module, max_grad_norm=1.0)  # reads Jacobians only: the bound is not used

    def _table(self, batch: PairBatch) -> Tensor:
        found = zip(batch.sides, embed_all(batch, rows_at_once=ROWS_AT_ONCE), strict=True)
        query, passage = (self._head(side, embeddings) for side, embeddings in found)
        if query.weight is None and passage.weight is None:
            raise UnsupportedModelError("The embeddings depend on no trainable parameter: nothing to clip.", trap="T13")
        with torch.no_grad():
            s = query.embeddings @ passage.embeddings.T
            lengths = query.a.square().sum(1)[:, None] + passage.a.square().sum(1)
            cross = 2 * s * (query.a @ passage.a.T) if query.weight == passage.weight else 0
            slack = SLACK * max(torch.finfo(p.dtype).eps for p in self._engine.parameters.values())
            # Slack is added, since a norm that is too small would let a pair exceed its bound.
            return ((1 - s.square()).clamp(min=0) * (lengths - cross) + slack * lengths).sqrt()

    def _head(self, side: Side, embeddings: Tensor) -> Head:
        parts = [self._part(side, rows, embeddings[rows]) for rows in side.blocks(ROWS_AT_ONCE)]
        names = {part.weight for part in parts}
        if len(names) > 1:
            raise self._refusal("rows take different ways")
        return Head(names.pop(), torch.cat([part.a for part in parts]), torch.cat([part.embeddings for part in parts]))

    def _part(self, side: Side, rows: slice, before: Tensor) -> Head:
        """Return some rows in float64, where 1 - S^2 keeps its digits."""

        def outputs() -> Tensor:
            embedded = side.embedded(rows)
            refuse_other_function(before, embedded)
            return embedded.sum(1, keepdim=True)

        _, columns = self._engine.columns(outputs, len(before))
        if not columns:
            return Head(None, before.new_zeros(len(before), 1, dtype=torch.float64), before.double())
        uses = [(name, use) for name, each in columns[0].items() for use in each]
        name, use = uses[0]
        weight = self._engine.parameters[name]
        if len(uses) > 1 or not isinstance(use, Outer) or use.a.shape[1:] != (1, weight.shape[1]):
            raise self._refusal(f"{', '.join(sorted({name for name, _ in uses}))} is not one such layer, called once")
        with torch.no_grad():
            h = use.a[:, 0].double()
            projected = h @ weight.double().T
            length = torch.linalg.vector_norm(projected, dim=1, keepdim=True)
            e = projected / length
            self._compare(name, e, before.double(), before.dtype)
            # The derivative of the sum of normalised coordinates, in closed form; autograd's is compared with it.
            slope = (1 - e * e.sum(1, keepdim=True)) / length
            scale = length.nan_to_num(1.0)
            self._compare(name, slope * scale, use.g[:, 0].double() * scale, use.g.dtype)
            return Head(name, h / length, e)

    def _compare(self, name: str, form: Tensor, found: Tensor, dtype: torch.dtype) -> None:
        """Refuse a difference; broken rows are ignored, as their pairs get norms that are not finite."""
        if bool(((form - found).abs().amax(1) > TOLERANCE[dtype]).any()):
            raise self._refusal(f"the embeddings are not those of {name} on its inputs, normalised to length 1")

    @staticmethod
    def _refusal(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"privacy.norms=linear_head is for a bias-free nn.Linear on frozen features, normalised: {reason}. "
            "Choose privacy.norms=jacobian or privacy.norms=pair_ghost."
        )
