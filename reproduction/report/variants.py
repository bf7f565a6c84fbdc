"""Runs of several variants of one training as a table in the form of paper 002's tables 1 to 4, and as a page.

`VariantReport` takes runs from any source; `write_study` adds what `task=variants` knows about its own.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.cards.blocks import Block, Code, Grid, Paragraph, Section
from lit_dpret.errors import DataError
from lit_dpret.files import write_whole
from lit_dpret.report.page import Page, Picture, Sheet
from lit_dpret.report.table import plain
from lit_dpret.settings import picked
from reproduction.published import PAPER_002
from reproduction.report import variant_figures as figures
from reproduction.report.variant_runs import UNTRAINED, VariantRun, by_variant, read_runs, sizes_of, ties_of, write_runs

PAGE, SETTINGS = "README", "settings.json"
RUNS, BATCH_RUNS, UNTRAINED_RUNS = "runs.jsonl", "batch_runs.jsonl", "untrained.jsonl"
# In the order of the paper's columns. Its recall, precision and F-beta are those of the best class of each run.
PAPER_METRICS: Mapping[str, str] = {
    "accuracy": "Accuracy",
    "best_recall": "Recall (best class)",
    "best_precision": "Precision (best class)",
    "best_f_beta": "F-beta (best class)",
}


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MetricsTable:
    """Metrics by variant over its runs; tables 1 and 2 of the paper divide by a baseline, tables 3 and 4 do not."""

    baseline: str | None
    metrics: Mapping[str, str]
    values: Mapping[str, Mapping[str, Sequence[float]]]

    @classmethod
    def of(
        cls, runs: Sequence[VariantRun], *, baseline: str | None, metrics: Mapping[str, str] = PAPER_METRICS
    ) -> MetricsTable:
        """Return the table of all runs of a comparison."""
        groups = by_variant(runs)
        if baseline is not None and baseline not in groups:
            raise DataError(f"The baseline {baseline!r} is not among the variants {', '.join(groups)}.")
        for run, name in ((run, name) for run in runs for name in metrics if name not in run.metrics):
            raise DataError(f"The run {run.variant!r} of seed {run.seed} has no metric {name!r}.")
        values = {v: {name: [run.metrics[name] for run in group] for name in metrics} for v, group in groups.items()}
        return cls(baseline=baseline, metrics=dict(metrics), values=values)

    def mean(self, variant: str, metric: str, *, relative: bool = False) -> float | None:
        """Return a mean over runs, divided by the baseline's if ``relative``; None if that is not possible."""
        found = self.values.get(variant, {}).get(metric)
        base = 1.0 if not relative else self.mean(self.baseline, metric) if self.baseline is not None else None
        return statistics.fmean(found) / base if found and base else None

    def sheet(self) -> Grid:
        """Return every number, one line for each variant and metric."""
        lines = [
            [variant, metric, statistics.fmean(found), _deviation(found), self.mean(variant, metric, relative=True),
             len(found)]
            for variant, cells in self.values.items()
            for metric, found in cells.items()
        ]  # fmt: skip
        return Grid(["variant", "metric", "mean", "standard_deviation", "relative", "runs"], lines)

    def blocks(self) -> list[Block]:
        """Return the table and, if there is a baseline, first the table divided by it, each with its caption."""
        forms = [False] if self.baseline is None else [True, False]
        return [block for form in forms for block in (Paragraph(self.caption(relative=form)), self.grid(relative=form))]

    def grid(self, *, relative: bool) -> Grid:
        """Return relative means, or means with standard deviations."""

        def shown(variant: str, metric: str, found: Sequence[float]) -> str:
            deviation = None if relative else _deviation(found)
            mean = _number(self.mean(variant, metric, relative=relative))
            return mean if deviation is None else f"{mean} / {deviation:.3f}"

        rows = [[v, *(shown(v, name, found) for name, found in cells.items())] for v, cells in self.values.items()]
        return Grid(("", *self.metrics.values()), rows, frozenset(range(1, 1 + len(self.metrics))))

    def caption(self, *, relative: bool) -> str:
        """Explain the numbers in two sentences."""
        counts = {len(found) for cells in self.values.values() for found in cells.values()}
        low, high = min(counts), max(counts)
        over = f"{low} run" if low == high == 1 else f"{low} runs" if low == high else f"{low} to {high} runs"
        best = ""
        if any(name.startswith("best_") for name in self.metrics):
            best = " Recall, precision and F-beta are those of each run's best class, averaged over runs."
        if relative:
            return f"Test metrics over {over}, each mean divided by that of {self.baseline}.{best}"
        return f"Test metrics over {over}{'' if high == 1 else ': mean / standard deviation'}.{best}"

    def shares_of_the_gain(self, *, start: str) -> str:
        """State how much of the baseline's gain in accuracy over ``start`` each variant keeps; empty without a gain."""
        # Dividing by the baseline's mean would count what the encoder had before training as learned.
        means = {variant: self.mean(variant, "accuracy") or 0.0 for variant in self.values}
        base, low = means.pop(self.baseline or "", 0.0), means.pop(start, math.inf)
        if base <= low or "accuracy" not in self.metrics:
            return ""
        shares = ", ".join(f"{variant} {(mean - low) / (base - low):.0%}" for variant, mean in means.items())
        gain = f"the gain of {self.baseline} over {start.lower()} encoders in accuracy ({low:.3f} to {base:.3f})"
        return f"Of {gain}: {shares}."

    def beside_the_paper(
        self, paper: Mapping[str, Sequence[float]], *, relative: bool, marks: Mapping[str, str] | None = None
    ) -> Grid:
        """Return each cell as ours / the paper's, with a dash for a missing one; ``marks`` are appended to names."""
        rows: list[list[str]] = []
        for variant in dict.fromkeys([*self.values, *paper]):
            ours = [self.mean(variant, name, relative=relative) for name in PAPER_METRICS]
            pairs = zip(ours, paper.get(variant, [None] * len(PAPER_METRICS)), strict=True)
            label = f"{variant}{(marks or {}).get(variant, '')}"
            rows.append([label, *(f"{_number(mine)} / {_number(theirs)}" for mine, theirs in pairs)])
        header = ("ours / paper", *PAPER_METRICS.values())
        return Grid(header, rows, frozenset(range(1, len(header))))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation over the runs (divided by runs - 1); None for one run."""
    return statistics.stdev(values) if len(values) > 1 else None


def beside_the_paper(
    table: MetricsTable, name: str, relative: Mapping[str, Any], said: str, absolute: Mapping[str, Any]
) -> Section:
    """Return ours / the paper's, divided by the baseline if there is one, and undivided."""
    blocks: list[Block] = []
    if table.baseline is not None:
        blocks.append(Paragraph(f"{name}, each divided by {table.baseline}."))
        blocks.append(table.beside_the_paper(relative, relative=True))
    blocks += [Paragraph(said), table.beside_the_paper(absolute, relative=False)]
    return Section("Beside the paper", blocks)


