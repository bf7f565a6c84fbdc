"""`task=compare_modes`: one retriever under every privacy mode, several times each, and which of them differ.

Budgets can be added to a comparison that is done, as seeds and variants can (`reproduction.study`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.runs import EvaluationResult
from lit_dpret.settings import require_whole
from lit_dpret.synthesis.filters import load_released
from lit_dpret.tasks.pipeline_stages import KEPT
from reproduction.heads import HeadStudy, HeadVariant
from reproduction.report.comparison import COMPARE_MODES
from reproduction.study import Cell, TrainingRun


@dataclass(kw_only=True, eq=False)
class CompareModes(HeadStudy):
    """Train every variant at every budget, evaluate and compare."""

    headings = COMPARE_MODES
    encoder = "; frozen encoder with a linear query head"
    growing = HeadStudy.growing | {"eps", "synthetic", "folders"}

    eps: Sequence[float] = (3.0, 8.0)
    synthetic: str | Path | Sequence[str | Path] | None = None
    round_trip_filter: int | None = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps or any(not (isinstance(e, (int, float)) and 0 < e < math.inf) for e in self.eps):
            raise ConfigurationError(f"task.eps={list(self.eps)} must be one or more positive, finite numbers.")
        require_whole("task", self, 1, "round_trip_filter", null=True)
        self.eps = sorted({float(e) for e in self.eps})
        given = [self.synthetic] if isinstance(self.synthetic, (str, Path)) else self.synthetic or ()
        self.folders = [Path(folder) for folder in given]

    # -- what there is to do -----------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """Return the rows to train: those without a budget first, then each budget."""
        free = [Cell(name, None) for name in self.chosen if self.variants[name].guarantee == "none"]
        cells: list[Cell] = []
        claims = [(folder, self._budget_of(folder)) for folder in self.folders]
        for budget in self.eps:
            for name in self.chosen:
                variant = self.variants[name]
                if variant.guarantee == "dp":
                    cells.append(Cell(name, budget))
                elif variant.learns_from_synthetic:
                    cells += [Cell(name, budget, folder) for folder, covered in claims if covered == budget]
        for name in self.chosen:
            if self.delta is None and self.variants[name].privacy.keywords.get("neighbours") == "add_or_remove":
                raise ConfigurationError(
                    f"task.delta=null is 1 / (2 n), and neighbours=add_or_remove of task.variants.{name}.privacy "
                    "makes n private. Set task.delta."
                )
        names = [cell.stage for cell in free + cells]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigurationError(
                f"task.synthetic has two folders for {twice.pop()}: give one for each of task.eps."
            )
        return free + cells

    def _budget_of(self, folder: Path) -> float:
        claim = read_card(folder)["claim"]
        if claim["guarantee"] != "dp":
            raise ConfigurationError(f"task.synthetic={folder} claims no epsilon: there is no row that it belongs to.")
        covering = [eps for eps in self.eps if claim["epsilon"] <= eps]
        if not covering:
            raise ConfigurationError(
                f"task.synthetic={folder} claims epsilon = {claim['epsilon']:.4g}, more than all of task.eps="
                f"{self.eps}. Add a budget that covers it, or leave the folder out."
            )
        return covering[0]

    # -- stages ------------------------------------------------------------------------------

    def before_training(self, cells: Sequence[Cell]) -> None:
        """Choose, by public means, the synthetic queries that are trained on."""
        for cell in cells:
            if cell.synthetic is not None and self.round_trip_filter is not None:
                self._stages.run(_round_trip(cell), partial(self._consistent, cell))

    def _consistent(self, cell: Cell, stage: Path, resume: bool) -> dict[str, Any]:
        released = replace(load_released(str(cell.synthetic)), passages=self._passages())
        k = self.round_trip_filter or 1
        return self.round_trip(self._made(cell, None), released, stage, k=k, label="encoding synthetic queries")

    def _made(self, cell: Cell, keep: Path | None) -> SyntheticDataModule:
        return SyntheticDataModule(folder=str(cell.synthetic), evaluation=self._searched, keep=keep)

    def train(self, run: TrainingRun) -> EvaluationResult:
        cell = run.cell
        data: PairsDataModule = self.make_data()
        if cell.synthetic is not None:
            keep = None if self.round_trip_filter is None else self._parts.run_dir / _round_trip(cell) / KEPT
            data = self._made(cell, keep)
        return self.train_on(data, run)

    def budget_of(self, cell: Cell) -> float | None:
        return cell.eps

    # -- the table ---------------------------------------------------------------------------

    def describe_row(self, cell: Cell, card: Mapping[str, Any]) -> dict[str, Any]:
        variant: HeadVariant = self.variants[cell.variant]
        return {
            "name": variant.label if cell.eps is None else f"{variant.label}, epsilon {cell.eps:g}",
            "privacy": privacy_line(card),
            "budget": cell.eps,
            "variant": cell.variant,
            "settings": variant.describe(card),
        }

    def notes(self) -> Iterable[str]:
        for name in self.chosen:
            if self.variants[name].learns_from_synthetic:
                yield from self._synthetic_notes(self.variants[name].label)

    def _synthetic_notes(self, label: str) -> Iterable[str]:
        covered = {self._budget_of(folder) for folder in self.folders}
        missing = [f"{eps:g}" for eps in self.eps if eps not in covered]
        if missing:
            yield (
                f"{label} is left out at epsilon {' and '.join(missing)}: task.synthetic names no data set with such a "
                "claim. task=synthesize and experiment=quickstart make one (RUN/synthetic/data)."
            )
        if covered:
            yield (
                f"The runs of {label} differ in how the retriever is trained, not in the data set: the noise of its "
                "generator was drawn once, and the interval over runs does not cover that draw."
            )


def _round_trip(cell: Cell) -> str:
    return f"round_trip-{cell.stage}"
