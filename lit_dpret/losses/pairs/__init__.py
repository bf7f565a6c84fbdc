"""Losses on the matrix of all similarities in a batch, and their sensitivity to one record."""

from lit_dpret.losses.pairs.base import LossClaim, PairwiseLoss, Relation
from lit_dpret.losses.pairs.declared import (
    DeclaredPairLoss,
    WorstCase,
    check_declared_bounds,
    find_worst_case,
    movement_factors,
)
from lit_dpret.losses.pairs.separate import KernelPairLoss, SigmoidPairLoss, SpreadoutPairLoss
from lit_dpret.losses.pairs.softmax import NullMassSoftmaxPairLoss, SoftmaxPairLoss, SymmetricSoftmaxPairLoss

__all__ = [
    "DeclaredPairLoss",
    "KernelPairLoss",
    "LossClaim",
    "NullMassSoftmaxPairLoss",
    "PairwiseLoss",
    "Relation",
    "SigmoidPairLoss",
    "SoftmaxPairLoss",
    "SpreadoutPairLoss",
    "SymmetricSoftmaxPairLoss",
    "WorstCase",
    "check_declared_bounds",
    "find_worst_case",
    "movement_factors",
]
