"""Training without noise: on private data without protection, or on released data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from lit_dpret.distributed.strategies import Supported, with_xla
from lit_dpret.privacy.clipping.base import trainable
from lit_dpret.privacy.modes.base import Candidates, GradientSums, Guarantee, PrivacyMode, StepCounts, Update
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.settings import require_whole


class PlainGradients(PrivacyMode):
    """Average the gradients; shared by ``none`` and ``synthetic``.

    Args:
        sub_batches: Let only rows of the same sub-batch be each other's negatives, as under the private modes that
            split a batch in this way; null for whole batches.
    """

    candidates: ClassVar[Candidates] = "batch"
    strategies: ClassVar[Supported] = with_xla()

    def __init__(self, *, sub_batches: int | None = None) -> None:
        super().__init__()
        require_whole("privacy", {"sub_batches": sub_batches}, 1, null=True)
        self.sub_batches = sub_batches

    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        self.counts = StepCounts()
        self._module = module
        self._sums = GradientSums(module)

    def add(self, row_loss: Callable[[], Tensor], unit_ids: Tensor, mask: Tensor) -> None:
        parameters = trainable(self._module)
        with torch.enable_grad():
            loss = row_loss().sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        self._sums.add(dict(zip(parameters, gradients, strict=True)))
        self.counts.units += int(torch.bincount(unit_ids[mask[unit_ids]]).count_nonzero())

    def privatize(
        self,
        sums: dict[str, Tensor],
        *,
        attempt: int,
        step: int,
        salt: str = "",
        starts: Mapping[str, int] | None = None,
    ) -> Update:
        # The realised number, which is private: nothing is promised here.
        units = max(self.counts.units, 1)
        self.counts = StepCounts()
        gradients = {name: total / units for name, total in sums.items()}
        # Infinite, so that a ledger without noise is never read as one with noise.
        return Update(gradients, noise_std=0.0, sensitivity=float("inf"), denominator=float(units))


class NoPrivacy(PlainGradients):
    """Train on the private data without protection. The card says that there is no guarantee.

    Guarantees:
        - Epsilon is infinite in the ledger, and the card carries no number.
        - The update is the mean gradient over the units of the batch.
    """

    name: ClassVar[str] = "none"
    guarantee: ClassVar[Guarantee] = "none"


class SyntheticData(PlainGradients):
    """Train without noise on data released by a private generator.

    Guarantees:
        - The run's card repeats the claim of the data's card and names that card by SHA-256; it never claims more than
          the data's card.
        - A data set without a card is refused before training.
    """

    name: ClassVar[str] = "synthetic"
    guarantee: ClassVar[Guarantee] = "inherited"
