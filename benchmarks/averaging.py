"""Measure the benefit of weight averaging at epsilon 3: the recipe of experiment=best_eps3, with and without.

    python benchmarks/averaging.py --cache ~/.cache/lit-dpret

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import machine, options, say, write
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

from lit_dpret.callbacks.privacy_accountant import PrivacyAccountant
from lit_dpret.datamodules.insuranceqa import InsuranceQADataModule
from lit_dpret.modules.frozen_dual_encoder import FrozenDualEncoder
from lit_dpret.modules.optimizers import OptimizerSpec, Schedule
from lit_dpret.privacy.modes import PublicPassages
from lit_dpret.retrieval.statistics import paired_randomisation_test
from lit_dpret.tasks.ranking import score_embeddings

STEPS, BATCH = 40, 2048
SCHEDULES: tuple[Schedule, ...] = ("linear", "constant")


class SecondHalf(WeightAveraging):
    """The mean of the weights over the second half of the steps."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= STEPS // 2


AVERAGES: dict[str, Any] = {
    "none": list,
    **{f"ema {decay}": lambda decay=decay: [EMAWeightAveraging(decay=decay, use_buffers=False)]
       for decay in (0.8, 0.9, 0.95)},
    "second half": lambda: [SecondHalf(use_buffers=False)],
}  # fmt: skip


def run(data: InsuranceQADataModule, split: str, schedule: Schedule, average: str, seed: int, cache: Path) -> Any:
    """Train once and return nDCG@10 of every query; the noise of a run depends on its seed."""
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        privacy = PublicPassages(
            eps=3.0, max_grad_norm=2.0, pool_size=2048, noise_seed=seed, secret_file=Path(folder) / "secret"
        )
        model = FrozenDualEncoder(
            privacy=privacy, optimizer=OptimizerSpec(name="sgd", lr=4.0, schedule=schedule), head_dim=128,
            temperature=0.035, max_passage_length=64, max_query_length=32, cache_dir=cache,
        )  # fmt: skip
        queries, qrels = data.evaluation_set(split)
        passages = dict(data.public_passages())
        model.prepare_texts(passages, {**data.collection.queries, **queries})
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            callbacks=[PrivacyAccountant(run_dir=folder, eps_log_points=1), *AVERAGES[average]()],
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
        asked, found = model.encode_queries(list(queries.values())), model.encode_passages(list(passages.values()))
    return np.asarray(score_embeddings(list(queries), asked, list(passages), found, qrels).per_query["ndcg@10"])


def main() -> None:
    parser = options(__doc__ or "", "averaging.json", seeds=3)
    parser.add_argument("--cache", type=Path, required=True, help="folder for embeddings; as private as the queries")
    shared = os.environ.get("LIT_DPRET_DATA")
    parser.add_argument(
        "--data", default=shared and str(Path(shared) / "insuranceqa"),
        help="folder of InsuranceQA; default $LIT_DPRET_DATA/insuranceqa, else the package",
    )  # fmt: skip
    parser.add_argument("--split", choices=["dev", "test"], default="test")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    data = InsuranceQADataModule(
        folder=args.data, max_passages=8000, expected_batch_size=BATCH, physical_batch_size=2 * BATCH,
        rows_per_unit="all",
    )  # fmt: skip
    data.setup("fit")
    rows: list[dict[str, Any]] = []
    for schedule in SCHEDULES:
        without: Any = None
        for average in AVERAGES:
            per_seed, found = [], []
            for seed in range(args.seeds):
                start = time.perf_counter()
                found.append(run(data, args.split, schedule, average, seed, args.cache))
                seconds = round(time.perf_counter() - start, 1)
                per_seed.append({"seed": seed, "ndcg@10": float(found[-1].mean()), "train_seconds": seconds})
            values = np.mean(found, axis=0)
            row = {"schedule": schedule, "average": average, "ndcg@10": float(values.mean()), "per_seed": per_seed}
            if without is None:
                without = values
            else:
                test = paired_randomisation_test(values, without)
                row["over_none"] = {"mean": float((values - without).mean()), "p_value": test.p_value}
            rows.append(row)
            say(json.dumps({k: v for k, v in row.items() if k != "per_seed"}))
    counts = {"passages": len(data.public_passages()), f"{args.split}_queries": len(data.evaluation_set(args.split)[0])}
    report = {
        "data": {"name": "InsuranceQA", **counts},
        "recipe": "experiment=best_eps3: public_passages, eps 3, 40 steps, sgd, head_dim 128, all-MiniLM-L6-v2 frozen",
        "noise": {"keyed_by": "privacy.noise_seed = seed"},
        "rows": rows,
        "tuning": "none for this table; the recipe was chosen on dev without averages, which epsilon does not cover",
        "threads": torch.get_num_threads(),
        **machine("torch", "lightning", "transformers", "dp-accounting"),
    }
    write(report, args.out)


if __name__ == "__main__":
    main()
