"""Units of a Lightning user's own data set: which rows are one, and what their name does to a claim."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from lightning.pytorch.callbacks import Callback
from own_modules import Classifier, RowsOf, card_in, data, fit, made, rows
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate, get_worker_info

from lit_dpret import PrivacyAccountant, UnitDataModule, cards
from lit_dpret.cards.card import write_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, DataError, ResumeError, UnsupportedModelError
from lit_dpret.privacy.content import content_of
from lit_dpret.privacy.user_code import is_library

# -- which rows are one unit -----------------------------------------------------------------------------------


SMALL: dict[str, Any] = {"expected_batch_size": 1}


def test_rows_of_one_name_are_one_unit_and_rows_without_names_are_units_themselves() -> None:
    grouped = data([10, 11, 12, 13], unit_of=["a", "b", "a", "a"].__getitem__, **SMALL)
    grouped.use_unit("record")
    units = grouped.train_units()
    assert [list(units.rows(unit)) for unit in range(len(units))] == [[10, 12, 13], [11]]
    single = data([10, 11], **SMALL)
    single.use_unit("record")
    assert single.n_units == 2 and list(single.train_units().rows(1)) == [11]


@pytest.mark.costly
def test_a_subclass_may_read_its_data_in_setup(tmp_path: Path) -> None:
    class ReadLate(UnitDataModule):
        def __init__(self, count: int) -> None:
            self.count = count

        def setup(self, stage: str | None = None) -> None:
            if not hasattr(self, "dataset"):
                super().__init__(rows(self.count), expected_batch_size=20)

    late = ReadLate(60)
    for name, of in {"plain": data(rows(60)), "late": late, "late again": late}.items():
        fit(tmp_path / name, made(), of, max_steps=1)
    claims = [card_in(tmp_path / name)["claim"] for name in ("plain", "late", "late again")]
    assert claims[0] == claims[1] == claims[2]


def test_another_row_name_or_order_is_another_fingerprint() -> None:
    x, y = rows(6).tensors
    of = partial(data, **SMALL)
    key = b"k" * 32
    whole = of(TensorDataset(x, y)).data_fingerprint(key)
    assert of(TensorDataset(x.clone(), y.clone())).data_fingerprint(key) == whole
    others = [
        of(TensorDataset(x.flip(0), y.flip(0))), of(TensorDataset(x, 1 - y)), of(TensorDataset(x.double(), y)),
        of(TensorDataset(x[:5], y[:5])), of(TensorDataset(x, y), unit_of=lambda row: row // 2),
        of(TensorDataset(x.view(6, 2, 2), y)),
    ]  # fmt: skip
    found = {other.data_fingerprint(key) for other in others}
    assert whole not in found and len(found) == len(others)
    assert of(TensorDataset(x, y)).data_fingerprint(b"l" * 32) != whole


def test_the_order_of_a_set_is_no_part_of_the_fingerprint() -> None:
    one, other = set([0, 8]), set([8, 0])
    assert list(one) != list(other) and content_of(one) == content_of(other)


def test_random_augmentations_leave_the_fingerprint_and_the_generators_alone() -> None:
    before = torch.get_rng_state()
    augmented = RowsOf(lambda row: torch.rand(2), 3)
    assert data(augmented, **SMALL).data_fingerprint(b"k") == data(augmented, **SMALL).data_fingerprint(b"k")
    assert torch.equal(before, torch.get_rng_state())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [Stream(), (row for row in range(3)), []], ids=["iterable", "generator", "empty"])
def test_data_without_rows_that_can_be_counted_and_drawn_are_refused(dataset: Any) -> None:
    with pytest.raises(DataError, match="dataset"):
        data(dataset)


@pytest.mark.parametrize(
    "name", [lambda row: {}[row], lambda row: torch.tensor([1, 2]), lambda row: None, lambda row: 0.5]
)
def test_a_function_that_names_no_unit_is_refused_with_the_row(name: Any) -> None:
    with pytest.raises(DataError, match=r"unit_of\(0\)"):
        data(unit_of=name).n_units  # noqa: B018


class Table:
    """Looks names up by labels, as a ``pandas.Series``."""

    iloc = ()

    def __init__(self, labels: list[int]) -> None:
        self.index = labels

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, label: int) -> str:
        return f"user {label}"


class _LocIndexer:
    """What ``table.loc`` is."""

    def __init__(self, table: Table) -> None:
        self.obj, self.look_up = table, table.__getitem__

    def __getitem__(self, label: int) -> str:
        return self.look_up(label)


SHUFFLED = Table([*range(1, 60), 0])


@pytest.mark.parametrize(
    "names", [SHUFFLED, _LocIndexer(SHUFFLED), Table([*range(61)])], ids=["shuffled", "loc of shuffled", "longer"]
)  # fmt: skip
def test_names_of_another_table_are_refused(names: Any) -> None:
    with pytest.raises(DataError, match="unit_of"):
        data(unit_of=names.__getitem__)


WRITTEN = ["u1", "u1 ", 1, "1", 1.0, np.int64(1), "Jos\u00e9", "Jose\u0301"]


@pytest.mark.parametrize(
    ("names", "units"),
    [
        (Table([*range(60)]).__getitem__, 60),
        ((torch.arange(60) // 2).__getitem__, 30),
        (lambda row: WRITTEN[row % 8], 3),
        ({row: row // 2 for row in range(90)}.__getitem__, 30),
    ],
    ids=["table", "numbers in a tensor", "as they are written", "more than the rows"],
)
def test_rows_are_one_unit_that_have_one_name(names: Any, units: int) -> None:
    assert data(unit_of=names, **SMALL).n_units == units


@pytest.mark.parametrize("batch", [None, 0, 1.5, 31, 100])
def test_a_batch_of_no_or_of_more_units_than_there_are_is_refused_when_the_data_are_given(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected_batch_size") as found:
        data(unit_of=(torch.arange(60) // 2).__getitem__, expected_batch_size=batch)
    assert "30" not in str(found.value)  # which may be private
    assert data(unit_of=(torch.arange(60) // 2).__getitem__, expected_batch_size=30).n_units == 30


def test_other_units_than_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unit"):
        fit(tmp_path, made(unit="user"))


def test_a_data_set_that_remembers_is_refused(tmp_path: Path) -> None:
    class Remembering(Dataset[Any]):
        last = 0

        def __len__(self) -> int:
            return 60

        def __getitem__(self, row: int) -> Any:
            self.last, before = row, self.last
            return torch.full((4,), float(before)), row % 3

    with pytest.raises(DataError):
        fit(tmp_path, made(), data(Remembering()))


class Mined(Dataset[Any]):
    """Gives rows by an order that a callback changes."""

    def __init__(self) -> None:
        self.rows, self.order = rows(), list(range(60))

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        return self.rows[self.order[row]]


class PerWorker(Mined):
    """Puts its rows in an order of each worker process."""

    def __getitem__(self, row: int) -> Any:
        info = get_worker_info()
        return self.rows[(row + (0 if info is None else 1 + info.id)) % 60]


class Reshuffling(UnitDataModule):
    """Shuffles the rows for the loader, after units were made of them."""

    def train_dataloader(self) -> Any:
        self.dataset.order.reverse()
        return super().train_dataloader()


def mined(hook: str) -> tuple[UnitDataModule, list[Callback]]:
    """Rows of which half become the one with the largest loss in a hook."""
    dataset, callback = Mined(), Callback()
    setattr(callback, hook, lambda *_: dataset.order.__setitem__(slice(0, 30), [7] * 30))
    return data(dataset), [callback]


def moved(hook: str) -> tuple[UnitDataModule, list[Callback]]:
    """Rows that change their places in a hook: those of a user would be in several of the units that were made."""
    dataset, callback = Mined(), Callback()
    setattr(callback, hook, lambda *_: dataset.order.reverse())
    users = {"unit_of": lambda row: dataset.order[row] // 5, "unit_name": "user", "rows_per_unit": "all"}
    return data(dataset, expected_batch_size=4, **users), [callback]


CHANGED: dict[str, Callable[[], tuple[UnitDataModule, list[Callback]]]] = {
    **{f"mined in {hook}": partial(mined, hook) for hook in ("on_train_batch_end", "on_train_epoch_end")},
    **{f"moved in {hook}": partial(moved, hook) for hook in ("on_fit_start", "on_train_start")},
    "shuffled by the loader": lambda: (Reshuffling(Mined(), expected_batch_size=20), []),
    "ordered by each worker": lambda: (data(PerWorker(), num_workers=2), []),
}


@pytest.mark.parametrize("how", CHANGED)
def test_rows_that_are_others_than_when_the_run_was_planned_are_refused(how: str, tmp_path: Path) -> None:
    datamodule, callbacks = CHANGED[how]()
    with pytest.raises(DataError) as refused:
        fit(tmp_path, made(noise_multiplier=4.0), datamodule, callbacks=callbacks, max_steps=12)
    assert refused.value.trap == "T38"
    assert how == "shuffled by the loader" or card_in(tmp_path)["claim"]["guarantee"] != "dp"


class Lazy:
    """Is sent to worker processes by its number, and loads itself there."""

    def __init__(self, of: LazyRows, number: int) -> None:
        self.of, self.number = of, number

    def __reduce__(self) -> Any:
        return int, (self.number,)


class Held:
    def __init__(self, of: LazyRows, number: int) -> None:
        self.of, self.number, self.lock = of, number, threading.Lock()


class LazyRows(Mined):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def __getitem__(self, row: int) -> Any:
        return self.kind(self, row)


def loaded(found: list[Any]) -> Any:
    return default_collate([row.of.rows[row.number] for row in found])


class Fingerprinted(UnitDataModule):
    def data_fingerprint(self, key: bytes) -> str:
        return "of one's own"


@pytest.mark.parametrize("kind", [Lazy, Held])
@pytest.mark.parametrize("module", [UnitDataModule, Fingerprinted])
def test_rows_whose_content_cannot_be_compared_are_refused(kind: Any, module: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be compared") as refused:
        private = made(noise_multiplier=4.0, collate_fn=loaded)
        fit(tmp_path, private, module(LazyRows(kind), expected_batch_size=20), max_steps=2)
    assert refused.value.trap == "T38"


def test_a_package_of_a_project_is_no_library_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("profile")
    own.__file__ = str(tmp_path / "profile.py")
    assert is_library("profile") and is_library("torch.nn")
    monkeypatch.setitem(sys.modules, "profile", own)
    assert not is_library("profile")


class Words(Dataset[Any]):
    """Numbers words by their first occurrence."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        return torch.full((4,), float(self.known.setdefault(f"word {row % 7}", len(self.known)))), row % 3


