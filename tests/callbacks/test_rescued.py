"""A refusal or an error after steps were paid for leaves their results in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from own_modules import card_in, data, fit, made
from stand_ins import StopAfter, Stopped

from lit_dpret import PrivacyAccountant
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger


def intents(folder: Path) -> int:
    return sum(record["kind"] == "intent" for record in PrivacyLedger.read(folder / "privacy_ledger.jsonl").records)


class History(L.Callback):
    """Keeps a number of each step, as progress callbacks do, and puts it into checkpoints."""

    def __init__(self, when: str) -> None:
        self.history: list[int] = []
        setattr(self, when, self._note)

    def _note(self, trainer: Any, *_: Any) -> None:
        self.history.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.history)}


def test_what_no_checkpoint_may_hold_is_refused_after_one_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"History\.history") as refused:
        fit(tmp_path, made(), callbacks=[History("on_train_batch_end")])
    assert refused.value.trap == "T25" and intents(tmp_path) == 1


class Fails(L.Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 6:
            raise ValueError("The picture could not be drawn.")


class FailsToSave(L.Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if trainer.global_step == 6:
            raise RuntimeError("The upload failed.")


class FailsInTheLastBatch(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise ValueError("The picture could not be drawn.")


@pytest.mark.parametrize(
    "callback", [History("on_train_epoch_end"), Fails(), FailsToSave(), FailsInTheLastBatch()],
    ids=["refused", "error", "save", "batch"],
)  # fmt: skip
def test_a_run_whose_last_hook_fails_keeps_its_steps_and_can_be_finished(callback: Any, tmp_path: Path) -> None:
    given = {"expected_batch_size": None, "sample_rate": 1 / 6}
    with pytest.raises((ConfigurationError, ValueError, RuntimeError)):
        fit(tmp_path, made(), data(**given), callbacks=[callback])
    (last,) = tmp_path.rglob("last.ckpt")
    assert not any("History" in key for key in torch.load(last, weights_only=False)["callbacks"])
    fit(tmp_path, made(), data(**given), ckpt_path=last, callbacks=[PrivacyAccountant(resume=True)])
    assert intents(tmp_path) == 6 and card_in(tmp_path)["claim"]["guarantee"] == "dp"
    assert (tmp_path / "model" / "weights.pt").is_file()


def test_a_resume_without_its_checkpoint_names_it_wherever_it_lies_in_the_run_folder(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2)
    with pytest.raises(Stopped):
        fit(tmp_path, made(), callbacks=[kept, StopAfter(3)])
    with pytest.raises(ResumeError, match=r"kept.*ckpt"):
        fit(tmp_path, made(), callbacks=[PrivacyAccountant(resume=True)])
    assert intents(tmp_path) == 3
