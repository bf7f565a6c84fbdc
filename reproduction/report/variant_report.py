"""A whole comparison in one folder: figures, tables and a page that shows them with their captions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lit_dpret.errors import StorageError
from reproduction.report import variant_figures as figures
from reproduction.report.relative_table import PAPER_METRICS, relative_table, shares_of_the_gain, write_table
from reproduction.report.variant_figures import Axis, Band, relative_curves
from reproduction.report.variant_runs import UNTRAINED, VariantRun, write_runs

PAGE = "README.md"
UNTRAINED_RUNS = "untrained.jsonl"


def write_variant_report(
    runs: Sequence[VariantRun],
    folder: Path,
    *,
    baseline: str | None = None,
    batch_runs: Sequence[VariantRun] = (),
    class_names: Sequence[str] = (),
    metrics: Mapping[str, str] = PAPER_METRICS,
    band: Band = "interval",
    title: str = "",
    untrained: Sequence[VariantRun] = (),
) -> Path:
    """Write everything that ``runs`` have the data for; what they lack is left out.

    ``runs.jsonl``, ``curves.json``, ``relative_loss.png``, ``smoothed_loss.png``, and where the runs tell
    them ``confusion.png``, ``runtime.png``, ``metrics.{csv,json,md}``; with ``batch_runs`` also
    ``batch_runs.jsonl`` and one ``batch_sizes.png`` for each of their variants. ``README.md`` shows all.

    Args:
        runs: Runs of one task, several variants and seeds.
        folder: Made where it is not there.
        baseline: The variant that metrics are divided by, ``Non-private`` in the paper; None for none.
        batch_runs: Single runs of a variant with different batch sizes (figure 1, right); their losses
            are divided by the lowest among themselves and ``runs``.
        class_names: For the confusion matrices.
        metrics: Names and titles of the metrics in the table.
        band: Of the loss curves; see `relative_curves`.
        title: Of the page and the figures.
        untrained: Encoders before their first step: rows of the table, in ``untrained.jsonl`` and in no figure.

    Returns:
        The page.

    Raises:
        ConfigurationError: matplotlib is not installed.
        DataError: The runs cannot be compared.
        StorageError: A file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} could not be made: {error.strerror}.") from error
    axis: Axis = "examples" if all(run.examples for run in runs) else "steps"
    page = [f"# {title or 'Comparison'}", ""]

    def show(name: str, caption: str) -> None:
        page.extend([f"![{name}]({name})", "", caption, ""])

    curves = relative_curves(runs, axis=axis, band=band)
    write_runs(runs, folder / "runs.jsonl")
    if batch_runs:
        write_runs(batch_runs, folder / "batch_runs.jsonl")
    if untrained:
        write_runs(untrained, folder / UNTRAINED_RUNS)
    show(
        "relative_loss.png",
        figures.draw_relative_loss(runs, folder / "relative_loss.png", axis=axis, band=band, title=title),
    )
    show("smoothed_loss.png", figures.draw_smoothed_loss(runs, folder / "smoothed_loss.png", axis=axis, title=title))
    for number, variant in enumerate(dict.fromkeys(run.variant for run in batch_runs)):
        name = "batch_sizes.png" if number == 0 else f"batch_sizes_{number + 1}.png"
        shown = [*(run for run in batch_runs if run.variant == variant), *(r for r in runs if r.variant != variant)]
        show(name, figures.draw_batch_sizes(shown, folder / name, variant=variant))
    if any(run.confusion is not None for run in runs):
        show("confusion.png", figures.draw_confusions(runs, folder / "confusion.png", names=class_names, title=title))
    if all(run.seconds and len(run.examples) > 1 for run in runs):
        show("runtime.png", figures.draw_runtime(runs, folder / "runtime.png", title=title))
    judged = [*runs, *untrained]
    told = {name: words for name, words in metrics.items() if all(name in run.metrics for run in judged)}
    if told:
        table = relative_table(judged, baseline=baseline, metrics=told)
        page.append(write_table(table, folder)[-1].read_text(encoding="utf-8"))
        if shares := shares_of_the_gain(table, start=UNTRAINED):
            page += [shares, ""]
    readme = folder / PAGE
    try:
        (folder / "curves.json").write_text(json.dumps([asdict(curve) for curve in curves]) + "\n", encoding="utf-8")
        readme.write_text("\n".join(page), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder} could not be written to: {error.strerror}.") from error
    return readme
