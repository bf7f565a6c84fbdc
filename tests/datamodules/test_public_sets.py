"""Public collections in their publishers' own layouts: BEIR, MS MARCO, SQuAD and InsuranceQA."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
import sys
import types
import warnings
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_dpret.datamodules import BeirDataModule, InsuranceQADataModule, MSMarcoDataModule, SquadDataModule
from lit_dpret.datamodules.beir import BEIR_SETS, beir_set
from lit_dpret.datamodules.passage_store import PassageStore
from lit_dpret.datamodules.records import Problems
from lit_dpret.errors import ConfigurationError, DataError

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (BeirDataModule, {"name": "trec-news"}, "datamodule.name='trec-news'"),
        (BeirDataModule, {"name": "cqadupstack", "root": "x"}, "datamodule.name=cqadupstack"),
        (BeirDataModule, {"name": "scifact"}, "datamodule.root=null and datamodule.download=false"),
        (BeirDataModule, {"name": "scifact", "root": "x", "download": True}, "datamodule.download=true"),
        (MSMarcoDataModule, {}, "datamodule.folder"),
        (MSMarcoDataModule, {"folder": "x", "download": True}, "datamodule.download=true"),
        (MSMarcoDataModule, {"folder": "x", "dev": "tiny"}, "datamodule.dev='tiny' is not one of small, full"),
        (SquadDataModule, {"folder": "x", "unanswerable": "keep"}, "datamodule.unanswerable='keep'"),
    ],
)
def test_a_setting_that_names_no_data_is_refused(kind: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        kind(**settings)


@pytest.mark.parametrize("kind", [partial(BeirDataModule, name="scifact"), MSMarcoDataModule])
def test_a_download_without_ir_datasets_names_the_extra(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(ConfigurationError, match=r"lit-dpret\[beir\]"):
        kind(download=True).setup("test")


# -- BEIR ----------------------------------------------------------------------------------------


def write_set(folder: Path, *, splits: tuple[str, ...] = ("test",)) -> Path:
    """A collection in BEIR's layout whose query i of a split is answered by passage i."""
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": f"d{i}", "title": "", "text": f"passage number {i}" if i else ""} for i in range(4)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    queries = [{"_id": f"{split}{i}", "text": f"number {i}"} for split in splits for i in range(1, 4)]
    queries.append({"_id": "unjudged", "text": "a query of no split"})
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    for split in splits:
        lines = [f"{split}{i}\td{i}\t1\n" for i in range(1, 4)]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def evaluated(data: BeirDataModule, split: str | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return data.evaluation_set(split)


def test_the_registry_knows_the_protocol_of_every_set() -> None:
    public = [name for name in BEIR_SETS if "/" not in name]
    assert {name for name in public if BEIR_SETS[name].split != "test"} == {"msmarco"}
    assert {name for name in public if BEIR_SETS[name].drops_self_matches} == {"arguana", "quora"}
    assert sum(BEIR_SETS[name].queries for name in BEIR_SETS["cqadupstack"].members) == 13_145  # as BEIR's paper counts
    touche = beir_set("touche")
    assert touche.departures(passages=382_545, queries=49, judgements=2_214) == []
    assert touche.departures(passages=382_545, queries=49, judgements=2_962) == ["2,962 judgements instead of 2,214"]


def test_a_name_finds_its_folder_and_its_split_and_a_departure_from_the_protocol_is_warned_of(tmp_path: Path) -> None:
    write_set(tmp_path / "msmarco", splits=("train", "dev", "test"))
    data = BeirDataModule(name="MSMARCO", root=tmp_path)
    assert data.folder == tmp_path / "msmarco", "beside which a card is looked for"
    queries, qrels = evaluated(data)
    assert list(qrels) == ["dev1", "dev2", "dev3"] == list(queries)
    assert data.evaluation_split == "dev" and not data.drops_self_matches
    assert [row.query_id for row in data.pair_rows("train")] == ["train1", "train2", "train3"]
    with pytest.warns(UserWarning, match=r"msmarco: .*; 3 queries instead of 6,980; .*43 TREC"):
        data.evaluation_set()
    with pytest.warns(UserWarning, match="split test, where BEIR evaluates dev"):
        data.evaluation_set("test")
    named = BeirDataModule(name="scifact", root=write_set(tmp_path / "my copy"))
    assert list(evaluated(named)[1]) == ["test1", "test2", "test3"]


def test_only_the_evaluated_split_is_read_where_that_is_asked_for(tmp_path: Path) -> None:
    write_set(tmp_path / "fiqa", splits=("train", "test"))
    (tmp_path / "fiqa" / "qrels" / "train.tsv").write_text("broken")
    data = BeirDataModule(name="fiqa", root=tmp_path, only_evaluation=True)
    assert list(evaluated(data)[1]) == ["test1", "test2", "test3"]
    with pytest.raises(DataError, match=r"train\.tsv"):
        BeirDataModule(name="fiqa", root=tmp_path).setup()


def test_a_set_that_is_not_there_is_refused_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ir_datasets", None)  # importing it would raise
    with pytest.raises(DataError, match="holds no scifact"):
        BeirDataModule(name="scifact", root=tmp_path).prepare_data()
    write_set(tmp_path / "msmarco", splits=("test",))
    with pytest.raises(DataError, match="no qrels of dev"):
        BeirDataModule(name="msmarco", root=tmp_path).setup()


def test_download_takes_the_evaluated_split_of_ir_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    doc, query = namedtuple("doc", "doc_id text title"), namedtuple("query", "query_id text")
    judged = namedtuple("judged", "query_id doc_id relevance iteration")
    asked, grades = list[str](), [judged("q1", "d1", 2, "0")]

    def load(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(
            docs_iter=lambda: iter([doc("d1", "body", "title"), doc("d2", "", "")]),
            queries_iter=lambda: iter([query("q1", "what?"), query("q2", "unjudged")]),
            qrels_iter=lambda: iter(grades),
        )

    monkeypatch.setitem(sys.modules, "ir_datasets", types.SimpleNamespace(load=load))
    data = BeirDataModule(name="touche", download=True)
    data.prepare_data()
    assert evaluated(data) == ({"q1": "what?"}, {"q1": {"d1": 2}})
    assert data.public_passages() == {"d1": "title body", "d2": ""}
    assert set(asked) == {"beir/webis-touche2020/v2"}
    grades.append(judged("q1", "d1", 1, "0"))
    with pytest.raises(DataError, match=r"datamodule\.repeated_judgements"):
        BeirDataModule(name="touche", download=True).setup("test")
    kept = BeirDataModule(name="touche", download=True, repeated_judgements="last")
    kept.setup("test")
    assert evaluated(kept)[1] == {"q1": {"d1": 1}}


# -- MS MARCO ------------------------------------------------------------------------------------

FILES = {
    "collection": '0\tA "quoted" start.\n1\tsecond\n7067032\tlast\n',
    "queries.train": "121352\tdefine extreme\n634306\tnobody judged this\n",
    "queries.dev.small": "1048585\twhat is paula deen's brother\n",
    "queries.dev": "1048585\twhat is paula deen's brother\n2\tAndrogen receptor define\n",
    "qrels.train": "121352\t0\t1\t1\n121352\t0\t0\t1\n",
    "qrels.dev.small": "1048585\t0\t7067032\t1\n",
    "qrels.dev": "1048585\t0\t7067032\t1\n2\t0\t0\t1\n",
}


@pytest.fixture
def msmarco(tmp_path: Path) -> Path:
    root = tmp_path / "msmarco"
    root.mkdir()
    for name, content in FILES.items():
        (root / f"{name}.tsv").write_text(content, encoding="utf-8")
    return root


def test_train_and_the_development_set_that_is_asked_for_are_read(msmarco: Path) -> None:
    data = MSMarcoDataModule(folder=msmarco)
    assert data.collection.passages == {"0": 'A "quoted" start.', "1": "second", "7067032": "last"}
    assert data.collection.queries == {"121352": "define extreme", "1048585": "what is paula deen's brother"}
    assert data.collection.qrels == {"train": {"121352": {"1": 1, "0": 1}}, "dev": {"1048585": {"7067032": 1}}}
    assert data.evaluation_split == "dev"
    data.use_unit("query")
    assert data.n_units == 1
    whole = MSMarcoDataModule(folder=msmarco, dev="full", only_evaluation=True)
    assert whole.collection.qrels == {"dev": {"1048585": {"7067032": 1}, "2": {"0": 1}}}


def test_compressed_files_and_a_stored_collection_give_the_same(msmarco: Path, tmp_path: Path) -> None:
    wanted = MSMarcoDataModule(folder=msmarco).collection
    for name in FILES:
        plain = msmarco / f"{name}.tsv"
        plain.with_name(plain.name + ".gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    data = MSMarcoDataModule(folder=msmarco, in_memory=False, cache_dir=tmp_path / "cache")
    data.prepare_data()
    built = list((tmp_path / "cache").iterdir())
    assert isinstance(data.public_passages(), PassageStore)
    found = data.collection
    assert (found.passages, found.queries, found.qrels) == (wanted.passages, wanted.queries, wanted.qrels)
    assert len(built) == 1 and list((tmp_path / "cache").iterdir()) == built


def test_every_missing_file_is_told_at_once(msmarco: Path) -> None:
    for name in ("queries.dev.small", "qrels.train"):
        (msmarco / f"{name}.tsv").unlink()
    with pytest.raises(DataError, match=r"datamodule\.dev=full") as error:
        MSMarcoDataModule(folder=msmarco).prepare_data()
    message = str(error.value)
    assert all(name in message for name in ("queries.dev.small.tsv", "qrels.train.tsv", "it holds: collection.tsv"))
    with pytest.raises(DataError, match=r"datamodule\.folder"):
        MSMarcoDataModule(folder=msmarco / "nowhere").prepare_data()


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("collection", "8\n", "collection.tsv line 4: 1 columns, but 2 are expected (id, text; tabs between them"),
        ("collection", "1\tagain\n", "collection.tsv line 4: id '1' was already given on line 2"),
        ("queries.train", "9\t \n", "queries.train.tsv line 3: query '9' has an empty text"),
        ("qrels.train", "121352 0 1 1\n", "qrels.train.tsv line 3: 1 columns, but 4 are expected"),
        ("qrels.train", "121352\t0\t5\t1\n", "line 3: passage '5' is not in the corpus"),
        ("qrels.dev.small", "3\t0\t1\t1\n", "line 2: query '3' is not among the queries"),
        ("qrels.train", "121352\t0\t7067032\tyes\n", "line 3: grade grade=(text hidden) is not an integer"),
    ],
)
def test_a_bad_line_is_refused_and_left_out_where_problems_are_collected(
    msmarco: Path, name: str, line: str, told: str
) -> None:
    with (msmarco / f"{name}.tsv").open("a", encoding="utf-8") as file:
        file.write(line)
    with pytest.raises(DataError) as error:
        MSMarcoDataModule(folder=msmarco).setup("fit")
    assert told in str(error.value) and "again" not in str(error.value)
    problems = Problems()
    found = MSMarcoDataModule(folder=msmarco).read_collection(problems)
    assert problems.total == 1 and found.qrels["train"] == {"121352": {"1": 1, "0": 1}}


def test_a_pair_judged_twice_is_refused_and_read_with_the_setting_that_the_refusal_names(msmarco: Path) -> None:
    with (msmarco / "qrels.train.tsv").open("a", encoding="utf-8") as file:
        file.write("121352\t0\t0\t3\n")
    with pytest.raises(DataError, match=r"datamodule\.repeated_judgements"):
        MSMarcoDataModule(folder=msmarco).setup("fit")
    read = MSMarcoDataModule(folder=msmarco, repeated_judgements="last").read_collection()
    assert read.qrels["train"]["121352"]["0"] == 3


def test_a_query_with_another_text_in_another_split_is_refused(msmarco: Path) -> None:
    for name, line in (("queries.dev.small", "121352\tanother text\n"), ("qrels.dev.small", "121352\t0\t1\t1\n")):
        with (msmarco / f"{name}.tsv").open("a", encoding="utf-8") as file:
            file.write(line)
    with pytest.raises(DataError, match="query '121352' has another text in the train split"):
        MSMarcoDataModule(folder=msmarco).setup("fit")


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
    msmarco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, dev: Any
) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "ir_datasets", library)  # type: ignore[arg-type]
    wanted = MSMarcoDataModule(folder=msmarco, dev=dev).collection
    for _ in range(2):
        data = MSMarcoDataModule(download=True, dev=dev, in_memory=in_memory, cache_dir=tmp_path / "cache")
        data.prepare_data()
        found = data.collection
        assert (found.passages, found.queries, found.qrels) == (wanted.passages, wanted.queries, wanted.qrels)
    assert library.collections == (4 if in_memory else 1), "a store is filled once"


