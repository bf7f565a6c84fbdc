"""Runs that train weights, and runs that start from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_ins import Numbers, Regression, dp, fit

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.errors import LitDpretError
from lit_dpret.privacy.modes import NoPrivacy


class Kept(Regression):
    """A regression that can be rebuilt from its own checkpoints, with a setting that a checkpoint may hold."""

    def __init__(self, *, privacy: Any, optimizer: Any = None, lr: float = 0.05) -> None:
        super().__init__(privacy=privacy, optimizer=optimizer, lr=lr)
        self.keep_settings({"lr": lr})


def numbers() -> Numbers:
    return Numbers(sampling="poisson")


def private(folder: Path, **settings: Any) -> Kept:
    return Kept(privacy=dp(folder, **{"noise_multiplier": 4.0} | settings))


def trained_by(mode: str, folder: Path, **settings: Any) -> Kept:
    """Return a module that was trained in ``folder`` under ``mode``, with its checkpoints and card there."""
    module = Kept(privacy=NoPrivacy()) if mode == "none" else private(folder.parent)
    fit(folder, module, numbers(), steps=4, extra=[PrivacyCard(run_dir=folder)], **settings)
    return module


def checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def begin(tmp_path: Path, module: Any, **settings: Any) -> None:
    fit(tmp_path / "second", module, numbers(), steps=2, **settings)


def refused(tmp_path: Path, module: Any, **settings: Any) -> LitDpretError:
    """Return the error that a private fit of ``module`` raises."""
    with pytest.raises(LitDpretError) as raised:
        begin(tmp_path, module, **settings)
    assert raised.value.trap == "T30", raised.value
    return raised.value


def the_same(module: Kept, folder: Path) -> Any:
    module.privacy = dp(folder, noise_multiplier=4.0)
    return module
