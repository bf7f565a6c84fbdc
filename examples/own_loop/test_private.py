"""The loss is put to the test by `assert_private`, which brings a step of its own."""

from __future__ import annotations

from typing import Any

import torch
from train import Regression

from lit_dpret.privacy.modes import DPSGD


def test_the_regression_is_private(assert_private: Any) -> None:
    coins = torch.Generator().manual_seed(0)
    rows = {"x": torch.randn(6, 8, generator=coins), "y": torch.randn(6, generator=coins)}
    module = Regression(DPSGD(eps=3))
    assert_private(module.layer, rows, eps=1.0, delta=1e-5, per_row_loss=module.per_row_loss)
