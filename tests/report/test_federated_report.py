"""The page of a federation: averages, intervals, what the paper's table cannot be, and what is said of privacy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.report.federated_report import COLUMNS, FederatedFacts, FederatedRow, write_federated_report
from lit_dpret.retrieval.statistics import seed_interval

SIZES = {"passages": 2, "sentences": 9, "train": 4, "dev": 1, "test": 3}
FACTS = FederatedFacts(
    silos={"a": SIZES, "b": {**SIZES, "train": 8}}, split="test", model="a small one", trust=[("x", "y", "z", "none")],
    eps=None, unit="query", command="python train.py experiment=pdd_as2",
)  # fmt: skip


def row(system: str, seeds: dict[int, dict[str, list[float]]], **more: Any) -> FederatedRow:
    values = {
        seed: {client: dict.fromkeys(COLUMNS, found) for client, found in clients.items()}
        for seed, clients in seeds.items()
    }
    return FederatedRow(system=system, values=values, **more)


ALONE = row("single_star", {0: {"a": [0.0], "b": [1.0, 0.0]}, 1: {"a": [0.0], "b": [1.0, 0.0]}})
STAGE1 = row(
    "stage1", {0: {"a": [1.0], "b": [1.0, 0.0]}, 1: {"a": [0.5], "b": [1.0, 0.0]}},
    sent={"a": {"stage 1": 1_500_000.0}, "b": {"stage 1": 500_000.0}},
)  # fmt: skip


def test_a_mean_over_silos_counts_each_alike_and_a_mean_over_queries_each_query() -> None:
    assert STAGE1.over_silos("sentence/mrr@10") == {0: 0.75, 1: 0.5}
    assert STAGE1.over_queries("sentence/mrr@10") == {0: pytest.approx(2 / 3), 1: 0.5}


def test_ours_stands_before_the_papers_in_its_order_with_the_t_interval_over_seeds(tmp_path: Path) -> None:
    written = write_federated_report(tmp_path, [STAGE1, ALONE], FACTS)
    lines = written["pdd_as2.md"].read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if "/ 0." in line]
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows] == ["STAR", "PDD-AS2 (stage 1)"]
    interval = seed_interval([0.75, 0.5])
    assert f"0.625 \\[{interval.low:.3f}, {interval.high:.3f}\\] / 0.261" in rows[1]
    gains = [line for line in lines if line.startswith(("| a |", "| b |"))]
    assert gains[0].startswith("| b | 8 | \\+0.000") and gains[1].startswith("| a | 4 | \\+0.750")  # the larger first
    assert "| PDD-AS2 (stage 1) | all silos | 2.0 | 2.0 |" in lines
    data = json.loads(written["pdd_as2.json"].read_text(encoding="utf-8"))
    assert data["systems"]["stage1"]["measures"]["sentence/mrr@10"]["over_silos"]["mean"] == 0.625
    assert data["gain_of_stage1_over_single_star"]["b"]["mean"] == 0.0


def test_silos_may_withhold_their_measures_and_the_untrained_encoder_has_no_number_in_the_paper(tmp_path: Path) -> None:
    rows = [STAGE1, FederatedRow(system="customised", values={0: {}}), replace(STAGE1, system="zero_shot")]
    text = write_federated_report(tmp_path, rows, FACTS)["pdd_as2.md"].read_text(encoding="utf-8")
    assert "withheld / 0." in text and "Untrained encoder | 0.625" in text and " / – |" in text


@pytest.mark.parametrize(("delta", "expected"), [(None, "1/(2n)"), (1e-4, "0.0001")])
def test_every_epsilon_stands_beside_its_delta_unit_and_neighbours(
    delta: float | None, expected: str, tmp_path: Path
) -> None:
    private = replace(STAGE1, epsilon={"a": 7.5, "b": 7.9})
    written = write_federated_report(tmp_path, [private], replace(FACTS, eps=8.0, delta=delta))
    for name in ("pdd_as2.md", "pdd_as2.html"):
        page = written[name].read_text(encoding="utf-8")
        assert page.count(f"delta = {expected}") == 2 and page.count("zero_out") >= 2, name
    assert json.loads(written["pdd_as2.json"].read_text(encoding="utf-8"))["delta"] == delta


def test_a_budget_is_claimed_of_one_run_and_what_seeds_and_systems_cost_together_stands_beside_it(
    tmp_path: Path,
) -> None:
    private = replace(STAGE1, epsilon={"a": 7.5, "b": 7.9}, over_seeds={"a": 11.0601, "b": 11.5})
    facts = replace(FACTS, eps=8.0, together={"a": 17.2, "b": 21.7101}, passages={"a": 6.5})
    written = write_federated_report(tmp_path, [private, ALONE], facts)
    page = written["pdd_as2.md"].read_text(encoding="utf-8")
    claim = next(line for line in page.splitlines() if "has a budget of epsilon = 8" in line)
    assert "in one run" in claim and "2 such runs" in claim and "epsilon = 21.711" in claim
    assert "| a | 7.500 | 11.061 | 17.200 |" in page and "a 6.500" in page  # rounded up, never down
    data = json.loads(written["pdd_as2.json"].read_text(encoding="utf-8"))
    assert data["epsilon_of_page"] == {"a": 17.2, "b": 21.7101}
    assert data["systems"]["stage1"]["epsilon_over_seeds"] == {"a": 11.0601, "b": 11.5}
    unknown = write_federated_report(tmp_path, [replace(private, over_seeds={})], replace(facts, together={}))
    assert "| a | 7.500 | not known here | not known here |" in unknown["pdd_as2.md"].read_text(encoding="utf-8")
