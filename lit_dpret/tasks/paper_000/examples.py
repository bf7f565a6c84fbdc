"""Table 2: passages with the queries that each generator wrote for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from lit_dpret.report.paper_000 import TABLE_2, TABLE_2_PASSAGE
from lit_dpret.report.paper_examples import Example, ExampleTable
from lit_dpret.tasks.paper_000.retrieval import named
from lit_dpret.tasks.paper_000.study import BASELINES, Study, shown
from lit_dpret.tasks.parts import Parts


def tables(study: Study, *, passages: int) -> list[ExampleTable]:
    """So many passages, chosen by hash of id.

    Queries that were made without privacy may repeat a private one word for word: they are shown under the same
    condition as the original ones.
    """
    public = study.choices.originals_are_public
    cells = [cell for cell in study.choices.cells() if public or cell.eps is not None]
    settings = [passages, public, [cell.name for cell in cells]]

    def work(parts: Parts) -> Any:
        data = parts.make_datamodule(max_passages=study.base.max_passages, expected_batch_size=None, sample_rate=None)
        data.prepare_data()
        data.setup("fit")
        texts = data.public_passages()
        asked = _asked(data) if public else {}
        choice = [name for name in texts if name in asked] or list(texts)
        names = sorted(choice, key=lambda name: sha256(name.encode()).digest())[:passages]
        made = {f"{study.described(c.size)}, ε = {shown(c.eps)}": _first_of(study.queries_of(c)) for c in cells}
        study.baselines()
        made["pseudo-query, public only"] = _first_of(study.kept.folder(BASELINES) / "pseudo_queries")
        return [
            {
                "passage": texts[name],
                "queries": ([["original", asked[name]]] if name in asked else [])
                + [[label, queries.get(name, "")] for label, queries in made.items()],
            }
            for name in names
        ]

    found = study.kept.result(f"examples-{passages}", settings, work)
    ours = [Example(passage=one["passage"], queries=[(a, b) for a, b in one["queries"]]) for one in found]
    theirs = Example(passage=TABLE_2_PASSAGE, queries=[(named(point), text) for point, text in TABLE_2.items()])
    notes = ["Passages are chosen by hash of id, not for what was written."]
    if public:
        notes = [
            "Passages are chosen by hash of id among those that have an original question; the questions were declared "
            "public (task.originals_are_public)."
        ]
    else:
        notes.append(
            "Original queries, and those that were made without privacy and may repeat them, are left out: "
            "task.originals_are_public=false."
        )
    notes.append("The zero-shot encoder writes nothing, so the pseudo-query is the one public-only row.")
    return [ExampleTable(name="table_2_examples", title="Table 2: examples", ours=ours, theirs=theirs, notes=notes)]


def _asked(data: Any) -> dict[str, str]:
    """The first train query of each passage that has one."""
    queries, qrels = data.evaluation_set("train")
    found: dict[str, str] = {}
    for query, judged in sorted(qrels.items()):
        for passage, grade in judged.items():
            if grade > 0:
                found.setdefault(passage, queries[query])
    return found


def _first_of(folder: Path) -> Mapping[str, str]:
    """The first query of each passage of a data set in BEIR's layout."""
    texts: dict[str, str] = {}
    with (folder / "queries.jsonl").open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            texts[record["_id"]] = record["text"]
    found: dict[str, str] = {}
    with (folder / "qrels" / "train.tsv").open(encoding="utf-8") as file:
        next(file)
        for line in file:
            query, passage, _ = line.rstrip("\n").split("\t")
            found.setdefault(passage, texts[query])
    return found
