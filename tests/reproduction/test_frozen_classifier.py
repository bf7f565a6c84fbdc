"""The second task: a classifier on frozen embeddings learns, repeats itself and leaves the encoder alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError
from reproduction.frozen_classifier import SecondTask, SecondTaskResult, train_second_task

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
    defaults: dict[str, Any] = {"classes": CLASSES, "batch_size": 25, "epochs": 3}
    return train_second_task(net, **{"train": split(60, seed=0), "test": split(30, seed=1), **defaults, **settings})


def test_the_layers_are_64_and_32_wide_and_the_last_follows_the_classes() -> None:
    widths = [layer.out_features for layer in SecondTask(dim=8, classes=20).modules() if isinstance(layer, nn.Linear)]
    assert widths == [64, 32, 20]
    assert SecondTask(dim=8, classes=5)(torch.zeros(2, 8)).shape == (2, 5)


def test_it_is_trained_by_adam_at_one_hundredth() -> None:
    optimizer = SecondTask(dim=8, classes=5).configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam) and optimizer.param_groups[0]["lr"] == 1e-2


def test_it_learns_what_the_embeddings_hold() -> None:
    result = train(encoder(), epochs=15)
    assert result.scores.accuracy > 0.9 and result.losses[-1] < 0.5 * result.losses[0]
    assert int(result.confusion.sum()) == 30


def test_every_image_is_seen_once_an_epoch_and_counted() -> None:
    result = train(encoder())
    assert result.examples == (25, 50, 60, 85, 110, 120, 145, 170, 180) and len(result.losses) == 9


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


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"epochs": 0}, ConfigurationError, "epochs=0"),
        ({"batch_size": 0}, ConfigurationError, "batch_size=0"),
        ({"classes": 2}, DataError, "between 0 and 1"),
        ({"train": (split(60, seed=0)[0], torch.zeros(3, dtype=torch.long))}, DataError, "a label each"),
        ({"learning_rate": 0.0}, ConfigurationError, r"learning_rate=0\.0"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(settings: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        train(encoder(), **settings)


def test_a_diverged_encoder_is_refused() -> None:
    net = encoder()
    nn.init.constant_(net[1].weight, float("inf"))  # type: ignore[index, arg-type]
    with pytest.raises(DataError, match="diverged"):
        train(net)
