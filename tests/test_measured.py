"""Tables that pages of the documentation show of runs: every number of them stands in the files of those runs."""

from __future__ import annotations

import csv
import json
import re
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
    "Central-training": "central", "BM25": "bm25", "Untrained encoder, no query": "zero_shot",
    "Pseudo-queries, no query": "pseudo_queries", "Random negatives": "single_random",
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


# -- membership ----------------------------------------------------------------------------------


def of_attack(name: str, run: str) -> dict[str, Any]:
    """An attack's cells of a page: AUC, two true positive rates, and the proved epsilon."""
    (found,) = [each for each in facts(f"membership/{run}.json")["attacks"] if each["attack"] == name]
    rates = [found["auc"], found["tpr_at_fpr"]["0.1"], found["tpr_at_fpr"]["0.01"]]
    eps = found["evidence"]["eps_lower"]
    return {"cells": [_bracketed(rate) for rate in rates], "eps": "0" if eps == 0 else f"{eps:.2f}"}


def _bracketed(found: dict[str, Any]) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


@pytest.mark.parametrize(
    ("heading", "run"),
    [
        ("## Measured", "generator"),
        ("### What is released alone, and a model made from it", "release"),
        ("### A dual encoder", "encoder"),
    ],
)
def test_the_attacks_are_those_of_their_runs(heading: str, run: str) -> None:
    header, shown = next(tables("membership.md", heading))
    *attacks, ceiling = shown
    for name, *cells in attacks:
        free, private = of_attack(name, run), of_attack(name, f"{run}_eps3")
        assert cells[:7] == [*free["cells"], free["eps"], *private["cells"]]
        assert cells[7:] == [private["eps"]] * (len(header) - 8)
    claim = facts(f"membership/{run}_eps3.json")["claim"]
    assert ceiling[6:8] == [f"{claim['ceilings']['tpr_at_fpr'][rate]:.3f}" for rate in ("0.1", "0.01")]
    if run != "release":
        assert {name for name, *_ in attacks} == {
            each["attack"] for each in facts(f"membership/{run}.json")["attacks"]
        }, "no attack is left out"


def test_what_a_release_repeats_is_told_as_it_was_counted() -> None:
    page = "### What is released alone, and a model made from it"
    _, shown = list(tables("membership.md", page))[1]
    counted = {name: facts(f"membership/{run}.json") for name, run in (
        ("no privacy", "release"), ("epsilon 3", "release_eps3"),
    )}  # fmt: skip
    for name, *cells in shown:
        found = counted[name]["disclosures"]
        eps = found["evidence"]["eps_lower"]
        numbers = [found["trained"], found["phantoms"], found["excess"]]
        assert cells == [f"{found['repeated']} of 1,000", *map(str, numbers), "0" if eps == 0 else f"{eps:.2f}"]
    members = counted["no privacy"]["suspects"]["members"]
    free, private = (counted[name]["disclosures"] for name in ("no privacy", "epsilon 3"))
    concepts = " ".join((DOCS / "concepts.md").read_text(encoding="utf-8").split())
    assert f"wrote {free['trained']} of {members} questions" in concepts
    assert f"it wrote {private['trained']} of them, and {private['phantoms']} of {1000 - members}" in concepts


# -- ways to train at one budget -----------------------------------------------------------------

WAYS = {
    "a generator that learned nothing private": "generator untrained",
    "no filter, instead of a place among the first 10": "no round-trip filter",
    "filter at the first place": "filter at 1",
    "a head in 128 directions": "128 directions",
    "two heads": "two heads",
    "prompt tuning, 3,840 numbers": "generator by prompt tuning",
    "LoRA, 36,864 numbers": "generator by LoRA",
    "DP-AdamBC": "generator by DP-AdamBC",
    "a batch of 768 in 20 steps": "generator with 3 times the batch, a third of the steps",
    "three queries for each passage": "3 for each passage",
    "begun on 1,473 public pairs": "generator warmed up on public pairs",
    "pseudo-labels of a small public cross-encoder": "pseudo-labels",
    "pseudo-labels, no filter": "pseudo-labels, no round-trip filter",
}


def shares(run: str) -> dict[str, str]:
    """What each row keeps of the gain of a query head without privacy, as ``34% [21, 46]``."""
    header, rows = next(tables(f"reproduction/{run}/ablation.md", "## How much of the gain is kept"))
    assert header[1] == "of the gain of no privacy, query head"
    return {row[0]: row[1].replace("\\", "").replace("%,", ",").replace("%]", "]") for row in rows}


def difference(run: str, first: str, second: str) -> dict[str, float]:
    """nDCG@10 of one row above another, and p over training runs, as a comparison stored it."""
    with (RUNS / run / "differences.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["metric"] == "nDCG@10" and {row["first"], row["second"]} == {first, second}:
                sign = 1 if row["first"] == first else -1
                return {"gain": sign * float(row["difference"]), "p": float(row["p_runs"])}
    raise AssertionError(f"{run} compares {first} and {second} nowhere")


def test_the_shares_of_the_ablation_are_those_of_its_runs() -> None:
    found = shares("ablate_eps3")
    _, shown = next(tables("ablations.md", "## What came out"))
    assert {name for name, *_ in shown} == set(WAYS)
    for name, share, _ in shown:
        assert share == found[f"synthetic, {WAYS[name]}"], name
    page = " ".join((DOCS / "ablations.md").read_text(encoding="utf-8").split())
    everywhere = shares("ablate_eps3_all")
    best, made = everywhere["direct, clip 2, 128 directions"], everywhere["synthetic"]
    assert f"`best_eps3` keeps {best.replace('%', ' percent')} of the gain" in page
    assert f"the same generators keep {made.replace('%', ' percent')}" in page
    assert f"Kept are {found['synthetic'].replace('%', ' percent')} of the gain of a query head without privacy" in page
    assert f"direct training with public passages ({found['public_passages']})" in page
    for run, count in (("ablate_eps3", "51"), ("ablate_eps3_all", "21")):
        (spent,) = re.findall(rf"has epsilon = ([\d.]+) .* {count} trainings", facts(f"{run}/ablation.json")["spent"])
        assert re.search(rf"{spent} for the {count}\b", page)


def test_what_synthetic_queries_gain_is_told_with_its_p() -> None:
    page = " ".join((DOCS / "ablations.md").read_text(encoding="utf-8").split())
    small, large = "ablate_eps3_generators", "ablate_eps3_all"
    told = {base: difference(small, "synthetic", base) for base in
            ("zero-shot", "per_example_duplicated", "batch_clip", "public_passages")}  # fmt: skip
    for base in ("zero-shot", "per_example_duplicated", "public_passages"):
        assert f"({told[base]['gain']:+.3f}, adjusted p {told[base]['p']:.3f})" in page, base
    assert (
        f"not told apart from `batch_clip` ({told['batch_clip']['gain']:+.3f})" in page
        and told["batch_clip"]["p"] > 0.05
    )
    over = {base: difference(large, "synthetic", base) for base in told}
    start, weak, batch, public = over.values()
    assert f"{start['gain']:+.3f} over it and {weak['gain']:+.3f} over `per_example_duplicated`" in page
    assert f"(adjusted p {start['p']:.3f} and {weak['p']:.3f})" in page
    assert f"below `batch_clip` by {-batch['gain']:.3f} ({batch['p']:.3f})" in page
    assert f"below `public_passages` by {-public['gain']:.3f} ({public['p']:.3f})" in page
    best = difference(large, "direct, clip 2, 128 directions", "public_passages")
    assert f"(adjusted p {best['p']:.3f})" in page and best["gain"] > 0
