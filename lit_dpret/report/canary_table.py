"""The canary study as a page, a table and data: like table 7 of paper 000, with intervals and ceilings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.audit.statistics.evidence import group_delta
from lit_dpret.cards.blocks import Banner, Bullets, Code, Grid, Paragraph, Section
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.report.page import Page
from lit_dpret.report.table import Measured, Table

SCHEMA = "lit-dpret/canaries-report/1"
POOLED = "three kinds"
SHORT = {"query": "the query", "passage": "the passage", "both": "both"}
FORMS = {
    "query": "Secret in the query",
    "passage": "Secret in the passage, the papers' letter",
    "both": "Secret in query and passage",
}
_HOW = (
    "Rank: of the planted secret among {candidates} candidates by perplexity, 1 the likeliest, ties counted against "
    "the finding; with the t-interval over trainings, and none if all trainings agree. A secret that was not planted "
    "has {chance} on average. Rank 1 and leaked: shares with Clopper and Pearson's interval, counted by training, as "
    "if the canaries of one training rose and fell together. Leaked: the secret occurs in one of {draws} queries drawn "
    "for its passage without it. In brackets: 95 %. Bits: mean exposure."
)
_HOW_PAIRS = (
    "Rank: of the planted secret among {candidates} candidates, 1 the nearest, by how surely the encoder tells the "
    "pair's own passage from those of the other canaries; ties counted against the finding; with the t-interval over "
    "trainings, and none if all trainings agree. A secret that was not planted has {chance} on average. Rank 1: the "
    "share with Clopper and Pearson's interval, counted by training. In brackets: 95 %. Bits: mean exposure."
)
_DRAWN = "Queries are drawn with top_p = {top_p:g} and temperature {temperature:g}, at most {max_new_tokens} tokens."
_BOUND = (
    "Bound: evidence of leakage of at least this much, as epsilon for one unit at 95 %; absence of evidence is no "
    "guarantee. If canaries share a training, the bound is for pure DP (delta = 0). Point values, which have no "
    "confidence, are in the JSON alone."
)
_CEILING = (
    "At least and at most: what the accounting allows, which is not a measurement. A secret with k copies is k units, "
    "so its ceiling is that of k units together, by the mixture of Gaussians. 100 % means that the claim does not "
    "protect that many copies."
)


@dataclass(frozen=True)
class CanaryRow:
    """A cell of the study under one budget."""

    model: str
    cell: Any
    candidates: int

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        limits, copies, group = self.cell.limits, self.cell.copies, None
        if limits.eps is not None:
            group = {"eps": copies * limits.eps, "delta": group_delta(limits.eps, limits.delta, copies)}
        return {"model": self.model, "candidates": self.candidates, **self.cell.to_dict(), "group_privacy": group}


def write_canary_table(
    folder: Path, rows: Sequence[CanaryRow], *, name: str, title: str, facts: Mapping[str, Any],
    notes: Sequence[str] = (), command: str = "",
) -> tuple[dict[str, Path], list[str]]:  # fmt: skip
    """Write ``NAME.{html,md,json,csv}``; return their paths by file name, and contradictions of the claim."""
    contradictions = [f"{row.model}, {_about(row.cell)}: {text}" for row in rows for text in row.cell.contradictions]
    data = {"schema": SCHEMA, "command": command, **facts, "contradictions": contradictions}
    # Readable only by the owner: the table also has models without privacy.
    page = Page(
        name=name, title=title, lead=[Banner(text) for text in contradictions],
        sections=[*_in_short(rows), *_in_full(rows), *_words(rows, facts, notes, command)],
        facts=data | {"rows": [row.to_dict() for row in rows]}, tables={f"{name}.csv": _sheet(rows)},
    )  # fmt: skip
    return page.write(folder), contradictions


def _in_short(rows: Sequence[CanaryRow]) -> list[Section]:
    # The papers' table: their kinds together, one line per model and form.
    pooled = {(row.cell.side, row.model, row.cell.copies): row.cell for row in rows if row.cell.kind == POOLED}
    copies = sorted({k for _, _, k in pooled})
    lines = []
    for side, model in sorted(dict.fromkeys(key[:2] for key in pooled), key=lambda key: list(SHORT).index(key[0])):
        line: list[object] = [f"{model}, secret in {SHORT[side]}"]
        for cell in (pooled.get((side, model, k)) for k in copies):
            line += [_interval(cell.mean_rank, "{:.0f}"), _interval(cell.leaked, "{:.0%}")] if cell else ["", ""]
        lines.append(line)
    head = ["model", *(f"{what}, {k}" for k in copies for what in ("rank", "leaked"))]
    grid = Grid(head, lines, frozenset(range(1, len(head))))
    return [Section("In short: the three kinds together, by copies", [grid])] if pooled else []


def _in_full(rows: Sequence[CanaryRow]) -> list[Section]:
    sections = []
    for side, model in dict.fromkeys((row.cell.side, row.model) for row in rows):
        found = [row for row in rows if (row.cell.side, row.model) == (side, model)]
        head = ["copies", "canaries", "n", "rank", "rank 1", "leaked", "bits", "bound"]
        if found[0].cell.limits.eps is not None:
            head += ["rank at least", "rank 1 at most", "leaked at most"]
        lines = [_line(row) for row in found]
        sections.append(Section(f"{FORMS[side]}: {model}", [Grid(head, lines, frozenset({0, *range(2, len(head))}))]))
    return sections


def _line(row: CanaryRow) -> tuple[object, ...]:
    cell, limits = row.cell, row.cell.limits
    measured = (
        cell.copies, cell.kind, f"{cell.canaries} in {cell.trainings}", _interval(cell.mean_rank, "{:.1f}"),
        _interval(cell.top, "{:.0%}"), _interval(cell.leaked, "{:.0%}"), f"{cell.exposure:.2f}",
        f"{cell.bounds[0].eps_lower:.2g}",
    )  # fmt: skip
    if limits.eps is None:
        return measured
    leak = f"{limits.leak:.1%}" if _has_digits(cell) and cell.draws else "none"
    return (*measured, f"{limits.mean_rank:.1f}", f"{limits.top:.0%}", leak)


def _words(rows: Sequence[CanaryRow], facts: Mapping[str, Any], notes: Sequence[str], command: str) -> list[Section]:
    measure, of = facts["measure"], {"candidates": facts["candidates"], "chance": (facts["candidates"] + 1) / 2}
    how, drawn = _HOW_PAIRS.format(**of), "The model is a dual encoder, which writes no text: nothing was drawn."
    if any(row.cell.draws for row in rows):
        how, drawn = _HOW.format(**of, draws=measure["draws"]), _DRAWN.format(**measure)
    return [
        Section("How to read this", [Paragraph(how), Paragraph(_BOUND), Paragraph(_CEILING)]),
        Section("What was done", [Bullets([*notes, drawn, *_claims(rows)])]),
        *([Section("How to reproduce this", [Code(command)])] if command else []),
    ]


def _claims(rows: Sequence[CanaryRow]) -> list[str]:
    found: dict[str, str] = {}
    for row in rows:
        limits = row.cell.limits
        if limits.eps is None:
            continue
        text = (
            f"{row.model}: the claim of a training is epsilon = {show_epsilon(limits.eps)} at delta = "
            f"{show_delta(limits.delta)} for one unit"
        )
        if row.cell.copies > 1:
            delta = group_delta(limits.eps, limits.delta, row.cell.copies)
            known = limits.group_eps is not None
            together = f"epsilon = {show_epsilon(limits.group_eps)}" if known else "no epsilon that bounds anything"
            text += (
                f"; for {row.cell.copies} together the mixture gives {together}, and group privacy "
                f"({show_epsilon(row.cell.copies * limits.eps)}, {show_delta(delta)})"
            )
        found[f"{row.model} {row.cell.copies}"] = f"{text}."
    return list(found.values())


def _has_digits(cell: Any) -> bool:
    """Return whether the ceiling of leaks, which assumes ten digits, applies to the cell's secrets."""
    return cell.kind not in ("echo", "new_token")


