"""The guarantee of every clipping engine, and the code that engines share.

An engine turns the losses of one physical batch into a sum, in fp32, of the gradients of *units*, each scaled down to
``max_grad_norm``. The mode adds noise and divides, once per logical step. *Per-layer* clipping (He et al. 2023,
2212.01539) bounds each of K layers by C / sqrt(K); by Pythagoras, the whole gradient stays within C.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Required, TypedDict, get_args

import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.budget import ClipGroups, ClipName
from lit_dpret.privacy.clipping.rules import refuse_embedding
from lit_dpret.privacy.clipping.units import UnitRows
from lit_dpret.settings import require_choice, require_number


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, each shared tensor once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def group_parameters(names: Iterable[str], clip_groups: ClipGroups) -> tuple[tuple[str, ...], ...]:
    """Return the parameters in groups, in their order.

    A layer is the module that owns a parameter. A parameter that several modules share belongs to the first of them,
    which is where ``named_parameters`` lists it. So every parameter is in exactly one group, and a tied weight counts
    once.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = "" if clip_groups == "flat" else name.rpartition(".")[0]
        groups.setdefault(layer, []).append(name)
    return tuple(map(tuple, groups.values()))


#: A smaller clip factor would lose its digits in fp32, and the bound with them; such a unit is dropped.
LEAST_FACTOR = 1e-30
#: Returns the losses of all rows or, given indices ``(n,)``, of those rows alone.
RowLoss = Callable[..., Tensor]

#: How far the upper bound on a norm may exceed the computed norm, as a share (engine ``ghost`` and its subclasses), by
#: the dtype of the sums. Where the bound is looser, the norm is computed in float64.
LOOSE = {torch.float64: 2.0**-31, torch.float32: 2.0**-8}
#: Room for rounding, as a share of a unit's contribution, by the dtype of the sums. It covers the amount by which a
#: norm may be too small, plus 1e-3 in float32. Of that 1e-3, a factor and its product with a gradient each take a
#: rounding error of 6e-8. The rest covers the unit's effect on the rounding of other units and of the total, without
#: proof: 3.5e-5 was observed with 64 units of a T5.
CLIP_ROUNDING = {torch.float64: 1e-9, torch.float32: 5e-3}


@dataclass(frozen=True)
class ClipStats:
    """Norms and counts of one physical batch. Private: release only a noised summary."""

    # L2 norm of each unit's gradient before clipping, ``(units,)``: zero for a masked slot, and the computed value (NaN
    # or infinity) for a unit that was dropped.
    norms: Tensor
    # The number of units whose norm exceeds ``max_grad_norm``; with per-layer clipping, whose norm exceeds the bound in
    # any layer. The count is on the device: reading it waits for the device.
    clipped: Tensor
    # The number of units whose gradient is within the bound. A unit without rows has no gradient and is in no count.
    within: Tensor
    non_finite: Tensor  # the number of units dropped for a loss or gradient that is not finite; also a device count


def clip_factors(norms: Tensor, *, max_grad_norm: float, clip: ClipName, gamma: float) -> Tensor:
    """Return the factor that clips each unit's gradient.

    Guarantees:
        - A factor times its norm is at most ``max_grad_norm``, up to rounding.
        - ``abadi`` (Abadi et al. 2016, 1607.00133) leaves a gradient within the bound unchanged.
        - ``automatic`` (Bu et al. 2023, 2206.07136, eq. 5) is ``max_grad_norm / (norm + gamma)``.
        - A norm that is not finite gets factor zero, and so does one whose factor would be below 1e-30.
    """
    factors = (max_grad_norm / norms).clamp(max=1.0) if clip == "abadi" else max_grad_norm / (norms + gamma)
    return torch.where((norms < math.inf) & (factors >= LEAST_FACTOR), factors, 0)


def accumulator_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of sums: fp32, or float64 if the parameter is float64."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def room_for_rounding(
    bound: float, parameters: Iterable[Tensor], rounding: Mapping[torch.dtype, float] = CLIP_ROUNDING
) -> float:
    """Return the norm to clip to, with room for rounding, so that a contribution stays within ``bound``.

    The charged sensitivity stays ``bound``. One effect has no proof: how one unit changes the rounding of the running
    total over all units. It is a property of all floating-point mechanisms, and the card names it.
    """
    return bound / (1 + max(rounding[accumulator_dtype(parameter)] for parameter in parameters))


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=accumulator_dtype(parameter), requires_grad=False)


def check_losses(losses: Tensor, rows: int) -> None:
    """Refuse a loss that cannot be split into its rows."""
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UnsupportedModelError(
            f"The loss has shape {shape} for {rows} rows. Clipping needs one loss per row, shape ({rows},): "
            "a mean or a sum over the batch cannot be split between its units.",
            trap="T11",
        )
    if not losses.requires_grad:
        raise UnsupportedModelError(
            "The loss depends on no trainable parameter, so every step would spend privacy on noise alone. "
            "The cause may be merged or disabled adapters, torch.no_grad() or detach().",
            trap="T13",
        )


