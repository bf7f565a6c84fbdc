"""`task=ablate` and `task=compare_modes`: compare ways to train the head of a frozen encoder, each over several runs.

Each run draws its own noise, and texts are encoded once for all of them. A row that learns from synthetic queries has a
generator for every run, or a set from another run. What is made from those queries is post-processing, so a retriever
may be trained on them in any way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.blocks import Grid, Paragraph, Section
from lit_dpret.cards.card import read_card
from lit_dpret.cards.start import model_folder
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.losses import MarginMSELoss
from lit_dpret.negatives import LabelledNegatives
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.retrieval.trec_runs import EvaluationResult
from lit_dpret.settings import require_whole
from lit_dpret.synthesis.filters import load_released
from lit_dpret.synthesis.filters.pseudo_labels import LABELS
from lit_dpret.synthesis.pseudo_queries import write_pseudo_queries
from lit_dpret.tasks.parts import Parts, say
from lit_dpret.tasks.round_trip import KEPT, check_made
from reproduction.recipe import (
    PSEUDO,
    GeneratorRecipe,
    Recipe,
    Teacher,
    likeness,
    made_by,
    of_those,
    refuse_other_training,
)
from reproduction.report.comparison import COMPARE_MODES, Headings, ModeRow, gain_shares, share_section
from reproduction.study import METRIC_NAMES, Cell, RetrievalStudy

EMBEDDINGS = "embeddings"
_MEBI = 2**20
_LIKENESS = {"bleu": "{:.2f}", "mauve": "{:.3f}"}
_WARM_UP = (
    "python train.py model=generator privacy=none datamodule=pairs datamodule.folder=PUBLIC_PAIRS "
    "trainer.max_steps=300 hydra.run.dir={run}"
)


@dataclass(kw_only=True, eq=False)
class Ablate(RetrievalStudy):
    """Train a retriever by every recipe, at one or several budgets; evaluate and compare."""

    headings = Headings(
        name="ablation", title="What helps at one budget: ways to train a retriever on private queries", rows="Recipes"
    )
    encoder = "; frozen encoder with linear heads"
    growing = RetrievalStudy.growing | {"generators", "likeness_texts", "teacher"}
    private_folder = EMBEDDINGS

    generators: Mapping[str, GeneratorRecipe] = field(default_factory=dict)
    teacher: str | Path | None = None
    eps: float | Sequence[float] = 3.0
    delta: float | None = None
    synthetic: str | Path | Sequence[str | Path] | None = None
    round_trip_filter: int | None = None
    written_passages: int | None = None
    likeness_texts: int | None = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = isinstance(self.eps, (int, float))
        listed: list[Any] = [self.eps] if alone else list(self.eps)  # type: ignore[arg-type]
        if not listed or any(not (isinstance(e, (int, float)) and 0 < e < math.inf) for e in listed):
            raise ConfigurationError(f"task.eps={self.eps} must be one or more positive, finite numbers.")
        self._budgets = [] if alone else sorted(set(map(float, listed)))
        require_whole("task", self, 1, "likeness_texts", "written_passages", "round_trip_filter", null=True)
        given = [self.synthetic] if isinstance(self.synthetic, (str, Path)) else self.synthetic or ()
        self._given = [Path(folder) for folder in given]
        self._teacher = None if self.teacher is None else Teacher(str(self.teacher))
        for name in self.chosen:
            recipe: Recipe = self.variants[name]
            if recipe.queries not in (None, PSEUDO, *self.generators) or (
                recipe.learns_from_given and not self._budgets
            ):
                raise ConfigurationError(
                    f"task.variants.{name}.queries={recipe.queries} is not one of task.generators: "
                    f"{', '.join(self.generators) or 'there are none'}."
                )
            splits = (recipe.start, recipe.eps) != (None, None)
            if (self._budgets and splits) or recipe.start not in (None, *self.chosen):
                raise ConfigurationError(
                    f"task.variants.{name}: start={recipe.start} and eps={recipe.eps} split one budget between rows of "
                    "one study. Give task.eps as one number, and let task.only name the row that it starts from."
                )
            if self.delta is None and recipe.privacy.keywords.get("neighbours") == "add_or_remove":
                raise ConfigurationError(
                    f"task.delta=null is 1 / (2 n), and neighbours=add_or_remove of task.variants.{name}.privacy makes "
                    "n private. Set task.delta."
                )

    def run(self, parts: Parts) -> dict[str, float]:
        """Train, evaluate and compare; check first that the generators have what they start from."""
        self.chosen = self._that_can_start()
        return super().run(parts)

    def _that_can_start(self) -> list[str]:
        """Return the recipes that have what they start from; leave out others, or refuse them if they were chosen."""
        missing = {}
        for name in self.chosen:
            generator = self.generators.get(str(self.variants[name].queries))
            if generator is not None and (folder := generator.missing_start()) is not None:
                missing[name] = (
                    f"task.variants.{name} needs a generator that starts from {folder}, which is missing. Train it "
                    f"on public pairs: {_WARM_UP.format(run=generator.public_start)}"
                )
            elif generator is not None:
                generator.check_start()
            if name not in missing and (why := self._no_teacher(name)):
                missing[name] = why
        if missing and (self.only is not None or len(missing) == len(self.chosen)):
            raise ConfigurationError(next(iter(missing.values())))
        for why in missing.values():
            say(f"left out: {why}")
        return [name for name in self.chosen if name not in missing]

    def _no_teacher(self, name: str) -> str | None:
        """Return why a recipe that needs a teacher has none; None if it needs none, or has one."""
        if self.variants[name].pseudo_labels is None:
            return None
        try:
            if self._teacher is not None:
                self._teacher.check()
                return None
            reason = "it is null"
        except ConfigurationError as error:
            reason = str(error)
        return (
            f"task.variants.{name} learns the margins of task.teacher, a public cross-encoder, which is missing: "
            f"{reason} docs/ablations.md explains how to make one."
        )

    def cells(self) -> list[Cell]:
        """Return the recipes, upper bounds first; with several budgets, those without a budget, then each budget's."""
        order = ("bound", "baseline", "recipe")
        names = sorted(self.chosen, key=lambda name: order.index(self.variants[name].part))
        names.sort(key=lambda name: self.variants[name].start is not None)  # after the rows they start from
        if not self._budgets:
            return [Cell(name) for name in names]
        cells = [Cell(name) for name in names if self.variants[name].guarantee == "none"]
        claims = [(folder, self._budget_of(folder)) for folder in self._given]
        for budget in self._budgets:
            for name in names:
                if self.variants[name].guarantee == "dp":
                    cells.append(Cell(name, budget))
                elif self.variants[name].learns_from_given:
                    cells += [Cell(name, budget, folder) for folder, covered in claims if covered == budget]
        stages = [cell.stage for cell in cells]
        if twice := {stage for stage in stages if stages.count(stage) > 1}:
            raise ConfigurationError(
                f"task.synthetic has two folders for {twice.pop()}: give one for each of task.eps."
            )
        return cells

    def _budget_of(self, folder: Path) -> float:
        """Return the smallest budget that covers the claim of a given data set."""
        claim = read_card(folder)["claim"]
        if claim["guarantee"] != "dp":
            raise ConfigurationError(f"task.synthetic={folder} claims no epsilon, so it belongs to no row.")
        covering = [eps for eps in self._budgets if claim["epsilon"] <= eps]
        if not covering:
            raise ConfigurationError(
                f"task.synthetic={folder} claims epsilon = {show_epsilon(claim['epsilon'])}, more than all of task.eps="
                f"{self._budgets}. Add a budget that covers it, or leave the folder out."
            )
        return covering[0]

    # -- the retriever --------------------------------------------------------------------------

    def is_private(self, cell: Cell) -> bool:
        return bool(self.variants[cell.variant].guarantee == "dp")

    def kept_models(self) -> set[str]:
        return {*super().kept_models(), *self._starts(), *(f"generator-{name}" for name in self._asked_generators())}

    def _starts(self) -> set[str]:
        return {str(start) for name in self.chosen if (start := self.variants[name].start) is not None}

    def tried(self) -> dict[str, int | None]:
        trials = {f"generators.{name}": self.generators[name].trials for name in self._asked_generators()}
        return {**super().tried(), **trials}

    def _asked_generators(self) -> list[str]:
        asked = dict.fromkeys(str(self.variants[name].queries) for name in self.chosen)
        return [name for name in asked if name in self.generators]

    def zero_shot(self) -> EvaluationResult:
        model = self._make_retriever(NoPrivacy())
        with ProgressLine("encoding passages and queries") as progress:
            model.prepare(self._searched, progress=progress)
        return self.score(model)

    def _make_retriever(self, privacy: Any, **settings: Any) -> Any:
        return self.retriever(privacy=privacy, cache_dir=self._run_dir / EMBEDDINGS, **settings)

    def score(self, model: Any) -> EvaluationResult:
        model.prepare_texts(dict(sorted(self.passages().items())), self._queries)  # from the cache after the first time
        return super().score(model)

    def _calibrated(self, cell: Cell) -> tuple[float | None, int | None]:
        """Return the noise multiplier and cap of the row's first run, so that the others need not compute them."""
        first = cell.run(self._parts.seed)
        if not self.is_private(cell) or not self._stages.is_done(first):
            return None, None
        mechanism = read_card(self._run_dir / first)["mechanism"]
        return mechanism["noise_multiplier"], mechanism["law"][0].get("cap")

    # -- the queries that a run learns from -----------------------------------------------------

    def train(self, cell: Cell, seed: int, folder: Path, resume: bool) -> EvaluationResult:
        recipe: Recipe = self.variants[cell.variant]
        noise, cap = self._calibrated(cell)
        data, margins = self._learned_from(cell, seed)
        data.cap = data.cap if cap is None else cap
        start = None if recipe.start is None else self._run_dir / Cell(recipe.start).run(seed)
        encoder = {} if start is None else {"encoder": str(model_folder(start))}

        def make_model() -> Any:
            eps = recipe.eps or (self.eps if cell.eps is None else cell.eps)
            privacy = recipe.make_privacy(eps=eps, delta=self.claimed_delta(), seed=seed, noise_multiplier=noise)  # type: ignore[arg-type]
            return self._make_retriever(privacy, **recipe.module_settings(seed=seed) | margins | encoder)

        keep = cell.variant in self._starts()
        trained = self.fit(make_model, data, folder, seed=seed, resume=resume, start=start, keep=keep, **recipe.size())
        return self.score(trained)

    def _learned_from(self, cell: Cell, seed: int) -> tuple[PairsDataModule, dict[str, Any]]:
        recipe, given = self.variants[cell.variant], cell.synthetic
        if recipe.queries is None and given is None:
            data = self.make_data()
            data.rows_per_unit = recipe.rows_per_unit
            return data, {}
        made = given or (self._pseudo(recipe) if recipe.queries == PSEUDO else self._made(recipe, seed))
        chosen = self._chosen(recipe, made, made.parent.name if given is None else cell.stage)
        return chosen, {} if recipe.pseudo_labels is None else self._margins(recipe, chosen, made, seed)

    def _pseudo(self, recipe: Recipe) -> Path:
        name, passages = f"pseudo-{recipe.queries_per_passage}", self.to_write_for(self.passages())

        def work(folder: Path, resume: bool) -> dict[str, Any]:
            write_pseudo_queries(passages, folder / "data", queries_per_passage=recipe.queries_per_passage)
            return {}

        self._stages.run(name, work)
        return self._run_dir / name / "data"

    def _made(self, recipe: Recipe, seed: int) -> Path:
        name, count = str(recipe.queries), recipe.queries_per_passage
        generator, first = self.generators[name], f"generator-{name}-seed{self._parts.seed}"

        def make_privacy() -> PrivacyMode:
            known = read_card(self._run_dir / first)["mechanism"] if self._stages.is_done(first) else {}
            noise = {"noise_multiplier": known["noise_multiplier"]} if known else {}
            return generator.privacy(eps=generator.eps or self.eps, delta=self.claimed_delta(), **noise)

        return self.generate(
            generator, make_privacy, self.passages, trained=f"generator-{name}-seed{seed}",
            made=f"made-{name}-{count}-seed{seed}", knob=f"task.generators.{name}", seed=seed, count=count,
        )  # fmt: skip

    def _chosen(self, recipe: Recipe, made: Path, name: str) -> SyntheticDataModule:
        k = recipe.round_trip_filter or self.round_trip_filter
        if k is None:
            return self._as_data(made, None)

        def work(folder: Path, resume: bool) -> dict[str, Any]:
            model, data = self._make_retriever(NoPrivacy()), self._as_data(made, None)
            found = check_made(model, data, folder, passages=self.passages(), k=k, seed=self._parts.seed)
            return found | self._source(made)

        self._stages.run(stage := f"round_trip{k}-{name}", work)
        return self._as_data(made, self._run_dir / stage / KEPT)

    def _as_data(self, made: Path, keep: Path | None) -> SyntheticDataModule:
        card = not self._is_pseudo(made)
        return SyntheticDataModule(folder=made, evaluation=self._searched, keep=keep, require_privacy_card=card)

    def _source(self, made: Path) -> dict[str, str]:
        """Return the training in this study that wrote the queries; empty if it was elsewhere, or there was none."""
        return made_by(made) if self._is_here(made) and not self._is_pseudo(made) else {}

    def _is_here(self, made: Path) -> bool:
        return made.parent.parent == self._run_dir

    def _is_pseudo(self, made: Path) -> bool:
        return self._is_here(made) and made.parent.name.startswith(PSEUDO)

    def _margins(self, recipe: Recipe, data: SyntheticDataModule, made: Path, seed: int) -> dict[str, Any]:
        teacher, per_query = self._teacher, recipe.pseudo_labels
        if teacher is None or per_query is None:
            raise ConfigurationError("task.teacher is null.")

        def work(folder: Path, resume: bool) -> dict[str, Any]:
            zero_shot = self._make_retriever(NoPrivacy())
            zero_shot.prepare(data)
            whole = replace(load_released(made, declared_public=self._is_pseudo(made)), passages=self.passages())
            released = of_those(whole, None if data.keep is None else Path(data.keep))
            labelled = teacher.label(released, folder, zero_shot=zero_shot, per_query=per_query, seed=self._parts.seed)
            return labelled | self._source(made)

        stage = self._labels(recipe, seed)
        self._stages.run(stage, work)
        source = LabelledNegatives(file=self._run_dir / stage / LABELS, per_query=per_query, seed=seed)
        return {"negatives": [source], "loss": MarginMSELoss(temperature=recipe.temperature)}

    def _labels(self, recipe: Recipe, seed: int) -> str:
        """Return the stage of the labels for the queries from which a recipe learns."""
        chosen = "all" if recipe.round_trip_filter is None else f"round_trip{recipe.round_trip_filter}"
        source = f"{recipe.queries}-{recipe.queries_per_passage}"
        run = "" if recipe.queries == PSEUDO else f"-seed{seed}"
        return f"labels{recipe.pseudo_labels}-{chosen}-{source}{run}"

    def before_training(self, cells: Sequence[Cell]) -> None:
        """Refuse to resume if finished stages used another generator, or another teacher."""
        for cell, seed in product(cells, self.all_seeds()):
            recipe: Recipe = self.variants[cell.variant]
            labels = self._labels(recipe, seed)
            if recipe.queries not in (None, PSEUDO):
                made, row = f"made-{recipe.queries}-{recipe.queries_per_passage}-seed{seed}", cell.run(seed)
                readers = [f"round_trip{recipe.round_trip_filter}-{made}", labels]
                readers += [] if self.likeness_texts is None else [f"likeness-{recipe.queries}-seed{seed}"]
                refuse_other_training(
                    self._stages, self._run_dir, f"generator-{recipe.queries}-seed{seed}", readers=readers,
                    cards={made: self._run_dir / made / "data", row: self._run_dir / row},
                )  # fmt: skip
            if recipe.pseudo_labels is None or self._teacher is None or not self._stages.is_done(labels):
                continue
            if self._stages.result(labels)["teacher"] != self._teacher.fingerprint():
                raise ResumeError(
                    f"resume=true, but {labels} comes from another cross-encoder than task.teacher="
                    f"{self._teacher.source}. Restore it, or remove {self._run_dir / labels} and the runs of "
                    f"task.variants.{cell.variant}."
                )

    # -- the report -------------------------------------------------------------------------------

    def describe_row(self, cell: Cell, card: Mapping[str, Any]) -> dict[str, Any]:
        recipe: Recipe = self.variants[cell.variant]
        public = recipe.queries == PSEUDO
        free = self._budgets or recipe.part == "bound" or public
        return {
            "name": recipe.label if cell.eps is None else f"{recipe.label}, epsilon {cell.eps:g}",
            "privacy": self._promise if public else privacy_line(card),
            "budget": cell.eps if free else self.eps,
            "variant": cell.variant,
            "settings": recipe.describe(card),
        }

    def references(self) -> Sequence[str]:
        """Name zero-shot and the baselines, against which recipes are tested; with several budgets compare all rows."""
        bases = [self.variants[name].label for name in self.chosen if self.variants[name].part == "baseline"]
        return [] if self._budgets else ["zero-shot", *bases]

    def sections(self, rows: Sequence[ModeRow]) -> list[Section]:
        by_label = {row.name: row for row in rows}
        cells = [] if self._budgets else self.cells()
        judged = [by_label[self.variants[cell.variant].label] for cell in cells]
        bounds = [row for row, cell in zip(judged, cells, strict=True) if self.variants[cell.variant].part == "bound"]
        metric = next(iter(METRIC_NAMES.values()))
        shares = gain_shares(judged, bounds, by_label["zero-shot"], metric)
        found = [share_section(shares, metric)] if shares else []
        return found + self._generator_section()

    def _generator_section(self) -> list[Section]:
        body = [self._generator_row(name) for name in self._asked_generators()]
        if not body:
            return []
        header = ["Generator", "trained parameters", "memory, MiB", *(["BLEU", "MAUVE"] if self.likeness_texts else [])]
        explained = (
            "Means over the generators of all runs, with the smallest and the largest. Memory is the peak of the "
            "process during training, above what it held before: weights, optimizer, activations of a physical batch, "
            "and everything else. It is the largest over the runs, and a dash where an earlier training in the same "
            "process held as much."
        )
        if self.likeness_texts:
            explained += (
                f" BLEU (0 to 100, against the private questions of the same passage) and MAUVE ({self.likeness_texts} "
                "questions, all-MiniLM-L6-v2) are computed from private queries, and no epsilon covers them."
            )
        return [Section("Generators", [Paragraph(explained), Grid(header, body, frozenset(range(1, len(header))))])]

    def _generator_row(self, name: str) -> list[object]:
        recipe, knob = self.generators[name], f"task.generators.{name}"
        trained = [  # all are done by now; one that another recipe trained is refused
            self.once(f"generator-{name}-seed{seed}", recipe.describe(), lambda *_: {}, knob=knob)
            for seed in self.all_seeds()
        ]
        memory = f"{max(each['extra_bytes'] for each in trained) / _MEBI:.0f}"
        cells: list[object] = [recipe.label, f"{trained[0]['trained_parameters']:,}", "–" if memory == "0" else memory]
        if self.likeness_texts is None:
            return cells
        alike = []
        for seed in self.all_seeds():
            made = next(self._run_dir.glob(f"made-{name}-*-seed{seed}")) / "data"
            alike.append(self._stages.run(f"likeness-{name}-seed{seed}", partial(self._likeness, made)))
        return [*cells, *(_spread([each[key] for each in alike], form) for key, form in _LIKENESS.items())]

    def _likeness(self, made: Path, folder: Path, resume: bool) -> dict[str, Any]:
        return likeness(made, folder, parts=self._parts, max_texts=self.likeness_texts or 1) | self._source(made)

    def private_trainings(self, cells: Sequence[Cell]) -> int:
        return super().private_trainings(cells) + self.seeds * len(self._asked_generators())

    def notes(self) -> Iterable[str]:
        if self._asked_generators():
            yield (
                "Each run that learns from synthetic queries has its own generator, trained with its own noise: the "
                "interval over runs covers that noise."
            )
        covered = {self._budget_of(folder) for folder in self._given}
        missing = [f"{eps:g}" for eps in self._budgets if eps not in covered]
        for label in (self.variants[name].label for name in self.chosen if self.variants[name].learns_from_given):
            if missing:
                yield (
                    f"{label} is left out at epsilon {' and '.join(missing)}: task.synthetic names no data set with "
                    "such a claim. task=synthesize and experiment=quickstart make one (RUN/synthetic/data)."
                )
            if covered:
                yield (
                    f"The runs of {label} differ in how the retriever is trained, not in the data set: the noise of "
                    "its generator was drawn once, and the interval over runs does not cover that draw."
                )


@dataclass(kw_only=True, eq=False)
class CompareModes(Ablate):
    """Train every mode at every budget, evaluate and compare; budgets can be added to a finished comparison."""

    headings = COMPARE_MODES
    encoder = "; frozen encoder with a linear query head"
    growing = Ablate.growing | {"eps", "synthetic"}

    eps: float | Sequence[float] = (3.0, 8.0)
    round_trip_filter: int | None = 10


def _spread(values: Sequence[float], shown: str) -> str:
    mean = shown.format(float(np.mean(values)))
    if len(values) == 1:
        return mean
    return f"{mean} [{shown.format(min(values))}, {shown.format(max(values))}]"
