"""Rows that depend on each other before the loss sees them: in their collation, or on the way to the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coupled_losses import Plain, QuantisedInLowPrecision, Remembering, ScaledInLowPrecision, refused, train
from stand_ins import Numbers, dp, fit
from torch import Tensor

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.modules.coupling_passes import Passes
from lit_dpret.modules.kept_state import Looks
from lit_dpret.privacy.batches import copied_rows

Patch = pytest.MonkeyPatch


class CountsWhatCameBefore(Plain):
    """A row's part is smaller the more rows stand before it, as where a passage counts once in a batch."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        before = rows["inputs"][:, :1].abs().cumsum(0).squeeze(1) - rows["inputs"][:, 0].abs()
        return self.losses(rows["inputs"], rows["target"]) / (1 + before)


LOW = [
    (Remembering, "bf16-mixed", 1), (CountsWhatCameBefore, "bf16-mixed", 8),
    (ScaledInLowPrecision, "bf16-mixed", 16), (ScaledInLowPrecision, "bf16-true", 16),
    (QuantisedInLowPrecision, "bf16-mixed", 16), (QuantisedInLowPrecision, "bf16-true", 16),
]  # fmt: skip


@pytest.mark.parametrize(("module", "precision", "units"), LOW)
def test_rows_that_are_coupled_in_low_precision_maybe_there_alone_are_refused(
    module: type[Any], precision: str, units: int, tmp_path: Path
) -> None:
    refused(tmp_path, module, data=Numbers(sampling="poisson", physical_batch_size=units), precision=precision, steps=4)


class CountsAPassageOnce(Plain):
    """Of the rows that are collated together, the first one with a passage has a loss."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        seen = [row.passage for row in rows]
        first = torch.tensor([float(text not in seen[:place]) for place, text in enumerate(seen)])
        return super().collate_rows(rows) | {"first": first}

    def place_rows(self, features: Any, places: Any, rows: int) -> Any:
        return copied_rows(features, places, rows)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"]) * rows["first"]


class CountsAPassageOnceInOneShape(CountsAPassageOnce):
    fixed_shapes = True


@pytest.mark.parametrize(
    ("module", "units", "precision"),
    [
        (CountsAPassageOnce, 2, "32-true"), (CountsAPassageOnceInOneShape, 16, "32-true"),
        (CountsAPassageOnceInOneShape, 2, "32-true"), (CountsAPassageOnce, 2, "bf16-mixed"),
        (CountsAPassageOnce, 3, "bf16-true"), (CountsAPassageOnce, 16, "bf16-true"),
    ],
)  # fmt: skip
def test_a_row_that_depends_on_rows_before_it_in_the_same_collation_is_refused(
    module: type[Any], units: int, precision: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    for other in ("compare_company", "compare_sizes", "compare_histories"):  # which may meet it by luck, or not
        monkeypatch.setattr(Passes, other, lambda *_, **__: None)
    refused(tmp_path, module, data=Numbers(physical_batch_size=units), precision=precision, steps=1)


class MaskedInCollation(Plain):
    """Drops numbers of each row by chance while rows are collated, as masked language models do."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        return found | {"inputs": found["inputs"] * (torch.rand_like(found["inputs"]) > 0.2)}


class FilledUpLater(Plain):
    """From the second step on fills rows up to the longest of the batch, and the loss shows it."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        if self._trainer is not None and self.trainer.global_step > 0:
            found["filling"] = torch.ones(len(rows), 1 + max(int(row.query) for row in rows) // 10)
        return found

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        return found * rows["filling"].sum(1) if "filling" in rows else found


def test_a_collation_that_couples_rows_from_the_second_step_on_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Looks, "due", lambda *_: False)  # so that only what was collated alone is compared
    module = FilledUpLater(privacy=dp(tmp_path, noise_seed=1, noise_multiplier=2.0))
    with pytest.raises(UnsupportedModelError, match="other rows"):
        fit(tmp_path / "run", module, steps=24)


class GrowsAVocabulary(Plain):
    """Numbers words in the order in which they come, so a row's features depend on who came before."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.vocabulary: dict[str, int] = {}

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        places = [self.vocabulary.setdefault(row.query, len(self.vocabulary)) for row in rows]
        return super().collate_rows(rows) | {"place": torch.tensor(places)}


class Vocabulary:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, word: str) -> int:
        return self.ids.setdefault(word, len(self.ids))


class GrowsAnObject(Plain):
    """The same in an object that is not plain data."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.vocabulary = Vocabulary()

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        places = torch.tensor([self.vocabulary(row.query) for row in rows])
        return super().collate_rows(rows) | {"place": places}


OF_THE_FILE = np.random.default_rng(3)


class DrawsFromItsOwn(Plain):
    """Augments rows from a generator that it keeps, from which rows take numbers in turn."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.coins: Any = np.random.default_rng(3)

    def coin(self, row: Any) -> float:
        return float(self.coins.random())

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        return found | {"inputs": found["inputs"] + torch.tensor([[self.coin(row)] for row in rows])}


class DrawsFromTorchs(DrawsFromItsOwn):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.coins = {"coins": [torch.Generator().manual_seed(3)]}

    def coin(self, row: Any) -> float:
        """Nearly always zero: two looks do not show it, and the generator's state does."""
        return float(torch.rand((), generator=self.coins["coins"][0]) < 1e-6)


class DrawsFromTheFiles(DrawsFromItsOwn):
    def coin(self, row: Any) -> float:
        return float(OF_THE_FILE.random())


class SeedsItsOwnForEachRow(DrawsFromItsOwn):
    def coin(self, row: Any) -> float:
        self.coins = np.random.default_rng([3, int(row.query)])
        return super().coin(row)


class KeepsWhatItCollated(Plain):
    """A cache: rows are the same with it and without."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cache: dict[str, float] = {}

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = [self.cache.setdefault(row.query, float(len(row.query))) for row in rows]
        return super().collate_rows(rows) | {"length": torch.tensor(found)}


class MixesOnTheDevice(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch.rows["inputs"] = batch.rows["inputs"] - batch.rows["inputs"].mean(0)
        return batch


class MixesBeforeTheStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch.rows is not None:
            batch.rows["inputs"] = batch.rows["inputs"] - batch.rows["inputs"].mean(0)
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (GrowsAVocabulary, "keeps of one batch"),
        (GrowsAnObject, ""),
        (DrawsFromItsOwn, "generator of its own"),
        (DrawsFromTorchs, "generator of its own"),
        (DrawsFromTheFiles, "generator of its own"),
        (MixesOnTheDevice, "on_after_batch_transfer"),
        (MixesBeforeTheStep, "inputs"),
    ],
)
def test_a_collation_that_remembers_and_rows_that_are_mixed_after_it_are_refused(
    module: type[Any], named: str, tmp_path: Path
) -> None:
    refused(tmp_path, module, named=named)


@pytest.mark.parametrize("module", [MaskedInCollation, SeedsItsOwnForEachRow, KeepsWhatItCollated])
def test_random_masks_seeds_of_each_row_and_a_cache_are_not(module: type[Any], tmp_path: Path) -> None:
    train(tmp_path, module)
