"""A study of several settings: a table of our numbers and the paper's, in five forms, and one picture.

The picture shows lines over what varies, bars of clients, or quality against bytes. The paper's numbers are hollow and
grey.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from lit_dpret.cards.blocks import Banner, Block, Bullets, Code, Grid, Paragraph, Section
from lit_dpret.errors import DataError, in_words
from lit_dpret.files import write_whole
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.ledger.chain import today
from lit_dpret.report.chart import gain_chart
from lit_dpret.report.federated_report import COLUMNS
from lit_dpret.report.figures import STYLES, new_figure, save_png, tidy
from lit_dpret.report.page import Page, Picture
from lit_dpret.report.table import Table, ends
from lit_dpret.retrieval.statistics import Interval, seed_interval

SHOWN = "sentence/success@1"
_GREY = "#777777"
_ASIDE = 0.008  # fraction of the axis from one line to the next, so that their intervals are distinguishable
INTERNAL = (
    "Internal: these numbers were computed on each client's own queries. No guarantee covers them: keep them "
    "where the queries are kept."
)
_MEANS = (
    "Means over clients, then over seeds, ± the 95 % t-interval over seeds; the paper's number, where it has one, in "
    "brackets. R@k is the paper's name for a hit at k, here success@k. The paper's data and encoder differ: "
    "compare orders, not levels."
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measure of a point: the mean over clients for each seed, its t-interval, and the paper's number."""

    mean: float
    low: float | None
    high: float | None
    per_seed: Sequence[float]
    paper: float | None = None

    @classmethod
    def of(cls, per_seed: Sequence[float], paper: float | None = None) -> Measured:
        """Return a measure with its interval over seeds; without bounds if there is one seed."""
        return cls(per_seed=per_seed, paper=paper, **ends(seed_interval(per_seed)))  # type: ignore[arg-type]

    @property
    def interval(self) -> Interval:
        return seed_interval(self.per_seed)


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One point of a study, in the form of its file."""

    line: str  # shared with other points
    label: str  # how it differs from them
    at: float | None = None  # its position on the axis of the plot; null if that is a measured one
    measures: Mapping[str, Measured]  # by name
    bytes_per_client: Mapping[str, float] = field(default_factory=dict)  # by phase, the mean over clients and seeds
    epsilon: float | None = None  # the largest of all clients; null if nothing is promised
    cpu_seconds: float = 0.0  # of all seeds

    def interval(self, measure: str) -> Interval:
        """Return mean and t-interval over seeds; without bounds if there is one seed."""
        return self.measures[measure].interval

    @property
    def stage2_bytes(self) -> float:
        """The bytes of a client's requests and answers."""
        return sum(count for phase, count in self.bytes_per_client.items() if phase != "stage 1")


@dataclass(frozen=True, kw_only=True)
class ClientGain:
    """The gain of one client, or of a rank in size, over training alone."""

    client: str
    queries: float
    gains: Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class StudyPage:
    """The contents of a study's report; its file holds all of them except the axis."""

    title: str
    internal: bool = True
    promise: str = ""
    paper_says: str = ""
    findings: Sequence[str] = ()
    notes: Sequence[str] = ()
    command: str = ""
    rows: Sequence[StudyRow]
    gains: Sequence[ClientGain] = ()
    axis: str = ""


def with_reach(interval: Interval) -> str:
    """Format an interval as ``0.412 ±.013``, or only the mean if it has no bounds."""
    if math.isnan(interval.high):
        return f"{interval.mean:.3f}"
    return f"{interval.mean:.3f} ±" + f"{interval.high - interval.mean:.3f}".removeprefix("0")


def write_study(page: StudyPage, folder: Path, name: str, *, picture: Path | None = None) -> dict[str, Path]:
    """Write ``NAME.md``, ``.html``, ``.json`` and ``.csv``; ``picture`` is the plot, in the same folder."""
    facts = asdict(page)
    del facts["axis"]
    return Page(
        name=name, title=page.title, subtitle=today(), lead=[Banner(INTERNAL, "caution"), Paragraph(page.promise)],
        sections=_sections(page, picture), facts=facts, tables={f"{name}.csv": _sheet(page)},
    ).write(folder)  # fmt: skip


