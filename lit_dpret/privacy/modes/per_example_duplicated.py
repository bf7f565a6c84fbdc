"""Per-example clipping of an in-batch loss, with its true sensitivity: the direct baseline of the papers.

Each row's loss has copies of all passages of its sub-batch. Removing a unit removes its row (C) and turns n - 1 others
(2C each): (2n - 1) C in total, and 2nC for a replacement; both are attained. Counting C alone would be a false claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lit_dpret.distributed.strategies import SUMS_ADD_UP, Supported
from lit_dpret.privacy.accounting.coupled_sensitivity import Bounded, Relation
from lit_dpret.privacy.batches import rows_in_turn
from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.modes.base import Candidates
from lit_dpret.privacy.modes.coupled import CoupledMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.settings import require_choice


def duplicated_sensitivity(n_max: int, change: Relation) -> float:
    """Return how far one unit moves a sum of n row gradients of norm at most 1 that all depend on it."""
    # n - 1 other rows turn from one vector to another (2 each); the unit's own row goes (1), or turns as well (2).
    return 2.0 * n_max - (1.0 if change == "add_or_remove" else 0.0)


@dataclass(kw_only=True, eq=False, repr=False)
class PerExampleDuplicated(CoupledMode):
    """Clip each row's in-batch gradient, with its own copy of the sub-batch's passages.

    Guarantees:
        - Removing one unit from a sub-batch moves the sum by at most (2 ``n_max`` - 1) C, and replacing one by at most
          2 ``n_max`` C, with C = ``max_grad_norm``, for every loss and temperature.

    Args:
        max_grad_norm: L2 bound C on one row's gradient.
        sub_batches: The number of parts of a logical batch. Smaller parts need less noise.
        engine: ``ghost`` or ``vmap``.
        rows_at_once: How many rows, each with its copies of all passages, go through the model together.
    """

    name: ClassVar[str] = "per_example_duplicated"
    strategies: ClassVar[Supported] = SUMS_ADD_UP
    bounded: ClassVar[Bounded] = "row"
    candidates: ClassVar[Candidates] = "copies"
    bounds_any_rows: ClassVar[bool] = True

    engine: str = "ghost"
    rows_at_once: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("privacy.engine", self.engine, ("ghost", "vmap"))
        self.rows_at_once = max(1, self.rows_at_once)

    def _sensitivity(self, n_max: int, change: Relation, loss: Any) -> float:
        return duplicated_sensitivity(n_max, change)

    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        super().attach(module, plan, stream)
        contrasted: Any = module
        contrasted.row_temperature()
        self._sums = make_engine(self.engine, module, max_grad_norm=self._plan.max_grad_norm)

    def contribute(self, module: Any, batch: Any) -> None:
        self._refuse_large(int(batch.mask.sum()))
        ids, real = batch.unit_ids, batch.mask[batch.unit_ids]
        for part in rows_in_turn(len(ids), self.rows_at_once):
            # To the engine, each row is a separate unit: its gradient holds copies of all passages.
            slots = torch.arange(part.stop - part.start, device=ids.device)
            self.add(module.copied_loss(batch, part), slots, real[part])
        self.counts.units += int(batch.mask.sum()) - int(real.sum())  # units of which no row is left
