"""The accountant: it calibrates, grants each release, writes it down first, and stops in time.

The order is what makes the number honest. Before a logical step may draw noise, the accountant
checks that the budget covers it and appends an *intent* to a ledger on disk; after the step it
appends what was really done. A run that is killed in between has paid for the step. Epsilon is
always computed from that ledger, never from the configuration.
"""

from __future__ import annotations

import secrets as random_secrets
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor

from lit_dpret.errors import BudgetExceededError, ConfigurationError, DataError, LedgerError, ResumeError
from lit_dpret.privacy.accounting import Accountant
from lit_dpret.privacy.card_file import file_sha256, read_card
from lit_dpret.privacy.fingerprints import state_hash, sum_tag, update_hash
from lit_dpret.privacy.guard import Permit
from lit_dpret.privacy.ledger import PrivacyLedger, charged_releases
from lit_dpret.privacy.modes import DPSGD, PrivacyMode, Update
from lit_dpret.privacy.noise import KeyedStream, load_secret
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.releases import GaussianRelease, NonPrivateRelease, Poisson, Shuffle, TruncatedPoisson
from lit_dpret.privacy.sampling import PrivateBatchSampler, SamplingRequest, UnitCollator, steps_per_epoch

LEDGER_NAME = "privacy_ledger.jsonl"
CARD_NAME = "privacy_card.json"


class PrivateTraining(Protocol):
    """What the accountant asks of a module."""

    privacy: PrivacyMode
    log_private_loss: bool

    def receive_guard(self, guard: Any) -> None: ...
    def collate_rows(self, rows: list[Any]) -> Any: ...


class Sampled(SamplingRequest, Protocol):
    """What the accountant asks of a DataModule."""

    def use_unit(self, unit: str, neighbours: str | None = None) -> None: ...
    @property
    def n_units(self) -> int: ...
    def data_fingerprint(self, key: bytes) -> str: ...
    def attach(self, batch_sampler: Any, collate_fn: Any) -> None: ...


