"""Train on a teacher's margins between passages, for a module with frozen passage embeddings.

They are chosen for the rows of a batch before the step, as for any dual encoder (`lit_dpret.negatives`), and stored in
the batch as indices of the public list, whose embeddings exist already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import MarginMSELoss
from lit_dpret.negatives import RowNegatives, TrainTexts
from lit_dpret.negatives.base import NOBODY, TrainRow
from lit_dpret.negatives.row_negatives import Sources
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.modes import PrivacyMode


class LabelledMargins:
    """Labelled passages by index, and the error of margins, a function of a row's own query, passage and labels."""

    def __init__(self, sources: Sources, loss: Any, privacy: PrivacyMode) -> None:
        listed = list(sources.values()) if isinstance(sources, Mapping) else list(sources)
        names = ",".join(source.name for source in listed)
        if names != "labelled":
            raise ConfigurationError(
                "model.negatives of model=frozen_dual_encoder must be auto, pool, batch or labelled, not "
                f"{names or '[]'}: other sources of negatives (negatives=bm25 and others) are for model=dual_encoder."
            )
        if not isinstance(loss, MarginMSELoss):
            raise ConfigurationError(
                "model.negatives=labelled of model=frozen_dual_encoder trains on a teacher's margins, not with "
                f"model.loss={'null' if loss is None else type(loss).__name__}. Set loss=margin_mse."
            )
        if privacy.guarantee == "dp" and privacy.candidates != "rows":
            raise ConfigurationError(
                f"privacy={privacy.name} is for a loss over passages of the batch or of a public pool, and "
                "model.loss=MarginMSELoss reads only the labels of each row. Choose privacy=dp_sgd, synthetic or none."
            )
        self.of_rows, self.loss = RowNegatives(listed, privacy), loss

    def learn(self, data: Any) -> None:
        """Read the labels of a DataModule's train queries; it must list its public passages and judgements."""
        no_towers: Any = None  # labels are read from a file, so nothing is embedded
        self.of_rows.learn(TrainTexts.of(data), no_towers)

    def keys(self, rows: Sequence[TrainRow]) -> dict[str, Tensor]:
        return self._texts().keys(rows)

    def before_batch(self, batch: UnitBatch, place: Mapping[str, int], *, epoch: int) -> None:
        """Put ``compared_at`` and ``margins``, ``(rows, each)``, into a batch; ``place`` maps ids to indices."""
        nothing: Any = None
        chosen = self.of_rows.places(batch.rows, step=batch.step, epoch=epoch, embed=nothing)
        own_at, names = chosen["own_at"], self._texts().passage_ids
        stands = [NOBODY if at == NOBODY else place[names[at]] for at in own_at.flatten().tolist()]
        batch.rows["compared_at"] = own_at.new_tensor(stands).view_as(own_at)
        batch.rows["margins"] = chosen["own_margins"]

    def _texts(self) -> TrainTexts:
        if self.of_rows.texts is None:
            raise ConfigurationError("The labels were not read. Call prepare(datamodule) with the data to train on.")
        return self.of_rows.texts

    def row_losses(self, queries: Tensor, rows: Mapping[str, Tensor], passages: Tensor) -> Tensor:
        """Return the error of every row's margins, ``(rows,)``; ``passages`` are the embeddings of the whole list."""
        at, margins = rows["compared_at"], rows["margins"]
        own, others = passages[rows["positive"]], passages[at.clamp(min=0)]
        found: Tensor = self.loss(queries, own, others, margins, (at == NOBODY) | margins.isnan())
        return found
