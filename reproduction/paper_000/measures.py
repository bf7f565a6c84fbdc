"""Tables 5 and 6 and section 5.2.3: retrievers on other sets, and how close queries are to what models read."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.beir import beir_set
from lit_dpret.report.table import RowResult
from lit_dpret.retrieval.statistics import Interval
from lit_dpret.synthesis.textsim.words import need
from lit_dpret.tasks.parts import Parts
from reproduction.paper_000.retrieval import PUBLIC_NAMES, sizes_note
from reproduction.paper_000.study import BASELINES, Cell, LeftOut, Trainings
from reproduction.paper_000.table import (
    PUBLIC_ONLY,
    PaperRow,
    PaperTable,
    columns_of,
    named,
    row_beside,
    rows_of_the_paper_alone,
    shown,
)
from reproduction.published import MAIN, ORIGINAL, PAPER_000, Point, by_point

# -- table 5: retrievers that learned from the private queries, evaluated on public sets that they never saw

ZERO_SHOT = columns_of("table_5_zero_shot")


@dataclass(frozen=True)
class _System:
    """A row of the table in every set."""

    name: str
    label: str
    epsilon: str
    encoder: str
    privacy: str
    point: Point | None


def zero_shot_tables(study: Trainings, make_zero_shot: Callable[..., Any]) -> list[PaperTable]:
    """Return the table of the sets that are present."""
    check_zero_shot(make_zero_shot)
    results = {system.name: _zero_shot_of(study, system, make_zero_shot) for system in _systems(study)}
    measured = [one["name"] for one in next(iter(results.values()))["sets"] if one["metrics"]]
    rows = [
        _zero_shot_row(name, system, next(one for one in results[system.name]["sets"] if one["name"] == name))
        for name in measured
        for system in _systems(study)
    ]
    absent = [name for name in PAPER_000["sets"] if beir_set(name).name not in measured]
    notes = [f"Missing, so not measured: {', '.join(absent)}."] if absent else []
    return [PaperTable.of("table_5_zero_shot", rows, notes)]


def check_zero_shot(make_zero_shot: Callable[..., Any]) -> None:
    """Refuse settings of this part that could not be run, before anything is trained for it."""
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


def _zero_shot_of(study: Trainings, system: _System, make: Callable[..., Any]) -> Any:
    def work(parts: Parts) -> Any:
        make(encoder=system.encoder, cache_dir=study.parts.run_dir / "zero-shot-passages").run(parts)
        return json.loads((parts.run_dir / "zero_shot.json").read_text(encoding="utf-8"))

    return study.result(f"zero-shot-{system.name}", make, work)


def _zero_shot_row(name: str, system: _System, found: Any) -> PaperRow:
    theirs = by_point("table_5").get(system.point) if system.point is not None else None
    sets = [beir_set(each).name for each in PAPER_000["sets"]]
    paper = {}
    if theirs is not None and name in sets:
        paper = {metric: values[sets.index(name)] for metric, values in zip(ZERO_SHOT, theirs, strict=True)}
    ours = {metric: Interval(**found["metrics"][metric]) for metric in ZERO_SHOT if metric in found["metrics"]}
    beside = named(system.point) if paper and system.point is not None else ""
    return PaperRow(
        group=name, system=system.label, epsilon=system.epsilon, metrics=ours, paper=paper, beside=beside,
        privacy=system.privacy, note=found["note"],
    )  # fmt: skip


# -- table 6: how close the synthetic queries are to the original ones, by BLEU and MAUVE

SIMILARITY = columns_of("table_6_similarity")


def similarity_tables(study: Trainings, make_similarity: Callable[..., Any]) -> list[PaperTable]:
    """Return one row for each synthetic data set, and one for the pseudo-queries."""
    if not study.originals_are_public:
        raise LeftOut(
            "similarity is a measure of the original queries, but task.originals_are_public=false. task=similarity "
            "measures one data set and notes that on its card."
        )
    for package in ("sacrebleu", "sklearn"):
        need(package)  # type: ignore[arg-type]
    rows = []
    for cell in study.cells():
        ours = _similarity_of(study, f"similarity-{cell.name}", study.queries_of(cell), make_similarity)
        made = RowResult(study.described(cell.size), ours, study.synthetic(cell).privacy)
        rows.append(row_beside("table_6", study.point(cell), SIMILARITY, made))
    rows += rows_of_the_paper_alone("table_6", SIMILARITY, rows)
    study.baselines()
    pseudo = _similarity_of(study, "similarity-pseudo", study.folder(BASELINES) / "pseudo_queries", make_similarity)
    made = RowResult("pseudo-queries of the passages", pseudo, "no private data")
    rows.append(PaperRow(**vars(made), epsilon=PUBLIC_ONLY))
    return [PaperTable.of("table_6_similarity", rows, [PAPER_000["table_6_footnote"], *sizes_note(study)])]


def _similarity_of(study: Trainings, name: str, folder: Path, make: Callable[..., Any]) -> dict[str, Interval]:
    def work(parts: Parts) -> Any:
        make(synthetic=folder, reference="private", card_entry=True, plot=False).run(parts)
        facts = json.loads((parts.run_dir / "similarity.json").read_text(encoding="utf-8"))
        found = facts["mauve"]["query"]
        return {"bleu": facts["bleu"]["as_in_the_papers"], "mauve": [found["mean"], found["sd"]]}

    found = study.result(name, [make, str(folder.name)], work)
    mean, sd = found["mauve"]
    reach = math.nan if sd is None else sd
    return {"bleu": Interval(found["bleu"], math.nan, math.nan), "mauve": Interval(mean, mean - reach, mean + reach)}


# -- section 5.2.3 (appendix C of 001): how many queries and passages occur in the text that the public model read


def overlap_tables(study: Trainings, make_overlap: Callable[..., Any]) -> list[PaperTable]:
    """Return the table of queries and passages."""
    if not study.originals_are_public:
        raise LeftOut("the share of queries found is a measure of them, but task.originals_are_public=false.")
    corpus = getattr(make_overlap, "keywords", {}).get("corpus")
    if corpus is None:
        raise LeftOut("task.overlap.corpus=null: name the corpus that the public model read, or a sample of it.")
    if not Path(corpus).exists():
        raise LeftOut(f"task.overlap.corpus={corpus} does not exist.")

    def work(parts: Parts) -> Any:
        make_overlap(queries="private", card_entry=True).run(parts)
        return json.loads((parts.run_dir / "pretraining_overlap.json").read_text(encoding="utf-8"))

    facts = study.result("overlap", make_overlap, work)
    read = facts["corpus"]
    columns = columns_of("overlap") | {"ngram": f"{next(iter(facts['found'].values()))['n']} words in a row"}
    corpus_told = (
        f"Corpus: {read['name']}, {read['documents']:,} documents, {read['words']:,} words. A text that was "
        "not found may occur outside this file: the shares are lower bounds."
    )
    rows = [_overlap_row(name, facts["found"]) for name in ("queries", "passages")]
    return [PaperTable.of("overlap", rows, [corpus_told], columns=columns)]


def _overlap_row(name: str, found: Any) -> PaperRow:
    subsets = [each for key, each in found.items() if key.split(",")[0] == name]
    sizes = sorted({each["exact"]["total"] for each in subsets})
    ours = {kind: _mean_share([each[kind] for each in subsets]) for kind in ("exact", "ngram")}
    return PaperRow(
        system=name, epsilon="", metrics=ours,
        paper={"exact": PAPER_000["overlap_shares"][name]}, beside="C4 and MS MARCO",
        note=f"{len(subsets)} subsets of {' to '.join(f'{size:,}' for size in sizes)}",
    )  # fmt: skip


def _mean_share(shares: list[Any]) -> Interval:
    values = [each["share"] for each in shares if each["share"] is not None]
    if not values:
        return Interval(float("nan"), float("nan"), float("nan"))
    return Interval(
        statistics.fmean(values), min(each["low"] for each in shares), max(each["high"] for each in shares)
    )  # fmt: skip
