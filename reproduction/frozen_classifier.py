"""A second task on frozen embeddings: what a privately trained encoder is worth to somebody else.

Paper 002, section 5.2: the encoder is frozen, and a small classifier on top of it learns the coarse
labels of CIFAR-100 without privacy. Since neither the encoder nor the images change, embeddings are
computed once. The paper's appendix B.2 also names a sensitivity and an epsilon for this task, which
contradicts its section 5.2; here nothing is private, and no claim is made about the second data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dpret.encoders.vision.knn import ClassificationScores, confusion_matrix
from lit_dpret.encoders.vision.nets import embed
from lit_dpret.errors import ConfigurationError, DataError


@dataclass(frozen=True, kw_only=True)
class SecondTaskResult:
    """What the classifier on top reached.

    Attributes:
        losses: Cross entropy of each step's batch, in order.
        examples: Images seen up to and with each step.
        scores: On the test images, after the last step.
        confusion: Counts, shape (classes, classes); row: true, column: predicted.
    """

    losses: tuple[float, ...]
    examples: tuple[int, ...]
    scores: ClassificationScores
    confusion: Tensor


class SecondTask(L.LightningModule):
    """A fully connected classifier of embeddings, trained with Adam on cross entropy.

    Layers have the widths of ``hidden`` and then one output for each class, with ReLU between them: 64,
    32 and 20 in the paper, whose task has 20 classes.

    Args:
        hidden: Widths of the hidden layers.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    def __init__(
        self, *, dim: int, classes: int, hidden: Sequence[int] = (64, 32), learning_rate: float = 1e-2
    ) -> None:
        super().__init__()
        if min(dim, *hidden, 1) < 1 or classes < 2 or not learning_rate > 0:
            raise ConfigurationError(
                f"SecondTask(dim={dim}, classes={classes}, hidden={tuple(hidden)}, learning_rate={learning_rate}): "
                "widths are at least 1, classes at least 2, and the learning rate is positive."
            )
        layers: list[nn.Module] = []
        for wide_in, wide_out in zip((dim, *hidden), hidden, strict=False):
            layers += [nn.Linear(wide_in, wide_out), nn.ReLU()]
        self.classifier = nn.Sequential(*layers, nn.Linear((dim, *hidden)[-1], classes))
        self.learning_rate = learning_rate
        self.losses: list[float] = []
        self.examples: list[int] = []

    def forward(self, embeddings: Tensor) -> Tensor:
        """Logits, shape (n, classes), of embeddings of shape (n, dim)."""
        logits: Tensor = self.classifier(embeddings)
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        embeddings, labels = batch
        loss = F.cross_entropy(self(embeddings), labels)
        self.losses.append(float(loss.detach()))
        self.examples.append((self.examples[-1] if self.examples else 0) + len(labels))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def train_second_task(
    net: nn.Module,
    *,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    seed: int = 0,
    learning_rate: float = 1e-2,
    batch_size: int = 400,
    epochs: int = 10,
    beta: float = 1.0,
    trainer: dict[str, Any] | None = None,
) -> SecondTaskResult:
    """Train a classifier on the frozen ``net`` and score it; the defaults are the paper's (appendix B.2).

    Guarantees:
        - ``net`` ends with the weights that it began with, and gathers no gradient.
        - The same seed, on the same machine, gives the same result. torch's global random state ends as it began.

    Args:
        net: The encoder.
        train: Images and labels, as ``datamodule.labelled("train", labels="coarse")`` gives them.
        test: The same of the test split.
        classes: How many classes there are; the width of the last layer.
        seed: Of the classifier's first weights and the order of the images.
        learning_rate: Of Adam.
        batch_size: Images to a step.
        epochs: Passes over the train images.
        beta: Of F-beta.
        trainer: More settings for the Lightning Trainer, such as ``accelerator``.

    Raises:
        ConfigurationError: A setting is out of range.
        DataError: Labels do not fit the images or the classes, or an embedding is not finite.
    """
    if batch_size < 1 or epochs < 1:
        raise ConfigurationError(f"batch_size={batch_size} and epochs={epochs} must be at least 1.")
    known, unseen = (embed(net, images) for images, _ in (train, test))
    for embeddings, labels in ((known, train[1]), (unseen, test[1])):
        if labels.shape != embeddings.shape[:1] or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise DataError(f"{len(embeddings)} images need a label each, between 0 and {classes - 1}.")
        if not torch.isfinite(embeddings).all():
            raise DataError("An embedding is not finite: the encoder has diverged.")
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        TensorDataset(known, train[1]),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        task = SecondTask(dim=known.shape[1], classes=classes, learning_rate=learning_rate)
        quiet: dict[str, Any] = {
            "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "accelerator": "cpu", "devices": 1,
        }  # fmt: skip
        L.Trainer(max_epochs=epochs, **{**quiet, **(trainer or {})}).fit(task, loader)
    with torch.no_grad():
        predictions = task.cpu().eval()(unseen).argmax(dim=1)
    confusion = confusion_matrix(test[1], predictions, classes=classes)
    return SecondTaskResult(
        losses=tuple(task.losses),
        examples=tuple(task.examples),
        scores=ClassificationScores.of(confusion, beta=beta),
        confusion=confusion,
    )
