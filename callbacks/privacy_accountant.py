"""The accountant: it calibrates, has every release granted and written down first, and stops in time.

The order is what makes the number honest. Before a logical step may draw noise, the gate checks that
the budget covers it and appends an *intent* to a ledger on disk; after the step it appends what was
really done. A run that is killed in between has paid for the step. Epsilon is always computed from
that ledger, never from the configuration.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_dpret.callbacks.agreement import require_agreement
from lit_dpret.callbacks.fixed_shapes import place_early, shape_of_batches, tie_again
from lit_dpret.callbacks.inputs import fingerprint_of_files
from lit_dpret.callbacks.physical_batch import fit_physical_batch
from lit_dpret.callbacks.planning import PlannedRun, plan_run
from lit_dpret.callbacks.refusals import refuse_broken_claims, refuse_replaced_sampler
from lit_dpret.callbacks.strategies import keep_the_sampler, note_sigterm_quietly, strategy_name
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy.card import LEDGER_NAME
from lit_dpret.privacy.dataset_account import DatasetAccount
from lit_dpret.privacy.dataset_ledger import DatasetLedger
from lit_dpret.privacy.fingerprints import state_hash
from lit_dpret.privacy.gate import ReleaseGate
from lit_dpret.privacy.ledger import PrivacyLedger
from lit_dpret.privacy.modes import GaussianMode, PrivacyMode
from lit_dpret.privacy.noise import KeyedStream, load_secret, published_secret
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.ranks import Ranks
from lit_dpret.privacy.releases import Release
from lit_dpret.privacy.run import Position, PrivateRun
from lit_dpret.privacy.sampling import UnitCollator
from lit_dpret.privacy.shared_gate import SharedGate
from lit_dpret.privacy.start import Start, note_start, read_start
from lit_dpret.privacy.sweep_places import note_sweep
from lit_dpret.sweeps import SweepFolder, trial_ledger


class PrivacyAccountant(Callback):
    """Compose every release into ``privacy/eps_spent``; end the run inside its budget.

    Guarantees:
        - No noise is drawn before the ledger on disk says so.
        - The step that would overspend is refused by an exception before it runs, the first one
          included; ``min_epochs`` and ``min_steps`` cannot overrule it.
        - After a crash, epsilon is never less than was spent. A step is repeated under its old
          noise only where the state before it and its clipped sum are bit for bit the same.
        - A resume with another sigma, clip norm, sampling law or data set is refused, and so is one that
          leaves the ledger of its data set.
        - With ``privacy.dataset_ledger``, no step is made that would bring the total of all runs on
          the data set past ``privacy.total_eps``; each fit reserves its own steps, also a second one
          with the same object.
        - On several ranks there is one ledger, that of rank 0: what it grants or refuses holds on all.

    Args:
        run_dir: Where the ledger lies; null for the Trainer's ``default_root_dir``.
        resume: Go on with the ledger found there. Without it, an existing ledger is refused.
        resume_reserve: Extra steps that the calibration pays for in advance, so that re-executed
            steps after a crash do not end the run early.
        replay: ``auto`` repeats steps bit by bit on a CPU in float32 or float64; ``never`` always
            draws fresh noise after a crash, and charges it.
        eps_log_points: How often epsilon is computed and logged during the run, at most.
        init_from: The run whose model this one starts from; its cost goes into the ledger and the claim.
            ``privacy.eps`` stays the budget of this run alone.
        init_from_is_public: Declares that nothing private went into that model.
        trial_of: The folder of the sweep that the run is a trial of. The run takes over one of the reservations that
            the sweep made in its ledger of the data set, and its own ledger and card tell of the sweep.
    """

    counts_releases = True

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
        if replay not in ("auto", "never"):
            raise ConfigurationError(f"callbacks.accountant.replay={replay!r} is not one of auto, never.")
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.resume = resume
        self.resume_reserve = resume_reserve
        self.replay = replay
        self.eps_log_points = eps_log_points
        self.init_from, self.init_from_is_public = init_from, init_from_is_public
        self.sweep = None if trial_of is None else SweepFolder.read(trial_of)
        self.plan: PrivacyPlan | None = None
        self._start: Start | None = None
        self._dataset: DatasetLedger | None = None
        self._account: DatasetAccount | None = None
        self._restored: Position | None = None
        self._begun = self._ended = False

    @property
    def ledger(self) -> PrivacyLedger:
        """The run's ledger, on rank 0; open for writing during ``fit``."""
        if "_run" not in vars(self):
            raise AttributeError("This rank has no ledger open: rank 0 has, during fit.")
        return self._run.ledger

    def epsilon(self) -> float:
        """Epsilon spent so far, from the ledger; on another rank than 0, as it was last told."""
        return self._gate.epsilon()

    def start(self) -> Start | None:
        """The run that this one starts from, its card checked against its ledger; read once."""
        if self._start is None and self.init_from is not None:
            self._start = read_start(self.init_from, public=self.init_from_is_public)
        return self._start

    # -- getting ready -----------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._forget_earlier_fit()
        ranks = self._ranks = Ranks.here()
        module: Any = pl_module
        mode: Any = getattr(module, "privacy", None)
        data: Any = getattr(trainer, "datamodule", None)
        self.run_dir = self.run_dir or Path(trainer.default_root_dir)
        own_plan = ranks.together(lambda: self._planned(trainer, module, data))
        planned = ranks.share(lambda: own_plan)
        counted = self.sweep is not None and isinstance(mode, GaussianMode)
        self._in_dataset = counted or getattr(mode, "dataset_ledger", None) is not None
        secret = ranks.share(lambda: self._secret(mode))
        agreed = KeyedStream(secret, "agreement")
        require_agreement(trainer, module, data, planned=own_plan, stream=agreed, ranks=ranks)
        planned = fit_physical_batch(trainer, module, data, planned, ranks)
        self.plan, self.planned_steps = planned.plan, planned.steps
        run_id = ranks.share(lambda: self._open(module, data, planned, secret))
        stream = self._run.stream if ranks.is_first else KeyedStream(secret, run_id, secure_rng=mode.secure_rng)
        self.sampler = planned.sampler(data, stream, ranks=ranks)
        self.sampler.before_first_draw = lambda: self._begin(trainer, pl_module)
        own = None
        if ranks.is_first:
            # Until the account reserves, nothing is: a step that came too early would be refused.
            reserved_until = None if self._dataset is None else 0
            own = ReleaseGate(self._run, self.plan, mode, self.sampler, reserved_until=reserved_until)
        whole = strategy_name(trainer) == "ddp"
        self._gate = SharedGate(own, stream=stream, run_id=run_id, sampler=self.sampler, ranks=ranks, whole=whole)
        shape = shape_of_batches(trainer, module, data)
        mode.fixed_shapes = shape is not None
        data.attach(self.sampler, UnitCollator(module.collate_rows, data.rows_per_unit, shape=shape))
        keep_the_sampler(trainer)
        self._shared = place_early(trainer, pl_module)
        ranks.together(lambda: mode.attach(pl_module, self.plan, stream))
        module.receive_guard(self._gate)

    def _planned(self, trainer: L.Trainer, module: Any, data: Any) -> PlannedRun:
        """What would run, once nothing speaks against it."""
        refuse_broken_claims(trainer, module, data)
        if (start := self.start()) is not None:
            start.check(module.privacy)
        if module.privacy.noise_seed is None and self._ranks.is_first:
            self._secret(module.privacy)  # a bad secret file is refused before a long calibration
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "plant_canaries"):  # an audit: before the run is planned, because n counts its units
                callback.plant_canaries(trainer, module, data)
        return plan_run(trainer, module.privacy, data, module=module, reserve=self.resume_reserve)

    def _secret(self, mode: PrivacyMode) -> bytes:
        if mode.noise_seed is None:
            return load_secret(mode.secret_file, run_dir=self.run_dir)
        return published_secret(mode.noise_seed)

    def _open(self, module: Any, data: Any, planned: PlannedRun, secret: bytes) -> str:
        """Begin the ledger or go on with it, on rank 0; returns the id of the run."""
        mode: PrivacyMode = module.privacy
        self._dataset = self._dataset_ledger(mode)
        planted = getattr(data, "planted_facts", None)
        self._run = PrivateRun.open(
            Path(self.run_dir or ".") / LEDGER_NAME,
            resume=self.resume,
            secret=secret,
            secure_rng=mode.secure_rng,
            described={
                "mode": mode.name,
                "unit": mode.unit,
                "neighbours": mode.neighbours,
                "law": planned.law.to_dict(),
                "planned_steps": self.planned_steps,
                "plan": None if self.plan is None else self.plan.to_dict(),
                "plan_fingerprint": None if self.plan is None else self.plan.fingerprint(),
                "rows_per_unit": data.rows_per_unit,
                "secure_rng": mode.secure_rng,
                "noise_seed": mode.noise_seed,
                "log_private_loss": bool(module.log_private_loss),
                "assumptions": module.assumptions() if hasattr(module, "assumptions") else [],
                "dataset_ledger": None if self._dataset is None else self._dataset.begin(),
                "planted": planted,
            },
            data_fingerprint=data.data_fingerprint,
            unplanted_fingerprint=partial(data.data_fingerprint, planted=False) if planted else None,
            files_fingerprint=partial(fingerprint_of_files, module),
            run_id=None if mode.noise_seed is None else "seeded",
        )
        note_start(self._run.ledger, self.start())
        note_sweep(self._run.ledger, None if self.sweep is None else self.sweep.describe())
        return self._run.run_id

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attach the mode to what a strategy put in the parameters' place: engines know parameters by identity."""
        module: Any = pl_module
        if getattr(module, "in_shards", False):
            with module.whole():
                self._ranks.together(lambda: module.privacy.attach(module, self.plan, self._gate.stream))

    def _forget_earlier_fit(self) -> None:
        """Let nothing of an earlier fit with this object stand for this one: not its reservation, nor its place."""
        if self._account is not None:
            self._account.close()
        self._begun = self._ended = False
        self._account, self._restored = None, None
        for name in ("_run", "_gate"):
            vars(self).pop(name, None)

    def _dataset_ledger(self, mode: PrivacyMode) -> DatasetLedger | None:
        """The ledger of the data set, if there is one; a new run that it does not cover leaves nothing behind."""
        if not isinstance(mode, GaussianMode) or self.plan is None:
            return None
        ledger = mode.ledger_of_dataset(self.plan.budget, run_dir=self.run_dir)
        if self.sweep is not None:
            ledger = trial_ledger(self.sweep, self.plan.budget, own=ledger, mode=mode.name)
        start = self.start()
        known = set() if start is None else start.counted_in()
        if start is not None and known and (ledger is None or not ledger.path.exists() or ledger.begin() not in known):
            raise ConfigurationError(
                f"{start.knob}={start.folder} was counted in a privacy.dataset_ledger, and this run names none or "
                "another: the total of the data set would miss this run. Name the same file."
            )
        if ledger is not None and not self.resume:
            ledger.require([self.plan.release(self.planned_steps), *self._uncounted(ledger)])
        return ledger

    def _uncounted(self, ledger: DatasetLedger) -> list[Release]:
        """What the model that the run starts from cost, where the data set's ledger does not count it."""
        start = self.start()
        if start is None or (ledger.path.exists() and ledger.begin() in start.counted_in()):
            return []
        return start.releases()

    # -- resuming ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._gate.position.to_dict() if hasattr(self, "_gate") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = Position.from_dict(state_dict, place="The checkpoint") if state_dict else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        refuse_replaced_sampler(trainer.train_dataloader, self.sampler)
        note_sigterm_quietly(trainer)
        self._begin(trainer, pl_module)
        if self._gate.steps_done < self.planned_steps:
            self._gate.require_budget(self._gate.steps_done)

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Settle where to go on, before the first coin is tossed.

        Lightning may fetch the first batches before ``on_train_start``; the sampler calls this too.
        """
        if self._begun:
            return
        self._begun = True
        self._refuse_other_checkpoints()
        self._ranks.share(lambda: self._refuse_unknown_start(trainer))
        module: Any = pl_module
        wrapped: Any = module.optimizers()
        optimizer = wrapped.optimizer if hasattr(wrapped, "optimizer") else wrapped
        deterministic = pl_module.device.type == "cpu" and str(trainer.precision) in ("32-true", "64-true")
        whole = strategy_name(trainer) in ("one_device", "ddp")  # rank 0 sees the whole sum, model and optimizer
        replays = self.replay == "auto" and deterministic and whole
        world = self._ranks.world_size  # a sum over another number of ranks has other last bits
        self._gate.begin(self._restored, (lambda: state_hash(pl_module, optimizer, world)) if replays else None)
        self._ranks.share(self._reserve)

    def _refuse_other_checkpoints(self) -> None:
        found = self._ranks.gather(self._restored)
        for rank, position in enumerate(found):
            if position != found[0]:
                raise ResumeError(
                    f"Rank {rank} went on from another checkpoint than rank 0: all must read the same file. Put the "
                    "run folder where every machine of the job sees it."
                )

    def _refuse_unknown_start(self, trainer: L.Trainer) -> None:
        if self._restored is None and self._run.intents and trainer.global_step > 0:
            raise ResumeError("The checkpoint holds no accountant state, but the ledger holds releases.")

    def _reserve(self) -> None:
        """Reserve the run's steps in the ledger of its data set, on rank 0."""
        if self._dataset is not None:
            name = str(self.run_dir)
            self._account = DatasetAccount(
                self._dataset,
                self._gate.own,
                steps=self.planned_steps,
                name=name,
                earlier=self._uncounted(self._dataset),
            )
            self._account.reserve()

    def _keep_covered(self) -> None:
        if self._account is not None:
            self._account.keep_covered()

    # -- during the run ----------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch.part == self._ranks.rank:  # the first of its step here
            self._gate.require_budget(batch.step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.plan is None or not batch.last:
            return
        if self._in_dataset:
            self._ranks.share(self._keep_covered)
        every = max(1, -(-self.planned_steps // max(1, self.eps_log_points)))
        done = batch.step + 1
        if (fraction := self._gate.clip_fraction) is not None:
            self._tell(trainer, {"privacy/clip_fraction": fraction}, done)
        if done % every == 0 or done == self.planned_steps:
            spent = {"privacy/eps_spent": self._gate.share_epsilon(), "privacy/delta": self.plan.budget.delta}
            self._tell(trainer, spent, done)

    @staticmethod
    def _tell(trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
        """Log public numbers by logical step: how many physical batches there were may be private."""
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Where the number of physical batches tells the size of each draw, or that of the data set: hide it."""
        if self.plan is None or self.sampler.physical_batches_per_step is not None:
            return
        loop = checkpoint["loops"]["fit_loop"]
        loop["epoch_loop.state_dict"].pop("_batches_that_stepped", None)
        for part in ("total", "current"):
            progress = loop["epoch_loop.batch_progress"][part]
            for name in progress:
                progress[name] = self._gate.steps_done

    # -- the end -----------------------------------------------------------------------------

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ended = True
        self._ranks.share(self._finish)
        if self._ranks.world_size > 1:
            self._gate.share_epsilon()  # for who asks another rank when the run is over

    def _finish(self) -> None:
        self._settle()
        self.ledger.append("end", reason="finished", steps=self._gate.steps_done)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End a run that went on from its very last step: Lightning then skips training, and ``on_train_end``."""
        if not self._ended and hasattr(self, "_gate"):
            self._begin(trainer, pl_module)
            self.on_train_end(trainer, pl_module)
        if hasattr(self, "_shared"):
            tie_again(pl_module, self._shared)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not hasattr(self, "_run"):  # nothing was opened yet, or this rank holds no ledger
            return
        try:
            begun = hasattr(self, "_gate") and not self._ended  # once ended, the card names the ledger's last record
            if begun and not isinstance(exception, OSError):
                self._settle()
                self.ledger.append("end", reason=type(exception).__name__, steps=self._gate.steps_done)
        finally:
            self._close()

    def _settle(self) -> None:
        if self._account is not None:
            self._account.settle()

    def _close(self) -> None:
        if self._account is not None:
            self._account.close()
        self.ledger.close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and hasattr(self, "_run"):
            self._close()
