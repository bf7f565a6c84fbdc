"""What `task=federated_study` leaves behind: a table, a plot, and which of the paper's effects the seeds carry."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.silo_ledger import PASSAGE_LEDGER, QUERY_LEDGER
from lit_dpret.federated.systems import SystemResult
from lit_dpret.report.paper_004 import COLUMNS, WITHOUT_QUERIES
from lit_dpret.retrieval.statistics import seed_interval
from reproduction.federated.catalogue import Contrast, Point, Study, Trend
from reproduction.federated.cells import Cells
from reproduction.federated.study_figure import SHOWN, draw_study
from reproduction.federated.study_page import ClientGain, StudyPage, StudyRow, with_reach, write_study
from reproduction.published import of_study

Found = Mapping[str, Mapping[int, SystemResult]]
"""By the name of a point, then by seed."""
_ALIKE = 1e-9


def tell(
    study: Study,
    points: Sequence[Point],
    found: Found,
    folder: Path,
    *,
    plan: FederationPlan,
    cells: Cells,
    sizes: Mapping[int, Mapping[str, int]],
    plot: bool,
    notes: Sequence[str],
    command: str,
) -> dict[str, float]:
    """Write the report and print it in short; returns sentence R@1 by point."""
    rows = [_row(study, point, found[point.name]) for point in points]
    gains = _gains(points, found, study.trend, sizes) if study.trend is not None else []
    findings = [_finding(one, found) for one in study.contrasts(points)]
    by_line = {point.line: found[point.name] for point in points}
    if study.trend is not None and {study.trend.of, study.trend.over} <= set(by_line):
        findings.append(trend_finding(study.trend, by_line, sizes))
    seconds = sum(row.cpu_seconds for row in rows)
    faults = sorted({fault for by_seed in found.values() for result in by_seed.values() for fault in result.faults})
    page = StudyPage(
        title=study.title,
        axis=study.axis,
        rows=rows,
        says=study.says,
        findings=[finding for finding in findings if finding],
        gains=gains,
        notes=[
            *notes,
            *study.notes,
            f"Processor time of all rows: {seconds:.0f} s; what rows share is counted once.",
            *(f"Left out: {fault}" for fault in faults),
        ],
        command=command,
        promise=_promise(plan, cells),
    )
    picture = draw_study(page, folder / f"{study.name}.png") if plot else None
    written = write_study(page, folder, study.name, picture=picture)
    for row in rows:
        sys.stdout.write(f"{row.line}, {row.label}: sentence R@1 {with_reach(row.interval(SHOWN))}\n")
    for finding in page.findings:
        sys.stdout.write(f"{finding}\n")
    for path in [*written.values(), *([] if picture is None else [picture])]:
        sys.stdout.write(f"written: {path}\n")
    return {point.name: row.interval(SHOWN).mean for point, row in zip(points, rows, strict=True)}


def _row(study: Study, point: Point, by_seed: Mapping[int, SystemResult]) -> StudyRow:
    results = list(by_seed.values())
    sent: dict[str, float] = {}
    for result in results:
        for phases in result.sent.values():
            for phase, count in phases.items():
                sent[phase] = sent.get(phase, 0.0) + count / len(result.sent) / len(results)
    spent = [value for result in results for value in result.epsilon.values() if value is not None]
    return StudyRow(
        line=point.line,
        label=point.label,
        at=point.at,
        per_seed={name: [_over_clients(result, name) for result in results] for name in COLUMNS},
        paper=of_study(study.name, point.line, point.label),
        bytes_per_client=sent,
        epsilon=max(spent, default=None),
        cpu_seconds=sum(result.cpu_seconds for result in results),
    )


def _over_clients(result: SystemResult, measure: str) -> float:
    """The mean over clients of each one's mean over queries."""
    return float(np.mean([np.mean(values[measure]) for values in result.values.values()]))


def _finding(contrast: Contrast, found: Found) -> str:
    more, less = found[contrast.more], found[contrast.less]
    steps = [_over_clients(more[seed], SHOWN) - _over_clients(less[seed], SHOWN) for seed in more]
    words = f"{contrast.more} above {contrast.less}: {_judged(steps, claimed=bool(contrast.claim))}"
    return f"{contrast.claim[:1].upper()}{contrast.claim[1:]}? {words}" if contrast.claim else words