@pytest.mark.parametrize(
    ("fails", "left"), [("collection", []), ("qrels.train", ["msmarco-passage-ir-datasets.sqlite"])]
)
def test_what_ir_datasets_does_not_give_is_one_line_and_leaves_no_half_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, left: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ir_datasets", Library(fails))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"ir-datasets could not load msmarco-passage.*: no route$"):
        MSMarcoDataModule(download=True, in_memory=False, cache_dir=tmp_path / "cache").setup("fit")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == left


# -- SQuAD ---------------------------------------------------------------------------------------


def question(query_id: str, text: str, **more: Any) -> dict[str, Any]:
    return {"id": query_id, "question": text, "answers": [{"text": "a", "answer_start": 0}], **more}


ARTICLES: list[dict[str, Any]] = [
    {
        "title": "Super_Bowl_50",
        "paragraphs": [
            {"context": "The game was played.", "qas": [question("q1", " Who  played? "), question("q2", "When?")]},
            {"context": "Nobody lost.", "qas": [question("q3", "Who lost?", is_impossible=False)]},
        ],
    },
    {
        "title": "Tides",
        "paragraphs": [
            {"context": "The game was played.", "qas": [question("q4", "What was played?")]},
            {"context": "Unasked.", "qas": [question("q5", "Unanswerable?", is_impossible=True)]},
        ],
    },
]


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    write_squad(tmp_path / "train-v1.1.json", ARTICLES[:1])
    write_squad(tmp_path / "dev-v1.1.json.gz", ARTICLES[1:])
    return tmp_path


