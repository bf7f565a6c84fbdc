r"""The norm of every pair's similarity gradient, or a bound on it that depends on the pair alone.

:math:`S_{ij} = \langle e_i, f_j \rangle` has the gradient :math:`g_{ij}`. Clipping each to B (Logit-DP: Kong, Munoz
Medina and Ribero 2025, Algorithm 1) needs only their norms, and any :math:`N_{ij} \ge |g_{ij}|` keeps the guarantee.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.matmul_precision import exact_float32
from lit_dpret.privacy.clipping.base import refuse_batch_mixing, trainable
from lit_dpret.privacy.clipping.contributions import Contribution, Dense, by_input, chunk_of, joined
from lit_dpret.privacy.clipping.ghost import Contributions, GhostClipping
from lit_dpret.privacy.clipping.pairs.batch import (
    LOW_PRECISION_TOLERANCE,
    TOLERANCE,
    PairBatch,
    Side,
    embed_all,
    refuse_low_precision,
    refuse_other_function,
    refuse_randomness,
)

#: Rows that are embedded together where there is no graph.
ROWS_AT_ONCE = 64
#: Rounding errors of a similarity's gradient, in units of the dtype's roundoff times a gradient that does not cancel.
NOISE = 32


class PairNorms(ABC):
    """Compute the norm of each pair's gradient, or an upper bound where not ``exact``.

    Guarantees:
        - ``table(batch)[i, j]`` is at least the norm of the gradient of S_ij over all trainable parameters of the
          module, up to rounding; with ``exact`` it is that norm. The entries of a broken pair are not finite.
        - It depends on records i and j (and the module) alone: another record changes it by rounding at most.
        - Memory does not grow with n squared times the parameters (except in ``BruteForce``); the module does not
          change.
        - Passes run in fp32 (or float64) even under the caller's autocast.
    """

    exact: bool = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._batches = 0
        refuse_randomness(module)

    def table(self, batch: PairBatch) -> Tensor:
        """Return the norms or bounds, (n, n) in float64; rows are queries. Private."""
        refuse_randomness(self.module)
        refuse_batch_mixing(self.module)
        if not batch.n:
            device = next(self.module.parameters()).device
            return torch.zeros(0, 0, dtype=torch.float64, device=device)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                refuse_low_precision(name, parameter)
        with exact_float32(batch.device):
            found = self._table(batch)
            self._batches += 1
            if not self._batches & (self._batches - 1):  # batches 1, 2, 4, 8, ...
                for side in batch.sides:
                    _refuse_mixing(side)
        return found

    @abstractmethod
    def _table(self, batch: PairBatch) -> Tensor: ...

    def _with_noise(self, norms: Tensor, batch: PairBatch, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Return the norms plus what rounding may add to the gradient in the pass that sums it up.

        Where the texts of a pair are alike and the encoder is shared, S is near 1 and its gradient is a difference of
        nearly equal terms. The computed gradient then consists of rounding errors, which differ between the two passes,
        and the norm of one says nothing about the other. They are of the size of the roundoff times the gradient of the
        embedding along a direction that does not cancel; two fixed directions represent it.
        """
        # A separate generator: the model's random streams are not changed.
        generator = torch.Generator().manual_seed(embeddings[0].shape[1])
        directions = torch.randn(2, embeddings[0].shape[1], generator=generator, dtype=torch.float64)
        directions = torch.nn.functional.normalize(directions).to(embeddings[0])
        unit = NOISE * max(torch.finfo(p.dtype).eps for p in self.module.parameters() if p.requires_grad)
        squares = [torch.zeros(batch.n, dtype=torch.float64, device=norms.device) for _ in batch.sides]
        for square, side, before in zip(squares, batch.sides, embeddings, strict=True):
            for rows in side.blocks(ROWS_AT_ONCE):
                for found in self._along(side, rows, before[rows], directions):
                    square[rows] += found.to(square).square()
        return (norms.square() + unit**2 * (squares[0][:, None] + squares[1])).sqrt()

    def _along(self, side: Side, rows: slice, before: Tensor, directions: Tensor) -> list[Tensor]:
        """Return the norms of the gradients of some rows' embeddings along each direction; empty if none is trained."""
        raise NotImplementedError


