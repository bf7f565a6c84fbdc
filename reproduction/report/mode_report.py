"""A comparison of ways to train, privacy modes above all, as a page, a table and data.

The page says what every row costs in the same line as what it reached, and that many trainings on
the same queries cost more together than any one of them.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.page import Banner, Block, Bullets, Code, Grid, Paragraph, Section, to_html, to_markdown
from lit_dpret.files import write_whole
from lit_dpret.privacy.ledger.chain import today
from lit_dpret.report.chart import bar_chart
from lit_dpret.report.html import Drawing
from lit_dpret.report.table import RowResult, show
from lit_dpret.retrieval.statistics import Interval
from reproduction.report.mode_comparison import Difference, ModeRow, differences

_SCHEMA = "lit-dpret/mode-comparison/1"
_HOW_SURE = (
    "Means over training runs, each with noise and coins of its own, and 95 % intervals: of the t-distribution over "
    "training runs, and of the bootstrap over queries. The first says how the setting does, the second how much these "
    "queries say; neither covers the other. Claims are those of the runs' privacy cards."
)
_HOW_TESTED = (
    "Significant means that the training runs carry the difference at 0.05: Welch's t-test over runs (one-sample "
    "where a system is not trained), adjusted by Holm for all comparisons of its budget and metric. Runs are not "
    "paired: they share no noise and no coins. Beside it the randomisation test over queries, adjusted likewise. "
    "The interval is of the one difference, over training runs, and not adjusted."
)


@dataclass(frozen=True, kw_only=True)
class Headings:
    """What a comparison is called.

    Args:
        name: Of the files.
        title: Of the page.
        rows: What the rows are, in the plural.
    """

    name: str
    title: str
    rows: str


COMPARE_MODES = Headings(name="compare_modes", title="One retriever under every privacy mode", rows="Privacy modes")


def write_mode_report(
    folder: Path,
    rows: Sequence[ModeRow],
    *,
    headings: Headings = COMPARE_MODES,
    metrics: Sequence[str],
    evaluated_on: str,
    command: str,
    notes: Sequence[str] = (),
    private_runs: int = 0,
    spent: str = "",
    more: Sequence[Section] = (),
    references: Sequence[str] = (),
) -> dict[str, Path]:
    """Write ``NAME.{html,md,json,csv}``, as the headings name it, and ``differences.csv`` into ``folder``.

    They are for their owner alone: measures of private queries stand in them, which no budget covers.

    Args:
        folder: It exists.
        rows: The systems, in the order of the table.
        headings: What the comparison is called.
        metrics: Which of their metrics are shown; the first one is drawn.
        evaluated_on: Test set and model, in words.
        command: What to type to get the same again.
        notes: Further remarks.
        private_runs: How many trainings on the private queries claim an epsilon of their own.
        spent: What all of them have spent together, in words.
        more: Further sections, after the results.
        references: Names of the systems that the others are tested against; without any, every two are compared.

    Returns:
        The paths by file name.

    Raises:
        DataError: Rows were judged on different queries.
        StorageError: A file cannot be written.
    """
    found = {metric: differences(rows, metric, references) for metric in metrics}
    lead, sections = _lead(private_runs, spent), _sections(rows, found, evaluated_on, command, notes, references)
    sections[2:2] = more
    subtitle = f"lit-dpret report, {today()}"
    facts = {
        "schema": _SCHEMA,
        "evaluated_on": evaluated_on,
        "command": command,
        "notes": list(notes),
        "private_runs": private_runs,
        "spent": spent,
        "rows": [_row_facts(row, metrics) for row in rows],
        "references": list(references),
        "differences": [_difference_facts(each) for of_metric in found.values() for each in of_metric],
    }
    texts = {
        f"{headings.name}.html": to_html(headings.title, subtitle, lead, sections),
        f"{headings.name}.md": to_markdown(headings.title, subtitle, lead, sections),
        f"{headings.name}.json": json.dumps(facts, indent=1, allow_nan=False) + "\n",
    }
    tables = {f"{headings.name}.csv": _row_table(rows, metrics), "differences.csv": _difference_table(found)}
    texts |= {name: _csv(table) for name, table in tables.items()}
    return {name: write_whole(folder / name, text, owner_only=True) for name, text in texts.items()}


def _csv(table: Sequence[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(table)
    return file.getvalue()


def _lead(private_runs: int, spent: str) -> list[Block]:
    if not private_runs and not spent:
        return []
    together = spent or (
        f"{private_runs} trainings on the same private queries stand behind this page. The epsilon of a row is that of "
        "one of its runs; all of them together have spent more, and it was not added up."
    )
    for_what = "A comparison like this is for queries that may be read, not for those that are to be protected."
    return [Banner(f"{together} {for_what}", "caution")]


def _sections(
    rows: Sequence[ModeRow],
    found: Mapping[str, Sequence[Difference]],
    evaluated_on: str,
    command: str,
    notes: Sequence[str],
    references: Sequence[str],
) -> list[Section]:
    tested = _HOW_TESTED + (f" Only differences from {', '.join(references)} are tested." if references else "")
    metrics = list(found)
    first, budgeted = metrics[0], any(row.budget is not None for row in rows)
    drawn = [RowResult(system=row.name, metrics={first: row.over_runs(first)}) for row in rows]
    sections = [
        Section("Results", [Paragraph(f"Computed on {evaluated_on}."), *_results(rows, metrics)]),
        Section(f"{first}, with the interval over training runs", [Drawing(bar_chart(drawn))]),
        Section("Which differences are significant", [Paragraph(tested), *_verdicts(found, budgeted=budgeted)]),
        Section("How each row was trained", [_settings(rows)]),
    ]
    if notes:
        sections.append(Section("Notes", [Bullets(notes)]))
    return [*sections, Section("How to get this again", [Code(command)])]


def _results(rows: Sequence[ModeRow], metrics: Sequence[str]) -> list[Block]:
    claims, shared = _claims(rows)
    body = []
    for row, claim in zip(rows, claims, strict=True):
        cells: list[object] = [row.name]
        for metric in metrics:
            runs = row.over_runs(metric)
            cells += [f"{runs.mean:.3f}", _bounds(runs), _bounds(row.over_queries(metric))]
        body.append([*cells, claim])
    numbers = [name for metric in metrics for name in (metric, "over runs", "over queries")]
    table = Grid(["System", *numbers, "Claim of one run"], body, frozenset(range(1, 1 + len(numbers))))
    return [Paragraph(f"{_HOW_SURE}{shared}"), table]


def _claims(rows: Sequence[ModeRow]) -> tuple[list[str], str]:
    """The claims for a narrow column, and a sentence with what all epsilons have in common, if they have."""
    ends = {row.privacy.partition(", ")[2] for row in rows if row.privacy.startswith("epsilon = ")}
    if len(ends) != 1:
        return [row.privacy for row in rows], ""
    (end,) = ends
    return [row.privacy.removesuffix(f", {end}") for row in rows], f" Every epsilon is at {end}."


def _verdicts(found: Mapping[str, Sequence[Difference]], *, budgeted: bool) -> list[Block]:
    blocks: list[Block] = []
    for metric, of_metric in found.items():
        for budget in dict.fromkeys(each.budget for each in of_metric):
            family = [each for each in of_metric if each.budget == budget]
            carried = sum(each.is_significant() for each in family)
            if budget is not None:
                where = f"epsilon {budget:g}"
            else:
                where = "the same mode at two budgets" if budgeted else "all rows"
            blocks.append(Paragraph(f"{metric}, {where}: {carried} of {len(family)} differences are significant."))
            body = [
                (
                    each.first,
                    each.second,
                    show(Interval(each.difference, each.low, each.high)),
                    p_value(each.p_runs),
                    "yes" if each.is_significant() else "no",
                    p_value(each.p_queries),
                )
                for each in family
            ]
            header = ("Better", "Worse", "Difference", "p over runs", "Significant", "p over queries")
            blocks.append(Grid(header, body, frozenset({2, 3, 5})))
    return blocks


def _settings(rows: Sequence[ModeRow]) -> Grid:
    trained = [row for row in rows if row.settings]
    names = list(dict.fromkeys(name for row in trained for name in row.settings))
    body = [[row.name, row.runs, *(_short(row.settings.get(name)) for name in names)] for row in trained]
    return Grid(
        ["System", "runs", *(name.replace("_", " ") for name in names)], body, frozenset(range(1, 2 + len(names)))
    )


def _row_facts(row: ModeRow, metrics: Sequence[str]) -> dict[str, Any]:
    measured = {
        metric: {
            "per_run": list(row.per_run[metric]),
            "over_runs": _ends(row.over_runs(metric)),
            "over_queries": _ends(row.over_queries(metric)),
        }
        for metric in metrics
    }
    return {
        "system": row.name,
        "budget": row.budget,
        "privacy": row.privacy,
        "settings": dict(row.settings),
        "metrics": measured,
    }


def _difference_facts(each: Difference) -> dict[str, Any]:
    facts = {"significant": each.is_significant(), "holds_over_queries": each.holds_over_queries()}
    return asdict(each) | facts


def _row_table(rows: Sequence[ModeRow], metrics: Sequence[str]) -> list[list[object]]:
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    ends = [f"{metric} {end}" for metric in metrics for end in ("mean", *_ENDS)]
    table: list[list[object]] = [["system", "runs", *ends, "privacy", *names]]
    for row in rows:
        cells: list[object] = [row.name, row.runs if row.settings else ""]
        for metric in metrics:
            runs, queries = row.over_runs(metric), row.over_queries(metric)
            cells += [runs.mean, *(_blank(end) for end in (runs.low, runs.high)), queries.low, queries.high]
        table.append([*cells, row.privacy, *(_plain(row.settings.get(name)) for name in names)])
    return table


_ENDS = ("low over runs", "high over runs", "low over queries", "high over queries")


def _difference_table(found: Mapping[str, Sequence[Difference]]) -> list[list[object]]:
    facts = [_difference_facts(each) for of_metric in found.values() for each in of_metric]
    header: list[object] = list(facts[0]) if facts else []
    return [header, *([_plain(value) for value in each.values()] for each in facts)]


def _ends(interval: Interval) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(interval).items()}


def _bounds(interval: Interval) -> str:
    if not math.isfinite(interval.low):
        return "–"
    return f"[{interval.low:.3f}, {interval.high:.3f}]"


def p_value(value: float) -> str:
    """As it is printed: never 0, which no test can say."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def _plain(value: object) -> object:
    return "" if value is None else value


def _blank(value: float) -> object:
    return value if math.isfinite(value) else ""
