"""Table 5: retrievers that learned from the private queries, judged on public sets that they never saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.beir_sets import beir_set
from lit_dpret.retrieval.statistics import Interval
from lit_dpret.tasks.parts import Parts
from reproduction.paper_000.retrieval import PUBLIC_NAMES
from reproduction.paper_000.study import BASELINES, Cell, LeftOut, Trainings
from reproduction.paper_000.table import PUBLIC_ONLY, PaperRow, PaperTable, named, shown
from reproduction.published import MAIN, ORIGINAL, PAPER_000, Point, by_point

COLUMNS = {"ndcg@10": "nDCG@10", "recall@10": "Recall@10"}
_CAPTION = (
    "Mean over the queries of each public set with its 95 % bootstrap interval, of one training run. Recall@10 is the "
    "share of a query's relevant passages among the first 10, as the paper's numbers have it; its text describes the "
    "share of queries with one of them there. Passages are cut as in training."
)


@dataclass(frozen=True)
class _System:
    """A row of the table in every set."""

    name: str
    label: str
    epsilon: str
    encoder: str
    privacy: str
    point: Point | None


def tables(study: Trainings, make_zero_shot: Callable[..., Any]) -> list[PaperTable]:
    """Return the table of the sets that are there."""
    check(make_zero_shot)
    results = {system.name: _measured(study, system, make_zero_shot) for system in _systems(study)}
    measured = [one["name"] for one in next(iter(results.values()))["sets"] if one["metrics"]]
    rows = [
        _row(name, system, next(one for one in results[system.name]["sets"] if one["name"] == name))
        for name in measured
        for system in _systems(study)
    ]
    absent = [name for name in PAPER_000["sets"] if beir_set(name).name not in measured]
    notes = [f"Not there, and so not measured: {', '.join(absent)}."] if absent else []
    title = "Table 5: zero-shot evaluation on public sets"
    return [PaperTable("table_5_zero_shot", title, COLUMNS, rows, _CAPTION, notes, group="data set")]


def check(make_zero_shot: Callable[..., Any]) -> None:
    """Refuse settings of the part that could not be run, before anything is trained for it."""
    known: Mapping[str, Any] = getattr(make_zero_shot, "keywords", {})
    root = known.get("root")
    if known.get("download"):
        make_zero_shot()
        return
    if root is None:
        raise LeftOut("task.zero_shot.root=null: name the folder that holds BEIR sets, one folder each.")
    if not Path(root).is_dir():
        raise LeftOut(f"task.zero_shot.root={root} is not a folder.")
    task = make_zero_shot()
    if not task.present():
        raise LeftOut(f"task.zero_shot.root={root} holds none of {', '.join(task.sets)}.")


def _systems(study: Trainings) -> list[_System]:
    base, folder = study.baselines(), study.folder

    def model(run: Path, of: str) -> str:
        return str(run / of / "model")

    made_on = folder(BASELINES)
    promise = base["original"].privacy
    found = [_System("original", "original queries", "∞", model(made_on, "original"), promise, (ORIGINAL, None))]
    if study.finite:
        eps = max(study.finite)
        cell, direct = Cell(study.main, eps), study.direct_name(eps)
        promises = study.direct(eps).privacy, study.synthetic(cell).privacy
        told = "original queries, direct DP", study.described(cell.size)
        made = study.queries_of(cell).parents[1]
        found += [
            _System(direct, told[0], shown(eps), model(folder(direct), "direct"), promises[0], (ORIGINAL, eps)),
            _System(cell.name, told[1], shown(eps), model(made, "from_synthetic"), promises[1], (MAIN, eps)),
        ]
    encoder = getattr(study.base.retriever, "keywords", {}).get("encoder", "minilm")
    if isinstance(encoder, str):
        known = base["zero_shot"].privacy
        found.append(_System("zero-shot", PUBLIC_NAMES["zero_shot"], PUBLIC_ONLY, encoder, known, None))
    pseudo, known = model(made_on, "from_pseudo"), base["pseudo"].privacy
    return [*found, _System("pseudo", PUBLIC_NAMES["pseudo"], PUBLIC_ONLY, pseudo, known, None)]


def _measured(study: Trainings, system: _System, make: Callable[..., Any]) -> Any:
    def work(parts: Parts) -> Any:
        make(encoder=system.encoder, cache_dir=study.parts.run_dir / "zero-shot-passages").run(parts)
        return json.loads((parts.run_dir / "zero_shot.json").read_text(encoding="utf-8"))

    return study.result(f"zero-shot-{system.name}", make, work)


def _row(name: str, system: _System, found: Any) -> PaperRow:
    theirs = by_point("table_5").get(system.point) if system.point is not None else None
    sets = [beir_set(each).name for each in PAPER_000["sets"]]
    paper = {}
    if theirs is not None and name in sets:
        paper = {metric: values[sets.index(name)] for metric, values in zip(COLUMNS, theirs, strict=True)}
    ours = {metric: Interval(**found["metrics"][metric]) for metric in COLUMNS if metric in found["metrics"]}
    beside = named(system.point) if paper and system.point is not None else ""
    return PaperRow(
        group=name, system=system.label, epsilon=system.epsilon, metrics=ours, paper=paper, beside=beside,
        privacy=system.privacy, note=found["note"],
    )  # fmt: skip
