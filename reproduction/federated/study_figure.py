"""A study as one picture: lines over what varies, bars of clients, or quality against bytes.

Drawn with matplotlib, which is an extra (``pip install "lit-dpret[plot]"``). Lines are told apart by markers and
dashes as well as by the colours of Okabe and Ito (2008); the paper's numbers are hollow and grey.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lit_dpret.report.figures import new_figure, save_png, tidy
from lit_dpret.retrieval.statistics import Interval, seed_interval
from reproduction.federated.study_page import StudyPage, StudyRow

SHOWN = "sentence/success@1"
_STYLES = (
    ("#0072B2", "-", "o"), ("#D55E00", "--", "s"), ("#009E73", "-.", "^"), ("#CC79A7", ":", "D"),
    ("#000000", (0, (5, 1)), "v"), ("#E69F00", (0, (1, 1)), "P"),
)  # fmt: skip
_GREY = "#777777"
_ASIDE = 0.008  # of the axis, from one line to the next, so that their intervals can be told apart


def draw_study(page: StudyPage, path: Path) -> Path:
    """Write the picture of a study as a PNG.

    Raises:
        StorageError: The file cannot be written.
    """
    return save_png(figure_of(page), path, owner_only=True)


def figure_of(page: StudyPage) -> Any:
    """The picture as a figure of matplotlib."""
    figure = new_figure(8.5, 6.0)
    axis = figure.subplots()
    axis.set_title(page.title)
    if page.gains:
        _clients(axis, page)
    elif all(row.at is None for row in page.rows):
        _bytes(axis, page)
    else:
        _lines(axis, page)
    tidy(axis, grid="y")
    return figure


def _lines(axis: Any, page: StudyPage) -> None:
    places = sorted({row.at for row in page.rows if row.at is not None})
    if len(places) > 1 and places[0] > 0 and places[-1] / places[0] >= 8:
        axis.set_xscale("log")
    for number, (style, (line, rows)) in enumerate(zip(_cycled(), _by_line(page).items(), strict=False)):
        colour, dashes, marker = style
        if all(row.at is None for row in rows):
            axis.axhline(rows[0].interval(SHOWN).mean, color=_GREY, linestyle=dashes, linewidth=1.0, label=line)
            continue
        at = {id(row): _aside(row.at or 0.0, number, places, logarithmic=axis.get_xscale() == "log") for row in rows}
        found = [row.interval(SHOWN) for row in rows]
        axis.errorbar(
            list(at.values()), [one.mean for one in found], yerr=[_reach(one) for one in found],
            color=colour, linestyle=dashes, marker=marker, capsize=3, label=line,
        )  # fmt: skip
        theirs = [(at[id(row)], row.paper[SHOWN]) for row in rows if SHOWN in row.paper]
        if theirs:
            axis.plot(
                *zip(*theirs, strict=True), color=_GREY, linestyle=dashes, marker=marker, markerfacecolor="none",
                label=f"{line}, the paper's", linewidth=1.0,
            )  # fmt: skip
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.minorticks_off()
    axis.set(xlabel=page.axis, ylabel="sentence R@1")
    _share_of_queries(axis)


def _aside(at: float, number: int, places: list[float], *, logarithmic: bool) -> float:
    """A place on the axis, moved to the right for each line before this one."""
    low, high = places[0], places[-1]
    return at * (high / low) ** (_ASIDE * number) if logarithmic else at + _ASIDE * number * (high - low)


def _clients(axis: Any, page: StudyPage) -> None:
    lines = list(page.gains[0].gains)
    width = 0.8 / len(lines)
    for number, ((colour, _, _), line) in enumerate(zip(_cycled(), lines, strict=False)):
        found = [seed_interval(gain.gains[line]) for gain in page.gains]
        places = [place + (number - (len(lines) - 1) / 2) * width for place in range(len(found))]
        axis.bar(
            places, [one.mean for one in found], width=width, yerr=[_reach(one) for one in found], capsize=2,
            color=colour, alpha=0.85, hatch="//" if number else None, edgecolor="white", label=line,
            error_kw={"linewidth": 0.9},
        )  # fmt: skip
    axis.axhline(0.0, color="black", linewidth=0.8)
    names = [f"{gain.client}\n{gain.queries:g}" for gain in page.gains]
    axis.set_xticks(range(len(names)), names, fontsize=8)
    if any(len(gain.client) > 6 for gain in page.gains):
        axis.tick_params("x", rotation=45)
    axis.set(
        xlabel=f"client, and its {page.axis.removesuffix(' of the client')}",
        ylabel="gain in sentence R@1 over training alone",
    )
    axis.legend(frameon=False, fontsize=9)


def _bytes(axis: Any, page: StudyPage) -> None:
    sent = [row.stage2_bytes for row in page.rows if row.stage2_bytes > 0]
    lines = zip(_cycled(), _by_line(page).items(), strict=False)
    for number, ((colour, dashes, marker), (line, rows)) in enumerate(lines):
        if all(row.stage2_bytes == 0 for row in rows):
            axis.axhline(
                rows[0].interval(SHOWN).mean,
                color=_GREY,
                linestyle=dashes,
                linewidth=1.0,
                label=f"{line}: {rows[0].label}",
            )
            continue
        found = [row.interval(SHOWN) for row in rows]
        axis.errorbar(
            [row.stage2_bytes / 1e6 for row in rows], [one.mean for one in found], yerr=[_reach(one) for one in found],
            color=colour, linestyle="none", marker=marker, capsize=3,
            label=line if len(rows) > 1 else f"{line}: {rows[0].label}",
        )  # fmt: skip
        below = -13 if number % 2 else 6
        for row, one in zip(rows if len(rows) > 1 else [], found, strict=False):
            axis.annotate(
                row.label, (row.stage2_bytes / 1e6, one.mean), xytext=(6, below), textcoords="offset points",
                fontsize=8, color=colour,
            )  # fmt: skip
    if sent and max(sent) / min(sent) >= 8:
        axis.set_xscale("log")
    axis.set(xlabel=f"MB of {page.axis}", ylabel="sentence R@1")
    _share_of_queries(axis)


def _share_of_queries(axis: Any) -> None:
    """An axis of shares ends where shares do; few seeds have intervals that reach further."""
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, -0.01), min(high, 1.01))
    axis.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)


def _by_line(page: StudyPage) -> dict[str, list[StudyRow]]:
    found: dict[str, list[StudyRow]] = {}
    for row in page.rows:
        found.setdefault(row.line, []).append(row)
    return found


def _reach(interval: Interval) -> float:
    return 0.0 if math.isnan(interval.high) else interval.high - interval.mean


def _cycled() -> list[Any]:
    return [*_STYLES, *_STYLES]
