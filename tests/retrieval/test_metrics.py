from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.metrics import Metric
from lit_dpret.retrieval.search import TopK, lexicographic_rank, search
from lit_dpret.retrieval.trec_runs import Ranking, evaluate

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
def test_a_ranking_from_search_scores_as_its_run_does_in_trec_eval(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, passages = (
        torch.randint(-1, 2, (30, 6), generator=generator),
        torch.randint(-1, 2, (200, 6), generator=generator),
    )
    passage_ids = [f"p{i * 7 % 211}" for i in range(200)]
    query_ids = [f"q{i}" for i in range(30)]
    rng = np.random.default_rng(seed)
    qrels: Qrels = {
        f"q{q}": {passage_ids[i]: int(rng.integers(0, 4)) for i in rng.choice(200, 12, replace=False)}
        for q in reversed(range(2, 33))
    }
    qrels["q7"]["not-in-the-corpus"] = 2
    top = search(queries.float(), passages.float(), 100, tie_rank=lexicographic_rank(passage_ids))
    ranking = Ranking(query_ids=query_ids, passage_ids=passage_ids, top=top)
    assert_equals_trec_eval(ranking, ranking.to_run(), qrels, [m for m in METRICS if m != "ndcg@1000"])


def test_a_metric_is_written_the_way_it_is_read() -> None:
    read = {"NDCG@10": "ndcg@10", " mrr@5 ": "mrr@5", "hit@3": "success@3", "P@5": "precision@5"}
    assert {name: str(Metric.parse(name)) for name in read} == read
    for wrong in ("ndcg", "ndcg@0", "f1@10", "mrr@-1", "recall@1.5"):
        with pytest.raises(ConfigurationError, match=wrong):
            Metric.parse(wrong)


def test_what_cannot_be_judged_is_refused() -> None:
    ranking = Ranking(
        query_ids=["q"], passage_ids=list("abcd"), top=TopK(torch.tensor([[1.0, 0.5]]), torch.tensor([[0, 1]]))
    )
    with pytest.raises(ConfigurationError, match="first 2 passages cannot answer ndcg@3, recall@10"):
        evaluate(ranking, {"q": {"a": 1}}, ["ndcg@3", "mrr@2", "recall@10"])
    with pytest.raises(DataError, match="no relevance judgements"):
        evaluate(ranking, {}, ["mrr@1"])
    with pytest.raises(DataError, match="NaN score for query 'q'"):
        evaluate({"q": {"a": float("nan")}}, {"q": {"a": 1}})
    with pytest.raises(DataError, match="'q9' is not among the 1 query ids"):
        evaluate({"q9": {"a": 1.0}}, {"q": {"a": 1}})
    with pytest.raises(DataError, match="more than one row"):
        Ranking(
            query_ids=["q", "q"], passage_ids=["a"], top=TopK(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.long))
        )


@pytest.mark.parametrize(
    ("scores", "indices", "passage_ids", "message"),
    [
        ([[1.0, float("nan")]], [[0, 1]], ["a", "b"], "NaN score in 1 of 1 rows"),
        ([[1.0, 0.5]], [[1, 1]], ["a", "b"], "same passage twice"),
        ([[1.0, 0.5]], [[0, 2]], ["a", "b"], "outside -1..1"),
        ([[1.0, 0.5]], [[0, 1]], ["a", "a"], "same passage id"),
    ],
)
def test_a_ranking_that_would_count_a_passage_twice_is_refused(
    scores: list[list[float]], indices: list[list[int]], passage_ids: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Ranking(query_ids=["q"], passage_ids=passage_ids, top=TopK(torch.tensor(scores), torch.tensor(indices)))
