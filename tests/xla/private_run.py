"""One private training of a tiny T5, on the CPU or on an XLA device, told as JSON; `test_private_training` starts it.

In a process of its own, because autograd's engine counts the kinds of devices when it first runs, and because XLA
reads its settings when it is imported.

    PJRT_DEVICE=CPU python tests/xla/private_run.py FOLDER '{"device": "xla", "steps": 4}'
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from tiny_generator import copy_pairs, generator  # noqa: E402

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard  # noqa: E402
from lit_dpret.distributed.xla_processes import XLAProcesses  # noqa: E402
from lit_dpret.modules.query_generator import QueryGenerator  # noqa: E402
from lit_dpret.privacy.batches import Draw  # noqa: E402
from lit_dpret.privacy.modes import DPSGD, NoPrivacy  # noqa: E402


class Pairs(L.LightningDataModule):
    """Units of one to three pairs; few are drawn, so that physical batches are full, partly full and empty."""

    sampling, cap, sample_rate, max_rows_per_unit = "truncated_poisson", None, None, 3
    n_units, n_pairs, unit_by = 64, copy_pairs(66), None

    def __init__(self, *, rows_per_unit: str, expected: int, physical: int) -> None:
        super().__init__()
        self.rows_per_unit, self.expected_batch_size, self.physical_batch_size = rows_per_unit, expected, physical

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        self.unit = unit

    def data_fingerprint(self, key: bytes) -> str:
        return "pairs"

    def attach(self, batch_sampler: Any, collate_fn: Any) -> None:
        self.batch_sampler, self.collate_fn = batch_sampler, collate_fn

    def __getitem__(self, draw: Draw) -> Any:
        first = draw.unit
        return draw, (self.n_pairs[first : first + 1 + first % 3] if first >= 0 else ())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)


class Compilations(L.Callback):
    """What XLA had compiled, run and read when each physical batch was done."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        from torch_xla.core.xla_model import wait_device_ops
        from torch_xla.debug import metrics

        wait_device_ops()  # a graph is counted when it has run

        def count(name: str) -> int:
            return (metrics.metric_data(name) or [0])[0]

        fallbacks = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}
        self.seen.append(
            {"step": batch.step, "last": batch.last, "units": int(batch.mask.sum()), "compiled": count("CompileTime"),
             "device": str(module.device), "run": count("ExecuteTime"), "fallbacks": fallbacks}
        )  # fmt: skip


def pretend_to_be_a_tpu() -> None:
    """Lightning's accelerator takes TPUs alone; what it is asked for is the same on any XLA device."""
    from lightning.fabric.accelerators.xla import XLAAccelerator as OfFabric
    from lightning.pytorch.accelerators import XLAAccelerator

    for accelerator in (OfFabric, XLAAccelerator):
        accelerator.is_available = staticmethod(lambda: True)
        accelerator.auto_device_count = staticmethod(lambda: 1)


def run(folder: Path, *, device: str, steps: int = 4, private: bool = True, rows_per_unit: str = "one",
        expected: int = 8, physical: int = 4, model: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None, processes: bool = False, **mode: Any) -> dict[str, Any]:  # fmt: skip
    """Train, and tell the parameters, the ledger and what was compiled."""
    secrets.token_hex = lambda count=32: "ab" * count  # salts the noise of a run: here runs are compared
    settings = {"eps": 8.0, "noise_multiplier": 3.0, "max_grad_norm": 0.5, "noise_seed": 5} | mode
    module = generator(privacy=DPSGD(**settings) if private else NoPrivacy(), **(model or {}))
    compilations = Compilations()
    if device == "xla":
        pretend_to_be_a_tpu()
    settings_of_trainer = dict(trainer or {})
    if processes:
        settings_of_trainer["strategy"] = XLAProcesses(timeout_minutes=2)
    accountant = PrivacyAccountant(run_dir=folder, replay="never", eps_log_points=1)
    fitter = L.Trainer(
        accelerator="tpu" if device == "xla" else "cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, default_root_dir=str(folder),
        callbacks=[accountant, PrivacyCard(run_dir=folder), *([compilations] if device == "xla" else [])],
        **settings_of_trainer,
    )  # fmt: skip
    data = Pairs(rows_per_unit=rows_per_unit, expected=expected, physical=physical)
    fitter.fit(module, datamodule=data)
    weights = {name: p.detach().cpu().double().flatten().tolist() for name, p in module.named_parameters()}
    tied = module.model.get_input_embeddings().weight is module.model.get_output_embeddings().weight
    own = folder / "privacy_ledger.jsonl"
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    exported = {}
    if (folder / "model").exists():
        model = QueryGenerator.load_model(folder / "model").model
        exported = {name: p.detach().double().flatten().tolist() for name, p in model.named_parameters()}
    return {
        "weights": weights,
        "exported": exported,
        "tied": tied,
        "ledger": [json.loads(line) for line in lines],
        "compilations": compilations.seen,
    }


if __name__ == "__main__":
    target, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    (target / "told.json").write_text(json.dumps(run(target, **asked)), encoding="utf-8")
