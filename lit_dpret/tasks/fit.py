"""`task=fit`: train one module under one privacy mode."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_dpret.audit.attacks.coins import COINS_NAME, Coins
from lit_dpret.audit.canaries import CanarySuite
from lit_dpret.audit.canaries.suite import plant_blanks, plant_in_run
from lit_dpret.callbacks import MetricsFile, PrivacyAccountant
from lit_dpret.callbacks.checkpoint_files import WholeCheckpoints, newest_checkpoint, remove_drafts
from lit_dpret.callbacks.planning import plan_run, refuse_unread_rows
from lit_dpret.callbacks.refusals import refuse_broken_claims
from lit_dpret.cards.card import CARD_NAME, read_card
from lit_dpret.cards.file import MODEL_FOLDER, check_artefact
from lit_dpret.cards.start import Start
from lit_dpret.cards.text import privacy_line, total_of_runs
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, ResumeError, UnplannedError
from lit_dpret.privacy.accounting.releases import Release
from lit_dpret.privacy.ledger.private_run import require_run
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, forthcoming_releases, plans_of
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.settings import Settings
from lit_dpret.tasks.parts import CHECKPOINTS, Parts, check_run_dir, say, say_unaccounted
from lit_dpret.tasks.resumed_settings import keep_settings


@dataclass(frozen=True)
class PlannedFit:
    """A private training that has not run yet."""

    plan: PrivacyPlan
    steps: int
    start: Start | None = None

    @property
    def releases(self) -> list[Release]:
        """The releases that its own ledger will charge: a shuffled epoch counts as a whole."""
        return forthcoming_releases([], self.plan.release(), first=0, until=self.steps)


def plan_fit(
    mode: Any, data: Any, trainer: Any, *, make_module: Any, callbacks: Sequence[Any] = (), epochs: float | None = None
) -> list[PlannedFit]:
    """Return the plan of one training, as a list; empty for a mode without releases.

    ``make_module`` is called with ``privacy`` for modes whose noise depends on the loss. Among the ``callbacks``, the
    accountant may pay for steps in advance and name a start, and an audit plants canaries.
    """
    if mode.guarantee != "dp":
        return []
    accountants = [one for one in callbacks if isinstance(one, PrivacyAccountant)]
    start = next((found for one in accountants if (found := one.start()) is not None), None)
    reserve = sum(one.resume_reserve for one in accountants)
    _plant_blanks_of(callbacks, mode, data)
    module = make_module(privacy=mode) if mode.calibrated_to_loss else None
    planned = plan_run(trainer, mode, data, module=module, reserve=reserve, start=start, epochs=epochs)
    return [] if planned.plan is None else [PlannedFit(planned.plan, planned.steps, start)]


def _plant_blanks_of(callbacks: Sequence[Any], mode: Any, data: Any) -> None:
    """Plant blank units, as many as the audits among the callbacks will plant canaries."""
    for one in callbacks:
        if not hasattr(one, "plant_canaries"):
            continue
        if not hasattr(one, "planned_units"):
            raise UnplannedError(
                f"callbacks: {type(one).__name__} plants canaries without stating their number (planned_units), so the "
                "run cannot be planned. Remove it."
            )
        plant_blanks(data, one.planned_units(mode, data))


@dataclass(kw_only=True)
class Fit(Settings):
    """Train ``model`` on ``datamodule`` under ``privacy``; write model, ledger and card."""

    takes_ranks = takes_canaries = takes_start = True

    min_free_mb: float = 200
    membership_coins: bool = False

    def run(self, parts: Parts) -> dict[str, float]:
        """Build, train and export; return the last logged metrics."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        keep_settings(parts)
        if parts.resume and _is_finished(parts.run_dir):
            _tell_where(parts.run_dir, "this run is finished, nothing is left to do\n")
            return _logged(parts.run_dir)
        L.seed_everything(parts.seed, verbose=False)
        privacy = parts.make_privacy()
        datamodule = parts.make_datamodule()
        module = parts.make_module(privacy=privacy)
        hold_out = self._hold_out(privacy, datamodule, parts.run_dir)
        canaries = released_canaries(parts)
        how = Training(
            run_dir=parts.run_dir, make_trainer=parts.make_trainer, callbacks=parts.make_callbacks(),
            loggers=parts.make_loggers(), resume=parts.resume, several_ranks=True,
        )  # fmt: skip
        logged = train(module, datamodule, how, canaries=canaries, after_setup=hold_out)
        _tell_where(parts.run_dir)
        # A run interrupted after its last step logs nothing more; its results were logged before.
        return _logged(parts.run_dir) | logged if parts.resume else logged

    def planned_fits(self, parts: Parts) -> list[PlannedFit]:
        """Return the private training that ``run`` would perform; reads the data without training."""
        if self.membership_coins:
            raise UnplannedError("task.membership_coins=true cannot be planned: coins decide how many it holds out.")
        datamodule = parts.read_data()
        if (canaries := released_canaries(parts)) is not None:
            plant_blanks(datamodule, canaries.units)
        return plan_fit(
            parts.make_privacy(), datamodule, parts.make_trainer(logger=False), make_module=parts.make_module,
            callbacks=parts.make_callbacks(),
        )  # fmt: skip

    def _hold_out(self, privacy: Any, datamodule: Any, folder: Path) -> Callable[[], None] | None:
        """Return a function that holds queries out once the data are read; None if all are trained on."""
        if not self.membership_coins:
            if (folder / COINS_NAME).exists():
                raise ConfigurationError(
                    f"{folder} holds the {COINS_NAME} of a run that held out queries by coins. Set "
                    "task.membership_coins=true, or choose another hydra.run.dir."
                )
            return None
        if not hasattr(datamodule, "train_on"):
            raise ConfigurationError(
                f"task.membership_coins=true holds out train queries, which {type(datamodule).__name__} does not "
                "support. Use a datamodule of pairs, for example datamodule=pairs."
            )
        if privacy.unit == "user":
            raise ConfigurationError(
                "task.membership_coins=true tosses a coin for each query, and with privacy.unit=user one person's "
                "queries would be on both sides. Set privacy.unit=query."
            )
        return partial(_keep_heads, datamodule, folder)


