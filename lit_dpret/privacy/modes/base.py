"""A privacy mode turns batches into one update and states its privacy cost.

The training loop, the accountant, the ledger and the card do not know which mode they drive. Every mode defines:

* ``name``: the mode on the command line, in the ledger and on the card;
* ``guarantee``: ``dp``, ``inherited`` or ``none``;
* ``attach``: prepare to train a module, or refuse if the guarantee cannot be honoured;
* ``add``: add one physical batch;
* ``privatize``: return the update and its provenance.

Everything else has a default here. A capability that a mode does not declare (an attribute of `PrivacyMode`, such as
``strategies``) is refused. A mode that adds noise derives from `GaussianMode`, which defines all of these except
``name`` and requires ``plan``, the bound on how far one unit moves the sum. A custom ``attach`` calls that of
`GaussianMode` and sets ``self._sums``. A subclass of `DPSGD` inherits all of this and its capabilities: narrow
``strategies`` to those that were tested. ``facts`` are recorded with the plan and printed on the card.

The loop also calls ``contribute`` (`add`, from a module and a batch), ``take`` (the sums of the logical step),
``extra_sums`` and ``forget``. Training without privacy is a mode too, never a flag.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_dpret.distributed.strategies import ONE_DEVICE, Supported
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import Neighbours, PrivacyBudget, Unit
from lit_dpret.privacy.clipping.base import trainable
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan, SamplingRequest

Guarantee = Literal["dp", "inherited", "none"]
Candidates = Literal["rows", "batch", "copies", "pool"]
PassageGradient = Literal["none", "own", "full"]


@dataclass(frozen=True)
class Update:
    """The gradient for the optimizer, and its provenance.

    Attributes:
        gradients: Per parameter name, already divided by the public denominator.
        noise_std: The standard deviation of the noise that was added to the sum. The guard measures it: a mode may
            report less noise than planned, and is charged for that.
        sensitivity: How far one unit can move the sum (L2).
        denominator: The divisor of the noised sum.
        clip_fraction: The noised share of units that were clipped, where the plan pays for it.
    """

    gradients: dict[str, Tensor]
    noise_std: float
    sensitivity: float
    denominator: float
    clip_fraction: float | None = None


@dataclass
class StepCounts:
    """Counts of a logical step; private under ``add_or_remove``, so never logged without noise."""

    units: int = 0
    clipped: int = 0
    non_finite: int = 0
    within: int = 0


class PrivacyMode(ABC):
    """The interface between a training loop and a privacy mechanism.

    Attributes:
        candidates: What a row's loss may depend on, for a module that contrasts pairs: ``rows`` (its own row and public
            data), ``batch`` (the other rows themselves), ``copies`` (copies of them that belong to the row) or ``pool``
            (public passages).
        strategies: Those of `lit_dpret.distributed.strategies` under which the claim holds; an undeclared one is
            refused.
        clips_whole_batch: Whether the bound applies to the gradient of a whole sub-batch instead of each unit's.
        calibrated_to_loss: Whether the noise depends on the module's loss, so that a plan needs the module.
        passage_gradient: Through which passages a query's gradient flows.
        pool_size: Where candidates are a ``pool``: the number of public passages that a step draws; None for all.
        pool_seed: The seed of those draws; public.
        sub_batches: The number of sub-batches of a logical batch whose rows see each other; None where the batch is
            split to fit the device.
        fixed_shapes: Whether every physical batch is padded to one shape, and no branch may depend on a value; set
            before ``attach``.
        delta_at_most: The delta of the run that training starts from; no claim about both runs is stated above it.
        limit: The setting of the limit of the data-set ledger, for messages, if it is not ``privacy.total_eps``.
        bounds_any_rows: Whether the bound on a unit holds even where all other rows of its batch get another gradient
            without it, as may happen in low precision.
    """

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee]
    # A mode keeps the module of its last run. `trained.objects_in` skips such an object when it looks for weights;
    # otherwise a module would seem to hold everything that was trained under its mode before.
    holds_module: ClassVar[bool] = True
    candidates: ClassVar[Candidates] = "rows"
    strategies: ClassVar[Supported] = ONE_DEVICE
    bounds_any_rows: ClassVar[bool] = False
    clips_whole_batch: ClassVar[bool] = False
    calibrated_to_loss: ClassVar[bool] = False
    passage_gradient: PassageGradient = "full"
    pool_size: int | None = None
    pool_seed: int = 0
    sub_batches: int | None = None
    fixed_shapes: bool = False
    unit: Unit = "query"
    neighbours: Neighbours = "zero_out"
    secret_file: str | Path | None = None
    secure_rng: bool = False
    noise_seed: int | None = None
    delta_at_most: float | None = None
    limit: str | None = None
    _sums: Any  # set by `attach`: a clipping engine, or `GradientSums`

    def __init__(self) -> None:
        self.counts = StepCounts()

    def __getstate__(self) -> dict[str, Any]:
        """Copy or pickle only the settings: no secret, no private sum, nothing attached."""
        kept = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return kept | {"counts": StepCounts()}

    def public_units(self, units: int) -> int | None:
        return None if self.neighbours == "add_or_remove" else units

    def check_request(self, request: SamplingRequest) -> None:  # noqa: B027  (without a plan any will do)
        """Refuse batches that this mode cannot plan, before any data are read."""

    def plan(self, request: SamplingRequest, *, units: int, steps: int, module: Any = None) -> PrivacyPlan | None:
        """Return the plan of a run that releases private data; None if it does not."""
        return None

    def facts(self) -> Mapping[str, Any]:
        """Return further facts for the card about this mode: public JSON values, by name."""
        return {}

    def recorded_facts(self) -> dict[str, Any]:
        """Return `facts` in the form in which a ledger stores them, for comparison on a resume."""
        recorded = {}
        for name, value in self.facts().items():
            try:
                if not isinstance(name, str):
                    raise TypeError("its name is not a string")
                # Through JSON and back, so that a tuple equals the list that a ledger returns.
                recorded[name] = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"privacy={self.name}: mode_facts.{name} is not a JSON value ({error}), so the ledger cannot "
                    f"hold it. Return numbers, strings, lists and dictionaries from {type(self).__name__}.facts()."
                ) from error
        return recorded

    def ledger_of_dataset(self, budget: PrivacyBudget, *, run_dir: Path | None = None) -> DatasetLedger | None:
        """Return the data-set ledger; None if not configured."""
        return None

    @property
    def gradient_noise_std(self) -> float:
        """Standard deviation of the noise in each coordinate of an update's gradients, once attached; public."""
        return 0.0

    @abstractmethod
    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        """Prepare to train ``module``; refuse it by name if the claim would not hold."""

    @property
    def units_apart(self) -> bool:
        """Return whether each unit is computed in its own passes, in which no other unit takes part."""
        return getattr(getattr(self, "_sums", None), "units_apart", False)

    @property
    def clips_by_block(self) -> bool:
        """Return whether sums may be handed over block by block, to the store that `keep_in` sets after `attach`."""
        return False

    def keep_in(self, store: Any) -> None:
        """Let a `SumStore` keep the sums from now on."""
        self._sums.store = store

    def contribute(self, module: Any, batch: Any) -> None:
        """Add a `PrivateModule`'s batch with at least one row; some modes need more than the loss of its rows."""
        # An engine for a compiler takes slots with equal numbers of rows; there a unit's own rows fill up its slot.
        owners, real = (batch.unit_ids, batch.mask) if self.fixed_shapes else batch.owners_of_rows()
        self.add(module.unit_loss(batch), owners, real)

    @abstractmethod
    def add(self, row_loss: Callable[..., Tensor], unit_ids: Tensor, mask: Tensor) -> None:
        """Add one physical batch; ``row_loss`` runs the forward pass of all rows, or of the rows with the given
        indices.
        """

    def take(self) -> dict[str, Tensor]:
        """Return the sums of the logical step by parameter name, before noise; start the next step."""
        found: dict[str, Tensor] = self._sums.take()
        return found

    def extra_sums(self) -> dict[str, Tensor]:
        """Return further coordinates of the logical step's sum, after `take`, from the counts of all ranks."""
        return {}

    def forget(self) -> None:
        """Discard everything added in this logical step, a half-added batch included; the step restarts."""
        self._sums.forget()
        self.counts = StepCounts()

    @abstractmethod
    def privatize(
        self,
        sums: dict[str, Tensor],
        *,
        attempt: int,
        step: int,
        salt: str = "",
        starts: Mapping[str, int] | None = None,
    ) -> Update:
        """Turn the ``sums`` over all ranks into the update: add noise once, then divide by the plan's denominator.

        The sums must stay unchanged: the guard subtracts them from the update to see the noise. ``attempt``, ``step``
        and ``salt``, a tag of the sum that the noise is added to, key the noise. Where ``sums`` holds a flat part of
        each parameter, ``starts`` are the flat indices at which the parts begin; a part gets the same noise as it would
        within the whole parameter.
        """


class GradientSums:
    """The sum of the gradients of a logical step by parameter name, in float32 or wider."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sums: dict[str, Tensor] = {}

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add gradients; never in place, since autograd may return one tensor for two parameters."""
        for name, gradient in gradients.items():
            if gradient is not None:
                # In float32 at least: many small gradients added up in bfloat16 would vanish.
                wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
                self._sums[name] = wide if name not in self._sums else self._sums[name] + wide

    def take(self) -> dict[str, Tensor]:
        sums, self._sums = self._sums, {}
        for name, parameter in trainable(self._module).items():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            # A parameter without a gradient gets noise too, or its absence would show.
            sums.setdefault(name, torch.zeros_like(parameter, dtype=wide, requires_grad=False))
        return sums

    def forget(self) -> None:
        self._sums = {}