# -- the page --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VariantReport:
    """A report of everything for which the runs have data; the rest is left out."""

    runs: Sequence[VariantRun]
    baseline: str | None = None  # the variant by whose metrics others are divided, ``Non-private`` in the paper
    # Single runs of a variant with other batch sizes. Their losses are divided by the lowest of these and ``runs``.
    batch_runs: Sequence[VariantRun] = ()
    class_names: Sequence[str] = ()
    metrics: Mapping[str, str] = field(default_factory=lambda: PAPER_METRICS)
    title: str = "Comparison"
    untrained: Sequence[VariantRun] = ()  # encoders before their first step: rows of the table, in no figure
    lead: Sequence[Block] = ()
    more: Sequence[Section] = ()
    tables: Mapping[str, Sheet] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the runs, their figures, ``metrics.csv`` and a page that shows all; return the page in Markdown."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, some in ((RUNS, self.runs), (BATCH_RUNS, self.batch_runs), (UNTRAINED_RUNS, self.untrained)):
            if some:
                write_runs(some, folder / name)
        shown = self._draw(folder)
        drawn = [block for name, said in shown.items() for block in _shown(folder / name, said)]
        sections = [Section("Figures", drawn)]
        judged, tables = [*self.runs, *self.untrained], dict(self.tables)
        if known := _known(self.metrics, judged):
            table = MetricsTable.of(judged, baseline=self.baseline, metrics=known)
            tables["metrics.csv"] = table.sheet()
            shares = table.shares_of_the_gain(start=UNTRAINED)
            said = [Paragraph(words) for words in (shares, ties_of(judged)) if words]
            sections.append(Section("Metrics", [*table.blocks(), *said]))
        page = Page(
            name=PAGE, title=self.title, subtitle="", lead=self.lead, sections=[*sections, *self.more],
            facts={"title": self.title, "baseline": self.baseline, "figures": shown}, tables=tables, owner_only=False,
        )  # fmt: skip
        return page.write(folder)[f"{PAGE}.md"]

    def _draw(self, folder: Path) -> dict[str, str]:
        runs, title, shown = self.runs, self.title, dict[str, str]()
        axis: figures.Axis = "examples" if all(run.examples for run in runs) else "steps"
        for name, draw in (
            ("relative_loss.png", figures.draw_relative_loss),
            ("smoothed_loss.png", figures.draw_smoothed_loss),
        ):
            shown[name] = draw(runs, folder / name, axis=axis, title=title)
        for number, variant in enumerate(dict.fromkeys(run.variant for run in self.batch_runs)):
            name = "batch_sizes.png" if number == 0 else f"batch_sizes_{number + 1}.png"
            own = [run for run in self.batch_runs if run.variant == variant]
            some = [*own, *(run for run in runs if run.variant != variant)]
            shown[name] = figures.draw_batch_sizes(some, folder / name, variant=variant)
        if any(run.confusion is not None for run in runs):
            name, classes = "confusion.png", self.class_names
            shown[name] = figures.draw_confusions(runs, folder / name, names=classes, title=title)
        if all(run.seconds and len(run.examples) > 1 for run in runs):
            shown["runtime.png"] = figures.draw_runtime(runs, folder / "runtime.png", title=title)
        return shown


