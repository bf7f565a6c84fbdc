"""The step that all model families share: from physical batches to the update of the weights.

Physical batches are added up to logical steps. Before each release the guard is asked for a permit; the privacy mode
clips and noises, and the optimizer steps. All this runs under a plain ``Trainer``, by manual optimization: a step that
is refused leaves the optimizer untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lit_dpret.distributed.handover import Handover, in_float32
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.distributed.xla import read, sync_device
from lit_dpret.distributed.xla import seed as seed_xla
from lit_dpret.errors import (
    DeviceMemoryError,
    DivergenceError,
    LitDpretError,
    UnsupportedModelError,
)
from lit_dpret.matmul_precision import whole_convolutions
from lit_dpret.memory import is_out_of_memory
from lit_dpret.modules.checkpointed import Checkpointed
from lit_dpret.modules.coupling_check import CouplingCheck, prepares_itself
from lit_dpret.modules.hook_watch import HookWatch
from lit_dpret.modules.kept_state import OF_A_RUN, KeptState
from lit_dpret.modules.physical_batches import Drops, PhysicalBatches, memory_advice, refuse_where_none_fits
from lit_dpret.privacy.batches import UnitBatch, take_rows
from lit_dpret.privacy.ledger.gate import (
    ALWAYS,
    Guard,
    no_accountant,
    public_names,
    tells_progress,
    undeclared_metric,
)
from lit_dpret.privacy.ledger.passed import outside_steps
from lit_dpret.privacy.modes import PrivacyMode, StepCounts
from lit_dpret.privacy.state_watch import kept_buffers
from lit_dpret.privacy.user_generators import kept_generators, seed_everywhere

if TYPE_CHECKING:
    from lit_dpret.distributed.block_by_block import BlockByBlock
    from lit_dpret.distributed.fsdp import ShardedParameters


class PrivateStep(Checkpointed):
    """The part of `PrivateModule` that runs in a fit, apart from what its subclasses implement.

    Guarantees:
        - A logical step is taken for every draw, including an empty one.
        - On several ranks the sums of a step are reduced before they are noised, and every rank makes the same
          update from the same noise.
        - No update is made without a permit, and every permit is requested before noise is drawn.
        - Logging of private rows is refused, unless the mode has no guarantee or ``log_private_loss``
          declares the leak; the card then says so.
    """

    privacy: PrivacyMode
    log_private_loss: bool
    coupled_loss: bool
    drops_failing_units: bool
    gathers_blocks: bool
    #: Whether blocks are gathered one by one in this run: then no process holds all weights, or all gradients.
    in_blocks: bool = False
    #: Whether an update is in progress: weights, optimizer and step count are then inconsistent.
    updating: bool = False

    def _leave_run(self) -> None:
        self._guard: Guard | None = None
        self._ranks = Ranks()
        self._shards: ShardedParameters | None = None
        self._handover = Handover(self, self._ranks)
        self._physical = PhysicalBatches(self._add_piece, self._forget_step, lambda: self._handover.settle())
        self._held_error: LitDpretError | None = None
        self._couplings = CouplingCheck()
        self._hooks = HookWatch()
        self._rehearses = self.in_blocks = False
        self._loss_sum = 0.0
        self._losses: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        """Exclude a run's guard, secret and private sums from a copy, such as a running average."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc]
        return {name: value for name, value in state.items() if name not in OF_A_RUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._leave_run()

    def receive_guard(self, guard: Guard) -> None:
        """Store the guard from the accountant once plan, mode and ledger are ready, and reset the rest."""
        self._guard = guard
        self._ranks = Ranks.here()
        kept = self._shards  # from an earlier fit, whose parameters stay sharded
        self._handover = Handover(self, self._ranks) if kept is None else kept.handover(self._ranks)
        self._physical.begin()
        self._held_error = None
        self._saved_optimizer = {}
        self.updating = self.in_blocks = False
        self._couplings.begin()
        self._hooks.begin()
        self._loss_sum = 0.0
        self._losses.clear()

    def receive_handover(self, handover: Handover) -> None:
        """Set a handover that takes the gradients instead of ``.grad``, after `receive_guard` and before a step."""
        self._handover = handover

    def per_row_loss(self, rows: Any) -> Tensor:
        """Return the loss of each row, shape ``(rows,)``; a row's random numbers must come from torch."""
        raise UnsupportedModelError(f"{type(self).__name__} does not implement per_row_loss(rows).")

    def before_batch(self, batch: UnitBatch) -> None:
        """Prepare further inputs of the loss for a physical batch with rows, such as public passages."""

    @property
    def _counted_by(self) -> Guard:
        if self._guard is None:
            raise no_accountant(type(self).__name__)
        return self._guard

    @property
    def _hides_rows(self) -> bool:
        """Whether logging private rows, or keeping something of them in a hook, is refused."""
        return self.privacy.guarantee == "dp" and not self.log_private_loss

    def _public(self) -> frozenset[str]:
        callbacks = () if self._trainer is None else self._trainer.callbacks  # type: ignore[attr-defined]
        return public_names([self, *callbacks])

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log as Lightning does; under a guarantee, only declared public values or declared leaks."""
        if self._hides_rows and name not in self._public() and not tells_progress(name, value, self._trainer):
            raise undeclared_metric(repr(name), self)
        if not self._rehearses:
            super().log(name, value, *args, **kwargs)

    def watch_hooks(self) -> None:
        """Start watching hooks, before those of the first batch run."""
        if self._hides_rows:
            self._hooks.note_first(self)

    @contextmanager
    def validating(self, *, on_trial: bool) -> Iterator[None]:
        """Let a validation step on public rows write within the block; on trial, restore what it wrote."""
        kept = KeptState(self) if on_trial else None
        with self._hooks.validating(self), kept_buffers(self) if on_trial else nullcontext():
            yield
        if kept is not None:
            kept.put_back()

    def _watched_update(self, optimizer: Any, coin: int) -> AbstractContextManager[None]:
        if not self._hides_rows:
            return nullcontext()
        return self._hooks.optimizing(self, optimizer, self._public() | ALWAYS, coin)

    def look_at_last_hooks(self, *, trained: bool) -> None:
        """Refuse what a hook wrote after the last batch, before it is saved."""
        if self._hides_rows:
            self._hooks.compare_last(self, self._public() | ALWAYS, trained=trained)

    @property
    def in_shards(self) -> bool:
        """Whether this process completes and keeps only a part of each parameter."""
        return self._handover.in_shards

    def whole(self) -> AbstractContextManager[object]:
        """Let every rank run the module within the block; a collective call."""
        return self._handover.whole()

    def by_block(self) -> BlockByBlock | None:
        """Return what from now on gathers weights one block at a time; None if they are gathered at once."""
        fits = self.gathers_blocks and self.may_split and not self.drops_failing_units
        found = self._handover.by_block() if fits and self.privacy.clips_by_block else None
        self.in_blocks = found is not None
        return found

    @contextmanager
    def assembled(self) -> Iterator[None]:
        """Let rank 0 write the module with its master weights within the block; a collective call."""
        optimizers = self.trainer.optimizers if self._ranks.is_first else ()
        with self._handover.assembled(here=self._ranks.is_first), in_float32(self, optimizers):
            yield

    @property
    def may_split(self) -> bool:
        """Whether the units of a physical batch may be split: not if they are compared with each other."""
        return self.privacy.sub_batches is None and not self.coupled_loss

    def on_fit_start(self) -> None:  # before batches are requested from the loader, which the accountant set up
        _ = self._counted_by

    def training_step(self, batch: UnitBatch, batch_idx: int) -> None:
        guard = self._counted_by
        if self._hides_rows:
            self._or_hold_error(lambda: self._hooks.compare(self, batch, self._public() | ALWAYS))
        with self._handover.clipping():
            split = self.may_split
            # Whether a unit fits depends on its rows alone: ending the run for it would reveal something about them.
            of_memory: Drops = "memory" if self.privacy.guarantee == "dp" else "none"
            drops: Drops = "all" if self.drops_failing_units else of_memory
            advice = memory_advice(split)
            parts = (self._ranks.rank, self._ranks.world_size) if self.privacy.guarantee == "dp" else None
            self._or_hold_error(
                lambda: self._physical.add(batch, may_split=split, advice=advice, drops=drops, parts=parts)
            )
        if batch.last:
            self._ranks.together(self._raise_held_error, quick=True)
            if drops == "memory":
                refuse_where_none_fits(self._ranks.gather(self._physical.tally, quick=True), batch.step, advice)
            try:
                with _wide_defaults():
                    self._logical_step(guard, batch.attempt, batch.step)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise DeviceMemoryError(
                    f"Memory ran out while step {batch.step} was noised or applied; the ledger holds what was charged "
                    "for it. Choose an optimizer with fewer states (model.optimizer.name=adafactor or sgd), a strategy "
                    "that shards, or model.lora. Then continue with resume=true."
                ) from error
        if self._hides_rows:
            coin = guard.stream.model_seed(batch.attempt, batch.step, batch.part)
            self._hooks.note(self, coin, ends_epoch=self._is_last_of_something())

    def _is_last_of_something(self) -> bool:
        """Return whether an epoch or the training ends with this batch."""
        trainer = self._trainer
        if trainer is None:
            return False
        return trainer.is_last_batch or 0 <= trainer.max_steps <= trainer.global_step

    def _or_hold_error(self, work: Callable[[], object]) -> None:
        """Do the part of a step that a rank does alone; hold a refusal, to be raised later on all ranks together.

        A rank that left at once would break the connections of the others, including rank 0, which has to record what
        the refusal means for the claim. After an error nothing more is added.
        """
        if self._held_error is not None:
            return
        try:
            work()
        except LitDpretError as error:
            if self._ranks.world_size == 1:
                raise
            self._held_error = error

    def _raise_held_error(self) -> None:
        if self._held_error is not None:
            raise self._held_error

    def _add_piece(self, batch: UnitBatch, first: int) -> None:
        """Contribute a physical batch, or a piece of one from its unit ``first`` on, with its own dropout masks."""
        guard = self._counted_by
        self._contribute(batch, guard.stream.model_seed(guard.attempt, batch.step, batch.part) + first)

    def _forget_step(self) -> None:
        self.privacy.forget()
        self._loss_sum = 0.0
        self._losses.clear()

    def rehearse(self, batches: Iterable[UnitBatch]) -> None:
        """Clip some physical batches as in training, and discard the sum without any release or update."""
        self._rehearses = True
        try:
            for batch in batches:
                self._contribute(batch, seed=batch.part)
        finally:
            self._forget_step()
            self._couplings.begin()
            self._rehearses = False

    def _contribute(self, batch: UnitBatch, seed: int) -> None:
        """Add one physical batch to the sum of its logical step; ``seed`` keys dropout masks and other draws."""
        if batch.rows is None:
            self.privacy.counts.units += int(batch.mask.sum())
            return
        with self._replayable_dropout(seed):
            self._contribute_rows(batch, seed)
        sync_device(self.device)

    def _contribute_rows(self, batch: UnitBatch, seed: int) -> None:
        if not prepares_itself(self):
            self.before_batch(batch)
        if self.privacy.guarantee == "dp":
            self._couplings.prepare(self, batch, seed)
        if prepares_itself(self):
            self.before_batch(batch)
        with _wide_defaults(), whole_convolutions():
            try:
                self.privacy.contribute(self, batch)
                if self.privacy.guarantee == "dp":  # after the engine, whose refusals say more; nothing is released yet
                    self._couplings.look(self, batch, seed)
            finally:
                self._couplings.put_back(self)

    @contextmanager
    def _replayable_dropout(self, seed: int) -> Any:
        with kept_generators():
            seed_everywhere(seed)
            seed_xla(self.device, seed)
            yield

    def unit_loss(self, batch: UnitBatch) -> Callable[..., Tensor]:
        """Return a function that runs the forward pass and returns one loss per row, ``(rows,)``.

        The losses are scaled so that their sum over a unit is the unit's mean. Given indices of rows, ``(n,)``, the
        function runs the forward pass of these rows alone.
        """
        counted = batch.unit_ids if batch.data_rows is None else batch.unit_ids[batch.data_rows]
        rows_of_unit = torch.bincount(counted, minlength=len(batch.mask)).clamp(min=1)[batch.unit_ids]

        def losses(index: Tensor | None = None) -> Tensor:
            chosen = slice(None) if index is None else index
            loss = self.per_row_loss(batch.rows if index is None else take_rows(batch.rows, index))
            weights, data_rows = rows_of_unit[chosen], None if batch.data_rows is None else batch.data_rows[chosen]
            if not isinstance(loss, Tensor):
                raise UnsupportedModelError(
                    f"{type(self).__name__}.per_row_loss returned a {type(loss).__name__}; it must return a tensor "
                    "with one loss per row, as torch's losses do under reduction='none'."
                )
            if loss.shape != weights.shape:
                raise UnsupportedModelError(
                    f"{type(self).__name__}.per_row_loss returned shape {tuple(loss.shape)} for {len(weights)} rows; "
                    "it must return one loss per row, as torch's losses do under reduction='none'."
                )
            if index is None:
                self._couplings.note(loss)
            weighted = loss / weights.to(device=loss.device, dtype=loss.dtype)
            if data_rows is not None:
                weighted = torch.where(data_rows.to(loss.device), weighted, torch.zeros_like(weighted))
            self.note_loss(weighted.detach().sum(dtype=torch.float64))
            return weighted

        return losses

    def note_loss(self, total: float | Tensor) -> None:
        """Add the summed loss of some units to the step's mean. Private: logged only if declared.

        A tensor stays on its device until the end of the step, since reading it earlier would wait for the device.
        """
        if isinstance(total, Tensor):
            self._losses.append(total)
        else:
            self._loss_sum += total

    def _logical_step(self, guard: Guard, attempt: int, step: int) -> None:
        if self._hides_rows:
            self._hooks.compare_weights(self, self._public() | ALWAYS)
        sums = self._handover.add_up(self.privacy.take())
        self._loss_sum += sum(read(self._losses))
        self._losses.clear()
        self._add_up_counts()
        sums |= self.privacy.extra_sums()
        units, starts = self.privacy.counts.units, self._handover.starts
        permit = guard.authorise(attempt, step, units, sums)
        parts = {} if starts is None else {"starts": starts}
        update = self.privacy.privatize(sums, attempt=permit.attempt, step=permit.step, salt=permit.salt, **parts)
        del sums
        self.updating = True
        guard.record(permit, update)  # frees the sums, and measures their noise
        optimizer: Any = self.optimizers()
        self._handover.give(update.gradients, optimizer)
        with outside_steps.off(), self._watched_update(optimizer, guard.stream.model_seed(attempt, step, 0)):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._move_schedules(step + 1)
        self.updating = False
        if self._hides_rows:
            self._hooks.note_weights(self)
        if self.privacy.guarantee == "dp":  # depends on released weights alone, so ending the run reveals nothing more
            self._ranks.together(lambda: refuse_infinite(self, step), quick=True)
        if not self._hides_rows:
            self.log("train/loss", self._loss_sum / max(units, 1), on_step=True, prog_bar=True, batch_size=1)
        self._loss_sum = 0.0

    def _move_schedules(self, done: int) -> None:
        """Step every schedule that is due by its ``interval`` and ``frequency``, in logical steps."""
        if self._trainer is None:  # a step that is tested by itself
            return
        epochs = self.trainer.current_epoch + 1 if self.trainer.is_last_batch else 0
        for config in self.trainer.lr_scheduler_configs:
            schedule: Any = config.scheduler
            count = done if config.interval == "step" else epochs
            if count and count % config.frequency == 0:
                schedule.step()

    def _add_up_counts(self) -> None:
        if self._ranks.world_size == 1:
            return
        counts = self.privacy.counts
        found = torch.tensor([*astuple(counts), self._loss_sum], dtype=torch.float64)
        self._ranks.sum_({}, found)
        *summed, self._loss_sum = found.tolist()
        self.privacy.counts = StepCounts(*(round(count) for count in summed))


def refuse_infinite(module: nn.Module, step: int) -> None:
    """Refuse NaN or infinity in the part of the trained weights on this rank, after logical step ``step``."""
    held = {name: _lies_here(one) for name, one in module.named_parameters() if one.requires_grad}
    held = {name: one for name, one in held.items() if one.is_floating_point() and one.numel()}
    if not held or bool(nn.utils.get_total_norm(held.values(), math.inf).isfinite()):
        return
    name = next(name for name, one in held.items() if not bool(one.isfinite().all()))
    raise DivergenceError(
        f"The weights are not finite after step {step + 1} ({name} first), and further steps would spend the budget "
        "for nothing. The steps so far are charged, and the claim covers all planned steps. The last checkpoint is "
        "finite: resume=true with trainer.max_steps set to the step in its name writes its model and card. To train "
        "further, begin a new run with a lower learning rate (model.optimizer.lr), from scratch or from that model "
        "(init_from)."
    )


def _lies_here(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter that may be sharded, by FSDP2 or ZeRO-3."""
    found: Any = parameter.detach()
    part = getattr(parameter, "ds_tensor", None)
    return cast(
        Tensor, part.detach() if part is not None else found.to_local() if hasattr(found, "to_local") else found
    )


@contextmanager
def _wide_defaults() -> Iterator[None]:
    """Make float32 the default type within the block: under ``precision=bf16-true`` Lightning sets bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(before, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
