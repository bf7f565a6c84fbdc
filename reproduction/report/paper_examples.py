"""Passages with the queries that several generators wrote for them, in the form of table 2 of paper 000."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.page import Block, Bullets, Grid, Paragraph, Section

_LONGEST = 400


@dataclass(frozen=True)
class Example:
    """One passage.

    Args:
        passage: Its text.
        queries: Where each query comes from, and its text.
    """

    passage: str
    queries: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class ExampleTable:
    """Several passages, and the paper's own one.

    Args:
        name: Of its files.
        title: With the number of the paper's table.
        ours: Ours.
        theirs: The paper's.
        notes: Remarks below it.
    """

    name: str
    title: str
    ours: Sequence[Example]
    theirs: Example
    notes: Sequence[str] = ()

    def section(self, picture: Path | None = None) -> Section:
        """The table as a part of a page."""
        blocks: list[Block] = []
        for example in self.ours:
            blocks.append(Grid(("source", "text"), [("passage", _cut(example.passage)), *example.queries]))
        blocks.append(Paragraph("The paper's example, of MS MARCO:"))
        blocks.append(Grid(("source", "text"), [("passage", self.theirs.passage), *self.theirs.queries]))
        return Section(self.title, [*blocks, *([Bullets(list(self.notes))] if self.notes else [])])

    def facts(self) -> dict[str, Any]:
        """The table as JSON values."""
        return {
            "name": self.name,
            "title": self.title,
            "notes": list(self.notes),
            "ours": [asdict(example) for example in self.ours],
            "paper": asdict(self.theirs),
        }

    def csv(self) -> str:
        """One line per query."""
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["whose", "passage", "source", "query"])
        for whose, examples in (("ours", self.ours), ("paper", [self.theirs])):
            for example in examples:
                writer.writerows([whose, example.passage, source, text] for source, text in example.queries)
        return file.getvalue()


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST].rstrip() + " …"
