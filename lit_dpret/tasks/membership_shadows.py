"""Shadow models of a target: its own training again, on other halves, within a time that was set beforehand."""

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

from lit_dpret.attacks.shadows import ShadowMatrix, balanced_halves
from lit_dpret.callbacks import PrivacyAccountant, ProgressLine, StepProgress
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.tasks.fit import train
from lit_dpret.tasks.membership_models import Attacker, read_signals, write_signals
from lit_dpret.tasks.membership_suspects import Suspects
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.stages import Stages

PILOT_STEPS = 5
SIGNALS = "signals.npz"
LEAST_STEPS = 1


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How far the shadow models were trained.

    Attributes:
        matrix: Their signals of all suspects.
        steps: Of each model.
        planned: Of the configuration, which is to be the target's.
        seconds: Of all of them together.
    """

    matrix: ShadowMatrix
    steps: tuple[int, ...]
    planned: int
    seconds: float


class Shadows:
    """Train, score and forget shadow models, one stage for each.

    Guarantees:
        - A shadow model that is done is not trained again; one that was interrupted begins anew.
        - No more steps than the target's configuration has, and no more than the time allows by the speed of the
          model before, of a few steps for the first. On a machine that slows down, later models have fewer.
        - Nothing of a shadow model is kept but its signals and its ledger.

    Args:
        parts: The target's configuration: model, data, privacy mode and trainer.
        count: How many.
        minutes: Wall time of all of them.
    """

    def __init__(self, parts: Parts, *, count: int, minutes: float) -> None:
        self.parts, self.count, self.minutes = parts, count, minutes
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

    def train(self, suspects: Suspects, attacker: Attacker, stages: Stages, *, scoring: float) -> Trained:
        """The matrix of all suspects; ``scoring`` is how many seconds the signals of one model take."""
        halves = balanced_halves(len(suspects.universe), self.count, seed=self.parts.seed)
        pace = stages.run("pilot", lambda folder, resume: self._pace(folder, suspects, halves[0]))
        names = [f"shadow_{number}" for number in range(self.count)]
        columns = {query: place for place, query in enumerate(suspects.universe)}
        chosen = np.array([columns[query] for query in suspects.ids])
        models, steps, spent = [], [], stages.seconds["pilot"]
        with ProgressLine("shadow models", every=0.0) as progress:
            for number, name in enumerate(names):
                # What is left, shared among the models that are left, less what each takes besides its steps.
                share = (60 * self.minutes - spent) / (self.count - number) - scoring - pace["around"]
                allowed = max(LEAST_STEPS, min(self.planned, int(share / pace["seconds_per_step"])))
                progress(number, self.count, f"next of {allowed} steps")
                work = partial(self._one, suspects=suspects, half=halves[number], attacker=attacker, number=number)
                pace = stages.run(name, lambda folder, _, w=work, n=allowed: w(folder, steps=n))  # type: ignore[misc]
                spent += stages.seconds[name]
                scoring = pace["scoring"]
                steps.append(int(pace["steps"]))
                models.append(read_signals(stages.run_dir / name / SIGNALS))
            progress(self.count, self.count)
        return Trained(
            matrix=ShadowMatrix.stack(models, halves[:, chosen]),
            steps=tuple(steps),
            planned=self.planned,
            seconds=spent,
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
        self, folder: Path, *, suspects: Suspects, half: NDArray[np.bool_], attacker: Attacker, steps: int, number: int
    ) -> dict[str, float]:
        for left_over in folder.iterdir():  # of an attempt that was interrupted
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        folder.chmod(0o700)  # its log tells of the queries, too
        label, watch, start = f"shadow {number + 1} of {self.count}", _Watch(), time.monotonic()
        seed = self.parts.seed + 1 + number
        model = self._fit(folder, suspects, half, steps=steps, seed=seed, label=label, watch=watch)
        around, start = time.monotonic() - start - sum(watch.seconds), time.monotonic()
        with ProgressLine(f"{label}: signals") as progress:
            write_signals(folder / SIGNALS, attacker.signals(model, progress))
        shutil.rmtree(model)
        scoring = time.monotonic() - start
        return {"steps": steps, "seconds_per_step": watch.typical(), "around": around, "scoring": scoring}

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