def _is_finished(folder: Path) -> bool:
    """Return whether a run finished its planned steps, and its ledger, model and card are unchanged since.

    Continuing would append to the ledger and write another card, while later artefacts name this one by its SHA-256.
    """
    try:
        records, card = PrivacyLedger.read(folder / LEDGER_NAME).records, read_card(folder)
    except (LedgerError, DataError):
        return False
    plans = plans_of(records)
    if not plans:  # starting again would forget what the card counts
        raise LedgerError(
            f"{folder / LEDGER_NAME} holds no plan, although the run's card is next to it: its records are lost. "
            "Restore them from a copy, or choose another hydra.run.dir."
        )
    plan, last = plans[-1], records[-1]
    inherited = card["mechanism"].get("kind") == "post_processing"  # its ledger block belongs to the data's run
    carded = (
        (last["kind"], last.get("reason")) == ("end", "finished")
        and int(last.get("steps") or 0) >= plan.get("ends_at", plan["planned_steps"])
        and (inherited or card["ledger"]["head"] == last["hash"])
        and bool(card["subject"]["sha256"])  # the card of an interrupted run lists no model
    )
    try:
        check_artefact(folder / MODEL_FOLDER, card)
    except DataError as error:
        if carded:
            raise ResumeError(
                f"resume=true: the run in {folder} is finished, but its {MODEL_FOLDER}/ was moved, removed or changed. "
                "Writing it again would also rewrite ledger and card, which artefacts derived from the run name by "
                f"their SHA-256. Put {MODEL_FOLDER}/ back; or export the last checkpoint to another folder (lit-dpret "
                f"export task.checkpoint={folder} hydra.run.dir=...); or, if nothing was derived from the run, remove "
                f"{folder / CARD_NAME} and resume."
            ) from error
        return False
    return carded and (folder / MODEL_FOLDER / CARD_NAME).is_file()


def _logged(folder: Path) -> dict[str, float]:
    found: dict[str, Any] = {}
    path = folder / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        found |= json.loads(line)
    return {name: float(value) for name, value in found.items() if name != "step"}


@rank_zero_only
def _tell_where(folder: Path, first: str = "") -> None:
    sys.stdout.write(first)
    if (folder / CARD_NAME).exists():
        say(f"privacy: {privacy_line(read_card(folder))}")
    for what, place in (("model", folder / "model"), ("privacy card", folder / CARD_NAME)):
        if place.exists():
            say(f"{what}: {place}")
    if not (folder / CARD_NAME).exists():
        return
    card = read_card(folder)
    if (total := (card["accounting"] or {}).get("dataset_total")) is not None:
        say(f"all runs on this data set: {total_of_runs(total)}")
    say_unaccounted(card, "callbacks.card.tuning_data")
    for caution in card["cautions"]:
        if caution != card["tuning"]["text"]:
            sys.stderr.write(f"on the card: {caution}\n")


def released_canaries(parts: Parts) -> CanarySuite | None:
    """Return the canaries to plant in a released model."""
    canaries: CanarySuite | None = parts.make_canaries()
    if canaries is not None:
        canaries.check().refuse_splits()
    return canaries


