"""MS MARCO's own files: TSV without headers, the small development set, a collection that may stay on disk."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_dpret.datamodules import MSMarcoDataModule
from lit_dpret.datamodules.passage_store import PassageStore
from lit_dpret.datamodules.readers import Problems
from lit_dpret.errors import ConfigurationError, DataError

FILES = {
    "collection": '0\tA "quoted" start.\n1\tsecond\n7067032\tlast\n',
    "queries.train": "121352\tdefine extreme\n634306\tnobody judged this\n",
    "queries.dev.small": "1048585\twhat is paula deen's brother\n",
    "queries.dev": "1048585\twhat is paula deen's brother\n2\tAndrogen receptor define\n",
    "qrels.train": "121352\t0\t1\t1\n121352\t0\t0\t1\n",
    "qrels.dev.small": "1048585\t0\t7067032\t1\n",
    "qrels.dev": "1048585\t0\t7067032\t1\n2\t0\t0\t1\n",
}
# A query of the train split, with another text among those of dev.
TWO_TEXTS = {"queries.dev.small": "121352\tanother text\n", "qrels.dev.small": "121352\t0\t1\t1\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "msmarco"
    root.mkdir()
    for name, content in FILES.items():
        (root / f"{name}.tsv").write_text(content, encoding="utf-8")
    return root


def test_train_and_the_small_development_set_are_read(folder: Path) -> None:
    data = MSMarcoDataModule(folder=folder)
    assert data.collection.passages == {"0": 'A "quoted" start.', "1": "second", "7067032": "last"}
    assert data.collection.queries == {"121352": "define extreme", "1048585": "what is paula deen's brother"}
    assert data.collection.qrels == {"train": {"121352": {"1": 1, "0": 1}}, "dev": {"1048585": {"7067032": 1}}}
    assert data.evaluation_split == "dev"
    data.use_unit("query")
    assert data.n_units == 1


def test_the_full_development_set_and_evaluation_alone_can_be_asked_for(folder: Path) -> None:
    data = MSMarcoDataModule(folder=folder, dev="full", only_evaluation=True)
    assert data.collection.qrels == {"dev": {"1048585": {"7067032": 1}, "2": {"0": 1}}}
    with pytest.raises(ConfigurationError, match=r"datamodule\.dev='tiny' is not one of small, full"):
        MSMarcoDataModule(folder=folder, dev="tiny")  # type: ignore[arg-type]


def test_compressed_files_and_a_stored_collection_give_the_same(folder: Path, tmp_path: Path) -> None:
    wanted = MSMarcoDataModule(folder=folder).collection
    for name in FILES:
        plain = folder / f"{name}.tsv"
        plain.with_name(plain.name + ".gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    data = MSMarcoDataModule(folder=folder, in_memory=False, cache_dir=tmp_path / "cache")
    data.prepare_data()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert isinstance(data.public_passages(), PassageStore)
    assert (data.collection.passages, data.collection.queries, data.collection.qrels) == (
        wanted.passages,
        wanted.queries,
        wanted.qrels,
    )
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_every_missing_file_is_told_at_once(folder: Path) -> None:
    for name in ("queries.dev.small", "qrels.train"):
        (folder / f"{name}.tsv").unlink()
    with pytest.raises(DataError) as error:
        MSMarcoDataModule(folder=folder).prepare_data()
    message = str(error.value)
    assert all(name in message for name in ("queries.dev.small.tsv", "qrels.train.tsv", "it holds: collection.tsv"))
    assert "datamodule.dev=full" in message and "\n" not in message
    with pytest.raises(DataError, match=r"does not exist or is not a folder; check datamodule\.folder"):
        MSMarcoDataModule(folder=folder / "nowhere").prepare_data()


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("collection", "8\n", "collection.tsv line 4: 1 columns, but 2 are expected (id, text; tabs between them"),
        ("collection", "1\tagain\n", "collection.tsv line 4: id '1' was already given on line 2"),
        ("queries.train", "9\t \n", "queries.train.tsv line 3: query '9' has an empty text"),
        ("qrels.train", "121352 0 1 1\n", "qrels.train.tsv line 3: 1 columns, but 4 are expected"),
        ("qrels.train", "121352\t0\t5\t1\n", "line 3: passage '5' is not in the corpus"),
        ("qrels.dev.small", "3\t0\t1\t1\n", "line 2: query '3' is not among the queries"),
        ("qrels.train", "121352\t0\t7067032\tyes\n", "line 3: grade grade=(a text) is not a whole number"),
    ],
)
def test_a_bad_line_is_refused_and_left_out_where_problems_are_collected(
    folder: Path, name: str, line: str, told: str
) -> None:
    with (folder / f"{name}.tsv").open("a", encoding="utf-8") as file:
        file.write(line)
    with pytest.raises(DataError) as error:
        MSMarcoDataModule(folder=folder).setup("fit")
    assert told in str(error.value) and "again" not in str(error.value)
    problems = Problems()
    found = MSMarcoDataModule(folder=folder).read_collection(problems)
    assert problems.total == 1 and found.qrels["train"] == {"121352": {"1": 1, "0": 1}}
    for part, more in FILES.items():
        (folder / f"{part}.tsv").write_text(more + TWO_TEXTS.get(part, ""), encoding="utf-8")
    with pytest.raises(DataError, match="query '121352' has another text in the train split"):
        MSMarcoDataModule(folder=folder).setup("fit")


# -- download --------------------------------------------------------------------------------------


class Library:
    """A stand-in for ir-datasets over the same files."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.collections = fails, 0

    def load(self, name: str) -> SimpleNamespace:
        part = name.removeprefix("msmarco-passage").removeprefix("/").replace("/", ".")

        def rows(file: str, *names: str) -> Iterator[SimpleNamespace]:
            self.collections += file == "collection"
            for line in FILES[file].splitlines():
                if self.fails == file:
                    raise ConnectionError("no route\nto host")
                yield SimpleNamespace(**dict(zip(names, line.split("\t"), strict=True)))

        return SimpleNamespace(
            docs_iter=lambda: rows("collection", "doc_id", "text"),
            queries_iter=lambda: rows(f"queries.{part}", "query_id", "text"),
            qrels_iter=lambda: rows(f"qrels.{part}", "query_id", "iteration", "doc_id", "relevance"),
        )


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("dev", ["small", "full"])
def test_what_ir_datasets_gives_is_what_the_files_hold(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, dev: Any
) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "ir_datasets", library)  # type: ignore[arg-type]
    wanted = MSMarcoDataModule(folder=folder, dev=dev).collection
    for _ in range(2):
        data = MSMarcoDataModule(download=True, dev=dev, in_memory=in_memory, cache_dir=tmp_path / "cache")
        data.prepare_data()
        found = data.collection
        assert (found.passages, found.queries, found.qrels) == (wanted.passages, wanted.queries, wanted.qrels)
    assert library.collections == (4 if in_memory else 1), "a store is filled once"


@pytest.mark.parametrize("fails", ["collection", "qrels.train"])
def test_what_ir_datasets_does_not_give_is_one_line_and_leaves_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setitem(sys.modules, "ir_datasets", Library(fails))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"ir-datasets could not give msmarco-passage.*: no route$"):
        MSMarcoDataModule(download=True, in_memory=False, cache_dir=tmp_path / "cache").setup("fit")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == (
        [] if fails == "collection" else ["msmarco-passage-ir-datasets.sqlite"]
    )


def test_a_folder_or_a_download_is_needed_and_ir_datasets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ({}, {"folder": tmp_path, "download": True}):
        with pytest.raises(ConfigurationError, match="let download=true fetch them, and not both"):
            MSMarcoDataModule(**wrong)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(ConfigurationError, match=r"lit-dpret\[beir\]"):
        MSMarcoDataModule(download=True).prepare_data()
