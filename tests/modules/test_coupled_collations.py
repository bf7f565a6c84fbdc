"""Rows that depend on each other before the loss sees them: in their collation, or on the way to the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coupled_losses import Plain, QuantisedInLowPrecision, Remembering, ScaledInLowPrecision, train
from stand_ins import Numbers, dp, fit
from torch import Tensor

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.coupling_passes import Passes
from lit_dpret.modules.kept_state import Looks
from lit_dpret.privacy.batches import copied_rows

Patch = pytest.MonkeyPatch


class CountsWhatCameBefore(Plain):
    """A row's part is smaller the more rows stand before it, as where a passage counts once in a batch."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        before = rows["inputs"][:, :1].abs().cumsum(0).squeeze(1) - rows["inputs"][:, 0].abs()
        return self.losses(rows["inputs"], rows["target"]) / (1 + before)


@pytest.mark.parametrize(("module", "units"), [(Remembering, 1), (CountsWhatCameBefore, 8)])
def test_in_low_precision_it_is_refused_as_well(module: type[Any], units: int, tmp_path: Path) -> None:
    data = Numbers(sampling="poisson", physical_batch_size=units)
    with pytest.raises(UnsupportedModelError) as refusal:
        train(tmp_path, module, data=data, precision="bf16-mixed", steps=4)
    assert refusal.value.trap == "T11"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("module", [ScaledInLowPrecision, QuantisedInLowPrecision])
def test_rows_that_are_coupled_in_low_precision_alone_are_refused(
    module: type[Any], precision: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        train(tmp_path, module, data=Numbers(sampling="poisson"), precision=precision, steps=4)
    assert refusal.value.trap == "T11"


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
    with pytest.raises(UnsupportedModelError) as refusal:
        train(tmp_path, module, data=Numbers(physical_batch_size=units), precision=precision, steps=1)
    assert refusal.value.trap == "T11"


class MaskedInCollation(Plain):
    """Drops numbers of each row by chance while rows are collated, as masked language models do."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        return found | {"inputs": found["inputs"] * (torch.rand_like(found["inputs"]) > 0.2)}


def test_rows_that_are_collated_at_random_are_not_taken_for_coupled(tmp_path: Path) -> None:
    train(tmp_path, MaskedInCollation)


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


def test_what_an_object_remembers_is_found(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        train(tmp_path / "found", GrowsAnObject)
    assert refusal.value.trap == "T11"


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


@pytest.mark.parametrize("module", [DrawsFromItsOwn, DrawsFromTorchs, DrawsFromTheFiles])
def test_rows_that_take_numbers_from_a_generator_in_turn_are_refused(module: type[Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="generator of its own") as refusal:
        train(tmp_path, module)
    assert refusal.value.trap == "T11"


def test_a_generator_that_is_seeded_for_each_row_is_no_memory(tmp_path: Path) -> None:
    train(tmp_path, SeedsItsOwnForEachRow)


class KeepsWhatItCollated(Plain):
    """A cache: rows are the same with it and without."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cache: dict[str, float] = {}

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = [self.cache.setdefault(row.query, float(len(row.query))) for row in rows]
        return super().collate_rows(rows) | {"length": torch.tensor(found)}


def test_a_collation_that_remembers_is_refused_and_a_cache_is_not(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="keeps of one batch"):
        train(tmp_path, GrowsAVocabulary)
    train(tmp_path / "cached", KeepsWhatItCollated)


class MixesOnTheDevice(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch.rows["inputs"] = batch.rows["inputs"] - batch.rows["inputs"].mean(0)
        return batch


def test_batches_that_are_changed_on_the_way_to_the_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="on_after_batch_transfer") as refusal:
        train(tmp_path, MixesOnTheDevice)
    assert refusal.value.trap == "T11"


class MixesBeforeTheStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch.rows is not None:
            batch.rows["inputs"] = batch.rows["inputs"] - batch.rows["inputs"].mean(0)
        super().training_step(batch, batch_idx)


def test_rows_that_are_mixed_before_the_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="inputs"):
        train(tmp_path, MixesBeforeTheStep)
