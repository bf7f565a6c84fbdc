"""Tables and figures of paper 002 (Logit-DP), each from the stored runs of `task=variants` and `task=second_task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lit_dpret.cards.page import Block, Paragraph
from lit_dpret.report.page import Picture
from reproduction.published import PAPER_002 as PUBLISHED
from reproduction.report import variant_figures as figures
from reproduction.report.reproduction import Show, read_paper
from reproduction.report.variant_runs import UNTRAINED, VariantRun, read_runs
from reproduction.report.variants import UNTRAINED_RUNS, MetricsTable, equal_negatives

BASELINE = "Non-private"


def _figure(draw: Callable[[Sequence[VariantRun], Path], str]) -> Show:
    """Return a figure of the runs that a report was made from, and its caption."""

    def show(results: Path, picture: Path) -> list[Block]:
        said = draw(read_runs(results / "runs.jsonl"), picture)
        return [Picture(picture, said), Paragraph(said, small=True)]

    return show


def _batch_sizes(results: Path, picture: Path) -> list[Block]:
    """Single runs of Naive-DP, and the other variants' as a measure of what is low."""
    single = read_runs(results / "batch_runs.jsonl")
    variant = single[0].variant
    others = [run for run in read_runs(results / "runs.jsonl") if run.variant != variant]
    said = figures.draw_batch_sizes([*single, *others], picture, variant=variant)
    return [Picture(picture, said), Paragraph(said, small=True)]


def _table(paper: Mapping[str, Sequence[float]], *, relative: bool) -> Show:
    def show(results: Path, _: Path) -> list[Block]:
        runs = read_runs(results / "runs.jsonl")
        base = BASELINE if any(run.variant == BASELINE for run in runs) else None
        untrained = results / UNTRAINED_RUNS
        table = MetricsTable.of([*runs, *(read_runs(untrained) if untrained.is_file() else [])], baseline=base)
        said = table.caption(relative=relative and base is not None).replace(": mean / standard deviation", "")
        longest = max(runs, key=lambda run: run.steps[-1])
        took = f"{longest.steps[-1]:,} steps of batches of {longest.batch_size or 0:,}"
        classes = len(longest.confusion or [])
        said = " ".join([f"{said} {took}; {classes} classes.", table.shares_of_the_gain(start=UNTRAINED)]).rstrip()
        return [table.beside_the_paper(paper, relative=relative), Paragraph(said, small=True)]

    return show


def _shows() -> dict[str, Show]:
    """Return by number what shows each table and figure."""
    absolute, relative, confusions = PUBLISHED["table_3"], PUBLISHED["table_1"], _figure(figures.draw_confusions)
    return {
        "Figure 1, left": _figure(figures.draw_relative_loss),
        "Figure 1, right": _batch_sizes,
        "Table 1, embedding net": _table(relative["EmbeddingNet"], relative=True),
        "Table 1, ResNet18": _table(relative["ResNet18"], relative=True),
        "Figure 2": _figure(figures.draw_smoothed_loss),
        "Table 2": _table(PUBLISHED["table_2"], relative=True),
        "Figure 3": confusions,
        "Figure 4": confusions,
        "Table 3, embedding net": _table(absolute["EmbeddingNet"], relative=False),
        "Table 3, ResNet18": _table(absolute["ResNet18"], relative=False),
        "Figure 5": _figure(figures.draw_runtime),
        "Table 4": _table(PUBLISHED["table_4"], relative=False),
        "Beyond the paper, equal negatives": equal_negatives,
    }


PAPER_002 = read_paper("paper_002", _shows())
