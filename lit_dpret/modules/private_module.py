"""The training loop that all model families share.

A subclass says what one row's loss is. This class turns physical batches into logical steps, asks for permission
before each release, lets the privacy mode clip and noise, and steps the optimizer, under a plain ``Trainer``, by
manual optimization: a step that is refused leaves the optimizer untouched.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lit_dpret.distributed.handover import Handover, in_float32, keep_masters
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.distributed.xla import read, sync_device
from lit_dpret.distributed.xla import seed as seed_xla
from lit_dpret.errors import (
    ConfigurationError,
    DeviceMemoryError,
    DivergenceError,
    LitDpretError,
    UnsupportedModelError,
)
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.matmul_precision import whole_convolutions
from lit_dpret.memory import is_out_of_memory
from lit_dpret.modules.checkpointed import Checkpointed
from lit_dpret.modules.coupling_check import CouplingCheck, prepares_itself
from lit_dpret.modules.coupling_passes import Passes
from lit_dpret.modules.hook_watch import HookWatch
from lit_dpret.modules.kept_state import OF_A_RUN, KeptState
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.physical_batches import Drops, PhysicalBatches, memory_advice, refuse_where_none_fits
from lit_dpret.privacy.batches import UnitBatch, map_rows, rows_in_turn, take_rows
from lit_dpret.privacy.ledger.gate import (
    ALWAYS,
    Guard,
    no_accountant,
    public_names,
    refuse_other_sums,
    tells_progress,
    undeclared_metric,
)
from lit_dpret.privacy.modes import PrivacyMode, StepCounts
from lit_dpret.privacy.sampling import Row
from lit_dpret.privacy.state_watch import copy_parts, kept_buffers
from lit_dpret.privacy.user_generators import kept_generators, seed_everywhere
from lit_dpret.settings import naming_arguments

if TYPE_CHECKING:
    from lit_dpret.distributed.block_by_block import BlockByBlock
    from lit_dpret.distributed.fsdp import ShardedParameters


#: What the arguments are that `PrivateModule` needs, and where others belong.
_ARGUMENTS = {
    "privacy": "the privacy mode, such as DPSGD(eps=3)",
    "per_row_loss": "write it as a method of your class, or give it to make_private with your module",
    "collate_fn": "write collate_rows as a method of your class, or give collate_fn to make_private with your module",
    "module": "make_private wraps a module of yours; to derive from PrivateModule, make it an attribute",
    "eps": "give privacy=DPSGD(eps=...)",
    "delta": "give privacy=DPSGD(delta=...)",
    "lr": "give optimizer=OptimizerSpec(name=..., lr=...)",
}
Reads = Literal["texts", "images"]
#: What `PrivateModule.save_model` writes.
WEIGHTS = "weights.pt"


def save_weights(state: dict[str, Any], folder: str | Path) -> Path:
    """Write a state dict to ``weights.pt`` in ``folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    copy_parts(state)
    torch.save(state, folder / WEIGHTS)
    return folder