def _keep_heads(datamodule: Any, folder: Path) -> None:
    """Train on the queries whose coin shows heads; coins already tossed are reused."""
    queries = datamodule.collection.split("train")
    if (folder / COINS_NAME).exists():
        coins = Coins.read(folder)
        if set(coins.heads) != set(queries):
            raise DataError(f"{folder / COINS_NAME} was tossed for other train queries. Choose another hydra.run.dir.")
    else:
        coins = Coins.toss(queries)
        coins.write(folder)
    datamodule.train_on(coins.trained_on)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a module's training."""

    run_dir: Path  # the folder for its checkpoints, ledger, model and card
    make_trainer: Callable[..., L.Trainer]  # takes settings of a Trainer
    callbacks: Sequence[Any]  # callbacks of the training
    loggers: Sequence[Any] = ()  # in addition to the metrics file
    resume: bool = False  # continue from the newest whole checkpoint
    several_ranks: bool = False  # whether further processes may repeat the caller from its start


def train(
    module: Any, datamodule: Any, how: Training, *, canaries: CanarySuite | None = None,
    after_setup: Callable[[], None] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Train ``module`` on ``datamodule``; return the last logged metrics.

    ``after_setup`` is called once the data are read, before the module prepares for them.

    Guarantees:
        - Checkpoints are written whole or not at all, unless ``make_trainer`` supplies custom checkpoint I/O.
        - A run that is killed at any moment can resume; after its last step it still gets its model and its card.
        - ``canaries`` are planted before anything reads the training data, and kept in ``canaries.json``.
        - With several ranks, rank 0 writes the shared files, and the others end when it has.
        - Training without privacy, or without a remaining claim, writes to a folder that only its owner can read.
    """
    run_dir, resume, callbacks = how.run_dir, how.resume, list(how.callbacks)
    trainer = how.make_trainer(
        default_root_dir=str(run_dir), callbacks=callbacks, logger=[MetricsFile(run_dir), *how.loggers]
    )
    refuse_broken_claims(trainer, module, datamodule)  # before any data is read; the accountant checks again
    warn_of_crowded_cores(trainer)
    if not how.several_ranks:
        refuse_several_ranks(trainer)
    mode = module.privacy
    given_up = mode.noise_seed is not None or module.log_private_loss
    if mode.guarantee == "none" or (mode.guarantee == "dp" and given_up):  # no claim
        run_dir.mkdir(parents=True, exist_ok=True)
        run_dir.chmod(0o700)
    ranks = _meet(trainer)
    if any(getattr(callback, "counts_releases", False) and callback.resume for callback in callbacks):
        ranks.share(lambda: require_run(run_dir / LEDGER_NAME))
    alone = not resume and not (run_dir / LEDGER_NAME).exists()
    if alone and (left := sorted((run_dir / CHECKPOINTS).glob("*.ckpt"))):
        raise ResumeError(
            f"{left[0]} is from an earlier run, and resume=true could confuse it with checkpoints of this one. "
            "Choose another hydra.run.dir, or remove that folder."
        )
    ranks.in_turn(datamodule.prepare_data)
    ranks.together(lambda: datamodule.setup("fit"))
    refuse_unread_rows(module, datamodule)
    if after_setup is not None:
        ranks.in_turn(after_setup)
    if canaries is not None:
        plant_in_run(datamodule, canaries, run_dir, resume=resume, reader=module)
    if hasattr(module, "prepare"):
        ranks.in_turn(lambda: module.prepare(datamodule))
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeCheckpoints()
    remove_drafts(run_dir / CHECKPOINTS)
    checkpoint = newest_checkpoint(run_dir / CHECKPOINTS, run_id=_run_id(run_dir)) if resume else None
    trainer.fit(
        module, datamodule=datamodule, ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=True
    )
    if trainer.received_sigterm:  # after the last step, where Lightning no longer checks for it
        raise SIGTERMException
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def warn_of_crowded_cores(trainer: L.Trainer) -> None:
    """Warn if there are more processes on the CPU than cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > max(1, cores):
        rank_zero_warn(
            f"trainer.devices={trainer.num_devices} starts as many processes on the CPU, but this machine has {cores} "
            f"cores: they wait for each other. trainer.devices={cores} is faster, with the same result."
        )


def _run_id(run_dir: Path) -> str | None:
    path = run_dir / LEDGER_NAME
    records = PrivacyLedger.read(path).records if path.exists() else []
    return next((plan["run_id"] for plan in plans_of(records)), None)


def refuse_several_ranks(trainer: L.Trainer) -> None:
    """Refuse a multi-process Trainer for a task that trains as one of its stages."""
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"trainer.devices and num_nodes start {trainer.world_size} processes, but this task trains in one: each "
            "would repeat its other stages. Set trainer=cpu or trainer=gpu; task=fit trains in several."
        )


def _meet(trainer: L.Trainer) -> Ranks:
    """Return the ranks that torchrun or SLURM has already started, which share the preparation.

    Where Lightning will start the others, this process is alone until it trains; they then find its prepared files.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.world_size > 1 and environment is not None and not isinstance(environment, LightningEnvironment):
        trainer.strategy.setup_environment()
        return Ranks.here()
    return Ranks()
