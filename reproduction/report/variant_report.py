"""A whole comparison of variants in one folder: figures, tables and a page that shows them with their captions.

`VariantReport` takes runs from anywhere; `write_study` adds what `task=variants` knows beside them: the
held-out loss, the variants that go beyond the paper, the paper's numbers, settings and privacy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_dpret.cards.page import Block, Code, Grid, Paragraph, Section
from lit_dpret.files import write_whole
from lit_dpret.report.page import Page, Picture
from reproduction.published import PAPER_002
from reproduction.report import variant_figures as figures
from reproduction.report.metrics_table import PAPER_METRICS, MetricsTable
from reproduction.report.variant_runs import UNTRAINED, VariantRun, write_runs

PAGE = "README"
UNTRAINED_RUNS = "untrained.jsonl"
SETTINGS = "settings.json"


@dataclass(frozen=True, kw_only=True)
class VariantReport:
    """Everything that runs have the data for; what they lack is left out.

    Args:
        runs: Runs of one task, several variants and seeds.
        baseline: The variant that metrics are divided by, ``Non-private`` in the paper; None for none.
        batch_runs: Single runs of a variant with different batch sizes (figure 1, right); their losses
            are divided by the lowest among themselves and ``runs``.
        class_names: For the confusion matrices.
        metrics: Names and titles of the metrics in the table.
        title: Of the page and the figures.
        untrained: Encoders before their first step: rows of the table, in ``untrained.jsonl`` and in no figure.
        lead: Blocks above the first picture.
        more: Further sections of the page.
    """

    runs: Sequence[VariantRun]
    baseline: str | None = None
    batch_runs: Sequence[VariantRun] = ()
    class_names: Sequence[str] = ()
    metrics: Mapping[str, str] = field(default_factory=lambda: PAPER_METRICS)
    title: str = "Comparison"
    untrained: Sequence[VariantRun] = ()
    lead: Sequence[Block] = ()
    more: Sequence[Section] = ()

    def write(self, folder: Path) -> Path:
        """Write the runs, their figures and tables, and a page that shows all; returns the page in Markdown.

        ``runs.jsonl``, ``curves.json``, ``relative_loss.png``, ``smoothed_loss.png``, and where the runs tell
        them ``confusion.png``, ``runtime.png``, ``metrics.{csv,json,md}``; with ``batch_runs`` also
        ``batch_runs.jsonl`` and one ``batch_sizes.png`` for each of their variants. ``README.{md,html}`` shows all.
        """
        folder.mkdir(parents=True, exist_ok=True)
        runs, title, place = self.runs, self.title, folder.joinpath
        axis: figures.Axis = "examples" if all(run.examples for run in runs) else "steps"
        curves = figures.relative_curves(runs, axis=axis)
        for name, some in (
            ("runs.jsonl", runs),
            ("batch_runs.jsonl", self.batch_runs),
            (UNTRAINED_RUNS, self.untrained),
        ):
            if some:
                write_runs(some, folder / name)
        write_whole(folder / "curves.json", json.dumps([asdict(curve) for curve in curves]) + "\n")
        shown: dict[str, str] = {}
        for name, draw in (
            ("relative_loss", figures.draw_relative_loss),
            ("smoothed_loss", figures.draw_smoothed_loss),
        ):
            shown[f"{name}.png"] = draw(runs, place(f"{name}.png"), axis=axis, title=title)
        for number, variant in enumerate(dict.fromkeys(run.variant for run in self.batch_runs)):
            name = "batch_sizes.png" if number == 0 else f"batch_sizes_{number + 1}.png"
            own = [run for run in self.batch_runs if run.variant == variant]
            some = [*own, *(run for run in runs if run.variant != variant)]
            shown[name] = figures.draw_batch_sizes(some, place(name), variant=variant)
        if any(run.confusion is not None for run in runs):
            classes = self.class_names
            shown["confusion.png"] = figures.draw_confusions(runs, place("confusion.png"), names=classes, title=title)
        if all(run.seconds and len(run.examples) > 1 for run in runs):
            shown["runtime.png"] = figures.draw_runtime(runs, place("runtime.png"), title=title)
        drawn = [block for name, said in shown.items() for block in _picture(place(name), said)]
        sections = [Section("Figures", drawn)]
        judged = [*runs, *self.untrained]
        known = {name: words for name, words in self.metrics.items() if all(name in run.metrics for run in judged)}
        if known:
            table = MetricsTable.of(judged, baseline=self.baseline, metrics=known)
            blocks = table.write(folder)
            if shares := table.shares_of_the_gain(start=UNTRAINED):
                blocks.append(Paragraph(shares))
            sections.append(Section("Metrics", blocks))
        page = Page(
            name=PAGE, title=title, subtitle="", lead=self.lead, sections=[*sections, *self.more],
            facts={"title": title, "baseline": self.baseline, "figures": shown}, owner_only=False,
        )  # fmt: skip
        return page.write(folder)[f"{PAGE}.md"]


def _picture(path: Path, said: str) -> list[Block]:
    return [Picture(path, path.name), Paragraph(said)]


# -- what task=variants adds ---------------------------------------------------------------------------

_HELD_OUT = "held_out_loss"
_METRICS = {**PAPER_METRICS, _HELD_OUT: "Held-out loss"}
_SIDE_PARTS: Mapping[str, str] = {
    "equal_negatives": "The same with as many negatives for every variant",
    "losses": "Other losses over pairs",
}
_COLUMNS = {
    "eps_of_the_updates": "eps of the updates", "delta": "delta", "noise_multiplier": "sigma",
    "l2_sensitivity": "L2 sensitivity", "bound": "bound", "n_max": "n_max", "norms": "norms",
    "sub_batches": "sub-batches", "lr": "lr", "steps": "steps", "seconds_per_step": "s / step",
}  # fmt: skip
_WHAT_IS_CLAIMED = (
    "No epsilon is claimed for these models: the curves above are computed from the images that were trained on, so "
    "the card of every private run says not_proved. The column eps of the updates is what its ledger charged for the "
    "noised updates alone, at the delta beside it; it would be the claim had nothing else been shown. The choice of "
    "the settings is not in it either."
)
_NOT_COMPARABLE = (
    "The training losses above are of each variant's own loss and batches, as the paper's are: a softmax among n "
    "images starts near log n, so a variant whose negatives come from sub-batches starts lower by nothing it learned."
)
_HELD_OUT_MEANS = (
    "The softmax loss at temperature 1 on test images, the same groups and the same views for all, so that variants "
    "with other losses or other numbers of negatives can be compared."
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One run that is done."""

    name: str
    part: str
    run: VariantRun
    held_out: Sequence[float]
    facts: Mapping[str, Any]

    def about(self) -> dict[str, Any]:
        """Which run this is, for a line of a file."""
        return {"variant": self.run.variant, "name": self.name, "seed": self.run.seed}


