"""The final page of a run, one file without scripts: results, their privacy, and the evidence.

The privacy statement and the list of what is not covered are copied word for word from the run's privacy card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.blocks import Banner, Bullets, Code, Grid, Paragraph, Section, esc, to_html
from lit_dpret.cards.text import claim_blocks, not_covered, privacy_line
from lit_dpret.files import write_whole
from lit_dpret.privacy.ledger.chain import today
from lit_dpret.report.chart import bar_chart
from lit_dpret.report.page import Drawing, shortened
from lit_dpret.report.table import RowResult, result_table, show
from lit_dpret.retrieval.statistics import Interval

REPORT_NAME = "report.html"
MAX_PASSAGE = 500  # characters shown


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The content of a run's page."""

    title: str
    table: Sequence[RowResult]
    card: Mapping[str, Any]  # card of the artefact that the page describes
    samples: Sequence[tuple[str, str, str]]  # id and text of a passage, and a synthetic query for it
    round_trip: Mapping[str, Any]  # from `check_round_trip`: recall of the own passage, with its control
    files: Mapping[str, Path]  # each file or folder that the run wrote, by what it is
    command: str  # the command that reproduces the page
    evaluated_on: str  # the queries and passages that the numbers were computed on
    notes: Sequence[str]  # further remarks

    def write(self, folder: Path) -> Path:
        """Write ``report.html`` into ``folder``, readable only by its owner: it may have rows without privacy."""
        sections = [
            _results(self.table, self.evaluated_on),
            _round_trip(self.round_trip),
            *_samples(self.samples, self.card),
            Section(
                "Privacy statement",
                [
                    Banner(str(self.card["claim"]["statement"]), "plain"),
                    Paragraph(f"In one line: {privacy_line(self.card)}", small=True),
                ],
            ),
            Section("What is not covered", [Bullets(not_covered(self.card))]),
            Section("Notes", [Bullets(self.notes)]),
            Section("Files", [Grid(("What", "Where"), [(what, str(path)) for what, path in self.files.items()])]),
            Section("How to reproduce this", [Code(self.command)]),
        ]
        page = to_html(self.title, f"lit-dpret report, {today()}", claim_blocks(self.card), sections)
        return write_whole(folder / REPORT_NAME, page, owner_only=True)


def _results(table: Sequence[RowResult], evaluated_on: str) -> Section:
    said = Paragraph(
        f"Computed on {evaluated_on}. Mean over queries with its 95 % confidence interval. The interval covers the "
        "choice of queries, not the luck of one training run.",
        small=True,
    )
    return Section("Results", [result_table(table).grid(), said, Drawing(bar_chart(table))])


def _round_trip(result: Mapping[str, Any]) -> Section:
    k = result["k"]
    rows = [
        ("synthetic queries, own passage", show(Interval(*result["recall"]))),
        ("control, passages shuffled", show(Interval(*result["control"]))),
    ]
    text = (
        f"How often a synthetic query finds the passage it was generated for among the first {k} results, over "
        f"{result['queries']:,} queries answered by the zero-shot encoder. In the control each query is compared with "
        "another query's passage: what it reaches there is chance."
    )
    return Section("Round trip", [Paragraph(text), Grid(("", f"Recall@{k}"), rows, frozenset({1}), narrow=True)])


def _samples(samples: Sequence[tuple[str, str, str]], card: Mapping[str, Any]) -> list[Section]:
    if not samples:  # task.samples=0
        return []
    bare = "Made without a privacy guarantee: these queries may repeat private ones word for word."
    warning = [] if card["claim"]["guarantee"] == "dp" else [Banner(bare)]
    return [Section("Synthetic queries with their passages", [*warning, SampleTable(samples)])]


@dataclass(frozen=True)
class SampleTable:
    """Passages on the left, their synthetic queries on the right; each text keeps its own direction."""

    samples: Sequence[tuple[str, str, str]]

    def html(self) -> str:
        rows = "".join(
            f'<tr class="sample"><td><div class="small">{esc(name)}</div>'
            f'<div class="text" dir="auto">{esc(shortened(passage, MAX_PASSAGE))}</div></td>'
            f'<td><span class="text" dir="auto">{esc(query)}</span></td></tr>'
            for name, passage, query in self.samples
        )
        head = "<tr><th>Passage</th><th>Synthetic query</th></tr>"
        return f'<table class="samples"><thead>{head}</thead><tbody>{rows}</tbody></table>'

    def markdown(self) -> str:
        return Grid(("Passage", "Synthetic query"), [sample[1:] for sample in self.samples]).markdown()
