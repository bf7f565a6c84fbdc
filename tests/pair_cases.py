"""One of each loss over pairs, with its row loss written out one exponential at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lit_dpret.losses import (
    DeclaredPairLoss,
    KernelPairLoss,
    NullMassSoftmaxPairLoss,
    PairwiseLoss,
    SigmoidPairLoss,
    SoftmaxPairLoss,
    SpreadoutPairLoss,
    SymmetricSoftmaxPairLoss,
)

Table = list[list[float]]


def hinge(table: Tensor) -> Tensor:
    gaps = (0.2 + table - table.diagonal().unsqueeze(1)).relu()
    return (gaps.sum(1) - gaps.diagonal()) / 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw numbers in [-1, 1]."""
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


LOSSES: dict[str, PairwiseLoss] = {
    "softmax": SoftmaxPairLoss(temperature=1.0),
    "softmax, cool": SoftmaxPairLoss(temperature=0.2),
    "softmax of dot": SoftmaxPairLoss(temperature=1.0, similarity="dot", radius=1.2),
    "symmetric": SymmetricSoftmaxPairLoss(temperature=0.7),
    "null mass": NullMassSoftmaxPairLoss(temperature=0.3, n0=4),
    "null mass, small": NullMassSoftmaxPairLoss(temperature=1.0, n0=2, negative_weight=10.0),
    "sigmoid": SigmoidPairLoss(temperature=0.5, bias=-1.0, n0=4),
    "sigmoid of any dot": SigmoidPairLoss(temperature=0.5, similarity="dot", n0=4, negative_weight=2.0),
    "kernel": KernelPairLoss(temperature=0.3, n0=4, negative_weight=0.5),
    "spreadout": SpreadoutPairLoss(n0=4),
    "spreadout, realised": SpreadoutPairLoss(normaliser="realised", similarity="dot", radius=1.1),
}
DECLARED = DeclaredPairLoss(
    row_loss=hinge,
    g1=lambda n, low, high: 2 * (n - 1) / 3,
    g2=lambda n, low, high: (n - 1) / 3,
    l=lambda n, low, high: 1 / 3,
)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _softmax(z: Table, i: int, rest: float = 0.0) -> float:
    return math.log(sum(math.exp(x) for x in z[i]) + rest) - z[i][i]


def _by_hand(name: str, s: Table, i: int) -> float:
    loss = LOSSES[name]
    t = getattr(loss, "temperature", 1.0)
    z = [[x / t for x in row] for row in s]
    others = [j for j in range(len(s)) if j != i]
    if name.startswith("softmax"):
        return _softmax(z, i)
    if name == "symmetric":
        return (_softmax(z, i) + _softmax([list(column) for column in zip(*z, strict=True)], i)) / 2
    if name == "null mass":
        return _softmax(z, i, rest=4 * math.exp(1 / 0.3))
    if name == "null mass, small":
        return _softmax(z, i, rest=2 / 10 * math.exp(1))
    if name == "sigmoid":
        return -math.log(_sigmoid(z[i][i] - 1)) - sum(math.log(_sigmoid(1 - z[i][j])) for j in others) / 3
    if name == "sigmoid of any dot":
        return -math.log(_sigmoid(z[i][i])) - 2 * sum(math.log(_sigmoid(-z[i][j])) for j in others) / 3
    if name == "kernel":
        return -z[i][i] + 0.5 / 4 * sum(math.exp((s[i][j] - 1) / 0.3) for j in others)
    if name == "spreadout":
        return sum(s[i][j] ** 2 for j in others) / 3
    return sum(s[i][j] ** 2 for j in others) / max(len(others), 1)


def by_hand(name: str) -> Callable[[Table], list[float]]:
    """Return a function that computes all row losses of the loss of that name."""
    return lambda s: [_by_hand(name, s, i) for i in range(len(s))]
