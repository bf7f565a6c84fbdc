"""`task=check_data`: every problem in one report, numbers for the owner, a split for a log that has none."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from configured import composed
from hydra.utils import instantiate
from tiny_generator import generator
from tiny_tasks import parts, retriever, write_synthetic

from lit_dpret.datamodules import HuggingFaceDataModule, ImagesDataModule, PairsDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.tasks import CheckData
from lit_dpret.tasks.check_data import PAGE, REPORT
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.rulers import cut_texts, rulers_by_words

HARBOUR = Path(__file__).resolve().parents[1] / "data" / "harbour"
Spoil = Callable[[Path], None]


@pytest.fixture
def harbour(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HARBOUR, tmp_path / "harbour"))


def job(tmp_path: Path, **data: Any) -> Parts:
    return parts(tmp_path, make_datamodule=partial(PairsDataModule, **data), make_module=no_model)


def no_model(privacy: Any) -> Any:
    raise UnsupportedModelError("model.encoder=nowhere cannot be loaded.")


def report(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "run" / REPORT).read_text(encoding="utf-8"))
    return found


def write_log(folder: Path, *, users: bool = True) -> Path:
    """An unsplit log of pairs: 60 queries of 20 users, one text asked twice."""
    rows = [
        {"query": f"secret {i % 59}", "passage": f"Passage {i % 7}."} | ({"user_id": f"u{i % 20}"} if users else {})
        for i in range(60)
    ]
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# -- what is in it -------------------------------------------------------------------------------


def test_good_data_is_told_without_texts(tmp_path: Path, harbour: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert CheckData().run(job(tmp_path, folder=harbour)) == {"problems": 0.0}
    found, page = report(tmp_path), (tmp_path / "run" / PAGE).read_text(encoding="utf-8")
    assert found["problems"]["total"] == 0 and "No problems" in page
    assert found["columns"]["qrels.train"] == ["query-id", "corpus-id", "score"]
    assert {split: counts["queries"] for split, counts in found["splits"].items()} == {"train": 5, "dev": 1, "test": 2}
    assert capsys.readouterr().out == page
    told = page + (tmp_path / "run" / REPORT).read_text(encoding="utf-8")
    for line in [*(harbour / "queries.jsonl").open(), *(harbour / "corpus.jsonl").open()]:
        assert not (text := json.loads(line)["text"]) or text not in told
    for shown in (page, found["private"]):
        assert "no differential privacy covers them" in shown
    for name in (PAGE, REPORT):
        assert "private" in name and (tmp_path / "run" / name).stat().st_mode & 0o077 == 0


def test_lengths_are_in_the_models_own_tokens_and_say_what_it_cuts(tmp_path: Path, harbour: Path) -> None:
    models = {
        "QueryGenerator": lambda privacy: generator(privacy=privacy, max_passage_length=8, max_query_length=5),
        "FrozenDualEncoder": lambda privacy: retriever(privacy=privacy),
    }
    for number, (name, make) in enumerate(models.items()):
        given = parts(tmp_path, make_datamodule=partial(PairsDataModule, folder=harbour), make_module=make)
        CheckData().run(given)
        lengths = report(tmp_path)["lengths"]
        assert lengths["by"].startswith(f"tokens of {name}")
        assert lengths["passage"]["limit"] == (8, 10)[number] and lengths["query"]["limit"] == (5, 8)[number]
        assert lengths["passage"]["max"] > lengths["passage"]["limit"] and 0 < lengths["passage"]["share_cut"] <= 1


def test_a_stored_corpus_gives_the_same_report_in_words_without_a_model(tmp_path: Path, harbour: Path) -> None:
    CheckData().run(job(tmp_path, folder=harbour))
    held = report(tmp_path)
    assert held["lengths"]["by"].startswith("words") and "model.encoder=nowhere" in held["lengths"]["by"]
    assert held["lengths"]["passage"]["limit"] is None and held["lengths"]["passage"]["share_cut"] is None
    CheckData().run(job(tmp_path, folder=harbour, in_memory=False, cache_dir=tmp_path / "cache"))
    assert report(tmp_path) == held


def test_queries_that_are_trained_and_evaluated_on_are_told(tmp_path: Path, harbour: Path) -> None:
    CheckData().run(job(tmp_path, folder=harbour))
    found, page = report(tmp_path)["duplicates"], (tmp_path / "run" / PAGE).read_text(encoding="utf-8")
    assert sorted(found["queries"]["examples"]) == [["t1", "t3"], ["t4", "e1"]]
    assert found["shared_with_train"]["test"] == {"queries": 1, "positive_passages": 1}
    assert "test and train: queries that repeat a train query: 1;" in page and "datamodule.drop_overlap=true" in page


# -- what is wrong with it -----------------------------------------------------------------------


def append(name: str, content: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(content)

    return spoil


BAD_LINES: dict[str, tuple[Spoil, str, str]] = {
    "unknown passage": (append("qrels/train.tsv", b"t1\tp99\t1\n"), "unknown passage", "passage 'p99' is not in"),
    "unknown query": (append("qrels/test.tsv", b"q99\tp1\t1\n"), "unknown query", "query 'q99' is not among"),
    "no JSON": (append("corpus.jsonl", b"{secret\n"), "malformed JSON", "corpus.jsonl line 9: malformed JSON"),
    "repeated id": (append("corpus.jsonl", b'{"_id": "p1", "text": "secret"}\n'), "repeated id", "id 'p1' was already"),
    "columns": (append("qrels/dev.tsv", b"t1\tp1\n"), "wrong number of columns", "2 columns, but the header"),
    "not UTF-8": (append("queries.jsonl", b'{"_id": "x", "text": "\xff"}\n'), "not UTF-8", "not UTF-8 text"),
    "surrogate": (append("queries.jsonl", b'{"_id": "z", "text": "\\ud800"}\n'), "not Unicode text", "'text' holds"),
    "both splits": (append("qrels/test.tsv", b"t1\tp1\t1\n"), "query in two splits", "'t1' is in train and in test"),
    "no passage": (append("queries.jsonl", b'{"_id": "x", "text": "secret"}\n'), "query without passage", "query 'x'"),
    "empty query": (append("queries.jsonl", b'{"_id": "y", "text": " "}\n'), "empty query", "query 'y' has an empty"),
}  # fmt: skip


def test_every_bad_line_is_one_clear_line_of_one_report(tmp_path: Path, harbour: Path) -> None:
    for spoil, _, _ in BAD_LINES.values():
        spoil(harbour)
    with pytest.raises(DataError, match="has problems: ") as refused:
        CheckData().run(job(tmp_path, folder=harbour))
    found, page = report(tmp_path), (tmp_path / "run" / PAGE).read_text(encoding="utf-8")
    counts, examples = found["problems"]["counts"], found["problems"]["messages"]
    for _, kind, told in BAD_LINES.values():
        assert counts[kind] >= 1 and kind in str(refused.value) and f"* {kind}: " in page, kind
        assert any(told in message for message in examples[kind]), kind
    assert not any("\n" in message for messages in examples.values() for message in messages)
    assert "secret" not in page + json.dumps(found) and "split" not in found
    assert found["splits"]["train"]["queries"] == 5, "what can be read is still examined"


def test_every_fault_of_a_line_is_in_one_report_also_where_its_passage_is_unknown(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"query": f"secret {i}", "passage": f"Passage {i}."} for i in range(6)]
    rows[1] |= {"passage": "secret elsewhere", "query": ""}
    rows[2] |= {"passage": "secret elsewhere", "user_id": ["u"]}
    del rows[2]["query"]
    rows[3] |= {"passage": 7, "query": 5, "split": "nosplit"}
    log, corpus = tmp_path / "log.jsonl", tmp_path / "corpus.jsonl"
    broken = '{"query": "secret\\q"}'
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + broken, encoding="utf-8")
    corpus.write_text("".join(json.dumps({"_id": f"p{i}", "text": f"Passage {i}."}) + "\n" for i in range(6)))
    with pytest.raises(DataError, match=r"task\.write_split"):
        CheckData(write_split=tmp_path / "new").run(job(tmp_path, pairs=log, corpus=corpus))
    told = [message for messages in report(tmp_path)["problems"]["messages"].values() for message in messages]
    faults = {line: [one for one in told if f"log.jsonl line {line}:" in one] for line in range(1, 8)}
    assert [len(faults[line]) for line in range(1, 8)] == [0, 2, 3, 3, 0, 0, 1]
    for line, named in ((2, "corpus"), (3, "'query'"), (3, "'user_id'"), (4, "'passage'"), (4, " split ")):
        assert any(named in one for one in faults[line]), (line, named)
    assert "column 18" in faults[7][0]
    page = (tmp_path / "run" / PAGE).read_text(encoding="utf-8")
    assert "task.write_split" in page and not (tmp_path / "new").exists() and "secret" not in page


def test_every_fault_of_a_line_of_separate_files_is_in_one_report(tmp_path: Path, harbour: Path) -> None:
    append("queries.jsonl", b'{"_id": "y", "text": 5, "user_id": []}\n')(harbour)
    append("corpus.jsonl", b'{"_id": [], "text": 5}\n')(harbour)
    append("qrels/train.tsv", b"q99\tp99\t1\n")(harbour)
    with pytest.raises(DataError):
        CheckData().run(job(tmp_path, folder=harbour))
    counts = report(tmp_path)["problems"]["counts"]
    assert {kind: counts[kind] for kind in ("no text", "no id", "unknown query", "unknown passage")} == {
        "no text": 2, "no id": 2, "unknown query": 1, "unknown passage": 1
    }  # fmt: skip


def replaced(name: str, content: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        before = (folder / "corpus.jsonl").read_bytes()
        (folder / "corpus.jsonl").unlink()
        (folder / name).write_bytes(content(before))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "kind", "told"),
    [
        (replaced("corpus.jsonl", lambda whole: b""), "empty file", "corpus.jsonl holds no passages"),
        (replaced("corpus.parquet", lambda whole: b"PAR1 none PAR1"), "unreadable file", "corpus.parquet is not"),
        (
            replaced("corpus.jsonl.gz", lambda whole: gzip.compress(whole)[:-40]),
            "unreadable file",
            "corpus.jsonl.gz is",
        ),
    ],
)
def test_unreadable_data_is_one_line(tmp_path: Path, harbour: Path, spoil: Spoil, kind: str, told: str) -> None:
    pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    spoil(harbour)
    with pytest.raises(DataError, match=kind):
        CheckData().run(job(tmp_path, folder=harbour))
    assert any(told in message for message in report(tmp_path)["problems"]["messages"][kind])


def test_a_column_that_no_record_has_is_one_problem_that_names_the_setting_and_shows_no_text(tmp_path: Path) -> None:
    log = write_log(tmp_path)
    log.write_text(log.read_text(encoding="utf-8").replace('"passage"', '"pasage"'), encoding="utf-8")
    (tmp_path / "log.tsv").write_text("does my policy cover floods\tIt does not, unless you ask.\n" * 3)
    bare = (tmp_path / "log.tsv", "(text hidden), (text hidden)", 2)  # a table without a header lacks both
    for file, said, columns in ((log, "pasage", 1), bare):
        with pytest.raises(DataError):
            CheckData().run(job(tmp_path, pairs=file))
        told = report(tmp_path)["problems"]["messages"]["missing column"]
        assert len(told) == columns and all(said in one for one in told) and "datamodule.columns" in told[-1]
    assert "floods" not in json.dumps(report(tmp_path))


def test_queries_without_ids_that_repeat_a_text_are_told_by_their_lines(tmp_path: Path) -> None:
    CheckData().run(job(tmp_path, pairs=write_log(tmp_path)))
    assert "lines 1 and 60" in (tmp_path / "run" / PAGE).read_text(encoding="utf-8")


def test_a_user_column_that_is_missing_is_told_by_the_columns_that_there_are(tmp_path: Path) -> None:
    log = write_log(tmp_path)
    data = partial(HuggingFaceDataModule, path=log, user_column="author")
    with pytest.raises(DataError, match="has problems: missing column"):
        CheckData(examples=1).run(parts(tmp_path, make_datamodule=data, make_module=no_model))
    problems = report(tmp_path)["problems"]
    (told,) = problems["messages"]["missing column"]
    assert all(word in told for word in ("author", "user_id", "datamodule.user_column", f"{log} line 1"))
    assert problems["counts"]["missing column"] == 60


def test_images_are_refused(tmp_path: Path) -> None:
    images = ImagesDataModule.__new__(ImagesDataModule)
    with pytest.raises(ConfigurationError, match="ImagesDataModule has no read_collection"):
        CheckData().run(parts(tmp_path, make_datamodule=lambda: images))


# -- users and splits ----------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["python train.py", "lit-dpret"])
def test_users_and_a_cap_are_told_and_stand_in_the_command(tmp_path: Path, program: str) -> None:
    log = write_log(tmp_path)
    given = job(tmp_path, pairs=log)
    CheckData().run(Parts(**{**vars(given), "command": f"{program} task=check_data datamodule.pairs={log}"}))
    found = report(tmp_path)
    assert found["users"]["users"] == 20 and found["users"]["recommended_cap"] == 5
    assert found["split"]["by"] == "user" and found["split"]["written"] is None
    assert found["command"] == (
        f"{program} datamodule.pairs={log} hydra.run.dir=runs/mine datamodule.expected_batch_size=5 "
        "privacy.unit=user datamodule.max_rows_per_unit=5 callbacks.card.tuning_data=private"
    ), "a quarter of the users is a batch"


def test_no_user_unit_is_offered_where_training_would_refuse_it_or_would_lose_most(tmp_path: Path) -> None:
    log = write_log(tmp_path)
    some = log.read_text(encoding="utf-8").replace(', "user_id": "u3"', "", 1)
    one = log.read_text(encoding="utf-8") + "".join(
        json.dumps({"query": f"one {i}", "passage": "p", "user_id": "u0"}) + "\n" for i in range(900)
    )
    for lines, without in ((some, 1), (one, 0)):
        log.write_text(lines, encoding="utf-8")
        CheckData().run(job(tmp_path, pairs=log))
        found = report(tmp_path)
        assert "privacy.unit" not in found["command"] and "tuning_data" not in found["command"]
        assert len(found["users"]["queries_without_user"]) == without
        units = min(256, found["splits"]["train"]["queries"] // 4)
        assert f"expected_batch_size={units}" in found["command"]


@pytest.mark.parametrize("users", [False, True])
def test_a_log_whose_default_delta_would_be_large_is_cautioned_of_it(users: bool, tmp_path: Path) -> None:
    log = write_log(tmp_path, users=users)
    CheckData(max_texts=5).run(job(tmp_path, pairs=log))
    units, found = 20 if users else 60, report(tmp_path)
    (told,) = found["cautions"]
    assert f"{units} units" in told and "privacy.delta" in told
    assert found["split"]["by"] == ("user" if users else "text") and (found["users"] is not None) is users


def test_a_length_that_cuts_most_texts_is_said_and_one_that_does_not_is_not() -> None:
    class Read:
        collection = Collection(
            passages={"p": "one two three four five", "r": "one two three four five six"},
            queries={"q": "one", "s": "one two"},
            qrels={},
        )

    told = cut_texts(Read(), rulers_by_words({"model.max_passage_length": 4, "model.max_query_length": 2}))
    assert len(told) == 1 and "model.max_passage_length=4" in told[0] and "100%" in told[0]
    assert cut_texts(Read(), rulers_by_words({"model.max_passage_length": 5, "model.max_query_length": 1})) == []
    assert cut_texts(object(), rulers_by_words({})) == []


@pytest.mark.parametrize("declared", [True, False])
def test_a_written_split_is_trained_on_by_the_command_that_is_shown(tmp_path: Path, declared: bool) -> None:
    log, new = write_log(tmp_path), tmp_path / "new split"
    command = f"python train.py task=check_data task.write_split='{new}' datamodule=pairs datamodule.pairs={log} "
    command += "model=generator datamodule.lower_case_queries=true hydra.run.dir=x"
    given = job(tmp_path, pairs=log, passages_are_public=declared)
    CheckData(write_split=new).run(Parts(**{**vars(given), "command": command}))
    shown = report(tmp_path)["command"]
    overrides = shlex.split(shown)[2:]
    assert "model=generator" in overrides and "privacy.unit=user" in overrides
    data = instantiate(composed(*overrides).datamodule)
    data.use_unit("user")
    assert data.lower_case_queries and data.max_rows_per_unit == 5 and data.n_units > 0
    assert {split: len(qrels) for split, qrels in data.collection.qrels.items()} == report(tmp_path)["split"]["queries"]
    assert data.has_public_passages is declared


def test_a_split_that_would_part_released_queries_from_their_card_is_not_written(tmp_path: Path) -> None:
    released = write_synthetic(
        tmp_path / "released", PairsDataModule(pairs=write_log(tmp_path), passages_are_public=True)
    )
    with pytest.raises(ConfigurationError) as refused:
        CheckData(write_split=tmp_path / "split").run(job(tmp_path, folder=released))
    assert refused.value.trap == "T27" and not (tmp_path / "split").exists()


def test_a_split_that_would_leave_a_side_empty_is_told_and_refused_where_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"query": "q", "passage": "p"}\n')
    CheckData().run(job(tmp_path, pairs=path))
    assert "empty. Change task.fractions" in (tmp_path / "run" / PAGE).read_text()
    with pytest.raises(DataError, match=r"empty\. Change task\.fractions"):
        CheckData(write_split=tmp_path / "new").run(job(tmp_path, pairs=path))
    assert not (tmp_path / "new").exists()


def test_what_is_split_is_split_anew_only_where_that_is_said(tmp_path: Path, harbour: Path) -> None:
    new = tmp_path / "new"
    with pytest.raises(ConfigurationError, match=r"is already split.*task\.resplit=true"):
        CheckData(write_split=new).run(job(tmp_path, folder=harbour))
    half = {"train": 0.5, "test": 0.5}
    CheckData(write_split=new, resplit=True, fractions=half, split_by="text").run(job(tmp_path, folder=harbour))
    again = PairsDataModule(folder=new).collection
    assert sorted(again.qrels) == ["test", "train"] and len(again.queries) == 8


def test_a_split_is_not_written_over_a_folder(tmp_path: Path, harbour: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.write_split=.*harbour exists already"):
        CheckData(write_split=harbour).run(job(tmp_path, folder=harbour))


class Asked:
    """A foreign DataModule, with nothing but its texts."""

    def read_collection(self, complain: Any = None) -> Collection:
        return Collection(
            passages={"a": "A water butt collects rain."}, queries={"1": "what is a water butt"},
            qrels={"train": {"1": {"a": 1}}}, source="asked.csv",
        )  # fmt: skip


def test_a_datamodule_of_somebody_elses_is_examined_by_its_texts(tmp_path: Path) -> None:
    made = parts(tmp_path, make_datamodule=Asked, make_module=lambda privacy: retriever(privacy=privacy))
    assert CheckData().run(made) == {"problems": 0.0}
    facts = json.loads((made.run_dir / "check_data.private.json").read_text())
    assert facts["source"] == "Asked" and facts["queries"] == 1
