"""The harness: a study runs each of its stages once, in one folder, and reports their results.

An interrupted study continues with ``resume=true``, and may grow in settings that its stages do not depend on
(`Study.growing`). A `QueryStudy` trains retrievers on private queries or on those of a generator. A `RetrievalStudy`
trains named variants of a retriever under several seeds, evaluates every run and states which variants differ
(`reproduction.report.comparison`).
"""

from __future__ import annotations

import math
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import lightning as L
import numpy as np
import torch

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.blocks import Section
from lit_dpret.cards.card import CARD_NAME, read_card
from lit_dpret.cards.tuning import AMONG, refuse_told_as_none, refuse_trials_of_no_choice
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.retrieval.trec_runs import EvaluationResult
from lit_dpret.settings import require_whole
from lit_dpret.tasks.encoder_privacy import PUBLIC, UNKNOWN, privacy_of_encoder
from lit_dpret.tasks.parts import Parts, check_run_dir, say, some_of
from lit_dpret.tasks.pipeline_stages import stage_callbacks, train_retriever
from lit_dpret.tasks.ranking import score_bm25, score_embeddings
from lit_dpret.tasks.stages import Stages, described, settings_fingerprint
from lit_dpret.tasks.synthesize import public_sample
from reproduction.recipe import GeneratorRecipe
from reproduction.report.comparison import ComparisonReport, Headings, ModeRow
from reproduction.spent import spent_under

_SEED = re.compile(r"[-_](seed)?\d+$")
METRIC_NAMES = {"ndcg@10": "nDCG@10", "recall@10": "Recall@10"}
T = TypeVar("T")


class Study:
    """A task of many stages, whose settings are its public attributes."""

    # Settings that finished stages do not depend on, so that a study can grow in them.
    growing: ClassVar[frozenset[str]] = frozenset({"min_free_mb"})
    tuning_knob: ClassVar[str] = "task"
    min_free_mb: float

    def begin(self, parts: Parts, *, fingerprint: str | None = None, **more: object) -> None:
        """Open the run folder; refuse one that was begun with settings other than these and ``more``.

        A study whose stages name everything they depend on gives its own fingerprint, and grows in all other settings.
        """
        self.refuse_untold_choice(parts)
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        if fingerprint is None:
            fingerprint = settings_fingerprint(self, but=self.growing, **more)
        self._parts, self._run_dir = parts, parts.run_dir
        self._stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=fingerprint).begin()

    def kept_models(self) -> Collection[str]:
        """Return the stages, without seeds, whose private models stay; taking one of several models is a choice."""
        return ()

    def tried(self) -> Mapping[str, int | None]:
        """Return how many settings were tried for each training, by the setting that holds it."""
        return {}

    def refuse_untold_choice(self, parts: Parts) -> None:
        """Refuse cards that would claim no choice, or one by public data alone, for models chosen among several.

        Raises:
            ConfigurationError: Several private models stay, here or from an earlier attempt, or settings were tried.
        """
        data = getattr(self, "tuning_data", None)
        for name, trials in self.tried().items():
            refuse_trials_of_no_choice({"data": data, "n_trials": trials}, knob=f"task.{name}.")
        kept = set(self.kept_models())
        if kept and data in ("none", "public"):
            kept |= {_SEED.sub("", stage) for stage in _private_models(parts.run_dir)}
        if len(kept) > 1:
            several = f"several private models that stay ({', '.join(sorted(kept)[:3])})"
            refuse_told_as_none(data, several, AMONG, knob=f"{self.tuning_knob}.tuning_")

    def once(
        self, name: str, settings: str, work: Callable[[Path, bool], dict[str, Any]], *, knob: str
    ) -> dict[str, Any]:
        """Return the result of ``work(folder, resume)``, from now or from an earlier attempt with the same settings."""
        settings = described(settings)
        result = self._stages.run(name, lambda folder, resume: {**work(folder, resume), "settings": settings})
        if result["settings"] != settings:
            raise ResumeError(
                f"resume=true, but {name} was run with other settings of {knob}. Restore them, or move away "
                f"{self._run_dir / name} and everything derived from it; charges in its ledger remain."
            )
        return result

    def in_turn(
        self, todo: Sequence[T], name: Callable[[T], str], work: Callable[[T], str], *, label: str,
        is_done: Callable[[T], bool] | None = None,
    ) -> None:  # fmt: skip
        """Run the stages that are not done and report progress; ``work`` returns a stage's result for that line."""
        known = is_done or (lambda one: self._stages.is_done(name(one)))
        done = sum(map(known, todo))
        with ProgressLine(label, every=0.0) as progress:
            progress(done, len(todo))
            for one in todo:
                finished_before = known(one)
                told = work(one)
                if not finished_before:
                    done += 1
                    progress(done, len(todo), f"{name(one)} {told}".rstrip())