@torch.no_grad()
def _refuse_mixing(side: Side) -> None:
    """Refuse embeddings of rows that change when further rows are in the batch; broken rows are ignored."""
    count = min(side.count, ROWS_AT_ONCE)
    if count < 2:
        return
    together = side.embedded(slice(0, count))
    # Both halves: in a net that runs over the rows as over time, only the later rows depend on others.
    alone = torch.cat([side.embedded(half) for half in (slice(0, count // 2), slice(count // 2, count))])
    gap = (together - alone).abs().amax(1)
    tolerance = TOLERANCE.get(alone.dtype, LOW_PRECISION_TOLERANCE)
    if bool((gap > tolerance * alone.abs().amax(1).clamp(min=1e-3)).any()):
        raise UnsupportedModelError(
            "The embedding of a row differs when other rows are in the batch, so a pair's gradient is not a "
            "function of its own two records and clipping pairs does not bound the effect of one record. Make "
            "embeddings functions of their own rows: no statistics of the batch.",
            trap="T11",
        )


class BruteForce(PairNorms):
    """Each pair separately, keeping all n squared gradients: ``norms=brute_force``, the paper's Algorithm 1."""

    def gradients(self, batch: PairBatch) -> dict[str, Tensor]:
        """Return the gradients of all similarities, (n, n, *shape) for each trainable parameter."""
        trained = trainable(self.module)
        found = {name: p.new_zeros(batch.n, batch.n, *p.shape) for name, p in trained.items()}
        queries, passages = batch.sides
        for i in range(batch.n):
            for j in range(batch.n):
                with torch.enable_grad():
                    similarity = (queries.embedded(slice(i, i + 1)) * passages.embedded(slice(j, j + 1))).sum()
                for name, gradient in zip(trained, _grad(similarity, list(trained.values())), strict=True):
                    if gradient is not None:
                        found[name][i, j] = gradient.to_dense() if gradient.is_sparse else gradient
        return found

    def _table(self, batch: PairBatch) -> Tensor:
        squares = torch.zeros(batch.n, batch.n, dtype=torch.float64)
        for gradient in self.gradients(batch).values():
            for i, of_query in enumerate(gradient):
                squares[i] += of_query.double().square().flatten(1).sum(1).to(squares.device)
        norms = squares.sqrt().to(next(self.module.parameters()).device)
        return self._with_noise(norms, batch, embed_all(batch, rows_at_once=ROWS_AT_ONCE))

    def _along(self, side: Side, rows: slice, before: Tensor, directions: Tensor) -> list[Tensor]:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        found = torch.zeros(len(directions), len(before), dtype=torch.float64)
        for place in range(len(before)):
            row = slice(rows.start + place, rows.start + place + 1)
            with torch.enable_grad():
                embedded = side.embedded(row)
            refuse_other_function(before[place : place + 1], embedded)
            for norms, direction in zip(found, directions, strict=True):
                if embedded.requires_grad:
                    gradients = _grad((embedded * direction.to(embedded)).sum(), trained, keep=True)
                    whole = [(g.to_dense() if g.is_sparse else g).double().norm() for g in gradients if g is not None]
                    norms[place] = torch.stack(whole).norm()
        return list(found)


def _grad(similarity: Tensor, parameters: list[nn.Parameter], *, keep: bool = False) -> tuple[Tensor | None, ...]:
    if not similarity.requires_grad:
        raise UnsupportedModelError("The embeddings depend on no trainable parameter: nothing to clip.", trap="T13")
    return torch.autograd.grad(similarity, parameters, allow_unused=True, retain_graph=keep)


class PairGhost(PairNorms):
    """Each pair as one unit of the ghost engine: ``norms=pair_ghost``, exact for any towers.

    A pair's gradient is that of its query's embedding along the passage's, plus that of its passage's along the
    query's. So a tile of queries and passages takes one forward pass of each, and one backward pass of its queries for
    each passage and of its passages for each query. About 0.7 n ordinary steps; the backward passes are 0.33 n of them.
    """

    def __init__(self, module: nn.Module, *, pairs_at_once: int | None = None) -> None:
        super().__init__(module)
        self.pairs_at_once = pairs_at_once
        self._engine = GhostClipping(module, max_grad_norm=1.0)  # reads norms only: the bound is not used

    def _table(self, batch: PairBatch) -> Tensor:
        embeddings = embed_all(batch, rows_at_once=ROWS_AT_ONCE)
        queries, passages = batch.sides
        held = self._held(batch, embeddings)
        edge = max(1, math.isqrt(self.pairs_at_once or 16 * chunk_of(batch.device) // held))
        edge = math.ceil(batch.n / math.ceil(batch.n / edge))
        norms = torch.zeros(batch.n, batch.n, dtype=torch.float64, device=embeddings[0].device)
        for i in queries.blocks(edge):
            for j in passages.blocks(edge):
                e, f = embeddings[0][i], embeddings[1][j]
                of_queries, of_passages = self._columns(queries, i, e, f), self._columns(passages, j, f, e)
                scores = e.float() @ f.float().T  # shows broken records
                parts = partial(_of_pairs, of_queries, of_passages)
                norms[i, j] = self._engine.norms_of(parts, scores.flatten()).view(scores.shape)
        return self._with_noise(norms, batch, embeddings)

    def _held(self, batch: PairBatch, embeddings: tuple[Tensor, Tensor]) -> int:
        """Return the elements that the gradients of one pair's query and passage take."""
        one = slice(0, 1)
        found = [self._columns(side, one, None, e[one]) for side, e in zip(batch.sides, embeddings, strict=True)]
        if not any(found):
            raise UnsupportedModelError("The embeddings depend on no trainable parameter: nothing to clip.", trap="T13")
        of_uses = [use for columns in found for column in columns for uses in column.values() for use in uses]
        return sum((use.value if isinstance(use, Dense) else use.g).numel() for use in of_uses)

    def _columns(self, side: Side, rows: slice, before: Tensor | None, along: Tensor) -> list[Contributions]:
        """Return the gradients of some rows' embeddings along each vector; empty if nothing is trained."""

        def outputs() -> Tensor:
            embedded = side.embedded(rows)
            if before is not None:
                refuse_other_function(before, embedded)
            return embedded

        return self._engine.columns(outputs, len(range(side.count)[rows]), along)[1]

    def _along(self, side: Side, rows: slice, before: Tensor, directions: Tensor) -> list[Tensor]:
        found = self._columns(side, rows, before, directions)
        return [self._engine.norms_of(partial(_of_pairs, [column], []), before.sum(1)) for column in found]


def _of_pairs(of_queries: list[Contributions], of_passages: list[Contributions]) -> Iterator[Contributions]:
    """Yield the gradients of all pairs, query by query, one parameter at a time or those with equal inputs."""
    first: dict[str, list[Contribution]] = {}
    for columns in (of_queries, of_passages):
        for name, uses in columns[0].items() if columns else ():
            first[name] = first.get(name, []) + uses
    for names in by_input(first):
        found: Contributions = {name: [] for name in names}
        for columns, axis in ((of_queries, 1), (of_passages, 0)):
            known: dict[object, Tensor] = {}
            for name in names:
                of_uses = zip(*(column.get(name, []) for column in columns), strict=True)
                found[name] += [joined(uses, partial(_stacked, axis=axis, known=known)) for uses in of_uses]
        yield found


def _stacked(columns: list[Tensor], *, axis: int, known: dict[object, Tensor]) -> Tensor:
    """Return the values of all pairs, from those of some rows in each column."""
    first, place = columns[0], columns[0].data_ptr()
    if not place or any(each.data_ptr() != place for each in columns):
        return torch.stack(columns, axis).flatten(0, 1)
    # One tensor for all columns, and for all layers that read it: layers with equal inputs stay recognisable.
    key = place, first.shape, first.stride()
    if key not in known:
        known[key] = torch.stack([first] * len(columns), axis).flatten(0, 1)
    return known[key]
