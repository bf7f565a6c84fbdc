"""A data set that answers for a draw with the rows of another unit is refused before, or charged as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import Line, Numbers, Regression, Units, _Items, dp, fit, granted, records
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.batches import Draw
from lit_dpret.privacy.ledger.run_ledger import charged_releases

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


class Rows(Dataset[Any]):
    """Row ``n`` is unit ``n``, as somebody writes it who has a table: ``table[n]`` gives the row."""

    def __init__(self, table: list[Any]) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, draw: Draw) -> Any:
        return draw, [] if draw.unit < 0 else [self.table[draw.unit]]


@dataclass(frozen=True)
class UserLine(Line):
    user_id: str


@dataclass(frozen=True)
class Anonymous:
    """What `Regression` reads of a row, and nothing that says whose it is."""

    query: str
    passage: str


def of_a_query(row: int) -> Line:
    return Line(f"q{row // 20}", "7", f"p{row}", f"{row % 3}", frozenset((f"p{row}",)))


def of_a_user(row: int) -> UserLine:
    return UserLine(f"q{row}", "7", f"p{row}", f"{row % 3}", frozenset((f"p{row}",)), user_id=f"u{row // 20}")


def half_as_many(draw: Draw) -> int:
    return draw.unit % (SIZE // 2)


def in_later_steps(draw: Draw) -> int:
    return half_as_many(draw) if draw.step > 1 else draw.unit


def one_person(draw: Draw) -> int:
    return 7 if draw.unit % 50 == 0 else draw.unit


def run(tmp_path: Path, dataset: Any, *, kind: type[Foreign] = Foreign, unit: str = "query") -> None:
    mode = dp(tmp_path, eps=50.0, noise_multiplier=2.0, accountant="rdp", unit=unit)
    fit(tmp_path / "run", Regression(privacy=mode, dropout=0.0), kind(dataset), steps=6,
        extra=[PrivacyCard(run_dir=tmp_path / "run")])  # fmt: skip


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
    assert not granted(tmp_path / "run")


@pytest.mark.parametrize(("row", "unit"), [(of_a_query, "query"), (of_a_user, "user")])
def test_a_data_set_that_counts_rows_as_units_is_refused_where_a_query_or_a_user_is_one(
    row: Callable[[int], Any], unit: str, tmp_path: Path
) -> None:
    """Twenty rows of one query were twenty units: a card said 0.27 where about 5 was true."""
    with pytest.raises(DataError, match=r"privacy\.unit") as refused:
        run(tmp_path, Rows([row(number) for number in range(SIZE)]), unit=unit)
    assert refused.value.trap == "T38"
    assert not granted(tmp_path / "run")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("row", "unit", "open_claims"),
    [
        (lambda row: Anonymous("7", f"{row % 3}"), "query", 1), (of_a_query, "user", 1),
        (lambda row: of_a_user(20 * row), "user", 0), (of_a_query, "pair", 0),
    ],
    ids=["without a name", "queries without users", "users", "pairs"],
)  # fmt: skip
def test_rows_that_do_not_say_whose_they_are_leave_that_open_on_the_card(
    row: Callable[[int], Any], unit: str, open_claims: int, tmp_path: Path
) -> None:
    run(tmp_path, Rows([row(number) for number in range(SIZE)]), unit=unit)
    assert len(unverified(tmp_path)) == open_claims


def unverified(tmp_path: Path) -> list[str]:
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text())
    return [a["text"] for a in card["assumptions"] if a["holds"] == "unverified" and "all rows of one" in a["text"]]


class Remembers(Rows):
    """Gives each unit the words of the one that was asked for before it."""

    before = "7"

    def __getitem__(self, draw: Draw) -> Any:
        found, rows = super().__getitem__(draw)
        mixed = [Line(row.query_id, self.before, row.passage_id, row.passage, row.positives) for row in rows]
        self.before = f"{draw.unit}"
        return found, mixed


class FollowsTheFirst(Rows):
    """Gives each unit the words of the one that was asked for first, as data that are scaled by it."""

    first: str | None = None

    def __getitem__(self, draw: Draw) -> Any:
        found, rows = super().__getitem__(draw)
        if self.first is None:
            self.first = f"{draw.unit}"
        return found, [Line(row.query_id, self.first, row.passage_id, row.passage, row.positives) for row in rows]


@pytest.mark.parametrize("kind", [Remembers, FollowsTheFirst])
def test_a_data_set_that_mixes_in_what_was_asked_for_before_is_refused(kind: type[Rows], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train_dataloader") as refused:
        run(tmp_path, kind([of_a_query(20 * number) for number in range(SIZE)]))
    assert refused.value.trap == "T38"


class FetchedTogether(Rows):
    def __getitems__(self, draws: list[Draw]) -> list[Any]:
        return [self[draw] for draw in draws]


def test_a_data_set_that_fetches_the_units_of_a_batch_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="__getitems__") as refused:
        run(tmp_path, FetchedTogether([of_a_query(20 * number) for number in range(SIZE)]))
    assert refused.value.trap == "T38"


class Augments(Rows):
    """Draws something for each row anew."""

    def coin(self) -> float:
        return torch.rand(()).item() + np.random.rand() + random.random()

    def __getitem__(self, draw: Draw) -> Any:
        found, rows = super().__getitem__(draw)
        coin = f"{self.coin():.6f}"
        return found, [Line(row.query_id, coin, row.passage_id, row.passage, row.positives) for row in rows]


class AugmentsFromItsOwn(Augments):
    def __init__(self, table: list[Any]) -> None:
        super().__init__(table)
        self.coins = random.Random(3)

    def coin(self) -> float:
        """Nearly always the same: two looks do not show it, and the generator's state does."""
        return 1.0 + (self.coins.random() < 1e-6)


