"""Tables that pages of the documentation show of runs: every number of them stands in the files of those runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.report.paper_004 import COLUMNS

DOCS = Path(__file__).parents[1] / "docs"
RUNS = DOCS / "reproduction"


def facts(path: str) -> dict[str, Any]:
    return dict(json.loads((RUNS / path).read_text(encoding="utf-8")))


def tables(page: str, heading: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The tables of a part of a page, each as its header and its rows."""
    part = (DOCS / page).read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1]
    level = heading.split(" ", 1)[0]
    found: list[list[str]] = []
    for line in [*part.splitlines(), f"{level} end"]:
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
        elif found:
            yield found[0], found[2:]
            found = []
        if line.startswith("#") and len(line.split(" ", 1)[0]) <= len(level):
            return


def with_ends(found: dict[str, Any], *, sign: str = "") -> str:
    ends = "" if found["low"] is None else f" [{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"
    return f"{found['mean']:{sign}.3f}{ends}"


ROWS = {
    "Central-training": "central", "BM25": "bm25", "Untrained encoder, public alone": "zero_shot",
    "Pseudo-queries, public alone": "pseudo_queries", "Random negatives": "single_random",
    "BM25 negatives": "single_bm25", "STAR": "single_star", "PDD-AS2 (stage 1)": "stage1",
    "+ client-customised query encoding": "customised", "+ fed-negative": "fed_negative",
    "PDD-AS2 (stage 1), each silo at 5.40": "stage1", "+ fed-negative, each silo at 8.00": "fed_negative",
}  # fmt: skip


@pytest.mark.parametrize(("place", "run"), [(0, "insuranceqa"), (1, "insuranceqa_eps8")])
def test_the_federated_tables_are_those_of_their_runs(place: int, run: str) -> None:
    systems = facts(f"federated/{run}/pdd_as2.json")["systems"]
    _, shown = list(tables("federated.md", "### On ten InsuranceQA domains"))[place]
    assert {ROWS[row[0]] for row in shown} == set(systems)
    for name, *cells in shown:
        measures = [systems[ROWS[name]]["measures"][column] for column in COLUMNS]
        sure = {"low": None} if ROWS[name] == "zero_shot" else {}  # without training all seeds are one number
        expected = [with_ends(found["over_silos"] | sure) for found in measures]
        assert [cell.partition(" / ")[0] for cell in cells] == expected
        if place == 0:
            papers = ["–" if found["paper"] is None else f"{found['paper']:.3f}" for found in measures]
            assert [cell.partition(" / ")[2] for cell in cells] == papers
        if "each silo at" in name:
            spent = max(systems[ROWS[name]]["epsilon"].values())
            assert 0 <= float(name.rpartition(" ")[2]) - spent < 0.01, "rounded up"
