"""The second task: a classifier on frozen embeddings learns, repeats itself and leaves the encoder alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError
from reproduction.second_task import Classifier, SecondTaskResult, train_second_task

CLASSES = 3


def split(count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Images of one pixel row whose brightest pixel is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    images = torch.randint(0, 100, (count, 1, 1, CLASSES), generator=generator)
    images[torch.arange(count), 0, 0, labels] += 150
    return images.to(torch.uint8), labels


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(CLASSES, 4))


def train(net: nn.Module, **settings: Any) -> SecondTaskResult:
    how = Classifier(**{"batch_size": 25, "epochs": settings.pop("epochs", 3)})
    data = {"train": split(60, seed=0), "test": split(30, seed=1), "classes": CLASSES}
    return train_second_task(net, how=how, **data | settings)


def test_it_learns_what_the_embeddings_hold() -> None:
    result = train(encoder(), epochs=15)
    assert result.scores.accuracy > 0.9 and result.losses[-1] < 0.5 * result.losses[0]
    assert int(result.confusion.sum()) == 30
    assert Classifier() == Classifier(learning_rate=1e-2, batch_size=400, epochs=10, hidden=(64, 32)), "the paper's"


def test_every_image_is_seen_once_an_epoch_and_counted() -> None:
    result = train(encoder())
    assert result.examples == [25, 50, 60, 85, 110, 120, 145, 170, 180] and len(result.losses) == 9


def test_the_encoder_keeps_its_weights_its_mode_and_no_gradient() -> None:
    net = encoder().train()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    train(net)
    assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    assert net.training and all(parameter.grad is None for parameter in net.parameters())


def test_a_seed_repeats_the_result_and_leaves_the_global_random_state_alone() -> None:
    net = encoder()
    state = torch.get_rng_state()
    first, again, other = train(net), train(net), train(net, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.losses == again.losses != other.losses


@pytest.mark.parametrize("change", [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}])
def test_a_setting_out_of_range_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"task.{next(iter(change))}"):
        Classifier(**change)


@pytest.mark.parametrize("change", [{"classes": 2}, {"train": (split(60, seed=0)[0], torch.zeros(3).long())}])
def test_labels_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a label each"):
        train(encoder(), **change)


def test_a_diverged_encoder_is_refused() -> None:
    net = encoder()
    nn.init.constant_(net[1].weight, float("inf"))  # type: ignore[index, arg-type]
    with pytest.raises(DataError, match="diverged"):
        train(net)