def read_study(path: Path) -> StudyPage:
    """Read the page that `write_study` wrote as JSON, without its axis."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        for row in facts["rows"]:
            row["measures"] = {name: Measured(**found) for name, found in row["measures"].items()}
        rows, gains = [StudyRow(**row) for row in facts["rows"]], [ClientGain(**gain) for gain in facts["gains"]]
        return StudyPage(**{**facts, "rows": rows, "gains": gains})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds no study ({in_words(error)}).") from error


def _sections(page: StudyPage, picture: Path | None) -> list[Section]:
    blocks: list[Block] = [Paragraph(_MEANS), study_grid(page)]
    if picture is not None:
        blocks.append(Picture(picture, f"{page.title}; {page.axis}"))
    sections = [Section("Result", blocks)]
    if page.gains:
        sections.append(Section("Each client", [gain_grid(page.gains)]))
    read: list[Block] = [Paragraph(f"The paper: {page.paper_says}")] if page.paper_says else []
    if page.findings:
        read.append(Bullets(list(page.findings)))
    if read:
        sections.append(Section("Against what the paper reports" if page.paper_says else "Differences", read))
    if page.notes:
        sections.append(Section("Notes", [Bullets(list(page.notes))]))
    return [*sections, Section("Again", [Code(page.command)])]


def study_grid(page: StudyPage, only: Sequence[str] | None = None) -> Grid:
    """Return the points as a table, ours with the paper's in brackets, for all measures or for some."""
    wanted = COLUMNS if only is None else only
    measures = [name for name in wanted if all(name in row.measures for row in page.rows)]
    sent = any(row.bytes_per_client for row in page.rows)
    header = ["", "", *(COLUMNS[name] for name in measures)]
    header += ["stage 1, MB / client", "stage 2, MB / client"] if sent else []
    private = any(row.epsilon is not None for row in page.rows)
    header += ["epsilon"] if private else []
    lines: list[list[str]] = []
    before = None
    for row in page.rows:
        cells = ["" if row.line == before else row.line, row.label]
        for name in measures:
            paper = row.measures[name].paper
            theirs = "" if paper is None else f" ({f'{paper:.3f}'.removeprefix('0')})"
            cells.append(with_reach(row.interval(name)) + theirs)
        if sent:
            cells += [_mb(row.bytes_per_client.get("stage 1", 0.0)), _mb(row.stage2_bytes)]
        if private:
            cells.append("none" if row.epsilon is None else show_epsilon(row.epsilon))
        lines.append(cells)
        before = row.line
    return Grid(header, lines, numeric=frozenset(range(2, len(header))))


def gain_grid(gains: Sequence[ClientGain]) -> Grid:
    """Return a table of each client's gains, by its number of train queries."""
    lines = list(gains[0].gains)
    rows = [
        [gain.client, f"{gain.queries:g}", *(_signed(seed_interval(gain.gains[line])) for line in lines)]
        for gain in gains
    ]
    header = ["client", "train queries", *(f"{line}: gain in sentence R@1" for line in lines)]
    return Grid(header, rows, numeric=frozenset(range(1, len(header))))


def _signed(interval: Interval) -> str:
    return ("+" if interval.mean >= 0 else "") + with_reach(interval)


def _mb(count: float) -> str:
    return f"{count / 1e6:.3g}" if count else "0"


def _sheet(page: StudyPage) -> Table:
    names = list(dict.fromkeys(name for row in page.rows for name in row.measures))
    header = ["line", "label", "at", *(f"{name}{end}" for name in names for end in ("", " paper"))]
    header += ["stage 1 bytes per client", "stage 2 bytes per client", "epsilon"]
    rows = [
        [row.line, row.label, row.at,
         *(cell for name in names for cell in (row.interval(name), row.measures[name].paper)),
         row.bytes_per_client.get("stage 1", 0.0), row.stage2_bytes, row.epsilon]
        for row in page.rows
    ]  # fmt: skip
    return Table(header, rows, measured=frozenset(range(3, 3 + 2 * len(names), 2)))


