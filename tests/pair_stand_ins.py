"""Small modules that contrast pairs, in float64, and rows for them. Imported by path; not a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from stand_ins import Line
from tiny_models import WORDS
from torch import Tensor, nn

from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.losses import InBatchSoftmaxLoss
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.pair_module import PairModule
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.modes import BatchClip, LogitDP, PerExampleDuplicated, PrivacyMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan


class Pairs(PairModule):
    """A network on features of four numbers, shared by both sides or one for each."""

    def __init__(
        self, *, privacy: PrivacyMode, loss: Any = None, temperature: float = 0.5, separate: bool = False, dim: int = 3
    ) -> None:
        super().__init__(privacy=privacy, optimizer=OptimizerSpec(name="sgd", lr=0.1))
        torch.manual_seed(3)
        self.loss = InBatchSoftmaxLoss(temperature=temperature, similarity="cosine") if loss is None else loss
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, dim)).double()
        self.other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, dim)).double() if separate else None

    def collate_rows(self, rows: list[Line]) -> dict[str, Tensor]:
        return {"query": _numbers([row.query for row in rows]), "passage": _numbers([row.passage for row in rows])}

    def represent(self, features: Tensor, side: str) -> Tensor:
        net = self.net if side == "query" or self.other is None else self.other
        found: Tensor = net(features)
        return found

    def pair_shape(self) -> dict[str, Any]:
        return {"dim": 3, "positions": 1, "shared": self.other is None}


def _numbers(texts: list[str]) -> Tensor:
    return torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(hash_of(t))).double() for t in texts])


def hash_of(text: str) -> int:
    """Return a number that is the same in every process."""
    return int.from_bytes(text.encode(), "big") % (2**31)


def logit_dp(**settings: Any) -> LogitDP:
    return LogitDP(**{"eps": 1.0, "delta": 1e-6, "max_logit_grad_norm": 0.02, **settings})


def duplicated(**settings: Any) -> PerExampleDuplicated:
    return PerExampleDuplicated(**{"eps": 1.0, "delta": 1e-6, "max_grad_norm": 0.02, **settings})


def batch_clip(**settings: Any) -> BatchClip:
    return BatchClip(**{"eps": 1.0, "delta": 1e-6, "max_grad_norm": 0.02, **settings})


def records(n: int, seed: int = 0) -> dict[str, Tensor]:
    """Return the features of n records for `Pairs`."""
    generator = torch.Generator().manual_seed(seed)
    return {side: torch.randn(n, 4, generator=generator, dtype=torch.float64) for side in ("query", "passage")}


def without(rows: dict[str, Any], k: int) -> dict[str, Any]:
    """Return the records without record ``k``."""
    n = len(rows["query"])
    kept = [i for i in range(n) if i != k]
    return {name: value[kept][:, kept] if name == "answers" else value[kept] for name, value in rows.items()}


def count_of(rows: Any) -> int:
    """Return the number of records in nested features."""
    while isinstance(rows, dict):
        rows = next(iter(rows.values()))
    return len(rows)


def batch_of(rows: dict[str, Any]) -> UnitBatch:
    """Return one sub-batch in which each record is a unit."""
    n = count_of(rows)
    units = torch.arange(n)
    return UnitBatch(rows=rows, unit_ids=units, mask=torch.ones(n, dtype=torch.bool), step=0, part=0, last=True)


def plan_of(
    mode: Any, module: Any, *, n_max: int, neighbours: str = "zero_out", expected: int | None = None
) -> PrivacyPlan:
    """Return a plan of one full-batch step for a mode of coupled losses."""
    return mode.plan(  # type: ignore[no-any-return]
        Request(n_max, expected or n_max), units=expected or n_max, steps=1, module=module
    )


class Request:
    """A request with every unit in one batch, or by another sampling law."""

    cap, rows_per_unit = None, "one"

    def __init__(
        self, physical: int, expected: int, sampling: str = "full_batch", sample_rate: float | None = None
    ) -> None:
        self.physical_batch_size, self.expected_batch_size = physical, expected
        self.sampling, self.sample_rate = sampling, sample_rate


def clipped_sum(module: Any, plan: PrivacyPlan, rows: dict[str, Any] | None) -> Tensor:
    """Return the mode's sum for one sub-batch, before noise, as one vector."""
    mode = module.privacy
    mode.attach(module, plan, KeyedStream(b"k" * 32, "run"))
    if rows is not None and count_of(rows):
        batch = batch_of(rows)
        module.before_batch(batch)
        mode.contribute(module, batch)
    sums = mode.take()
    return torch.cat([sums[name].flatten().double() for name in sums])


def data_module(folder: Path, **settings: Any) -> PairsDataModule:
    """Write thirteen queries, each with its own passage."""
    (folder / "qrels").mkdir(parents=True)
    for name, width in (("corpus", 5), ("queries", 3)):
        texts = [" ".join(WORDS[(7 * i + j * (1 + i % 3)) % 13] for j in range(width)) for i in range(13)]
        lines = [json.dumps({"_id": f"{name}{i}", "title": "", "text": text}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    judged = [f"queries{i}\tcorpus{i}\t1" for i in range(13)]
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(judged) + "\n")
    known = {"expected_batch_size": 13, "physical_batch_size": 13, "sampling": "shuffle", "cap": None}
    return PairsDataModule(folder=folder, **{**known, **settings})