def write_squad(path: Path, articles: Any) -> Path:
    content = json.dumps({"version": "1.1", "data": articles}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_questions_paragraphs_and_articles_become_queries_passages_and_domains(squad: Path) -> None:
    data = SquadDataModule(folder=squad)
    found = data.collection
    assert sorted(found.passages.values()) == ["Nobody lost.", "The game was played.", "Unasked."]
    assert found.queries == {"q1": "Who played?", "q2": "When?", "q3": "Who lost?", "q4": "What was played?"}
    judged = found.qrels["train"]
    assert (list(judged), list(found.qrels["dev"])) == (["q1", "q2", "q3"], ["q4"]), "q5 has no answer"
    assert found.domains == {"q1": "Super Bowl 50", "q2": "Super Bowl 50", "q3": "Super Bowl 50", "q4": "Tides"}
    assert sorted(found.passage_domains.values()) == ["Super Bowl 50", "Super Bowl 50", "Tides"]
    assert data.evaluation_split == "dev"
    assert judged["q1"] == judged["q2"] == found.qrels["dev"]["q4"] != judged["q3"], "equal paragraphs are one passage"
    for name, split in (("train-v1.1.json", "train"), ("dev-v1.1.json.gz", "dev")):
        assert list(SquadDataModule(folder=squad / name).collection.qrels) == [split]
    with pytest.raises(DataError, match=r"'q5' .*datamodule\.unanswerable=drop"):
        SquadDataModule(folder=squad, unanswerable="refuse").setup("fit")


def test_a_folder_with_two_versions_of_a_split_or_without_one_is_refused_and_one_of_beir_read(
    squad: Path, harbour: Path
) -> None:
    write_squad(squad / "train-v2.0.json", ARTICLES[:1])
    with pytest.raises(DataError, match=r"both train-v1\.1\.json and train-v2\.0\.json"):
        SquadDataModule(folder=squad).prepare_data()
    (squad / "empty").mkdir()
    with pytest.raises(DataError, match=r"train-v1\.1\.json.*datamodule\.folder"):
        SquadDataModule(folder=squad / "empty").prepare_data()
    data = SquadDataModule(folder=harbour)
    assert data.evaluation_split == "test" and data.collection.users


Spoil = Callable[[list[dict[str, Any]]], Any]


def asked(articles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = articles[0]["paragraphs"][0]["qas"]
    return found


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda all: asked(all).append(asked(all)[0]), "question 'q1' occurs twice"),
        (lambda all: asked(all)[0].pop("id"), "a question has no string 'id'"),
        (lambda all: asked(all)[0].update(question=["secret"]), "a question has no string 'question'"),
        (lambda all: asked(all)[0].update(question=" "), "question 'q1' has an empty text"),
        (lambda all: all[0]["paragraphs"][1].pop("context"), "paragraph 2 of article 1 has no string 'context'"),
        (lambda all: all[0]["paragraphs"][1].update(context=" "), "paragraph 2 of article 1 has an empty text"),
        (lambda all: all[1].pop("title"), "article 2 has no string 'title'"),
        (lambda all: all[1].update(paragraphs="secret"), "article 2 has no list 'paragraphs'"),
        (lambda all: asked(all)[0].update(id="secret \ud800"), "surrogate"),
        (lambda all: asked(all)[0].update(question="secret \ud800"), "surrogate"),
        (lambda all: all[0]["paragraphs"][1].update(context="secret \ud800"), "surrogate"),
        (lambda all: all[1].update(title="secret \ud800"), "surrogate"),
    ],
)
def test_what_is_not_squad_is_refused_and_left_out_where_problems_are_collected(
    tmp_path: Path, spoil: Spoil, told: str
) -> None:
    articles = copy.deepcopy(ARTICLES)
    spoil(articles)
    path = write_squad(tmp_path / "train-v1.1.json", articles)
    with pytest.raises(DataError, match=rf"train-v1\.1\.json.*{told}") as error:
        SquadDataModule(folder=path).setup("fit")
    assert "secret" not in str(error.value) and "Who" not in str(error.value)
    problems = Problems()
    found = SquadDataModule(folder=path).read_collection(problems)
    assert problems.total == 1 and "q2" in found.queries


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "line 1: malformed JSON"),
        (b"[]", "is not in SQuAD's format"),
        (b'{"data": {}}', "is not in SQuAD's format"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_file_that_is_no_squad_at_all_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "dev.json").write_bytes(content)
    with pytest.raises(DataError, match=told):
        SquadDataModule(folder=tmp_path / "dev.json").setup("fit")


