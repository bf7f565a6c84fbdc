"""Losses of a retriever: rank the right passage above the others.

`row_losses` holds losses on embeddings, one value per row. `pairs` holds losses on the table of all
similarities in a batch, with bounds on how much one record can change their gradient.
"""

from lit_dpret.losses.pairs.base import PairwiseLoss
from lit_dpret.losses.pairs.declared import DeclaredPairLoss, check_declared_bounds
from lit_dpret.losses.pairs.separate import KernelPairLoss, SigmoidPairLoss, SpreadoutPairLoss
from lit_dpret.losses.pairs.softmax import NullMassSoftmaxPairLoss, SoftmaxPairLoss, SymmetricSoftmaxPairLoss
from lit_dpret.losses.row_losses import (
    HardNegativeSoftmaxLoss,
    InBatchSoftmaxLoss,
    MarginMSELoss,
    PublicPoolSoftmaxLoss,
    false_negatives,
)

__all__ = [
    "DeclaredPairLoss",
    "HardNegativeSoftmaxLoss",
    "InBatchSoftmaxLoss",
    "KernelPairLoss",
    "MarginMSELoss",
    "NullMassSoftmaxPairLoss",
    "PairwiseLoss",
    "PublicPoolSoftmaxLoss",
    "SigmoidPairLoss",
    "SoftmaxPairLoss",
    "SpreadoutPairLoss",
    "SymmetricSoftmaxPairLoss",
    "check_declared_bounds",
    "false_negatives",
]
