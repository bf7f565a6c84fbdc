"""Table 2: passages with the queries that each generator wrote for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.blocks import Block, Bullets, Grid, Paragraph
from lit_dpret.report.page import shortened
from lit_dpret.tasks.parts import by_hash
from reproduction.paper_000.study import BASELINES, Trainings
from reproduction.paper_000.table import named, shown
from reproduction.published import PAPER_000, by_point

_LONGEST = 400


@dataclass(frozen=True)
class Example:
    """One passage, and its queries by source."""

    passage: str
    queries: Sequence[tuple[str, str]]

    def grid(self) -> Grid:
        return Grid(("source", "text"), [("passage", shortened(self.passage, _LONGEST)), *self.queries])


@dataclass(frozen=True)
class ExampleTable:
    """Several passages, and the paper's own example."""

    name: str
    title: str
    ours: Sequence[Example]
    theirs: Example
    notes: Sequence[str]

    def blocks(self, picture: Path | None = None) -> list[Block]:
        theirs = Paragraph("The paper's example, of MS MARCO:")
        return [*(example.grid() for example in self.ours), theirs, self.theirs.grid(), Bullets(list(self.notes))]

    def facts(self) -> dict[str, Any]:
        examples = {"ours": [asdict(example) for example in self.ours], "paper": asdict(self.theirs)}
        return {"name": self.name, "title": self.title, "notes": list(self.notes), **examples}

    def sheet(self) -> Grid:
        listed = [("ours", example) for example in self.ours] + [("paper", self.theirs)]
        rows = [(whose, one.passage, source, text) for whose, one in listed for source, text in one.queries]
        return Grid(("whose", "passage", "source", "query"), rows)


def tables(study: Trainings, *, passages: int, texts: bool) -> list[ExampleTable]:
    """Return this many passages, chosen by hash of id."""
    # Queries that were written without privacy may repeat a private one word for word, so they are shown on the same
    # condition as the original queries.
    public = study.originals_are_public
    cells = [cell for cell in study.cells() if public or cell.eps is not None]
    data = study.parts.read_data(max_passages=study.base.max_passages, expected_batch_size=None, sample_rate=None)
    known = data.public_passages()
    asked = _asked(data) if public else {}
    choice = [name for name in known if name in asked] or list(known)
    made = {f"{study.described(c.size)}, ε = {shown(c.eps)}": _first_of(study.queries_of(c)) for c in cells}
    if texts:
        study.baselines()
        made["pseudo-query, public only"] = _first_of(study.folder(BASELINES) / "pseudo_queries")
        made = {"original": asked, **made} if public else made
    ours = [
        Example(
            known[name] if texts else f"passage {name}",
            [(source, queries.get(name, "–")) for source, queries in made.items()],
        )
        for name in sorted(choice, key=by_hash)[:passages]
    ]
    of_paper = [(named(point), text) for point, text in by_point("table_2").items()]
    theirs = Example(PAPER_000["table_2_passage"], of_paper)
    return [ExampleTable("table_2_examples", "Table 2: examples", ours, theirs, list(_notes(public, texts)))]


def _notes(public: bool, texts: bool) -> Iterator[str]:
    if public:
        yield (
            "Passages are chosen by hash of id among those that have an original question; the questions were declared "
            "public (task.originals_are_public)."
        )
    else:
        yield "Passages are chosen by hash of id, not for what was written."
        yield (
            "Original queries, and those written without privacy, which may repeat them, are left out: "
            "task.originals_are_public=false."
        )
    if not texts:
        yield (
            "Texts of the data set are left out, among them the original and the pseudo-queries, which are words of "
            "the passages: task.example_texts=false."
        )
    yield "The zero-shot encoder writes nothing, so the pseudo-query is the one public-only row."


def _asked(data: Any) -> dict[str, str]:
    queries, qrels = data.evaluation_set("train")
    found: dict[str, str] = {}
    for query, judged in sorted(qrels.items()):
        for passage, grade in judged.items():
            if grade > 0:
                found.setdefault(passage, queries[query])
    return found


def _first_of(folder: Path) -> Mapping[str, str]:
    """Return the first query of each passage of a data set in BEIR's layout."""
    with (folder / "queries.jsonl").open(encoding="utf-8") as file:
        texts = {record["_id"]: record["text"] for record in map(json.loads, file)}
    found: dict[str, str] = {}
    with (folder / "qrels" / "train.tsv").open(encoding="utf-8") as file:
        next(file)
        for query, passage, _ in (line.rstrip("\n").split("\t") for line in file):
            found.setdefault(passage, texts[query])
    return found