def test_rows_made_by_a_vocabulary_that_grows_are_refused_and_those_of_a_cache_are_not(tmp_path: Path) -> None:
    words, first = Words(), {}

    def collate(given: list[Any]) -> Any:
        numbers = [first.setdefault(float(x[0]), len(first)) for x, _ in given]
        return torch.tensor(numbers)[:, None].float().expand(-1, 4), torch.tensor([y for _, y in given])

    with pytest.raises(DataError):
        fit(tmp_path / "rows", made(), data(words))
    assert not words.known, "as it was"
    with pytest.raises(UnsupportedModelError, match="collate_rows"):
        fit(tmp_path / "batch", made(collate_fn=collate))
    cache: dict[int, Any] = {}

    class Cached(Words):
        def __getitem__(self, row: int) -> Any:
            return cache.setdefault(row, (torch.full((4,), row / 60), row % 3))

    fit(tmp_path / "cache", made(), data(Cached()), max_steps=1)


SCALES: dict[str, Any] = {}


class ScaledAtFirstUse(Dataset[Any]):
    """Divides its rows by the largest number of the first one that is read."""

    scale: Any = None

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        x, y = rows()[row]
        if self.scale is None:
            self.scale = x.abs().max()
        return x / self.scale, y


class Scaling:
    """Centres rows by those of the first call, ``public`` ones by what is no row."""

    def __init__(self, *, public: bool = False) -> None:
        self.public, self.mean, self.unit = public, None, np.array(1.0)

    def __call__(self, given: list[Any]) -> Any:
        x, y = default_collate(given)
        if self.mean is None:
            self.mean = torch.ones(4) if self.public else x.mean(0)
        return (x - self.mean) * float(self.unit), y


