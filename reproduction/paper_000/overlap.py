"""Section 5.2.3 (appendix C of 001): how many queries and passages stand in the text the public model read."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_dpret.retrieval.statistics import Interval
from lit_dpret.tasks.parts import Parts
from reproduction.paper_000.study import LeftOut, Trainings
from reproduction.paper_000.table import PaperRow, PaperTable
from reproduction.published import PAPER_000

_CAPTION = (
    "Share of texts whose words stand in one document of the corpus in a row; mean over random subsets, as the paper "
    "has it, and the lowest and highest bound of their 95 % intervals (Clopper and Pearson). The paper looks for MS "
    "MARCO in C4; ours is the corpus named below, of which a part was read by the public T5 of this package."
)


def tables(study: Trainings, make_overlap: Callable[..., Any]) -> list[PaperTable]:
    """Return the table of queries and passages."""
    if not study.originals_are_public:
        raise LeftOut("the share of queries found is a measure of them, and task.originals_are_public=false.")
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
    columns = {"exact": "found exactly", "ngram": f"{next(iter(facts['found'].values()))['n']} words in a row"}
    notes = [
        f"Corpus: {read['name']}, {read['documents']:,} documents, {read['words']:,} words. A text that was "
        "not found may stand in what is not in this file: the shares are lower bounds.",
        "The public-only rows of the other tables have no counterpart here: nothing is trained.",
        "The paper gives its number for queries as an upper bound (< 1.9 %) and that for passages as ~22 %.",
    ]
    rows = [_row(name, facts["found"]) for name in ("queries", "passages")]
    return [PaperTable("overlap", "Section 5.2.3: overlap with pre-training text", columns, rows, _CAPTION, notes)]


def _row(name: str, found: Any) -> PaperRow:
    subsets = [each for key, each in found.items() if key.split(",")[0] == name]
    sizes = sorted({each["exact"]["total"] for each in subsets})
    return PaperRow(
        system=name, epsilon="", metrics={kind: _mean([each[kind] for each in subsets]) for kind in ("exact", "ngram")},
        paper={"exact": PAPER_000["overlap_shares"][name]}, beside="C4 and MS MARCO",
        note=f"{len(subsets)} subsets of {' to '.join(f'{size:,}' for size in sizes)}",
    )  # fmt: skip


def _mean(shares: list[Any]) -> Interval:
    values = [each["share"] for each in shares if each["share"] is not None]
    if not values:
        return Interval(float("nan"), float("nan"), float("nan"))
    return Interval(
        statistics.fmean(values), min(each["low"] for each in shares), max(each["high"] for each in shares)
    )  # fmt: skip
