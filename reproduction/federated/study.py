"""`task=federated_study`: one of the analyses of paper 004, as a table and a plot.

    python train.py experiment=pdd_as2 task=federated_study task.study=hubness

Work that studies share, above all stage 1, is done once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np

from lit_dpret.datamodules.silo_folder import read_silo
from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.aggregation import check_silos
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.silo_ledger import PASSAGE_LEDGER, QUERY_LEDGER
from lit_dpret.federated.systems import SystemResult, check_seeds_and_split, check_stage2
from lit_dpret.files import json_sha256
from lit_dpret.report.federated_report import COLUMNS, WITHOUT_QUERIES
from lit_dpret.report.figures import can_draw
from lit_dpret.report.table import verdict
from lit_dpret.retrieval.statistics import seed_interval
from lit_dpret.settings import picked
from lit_dpret.tasks.parts import Parts, say, some_of
from reproduction.federated.catalogue import Asked, Contrast, Point, Study, Trend, study_of
from reproduction.federated.cells import Cells, check_divisible, kept_shares, sizes
from reproduction.federated.study_page import (
    SHOWN,
    ClientGain,
    Measured,
    StudyPage,
    StudyRow,
    draw_study,
    with_reach,
    write_study,
)
from reproduction.published import of_study
from reproduction.study import Study as Task

PRIVATE = "private"
_SKEW, _EQUAL = 8.0, 2.0
# By the name of a point, then by seed.
Found = Mapping[str, Mapping[int, SystemResult]]


@dataclass(kw_only=True)
class FederatedStudy(Task):
    """Run the cells of a study that are not done yet, and report its findings."""

    takes_federation: ClassVar[bool] = True

    study: str | None = None
    seeds: Sequence[int] = (0, 1, 2)
    systems: Sequence[str] | None = None
    values: Sequence[float] | None = None
    skew: float | None = None
    split: str = "test"
    plot: bool | None = None
    note: str = ""
    min_free_mb: float = 1000

    def __post_init__(self) -> None:
        self._study = study_of(self.study)
        check_seeds_and_split(self.seeds, self.split)
        if self.plot and not can_draw():
            raise ConfigurationError(
                'task.plot=true draws with matplotlib, which is not installed. Run: pip install "lit-dpret[plot]", or '
                "set task.plot=null to go without."
            )
        self._draws = can_draw() if self.plot is None else self.plot
        chosen: Sequence[Any] = self._study.default if self.systems is None else self.systems
        self._systems = some_of("task.systems", chosen, self._study.systems)
        self._values = self._varied()
        if self.skew is not None and (self._study.name != "gain" or not 1 <= self.skew < float("inf")):
            raise ConfigurationError(
                f"task.skew={self.skew} must be finite and at least 1, and is for task.study=gain only."
            )

    def _varied(self) -> list[float]:
        values, study = self.values, self._study
        if values is None:
            return list(study.values)
        kind, least, most = {
            "data_ratio": ("shares above 0, at most 1", 0.0, 1.0),
            "hubness": ("integers of at least 10", 10.0, float("inf")),
        }.get(study.name, ("integers above 0", 0.0, float("inf")))
        whole = study.name != "data_ratio"
        wrong = [v for v in values if not (least <= v <= most and v > 0) or (whole and v != int(v))]
        if not study.values or wrong or not values or len(set(values)) < len(values):
            can = f"must be some different {kind}" if study.values else "must be null: this study varies no such value"
            raise ConfigurationError(f"task.values={list(values)} {can} (task.study={study.name}).")
        return sorted(values)

    def run(self, parts: Parts) -> dict[str, float]:
        """Run every cell that is not done yet; return sentence R@1 by point, the mean over silos and seeds."""
        plan: FederationPlan = parts.federation()
        if plan.transport != "inprocess":
            raise ConfigurationError(
                f"federated.transport={plan.transport}: a study compares settings, not transports. Set "
                "federated=inprocess."
            )
        if plan.state is not None or plan.settings(0).generated:
            raise ConfigurationError(
                "task=federated_study derives smaller or other silos from the given ones, but a generator was charged "
                "for a whole silo. Use federated.state and synthetic queries only with task=federated."
            )
        plan.model.check()
        root = parts.run_dir / "studies"
        base = plan.folders(root / PRIVATE / "data" / _source(plan))
        points = self._points(plan, base)
        out = root / self._study.name
        self.begin(replace(parts, run_dir=out), fingerprint=_source(plan, settings=True, split=self.split))
        cells = Cells(plan, base, root / PRIVATE, split=self.split)
        todo = [(seed, point) for seed in self.seeds for point in points]
        todo.sort(key=lambda one: not cells.is_done(one[1], one[0]))
        found: dict[str, dict[int, SystemResult]] = {point.name: {} for point in points}

        def work(one: tuple[int, Point]) -> str:
            seed, point = one
            L.seed_everything(seed, verbose=False)
            found[point.name][seed] = cells.result(point, seed)
            return ""

        self.in_turn(
            todo, lambda one: f"{one[1].name}, seed {one[0]}", work,
            label=f"study {self._study.name}, points and seeds", is_done=lambda one: cells.is_done(one[1], one[0]),
        )  # fmt: skip
        return self._tell(points, found, out, cells, notes=self._notes(points, base), command=parts.command_again())

    def _tell(
        self, points: Sequence[Point], found: Found, folder: Path, cells: Cells, *, notes: Sequence[str], command: str
    ) -> dict[str, float]:
        study, plan = self._study, cells.plan
        counts = {seed: sizes(cells.silos(points[0], seed)) for seed in self.seeds} if study.trend else {}
        rows = [_row(study, point, found[point.name]) for point in points]
        findings = [_finding(one, found) for one in study.contrasts(points)]
        by_line = {point.line: found[point.name] for point in points}
        if study.trend is not None and {study.trend.of, study.trend.over} <= set(by_line):
            findings.append(trend_finding(study.trend, by_line, counts))
        faults = sorted({fault for by_seed in found.values() for result in by_seed.values() for fault in result.faults})
        seconds = f"{sum(row.cpu_seconds for row in rows):.0f} s"
        told = [*filter(None, [plan.note]), *notes, *study.notes]
        told.append(f"Processor time of all rows: {seconds}; what rows share is counted once.")
        page = StudyPage(
            title=study.title, axis=study.axis, rows=rows, paper_says=study.says, findings=findings, command=command,
            gains=_gains(points, found, study.trend, counts) if study.trend is not None else [],
            notes=[*told, *(f"Left out: {fault}" for fault in faults)], promise=_promise(plan, cells),
        )  # fmt: skip
        picture = draw_study(page, folder / study.name) if self._draws else None
        written = write_study(page, folder, study.name, picture=picture)
        lines = [f"{row.line}, {row.label}: sentence R@1 {with_reach(row.interval(SHOWN))}" for row in rows]
        lines += page.findings
        lines += [f"written: {path}" for path in [*written.values(), *([] if picture is None else [picture])]]
        say(*lines)
        return {point.name: row.interval(SHOWN).mean for point, row in zip(points, rows, strict=True)}

    def _points(self, plan: FederationPlan, base: Mapping[str, Path]) -> list[Point]:
        values = [self._skew(base)] if self._study.name == "gain" else self._values
        asked = Asked(run=plan.settings(0), clients=len(base), systems=self._systems, values=values)
        points = self._study.points(asked)
        for point in points:
            settings = point.settings(plan.settings(0))
            check_stage2(point.system, settings)
            check_silos(settings, point.silos.parts * len(base))
        if any(point.silos.parts > 1 or point.silos.share < 1 or point.silos.skew > 1 for point in points):
            for name, folder in base.items():
                counts = read_silo(folder, verify=False).counts()
                for parts in {point.silos.parts for point in points} - {1}:
                    check_divisible(name, counts, parts)
        self._check_batches(plan, points, base)
        return points

    def _check_batches(self, plan: FederationPlan, points: Sequence[Point], base: Mapping[str, Path]) -> None:
        """Refuse a budget that a smaller silo could not meet, since its batch would exceed its queries."""
        run = plan.settings(0)
        if run.privacy.eps is None:
            return
        batch, have = max(run.stage1.batch_size, run.stage2.batch_size), sizes(base)
        for seed, point in ((seed, point) for seed in self.seeds for point in points):
            for name, share in kept_shares(base, point.silos, seed=seed).items():
                left = int(have[name] * share / point.silos.parts)
                if left < batch:
                    raise ConfigurationError(
                        f"task.study={self._study.name}: client {name!r} would have about {left} train queries at "
                        f"{point.name}, fewer than a batch of {batch}. Lower the batch_size of federated.stage1 and "
                        "federated.stage2, or take other values."
                    )

    def _skew(self, base: Mapping[str, Path]) -> float:
        counts = sizes(base).values()
        return self.skew or (_SKEW if max(counts) < _EQUAL * min(counts) else 1.0)

    def _notes(self, points: Sequence[Point], base: Mapping[str, Path]) -> list[str]:
        counts = sorted(set(sizes(base).values()))
        span = " to ".join(map(str, counts[:1] + counts[1:][-1:]))
        found = [self.note] if self.note else []
        found.append(
            f"{len(base)} silos with {span} train queries, judged on their {self.split} queries; seeds "
            f"{', '.join(map(str, self.seeds))}."
        )
        if self._study.name == "gain" and points[0].silos.skew > 1:
            found.append(
                f"The clients' sizes are set: the smallest keeps 1/{points[0].silos.skew:g} of its train queries, and "
                "each seed draws the order of the clients again, so a rank is not a domain."
            )
        return found


def _row(study: Study, point: Point, by_seed: Mapping[int, SystemResult]) -> StudyRow:
    results, paper = list(by_seed.values()), of_study(study.name, point.line, point.label)
    sent: dict[str, float] = {}
    for result in results:
        for phase, count in (each for phases in result.sent.values() for each in phases.items()):
            sent[phase] = sent.get(phase, 0.0) + count / len(result.sent) / len(results)
    spent = [value for result in results for value in result.epsilon.values() if value is not None]
    measured = {name: [_over_clients(result, name) for result in results] for name in COLUMNS}
    return StudyRow(
        **picked(point, "line", "label", "at"), bytes_per_client=sent, epsilon=max(spent, default=None),
        measures={name: Measured.of(values, paper.get(name)) for name, values in measured.items()},
        cpu_seconds=round(sum(result.cpu_seconds for result in results), 1),
    )  # fmt: skip


def _over_clients(result: SystemResult, measure: str) -> float:
    return float(np.mean([np.mean(values[measure]) for values in result.values.values()]))


def _finding(contrast: Contrast, found: Found) -> str:
    more, less = found[contrast.more], found[contrast.less]
    steps = [_over_clients(more[seed], SHOWN) - _over_clients(less[seed], SHOWN) for seed in more]
    words = f"{contrast.more} above {contrast.less}: {_judged(steps)}"
    return f"{contrast.claim[:1].upper()}{contrast.claim[1:]}? {words}" if contrast.claim else words


def _judged(steps: Sequence[float], what: str = "sentence R@1") -> str:
    found = seed_interval(steps)
    return f"{'+' if found.mean >= 0 else ''}{with_reach(found)} {what}; {verdict(found)}."


def _gains(
    points: Sequence[Point], found: Found, trend: Trend, sizes: Mapping[int, Mapping[str, int]]
) -> list[ClientGain]:
    """Return gains by a client's rank in size, the largest first; by its name if all seeds have the same order."""
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
    """State whether one line gains more over another at clients with fewer queries, and whether seeds support it."""
    slopes: list[float] = []
    for seed, counts in sizes.items():
        names = list(counts)
        gains = [_of_client(by_line[trend.of][seed], n) - _of_client(by_line[trend.over][seed], n) for n in names]
        halvings = -np.log2([counts[name] for name in names])
        slopes.append(float(np.polyfit(halvings, gains, 1)[0]) if len(set(counts.values())) > 1 else 0.0)
    words = _judged(slopes, "gain in sentence R@1 for each halving of a client's queries")
    return f"{trend.claim[:1].upper()}{trend.claim[1:]}? {words}"


