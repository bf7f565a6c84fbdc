"""Runs that go on with physical batches of another size than they began with."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from rank_runs import Server, told
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit

from lit_dpret.privacy.modes import NoPrivacy

# Four logical steps an epoch, and three epochs.
DATA: dict[str, Any] = {"size": 80, "expected_batch_size": 20}
STEPS = 12


class Epochs(Callback):
    """The epoch that Lightning counts in each logical step."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.seen[batch.step] = trainer.current_epoch


def go(folder: Path, size: int, sampling: str, *, resume: bool, kill_at: int | None = None, **given: Any) -> Epochs:
    epochs = Epochs()
    mode = dp(folder.parent, eps=50.0, noise_multiplier=2.0, accountant="pld")
    data = Numbers(**DATA, sampling=sampling, physical_batch_size=size)
    extra = [epochs, *given.pop("extra", []), *([] if kill_at is None else [KillAt(kill_at)])]
    settings: dict[str, Any] = {"max_steps": STEPS} | given
    runner = fit(folder, Regression(privacy=mode), data, resume=resume, extra=extra, **settings)
    assert runner.global_step == STEPS
    return epochs


def released(folder: Path) -> list[int]:
    """The steps that were released under the last attempt that made them, in order."""
    records = map(json.loads, (folder / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines())
    found = {r["step"]: r["attempt"] for r in records if r["kind"] == "release"}
    assert list(found.values()) == sorted(found.values())
    return sorted(found)


LENGTHS: list[dict[str, Any]] = [{"save_every": 1}, {"save_every": 2, "max_steps": -1, "max_epochs": 3}]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["truncated_poisson", "poisson"])
@pytest.mark.parametrize("length", LENGTHS, ids=["steps", "epochs"])
@pytest.mark.parametrize(("first", "second", "third"), [(8, 4, 8), (4, 16, 5), (8, 8, 8)])
def test_a_run_goes_on_with_physical_batches_of_any_size_and_after_a_second_crash_too(
    first: int, second: int, third: int, length: dict[str, Any], sampling: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for size, kill_at, resume in ((first, 6, False), (second, 9, True)):
        with pytest.raises(Killed):
            go(folder, size, sampling, resume=resume, kill_at=kill_at, **length)
    seen = go(folder, third, sampling, resume=True, **length).seen
    assert released(folder) == list(range(STEPS))
    assert seen == {step: step // 4 for step in range(min(seen), STEPS)}


class Fails(Callback):
    """Stands for memory that runs out before the first step."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        raise MemoryError("no room")


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (4, 2)])
def test_a_resume_that_fails_before_its_first_step_takes_nothing_from_the_next_one(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        go(folder, 8, "truncated_poisson", resume=False, kill_at=6)
    with pytest.raises(MemoryError):
        go(folder, sizes[0], "truncated_poisson", resume=True, extra=[Fails()])
    go(folder, sizes[1], "truncated_poisson", resume=True)
    assert released(folder) == list(range(STEPS))


@pytest.mark.parametrize("sampling", ["truncated_poisson", "poisson"])
def test_two_ranks_go_on_with_physical_batches_of_another_size(sampling: str, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for size, at in ((8, 5), (3, 9), (8, None)):
        doom = None if at is None else {"whose": -1, "at": at, "part": 0}
        mode = {"name": "dp_sgd", "accountant": "pld"}
        given = {"mode": mode, "steps": STEPS, "resume": size == 3 or at is None, "doom": doom}
        data = DATA | {"sampling": sampling, "physical_batch_size": size}
        assert server.run("fit", folder, data=data, **given) == ([0, 0] if doom is None else [-9, -9])
    assert told(folder, 0)["global_step"] == told(folder, 1)["global_step"] == STEPS
    assert told(folder, 0)["weights"] == told(folder, 1)["weights"]
    assert released(folder) == list(range(STEPS))


def test_a_run_without_a_claim_goes_on_with_physical_batches_of_another_size(tmp_path: Path) -> None:
    given = {"save_every": 1, "max_steps": STEPS}
    for size, extra in ((8, [KillAt(6)]), (4, [KillAt(9)]), (8, [])):
        runner = None
        with nullcontext() if not extra else pytest.raises(Killed):
            data = Numbers(**DATA, sampling="shuffle", physical_batch_size=size)
            module, resume = Regression(privacy=NoPrivacy()), size == 4 or not extra
            runner = fit(tmp_path / "run", module, data, resume=resume, extra=extra, **given)
    assert runner is not None and runner.global_step == STEPS
