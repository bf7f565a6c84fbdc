"""Margin-MSE: learn how much better one passage is than another, not only that it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses.checks import checked_mask, checked_temperature
from lit_dpret.losses.similarity import get_similarity


class MarginMSELoss(nn.Module):
    """Squared error between a row's margin and that of a teacher (Hofstätter et al., 2020, section 3, equation 4).

    The row's margin is the similarity of its query to its own passage, less that to one of its negatives,
    over the temperature. The teacher's is a difference of logits of a cross-encoder, of order 10: with the
    cosine, whose differences are at most 2, a temperature of 0.05 to 0.1 lets the towers reach it.

    Guarantees:
        - Row i depends on row i alone.
        - A row without any label has the loss 0 and no gradient.

    Args:
        temperature: Divides the similarity; positive.
        similarity: ``cosine`` or ``dot``.

    Raises:
        ConfigurationError: The temperature is not positive, or the similarity unknown.
    """

    def __init__(self, temperature: float = 0.05, similarity: str = "cosine") -> None:
        super().__init__()
        self.temperature = checked_temperature(temperature)
        self.similarity = similarity
        self._score = get_similarity(similarity)

    def forward(
        self,
        query_embeddings: Tensor,
        positive_embeddings: Tensor,
        negative_embeddings: Tensor,
        margins: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The loss of every row: the mean over its labelled negatives.

        Args:
            query_embeddings: Shape ``(rows, dim)``.
            positive_embeddings: Each query's own passage, ``(rows, dim)``.
            negative_embeddings: Passages that each row is told from, ``(rows, each, dim)``.
            margins: The teacher's, in logits, ``(rows, each)``.
            mask: Booleans ``(rows, each)``, True for negatives to leave out, those without a label among them.

        Returns:
            Losses of shape ``(rows,)``, not reduced.

        Raises:
            ConfigurationError: Shapes do not fit together, or a margin that counts is not finite.
        """
        rows, each = len(query_embeddings), negative_embeddings.shape[1] if negative_embeddings.dim() == 3 else -1
        if negative_embeddings.dim() != 3 or len(negative_embeddings) != rows or margins.shape != (rows, each):
            raise ConfigurationError(
                f"negatives of shape {tuple(negative_embeddings.shape)} with margins of shape {tuple(margins.shape)} "
                f"are not one margin for each of some negatives of each of {rows} rows."
            )
        device = query_embeddings.device
        left_out = torch.zeros(rows, each, dtype=torch.bool) if mask is None else mask
        left_out = checked_mask(left_out, rows, each, device)
        if not bool((torch.isfinite(margins) | left_out).all()):
            raise ConfigurationError("A margin is not a finite number. Mask the negatives that have no label.")
        wide = torch.promote_types(query_embeddings.dtype, torch.float32)
        with torch.autocast(device.type, enabled=False):
            queries = query_embeddings.to(wide).unsqueeze(1)
            own = self._score(queries, positive_embeddings.to(wide).unsqueeze(1)).squeeze(1)
            others = self._score(queries, negative_embeddings.to(wide)).squeeze(1)
            found = (own - others) / self.temperature
            wanted = margins.to(found).masked_fill(left_out, 0.0)
            errors = (found - wanted).square().masked_fill(left_out, 0.0)
            return errors.sum(1) / (~left_out).sum(1).clamp(min=1)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:g}, similarity={self.similarity!r}"
