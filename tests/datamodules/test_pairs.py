from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from lit_dpret.datamodules import sampled
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.rows import TextUnit
from lit_dpret.datamodules.sampled import SampledDataModule
from lit_dpret.datamodules.splitting import write_split
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.batches import PADDING, Draw
from lit_dpret.privacy.budget import EACH_ROW, PARTLY_NAMED, UNSAID

Write = Callable[..., Path]
KEY = bytes(range(32))


class Batches:
    """Two logical steps over a few units, as a plan's sampler would give them."""

    def __init__(self) -> None:
        self.batches = [
            [Draw(unit=0, step=0, part=0, last=True), Draw(unit=3, step=0, part=0, last=True)],
            [Draw(unit=2, step=1, part=0, last=True), Draw(unit=PADDING, step=1, part=0, last=True)],
        ]

    def __iter__(self) -> Iterator[list[Draw]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def collate(items: list[Any]) -> list[tuple[int, list[str]]]:
    return [(draw.unit, [row.passage_id for row in rows]) for draw, rows in items]


def attached(harbour: Path, **settings: Any) -> PairsDataModule:
    datamodule = PairsDataModule(folder=harbour, **settings)
    datamodule.use_unit("query")
    datamodule.attach(Batches(), collate)
    return datamodule


EXPECTED = [[(0, ["p1", "p2"]), (3, ["p5", "p6"])], [(2, ["p1"]), (PADDING, [])]]


def test_a_folder_its_parts_and_a_mapping_of_qrels_give_the_same_collection(harbour: Path) -> None:
    parts: dict[str, Any] = {"corpus": harbour / "corpus.jsonl", "queries": str(harbour / "queries.jsonl")}
    splits = {split: harbour / "qrels" / f"{split}.tsv" for split in ("train", "dev", "test")}
    folder = PairsDataModule(folder=str(harbour)).collection
    for qrels in (harbour / "qrels", splits, MappingProxyType(splits)):
        datamodule = PairsDataModule(**parts, qrels=qrels)
        datamodule.prepare_data()
        datamodule.setup("fit")
        assert datamodule.collection.fingerprint(KEY) == folder.fingerprint(KEY)
        assert datamodule.collection.qrels == folder.qrels


def test_columns_of_a_log_may_have_other_names(write: Write) -> None:
    log = write("log.csv", "question,answer,author\nwhy?,because,ann\nhow?,so,bob\n")
    data = PairsDataModule(pairs=log, columns={"query": "question", "passage": "answer", "user_id": "author"})
    assert list(data.collection.queries.values()) == ["why?", "how?"]
    assert list(data.collection.passages.values()) == ["because", "so"]
    assert list(data.collection.users.values()) == ["ann", "bob"]
    with pytest.raises(DataError, match="writer"):
        PairsDataModule(pairs=log, columns={"query": "question", "passage": "answer", "user_id": "writer"}).setup()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"folder": None}, r"one of datamodule\.folder, datamodule\.pairs"),
        ({"pairs": "b"}, r"one of datamodule\.folder, datamodule\.pairs"),
        ({"queries": "b"}, r"one of datamodule\.folder, datamodule\.pairs"),
        ({"folder": None, "corpus": "c"}, r"one of datamodule\.folder, datamodule\.pairs"),
        ({"folder": None, "queries": "queries.jsonl", "qrels": "qrels"}, r"datamodule\.corpus is not set"),
        ({"columns": {"query": "question"}}, "datamodule.columns="),
        ({"folder": None, "pairs": "b", "columns": {"text": "question"}}, "datamodule.columns="),
        ({"folder": None, "pairs": "b", "columns": {"query": ""}}, "datamodule.columns="),
        ({"folder": None, "pairs": "b", "columns": {"query": 3}}, "datamodule.columns="),
        ({"folder": None, "pairs": "b", "max_passages": 1}, "datamodule.max_passages"),
        ({"sampling": "sorted"}, "datamodule.sampling='sorted' is not one of truncated_poisson, poisson"),
        ({"rows_per_unit": "two"}, "datamodule.rows_per_unit='two' is not one of one, all"),
        ({"duplicates": "drop"}, "datamodule.duplicates='drop' is not one of keep, merge"),
        ({"sample_rate": 0.0}, "datamodule.sample_rate=0.0"),
        ({"sample_rate": 1.5}, "datamodule.sample_rate=1.5"),
        ({"cap": 9, "sampling": "poisson"}, "datamodule.cap=9 has no meaning"),
        ({"physical_batch_size": 0}, "datamodule.physical_batch_size=0"),
        ({"physical_batch_size": None}, "datamodule.physical_batch_size=None"),
        ({"expected_batch_size": 2.5}, "datamodule.expected_batch_size=2.5"),
        ({"max_passages": 0}, "datamodule.max_passages=0"),
        ({"max_train_queries": -1}, "datamodule.max_train_queries=-1"),
        ({"max_eval_queries": True}, "datamodule.max_eval_queries=True"),
        ({"max_rows_per_unit": 0}, "datamodule.max_rows_per_unit=0"),
        ({"num_workers": -1}, "datamodule.num_workers=-1"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_knob(harbour: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        PairsDataModule(**{"folder": harbour, **settings})


@pytest.mark.parametrize(
    ("settings", "knob"),
    [
        ({"folder": "gone"}, "datamodule.folder"),
        ({"pairs": "gone.tsv"}, "datamodule.pairs"),
        ({"pairs": "{log}", "corpus": "gone.jsonl"}, "datamodule.corpus"),
        ({"corpus": "gone.jsonl", "queries": "gone.jsonl", "qrels": {"train": "gone.tsv"}}, "datamodule.corpus"),
    ],
)
def test_prepare_data_names_a_missing_file_by_its_knob(settings: dict[str, Any], knob: str, pair_log: Path) -> None:
    found: dict[str, Any] = {
        key: value.format(log=pair_log) if isinstance(value, str) else value for key, value in settings.items()
    }
    with pytest.raises(DataError, match=f"gone.*does not exist.*{knob}"):
        PairsDataModule(**found).prepare_data()


def test_a_single_qrels_file_needs_the_name_of_its_split(harbour: Path) -> None:
    parts: dict[str, Any] = {"corpus": harbour / "corpus.jsonl", "queries": harbour / "queries.jsonl"}
    with pytest.raises(DataError, match=r"datamodule\.qrels=\{train: .*\}\."):
        PairsDataModule(**parts, qrels=harbour / "qrels" / "train.tsv").prepare_data()
    twice = {"dev": harbour / "qrels" / "dev.tsv", "valid": harbour / "qrels" / "dev.tsv"}
    with pytest.raises(DataError, match="two files for the split dev"):
        PairsDataModule(**parts, qrels=twice).setup()


def test_the_data_is_checked_and_prepared_by_setup(harbour_copy: Path) -> None:
    with (harbour_copy / "queries.jsonl").open("a") as stream:
        stream.write('{"_id": "lost", "text": "nobody answers"}\n')
    with pytest.raises(DataError, match="'lost' has no passage"):
        PairsDataModule(folder=harbour_copy).setup()
    datamodule = PairsDataModule(folder=harbour_copy, drop_queries_without_passage=True, lower_case_queries=True)
    assert "lost" not in datamodule.collection.queries
    assert datamodule.collection.queries["t1"] == "when does the harbour fill?"


def test_units_and_a_loader_need_a_unit_and_a_plan_under_which_it_cannot_change(harbour: Path) -> None:
    datamodule = attached(harbour)
    datamodule.use_unit("query")
    with pytest.raises(ConfigurationError, match=r"privacy\.unit=pair.*units of query"):
        datamodule.use_unit("pair")
    bare = PairsDataModule(folder=harbour)
    with pytest.raises(ConfigurationError, match=r"privacy\.unit"):
        bare.train_units()
    bare.use_unit("query")
    with pytest.raises(ConfigurationError, match="pair_rows"):
        bare.train_dataloader()


@pytest.mark.parametrize(
    ("unit", "duplicates", "neighbours", "named"),
    [
        ("query", "keep", "add_or_remove", "add_or_remove"),
        ("user", "keep", "replace_one", r"privacy\.unit=user.*zero_out"),
        ("pair", "keep", "replace_one", r"privacy\.unit=pair.*zero_out"),
        ("query", "merge", "replace_one", r"datamodule\.duplicates=merge.*zero_out"),
    ],
)
def test_a_query_limit_is_refused_where_n_is_private_or_a_replaced_unit_moves_other_queries(
    harbour: Path, unit: Any, duplicates: Any, neighbours: str, named: str
) -> None:
    datamodule = PairsDataModule(folder=harbour, max_train_queries=3, duplicates=duplicates)
    datamodule.use_unit(unit, neighbours="zero_out")
    assert len(datamodule.collection.split("train")) == 3
    with pytest.raises(ConfigurationError, match=rf"datamodule\.max_train_queries=3.*{named}"):
        datamodule.use_unit(unit, neighbours=neighbours)
    PairsDataModule(folder=harbour, duplicates=duplicates).use_unit(unit, neighbours=neighbours)
    PairsDataModule(folder=harbour, max_train_queries=3).use_unit("query", neighbours="replace_one")


@pytest.mark.parametrize("neighbours", [None, "zero_out", "add_or_remove", "replace_one"])
@pytest.mark.parametrize("unit", ["user", "query"])
def test_evaluation_queries_may_not_choose_the_rows_of_other_units(harbour: Path, unit: Any, neighbours: Any) -> None:
    """One user's test query can take many other users' train queries out."""
    datamodule = PairsDataModule(folder=harbour, drop_overlap=True)
    if unit == "query" and neighbours != "add_or_remove":
        datamodule.use_unit(unit, neighbours)
        assert "datamodule.drop_overlap" in datamodule.assumptions()[0]
        assert not PairsDataModule(folder=harbour).assumptions()
        return
    setting = r"privacy\.unit=user" if unit == "user" else r"privacy\.neighbours=add_or_remove"
    with pytest.raises(ConfigurationError, match=rf"datamodule\.drop_overlap=true cannot go with {setting}.*=false"):
        datamodule.use_unit(unit, neighbours)


@pytest.mark.parametrize("setting", [{"max_passages": 3}, {"drop_overlap": True}])
def test_pairs_are_no_unit_where_settings_take_rows_out_by_what_they_say(harbour: Path, setting: Any) -> None:
    datamodule = PairsDataModule(folder=harbour, **setting)
    datamodule.use_unit("query")
    with pytest.raises(ConfigurationError, match=r"privacy\.unit=pair.*privacy\.unit=query"):
        datamodule.use_unit("pair")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_train_loader_gives_what_the_attached_sampler_draws(harbour: Path, num_workers: int) -> None:
    loader, before = attached(harbour, num_workers=num_workers).train_dataloader(), torch.get_rng_state()
    assert list(loader) == EXPECTED and len(loader) == 2
    assert num_workers or torch.equal(before, torch.get_rng_state())


def test_the_fingerprint_follows_the_data_and_how_it_is_grouped(harbour: Path, harbour_copy: Path) -> None:
    def fingerprint(folder: Path = harbour, **settings: Any) -> str:
        return PairsDataModule(folder=folder, **settings).data_fingerprint(KEY)

    assert fingerprint() == fingerprint(harbour_copy) == fingerprint(physical_batch_size=7)
    assert PairsDataModule(folder=harbour).data_fingerprint(KEY[::-1]) != fingerprint()
    text = (harbour_copy / "queries.jsonl").read_text()
    (harbour_copy / "queries.jsonl").write_text(text.replace("mooring", "moored"))
    others = [
        fingerprint(harbour_copy),
        fingerprint(duplicates="merge"),
        fingerprint(max_rows_per_unit=1),
        fingerprint(lower_case_queries=True),
        fingerprint(max_train_queries=4),
        fingerprint(drop_overlap=True),
    ]
    assert len({fingerprint(), *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("columns", "settings", "unit", "by"),
    [
        ({}, {}, "query", EACH_ROW),
        ({"query_id": "q1"}, {}, "query", None),
        ({}, {"duplicates": "merge"}, "query", None),  # equal texts are one unit, with ids or without
        ({}, {}, "pair", None),
        ({"user_id": "u1"}, {}, "user", None),
        ({"device": "d1"}, {"columns": {"user_id": "device"}}, "user", "all rows of one device"),
    ],
)
def test_each_row_is_a_unit_only_where_nothing_names_queries(
    columns: dict[str, str], settings: dict[str, Any], unit: TextUnit, by: str | None, write: Write
) -> None:
    log = write("log.jsonl", [{"query": "wet cellar", "passage": text} | columns for text in ("pump", "drain")])
    datamodule = PairsDataModule(pairs=log, **settings)
    datamodule.use_unit(unit)
    assert (datamodule.unit_by, datamodule.n_units) == (by, 2 if by == EACH_ROW or unit == "pair" else 1)


@pytest.mark.parametrize(("column", "by"), [("query_id", PARTLY_NAMED), ("query_ids", EACH_ROW)])
def test_no_log_says_that_its_records_had_ids_which_they_lack(column: str, by: str, write: Write) -> None:
    log = write("log.jsonl", [{"query": "wet", "passage": "pump"}, {"query": "mole", "passage": "x", column: "all"}])
    datamodule = PairsDataModule(pairs=log)
    datamodule.use_unit("query")
    assert datamodule.unit_by == by


def test_a_log_alone_gives_no_public_passages_unless_declared(pair_log: Path, write: Write) -> None:
    with pytest.raises(ConfigurationError, match=r"datamodule\.corpus.*datamodule\.passages_are_public=true"):
        PairsDataModule(pairs=pair_log).public_passages()
    assert len(PairsDataModule(pairs=pair_log, passages_are_public=True).public_passages()) == 2
    corpus = write("c.tsv", "id\ttext\nx\tFour metres at low water.\ny\tThe lighthouse crew, in spring.\nz\tUnused.\n")
    assert list(PairsDataModule(pairs=pair_log, corpus=corpus).public_passages()) == ["x", "y", "z"]


@pytest.mark.parametrize("named", [True, False], ids=["ids", "ids of texts"])
def test_the_public_list_of_a_log_does_not_tell_in_which_order_it_was_asked_about(
    named: bool, tmp_path: Path, write: Write
) -> None:
    """One record more or less may move passages in the log, also where the set of them stays the same."""
    ids = [{"passage_id": f"{n % 3}"} if named else {} for n in range(6)]
    rows = [{"query": f"q{n}", "passage": f"p{n % 3}"} | id for n, id in enumerate(ids)]
    found = []
    for number, some in enumerate((rows, rows[1:])):
        data = PairsDataModule(pairs=write(f"{number}.jsonl", some), passages_are_public=True)
        settings = write_split(data.collection, tmp_path / f"split{number}", public_passages=True)
        corpus = (Path(settings["folder"]) / "corpus.jsonl").read_bytes()
        found.append((list(data.public_passages().items()), corpus))
    assert found[0] == found[1]


@dataclass(kw_only=True, eq=False, repr=False)
class OwnReader(PairsDataModule):
    """A reader of one's own, whose collection says nothing of ids of queries."""

    def read_collection(self, complain: Any = None) -> Collection:
        return Collection(passages={"p": "pump"}, queries={"1": "wet"}, qrels={"train": {"1": {"p": 1}}})


def test_a_reader_that_does_not_say_which_records_had_ids_does_not_say_what_its_units_are(tmp_path: Path) -> None:
    data = OwnReader(pairs=tmp_path)
    data.use_unit("query")
    assert data.unit_by == UNSAID
    data.use_unit("pair")
    assert data.unit_by is None
    assert SampledDataModule(expected_batch_size=2).unit_by == UNSAID


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_are_forked_where_python_starts_them_by_a_server(
    workers: int, monkeypatch: pytest.MonkeyPatch, pair_log: Path
) -> None:
    monkeypatch.setattr(sampled, "get_start_method", lambda: "forkserver")
    data = PairsDataModule(pairs=pair_log, num_workers=workers)
    data.use_unit("query")
    data.attach(Batches(), list)
    context = data.train_dataloader().multiprocessing_context
    assert context is None if not workers else context.get_start_method() == "fork"