# -- the picture --------------------------------------------------------------------------------


def draw_study(page: StudyPage, path: Path) -> Path:
    """Write a picture of gains (Figure 4) as SVG, or of quality against bytes or what varies (Figure 5) as PNG."""
    if not page.gains:
        return save_png(figure_of(page), path.with_suffix(".png"), owner_only=True)
    panels = {
        f"{line}: gain in sentence R@1 over training alone": {
            f"{one.client} ({one.queries:g} train queries)": seed_interval(one.gains[line]) for one in page.gains
        }
        for line in page.gains[0].gains
    }
    return write_whole(path.with_suffix(".svg"), gain_chart(panels), owner_only=True)


def figure_of(page: StudyPage) -> Any:
    """Draw the picture as a matplotlib figure: lines over what varies, or points over bytes."""
    by_bytes = all(row.at is None for row in page.rows)

    def place_of(row: StudyRow) -> float | None:
        return row.stage2_bytes / 1e6 or None if by_bytes else row.at

    figure = new_figure(8.5, 6.0)
    axis = figure.subplots()
    places = sorted({place for row in page.rows if (place := place_of(row)) is not None})
    wide = len(places) > 1 and places[0] > 0 and places[-1] / places[0] >= 8
    if wide:
        axis.set_xscale("log")
    lines = [[row for row in page.rows if row.line == line] for line in dict.fromkeys(row.line for row in page.rows)]
    for number, ((colour, dashes, marker), rows) in enumerate(zip(cycle(STYLES), lines, strict=False)):
        name = rows[0].line if not by_bytes or len(rows) > 1 else f"{rows[0].line}: {rows[0].label}"
        if all(place_of(row) is None for row in rows):
            level = rows[0].interval(SHOWN).mean
            axis.axhline(level, color=_GREY, linestyle=dashes, linewidth=1.0, label=name)
            continue
        aside = 0.0 if by_bytes else _ASIDE * number  # makes intervals of different lines distinguishable
        at = [_moved(place_of(row) or 0.0, aside, places, logarithmic=wide) for row in rows]
        found = [row.interval(SHOWN) for row in rows]
        reach = [0.0 if math.isnan(one.high) else one.high - one.mean for one in found]
        axis.errorbar(
            at, [one.mean for one in found], yerr=reach, color=colour, linestyle="none" if by_bytes else dashes,
            marker=marker, capsize=3, label=name,
        )  # fmt: skip
        papers = [row.measures[SHOWN].paper for row in rows]
        theirs = [(x, paper) for x, paper in zip(at, papers, strict=True) if paper is not None]
        if theirs and not by_bytes:
            axis.plot(
                *zip(*theirs, strict=True), color=_GREY, linestyle=dashes, marker=marker, markerfacecolor="none",
                label=f"{name}, the paper's", linewidth=1.0,
            )  # fmt: skip
        for x, row, one in zip(at, rows, found, strict=True) if by_bytes and len(rows) > 1 else ():
            axis.annotate(
                row.label, (x, one.mean), xytext=(6, -13 if number % 2 else 6), textcoords="offset points", fontsize=8,
                color=colour,
            )  # fmt: skip
    if not by_bytes:
        axis.set_xticks(places, [f"{place:g}" for place in places])
        axis.minorticks_off()
    axis.set(title=page.title, xlabel=f"MB of {page.axis}" if by_bytes else page.axis, ylabel="sentence R@1")
    low, high = axis.get_ylim()  # clip to the range of shares: with few seeds, intervals reach beyond it
    axis.set_ylim(max(low, -0.01), min(high, 1.01))
    axis.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    tidy(axis, grid="y")
    return figure


def _moved(at: float, aside: float, places: Sequence[float], *, logarithmic: bool) -> float:
    low, high = places[0], places[-1]
    return at * (high / low) ** aside if logarithmic else at + aside * (high - low)
