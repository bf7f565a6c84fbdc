"""A split by a public hash: the same in any order, whole users and whole texts on one side, nothing overwritten."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.rows import SPLITS
from lit_dpret.datamodules.splitting import checked_fractions, divides_by, split_collection, write_split
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.budget import EACH_ROW, PARTLY_NAMED, UNSAID
from lit_dpret.texts import normalise

SHARES = {"train": 0.6, "dev": 0.2, "test": 0.2}
QUERIES = {f"q{i}": f"What is {i % 150}" + "?" * (i % 2) for i in range(300)}
LOG = Collection(
    passages={f"p{i}": f"passage\t{i}" for i in range(40)},
    queries=QUERIES,
    qrels={"train": {name: {f"p{i % 40}": 1 + i % 2, f"p{(i + 1) % 40}": i % 2} for i, name in enumerate(QUERIES)}},
    users={name: f"u{i % 60}" for i, name in enumerate(QUERIES)},
    domains={"q3": "sea"},
    passage_domains={"p1": "harbour"},
    source="log",
)
ANONYMOUS = replace(LOG, users={})


def sides(collection: Collection) -> dict[str, str]:
    return {query: split for split, qrels in collection.qrels.items() for query in qrels}


def test_every_query_is_in_one_split_with_all_its_judgements_and_those_of_a_user_in_the_same() -> None:
    found = split_collection(LOG, fractions=SHARES)
    assert list(found.qrels) == list(SPLITS)
    assert {query: judged for qrels in found.qrels.values() for query, judged in qrels.items()} == LOG.qrels["train"]
    assert sum(map(len, found.qrels.values())) == len(LOG.queries)
    assert found.check() is found
    assert len({(LOG.users[query], split) for query, split in sides(found).items()}) == 60


@pytest.mark.parametrize("collection", [ANONYMOUS, replace(LOG, users={"q1": "u1"})])
def test_all_copies_of_a_text_are_on_one_side_where_users_are_unknown(collection: Collection) -> None:
    found = sides(split_collection(collection, fractions=SHARES))
    texts = {name: normalise(text) for name, text in LOG.queries.items() if name not in collection.users}
    assert len({(text, found[name]) for name, text in texts.items()}) == len(set(texts.values())) < 300


def test_the_split_depends_neither_on_the_order_of_the_file_nor_on_an_earlier_split() -> None:
    mixed = list(LOG.qrels["train"].items())
    random.Random(0).shuffle(mixed)
    shuffled = replace(LOG, qrels={"train": dict(mixed)}, queries=dict(reversed(LOG.queries.items())))
    first = split_collection(LOG, fractions=SHARES)
    assert sides(split_collection(shuffled, fractions=SHARES)) == sides(first)
    again = split_collection(first, fractions=SHARES, seed=3)
    assert sides(again) == sides(split_collection(LOG, fractions=SHARES, seed=3))


def test_removing_a_record_moves_no_other_one() -> None:
    whole = sides(split_collection(LOG, fractions=SHARES))
    for gone in ("q0", "q17", "q299"):
        fewer = replace(LOG, qrels={"train": {q: judged for q, judged in LOG.qrels["train"].items() if q != gone}})
        assert sides(split_collection(fewer, fractions=SHARES)) == {q: s for q, s in whole.items() if q != gone}


def test_another_seed_gives_another_split_and_the_shares_are_kept() -> None:
    first, second = (split_collection(LOG, fractions=SHARES, seed=seed, by="text") for seed in (0, 1))
    assert sides(first) != sides(second)
    many = replace(
        ANONYMOUS,
        queries={f"q{i}": str(i) for i in range(20_000)},
        qrels={"train": {f"q{i}": {"p1": 1} for i in range(20_000)}},
    )
    sizes = {split: len(qrels) / 20_000 for split, qrels in split_collection(many, fractions=SHARES).qrels.items()}
    assert sizes == pytest.approx(SHARES, abs=0.02)


def test_a_split_that_would_be_empty_is_refused() -> None:
    tiny = replace(LOG, qrels={"train": {"q1": {"p1": 1}}}, users={})
    with pytest.raises(DataError, match=r"leaves (train|dev|test) empty\. Change task\.fractions or task\.split_seed"):
        split_collection(tiny, fractions=SHARES)
    alone = split_collection(tiny, fractions={"train": 1.0})
    assert list(alone.qrels) == ["train"]
    seed = next(seed for seed in range(99) if sides(_halves(tiny, seed))["q1"] == "test")
    with pytest.raises(DataError, match="leaves train empty"):
        split_collection(tiny, fractions={"train": 0.5, "test": 0.5}, seed=seed)


def _halves(collection: Collection, seed: int) -> Collection:
    """The same split with enough other queries that neither half is empty."""
    qrels = {"train": {**collection.qrels["train"], **{f"q{i}": {"p1": 1} for i in range(2, 60)}}}
    return split_collection(replace(collection, qrels=qrels), fractions={"train": 0.5, "test": 0.5}, seed=seed)


@pytest.mark.parametrize(
    ("fractions", "told"),
    [
        ({"train": 0.5, "test": 0.4}, "must add up to 1, not to 0.9"),
        ({"train": 0.5, "valid": 0.5}, "'valid' is not one of train, dev, test"),
        ({"train": 1.5, "test": -0.5}, "the share of train is not a number from 0 to 1"),
        ({"train": "most", "test": 0.5}, "the share of train is not a number"),
        ({"test": 1.0}, "leaves nothing to train on"),
    ],
)
def test_impossible_fractions_are_refused(fractions: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        checked_fractions(fractions)
    with pytest.raises(ConfigurationError, match=r"task\.split_by=user"):
        split_collection(ANONYMOUS, fractions=SHARES, by="user")


def test_a_written_split_reads_back_as_it_was(tmp_path: Path) -> None:
    wanted = split_collection(LOG, fractions=SHARES)
    settings = write_split(wanted, tmp_path / "split", public_passages=True)
    assert settings == {"folder": str(tmp_path / "split")}
    found = PairsDataModule(**settings).collection  # type: ignore[arg-type]
    assert (found.passages, found.qrels) == (wanted.passages, wanted.qrels)
    assert (found.queries, found.users) == (wanted.queries, wanted.users)
    assert (found.domains, found.passage_domains) == (wanted.domains, wanted.passage_domains)
    assert [path.name for path in tmp_path.iterdir()] == ["split"]
    assert (tmp_path / "split").stat().st_mode & 0o077 == 0


def test_a_private_list_of_passages_stays_private_in_a_written_split(tmp_path: Path) -> None:
    positives = {query: {p: 1 for p, grade in judged.items() if grade} for query, judged in LOG.qrels["train"].items()}
    wanted = split_collection(replace(LOG, qrels={"train": positives}), fractions=SHARES)
    settings = write_split(wanted, tmp_path / "split", public_passages=False)
    data = PairsDataModule(**settings)  # type: ignore[arg-type]
    assert data.collection.qrels == wanted.qrels and data.collection.users == wanted.users
    assert data.collection.passages.items() <= wanted.passages.items() and data.collection.domains == wanted.domains
    with pytest.raises(ConfigurationError, match="needs a public list of passages"):
        data.public_passages()


def test_nothing_is_overwritten_and_nothing_is_left_half_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigurationError, match=r"task\.write_split=.*there exists, and nothing is overwritten"):
        write_split(LOG, tmp_path / "there", public_passages=True)
    odd = replace(LOG, qrels={"train": {"q1": {"p\t1": 1}}})
    with pytest.raises(DataError, match=r"id 'p\\t1' cannot stand in a qrels file"):
        write_split(odd, tmp_path / "new", public_passages=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("public", [True, False])
def test_a_run_on_a_split_by_text_says_that_the_split_depends_on_texts(tmp_path: Path, public: bool) -> None:
    for number, users in enumerate((LOG.users, {}, {"q1": "u1"})):
        log = replace(LOG, users=users)
        split, folder = split_collection(log, fractions=SHARES), tmp_path / str(number)
        settings = write_split(split, folder, public_passages=public, by=divides_by(log, "auto"))
        told = PairsDataModule(**settings).assumptions()  # type: ignore[arg-type]
        assert bool(told) is (users is not LOG.users)


@pytest.mark.parametrize("public", [True, False])
def test_a_log_without_ids_does_not_get_other_units_by_being_split(tmp_path: Path, public: bool) -> None:
    kinds = (("all", None), ("some", PARTLY_NAMED), ("none", EACH_ROW), ("unknown", UNSAID))
    for number, (ids, by) in enumerate(kinds):
        split = split_collection(replace(LOG, query_ids=ids), fractions=SHARES)  # type: ignore[arg-type]
        settings = write_split(split, tmp_path / str(number), public_passages=public)
        for copied in (False, True):  # without the note beside it
            if copied:
                shutil.copytree(tmp_path / str(number), tmp_path / f"copy {number}")
                (tmp_path / f"copy {number}" / "division.json").unlink()
                settings = {k: v.replace(f"/{number}", f"/copy {number}") for k, v in settings.items()}
            data = PairsDataModule(**settings)  # type: ignore[arg-type]
            data.use_unit("query")
            assert data.unit_by == by
    (tmp_path / "0" / "division.json").write_text("{}")
    with pytest.raises(DataError, match=r"division\.json"):
        PairsDataModule(**write_split_settings(tmp_path / "0", public)).assumptions()


def write_split_settings(folder: Path, public: bool) -> dict[str, Any]:
    return {"folder": str(folder)} if public else {"pairs": str(folder / "pairs.jsonl")}
