"""`task=compare_modes`: one retriever under every privacy mode, several times each, and which of them differ.

Budgets can be added to a comparison that is done, as seeds and variants can (`reproduction.comparison`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.retrieval.runs import EvaluationResult
from lit_dpret.synthesis.filters import load_released
from lit_dpret.tasks.pipeline_stages import KEPT, check_round_trip
from reproduction.compare_variant import Variant
from reproduction.head_comparison import HeadComparison
from reproduction.report.mode_report import COMPARE_MODES, Headings


@dataclass(frozen=True)
class _Cell:
    """A row of the table: a variant at a budget (None where it has none), and the data set it learns from."""

    variant: str
    eps: float | None
    synthetic: Path | None = None

    @property
    def stage(self) -> str:
        return self.variant if self.eps is None else f"{self.variant}-eps{self.eps:g}"


class CompareModes(HeadComparison[_Cell]):
    """Train, evaluate and compare.

    Args:
        retriever: Makes the frozen dual encoder, given its privacy mode and a variant's settings.
        variants: What is compared, by a short name.
        eps: Budgets at which the private variants are trained.
        delta: Of every claim; null for 1 / (2 n), n the public number of queries.
        seeds: Training runs of each row; run i has the seed ``seed + i``, and noise and coins of its own.
        synthetic: The folder of a DP synthetic data set, or several; each stands at the smallest budget that
            covers its claim. Without one, variants that learn from synthetic queries are left out.
        round_trip_filter: Train on the made queries that find their own passage among so many results
            of the zero-shot encoder; null trains on all.
        only: Names of the variants to take; null for all.
        max_passages: Public sample of passages that are encoded and searched; null for all.
        split: On which questions the runs are judged.
        tuning_note, tuning_data: What the settings were chosen on; they go into the cards.
        keep_models: Keep the trained models. One takes the space of the encoder, twice.
        min_free_mb: Refuse to start with less free disk.

    Raises:
        ConfigurationError: A setting is out of range, or ``only`` names no variant.
    """

    headings: ClassVar[Headings] = COMPARE_MODES
    growing = HeadComparison.growing | {"eps", "synthetic"}

    def __init__(
        self,
        *,
        retriever: Callable[..., Any],
        variants: Mapping[str, Variant],
        eps: Sequence[float] = (3.0, 8.0),
        delta: float | None = None,
        seeds: int = 3,
        synthetic: str | Path | Sequence[str | Path] | None = None,
        round_trip_filter: int | None = 10,
        only: Sequence[str] | None = None,
        max_passages: int | None = None,
        split: str = "test",
        tuning_note: str | None = None,
        tuning_data: str = "unknown",
        keep_models: bool = False,
        min_free_mb: float = 1000,
    ) -> None:
        super().__init__(
            retriever=retriever,
            delta=delta,
            variants=variants,
            only=only,
            seeds=seeds,
            max_passages=max_passages,
            split=split,
            tuning_note=tuning_note,
            tuning_data=tuning_data,
            keep_models=keep_models,
            min_free_mb=min_free_mb,
        )
        if not eps or any(not (isinstance(e, (int, float)) and 0 < e < math.inf) for e in eps):
            raise ConfigurationError(f"task.eps={list(eps)} must be one or more positive, finite numbers.")
        if round_trip_filter is not None and round_trip_filter < 1:
            raise ConfigurationError(f"task.round_trip_filter={round_trip_filter} must be at least 1.")
        self.eps = sorted({float(e) for e in eps})
        given = [synthetic] if isinstance(synthetic, (str, Path)) else list(synthetic or ())
        self.synthetic = [Path(folder) for folder in given]
        self.round_trip_filter = round_trip_filter

    # -- what there is to do -----------------------------------------------------------------

    def cells(self) -> list[_Cell]:
        """The rows to train: those without a budget first, then each budget."""
        free = [_Cell(name, None) for name in self.only if self.variants[name].guarantee == "none"]
        cells: list[_Cell] = []
        claims = [(folder, self._budget_of(folder)) for folder in self.synthetic]
        for budget in self.eps:
            for name in self.only:
                variant = self.variants[name]
                if variant.guarantee == "dp":
                    cells.append(_Cell(name, budget))
                elif variant.learns_from_synthetic:
                    cells += [_Cell(name, budget, folder) for folder, covered in claims if covered == budget]
        for name in self.only:
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

    def before_training(self, cells: Sequence[_Cell]) -> None:
        """Choose, by public means, the synthetic queries that are trained on."""
        for cell in cells:
            if cell.synthetic is not None and self.round_trip_filter is not None:
                self._stages.run(_round_trip(cell), partial(self._consistent, cell))

    def _consistent(self, cell: _Cell, stage: Path, resume: bool) -> dict[str, Any]:
        data = self._made(cell, keep=None)
        data.setup("fit")
        model = self.retriever(NoPrivacy())
        with ProgressLine("encoding synthetic queries") as progress:
            model.prepare(data, progress=progress)
        released = replace(load_released(str(cell.synthetic)), passages=self._searched.public_passages())
        k = self.round_trip_filter or 1
        return check_round_trip(model, released, stage, k=k, seed=self._parts.seed)

    def _made(self, cell: _Cell, keep: Path | None) -> SyntheticDataModule:
        return SyntheticDataModule(folder=str(cell.synthetic), evaluation=self._searched, keep=keep)

    def train(self, cell: _Cell, seed: int, folder: Path, resume: bool) -> EvaluationResult:
        data: PairsDataModule = self.make_data()
        if cell.synthetic is not None:
            keep = None if self.round_trip_filter is None else self._parts.run_dir / _round_trip(cell) / KEPT
            data = self._made(cell, keep)
        return self.train_on(cell, data, seed, folder, resume)

    def budget_of(self, cell: _Cell) -> float | None:
        return cell.eps

    # -- the table ---------------------------------------------------------------------------

    def describe_row(self, cell: _Cell, card: Mapping[str, Any]) -> dict[str, Any]:
        variant: Variant = self.variants[cell.variant]
        return {
            "name": variant.label if cell.eps is None else f"{variant.label}, epsilon {cell.eps:g}",
            "privacy": privacy_line(card),
            "budget": cell.eps,
            "variant": cell.variant,
            "settings": variant.describe(card),
        }

    def evaluated_on(self) -> str:
        return (
            f"{len(self._queries)} {self.split} questions over {len(self._searched.public_passages())} passages; "
            "frozen encoder with a linear query head"
        )

    def given(self, cells: Sequence[_Cell]) -> Sequence[Path]:
        return [cell.synthetic for cell in cells if cell.synthetic is not None]

    def notes(self) -> Iterable[str]:
        for name in self.only:
            if self.variants[name].learns_from_synthetic:
                yield from self._synthetic_notes(self.variants[name].label)

    def _synthetic_notes(self, label: str) -> Iterable[str]:
        covered = {self._budget_of(folder) for folder in self.synthetic}
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


def _round_trip(cell: _Cell) -> str:
    return f"round_trip-{cell.stage}"
