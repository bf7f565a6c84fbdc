"""`task=canaries`: plant secrets, train with and without privacy, and see which leak. Table 7 of paper 000.

Every training has its own secrets, noise and coins, and is a stage that is done once. An interrupted study continues
with ``resume=true``, and can grow by more trainings or other epsilons in the same way.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L

from lit_dpret.audit.canaries import CanarySuite
from lit_dpret.audit.canaries.canary import Knobs
from lit_dpret.audit.canaries.findings import Cell, Outcome, cells_of
from lit_dpret.audit.canaries.suite import plant_in_run
from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, PrivacyViolation
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.report.canary_table import CanaryRow, write_canary_table
from lit_dpret.settings import picked, require_whole
from lit_dpret.tasks.audit import Measurement, limits_by_copies
from lit_dpret.tasks.parts import Parts, require_budgets
from lit_dpret.tasks.pipeline_stages import stage_callbacks, train_retriever
from reproduction.study import Study, budget_name, refuse_other_modes

NAME = "canaries"
_KNOBS = Knobs(
    group="task.canaries", queries="task.canaries.queries", count="task.canaries.count",
    echo="task.canaries.kinds=[echo]",
)  # fmt: skip
_HOW_NOT_WHAT = ("hydra.run.dir=", "privacy.secret_file=")  # parts of a command that change no number


@dataclass(kw_only=True, eq=False)
class CanaryStudy(Study):
    """Repeated trainings with planted secrets."""

    growing = Study.growing | {"eps", "trainings", "keep_models"}

    generator: Callable[..., Any]
    canaries: CanarySuite
    measure: Measurement
    eps: Sequence[float | None] = (None, 16.0)
    trainings: int = 5
    steps: int = 80
    batch: int = 64
    max_grad_norm: float = 0.1
    tuning_note: str | None = None
    tuning_data: str = "unknown"
    keep_models: bool = False
    min_free_mb: float = 300

    def __post_init__(self) -> None:
        require_whole("task", self, 1, "trainings", "steps", "batch")
        require_budgets("task.eps", self.eps, some=True)
        self.canaries.check(_KNOBS)
        if self.keep_models:
            self.canaries.refuse_splits(_KNOBS)
        if self.canaries.include != 1:
            raise ConfigurationError(
                f"task.canaries.include={self.canaries.include:g}: ranks need every secret planted. Set it to 1; for "
                "coins use the one-run audit."
            )

    def run(self, parts: Parts) -> dict[str, float]:
        """Do every training that is not done yet, then write the table; return the leaked share by row."""
        self._parts = parts
        for eps in self.eps:
            self._privacy(eps)  # refuses before anything is trained
        self.begin(parts, seed=parts.seed)
        data = parts.make_datamodule(expected_batch_size=None, sample_rate=None)
        data.setup("fit")
        read = data.collection
        self._stages.on_data(read.queries, read.passages, read.qrels, read.users).begin()
        todo = [(eps, number) for number in range(self.trainings) for eps in self.eps]

        def train(one: tuple[float | None, int]) -> str:
            self._stages.run(_stage(*one), lambda folder, resume: self._trained(*one, folder, resume))
            return ""

        self.in_turn(todo, lambda one: _stage(*one), train, label="trainings")
        return self._tell()

    def kept_models(self) -> list[str]:
        return [budget_name(eps) for eps in self.eps if self.keep_models and eps is not None]

    def _privacy(self, eps: float | None) -> Any:
        if eps is None:
            return NoPrivacy()
        mode = self._parts.make_privacy(eps=eps)
        refuse_other_modes(mode, eps)
        mode.max_grad_norm = self.max_grad_norm
        return mode

    # -- one training --------------------------------------------------------------------------

    def _trained(self, eps: float | None, number: int, folder: Path, resume: bool) -> dict[str, Any]:
        seed = self._parts.seed + number
        L.seed_everything(seed, verbose=False)
        model = self.generator(privacy=self._privacy(eps))
        data: PairsDataModule = self._parts.make_datamodule(expected_batch_size=None, sample_rate=None)
        if eps is None:
            data.sampling = "shuffle"
        data.setup("fit")
        suite = self.canaries
        suite = suite if suite.seed is None else replace(suite, seed=suite.seed + number)
        planted = plant_in_run(
            data, suite, folder, resume=resume, reader=model, released=self.keep_models, knobs=_KNOBS
        )
        callbacks = stage_callbacks(
            folder, resume=resume, label=_stage(eps, number), save_every=self.steps, tuning_note=self.tuning_note,
            tuning_data=self.tuning_data,
        )  # fmt: skip
        size: dict[str, Any] = {"steps": self.steps, "batch": self.batch}
        train_retriever(model, data, folder, parts=self._parts, callbacks=callbacks, resume=resume, **size)
        found = self.measure.of(folder / "model", planted.canaries, seed=seed)
        for name in () if self.keep_models else ("model", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)
        return {"canaries": found, "units": data.n_units}

    # -- the table -----------------------------------------------------------------------------

    def _tell(self) -> dict[str, float]:
        rows = [row for eps in self.eps for row in self._rows(eps)]
        units = self._stages.result(_stage(self.eps[0], 0))["units"]
        facts = {
            "units": units, "planted_units": self.canaries.units, "measure": vars(self.measure),
            "canaries": self.canaries.settings(), "seconds": round(sum(self._stages.seconds.values())),
        }  # fmt: skip
        notes = [
            f"{self.trainings} trainings with each budget, {self.steps} steps of {self.batch} units on average, on "
            f"{units} units of which {self.canaries.units} are copies of canaries; secrets, coins and noise are "
            "new in each.",
            "These are canaried models: release none of them.",
            *([self.tuning_note] if self.tuning_note else []),
        ]
        written, contradictions = write_canary_table(
            self._run_dir, rows, name=NAME, title="What became of planted secrets", notes=notes,
            facts=facts | picked(self.canaries, "candidates") | picked(self, "trainings", "steps", "batch"),
            command=self._parts.command_again(*_HOW_NOT_WHAT),
        )  # fmt: skip
        if contradictions:
            raise PrivacyViolation(
                f"{len(contradictions)} attacks were measured above their ceilings, the first: {contradictions[0]} "
                f"The report is {written['canaries.html']}."
            )
        return {f"{row.model}, {cell.side}, {cell.copies}, {cell.kind}": cell.leaked.mean
                for row in rows for cell in (row.cell,)}  # fmt: skip

    def _rows(self, eps: float | None) -> list[CanaryRow]:
        outcomes = [
            Outcome.of(number, one["score"], one["leak"])
            for number in range(self.trainings)
            for one in self._stages.result(_stage(eps, number))["canaries"]
        ]
        folder = self._run_dir / _stage(eps, 0)
        card, candidates = read_card(folder), self.canaries.candidates
        copies, claim = list(self.canaries.repetitions), card["claim"]
        private = claim["guarantee"] == "dp"
        cells: list[Cell] = cells_of(
            outcomes, candidates=candidates, tables=len(self.eps), delta=claim["delta"] if private else 0.0,
            neighbours=claim["neighbours"] if private else "zero_out",
            limits=limits_by_copies(card, folder / LEDGER_NAME, self.measure, copies=copies, candidates=candidates),
        )  # fmt: skip
        model = "no privacy" if eps is None else f"eps = {eps:g}"
        return [CanaryRow(model=model, cell=cell, candidates=candidates) for cell in cells]


def _stage(eps: float | None, number: int) -> str:
    return f"{budget_name(eps)}-{number}"
