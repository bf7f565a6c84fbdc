"""Runs of the real Trainer on data sets that differ in one unit, with their clipped sums.

Imported by path; not a test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from negative_cases import dual
from stand_ins import Line
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from torch import Tensor
from torch.utils.data import DataLoader

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.modules import OptimizerSpec

_COINS = random.Random(1)
PASSAGES = {f"p{i:03}": " ".join(_COINS.choice(WORDS) for _ in range(_COINS.randint(1, 9))) for i in range(800)}


LONGEST = 9


def _query(i: int) -> str:
    """Return the text of a query; one is longer than all others, and so decides their padding."""
    words = 14 if i == LONGEST else 2 + i % 4
    return " ".join(WORDS[(7 * i + k * (1 + i % 11) + i // 20) % 20] for k in range(words))


class Log(L.LightningDataModule):
    """Queries with one passage each; the unit ``emptied`` is drawn but has no rows."""

    def __init__(self, size: int = 128, *, emptied: int | None = None, **settings: Any) -> None:
        super().__init__()
        known = {
            "sampling": "full_batch", "expected_batch_size": size, "sample_rate": None, "cap": None,
            "physical_batch_size": size, "rows_per_unit": "one", "max_rows_per_unit": None,
        }  # fmt: skip
        for name, value in (known | settings).items():
            setattr(self, name, value)
        self.n_units, self.emptied = size, emptied
        self.unit_by = None

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        self.unit = unit

    def data_fingerprint(self, key: bytes) -> str:
        return "log"

    def public_passages(self) -> dict[str, str]:
        return PASSAGES

    def line(self, unit: int) -> Line:
        own = f"p{(unit * 13) % len(PASSAGES):03}"
        return Line(f"q{unit}", _query(unit), own, PASSAGES[own], frozenset({own}))

    def rows(self, unit: int) -> list[Line]:
        return [] if unit in (self.emptied, -1) else [self.line(unit)]

    def evaluation_set(self, split: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        kept = [row for unit in range(self.n_units) for row in self.rows(unit)]
        return {row.query_id: row.query for row in kept}, {row.query_id: {row.passage_id: 1} for row in kept}

    def pair_rows(self, split: str) -> list[Line]:
        return [row for unit in range(self.n_units) for row in self.rows(unit)]

    def attach(self, batch_sampler: Any, collate_fn: Any) -> None:
        self.batch_sampler, self.collate_fn = batch_sampler, collate_fn

    def train_dataloader(self) -> Any:
        return DataLoader(_Items(self), batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)


class _Items:
    def __init__(self, log: Log) -> None:
        self._log = log

    def __getitem__(self, draw: Any) -> Any:
        return draw, self._log.rows(draw.unit)

    def __len__(self) -> int:
        return self._log.n_units


def tower(**settings: Any) -> TextEncoder:
    """Return a transformer that is wide enough for its products to be blocked in several ways."""
    plain = {
        "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3,
    }  # fmt: skip
    contract = Contract(query_max_length=16, passage_max_length=12)
    return TextEncoder(tiny_bert(**plain | settings), tiny_tokenizer(), contract)


STILL = OptimizerSpec(name="sgd", lr=1e-30)  # the weights stay the same, so that every step can be compared


def encoder(privacy: Any, *, initializer_range: float = 0.3, matrices_alone: bool = False, **settings: Any) -> Any:
    torch.manual_seed(0)
    made = tower(initializer_range=initializer_range)
    if matrices_alone:
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(parameter.dim() == 2 and "embeddings" not in name)
    return dual(privacy, encoder=made, optimizer=STILL, **{"temperature": 0.05} | settings)


def sums_of(
    folder: Path, module: Any, data: Any, *, steps: int = 2, **trainer: Any
) -> tuple[list[dict[str, Tensor]], float]:
    """Return the clipped sums of every step of a fit, and the sensitivity that it was charged for."""
    found: list[dict[str, Tensor]] = []
    take = module.privacy.take

    def kept() -> dict[str, Tensor]:
        sums = take()
        found.append({name: value.detach().cpu().double().clone() for name, value in sums.items()})
        return sums

    module.privacy.take = kept
    accountant = PrivacyAccountant(run_dir=folder, replay="never", eps_log_points=1)
    runner = L.Trainer(
        accelerator=trainer.pop("accelerator", "cpu"), devices=1, max_steps=steps, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[accountant],
        default_root_dir=folder, use_distributed_sampler=False, **trainer,
    )  # fmt: skip
    runner.fit(module, datamodule=data)
    return found, float(accountant.plan.sensitivity)


def moved(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


def largest_ratio(
    folder: Path, make: Callable[[], Any], emptied: Sequence[int], *, data: Callable[..., Any] = Log, **trainer: Any
) -> float:
    """Return the largest change of a step's sum when one of some units is emptied, relative to what was charged."""
    whole, charged = sums_of(folder / "whole", make(), data(), **trainer)
    assert len(whole) == 2 and all(moved(step, {n: 0 * v for n, v in step.items()}) > 0 for step in whole)
    found = []
    for unit in emptied:
        without, _ = sums_of(folder / f"without {unit}", make(), data(emptied=unit), **trainer)
        found += [moved(one, other) / charged for one, other in zip(whole, without, strict=True)]
    return max(found)
