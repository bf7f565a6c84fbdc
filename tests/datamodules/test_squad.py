"""SQuAD's JSON as retrieval: questions, paragraphs, articles."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules import SquadDataModule
from lit_dpret.datamodules.readers import Problems
from lit_dpret.errors import ConfigurationError, DataError


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
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train-v1.1.json", ARTICLES[:1])
    write(tmp_path / "dev-v1.1.json.gz", ARTICLES[1:])
    return tmp_path


def write(path: Path, articles: Any) -> Path:
    content = json.dumps({"version": "1.1", "data": articles}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_questions_paragraphs_and_articles_become_queries_passages_and_domains(folder: Path) -> None:
    data = SquadDataModule(folder=folder)
    found = data.collection
    assert sorted(found.passages.values()) == ["Nobody lost.", "The game was played.", "Unasked."]
    assert found.queries == {"q1": "Who played?", "q2": "When?", "q3": "Who lost?", "q4": "What was played?"}
    assert {split: list(judged) for split, judged in found.qrels.items()} == {
        "train": ["q1", "q2", "q3"],
        "dev": ["q4"],
    }
    assert found.domains == {"q1": "Super Bowl 50", "q2": "Super Bowl 50", "q3": "Super Bowl 50", "q4": "Tides"}
    assert sorted(found.passage_domains.values()) == ["Super Bowl 50", "Super Bowl 50", "Tides"]
    assert data.evaluation_split == "dev"
    judged = found.qrels["train"]
    assert judged["q1"] == judged["q2"] == found.qrels["dev"]["q4"] != judged["q3"], "equal paragraphs are one passage"
    for name, split in (("train-v1.1.json", "train"), ("dev-v1.1.json.gz", "dev")):
        assert list(SquadDataModule(folder=folder / name).collection.qrels) == [split]


def test_unanswerable_questions_are_left_out_or_refused(folder: Path) -> None:
    collection = SquadDataModule(folder=folder).collection
    assert not any(query == "q5" and judged for qrels in collection.qrels.values() for query, judged in qrels.items())
    with pytest.raises(DataError, match=r"question 'q5' has no answer.*datamodule\.unanswerable=drop"):
        SquadDataModule(folder=folder, unanswerable="refuse").setup("fit")
    with pytest.raises(ConfigurationError, match=r"datamodule\.unanswerable='keep' is not one of drop, refuse"):
        SquadDataModule(folder=folder, unanswerable="keep")  # type: ignore[arg-type]


def test_a_folder_with_two_versions_of_a_split_or_without_one_is_refused_and_one_of_beir_read(
    folder: Path, harbour: Path
) -> None:
    write(folder / "train-v2.0.json", ARTICLES[:1])
    with pytest.raises(DataError, match=r"holds both train-v1\.1\.json and train-v2\.0\.json; keep one"):
        SquadDataModule(folder=folder).prepare_data()
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds neither train-v1\.1\.json.*check datamodule\.folder"):
        SquadDataModule(folder=folder / "empty").prepare_data()
    data = SquadDataModule(folder=harbour)
    assert data.evaluation_split == "test" and data.collection.users


def spoilt(change: str) -> list[Any]:
    articles = copy.deepcopy(ARTICLES)
    asked = articles[0]["paragraphs"][0]["qas"]
    if change == "twice":
        asked.append(asked[0])
    elif change == "no id":
        del asked[0]["id"]
    elif change == "no question":
        asked[0]["question"] = ["secret"]
    elif change == "blank":
        asked[0]["question"] = " "
    elif change == "no context":
        del articles[0]["paragraphs"][1]["context"]
    elif change == "empty context":
        articles[0]["paragraphs"][1]["context"] = " "
    elif change == "no title":
        del articles[1]["title"]
    elif change == "no list":
        articles[1]["paragraphs"] = "secret"
    return articles


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("twice", "question 'q1' comes twice"),
        ("no id", "a question has no text 'id'"),
        ("no question", "a question has no text 'question'"),
        ("blank", "question 'q1' has an empty text"),
        ("no context", "paragraph 2 of article 1 has no text 'context'"),
        ("empty context", "paragraph 2 of article 1 has an empty text"),
        ("no title", "article 2 has no text 'title'"),
        ("no list", "article 2 has no list 'paragraphs'"),
    ],
)
def test_what_is_not_squad_is_refused_and_left_out_where_problems_are_collected(
    tmp_path: Path, change: str, told: str
) -> None:
    path = write(tmp_path / "train-v1.1.json", spoilt(change))
    with pytest.raises(DataError) as error:
        SquadDataModule(folder=path).setup("fit")
    assert told in str(error.value) and "secret" not in str(error.value) and "Who" not in str(error.value)
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
    path = tmp_path / "dev.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=told):
        SquadDataModule(folder=path).setup("fit")


def test_whether_a_question_has_an_answer_moves_no_other_question(tmp_path: Path) -> None:
    """Neither the published number of units nor a sample tells."""
    found = []
    for name, impossible in (("answered", False), ("impossible", True)):
        asked = [question(f"q{i}", f"question {i}", is_impossible=impossible and i == 3) for i in range(20)]
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train-v2.0.json", [{"title": "t", "paragraphs": [{"context": "c", "qas": asked}]}])
        data = [SquadDataModule(folder=tmp_path / name, max_train_queries=most) for most in (None, 10)]
        for each in data:
            each.use_unit("query", "zero_out")
        found.append([(each.n_units, sorted(each.collection.qrels["train"])) for each in data])
    assert found[0] == found[1] and found[0][0][0] == 20
