"""Files become records and collections; what cannot be read is one line with its place, and shows no text."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_silos import SIZE

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.huggingface import HubRows
from lit_dpret.datamodules.layouts import (
    CorpusSettings,
    folder_parts,
    open_corpus,
    read_parts,
    read_qrels,
    read_queries,
)
from lit_dpret.datamodules.pair_file import PairReader, read_pairs
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.datamodules.records import Problems
from lit_dpret.datamodules.silo_folder import read_silo, write_silos
from lit_dpret.datamodules.unit_dataset import GroupedUnitDataset
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.data import planted_silos

Write = Callable[..., Path]
HARBOUR = Path(__file__).resolve().parents[1] / "data" / "harbour"
RECORDS = [{"_id": "a", "text": "one, two"}, {"_id": "b", "text": 'the "third"\u2028word'}]
PASSAGES = {"p1": "one", "p2": "two"}
QUERIES = {"q1": "first", "q2": "second"}
#: Half of a surrogate pair, which JSON can say and nothing that hashes or writes texts can take.
BROKEN = "secret \ud800"


def zstd(content: bytes) -> bytes:
    packed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    return packed


def parquet(path: Path, **columns: Any) -> Path:
    table = pytest.importorskip("pyarrow").table(columns)
    pytest.importorskip("pyarrow.parquet").write_table(table, path)
    return path


# -- what is read --------------------------------------------------------------------------------


def test_every_format_gives_the_same_records(write: Write, tmp_path: Path) -> None:
    jsonl = write("x.jsonl", RECORDS)
    files = [
        jsonl,
        write("y.jsonl.gz", gzip.compress(jsonl.read_bytes())),
        write("z.jsonl.zst", zstd(jsonl.read_bytes())),
        write("frames.jsonl.zst", b"".join(map(zstd, jsonl.read_bytes().splitlines(keepends=True)))),
        write("x.tsv", '_id\ttext\na\tone, two\nb\tthe "third"\u2028word\n'),
        write("x.csv", '_id,text\na,"one, two"\nb,"the ""third""\u2028word"\n'),
        write("y.csv.gz", gzip.compress(b'_id,text\na,"one, two"\nb,"the ""third""\xe2\x80\xa8word"\n', mtime=0)),
        parquet(tmp_path / "x.parquet", **{name: [record[name] for record in RECORDS] for name in RECORDS[0]}),
    ]
    for path in files:
        assert [record for _, record in RecordFile(path)] == RECORDS, path.name


BOM, LONG = "\ufeff", "x" * 200_000


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.tsv", 'a\tb\n"low\twater"\n"\t\n', [(2, {"a": '"low', "b": 'water"'}), (3, {"a": '"', "b": ""})]),
        ("x.tsv", BOM + "a\tb\r\n1\t2\r\n", [(2, {"a": "1", "b": "2"})]),
        ("x.tsv", f"a\tb\n1\t{LONG}\n", [(2, {"a": "1", "b": LONG})]),  # longer than the csv module likes
        ("x.csv", 'a,b\n1,"two\nlines"\n3,4\n', [(2, {"a": "1", "b": "two\nlines"}), (4, {"a": "3", "b": "4"})]),
        ("x.jsonl", '{"a": 1}\n\n{"a": 2}', [(1, {"a": 1}), (3, {"a": 2})]),
    ],
    ids=["quote marks of a TSV", "byte order mark", "long text", "lines inside quotes", "blank lines"],
)
def test_records_and_their_lines_are_read_as_they_stand(
    name: str, content: str, expected: list[Any], write: Write
) -> None:
    assert list(RecordFile(write(name, content))) == expected


def test_a_beir_folder_is_read_whole(harbour: Path) -> None:
    data = read_parts(**folder_parts(harbour)).check()
    assert data.passages["p1"] == "Tides The harbour fills twice a day, about fifty minutes later each day."
    assert data.passages["p2"] == "A spring tide follows the new moon and the full moon."
    assert data.queries["t1"] == "When Does the Harbour Fill?"
    assert data.users == {"t1": "ann", "t2": "ben", "t3": "ben", "t4": "ann", "t5": "7"}
    assert data.domains["e2"] == "sea"
    assert data.passage_domains["p6"] == "office" and "p7" not in data.passage_domains
    assert {split: len(qrels) for split, qrels in data.qrels.items()} == {"train": 5, "dev": 1, "test": 2}
    assert data.qrels["train"]["t2"] == {"p4": 2, "p3": 1, "p8": 0}
    assert data.positives("train", "t2") == ("p4", "p3")


def test_compressed_and_other_formats_give_the_same_folder(harbour_copy: Path, harbour: Path) -> None:
    corpus = harbour_copy / "corpus.jsonl"
    (harbour_copy / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    rows = (harbour_copy / "qrels" / "dev.tsv").read_text().replace("\t", ",")
    (harbour_copy / "qrels" / "validation.csv").write_text(rows)
    (harbour_copy / "qrels" / "dev.tsv").unlink()
    (harbour_copy / "qrels" / "train.jsonl").write_text("not read beside its TSV")
    ours, theirs = read_parts(**folder_parts(harbour_copy)), read_parts(**folder_parts(harbour))
    assert ours.passages == theirs.passages and ours.qrels == theirs.qrels and ours.queries == theirs.queries


def test_a_log_of_pairs_gives_one_query_a_line_and_one_passage_a_text(pair_log: Path, write: Write) -> None:
    data = read_pairs(pair_log).check()
    assert data.queries == {
        "row-2": "how deep is the basin",
        "row-3": 'basin depth "low water"',
        "row-4": "who paints the buoys",
    }
    assert list(data.passages.values()) == ["Four metres at low water.", "The lighthouse crew, in spring."]
    assert data.users == {"row-2": "ann", "row-3": "ben", "row-4": "ann"}
    assert {split: set(qrels) for split, qrels in data.qrels.items()} == {"train": {"row-2", "row-3"}, "dev": {"row-4"}}
    assert data.positives("train", "row-2") == data.positives("train", "row-3")
    changed = write("p.tsv", pair_log.read_text().replace("how deep is the basin", "entirely different"))
    assert list(read_pairs(changed).queries) == list(data.queries), "an id says nothing about the text"


def test_pairs_may_name_the_passages_of_a_corpus(write: Write, harbour: Path) -> None:
    rows = [
        {"query": "a", "passage_id": "p7"},
        {"query": "b", "passage": "Gulls nest on the old crane."},
        {"query": "c", "passage_id": "p8", "passage": "Gulls nest on the old crane."},
    ]
    data = read_pairs(write("p.jsonl", rows), corpus=harbour / "corpus.jsonl").check()
    assert len(data.passages) == 8
    assert [data.positives("train", query) for query in data.queries] == [("p7",), ("p8",), ("p8",)]


def test_an_empty_passage_and_a_whole_float_as_a_grade_are_read(write: Write) -> None:
    path = write("x.jsonl", [{"_id": "a", "title": "", "text": ""}])
    assert open_corpus(path, CorpusSettings(allow_empty=True)).texts == {"a": ""}
    path = write("r.jsonl", [{"query_id": "q1", "corpus_id": "p1", "score": 2.0}])
    assert read_qrels(path, passages=PASSAGES, queries=QUERIES) == {"q1": {"p1": 2}}


def test_a_column_that_is_not_read_may_hold_anything(write: Write) -> None:
    note = {"note": BROKEN, BROKEN: 1}
    read_queries(write("q.jsonl", [{"_id": "a", "text": "t"} | note]))
    read_pairs(write("p.jsonl", [{"query": "q", "passage": "p"} | note]))


# -- what is refused -----------------------------------------------------------------------------


def judged(path: Path) -> Any:
    return read_qrels(path, passages=PASSAGES, queries=QUERIES)


def of_a_corpus(path: Path) -> Any:
    return read_pairs(path, corpus=HARBOUR / "corpus.jsonl")


def records(path: Path) -> Any:
    return list(RecordFile(path))


QREL = {"query_id": "q1", "corpus_id": "p1", "score": 1}
PAIR = {"query": "t", "passage": "z", "query_id": "q", "user_id": "a", "passage_id": "x"}
MALFORMED = "line 3: malformed JSON"
HIDDEN = r"found: \(text hidden\), \(text hidden\)\.$"
Case = tuple[Callable[[Path], Any], str, Any, str]
REFUSED: list[Case] = [
    (records, "x.jsonl", '{"a": 1}\n\n{"a": secret}\n', MALFORMED),
    (records, "x.jsonl", '{"a": 1}\n\n{"a": "secret"', MALFORMED),
    (records, "x.jsonl", '{"a": 1}\n\n["secret"]\n', "line 3: .* a list"),
    (records, "x.jsonl", '{"a": 1}\n\n3\n', "line 3: .* a number"),
    (records, "x.jsonl", '{"a": 1}\n\n' + "[" * 100_000, MALFORMED),
    (records, "x.jsonl", '{"query": ' + "1" * 5000 + "}\n", "line 1: malformed JSON"),
    (records, "x.jsonl", '{"a": \n{"a": 1}\n', "column 6"),  # where the line ends too early
    (records, "x.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), r"rename it to x\.jsonl\.gz"),
    (records, "x.csv", "a,a\n1,2\n", "column 'a' twice"),
    (records, "x.csv", 'a,b\n1,"two\n3,4\n', "line 2: not a readable table row"),
    *(
        (read, *case)
        for read in (open_corpus, read_queries)
        for case in (
            ("x.jsonl", [{"_id": "a", "text": "t"}, {"_id": "b", "body": "secret"}],
             r"line 2: no key 'text'; found: _id, body\."),
            ("x.tsv", "key\ttext\na\tsecret\n", r"line 2: no column '_id' or 'id'; found: key, text\."),
            ("x.jsonl", '{"_id": "a", "text": "t"}\n\n{"_id": "b", "text": "t"}\n{"id": "a", "text": "u"}\n',
             r"line 4: id 'a' was already given on line 1\."),
            ("x.jsonl", [{"_id": None, "text": "t"}], "line 1: '_id' is null"),
            ("x.jsonl", [{"_id": " ", "text": "t"}], "line 1: '_id' is empty"),
            ("x.jsonl", [{"_id": 1.5, "text": "t"}], "line 1: '_id' is a float"),
            ("x.jsonl", [{"_id": "a", "text": ["secret"]}], "line 1: 'text' is a list"),
            ("x.jsonl", [{"_id": "a", "text": None}], "line 1: 'text' is null"),
            ("x.jsonl", [{"_id": "a", "text": " \n"}], "line 1: .*'a' has an empty text"),
            ("x.jsonl", [{"_id": BROKEN, "text": "t"}], "line 1: '_id' .*surrogate"),
            ("x.jsonl", [{"_id": "a", "text": BROKEN}], "line 1: 'text' .*surrogate"),
            ("x.jsonl", [{"_id": "a", "text": "t", "domain": BROKEN}], "line 1: 'domain' .*surrogate"),
        )
    ),
    (open_corpus, "x.jsonl", [{"_id": "a", "title": "", "text": ""}], r"datamodule\.allow_empty_passages"),
    (open_corpus, "x.jsonl", [{"_id": "a", "text": "t", "title": BROKEN}], "line 1: 'title' .*surrogate"),
    (open_corpus, "c.jsonl", "", "holds no passages"),
    (read_queries, "x.jsonl", [{"_id": "a", "text": "t", "user_id": BROKEN}], "line 1: 'user_id' .*surrogate"),
    (read_queries, "x.jsonl", [{"_id": "a", "text": "t", "metadata": {"user_id": BROKEN}}], "line 1: 'user_id'"),
    (read_queries, "q.jsonl", "\n", "holds no queries"),
    (judged, "r.tsv", "query-id\tcorpus-id\tscore\n", "holds no qrels"),
    *(
        (judged, "r.tsv", f"query-id\tcorpus-id\tscore\nq1\tp1\t1\n{line}\n", f"line 3: .*{reason}")
        for line, reason in (
            ("q1\tp9\t1", "passage 'p9' is not in the corpus"),
            ("q9\tp1\t1", "query 'q9' is not among the queries"),
            ("q2\tp1\t1.5", "score='1.5' is not an integer"),
            ("q2\tp1\tsecret", r"score=\(text hidden\) is not an integer"),
            ("q2\tp1\t", "score='' is not an integer"),
            ("q1\tp1\t2", "already paired on line 2"),
        )
    ),
    *(
        (judged, "r.jsonl", [{**QREL, "score": grade}], "line 1: grade score=.* is not an integer")
        for grade in (1.5, float("nan"), True, None, [1], "1.0", "secret")
    ),
    *((judged, "r.jsonl", [{**QREL, name: BROKEN}], f"line 1: '{name}' .*surrogate") for name in [*QREL][:2]),
    (read_pairs, "p.tsv", "query\tpassage\n", "holds no pairs"),
    # Without a header the first line stands where names of columns are expected, and short queries look like names.
    (read_pairs, "p.tsv", "hiv secret\tWhere one is tested.\nother\tlines\n", HIDDEN),
    (read_pairs, "p.tsv", "insulin dose\thiv secret\nother\tlines\n", HIDDEN),
    (read_pairs, "p.jsonl", [{"query": "q", "passage": "p", "split": "train_sft"}], "split 'train_sft' is not one of"),
    *(
        (read_pairs, "p.jsonl", [PAIR, record], f"line 2: .*{reason}")
        for record, reason in (
            ({"passage": "x"}, "no key 'query'; found: passage"),
            ({"query": "secret"}, "no key 'passage'; found: query"),
            ({"query": " ", "passage": "x"}, "query 'row-2' has an empty text"),
            ({"query": "secret", "passage": " "}, "the passage has an empty text"),
            ({"query": "secret", "passage": "y", "query_id": "q "}, "query 'q' has two texts, here and on line 1"),
            ({"query": "t", "passage": "y", "query_id": "q", "user_id": "b"}, "query 'q' has two users"),
            ({**PAIR, "passage": "y", "passage_id": "y", "split": "test"}, "query 'q' has two splits"),
            ({"query": "secret", "passage": "y", "passage_id": "x"}, "passage 'x' has two texts"),
            ({"query": "secret", "passage": "y", "split": "tune"}, r"split \(text hidden\) is not one of"),
            (PAIR, "already paired on line 1"),
            *(({**PAIR, "domain": "d", name: BROKEN}, f"'{name}' .*surrogate") for name in [*PAIR, "domain"]),
            *(({**PAIR, "user_id": user}, "'user_id'") for user in (7.5, True, ["ann"], float("inf"), 2.0**60)),
        )
    ),
    (of_a_corpus, "p.jsonl", [{"query": "a", "passage_id": "p99"}], "passage 'p99' is not in the corpus"),
    (of_a_corpus, "p.jsonl", [{"query": "a", "passage": "secret"}], "passage with this text is not in the corpus"),
    (of_a_corpus, "p.jsonl", [{"query": "a", "passage_id": "p7", "passage": "secret"}], "'p7' has another text"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("read", "name", "content", "reason"), REFUSED, ids=[f"{case[0].__name__}: {case[3]}" for case in REFUSED]
)
def test_what_cannot_be_read_is_one_line_with_its_place_and_without_its_text(
    read: Callable[[Path], Any], name: str, content: Any, reason: str, write: Write
) -> None:
    path = write(name, content)
    with pytest.raises(DataError, match=reason) as error:
        read(path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message and "secret" not in message
    assert ("surrogate" in message) == (error.value.kind == "not Unicode text")


def test_a_damaged_file_is_refused_by_its_format(write: Write, tmp_path: Path) -> None:
    whole = zstd(b"".join(b'{"a": %d}\n' % (i * i) for i in range(50_000)))
    for packed in (b"not zstd at all", whole[: len(whole) // 2]):
        with pytest.raises(DataError, match="not a readable zstd file"):
            list(RecordFile(write("x.jsonl.zst", packed)))
    pyarrow = pytest.importorskip("pyarrow")
    no_text = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
    bad = parquet(tmp_path / "log.parquet", query=pyarrow.Array.from_buffers(pyarrow.string(), 1, no_text))
    with pytest.raises(DataError, match=r"log\.parquet row 1"):
        list(RecordFile(bad))


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "x.parquet"), ("zstandard", "x.jsonl.zst")])
def test_a_format_whose_package_is_missing_names_the_pip_command(
    write: Write, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=f"pip install {package}"):
        list(RecordFile(write(name, b"x")))


@pytest.mark.parametrize(
    ("gone", "wanted"), [("corpus.jsonl", "corpus.jsonl"), ("queries.jsonl", "queries.jsonl"), ("qrels", "qrels/train")]
)
def test_a_folder_that_lacks_a_part_or_has_one_twice_is_refused(harbour_copy: Path, gone: str, wanted: str) -> None:
    (harbour_copy / gone).rename(harbour_copy.parent / "elsewhere")
    with pytest.raises(DataError, match=f"lacks {wanted}.*it holds: .*(corpus|queries).jsonl"):
        folder_parts(harbour_copy)
    (harbour_copy.parent / "elsewhere").rename(harbour_copy / gone)
    (harbour_copy / "qrels" / "valid.tsv").write_text("x")
    with pytest.raises(DataError, match=r"both dev\.tsv and valid\.tsv"):
        folder_parts(harbour_copy)


def test_a_file_is_not_read_again_for_every_repeated_id(write: Write) -> None:
    file = RecordFile(write("a.jsonl", '{"_id": "a"}\n' * 100), complain=Problems())
    found = [file.find(number, (("_id",), "a")) for number in range(2, 60)]
    assert found[:20] == [1] * 20 and set(found[20:]) == {0}
    assert file.place(0) == "an earlier line"


def test_a_row_of_a_hub_that_is_refused_is_named_and_the_others_are_read() -> None:
    found: list[DataError] = []
    reader = PairReader()
    assert reader.add(HubRows([PAIR, {**PAIR, "query": BROKEN}], "some/set split train", found.append)) == 2
    assert [str(problem).partition(": ")[0] for problem in found] == ["some/set split train row 2"]
    assert list(reader.collection("here").queries.values()) == ["t"]


# -- silos ---------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path) -> Path:
    """The folder of the first of a few planted clients."""
    (silo, *_) = planted_silos(SIZE)
    write_silos(tmp_path / "silos", [silo], facts={})
    return tmp_path / "silos" / "clients" / silo.name


def changed(path: Path, record: int, columns: dict[str, Callable[[Any], Any]]) -> None:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records[record] |= {name: change(records[record][name]) for name, change in columns.items()}
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


@pytest.mark.parametrize(("file", "column"), [("passages", "title"), ("sentences", "text"), ("queries", "text")])
def test_half_a_surrogate_pair_is_neither_read_from_a_silo_nor_written(file: str, column: str, client: Path) -> None:
    silo = read_silo(client)
    spoiled = type(silo)(silo.name, silo.passages, dict.fromkeys(silo.sentences, BROKEN), silo.passage_of, silo.queries)
    with pytest.raises(DataError, match="surrogate"):
        write_silos(client.parent / "new", [spoiled], facts={})
    changed(client / f"{file}.jsonl", 1, {column: lambda _: BROKEN})
    with pytest.raises(DataError, match=rf"{file}\.jsonl line 2: '{column}'"):
        read_silo(client, verify=False)


def spaced(value: Any) -> Any:
    return [f" {one}" for one in value] if isinstance(value, list) else f"{value} "


def test_the_parts_of_a_silo_name_each_other_whatever_whitespace_surrounds_an_id(client: Path) -> None:
    silo = read_silo(client)
    for file, columns in (("sentences", ("sid", "pid")), ("queries", ("qid", "pos_sids"))):
        changed(client / f"{file}.jsonl", 0, dict.fromkeys(columns, spaced))
    assert read_silo(client, verify=False) == silo


# -- whose a row is, however an id was written ---------------------------------------------------

#: Ann in three spellings, and José with one letter for the accent and with two.
USERS = ["ann", "ann ", "\u00a0ann", "Jos\u00e9", "Jose\u0301 "]


def in_pairs(root: Path, users: list[Any], ending: str) -> dict[str, Any]:
    rows = [{"query": f"what is {i}", "passage": "one", "user_id": user} for i, user in enumerate(users)]
    lines = ["query,passage,user_id", *(",".join(map(str, row.values())) for row in rows)]
    path = root / f"log{ending}"
    path.write_text("\n".join(map(json.dumps, rows) if ending == ".jsonl" else lines) + "\n", encoding="utf-8")
    return {"pairs": path, "passages_are_public": True}


def in_queries(root: Path, users: list[Any], nested: bool) -> dict[str, Any]:
    said = [{"metadata": {"user_id": user}} if nested else {"user_id": user} for user in users]
    queries = [{"_id": f"q{i}", "text": f"what is {i}", **one} for i, one in enumerate(said)]
    corpus = [{"_id": f" {name}", "text": text} for name, text in PASSAGES.items()]
    (root / "qrels").mkdir()
    for name, records in (("queries", queries), ("corpus", corpus)):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    judgements = "".join(f"q{i} \tp1\t1\n" for i in range(len(users)))
    (root / "qrels" / "train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judgements}")
    return {"folder": root}


@pytest.mark.parametrize(
    ("make", "users"),
    [
        pytest.param(lambda root, users: in_pairs(root, users, ".jsonl"), USERS, id="a log"),
        pytest.param(lambda root, users: in_pairs(root, users, ".csv"), USERS, id="a table"),
        pytest.param(lambda root, users: in_pairs(root, users, ".jsonl"), [7.0, 7, "7", 8.0], id="whole floats"),
        pytest.param(lambda root, users: in_queries(root, users, False), USERS, id="a file of queries"),
        pytest.param(lambda root, users: in_queries(root, users, True), USERS, id="metadata of queries"),
    ],
)
def test_a_user_is_one_unit_however_the_id_was_written(make: Any, users: list[Any], tmp_path: Path) -> None:
    data = PairsDataModule(**make(tmp_path, users), expected_batch_size=1)
    data.use_unit("user")
    assert data.n_units == 2


def test_a_user_of_a_collection_that_was_made_by_hand_is_one_unit() -> None:
    ids = [f"q{i}" for i in range(len(USERS))]
    made = Collection(
        passages=PASSAGES,
        queries={name: f"text {name}" for name in ids},
        qrels={"train": {name: {"p1": 1} for name in ids}},
        users=dict(zip(ids, USERS, strict=True)),
    )
    assert len(GroupedUnitDataset(made, unit="user")) == 2 == len({*made.users.values()})
    assert GroupedUnitDataset(made, unit="query").most_units_of_a_user() == 3


def test_records_of_one_query_agree_whatever_whitespace_surrounds_its_ids(write: Write) -> None:
    again = {**PAIR, "passage": "two", "passage_id": "y", "user_id": "a ", "query_id": " q"}
    assert list(read_pairs(write("log.jsonl", [PAIR, again])).queries) == ["q"]
