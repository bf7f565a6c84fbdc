"""The physical batches of one logical step, made smaller if memory runs out, or if failures must stay hidden.

How a logical batch is split does not change the sum, and nothing is released before its last physical batch. So a step
that breaks off may start again: the draw is keyed by the step, the sum so far is discarded before any noise is drawn,
and the ledger records nothing of the restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from lit_dpret.distributed.block_by_block import BeganAgain
from lit_dpret.errors import DataError, DeviceMemoryError
from lit_dpret.memory import give_back_memory, is_out_of_memory
from lit_dpret.privacy.batches import UnitBatch, map_rows, rows_in_turn, take_rows
from lit_dpret.progress import tell_here

Drops = Literal["none", "memory", "all"]


class Tally(NamedTuple):
    """The outcome for the units of one step on one rank."""

    units: int = 0
    kept: int = 0
    lone: bool = False  # whether a unit does not fit even alone
    fitted: bool = False  # whether any unit has ever fitted


def refuse_where_none_fits(tallies: Sequence[Tally], step: int, advice: str) -> None:
    """Refuse a step with a rank on which none of several units fits, and any step before a unit has fitted on any rank.

    On a rank with one unit, ending the run would reveal how long that unit is.
    """
    fitted = any(each.fitted for each in tallies)
    if any(each.lone and not each.kept and (each.units > 1 or not fitted) for each in tallies):
        raise DeviceMemoryError(
            f"Memory ran out on every unit of step {step}, before the step was noised or charged. {advice} "
            "Then continue with resume=true."
        )


class PhysicalBatches:
    """Contribute the physical batches of a step, and restart the step in smaller ones if needed.

    Guarantees:
        - Each unit of the step contributes exactly once to the released sum, however often the step starts. A unit
          that fails alone, and may be dropped, does not contribute.
        - The size that fits into memory is found once and kept. A split because of a failed unit applies to its step
          only.
        - A failure other than for lack of memory is raised unchanged, unless all failing units are dropped. But a
          StopIteration is raised as a RuntimeError, because Lightning drops the former, and the batch with it.
        - With ``parts``, a batch that is missing before another one of its step, or comes twice, is refused: leaving
          out or repeating a unit's batch would change the contributions of all its units.

    Args:
        contribute: Adds one physical batch; the number is the position of its first unit in the loader's batch.
        forget: Discards everything that was added since the step began.
        settle: Waits for other ranks; returns whether one of them restarted the step, as this one then does. They
            may also signal this while a batch is contributed, by `BeganAgain`.

    Attributes:
        limit: The maximum number of units at once; None for the loader's batches.
        tally: The outcome for the units of the last step that was contributed.
    """

    def __init__(
        self,
        contribute: Callable[[UnitBatch, int], None],
        forget: Callable[[], None],
        settle: Callable[[], bool] = lambda: False,
    ) -> None:
        self.limit: int | None = None
        self.tally = Tally()
        self._contribute, self._forget, self._settle = contribute, forget, settle
        self._step: list[UnitBatch] = []
        self._lone = False  # whether a unit of this step does not fit even alone
        self._lowered_from: int | None = None  # the limit before this step
        self._fitted = False  # whether any unit has ever fitted
        # For this step, by the part of a batch in which a unit failed: the slots that do not fail, as they are split.
        self._sound: dict[int, list[slice]] = {}
        self._due: tuple[int, int, int] | None = None  # attempt, step and part of the next batch

    def begin(self) -> None:
        """Discard the batches of an interrupted step; keep the size that fits."""
        if self._lone:  # a unit that does not fit even alone lowered the limit, not the others
            self.limit = self._lowered_from
        self._step, self._sound, self._lone, self._lowered_from, self._due = [], {}, False, self.limit, None

    def add(
        self,
        batch: UnitBatch,
        *,
        may_split: bool,
        advice: str,
        drops: Drops = "none",
        parts: tuple[int, int] | None = None,
    ) -> None:
        """Contribute ``batch``, the next one of its step.

        Args:
            batch: The batch as the loader returned it.
            may_split: Whether its units may be separated; not if they see each other.
            advice: What to do if a single unit, or a batch that may not be split, does not fit.
            drops: Leave out a unit that fails alone: for lack of ``memory``, or for any reason (``all``, found by
                bisection), and report it on the terminal only. Then no such failure reveals anything about private
                rows, and each unit still adds either what depends on itself alone, or nothing.
            parts: Which parts of a step this rank gets: the first, and their distance; None for any.
        """
        if parts is None:
            self._add(batch, may_split=may_split, advice=advice, drops=drops)
            return
        key, (first, apart) = (batch.attempt, batch.step), parts
        due = first if self._due is None or self._due[:2] != key else self._due[2]
        if batch.part != due:
            raise DataError(
                f"Physical batch {batch.part} of step {batch.step} arrived where {due} was due: a step takes all units "
                "that were drawn for it. Let datamodule.train_dataloader hand out every batch of its sampler, once and "
                "in order, and let training_step pass each on to PrivateModule; drop bad rows before training.",
                trap="T38",
            )
        self._add(batch, may_split=may_split, advice=advice, drops=drops)
        self._due = (*key, first if batch.last else due + apart)

    def _add(self, batch: UnitBatch, *, may_split: bool, advice: str, drops: Drops) -> None:
        if self._step and (batch.attempt, batch.step) != (self._step[0].attempt, self._step[0].step):
            self.begin()  # after a step that was never finished
        if may_split:
            self._step.append(_copy(batch))
        due = [batch]
        drops = drops if may_split else "none"
        while True:
            try:
                failed = self._tried(due, drops=drops == "all")
                again = failed is None and self._settle()
            except BeganAgain:
                failed, again = None, True
            if again:
                self._forget()
                due = [_copy(each) for each in self._step]
                continue
            if failed is None:
                break
            at, slots, lacks_memory = failed
            if lacks_memory:
                give_back_memory()
            self._forget()
            if drops == "all" or (drops == "memory" and self.limit == 1):
                if drops == "memory":
                    self._lone = True
                    tell_here(
                        f"Kept on this machine: a unit of step {batch.step} does not fit into memory and counts as "
                        f"zero in that step. {advice}"
                    )
                self._set_aside(next(each for each in self._step if each.part == at), slots, lacks_memory)
            elif not may_split or self.limit == 1:
                what = "a single unit" if may_split else f"a physical batch of {slots.stop - slots.start} units"
                raise DeviceMemoryError(
                    f"Memory ran out on {what} of step {batch.step}, before the step was noised or charged. {advice} "
                    "Then continue with resume=true."
                )
            else:
                self._lower_limit(max(1, (slots.stop - slots.start) // 2))
            due = [_copy(each) for each in self._step]
        if batch.last:
            units = sum(int(batch.mask.sum()) for batch in self._step)
            kept = sum(int(batch.mask[slots].sum()) for batch in self._step for slots in self._slots(batch))
            self.tally = Tally(units, kept, lone=self._lone, fitted=self._fitted)
            self.begin()

    def _lower_limit(self, most: int) -> None:
        self.limit = most
        # Not to a logger, which may write a file, nor to the ledger: running out of memory reveals private lengths.
        tell_here(f"Memory ran out; a step restarts with at most {self.limit} units at a time.")

    def _slots(self, batch: UnitBatch) -> list[slice]:
        found = self._sound.get(batch.part)
        return slots_of(batch, self.limit) if found is None else found

    def _tried(self, due: list[UnitBatch], *, drops: bool) -> tuple[int, slice, bool] | None:
        """Contribute ``due``; return None, or the part that failed, its slots, and whether memory was lacking."""
        for batch in due:
            for slots in self._slots(batch):
                if (error := self._failure(batch, slots, drops=drops)) is not None:
                    return batch.part, slots, error
        return None

    def _failure(self, batch: UnitBatch, slots: slice, *, drops: bool) -> bool | None:
        """Contribute some slots of a batch; return None, or on failure whether memory was lacking."""
        try:
            self._contribute(piece_of(batch, slots), slots.start)
            self._fitted = self._fitted or batch.rows is not None
        except Exception as error:
            lacks_memory = is_out_of_memory(error)
            if isinstance(error, StopIteration) and not drops:
                raise RuntimeError("per_row_loss raised StopIteration.") from error
            if not drops and not lacks_memory:
                raise
            if drops:
                tell_here(f"Kept on this machine: {type(error).__name__}: {error}")
            # Returned, not handled here: the traceback keeps alive what the failed pass allocated.
            return lacks_memory
        return None

    def _set_aside(self, batch: UnitBatch, failed: slice, lacks_memory: bool) -> None:
        cut, sound = self._slots(batch), self._bisected(batch, failed)
        sizes = [slots.stop - slots.start for slots in sound]
        if lacks_memory and sum(sizes) == failed.stop - failed.start:
            self._lower_limit(max(sizes))  # no unit failed alone, so it was memory
        at = cut.index(failed)
        self._sound[batch.part] = [*cut[:at], *sound, *cut[at + 1 :]]

    def _bisected(self, batch: UnitBatch, failed: slice) -> list[slice]:
        """Return the largest parts of a failed one that do not fail; each is contributed alone and discarded."""
        if failed.stop - failed.start <= 1:
            return []
        middle = (failed.start + failed.stop) // 2
        found: list[slice] = []
        for half in (slice(failed.start, middle), slice(middle, failed.stop)):
            lacks_memory = self._failure(_copy(batch), half, drops=True)
            self._forget()
            if lacks_memory:
                give_back_memory()
            found += [half] if lacks_memory is None else self._bisected(batch, half)
        return found


def memory_advice(may_split: bool) -> str:
    """Return advice for a single unit, or an unsplittable physical batch, that does not fit."""
    if may_split:
        return (
            "Shorten the inputs (model.max_passage_length for texts), set model.gradient_checkpointing=true or train "
            "adapters (model.lora)."
        )
    return (
        "It is never taken apart, because its units are compared with each other: raise privacy.sub_batches, lower "
        "datamodule.expected_batch_size, or set model.grad_cache_rows of a dual encoder (privacy=none, synthetic or "
        "batch_clip)."
    )


def slots_of(batch: UnitBatch, limit: int | None) -> list[slice]:
    """Return the slots of a batch, including those without rows, in groups of at most ``limit``."""
    size = len(batch.mask)
    return [slice(0, size)] if limit is None or size <= limit else list(rows_in_turn(size, limit))


def piece_of(batch: UnitBatch, slots: slice) -> UnitBatch:
    """Return ``batch`` with only these slots; itself if these are all.

    A batch of fixed shape may end in an empty spare slot (`FixedShape.of`), which then ends every piece.
    """
    if slots.start == 0 and slots.stop >= len(batch.mask):
        return batch
    inside = ((batch.unit_ids >= slots.start) & (batch.unit_ids < slots.stop)).nonzero().flatten()
    unit_ids, mask = batch.unit_ids[inside] - slots.start, batch.mask[slots]
    data_rows = None if batch.data_rows is None else batch.data_rows[inside]
    if data_rows is not None and len(inside):
        end = (batch.unit_ids == len(batch.mask) - 1).nonzero().flatten()
        unit_ids = torch.cat([unit_ids, torch.full_like(end, len(mask))])
        inside, mask = torch.cat([inside, end]), torch.cat([mask, mask.new_zeros(1)])
        data_rows = torch.cat([data_rows, data_rows.new_zeros(len(end))])
    rows = None if batch.rows is None or not len(inside) else take_rows(batch.rows, inside)
    return replace(batch, rows=rows, unit_ids=unit_ids, mask=mask, data_rows=data_rows, alone=None, smallest=None)


def _copy(batch: UnitBatch) -> UnitBatch:
    """Return the batch with new dicts, since a module may write into them; the tensors are shared."""
    return batch if batch.rows is None else replace(batch, rows=map_rows(lambda leaf: leaf, batch.rows))
