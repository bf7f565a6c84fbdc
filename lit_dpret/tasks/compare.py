"""`task=compare`: compare two runs on the same queries: their differences and significance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_dpret.cards.blocks import Block, Bullets, Grid, Paragraph, Section, to_markdown
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import write_whole
from lit_dpret.retrieval import trec_runs
from lit_dpret.retrieval.comparison import Comparison, Difference, compare_values
from lit_dpret.retrieval.metrics import Metric, Values
from lit_dpret.settings import Count, Settings
from lit_dpret.tasks.parts import Parts, check_run_dir, say


@dataclass(kw_only=True)
class Compare(Settings):
    """The difference of two systems in every metric on every common data set."""

    run_a: Path
    run_b: Path
    qrels: Path | None = None
    metrics: Sequence[str] = trec_runs.DEFAULT_METRICS
    level: float = 0.95
    resamples: Count = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.metrics:
            raise ConfigurationError("task.metrics is empty. Name at least one, for example [ndcg@10].")
        if not 0 < self.level < 1:
            raise ConfigurationError(f"task.level={self.level} must be strictly between 0 and 1.")
        self.metrics = tuple(str(Metric.parse(name)) for name in self.metrics)

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``comparison.json`` and ``comparison.md``, and print the table; return the differences."""
        first, second = trec_runs.find_runs(self.run_a), trec_runs.find_runs(self.run_b)
        shared = [name for name in first if name in second]
        if not shared and len(first) == len(second) == 1:  # two files with any names
            shared = [next(iter(first))]
            second = {shared[0]: next(iter(second.values()))}
        if not shared:
            raise DataError(
                f"task.run_a={self.run_a} has runs of {', '.join(first)}, and task.run_b={self.run_b} of "
                f"{', '.join(second)}: they have no data set in common."
            )
        if self.qrels is not None and len(shared) > 1:
            raise ConfigurationError(
                f"task.qrels={self.qrels} is one file of judgements, but the runs cover {len(shared)} data sets. "
                "Leave it null to use the judgements next to the runs, or name two single runs."
            )
        check_run_dir(parts.run_dir, min_free_mb=1)
        measured_on = {name: [_measured_on(one) for one in (first[name], second[name])] for name in shared}
        called = {}  # a data set's subfolder, or, for single evaluations, the name that they state
        for name, runs in measured_on.items():
            stated = " / ".join(dict.fromkeys(one["data"] for one in runs if "data" in one))
            called[name] = stated or name if name == Path(trec_runs.RUN).stem else name
        values: tuple[dict[str, dict[str, Values]], ...] = ({}, {})
        for name in shared:
            qrels = trec_runs.read_qrels(self.qrels or self._beside(first[name], second[name]))
            for found, path in zip(values, (first[name], second[name]), strict=True):
                run = trec_runs.read_run(path)
                found[called[name]] = dict(trec_runs.evaluate(run, qrels, self.metrics, resamples=1).per_query)
        comparison = compare_values(
            *values,
            names=(str(self.run_a), str(self.run_b)),
            level=self.level,
            resamples=self.resamples,
            seed=self.seed,
        )
        about = {called[name]: found for name, found in measured_on.items()}
        files = write_comparison(comparison, parts.run_dir, about)
        Console().print(_console(comparison))
        if note := _uncovered(about):
            say(note)
        alone = [f"{n} ({w})" for runs, w in ((first, "a only"), (second, "b only")) for n in runs if n not in shared]
        if alone:
            say(f"not compared: {', '.join(alone)}")
        for name, (one, other) in about.items():
            if one.get("data_sha256") != other.get("data_sha256"):
                say(f"note: {name}: a was measured on {_shown(one)}, b on {_shown(other)}")
        say(*(f"written: {path}" for path in files))
        return {f"{cell.data}/{cell.metric}": cell.difference.mean for cell in comparison.cells}

    def _beside(self, *runs: Path) -> Path:
        found = [path.parent / trec_runs.JUDGEMENTS for path in runs if (path.parent / trec_runs.JUDGEMENTS).is_file()]
        if not found:
            raise DataError(
                f"{runs[0]} and {runs[1]} have no {trec_runs.JUDGEMENTS} next to them. Name one with task.qrels=FILE."
            )
        if len(found) == 2 and trec_runs.read_qrels(found[0]) != trec_runs.read_qrels(found[1]):
            raise DataError(
                f"{found[0]} and {found[1]} differ: the two systems were measured on different queries or judgements. "
                "Name the judgements for both with task.qrels=FILE."
            )
        return found[0]


