"""What data sets and collations count as they read private rows: nobody reads it after the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from keeping_losses import Reads
from own_modules import Classifier, data, fit, made, rows
from torch.utils.data import Dataset, default_collate

from lit_dpret.errors import UnsupportedModelError


class Counting(Dataset[Any]):
    """Counts what it reads, as a warm-up by tokens needs it."""

    seen = 0.0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        found = rows()[row]
        self.seen += float(found[0].abs().sum())
        return found


class CountingCollation:
    seen = 0.0

    def __call__(self, found: list[Any]) -> Any:
        self.seen += sum(float(x.abs().sum()) for x, _ in found)
        return default_collate(found)


@pytest.mark.parametrize("where", [Counting, CountingCollation])
def test_what_reading_rows_counts_is_put_back(where: Any, tmp_path: Path) -> None:
    counts = where()
    datamodule = data(counts) if where is Counting else data()
    private = made(**{} if where is Counting else {"collate_fn": counts})
    reads = Reads(lambda: counts.seen)
    with pytest.warns(UserWarning, match=f"{where.__name__}.seen"):
        fit(tmp_path, private, datamodule, callbacks=[reads], max_steps=3)
    assert {*reads.seen} == {"0.0"}


def test_what_two_of_one_kind_count_is_put_back_in_both(tmp_path: Path) -> None:
    parts = CountingCollation(), CountingCollation()

    def collate(found: list[Any]) -> Any:
        first, _ = (each(found) for each in parts)
        return first

    reads = Reads(lambda: [each.seen for each in parts])
    with pytest.warns(UserWarning, match="CountingCollation.seen"):
        fit(tmp_path, made(collate_fn=collate), callbacks=[reads], max_steps=2)
    assert {*reads.seen} == {"[0.0, 0.0]"}


class CountsInADict:
    """Counts tokens where numbers are not put back."""

    def __init__(self) -> None:
        self.seen = {"tokens": 0.0}

    def __call__(self, found: list[Any]) -> Any:
        self.seen["tokens"] += sum(float(x.abs().sum()) for x, _ in found)
        return default_collate(found)


class CountsRowsInADict(Counting):
    def __init__(self) -> None:
        self.tokens = {"seen": 0.0}

    def __getitem__(self, row: int) -> Any:
        found = rows()[row]
        self.tokens["seen"] += float(found[0].abs().sum())
        return found


@pytest.mark.parametrize("where", [CountsInADict, CountsRowsInADict])
def test_a_schedule_by_what_reading_counts_elsewhere_is_refused(where: Any, tmp_path: Path) -> None:
    counts = where()

    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            held = counts.seen if where is CountsInADict else counts.tokens
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + sum(held.values())))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    given = {"collate_fn": counts} if where is CountsInADict else {}
    with pytest.raises(UnsupportedModelError, match="data set or collate_rows"):
        fit(tmp_path, made(Scheduled(), **given), data() if given else data(counts))