def test_whether_a_question_has_an_answer_moves_no_other_question(tmp_path: Path) -> None:
    """Neither the published number of units nor a sample tells."""
    found = []
    for name, impossible in (("answered", False), ("impossible", True)):
        questions = [question(f"q{i}", f"question {i}", is_impossible=impossible and i == 3) for i in range(20)]
        (tmp_path / name).mkdir()
        path = tmp_path / name / "train-v2.0.json"
        write_squad(path, [{"title": "t", "paragraphs": [{"context": "c", "qas": questions}]}])
        data = [SquadDataModule(folder=tmp_path / name, max_train_queries=most) for most in (None, 10)]
        for each in data:
            each.use_unit("query", "zero_out")
        found.append([(each.n_units, sorted(each.collection.qrels["train"])) for each in data])
    assert found[0] == found[1] and found[0][0][0] == 20


# -- InsuranceQA ---------------------------------------------------------------------------------

FOG = {"en": "Does  Fog  Count?", "zh": "", "domain": "sea", "answers": ["1"], "negatives": []}


def packed(content: Any) -> bytes:
    return gzip.compress(content if isinstance(content, bytes) else json.dumps(content).encode(), mtime=0)


@pytest.fixture
def package(write: Write, tmp_path: Path) -> Path:
    """A made-up copy of the package's four files."""
    for name in ("train", "valid", "test"):
        write(f"{name}.json.gz", packed({"0": {**FOG, "en": f"{name}  Fog?"}}))
    write("answers.json.gz", packed({"1": {"en": " It \u00a0 does. ", "zh": ""}}))
    return tmp_path


