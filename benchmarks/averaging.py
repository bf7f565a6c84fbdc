"""What averages of the weights bring at epsilon 3: the recipe of experiment=best_eps3, with and without.

A frozen all-MiniLM-L6-v2, a query head in 128 directions, 8,000 passages of InsuranceQA, trained by the real path
(DataModule, accountant, Trainer). An average is post-processing, so that one run can be compared with and without: the
noise of a run is keyed by a number (``privacy.noise_seed``), and is the same for each row of one seed.

    python benchmarks/averaging.py --cache ~/.cache/lit-dpret

The settings were written down before the first run, and all of them are told. They differ in the schedule of the
learning rate: a schedule that ends at zero averages over its last steps by itself.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import machine, say, write
from frozen_head import insuranceqa_options, make_trainer, ndcg
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.datamodules.insuranceqa import InsuranceQADataModule
from lit_dpret.encoders import TextEncoder
from lit_dpret.modules import FrozenDualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import PublicPassages
from lit_dpret.retrieval.statistics import paired_randomisation_test

STEPS = 40
SCHEDULES = ("linear", "constant")


class SecondHalf(WeightAveraging):
    """The mean of the weights of the second half of the steps."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= STEPS // 2


AVERAGES: dict[str, Any] = {
    "none": lambda: [],
    "ema 0.8": lambda: [EMAWeightAveraging(decay=0.8, use_buffers=False)],
    "ema 0.9": lambda: [EMAWeightAveraging(decay=0.9, use_buffers=False)],
    "ema 0.95": lambda: [EMAWeightAveraging(decay=0.95, use_buffers=False)],
    "second half": lambda: [SecondHalf(use_buffers=False)],
}


class Bench:
    """The data, the embeddings, and one run after another over them."""

    def __init__(self, *, data: str | None, cache: Path, split: str) -> None:
        self.folder, self.cache = data, cache
        source = self.datamodule()
        source.setup()
        self.passages = dict(sorted(source.public_passages().items()))
        self.training = {row.query_id: row.query for row in source.pair_rows("train")}
        self.queries, self.qrels = source.evaluation_set(split)
        self.encoder = TextEncoder.from_pretrained("minilm", normalise=True, query_max_length=32, passage_max_length=64)
        self.known: dict[str, Any] = {}

    def datamodule(self, **known: Any) -> InsuranceQADataModule:
        return InsuranceQADataModule(
            folder=self.folder,
            max_passages=8000,
            expected_batch_size=2048,
            physical_batch_size=4096,
            rows_per_unit="all",
            **known,
        )

    def run(self, schedule: str, average: str, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Train once; nDCG@10 of every query, and what the run cost in time."""
        L.seed_everything(seed, verbose=False)
        noise = {"noise_multiplier": self.known.get("noise_multiplier"), "noise_seed": seed}
        module = FrozenDualEncoder(
            privacy=PublicPassages(eps=3.0, max_grad_norm=2.0, pool_size=2048, **noise),
            optimizer=OptimizerSpec(name="sgd", lr=4.0, schedule=schedule),  # type: ignore[arg-type]
            encoder=self.encoder,
            head_dim=128,
            temperature=0.035,
            max_passage_length=64,
            cache_dir=self.cache,
        )
        module.prepare_texts(self.passages, self.training)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            accountant = PrivacyAccountant(run_dir=folder, eps_log_points=1)
            trainer = make_trainer(Path(folder), steps=STEPS, callbacks=[accountant, *AVERAGES[average]()])
            trainer.fit(module, datamodule=self.datamodule(cap=self.known.get("cap")))
        plan: Any = accountant.plan
        self.known = {"noise_multiplier": plan.noise_multiplier, "cap": plan.law.cap}
        seconds = time.perf_counter() - start
        values = ndcg(module, self.passages, self.queries, self.qrels)
        return values, {"seed": seed, "ndcg@10": float(values.mean()), "train_seconds": round(seconds, 1)}


def main() -> None:
    parser = insuranceqa_options(__doc__, "averaging.json")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    bench = Bench(data=args.data, cache=args.cache, split=args.split)
    rows: list[dict[str, Any]] = []
    for schedule in SCHEDULES:
        without: np.ndarray | None = None
        for average in AVERAGES:
            found = [bench.run(schedule, average, seed) for seed in range(args.seeds)]
            values = np.mean([each for each, _ in found], axis=0)
            row = {"schedule": schedule, "average": average, "ndcg@10": float(values.mean())}
            row["per_seed"] = [facts for _, facts in found]
            if without is None:
                without = values
            else:
                test = paired_randomisation_test(values, without)
                row["over_none"] = {"mean": float((values - without).mean()), "p_value": test.p_value}
            rows.append(row)
            say(json.dumps({k: v for k, v in row.items() if k != "per_seed"}))
    report = {
        "data": {"name": "InsuranceQA", "passages": len(bench.passages), f"{args.split}_queries": len(bench.queries)},
        "recipe": "experiment=best_eps3: public_passages, eps 3, 40 steps, sgd, head_dim 128, all-MiniLM-L6-v2 frozen",
        "noise": {"noise_multiplier": bench.known["noise_multiplier"], "keyed_by": "privacy.noise_seed = seed"},
        "rows": rows,
        "tuning": "none for this table; the recipe was chosen on dev without averages, which epsilon does not cover",
        "threads": torch.get_num_threads(),
        **machine("torch", "lightning", "transformers", "dp-accounting"),
    }
    write(report, args.out)


if __name__ == "__main__":
    main()
