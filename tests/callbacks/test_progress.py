"""What a run says of its own speed, and where it says it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins import Numbers, Regression, dp, fit
from tiny_generator import generator

from lit_dpret.callbacks.progress import ProgressLine, Throughput
from lit_dpret.costs.work import ACCELERATORS, work_of
from lit_dpret.errors import ConfigurationError


def test_times_go_to_the_terminal_and_into_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ticks = count()
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), Numbers(), steps=4,
        extra=[Throughput(every=2, clock=lambda: 2.0 * next(ticks))])  # fmt: skip
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("speed: ")]
    assert lines == ["speed: 1 s a step", "speed: 1 s a step"]
    assert not [f for f in (tmp_path / "run").rglob("*") if f.is_file() and b"speed/" in f.read_bytes()]


def test_rates_follow_from_the_plan_and_the_lengths_and_not_from_the_batch() -> None:
    module = generator()
    plan = SimpleNamespace(denominator=50.0, steps=10)
    trainer = SimpleNamespace(callbacks=[SimpleNamespace(counts_releases=True, plan=plan)], world_size=2, global_step=4)
    found = Throughput(device="h100-80gb").rates(trainer, module, seconds=0.5)
    assert found["tokens_per_second"] == 50 * (12 + 8) / 0.5 and found["seconds_left"] == 3.0
    done = work_of(module.outlined).model_flops * 50 / 0.5
    assert found["model_flop_utilisation"] == pytest.approx(done / (2 * ACCELERATORS["h100-80gb"].bf16_flops))
    assert "model_flop_utilisation" not in Throughput().rates(trainer, module, seconds=0.5), "no peak, no share"


def test_a_line_that_ended_is_printed_once_and_the_first_step_tells_how_long_the_rest_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr("lit_dpret.progress.time.monotonic", lambda: 60.0 * next(ticks))
    line = ProgressLine("training", begun=4)
    for done in (5, 6, 6):
        line(done, 6)
    assert capsys.readouterr().err.splitlines() == ["training:  83% 5/6  1:00 ETA 1:00", "training: 100% 6/6  2:00"]
    for done in (1, 2):
        line(done, 2)
    assert len(capsys.readouterr().err.splitlines()) == 2, "of the next round too"


def test_a_setting_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"callbacks\.throughput\.every=0"):
        Throughput(every=0)
    with pytest.raises(ConfigurationError, match=r"callbacks\.throughput\.device='abacus'"):
        Throughput(device="abacus")
