"""`physical_batch_size=auto`: found before the first release, on rows that are nobody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from rank_runs import Server, told
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit, granted, records
from torch import Tensor

from lit_dpret.callbacks.physical_batch import largest_that_fits
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DeviceMemoryError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import NoPrivacy


class Growing(Regression):
    """Runs out of memory on more than ``room`` rows, and notes what it was tried on."""

    public_metrics = ("tried", "trained")  # declared, so that the tests can read them

    def __init__(self, *, room: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.room, self.tried, self.trained = room, [], []

    def longest_rows(self, count: int) -> dict[str, Tensor]:
        return {"inputs": torch.full((count, 4), 0.5), "target": torch.zeros(count)}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            nobodys = bool((rows["inputs"] == 0.5).all())
            (self.tried if nobodys else self.trained).append(len(rows["target"]))
            if len(rows["target"]) > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().per_row_loss(rows)


def auto(**settings: Any) -> Numbers:
    data = Numbers(**settings)
    data.finds_physical_batch_size = True
    return data


@pytest.mark.costly
def test_the_size_is_found_on_rows_of_nobody_before_the_first_release_and_written_into_the_plan(tmp_path: Path) -> None:
    module = Growing(room=11, privacy=dp(tmp_path))
    before = [p.detach().clone() for p in module.parameters()]
    seen: list[Any] = []
    real = PrivacyLedger.append

    def append(self: PrivacyLedger, kind: str, **facts: Any) -> Any:
        seen.append((kind, list(module.tried)))
        return real(self, kind, **facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivacyLedger, "append", append)
        fit(tmp_path / "run", module, auto(), steps=2)
    assert module.tried == [1, 2, 4, 8, 16] and max(module.trained) == 8
    assert seen[0] == ("plan", [1, 2, 4, 8, 16]), "all tries came before the ledger was begun"
    assert records(tmp_path / "run")[0]["plan"]["physical_batch_size"] == 8
    assert granted(tmp_path / "run") == [(0, 0), (0, 1)]
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.slow
def test_tries_change_neither_the_draws_nor_the_noise_nor_the_weights(tmp_path: Path) -> None:
    """A run that found 8 is the run that was told 8."""
    ends = []
    for name, data in (("told", Numbers(physical_batch_size=8)), ("found", auto())):
        torch.manual_seed(0)
        module = Growing(room=11, privacy=dp(tmp_path, noise_seed=1))
        fit(tmp_path / name, module, data, steps=2)
        ends.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.slow
def test_where_not_even_one_unit_fits_the_run_ends_before_there_is_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(DeviceMemoryError, match=r"auto: one unit of the longest rows.*nothing was released"):
        fit(tmp_path / "run", Growing(room=0, privacy=dp(tmp_path)), auto(), steps=2)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


@pytest.mark.costly
def test_where_attempts_do_not_fail_doubling_stops_while_there_is_room() -> None:
    """Ten bytes a row beside a hundred; 60 free: 2 rows took 20, and 4 would take more than half of what is left."""
    made: list[int] = []
    size = largest_that_fits(
        made.append, most=64, room=lambda: (100 + 10 * max(made, default=0), 60 - 10 * max(made, default=0))
    )
    assert (size, made) == (2, [1, 2])

    def attempt(size: int) -> None:
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):  # another failure is raised as it is
        largest_that_fits(attempt, most=4)


def test_what_cannot_be_tried_is_refused(tmp_path: Path) -> None:
    assert PairsDataModule(pairs="x", physical_batch_size="auto").finds_physical_batch_size
    assert not PairsDataModule(pairs="x", physical_batch_size=8).finds_physical_batch_size
    with pytest.raises(ConfigurationError, match="physical_batch_size='many'"):
        PairsDataModule(pairs="x", physical_batch_size="many")
    with pytest.raises(ConfigurationError, match=r"auto tries batches.*longest_rows"):
        fit(tmp_path / "a", Regression(privacy=dp(tmp_path)), auto(), steps=2)
    coupled = Growing(room=4, privacy=NoPrivacy())
    coupled.coupled_loss = True
    with pytest.raises(ConfigurationError, match="units of a physical batch are compared with each other"):
        fit(tmp_path / "b", coupled, auto(), steps=2)


FULL: dict[str, Any] = {"sampling": "full_batch", "expected_batch_size": 20}
UNKNOWN: dict[str, Any] = {"neighbours": "add_or_remove", "delta": 1e-3, "eps": 200.0, "noise_multiplier": 2.0}


@pytest.mark.slow
def test_a_private_number_of_units_does_not_bound_the_size_that_is_published(tmp_path: Path) -> None:
    sizes = []
    for units in (23, 24):
        fit(tmp_path / str(units), Growing(room=99, privacy=dp(tmp_path, **UNKNOWN)), auto(size=units, **FULL), steps=1)
        sizes.append(records(tmp_path / str(units))[0]["plan"]["physical_batch_size"])
    assert sizes[0] == sizes[1]


@pytest.mark.costly
def test_a_checkpoint_of_full_batches_does_not_tell_a_private_number_of_units(tmp_path: Path) -> None:
    told = []
    for units in (20, 60):
        data = Numbers(size=units, physical_batch_size=4, **FULL)
        fit(tmp_path / str(units), Regression(privacy=dp(tmp_path, **UNKNOWN)), data, steps=2)
        told.append(torch.load(tmp_path / str(units) / "checkpoints" / "last.ckpt", weights_only=True)["loops"])
    assert told[0] == told[1]
    resumed = Numbers(size=60, physical_batch_size=4, **FULL)
    runner = fit(tmp_path / "60", Regression(privacy=dp(tmp_path, **UNKNOWN)), resumed, steps=2, resume=True)
    assert runner.global_step == 2


# -- runs that go on with physical batches of another size than they began with ----------------


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
    found = {record["step"]: record["attempt"] for record in records(folder, "release")}
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


@pytest.mark.costly
def test_a_resume_that_fails_before_its_first_step_takes_nothing_from_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        go(folder, 8, "truncated_poisson", resume=False, kill_at=6)
    with pytest.raises(MemoryError):
        go(folder, 4, "truncated_poisson", resume=True, extra=[Fails()])
    go(folder, 2, "truncated_poisson", resume=True)
    assert released(folder) == list(range(STEPS))


@pytest.mark.costly
@pytest.mark.parametrize("sampling", ["truncated_poisson", pytest.param("poisson", marks=pytest.mark.slow)])
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
