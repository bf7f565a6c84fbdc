"""The two image encoders of paper 002: a small convolutional net, and ResNet18 without batch normalisation.

Both map a batch of images to a batch of embeddings row by row. Batch normalisation would make one
image's embedding depend on the others, so neither has it (paper 002, section 5). ResNet18 can have
group normalisation, which uses one image alone.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.encoders.vision.augment import as_input
from lit_dpret.errors import ConfigurationError
from lit_dpret.evaluation_mode import evaluation_mode

Norm = Literal["none", "group"]
Stem = Literal["cifar", "imagenet"]


class EmbeddingNet(nn.Module):
    """The paper's generic embedding net: three strided convolutions and one linear layer (appendix B.1).

    Convolutions are 3 x 3 with stride 2, ReLU and Kaiming-normal weights; the last layer has Xavier-normal weights;
    biases start at zero. The paper does not state the padding; here it is one pixel on every side, which reduces
    32 x 32 pixels to 4 x 4 (10,136 parameters). ``channels`` are the output channels of the convolutions;
    ``in_channels`` is 3 for colour and 1 for grey images; ``image_size`` is their width and height in pixels.
    """

    def __init__(
        self, *, dim: int = 8, channels: tuple[int, ...] = (8, 16, 32), in_channels: int = 3, image_size: int = 32
    ) -> None:
        super().__init__()
        if min(dim, in_channels, image_size, *channels) < 1:
            raise ConfigurationError(
                f"EmbeddingNet(dim={dim}, channels={tuple(channels)}, in_channels={in_channels}, "
                f"image_size={image_size}): every size must be at least 1."
            )
        layers: list[nn.Module] = []
        size = image_size
        for wide_in, wide_out in zip((in_channels, *channels), channels, strict=False):
            layers += [nn.Conv2d(wide_in, wide_out, 3, stride=2, padding=1), nn.ReLU()]
            size = math.ceil(size / 2)
        self.features = nn.Sequential(*layers)
        self.embedding = nn.Linear((channels[-1] if channels else in_channels) * size**2, dim)
        self.dim = dim
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings, shape (n, dim), of images of shape (n, in_channels, image_size, image_size)."""
        embeddings: Tensor = self.embedding(self.features(images).flatten(1))
        return embeddings


class ResNet18(nn.Module):
    """ResNet18 (He et al. 2016, table 1) without batch normalisation, ending in an embedding.

    Args:
        dim: Width of the embedding.
        norm: ``none`` omits normalisation, as the paper does; ``group`` replaces batch normalisation
            by group normalisation.
        groups: Groups of each group normalisation, which must divide 64.
        stem: ``cifar`` starts with one 3 x 3 convolution and keeps the resolution, as usual for images of
            32 x 32; ``imagenet`` starts with 7 x 7 at stride 2 and a pooling layer, as in the original.
        in_channels: 3 for colour, 1 for grey images.
    """

    def __init__(
        self, *, dim: int = 128, norm: Norm = "none", groups: int = 16, stem: Stem = "cifar", in_channels: int = 3
    ) -> None:
        super().__init__()
        if norm not in ("none", "group"):
            raise ConfigurationError(f"norm={norm!r} is not one of none, group: batch normalisation mixes examples.")
        if stem not in ("cifar", "imagenet"):
            raise ConfigurationError(f"stem={stem!r} is not one of cifar, imagenet.")
        if min(dim, in_channels, groups) < 1 or 64 % groups:
            raise ConfigurationError(
                f"ResNet18(dim={dim}, in_channels={in_channels}, groups={groups}): sizes must be at least 1, and "
                "groups must divide 64."
            )
        opening: list[nn.Module] = [
            _conv(in_channels, 64, size=3 if stem == "cifar" else 7, stride=1 if stem == "cifar" else 2)
        ]
        opening += [*_norm(norm, 64, groups), nn.ReLU()]
        if stem == "imagenet":
            opening.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*opening)
        blocks = []
        for wide_in, wide_out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
            blocks += [
                _Block(wide_in, wide_out, stride=stride, norm=norm, groups=groups),
                _Block(wide_out, wide_out, stride=1, norm=norm, groups=groups),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.embedding = nn.Linear(512, dim)
        self.dim = dim
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings, shape (n, dim), of images of shape (n, in_channels, height, width)."""
        embeddings: Tensor = self.embedding(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return embeddings


class _Block(nn.Module):
    """Two 3 x 3 convolutions with a residual connection."""

    def __init__(self, wide_in: int, wide_out: int, *, stride: int, norm: Norm, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(wide_in, wide_out, size=3, stride=stride),
            *_norm(norm, wide_out, groups),
            nn.ReLU(),
            _conv(wide_out, wide_out, size=3, stride=1),
            *_norm(norm, wide_out, groups),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or wide_in != wide_out:
            self.around = nn.Sequential(_conv(wide_in, wide_out, size=1, stride=stride), *_norm(norm, wide_out, groups))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.around(images))


def _conv(wide_in: int, wide_out: int, *, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(wide_in, wide_out, size, stride=stride, padding=size // 2, bias=False)


def _norm(norm: Norm, channels: int, groups: int) -> list[nn.Module]:
    return [nn.GroupNorm(groups, channels)] if norm == "group" else []


def initialise(net: nn.Module) -> None:
    """Initialise convolutions Kaiming-normal, linear layers Xavier-normal, biases zero (paper 002, appendix B.1)."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


class UnitLength(nn.Module):
    """An encoder, (n, ...) to (n, dim), whose embeddings have L2 norm 1; a zero embedding stays zero."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Return unit embeddings, shape (n, dim)."""
        return F.normalize(self.net(images), dim=1)


@torch.no_grad()
def embed(net: nn.Module, images: Tensor, *, batch_size: int = 512) -> Tensor:
    """Return the embeddings of images, on the CPU, (n, dim), without augmentation, in evaluation mode."""
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    with evaluation_mode(net):
        return torch.cat([net(as_input(part.to(device))).cpu() for part in torch.split(images, batch_size)])
