from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.runs import evaluate
from lit_dpret.retrieval.torch_metric import RetrievalMetrics

METRICS = ["ndcg@10", "map@5", "success@1"]


def collection() -> tuple[dict[str, dict[str, float]], dict[str, dict[str, int]]]:
    rng = np.random.default_rng(0)
    qrels = {f"q{q}": {f"d{d}": int(rng.integers(0, 3)) for d in rng.choice(40, 6, replace=False)} for q in range(50)}
    run = {f"q{q}": {f"d{d}": float(rng.integers(0, 9)) for d in rng.permutation(40)[:20]} for q in range(45)}
    return run, qrels


def shard(part: slice) -> tuple[Any, Any]:
    run, qrels = collection()
    names = list(qrels)[part]
    return {name: run[name] for name in names if name in run}, {name: qrels[name] for name in names}


def values(metric: RetrievalMetrics) -> dict[str, float]:
    return {name: float(value) for name, value in metric.compute().items()}


def test_batches_of_any_size_add_up_to_the_evaluation_of_all() -> None:
    run, qrels = collection()
    metric = RetrievalMetrics(metrics=METRICS)
    for start, stop in ((0, 1), (1, 20), (20, 50)):
        metric.update(*shard(slice(start, stop)))
    assert values(metric) == pytest.approx(dict(evaluate(run, qrels, METRICS).means), abs=1e-12)
    metric.reset()
    metric.update(run, qrels)
    assert values(metric) == pytest.approx(dict(evaluate(run, qrels, METRICS).means), abs=1e-12)


def test_forward_gives_the_batch_and_keeps_the_whole() -> None:
    run, qrels = collection()
    metric = RetrievalMetrics(metrics=["ndcg@10"])
    first = metric(*shard(slice(0, 10)))
    metric(*shard(slice(10, 50)))
    assert float(first["ndcg@10"]) == pytest.approx(evaluate(*shard(slice(0, 10)), ["ndcg@10"]).means["ndcg@10"])
    assert values(metric)["ndcg@10"] == pytest.approx(evaluate(run, qrels, ["ndcg@10"]).means["ndcg@10"])


def test_the_sums_stay_in_float64_where_the_module_goes_to_half_precision() -> None:
    module = torch.nn.Module()
    module.metric = RetrievalMetrics(metrics=["ndcg@10"])
    module.bfloat16()
    assert module.metric.totals.dtype == torch.float64


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no metric"):
        RetrievalMetrics(metrics=[])
    with pytest.raises(DataError, match="NaN"):
        RetrievalMetrics().update({"q": {"a": float("nan")}}, {"q": {"a": 1}})
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert np.isnan(float(RetrievalMetrics(metrics=["mrr@1"]).compute()["mrr@1"]))


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    metric = RetrievalMetrics(metrics=METRICS)
    metric.update(*shard(slice(0, 13) if rank == 0 else slice(13, 50)))
    torch.save(values(metric), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_agree_on_the_mean_over_all_their_queries(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, args=(port, str(tmp_path)), nprocs=2, start_method="fork")
    wanted = pytest.approx(dict(evaluate(*collection(), METRICS).means), abs=1e-12)
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("0.pt", "1.pt"))
    assert first == wanted == second
