"""The numbers that papers print, for comparison with ours: one JSON file per paper, which names the paper."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Source and epsilon, which identify a row in the tables of paper 000; None stands for infinity there.
Point = tuple[str, float | None]
ORIGINAL = "Original"
MAIN, SIZES = "T5-Base", ("T5-Small", "T5-Base", "T5-Large", "T5-XL")


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
    return found


PAPER_000, PAPER_002, PAPER_004 = _read("paper_000"), _read("paper_002"), _read("paper_004")


def by_point(table: str) -> dict[Point, Any]:
    """Return a table of paper 000 by row: its values, or for table 2 the query."""
    return {(row["source"], row["epsilon"]): row["values"] for row in PAPER_000[table]}


def of_study(study: str, line: str, label: str) -> Mapping[str, float]:
    """Return paper 004's numbers for a point of a federated study, by measure; empty if it has none.

    Example:
        >>> of_study("hubness", "PDD-AS2, stage 1", "k=10")
        {'sentence/success@1': 0.121, 'passage/success@1': 0.235}
    """
    table = PAPER_004.get(study, {"columns": [], "rows": []})
    found = [row["values"] for row in table["rows"] if (row["line"], row["label"]) == (line, label)]
    return dict(zip(table["columns"], found[0], strict=True)) if found else {}
