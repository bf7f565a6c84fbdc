"""Tables and figures of paper 002 (Logit-DP), each from the stored runs of `task=variants` and `task=second_task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lit_dpret.cards.page import Block, Paragraph
from lit_dpret.report.page import Picture, copied_picture
from reproduction.report import variant_figures as figures
from reproduction.report.paper_002 import TABLE_1, TABLE_2, TABLE_3, TABLE_4
from reproduction.report.relative_table import (
    beside_the_paper,
    caption,
    read_table,
    relative_table,
    shares_of_the_gain,
    table_grid,
)
from reproduction.report.reproduction import Item, Paper, Show
from reproduction.report.variant_report import UNTRAINED_RUNS
from reproduction.report.variant_runs import UNTRAINED, VariantRun, read_runs

BASELINE = "Non-private"
NET, RESNET = ("embedding_net",), ("resnet18",)
SECOND = ("fine_tune_cifar100", "fine_tune")
_VIEWS = "Views are SimCLR's, which the paper does not state; delta is 1e-5, nor does it state that."
_STAND_IN = (
    "Where CIFAR-100 is not at hand, Fashion-MNIST's ten classes or five groups of CIFAR-10 are learned instead."
)
_LOSSES = (
    "A softmax among n images starts near log n, so a variant whose negatives come from sub-batches starts lower by "
    "nothing that it learned."
)


def _figure(draw: Callable[[Sequence[VariantRun], Path], str]) -> Show:
    """A figure of the runs that a report was made from, and its caption."""

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


def _table(paper: Mapping[str, tuple[float, ...]], *, relative: bool) -> Show:
    def show(results: Path, _: Path) -> list[Block]:
        runs = read_runs(results / "runs.jsonl")
        base = BASELINE if any(run.variant == BASELINE for run in runs) else None
        untrained = results / UNTRAINED_RUNS
        table = relative_table([*runs, *(read_runs(untrained) if untrained.is_file() else [])], baseline=base)
        said = caption(table, form="relative" if relative and base else "absolute").replace(
            ": mean / standard deviation", ""
        )
        longest = max(runs, key=lambda run: run.steps[-1])
        took = f"{longest.steps[-1]:,} steps of batches of {longest.batch_size or 0:,}"
        classes = len(longest.confusion or [])
        said = " ".join([f"{said} {took}; {classes} classes.", shares_of_the_gain(table, start=UNTRAINED)]).rstrip()
        return [beside_the_paper(table, paper, relative=relative), Paragraph(said, small=True)]

    return show


def _equal_negatives(results: Path, picture: Path) -> list[Block]:
    table = read_table(results / "equal_negatives.json")
    drawn = copied_picture(results / "equal_negatives.png", picture, "Held-out loss with as many negatives for all")
    said = caption(table, form="absolute")
    return [drawn, table_grid(table, form="absolute"), Paragraph(said, small=True)]


PAPER_002 = Paper(
    name="paper_002",
    title="Paper 002, Differentially private optimization for non-decomposable objective functions",
    promise=(
        "No epsilon is claimed for any model behind this page: training losses, which no ledger counts, are shown, so "
        "the card of every private run says not_proved. For public images only."
    ),
    items=(
        Item(
            number="Figure 1, left",
            says="relative training loss of the embedding net on CIFAR-10; Logit-DP's falls, Naive-DP's hardly does.",
            parts=NET,
            show=_figure(figures.draw_relative_loss),
            differs=_LOSSES,
        ),
        Item(
            number="Figure 1, right",
            says="single runs of Naive-DP with other batch sizes; those of 1,000 and 10,000 lie on each other.",
            parts=NET,
            show=_batch_sizes,
            differs=_LOSSES,
        ),
        Item(
            number="Table 1, embedding net",
            says="k-NN metrics on CIFAR-10, each divided by that of no privacy; both private variants near .82.",
            parts=NET,
            show=_table(TABLE_1["EmbeddingNet"], relative=True),
            differs=_VIEWS,
        ),
        Item(
            number="Table 1, ResNet18",
            says="the same for ResNet18 without batch normalisation; Logit-DP is above Naive-DP.",
            parts=RESNET,
            show=_table(TABLE_1["ResNet18"], relative=True),
            differs=_VIEWS,
        ),
        Item(
            number="Figure 2",
            says="relative training loss of a classifier for CIFAR-100's twenty groups on the frozen embedding net.",
            parts=SECOND,
            show=_figure(figures.draw_smoothed_loss),
            differs=_STAND_IN,
        ),
        Item(
            number="Table 2",
            says="that classifier's test metrics, each divided by that of no privacy; all near 1.",
            parts=SECOND,
            show=_table(TABLE_2, relative=True),
            differs=_STAND_IN,
        ),
        Item(
            number="Figure 3",
            says="confusion matrices of k-NN on CIFAR-10, embedding net.",
            parts=NET,
            show=_figure(figures.draw_confusions),
        ),
        Item(
            number="Figure 4", says="the same for ResNet18.", parts=RESNET, show=_figure(figures.draw_confusions)
        ),
        Item(
            number="Table 3, embedding net",
            says="the metrics of Table 1 themselves; means over ten runs.",
            parts=NET,
            show=_table(TABLE_3["EmbeddingNet"], relative=False),
            differs=_VIEWS,
        ),
        Item(
            number="Table 3, ResNet18",
            says="the same for ResNet18.",
            parts=RESNET,
            show=_table(TABLE_3["ResNet18"], relative=False),
            differs=_VIEWS,
        ),
        Item(
            number="Figure 5",
            says="seconds of an example, and the training loss over the runtime, embedding net.",
            parts=NET,
            show=_figure(figures.draw_runtime),
            differs="Times are of our machine, which other work shared; the paper's of a V100.",
        ),
        Item(
            number="Table 4",
            says="the metrics of Table 2 themselves, of one run.",
            parts=SECOND,
            show=_table(TABLE_4, relative=False),
            differs=_STAND_IN,
        ),
        Item(
            number="Beyond the paper, equal negatives",
            says="nothing: it gives Logit-DP the negatives of a sub-batch, and the other variants those of the batch.",
            parts=NET,
            show=_equal_negatives,
            differs="Here Naive-DP and no privacy get those of a sub-batch as well.",
        ),
        Item(
            number="Section 5.3, memory",
            says="gradients of all pairs need not be kept; it measures nothing.",
            why_not="No table or figure of the paper. What ours take: python benchmarks/logit_dp.py.",
        ),
    ),
)  # fmt: skip
