"""What tasks share that train something several times in several ways and tell which ways differ.

Every run is a stage of its own: an interrupted comparison goes on with ``resume=true``, and more seeds or
variants can be added to one that is done. Numbers are means over training runs; what is called a
difference is one over runs (`reproduction.report.mode_comparison`).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.card import read_card
from lit_dpret.cards.page import Section
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.retrieval.runs import EvaluationResult
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.ranking import score_bm25
from lit_dpret.tasks.stages import DONE, Stages
from reproduction.compare_report import tell
from reproduction.report.mode_comparison import ModeRow
from reproduction.report.mode_report import Headings
from reproduction.spent import spent_under

METRIC_NAMES = {"ndcg@10": "nDCG@10", "recall@10": "Recall@10"}
PUBLIC = "no private data"


class Cell(Protocol):
    """A row of the table that is trained."""

    @property
    def variant(self) -> str:
        """The key of its settings in ``task.variants``."""
        ...

    @property
    def stage(self) -> str:
        """Its own name, for folders."""
        ...


C = TypeVar("C", bound=Cell)


class Comparison(ABC, Generic[C]):
    """Train, evaluate and compare.

    Args:
        variants: What is compared, by a short name; a ``repr`` that tells all of its settings.
        only: Names of the variants to take; null for all.
        seeds: Training runs of each row; run i has the seed ``seed + i``, and noise and coins of its own.
        max_passages: Public sample of passages that are encoded and searched; null for all.
        split: On which questions the runs are judged.
        tuning_note: What the settings were chosen on; it goes into the cards.
        tuning_data: The same in a word.
        keep_models: Keep the trained models. One takes the space of the encoder, twice.
        min_free_mb: Refuse to start with less free disk.

    Raises:
        ConfigurationError: A setting is out of range, or ``only`` names no variant.
    """

    headings: ClassVar[Headings]
    #: Settings that finished runs do not depend on, so that a comparison can grow by them.
    growing: ClassVar[frozenset[str]] = frozenset({"variants", "only", "seeds", "keep_models", "min_free_mb"})
    #: A folder of the run that is removed at its end: embeddings of queries are as private as the queries.
    private_folder: ClassVar[str]

    def __init__(
        self,
        *,
        variants: Mapping[str, Any],
        only: Sequence[str] | None,
        seeds: int,
        max_passages: int | None,
        split: str,
        tuning_note: str | None,
        tuning_data: str,
        keep_models: bool,
        min_free_mb: float,
    ) -> None:
        self.variants = dict(variants)
        if unknown := sorted(set(only or ()) - set(self.variants)):
            raise ConfigurationError(f"task.only: {unknown[0]!r} is not one of {', '.join(self.variants)}.")
        self.only = list(self.variants) if only is None else [name for name in self.variants if name in only]
        if not self.only:
            raise ConfigurationError("task.variants and task.only leave nothing to compare.")
        if seeds < 1:
            raise ConfigurationError(f"task.seeds={seeds} must be at least 1.")
        self.seeds, self.max_passages, self.split = seeds, max_passages, split
        self.tuning_note, self.tuning_data = tuning_note, tuning_data
        self.keep_models, self.min_free_mb = keep_models, min_free_mb

    def run(self, parts: Parts) -> dict[str, float]:
        """Run every stage that is not done yet; returns nDCG@10 by row."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        self._parts = parts
        cells = self.cells()
        self._stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint())
        self._searched = self.make_data()
        self._searched.prepare_data()
        self._searched.setup("fit")
        self._searched.use_unit("query")
        self._queries, self._qrels = self._searched.evaluation_set(self.split)
        rows = [self._untrained("bm25", "BM25", self._bm25), self._untrained("zero_shot", "zero-shot", self.zero_shot)]
        self.before_training(cells)
        self._train_all(cells)
        rows += [self._row(cell) for cell in cells]
        given = self.given(cells)
        told = tell(
            parts.run_dir,
            rows,
            headings=self.headings,
            metrics=list(METRIC_NAMES.values()),
            evaluated_on=self.evaluated_on(),
            command=parts.command_again(),
            notes=[*([self.tuning_note] if self.tuning_note else []), *self.notes()],
            private_runs=(private := self.private_trainings(cells)),
            spent=spent_under(parts.run_dir, near=given).text if private or given else "",
            sections=self.sections(rows),
            references=self.references(rows),
            seconds=sum(self._stages.seconds.values()),
        )
        shutil.rmtree(parts.run_dir / self.private_folder, ignore_errors=True)
        return told

    # -- what a subclass says ------------------------------------------------------------------

    @abstractmethod
    def cells(self) -> list[C]:
        """The rows to train, in the order of the table."""

    @abstractmethod
    def zero_shot(self) -> EvaluationResult:
        """What the encoder reaches before any training."""

    @abstractmethod
    def train(self, cell: C, seed: int, folder: Path, resume: bool) -> EvaluationResult:
        """One training run, judged; `data_of` gives its data."""

    @abstractmethod
    def describe_row(self, cell: C, card: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `ModeRow` besides the results; ``card`` is that of the run with the largest epsilon."""

    @abstractmethod
    def is_private(self, cell: C) -> bool:
        """Whether its runs claim an epsilon of their own."""

    @abstractmethod
    def evaluated_on(self) -> str:
        """Test set and model, in words."""

    def before_training(self, cells: Sequence[C]) -> None:
        """Run the stages that training runs need; here there are none."""
        return None

    def notes(self) -> Iterable[str]:
        """Remarks under the table."""
        return ()

    def private_trainings(self, cells: Sequence[C]) -> int:
        """How many trainings on the private queries stand behind the table."""
        return self.seeds * sum(map(self.is_private, cells))

    def given(self, cells: Sequence[C]) -> Sequence[Path]:
        """Folders of what the rows learn from that private runs made elsewhere."""
        return ()

    def sections(self, rows: Sequence[ModeRow]) -> Sequence[Section]:
        """What the page says beside the table, which differences are significant, and the settings."""
        return ()

    def references(self, rows: Sequence[ModeRow]) -> Sequence[str]:
        """The rows that the others are tested against; where there are none, every two rows are compared."""
        return ()

    # -- stages --------------------------------------------------------------------------------

    def make_data(self) -> PairsDataModule:
        """The private data, read anew; sampling is set where a run knows its batches."""
        made: PairsDataModule = self._parts.make_datamodule(
            max_passages=self.max_passages, expected_batch_size=None, sample_rate=None, rows_per_unit="one"
        )
        return made

    def run_name(self, cell: C, seed: int) -> str:
        """The stage of one training run."""
        return f"{cell.stage}-seed{seed}"

    def drop_model(self, folder: Path) -> None:
        """Forget a trained model, unless models are kept."""
        if not self.keep_models:
            shutil.rmtree(folder / "model", ignore_errors=True)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _fingerprint(self) -> str:
        """What finished runs depend on; runs can be added without touching them."""
        settings = {k: str(v) for k, v in sorted(vars(self).items()) if not k.startswith("_") and k not in self.growing}
        settings["seed"] = str(self._parts.seed)
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _untrained(self, name: str, label: str, score: Callable[[], EvaluationResult]) -> ModeRow:
        result = self._stages.run(name, lambda folder, resume: _per_query(score()))
        return self._as_row([result], name=label, privacy=PUBLIC)

    def _bm25(self) -> EvaluationResult:
        return score_bm25(self._queries, self._searched.public_passages(), self._qrels)

    def _train_all(self, cells: Sequence[C]) -> None:
        """Every row's first run, then every row's second one: early numbers are of all rows."""
        todo = [(cell, self._parts.seed + i) for i in range(self.seeds) for cell in cells]
        done = sum((self._parts.run_dir / self.run_name(cell, seed) / DONE).exists() for cell, seed in todo)
        with ProgressLine("training runs", every=0.0) as progress:
            progress(done, len(todo))
            for cell, seed in todo:
                if (self._parts.run_dir / self.run_name(cell, seed) / DONE).exists():
                    self._result(cell, seed)
                    continue
                result = self._result(cell, seed)
                done += 1
                value = np.mean(result["per_query"]["nDCG@10"])
                progress(done, len(todo), f"{self.run_name(cell, seed)} nDCG@10 {value:.4f}")

    def _result(self, cell: C, seed: int) -> dict[str, Any]:
        """What a run reached; one that was trained with other settings of its variant is refused."""
        name, settings = self.run_name(cell, seed), repr(self.variants[cell.variant])

        def work(folder: Path, resume: bool) -> dict[str, Any]:
            return _per_query(self.train(cell, seed, folder, resume)) | {"settings": settings}

        result = self._stages.run(name, work)
        if result["settings"] != settings:
            raise ResumeError(
                f"resume=true, but {name} was trained with other settings of task.variants.{cell.variant}. Restore "
                f"them, or move {self._parts.run_dir / name} elsewhere; what its ledger is charged with stays spent."
            )
        return result

    # -- the table -----------------------------------------------------------------------------

    def _row(self, cell: C) -> ModeRow:
        seeds = range(self._parts.seed, self._parts.seed + self.seeds)
        results = [self._result(cell, seed) for seed in seeds]
        cards = [read_card(self._parts.run_dir / self.run_name(cell, seed)) for seed in seeds]
        worst = max(cards, key=lambda card: math.inf if card["claim"]["epsilon"] is None else card["claim"]["epsilon"])
        return self._as_row(results, **self.describe_row(cell, worst))

    def _as_row(self, results: Sequence[Mapping[str, Any]], **facts: Any) -> ModeRow:
        values = {m: np.array([result["per_query"][m] for result in results]) for m in METRIC_NAMES.values()}
        return ModeRow(
            per_run={m: table.mean(axis=1).tolist() for m, table in values.items()},
            per_query={m: table.mean(axis=0).tolist() for m, table in values.items()},
            **facts,
        )


def _per_query(result: EvaluationResult) -> dict[str, Any]:
    return {"per_query": {shown: [float(v) for v in result.per_query[name]] for name, shown in METRIC_NAMES.items()}}
