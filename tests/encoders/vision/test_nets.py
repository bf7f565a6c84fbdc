"""The encoders: their sizes, their first weights, and that they treat each image alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_dpret.encoders.vision.nets import EmbeddingNet, ResNet18, UnitLength, embed
from lit_dpret.errors import ConfigurationError


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def pictures(n: int = 3, *, size: int = 32) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_the_embedding_net_has_the_layers_of_the_paper() -> None:
    net = EmbeddingNet()
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [8, 16, 32]
    assert {(layer.kernel_size, layer.stride) for layer in convolutions} == {((3, 3), (2, 2))}
    assert net.embedding.in_features == 512 and net.embedding.out_features == 8
    assert count(net) == (3 * 8 * 9 + 8) + (8 * 16 * 9 + 16) + (16 * 32 * 9 + 32) + (512 * 8 + 8) == 10_136


def test_convolutions_start_kaiming_normal_and_the_embedding_xavier_normal_with_zero_biases() -> None:
    torch.manual_seed(0)
    net = EmbeddingNet(channels=(32, 64, 64), dim=64)
    last = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)][-1]
    assert float(last.weight.detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)
    fan = net.embedding.in_features + net.embedding.out_features
    assert float(net.embedding.weight.detach().std()) == pytest.approx((2 / fan) ** 0.5, rel=0.03)
    assert all(float(p.detach().abs().max()) == 0 for name, p in net.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize(
    ("norm", "parameters"),
    # torchvision's resnet18: 11,689,512, of which 9,600 are scales and shifts of batch normalisation.
    [("group", 11_689_512), ("none", 11_689_512 - 9_600)],
)
def test_resnet18_has_as_many_parameters_as_the_original(norm: Any, parameters: int) -> None:
    assert count(ResNet18(dim=1000, norm=norm, stem="imagenet")) == parameters


@pytest.mark.parametrize("make", [EmbeddingNet, ResNet18, lambda: ResNet18(norm="group")])
def test_an_embedding_does_not_depend_on_the_other_images_nor_on_training_mode(make: Any) -> None:
    torch.manual_seed(0)
    net = make().double()
    batch = pictures().double()
    others = torch.cat([batch[:1], torch.rand_like(batch[1:])])
    with torch.no_grad():
        alone = net.train()(batch)[0]
        assert torch.allclose(alone, net(others)[0], atol=1e-10)
        assert torch.allclose(alone, net.eval()(batch)[0], atol=1e-10)


def test_unit_embeddings_have_length_one_and_zero_stays_zero() -> None:
    torch.manual_seed(0)
    assert torch.allclose(UnitLength(EmbeddingNet())(pictures()).norm(dim=1), torch.ones(3), atol=1e-5)
    assert torch.equal(UnitLength(nn.Identity())(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_embedding_in_parts_gives_the_same_as_at_once_and_restores_the_mode() -> None:
    torch.manual_seed(0)
    net = EmbeddingNet().train()
    whole = (pictures(7) * 127 + 128).to(torch.uint8)
    parts = embed(net, whole, batch_size=3)
    assert net.training and not parts.requires_grad
    assert torch.allclose(parts, embed(net, whole), atol=1e-5)
    assert torch.allclose(parts, net(whole.float() / 127.5 - 1).detach(), atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EmbeddingNet(dim=0), "dim=0"),
        (lambda: EmbeddingNet(channels=(8, 0)), r"channels=\(8, 0\)"),
        (lambda: ResNet18(norm="batch"), "norm='batch'.*mixes examples"),
        (lambda: ResNet18(stem="tall"), "stem='tall'"),
        (lambda: ResNet18(norm="group", groups=7), "groups=7"),
    ],
)
def test_a_net_that_cannot_be_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
