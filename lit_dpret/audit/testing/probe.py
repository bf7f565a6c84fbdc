"""Run single logical steps of a module without a Trainer, and record their results.

The real ``training_step`` runs. The accountant is replaced by one that grants everything, and the optimizer by one that
records its input. So the probe sees what an optimizer would have seen, whichever part of the path failed.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, PrivacyViolation, UnsupportedModelError
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.modules.coupling_check import CouplingCheck
from lit_dpret.modules.hook_watch import HookWatch
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.clipping.base import trainable
from lit_dpret.privacy.ledger.gate import Permit
from lit_dpret.privacy.modes import PrivacyMode, Update
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan

WEIGHT = "__lit_dpret_testing_weight__"


@dataclass(frozen=True)
class Inputs:
    """Units of rows, to build batches from."""

    # Tensors whose first axis is the rows, or a list for the module's ``collate_rows``.
    rows: dict[str, Tensor] | list[Any]
    unit_ids: Tensor  # the unit of each row, ``(rows,)``, counted from 0 without gaps

    @classmethod
    def build(cls, batch: Any, unit_ids: Tensor | None) -> Inputs:
        rows: dict[str, Tensor] | list[Any]
        if isinstance(batch, list):
            count, rows = len(batch), batch
        elif isinstance(batch, Mapping) and batch and all(isinstance(v, Tensor) and v.dim() for v in batch.values()):
            rows, lengths = dict(batch), {len(v) for v in batch.values()}
            count = lengths.pop()
            if lengths:
                raise ConfigurationError("batch: its tensors differ in the length of their first axis, the rows.")
        else:
            raise ConfigurationError(
                f"batch is a {type(batch).__name__}; give a dict of tensors whose first axis is the rows, or a list "
                "of rows that the module's collate_rows takes."
            )
        ids = torch.arange(count) if unit_ids is None else unit_ids.cpu().long()
        units = sorted(set(ids.tolist()))
        if ids.shape != (count,) or units != list(range(len(units))):
            raise ConfigurationError(
                f"unit_ids must give each of the {count} rows a unit, counted from 0 without gaps."
            )
        if len(units) < 2:
            raise ConfigurationError(
                "batch holds fewer than two units, so its neighbours would show nothing. Give three or more."
            )
        return cls(rows, ids)

    @property
    def units(self) -> int:
        return int(self.unit_ids.max()) + 1

    def collated(self, module: PrivateModule) -> Inputs:
        """Return the same units as tensors collated once, so that all batches have the same shape."""
        rows = module.collate_rows(self.rows) if isinstance(self.rows, list) else self.rows
        return Inputs(rows, self.unit_ids)

    def collate(
        self, module: PrivateModule, units: Sequence[int], weights: Mapping[int, float], emptied: Sequence[int] = ()
    ) -> tuple[Any, Tensor]:
        """Return the rows of ``units`` (a unit may occur twice) with their weights, and each row's slot ``(rows,)``.

        Slots that are ``emptied`` have no rows. If no row at all is left, the rows are None.
        """
        index = [(self.unit_ids == unit).nonzero().flatten() for unit in units]
        index = [rows[:0] if slot in emptied else rows for slot, rows in enumerate(index)]
        if not sum(map(len, index)):
            return None, torch.zeros(0, dtype=torch.long)
        chosen = torch.cat(index)
        slots = torch.cat([torch.full_like(rows, slot) for slot, rows in enumerate(index)])
        if isinstance(self.rows, list):
            rows = module.collate_rows([self.rows[i] for i in chosen.tolist()])
            if not isinstance(rows, MutableMapping):
                raise ConfigurationError(
                    f"{type(module).__name__}.collate_rows returned a {type(rows).__name__}; it must return a dict of "
                    "tensors whose first axis is the rows."
                )
        else:
            rows = {name: value[chosen.to(value.device)] for name, value in self.rows.items()}
        rows[WEIGHT] = torch.tensor([weights.get(int(self.unit_ids[i]), 1.0) for i in chosen])
        return rows, slots


@dataclass
class Step:
    """The result of one logical step."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # passed to the guard: the clipped sums before noise
    gradients: dict[str, Tensor] = field(default_factory=dict)  # found by the optimizer in ``.grad``
    denominator: float = 1.0  # the public constant of the plan
    beside: dict[str, Tensor] = field(default_factory=dict)  # other released values, as coordinates of the noised sum

    def noised_sums(self) -> dict[str, Tensor]:
        """Return the gradients times the denominator, and other released values, in float64."""
        return {name: g.double() * self.denominator for name, g in self.gradients.items()} | self.beside

    def noise(self) -> dict[str, Tensor]:
        """Return the noise added to the sums, in float64."""
        noised = self.noised_sums()
        return {name: noised[name] - self.sums[name].double() for name in noised if name in self.sums}


def gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the L2 distance over all parameters together."""
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


def _violation(error: UnsupportedModelError) -> PrivacyViolation:
    """Return the refusal of a step as a violation of ``independence``, or of ``step`` if it has another reason."""
    what = "independence" if error.trap in ("T10", "T11") else "step"
    return PrivacyViolation(f"{what}: {error.sentence}", trap=error.trap)


class Probe:
    """A module prepared for steps; created by ``probing``.

    Attributes:
        plan: The plan of one step over the whole batch, with noise calibrated to the tested claim.
        weights: The factor of each unit's loss; 1 for units that are not listed.
    """

    def __init__(self, module: PrivateModule, inputs: Inputs, mode: PrivacyMode, plan: PrivacyPlan, seed: int) -> None:
        self.module, self.inputs, self.mode, self.plan = module, inputs, mode, plan
        self.weights: dict[int, float] = {}
        self.salt = ""
        self.attempt = 0
        self.stream = KeyedStream(hashlib.sha256(str(seed).encode()).digest(), "assert_private")
        self._step = Step()
        self._count = 0

    @property
    def bound(self) -> float:
        """The most that one unit may move the sum."""
        return self.plan.sensitivity

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return trainable(self.module)

    def step(
        self, units: Sequence[int], *, step: int = 0, attempt: int = 0, salt: str = "", size: int | None = None,
        masked: Sequence[int] = (), emptied: Sequence[int] = (),
    ) -> Step:  # fmt: skip
        """Run one logical step over ``units``.

        ``step`` and ``attempt`` key noise and dropout, ``salt`` the noise. Slots that are ``masked`` have rows but
        are not real, and must contribute nothing. ``emptied`` slots are real but have no rows, like a unit that was
        replaced by nothing. ``size`` is the units per physical batch; None puts all into one.
        """
        self._step, self._count, self.salt, self.attempt = Step(denominator=self.plan.denominator), 0, salt, attempt
        try:
            for index, batch in enumerate(
                self._batches(units, step, attempt, size or max(len(units), 1), masked, emptied)
            ):
                self.module.training_step(batch.to(self.module.device), index)
        except UnsupportedModelError as error:
            raise _violation(error) from error
        if self._count != 1:
            what = "an empty logical batch" if not units else f"a logical batch of {len(units)} units"
            raise PrivacyViolation(f"steps: {what} made {self._count} updates instead of one.")
        return self._step

    def _batches(
        self, units: Sequence[int], step: int, attempt: int, size: int, masked: Sequence[int], emptied: Sequence[int]
    ) -> Iterator[UnitBatch]:
        if not units:
            none = torch.zeros(0, dtype=torch.long)
            yield UnitBatch(None, none, torch.zeros(1, dtype=torch.bool), step, 0, True, attempt)
        for part, first in enumerate(range(0, len(units), size)):
            chosen = units[first : first + size]
            blank = [slot for slot in range(len(chosen)) if first + slot in emptied]
            rows, slots = self.inputs.collate(self.module, chosen, self.weights, blank)
            mask = torch.tensor([first + slot not in masked for slot in range(len(chosen))])
            yield UnitBatch(rows, slots, mask, step, part, first + size >= len(units), attempt)

    # -- in place of the accountant and the optimizer ---------------------------------------

    def authorise(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> Permit:
        self._step.sums = {name: value.detach().clone() for name, value in sums.items()}
        return Permit(attempt, step, self.salt)

    def record(self, permit: Permit, update: Update) -> None:
        """Store the value released in addition to the gradients, as its original coordinate."""
        if update.clip_fraction is not None:
            noised = clip_fraction.coordinate_of(
                update.clip_fraction,
                max_grad_norm=self.plan.max_grad_norm,
                share=self.plan.clip_fraction_budget,
                denominator=self.plan.denominator,
            )
            self._step.beside = {clip_fraction.NAME: torch.tensor(noised, dtype=torch.float64)}

    def take(self) -> None:
        found = ((name, p.grad) for name, p in self.parameters.items())
        self._step.gradients = {name: g.detach().clone() for name, g in found if g is not None}
        self._count += 1

    def clear(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


class _Optimizer:
    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def step(self) -> None:
        self._probe.take()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._probe.clear()


@contextmanager
def probing(module: PrivateModule, inputs: Inputs, plan: PrivacyPlan, seed: int) -> Iterator[Probe]:
    """Yield a probe of the module; restore weights and modes at the end."""
    mode = copy.copy(module.privacy)
    probe = Probe(module, inputs, mode, plan, seed)
    loss = module.per_row_loss

    def weighted(rows: Any) -> Tensor:
        rest = type(rows)({name: value for name, value in rows.items() if name != WEIGHT})
        losses: Tensor = loss(rest) * rows[WEIGHT].to(next(module.parameters()).device)
        return losses

    lent: dict[str, Any] = {
        "privacy": mode, "per_row_loss": weighted, "_guard": probe, "optimizers": lambda: _Optimizer(probe),
        "lr_schedulers": lambda: None, "log": lambda *args, **kwargs: None,
        "_couplings": CouplingCheck(), "_hooks": HookWatch(), "_loss_sum": 0.0, "updating": False,
    }  # fmt: skip
    before = {name: module.__dict__[name] for name in lent if name in module.__dict__}
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    try:
        probe.clear()
        try:
            mode.attach(module, plan, probe.stream)
        except UnsupportedModelError as error:
            raise _violation(error) from error
        module.__dict__.update(lent)
        with evaluation_mode(module):  # dropout would make two runs differ; training mode has a separate check
            yield probe
    finally:
        for name in lent:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
