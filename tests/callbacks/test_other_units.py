"""A data set that answers for a draw with the rows of another unit is refused before, or charged as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Line, Numbers, Regression, Units, _Items, dp, fit
from torch.utils.data import DataLoader, Dataset

from lit_dpret.callbacks import privacy_accountant
from lit_dpret.errors import DataError
from lit_dpret.privacy.charges import charged_releases
from lit_dpret.privacy.ledger import PrivacyLedger
from lit_dpret.privacy.releases import NonPrivateRelease
from lit_dpret.privacy.sampling import Draw, UnitCollator
from lit_dpret.privacy.unit_owners import UnitOwners, row_key

SIZE = 200


class Answering(Dataset[Any]):
    """Gives the rows of unit ``unit_of(draw)``, and calls them those of the draw."""

    def __init__(self, unit_of: Callable[[Draw], int], *, renamed: bool = False) -> None:
        self.unit_of, self.renamed, self.units = unit_of, renamed, Units(SIZE)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, draw: Draw) -> Any:
        if draw.unit < 0:
            return draw, []
        unit = self.unit_of(draw)
        told = Draw(unit, draw.step, draw.part, draw.last, draw.pick, draw.attempt) if self.renamed else draw
        return told, self.units.rows(unit)


class Foreign(Numbers):
    """`Numbers` with a data set of somebody else's."""

    def __init__(self, dataset: Any, **settings: Any) -> None:
        super().__init__(SIZE, **{"sampling": "poisson"} | settings)
        self.dataset = dataset

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)


def half_as_many(draw: Draw) -> int:
    return draw.unit % (SIZE // 2)


def one_person(draw: Draw) -> int:
    return 7 if draw.unit % 50 == 0 else draw.unit


def run(tmp_path: Path, dataset: Any, **settings: Any) -> None:
    mode = dp(tmp_path, eps=50.0, noise_multiplier=2.0, accountant="rdp")
    fit(tmp_path / "run", Regression(privacy=mode, dropout=0.0), Foreign(dataset, **settings), steps=6)


def ledger(tmp_path: Path) -> list[dict[str, Any]]:
    return list(PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records)


@pytest.mark.parametrize(
    "dataset",
    [Answering(half_as_many), Answering(one_person), Answering(half_as_many, renamed=True)],
    ids=["index % n", "one unit for several", "with another draw"],
)
def test_a_data_set_that_gives_one_unit_for_several_is_refused_before_the_first_step(
    tmp_path: Path, dataset: Any
) -> None:
    with pytest.raises(DataError, match=r"datamodule\.train_dataloader") as refused:
        run(tmp_path, dataset)
    assert refused.value.trap == "T38"
    assert not [record for record in ledger(tmp_path) if record["kind"] == "intent"]


@pytest.mark.parametrize("renamed", [False, True])
def test_one_that_does_it_only_now_and_then_is_noticed_and_leaves_no_claim(tmp_path: Path, renamed: bool) -> None:
    later = Answering(lambda draw: half_as_many(draw) if draw.step > 1 else draw.unit, renamed=renamed)
    with pytest.raises(DataError, match=r"datamodule\.train_dataloader") as refused:
        run(tmp_path, later)
    assert refused.value.trap == "T38"
    records = ledger(tmp_path)
    assert 2 <= sum(record["kind"] == "release" for record in records) < 6
    assert all(isinstance(release, NonPrivateRelease) for release in charged_releases(records))


def test_rows_that_come_from_workers_are_looked_at_too(tmp_path: Path) -> None:
    class Working(Foreign):
        def train_dataloader(self) -> Any:
            return DataLoader(self.dataset, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn, num_workers=2)

    mode = dp(tmp_path, eps=50.0, noise_multiplier=2.0, accountant="rdp")
    later = Answering(in_later_steps)
    with pytest.raises(DataError, match=r"datamodule\.train_dataloader"):
        fit(tmp_path / "run", Regression(privacy=mode, dropout=0.0), Working(later), steps=6)


def in_later_steps(draw: Draw) -> int:
    return half_as_many(draw) if draw.step > 1 else draw.unit


@pytest.mark.parametrize("dataset", [_Items(Units(SIZE)), Answering(lambda draw: SIZE - 1 - draw.unit)])
def test_units_of_their_own_run_whatever_order_they_are_kept_in(tmp_path: Path, dataset: Any) -> None:
    run(tmp_path, dataset)
    assert sum(record["kind"] == "release" for record in ledger(tmp_path)) == 6


def test_without_the_two_looks_the_same_run_ends_with_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy_accountant, "refuse_other_units", lambda loader, sampler: None)
    monkeypatch.setattr(UnitOwners, "note", lambda self, unit, keys: None)
    run(tmp_path, Answering(half_as_many))
    assert not any(isinstance(release, NonPrivateRelease) for release in charged_releases(ledger(tmp_path)))


def test_rows_without_a_name_are_not_told_apart_and_not_refused() -> None:
    assert row_key(object()) is None
    line = Line("q", "text", "p", "passage", frozenset("p"))
    assert (
        row_key(line)
        == row_key(Line("q", "other", "p", "other", frozenset()))
        != row_key(Line("q", "text", "p2", "passage", frozenset()))
    )
    batch = UnitCollator(list)([(Draw(3, 0, 0, True), [object(), line])])
    assert batch.origin == ((3, (row_key(line),)),)
