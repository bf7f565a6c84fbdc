"""Exact k-NN classification by cosine similarity, to measure the quality of an embedding.

Paper 002 uses k = 3 (section 5.1), and does not say how it breaks ties, which are two thirds of an untrained net's
votes. scikit-learn gives ties to the lowest label; here the nearest of the tied neighbours decides, and the scores by
the other rule are reported too. Scores that use private train embeddings are not covered by the encoder's claim.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.encoders.vision.nets import embed
from lit_dpret.errors import ConfigurationError, DataError

_DECIMALS = 12
Ties = Literal["nearest", "lowest"]


@dataclass(frozen=True, kw_only=True)
class KnnResult:
    """The result of k-NN on one split."""

    scores: ClassificationScores  # with ties to the label of the nearest of the tied neighbours
    lowest: ClassificationScores  # with ties to the lowest label, as in scikit-learn
    tied: float  # share of the votes that were ties
    confusion: Tensor  # counts behind ``scores``, shape (classes, classes); row: true, column: predicted
    k: int


def nearest(train: Tensor, queries: Tensor, *, k: int, chunk_size: int = 256) -> Tensor:
    """Return indices of the ``k`` train embeddings of highest cosine similarity, nearest first, ``(queries, k)``.

    Similarities are computed in float64 and compared after rounding to 12 decimals; equal ones keep the order of
    ``train``. A zero embedding has similarity 0 to all. Memory is a few times chunk_size * n * 8 bytes, with n train
    embeddings.
    """
    if not 1 <= k <= len(train):
        raise ConfigurationError(f"k={k} neighbours cannot be found among {len(train)} train embeddings.")
    if train.ndim != 2 or queries.ndim != 2 or train.shape[1] != queries.shape[1]:
        raise DataError(f"Embeddings of shapes {tuple(train.shape)} and {tuple(queries.shape)} cannot be compared.")
    if not (torch.isfinite(train).all() and torch.isfinite(queries).all()):
        raise DataError("An embedding is not finite: the encoder has diverged.")
    keys = F.normalize(train.double(), dim=1).T
    found = [_nearest_of(F.normalize(part.double(), dim=1) @ keys, k) for part in torch.split(queries, chunk_size)]
    return torch.cat(found) if found else torch.empty((0, k), dtype=torch.long)


def _nearest_of(similarities: Tensor, k: int) -> Tensor:
    """Return the indices of the ``k`` highest similarities of each row; equal ones in index order."""
    similarities = similarities.round(decimals=_DECIMALS)
    indices = similarities.topk(k, dim=1).indices
    # If several last neighbours are equal, `topk` may return any of them, so those rows are sorted in full.
    last = similarities.gather(1, indices[:, -1:])
    tied = ((similarities >= last).sum(dim=1) > k).nonzero()[:, 0]
    indices[tied] = similarities[tied].sort(dim=1, descending=True, stable=True).indices[:, :k]
    indices = indices.sort(dim=1).values
    order = similarities.gather(1, indices).sort(dim=1, descending=True, stable=True).indices
    return indices.gather(1, order)


def votes(
    train: Tensor, labels: Tensor, queries: Tensor, *, classes: int, k: int = 3, chunk_size: int = 256
) -> tuple[dict[Ties, Tensor], Tensor]:
    """Return each query's majority label among its ``k`` nearest train embeddings by each tie rule, and which tie.

    Ties go to the ``nearest`` of the tied neighbours, or to the ``lowest`` label as in scikit-learn.
    """
    if labels.shape != train.shape[:1]:
        raise DataError(f"{len(train)} train embeddings have labels of shape {tuple(labels.shape)}.")
    neighbours = labels[nearest(train, queries, k=k, chunk_size=chunk_size)]
    counts = F.one_hot(neighbours, classes).sum(dim=1)
    leads = counts == counts.amax(dim=1, keepdim=True)
    first = leads.gather(1, neighbours).int().argmax(dim=1, keepdim=True)  # the nearest whose label leads
    return {"nearest": neighbours.gather(1, first)[:, 0], "lowest": leads.int().argmax(dim=1)}, leads.sum(dim=1) > 1


def evaluate_knn(
    net: nn.Module,
    *,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    k: int = 3,
    beta: float = 1.0,
    batch_size: int = 512,
) -> KnnResult:
    """Embed both splits and classify the test images by their ``k`` neighbours, under both tie rules.

    ``train`` and ``test`` are images and labels, as returned by ``datamodule.labelled("train")``. ``net`` runs in
    evaluation mode; ``beta`` is that of F-beta.
    """
    keys, queries = (embed(net, images, batch_size=batch_size) for images, _ in (train, test))
    predicted, tied = votes(keys, train[1], queries, classes=classes, k=k)
    confusions = {rule: confusion_matrix(test[1], labels, classes=classes) for rule, labels in predicted.items()}
    scores = {rule: ClassificationScores.of(confusion, beta=beta) for rule, confusion in confusions.items()}
    return KnnResult(
        scores=scores["nearest"], lowest=scores["lowest"], tied=float(tied.double().mean()),
        confusion=confusions["nearest"], k=k,
    )  # fmt: skip


def confusion_matrix(labels: Tensor, predictions: Tensor, *, classes: int) -> Tensor:
    """Count how often each label was predicted as each class: int64, ``(classes, classes)``; row true, column
    predicted.
    """
    if labels.shape != predictions.shape or labels.ndim != 1:
        raise DataError(f"Labels of shape {tuple(labels.shape)} and predictions of {tuple(predictions.shape)} differ.")
    for name, values in (("label", labels), ("prediction", predictions)):
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < classes):
            raise DataError(
                f"A {name} is outside 0 to {classes - 1}: found {int(values.min())} to {int(values.max())}."
            )
    counts = torch.bincount(labels * classes + predictions, minlength=classes * classes)
    return counts.reshape(classes, classes)


@dataclass(frozen=True, kw_only=True)
class ClassificationScores:
    """Scores derived from a classifier's confusion matrix.

    A class that was never predicted has precision 0, one that never occurred has recall 0, and
    F-beta is 0 if both are. Paper 002 reports the best class, which flatters a model that knows only one class;
    the mean over classes is therefore reported too.
    """

    accuracy: float
    recall: float  # mean over classes (macro), like precision and f_beta
    precision: float
    f_beta: float  # weighted harmonic mean of precision and recall of a class, averaged over classes
    best_recall: float  # of the class where it is highest: the paper's form, like best_precision and best_f_beta
    best_precision: float
    best_f_beta: float
    # Weight of recall in F-beta. The paper does not state it; its tables agree with 1.
    beta: float

    @classmethod
    def of(cls, confusion: Tensor, *, beta: float = 1.0) -> ClassificationScores:
        """Return the scores of a confusion matrix (rows: true, columns: predicted)."""
        if confusion.ndim != 2 or confusion.shape[0] != confusion.shape[1] or not confusion.sum() > 0:
            raise DataError(f"A confusion matrix of shape {tuple(confusion.shape)} must be square and not all zero.")
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
        """Return the scores by name, as plain JSON values."""
        return asdict(self)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return ``part / whole``, or 0 where ``whole`` is 0."""
    return torch.where(whole > 0, part / whole.clamp(min=torch.finfo(whole.dtype).tiny), torch.zeros_like(part))
