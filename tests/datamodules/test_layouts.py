from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_dpret.datamodules.layouts import (
    CorpusSettings,
    folder_parts,
    open_corpus,
    read_parts,
    read_qrels,
    read_queries,
)
from lit_dpret.datamodules.pair_file import read_pairs
from lit_dpret.errors import DataError

Write = Callable[..., Path]
PASSAGES = {"p1": "one", "p2": "two"}
QUERIES = {"q1": "first", "q2": "second"}


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


@pytest.mark.parametrize("reader", [open_corpus, read_queries])
def test_a_missing_key_is_refused_with_the_keys_found_and_a_repeated_id_with_both_lines(
    write: Write, reader: Callable[[Path], object]
) -> None:
    with pytest.raises(DataError, match=r"line 2: no key 'text'; found: _id, body\."):
        reader(write("x.jsonl", [{"_id": "a", "text": "t"}, {"_id": "b", "body": "secret"}]))
    with pytest.raises(DataError, match=r"line 2: no column '_id' or 'id'; found: key, text\."):
        reader(write("x.tsv", "key\ttext\na\tsecret\n"))
    path = write("x.jsonl", '{"_id": "a", "text": "t"}\n\n{"_id": "b", "text": "t"}\n{"id": "a", "text": "u"}\n')
    with pytest.raises(DataError, match=r"line 4: id 'a' was already given on line 1\."):
        reader(path)


@pytest.mark.parametrize("reader", [open_corpus, read_queries])
@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"_id": None, "text": "t"}, "'_id' is null"),
        ({"_id": " ", "text": "t"}, "'_id' is empty"),
        ({"_id": 1.5, "text": "t"}, "'_id' is a float"),
        ({"_id": "a", "text": ["secret"]}, "'text' is a list"),
        ({"_id": "a", "text": None}, "'text' is null"),
        ({"_id": "a", "text": " \n"}, "'a' has an empty text"),
    ],
)
def test_a_record_without_a_usable_id_or_text_is_refused(
    write: Write, reader: Callable[[Path], object], record: dict[str, object], reason: str
) -> None:
    path = write("x.jsonl", [record])
    with pytest.raises(DataError) as error:
        reader(path)
    assert f"{path} line 1: " in str(error.value) and reason in str(error.value)
    assert "secret" not in str(error.value)


def test_an_empty_passage_is_accepted_only_when_asked_for(write: Write) -> None:
    path = write("x.jsonl", [{"_id": "a", "title": "", "text": ""}])
    with pytest.raises(DataError, match=r"datamodule\.allow_empty_passages"):
        open_corpus(path)
    assert open_corpus(path, CorpusSettings(allow_empty=True)).texts == {"a": ""}


def test_an_empty_file_is_refused_by_what_it_should_hold(write: Write) -> None:
    with pytest.raises(DataError, match="holds no passages"):
        open_corpus(write("c.jsonl", ""))
    with pytest.raises(DataError, match="holds no queries"):
        read_queries(write("q.jsonl", "\n"))
    with pytest.raises(DataError, match="holds no qrels"):
        read_qrels(write("r.tsv", "query-id\tcorpus-id\tscore\n"), passages=PASSAGES, queries=QUERIES)
    with pytest.raises(DataError, match="holds no pairs"):
        read_pairs(write("p.tsv", "query\tpassage\n"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("q1\tp9\t1", "passage 'p9' is not in the corpus"),
        ("q9\tp1\t1", "query 'q9' is not among the queries"),
        ("q2\tp1\t1.5", "grade score='1.5' is not a whole number"),
        ("q2\tp1\thigh", "grade score=(a text) is not a whole number"),
        ("q2\tp1\t", "grade score='' is not a whole number"),
        ("q1\tp1\t2", "already paired on line 2"),
    ],
)
def test_a_wrong_qrel_is_refused_with_its_line(write: Write, line: str, reason: str) -> None:
    path = write("r.tsv", f"query-id\tcorpus-id\tscore\nq1\tp1\t1\n{line}\n")
    with pytest.raises(DataError) as error:
        read_qrels(path, passages=PASSAGES, queries=QUERIES)
    assert f"{path} line 3: " in str(error.value) and reason in str(error.value)


