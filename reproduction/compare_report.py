"""What a comparison tells at its end: the table, what differs, and where everything lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lit_dpret.cards.page import Section
from lit_dpret.report.table import RowResult, console_table
from reproduction.report.mode_comparison import ModeRow, differences
from reproduction.report.mode_report import Headings, p_value, write_mode_report


def tell(
    run_dir: Path,
    rows: Sequence[ModeRow],
    *,
    headings: Headings,
    metrics: Sequence[str],
    evaluated_on: str,
    command: str,
    notes: Sequence[str],
    private_runs: int,
    spent: str,
    seconds: float,
    sections: Sequence[Section] = (),
    references: Sequence[str] = (),
) -> dict[str, float]:
    """Write the report and print it in short; returns the first metric by system."""
    written = write_mode_report(
        run_dir,
        rows,
        headings=headings,
        metrics=metrics,
        evaluated_on=evaluated_on,
        command=command,
        notes=notes,
        private_runs=private_runs,
        spent=spent,
        more=sections,
        references=references,
    )
    console = Console()
    shown = [RowResult(row.name, {m: row.over_runs(m) for m in metrics}, row.privacy) for row in rows]
    console.print(console_table(shown, title=f"{headings.rows}; intervals over training runs"))
    first = metrics[0]
    for each in differences(rows, first, references):
        if each.is_significant():
            console.print(
                f"{each.first} above {each.second}: {first} +{each.difference:.4f}, p over runs {p_value(each.p_runs)}",
                highlight=False,
                soft_wrap=True,
            )
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    for name, path in written.items():
        console.print(f"{name}: {path}", highlight=False, soft_wrap=True)
    console.print(f"Stages took {seconds:.0f} s")
    return {row.name: row.over_runs(first).mean for row in rows}
