"""What `task=variants` leaves behind: the figures and tables of paper 002, the settings, and the paper's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_dpret.errors import StorageError
from reproduction.report import variant_figures as figures
from reproduction.report.paper_002 import TABLE_1, TABLE_3
from reproduction.report.relative_table import (
    PAPER_METRICS,
    RelativeTable,
    beside_the_paper,
    caption,
    relative_table,
    to_markdown,
    write_table,
)
from reproduction.report.variant_report import write_variant_report
from reproduction.report.variant_runs import VariantRun
from reproduction.variant import Part, Variant

SETTINGS = "settings.json"
_HELD_OUT = "held_out_loss"
_METRICS = {**PAPER_METRICS, _HELD_OUT: "Held-out loss"}
_SIDE_PARTS: Mapping[Part, str] = {
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
    "the card of every private run says `not_proved`. `eps of the updates` is what its ledger charged for the noised "
    "updates alone, at the delta beside it; it would be the claim had nothing else been shown. The choice of the "
    "settings is not in it either."
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
    """One run that is done.

    Args:
        name: Of its variant, in the task's configuration.
        variant: Its variant.
        run: Curve and metrics.
        held_out: The comparable loss at each observation of ``run``.
        facts: Settings, noise and privacy.
    """

    name: str
    variant: Variant
    run: VariantRun
    held_out: Sequence[float]
    facts: Mapping[str, Any]


def write_study(
    finished: Sequence[Finished],
    folder: Path,
    *,
    baseline: str | None,
    class_names: Sequence[str],
    note: str,
    command: str,
    net: str,
    untrained: Sequence[VariantRun] = (),
) -> dict[str, float]:
    """Write the report; returns the mean k-NN accuracy by variant.

    Args:
        finished: All runs that are done.
        folder: Of the report.
        baseline: The label that metrics are divided by; None for none, and where it has no run yet.
        class_names: Of the k-NN's labels.
        note: Said first.
        command: What was called.
        net: The encoder's class, whose numbers of the paper stand beside, where it has some.
        untrained: The encoders of the seeds before their first step.

    Raises:
        StorageError: A file cannot be written.
    """
    main = [each for each in finished if each.variant.part == "paper"] or list(finished)
    runs = [each.run for each in main]
    base = baseline if any(run.variant == baseline for run in runs) else None
    page = write_variant_report(
        runs,
        folder,
        baseline=base,
        batch_runs=_batch_runs(finished, runs),
        class_names=class_names,
        metrics=_METRICS,
        title="Views of one image among those of others",
        untrained=untrained,
    )
    text = [page.read_text(encoding="utf-8").rstrip(), "", _NOT_COMPARABLE, ""]
    text += ["## Held-out loss", "", *_held_out_figure(main, folder / "held_out_loss.png"), _HELD_OUT_MEANS, ""]
    if net in TABLE_1:
        text += _paper(relative_table([*runs, *untrained], baseline=base, metrics=PAPER_METRICS), net)
    for part, title in _SIDE_PARTS.items():
        own = [each for each in finished if each.variant.part == part]
        if own:
            text += ["", f"## {title}", "", *_side_part(own, main, untrained, folder, str(part), base)]
    text += ["", "## Settings and privacy", "", _WHAT_IS_CLAIMED, "", *_settings(finished)]
    head, rest = text[0].split("\n", 1)
    command_lines = ["", "Made by", "", "```sh", command, "```"]
    _write(page, "\n".join([head, *(["", note] if note else []), *command_lines, rest, *text[1:], ""]))
    settings = [
        {"variant": e.variant.label, "name": e.name, "part": e.variant.part, "seed": e.run.seed, **e.facts}
        for e in finished
    ]
    _write(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")
    curves = [
        {"variant": e.variant.label, "name": e.name, "seed": e.run.seed, "examples": list(e.run.examples),
         "held_out": list(e.held_out)}
        for e in finished
    ]  # fmt: skip
    _write(folder / "held_out.json", json.dumps(curves) + "\n")
    return _accuracies(finished)


def _batch_runs(finished: Sequence[Finished], runs: Sequence[VariantRun]) -> list[VariantRun]:
    """Single runs with other batch sizes, and the first run of the same variant with the usual one."""
    others = [each.run for each in finished if each.variant.part == "batch_sizes"]
    for label in dict.fromkeys(run.variant for run in others):
        usual = [run for run in runs if run.variant == label]
        others += usual[:1]
    return others


def _held_out_figure(finished: Sequence[Finished], path: Path) -> list[str]:
    runs = [replace(each.run, losses=list(each.held_out)) for each in finished]
    return [f"![{path.name}]({path.name})", "", figures.draw_relative_loss(runs, path, of="held-out loss"), ""]


def _paper(table: RelativeTable, net: str) -> list[str]:
    lines = ["## Beside the paper", ""]
    if table.baseline is not None:
        lines += [f"Table 1 ({net}), each divided by {table.baseline}.", ""]
        lines += [beside_the_paper(table, TABLE_1[net], relative=True).markdown(), ""]
    return [*lines, f"Table 3 ({net}), absolute; the paper's are means over ten runs.", "",
            beside_the_paper(table, TABLE_3[net], relative=False).markdown(), ""]  # fmt: skip


def _side_part(
    own: Sequence[Finished],
    main: Sequence[Finished],
    untrained: Sequence[VariantRun],
    folder: Path,
    name: str,
    baseline: str | None,
) -> list[str]:
    """Figure and table of some more variants, beside those of the paper under the same seeds, where there are any."""
    seeds = {each.run.seed for each in own}
    beside = (each for each in main if each.run.seed in seeds and each.variant.part != own[0].variant.part)
    shown = [*beside, *own]
    judged = [*(each.run for each in shown), *(run for run in untrained if run.seed in seeds)]
    table = relative_table(judged, baseline=baseline, metrics=_METRICS)
    write_table(table, folder, name=name)
    form: Any = "absolute" if baseline is None else "relative"
    return [
        *_held_out_figure(shown, folder / f"{name}.png"),
        f"{caption(table, form=form)}\n\n{to_markdown(table, form=form)}",
        f"{caption(table, form='absolute')}\n\n{to_markdown(table, form='absolute')}",
    ]


def _settings(finished: Sequence[Finished]) -> list[str]:
    lines = [
        "| variant | batch | " + " | ".join(_COLUMNS.values()) + " |",
        "| --- |" + " ---: |" * (len(_COLUMNS) + 1),
    ]
    seen: set[str] = set()
    for each in finished:
        if each.name in seen:
            continue
        seen.add(each.name)
        same = [other.facts["seconds_per_step"] for other in finished if other.name == each.name]
        facts = {**each.facts, "seconds_per_step": sum(same) / len(same)}
        cells = [_cell(facts.get(name)) for name in _COLUMNS]
        lines.append(f"| {each.variant.label} | {each.run.batch_size} | " + " | ".join(cells) + " |")
    return lines


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _accuracies(finished: Sequence[Finished]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for each in finished:
        found.setdefault(each.name, []).append(each.run.metrics["accuracy"])
    return {name: sum(values) / len(values) for name, values in found.items()}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}.") from error
