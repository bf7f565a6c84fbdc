"""Random numbers that user code draws by a seed of its own: anyone can repeat them, and the rows share them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from own_modules import Classifier, fit, made, row_loss
from torch import Tensor, nn
from torch.utils.data import default_collate

from lit_dpret.errors import UnsupportedModelError


class Noisy(Classifier):
    """Adds noise to its inputs, as a denoising model does."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5))
        self.coins = torch.Generator().manual_seed(42)

    def noised(self, batch: Any, coins: torch.Generator | None) -> Tensor:
        x, y = batch
        return row_loss(self, (x + torch.randn(x.shape, generator=coins), y))


def by_a_generator_of_the_module(model: Any, batch: Any) -> Tensor:
    return model.noised(batch, model.coins)  # type: ignore[no-any-return]


def by_a_new_generator(model: Any, batch: Any) -> Tensor:
    return model.noised(batch, torch.Generator().manual_seed(42))  # type: ignore[no-any-return]


def after_a_seed(model: Any, batch: Any) -> Tensor:
    torch.manual_seed(0)
    return row_loss(model, batch)


def after_a_seed_for_itself(model: Any, batch: Any) -> Tensor:
    with torch.random.fork_rng():
        L.seed_everything(7, verbose=False)
        return row_loss(model, batch)


@pytest.mark.parametrize(
    "loss", [by_a_generator_of_the_module, by_a_new_generator, after_a_seed, after_a_seed_for_itself]
)
@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_a_loss_that_draws_by_a_seed_of_its_own_is_refused(loss: Any, engine: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="global generator"):
        fit(tmp_path, made(Noisy(), per_row_loss=loss, engine=engine), max_steps=1)


@pytest.mark.parametrize(
    "coins", [torch.Generator().manual_seed(42), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]
)
@pytest.mark.parametrize("held", ["by the module", "beside it"])
def test_a_generator_that_goes_on_from_batch_to_batch_is_refused(coins: Any, held: str, tmp_path: Path) -> None:
    def flipped(model: Any, batch: Any) -> Tensor:
        own = coins if held == "beside it" else model.coins
        number = torch.rand((), generator=own).item() if isinstance(own, torch.Generator) else own.uniform(0, 1)
        return row_loss(model, batch) * (1 if number < 0.5 else 2)

    module = Noisy()
    module.coins = coins
    with pytest.raises(UnsupportedModelError, match="from batch to batch"):
        fit(tmp_path, made(module, per_row_loss=flipped), max_steps=1)


def test_a_collation_that_draws_by_a_seed_of_its_own_is_refused(tmp_path: Path) -> None:
    def masked(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(42)) > 0.2), y

    with pytest.raises(UnsupportedModelError, match="global generator"):
        fit(tmp_path, made(collate_fn=masked), max_steps=1)


def test_a_projection_by_a_seed_of_its_own_is_the_same_for_all_rows(tmp_path: Path) -> None:
    def projected(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return row_loss(model, (x @ torch.randn(4, 4, generator=torch.Generator().manual_seed(42)), y))

    fit(tmp_path, made(per_row_loss=projected), max_steps=1)


def test_numbers_of_the_global_generator_are_drawn_for_each_row(tmp_path: Path) -> None:
    fit(tmp_path, made(Noisy(), per_row_loss=lambda model, batch: model.noised(batch, None)), max_steps=1)