def _interval(found: Measured, form: str) -> str:
    if math.isnan(found.mean):
        return "none drawn"
    if math.isnan(found.low):
        return form.format(found.mean)
    return f"{form.format(found.mean)} [{form.format(found.low)}, {form.format(found.high)}]"


def _about(cell: Any) -> str:
    return f"{FORMS[cell.side].lower()}, {cell.kind}, {cell.copies} copies"


def _sheet(rows: Sequence[CanaryRow]) -> Table:
    known = ("side", "kind", "copies", "trainings", "canaries", "draws")
    measured = ("mean_rank", "top", "leaked")
    head = ["model", *known, *measured, "exposure", "chance", "eps_lower", "method"]
    head += ["ceiling top", "ceiling mean_rank", "ceiling leaked"]
    lines = []
    for row in rows:
        cell = row.cell
        limits: list[object] = [None, None, None]
        if cell.limits.eps is not None:
            leak = cell.limits.leak if _has_digits(cell) and cell.draws else None
            limits = [cell.limits.top, cell.limits.mean_rank, leak]
        told = [getattr(cell, name) for name in (*known, *measured)]
        bound = cell.bounds[0]
        lines.append([row.model, *told, cell.exposure, cell.chance, bound.eps_lower, bound.method, *limits])
    return Table(head, lines, measured=frozenset(range(7, 10)))
