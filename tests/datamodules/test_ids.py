"""An id says who it is whatever whitespace surrounds it, and however its accents are written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_silos import SIZE

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.silo_folder import read_silo, write_silos
from lit_dpret.datamodules.unit_dataset import GroupedUnitDataset
from lit_dpret.errors import DataError
from lit_dpret.federated.data import planted_silos

#: Ann in three spellings, and José with one letter for the accent and with two.
USERS = ["ann", "ann ", "\u00a0ann\t", "Jos\u00e9", "Jose\u0301 "]
PASSAGES = {"p1": "one", "p2": "two"}


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def pairs(root: Path, users: Sequence[Any] = USERS, ending: str = ".jsonl") -> Path:
    records = [{"query": f"what is {i}", "passage": "one", "user_id": user} for i, user in enumerate(users)]
    if ending == ".jsonl":
        return write(root / "log.jsonl", records)
    path = root / f"log{ending}"
    lines = ["query,passage,user_id", *(f"{r['query']},{r['passage']},{r['user_id']}" for r in records)]
    path.write_text("\n".join(lines).replace(",", "\t" if ending == ".tsv" else ",") + "\n", encoding="utf-8")
    return path


def users_of(data: PairsDataModule) -> int:
    data.use_unit("user")
    data.setup("fit")
    return len(data.train_units())


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_a_user_of_a_log_is_one_unit_however_the_id_was_written(ending: str, tmp_path: Path) -> None:
    file = pairs(tmp_path, [user.replace("\t", "") for user in USERS], ending)
    data = PairsDataModule(pairs=file, passages_are_public=True, expected_batch_size=1)
    assert users_of(data) == 2


def test_a_user_is_one_unit_where_a_table_has_whole_floats_for_ids(tmp_path: Path) -> None:
    data = PairsDataModule(pairs=pairs(tmp_path, [7.0, 7, "7", 8.0]), passages_are_public=True, expected_batch_size=1)
    assert users_of(data) == 2


@pytest.mark.parametrize("user", [7.5, True, ["ann"], float("inf"), 2.0**60])
def test_what_is_no_id_of_a_user_is_not_passed_over(user: Any, tmp_path: Path) -> None:
    data = PairsDataModule(pairs=pairs(tmp_path, ["ann", user]), passages_are_public=True, expected_batch_size=1)
    with pytest.raises(DataError, match="user_id"):
        data.setup("fit")


@pytest.mark.parametrize("inside", [True, False])
def test_a_user_of_a_file_of_queries_is_one_unit(inside: bool, tmp_path: Path) -> None:
    def said(user: str) -> dict[str, Any]:
        return {"metadata": {"user_id": user}} if inside else {"user_id": user}

    queries = [{"_id": f"q{i}", "text": f"what is {i}", **said(user)} for i, user in enumerate(USERS)]
    (tmp_path / "qrels").mkdir()
    write(tmp_path / "queries.jsonl", queries)
    write(tmp_path / "corpus.jsonl", [{"_id": f" {name}", "text": text} for name, text in PASSAGES.items()])
    judged = [f"q{i} \tp1\t1" for i in range(len(USERS))]
    (tmp_path / "qrels" / "train.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    assert users_of(PairsDataModule(folder=tmp_path, expected_batch_size=1)) == 2


def test_a_user_of_a_collection_that_was_made_by_hand_is_one_unit() -> None:
    ids = [f"q{i}" for i in range(len(USERS))]
    made = Collection(
        passages=PASSAGES,
        queries={name: f"text {name}" for name in ids},
        qrels={"train": {name: {"p1": 1} for name in ids}},
        users=dict(zip(ids, USERS, strict=True)),
    )
    units = GroupedUnitDataset(made, unit="user")
    assert len(units) == 2 and len({*made.users.values()}) == 2
    assert GroupedUnitDataset(made, unit="query").most_units_of_a_user() == 3


def test_two_records_of_one_query_with_one_user_agree_and_an_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    record = {"query": "what", "query_id": "q", "passage": "one", "user_id": "ann"}
    write(tmp_path / "log.jsonl", [record, {**record, "passage": "two", "user_id": "ann ", "query_id": " q"}])
    data = PairsDataModule(pairs=tmp_path / "log.jsonl", passages_are_public=True, expected_batch_size=1)
    assert users_of(data) == 1
    write(tmp_path / "log.jsonl", [record, {**record, "query": "other", "query_id": "q "}])
    with pytest.raises(DataError, match="two texts"):
        PairsDataModule(pairs=tmp_path / "log.jsonl", passages_are_public=True).setup("fit")


def test_the_parts_of_a_silo_name_each_other_however_an_id_was_written(tmp_path: Path) -> None:
    (silo, *_) = planted_silos(SIZE)
    write_silos(tmp_path / "silos", [silo], facts={})
    folder = tmp_path / "silos" / "clients" / silo.name
    for name, columns in (("sentences", ("sid", "pid")), ("queries", ("qid", "pos_sids"))):
        records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for column in columns:
            value = records[0][column]
            records[0][column] = [f" {one}" for one in value] if isinstance(value, list) else f"{value} "
        write(folder / f"{name}.jsonl", records)
    assert read_silo(folder, verify=False) == read_silo_of(silo, tmp_path / "clean")


def read_silo_of(silo: Any, folder: Path) -> Any:
    write_silos(folder, [silo], facts={})
    return read_silo(folder / "clients" / silo.name)
