"""`task=own_log`: what it decides for a log, and what it refuses; the pipeline itself has tests of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_generator import generator
from tiny_tasks import parts, retriever

from lit_dpret.cards.tuning import tuning_facts
from lit_dpret.datamodules import InsuranceQADataModule, PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.tasks import OwnLog, check_data
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.pipeline import Pipeline
from lit_dpret.tasks.rulers import fitting_batch, fitting_length

COUNT = 200


@given(st.lists(st.integers(1, 600), min_size=1, max_size=400), st.integers(1, 10**6))
def test_a_fitting_length_cuts_one_text_in_twenty_and_a_batch_is_a_quarter(lengths: list[int], units: int) -> None:
    length = fitting_length(lengths)
    cut = [sum(one > limit for one in lengths) / len(lengths) for limit in (length, length - 8)]
    assert length % 8 == 0 and cut[0] <= 0.05 and (cut[1] >= 0.05 or length == 8)
    assert 1 <= fitting_batch(units, 256) <= max(1, units / 4)


def own_log(**changes: Any) -> OwnLog:
    settings: dict[str, Any] = {
        "generator": partial(generator, seed=0), "retriever": retriever, "generator_steps": 2, "generator_batch": 256,
        "generator_physical_batch": 8, "generator_max_grad_norm": 0.1, "retriever_steps": 2, "retriever_batch": 16,
        "retriever_max_grad_norm": 0.5, "min_free_mb": 1, "longest": 16,
    }  # fmt: skip
    return OwnLog(**settings | changes)


def log_parts(
    tmp_path: Path, *, public: bool = True, rows: list[dict[str, str]] | None = None, **changes: Any
) -> Parts:
    words = ["flood", "fire", "house", "cover", "claim", "agent", "policy", "rain", "roof", "pays"]
    tmp_path.mkdir(exist_ok=True)
    log = tmp_path / "log.jsonl"
    made = [
        {"query": f"{words[i % 10]} {i}", "passage": " ".join([words[i % 10]] * 30) + f" {i}"} for i in range(COUNT)
    ]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows or made))
    read = partial(PairsDataModule, pairs=log, passages_are_public=public, sampling="poisson")
    return parts(tmp_path, make_datamodule=read, make_module=partial(generator, seed=0), **changes)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[OwnLog, Parts]]:
    """What the pipeline was begun with; it trains nothing."""
    found: list[tuple[OwnLog, Parts]] = []
    monkeypatch.setattr(Pipeline, "run", lambda self, parts: found.append((self, parts)) or {})
    return found


def test_a_log_is_checked_split_and_given_sizes_that_fit_it(
    tmp_path: Path, begun: list[tuple[OwnLog, Parts]], capsys: pytest.CaptureFixture[str]
) -> None:
    own_log().run(log_parts(tmp_path))
    assert "check_data.private.md" in (shown := capsys.readouterr().out) and "## Next" not in shown
    own_log().run(log_parts(tmp_path, resume=True))
    with pytest.raises(ResumeError, match=r"resume=true"):
        own_log().run(log_parts(tmp_path))
    (first, one), (second, other) = begun
    data = one.read_data()
    train, test = (len(data.collection.split(name)) for name in ("train", "test"))
    assert 0.6 * COUNT < train < COUNT and test > 0
    assert first.generator_batch == train // 4 and first.retriever_batch == 16
    assert first.generator.keywords["max_passage_length"] == 16, "longest, since the passages are longer"
    assert first.retriever.keywords["max_passage_length"] == 16
    assert data.collection == other.read_data().collection and second.generator_batch == first.generator_batch
    assert (tmp_path / "run" / "check" / "check_data.private.md").stat().st_mode & 0o077 == 0
    assert (tmp_path / "run" / "split").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("unit", "named"), [("query", True), ("user", False)])
def test_a_log_of_users_has_batches_of_its_unit_and_is_told_that_a_query_is_not_a_person(
    tmp_path: Path, begun: list[tuple[OwnLog, Parts]], capsys: pytest.CaptureFixture[str], unit: Any, named: bool
) -> None:
    rows = [{"query": f"q {i}", "passage": f"p {i % 50}", "user_id": f"u{i % 40}"} for i in range(COUNT)]
    own_log().run(log_parts(tmp_path, rows=rows, privacy=partial(DPSGD, eps=3.0, unit=unit)))
    assert ("privacy.unit=user" in capsys.readouterr().out) == named
    [(task, given)] = begun
    data = given.read_data()
    data.use_unit(unit)
    assert task.generator_batch == data.n_units // 4 and (unit == "query" or task.generator_batch < 10)


def test_a_run_that_was_ended_between_split_and_report_writes_the_report_when_it_goes_on(
    tmp_path: Path, begun: list[tuple[OwnLog, Parts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as killed:
        killed.setattr(check_data, "write_whole", ended)
        with pytest.raises(KeyboardInterrupt):
            own_log().run(log_parts(tmp_path))
    assert (run / "split").is_dir() and not begun
    own_log().run(log_parts(tmp_path, resume=True))
    report = json.loads((run / "check" / "check_data.private.json").read_text(encoding="utf-8"))
    assert report["split"]["written"] == str(run / "split") and len(begun) == 1


def test_a_run_does_not_go_on_with_another_log(tmp_path: Path, begun: list[tuple[OwnLog, Parts]]) -> None:
    own_log().run(log_parts(tmp_path))
    rows = [{"query": f"other {i}", "passage": " ".join(["rain"] * 30) + f" {i}"} for i in range(COUNT)]
    with pytest.raises(ResumeError, match="resume=true"):
        own_log().run(log_parts(tmp_path, rows=rows, resume=True))
    assert len(begun) == 1


def test_a_folder_of_others_stays(tmp_path: Path) -> None:
    other = log_parts(tmp_path)
    kept = other.run_dir / "split" / "mine.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"hydra\.run\.dir"):
        own_log().run(replace(other, resume=True))
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "by_rule"),
    [
        ({"longest": 128}, {"task.generator_batch", "the length of passages"}),
        ({"longest": 16}, {"task.generator_batch"}),
        ({"longest": 16, "generator_batch": 8}, set()),
    ],
)
def test_a_card_calls_by_rule_what_a_rule_chose_and_declares_nothing_in_the_users_name(
    tmp_path: Path, begun: list[tuple[OwnLog, Parts]], given: dict[str, Any], by_rule: set[str]
) -> None:
    own_log(**given, tuning_note="My note.").run(log_parts(tmp_path))
    [(task, _)] = begun
    tuning = tuning_facts({"data": task.tuning_data, "note": task.tuning_note})
    assert tuning["data"] == "unknown" and not tuning["accounted"] and "My note." in tuning["text"]
    named = {"task.generator_batch", "task.retriever_batch", "the length of passages"}
    assert {one for one in named if one in tuning["text"]} == by_rule
    own_log(**given, tuning_data="none").run(log_parts(tmp_path, resume=True))
    assert tuning_facts({"data": begun[1][0].tuning_data})["accounted"]  # it is the user's word


def test_the_default_data_are_no_log_of_ones_own(tmp_path: Path, begun: list[tuple[OwnLog, Parts]]) -> None:
    given = log_parts(tmp_path)
    with pytest.raises(ConfigurationError, match=r"datamodule\.pairs"):
        own_log().run(replace(given, make_datamodule=InsuranceQADataModule))
    assert not begun


def test_a_log_that_is_split_stays_as_it_is(tmp_path: Path, begun: list[tuple[OwnLog, Parts]]) -> None:
    own_log(passage_length=24).run(parts(tmp_path, make_module=partial(generator, seed=0)))
    assert not (tmp_path / "run" / "split").exists()
    assert begun[0][0].generator.keywords["max_passage_length"] == 24


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"public": False}, ConfigurationError, "passages_are_public"),
        ({"privacy": partial(DPSGD, eps=3, neighbours="add_or_remove")}, ConfigurationError, r"privacy\.neighbours"),
        ({"rows": [{"query": "", "passage": "b"}]}, DataError, r"check_data\.private"),
        ({"rows": [{"query": "a", "passage": "b", "split": split} for split in ("train", "dev")]}, DataError, "test"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_trained(
    tmp_path: Path, begun: list[tuple[OwnLog, Parts]], changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        own_log().run(log_parts(tmp_path, **changes))
    assert not begun
    own_log().run(log_parts(tmp_path))  # the folder is free for a corrected log
    assert len(begun) == 1