def broken_units(losses: Tensor, batch: UnitRows) -> Tensor:
    """Return which real units have a loss that is not finite, ``(units,)``."""
    broken = torch.zeros(batch.units, dtype=torch.int32, device=losses.device)
    broken.index_add_(0, batch.unit_of_row, (~(losses.abs() < math.inf)).int())
    return (broken > 0) & batch.real


def refuse_batch_mixing(module: nn.Module) -> None:
    """Refuse layers in which one unit affects another's gradient, or that keep batch statistics."""
    for name, layer in module.named_modules():
        refuse_embedding(name, layer)
        normalises = isinstance(layer, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm))
        if not normalises:
            continue
        tracks = layer.running_mean is not None
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if (batch_norm and (layer.training or not tracks)) or (not batch_norm and layer.training and tracks):
            raise UnsupportedModelError(
                f"{name or 'the module'} is a {type(layer).__name__} that uses or stores statistics of the whole "
                "batch, so one unit changes the gradients of all others and no clipping bounds it, frozen or not. "
                "Replace it with GroupNorm, or put it in eval mode with its running statistics.",
                trap="T11",
            )


class ClipSettings(TypedDict, total=False):
    """The arguments of `ClippedSum`, which every engine accepts."""

    max_grad_norm: Required[float]
    clip: ClipName
    gamma: float
    clip_groups: ClipGroups


class SumStore(Protocol):
    """Storage for the sums outside the engine, where no process may hold all of them (`BlockByBlock`).

    Attributes:
        parts: The names of the parameters whose sums are handed over together.
    """

    parts: Sequence[Sequence[str]]

    def free(self) -> None:
        """Free the weights that the passes needed."""

    def add(self, part: int, sums: dict[str, Tensor]) -> None:
        """Add the sums of a physical batch and empty them; a missing sum counts as zero."""

    def take(self) -> dict[str, Tensor]:
        """Return the part of the sums that this process keeps, and begin the next step."""

    def forget(self) -> None:
        """Discard everything added since the step began."""


