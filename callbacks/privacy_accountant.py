"""The accountant: calibrate the noise, grant and record every release in advance, and stop within the budget.

Before a logical step may draw noise, the gate checks that the budget covers it and appends an *intent* to a ledger on
disk. After the step it appends what was actually done. A run that is killed in between has paid for the step. Epsilon
is always computed from that ledger, never from the configuration.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.hooks import RemovableHandle

from lit_dpret.callbacks.averages import averaging, go_on_averaging
from lit_dpret.callbacks.checkpoint_files import (
    optimizer_settings,
    refuse_checkpoint_of_other_run,
    refuse_other_positions,
    refuse_short_schedules,
    tell_repeated,
    tell_restored_settings,
)
from lit_dpret.callbacks.checkpoints import BetweenSteps, CheckpointGate, count_by_steps, hide_batches
from lit_dpret.callbacks.endings import ends_by_rows, fails_in_update, hear_no_worker
from lit_dpret.callbacks.fixed_shapes import attach_batches, place_early, tie_again
from lit_dpret.callbacks.log_gate import LogGate, tell
from lit_dpret.callbacks.origins import OwnWeights, claim_of, refuse_called, refuse_other_weights
from lit_dpret.callbacks.own_code import (
    UnchangedUnits,
    refuse_first_asked,
    refuse_other_units,
    refuse_remembering_collation,
    refuse_replaced_rows,
    refuse_replaced_sampler,
    refuse_shared_draws,
)
from lit_dpret.callbacks.physical_batch import fit_physical_batch
from lit_dpret.callbacks.planning import require_agreement, tell_plan
from lit_dpret.callbacks.progress import count_steps
from lit_dpret.callbacks.refusals import takes_whole_epochs
from lit_dpret.callbacks.run_ledgers import RunLedgers
from lit_dpret.callbacks.strategies import keep_the_sampler, note_sigterm_quietly, refuse_own_optimizers, strategy_name
from lit_dpret.callbacks.unseen_writes import UnseenWrites, UpdateCounter
from lit_dpret.distributed.ranks import Ranks, is_of_lost_rank
from lit_dpret.errors import BudgetExceededError, ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.ledger.gate import ReleaseGate, undeclared_metric
from lit_dpret.privacy.ledger.private_run import Position, PrivateRun, state_hash
from lit_dpret.privacy.ledger.run_ledger import FAILED, PRIVATE_LOG_EVENT, UNITS_UNNAMED
from lit_dpret.privacy.ledger.shared_gate import SharedGate
from lit_dpret.privacy.ledger.trained import TrainedIn, extra_states, merged_values, values_of
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.state_watch import copy_parts
from lit_dpret.settings import require_choice

#: Lightning's advice that does not apply here: by design, the sampler resumes by step number, and a checkpoint holds
#: the state after the update.
_NOT_FOR_US = ("your dataloader is not resumable", "pre-optimization state")


class PrivacyAccountant(RunLedgers):
    """Compose every release into ``privacy/eps_spent``; end the run within its budget.

    Guarantees:
        - No noise is drawn before the ledger on disk records it.
        - The step that would overspend is refused by an exception before it runs, even if it is the
          first; ``min_epochs`` and ``min_steps`` cannot overrule this.
        - After a crash, epsilon is never less than was spent, if the ledger is the newest one. A step is
          repeated under its old noise only if the state before it and its clipped sum are bit for bit the same.
        - Under a claim, weights that another run is known to have trained on private data are refused, however they
          came into the module, unless ``init_from`` names a run that counts them. So is every checkpoint of another
          run.
        - A resume with another noise multiplier, clip norm, sampling law or data set is refused, and so is one that
          leaves the ledger of its data set. A resume with fewer steps ends earlier, and claims the planned steps.
        - With ``privacy.dataset_ledger``, no step is made that would bring the total of all runs on
          the data set past ``privacy.total_eps``. Each fit reserves its own steps, also a second one
          with the same object.
        - Only values declared public are logged, and no logger learns when a step was made (`LogGate`).
        - On several ranks there is one ledger, that of rank 0, whose grants and refusals hold on all ranks.

    Args:
        run_dir: The folder of the ledger; null for the Trainer's ``default_root_dir``.
        resume: Continue the ledger found there. False refuses an existing ledger, true a missing one.
        resume_reserve: Extra steps that the calibration pays for in advance, so that steps repeated
            after a crash do not end the run early.
        replay: ``auto`` repeats steps bit by bit on a CPU in float32 or float64; ``never`` always
            draws fresh noise after a crash, and charges it.
        eps_log_points: The maximum number of times that epsilon is computed and logged during the run.
        init_from: The run whose model this one starts from; its cost goes into the ledger and the claim.
            ``privacy.eps`` remains the budget of this run alone.
        init_from_is_public: Declares that no private data went into that model or, without ``init_from``, into the
            weights that were set after the module was built. The card names the declaration.
        trial_of: The folder of the sweep that the run is a trial of. The run takes over one of the reservations that
            the sweep made in its data-set ledger; the run's own ledger and card name the sweep.
    """

    counts_releases = True
    #: Whether a caller composes this run with those that trained its weights before (rounds of federated learning).
    counted_by_others = False

    def __init__(
        self,
        *,
        run_dir: str | Path | None = None,
        resume: bool = False,
        resume_reserve: int = 0,
        replay: str = "auto",
        eps_log_points: int = 10,
        init_from: str | Path | None = None,
        init_from_is_public: bool = False,
        trial_of: str | Path | None = None,
    ) -> None:
        require_choice("callbacks.accountant.replay", replay, ("auto", "never"))
        super().__init__(
            run_dir=run_dir, resume=resume, resume_reserve=resume_reserve, init_from=init_from,
            init_from_is_public=init_from_is_public, trial_of=trial_of,
        )  # fmt: skip
        self._takes_the_trainers = run_dir is None
        self.replay = replay
        self.eps_log_points = eps_log_points
        self._calls: RemovableHandle | None = None
        self._updates = UpdateCounter(self._require_granted)
        self._forget_earlier_fit()

    def _forget_earlier_fit(self) -> None:
        """Discard all state of an earlier fit with this object, including its reservation and position."""
        self._close_account()
        self._account = None
        self._allow_calls()
        self._restored: Position | None = None
        self.log_gate: LogGate | None = None
        self._checkpoint_gate: CheckpointGate | None = None
        self._weights: OwnWeights | None = None
        self._noted: set[str] = set()
        self._early = self._begun = self._ended = self._in_batch = self._with_rows = self._counts_epochs = False
        self._asked = False
        self._step, self._trial_at = 0, -1
        self._strange: str | None = None
        self._unchanged: UnchangedUnits | None = None
        self._updates.reset()
        for name in ("_run", "_gate", "_between", "_identity"):  # a missing one means that setup did not get this far
            vars(self).pop(name, None)

    def epsilon(self) -> float:
        """Epsilon spent so far, from the ledger; on ranks other than 0, as last shared."""
        return self._gate.epsilon()

    # -- setup: plan, open the ledger, install the gates --------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._forget_earlier_fit()
        for words in _NOT_FOR_US:
            warnings.filterwarnings("ignore", message=f".*{words}")
        ranks = self._ranks = Ranks.here()
        module: Any = pl_module
        data: Any = getattr(trainer, "datamodule", None)
        self._trainer, self._module, self._data = trainer, module, data
        if self.run_dir is None or self._takes_the_trainers:
            self.run_dir = Path(trainer.default_root_dir)
        self._calls = refuse_called(trainer, module, self, data)

        # Every rank plans by itself, and all plans must agree.
        begun_with = ranks.share(self._begun_with)
        own_plan = ranks.together(lambda: self._planned(trainer, module, data, begun_with))
        planned = ranks.share(lambda: own_plan)
        mode: PrivacyMode = module.privacy
        self._mode = mode
        secret = ranks.share(lambda: self._secret(mode))
        stream = KeyedStream(secret, "agreement")
        require_agreement(trainer, module, data, planned=own_plan, stream=stream, ranks=ranks)
        planned = fit_physical_batch(trainer, module, data, planned, ranks)
        self.plan, self.planned_steps = planned.plan, planned.steps_to_make
        tell_plan(self.plan, self.planned_steps)
        if trainer.max_epochs == -1 and takes_whole_epochs(trainer):  # for a progress bar; max_steps ends the run
            trainer.fit_loop.max_epochs = math.ceil(planned.steps / planned.steps_per_epoch)
            self._counts_epochs = True

        # Rank 0 opens the ledger; the gate later shares its grants and refusals.
        run_id = ranks.share(lambda: self._open(trainer, module, data, planned, secret))
        self._identity = ranks.share(lambda: self._run.identity)
        self._in_dataset = ranks.share(lambda: self._dataset is not None)
        self._fingerprint = ranks.share(lambda: self._run.data_fingerprint)
        stream = self._run.stream if ranks.is_first else KeyedStream(secret, run_id, secure_rng=mode.secure_rng)
        self.sampler = planned.sampler(data, stream, ranks=ranks)
        self.sampler.watched = self.plan is not None
        self.sampler.before_first_draw = lambda: self._begin_to_draw(trainer, pl_module)
        own = None
        if ranks.is_first:
            # Nothing is reserved until the account does so: a step before that is refused.
            reserved_until = None if self._dataset is None else 0
            own = ReleaseGate(self._run, self.plan, mode, self.sampler, reserved_until=reserved_until)
        strategy = strategy_name(trainer)
        self._gate = SharedGate(
            own, stream=stream, run_id=run_id, sampler=self.sampler, ranks=ranks, plan=self.plan,
            whole=strategy == "ddp", parts=strategy in ("fsdp", "deepspeed"),
        )  # fmt: skip

        self._attach(trainer, module, data, stream)
        count_steps(trainer, self.sampler.steps_per_epoch)
        whole = mode.guarantee == "dp" and strategy in ("one_device", "ddp")
        self._writes = UnseenWrites(trainer, module, ranks, whole=whole)
        self._between = BetweenSteps(trainer, module, self._complete)
        if mode.guarantee == "dp":
            declare = self._note_private if module.log_private_loss else None
            self.log_gate = LogGate(trainer, module, step=lambda: self._gate.steps_done, declare=declare)
            if self.sampler.physical_batches_per_step is None:
                self.log_gate.log_every_batch()

    def _attach(self, trainer: L.Trainer, module: Any, data: Any, stream: KeyedStream) -> None:
        mode: PrivacyMode = module.privacy
        if averaging(trainer) is not None and hasattr(module, "prepare"):
            self._ranks.in_turn(lambda: module.prepare(data))  # the average copies weights in their final shapes
        attach_batches(trainer, module, data, self.sampler)
        keep_the_sampler(trainer)
        self._shared = place_early(trainer, module)
        self._ranks.together(lambda: mode.attach(module, self.plan, stream))
        module.receive_guard(self._gate)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attach the mode to the strategy's parameters: engines identify parameters by object identity."""
        module: Any = pl_module
        self._ranks.together(lambda: refuse_own_optimizers(trainer, module))
        self._rates = optimizer_settings(trainer)
        refuse_short_schedules(trainer, self.planned_steps)
        if averaging(trainer) is not None and hasattr(module, "take_precision"):
            module.take_precision()
        if (refuse_another := getattr(module, "refuse_another_optimizer", None)) is not None:
            refuse_another()
        if self.log_gate is not None:
            self.log_gate.watch_results()
        if getattr(module, "in_shards", False):
            by_block = module.by_block()
            with module.whole() if by_block is None else by_block.placed():
                self._ranks.together(lambda: module.privacy.attach(module, self.plan, self._gate.stream))
            if by_block is not None:
                module.privacy.keep_in(by_block)

    # -- resuming ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._gate.position.to_dict() if hasattr(self, "_gate") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = Position.from_dict(state_dict, place="The checkpoint") if state_dict else None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse another run's checkpoint, and recompute the counters, since it may count batches differently."""
        module: Any = pl_module
        if trainer.state.fn != "fit" or "_gate" not in vars(self):
            return
        position = Position.among(checkpoint.get("callbacks", {}), place="The checkpoint")
        if position is not None and takes_whole_epochs(trainer):
            count_by_steps(checkpoint, position.steps_done, self.sampler)
        self._writes.expect(checkpoint)
        if not self.counted_by_others and module.privacy.guarantee != "none":
            refuse_checkpoint_of_other_run(module, position, self._gate.position, self.run_dir)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        refuse_replaced_sampler(trainer.train_dataloader, self.sampler)
        module: Any = pl_module
        if module.privacy is not self._mode:
            raise ConfigurationError(
                f"privacy of {type(module).__name__} was replaced after the run was planned. Pass the mode to the "
                "module's constructor, and do not replace it."
            )
        if self.plan is not None:
            self._ranks.together(lambda: self._examine_data(trainer, pl_module))
        note_sigterm_quietly(trainer)
        if self.log_gate is not None:
            self.log_gate.training = True
        self._between.note_requeue_quietly()
        self._begin(trainer, pl_module)
        # Lightning has fetched a batch already, but the checkpoint may be at a different step.
        if self._early and (fetcher := trainer.fit_loop._data_fetcher) is not None:
            self.sampler.next_step = self._gate.steps_done
            iter(fetcher)

    def _examine_data(self, trainer: L.Trainer, module: Any) -> None:
        loader: Any = trainer.train_dataloader
        if module.privacy.guarantee == "dp":
            refuse_shared_draws(loader, self.sampler.units)
        self._with_rows = True
        if not refuse_other_units(loader, self.sampler) and self._ranks.is_first:
            self.ledger.append("event", name=UNITS_UNNAMED, unit=module.privacy.unit)
        if module.privacy.guarantee == "dp":
            refuse_replaced_rows(self._data, self._gate.stream, self._fingerprint)
            refuse_remembering_collation(module, getattr(loader, "dataset", None), self.sampler)
            if getattr(loader, "dataset", None) is not None:
                self._unchanged = UnchangedUnits(loader.dataset, self.sampler)
        self._with_rows = False

    def _begin_to_draw(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the data set before the loader reads it, and begin: Lightning fetches before ``on_train_start``."""
        loader: Any = trainer.train_dataloader
        if self.plan is not None and not self._asked and loader is not None:
            self._asked = self._with_rows = True
            self._ranks.together(lambda: refuse_first_asked(loader, self.sampler))
            self._with_rows = False
        self._begin(trainer, pl_module)

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Determine where to continue, and reserve the steps, before the first random draw."""
        if self._begun:
            return
        if not trainer.strategy.optimizers:  # a schedule being built asked for `trainer.estimated_stepping_batches`
            self._early = True
            return
        self._begun = True
        module: Any = pl_module
        run: PrivateRun | None = vars(self).get("_run")
        refuse_other_positions(trainer, self._restored, run, self.run_dir, self._ranks)
        if self._restored is None:  # weights of its own checkpoint are known to the ledger
            self._ranks.together(lambda: refuse_other_weights(module, self, self._data))
        inherited = module.privacy.guarantee == "inherited"
        itself = claim_of(self._data) if inherited else self._identity
        self._weights = OwnWeights(
            module, TrainedIn(itself, module.privacy.name, str(self.run_dir)), self.start(),
            callbacks=trainer.callbacks,  # type: ignore[attr-defined]
        )  # fmt: skip
        if self._restored is not None:
            go_on_averaging(trainer, pl_module)
            tell_restored_settings(self._rates, optimizer_settings(trainer))
        wrapped: Any = module.optimizers()
        optimizer = wrapped.optimizer if hasattr(wrapped, "optimizer") else wrapped
        # FSDP2 creates missing optimizer state by a step at learning rate 0 while a checkpoint is saved.
        self._updates.watch(optimizer, lambda: self._in_batch and not self._between.saving)
        deterministic = pl_module.device.type == "cpu" and str(trainer.precision) in ("32-true", "64-true")
        whole = strategy_name(trainer) in ("one_device", "ddp")  # rank 0 sees the whole sum, model and optimizer
        replays = self.replay == "auto" and deterministic and whole
        # The last bits of a sum depend on the number of ranks and on the physical batches.
        state = partial(
            state_hash, pl_module, optimizer, summed=(self.sampler.physical_batch_size, self._ranks.world_size)
        )
        self._gate.begin(self._restored, state if replays else None)
        if self.resume and run is not None:
            tell_repeated(run, self._gate.steps_done, self.planned_steps)
        if module.privacy.guarantee == "dp":
            self._trial_at = self._gate.steps_done + 1
            declare = self._note_kept if module.log_private_loss else None
            self._checkpoint_gate = CheckpointGate(trainer, module, self._between.put_together(False), declare)
            self._writes.expect_at_saving(self._checkpoint_gate)
        self._ranks.share(self._reserve)

    def refuse_unseen_writes(self) -> None:
        """Refuse writes made outside a step, before weights are saved."""
        if self._module.privacy.guarantee == "dp":
            self._writes.refuse_before_saving(self._checkpoint_gate)

    # -- during the run ----------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._writes.refuse_before_first_batch()
        if (watch := getattr(pl_module, "watch_hooks", None)) is not None:
            watch()
        if batch.step == self._trial_at and batch.part == self._ranks.rank:
            self._ranks.together(self._try_states)
        self._in_batch, self._step = True, batch.step
        self._between.begin_batch(batch.step)
        if self.plan is not None:
            self._require_drawn(batch)
        if batch.part == self._ranks.rank:  # the first of its step on this rank
            try:
                self._gate.require_budget(batch.step)
            except BudgetExceededError:
                self._save_paid(trainer, trainer.save_checkpoint)
                raise

    def _try_states(self) -> None:
        """Check callback states after the first step: by the first checkpoint, the whole budget may be spent."""
        if (gate := self._checkpoint_gate) is not None:
            callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
            gate.check({"callbacks": {each.state_key: each.state_dict() for each in callbacks}})

    def _save_paid(self, trainer: L.Trainer, save: Callable[[Path], None]) -> None:
        """Write a checkpoint of all completed steps, from which a resume can write the model."""
        folders = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
        if self._gate.steps_done and (folder := next(filter(None, folders), None)) is not None:
            last = Path(folder) / "last.ckpt"
            if last.is_symlink() and self._ranks.is_first:  # keep the file that it points to
                last.unlink()
            save(last)

    def _require_drawn(self, batch: Any) -> None:
        """Refuse on all ranks, before its release, a step whose units are not those drawn."""
        try:
            self.sampler.require_drawn(batch)
            if self._unchanged is not None:
                self._unchanged.compare_drawn(batch.contents)
        except DataError as error:
            self._strange = str(error)
        if not batch.last:
            return
        if (found := next(filter(None, self._ranks.gather(self._strange, quick=True)), None)) is not None:
            self._gate.void_attempt()  # on all ranks, since all gathered it
            raise DataError(found, trap="T38")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._updates.count("Lightning")

    def _require_granted(self, updates: int) -> None:
        """Forfeit the claim and raise on an update that was not granted, as from a custom ``training_step``."""
        if self.plan is None or updates <= self._gate.granted:
            return
        self._gate.forfeit()
        raise ConfigurationError(
            f"An optimizer makes update {updates}, but only {self._gate.granted} steps were granted. Define "
            f"per_row_loss in {type(self._module).__name__}, and do not override the training_step of PrivateModule.",
            trap="T7",
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._in_batch = False
        if not batch.last:
            return
        if self._weights is not None:
            self._weights.mark_trained(pl_module)
            self._weights.note_step()
        self._between.end_step(self._ranks)
        if self.plan is None:
            return
        if self._in_dataset:
            self._ranks.share(self._keep_covered)
        done = batch.step + 1
        if done & (done - 1) == 0:  # a power of two
            self._compare_units()
        if (fraction := self._gate.clip_fraction) is not None:
            tell(trainer, {"privacy/clip_fraction": fraction}, done)
        every = max(1, -(-self.planned_steps // max(1, self.eps_log_points)))
        if done % every == 0 or done == self.planned_steps:
            spent = {"privacy/eps_spent": self._gate.share_epsilon(), "privacy/delta": self.plan.budget.delta}
            tell(trainer, spent, done)

    def _compare_units(self) -> None:
        if self._unchanged is None:
            return
        try:
            self._ranks.together(self._unchanged.compare)
        except DataError:
            self._gate.void_attempt()  # the data may have changed in any earlier step
            raise

    def _note_private(self, name: str) -> None:
        """Record for the card that a private number is shown; refuse once the run has ended, when it is too late."""
        if name in self._noted:
            return
        if self._ended:
            raise undeclared_metric(repr(name), self._module)
        self._noted.add(name)
        if self._ranks.is_first:
            self.ledger.append("event", name=PRIVATE_LOG_EVENT, logged=name)

    def _note_kept(self, name: str) -> None:
        """Record that a checkpoint holds a private number; not after the end, when its card claims nothing anyway."""
        if not self._ended:
            self._note_private(name)

    def _complete(self, checkpoint: dict[str, Any]) -> None:
        """Complete a checkpoint: remember its weights, set its counters to a whole step, and check its contents."""
        trainer = self._trainer
        # The second key exists where an average replaced the weights under the first.
        states = [checkpoint[name] for name in ("state_dict", "current_model_state") if name in checkpoint]
        for state in states:
            copy_parts(state)
        if self._weights is not None:
            for state in states:
                self._weights.remember(state.items())
            self._weights.remember(merged_values(self._module))  # a user of the checkpoint may merge its adapters
        loops = trainer._checkpoint_connector._get_loops_state_dict()
        checkpoint |= {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "loops": loops}
        self._between.set_back(checkpoint, self._gate.steps_done)
        if self.plan is not None and self.sampler.physical_batches_per_step is None:
            hide_batches(checkpoint, self._gate.steps_done)
        if (gate := self._checkpoint_gate) is not None:
            # After an error on this rank, the others may not reach this point.
            ranks = Ranks() if trainer.interrupted else self._ranks
            if not (trainer.interrupted or self._ended):
                ranks.together(self._writes.refuse_after_last_batch)
            ranks.together(lambda: gate.check(checkpoint))
        if hasattr(self._module, "complete_checkpoint"):  # a custom module may lack it
            self._module.complete_checkpoint(checkpoint)

    # -- the end -----------------------------------------------------------------------------

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compare_units()
        self._ended = True
        self._allow_calls()  # calls no longer train anything: an older model may be compared with this one
        self._remember(pl_module)
        # A hook that skips a batch ends the epoch and so the run, perhaps because of the batch's rows.
        short = self.plan is not None and self._gate.steps_done < self.planned_steps and not trainer.should_stop
        self._ranks.share(lambda: self._finish(FAILED if short else "finished"))
        if self._ranks.world_size > 1:
            self._gate.share_epsilon()  # so that every rank can report it after the run

    def _finish(self, reason: str) -> None:
        self._gate.take_forfeits()
        if self._account is not None:
            self._account.settle()
        self.ledger.append("end", reason=reason, steps=self._gate.steps_done)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End a run resumed after its last step, for which Lightning skips training and ``on_train_end``."""
        if not self._ended and hasattr(self, "_gate"):
            self._begin(trainer, pl_module)
            self.on_train_end(trainer, pl_module)
        if hasattr(self, "_shared"):
            tie_again(pl_module, self._shared)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        hear_no_worker()
        self._allow_calls()
        self._remember(pl_module)
        begun = hasattr(self, "_gate") and not self._ended  # once ended, the card names the ledger's last record
        # A coupling or an uncovered weight that is found late may have affected earlier steps.
        late = begun and isinstance(exception, UnsupportedModelError) and self.plan is not None
        try:
            if late and self._gate.steps_done:
                self._gate.forfeit()
            failed = begun and self.plan is not None and self._ends_by_rows(exception)
            finished = begun and self.plan is not None and self._gate.steps_done == self.planned_steps
            if finished and self._ranks.world_size == 1 and not (late or isinstance(exception, OSError)):
                self._save_paid(trainer, self._between.rescue)
            if begun and hasattr(self, "_run"):  # this rank holds the ledger
                if isinstance(exception, OSError) and not failed:
                    self._gate.take_forfeits()  # the disk may be full; a resume can write the end
                else:
                    self._finish(FAILED if failed else type(exception).__name__)
        finally:
            self._count_no_epochs(trainer)
            if hasattr(self, "_run"):
                self._close()

    def _ends_by_rows(self, error: BaseException) -> bool:
        """Judge by this rank's own error, or by the verdict of the rank that failed first; leave it for the others."""
        by_rows, by_none = (f"{self._identity} {self._gate.attempt} {word}" for word in ("rows", "no row"))
        if is_of_lost_rank(error):
            found = self._ranks.word_was_left(by_rows) or not self._ranks.word_was_left(by_none)
        else:
            # After a step is recorded, its update depends only on released values.
            of_update = self._gate.steps_done > self._step and fails_in_update(error)
            found = ends_by_rows(error, at_hand=self._with_rows or (self._in_batch and not of_update))
        self._ranks.leave_word(by_rows if found else by_none)
        return found

    def _count_no_epochs(self, trainer: L.Trainer) -> None:
        if self._counts_epochs:
            trainer.fit_loop.max_epochs = -1

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._allow_calls()
        self._remember(pl_module)  # again: a callback may have replaced the weights by an average
        self._count_no_epochs(trainer)
        if hasattr(self, "_between"):
            self._between.release()
        self._updates.release()
        if hasattr(self, "_run"):
            self._close()

    def _remember(self, module: Any) -> None:
        if self._weights is not None:
            self._weights.note_step()
            self._weights.remember([*values_of(module), *extra_states(module)])

    def _allow_calls(self) -> None:
        if self._calls is not None:
            self._calls.remove()

    def _close(self) -> None:
        self._close_account()
        self.ledger.close()
        self._ended = True
