"""`task=compare_modes`: one retriever under every privacy mode, several times each, and which of them differ.

Every run is a stage of its own: an interrupted comparison goes on with ``resume=true``, and more seeds,
budgets or variants can be added to one that is done. Numbers are means over training runs; what is
called a difference is one over runs (`lit_dpret.report.mode_comparison`).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from lit_dpret.callbacks import ProgressLine
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.postprocessing import load_released
from lit_dpret.privacy.card import read_card
from lit_dpret.privacy.card_text import privacy_line
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.report.mode_comparison import ModeRow
from lit_dpret.retrieval.runs import EvaluationResult
from lit_dpret.tasks.compare_report import tell
from lit_dpret.tasks.compare_variant import Variant
from lit_dpret.tasks.consistency import KEPT, check_round_trip
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.retriever_stage import stage_callbacks, train_retriever
from lit_dpret.tasks.scoring import score_bm25, score_embeddings
from lit_dpret.tasks.stages import DONE, Stages

METRIC_NAMES = {"ndcg@10": "nDCG@10", "recall@10": "Recall@10"}
PUBLIC = "no private data"
# Removed at the end: embeddings of queries are as private as the queries.
EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class _Cell:
    """A row of the table: a variant at a budget (None where it has none), and the data set it learns from."""

    variant: str
    eps: float | None
    synthetic: Path | None = None

    @property
    def stage(self) -> str:
        return self.variant if self.eps is None else f"{self.variant}-eps{self.eps:g}"


class CompareModes:
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
        self.make_retriever, self.variants = retriever, dict(variants)
        if unknown := sorted(set(only or ()) - set(self.variants)):
            raise ConfigurationError(f"task.only: {unknown[0]!r} is not one of {', '.join(self.variants)}.")
        self.only = list(self.variants) if only is None else [name for name in self.variants if name in only]
        if not self.only:
            raise ConfigurationError("task.variants and task.only leave nothing to compare.")
        if not eps or any(not (isinstance(e, (int, float)) and 0 < e < math.inf) for e in eps):
            raise ConfigurationError(f"task.eps={list(eps)} must be one or more positive, finite numbers.")
        for name, number in (("seeds", seeds), ("round_trip_filter", round_trip_filter)):
            if number is not None and number < 1:
                raise ConfigurationError(f"task.{name}={number} must be at least 1.")
        self.eps, self.delta, self.seeds = sorted({float(e) for e in eps}), delta, seeds
        given = [synthetic] if isinstance(synthetic, (str, Path)) else list(synthetic or ())
        self.synthetic = [Path(folder) for folder in given]
        self.round_trip_filter, self.max_passages, self.split = round_trip_filter, max_passages, split
        self.tuning_note, self.tuning_data = tuning_note, tuning_data
        self.keep_models, self.min_free_mb = keep_models, min_free_mb

    def run(self, parts: Parts) -> dict[str, float]:
        """Run every stage that is not done yet; returns nDCG@10 by row."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        self._parts = parts
        cells = self._cells()
        self._stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint())
        self._searched = self._data()
        self._searched.prepare_data()
        self._searched.setup("fit")
        self._searched.use_unit("query")
        self._delta = 1.0 / (2 * self._searched.n_units) if self.delta is None else self.delta
        self._queries, self._qrels = self._searched.evaluation_set(self.split)
        rows = [self._untrained("bm25", "BM25", self._bm25), self._untrained("zero_shot", "zero-shot", self._zero_shot)]
        self._filter(cells)
        self._train_all(cells)
        rows += [self._row(cell) for cell in cells]
        told = tell(
            parts.run_dir,
            rows,
            metrics=list(METRIC_NAMES.values()),
            evaluated_on=self._evaluated_on(),
            command=parts.command,
            notes=self._notes(),
            private_runs=self.seeds * sum(self.variants[cell.variant].guarantee == "dp" for cell in cells),
            seconds=sum(self._stages.seconds.values()),
        )
        shutil.rmtree(parts.run_dir / EMBEDDINGS, ignore_errors=True)
        return told

    # -- what there is to do -----------------------------------------------------------------

    def _cells(self) -> list[_Cell]:
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

    def _fingerprint(self) -> str:
        """What finished runs depend on; runs can be added without touching them."""
        growing = {"variants", "only", "eps", "seeds", "synthetic", "keep_models", "min_free_mb"}
        settings = {k: str(v) for k, v in sorted(vars(self).items()) if not k.startswith("_") and k not in growing}
        settings["seed"] = str(self._parts.seed)
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _data(self) -> PairsDataModule:
        made: PairsDataModule = self._parts.make_datamodule(
            max_passages=self.max_passages, expected_batch_size=None, sample_rate=None, rows_per_unit="one"
        )
        return made

    # -- stages ------------------------------------------------------------------------------

    def _untrained(self, name: str, label: str, score: Callable[[], EvaluationResult]) -> ModeRow:
        result = self._stages.run(name, lambda folder, resume: _per_query(score()))
        return self._as_row(label, [result], privacy=PUBLIC)

    def _bm25(self) -> EvaluationResult:
        return score_bm25(self._queries, self._searched.public_passages(), self._qrels)

    def _zero_shot(self) -> EvaluationResult:
        model = self._retriever(NoPrivacy())
        with ProgressLine("encoding passages and queries") as progress:
            model.prepare(self._searched, progress=progress)
        return self._score(model)

    def _retriever(self, privacy: Any, **settings: Any) -> Any:
        return self.make_retriever(privacy=privacy, cache_dir=self._parts.run_dir / EMBEDDINGS, **settings)

    def _score(self, model: Any) -> EvaluationResult:
        passages = dict(sorted(self._searched.public_passages().items()))
        model.prepare_texts(passages, self._queries)  # from the cache, but for the first run
        return score_embeddings(
            list(self._queries),
            model.encode_queries(list(self._queries.values())),
            list(passages),
            model.encode_passages(list(passages.values())),
            self._qrels,
        )

    def _filter(self, cells: Sequence[_Cell]) -> None:
        """Choose, by public means, the synthetic queries that are trained on."""
        for cell in cells:
            if cell.synthetic is not None and self.round_trip_filter is not None:
                self._stages.run(_round_trip(cell), partial(self._consistent, cell))

    def _consistent(self, cell: _Cell, stage: Path, resume: bool) -> dict[str, Any]:
        data = self._made(cell, keep=None)
        data.setup("fit")
        model = self._retriever(NoPrivacy())
        with ProgressLine("encoding synthetic queries") as progress:
            model.prepare(data, progress=progress)
        released = replace(load_released(str(cell.synthetic)), passages=self._searched.public_passages())
        k = self.round_trip_filter or 1
        return check_round_trip(model, released, stage, k=k, seed=self._parts.seed)

    def _made(self, cell: _Cell, keep: Path | None) -> SyntheticDataModule:
        return SyntheticDataModule(folder=str(cell.synthetic), evaluation=self._searched, keep=keep)

    def _train_all(self, cells: Sequence[_Cell]) -> None:
        """Every row's first run, then every row's second one: early numbers are of all rows."""
        todo = [(cell, self._parts.seed + i) for i in range(self.seeds) for cell in cells]
        done = sum((self._parts.run_dir / _run_name(cell, seed) / DONE).exists() for cell, seed in todo)
        with ProgressLine("training runs", every=0.0) as progress:
            progress(done, len(todo))
            for cell, seed in todo:
                if (self._parts.run_dir / _run_name(cell, seed) / DONE).exists():
                    self._result(cell, seed)
                    continue
                result = self._result(cell, seed)
                done += 1
                value = np.mean(result["per_query"]["nDCG@10"])
                progress(done, len(todo), f"{_run_name(cell, seed)} nDCG@10 {value:.4f}")

    def _result(self, cell: _Cell, seed: int) -> dict[str, Any]:
        """What a run reached; one that was trained with other settings of its variant is refused."""
        name, settings = _run_name(cell, seed), repr(self.variants[cell.variant])

        def work(folder: Path, resume: bool) -> dict[str, Any]:
            return self._train(cell, seed, folder, resume) | {"settings": settings}

        result = self._stages.run(name, work)
        if result["settings"] != settings:
            raise ResumeError(
                f"resume=true, but {name} was trained with other settings of task.variants.{cell.variant}. Restore "
                f"them, or remove {self._parts.run_dir / name}."
            )
        return result

    def _train(self, cell: _Cell, seed: int, folder: Path, resume: bool) -> dict[str, Any]:
        variant = self.variants[cell.variant]
        L.seed_everything(seed, verbose=False)
        noise, cap = self._calibrated(cell)
        privacy = variant.make_privacy(eps=cell.eps, delta=self._delta, seed=seed, noise_multiplier=noise)
        model = self._retriever(privacy, **variant.module_settings(seed=seed))
        tuning = {"tuning_data": self.tuning_data, "tuning_note": self.tuning_note, "tuning_trials": variant.trials}
        data: PairsDataModule = self._data()
        if cell.synthetic is not None:
            keep = None if self.round_trip_filter is None else self._parts.run_dir / _round_trip(cell) / KEPT
            data = self._made(cell, keep)
        data.physical_batch_size = 2 * variant.batch
        data.cap = data.cap if cap is None else cap
        train_retriever(
            model,
            data,
            folder,
            parts=self._parts,
            steps=variant.steps,
            batch=variant.batch,
            callbacks=stage_callbacks(folder, resume=resume, label=_run_name(cell, seed), **tuning),
            resume=resume,
        )
        result = _per_query(self._score(model))
        if not self.keep_models:
            shutil.rmtree(folder / "model", ignore_errors=True)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result

    def _calibrated(self, cell: _Cell) -> tuple[float | None, int | None]:
        """Noise multiplier and cap of the row's first run, which the others need not look for again."""
        first = self._parts.run_dir / _run_name(cell, self._parts.seed)
        if self.variants[cell.variant].guarantee != "dp" or not (first / DONE).exists():
            return None, None
        mechanism = read_card(first)["mechanism"]
        return mechanism["noise_multiplier"], mechanism["law"][0].get("cap")

    # -- the table ---------------------------------------------------------------------------

    def _row(self, cell: _Cell) -> ModeRow:
        variant = self.variants[cell.variant]
        seeds = range(self._parts.seed, self._parts.seed + self.seeds)
        results = [self._result(cell, seed) for seed in seeds]
        cards = [read_card(self._parts.run_dir / _run_name(cell, seed)) for seed in seeds]
        worst = max(cards, key=lambda card: math.inf if card["claim"]["epsilon"] is None else card["claim"]["epsilon"])
        label = variant.label if cell.eps is None else f"{variant.label}, epsilon {cell.eps:g}"
        return self._as_row(
            label,
            results,
            privacy=privacy_line(worst),
            budget=cell.eps,
            variant=cell.variant,
            settings=variant.describe(worst),
        )

    def _as_row(self, name: str, results: Sequence[Mapping[str, Any]], **facts: Any) -> ModeRow:
        values = {m: np.array([result["per_query"][m] for result in results]) for m in METRIC_NAMES.values()}
        return ModeRow(
            name=name,
            per_run={m: table.mean(axis=1).tolist() for m, table in values.items()},
            per_query={m: table.mean(axis=0).tolist() for m, table in values.items()},
            **facts,
        )

    def _evaluated_on(self) -> str:
        return (
            f"{len(self._queries)} {self.split} questions over {len(self._searched.public_passages())} passages; "
            "frozen encoder with a linear query head"
        )

    def _notes(self) -> list[str]:
        notes = []
        if self.tuning_note:
            notes.append(self.tuning_note)
        for name in self.only:
            if self.variants[name].learns_from_synthetic:
                notes += self._synthetic_notes(self.variants[name].label)
        return notes

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


def _run_name(cell: _Cell, seed: int) -> str:
    return f"{cell.stage}-seed{seed}"


def _round_trip(cell: _Cell) -> str:
    return f"round_trip-{cell.stage}"


def _per_query(result: EvaluationResult) -> dict[str, Any]:
    return {"per_query": {shown: [float(v) for v in result.per_query[name]] for name, shown in METRIC_NAMES.items()}}
