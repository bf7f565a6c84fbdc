"""A fallback for layers without a rule: row-by-row gradients, by torch.func.

Chosen explicitly, because it costs what the book-keeping engine exists to save: one gradient per row
in memory, and one more forward and backward pass of those layers.
"""

from __future__ import annotations

from typing import Unpack

from torch import nn

from lit_dpret.privacy.clipping.base import ClipSettings
from lit_dpret.privacy.clipping.ghost import GhostClipping
from lit_dpret.privacy.clipping.rules import Plan, make_plan


class VmapClipping(GhostClipping):
    """``GhostClipping`` for the layers it covers, torch.func for the rest; ``privacy.engine=vmap``.

    A module that owns a trainable parameter without a rule is run again with everything in it, row
    by row, by ``vmap`` over ``vjp``. Its outputs must be tensors (in lists or dictionaries, if there
    are several) with the batch on their first axis, and so must those of its inputs that differ
    between rows: a tensor whose first axis is not the batch is taken for the same in every row.

    Guarantees, beyond those of ``GhostClipping``:
        - In every batch, what such a module gives for a row alone is compared with what it gave in
          the batch, so a module that mixes rows, with or without a gradient between them, or that
          does something else when it is run again, is refused.
        - In every batch gradients are compared with the weights of the units that they are charged
          to, and in the first one their sum with autograd's, unless a broken unit makes that NaN.
        - What vmap cannot run is refused with its reason: recurrent layers, randomness (dropout)
          inside the module, values that decide the control flow, writes into buffers.
    """

    def __init__(self, module: nn.Module, **clipping: Unpack[ClipSettings]) -> None:
        super().__init__(module, verify=True, **clipping)

    def _plan(self) -> Plan:
        return make_plan(self.module, self.parameters, fallback=True)
