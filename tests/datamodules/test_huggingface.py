"""Rows by the names of their columns: from a folder without any library, from the hub through ``datasets``."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from lit_dpret import errors
from lit_dpret.datamodules import HuggingFaceDataModule
from lit_dpret.datamodules.records import Problems
from lit_dpret.datamodules.rows import TextUnit
from lit_dpret.errors import ConfigurationError, DataError

Write = Callable[..., Path]
ROWS = [
    {"question": "How deep?", "answer": "Four metres.", "person": "ann", "part": "train", "key": 1},
    {"question": "Who paints?", "answer": "The crew.", "person": "ben", "part": "valid", "key": 2},
    {"question": "How wide?", "answer": "Four metres.", "person": "ann", "part": "train", "key": 3},
]
COLUMNS: dict[str, Any] = {"query_column": "question", "passage_column": "answer"}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def folder(write: Write, tmp_path: Path) -> Path:
    write("data/train-00000-of-00002.jsonl", ROWS[:1])
    write("data/train-00001-of-00002.jsonl.gz", gzip.compress(lines(ROWS[2:])))
    write("data/validation.csv", "question,answer\nWho paints?,The crew.\n")
    write("data/README.md", "# not data")
    return tmp_path / "data"


def texts(data: HuggingFaceDataModule) -> dict[str, list[tuple[str, str]]]:
    found = data.collection
    return {
        split: [(found.queries[q], found.passages[p]) for q, judged in qrels.items() for p in judged]
        for split, qrels in found.qrels.items()
    }


def test_the_files_of_a_folder_are_read_by_split_and_column(folder: Path) -> None:
    data = HuggingFaceDataModule(path=folder, **COLUMNS)
    data.prepare_data()
    assert texts(data) == {
        "train": [("How deep?", "Four metres."), ("How wide?", "Four metres.")],
        "dev": [("Who paints?", "The crew.")],
    }
    assert len(data.collection.passages) == 2 and len(data.collection.queries) == 3
    assert data.file_columns() == {
        "train": ("question", "answer", "person", "part", "key"),
        "dev": ("question", "answer"),
    }


def test_a_column_can_say_the_split(write: Write) -> None:
    path = write("log.jsonl", ROWS)
    data = HuggingFaceDataModule(path=path, split_column="part", **COLUMNS)
    assert [*texts(data)] == ["train", "dev"]


def test_splits_can_have_names_of_their_own(write: Write, tmp_path: Path) -> None:
    write("data/train_sft-0.jsonl", ROWS[:1])
    write("data/train_gen-0.jsonl", ROWS[1:2])
    write("data/holdout.jsonl", ROWS[2:])
    data = HuggingFaceDataModule(path=tmp_path / "data", splits={"train": "train_sft", "test": "holdout"}, **COLUMNS)
    assert texts(data) == {"train": [("How deep?", "Four metres.")], "test": [("How wide?", "Four metres.")]}


def test_names_that_say_a_split_and_names_that_do_not_are_refused_together(folder: Path) -> None:
    (folder / "corpus.tsv").write_text("_id\ttext\n")
    with pytest.raises(DataError, match=r"the name of corpus\.tsv names no split, but other names do"):
        HuggingFaceDataModule(path=folder, **COLUMNS).prepare_data()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"path": "gone"}, r"datamodule\.path"),
        ({"query_column": "qestion"}, r"'qestion'.*found: question.*datamodule\.query_column"),
        ({"passage_column": "passage"}, r"datamodule\.passage_column"),
        ({"passage_column": "question"}, r"datamodule\.query_column and datamodule\.passage_column"),
        ({"query_column": ["question", "title"]}, r"datamodule\.query_column"),
        ({"query_column": None}, r"datamodule\.query_column"),
        ({"user_column": 3}, r"datamodule\.user_column"),
        ({"splits": "train"}, r"datamodule\.splits"),
        ({"splits": ["train"]}, r"datamodule\.splits"),
        ({"splits": {"train_sft": "train"}}, r"datamodule\.splits.*train, dev, test"),
        ({"splits": {"train": "train", "test": "holdout"}}, r"datamodule\.splits\.test"),
        ({"split_column": "part", "splits": {"train": "log"}}, r"datamodule\.splits and datamodule\.split_column"),
        ({"corpus": "gone.jsonl"}, r"datamodule\.corpus"),
        ({"path": "gone/deeper/log.jsonl"}, r"gone/deeper/log\.jsonl does not exist; check datamodule\.path"),
        ({"name": "en"}, r"datamodule\.name.*datamodule\.path"),
        ({"revision": "main"}, r"datamodule\.revision.*datamodule\.path"),
        ({"streaming": True, "max_rows": 3}, r"datamodule\.streaming=true.*datamodule\.path"),
        ({"max_rows": "all"}, r"datamodule\.max_rows"),
    ],
)
def test_a_wrong_setting_of_a_local_folder_is_named_in_one_line_and_nothing_is_warned_of(
    settings: dict[str, Any],
    named: str,
    folder: Path,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # five retries take 23 s
    with pytest.raises((ConfigurationError, DataError), match=named) as found:
        data = HuggingFaceDataModule(**{"path": folder, **COLUMNS, **settings})
        data.prepare_data()
        data.setup("fit")
    assert "\n" not in str(found.value) and not recwarn.list


@pytest.mark.parametrize(("name", "way_out"), [("data-00000-of-00001.arrow", "to_parquet"), ("train.json", "jsonl")])
def test_files_of_another_kind_are_told_how_to_be_written(name: str, way_out: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=rf"datamodule\.path.*{way_out}"):
        HuggingFaceDataModule(path=tmp_path, **COLUMNS).prepare_data()


@pytest.mark.parametrize("knob", ["user_column", "query_id_column", "passage_id_column", "split_column"])
def test_a_column_that_was_named_and_is_missing_is_refused_and_others_are_not_read(knob: str, write: Write) -> None:
    rows = [{**row, "user_id": "x", "split": "sft", "query_id": ["a list"]} for row in ROWS]
    data = HuggingFaceDataModule(path=write("log.jsonl", rows), **COLUMNS)
    assert data.collection.users == {} and list(data.collection.queries) == ["row-1", "row-2", "row-3"]
    path = write("log.jsonl", ROWS)
    with pytest.raises(DataError, match="no key 'nobody'; found: question, answer, person, part, key") as error:
        HuggingFaceDataModule(path=path, **COLUMNS, **{knob: "nobody"}).setup("fit")
    assert "How deep" not in str(error.value)


def test_the_first_rows_of_each_split_can_be_asked_for(folder: Path) -> None:
    data = HuggingFaceDataModule(path=folder, max_rows=1, **COLUMNS)
    assert texts(data) == {"train": [("How deep?", "Four metres.")], "dev": [("Who paints?", "The crew.")]}
    assert len(HuggingFaceDataModule(path=folder, max_rows=2, **COLUMNS).collection.qrels["train"]) == 2
    for neighbours in ("add_or_remove", "replace_one"):
        for unit in get_args(TextUnit)[:3]:
            with pytest.raises(
                ConfigurationError, match=rf"max_rows=1 cannot go with privacy\.neighbours={neighbours}"
            ):
                data.use_unit(unit, neighbours)
    data.use_unit("query", "zero_out")
    assert data.n_units == 1


def test_rows_of_several_files_have_ids_of_their_own_and_problems_name_the_file(folder: Path) -> None:
    assert list(HuggingFaceDataModule(path=folder, **COLUMNS).collection.qrels["train"]) == ["row-1", "row-2.1"]
    (folder / "train-00002.jsonl").write_bytes(lines([*ROWS[:1], {"question": 7, "answer": "a"}]))
    problems = Problems()
    HuggingFaceDataModule(path=folder, **COLUMNS).read_collection(problems)
    assert [message for shown in problems.shown.values() for message in shown] == [
        f"{folder / 'train-00002.jsonl'} line 2: 'question' is a number; a string is expected."
    ]


def test_the_passages_of_private_rows_are_no_public_list_unless_declared(folder: Path, write: Write) -> None:
    with pytest.raises(ConfigurationError, match="needs a public list of passages"):
        HuggingFaceDataModule(path=folder, **COLUMNS).public_passages()
    assert len(HuggingFaceDataModule(path=folder, passages_are_public=True, **COLUMNS).public_passages()) == 2
    corpus = write("corpus.jsonl", [{"_id": "p", "text": "Four metres."}, {"_id": "o", "text": "The crew."}])
    data = HuggingFaceDataModule(path=folder, corpus=corpus, **COLUMNS)
    data.prepare_data()
    assert list(data.public_passages()) == ["o", "p"] and data.collection.qrels["dev"] == {"row-3.2": {"o": 1}}


# -- the hub ---------------------------------------------------------------------------------------


class Hub:
    """A stand-in for the library: it keeps what it was asked for, and gives rows like a streamed data set."""

    def __init__(self, splits: dict[str, list[dict[str, Any]]], fails_at: int | None = None) -> None:
        self.splits, self.fails_at = splits, fails_at
        self.asked: list[dict[str, Any]] = []
        self.given = 0

    def load_dataset(self, path: str, name: str | None = None, **how: Any) -> Any:
        self.asked.append({"path": path, "name": name, **how})
        found = {split: self.streamed(rows) for split, rows in self.splits.items()}
        return found[how["split"]] if "split" in how else found

    def streamed(self, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for place, row in enumerate(rows):
            if place == self.fails_at:
                raise ConnectionError("the connection was reset\nand more")
            self.given += 1
            yield row


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    library = Hub({"train": ROWS[:1] * 1 + ROWS[2:], "validation": ROWS[1:2], "unsupervised": ROWS})
    monkeypatch.setitem(sys.modules, "datasets", library)  # type: ignore[arg-type]
    return library


def test_a_name_that_is_no_path_is_read_from_the_hub_at_its_revision(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    data = HuggingFaceDataModule(path="someone/log", name="en", revision="abc123", **COLUMNS)
    data.prepare_data()
    assert {split: len(found) for split, found in texts(data).items()} == {"train": 2, "dev": 1}
    assert hub.asked[0] == {"path": "someone/log", "name": "en", "revision": "abc123", "streaming": False}
    with pytest.warns(UserWarning, match=r"without datamodule\.revision"):
        HuggingFaceDataModule(path="someone/log", **COLUMNS).prepare_data()
    monkeypatch.setattr(errors, "on_command_line", False)
    with pytest.warns(UserWarning, match="read without revision"):
        HuggingFaceDataModule(path="someone/log", **COLUMNS).prepare_data()


def test_the_splits_that_are_named_are_asked_for_by_name(hub: Hub) -> None:
    splits = {"train": "unsupervised"}
    data = HuggingFaceDataModule(path="someone/log", splits=splits, **COLUMNS)
    assert list(texts(data)) == ["train"] and hub.asked[-1]["split"] == "unsupervised"
    hub.splits = {"unsupervised": ROWS}
    with pytest.raises(DataError, match=r"has no train, validation or test split, only unsupervised; set datamodule"):
        HuggingFaceDataModule(path="someone/log", **COLUMNS).setup("fit")


def test_streaming_fetches_no_more_rows_than_are_used(hub: Hub) -> None:
    hub.splits = {"train": [{**ROWS[0], "question": str(i)} for i in range(1000)]}
    data = HuggingFaceDataModule(path="someone/log", streaming=True, max_rows=3, **COLUMNS)
    assert len(data.collection.queries) == 3 and hub.given <= 4 and hub.asked[-1]["streaming"] is True
    with pytest.raises(ConfigurationError, match=r"datamodule\.max_rows, or set datamodule\.streaming=false"):
        HuggingFaceDataModule(path="someone/log", streaming=True, **COLUMNS)


def test_what_the_hub_does_not_give_is_one_line(hub: Hub) -> None:
    hub.fails_at = 1
    with pytest.raises(DataError, match=r"split train row 2 could not be loaded: the connection was reset$"):
        HuggingFaceDataModule(path="someone/log", **COLUMNS).setup("fit")
    with pytest.raises(DataError, match="could not be loaded: 'nothing'"):
        HuggingFaceDataModule(path="someone/log", splits={"train": "nothing"}, **COLUMNS).setup("fit")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"file or folder here.*lit-dpret\[hf\]"):
        HuggingFaceDataModule(path="someone/log", **COLUMNS).setup("fit")