def budget_name(eps: float | None) -> str:
    """Return the name of a budget for use in folder names."""
    return "none" if eps is None else f"eps{eps:g}"


def refuse_other_modes(mode: PrivacyMode, eps: float) -> None:
    """Refuse a mode that does not train generators privately."""
    if mode.guarantee != "dp" or mode.candidates != "rows":
        raise ConfigurationError(
            f"task.eps={eps:g} needs a mode that trains generators, but privacy={mode.name} trains none. Set "
            "privacy=dp_sgd; null in task.eps means no privacy."
        )


def _private_models(run_dir: Path) -> list[str]:
    """Return the stages whose model was trained with noise and is still stored."""
    stages = [model.parent for model in run_dir.glob("*/model") if (model.parent / CARD_NAME).is_file()]
    return [stage.name for stage in stages if read_card(stage)["mechanism"]["kind"] == "gaussian_sum"]


class QueryStudy(Study):
    """A study of retrievers that learn from private queries, or from queries that generators wrote."""

    max_passages: int | None
    written_passages: int | None = None
    split: str
    tuning_note: str | None
    tuning_data: str
    keep_models: bool = False

    def open(self, parts: Parts) -> None:
        """Begin the study; read the passages, queries and judgements for evaluation."""
        self.begin(parts, fingerprint=settings_fingerprint(self, but=self.growing, seed=parts.seed))
        self._searched = self.make_data()
        read = self._searched.collection
        self._stages.on_data(read.queries, read.passages, read.qrels, read.users).begin()
        self._searched.use_unit("query")
        self._queries, self._qrels = self._searched.evaluation_set(self.split)

    def make_data(self, **changes: Any) -> PairsDataModule:
        """Read the private data again; a run that knows its batches sets the sampling."""
        settings: dict[str, Any] = {"max_passages": self.max_passages, "rows_per_unit": "one"}
        unknown: dict[str, Any] = {"expected_batch_size": None, "sample_rate": None}
        made: PairsDataModule = self._parts.make_datamodule(**settings | unknown | changes)
        made.prepare_data()
        made.setup("fit")
        return made

    def passages(self) -> Mapping[str, str]:
        return self._searched.public_passages()

    def to_write_for(self, passages: Mapping[str, str]) -> dict[str, str]:
        """Return the passages for which queries are written."""
        return public_sample(dict(passages), self.written_passages)

    def generate(
        self, recipe: GeneratorRecipe, make_privacy: Callable[[], PrivacyMode],
        passages: Callable[[], Mapping[str, str]], *,
        trained: str, made: str, knob: str, seed: int, count: int = 1,
    ) -> Path:  # fmt: skip
        """Train a generator in the stage ``trained``, draw its queries in the stage ``made``; return their folder."""

        def train(folder: Path, resume: bool) -> dict[str, Any]:
            how: dict[str, Any] = {"parts": self._parts, "seed": seed, "resume": resume, "tuning": self.tuning()}
            return recipe.train(make_privacy(), folder, **how)

        def draw(folder: Path, resume: bool) -> dict[str, Any]:
            chosen = self.to_write_for(passages())
            return recipe.draw(self._run_dir / trained, chosen, folder, count=count, seed=seed, tuning=self.tuning())

        self.once(trained, recipe.describe(), train, knob=knob)
        self.once(made, recipe.describe(), draw, knob=knob)
        return self._run_dir / made / "data"

    def all_seeds(self) -> list[int]:
        return [self._parts.seed + i for i in range(self.seeds)]  # type: ignore[attr-defined]

    def claimed_delta(self) -> float:
        given: float | None = getattr(self, "delta", None)
        return 1.0 / (2 * self._searched.n_units) if given is None else given

    def tuning(self) -> dict[str, Any]:
        return {"tuning_data": self.tuning_data, "tuning_note": self.tuning_note}

    def fit(
        self, make_model: Callable[[], Any], data: PairsDataModule, folder: Path, *, seed: int, resume: bool,
        steps: int, batch: int, trials: int | None, save_every: int = 5, start: Path | None = None, keep: bool = False,
    ) -> Any:  # fmt: skip
        """Train a retriever in its stage, from the run in ``start`` if given; return it, with files only if kept."""
        L.seed_everything(seed, verbose=False)
        model = make_model()
        data.physical_batch_size = 2 * batch
        callbacks = stage_callbacks(
            folder, resume=resume, label=folder.name, tuning_trials=trials, save_every=save_every,
            accountant={"init_from": start}, **self.tuning(),
        )  # fmt: skip
        train_retriever(
            model, data, folder, parts=self._parts, steps=steps, batch=batch, callbacks=callbacks, resume=resume
        )
        if not (keep or self.keep_models):
            for name in ("model", "checkpoints"):
                shutil.rmtree(folder / name, ignore_errors=True)
        return model

    def score(self, model: Any) -> EvaluationResult:
        """Measure how well the questions of the split find their passages."""
        return self.score_on(model, self._queries, self._qrels)

    def score_on(
        self, model: Any, queries: Mapping[str, str], qrels: Mapping[str, Mapping[str, int]]
    ) -> EvaluationResult:
        """Measure how well these queries find their passages."""
        passages = dict(sorted(self.passages().items()))
        with ProgressLine("encoding passages") as progress:
            found = model.encode_passages(list(passages.values()), progress=progress)
        asked = model.encode_queries(list(queries.values()))
        return score_embeddings(list(queries), asked, list(passages), found, qrels)

    def bm25(self, names: Mapping[str, str] = METRIC_NAMES) -> dict[str, Any]:
        """Return the scores of BM25 for every question."""

        def work(folder: Path, resume: bool) -> dict[str, Any]:
            return per_query(score_bm25(self._queries, self.passages(), self._qrels), names)

        return self._stages.run("bm25", work)


