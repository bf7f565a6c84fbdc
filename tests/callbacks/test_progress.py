"""What a run says of its own speed, and where it says it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit

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


def _recording(kind: type[Any], seen: list[tuple[int, int | None]]) -> Any:
    """A bar of this kind that notes what it shows after each batch."""

    class Recording(kind):  # type: ignore[misc]
        def on_train_batch_end(self, *given: Any) -> None:
            super().on_train_batch_end(*given)
            if kind is TQDMProgressBar:
                seen.append((self.train_progress_bar.n, self.train_progress_bar.total))
            else:
                task = self.progress.tasks[self.train_progress_bar_id]
                seen.append((int(task.completed), task.total))

    return Recording()


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("private", [True, False], ids=["add_or_remove", "zero_out"])
def test_lightnings_bar_counts_logical_steps_and_no_physical_batches(
    kind: type[Any], private: bool, tmp_path: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    settings = {"neighbours": "add_or_remove", "delta": 1e-5} if private else {}
    data = Numbers(sampling="poisson", expected_batch_size=50, sample_rate=0.25, physical_batch_size=16)
    module = Regression(privacy=dp(tmp_path, noise_multiplier=8.0, **settings))
    fit(tmp_path / "run", module, data, steps=6, extra=[_recording(kind, seen)], enable_progress_bar=True)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4), (1, 2), (2, 2)], "a rate of a quarter: four steps to a pass"


def test_a_bar_goes_on_where_a_run_was_interrupted(tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    data: dict[str, Any] = {"sampling": "poisson", "expected_batch_size": 50, "sample_rate": 0.25}
    module = lambda: Regression(privacy=dp(tmp_path, noise_multiplier=8.0))  # noqa: E731
    with pytest.raises(Killed):
        fit(tmp_path / "run", module(), Numbers(**data), steps=6, extra=[KillAt(3)])
    bar = _recording(TQDMProgressBar, seen)
    fit(tmp_path / "run", module(), Numbers(**data), steps=6, resume=True, extra=[bar], enable_progress_bar=True)
    # Lightning starts no new pass there, so that its bar knows the length of the next one alone.
    assert [done for done, _ in seen] == [3, 4, 1, 2] and seen[2:] == [(1, 2), (2, 2)]
