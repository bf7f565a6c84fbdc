"""What a progress line says of the remaining time."""

from __future__ import annotations

import re

import pytest

from lit_dpret import progress
from lit_dpret.progress import ProgressLine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def remaining(shown: str) -> list[str | None]:
    return [found[1] if (found := re.search(r"ETA (\S+)", line)) else None for line in shown.splitlines()]


def test_a_first_step_with_all_the_checks_is_no_measure_of_the_others(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ProgressLine("training", every=0.0, begun=0)
    for done, second in ((1, 245), (2, 255), (3, 265), (60, 835)):
        clock[0] = second
        line(done, 60)
    assert remaining(capsys.readouterr().err) == [None, "9:40", "9:30", None]


def test_the_time_before_the_first_call_counts_where_nobody_said_how_much_was_done(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ProgressLine("encoding", every=0.0)
    for done, second in ((0, 100), (10, 110), (20, 120), (40, 140)):
        clock[0] = second
        line(done, 40)
    assert remaining(capsys.readouterr().err) == [None, None, "0:20", None]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_what_has_begun_before_any_of_it_is_done(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    with ProgressLine("encoding") as line:
        assert ("encoding" in capsys.readouterr().err) is terminal
        line(1, 1)
    assert capsys.readouterr().err.endswith("0:00\n")
