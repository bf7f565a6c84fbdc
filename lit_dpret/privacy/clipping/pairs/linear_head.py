r"""The closed form for a linear head on frozen features.

With :math:`e = W h / |W h|`, :math:`a_i = h_i / |W h_i|` and :math:`b_j = h'_j / |W h'_j|`,

.. math:: |g_{ij}|^2 = (1 - S_{ij}^2) (|a_i|^2 + |b_j|^2 - 2 S_{ij} \langle a_i, b_j \rangle),

because :math:`J_i^\top f_j = (f_j - S_{ij} e_i) a_i^\top`, and the two factors
:math:`f_j - S e_i` and :math:`e_i - S f_j` both have the squared length :math:`1 - S^2` and the inner product
:math:`-S (1 - S^2)`. With separate heads the last term is missing, with a frozen one its own square too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping.contributions import Outer
from lit_dpret.privacy.clipping.ghost import GhostClipping
from lit_dpret.privacy.clipping.pairs.batch import (
    TOLERANCE,
    PairBatch,
    Side,
    embed_all,
    refuse_other_function,
)
from lit_dpret.privacy.clipping.pairs.blocks import SLACK
from lit_dpret.privacy.clipping.pairs.norms import ROWS_AT_ONCE, PairNorms


@dataclass(frozen=True)
class Head:
    """What the closed form needs of one side: the trained weight (None: frozen), ``a`` and the embeddings."""

    weight: str | None
    a: Tensor
    embeddings: Tensor


class LinearHead(PairNorms):
    """The closed form: ``norms=linear_head``, exact, n squared times (features + dim) multiplications.

    Each side is a bias-free nn.Linear on features that nothing trained has touched, normalised to length 1
    (or frozen); values and gradients are compared with that form in every batch.

    Args:
        module: What is trained: one such layer, or one for each side.
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
            return ((1 - s.square()).clamp(min=0) * (lengths - cross) + slack * lengths).sqrt()

    def _head(self, side: Side, embeddings: Tensor) -> Head:
        parts = [self._part(side, rows, embeddings[rows]) for rows in side.blocks(ROWS_AT_ONCE)]
        names = {part.weight for part in parts}
        if len(names) > 1:
            raise self._refusal("rows take different ways")
        return Head(names.pop(), torch.cat([part.a for part in parts]), torch.cat([part.embeddings for part in parts]))

    def _part(self, side: Side, rows: slice, before: Tensor) -> Head:
        """Some rows, in float64, where 1 - S^2 keeps its digits."""

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
            slope = (1 - e * e.sum(1, keepdim=True)) / length
            scale = length.nan_to_num(1.0)
            self._compare(name, slope * scale, use.g[:, 0].double() * scale, use.g.dtype)
            return Head(name, h / length, e)

    def _compare(self, name: str, form: Tensor, found: Tensor, dtype: torch.dtype) -> None:
        """Broken rows say nothing: their pairs get norms that are not finite."""
        if bool(((form - found).abs().amax(1) > TOLERANCE[dtype]).any()):
            raise self._refusal(f"the embeddings are not those of {name} on its inputs, normalised to length 1")

    @staticmethod
    def _refusal(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"norms=linear_head is for a bias-free nn.Linear on frozen features, normalised: {reason}. "
            "Choose norms=jacobian or norms=pair_ghost."
        )