def write_study(
    finished: Sequence[Finished], folder: Path, *, baseline: str | None, class_names: Sequence[str], note: str,
    command: str, net: str, untrained: Sequence[VariantRun] = (),
) -> Path:  # fmt: skip
    """Write the report of all runs that are done."""
    main = [each for each in finished if each.part == "paper"] or list(finished)
    runs = [each.run for each in main]
    base = baseline if any(run.variant == baseline for run in runs) else None
    folder.mkdir(parents=True, exist_ok=True)
    held_out = [*_held_out(main, folder / "held_out_loss.png"), Paragraph(_HELD_OUT_MEANS)]
    more = [Section("Held-out loss", [Paragraph(_NOT_COMPARABLE), *held_out])]
    if net in PAPER_002["table_1"]:
        ours = MetricsTable.of([*runs, *untrained], baseline=base)
        relative, absolute = PAPER_002["table_1"][net], PAPER_002["table_3"][net]
        said = f"Table 3 ({net}), absolute; the paper's are means over ten runs."
        more.append(beside_the_paper(ours, f"Table 1 ({net})", relative, said, absolute))
    for part, title in _SIDE_PARTS.items():
        if own := [each for each in finished if each.part == part]:
            seeds = {each.run.seed for each in own}
            beside = [each for each in main if each.run.seed in seeds and each.part != part]
            judged = [each.run for each in (*beside, *own)] + [run for run in untrained if run.seed in seeds]
            blocks = MetricsTable.of(judged, baseline=base, metrics=_METRICS).write(folder, name=part)
            more.append(Section(title, [*_held_out([*beside, *own], folder / f"{part}.png"), *blocks]))
    more.append(Section("Settings and privacy", [Paragraph(_WHAT_IS_CLAIMED), _settings(finished)]))
    settings = [{**each.about(), "part": each.part, **each.facts} for each in finished]
    write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")
    curves = [
        {**each.about(), "examples": list(each.run.examples), "held_out": list(each.held_out)} for each in finished
    ]
    write_whole(folder / "held_out.json", json.dumps(curves) + "\n")
    return VariantReport(
        runs=runs, baseline=base, batch_runs=_batch_runs(finished, runs), class_names=class_names, metrics=_METRICS,
        title="Views of one image among those of others", untrained=untrained, lead=made_by(command, note), more=more,
    ).write(folder)  # fmt: skip


def made_by(command: str, *notes: str) -> list[Block]:
    """Return the lead of a page: remarks, and what to type to get the same again."""
    return [*(Paragraph(note) for note in notes if note), Paragraph("Made by"), Code(command)]


def beside_the_paper(
    table: MetricsTable, name: str, relative: Mapping[str, Any], said: str, absolute: Mapping[str, Any]
) -> Section:
    """Return ours / the paper's, divided by the baseline where there is one, and as they are."""
    blocks: list[Block] = []
    if table.baseline is not None:
        blocks.append(Paragraph(f"{name}, each divided by {table.baseline}."))
        blocks.append(table.beside_the_paper(relative, relative=True))
    blocks += [Paragraph(said), table.beside_the_paper(absolute, relative=False)]
    return Section("Beside the paper", blocks)


def _batch_runs(finished: Sequence[Finished], runs: Sequence[VariantRun]) -> list[VariantRun]:
    """Single runs with other batch sizes, and the first run of the same variant with the usual one."""
    others = [each.run for each in finished if each.part == "batch_sizes"]
    for label in dict.fromkeys(run.variant for run in others):
        others += [run for run in runs if run.variant == label][:1]
    return others


def _held_out(finished: Sequence[Finished], path: Path) -> list[Block]:
    runs = [replace(each.run, losses=each.held_out) for each in finished]
    return _picture(path, figures.draw_relative_loss(runs, path, of="held-out loss"))


def _settings(finished: Sequence[Finished]) -> Grid:
    """Return a line for each variant: the facts of its first run, its mean time of a step."""
    rows = []
    for name in dict.fromkeys(each.name for each in finished):
        same = [each for each in finished if each.name == name]
        took = [each.facts["seconds_per_step"] for each in same]
        facts = {**same[0].facts, "seconds_per_step": sum(took) / len(took)}
        rows.append([same[0].run.variant, same[0].run.batch_size, *(_cell(facts.get(column)) for column in _COLUMNS)])
    header = ("variant", "batch", *_COLUMNS.values())
    return Grid(header, rows, frozenset(range(1, len(header))))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