def test_the_package_s_files_become_ids_splits_and_collapsed_texts(package: Path) -> None:
    data = InsuranceQADataModule(folder=package, lower_case_queries=False).collection
    assert data.passages == {"a1": "It does."}
    assert data.queries == {"train-0": "train Fog?", "dev-0": "valid Fog?", "test-0": "test Fog?"}
    assert data.qrels["dev"] == {"dev-0": {"a1": 1}}
    assert data.domains["test-0"] == data.passage_domains["a1"] == "sea"
    assert InsuranceQADataModule(folder=package).collection.queries["train-0"] == "train fog?"


@pytest.mark.slow
def test_the_installed_data_has_the_published_sizes() -> None:
    pytest.importorskip("insuranceqa_data", reason="needs pip install 'lit-dpret[quickstart]'")
    installed = InsuranceQADataModule()
    data = installed.collection
    assert len(data.passages) == 27_413
    assert {split: len(qrels) for split, qrels in data.qrels.items()} == {"train": 12_889, "dev": 2_000, "test": 2_000}
    assert len(set(data.domains.values())) == 12
    installed.use_unit("query")
    units = installed.train_units()
    sizes = Counter(len(units.rows(unit)) for unit in range(len(units)))
    assert len(units) == 12_889 and max(sizes) == 15
    assert sum(size * count for size, count in sizes.items()) == 21_325 == len(installed.pair_rows("train"))


