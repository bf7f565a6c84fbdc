"""The page that a run leaves behind: what was reached, at what privacy, on what evidence.

One file without scripts and without anything loaded from elsewhere, for a colleague who has five
minutes and for the archive. The privacy statement and the list of what is not covered come from
the run's privacy card, word for word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.blocks import Banner, Block, Bullets, Code, Grid, Paragraph, Section, esc, to_html
from lit_dpret.cards.text import claim_blocks, not_covered, privacy_line
from lit_dpret.files import write_whole
from lit_dpret.privacy.ledger.chain import today
from lit_dpret.report.chart import bar_chart
from lit_dpret.report.page import Drawing
from lit_dpret.report.table import RowResult, result_table, show
from lit_dpret.retrieval.statistics import Interval

REPORT_NAME = "report.html"
MAX_SAMPLES = 40
MAX_PASSAGE = 500  # characters shown


@dataclass(frozen=True)
class Sample:
    """A passage and synthetic queries that were generated for it."""

    passage: str
    queries: Sequence[str]
    passage_id: str = ""


@dataclass(frozen=True)
class RoundTrip:
    """How often a synthetic query finds its own passage, and how often by luck."""

    recall: Interval  # share of synthetic queries with their own passage among the first ``k``
    # The same with the passages of the queries shuffled: what a query that ignores its passage reaches.
    control: Interval
    k: int  # how many results count
    queries: int  # how many synthetic queries were asked


@dataclass(frozen=True)
class Artefact:
    """A file or folder that the run wrote."""

    label: str
    path: str


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What stands on the page of a run."""

    title: str  # heading of the page
    table: Sequence[RowResult]  # the systems compared
    # The privacy card of the artefact that the page is about; without one the page says that nothing is promised.
    card: Mapping[str, Any] | None = None
    samples: Sequence[Sample] = ()  # synthetic queries beside their passages; at most ``MAX_SAMPLES`` are shown
    round_trip: RoundTrip | None = None  # recall of the own passage, with its control
    artefacts: Sequence[Artefact] = ()  # what the run wrote, and where
    command: str = ""  # what to type to get the same again
    evaluated_on: str = ""  # which queries and passages the numbers were computed on
    notes: Sequence[str] = ()  # further remarks

    def write(self, folder: Path) -> Path:
        """Write ``report.html`` into ``folder``, for its owner alone: rows without privacy may stand in it."""
        sections = [
            *_results(self.table, self.evaluated_on),
            *_round_trip(self.round_trip),
            *_samples(self.samples, self.card),
            *_privacy(self.card),
            *_closing(self.artefacts, self.command, self.notes),
        ]
        page = to_html(self.title, f"lit-dpret report, {today()}", _lead(self.card), sections)
        return write_whole(folder / REPORT_NAME, page, owner_only=True)


def _lead(card: Mapping[str, Any] | None) -> Sequence[Block]:
    if card is None:
        return [Banner("No privacy card: nothing is promised about the data behind these results.", "caution")]
    return claim_blocks(card)


def _results(table: Sequence[RowResult], evaluated_on: str) -> list[Section]:
    if not table:
        return []
    blocks: list[Block] = [result_table(table).grid()]
    where = f"Computed on {evaluated_on}. " if evaluated_on else ""
    blocks.append(
        Paragraph(
            f"{where}Mean over queries with its 95 % confidence interval. The interval covers the choice of queries, "
            "not the luck of one training run.",
            small=True,
        )
    )
    if svg := bar_chart(table):
        blocks.append(Drawing(svg))
    return [Section("Results", blocks)]


def _round_trip(result: RoundTrip | None) -> list[Section]:
    if result is None:
        return []
    rows = [
        ("synthetic queries, own passage", show(result.recall)),
        ("control, passages shuffled", show(result.control)),
    ]
    text = (
        f"How often a synthetic query finds the passage it was generated for among the first {result.k} results, "
        f"over {result.queries:,} queries answered by the zero-shot encoder. In the control each query "
        "is held against another query's passage: what it reaches there is luck."
    )
    grid = Grid(("", f"Recall@{result.k}"), rows, frozenset({1}), narrow=True)
    return [Section("Round trip", [Paragraph(text), grid])]


def _samples(samples: Sequence[Sample], card: Mapping[str, Any] | None) -> list[Section]:
    if not samples:
        return []
    blocks: list[Block] = []
    if card is None or card["claim"]["guarantee"] != "dp":
        blocks.append(Banner("Made without a privacy guarantee: these queries may repeat private ones word for word."))
    blocks.append(SampleTable(samples[:MAX_SAMPLES]))
    if len(samples) > MAX_SAMPLES:
        blocks.append(Paragraph(f"The first {MAX_SAMPLES} of {len(samples)} passages.", small=True))
    return [Section("Synthetic queries beside their passages", blocks)]


def _privacy(card: Mapping[str, Any] | None) -> list[Section]:
    if card is None:
        return []
    return [
        Section(
            "Privacy statement",
            [
                Banner(str(card["claim"]["statement"]), "plain"),
                Paragraph(f"In one line: {privacy_line(card)}", small=True),
            ],
        ),
        Section("What is not covered", [Bullets(not_covered(card))]),
    ]


def _closing(artefacts: Sequence[Artefact], command: str, notes: Sequence[str]) -> list[Section]:
    sections = []
    if notes:
        sections.append(Section("Notes", [Bullets(notes)]))
    if artefacts:
        rows = [(artefact.label, artefact.path) for artefact in artefacts]
        sections.append(Section("Files", [Grid(("What", "Where"), rows)]))
    if command:
        sections.append(Section("How to get this again", [Code(command)]))
    return sections


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_PASSAGE else text[:MAX_PASSAGE].rstrip() + " …"


@dataclass(frozen=True)
class SampleTable:
    """Passages on the left, their synthetic queries on the right; each text kept to its own direction."""

    samples: Sequence[Sample]

    def html(self) -> str:
        rows = ""
        for sample in self.samples:
            name = f'<div class="small">{esc(sample.passage_id)}</div>' if sample.passage_id else ""
            queries = "".join(f'<li><span class="text" dir="auto">{esc(query)}</span></li>' for query in sample.queries)
            rows += (
                f'<tr class="sample"><td>{name}<div class="text" dir="auto">{esc(_shorten(sample.passage))}</div></td>'
                f"<td><ul>{queries}</ul></td></tr>"
            )
        head = "<tr><th>Passage</th><th>Synthetic queries</th></tr>"
        return f'<table class="samples"><thead>{head}</thead><tbody>{rows}</tbody></table>'

    def markdown(self) -> str:
        return Grid(
            ("Passage", "Synthetic queries"), [(s.passage, " / ".join(s.queries)) for s in self.samples]
        ).markdown()