class ClippedSum(ABC):
    """The sum of clipped unit gradients over the physical batches of one logical step.

    Guarantees:
        - Adding or removing one unit moves the sum by at most ``max_grad_norm`` in L2 norm over all parameters
          together. With per-layer clipping, it moves the sum of each of K layers by at most
          ``max_grad_norm / sqrt(K)``. Both bounds include the rounding of the unit's own contribution
          (`room_for_rounding`).
        - The split of a logical batch into physical batches does not change the sum.
        - A masked slot contributes exactly zero, and so does a unit whose loss or gradient is not finite. The number of
          such units is private: no file and no log holds it.
        - ``add`` leaves no trace in the module: no hook, no attribute, no ``grad``.

    Attributes:
        fixed_shapes: Whether batches have a fixed shape (`units`); false for engines that do not support one.
        units_apart: Whether each unit has its own forward and backward pass.
        groups: The names of the parameters that are clipped together.
        bound: The L2 bound on one unit's gradient in each group.
        store: The object that keeps the sums instead of the engine; None if the engine keeps them.
    """

    fixed_shapes: bool = False
    units_apart: bool = False
    store: SumStore | None = None

    def __init__(
        self,
        module: nn.Module,
        *,
        max_grad_norm: float,
        clip: ClipName = "abadi",
        gamma: float = 0.01,
        clip_groups: ClipGroups = "flat",
    ) -> None:
        require_number("privacy", {"max_grad_norm": max_grad_norm, "gamma": gamma})
        require_choice("privacy.clip", clip, get_args(ClipName))
        require_choice("privacy.clip_groups", clip_groups, get_args(ClipGroups))
        self.module = module
        self.max_grad_norm = float(max_grad_norm)
        self.clip: ClipName = clip
        self.gamma = float(gamma)
        self.parameters = trainable(module)
        if not self.parameters:
            raise UnsupportedModelError("The module has no trainable parameter: there is no gradient to clip.")
        if found := [name for name, parameter in self.parameters.items() if parameter.is_complex()]:
            raise UnsupportedModelError(
                f"Parameter {found[0]} is complex, and no engine clips complex gradients. Store its real and imaginary "
                "parts in a real parameter (torch.view_as_real).",
                trap="T13",
            )
        self.groups = group_parameters(self.parameters, clip_groups)
        self.group_of = {name: index for index, names in enumerate(self.groups) for name in names}
        # By Pythagoras, K groups of norm C / sqrt(K) have norm C together.
        self.bound = self.max_grad_norm / math.sqrt(len(self.groups))
        refuse_batch_mixing(module)
        self._refuse_hooks()
        self._sums: dict[str, Tensor] = {}
        self._torn = False

    def add(self, row_loss: RowLoss, unit_ids: Tensor, mask: Tensor) -> ClipStats:
        """Add the clipped gradients of one physical batch.

        Args:
            row_loss: Runs the forward pass and returns one loss per row, ``(rows,)``. It runs once, with gradients
                enabled, in the caller's autocast. ``loop`` instead calls it once per unit with the indices of the
                unit's rows, ``(n,)``, for the losses of those rows alone. It is not called for a batch in which no real
                unit has a row. A row's loss must be a function of that row (and of its unit's other rows) alone. It
                must not be divided by the number of rows or by a count of tokens over the batch; no engine can detect
                that.
            unit_ids: Slot of each row's unit, ``(rows,)``. A unit's loss is the sum of its rows' losses.
            mask: Which slots are real, ``(units,)`` booleans.
        """
        self._refuse_torn_sums()
        self._refuse_changes()
        self._refuse_hooks()
        refuse_batch_mixing(self.module)
        device = next(iter(self.parameters.values())).device if self.fixed_shapes else mask.device
        batch = UnitRows.build(unit_ids, mask, device=device, fixed=self.fixed_shapes)
        if not batch.has_rows:
            none = torch.zeros((), dtype=torch.long, device=device)
            return ClipStats(norms=torch.zeros(batch.units, device=device), clipped=none, within=none, non_finite=none)
        with torch.enable_grad():
            return self._add(row_loss, batch)

    @abstractmethod
    def _add(self, row_loss: RowLoss, batch: UnitRows) -> ClipStats: ...

    def take(self) -> dict[str, Tensor]:
        """Return the sums by parameter name, dense and with each shared tensor once, and reset the accumulator."""
        self._refuse_torn_sums()
        if self.store is not None:
            return self.store.take()
        sums = {}
        for name, parameter in self.parameters.items():
            found = self._sums.pop(name, None)
            sums[name] = _zeros(parameter) if found is None else found
        self.forget()
        return sums

    def forget(self) -> None:
        self._sums.clear()
        self._torn = False
        if self.store is not None:
            self.store.forget()
        if self.fixed_shapes:  # so that the first batch of a step runs the same program as the others
            self._sums = {name: _zeros(parameter) for name, parameter in self.parameters.items()}

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Guard writes to the sums: half a batch must neither be released nor be added twice."""
        # Set before the first write and cleared after the last; an exception in between leaves it set.
        self._torn = True
        yield
        self._torn = False

    def _refuse_torn_sums(self) -> None:
        if self._torn:
            raise UnsupportedModelError(
                "An earlier physical batch failed while it was being added (out of memory, or interrupted), so the sum "
                "holds a part of it. Begin the logical step again: forget() drops the sum."
            )

    @property
    def target(self) -> float:
        """The norm that gradients are clipped to: below the bound, so that rounding errors stay within it."""
        return room_for_rounding(self.bound, self.parameters.values())

    def factors(self, norms: Tensor) -> Tensor:
        """Return clip factors for norms of ``(groups, units)``; one broken group drops the whole unit."""
        factors = clip_factors(norms, max_grad_norm=self.target, clip=self.clip, gamma=self.gamma)
        # All groups or none: a unit that is broken in one layer cannot be trusted in another.
        return factors * (factors > 0).all(0)

    def stats(
        self, norms: Tensor, batch: UnitRows, present: Tensor | None = None, factors: Tensor | None = None
    ) -> ClipStats:
        """Count clipped, dropped and other real units.

        All arguments are given for ``(groups, units)``: norms, which units have a gradient, and the `factors` of the
        norms, which may be zero for a masked slot.
        """
        present = norms > 0 if present is None else present
        kept = ((self.factors(norms) if factors is None else factors) > 0).any(0) & batch.real
        above = (norms > self.bound).any(0)
        return ClipStats(
            norms=torch.where(batch.real, torch.linalg.vector_norm(norms, dim=0), 0.0),
            clipped=(kept & above).sum(),
            within=(kept & ~above & present.any(0)).sum(),
            non_finite=(~kept & batch.real).sum(),
        )

    def _refuse_hooks(self) -> None:
        """Refuse hooks on parameters: they would see, or change, gradients before they are clipped."""
        for name, parameter in self.parameters.items():
            if parameter._backward_hooks:
                raise UnsupportedModelError(
                    f"Parameter {name} has a gradient hook (register_hook; wandb.watch sets one), which would see "
                    "or change gradients before they are clipped. Remove it.",
                    trap="T14",
                )

    def _refuse_changes(self) -> None:
        """Refuse if the trainable parameters are not the very objects that were there at construction."""
        now = trainable(self.module)
        for name in sorted(now.keys() | self.parameters.keys()):
            if now.get(name) is self.parameters.get(name):
                continue
            what = "was replaced" if name in now and name in self.parameters else "became trainable"
            what = what if name in now else "was frozen or removed"
            raise UnsupportedModelError(
                f"Parameter {name} {what} after the clipping engine was made, so its gradient would be "
                "missed or misplaced. Change the model before training begins: the engine is made at its start.",
                trap="T14",
            )