class PrivateModule(Checkpointed):
    """Base of every trainable module, in this package or your own.

    Implement ``collate_rows(rows)`` and ``per_row_loss(rows)``. The loss of a row must depend on
    that row and on public data alone; a module whose loss couples rows says so with
    ``coupled_loss = True`` and is refused by the per-example modes.

    Guarantees:
        - A logical step is taken for every draw, an empty one included.
        - On several ranks the sums of a step are added up before they are noised, and every rank makes the same
          update from the same noise.
        - No update is made without a permit, and every permit is asked for before noise is drawn.
        - What is logged on private rows is refused, unless the mode promises nothing or ``log_private_loss``
          declares the leak; the card then says so.

    Args:
        privacy: The privacy mode.
        optimizer: Name, learning rate and schedule of the optimizer; None where ``configure_optimizers`` is overridden.
        log_private_loss: Log the training loss, and what else is logged, although it is an unaccounted release.

    Raises:
        ConfigurationError: The optimizer corrects for noise, and the mode adds none; or one of them is something else.
    """

    coupled_loss: bool = False
    #: Whether sums and counts of a step are those of all ranks when the guard is asked; a module that says nothing is
    #: trained on one process alone.
    adds_up_over_ranks: bool = True
    #: Whether batches are filled up to a fixed shape for a compiler; None for XLA devices only. A module that
    #: implements ``place_rows`` may say other than False. In low precision under a guarantee they are in any case.
    fixed_shapes: bool | None = False
    #: Features that may vary in width even in batches of fixed shape, such as lists of the places of right answers.
    #: Only masks may be computed from them.
    ragged_features: Sequence[str] = ()
    #: Names of logged numbers, and of tensors that hooks write (such as a teacher), that depend on private rows only
    #: through the trained weights. Declared, not checked; the card says so.
    public_metrics: Sequence[str] = ()
    #: Whether a unit whose computation fails counts as zero instead of ending the run: for weights from an untrusted
    #: party, to whom a failure could reveal private rows (`PhysicalBatches`). One that does not fit into memory counts
    #: as zero under every guarantee.
    drops_failing_units: bool = False
    #: Whether each block's weights are used by calls of its own modules alone, so that they may be gathered for these
    #: and freed after them, where a strategy shards the weights.
    gathers_blocks: bool = False
    #: Which functions may not read other rows, and what else can be done, for messages.
    way_out_of_coupling: str = (
        "collate_rows and per_row_loss; or declare coupled_loss = True and choose a mode for coupled losses"
    )
    #: Whether they are, in this run: no process then holds all weights, or the gradient of all of them.
    in_blocks: bool = False
    #: Which rows of this package's data ``collate_rows`` reads, so that others are refused; None says nothing.
    reads: Reads | None = None
    #: Whether an update is being made: weights, optimizer and step count are then not of one moment.
    updating: bool = False

    @naming_arguments("PrivateModule", _ARGUMENTS)
    def __init__(
        self, *, privacy: PrivacyMode, optimizer: OptimizerSpec | None = None, log_private_loss: bool = False
    ) -> None:
        super().__init__()
        if optimizer is not None and not isinstance(optimizer, OptimizerSpec):
            given = optimizer if isinstance(optimizer, type | str) else type(optimizer)
            raise ConfigurationError(
                f"optimizer={getattr(given, '__name__', given)} is not an OptimizerSpec. Pass "
                "optimizer=OptimizerSpec(name=..., lr=...), by setting optimizer.name=... on the command line, or omit "
                "it and return a torch optimizer from configure_optimizers."
            )
        if not isinstance(privacy, PrivacyMode):
            raise ConfigurationError(f"privacy={privacy!r} is not a privacy mode: give one, such as DPSGD(eps=3).")
        if optimizer is not None and optimizer.uses_noise_std and privacy.guarantee != "dp":
            raise ConfigurationError(
                f"model.optimizer.name={optimizer.name} subtracts the noise of a private mode, and "
                f"privacy={privacy.name} adds none. Choose model.optimizer.name=adam."
            )
        self.automatic_optimization = False
        self.privacy = privacy
        self.optimizer_spec = optimizer
        self.log_private_loss = log_private_loss
        self._leave_run()

    def note_reading(self, counts: Iterable[Callable[[], object]]) -> None:
        """Store what puts back the numbers that change as rows are read and collated."""
        self._couplings.reading = list(counts)

    def put_back_reading(self) -> None:
        """Put back what reading the rows of a batch has counted, before anybody else can read it."""
        for put_back in self._couplings.reading:
            put_back()

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

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Store the constructor's arguments as Lightning does, except ``privacy`` and ``optimizer``."""
        current = inspect.currentframe()
        frame = frame or (None if current is None else current.f_back)
        ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
        super().save_hyperparameters(*args, ignore=[*ignored, "privacy", "optimizer"], frame=frame, logger=logger)

    def collate_rows(self, rows: list[Row]) -> Any:
        """Turn rows of text into the input of ``per_row_loss``: a dict of tensors, first axis rows.

        It may draw from the global generators of torch, ``random`` and numpy. Under a guarantee it is then called for
        the rows of one unit at a time, with coins of that unit, and every unit's tensors have the same shape per row.
        """
        raise UnsupportedModelError(f"{type(self).__name__} does not implement collate_rows(rows).")

    def examine_collation(self, rows: list[Row], others: list[Row]) -> None:
        """Refuse a ``collate_rows`` that remembers: collate rows alone, after others and with others."""
        with self._replayable_dropout(0):
            self._couplings.compare_collations(self, rows, others)

    def examine_reading(self, reads: Sequence[Callable[[], list[Row]]]) -> None:
        """Refuse learning rates that follow from which rows were read; each of ``reads`` gives other ones."""
        if self._hides_rows:
            with self._replayable_dropout(0), Passes(self, KeptState(self), seed=0) as passes:
                passes.compare_reading(reads)

    def place_rows(self, features: Any, places: Sequence[int], rows: int) -> Any:
        """Return features of a fixed shape: those of ``collate_rows`` at ``places``, among ``rows`` rows.

        No size in the result may follow from ``features``, but for `ragged_features`. Rows that are filled in count for
        nothing; copies of a unit's own first row replace them where that unit has rows.
        """
        raise UnsupportedModelError(f"{type(self).__name__} does not implement place_rows(features, places, rows).")

    @property
    def fills_up(self) -> bool:
        """Whether the module defines how to pad a batch to a fixed shape."""
        return type(self).place_rows is not PrivateModule.place_rows

    def per_row_loss(self, rows: Any) -> Tensor:
        """Return the loss of each row, shape ``(rows,)``; random numbers of a row come from torch."""
        raise UnsupportedModelError(f"{type(self).__name__} does not implement per_row_loss(rows).")

    def probe(self) -> Tensor | None:
        """Return `probe_losses` in evaluation mode, without gradients; random streams and the mode stay as they are."""
        with evaluation_mode(self), torch.no_grad(), kept_generators():
            return self.probe_losses()

    def probe_losses(self) -> Tensor | None:
        """Return the losses of some rows that are no data, such as random tokens; None if the module has none.

        A private run is refused, before its ledger opens, where all of them are NaN or infinite. Called in evaluation
        mode and without gradients.
        """
        made: Any = getattr(self, "longest_rows", None)
        return None if made is None else self.per_row_loss(made(1))

    def save_model(self, folder: str | Path) -> Path:
        """Write the trained state dict into ``folder``, which also gets a copy of the card."""
        return save_weights(self.state_dict(), folder)

    def assumptions(self) -> list[str]:
        """Return the trusted assumptions of a claim besides the mechanism, as statements for the card."""
        return []

    def configure_optimizers(self) -> Any:
        spec = self.optimizer_spec
        if spec is None:
            raise ConfigurationError(
                f"{type(self).__name__} has neither optimizer=OptimizerSpec(...) nor configure_optimizers, so it has "
                "no optimizer. Define one of them."
            )
        # The accountant attached the mode in its ``setup``, which Lightning runs before it asks for optimizers.
        noise_std = self.privacy.gradient_noise_std if spec.uses_noise_std else 0.0
        return spec.build(self.parameters(), steps=max(0, self.trainer.max_steps), noise_std=noise_std)

    def configure_model(self) -> None:
        """Shard the parameters over the ranks, once, if the strategy shards (``trainer=fsdp``)."""
        if self._shards is None and self.device_mesh is not None:
            from lit_dpret.distributed.fsdp import ShardedParameters  # not for runs on one process

            compute = torch.bfloat16 if str(self.trainer.precision) == "bf16-mixed" else None
            self._shards = ShardedParameters(self, self.device_mesh["data_parallel"], compute_dtype=compute)
            self.receive_handover(self._shards.handover(Ranks.here()))

    def receive_guard(self, guard: Guard) -> None:
        """Store the guard from the accountant once plan, mode and ledger are ready, and reset the rest."""
        self._guard = guard
        self._ranks = Ranks.here()
        kept = self._shards  # of an earlier fit, whose parameters stay sharded
        self._handover = Handover(self, self._ranks) if kept is None else kept.handover(self._ranks)
        self._physical.begin()
        self._held_error = None
        self._saved_optimizer = {}
        self.updating = self.in_blocks = False
        self._couplings.begin()
        self._hooks.begin()
        self.put_back_reading()
        self._loss_sum = 0.0
        self._losses.clear()

    @property
    def _hides_rows(self) -> bool:
        """Whether nothing of a private row may be logged, or kept by a hook."""
        return self.privacy.guarantee == "dp" and not self.log_private_loss

    def watch_hooks(self) -> None:
        """Start watching hooks, before those of the first batch run."""
        if self._hides_rows:
            self._hooks.note_first(self)

    @contextmanager
    def validating(self, *, on_trial: bool) -> Iterator[None]:
        """Let the step of a validation on public rows write within the block; what it writes on trial is put back."""
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

    def receive_handover(self, handover: Handover) -> None:
        """Called where somebody else than ``.grad`` takes the gradients, after `receive_guard` and before a step."""
        self._handover = handover

    @property
    def in_shards(self) -> bool:
        """Whether this process completes and keeps only a part of each parameter."""
        return self._handover.in_shards

    def whole(self) -> AbstractContextManager[object]:
        """Let every rank run the module within the block; a collective call."""
        return self._handover.whole()

    def by_block(self) -> BlockByBlock | None:
        """Return what gathers the weights of one block at a time from now on; None where they are gathered at once."""
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (state := checkpoint.get("state_dict")) is not None:
            keep_masters(state, self, self.trainer.optimizers)
        super().on_save_checkpoint(checkpoint)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log as Lightning does; under a guarantee, only declared public values or declared leaks."""
        if self._hides_rows and name not in self._public() and not tells_progress(name, value, self._trainer):
            raise undeclared_metric(repr(name), self.privacy)
        if not self._rehearses:
            super().log(name, value, *args, **kwargs)

    def _public(self) -> frozenset[str]:
        callbacks = () if self._trainer is None else self._trainer.callbacks  # type: ignore[attr-defined]
        return public_names([self, *callbacks])

    @property
    def _counted_by(self) -> Guard:
        if self._guard is None:
            raise no_accountant(type(self).__name__)
        return self._guard

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Return none; refuse settings that need Lightning's optimization, and name the replacement."""
        training = self._trainer is not None and self._trainer.state.fn == "fit"
        if training:
            self._refuse_other_data()
        if training and self.privacy.guarantee == "dp":
            refuse_other_sums(self._trainer)
        return []

    def _refuse_other_data(self) -> None:
        """Refuse what is not a DataModule in its place, before Lightning asks it for what only those have."""
        trainer = self.trainer
        data: Any = getattr(trainer, "datamodule", None)
        if data is None or isinstance(data, LightningDataModule):
            return
        trainer.datamodule = None  # type: ignore[attr-defined]  # Lightning would tell it of the error
        if isinstance(data, type):
            raise ConfigurationError(
                f"trainer.fit(datamodule={data.__name__}) is a class, and one of its objects is needed: "
                f"datamodule={data.__name__}(...)."
            )
        raise ConfigurationError(
            f"trainer.fit(datamodule=...) is a {type(data).__name__} and no LightningDataModule. A data set goes into "
            "UnitDataModule(dataset, unit_of=...), which names the unit of each row."
        )

    def on_fit_start(self) -> None:  # before the loader is asked for batches, which it has from the accountant
        _ = self._counted_by

    def training_step(self, batch: UnitBatch, batch_idx: int) -> None:
        guard = self._counted_by
        if self._hides_rows:
            self._or_hold_error(lambda: self._hooks.compare(self, batch, self._public() | ALWAYS))
        with self._handover.clipping():
            split = self.may_split
            # That a unit fits nowhere follows from its rows alone: an end of the run would tell of them.
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
                    f"Memory ran out while step {batch.step} was noised or its update was made; the ledger holds what "
                    "was charged for it. Reduce memory besides the step: choose an optimizer with fewer states "
                    "(model.optimizer.name=adafactor or sgd), a strategy that shards, or model.lora. Then go on with "
                    "resume=true."
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
        """Do the part of a step that a rank does alone; what it refuses is raised later, on all ranks together.

        A rank that left at once would leave the others with a broken connection, and with it rank 0, which has to
        write down what the refusal means for the claim. After an error nothing more is added.
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

    @property
    def may_split(self) -> bool:
        """Whether the units of a physical batch may be split: not if they are compared with each other."""
        return self.privacy.sub_batches is None and not self.coupled_loss

    def _add_piece(self, batch: UnitBatch, first: int) -> None:
        """Contribute a physical batch, or a piece of one from its unit ``first`` on, with dropout masks of its own."""
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
        """Add one physical batch to the sum of its logical step, dropout masks and other coins keyed by ``seed``."""
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
                if self.privacy.guarantee == "dp":  # after the engine, whose refusals say more; nothing was let out yet
                    self._couplings.look(self, batch, seed)
            finally:
                self._couplings.put_back(self)

    def before_batch(self, batch: UnitBatch) -> None:
        """Prepare further inputs of the loss for a physical batch with rows, such as public passages."""

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
        guard.record(permit, update)  # it lets go of the sums, and measures what becomes of them
        optimizer: Any = self.optimizers()
        self._handover.give(update.gradients, optimizer)
        with self._watched_update(optimizer, guard.stream.model_seed(attempt, step, 0)):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._move_schedules(step + 1)
        self.updating = False
        if self._hides_rows:
            self._hooks.note_weights(self)
        if self.privacy.guarantee == "dp":  # of released weights alone, so that an end by them tells nothing further
            self._ranks.together(lambda: refuse_infinite(self, step), quick=True)
        if not self._hides_rows:
            self.log("train/loss", self._loss_sum / max(units, 1), on_step=True, prog_bar=True, batch_size=1)
        self._loss_sum = 0.0

    def _move_schedules(self, done: int) -> None:
        """Step every schedule that is due by its ``interval`` and ``frequency``; a step is a logical one."""
        if self._trainer is None:  # a step that is put to the test by itself
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

    def unit_loss(self, batch: UnitBatch) -> Callable[..., Tensor]:
        """Return a function that runs the forward pass and returns one loss per row, ``(rows,)``.

        They are scaled so that their sum inside a unit is the unit's mean. Given indices of rows, ``(n,)``, the
        function runs the forward pass of these alone.
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
                    f"{type(self).__name__}.per_row_loss returned shape {tuple(loss.shape)} for "
                    f"{len(weights)} rows; it must return one loss per row, as torch's losses do under "
                    "reduction='none'."
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

        A tensor stays on its device until the step is made: to read it earlier is to wait for it.
        """
        if isinstance(total, Tensor):
            self._losses.append(total)
        else:
            self._loss_sum += total

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]] | None:
        """Return the token ids of texts, queries or passages; None if the module reads no tokens.

        ``whole`` leaves the side's maximal length out: what differs then is cut.
        """
        return None

    def canary_scores(self, rows: Sequence[Row]) -> Tensor:
        """Return how well the model knows each row, higher for trained ones, float64 on the CPU; here minus the loss.

        It is deterministic, and leaves the module in its mode. Of private rows the scores are as private as the rows.
        """
        with evaluation_mode(self), torch.no_grad():
            found = [-self.per_row_loss(features) for features in self.features_in_turn(rows)]
        return torch.cat(found).double().cpu()

    def features_in_turn(self, rows: Sequence[Row], *, at_once: int = 32) -> Iterator[Any]:
        """Yield ``collate_rows`` of some rows at a time, on the module's device."""
        for part in rows_in_turn(len(rows), at_once):
            yield map_rows(lambda tensor: tensor.to(self.device), self.collate_rows(list(rows[part])))

    @contextmanager
    def _replayable_dropout(self, seed: int) -> Any:
        with kept_generators():
            seed_everywhere(seed)
            seed_xla(self.device, seed)
            yield


