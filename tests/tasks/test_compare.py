from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from tiny_tasks import no_parts

from lit_dpret.cli import with_task
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.trec_runs import write_run
from lit_dpret.tasks import Compare

QRELS = "".join(f"q{q} 0 a 1\n" for q in range(20))
GOOD = {f"q{q}": {"a": 2.0, "b": 1.0} for q in range(20)}
BAD = {f"q{q}": {"a": 0.5, "b": 1.0} for q in range(20)}


def system(folder: Path, run: dict[str, dict[str, float]], sets: tuple[str, ...] = ("",)) -> Path:
    for name in sets:
        write_run(folder / name / "run.trec", run)
        (folder / name / "qrels.trec").write_text(QRELS)
    return folder


def test_two_run_files_are_compared_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a.trec", GOOD)
    write_run(tmp_path / "b.trec", BAD)
    (tmp_path / "qrels.trec").write_text(QRELS)
    task = Compare(run_a=tmp_path / "a.trec", run_b=tmp_path / "b.trec", metrics=["mrr@10"], resamples=1000)
    assert task.run(no_parts(tmp_path / "out")) == {"a/mrr@10": 0.5}
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").glob("comparison.*")} == {0o600}
    assert found["cells"][0]["p_value"] == pytest.approx(1 / 1001) and found["cells"][0]["significant"]
    assert "+0.5000 \\[+0.5000, +0.5000\\]" in (tmp_path / "out" / "comparison.md").read_text()
    assert "MRR@10" in capsys.readouterr().out


def test_folders_are_compared_on_the_data_sets_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = system(tmp_path / "a", GOOD, ("scifact", "cqadupstack/unix", "fiqa"))
    b = system(tmp_path / "b", BAD, ("scifact", "cqadupstack/unix", "quora"))
    found = Compare(run_a=a, run_b=b, metrics=["mrr@10"], resamples=100).run(no_parts(tmp_path / "out"))
    assert found == {"cqadupstack/unix/mrr@10": 0.5, "scifact/mrr@10": 0.5}
    assert "not compared: fiqa (a only), quora (b only)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "shown"), [("log_split", "log_split"), ("mine", "log_split / mine"), (None, "log_split")]
)
def test_evaluations_are_compared_under_the_name_of_their_data(
    other: str | None, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = system(tmp_path / "a", GOOD), system(tmp_path / "b", BAD)
    (a / "evaluation.json").write_text(json.dumps({"data": "log_split", "data_sha256": "1" * 64}))
    (b / "evaluation.json").write_text(json.dumps({"data": other} if other else {}))
    found = Compare(run_a=a, run_b=b, metrics=["mrr@10"], resamples=10).run(no_parts(tmp_path / "out"))
    assert found == {f"{shown}/mrr@10": 0.5}
    assert shown in capsys.readouterr().out and f"| {shown} " in (tmp_path / "out" / "comparison.md").read_text()


@pytest.mark.parametrize(("owners", "cautioned"), [(("private", "private"), True), (("public", None), True),
                                                  (("public", "public"), False)])  # fmt: skip
def test_a_comparison_on_queries_that_are_not_public_says_that_no_epsilon_covers_it(
    owners: tuple[str | None, str | None], cautioned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = system(tmp_path / "a", GOOD), system(tmp_path / "b", BAD)
    for folder, owner in zip((a, b), owners, strict=True):
        facts = {"data": "log", "data_sha256": "1" * 64, "whose": owner}
        (folder / "evaluation.json").write_text(json.dumps(facts))
    Compare(run_a=a, run_b=b, metrics=["mrr@10"], resamples=10).run(no_parts(tmp_path / "out"))
    written = (tmp_path / "out" / "comparison.md").read_text()
    assert ["No epsilon" in text for text in (capsys.readouterr().out, written)] == [cautioned] * 2


def test_runs_that_were_judged_differently_are_refused(tmp_path: Path) -> None:
    a, b = system(tmp_path / "a", GOOD), system(tmp_path / "b", BAD)
    (b / "qrels.trec").write_text(QRELS.replace("q0 0 a 1", "q0 0 a 2"))
    with pytest.raises(DataError, match="differ"):
        Compare(run_a=a, run_b=b).run(no_parts(tmp_path / "out"))
    Compare(run_a=a, run_b=b, qrels=a / "qrels.trec", resamples=10).run(no_parts(tmp_path / "out"))


def test_runs_without_judgements_or_without_a_common_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        Compare(run_a=tmp_path / "nowhere", run_b=tmp_path / "nowhere").run(no_parts(tmp_path / "out"))
    write_run(tmp_path / "a.trec", GOOD)
    with pytest.raises(DataError, match=r"beside them.*task\.qrels"):
        Compare(run_a=tmp_path / "a.trec", run_b=tmp_path / "a.trec").run(no_parts(tmp_path / "out"))
    a, b = system(tmp_path / "a", GOOD, ("one", "two")), system(tmp_path / "b", BAD, ("three", "four"))
    with pytest.raises(DataError, match="no data set in common"):
        Compare(run_a=a, run_b=b).run(no_parts(tmp_path / "out"))
    with pytest.raises(ConfigurationError, match="one file of judgements, and the runs are of 2 data sets"):
        Compare(run_a=a, run_b=a, qrels=a / "one" / "qrels.trec").run(no_parts(tmp_path / "out"))


def test_the_short_form_takes_two_runs_with_any_characters_in_their_paths() -> None:
    assert with_task(["compare", "a b/it's", "c", "task.seed=1"]) == [
        "task=compare", "task.run_a='a b/it\\'s'", "task.run_b='c'", "task.seed=1",
    ]  # fmt: skip
    assert with_task(["compare", "task.run_a=x"]) == ["task=compare", "task.run_a=x"]
    for wrong in (["compare", "a"], ["compare", "a", "b", "c"]):
        with pytest.raises(ConfigurationError, match="compare takes RUN_A RUN_B"):
            with_task(wrong)
