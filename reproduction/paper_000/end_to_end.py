"""`task=end_to_end`: the comparison of paper 000 as the paper made it, training all weights of dual encoders.

Retrievers learn from the original queries directly under DP, or from queries that a DP generator wrote, in several
regimes. One generator is trained for each epsilon, and its queries serve every regime and seed. The page is written
again after each training: it states which seeds a row has, and what was not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lit_dpret.cards.blocks import Code, Grid, Paragraph, Section
from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import DualEncoder
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.report.page import Page
from lit_dpret.report.table import settings_grid
from lit_dpret.settings import require_number, require_whole
from lit_dpret.synthesis.filters import load_released
from lit_dpret.synthesis.pseudo_queries import write_pseudo_queries
from lit_dpret.tasks.encoder_privacy import privacy_of_encoder
from lit_dpret.tasks.fit import refuse_several_ranks
from lit_dpret.tasks.parts import Parts, require_budgets, say, some_of
from lit_dpret.tasks.pipeline import METRIC_NAMES
from lit_dpret.tasks.round_trip import KEPT, check_round_trip
from lit_dpret.tasks.synthesize import public_sample
from reproduction.paper_000.end_to_end_table import FIRST, Cell, Finished, Regime, Run
from reproduction.paper_000.table import shown, write_page
from reproduction.recipe import GeneratorRecipe, Recipe, made_by, refuse_other_training
from reproduction.spent import spent_under
from reproduction.study import QueryStudy, budget_name, per_query

NAME = "end_to_end"
_TITLE = "Paper 000, its comparison end to end: synthetic queries and direct DP training of whole dual encoders"
_ABOUT = (
    "All weights of each retriever are trained, as in the paper. Our data, models and sizes differ from the paper's: "
    "compare orders, not levels. The paper's numbers are next to the encoder that has never learned retrieval, as in "
    "the paper, and those of direct training next to per_example_duplicated, which clips what the paper clipped and "
    "adds the noise that this really needs; the other ways to train directly are not the paper's."
)
_HOW_NOT_WHAT = ("hydra.run.dir=", "task.only=", "task.report_only=", "privacy.secret_file=")
# What `Recipe.describe` says about heads, which these retrievers do not have.
_OF_HEADS = ("head", "head_dim", "passages_of_a_query", "per_passage", "pseudo_labels")


def _trip(regime: str, k: int, eps: float | None) -> str:
    return f"round_trip{k}-{regime}-{budget_name(eps)}"


@dataclass(kw_only=True, eq=False)
class EndToEnd(QueryStudy):
    """Train every regime in every way at every budget under several seeds, and say where the paper's order holds.

    Guarantees:
        - A finished training is not repeated, and an interrupted one continues. A result made with other settings is
          refused by name, and nothing else is touched.
        - All rows of one seed are trained before those of the next seed. Within a seed, the smallest budget comes
          first, then no privacy, then the others, with the regimes in turn. The page is written after each training.
        - With ``rates`` private queries are used neither for training nor for evaluation: words of public passages
          replace them.
    """

    growing: ClassVar[frozenset[str]] = QueryStudy.growing | {
        "regimes", "generator", "eps", "seeds", "only", "report_only", "originals_are_public", "tuning_note",
        "tuning_data", "note", "chosen",
    }  # fmt: skip

    regimes: Mapping[str, Regime]
    generator: GeneratorRecipe
    eps: Sequence[float | None] = (3.0, 8.0, 16.0, None)
    seeds: int = 3
    max_passages: int | None = None
    written_passages: int | None = None
    split: str = "test"
    rates: Sequence[float] | None = None
    rate_queries: int = 400
    originals_are_public: bool = False
    tuning_note: str | None = None
    tuning_data: str = "unknown"
    note: str = ""
    only: Sequence[str] | None = None
    report_only: bool = False
    min_free_mb: float = 3000

    def __post_init__(self) -> None:
        known = [f"{regime}-{way}" for way in self._all_ways() for regime in self.regimes if way in self._ways(regime)]
        self.chosen = some_of("task.only", self.only, known)
        require_budgets("task.eps", self.eps, some=True)
        require_whole("task", self, 1, "seeds", "rate_queries")
        require_whole("task", self, 1, "max_passages", "written_passages", null=True)
        if self.rates is not None:
            require_number("task", {f"rates[{i}]": rate for i, rate in enumerate(self.rates)})
            if self.finite == []:
                raise ConfigurationError(
                    f"task.eps={list(self.eps)} names no finite budget at which to try task.rates."
                )

    def _all_ways(self) -> list[str]:
        return list(dict.fromkeys(way for regime in self.regimes.values() for way in regime.ways))

    def _ways(self, regime: str) -> Mapping[str, Recipe]:
        return self.regimes[regime].ways

    @property
    def finite(self) -> list[float]:
        return sorted(eps for eps in self.eps if eps is not None)

    def recipe(self, cell: Cell) -> Recipe:
        return self._ways(cell.regime)[cell.way]

    def cells(self) -> list[Cell]:
        """Return all rows, whatever ``only`` says: the smallest budget first, then no privacy."""
        known, found = [*self.finite[:1], None, *self.finite[1:]], []
        for eps, way, regime in product(known, self._all_ways(), self.regimes):
            guarantee = self._ways(regime)[way].guarantee if way in self._ways(regime) else None
            if eps in self.eps and (guarantee == "inherited" or guarantee == ("none" if eps is None else "dp")):
                found.append(Cell(regime, way, eps))
        return found

    def _asked(self) -> list[Cell]:
        return [cell for cell in self.cells() if f"{cell.regime}-{cell.way}" in self.chosen]

    def run(self, parts: Parts) -> dict[str, float]:
        """Train what is not done yet, and report; return nDCG@10 of each row that has a run."""
        refuse_several_ranks(parts.make_trainer(logger=False))
        self.open(parts)
        if self.rates is not None:
            return self._try_rates()
        self._refuse_other_generators()
        todo = [] if self.report_only else list(product(self.all_seeds(), self._asked()))
        self.in_turn(todo, lambda one: one[1].run(one[0]), self._do, label="training runs")
        told = self._tell()
        say(f"written: {self._run_dir / 'report' / NAME}.html")
        return told

    def kept_models(self) -> set[str]:
        if self.rates is not None:  # rates are tried on public texts only
            return set()
        learned = {cell.eps for cell in self._asked() if self.recipe(cell).learns_from_synthetic}
        return {f"generator-{budget_name(eps)}" for eps in learned if eps is not None}

    def tried(self) -> dict[str, int | None]:
        ways = {(cell.regime, cell.way): self.recipe(cell).trials for cell in self._asked()}
        found = {f"regimes.{regime}.ways.{way}": trials for (regime, way), trials in ways.items()}
        return {"generator": self.generator.trials, **found}

    def _refuse_other_generators(self) -> None:
        run_dir = self._run_dir
        for eps in self.eps:
            made = f"made-{budget_name(eps)}"
            learned = [cell for cell in self.cells() if cell.eps == eps and self.recipe(cell).learns_from_synthetic]
            rows = [cell.run(seed) for cell, seed in product(learned, self.all_seeds())]
            refuse_other_training(
                self._stages, run_dir, f"generator-{budget_name(eps)}",
                cards={made: run_dir / made / "data"} | {row: run_dir / row for row in rows},
                readers=[_trip(regime, k, eps) for regime, k in self._filters()],
            )  # fmt: skip

    def _filters(self) -> list[tuple[str, int]]:
        found = [(r, k) for r in self.regimes for way in self._ways(r).values() if (k := way.round_trip_filter)]
        return list(dict.fromkeys(found))

    def _do(self, one: tuple[int, Cell]) -> str:
        seed, cell = one
        if self.recipe(cell).learns_from_synthetic and not self._stages.is_done(cell.run(seed)):
            self._synthetic(cell)  # here, so that the time of a training does not include it
        told = f"{FIRST} {np.mean(self._trained(cell, seed)[FIRST]):.4f}"
        self._tell()
        return told

    def _synthetic(self, cell: Cell) -> SyntheticDataModule:
        eps, k, keep = cell.eps, self.recipe(cell).round_trip_filter, None

        def make_privacy() -> PrivacyMode:
            return NoPrivacy() if eps is None else self.generator.privacy(eps=eps, delta=self.claimed_delta())

        folder = self.generate(
            self.generator, make_privacy, self._everything,
            trained=f"generator-{budget_name(eps)}", made=f"made-{budget_name(eps)}", knob="task.generator",
            seed=self._parts.seed,
        )  # fmt: skip
        if k is not None:
            stage = _trip(cell.regime, k, eps)

            def work(place: Path, resume: bool) -> dict[str, Any]:
                start, released = self._untrained(cell.regime), load_released(folder)
                return check_round_trip(start, released, place, k=k, seed=self._parts.seed) | made_by(folder)

            settings = described_retriever(self.regimes[cell.regime])
            self.once(stage, settings, work, knob=f"task.regimes.{cell.regime}.retriever")
            keep = self._run_dir / stage / KEPT
        return SyntheticDataModule(folder=folder, evaluation=self._searched, keep=keep)

    # -- one training --------------------------------------------------------------------------

    def _trained(self, cell: Cell, seed: int) -> Any:
        recipe = self.recipe(cell)

        def work(folder: Path, resume: bool) -> dict[str, Any]:
            data = self._synthetic(cell) if recipe.learns_from_synthetic else self.make_data(max_passages=None)
            return per_query(self.score(self._fit(recipe, cell, data, folder, seed=seed, resume=resume)), METRIC_NAMES)

        settings = [recipe, described_retriever(self.regimes[cell.regime])]
        if recipe.learns_from_synthetic:
            settings.append(self.generator.describe())
        return self.once(cell.run(seed), repr(settings), work, knob=_knob(cell))["per_query"]

    def _fit(
        self, recipe: Recipe, cell: Cell, data: PairsDataModule, folder: Path, *, seed: int, resume: bool
    ) -> DualEncoder:
        def make_model() -> DualEncoder:
            privacy = recipe.make_privacy(eps=cell.eps, delta=self.claimed_delta(), seed=seed, noise_multiplier=None)
            how: dict[str, Any] = {"optimizer": recipe.optimizer, "temperature": recipe.temperature}
            return self.regimes[cell.regime].retriever(privacy=privacy, **how)

        often = max(1, recipe.steps // 2)
        trained: DualEncoder = self.fit(
            make_model, data, folder, seed=seed, resume=resume, save_every=often, **recipe.size()
        )
        return trained

    def _everything(self) -> Mapping[str, str]:
        return self.make_data(max_passages=None).public_passages()

    def _untrained(self, regime: str) -> DualEncoder:
        return self.regimes[regime].retriever(privacy=NoPrivacy())

    # -- the search for learning rates, on public texts ------------------------------------------

    def _try_rates(self) -> dict[str, float]:
        """Train each way at each rate on pseudo-queries, and evaluate on those of other passages; do nothing else."""
        eps, rates = self.finite[0], list(self.rates or ())
        folder = self._run_dir / "pseudo"
        self._stages.run("pseudo", self._write_pseudo)
        judged = self._pseudo_data(folder).evaluation_set("test")
        cells = [c for c in self._asked() if c.eps in (eps, None) and not self.recipe(c).learns_from_synthetic]
        todo = [(cell, rate) for cell in cells for rate in rates]

        def name(one: tuple[Cell, float]) -> str:
            return f"{one[0].name}-rate{one[1]:g}"

        def result(one: tuple[Cell, float]) -> dict[str, Any]:
            (cell, rate) = one
            recipe = self.recipe(cell)
            recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=rate))

            def work(place: Path, resume: bool) -> dict[str, Any]:
                data = self._pseudo_data(folder)
                model = self._fit(recipe, cell, data, place, seed=self._parts.seed, resume=resume)
                return {"means": dict(self.score_on(model, *judged).means)}

            settings = repr([recipe, described_retriever(self.regimes[cell.regime])])
            return dict(self.once(name(one), settings, work, knob=_knob(cell))["means"])

        def told(one: tuple[Cell, float]) -> str:
            return f"nDCG@10 {result(one)['ndcg@10']:.4f}"

        self.in_turn(todo, name, told, label="trials on pseudo-queries")
        start = {regime: self.score_on(self._untrained(regime), *judged).means["ndcg@10"] for regime in self.regimes}
        header = ["regime", "way", "epsilon", "rate", "nDCG@10", "untrained"]
        body = [
            (cell.regime, cell.way, shown(cell.eps), f"{rate:g}", f"{result((cell, rate))['ndcg@10']:.4f}",
             f"{start[cell.regime]:.4f}")
            for cell, rate in todo
        ]  # fmt: skip
        grid = Grid(header, body, frozenset({2, 3, 4, 5}))
        about = (
            f"Learning rates, tried on public pseudo-queries: each way is trained on {self._searched.n_units} of them, "
            f"as many as there are private queries, and evaluated on {len(judged[0])} of other passages. No private "
            "query is used for training or evaluation."
        )
        page = Page(
            name="rates", title="Learning rates, tried on public texts", lead=[Paragraph(about)],
            sections=[Section("Trials", [grid]), Section("How to get this again", [Code(self._command())])],
            facts={"about": about, "header": header, "trials": body}, tables={"rates.csv": grid}, owner_only=False,
        )  # fmt: skip
        page.write(self._run_dir / "report")
        return {name(one): float(result(one)["ndcg@10"]) for one in todo}

    def _pseudo_data(self, folder: Path) -> PairsDataModule:
        # The queries of some passages are used neither for training nor for evaluation.
        return self.make_data(folder=folder / "data", max_passages=None, drop_queries_without_passage=True)

    def _write_pseudo(self, folder: Path, resume: bool) -> dict[str, Any]:
        """Write as many pseudo-queries as there are private queries, and others for evaluation."""
        everything = dict(self._everything())
        searched = self.passages()
        held = set(public_sample(dict(searched), self.rate_queries))
        rest = {name: text for name, text in everything.items() if name not in held}
        chosen = set(public_sample(rest, self._searched.n_units)) | held | set(searched)
        write_pseudo_queries({name: text for name, text in everything.items() if name in chosen}, folder / "data")
        train = folder / "data" / "qrels" / "train.tsv"
        head, *lines = train.read_text(encoding="utf-8").splitlines(keepends=True)
        tests = [line for line in lines if line.split("\t")[1] in held]
        kept = [line for line in lines if line.split("\t")[1] not in held][: self._searched.n_units]
        train.write_text("".join([head, *kept]), encoding="utf-8")
        (train.parent / "test.tsv").write_text("".join([head, *tests]), encoding="utf-8")
        return {"train": len(kept), "test": len(tests)}

    # -- the page ------------------------------------------------------------------------------

    def _command(self) -> str:
        return self._parts.command_again(*_HOW_NOT_WHAT)

    def _known(self, cell: Cell) -> dict[int, Any]:
        """Return the finished runs of a row by seed, with each metric's values for every test question."""
        done = [seed for seed in self.all_seeds() if self._stages.is_done(cell.run(seed))]
        return {seed: self._trained(cell, seed) for seed in done}

    def _tell(self) -> dict[str, float]:
        known = {cell: self._known(cell) for cell in self.cells()}
        tables = [self._finished(regime, known).table() for regime in self.regimes]
        missing = self._missing(known)
        judged = f"Judged on {len(self._queries)} {self.split} questions over {len(self.passages())} passages."
        more = [
            Section("How each row was trained", [Paragraph(judged), self._settings(known)]),
            Section("The generators and their queries", [self._generators()]),
        ]
        if self.tuning_note:
            more.append(Section("How the settings were chosen", [Paragraph(self.tuning_note)]))
        per_run = {
            cell.name: {seed: {m: float(np.mean(v)) for m, v in run.items()} for seed, run in runs.items()}
            for cell, runs in known.items()
        }
        told = {"not_run": missing, "judged": judged, "note": self.note, "tuning_note": self.tuning_note}
        write_page(
            NAME, _TITLE, tables, self._run_dir, about=_ABOUT, public=self.originals_are_public,
            spent=spent_under(self._run_dir).text, lead=[self.note, missing], more=more, command=self._command(),
            seconds=self._stages.seconds, facts={**told, "per_run": per_run},
        )  # fmt: skip
        return {cell.name: float(np.mean([np.mean(r[FIRST]) for r in runs.values()])) for cell, runs in known.items()
                if runs}  # fmt: skip

    def _missing(self, known: Mapping[Cell, Mapping[int, Any]]) -> str:
        told = []
        for seed in self.all_seeds():
            lacks = [cell for cell, runs in known.items() if seed not in runs]
            whole = [eps for eps in self.eps if all(cell in lacks for cell in known if cell.eps == eps)]
            names = [f"ε = {shown(eps)}" for eps in whole] + [cell.name for cell in lacks if cell.eps not in whole]
            if lacks:
                told.append(f"seed {seed} ({'not one row' if len(lacks) == len(known) else ', '.join(names)})")
        if not told:
            return ""
        return f"Not run yet: {'; '.join(told)}. The same command with resume=true continues."

    def _finished(self, regime: str, known: Mapping[Cell, Mapping[int, Run]]) -> Finished:
        runs = {cell: found for cell, found in known.items() if cell.regime == regime}
        places = {cell: self._run_dir / cell.run(next(iter(found))) for cell, found in runs.items() if found}
        start = self._untrained(regime)
        return Finished(
            name=regime, regime=self.regimes[regime], runs=runs, start=self._start(regime),
            bm25=self.bm25(METRIC_NAMES)["per_query"],
            claims={cell: privacy_line(read_card(place)) for cell, place in places.items()},
            start_privacy=privacy_of_encoder(start.pretrained, start),
        )  # fmt: skip

    def _start(self, regime: str) -> Any:
        """Return the scores of the encoder before any training, for every test question."""

        def work(folder: Path, resume: bool) -> dict[str, Any]:
            return per_query(self.score(self._untrained(regime)), METRIC_NAMES)

        settings = described_retriever(self.regimes[regime])
        return self.once(f"{regime}-untrained", settings, work, knob=f"task.regimes.{regime}.retriever")["per_query"]

    def _generators(self) -> Grid:
        body = []
        for eps in self.eps:
            trained, made = f"generator-{budget_name(eps)}", f"made-{budget_name(eps)}"
            if not (self._stages.is_done(trained) and self._stages.is_done(made)):
                continue
            count = self._stages.result(made)["passages"]
            self._stages.result(trained)
            seconds = [f"{self._stages.seconds[stage]:.0f}" for stage in (trained, made)]
            claim = privacy_line(read_card(self._run_dir / trained))
            body.append((shown(eps), claim, count, *seconds, "; ".join(self._trips(eps))))
        header = ["ε", "guarantee of the generator", "queries", "seconds to train", "to draw", "find their passage"]
        return Grid(header, body, frozenset({2, 3, 4}))

    def _trips(self, eps: float | None) -> Iterator[str]:
        for regime, k in self._filters():
            if self._stages.is_done(stage := _trip(regime, k, eps)):
                found = self._stages.result(stage)
                yield f"{regime}: {found['kept']} of {found['queries']} among the first {k}"

    def _settings(self, known: Mapping[Cell, Mapping[int, Any]]) -> Grid:
        lines = []
        for cell, runs in known.items():
            for seed in list(runs)[:1]:
                told = self.recipe(cell).describe(read_card(self._run_dir / cell.run(seed)))
                told = {name: value for name, value in told.items() if name not in _OF_HEADS}
                told["seconds"] = round(self._stages.seconds[cell.run(seed)])
                lines.append(([cell.regime, cell.way], told))
        return settings_grid(["regime", "way"], lines)


def _knob(cell: Cell) -> str:
    return f"task.regimes.{cell.regime}.ways.{cell.way}"


def described_retriever(regime: Regime) -> str:
    """Return the settings of an encoder, without those that each recipe sets."""
    made = regime.retriever
    if not isinstance(made, partial):
        return repr(made)
    return repr({name: value for name, value in sorted(made.keywords.items()) if name != "optimizer"})