def test_without_the_package_or_its_data_the_extra_and_the_version_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_data = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    for spec, told in ((None, r"'lit-dpret\[quickstart\]'"), (without_data, r"insuranceqa-data==1\.0")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(ConfigurationError, match=told):
            InsuranceQADataModule()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train", b"not gzip", "cannot be read"),
        ("test", packed(b'{"0": {}}' * 500)[:-9], "cannot be read"),
        ("answers", packed(b'{"1":\n {"en": }}'), "line 2: malformed JSON"),
        ("answers", packed({}), "holds no entries"),
        ("valid", packed({"0": {"en": "secret", "domain": "d"}}), "entry '0': no key 'answers'; found: en"),
        ("valid", packed({"0": {"en": 3}}), "'en' is not a str"),
        ("valid", packed({"0": 3}), "found: no object"),
    ],
)
def test_a_broken_file_of_the_package_is_refused(
    package: Path, write: Write, name: str, content: bytes, reason: str
) -> None:
    path = write(f"{name}.json.gz", content)
    with pytest.raises(DataError, match=reason) as error:
        InsuranceQADataModule(folder=package).setup()
    assert str(path) in str(error.value) and "secret" not in str(error.value)


def test_an_answer_or_a_file_that_does_not_exist_is_refused(package: Path, write: Write) -> None:
    write("train.json.gz", packed({"0": {**FOG, "answers": ["9"]}}))
    with pytest.raises(DataError, match="unknown passage 'a9'"):
        InsuranceQADataModule(folder=package).setup()
    (package / "valid.json.gz").unlink()
    with pytest.raises(DataError, match=r"valid\.json\.gz does not exist"):
        InsuranceQADataModule(folder=package).prepare_data()