@dataclass(frozen=True)
class Cell:
    """A trained row of the table."""

    variant: str  # the key of its settings in ``task.variants``
    eps: float | None = None  # the budget at which it is trained, if a study has several
    synthetic: Path | None = None  # the data set from another run from which it learns, if any

    @property
    def stage(self) -> str:
        return self.variant if self.eps is None else f"{self.variant}-{budget_name(self.eps)}"

    def run(self, seed: int) -> str:
        return f"{self.stage}-seed{seed}"


@dataclass(kw_only=True, eq=False)
class RetrievalStudy(QueryStudy, ABC):
    """Train, evaluate and compare variants of one retriever."""

    headings: ClassVar[Headings]
    encoder: ClassVar[str] = ""  # which part is trained, printed after the test set in the report
    growing: ClassVar[frozenset[str]] = Study.growing | {"variants", "only", "chosen", "seeds", "keep_models"}
    # A folder of the run that is removed at the end: embeddings of queries are as private as the queries.
    private_folder: ClassVar[str]

    retriever: Callable[..., Any]
    variants: Mapping[str, Any]
    only: Sequence[str] | None = None
    seeds: int = 3
    max_passages: int | None = None
    split: str = "test"
    tuning_note: str | None = None
    tuning_data: str = "unknown"
    keep_models: bool = False
    min_free_mb: float = 1000

    def __post_init__(self) -> None:
        self.chosen = some_of("task.only", self.only, list(self.variants))
        require_whole("task", self, 1, "seeds")

    def run(self, parts: Parts) -> dict[str, float]:
        """Run every stage that is not done yet; return nDCG@10 by row."""
        self._parts = parts
        cells = self.cells()
        with torch.random.fork_rng(devices=[]):  # this model is only inspected, and must not change the study's draws
            start = self.retriever(privacy=NoPrivacy())
        self._promise = privacy_of_encoder(start.pretrained, start)
        self.open(parts)
        rows = [
            as_row([self.bm25()], name="BM25", privacy=PUBLIC),
            self._untrained("zero_shot", "zero-shot", self.zero_shot, self._promise),
        ]
        self.before_training(cells)
        self._train_all(cells)
        rows += [self._row(cell) for cell in cells]
        private, given = self.private_trainings(cells), [cell.synthetic for cell in cells if cell.synthetic is not None]
        page = ComparisonReport(
            rows=rows,
            headings=self.headings,
            metrics=list(METRIC_NAMES.values()),
            evaluated_on=f"{len(self._queries)} {self.split} questions over {len(self.passages())} "
            f"passages{self.encoder}",
            command=parts.command_again(),
            notes=[*([self.tuning_note] if self.tuning_note else []), *self.notes(), *self._note_on_start()],
            private_runs=private,
            spent=spent_under(parts.run_dir, near=given).text if private or given else "",
            more=self.sections(rows),
            references=self.references(),
        )
        written = page.write(parts.run_dir)
        page.print()
        say(*(f"{name}: {path}" for name, path in written.items()))
        say(f"Stages took {sum(self._stages.seconds.values()):.0f} s")
        shutil.rmtree(parts.run_dir / self.private_folder, ignore_errors=True)
        return {row.name: row.over_runs("nDCG@10").mean for row in rows}

    def kept_models(self) -> Collection[str]:
        return {cell.stage for cell in self.cells() if self.keep_models and self.is_private(cell)}

    def tried(self) -> Mapping[str, int | None]:
        return {f"variants.{name}": getattr(self.variants[name], "trials", None) for name in self.chosen}

    # -- how a study describes itself ------------------------------------------------------------

    @abstractmethod
    def cells(self) -> list[Cell]:
        """Return the rows to train, in the order of the table."""

    @abstractmethod
    def zero_shot(self) -> EvaluationResult:
        """Return the scores of the encoder before any training."""

    @abstractmethod
    def train(self, cell: Cell, seed: int, folder: Path, resume: bool) -> EvaluationResult:
        """Train a row under one seed in the folder of its stage, or continue with ``resume``; evaluate it."""

    @abstractmethod
    def describe_row(self, cell: Cell, card: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `ModeRow` except results; ``card`` is that of the run with the largest epsilon."""

    @abstractmethod
    def is_private(self, cell: Cell) -> bool:
        """Return whether the row's runs claim an epsilon themselves."""

    def before_training(self, cells: Sequence[Cell]) -> None:
        """Check what is finished before anything is trained; by default do nothing."""

    def notes(self) -> Iterable[str]:
        """Return remarks under the table."""
        return ()

    def private_trainings(self, cells: Sequence[Cell]) -> int:
        """Count the trainings on private queries from which the table is made."""
        return self.seeds * sum(map(self.is_private, cells))

    def sections(self, rows: Sequence[ModeRow]) -> Sequence[Section]:
        """Return the page's sections other than the table, the significance tests and the settings."""
        return ()

    def references(self) -> Sequence[str]:
        """Name the rows against which the others are tested; without any, all pairs of rows are compared."""
        return ()

    # -- stages and rows -----------------------------------------------------------------------------

    def _untrained(self, name: str, label: str, score: Callable[[], EvaluationResult], privacy: str) -> ModeRow:
        return as_row([self._stages.run(name, lambda *_: per_query(score()))], name=label, privacy=privacy)

    def _note_on_start(self) -> list[str]:
        if self._promise in (PUBLIC, UNKNOWN):
            return []
        return [
            "The training of the zero-shot row's encoder is charged to that row alone, and is in no sum on this page."
        ]

    def _train_all(self, cells: Sequence[Cell]) -> None:
        """Do every row's first run, then every row's second run, so that early numbers cover all rows."""
        todo = [(cell, seed) for seed in self.all_seeds() for cell in cells]

        def work(one: tuple[Cell, int]) -> str:
            return f"nDCG@10 {np.mean(self._result(*one)['per_query']['nDCG@10']):.4f}"

        self.in_turn(todo, lambda one: one[0].run(one[1]), work, label="training runs")

    def _result(self, cell: Cell, seed: int) -> dict[str, Any]:
        return self.once(
            cell.run(seed),
            repr(self.variants[cell.variant]),
            lambda folder, resume: per_query(self.train(cell, seed, folder, resume)),
            knob=f"task.variants.{cell.variant}",
        )

    def _row(self, cell: Cell) -> ModeRow:
        cards = [read_card(self._run_dir / cell.run(seed)) for seed in self.all_seeds()]
        worst = max(cards, key=lambda card: math.inf if card["claim"]["epsilon"] is None else card["claim"]["epsilon"])
        return as_row([self._result(cell, seed) for seed in self.all_seeds()], **self.describe_row(cell, worst))


def as_row(results: Sequence[Mapping[str, Any]], **facts: Any) -> ModeRow:
    """Return the row for a system's runs, each in the form of `per_query`."""
    values = {m: np.array([result["per_query"][m] for result in results]) for m in METRIC_NAMES.values()}
    return ModeRow(
        per_run={m: table.mean(axis=1).tolist() for m, table in values.items()},
        per_query={m: table.mean(axis=0).tolist() for m, table in values.items()},
        **facts,
    )


def per_query(result: EvaluationResult, names: Mapping[str, str] = METRIC_NAMES) -> dict[str, Any]:
    """Return each metric's values for all questions, in the form that a stage stores."""
    return {"per_query": {shown: [float(v) for v in result.per_query[name]] for name, shown in names.items()}}