def refuse_infinite(module: nn.Module, step: int) -> None:
    """Refuse trained weights that are NaN or infinite, as far as they lie on this rank, after logical step ``step``."""
    held = {name: _lies_here(one) for name, one in module.named_parameters() if one.requires_grad}
    held = {name: one for name, one in held.items() if one.is_floating_point() and one.numel()}
    if not held or bool(nn.utils.get_total_norm(held.values(), math.inf).isfinite()):
        return
    name = next(name for name, one in held.items() if not bool(one.isfinite().all()))
    raise DivergenceError(
        f"The weights are not finite after step {step + 1} ({name} first), and further steps would spend the budget "
        "for nothing. The steps so far are charged, and the claim is that of the planned ones. The last checkpoint is "
        "finite: resume=true with trainer.max_steps at the step in its name writes its model and card. To train "
        "further, begin another run with a lower learning rate (model.optimizer.lr), here or from that model "
        "(init_from)."
    )


def _lies_here(parameter: nn.Parameter) -> Tensor:
    """Return what this rank holds of a parameter that may be sharded, by FSDP2 or ZeRO-3."""
    found: Any = parameter.detach()
    part = getattr(parameter, "ds_tensor", None)
    return cast(
        Tensor, part.detach() if part is not None else found.to_local() if hasattr(found, "to_local") else found
    )


@contextmanager
def _wide_defaults() -> Iterator[None]:
    """Make float32 the default type within: under ``precision=bf16-true`` Lightning makes it bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(before, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