def _judged(steps: Sequence[float], *, claimed: bool, what: str = "sentence R@1") -> str:
    """A difference, and whether the seeds carry it."""
    found = seed_interval(steps)
    told = f"{'+' if found.mean >= 0 else ''}{with_reach(found)} {what}"
    if len(steps) == 1:
        return f"{told}; one seed decides nothing."
    if found.high - found.low < _ALIKE:
        return f"{told}; all seeds are alike, so nothing says how far others would be."
    if found.low > 0:
        return f"{told}; {'it appears here' if claimed else 'the seeds carry it'}."
    if found.high < 0:
        return f"{told}; {'here it is the other way round' if claimed else 'the seeds carry the opposite'}."
    return f"{told}; these seeds do not decide it."


def _gains(
    points: Sequence[Point], found: Found, trend: Trend, sizes: Mapping[int, Mapping[str, int]]
) -> list[ClientGain]:
    """By the rank of a client in size, the largest first; by its name where all seeds have the same order."""
    base = next((point for point in points if point.line == trend.over), None)
    lines = [point for point in points if point is not base and point.system not in WITHOUT_QUERIES]
    if base is None or not lines:
        return []
    orders = {seed: sorted(counts, key=lambda name: (-counts[name], name)) for seed, counts in sizes.items()}
    ranks = list(zip(*orders.values(), strict=True))
    listed: list[ClientGain] = []
    for rank, names in enumerate(ranks):
        gains = {
            point.line: [
                _of_client(found[point.name][seed], name) - _of_client(found[base.name][seed], name)
                for seed, name in zip(orders, names, strict=True)
            ]
            for point in lines
        }
        counts = [sizes[seed][name] for seed, name in zip(orders, names, strict=True)]
        title = names[0] if len(set(names)) == 1 and len(set(orders)) > 1 else f"#{rank + 1}"
        listed.append(ClientGain(client=title, queries=round(float(np.mean(counts)), 1), gains=gains))
    return listed


def trend_finding(
    trend: Trend, by_line: Mapping[str, Mapping[int, SystemResult]], sizes: Mapping[int, Mapping[str, int]]
) -> str:
    """Whether a line gains more over another where a client has fewer queries, and whether the seeds carry it."""
    slopes: list[float] = []
    for seed, counts in sizes.items():
        names = list(counts)
        gains = [_of_client(by_line[trend.of][seed], n) - _of_client(by_line[trend.over][seed], n) for n in names]
        halvings = -np.log2([counts[name] for name in names])
        slopes.append(float(np.polyfit(halvings, gains, 1)[0]) if len(set(counts.values())) > 1 else 0.0)
    words = _judged(slopes, claimed=True, what="gain in sentence R@1 for each halving of a client's queries")
    return f"{trend.claim[:1].upper()}{trend.claim[1:]}? {words}"


def _of_client(result: SystemResult, name: str) -> float:
    return float(np.mean(result.values[name][SHOWN]))


def _promise(plan: FederationPlan, cells: Cells) -> str:
    if plan.privacy.eps is None:
        return "No privacy is promised for any of these models: epsilon is infinite."
    told = (
        f"Each row's epsilon is what one run of it costs, with one seed: the largest of any client (unit "
        f"{plan.privacy.unit}, neighbours {plan.privacy.neighbours}). A row is a mean over seeds, and there are "
        "several rows: whoever sees them has all their runs composed. Clients that train alone release nothing and "
        "promise nothing."
    )
    for unit, ledger in ((plan.privacy.unit, QUERY_LEDGER), ("passage", PASSAGE_LEDGER)):
        if spent := cells.spent(ledger=ledger):
            name = max(spent, key=lambda client: spent[client])
            told += (
                f" All private runs of the studies in this folder together cost a client up to epsilon = "
                f"{math.ceil(spent[name] * 1000) / 1000:.3f} (client {name}, unit {unit}; each run counted once)."
            )
    return told
