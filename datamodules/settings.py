"""The settings that every DataModule of texts shares, for those that add a few of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from lit_dpret.datamodules.corpus import InMemory
from lit_dpret.datamodules.records import Duplicates
from lit_dpret.datamodules.sampled import PhysicalBatchSize, RowsPerUnit, SamplingName


class PairSettings(TypedDict, total=False):
    """Arguments of `lit_dpret.datamodules.pairs.PairsDataModule`, apart from where its data is."""

    lower_case_queries: bool
    sampling: SamplingName
    expected_batch_size: int | None
    sample_rate: float | None
    physical_batch_size: PhysicalBatchSize
    cap: int | None
    rows_per_unit: RowsPerUnit
    duplicates: Duplicates
    max_rows_per_unit: int | None
    drop_overlap: bool
    allow_empty_passages: bool
    in_memory: InMemory
    cache_dir: str | Path | None
    max_passages: int | None
    max_train_queries: int | None
    max_eval_queries: int | None
    seed: int
    num_workers: int