class Caches(Rows):
    """Makes an object when it is first asked for a row, and gives the same one later."""

    def __init__(self, table: list[Any]) -> None:
        super().__init__(table)
        self.made: dict[int, Any] = {}

    def __getitem__(self, draw: Draw) -> Any:
        found, rows = super().__getitem__(draw)
        first = [replace(row, query_id=f"{row.query_id}") for row in rows]
        return found, self.made.setdefault(draw.unit, first)


@pytest.mark.costly
@pytest.mark.parametrize(
    "dataset",
    [
        *(kind([of_a_query(20 * number) for number in range(SIZE)]) for kind in (Augments, Caches)),
        _Items(Units(SIZE)), Answering(lambda draw: SIZE - 1 - draw.unit),
    ],
    ids=["drawn anew", "cached", "in order", "in another order"],
)  # fmt: skip
def test_units_of_their_own_run_whatever_order_they_are_kept_in_and_drawn_anew_each_time(
    tmp_path: Path, dataset: Any
) -> None:
    run(tmp_path, dataset)
    assert len(records(tmp_path / "run", "release")) == 6


def test_rows_that_are_drawn_from_a_generator_that_units_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="generator of its own") as refused:
        run(tmp_path, AugmentsFromItsOwn([of_a_query(20 * number) for number in range(SIZE)]))
    assert refused.value.trap == "T38"


@pytest.mark.parametrize("told", [SIZE // 2, 2 * SIZE])
def test_a_data_set_of_another_size_than_planned_is_refused(told: int, tmp_path: Path) -> None:
    class Miscounted(Foreign):
        n_units = told

    with pytest.raises(DataError, match=r"datamodule\.n_units") as refused:
        run(tmp_path, _Items(Units(SIZE)), kind=Miscounted)
    assert refused.value.trap == "T38"


@pytest.mark.costly
def test_units_are_counted_once_for_the_plan_and_the_draws(tmp_path: Path) -> None:
    """Fewer units at the second look were drawn more often than the plan said."""

    class Shrinking(Foreign):
        looked = 0

        @property
        def n_units(self) -> int:
            self.looked += 1
            return SIZE if self.looked == 1 else SIZE // 10

    mode = dp(tmp_path, eps=50.0, noise_multiplier=2.0, accountant="rdp", neighbours="replace_one")
    data = Shrinking(_Items(Units(SIZE)), sampling="fixed_size")
    fit(tmp_path / "run", Regression(privacy=mode, dropout=0.0), data, steps=6)
    assert data.batch_sampler.units == SIZE


def test_a_stream_of_rows_is_refused_by_one_clear_error(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Units(SIZE).rows(0))

    class Streaming(Foreign):
        def train_dataloader(self) -> Any:
            return DataLoader(self.dataset, batch_size=4, collate_fn=self.collate_fn)

    with pytest.raises((DataError, ConfigurationError), match=r"train_dataloader"):
        run(tmp_path, Stream(), kind=Streaming)


class Working(Foreign):
    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn, num_workers=2)


@pytest.mark.parametrize(("kind", "renamed"), [(Foreign, False), (Foreign, True), (Working, False)])
def test_one_that_does_it_only_now_and_then_is_noticed_and_leaves_no_claim(
    kind: type[Foreign], renamed: bool, tmp_path: Path
) -> None:
    later = Answering(in_later_steps, renamed=renamed)
    with pytest.raises(DataError, match=r"datamodule\.train_dataloader") as refused:
        run(tmp_path, later, kind=kind)
    assert refused.value.trap == "T38"
    found = records(tmp_path / "run")
    assert 2 <= sum(record["kind"] == "release" for record in found) < 6
    assert all(isinstance(release, NonPrivateRelease) for release in charged_releases(found))


class Partial(DataLoader[Any]):
    """Leaves out, or hands out twice, the second physical batch of each step."""

    times = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield from [batch] * (self.times if batch.part == 1 else 1)


class LeftOut(Foreign):
    loader: type[Any] = Partial

    def train_dataloader(self) -> Any:
        return self.loader(self.dataset, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)


class Twice(LeftOut):
    loader = type("_Twice", (Partial,), {"times": 2})


class SkipsInTheStep(Regression):
    """Passes over a batch, as one does over a batch with a bad record."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch.part != 1:
            super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("module", "data"), [(Regression, LeftOut), (Regression, Twice), (SkipsInTheStep, Foreign)])
def test_a_step_that_lacks_a_physical_batch_or_has_it_twice_is_refused_before_it_is_released(
    module: type[Any], data: type[Any], tmp_path: Path
) -> None:
    chosen = data(Rows([Line(str(i), str(i), str(i), str(i), frozenset()) for i in range(SIZE)]),
                  sampling="full_batch", expected_batch_size=None, physical_batch_size=50)  # fmt: skip
    with pytest.raises(DataError) as refusal:
        fit(tmp_path / "run", module(privacy=dp(tmp_path, noise_multiplier=9.0)), data=chosen)
    assert refusal.value.trap == "T38"
    found = records(tmp_path / "run")
    assert not charged_releases(found) and found[-1]["reason"] == "failed"
