"""A run that a private row may have ended: no noise covers that it ended, or when."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from stand_ins import Numbers, Regression, StopAfter, dp, fit, records
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import DataError
from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.ledger.judgement import owed_releases

STEPS = 6


class Fragile(Regression):
    """Fails from the third step on."""

    where = ""
    error: BaseException = RuntimeError("row 7")

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        if self.where == "collate" and self._trainer is not None and self.trainer.global_step >= 2:
            raise self.error
        return super().collate_rows(rows)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if self.where == "loss" and self.trainer.global_step >= 2 and torch.is_grad_enabled():
            raise self.error
        return super().per_row_loss(rows)


class _Items:
    def __init__(self, items: Any, error: BaseException, module: Any) -> None:
        self.items, self.error, self.module = items, error, module

    def __getitem__(self, draw: Any) -> Any:
        if self.module.trainer.global_step >= 2:
            raise self.error
        return self.items[draw]

    def __len__(self) -> int:
        return len(self.items)


class Unreadable(Numbers):
    """Rows that cannot be read later on."""

    module: Any
    error: BaseException

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        items = _Items(loader.dataset, self.error, self.module)
        return DataLoader(items, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)


def card(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "privacy_card.json").read_text(encoding="utf-8")))


def ended(folder: Path, where: str, error: BaseException, *, extra: Any = ()) -> None:
    module = Fragile(privacy=dp(folder.parent))
    module.where, module.error, data = where, error, Numbers()
    if where == "dataset":
        data = Unreadable()
        data.module, data.error = module, error
    with pytest.raises(type(error)):
        fit(folder, module, data, steps=STEPS, extra=[PrivacyCard(), *extra])


class Worker(Numbers):
    """Rows that a worker reads, which dies, or takes longer than it may, at one of them."""

    how = ""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        items = _Deadly(loader.dataset, self.how)
        return DataLoader(
            items, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn, num_workers=1, timeout=1,
            multiprocessing_context="fork",
        )  # fmt: skip


class _Deadly:
    def __init__(self, items: Any, how: str) -> None:
        self.items, self.how = items, how

    def __getitem__(self, draw: Any) -> Any:
        if draw.step >= 2 and get_worker_info() is not None:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exits":
                os._exit(1)
            time.sleep(10)
        return self.items[draw]

    def __len__(self) -> int:
        return len(self.items)


@pytest.mark.parametrize("how", ["killed", "exits", "slow"])
def test_so_is_the_end_of_a_worker_that_read_a_private_row(how: str, tmp_path: Path) -> None:
    data = Worker()
    data.how = how
    with pytest.raises((RuntimeError, OSError)):
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), data, steps=STEPS, extra=[PrivacyCard()])
    assert records(tmp_path / "run")[-1]["reason"] == "failed"
    if (tmp_path / "run" / "privacy_card.json").exists():  # news of a dead worker may come while it is written
        assert card(tmp_path / "run")["claim"]["guarantee"] == "not_proved"


class LeavesOut(Fragile):
    """Ends the epoch at a batch, as Lightning's hook allows."""

    def on_train_batch_start(self, batch: Any, index: int) -> Any:
        return -1 if batch.step == 2 else None


class StopsIterating(Fragile):
    """Raises what Lightning drops, and the batch with it."""

    where, error = "loss", StopIteration()


@pytest.mark.parametrize("module", [LeavesOut, StopsIterating])
def test_a_batch_that_lightning_passes_over_ends_the_run_and_its_claim(module: type[Any], tmp_path: Path) -> None:
    data = Numbers(physical_batch_size=4)
    with pytest.raises(RuntimeError) if module is StopsIterating else nullcontext():
        fit(tmp_path / "run", module(privacy=dp(tmp_path)), data, steps=STEPS, extra=[PrivacyCard()])
    assert records(tmp_path / "run")[-1]["reason"] == "failed"
    assert card(tmp_path / "run")["claim"]["guarantee"] == "not_proved"


class Panic(BaseException):
    """Derives from no Exception, as what libraries in Rust raise."""


BY_A_ROW = [
    ("loss", Panic("row 7")),
    ("collate", Panic("row 7")),
    ("loss", RuntimeError("row 7")),
    ("loss", MemoryError()),
    ("collate", DataError("row 7 has no text")),
    ("dataset", OSError(errno.ENOENT, "7.png")),
    ("dataset", OSError("cannot identify image file 7.png")),
]


@pytest.mark.parametrize(("where", "error"), BY_A_ROW)
def test_an_end_that_a_private_row_may_have_caused_is_one_word_and_claims_nothing(
    where: str, error: BaseException, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ended(folder, where, error)
    end = records(folder)[-1]
    assert (end["kind"], end["reason"]) == ("end", "failed")
    written = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.json*"))
    assert type(error).__name__ not in written and "row 7" not in written and "7.png" not in written
    found = card(folder)
    assert found["claim"]["guarantee"] == "not_proved" and found["claim"]["epsilon"] is None
    assert "may depend on what it had released" not in found["claim"]["statement"]
    assert not verify_chain(folder).failed

    fit(folder, Fragile(privacy=dp(tmp_path)), Numbers(), steps=STEPS, resume=True, extra=[PrivacyCard()])
    found = card(folder)
    assert found["claim"]["guarantee"] == "dp" and found["claim"]["epsilon"] > 0
    broken = [one for one in found["assumptions"] if one["holds"] is False]
    assert [one["consequence"] for one in broken] == ["weights_alone"]
    assert any("the ledger" in banner for banner in found["banners"])
    assert not verify_chain(folder).failed


@pytest.mark.parametrize("kind", ["person", "callback", "disk"])
def test_an_end_for_another_reason_keeps_the_claim_of_all_planned_steps(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if kind == "callback":
        with pytest.raises(RuntimeError, match="stop"):
            fit(folder, Regression(privacy=dp(tmp_path)), steps=STEPS, extra=[PrivacyCard(), StopAfter(2)])
    elif kind == "person":

        def interrupt(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if batch.last and batch.step == 1:
                raise KeyboardInterrupt

        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(folder, Regression(privacy=dp(tmp_path)), steps=STEPS,
                extra=[PrivacyCard(), LambdaCallback(on_train_batch_end=interrupt)])  # fmt: skip
    else:
        ended(folder, "dataset", OSError(errno.ENOSPC, "full"))
        assert records(folder)[-1]["kind"] != "end"
        return
    assert records(folder)[-1]["reason"] != "failed"
    claim = card(folder)["claim"]
    assert claim["guarantee"] == "dp" and "may depend on what it had released" in claim["statement"]


def test_the_releases_of_such_a_run_are_counted_as_any_others(tmp_path: Path) -> None:
    ended(tmp_path / "run", "loss", RuntimeError("row 7"))
    owed = owed_releases(records(tmp_path / "run"))
    assert owed and not any(isinstance(one, NonPrivateRelease) for one in owed)
