from __future__ import annotations

import os
import socket
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

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.torch_metric import RetrievalMetric
from lit_dpret.retrieval.trec_runs import evaluate

METRICS = ["ndcg@10", "map@5", "success@1", "recall@3"]


def run_and_judgements() -> tuple[dict[str, dict[str, float]], dict[str, dict[str, int]]]:
    rng = np.random.default_rng(0)
    qrels = {f"q{q}": {f"d{d}": int(rng.integers(0, 3)) for d in rng.choice(40, 6, replace=False)} for q in range(50)}
    run = {f"q{q}": {f"d{d}": float(rng.random()) for d in rng.permutation(40)[:20]} for q in range(45)}
    return run, qrels


def rows() -> dict[str, torch.Tensor]:
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
    return {name: value[part] for name, value in rows().items()}


def test_rows_in_any_order_and_batches_give_the_evaluation_of_the_whole() -> None:
    wanted = evaluate(*run_and_judgements(), METRICS)
    metrics = MetricCollection({name: RetrievalMetric(name) for name in METRICS})
    order = torch.randperm(len(rows()["preds"]), generator=torch.Generator().manual_seed(1))
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
    module, data = Validated().bfloat16(), torch.utils.data.TensorDataset(*rows().values())
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
    part = torch.arange(len(rows()["preds"]))
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
