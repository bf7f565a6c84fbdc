"""The second task: a classifier on frozen embeddings learns, repeats itself and leaves the encoder alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.errors import DataError
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


@pytest.mark.costly
def test_it_learns_what_the_embeddings_hold() -> None:
    result = train(encoder(), epochs=15)
    assert result.scores.accuracy > 0.9 and result.losses[-1] < 0.5 * result.losses[0]
    assert int(result.confusion.sum()) == 30
    assert result.examples[:6] == [25, 50, 60, 85, 110, 120], "every image once an epoch"
    assert Classifier() == Classifier(learning_rate=1e-2, batch_size=400, epochs=10, hidden=(64, 32)), "the paper's"


@pytest.mark.costly
def test_a_seed_repeats_the_result_and_leaves_the_encoder_and_the_global_random_state_alone() -> None:
    net = encoder().train()
    before, state = [parameter.detach().clone() for parameter in net.parameters()], torch.get_rng_state()
    first, again, other = train(net), train(net), train(net, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.losses == again.losses != other.losses
    assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    assert net.training and all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.costly
def test_labels_that_do_not_fit_and_a_diverged_encoder_are_refused() -> None:
    for change in ({"classes": 2}, {"train": (split(60, seed=0)[0], torch.zeros(3).long())}):
        with pytest.raises(DataError, match="one label each"):
            train(encoder(), **change)
    net = encoder()
    nn.init.constant_(net[1].weight, float("inf"))  # type: ignore[index, arg-type]
    with pytest.raises(DataError, match="diverged"):
        train(net)
