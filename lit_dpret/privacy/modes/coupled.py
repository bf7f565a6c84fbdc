"""Base of the modes for coupled losses, where every unit of a sub-batch can move the terms of all others.

They clip something smaller than that whole, and know how far one unit can still move the sum. The plan records it
(`Coupling`), so that ledger and card can state it.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.accounting.coupled_sensitivity import (
    Bounded,
    Coupling,
    LossClaim,
    Relation,
    change_of_a_sub_batch,
    least_n_max,
    resolve_n_max,
)
from lit_dpret.privacy.accounting.releases import FullBatch, Shuffle
from lit_dpret.privacy.budget import with_rounding_paid
from lit_dpret.privacy.modes.base import Candidates
from lit_dpret.privacy.modes.gaussian import GaussianMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan, SamplingRequest
from lit_dpret.settings import require_number, require_whole


@dataclass(kw_only=True, eq=False, repr=False)
class CoupledMode(GaussianMode):
    """A private mode for losses that couple the units of a sub-batch.

    Guarantees:
        - Each drawn unit is assigned to one of ``sub_batches`` parts by its own coin; neighbouring data differ in one
          unit of one part.
        - No part holds more than ``n_max`` units: the sampler drops the surplus at random, and a larger batch from
          elsewhere is refused.
        - The noise is calibrated to ``n_max``, never to the realised size, and added once to the sum over all parts.

    Args:
        max_grad_norm: L2 bound on what is clipped.
        l2_sensitivity: How far one unit may move the sum, given instead of ``max_grad_norm``, which follows from it.
        sub_batches: The number of parts of a logical batch; negatives come from the same part.
        n_max: Maximum number of units in a part, public; null for a number that is hardly ever reached. Further units
            are left out of the step, uniformly. Where batches are drawn by coins, that must be almost impossible,
            except under ``add_or_remove`` (`lit_dpret.privacy.accounting.coupled_sensitivity.least_n_max`).
    """

    bounded: ClassVar[Bounded]
    bound_key: ClassVar[str] = "max_grad_norm"
    candidates: ClassVar[Candidates] = "batch"
    calibrated_to_loss: ClassVar[bool] = True

    max_grad_norm: float | None = None
    l2_sensitivity: float | None = None
    sub_batches: int = 1
    n_max: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("privacy", self, 1, "sub_batches", "n_max", null=True)
        if (self.max_grad_norm is None) == (self.l2_sensitivity is None):
            raise ConfigurationError(
                f"privacy.{self.bound_key}={self.max_grad_norm} and privacy.l2_sensitivity={self.l2_sensitivity}: set "
                "exactly one of them; the other follows from it."
            )
        bounds = {self.bound_key: self.max_grad_norm, "l2_sensitivity": self.l2_sensitivity}
        require_number("privacy", bounds, null=True)

    def plan(self, request: SamplingRequest, *, units: int, steps: int, module: Any = None) -> PrivacyPlan:
        """Return the plan, with the sensitivity of ``module``'s loss in sub-batches of ``n_max`` units."""
        # Before the noise is chosen, which is valid for one row of a unit.
        if request.rows_per_unit != "one":
            raise ConfigurationError(
                f"datamodule.rows_per_unit={request.rows_per_unit} cannot go with privacy={self.name}: several rows of "
                "one unit would be each other's negatives, and the sensitivity holds for one row. Set it to one."
            )
        # With a bound of 1: law, steps and noise do not depend on it, and the sensitivity needs them first.
        draft = self._build_plan(request, units=units, steps=steps, max_grad_norm=1.0, engine=self.bounded)
        parts = int(self.sub_batches or 1)
        n_max = resolve_n_max(
            self.n_max, law=draft.law, sub_batches=parts, expected=draft.denominator, units=draft.n_public
        )
        if draft.n_public is not None:
            n_max = self._without_cuts(n_max, draft, parts, draft.n_public)
        loss = self._read_loss(module, draft.denominator / parts)
        if self._claim(loss) == "refuted" and self.dataset_ledger is not None:
            raise ConfigurationError(
                f"privacy.dataset_ledger={self.dataset_ledger} adds up what runs cost, and what this one costs is not "
                f"known: the sensitivity of {loss!r} is refuted. Set privacy.dataset_ledger to null."
            )
        change = change_of_a_sub_batch(self.neighbours, draft.law, n_max=n_max)
        reach = self._sensitivity(n_max, change, loss)
        if self.neighbours == "replace_one" and isinstance(draft.law, (FullBatch, Shuffle)):
            # Without amplification a replacement is judged by how far it moves the sum, which the accountant takes to
            # be twice the sensitivity.
            reach = self._sensitivity(n_max, "replace_one", loss) / 2
        if not reach > 0:
            raise ConfigurationError(
                f"privacy.n_max={n_max}: under {loss!r} a sub-batch of so few units has no gradient, so there is "
                "nothing to train on. Raise privacy.n_max or lower privacy.sub_batches."
            )
        bound, sensitivity = self._bounds(reach)
        return replace(
            draft,
            max_grad_norm=bound,
            sensitivity=with_rounding_paid(sensitivity, self.noise),
            denominator=self._denominator(draft, parts),
            physical_batch_size=n_max,
            coupling=Coupling(
                bounded=self.bounded,
                sub_batches=parts,
                n_max=n_max,
                expected=draft.denominator / parts,
                loss=named(loss),
                claim=self._claim(loss),
            ),
        )

    def _without_cuts(self, n_max: int, draft: PrivacyPlan, parts: int, units: int) -> int:
        """Return a bound on a sub-batch that keeps amplification by sampling; refuse a declared one that does not."""
        least = least_n_max(draft.law, sub_batches=parts, steps=draft.steps, units=units, delta=draft.budget.delta)
        if self.n_max is not None and self.n_max < least:
            raise ConfigurationError(
                f"privacy.n_max={self.n_max}: sub-batches would be cut so often that amplification by sampling is not "
                f"proved under privacy.neighbours={self.neighbours}: a unit that is drawn would take the place of "
                f"another. Set privacy.n_max to {least} or more, or to null, raise privacy.sub_batches, or choose "
                "datamodule.sampling=shuffle."
            )
        # A larger n_max only adds noise, so it may always be raised.
        return max(n_max, least)

    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        super().attach(module, plan, stream)
        self._refuse_uncoupled(module)

    def _read_loss(self, module: Any, expected: float) -> Any:
        """Return the loss that determines the sensitivity; ``expected`` is the public mean size of a sub-batch."""
        return getattr(module, "loss", None)

    @abstractmethod
    def _sensitivity(self, n_max: int, change: Relation, loss: Any) -> float:
        """Return how far one unit moves the sum of a sub-batch (L2), with gradients clipped to 1."""

    def _bounds(self, unit_sensitivity: float) -> tuple[float, float]:
        if self.max_grad_norm is not None:
            return self.max_grad_norm, self.max_grad_norm * unit_sensitivity
        return float(self.l2_sensitivity or 0.0) / unit_sensitivity, float(self.l2_sensitivity or 0.0)

    def _claim(self, loss: Any) -> LossClaim:
        return "proved"

    def _denominator(self, draft: PrivacyPlan, parts: int) -> float:
        return draft.denominator

    def _refuse_large(self, count: int) -> None:
        coupling = self._plan.coupling
        if coupling is not None and count > coupling.n_max:
            raise DataError(
                f"A sub-batch of more than privacy.n_max={coupling.n_max} units arrived: the noise was calibrated to "
                "that number. Draw the batches with the sampler of the privacy plan."
            )

    def _refuse_uncoupled(self, module: Any) -> None:
        if not hasattr(module, "pair_batch"):
            raise UnsupportedModelError(
                f"privacy={self.name} is for modules that contrast the pairs of a batch (DualEncoder, "
                f"FrozenDualEncoder, EmbeddingTrainer); {type(module).__name__} does not. Choose privacy=dp_sgd.",
                trap="T11",
            )


def named(loss: Any) -> str:
    """Describe a loss with its settings, equal in every process: without addresses of functions."""
    # An address differs in every process, and the plan would never match on a resume.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(loss))
