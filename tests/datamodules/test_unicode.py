"""Half of a surrogate pair is not a character: JSON can say it, and nothing that hashes or writes texts can take it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_silos import SIZE

from lit_dpret.datamodules.huggingface import HubRows
from lit_dpret.datamodules.layouts import CorpusSettings, open_corpus, read_parts
from lit_dpret.datamodules.pair_file import PairReader, read_pairs
from lit_dpret.datamodules.readers import RecordFile, is_unicode
from lit_dpret.datamodules.silo_folder import read_silo, write_silos
from lit_dpret.datamodules.squad import SquadDataModule
from lit_dpret.errors import DataError
from lit_dpret.federated.data import planted_silos

BROKEN = "a \ud800 b"
CORPUS = [{"_id": "p1", "text": "one", "title": "t", "domain": "d"}, {"_id": "p2", "text": "two", "domain": "d"}]
QUERIES = [{"_id": "q1", "text": "first"}, {"_id": "q2", "text": "second", "user_id": "u", "domain": "d"}]
QRELS = [{"query-id": "q1", "corpus-id": "p1", "score": 1}, {"query-id": "q2", "corpus-id": "p2", "score": 1}]
PAIRS = [
    {"query": "first", "passage": "one", "query_id": "a", "passage_id": "p", "user_id": "u", "domain": "d"},
    {"query": "second", "passage": "two", "query_id": "b", "passage_id": "r", "user_id": "v", "domain": "d"},
]


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def folder(root: Path, part: str = "", column: str = "", value: Any = BROKEN) -> dict[str, Any]:
    parts = {"corpus": CORPUS, "queries": QUERIES, "qrels": QRELS}
    made = {
        name: write(root / f"{name}.jsonl", [records[0], records[1] | ({column: value} if name == part else {})])
        for name, records in parts.items()
    }
    return made | {"qrels": {"train": made["qrels"]}}


@pytest.mark.parametrize(
    ("part", "column"),
    [
        ("corpus", "_id"), ("corpus", "text"), ("corpus", "title"), ("corpus", "domain"), ("queries", "_id"),
        ("queries", "text"), ("queries", "user_id"), ("queries", "domain"), ("qrels", "query-id"),
        ("qrels", "corpus-id"),
    ],
)  # fmt: skip
def test_a_folder_is_refused_with_the_file_and_the_line(part: str, column: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{part}\.jsonl line 2: '{column}'") as refused:
        read_parts(**folder(tmp_path, part, column), source="here")
    assert is_unicode(str(refused.value)) and refused.value.kind == "not Unicode text"
    if part == "corpus":  # a stored one complains as one in memory does
        with pytest.raises(DataError, match=rf"corpus\.jsonl line 2: '{column}'"):
            open_corpus(tmp_path / "corpus.jsonl", CorpusSettings(in_memory=False, cache_dir=tmp_path / "cache"))


@pytest.mark.parametrize("column", PAIRS[1])
def test_a_file_of_pairs_and_rows_of_the_hub_are_refused_with_their_place(column: str, tmp_path: Path) -> None:
    records = [PAIRS[0], PAIRS[1] | {column: BROKEN}]
    with pytest.raises(DataError, match=rf"log\.jsonl line 2: '{column}'"):
        read_pairs(write(tmp_path / "log.jsonl", records))
    found: list[DataError] = []
    reader = PairReader()
    assert reader.add(HubRows(records, "some/set split train", found.append)) == 2
    assert [str(problem).partition(": ")[0] for problem in found] == ["some/set split train row 2"]
    assert list(reader.collection("here").queries.values()) == ["first"]


def test_a_user_in_metadata_is_looked_at_and_a_column_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    given = folder(tmp_path)
    write(given["queries"], [QUERIES[1], {"_id": "q1", "text": "first", "metadata": {"user_id": BROKEN}}])
    with pytest.raises(DataError, match=r"queries\.jsonl line 2: 'user_id'"):
        read_parts(**given, source="here")
    read_parts(**folder(tmp_path, "queries", "note", BROKEN), source="here")
    read_pairs(write(tmp_path / "log.jsonl", [PAIRS[0], PAIRS[1] | {"note": BROKEN, BROKEN: 1}]))


def client_folder(root: Path) -> Path:
    """The folder of the first of a few planted clients."""
    return sorted((write_silos(root / "silos", planted_silos(SIZE), facts={}) / "clients").iterdir())[0]


@pytest.mark.parametrize(("file", "column"), [("passages", "title"), ("sentences", "text"), ("queries", "text")])
def test_a_folder_of_silos_is_refused_with_the_file_and_the_line(file: str, column: str, tmp_path: Path) -> None:
    client = client_folder(tmp_path)
    path = client / f"{file}.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records[1][column] = BROKEN
    write(path, records)
    with pytest.raises(DataError, match=rf"{file}\.jsonl line 2: '{column}'"):
        read_silo(client, verify=False)


def squad(root: Path, spoil: Callable[[dict[str, Any]], None]) -> Path:
    question = {"id": "q1", "question": "which one"}
    article = {"title": "T", "paragraphs": [{"context": "one", "qas": [question]}]}
    spoil(article)
    root.mkdir(parents=True, exist_ok=True)
    path = root / "train-v1.1.json"
    path.write_text(json.dumps({"data": [article]}), encoding="utf-8")
    return root


@pytest.mark.parametrize(
    "spoil",
    [
        lambda article: article.update(title=BROKEN),
        lambda article: article["paragraphs"][0].update(context=BROKEN),
        lambda article: article["paragraphs"][0]["qas"][0].update(question=BROKEN),
        lambda article: article["paragraphs"][0]["qas"][0].update(id=BROKEN),
    ],
)
def test_squads_own_format_is_refused_with_the_file(spoil: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train-v1\.1\.json.*surrogate"):
        SquadDataModule(folder=squad(tmp_path, spoil), expected_batch_size=1).read_collection()


def test_what_comes_from_elsewhere_is_refused_by_its_id(tmp_path: Path) -> None:
    found = read_parts(**folder(tmp_path), source="here").check()
    for part, key in (("passages", "p2"), ("queries", "q2"), ("users", "q2"), ("domains", "q2")):
        broken = dict(getattr(found, part)) | {key: BROKEN}
        with pytest.raises(DataError, match=f"here: .*'{key}'.*surrogate"):
            type(found)(**{**{name: getattr(found, name) for name in vars_of(found)}, part: broken}).check()


def vars_of(collection: Any) -> list[str]:
    return list(type(collection).__dataclass_fields__)


def test_silos_with_half_a_pair_are_not_written(tmp_path: Path) -> None:
    silo = read_silo(client_folder(tmp_path))
    spoiled = type(silo)(silo.name, silo.passages, dict.fromkeys(silo.sentences, BROKEN), silo.passage_of, silo.queries)
    with pytest.raises(DataError, match="surrogate"):
        write_silos(tmp_path / "new", [spoiled], facts={})


def test_a_number_longer_than_python_reads_is_malformed_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"query": ' + "1" * 5000 + "}\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1: malformed JSON"):
        list(RecordFile(path))


def test_parquet_with_bytes_that_are_no_text_is_unreadable(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
    )
    parquet.write_table(pyarrow.table({"query": bad}), tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log\.parquet row 1"):
        list(RecordFile(tmp_path / "log.parquet"))
