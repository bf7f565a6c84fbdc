from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_dpret.errors import DataError, StorageError
from lit_dpret.retrieval.search import MISSING, TopK
from lit_dpret.retrieval.trec_runs import (
    Ranking,
    check_qrels,
    evaluate,
    read_qrels,
    read_run,
    without_self_matches,
    write_run,
)


def awkward_run() -> dict[str, dict[str, float]]:
    """Scores one float32 step apart, huge, tiny, negative and tied."""
    step = np.float32(0.7)
    scores = [step]
    for _ in range(50):
        scores.append(np.nextafter(scores[-1], np.float32(1)))
    scores += [np.float32(v) for v in (3e38, -3e38, 1e-40, -0.0, 0.1, 1 / 3, 0.7)]
    rng = np.random.default_rng(0)
    scores += list(rng.normal(size=2000).astype(np.float32))
    return {"q1": {f"p{i}": float(s) for i, s in enumerate(scores)}, "q-2": {"ü": 1.0}}


def test_a_run_reads_back_as_the_same_float32_scores(tmp_path: Path) -> None:
    run = awkward_run()
    write_run(tmp_path / "deep" / "run.trec", run)
    assert read_run(tmp_path / "deep" / "run.trec") == run


def test_a_written_run_is_in_the_order_and_form_of_trec(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"q": {"a": 0.5, "c": 0.25, "b": 0.5}}, tag="mine")
    assert (tmp_path / "run").read_text() == "q Q0 b 1 0.5 mine\nq Q0 a 2 0.5 mine\nq Q0 c 3 0.25 mine\n"


def test_evaluation_is_the_same_from_the_ranking_its_run_and_its_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, indices = torch.randn(20, 50, generator=generator).sort(dim=1, descending=True)
    indices[3, 40:], scores[3, 40:] = MISSING, float("-inf")
    ranking = Ranking(
        query_ids=[f"q{i}" for i in range(20)], passage_ids=[f"p{i}" for i in range(50)], top=TopK(scores, indices)
    )
    qrels = {f"q{i}": {f"p{(i * 3 + j) % 50}": j % 3 for j in range(6)} for i in range(20)}
    write_run(tmp_path / "run", ranking)
    assert len(ranking.to_run()["q3"]) == 40
    results = [evaluate(run, qrels) for run in (ranking, ranking.to_run(), read_run(tmp_path / "run"))]
    for result in results[1:]:
        assert result.means == results[0].means
        assert result.intervals == results[0].intervals


def test_aggregates_carry_no_value_of_a_single_query_and_the_file_carries_all(tmp_path: Path) -> None:
    result = evaluate({"secret query": {"a": 1.0}}, {"secret query": {"a": 1}, "b": {"a": 1}})
    assert "secret" not in json.dumps(result.to_dict())
    assert result.to_dict()["metrics"]["mrr@10"]["mean"] == 0.5
    result.write_per_query(tmp_path / "values.tsv")
    assert (tmp_path / "values.tsv").read_text().splitlines() == [
        "query-id\tndcg@10\trecall@10\tmrr@10",
        "secret query\t1.0\t1.0\t1.0",
        "b\t0.0\t0.0\t0.0",
    ]


@pytest.mark.parametrize("name", ["two words", "", "tab\tbed", " lead"])
def test_an_id_that_the_format_cannot_carry_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot carry"):
        write_run(tmp_path / "run", {"q": {name: 1.0}})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q Q0 b 1 0.5", "line 2: 5 fields"),
        ("q Q0 b 1 high tag", "line 2: the score 'high'"),
        ("q Q0 a 1 0.5 tag", "line 2: passage 'a' comes twice"),
    ],
)
def test_a_malformed_run_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "run").write_text(f"q Q0 a 1 0.5 tag\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_run(tmp_path / "run")


def test_a_missing_run_and_an_unwritable_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_run(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write_run(tmp_path / "file" / "run", {"q": {"a": 1.0}})


def test_a_failed_write_leaves_the_old_run_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", {"q": {"a": 1.0}})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_run(tmp_path / "run", {"q": {"a": 2.0}})
    assert read_run(tmp_path / "run") == {"q": {"a": 1.0}}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_judgements_read_alike_from_trec_and_from_beir(tmp_path: Path) -> None:
    (tmp_path / "trec").write_text("q1 0 a 2\nq1 0 b 0\n\nq2 0 a -1\n")
    (tmp_path / "beir").write_text("query-id\tcorpus-id\tscore\nq1\ta\t2\nq1\tb\t0\nq2\ta\t-1\n")
    wanted = {"q1": {"a": 2, "b": 0}, "q2": {"a": -1}}
    assert read_qrels(tmp_path / "trec") == read_qrels(tmp_path / "beir") == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q 0 a 1\nq 0 a 2\n", "line 2: query 'q' and passage 'a' are judged twice"),
        ("q 0 a 1.5\n", "line 1: the grade '1.5'"),
        ("query-id\tcorpus-id\tscore\nq a\n", "line 2: 2 fields"),
        ("query-id\tcorpus-id\tscore\n", "holds no judgements"),
    ],
)
def test_malformed_judgements_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "qrels").write_text(text)
    with pytest.raises(DataError, match=message):
        read_qrels(tmp_path / "qrels")


def test_missing_judgements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_qrels(tmp_path / "absent")


def test_judgements_of_unknown_ids_are_refused() -> None:
    check_qrels({"q": {"a": 1, "gone": 0}}, query_ids=["q"], passage_ids=["a"])
    with pytest.raises(DataError, match=r"unknown query 'other' \(1 such ids\)"):
        check_qrels({"q": {"a": 1}, "other": {"a": 1}}, query_ids=["q"], passage_ids=["a"])
    with pytest.raises(DataError, match=r"unknown passage 'b' as relevant \(2 such pairs\)"):
        check_qrels({"q": {"a": 1, "b": 1, "c": 2}}, query_ids=["q"], passage_ids=["a"])


def test_a_query_loses_the_passage_of_its_own_id_and_another_its_last() -> None:
    top = TopK(
        torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [9.0, float("-inf"), float("-inf")]]),
        torch.tensor([[0, 1, 2], [2, 0, 1], [2, MISSING, MISSING]]),
    )
    kept = without_self_matches(Ranking(query_ids=["a", "elsewhere", "c"], passage_ids=["a", "b", "c"], top=top), 2)
    assert kept.to_run() == {"a": {"b": 2.0, "c": 1.0}, "elsewhere": {"c": 3.0, "a": 2.0}, "c": {}}
    assert kept.top.indices.tolist() == [[1, 2], [2, 0], [MISSING, MISSING]]


def test_where_all_passages_were_ranked_the_row_ends_in_a_filler() -> None:
    top = TopK(torch.tensor([[2.0, 1.0]]), torch.tensor([[0, 1]]))
    kept = without_self_matches(Ranking(query_ids=["a"], passage_ids=["a", "b"], top=top), 5)
    assert kept.top.indices.tolist() == [[1, MISSING]]