def scaled_by_a_global(given: list[Any]) -> Any:
    x, y = default_collate(given)
    return x / SCALES.setdefault("std", SimpleNamespace(of=x.std(0))).of, y


class FirstSeen:
    """Numbers words by their first occurrence, in an array that it writes in place."""

    def __init__(self) -> None:
        self.known, self.count = np.full(60, np.nan), 0

    def __call__(self, given: list[Any]) -> Any:
        x, y = default_collate(given)
        for value in x[:, 0].tolist():
            if value not in self.known:
                self.known[self.count] = value
                self.count += 1
        places = torch.tensor([np.flatnonzero(self.known == value)[0] for value in x[:, 0].tolist()])
        return x + places[:, None], y


def test_a_scale_that_is_set_by_the_first_rows_is_refused_wherever_it_is_kept(tmp_path: Path) -> None:
    SCALES.clear()
    with pytest.raises(DataError) as refused:
        fit(tmp_path / "rows", made(), data(ScaledAtFirstUse()))
    assert refused.value.trap == "T38"
    for number, collate in enumerate((Scaling(), scaled_by_a_global, FirstSeen())):
        with pytest.raises(UnsupportedModelError, match="collate_rows"):
            fit(tmp_path / f"batch{number}", made(collate_fn=collate))
    fit(tmp_path / "public", made(collate_fn=Scaling(public=True)), max_steps=1)


