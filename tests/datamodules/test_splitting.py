"""Splits and samples by a public hash: the same in any order, whole users and whole texts on one side."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import folder_parts, read_parts
from lit_dpret.datamodules.preparation import (
    Overlap,
    drop_overlap,
    drop_queries_without_passage,
    report_overlap,
    sample,
)
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
    assert list(split_collection(tiny, fractions={"train": 1.0}).qrels) == ["train"]
    found = set()
    for seed in range(20):
        with pytest.raises(DataError, match=r"task\.fractions or task\.split_seed") as refused:
            split_collection(tiny, fractions={"train": 0.5, "test": 0.5}, seed=seed)
        found |= {part for part in ("train", "test") if f"leaves {part} empty" in str(refused.value)}
    assert found == {"train", "test"}


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
    with pytest.raises(DataError, match=r"id 'p\\t1' cannot be written to a qrels file"):
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


def test_the_note_of_a_split_is_found_beside_each_part_that_is_read(tmp_path: Path) -> None:
    split, elsewhere = tmp_path / "split", tmp_path / "elsewhere"
    write_split(split_collection(LOG, fractions=SHARES, by="text"), split, public_passages=True)
    elsewhere.mkdir()
    shutil.copy(split / "queries.jsonl", elsewhere)
    (elsewhere / "train.tsv").symlink_to(split / "qrels" / "train.tsv")
    (split / "queries").mkdir()
    shutil.copy(split / "queries.jsonl", split / "queries")
    copied = str(elsewhere / "queries.jsonl")
    cases: list[dict[str, Any]] = [
        {"queries": copied, "qrels": {"train": str(split / "qrels" / "train.tsv")}},
        {"queries": copied, "qrels": str(split / "qrels")},
        {"queries": copied, "qrels": {"train": str(elsewhere / "train.tsv")}},
        {"queries": str(split / "queries"), "qrels": {"train": str(elsewhere / "copy.tsv")}},
    ]
    shutil.copy(split / "qrels" / "train.tsv", elsewhere / "copy.tsv")
    for case in cases:
        assert PairsDataModule(corpus=str(split / "corpus.jsonl"), **case).assumptions(), case
    linked = tmp_path / "linked"
    (linked / "qrels").mkdir(parents=True)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/train.tsv"):
        (linked / name).symlink_to(split / name)
    assert PairsDataModule(folder=str(linked)).assumptions(), "a folder of links"
    apart = {"queries": copied, "qrels": {"train": str(elsewhere / "copy.tsv")}}
    assert not PairsDataModule(corpus=str(split / "corpus.jsonl"), **apart).assumptions()
    with pytest.raises(ConfigurationError, match=r"division\.json"):
        PairsDataModule(corpus=str(split / "corpus.jsonl"), **apart | {"queries": f"{split}/queries/*"}).prepare_data()
    (elsewhere / "division.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"division\.json"):
        PairsDataModule(corpus=str(split / "corpus.jsonl"), **apart).assumptions()


def write_split_settings(folder: Path, public: bool) -> dict[str, Any]:
    return {"folder": str(folder)} if public else {"pairs": str(folder / "pairs.jsonl")}


# -- samples, overlaps, and queries without a passage --------------------------------------------

NO_LIMITS: dict[str, Any] = {"max_passages": None, "max_train_queries": None, "max_eval_queries": None, "seed": 0}


@pytest.fixture
def data(harbour: Path) -> Collection:
    return read_parts(**folder_parts(harbour)).check()


@pytest.fixture
def large() -> Collection:
    """300 passages; 200 train queries with one to three positives, 60 test queries."""
    passages = {f"p{i}": f"passage {i}" for i in range(300)}
    train = {f"t{i}": {f"p{(7 * i + 31 * j) % 300}": 1 for j in range(1 + i % 3)} for i in range(200)}
    test = {f"e{i}": {f"p{(11 * i) % 300}": 1, f"p{(11 * i + 5) % 300}": 0} for i in range(60)}
    queries = {query: f"question {query}" for query in (*train, *test)}
    return Collection(passages=passages, queries=queries, qrels={"train": train, "test": test}).check()


def records(data: Collection, split: str = "train") -> dict[str, tuple[str, dict[str, int]]]:
    return {query: (data.queries[query], dict(judged)) for query, judged in data.qrels[split].items()}


def test_queries_without_a_passage_are_left_out_when_asked(data: Collection) -> None:
    qrels = {**data.qrels, "train": {**data.qrels["train"], "t5": {"p3": 0}}}
    spoilt = replace(data, queries={**data.queries, "x": "lost"}, qrels=qrels)
    with pytest.raises(DataError, match=r"datamodule\.drop_queries_without_passage"):
        spoilt.check()
    mended = drop_queries_without_passage(spoilt).check()
    assert mended.queries.keys() == data.queries.keys() - {"t5"}
    zero = replace(data, qrels={**data.qrels, "test": {"e2": {"p1": 0}}})
    assert "e2" in drop_queries_without_passage(zero).qrels["test"], "a test query stays for the evaluator"


def test_which_train_queries_have_a_passage_moves_no_other_query(harbour_copy: Path) -> None:
    """Neither the published number of units nor a sample tells."""
    train = harbour_copy / "qrels" / "train.tsv"
    lines, found = train.read_text().splitlines(), []
    for place in range(1, len(lines)):
        judged = lines[place].split("\t")
        train.write_text("\n".join([*lines[:place], "\t".join([*judged[:-1], "0"]), *lines[place + 1 :]]) + "\n")
        for most in (None, 2):
            data = PairsDataModule(folder=harbour_copy, drop_queries_without_passage=True, max_train_queries=most)
            data.use_unit("query", "zero_out")
            found.append((most, data.n_units, tuple(sorted(data.collection.qrels["train"]))))
    assert len(set(found)) == 2


def test_the_overlap_is_counted_and_dropping_it_removes_train_queries_only(data: Collection) -> None:
    assert report_overlap(data) == {"dev": Overlap(queries=0, passages=1), "test": Overlap(queries=1, passages=1)}
    cleaned = drop_overlap(data)
    assert [query for query, judged in cleaned.qrels["train"].items() if judged] == ["t1", "t2", "t3", "t5"]
    assert list(cleaned.qrels["train"]) == list(data.qrels["train"]), "as units they all stay"
    assert cleaned.qrels["dev"] == data.qrels["dev"] and cleaned.qrels["test"] == data.qrels["test"]
    assert report_overlap(cleaned) == {"dev": Overlap(queries=0, passages=0), "test": Overlap(queries=0, passages=0)}


def test_a_sample_holds_so_many_passages_and_only_queries_they_answer(large: Collection) -> None:
    small = sample(large, **{**NO_LIMITS, "max_passages": 100})
    assert len(small.passages) == 100
    assert len(sample(large, **{**NO_LIMITS, "max_passages": 150, "max_eval_queries": 7}).qrels["test"]) == 7
    whole = sample(large, **NO_LIMITS)
    assert (whole.passages, whole.queries, whole.qrels) == (large.passages, large.queries, large.qrels)
    for split, qrels in small.qrels.items():
        assert 0 < sum(map(bool, qrels.values())) < len(large.qrels[split])
        for query, judged in large.qrels[split].items():
            kept = {passage: grade for passage, grade in judged.items() if passage in small.passages}
            gone = {} if split == "train" else None
            assert qrels.get(query) == (kept if any(grade > 0 for grade in kept.values()) else gone)


def test_the_number_of_train_units_does_not_tell_what_queries_are_about(large: Collection) -> None:
    limits = {**NO_LIMITS, "max_passages": 100}
    kept, gone = (
        next(p for p in large.passages if (p in sample(large, **limits).passages) is wanted) for wanted in (True, False)
    )
    query = next(iter(large.qrels["train"]))
    sizes = set()
    for passage in (kept, gone):
        train = {**large.qrels["train"], query: {passage: 1}}
        sizes.add(len(sample(replace(large, qrels={**large.qrels, "train": train}), **limits).qrels["train"]))
    assert len(sizes) == 1


def test_the_retained_passages_depend_on_no_query(large: Collection) -> None:
    other = replace(
        large,
        queries={query: "something else" for query in large.queries},
        qrels={"train": {"t0": {"p1": 1}}, "test": large.qrels["test"]},
    )
    limits = {**NO_LIMITS, "max_passages": 150, "max_train_queries": 50}
    assert sample(large, **limits).passages == sample(other, **limits).passages


def test_the_sample_is_the_same_in_any_file_order_and_another_for_another_seed(large: Collection) -> None:
    backwards = replace(
        large,
        passages=dict(reversed([*large.passages.items()])),
        qrels={split: dict(reversed([*qrels.items()])) for split, qrels in large.qrels.items()},
    )
    limits = {**NO_LIMITS, "max_passages": 120, "max_train_queries": 80, "max_eval_queries": 9}
    ours, theirs = sample(large, **limits), sample(backwards, **limits)
    assert ours.passages == theirs.passages and ours.qrels == theirs.qrels
    assert ours.passages != sample(large, **{**limits, "seed": 1}).passages


@pytest.mark.parametrize("limit", [None, 40])
def test_changing_one_train_query_changes_no_other_and_nor_does_removing_one_without_a_limit(
    large: Collection, limit: int | None
) -> None:
    def sampled(train: Any, **changes: Any) -> dict[str, tuple[str, dict[str, int]]]:
        changed = replace(large, **changes, qrels={**large.qrels, "train": train})
        return records(sample(changed, **{**NO_LIMITS, "max_passages": 150, "max_train_queries": limit}))

    train = large.qrels["train"]
    before = sampled(train)
    for query in list(train)[::9]:
        others = {q: r for q, r in before.items() if q != query}
        for judged in ({"p299": 1}, {"p1": 1, "p2": 1, "p3": 1}):
            after = sampled({**train, query: judged}, queries={**large.queries, query: "changed"})
            assert {q: r for q, r in after.items() if q != query} == others
        assert limit or sampled({q: judged for q, judged in train.items() if q != query}) == others


def test_with_a_query_limit_removing_one_lets_another_in(large: Collection) -> None:
    """Why max_train_queries is refused under add_or_remove."""
    limits = {**NO_LIMITS, "max_train_queries": 40}
    before = records(sample(large, **limits))
    train = {q: judged for q, judged in large.qrels["train"].items() if q != next(iter(before))}
    after = records(sample(replace(large, qrels={**large.qrels, "train": train}), **limits))
    assert len(before) == len(after) == 40 and len(after.keys() - before.keys()) == 1


def test_a_sample_that_leaves_no_query_is_refused_by_its_knob(data: Collection) -> None:
    with pytest.raises(DataError, match=r"no query of .* remains\. Raise datamodule\.max_passages, or"):
        sample(data, **{**NO_LIMITS, "max_passages": 1})
