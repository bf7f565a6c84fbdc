"""Tables and figures of paper 002 (Logit-DP), each from the stored runs of `task=variants` and `task=second_task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lit_dpret.cards.page import Block, Paragraph
from lit_dpret.report.page import Picture, copied_picture
from reproduction.published import PAPER_002 as PUBLISHED
from reproduction.report import variant_figures as figures
from reproduction.report.metrics_table import MetricsTable
from reproduction.report.reproduction import Item, Paper, Show, item
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


def _equal_negatives(results: Path, picture: Path) -> list[Block]:
    table = MetricsTable.read(results / "equal_negatives.json")
    drawn = copied_picture(results / "equal_negatives.png", picture, "Held-out loss with as many negatives for all")
    return [drawn, table.grid(relative=False), Paragraph(table.caption(relative=False), small=True)]


def _items() -> tuple[Item, ...]:
    """List by number: what the paper shows, the parts that can make it, how, and how ours differs."""
    absolute, relative = PUBLISHED["table_3"], PUBLISHED["table_1"]
    confusions = _figure(figures.draw_confusions)
    rows: list[tuple[str, str, tuple[str, ...], Show, str]] = [
        ("Figure 1, left",
         "relative training loss of the embedding net on CIFAR-10; Logit-DP's falls, Naive-DP's hardly does.",
         NET, _figure(figures.draw_relative_loss), _LOSSES),
        ("Figure 1, right",
         "single runs of Naive-DP with other batch sizes; those of 1,000 and 10,000 lie on each other.",
         NET, _batch_sizes, _LOSSES),
        ("Table 1, embedding net",
         "k-NN metrics on CIFAR-10, each divided by that of no privacy; both private variants near .82.",
         NET, _table(relative["EmbeddingNet"], relative=True), _VIEWS),
        ("Table 1, ResNet18", "the same for ResNet18 without batch normalisation; Logit-DP is above Naive-DP.",
         RESNET, _table(relative["ResNet18"], relative=True), _VIEWS),
        ("Figure 2",
         "relative training loss of a classifier for CIFAR-100's twenty groups on the frozen embedding net.",
         SECOND, _figure(figures.draw_smoothed_loss), _STAND_IN),
        ("Table 2", "that classifier's test metrics, each divided by that of no privacy; all near 1.",
         SECOND, _table(PUBLISHED["table_2"], relative=True), _STAND_IN),
        ("Figure 3", "confusion matrices of k-NN on CIFAR-10, embedding net.", NET, confusions, ""),
        ("Figure 4", "the same for ResNet18.", RESNET, confusions, ""),
        ("Table 3, embedding net", "the metrics of Table 1 themselves; means over ten runs.",
         NET, _table(absolute["EmbeddingNet"], relative=False), _VIEWS),
        ("Table 3, ResNet18", "the same for ResNet18.", RESNET, _table(absolute["ResNet18"], relative=False), _VIEWS),
        ("Figure 5", "seconds of an example, and the training loss over the runtime, embedding net.",
         NET, _figure(figures.draw_runtime),
         "Times are of our machine, which other work shared; the paper's of a V100."),
        ("Table 4", "the metrics of Table 2 themselves, of one run.",
         SECOND, _table(PUBLISHED["table_4"], relative=False), _STAND_IN),
        ("Beyond the paper, equal negatives",
         "nothing: it gives Logit-DP the negatives of a sub-batch, and the other variants those of the batch.",
         NET, _equal_negatives, "Here Naive-DP and no privacy get those of a sub-batch as well."),
    ]  # fmt: skip
    memory = Item(
        number="Section 5.3, memory",
        says="gradients of all pairs need not be kept; it measures nothing.",
        why_not="No table or figure of the paper. What ours take: python benchmarks/logit_dp.py.",
    )
    return (*(item(*row) for row in rows), memory)


PAPER_002 = Paper(
    name="paper_002",
    title="Paper 002, Differentially private optimization for non-decomposable objective functions",
    promise=(
        "No epsilon is claimed for any model behind this page: training losses, which no ledger counts, are shown, so "
        "the card of every private run says not_proved. For public images only."
    ),
    items=_items(),
)
