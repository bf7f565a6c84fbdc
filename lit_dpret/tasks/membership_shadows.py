"""Shadow models of a target: its own training again, on other halves, as many as a time set beforehand allows.

A shadow model that was trained for fewer steps than the target remembers less, and tells little of what the target
remembers. So every one of them takes the target's number of steps, and where the time is short there are fewer of them.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray

from lit_dpret.audit.attacks.shadows import FEWEST, ShadowMatrix, balanced_halves
from lit_dpret.callbacks import PrivacyAccountant, ProgressLine, StepProgress
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.tasks.fit import train
from lit_dpret.tasks.membership_models import Attacker, read_signals, write_signals
from lit_dpret.tasks.membership_suspects import Suspects
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.stages import Stages

PILOT_STEPS = 5
SIGNALS = "signals.npz"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How far the shadow models were trained.

    Attributes:
        matrix: Their signals of all suspects.
        steps: Of each model; the configuration's, which is to be the target's.
        wanted: How many models were asked for.
        seconds: Of all of them together.
    """

    matrix: ShadowMatrix
    steps: int
    wanted: int
    seconds: float


class Shadows:
    """Train, score and forget shadow models, one stage for each.

    Guarantees:
        - A shadow model that is done is not trained again; one that was interrupted begins anew.
        - Each has as many steps as the target's configuration, however slow the machine is.
        - There are ``count`` of them, or as many as fit into the time by the speed of a few steps that are timed
          before, and none where not even four do. How many is decided once, before the first, and is an even number:
          every text is in the training data of half of them. A machine that slows down later makes the task longer.
        - Nothing of a shadow model is kept but its signals and its ledger.

    Args:
        parts: The target's configuration: model, data, privacy mode and trainer.
        count: How many at most.
        minutes: Wall time of all of them, by that estimate.
    """

    def __init__(self, parts: Parts, *, count: int, minutes: float) -> None:
        self.parts, self.count, self.minutes = parts, count, minutes
        self.why_none: str | None = None
        self.planned = int(parts.make_trainer().max_steps)
        if self.planned < 1:
            raise ConfigurationError(
                "trainer.max_steps says how long shadow models are trained, and is not set. Give it the target's."
            )
        if getattr(parts.make_privacy(), "dataset_ledger", None) is not None:
            raise ConfigurationError(
                "privacy.dataset_ledger adds up what is released, and shadow models are not. Set it to null for "
                "task=membership."
            )

    def train(self, suspects: Suspects, attacker: Attacker, stages: Stages, *, scoring: float) -> Trained | None:
        """The matrix of all suspects, or None where the time is too short for four models.

        Args:
            suspects: Whose signals are in the matrix, and whose halves are trained on.
            attacker: Computes signals.
            stages: Each model is one.
            scoring: How many seconds the signals of one model take.
        """

        def planned(folder: Path, resume: bool) -> dict[str, float]:
            # Which half the timed model gets is of no account.
            pace = self._pace(folder, suspects, balanced_halves(len(suspects.universe), FEWEST, seed=0)[0])
            each = self.planned * pace["seconds_per_step"] + pace["around"] + scoring
            return pace | {"seconds_each": each, "models": models_in(60 * self.minutes, each, wanted=self.count)}

        plan = stages.run("pilot", planned)
        count, spent = int(plan["models"]), stages.seconds["pilot"]
        if count == 0:
            self.why_none = (
                f"There are no shadow models, and the strongest attacks are missing: {FEWEST} of the target's "
                f"{self.planned} steps would take {FEWEST * plan['seconds_each'] / 60:.1f} minutes, and "
                f"task.minutes={self.minutes:g}. Raise it, and run the task in another hydra.run.dir."
            )
            return None
        halves = balanced_halves(len(suspects.universe), count, seed=self.parts.seed)
        columns = {query: place for place, query in enumerate(suspects.universe)}
        chosen = np.array([columns[query] for query in suspects.ids])
        models = []
        with ProgressLine("shadow models", every=0.0) as progress:
            for number in range(count):
                progress(number, count, f"of {self.planned} steps each")
                work = partial(
                    self._one, suspects=suspects, half=halves[number], attacker=attacker, number=number, count=count
                )
                stages.run(name := f"shadow_{number}", lambda folder, _, w=work: w(folder))  # type: ignore[misc]
                spent += stages.seconds[name]
                models.append(read_signals(stages.run_dir / name / SIGNALS))
            progress(count, count)
        return Trained(
            matrix=ShadowMatrix.stack(models, halves[:, chosen]), steps=self.planned, wanted=self.count, seconds=spent
        )

    def _pace(self, folder: Path, suspects: Suspects, half: NDArray[np.bool_]) -> dict[str, float]:
        """Seconds of a step, and of what is done once for each model, by a model of a few steps that is forgotten."""
        watch, start = _Watch(), time.monotonic()
        self._fit(folder, suspects, half, steps=min(PILOT_STEPS, self.planned), seed=self.parts.seed, watch=watch)
        around = time.monotonic() - start - sum(watch.seconds)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return {"seconds_per_step": watch.typical(), "around": around}

    def _one(
        self, folder: Path, *, suspects: Suspects, half: NDArray[np.bool_], attacker: Attacker, number: int, count: int
    ) -> dict[str, float]:
        for left_over in folder.iterdir():  # of an attempt that was interrupted
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        folder.chmod(0o700)  # its log tells of the queries, too
        label, watch, start = f"shadow {number + 1} of {count}", _Watch(), time.monotonic()
        seed = self.parts.seed + 1 + number
        model = self._fit(folder, suspects, half, steps=self.planned, seed=seed, label=label, watch=watch)
        around, start = time.monotonic() - start - sum(watch.seconds), time.monotonic()
        with ProgressLine(f"{label}: signals") as progress:
            write_signals(folder / SIGNALS, attacker.signals(model, progress))
        shutil.rmtree(model)
        scoring = time.monotonic() - start
        return {"steps": self.planned, "seconds_per_step": watch.typical(), "around": around, "scoring": scoring}

    def _fit(
        self, folder: Path, suspects: Suspects, half: NDArray[np.bool_], *, steps: int, seed: int,
        watch: _Watch, label: str = "pilot",
    ) -> Path:  # fmt: skip
        L.seed_everything(seed, verbose=False)
        data = self.parts.make_datamodule()
        chosen = {query for query, inside in zip(suspects.universe, half, strict=True) if inside}
        module = self.parts.make_module(privacy=self.parts.make_privacy())

        def make_trainer(**settings: Any) -> L.Trainer:
            made: L.Trainer = self.parts.make_trainer(max_steps=steps, enable_checkpointing=False, **settings)
            return made

        train(
            module, data, run_dir=folder, make_trainer=make_trainer, loggers=[], resume=False,
            after_setup=partial(data.train_on, chosen),
            callbacks=[PrivacyAccountant(run_dir=folder), StepProgress(label), watch],
        )  # fmt: skip
        if len(watch.seconds) < steps:  # stopped by a callback, or by a Trainer that takes an interruption for an end
            raise ResumeError(
                f"A shadow model was trained for {len(watch.seconds)} of {steps} steps and then stopped. The same "
                "command with resume=true trains it anew."
            )
        saved: Path = module.save_model(folder / "model")
        return saved


def models_in(seconds: float, each: float, *, wanted: int) -> int:
    """How many shadow models of ``each`` seconds fit: an even number from 4 to ``wanted``, or 0.

    >>> models_in(1200, 100, wanted=8), models_in(1200, 190, wanted=8), models_in(1200, 301, wanted=8)
    (8, 6, 0)
    """
    fitting = min(wanted, int(seconds / max(each, 1e-9)) // 2 * 2)
    return fitting if fitting >= FEWEST else 0


class _Watch(Callback):
    """Seconds of each logical step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0

    def typical(self) -> float:
        """The median, without the first step, which has most to set up; a microsecond where there was none."""
        return float(np.median(self.seconds[1:] or self.seconds or [1e-6]))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if getattr(batch, "last", True):
            now = time.monotonic()
            self.seconds.append(now - self._since)
            self._since = now