@pytest.mark.costly
@pytest.mark.parametrize(
    "change", [lambda x: torch.tensor(x.tolist()), lambda x: x / 2, lambda x: x + 0.01 * torch.randn(4)],
    ids=["made", "computed", "augmented"],
)  # fmt: skip
def test_rows_that_are_made_when_they_are_asked_for_are_no_memory(change: Any, tmp_path: Path) -> None:
    x, y = rows().tensors
    for turn in range(3):  # where a tensor lies in memory is a matter of luck
        found = RowsOf(lambda row: (change(x[row]), int(y[row])))
        fit(tmp_path / str(turn), made(), data(found), max_steps=1)


@dataclass
class Row:
    x: Tensor
    tags: frozenset[str]


def test_equal_rows_of_any_kind_have_one_content_and_others_another_one() -> None:
    row = Row(torch.ones(3), frozenset({"a", "bb"}))
    word = "abc"
    assert content_of(row) == content_of(Row(torch.ones(6)[::2], frozenset({"bb", "a"})))
    assert content_of((word, word)) == content_of((word, "".join(["a", "bc"])))
    others = [row, Row(torch.zeros(3), row.tags), Row(torch.ones(3).double(), row.tags), Row(row.x, frozenset()),
              [[1], 2], [1, [2]], torch.ones(3).bfloat16(), torch.empty(0, 3), torch.empty(0, 4), np.ones(3),
              "1", 1]  # fmt: skip
    assert len({content_of(other) for other in others}) == len(others)


def test_rows_that_hold_themselves_have_a_content_too() -> None:
    def ring(value: float) -> list[Any]:
        found: list[Any] = [torch.tensor([value])]
        found.append(found)
        return found

    assert content_of(ring(1.0)) == content_of(ring(1.0)) != content_of(ring(2.0))
    assert content_of(torch.tensor([1j]).conj()) != content_of(torch.tensor([1j]))


def test_names_of_more_rows_than_a_subset_has_are_refused() -> None:
    users = [f"u{row // 10}" for row in range(60)]
    part = Subset(rows(), range(0, 60, 2))
    with pytest.raises(DataError, match="unit_of"):
        data(part, unit_of=users.__getitem__)
    assert data(part, unit_of=lambda row: users[part.indices[row]], **SMALL).n_units == 6


@pytest.mark.costly
def test_two_users_who_clicked_the_same_passage_for_the_same_query_are_two_units(tmp_path: Path) -> None:
    x, _ = rows().tensors
    clicks = [{"query_id": "q", "passage_id": "p", "x": x[row], "y": row % 3} for row in range(60)]

    def collate(chosen: list[Any]) -> Any:
        return torch.stack([row["x"] for row in chosen]), torch.tensor([row["y"] for row in chosen])

    fit(tmp_path, made(collate_fn=collate), data(clicks, unit_of=lambda row: f"u{row}"), max_steps=2)
    assert card_in(tmp_path)["claim"]["epsilon"] is not None


# -- what units are called -------------------------------------------------------------------------------------


@pytest.mark.costly
def test_the_card_calls_a_unit_what_its_owner_calls_it_and_a_resume_cannot_change_that(tmp_path: Path) -> None:
    fit(tmp_path, made(), grouped("user"), max_steps=1)
    card = card_in(tmp_path)
    claim = card["claim"]
    assert claim["unit"] == "record" and claim["unit_name"] == "user" and claim["unit_plural"] == "users"
    assert "unit = user, " in privacy_line(card) and "each user was clipped" in claim["statement"]
    assert claim["user_level_epsilon"] == claim["epsilon"]  # all rows of a user are one unit
    assert any("unit_of" in str(taken) for taken in card["assumptions"])
    schema = Path(cards.__file__).with_name("privacy_card.schema.json").read_text(encoding="utf-8")
    Draft202012Validator(json.loads(schema)).validate(card)
    assert not verify_chain(tmp_path).failed
    copy = Path(shutil.copytree(tmp_path, tmp_path.with_name("copy")))
    write_card(card | {"claim": claim | {"unit_name": "team"}}, copy)
    assert verify_chain(copy).failed
    with pytest.raises(ResumeError, match=r"datamodule\.unit_name"):
        fit(tmp_path, made(), grouped("team"), max_steps=1, callbacks=[PrivacyAccountant(resume=True)])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"unit_name": "user"}, "needs unit_of"),
        *(({"unit_of": str, "unit_name": name}, "must be one word") for name in ("A user (public)", "query", "pair")),
    ],
)
def test_a_name_of_units_that_are_rows_or_that_is_no_word_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unit_name=.* {reason}"):
        data(**settings)


