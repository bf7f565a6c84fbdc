"""Settings that say which data a DataModule reads cannot change later: a card would be about other data."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_images as tiny
import torch

from lit_dpret.datamodules import (
    BeirDataModule,
    ImagesDataModule,
    PairsDataModule,
    SyntheticDataModule,
    UnitDataModule,
)
from lit_dpret.datamodules.sampled import SampledDataModule
from lit_dpret.errors import ConfigurationError, DataError

HARBOUR = Path(__file__).resolve().parents[1] / "data" / "harbour"
LIVE = ("sampling", "expected_batch_size", "sample_rate", "physical_batch_size", "cap", "rows_per_unit", "num_workers")


def with_a_card(folder: Path, epsilon: float) -> Path:
    shutil.copytree(HARBOUR, folder, dirs_exist_ok=True)
    (folder / "privacy_card.json").write_text(json.dumps({"claim": {"epsilon": epsilon}}))
    return folder


class OfOurOwn(PairsDataModule):
    """A subclass with a constructor of its own."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.place = place
        super().__init__(folder=place, **settings)


KINDS: dict[str, tuple[Callable[[Path], SampledDataModule], str]] = {
    "pairs": (lambda tmp: PairsDataModule(folder=HARBOUR), "folder"),
    "beir": (lambda tmp: BeirDataModule(name="scifact", root=HARBOUR), "name"),
    "synthetic": (lambda tmp: SyntheticDataModule(folder=with_a_card(tmp / "set", 3.0)), "keep"),
    "units": (lambda tmp: UnitDataModule(torch.arange(6), expected_batch_size=2), "unit_of"),
    "images": (lambda tmp: ImagesDataModule(source="vision_folder", folder=tiny.class_folders(tmp)), "labels"),
    "subclass": (lambda tmp: OfOurOwn(HARBOUR), "place"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_of_the_data_can_be_set_or_deleted_later_not_in_a_copy_either(kind: str, tmp_path: Path) -> None:
    make, one = KINDS[kind]
    data = make(tmp_path)
    names = {field.name for field in dataclasses.fields(data)} - set(LIVE) | {one}
    copies = [data, copy.copy(data), copy.deepcopy(data)]
    for each in [*copies, pickle.loads(pickle.dumps(data))]:
        for name in names:
            before = getattr(each, name)
            with pytest.raises(ConfigurationError, match=rf"datamodule\.{name}\b"):
                setattr(each, name, "merge")
            with pytest.raises(ConfigurationError, match=rf"datamodule\.{name}\b"):
                delattr(each, name)
            assert getattr(each, name) is before
        each.expected_batch_size = 7
        assert each.expected_batch_size == 7, "every plan reads it anew"


def test_replace_makes_a_module_that_reads_anew() -> None:
    first = PairsDataModule(folder=HARBOUR, expected_batch_size=2)
    first.use_unit("query")
    assert first.n_units > 1
    second = dataclasses.replace(first, max_train_queries=1)
    second.use_unit("query")
    assert second.n_units == 1 and second.expected_batch_size == 2


def test_a_dict_of_files_that_is_changed_in_place_is_refused_before_the_next_plan() -> None:
    qrels = {split: HARBOUR / "qrels" / f"{split}.tsv" for split in ("train", "dev", "test")}
    data = PairsDataModule(corpus=HARBOUR / "corpus.jsonl", queries=HARBOUR / "queries.jsonl", qrels=qrels)
    data.use_unit("query")
    assert data.n_units
    for each in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert each.n_units
    qrels["train"] = qrels["test"]
    with pytest.raises(ConfigurationError, match=r"datamodule\.qrels"):
        _ = data.n_units


def test_names_that_change_in_a_users_own_list_make_other_units_in_the_next_run() -> None:
    users = ["a", "b", "c", "d"]
    data = UnitDataModule(torch.arange(4), unit_of=users.__getitem__, unit_name="user", expected_batch_size=2)
    data.use_unit("record", "zero_out")
    assert data.n_units == 4
    users[2:] = ["a", "b"]
    data.use_unit("record", "zero_out")
    assert data.n_units == 2 and [int(row) for row in data.train_units().rows(0)] == [0, 2]


def test_a_synthetic_set_that_was_written_anew_is_not_claimed_for_by_the_queries_of_the_old_one(tmp_path: Path) -> None:
    folder = with_a_card(tmp_path / "set", 50.0)
    data = SyntheticDataModule(folder=folder)
    data.setup("fit")
    assert data.privacy_card_path == folder / "privacy_card.json"
    with_a_card(folder, 12.0)
    with pytest.raises(DataError, match=r"privacy_card\.json"):
        _ = data.privacy_card_path
    fresh = SyntheticDataModule(folder=folder)
    fresh.setup("fit")
    assert fresh.privacy_card_path == folder / "privacy_card.json"
