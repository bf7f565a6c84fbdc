"""What data sets and collations keep as they read private rows stays as they left it, and no schedule follows it."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_modules import Classifier, data, fit, made, row_loss, rows
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from lit_dpret.callbacks import PublicValidation, shared_files
from lit_dpret.datamodules.sampled import SampledDataModule
from lit_dpret.errors import DataError, UnsupportedModelError


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
def test_what_reading_rows_counts_is_named(where: Any, tmp_path: Path) -> None:
    counts = where()
    private = made(**{} if where is Counting else {"collate_fn": counts})
    with pytest.warns(UserWarning, match=f"{where.__name__}.seen"):
        fit(tmp_path, private, data(counts) if where is Counting else data(), max_steps=1)


class InADict:
    """Counts in a container."""

    def __init__(self) -> None:
        self.tokens = {"seen": 0.0}

    @property
    def seen(self) -> float:
        return self.tokens["seen"]

    @seen.setter
    def seen(self, value: float) -> None:
        self.tokens["seen"] = value


class CountingInADict(InADict, Counting):
    pass


class CountingCollationInADict(InADict, CountingCollation):
    pass


@pytest.mark.parametrize("where", [Counting, CountingInADict, CountingCollation, CountingCollationInADict])
def test_a_schedule_by_what_reading_counts_is_refused(where: Any, tmp_path: Path) -> None:
    counts = where()

    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + counts.seen))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    given = {"collate_fn": counts} if isinstance(counts, CountingCollation) else {}
    with pytest.raises(UnsupportedModelError, match="data set or collate_rows"):
        fit(tmp_path, made(Scheduled(), **given), data() if given else data(counts))


class InShards(Dataset[Any]):
    """Keeps the shard that it opened last."""

    shard = -1

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        if self.shard != row // 20:
            self.shard = row // 20
            self.open(self.shard * 20)
        number, found = self.at(row % 20)
        if number != row:
            raise LookupError(f"Row {number} in place of row {row}.")
        return found

    def open(self, first: int) -> None:
        self.rows = list(enumerate(rows()))[first : first + 20]

    def at(self, place: int) -> Any:
        return self.rows[place]


class InOneBuffer(InShards):
    """Reads each shard into the same memory, too much of it to be copied."""

    def __init__(self) -> None:
        self.numbers = np.zeros((20, 10_000))

    def open(self, first: int) -> None:
        self.numbers[:, 0] = np.arange(first, first + 20)

    def at(self, place: int) -> Any:
        number = int(self.numbers[place, 0])
        return number, rows()[number]


class OneAfterAnother(InShards):
    """Reads on from the last row where it can."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.place, self.reader = 0, iter(enumerate(rows()))

    def __getitem__(self, row: int) -> Any:
        if row < self.place:
            self.start()
        for number, found in self.reader:
            self.place = number + 1
            if number == row:
                return found
        raise LookupError(f"Row {row} is behind the reader.")


@pytest.mark.costly
@pytest.mark.parametrize("kept", [InShards, InOneBuffer, OneAfterAnother])
def test_a_place_that_a_data_set_keeps_stays_that_of_what_it_read_there(kept: Any, tmp_path: Path) -> None:
    reading = kept()
    for row in range(0 if kept is OneAfterAnother else 60):
        reading[row]
    fit(tmp_path, made(), data(reading, physical_batch_size=4))


class ShardInOneArray(InShards):
    """Reads each shard into the same array, of which its rows are views."""

    def __init__(self) -> None:
        self.held = np.zeros((20, 5), np.float32)

    def open(self, first: int) -> None:
        self.held[:, :4] = rows().tensors[0][first : first + 20]
        self.held[:, 4] = np.arange(first, first + 20)

    def at(self, place: int) -> Any:
        row = torch.from_numpy(self.held[place])
        return int(row[4]), {"x": row, "number": torch.tensor(int(row[4]))}


