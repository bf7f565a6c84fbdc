"""Scores of a classifier from its confusion matrix, in the usual form and in the paper's.

Paper 002 (tables 1 to 4) reports accuracy, and of recall, precision and F-beta the value of the best
class. A model that knows one class and guesses the rest looks good by that, so the mean over classes
(macro) stands beside it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError


def confusion_matrix(labels: Tensor, predictions: Tensor, *, classes: int) -> Tensor:
    """How often each label was predicted as each class.

    Args:
        labels: The true labels, int64, shape (n,).
        predictions: The predicted labels, int64, shape (n,).
        classes: How many classes there are.

    Returns:
        Counts, int64, shape (classes, classes); row: true, column: predicted.

    Raises:
        DataError: The shapes differ, or a label lies outside 0 to ``classes`` - 1.
    """
    if labels.shape != predictions.shape or labels.ndim != 1:
        raise DataError(f"Labels of shape {tuple(labels.shape)} and predictions of {tuple(predictions.shape)} differ.")
    for name, values in (("label", labels), ("prediction", predictions)):
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < classes):
            raise DataError(f"A {name} lies outside 0 to {classes - 1}: {int(values.min())} to {int(values.max())}.")
    counts = torch.bincount(labels * classes + predictions, minlength=classes * classes)
    return counts.reshape(classes, classes)


@dataclass(frozen=True, kw_only=True)
class ClassificationScores:
    """What a confusion matrix says about a classifier.

    A class that was never predicted has precision 0, one that never occurred has recall 0, and
    F-beta is 0 where both are.

    Attributes:
        accuracy: Share of right predictions.
        recall: Mean over classes (macro), like precision and f_beta.
        precision: See recall.
        f_beta: Weighted harmonic mean of precision and recall of a class, averaged over classes.
        best_recall: Of the class where it is highest: the paper's form, like best_precision and best_f_beta.
        best_precision: See best_recall.
        best_f_beta: See best_recall.
        beta: Weight of recall in F-beta. The paper does not state its own; its tables agree with 1.
    """

    accuracy: float
    recall: float
    precision: float
    f_beta: float
    best_recall: float
    best_precision: float
    best_f_beta: float
    beta: float

    @classmethod
    def of(cls, confusion: Tensor, *, beta: float = 1.0) -> ClassificationScores:
        """The scores of a confusion matrix (rows: true, columns: predicted).

        Raises:
            DataError: The matrix is not square, or counts nothing.
            ConfigurationError: ``beta`` is not positive.
        """
        if confusion.ndim != 2 or confusion.shape[0] != confusion.shape[1] or not confusion.sum() > 0:
            raise DataError(f"A confusion matrix of shape {tuple(confusion.shape)} must be square and count something.")
        if not beta > 0:
            raise ConfigurationError(f"beta={beta} must be positive.")
        counts = confusion.double()
        right = counts.diagonal()
        recall = _share(right, counts.sum(dim=1))
        precision = _share(right, counts.sum(dim=0))
        f_beta = _share((1 + beta**2) * precision * recall, beta**2 * precision + recall)
        return cls(
            accuracy=float(right.sum() / counts.sum()),
            recall=float(recall.mean()),
            precision=float(precision.mean()),
            f_beta=float(f_beta.mean()),
            best_recall=float(recall.max()),
            best_precision=float(precision.max()),
            best_f_beta=float(f_beta.max()),
            beta=beta,
        )

    def to_dict(self) -> dict[str, Any]:
        """The scores by name, as plain JSON values."""
        return asdict(self)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """``part / whole``, 0 where both are."""
    return torch.where(whole > 0, part / whole.clamp(min=torch.finfo(whole.dtype).tiny), torch.zeros_like(part))
