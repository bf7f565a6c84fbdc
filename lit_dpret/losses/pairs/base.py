"""Losses on the matrix of similarities, and how far one record can move their gradient.

In a batch of n records, record i is (query i, passage i). The n x n table is S_ij = s(query i, passage j), with the
positives on its diagonal. docs/derivations.md has the bounds of each loss and their proofs. In its notation, m = n - 1
counts the records that stay, and M is the largest score (1 for cosine).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses.similarity import checked_mask
from lit_dpret.settings import is_number, require_choice, require_whole

Relation = Literal["add_or_remove", "replace_one"]
LossClaim = Literal["proved", "declared", "refuted"]


@dataclass(frozen=True, kw_only=True)
class PairwiseLoss(ABC):
    """A loss on the n x n matrix of similarities, with a bound on the effect of one record.

    Row i is query i, column j is passage j, and the diagonal holds the positives.

    Guarantees:
        - `coefficients` is the derivative of the sum of `row_losses`.
        - `sensitivity` bounds the L2 change of ``sum_ij coefficients_ij * gbar_ij`` between neighbouring
          batches of at most ``n_max`` records, for any ``gbar_ij`` of length at most 1 that are
          functions of the records i and j (and of public data), up to floating-point rounding.
        - This holds for *every* table: a score outside the range is moved to its nearest end, and one
          that is NaN or infinite counts as masked, even a row's positive.
        - It holds with any mask whose entry ij is a function of the records i and j alone.

    **Masked pairs.** Dropping a candidate from a softmax would break the bound, because the shares of the remaining
    ones would grow beyond it. A masked pair therefore keeps its entry with a constant score, the lowest of the range,
    and its coefficient is 0, which changes no bound.
    """

    proved: ClassVar[bool] = False  # a class of this package sets it where docs/derivations.md has its proof

    similarity: Literal["cosine", "dot"] = "cosine"  # ``dot`` is for embeddings that are no longer than ``radius``
    radius: float | None = None  # with ``dot``, the largest length of an embedding; longer ones are scaled down to it

    def __post_init__(self) -> None:
        require_choice("model.loss.similarity", self.similarity, ("cosine", "dot"))
        if self.similarity == "cosine" and self.radius is not None:
            raise ConfigurationError(
                f"model.loss.radius={self.radius} bounds embeddings of similarity=dot; a cosine has none. Leave it "
                "null."
            )
        if self.radius is not None:
            checked_positive("radius", self.radius)
        if self.similarity == "dot" and self.radius is None and self._needs_range:
            raise ConfigurationError(
                f"{type(self).__name__} with model.loss.similarity=dot needs model.loss.radius, the norm to which "
                "embeddings are projected: without a largest score its sensitivity is unbounded."
            )

    @property
    def _needs_range(self) -> bool:
        """Whether the sensitivity is finite only for scores in a bounded range."""
        return True

    @property
    def high(self) -> float:
        """The largest score: 1 for cosine, the square of the radius for dot."""
        if self.similarity == "cosine":
            return 1.0
        return math.inf if self.radius is None else self.radius**2

    @property
    def low(self) -> float:
        """The smallest score."""
        return -self.high

    @property
    def claim(self) -> LossClaim:
        """Origin of `sensitivity`: ``proved`` here, ``declared`` by the user, or known to be ``refuted``.

        ``proved`` requires a class of this package that sets `proved` itself. A subclass inherits no proof.
        """
        ours = type(self).__module__.startswith(f"{__package__}.")
        return "proved" if ours and vars(type(self)).get("proved") else "declared"

    @property
    def guaranteed(self) -> bool:
        """Whether `sensitivity` may support a privacy claim."""
        return self.claim != "refuted"

    def for_expected_size(self, size: float) -> Self:
        """Return this loss with an unset normaliser set to the expected, public size of a (sub-)batch."""
        if getattr(self, "n0", 0.0) is None:
            return dataclasses.replace(self, n0=size)  # type: ignore[call-arg]
        return self

    def row_losses(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the loss of every row, ``(n,)``, at least float32, not reduced.

        ``scores`` ``(n, n)`` are similarities, not divided by a temperature. ``mask`` is True where a passage is
        known to answer the row's query and so is no negative. Entry ij must be a function of the records i and j;
        the diagonal is never masked. A score outside the range has the derivative at the end that it was moved to.
        """
        table, _ = self._table(scores, mask)
        return self._row_losses(table)

    def coefficients(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the derivative of the summed `row_losses` in every score, ``(n, n)``, detached; 0 where masked."""
        table, out = self._table(scores.detach(), mask)
        return self._coefficients(table).masked_fill(out, 0.0).detach()

    def sensitivity(self, n_max: int, *, relation: Relation) -> float:
        """Return the most that one record can move the gradient, in units of the bound on one pair's gradient.

        Multiply it by ``max_logit_grad_norm``; the temperature is included. It holds for batches of any size up to
        ``n_max``, which is public. ``relation=add_or_remove`` adds, removes or zeroes out one record;
        ``replace_one`` replaces one, at a fixed size.
        """
        if relation not in get_args(Relation):
            raise ConfigurationError(
                f"relation={relation!r} is not one of {', '.join(get_args(Relation))}: sensitivities of losses over "
                "pairs are known for these only. Zeroing out a record is add_or_remove."
            )
        require_whole("privacy", {"n_max": n_max}, 1)
        return self._supremum(n_max, relation)

    def _table(self, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return scores within the range, with masked and broken pairs replaced, and which pairs those are."""
        if scores.dim() != 2 or scores.shape[0] != scores.shape[1] or not scores.is_floating_point():
            raise ConfigurationError(
                f"scores are {scores.dtype} of shape {tuple(scores.shape)}; a loss over pairs needs one float for "
                "each query and each passage of the batch, shape (n, n)."
            )
        rows = len(scores)
        out = ~scores.isfinite()
        if mask is not None:
            own = torch.eye(rows, dtype=torch.bool, device=scores.device)
            out = out | (checked_mask(mask, rows, rows, scores.device) & ~own)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        kept = wide.masked_fill(out, self.low if math.isfinite(self.low) else 0.0)
        # The value is that of the nearest score in the range; the derivative is that of the identity.
        return kept.detach().clamp(self.low, self.high) + (kept - kept.detach()), out

    # For subclasses. Tables may have further leading axes, so that many can be searched at once.

    @abstractmethod
    def _row_losses(self, table: Tensor) -> Tensor:
        """Return the losses ``(..., n)`` of tables ``(..., n, n)`` in the range."""

    @abstractmethod
    def _coefficients(self, table: Tensor) -> Tensor:
        """Return the derivatives ``(..., n, n)`` of the summed losses of tables in the range; differentiable again."""

    @abstractmethod
    def _supremum(self, n: int, relation: Relation) -> float:
        """Return a bound for batches of at most ``n`` records, including the temperature."""


def eye_like(table: Tensor) -> Tensor:
    """Return the identity matrix with the size, dtype and device of the table."""
    return torch.eye(table.shape[-1], dtype=table.dtype, device=table.device)


def checked_positive(name: str, value: float, above: float = 0.0) -> None:
    """Refuse a loss setting that is not finite and larger than ``above``."""
    if not is_number(value) or not math.isfinite(value) or value <= above:
        raise ConfigurationError(f"model.loss.{name}={value!r} is not a finite number above {above:g}.")


def checked_normaliser(n0: float | None, loss: str) -> float:
    """Return ``n0``; refuse it if it is not set."""
    if n0 is None:
        raise ConfigurationError(
            f"{loss} divides by a fixed public number and never by the realised size, which is private. Set "
            "model.loss.n0, or call for_expected_size with the expected size of a sub-batch."
        )
    return n0