def _known(metrics: Mapping[str, str], runs: Sequence[VariantRun]) -> dict[str, str]:
    """Return the metrics that all runs have."""
    return {name: words for name, words in metrics.items() if all(name in run.metrics for run in runs)}


def _shown(path: Path, said: str) -> list[Block]:
    return [Picture(path, path.name), Paragraph(said)]


def made_by(command: str, *notes: str) -> list[Block]:
    """Return the lead of a page: remarks, and the command that makes it again."""
    return [*(Paragraph(note) for note in notes if note), Paragraph("Made by"), Code(command)]


# -- what task=variants adds -------------------------------------------------------------------------

_METRICS = {
    **PAPER_METRICS, "held_out_loss": "Held-out loss", "lowest_accuracy": "Accuracy, ties to the lowest label",
    "tied_votes": "Tied votes",
}  # fmt: skip
_SIDE_PARTS: Mapping[str, str] = {
    "equal_negatives": "The same with as many negatives for every variant",
    "losses": "Other losses over pairs",
}
_COLUMNS = {
    "eps_of_the_updates": "eps of the updates", "delta": "delta", "noise_multiplier": "sigma",
    "l2_sensitivity": "L2 sensitivity", "bound": "bound", "n_max": "n_max", "norms": "norms",
    "sub_batches": "sub-batches", "lr": "lr", "adam_eps": "Adam's eps", "first_step": "first step / lr",
    "mean_step": "mean step / lr", "steps": "steps", "seconds_per_step": "s / step",
}  # fmt: skip
# The facts that are averaged over a variant's runs.
_MEASURED = ("seconds_per_step", "first_step", "mean_step")
STEP_MEANS = (
    "A step is the root mean square change of the weights. Adam's first step equals the learning rate for every weight "
    "with a gradient, whatever the gradient's length, as long as Adam's eps is far smaller; so the first step over the "
    "learning rate is near 1 where the eps has no effect. The noised sum is divided by the batch size, which Algorithm "
    "1 of the paper does not do: with such an eps that changes nothing. Norms: what the gradients of pairs are clipped "
    "by; a bound clips more than necessary."
)
_WHAT_IS_CLAIMED = (
    "No epsilon is claimed for these models: the curves are computed from the images that were trained on, so the card "
    "of every private run says not_proved. The column eps of the updates is what its ledger charged for the noised "
    "updates alone, at the delta next to it; it would be the claim if nothing else were shown. It does not cover the "
    "choice of the settings either."
)
_NOT_COMPARABLE = (
    "The training losses above are of each variant's own loss and batches, as the paper's are: a softmax among n "
    "images starts near log n, so a variant whose negatives come from sub-batches starts lower without having learned "
    "anything."
)
_HELD_OUT_MEANS = (
    "The softmax loss at temperature 1 on test images, the same groups and the same views for all, so that variants "
    "with other losses or other numbers of negatives can be compared."
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One finished run: its name in ``task.variants``, and its facts from plan and ledger."""

    name: str
    part: str
    run: VariantRun
    facts: Mapping[str, Any]


def write_study(
    finished: Sequence[Finished], folder: Path, *, baseline: str | None, class_names: Sequence[str], note: str,
    command: str, net: str, untrained: Sequence[VariantRun] = (),
) -> Path:  # fmt: skip
    """Write the report of all finished runs."""
    main = [each for each in finished if each.part == "paper"] or list(finished)
    runs = [each.run for each in main]
    base = baseline if any(run.variant == baseline for run in runs) else None
    folder.mkdir(parents=True, exist_ok=True)
    held_out = [*_held_out(runs, folder / "held_out_loss.png"), Paragraph(_HELD_OUT_MEANS)]
    more = [Section("Held-out loss", [Paragraph(_NOT_COMPARABLE), *held_out])]
    if net in PAPER_002["table_1"]:
        ours = MetricsTable.of([*runs, *untrained], baseline=base)
        relative, absolute = PAPER_002["table_1"][net], PAPER_002["table_3"][net]
        said = f"Table 3 ({net}), absolute; the paper's are means over ten runs."
        more.append(beside_the_paper(ours, f"Table 1 ({net})", relative, said, absolute))
    tables: dict[str, Sheet] = {}
    for part, title in _SIDE_PARTS.items():
        if own := [each.run for each in finished if each.part == part]:
            seeds = {run.seed for run in own}
            beside = [each.run for each in main if each.run.seed in seeds and each.part != part] + own
            judged = beside + [run for run in untrained if run.seed in seeds]
            write_runs(judged, folder / f"{part}.jsonl")
            table = MetricsTable.of(judged, baseline=base, metrics=_known(_METRICS, judged))
            tables[f"{part}.csv"] = table.sheet()
            more.append(Section(title, [*_held_out(beside, folder / f"{part}.png"), *table.blocks()]))
    settings = [
        {**picked(one.run, "variant", "seed", "batch_size"), **picked(one, "name", "part"), **one.facts}
        for one in finished
    ]
    told: list[Block] = [Paragraph(_WHAT_IS_CLAIMED), settings_grid(settings), Paragraph(STEP_MEANS)]
    more.append(Section("Settings and privacy", told))
    write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")
    return VariantReport(
        runs=runs, baseline=base, batch_runs=_batch_runs(finished, runs), class_names=class_names, metrics=_METRICS,
        title="Views of one image among those of others", untrained=untrained, lead=made_by(command, note), more=more,
        tables=tables,
    ).write(folder)  # fmt: skip


def equal_negatives(results: Path, picture: Path) -> list[Block]:
    """Return the report's side part with equally many negatives for all variants, drawn again from its runs."""
    if not (path := results / "equal_negatives.jsonl").is_file():
        raise DataError(f"{path.name} is missing.")
    judged = read_runs(path)
    said = figures.draw_held_out([run for run in judged if run.variant != UNTRAINED], picture)
    table = MetricsTable.of(judged, baseline=None, metrics=_known(_METRICS, judged))
    caption = Paragraph(f"{table.caption(relative=False)} {sizes_of(judged)}.", small=True)
    return [Picture(picture, said), table.grid(relative=False), caption]


def _batch_runs(finished: Sequence[Finished], runs: Sequence[VariantRun]) -> list[VariantRun]:
    others = [each.run for each in finished if each.part == "batch_sizes"]
    for label in dict.fromkeys(run.variant for run in others):
        others += [run for run in runs if run.variant == label][:1]
    return others


def _held_out(runs: Sequence[VariantRun], path: Path) -> list[Block]:
    return _shown(path, figures.draw_held_out(runs, path))


def settings_grid(settings: Sequence[Mapping[str, Any]]) -> Grid:
    """Return one line for each variant of `SETTINGS`: the facts of its first run, and means of those that vary."""
    rows = []
    for name in dict.fromkeys(one["name"] for one in settings):
        same = [one for one in settings if one["name"] == name]
        facts = {**same[0], **{key: statistics.fmean(one[key] for one in same) for key in _MEASURED}}
        if facts.get("exact_norms") is not None:
            facts["norms"] = f"{facts['norms']} ({'exact' if facts['exact_norms'] else 'bound'})"
        rows.append([facts["variant"], facts["batch_size"], *(plain(facts.get(column)) for column in _COLUMNS)])
    header = ("variant", "batch", *_COLUMNS.values())
    return Grid(header, rows, frozenset(range(1, len(header))))


def bounded_norms(results: Path) -> dict[str, str]:
    """Return, by variant, the note on the name of each variant that clipped by a bound of the norms."""
    bounded = (one for one in read_settings(results) if one.get("exact_norms") is False)
    return {one["variant"]: ", by a bound of its norms" for one in bounded}


def read_settings(results: Path) -> list[dict[str, Any]]:
    """Return the facts of each run of a report; empty if they were not stored."""
    path = results / SETTINGS
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return found


def settings_shown(results: Path, _: Path) -> list[Block]:
    """Return the settings of every variant of a report, and the steps that they took."""
    if not (settings := read_settings(results)):
        raise DataError(f"{SETTINGS} is missing.")
    return [settings_grid(settings), Paragraph(STEP_MEANS, small=True), Paragraph(_WHAT_IS_CLAIMED, small=True)]