def test_a_log_without_a_header_or_with_its_columns_swapped_shows_none_of_its_texts(write: Write) -> None:
    """Its first line stands where names of columns are expected, and short queries look like names."""
    for texts in ("hiv test\tWhere one is tested.\n", "insulin dose\thiv test\n"):
        with pytest.raises(DataError, match=r"no column '(query|passage)'; found: \(a text\), \(a text\)\.$"):
            read_pairs(write("log.tsv", texts + "other\tlines\n"))
    with pytest.raises(DataError, match=r"line 1: split \(a text\) is not one of"):
        read_pairs(write("log.jsonl", [{"query": "q", "passage": "p", "split": "hiv"}]))
    with pytest.raises(DataError, match=r"split 'train_sft' is not one of"):
        read_pairs(write("log.jsonl", [{"query": "q", "passage": "p", "split": "train_sft"}]))
    with pytest.raises(DataError, match=r"grade score=\(a text\) is not a whole number"):
        qrels = [{"query_id": "q1", "corpus_id": "p1", "score": "hiv"}]
        read_qrels(write("r.jsonl", qrels), passages=PASSAGES, queries=QUERIES)


@pytest.mark.parametrize("grade", [1.5, float("nan"), True, None, [1], "1.0"])
def test_a_grade_that_is_no_whole_number_is_refused(write: Write, grade: object) -> None:
    path = write("r.jsonl", [{"query_id": "q1", "corpus_id": "p1", "score": 2.0}])
    assert read_qrels(path, passages=PASSAGES, queries=QUERIES) == {"q1": {"p1": 2}}
    path = write("r.jsonl", [{"query_id": "q1", "corpus_id": "p1", "score": grade}])
    with pytest.raises(DataError, match=r"line 1: grade score=.* is not a whole number"):
        read_qrels(path, passages=PASSAGES, queries=QUERIES)


def test_a_log_of_pairs_gives_one_query_a_line_and_one_passage_a_text(pair_log: Path) -> None:
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


def test_ids_made_for_a_log_say_nothing_about_the_query_text(pair_log: Path, write: Write) -> None:
    changed = write("p.tsv", pair_log.read_text().replace("how deep is the basin", "entirely different"))
    assert list(read_pairs(changed).queries) == list(read_pairs(pair_log).queries)


def test_pairs_may_name_the_passages_of_a_corpus(write: Write, harbour: Path) -> None:
    rows = [
        {"query": "a", "passage_id": "p7"},
        {"query": "b", "passage": "Gulls nest on the old crane."},
        {"query": "c", "passage_id": "p8", "passage": "Gulls nest on the old crane."},
    ]
    data = read_pairs(write("p.jsonl", rows), corpus=harbour / "corpus.jsonl").check()
    assert len(data.passages) == 8
    assert [data.positives("train", query) for query in data.queries] == [("p7",), ("p8",), ("p8",)]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"passage": "x"}, "line 2: no key 'query'; found: passage"),
        ({"query": "secret"}, "line 2: no key 'passage'; found: query"),
        ({"query": " ", "passage": "x"}, "query 'row-2' has an empty text"),
        ({"query": "secret", "passage": " "}, "the passage has an empty text"),
        ({"query": "secret", "passage": "y", "query_id": "q"}, "query 'q' has two texts, here and on line 1"),
        ({"query": "t", "passage": "y", "query_id": "q", "user_id": "b"}, "query 'q' has two users"),
        ({"query": "t", "passage": "y", "query_id": "q", "user_id": "a", "split": "test"}, "query 'q' has two splits"),
        ({"query": "secret", "passage": "y", "passage_id": "x"}, "passage 'x' has two texts"),
        ({"query": "secret", "passage": "y", "split": "tune"}, "split (a text) is not one of"),
        (
            {"query": "t", "passage": "z", "query_id": "q", "user_id": "a", "passage_id": "x"},
            "already paired on line 1",
        ),
    ],
)
def test_a_pair_that_lacks_or_contradicts_something_is_refused(
    write: Write, record: dict[str, object], reason: str
) -> None:
    first = {"query": "t", "passage": "z", "query_id": "q", "user_id": "a", "passage_id": "x"}
    path = write("p.jsonl", [first, record])
    with pytest.raises(DataError) as error:
        read_pairs(path)
    assert f"{path} line 2: " in str(error.value) and reason in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"query": "a", "passage_id": "p99"}, "passage 'p99' is not in the corpus"),
        ({"query": "a", "passage": "secret"}, "passage with this text is not in the corpus"),
        ({"query": "a", "passage_id": "p7", "passage": "secret"}, "passage 'p7' has another text in the corpus"),
    ],
)
def test_a_pair_outside_the_corpus_is_refused(
    write: Write, harbour: Path, record: dict[str, object], reason: str
) -> None:
    with pytest.raises(DataError) as error:
        read_pairs(write("p.jsonl", [record]), corpus=harbour / "corpus.jsonl")
    assert reason in str(error.value) and "secret" not in str(error.value)