def test_rows_that_are_views_of_one_array_are_those_that_were_asked_for(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Any:
        if not torch.equal(batch["x"][:, 4].long(), batch["number"]):
            raise LookupError("A row was written over by a later one.")
        return row_loss(model, (batch["x"][:, :4], batch["number"] % 3))

    fit(tmp_path, made(per_row_loss=loss), data(ShardInOneArray()), max_steps=3)


@dataclass(frozen=True)
class Numbers:
    x: Tensor
    number: int


class InManyBuffers(Counting):
    """Reads its rows into more arrays in turn than the looks at the start would see used again."""

    def __init__(self) -> None:
        self.held, self.at = np.zeros((20, 4), np.float32), 0

    def __getitem__(self, row: int) -> Any:
        self.at = (self.at + 1) % 20
        self.held[self.at] = rows().tensors[0][row]
        return Numbers(torch.from_numpy(self.held[self.at]), row)


class Holder:
    """A row of a class of the user's own, which is no dataclass."""

    def __init__(self, x: Tensor, number: int) -> None:
        self.x, self.number = x, number


class InManyBuffersByObjects(InManyBuffers):
    def __getitem__(self, row: int) -> Any:
        found = super().__getitem__(row)
        return Holder(found.x, found.number)


ALL_AT_ONCE = {"sampling": "full_batch", "expected_batch_size": None, "physical_batch_size": 60}


def stacked(found: list[Any]) -> Any:
    return torch.stack([each.x for each in found]), torch.tensor([each.number % 3 for each in found])


def stacked_if_right(found: list[Any]) -> Any:
    for each in found:
        if not torch.equal(each.x, rows().tensors[0][each.number]):
            raise LookupError("A row was written over by a later one.")
    return stacked(found)


def test_rows_of_dataclasses_are_copied_as_well(tmp_path: Path) -> None:
    fit(tmp_path, made(collate_fn=stacked_if_right), data(InManyBuffers(), **ALL_AT_ONCE), max_steps=1)


def test_a_pool_of_buffers_that_a_batch_uses_twice_is_refused_where_rows_cannot_be_copied(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="copies"):
        fit(tmp_path, made(collate_fn=stacked), data(InManyBuffersByObjects(), **ALL_AT_ONCE), max_steps=1)


class OwnUnitsInOneArray(SampledDataModule):
    """Units of the user's own, each of which is read into the same array, or copied from there."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__(expected_batch_size=20, physical_batch_size=16)
        self.copies, self.held = copies, np.zeros(4, np.float32)

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        self.unit = unit

    def train_units(self) -> Any:
        return self

    def __len__(self) -> int:
        return 60

    def rows(self, unit: int) -> Any:
        row = rows()[unit]
        self.held[:] = row[0]
        return ((torch.from_numpy(self.held.copy() if self.copies else self.held), row[1]),)

    def data_fingerprint(self, key: bytes) -> str:
        return key.hex()


@pytest.mark.parametrize("copies", [True, False])
def test_units_of_ones_own_in_one_array_are_refused_unless_they_are_copied(copies: bool, tmp_path: Path) -> None:
    with nullcontext() if copies else pytest.raises(DataError, match="copies") as refused:
        fit(tmp_path, made(), OwnUnitsInOneArray(copies=copies), max_steps=1)
    assert copies or refused.value.trap == "T38"  # type: ignore[union-attr]


class InMemory(Counting):
    def __init__(self) -> None:
        self.content = BytesIO(b"which each process has for itself")


def test_a_file_in_memory_is_shared_by_nobody(tmp_path: Path) -> None:
    fit(tmp_path, made(), data(InMemory(), num_workers=1), max_steps=1)


STRIDE = 10_000  # above what a reader keeps of a file
HANDLES: dict[Path, Any] = {}


@lru_cache
def opened(path: Path) -> Any:
    return path.open("rb")


def opened_by_name(path: Path) -> Any:
    if path not in HANDLES:
        HANDLES[path] = path.open("rb")
    return HANDLES[path]


class OpenedAtFirstUse(InShards):
    """Opens its file in the process that reads it, as workers should; this process has read it before."""

    def __init__(self, path: Path, how: str) -> None:
        self.path, self.how, self.file, self.number = path, how, {}, -1
        path.write_bytes(b"".join(row.numpy().tobytes().ljust(STRIDE) for row in rows().tensors[0]))

    def __getitem__(self, row: int) -> Any:
        return torch.frombuffer(bytearray(self.read(row * STRIDE)), dtype=torch.float32), row % 3

    def read(self, place: int) -> bytes:
        if self.how == "number":
            self.number = os.open(self.path, os.O_RDONLY) if self.number < 0 else self.number
            os.lseek(self.number, place, os.SEEK_SET)
            return os.read(self.number, 16)
        if self.how in ("cache", "global"):
            file = (opened if self.how == "cache" else opened_by_name)(self.path)
        elif self.how == "each time":
            file = self.path.open("rb")
        else:
            info = get_worker_info()
            key = {"own": os.getpid(), "worker": -1 if info is None else info.id}.get(self.how, 0)
            file = self.file.setdefault(key, None) or self.path.open("rb")
            self.file[key] = file
        file.seek(place)
        found: bytes = file.read(16)
        if self.how == "rewound":
            file.seek(0)
        return found


@pytest.mark.costly
@pytest.mark.parametrize(
    ("how", "workers", "shared"),
    [
        ("attribute", 0, False), ("number", 0, False), ("attribute", 2, True), ("number", 2, True), ("cache", 2, True),
        ("global", 2, True), ("rewound", 2, True), ("own", 2, False), ("worker", 2, False), ("each time", 2, False),
    ],
)  # fmt: skip
def test_worker_processes_that_would_share_an_open_file_are_refused(
    how: str, workers: int, shared: bool, tmp_path: Path
) -> None:
    given = data(OpenedAtFirstUse(tmp_path / "rows", how), num_workers=workers)
    with pytest.raises(DataError, match="num_workers") if shared else nullcontext() as refused:
        fit(tmp_path, made(), given, max_steps=1)
    assert not shared or refused.value.trap == "T38"  # type: ignore[union-attr]


@pytest.mark.costly
def test_a_worker_that_runs_already_does_not_hide_that_it_shares_a_file(tmp_path: Path) -> None:
    dataset = OpenedAtFirstUse(tmp_path / "rows", "rewound")
    assert len(dataset[0]) == 2
    loader, number = DataLoader(dataset, num_workers=2), dataset.file[0].fileno()
    if (running := os.fork()) == 0:
        while True:
            os.lseek(number, 0, os.SEEK_SET)
    try:
        moved = [shared_files._moved_by_a_worker(loader, dataset.__getitem__, [0, 30, 59]) for _ in range(8)]
    finally:
        os.kill(running, 9)
        os.waitpid(running, 0)
    assert all(moved)


@pytest.mark.costly
def test_open_files_of_the_process_are_left_at_their_place(tmp_path: Path) -> None:
    given = data(OpenedAtFirstUse(tmp_path / "rows", "own"), num_workers=2)
    with (tmp_path / "rows").open("rb", buffering=0) as mine, (tmp_path / "log").open("w+") as log:
        mine.seek(5)
        lines = Writing(log)
        fit(tmp_path, made(), given, max_steps=1)
        assert mine.tell() == 5
        lines.stop()
    written = (tmp_path / "log").read_text().splitlines()
    assert written == [str(number) for number in range(len(written))] and len(written) == lines.count


class Writing(threading.Thread):
    """Writes numbered lines into a file meanwhile, as a log does."""

    def __init__(self, log: Any) -> None:
        super().__init__(daemon=True)
        self.log, self.count, self.ends = log, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ends.wait(0.001):
            self.log.write(f"{self.count}\n")
            self.log.flush()
            self.count += 1

    def stop(self) -> None:
        self.ends.set()
        self.join()


@pytest.mark.costly
def test_rows_that_torch_computes_with_several_threads_are_read_in_a_fork_too(tmp_path: Path) -> None:
    class Computed(OpenedAtFirstUse):
        def __getitem__(self, row: int) -> Any:
            x, y = super().__getitem__(row)
            return x + torch.ones(100_000).mul(2.0).sum() * 0, y

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fit(tmp_path, made(), data(Computed(tmp_path / "rows", "own"), num_workers=1), max_steps=1)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_public_validation_share_no_open_file(workers: int, tmp_path: Path) -> None:
    public = DataLoader(OpenedAtFirstUse(tmp_path / "rows", "cache"), batch_size=20, num_workers=workers)
    validation = PublicValidation(public, metrics=["val/loss"], equal_rows=60)
    with pytest.raises(DataError, match=r"PublicValidation.*num_workers") if workers else nullcontext():
        fit(tmp_path, made(), max_steps=1, callbacks=[validation])
