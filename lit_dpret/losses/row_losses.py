"""Losses on embeddings, one value per row: softmax over candidate passages, and margins of a teacher.

They return one value per row, never reduced: the privacy mode decides what to clip, average or sum. Where a row's
candidates come from decides what can be guaranteed for one query.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses.similarity import checked_mask, checked_temperature, get_similarity


def false_negatives(
    own_ids: Sequence[str],
    candidate_ids: Sequence[str],
    positives: Sequence[Collection[str]] | None = None,
) -> Tensor:
    """Return which candidates are correct answers and must not be pushed away: booleans ``(rows, candidates)``.

    These have the id of the row's own positive (``own_ids``) or of another positive of the same query
    (``positives``, from its own record only). The row's own column is included; the losses keep it.
    """
    number: dict[str, int] = {}
    for name in candidate_ids:
        number.setdefault(name, len(number))
    columns = torch.tensor([number[name] for name in candidate_ids], dtype=torch.long)
    hits: list[tuple[int, int]] = []
    for row, own in enumerate(own_ids):
        answers = {own, *positives[row]} if positives is not None else {own}
        hits.extend((row, number[name]) for name in answers if name in number)
    table = torch.zeros(len(own_ids), len(number), dtype=torch.bool)
    if hits:
        rows, names = torch.tensor(hits, dtype=torch.long).unbind(1)
        table[rows, names] = True
    return table[:, columns]


class _RowLoss(nn.Module):
    """Losses with one value per row: a similarity, and a temperature that divides it."""

    def __init__(self, temperature: float = 0.05, similarity: str = "cosine") -> None:
        super().__init__()
        self.temperature = checked_temperature(temperature)
        self.similarity = similarity
        self._score = get_similarity(similarity)

    def scores(self, query_embeddings: Tensor, passage_embeddings: Tensor) -> Tensor:
        """Return similarities, at least float32 whatever the dtype of the embeddings."""
        wide = torch.promote_types(query_embeddings.dtype, torch.float32)
        with torch.autocast(query_embeddings.device.type, enabled=False):
            return self._score(query_embeddings.to(wide), passage_embeddings.to(wide))

    def logits(self, query_embeddings: Tensor, passage_embeddings: Tensor) -> Tensor:
        """Return similarities over temperature."""
        return self.scores(query_embeddings, passage_embeddings) / self.temperature

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:g}, similarity={self.similarity!r}"


class InBatchSoftmaxLoss(_RowLoss):
    """Softmax of each query's own passage against the passages of the whole batch.

    It is also called InfoNCE, N-pairs or MultipleNegativesRanking, often with ``scale`` for 1 / ``temperature``.
    ``temperature`` divides the ``similarity``, which is ``cosine`` or ``dot``.

    **The rows are coupled.** Row i has every passage of the batch in its denominator, so removing one record
    changes all rows. Per-row clipping of this loss bounds nothing. Use it with ``privacy=none``, or under a mode that
    accounts for the coupling (``batch_clip``, ``per_example_duplicated``, ``logit_dp``). For per-query privacy use
    `PublicPoolSoftmaxLoss`.

    Guarantees:
        - Row i equals the cross entropy of its logits over the unmasked candidates.
        - Passages after the first ``rows`` are additional (hard) negatives of every row.
    """

    def forward(
        self,
        query_embeddings: Tensor,
        passage_embeddings: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of every row, ``(rows,)``, of queries ``(rows, dim)`` and passages ``(passages, dim)``.

        Passage i is the positive of query i. ``mask``, ``(rows, passages)``, is True for candidates to leave out,
        as `false_negatives` finds them; a row's own positive is never masked.
        """
        rows, passages = len(query_embeddings), len(passage_embeddings)
        if passages < rows:
            raise ConfigurationError(f"{passages} passages cannot hold the positives of {rows} queries.")
        left_out = torch.zeros(rows, passages, dtype=torch.bool, device=query_embeddings.device)
        if mask is not None:
            left_out |= checked_mask(mask, rows, passages, query_embeddings.device)
        own = torch.arange(rows, device=query_embeddings.device)
        left_out[own, own] = False
        logits = self.logits(query_embeddings, passage_embeddings).masked_fill(left_out, float("-inf"))
        return F.cross_entropy(logits, own, reduction="none")