class PrivacyAccountant(Callback):
    """Compose every release into ``privacy/eps_spent``; end the run inside its budget.

    Guarantees:
        - No noise is drawn before the ledger on disk says so.
        - The step that would overspend is refused by an exception before it runs, the first one
          included; ``min_epochs`` and ``min_steps`` cannot overrule it.
        - After a crash, epsilon is never less than was spent. A step is repeated under its old
          noise only where the state before it and its clipped sum are bit for bit the same.
        - A resume with another sigma, clip norm, sampling law or data set is refused.

    Args:
        run_dir: Where the ledger lies; null for the Trainer's ``default_root_dir``.
        resume: Go on with the ledger found there. Without it, an existing ledger is refused.
        resume_reserve: Extra steps that the calibration pays for in advance, so that re-executed
            steps after a crash do not end the run early.
        replay: ``auto`` repeats steps bit by bit on a CPU in float32 or float64; ``never`` always
            draws fresh noise after a crash, and charges it.
        eps_log_points: How often epsilon is computed and logged during the run, at most.
    """

    def __init__(
        self,
        *,
        run_dir: str | Path | None = None,
        resume: bool = False,
        resume_reserve: int = 0,
        replay: str = "auto",
        eps_log_points: int = 10,
    ) -> None:
        if replay not in ("auto", "never"):
            raise ConfigurationError(f"callbacks.accountant.replay={replay!r} is not one of auto, never.")
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.resume = resume
        self.resume_reserve = resume_reserve
        self.replay = replay
        self.eps_log_points = eps_log_points
        self.plan: PrivacyPlan | None = None
        self.attempt = 0
        self.run_id = ""
        self._restored: dict[str, Any] | None = None
        self._begun = False
        self._nonce = random_secrets.token_hex(16)
        self._steps_done = 0

    # -- getting ready -----------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        module: Any = pl_module
        data: Any = getattr(trainer, "datamodule", None)
        self._refuse_broken_claims(trainer, module, data)
        mode: PrivacyMode = module.privacy
        self._mode, self._module = mode, module
        data.use_unit(mode.unit, mode.neighbours)
        self.run_dir = self.run_dir or Path(trainer.default_root_dir)
        secret = load_secret(mode.secret_file, run_dir=self.run_dir)
        self.plan, law, self.planned_steps, per_epoch = self._make_plan(trainer, mode, data)
        self._release = self.plan.release() if self.plan is not None else NonPrivateRelease(label="train")
        self._open_ledger(secret, mode, data, law)
        if self.plan is not None:
            self._accountant = Accountant(
                delta=self.plan.budget.delta,
                neighbours=self.plan.budget.neighbours,
                name=self.plan.accountant,
            )
            self._set_allowance()
        self.sampler = PrivateBatchSampler(
            law,
            units=data.n_units,
            steps_per_epoch=per_epoch,
            physical_batch_size=data.physical_batch_size,
            stream=self.stream,
        )
        self.sampler.before_first_draw = lambda: self._begin(trainer, pl_module)
        data.attach(self.sampler, UnitCollator(module.collate_rows, data.rows_per_unit))
        mode.attach(pl_module, self.plan, self.stream)
        module.receive_guard(self)

    def _refuse_broken_claims(self, trainer: L.Trainer, module: Any, data: Any) -> None:
        if not hasattr(module, "privacy") or not hasattr(module, "receive_guard"):
            raise ConfigurationError(
                f"{type(module).__name__} is not a PrivateModule: the accountant could not see what it releases."
            )
        if data is None or not hasattr(data, "attach"):
            raise ConfigurationError(
                "The accountant reads the sampling law from the DataModule, and there is none that states "
                "one. Pass datamodule= to trainer.fit, a PairsDataModule or a class with its methods."
            )
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"trainer.devices={trainer.world_size} processes: this version trains on one device, and "
                "refuses to guess how noise and batches are shared. Set trainer.devices=1."
            )
        if module.privacy.guarantee != "none":
            _refuse_private_start(module)
        if module.privacy.guarantee == "inherited":
            check_dataset_card(data.privacy_card_path)
        if module.privacy.guarantee != "dp":
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping):
                raise ConfigurationError(
                    f"EarlyStopping(monitor={callback.monitor!r}) decides by private data: that is a release "
                    "nobody counts. Remove it, or fix trainer.max_steps beforehand."
                )
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
                raise ConfigurationError(
                    f"ModelCheckpoint(monitor={callback.monitor!r}) chooses by private data: that is a "
                    "release nobody counts. Leave monitor unset, and keep the last checkpoint."
                )
        if type(module).validation_step is not L.LightningModule.validation_step:
            raise ConfigurationError(
                f"{type(module).__name__}.validation_step computes metrics inside a private run: on private rows each "
                "of them is a release nobody counts. Evaluate afterwards (task=evaluate), on public or held-out data."
            )
        if trainer.limit_train_batches not in (1.0, None) or getattr(trainer, "overfit_batches", False):
            raise ConfigurationError(
                "trainer.limit_train_batches and trainer.overfit_batches cut a logical batch short and change "
                "the sampling law. Use trainer.max_steps."
            )
        if str(trainer.precision).startswith("16"):
            raise ConfigurationError(
                f"trainer.precision={trainer.precision}: the loss scaler skips steps that were paid for. "
                "Choose bf16-mixed or 32-true."
            )

    def _make_plan(self, trainer: L.Trainer, mode: PrivacyMode, data: Any) -> tuple[PrivacyPlan | None, Any, int, int]:
        units = data.n_units
        per_epoch = steps_per_epoch(data, units)
        steps = planned_steps(trainer, per_epoch)
        if isinstance(mode, DPSGD):
            plan = mode.plan(data, units=units, steps=steps + self.resume_reserve)
            return plan, plan.law, steps, per_epoch
        batch = data.expected_batch_size or max(1, round((data.sample_rate or 1.0) * units))
        if data.sampling == "poisson":
            rate = data.sample_rate or min(1.0, batch / units)
            law: Any = Poisson(sample_rate=rate)
        else:
            law = Shuffle(batch_size=min(batch, units), n=units)
        return None, law, steps, per_epoch

    def _open_ledger(self, secret: bytes, mode: PrivacyMode, data: Any, law: Any) -> None:
        if self.run_dir is None:
            raise ConfigurationError("The accountant has no run folder.")
        path = self.run_dir / LEDGER_NAME
        if path.exists() and not self.resume:
            raise ResumeError(
                f"{path} already holds a ledger: a second run in this folder would hide what the first one "
                "spent. Say resume=true to go on with it, or choose another hydra.run.dir."
            )
        self.ledger = PrivacyLedger.open(path)
        described = {
            "mode": mode.name,
            "unit": mode.unit,
            "neighbours": mode.neighbours,
            "law": law.to_dict(),
            "planned_steps": self.planned_steps,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "plan_fingerprint": None if self.plan is None else self.plan.fingerprint(),
            "rows_per_unit": data.rows_per_unit,
            "secure_rng": mode.secure_rng,
            "log_private_loss": bool(self._module.log_private_loss),
        }
        earlier = [record for record in self.ledger.records if record["kind"] == "plan"]
        self._intents = {
            (record["attempt"], record["step"]): record for record in self.ledger.records if record["kind"] == "intent"
        }
        self._released = {
            (record["attempt"], record["step"]): record for record in self.ledger.records if record["kind"] == "release"
        }
        self.run_id = earlier[0]["run_id"] if earlier else random_secrets.token_hex(8)
        self.stream = KeyedStream(secret, self.run_id, secure_rng=mode.secure_rng)
        described["secret_tag"] = self.stream.tag("secret")
        described["data_fingerprint"] = data.data_fingerprint(bytes.fromhex(self.stream.tag("data-fingerprint")))
        self.attempt = max((attempt for attempt, _ in self._intents), default=0)
        if earlier:
            self._refuse_changed_plan(earlier[-1], described)
            if earlier[-1]["secret_tag"] != described["secret_tag"]:
                self.attempt += 1
        self.ledger.append("plan", run_id=self.run_id, attempt=self.attempt, **described)

    def _refuse_changed_plan(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        other_secret = before["secret_tag"] != now["secret_tag"]
        for key in ("mode", "unit", "neighbours", "plan", "law", "planned_steps", "rows_per_unit", "secure_rng"):
            if before[key] != now[key]:
                raise ResumeError(
                    f"resume=true with another {_difference(key, before[key], now[key])}. The ledger's claim "
                    "was made for the first. Restore it, or start a new run in another hydra.run.dir."
                )
        if not other_secret and before["data_fingerprint"] != now["data_fingerprint"]:
            raise ResumeError(
                "resume=true with another data set than the ledger's: the claim is about one data set. "
                "Restore it, or start a new run in another hydra.run.dir."
            )
        if other_secret:
            self.ledger.append(
                "event",
                name="secret_changed",
                text="privacy.secret_file is not the one of the earlier attempt: fresh noise and coins, and the data "
                "set could not be compared",
            )

    # -- resuming ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "attempt": self.attempt, "steps_done": self._steps_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loader = trainer.train_dataloader
        if getattr(loader, "batch_sampler", None) is not self.sampler:
            raise ConfigurationError(
                "The training loader does not draw by the planned law: its batch sampler was replaced. "
                "Set trainer.use_distributed_sampler=false, and do not override train_dataloader."
            )
        self._begin(trainer, pl_module)
        key = (self.attempt, self._steps_done)
        due = key not in self._intents and self._steps_done < self.planned_steps
        if self.plan is not None and due and not self._covers(key):
            self._refuse_overspending()

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Settle where to go on and under which attempt, before the first coin is tossed.

        Lightning may fetch the first batches before ``on_train_start``; the sampler calls this too.
        """
        if self._begun:
            return
        self._begun = True
        optimizer = pl_module.optimizers()
        self._optimizer: Any = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
        deterministic = pl_module.device.type == "cpu" and str(trainer.precision) in ("32-true", "64-true")
        self._replays = self.replay == "auto" and deterministic
        step = 0
        if self._restored is not None:
            if self._restored["run_id"] != self.run_id:
                raise ResumeError(
                    f"The checkpoint belongs to run {self._restored['run_id']}, the ledger to run {self.run_id}: "
                    "they must come from one run folder."
                )
            step = int(self._restored["steps_done"])
            last = (int(self._restored["attempt"]), step - 1)
            if step > 0 and self._mode.guarantee != "inherited" and last not in self._intents:
                raise ResumeError(
                    f"The checkpoint was taken after step {step} of attempt {last[0]}, which the ledger does not know: "
                    "the ledger is older than the checkpoint. Restore both from one moment."
                )
        elif self._intents and trainer.global_step > 0:
            raise ResumeError("The checkpoint holds no accountant state, but the ledger holds releases.")
        self._steps_done = step
        self._decide_attempt(step)
        self.sampler.next_step = step
        self.sampler.attempt = self.attempt

    def _decide_attempt(self, step: int) -> None:
        """Repeat bit by bit if everything matches, else start an attempt with fresh noise."""
        ahead = [s for attempt, s in self._intents if attempt == self.attempt and s >= step]
        if not ahead:
            return
        intent = self._intents.get((self.attempt, step))
        matches = (
            self._replays
            and intent is not None
            and intent.get("state_hash") is not None
            and intent["state_hash"] == state_hash(self._module, self._optimizer)
            and not any(r["kind"] == "event" and r.get("name") == "replay_failed" for r in self.ledger.records)
        )
        if not matches:
            self.attempt += 1
            self.ledger.append(
                "event",
                name="fresh_attempt",
                attempt=self.attempt,
                text=f"{len(ahead)} steps from step {step} on are executed again with fresh noise and charged again",
            )

    # -- granting releases -------------------------------------------------------------------

    def _set_allowance(self) -> None:
        if self.plan is None:
            return
        already = charged_releases(self.ledger.records)
        release = self.plan.release()
        self._allowance = self._accountant.max_steps(
            release, self.plan.budget.eps, already=already, at_most=self.plan.steps
        )

    def _refuse_overspending(self) -> None:
        if self.plan is None:
            return
        spent = self.epsilon()
        releases = [*charged_releases(self.ledger.records), self.plan.release()]
        after = self._accountant.epsilon(releases)
        budget = self.plan.budget
        raise BudgetExceededError(
            f"The next step would bring epsilon to {after:.4g} at delta={budget.delta:.3g} "
            f"(unit={budget.unit}, neighbours={budget.neighbours}), over the budget privacy.eps={budget.eps:g} "
            f"(already spent: {spent:.4g} in {self._steps_done} steps). The run ends here. Raise "
            "privacy.noise_multiplier, plan fewer steps, or pay in advance with callbacks.accountant.resume_reserve."
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.plan is None or batch.part != 0:
            return
        key = (self.attempt, batch.step)
        if key not in self._intents and not self._covers(key):
            self._refuse_overspending()

    def authorise(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> Permit:
        """Grant one release, after writing it down.

        Raises:
            BudgetExceededError: The budget does not cover it.
            ResumeError: A repeated step is not the same step, or a batch is not the one that is due.
        """
        if step != self._steps_done or attempt != self.attempt:
            raise ResumeError(
                f"A batch of step {step}, attempt {attempt}, arrived where step {self._steps_done}, attempt "
                f"{self.attempt}, was due: the loader does not hand out the sampler's draws in order."
            )
        key = (attempt, step)
        if self._mode.guarantee == "inherited":
            return Permit(*key)
        tag = sum_tag(self.stream, sums) if self._replays else None
        state = state_hash(self._module, self._optimizer) if self._replays else None
        # The noise of a step depends on what it is added to, or else on this process alone.
        salt = tag or self._nonce
        intent = self._intents.get(key)
        if intent is not None:
            if tag is None or intent.get("sum_tag") != tag or intent.get("state_hash") != state:
                self.ledger.append("event", name="replay_failed", attempt=self.attempt, step=step)
                raise ResumeError(
                    f"Step {step} could not be repeated bit by bit on this machine, so its noise must not be "
                    "used again. Run the same command once more: it will go on with fresh noise, and charge it."
                )
            self.ledger.append("replay", attempt=self.attempt, step=step)
            return Permit(*key, salt, replay=self._released.get(key) or {})
        if self.plan is not None and not self._covers(key):
            self._refuse_overspending()
        self._check_sampling(step, units)
        record = self.ledger.append(
            "intent",
            attempt=self.attempt,
            step=step,
            release=self._release.to_dict(),
            state_hash=state,
            sum_tag=tag,
        )
        self._intents[key] = record
        if self.plan is not None:
            self._allowance -= 1
        return Permit(*key, salt)

    def _covers(self, key: tuple[int, int]) -> bool:
        """Whether the budget covers one more release."""
        if self.plan is None or not isinstance(self.plan.law, Shuffle):
            return self._allowance > 0
        # A shuffled epoch costs as a whole, so what a step adds depends on where in its epoch it is.
        due = {"kind": "intent", "attempt": key[0], "step": key[1], "release": self._release.to_dict()}
        return self._accountant.epsilon(charged_releases([*self.ledger.records, due])) <= self.plan.budget.eps

    def _check_sampling(self, step: int, units: int) -> None:
        """Hold the number of units that took part against the law; more than it allows is charged."""
        self._seen = getattr(self, "_seen", 0) + units
        self._seen_steps = getattr(self, "_seen_steps", 0) + 1
        law = self.sampler.law
        if self.plan is None or not isinstance(self._release, GaussianRelease):
            return
        planned = self.plan.law
        if law != planned:
            self._release = GaussianRelease(
                noise_multiplier=self._release.noise_multiplier, law=law, label=self._release.label
            )
            self._allowance = min(self._allowance, self._remaining(self._release))
        if not isinstance(law, (Poisson, TruncatedPoisson)) or self.plan.budget.neighbours == "add_or_remove":
            return
        trials = self.sampler.units * self._seen_steps
        rate = self._seen / trials
        sd = (law.sample_rate * (1 - law.sample_rate) / trials) ** 0.5
        if rate > law.sample_rate + 8 * sd + 1 / trials:
            self.ledger.append(
                "event",
                name="sampling_departure",
                attempt=self.attempt,
                step=step,
                law=Poisson(sample_rate=min(1.0, rate)).to_dict(),
                text=f"{self._seen} units took part in {self._seen_steps} steps, more than the law allows",
            )
            raise LedgerError(
                f"The loader draws {rate:.3g} of the units per step where the plan says {law.sample_rate:.3g}: "
                "the claim would be false. The card charges what was drawn."
            )

    def _remaining(self, release: GaussianRelease) -> int:
        if self.plan is None:
            return 0
        return self._accountant.max_steps(
            release,
            self.plan.budget.eps,
            already=charged_releases(self.ledger.records),
            at_most=self.plan.steps,
        )

    def record(self, permit: Permit, update: Update) -> None:
        """Write down what the step did; a repeated step must have done the same."""
        self._steps_done = permit.step + 1
        if self._mode.guarantee == "inherited":
            return
        found = update_hash(update.gradients) if self._replays else None
        if permit.replay is not None:
            known = permit.replay.get("update_hash")
            if known is not None and known != found:
                self.ledger.append("event", name="replay_failed", attempt=permit.attempt, step=permit.step)
                raise ResumeError(f"The repeated update of step {permit.step} differs from the recorded one.")
            if permit.replay:
                return  # the first execution was confirmed already
        self.ledger.append(
            "release",
            attempt=permit.attempt,
            step=permit.step,
            noise_std=update.noise_std,
            sensitivity=None if update.sensitivity == float("inf") else update.sensitivity,
            denominator=update.denominator,
            law=self.sampler.law.to_dict(),
            update_hash=found,
        )
        if self.plan is not None and update.noise_std < self.plan.noise_std:
            self._set_allowance()

    # -- telling -----------------------------------------------------------------------------

    def epsilon(self) -> float:
        """Epsilon spent so far, from the ledger."""
        if self._mode.guarantee == "none":
            return float("inf")
        if self.plan is None:
            return 0.0
        return self._accountant.epsilon(charged_releases(self.ledger.records))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Under plain Poisson sampling the number of physical batches tells the size of each draw: hide it."""
        if self.plan is None or self.sampler.physical_batches_per_step is not None:
            return
        loop = checkpoint["loops"]["fit_loop"]
        loop["epoch_loop.state_dict"].pop("_batches_that_stepped", None)
        for part in ("total", "current"):
            progress = loop["epoch_loop.batch_progress"][part]
            for name in progress:
                progress[name] = self._steps_done

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.plan is None or not batch.last:
            return
        every = max(1, -(-self.planned_steps // max(1, self.eps_log_points)))
        done = batch.step + 1
        if done % every == 0 or done == self.planned_steps:
            metrics = {"privacy/eps_spent": self.epsilon(), "privacy/delta": self.plan.budget.delta}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=done)
            trainer.callback_metrics["privacy/eps_spent"] = torch.tensor(metrics["privacy/eps_spent"])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ledger.append("end", reason="finished", steps=self._steps_done)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not hasattr(self, "ledger"):
            return
        if not isinstance(exception, OSError):
            self.ledger.append("end", reason=type(exception).__name__, steps=self._steps_done)
        self.ledger.close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and hasattr(self, "ledger"):
            self.ledger.close()


def check_dataset_card(path: Path | None) -> None:
    """Refuse data that its privacy card does not describe, file by file.

    Raises:
        DataError: The card is missing, is not one of a data set, or lists other contents than the
            folder's queries, judgements and passages.
    """
    if path is None:
        raise DataError("privacy=synthetic trains on data that carries a privacy card, and this folder has none.")
    subject = read_card(path)["subject"]
    if subject["artifact_type"] != "dataset" or not subject["sha256"]:
        raise DataError(
            f"{path} is the card of {subject['artifact_type']} {subject['name']!r}, not of the data set it lies with: "
            "its claim says nothing about these queries. Take the folder that task=synthesize wrote."
        )
    folder = path.parent
    read = [p for pattern in ("queries.*", "corpus.*", "qrels/train.*") for p in folder.glob(pattern)]
    for name in {p.relative_to(folder).as_posix() for p in read} | set(subject["sha256"]):
        file = folder / name
        if not file.is_file() or file_sha256(file) != subject["sha256"].get(name):
            raise DataError(f"{file} is not the file that {path.name} describes; its claim does not cover it.")


def _refuse_private_start(module: Any) -> None:
    """Refuse to start from weights that were themselves trained on private data: the claims would add up."""
    start = getattr(module, "pretrained", None)
    if start and (Path(str(start)) / CARD_NAME).is_file():
        raise ConfigurationError(
            f"{start} carries a privacy card: its weights were trained on private data, and this run's card would "
            "forget what that cost. Start from a public model."
        )


def planned_steps(trainer: L.Trainer, steps_per_epoch: int) -> int:
    """How many logical steps ``trainer`` will take; a private run must know before it starts.

    Raises:
        ConfigurationError: Neither ``max_steps`` nor ``max_epochs`` is set.
    """
    epochs = trainer.max_epochs
    by_epochs = epochs * steps_per_epoch if epochs is not None and epochs > 0 else None
    by_steps = trainer.max_steps if trainer.max_steps > 0 else None
    known = [value for value in (by_epochs, by_steps) if value is not None]
    if not known:
        raise ConfigurationError("A private run must know its length: set trainer.max_steps or trainer.max_epochs.")
    return min(known)


# Said first, because the rest (the cap of the law, say) follows from them.
_CAUSES = ("budget", "eps", "delta", "noise_multiplier", "max_grad_norm", "sample_rate", "n")


def _difference(key: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*_CAUSES, *sorted(before), *sorted(now)]):
            if before.get(name) != now.get(name):
                return _difference(f"{key}.{name}", before.get(name), now.get(name))
    return f"{key}: {before!r} before, {now!r} now"