def _measured_on(run: Path) -> dict[str, str]:
    """Return the data facts from the evaluation next to a run; the file's name if there is none."""
    try:
        facts = json.loads((run.parent / trec_runs.SUMMARY).read_text(encoding="utf-8"))
        return {name: str(facts[name] or "") for name in ("data", "data_sha256", "whose") if name in facts}
    except (OSError, ValueError, TypeError):
        return {"data": run.stem}


def _shown(about: Mapping[str, str]) -> str:
    return f"{about.get('data', 'data without a name')} ({about.get('data_sha256', 'hash unknown')[:12]})"


_HEAD = ("data", "metric", "a", "b", "a - b", "better / worse", "p", "p (Holm)")


def _console(comparison: Comparison) -> Table:
    """Return the comparison for ``rich.print``, in 80 columns; significant rows are bold."""
    caption = f"{_caption(comparison)} Bold: significant."
    table = Table(title=_title(comparison), title_justify="left", caption=caption, caption_justify="left")
    table.add_column("metric\ndata")
    for name in ("a", "b", "a - b", "better /\nworse", "p\np (Holm)"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in comparison.cells:
        data, metric, a, b, difference, counts, p, corrected = _cells(cell)
        row = (f"{metric}\n{data}", a, b, difference.replace(" ", "\n", 1), counts.replace(" of ", "\nof "))
        style = "bold" if comparison.significant(cell) else None
        table.add_row(*(Text(text) for text in (*row, f"{p}\n{corrected}")), style=style)
    return table


def write_comparison(comparison: Comparison, folder: Path, about: Mapping[str, Any] | None = None) -> tuple[Path, Path]:
    """Write ``comparison.json`` and ``comparison.md``, readable by their owner alone."""
    rows = [(*_cells(cell), "yes" if comparison.significant(cell) else "no") for cell in comparison.cells]
    metrics = dict.fromkeys(Metric.parse(cell.metric) for cell in comparison.cells)
    blocks: list[Block] = [
        Grid((*_HEAD, "significant"), rows, frozenset(range(2, len(_HEAD)))),
        Paragraph(_caption(comparison)),
        Bullets([f"{metric.shown}: {metric.definition}." for metric in metrics]),
    ]
    if note := _uncovered(about or {}):
        blocks.insert(0, Paragraph(note))
    facts = {**comparison.to_dict(), "data": dict(about or {})}  # by data set: the facts of a, and of b
    texts = {
        "comparison.json": json.dumps(facts, indent=2, allow_nan=False) + "\n",
        "comparison.md": to_markdown(_title(comparison), "", [], [Section("Differences", blocks)]),
    }
    machine, reader = (write_whole(folder / name, text, owner_only=True) for name, text in texts.items())
    return machine, reader


def _uncovered(about: Mapping[str, Any]) -> str:
    """Return the caution about data whose evaluations do not declare the queries public; empty if there are none."""
    said = {name: {one["whose"] for one in runs if "whose" in one} - {"public"} for name, runs in about.items()}
    if not (names := [name for name, owners in said.items() if owners]):
        return ""
    declared = {f"declared {owner}" if owner else "of unknown owners (task.whose)" for n in names for owner in said[n]}
    return (
        f"{', '.join(names)}: queries {' or '.join(sorted(declared))}. No epsilon covers these numbers: keep "
        "them with the queries."
    )


def _title(comparison: Comparison) -> str:
    return f"a: {comparison.a}, b: {comparison.b}"


def _caption(comparison: Comparison) -> str:
    tests = len(comparison.cells)
    return (
        f"a - b: mean difference with its {comparison.level:.0%} bootstrap interval. p: paired randomisation test, "
        f"{comparison.resamples:,} swaps; Holm corrects for {tests} {'test' if tests == 1 else 'tests'}. "
        f"Significant: p (Holm) at most {1 - comparison.level:.2g}. All this concerns the "
        "choice of queries, not chance in training."
    )


def _cells(cell: Difference) -> tuple[str, ...]:
    d = cell.difference
    return (
        cell.data, Metric.parse(cell.metric).shown, f"{cell.a:.4f}", f"{cell.b:.4f}",
        f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]", f"{cell.better} / {cell.worse} of {cell.queries}",
        _p(cell.p_value), _p(cell.p_holm),
    )  # fmt: skip


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"