class PublicPoolSoftmaxLoss(_RowLoss):
    """Softmax of each query's positive against a pool of public passages; settings are those of `InBatchSoftmaxLoss`.

    Guarantees:
        - Row i depends only on query i, its own positive, its own mask and the pool; on no other row.
        - Row i equals the cross entropy of its logits over the unmasked candidates.
        - No gradient flows into the pool, so only one cotangent per query has to be clipped. A gradient flows into
          ``positive_embeddings``, row by row.

    Assumption, which the caller must keep: the pool (which passages, and their embeddings) is a function of public
    data, of coins that do not depend on the records, and of weights that were already released privately. A pool of
    the batch's positives, of clicked passages, or mined with other records' labels violates it. Under it, the sum
    over queries of clipped gradients has sensitivity ``max_grad_norm`` when one (query, positive) record is zeroed
    out, added or removed, and twice that when one is replaced.
    """

    def forward(
        self,
        query_embeddings: Tensor,
        pool_embeddings: Tensor,
        positive_index: Tensor | None = None,
        positive_embeddings: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of every row, ``(rows,)``, of queries ``(rows, dim)`` and a pool ``(pool, dim)``.

        The positive is either in the pool (``positive_index``, long ``(rows,)``: a pool that is the whole corpus) or
        given separately (``positive_embeddings``, ``(rows, dim)``: a pool drawn at random); give exactly one.
        ``mask``, ``(rows, pool)``, is True where the pool holds another positive of the same query (or, with
        ``positive_embeddings``, its own). It must come from row i's own record alone. A positive in the pool is never
        masked.
        """
        rows, pool = len(query_embeddings), len(pool_embeddings)
        device = query_embeddings.device
        logits = self.logits(query_embeddings, pool_embeddings.detach())
        left_out = torch.zeros_like(logits, dtype=torch.bool)
        if mask is not None:
            left_out |= checked_mask(mask, rows, pool, device)
        if positive_index is not None and positive_embeddings is None:
            known = positive_index.shape == (rows,) and positive_index.dtype == torch.long
            if not known or not bool(((positive_index >= 0) & (positive_index < pool)).all()):
                raise ConfigurationError(
                    f"positive_index ({positive_index.dtype}, shape {tuple(positive_index.shape)}) must name one of "
                    f"the pool's {pool} passages for each of {rows} rows, as torch.long."
                )
            target = positive_index.to(device)
            left_out = left_out.scatter(1, target.unsqueeze(1), False)
        elif positive_embeddings is not None and positive_index is None:
            if positive_embeddings.shape != query_embeddings.shape:
                raise ConfigurationError(
                    f"positive_embeddings of shape {tuple(positive_embeddings.shape)} must have one positive for each "
                    f"query; query embeddings have shape {tuple(query_embeddings.shape)}."
                )
            own = self.logits(query_embeddings.unsqueeze(1), positive_embeddings.unsqueeze(1)).flatten()
            logits = torch.cat([own.unsqueeze(1), logits], dim=1)
            left_out = F.pad(left_out, (1, 0), value=False)
            target = torch.zeros(rows, dtype=torch.long, device=device)
        else:
            raise ConfigurationError("Give exactly one of positive_index and positive_embeddings.")
        return F.cross_entropy(logits.masked_fill(left_out, float("-inf")), target, reduction="none")


class HardNegativeSoftmaxLoss(_RowLoss):
    """Cross entropy of the row's own passage among its candidates; settings as for `InBatchSoftmaxLoss`.

    Sharing decides what can be guaranteed. With ``own`` candidates alone, or with ``shared`` passages that are public
    and independent of the batch, row i is a function of row i. With passages of other rows among ``shared`` the rows
    are coupled; without ``own`` this is then `InBatchSoftmaxLoss`.

    Guarantees:
        - Row i equals the cross entropy of its logits over the unmasked candidates.
        - Row i depends on no other row's ``own`` candidates.
    """

    def forward(
        self,
        query_embeddings: Tensor,
        positive_embeddings: Tensor,
        *,
        own: Tensor | None = None,
        own_mask: Tensor | None = None,
        shared: Tensor | None = None,
        shared_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of every row, ``(rows,)``, of queries and positives ``(rows, dim)``.

        A row's candidates are ``own`` negatives ``(rows, each, dim)`` and ``shared`` ones ``(passages, dim)``. The
        masks ``(rows, each)`` and ``(rows, passages)`` are True for candidates to leave out, such as the row's answers.
        """
        rows = len(query_embeddings)
        if positive_embeddings.shape != query_embeddings.shape:
            raise ConfigurationError(
                f"positive_embeddings of shape {tuple(positive_embeddings.shape)} must have one positive for each "
                f"query; query embeddings have shape {tuple(query_embeddings.shape)}."
            )
        if own is not None and (own.dim() != 3 or len(own) != rows):
            raise ConfigurationError(
                f"own has shape {tuple(own.shape)}; it must be (rows, each, dim), with {rows} rows."
            )
        logits = [self._of_rows(query_embeddings, positive_embeddings.unsqueeze(1))]
        if own is not None:
            logits.append(_left_out(self._of_rows(query_embeddings, own), own_mask))
        if shared is not None:
            logits.append(_left_out(self.logits(query_embeddings, shared), shared_mask))
        target = torch.zeros(rows, dtype=torch.long, device=query_embeddings.device)
        return F.cross_entropy(torch.cat(logits, dim=1), target, reduction="none")

    def _of_rows(self, queries: Tensor, passages: Tensor) -> Tensor:
        """Return each query's logits with its own passages, ``(rows, each)``."""
        return self.logits(queries.unsqueeze(1), passages).squeeze(1)


def _left_out(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return logits
    rows, candidates = logits.shape
    return logits.masked_fill(checked_mask(mask, rows, candidates, logits.device), float("-inf"))


class MarginMSELoss(_RowLoss):
    """Squared error between a row's margin and that of a teacher (Hofstätter et al., 2020, section 3, equation 4).

    The row's margin is the similarity of its query to its own passage minus that to one of its negatives, divided by
    the temperature. The teacher's margin is a difference of cross-encoder logits, of order 10. Cosine differences are
    at most 2, so a temperature of 0.05 to 0.1 lets the towers reach it. Row i depends on row i alone; a row without
    any label has loss 0 and no gradient.
    """

    def forward(
        self,
        query_embeddings: Tensor,
        positive_embeddings: Tensor,
        negative_embeddings: Tensor,
        margins: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of every row, ``(rows,)``: the mean over its labelled negatives.

        Queries and positives are ``(rows, dim)``, negatives ``(rows, each, dim)``, and the teacher's ``margins``,
        in logits, ``(rows, each)``. ``mask`` is True for negatives to leave out, including those without a label.
        """
        rows, each = len(query_embeddings), negative_embeddings.shape[1] if negative_embeddings.dim() == 3 else -1
        if negative_embeddings.dim() != 3 or len(negative_embeddings) != rows or margins.shape != (rows, each):
            raise ConfigurationError(
                f"negative_embeddings has shape {tuple(negative_embeddings.shape)}, and margins "
                f"{tuple(margins.shape)}; they must be (rows, each, dim) and (rows, each), with {rows} rows."
            )
        device = query_embeddings.device
        left_out = torch.zeros(rows, each, dtype=torch.bool) if mask is None else mask
        left_out = checked_mask(left_out, rows, each, device)
        if not bool((torch.isfinite(margins) | left_out).all()):
            raise ConfigurationError("A margin is not a finite number. Mask the negatives that have no label.")
        queries = query_embeddings.unsqueeze(1)
        own = self.scores(queries, positive_embeddings.unsqueeze(1)).squeeze(1)
        found = (own - self.scores(queries, negative_embeddings).squeeze(1)) / self.temperature
        errors = (found - margins.to(found).masked_fill(left_out, 0.0)).square().masked_fill(left_out, 0.0)
        return errors.sum(1) / (~left_out).sum(1).clamp(min=1)
