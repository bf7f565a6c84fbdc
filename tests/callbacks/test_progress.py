"""What a run says of its own speed, and where it says it."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from stand_ins import Numbers, Regression, dp, fit

from lit_dpret.callbacks.progress import Throughput
from lit_dpret.errors import ConfigurationError


def test_times_go_to_the_terminal_and_into_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ticks = count()
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), Numbers(), steps=4,
        extra=[Throughput(every=2, clock=lambda: 2.0 * next(ticks))])  # fmt: skip
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("speed: ")]
    assert lines == ["speed: 1 s a step", "speed: 1 s a step"]
    assert not [f for f in (tmp_path / "run").rglob("*") if f.is_file() and b"speed/" in f.read_bytes()]


def test_a_setting_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"callbacks\.throughput\.every=0"):
        Throughput(every=0)
    with pytest.raises(ConfigurationError, match=r"callbacks\.throughput\.device='abacus'"):
        Throughput(device="abacus")
