"""The interface of a DataModule that is trained on under a guarantee: rows, units, and how to draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Row(Protocol):
    """One (query, passage) row of a unit; modules read its texts, the sampler reads nothing."""

    @property
    def query_id(self) -> str: ...
    @property
    def query(self) -> str: ...
    @property
    def passage_id(self) -> str: ...
    @property
    def passage(self) -> str: ...
    @property
    def positives(self) -> frozenset[str]: ...


class UnitDataset(Protocol):
    """A data set seen as units of privacy: each unit has one row or more."""

    def __len__(self) -> int: ...
    def rows(self, unit: int) -> Sequence[Row]: ...


class SamplingRequest(Protocol):
    """How a DataModule asks for batches to be drawn; the plan turns it into a law."""

    sampling: str
    expected_batch_size: int | None
    sample_rate: float | None
    physical_batch_size: int
    cap: int | None
    rows_per_unit: str


class TrainingData(SamplingRequest, Protocol):
    """A DataModule, beside the hooks of Lightning; `lit_dpret.datamodules.PairsDataModule` has it all."""

    @property
    def n_units(self) -> int:
        """How many units there are, after `use_unit`."""

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        """Group the rows by ``privacy.unit``; called before anything is planned."""

    def data_fingerprint(self, key: bytes) -> str:
        """Return a keyed hash of the training rows, so that a resumed run finds the data that it left."""

    def attach(self, batch_sampler: Any, collate_fn: Callable[..., Any]) -> None:
        """Keep both for the loader of `train_dataloader`."""

    def train_dataloader(self) -> Any:
        """Return a loader with that sampler, whose ``dataset[draw]`` is the draw and the rows of ``draw.unit``."""


OFFERED = (
    "sampling", "expected_batch_size", "sample_rate", "physical_batch_size", "cap", "rows_per_unit", "n_units",
    "use_unit", "data_fingerprint", "attach", "train_dataloader",
)  # fmt: skip


def not_offered(data: Any) -> list[str]:
    """The names of `TrainingData` that ``data`` lacks."""
    return [name for name in OFFERED if not hasattr(type(data), name) and name not in vars(data)]
