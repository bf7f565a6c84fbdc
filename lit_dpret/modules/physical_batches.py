"""The physical batches of one logical step, made smaller when memory runs out, or when nobody may hear of a failure.

How a logical batch is cut does not change the sum of clipped gradients, and nothing of a step is
released before its last physical batch. So a step that breaks off for want of memory may begin again:
the draw is the same (it is keyed by the step), the sum so far is forgotten before any noise was
drawn, and the ledger, which is asked for a permit after the last batch, never hears of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lit_dpret.errors import DeviceMemoryError
from lit_dpret.memory import give_back_memory, is_out_of_memory
from lit_dpret.privacy.batches import UnitBatch, map_rows, rows_in_turn, take_rows

_log = logging.getLogger(__name__)


class PhysicalBatches:
    """Contributes the physical batches of a step, and begins the step again in smaller ones where it must.

    Guarantees:
        - Each unit of the step contributes exactly once to the sum that is released, however often the step began; with
          ``drops`` one that fails alone does not.
        - The smaller size stays for the steps that follow: it is found once.
        - A failure other than for want of memory is raised as it is, but with ``drops``.

    Args:
        contribute: Adds one physical batch; ``piece`` counts the pieces that a batch of the loader fell into.
        forget: Forgets everything that was added since the step began.

    Attributes:
        limit: Most units at once; None for what the loader hands out.
    """

    def __init__(self, contribute: Callable[[UnitBatch, int], None], forget: Callable[[], None]) -> None:
        self.limit: int | None = None
        self._contribute, self._forget = contribute, forget
        self._step: list[UnitBatch] = []
        self._dropped: set[tuple[int, int]] = set()  # of this step: the batch and the place of a unit

    def begin(self) -> None:
        """Forget the batches of a step that an earlier training broke off; the size that fits stays."""
        self._step, self._dropped = [], set()

    def add(self, batch: UnitBatch, *, may_split: bool, advice: str, drops: bool = False) -> None:
        """Contribute ``batch``, the next one of its step.

        Args:
            batch: As the loader handed it out.
            may_split: Whether its units may be taken apart; not where they see each other.
            advice: What to do where a single unit, or a batch that may not be split, does not fit.
            drops: Where units may be taken apart: leave out one that fails alone, for whatever reason, and say so in
                the log alone. Then no failure tells anybody of private rows, and each unit still adds what follows from
                itself, or nothing.

        Raises:
            DeviceMemoryError: It does not fit, however small.
        """
        if self._step and (batch.attempt, batch.step) != (self._step[0].attempt, self._step[0].step):
            self._step, self._dropped = [], set()  # of a step that was never finished
        if may_split:
            self._step.append(_copy(batch))
        due = [batch]
        while True:
            largest = self._tried(due, drops=drops and may_split)
            if largest is None:
                break
            give_back_memory()
            if largest and (not may_split or self.limit == 1):
                what = "a single unit" if may_split else f"a physical batch of {largest} units"
                raise DeviceMemoryError(
                    f"Memory ran out on {what} of step {batch.step}, before the step was noised or charged. {advice} "
                    "Then go on with resume=true."
                )
            self.limit = max(1, largest // 2)
            # Not a logger of metrics, nor the ledger: that memory ran out here says something about private lengths.
            _log.warning("Memory ran out, or a unit failed; the step begins again with at most %d at once.", self.limit)
            self._forget()
            due = [_copy(each) for each in self._step]
        if batch.last:
            self._step, self._dropped = [], set()

    def _tried(self, due: list[UnitBatch], *, drops: bool) -> int | None:
        """Contribute all of ``due``, but for dropped units.

        Returns:
            The units of the piece that failed, 0 where it is dropped from now on; None where nothing failed.
        """
        piece, at = None, (0, 0)
        try:
            for batch in due:
                for number, piece in enumerate(pieces_of(batch, self.limit)):
                    at = batch.part, number
                    if at not in self._dropped:
                        self._contribute(piece, number)
        except Exception as error:
            if not drops and not is_out_of_memory(error):
                raise
            if drops:
                _log.error("Kept on this machine: %s: %s", type(error).__name__, error)
                if self.limit == 1:
                    self._dropped.add(at)
                    return 0
            # Returned, not handled here: the traceback keeps what the broken pass had allocated alive.
            return 1 if piece is None else len(piece.mask)
        return None


def memory_advice(may_split: bool) -> str:
    """Return what to change where a single unit, or a physical batch that may not be taken apart, does not fit."""
    if may_split:
        return (
            "Shorten the texts (model.max_passage_length), set model.gradient_checkpointing=true or train adapters "
            "(model.lora)."
        )
    return (
        "It is never taken apart, because its units are compared with each other: raise privacy.sub_batches, set "
        "model.grad_cache_rows, or lower datamodule.physical_batch_size."
    )


def pieces_of(batch: UnitBatch, limit: int | None) -> Iterator[UnitBatch]:
    """``batch`` in pieces of at most ``limit`` units; every slot is in one piece, those without rows included.

    A batch of fixed shape may end in a slot that nobody fills (`FixedShape.of`): it ends every piece.
    """
    if limit is None or len(batch.mask) <= limit:
        yield batch
        return
    for slots in rows_in_turn(len(batch.mask), limit):
        inside = ((batch.unit_ids >= slots.start) & (batch.unit_ids < slots.stop)).nonzero().flatten()
        unit_ids, mask = batch.unit_ids[inside] - slots.start, batch.mask[slots]
        data_rows = None if batch.data_rows is None else batch.data_rows[inside]
        if data_rows is not None and len(inside):
            end = (batch.unit_ids == len(batch.mask) - 1).nonzero().flatten()
            unit_ids = torch.cat([unit_ids, torch.full_like(end, len(mask))])
            inside, mask = torch.cat([inside, end]), torch.cat([mask, mask.new_zeros(1)])
            data_rows = torch.cat([data_rows, data_rows.new_zeros(len(end))])
        rows = None if batch.rows is None or not len(inside) else take_rows(batch.rows, inside)
        yield replace(batch, rows=rows, unit_ids=unit_ids, mask=mask, data_rows=data_rows, alone=None)


def _copy(batch: UnitBatch) -> UnitBatch:
    """Return the batch with dicts of its own, since a module may write into them; the tensors are shared."""
    return batch if batch.rows is None else replace(batch, rows=map_rows(lambda leaf: leaf, batch.rows))