def _of_client(result: SystemResult, name: str) -> float:
    return float(np.mean(result.values[name][SHOWN]))


def _promise(plan: FederationPlan, cells: Cells) -> str:
    if plan.privacy.eps is None:
        return "None of these models has a privacy guarantee: epsilon is infinite."
    told = (
        f"Each row's epsilon is what one run of it costs, with one seed: the largest of any client (unit "
        f"{plan.privacy.unit}, neighbours {plan.privacy.neighbours}). A row is a mean over seeds, and there are "
        "several rows: anyone who sees them sees the composition of all their runs. Clients that train alone release "
        "nothing and have no guarantee."
    )
    for unit, ledger in ((plan.privacy.unit, QUERY_LEDGER), ("passage", PASSAGE_LEDGER)):
        if spent := cells.spent(ledger=ledger):
            name = max(spent, key=lambda client: spent[client])
            told += (
                f" All private runs of the studies in this folder together cost a client up to epsilon = "
                f"{math.ceil(spent[name] * 1000) / 1000:.3f} (client {name}, unit {unit}; each run counted once)."
            )
    return told


def _source(plan: FederationPlan, *, settings: bool = False, split: str = "") -> str:
    """Hash the plan's silos, or everything about it."""
    facts = plan.describe()
    if not settings:
        facts = {name: facts[name] for name in ("silos", "clients", "sample", "planted", "declare_public")}
    return json_sha256({**facts, "split": split})[:20]