@pytest.mark.parametrize(("unit", "named"), [("user", True), ("query", False)])
def test_a_unit_of_the_mode_is_refused_with_a_unit_name_that_is_accepted(unit: str, named: bool) -> None:
    with pytest.raises(ConfigurationError, match=rf"privacy\.unit={unit}.*each row's {unit}") as refused:
        data().use_unit(unit)
    assert ("unit_name='user'" in str(refused.value)) == named == ("unit_name" in str(refused.value))


def test_a_bound_on_the_units_of_a_user_contradicts_units_that_are_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_units_per_user"):
        fit(tmp_path, made(max_units_per_user=3), grouped("user"), max_steps=1)


def grouped(by: str | None) -> UnitDataModule:
    """Return 60 rows of 30 users: each a unit of its own, or all rows of a user one, with that name or unnamed."""
    if by is None:
        return data(expected_batch_size=10)
    return data(unit_of=lambda row: f"u{row // 2}", unit_name=by or None, expected_batch_size=10)


@pytest.mark.costly
@pytest.mark.parametrize("by", ["user", None])
def test_a_chain_of_runs_is_about_users_if_every_run_declares_them(by: str | None, tmp_path: Path) -> None:
    module, before = Classifier(), {}
    for run in range(3):
        callbacks = [PrivacyAccountant(**before)]
        fit(tmp_path / str(run), made(module, delta=1e-3), grouped(by), max_steps=1, callbacks=callbacks)
        before = {"init_from": tmp_path / str(run)}
    claim, told = card_in(tmp_path / "2")["claim"], by or "record"
    assert f"unit = {told}, " in privacy_line(card_in(tmp_path / "2")) and claim["unit_plural"] == f"{told}s"
    assert claim["user_level_epsilon"] == (claim["epsilon"] if by else None)
    assert not verify_chain(tmp_path / "2").failed


@pytest.mark.parametrize(
    ("first", "others"), [(None, ["user"]), ("user", [None, "team", ""]), ("", ["user", None, ""])]
)
def test_a_run_does_not_start_from_a_run_whose_units_may_be_parts_of_its_own(
    first: str | None, others: list[str | None], tmp_path: Path
) -> None:
    module = Classifier()
    fit(tmp_path / "1", made(module, delta=1e-3), grouped(first), max_steps=1)
    for then in others:
        before = PrivacyAccountant(init_from=tmp_path / "1")
        with pytest.raises(ConfigurationError, match="unit_name"):
            fit(tmp_path / "2", made(module, delta=1e-3), grouped(then), max_steps=1, callbacks=[before])
        assert not (tmp_path / "2" / "privacy_ledger.jsonl").exists()


@pytest.mark.parametrize(("first", "others"), [(None, ["user"]), ("user", ["team", ""])])
def test_a_ledger_of_a_data_set_adds_up_no_runs_whose_units_may_be_parts_of_others(
    first: str | None, others: list[str], tmp_path: Path
) -> None:
    ledger = {"dataset_ledger": tmp_path / "spent.jsonl", "total_eps": 20.0, "delta": 1e-3}
    for run in "12":
        fit(tmp_path / run, made(**ledger), grouped(first), max_steps=1)
    spent = (tmp_path / "spent.jsonl").read_bytes()
    for then in others:
        with pytest.raises(ConfigurationError, match="unit_name"):
            fit(tmp_path / "3", made(**ledger), grouped(then), max_steps=1)
    assert (tmp_path / "spent.jsonl").read_bytes() == spent


def test_a_ledger_of_a_data_set_is_not_begun_by_a_run_whose_units_nobody_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unit_name"):
        fit(tmp_path / "1", made(dataset_ledger=tmp_path / "spent.jsonl", total_eps=9.0), grouped(""), max_steps=1)
    assert not (tmp_path / "spent.jsonl").exists()


def test_a_name_that_was_set_past_the_constructor_makes_no_claim_about_it(tmp_path: Path) -> None:
    rows_alone = data()
    vars(rows_alone)["unit_name"] = "user"
    fit(tmp_path, made(), rows_alone, max_steps=1)
    claim = card_in(tmp_path)["claim"]
    assert "unit_name" not in claim and claim["user_level_epsilon"] is None
