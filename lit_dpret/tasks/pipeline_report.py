"""What `task=pipeline` tells at its end: the table, a sample of queries, the round trip, where things lie."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from lit_dpret.cards.card import read_card
from lit_dpret.datamodules.records import Row
from lit_dpret.report.html import Artefact, RoundTrip, Sample, write_report
from lit_dpret.report.table import RowResult, console_table, write_csv, write_json


def tell(
    run_dir: Path,
    rows: Sequence[RowResult],
    pairs: Sequence[Row],
    round_trip: RoundTrip,
    *,
    samples: int,
    evaluated_on: str,
    notes: Sequence[str],
    command: str,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Write results and report, print the same in short; returns nDCG@10 by system.

    Args:
        run_dir: Of the pipeline.
        rows: The table.
        pairs: Synthetic queries; ``samples`` of them, chosen by hash of id, are shown.
        round_trip: How many synthetic queries find their passage.
        samples: How many queries to show.
        evaluated_on: Test set and model, in words.
        notes: More for the report than it says of every such run.
        command: What was called.
        seconds: By stage.
    """
    shown = sorted(pairs, key=lambda row: hashlib.sha256(row.query_id.encode()).digest())[:samples]
    console = _told_rows(run_dir, rows)
    artefacts = _artefacts(run_dir)
    report = write_report(
        run_dir,
        title="Retrieval from private queries: what it reached, and what was promised",
        table=list(rows),
        card=read_card(run_dir / "synthetic" / "data"),
        samples=[Sample(passage=r.passage, queries=[r.query], passage_id=r.passage_id) for r in shown],
        round_trip=round_trip,
        artefacts=artefacts,
        command=command,
        evaluated_on=evaluated_on,
        notes=[*_notes(rows), *notes],
    )
    for row in shown:
        console.print(f"[bold]{escape(row.query)}[/bold]\n    {escape(row.passage[:160])}", highlight=False)
    console.print(
        f"Round trip: {round_trip.recall.mean:.3f} of {round_trip.queries} synthetic queries find their own "
        f"passage among the first {round_trip.k}; with shuffled passages {round_trip.control.mean:.3f}.",
        highlight=False,
    )
    for artefact in [*artefacts, Artefact("report", str(report))]:
        console.print(f"{artefact.label}: {artefact.path}", highlight=False, soft_wrap=True)
    return _closed(console, rows, seconds)


def tell_baselines(
    run_dir: Path, rows: Sequence[RowResult], *, evaluated_on: str, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Write and print the results of a pipeline without synthetic queries, about which there is no page to write."""
    console = _told_rows(run_dir, rows)
    console.print(evaluated_on, highlight=False)
    return _closed(console, rows, seconds)


def _notes(rows: Sequence[RowResult]) -> list[str]:
    """What a reader of the table must know, whatever was run."""
    bare = [row.system for row in rows if row.privacy.startswith("no privacy guarantee")]
    found = [
        "What is promised at the top of the page holds for the synthetic queries and for the retriever that learned "
        "from them. Every other row has its own promise, in the table.",
        "Each row that learned from the real queries is a release of its own. Who publishes several has spent up to "
        "the sum of their epsilons, at the sum of their deltas.",
        "The numbers are computed on the test queries of the log, which no epsilon protects: show them to those who "
        "may see these queries.",
    ]
    if bare:
        found.append(
            f"Made from the real queries without protection: {'; '.join(bare)}. No guarantee covers these models, nor "
            "their numbers."
        )
    return found


def _told_rows(run_dir: Path, rows: Sequence[RowResult]) -> Console:
    """Write the results and print their table."""
    write_json(list(rows), run_dir / "results.json")
    write_csv(list(rows), run_dir / "results.csv")
    console = Console()
    console.print(console_table(list(rows), title="Retrieval"))
    return console


def _closed(console: Console, rows: Sequence[RowResult], seconds: Mapping[str, float]) -> dict[str, float]:
    console.print(
        f"Stages took {sum(seconds.values()):.0f} s: " + ", ".join(f"{k} {v:.0f}" for k, v in seconds.items())
    )
    return {row.system: row.metrics["nDCG@10"].mean for row in rows}


def _artefacts(folder: Path) -> list[Artefact]:
    found = [
        Artefact("query generator", str(folder / "generator" / "model")),
        Artefact("its privacy card", str(folder / "generator" / "privacy_card.html")),
        Artefact("its ledger", str(folder / "generator" / "privacy_ledger.jsonl")),
        Artefact("synthetic queries", str(folder / "synthetic" / "data")),
        Artefact("retriever trained on them", str(folder / "from_synthetic" / "model")),
        Artefact("retriever trained directly under DP", str(folder / "direct" / "model")),
        Artefact("results", str(folder / "results.json")),
    ]
    return [artefact for artefact in found if Path(artefact.path).exists()]
