"""Passages that a teacher compared with a row's own, for a module whose passages keep their embeddings.

They are named for the rows of a batch before the step, as for any dual encoder (`lit_dpret.negatives`), and stand in
it as places in the public list, whose embeddings exist already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import MarginMSELoss
from lit_dpret.negatives import RowNegatives, TrainTexts
from lit_dpret.negatives.row_negatives import Sources
from lit_dpret.negatives.texts import NOBODY, TrainRow
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import UnitBatch


class LabelledMargins:
    """Labelled passages by place, and the error of the margins to them.

    Guarantees:
        - The loss of a row is a function of its own query, passage and labels, and of public passages.

    Args:
        sources: ``labelled`` and nothing else.
        loss: Of the margins.
        privacy: ``none``, ``synthetic``, or ``dp_sgd``, which clips each row.

    Raises:
        ConfigurationError: There are other sources, another loss, or a mode that is for other losses.
    """

    def __init__(self, sources: Sources, loss: Any, privacy: PrivacyMode) -> None:
        listed = list(sources.values()) if isinstance(sources, Mapping) else list(sources)
        names = ",".join(source.name for source in listed)
        if names != "labelled":
            raise ConfigurationError(
                "model.negatives of model=frozen_dual_encoder is auto, pool, batch or labelled, and not "
                f"{names or '[]'}: other sources of negatives (negatives=bm25 and others) are for model=dual_encoder."
            )
        if not isinstance(loss, MarginMSELoss):
            raise ConfigurationError(
                "model.negatives=labelled of model=frozen_dual_encoder is for the margins of a teacher, and model.loss="
                f"{'null' if loss is None else type(loss).__name__}. Set loss=margin_mse."
            )
        if privacy.guarantee == "dp" and privacy.candidates != "rows":
            raise ConfigurationError(
                f"privacy={privacy.name} is for a softmax over passages, and model.loss=MarginMSELoss is none. Choose "
                "privacy=dp_sgd, synthetic or none."
            )
        self.of_rows, self.loss = RowNegatives(listed, privacy), loss
        self._place: Tensor | None = None

    def learn(self, data: Any, place: Mapping[str, int]) -> None:
        """Read the labels of a DataModule's train queries.

        Args:
            data: Lists its public passages and its judgements.
            place: Where the embedding of each passage stands, by id.
        """
        texts = TrainTexts.of(data)
        self.of_rows.learn(texts, _NoTowers())
        self._place = torch.tensor([place[name] for name in texts.passage_ids])

    def keys(self, rows: Sequence[TrainRow]) -> dict[str, Tensor]:
        """What rows of a batch are known by; see `TrainTexts.keys`."""
        self._places()
        return self.of_rows.keys(rows)

    def _places(self) -> Tensor:
        if self._place is None:
            raise ConfigurationError("The labels were not read. Call prepare(datamodule) with the data to train on.")
        return self._place

    def before_batch(self, batch: UnitBatch, *, epoch: int) -> None:
        """Put places and labels of its rows into a batch, ``compared_at`` and ``margins``, ``(rows, each)``."""
        chosen = self.of_rows.places(batch.rows, step=batch.step, epoch=epoch, embed=_nothing_to_embed)
        own_at, place = chosen["own_at"], self._places().to(chosen["own_at"].device)
        batch.rows["compared_at"] = torch.where(own_at < 0, own_at, place[own_at.clamp(min=0)])
        batch.rows["margins"] = chosen["own_margins"]

    def row_losses(self, queries: Tensor, rows: Mapping[str, Tensor], passages: Tensor) -> Tensor:
        """The error of every row's margins, ``(rows,)``.

        Args:
            queries: Embeddings, ``(rows, dim)``.
            rows: Of the batch, after `before_batch`.
            passages: Embeddings of the whole list, ``(passages, dim)``.
        """
        at, margins = rows["compared_at"], rows["margins"]
        own, others = passages[rows["positive"]], passages[at.clamp(min=0)]
        found: Tensor = self.loss(queries, own, others, margins, (at == NOBODY) | margins.isnan())
        return found


class _NoTowers:
    """Labels are read from a file, and nothing is mined."""

    device = None

    def embeddings(self, texts: Sequence[str], side: str, folder: Any) -> Tensor:
        raise AssertionError("labels need no embeddings")

    def fingerprint(self) -> str:
        raise AssertionError("labels need no embeddings")


def _nothing_to_embed() -> Tensor:
    raise AssertionError("labels need no embeddings")
