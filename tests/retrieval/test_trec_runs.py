from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchmetrics import MetricCollection
from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall

from lit_dpret.errors import ConfigurationError, DataError, StorageError
from lit_dpret.retrieval.metrics import Metric, gains_of_indices
from lit_dpret.retrieval.search import MISSING, TopK, lexicographic_rank, search
from lit_dpret.retrieval.torch_metric import RetrievalMetric
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


def test_a_run_is_written_in_the_order_and_form_of_trec_and_reads_back_as_the_same_float32_scores(
    tmp_path: Path,
) -> None:
    run = awkward_run()
    write_run(tmp_path / "deep" / "run.trec", run)
    assert read_run(tmp_path / "deep" / "run.trec") == run
    write_run(tmp_path / "run", {"q": {"a": 0.5, "c": 0.25, "b": 0.5}}, tag="mine")
    assert (tmp_path / "run").read_text() == "q Q0 b 1 0.5 mine\nq Q0 a 2 0.5 mine\nq Q0 c 3 0.25 mine\n"


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
    ("read", "text", "named"),
    [
        (read_run, "q Q0 a 1 0.5 tag\nq Q0 b 1 0.5\n", "line 2: 5 fields"),
        (read_run, "q Q0 a 1 0.5 tag\nq Q0 b 1 high tag\n", "line 2: the score 'high'"),
        (read_run, "q Q0 a 1 0.5 tag\nq Q0 a 1 0.5 tag\n", "line 2: passage 'a'"),
        (read_run, None, "file"),
        (read_qrels, "q 0 a 1\nq 0 a 2\n", "line 2: query 'q' and passage 'a'"),
        (read_qrels, "q 0 a 1.5\n", "line 1: the grade '1.5'"),
        (read_qrels, "query-id\tcorpus-id\tscore\nq a\n", "line 2: 2 fields"),
        (read_qrels, "query-id\tcorpus-id\tscore\n", "no judgements"),
        (read_qrels, None, "file"),
    ],
)
def test_a_missing_or_malformed_file_is_refused_with_its_line(
    read: Callable[[Path], object], text: str | None, named: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(DataError, match=named):
        read(tmp_path / "file")


def test_a_failed_write_is_refused_and_leaves_the_old_run_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", {"q": {"a": 1.0}})
    with pytest.raises(StorageError, match="run"):
        write_run(tmp_path / "run" / "below", {"q": {"a": 1.0}})

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
    whole = TopK(torch.tensor([[2.0, 1.0]]), torch.tensor([[0, 1]]))  # of which no more passages are left to fill in
    kept = without_self_matches(Ranking(query_ids=["a"], passage_ids=["a", "b"], top=whole), 5)
    assert kept.top.indices.tolist() == [[1, MISSING]]


Run = dict[str, dict[str, float]]


Qrels = dict[str, dict[str, int]]


pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec_eval-terrier, of the [dev] extra, is the truth here")


def cut(run: Run, k: int) -> Run:
    """The first k of every query, ordered as trec_eval orders."""
    ordered = {q: sorted(s, key=lambda d: (np.float32(s[d]), d.encode()), reverse=True) for q, s in run.items()}
    return {q: {d: run[q][d] for d in docs[:k]} for q, docs in ordered.items()}


def trec_eval(run: Run, qrels: Qrels, name: str) -> dict[str, float]:
    """What trec_eval -c says of every judged query."""
    kind, k = name.split("@")
    measure, key = {
        "ndcg": (f"ndcg_cut.{k}", f"ndcg_cut_{k}"),
        "recall": (f"recall.{k}", f"recall_{k}"),
        "mrr": ("recip_rank", "recip_rank"),
        "success": (f"success.{k}", f"success_{k}"),
        "map": (f"map_cut.{k}", f"map_cut_{k}"),
        "precision": (f"P.{k}", f"P_{k}"),
    }[kind]
    found = pytrec_eval.RelevanceEvaluator(qrels, {measure}).evaluate(cut(run, int(k)) if kind == "mrr" else run)
    return {query: found.get(query, {}).get(key, 0.0) for query in qrels}


def assert_equals_trec_eval(run: Any, plain: Run, qrels: Qrels, metrics: list[str]) -> None:
    result = evaluate(run, qrels, metrics, resamples=2)
    for name in metrics:
        truth = trec_eval(plain, qrels, name)
        values = dict(zip(result.query_ids, result.per_query[name].tolist(), strict=True))
        assert values.keys() == truth.keys()
        assert max(abs(values[q] - truth[q]) for q in truth) <= 1e-12, name
        assert result.means[name] == pytest.approx(sum(truth.values()) / len(truth), abs=1e-12)


METRICS = [
    "ndcg@1", "ndcg@10", "ndcg@1000", "recall@1", "recall@10", "recall@100", "mrr@1", "mrr@10", "mrr@100",
    "success@1", "success@10", "map@10", "map@100", "precision@1", "precision@10", "precision@100",
]  # fmt: skip


def random_collection(seed: int) -> tuple[Run, Qrels]:
    """Graded and negative judgements, heavy ties, scores that tie only as float32, missing queries."""
    rng = np.random.default_rng(seed)
    docs = [f"{'é' if i % 5 == 0 else 'doc'}{i * 37 % 1009}" for i in range(300)]
    qrels: Qrels = {
        f"q{q}": {docs[i]: int(rng.integers(-1, 4)) for i in rng.choice(300, rng.integers(1, 40), replace=False)}
        for q in range(40)
    }
    run: Run = {}
    for q in range(5, 45):
        depth = int(rng.integers(0, 250))
        scores = rng.integers(0, 6, depth) + rng.choice([0.0, 1e-9, 0.25], depth)
        run[f"q{q}"] = {docs[i]: float(s) for i, s in zip(rng.permutation(300)[:depth], scores, strict=True)}
    return run, qrels


@pytest.mark.parametrize("seed", range(5))
def test_every_value_equals_trec_eval_with_ties_grades_and_missing_queries(seed: int) -> None:
    run, qrels = random_collection(seed)
    assert_equals_trec_eval(run, {q: s for q, s in run.items() if s}, qrels, METRICS)


@pytest.mark.parametrize("seed", range(3))
def test_a_ranking_from_search_its_run_and_its_file_score_as_in_trec_eval(seed: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, passages = (torch.randint(-1, 2, (rows, 6), generator=generator).float() for rows in (30, 200))
    passage_ids = [f"p{i * 7 % 211}" for i in range(200)]
    rng = np.random.default_rng(seed)
    qrels: Qrels = {
        f"q{q}": {passage_ids[i]: int(rng.integers(0, 4)) for i in rng.choice(200, 12, replace=False)}
        for q in reversed(range(2, 33))
    }
    qrels["q7"]["not-in-the-corpus"] = 2
    scores, indices = search(queries, passages, 100, tie_rank=lexicographic_rank(passage_ids))
    indices[3, 40:], scores[3, 40:] = MISSING, float("-inf")
    ranking = Ranking(query_ids=[f"q{i}" for i in range(30)], passage_ids=passage_ids, top=TopK(scores, indices))
    assert len(ranking.to_run()["q3"]) == 40
    write_run(tmp_path / "run", ranking)
    for run in (ranking, ranking.to_run(), read_run(tmp_path / "run")):
        assert_equals_trec_eval(run, ranking.to_run(), qrels, [m for m in METRICS if m != "ndcg@1000"])
    assert evaluate(ranking, qrels).intervals == evaluate(read_run(tmp_path / "run"), qrels).intervals


def test_a_metric_is_written_the_way_it_is_read() -> None:
    read = {"NDCG@10": "ndcg@10", " mrr@5 ": "mrr@5", "hit@3": "success@3", "P@5": "precision@5"}
    assert {name: str(Metric.parse(name)) for name in read} == read
    for wrong in ("ndcg", "ndcg@0", "f1@10", "mrr@-1", "recall@1.5"):
        with pytest.raises(ConfigurationError, match=wrong):
            Metric.parse(wrong)


def ranking(scores: list[list[float]], indices: list[list[int]], passage_ids: str = "abcd") -> Ranking:
    top = TopK(torch.tensor(scores), torch.tensor(indices))
    return Ranking(query_ids=["q"] * len(scores), passage_ids=list(passage_ids), top=top)


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: evaluate(ranking([[1.0, 0.5]], [[0, 1]]), {"q": {"a": 1}}, ["ndcg@3", "mrr@2", "recall@10"]),
         ConfigurationError, "ndcg@3, recall@10"),
        (lambda: evaluate(ranking([[1.0, 0.5]], [[0, 1]]), {}, ["mrr@1"]), DataError, "judgements"),
        (lambda: evaluate({"q": {"a": float("nan")}}, {"q": {"a": 1}}), DataError, "query 'q'"),
        (lambda: evaluate({"q9": {"a": 1.0}}, {"q": {"a": 1}}), DataError, "'q9'"),
        (lambda: ranking([[1.0], [1.0]], [[0], [0]]), DataError, "query id"),
        (lambda: ranking([[1.0, float("nan")]], [[0, 1]]), DataError, "1 of 1 rows"),
        (lambda: ranking([[1.0, 0.5]], [[1, 1]]), DataError, "same passage twice"),
        (lambda: ranking([[1.0, 0.5]], [[0, 4]]), DataError, "outside -1 to 3"),
        (lambda: ranking([[1.0, 0.5]], [[0, 1]], "aa"), DataError, "same passage id"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_or_would_count_a_passage_twice_is_refused(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()


# -- as a metric of torchmetrics -------------------------------------------------------------------


NAMES = ["ndcg@10", "map@5", "success@1", "recall@3"]


def run_and_judgements() -> tuple[dict[str, dict[str, float]], dict[str, dict[str, int]]]:
    rng = np.random.default_rng(0)
    qrels = {f"q{q}": {f"d{d}": int(rng.integers(0, 3)) for d in rng.choice(40, 6, replace=False)} for q in range(50)}
    run = {f"q{q}": {f"d{d}": float(rng.random()) for d in rng.permutation(40)[:20]} for q in range(45)}
    return run, qrels


def rows_of_queries() -> dict[str, torch.Tensor]:
    """Every query's returned passages with their scores, and what was judged and not returned."""
    run, qrels = run_and_judgements()
    found = [
        (run.get(query, {}).get(passage, -np.inf), judged.get(passage, 0), number)
        for number, (query, judged) in enumerate(qrels.items())
        for passage in {**run.get(query, {}), **judged}
    ]
    preds, target, indexes = zip(*found, strict=True)
    return {"preds": torch.tensor(preds), "target": torch.tensor(target), "indexes": torch.tensor(indexes)}


def some(part: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: value[part] for name, value in rows_of_queries().items()}


def test_rows_in_any_order_and_batches_give_the_evaluation_of_the_whole() -> None:
    wanted = evaluate(*run_and_judgements(), NAMES)
    metrics = MetricCollection({name: RetrievalMetric(name) for name in NAMES})
    order = torch.randperm(len(rows_of_queries()["preds"]), generator=torch.Generator().manual_seed(1))
    for part in order.split(97):  # a query's rows lie in several batches
        metrics.update(**some(part))
    found = metrics.compute()
    assert all(value.shape == () and value.dtype == torch.float64 for value in found.values())
    assert {name: float(value) for name, value in found.items()} == pytest.approx(dict(wanted.means), abs=1e-12)
    for name, metric in metrics.items():
        assert np.array_equal(metric.per_query(), wanted.per_query[name])
    metrics.reset()
    assert float(metrics["map@5"].update(**some(order)) or metrics["map@5"].compute()) == pytest.approx(
        wanted.means["map@5"], abs=1e-12
    )


@pytest.mark.parametrize("action", ["neg", "pos", "skip"])
@pytest.mark.parametrize("aggregation", ["mean", "median", "max"])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [("ndcg@5", RetrievalNormalizedDCG), ("recall@5", RetrievalRecall), ("mrr@5", RetrievalMRR)],
)
def test_where_all_candidates_are_passed_it_is_the_metric_of_torchmetrics(
    name: str, theirs: Any, action: str, aggregation: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    indexes = torch.randint(0, 30, (400,), generator=generator)
    scores = torch.randperm(400, generator=generator) / 400  # no ties, which torchmetrics averages over
    grades = torch.randint(0, 8, (400,), generator=generator).eq(1).long()
    settings: Any = {"empty_target_action": action, "aggregation": aggregation}
    found = RetrievalMetric(name, **settings)(scores, grades, indexes=indexes)
    wanted = theirs(top_k=5, **settings)(scores, grades, indexes=indexes)
    assert float(found) == pytest.approx(float(wanted), abs=1e-6)


class Validated(L.LightningModule):
    """Validates two batches, and trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.loss = RetrievalMetric("ndcg@10"), torch.nn.Linear(1, 1)

    def validation_step(self, batch: Any, index: int) -> None:
        self.metric.update(*batch)
        self.log("val/ndcg@10", self.metric, batch_size=1)


def test_it_is_logged_by_lightning_and_stays_exact_in_half_precision(tmp_path: Path) -> None:
    module, data = Validated().bfloat16(), torch.utils.data.TensorDataset(*rows_of_queries().values())
    trainer = L.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    logged = trainer.validate(module, torch.utils.data.DataLoader(data, batch_size=311), verbose=False)
    assert logged[0]["val/ndcg@10"] == pytest.approx(evaluate(*run_and_judgements()).means["ndcg@10"], abs=1e-6)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="f1@10"):
        RetrievalMetric("f1@10")
    with pytest.raises(DataError, match="NaN"):
        RetrievalMetric().update(torch.tensor([float("nan")]), torch.tensor([1]), indexes=torch.tensor([0]))
    one = {"preds": torch.ones(1), "target": torch.zeros(1, dtype=torch.long), "indexes": torch.zeros(1).long()}
    with pytest.raises(ValueError, match="no relevant passage"):
        RetrievalMetric(empty_target_action="error")(**one)


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    metric = RetrievalMetric("ndcg@10")
    part = torch.arange(len(rows_of_queries()["preds"]))
    metric.update(**some(part[part % 3 == 0] if rank == 0 else part[part % 3 > 0]))
    torch.save(metric.compute(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_agree_on_the_mean_over_all_their_queries(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, args=(port, str(tmp_path)), nprocs=2, start_method="fork")
    wanted = pytest.approx(evaluate(*run_and_judgements()).means["ndcg@10"], abs=1e-12)
    first, second = (float(torch.load(tmp_path / name, weights_only=True)) for name in ("0.pt", "1.pt"))
    assert first == wanted == second


@pytest.mark.parametrize("indices", [[[0, 2]], [[0], [1]]], ids=["a passage that does not exist", "a query too many"])
def test_a_ranking_of_other_passages_or_queries_gets_no_grades(indices: list[list[int]]) -> None:
    """Without the refusal its index would be read as a passage of the next query."""
    with pytest.raises(DataError, match="passage"):
        gains_of_indices(np.array(indices), ["q"], ["a", "b"], {"q": {"a": 1}})
