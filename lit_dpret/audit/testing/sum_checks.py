"""Check that a unit moves the sum by at most its bound, and that its contribution depends only on itself.

Two neighbouring batches are run with the same randomness, so the noise cancels out of their difference and only one
unit's contribution is left. To reach the bound, a unit's loss is multiplied by a constant (rows are arbitrary, so a row
with a hundredfold loss is also one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_dpret.audit.testing.probe import Probe, Step, gap
from lit_dpret.errors import ConfigurationError, PrivacyViolation
from lit_dpret.evaluation_mode import evaluation_mode

#: The difference allowed between two ways of computing a contribution, as a share of the bound.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION = 3e-2
LOUD = 200.0


def tolerance(probe: Probe) -> float:
    """Return the tolerance as a share of the bound, for the lowest precision of the parameters."""
    return max(TOLERANCE.get(p.dtype, LOW_PRECISION) for p in probe.parameters.values())


def quiet_weights(probe: Probe, units: Sequence[int]) -> dict[int, float]:
    """Return weights with which each unit alone moves the sum by a fifth to four fifths of the bound: unclipped.

    Units whose gradient is zero or stays out of reach are omitted.
    """
    found: dict[int, float] = {}
    for unit in units:
        weight = 1.0
        for _ in range(40):
            probe.weights = {unit: weight}
            sums = probe.step([unit]).sums
            share = norm({name: sums[name] for name in probe.parameters}) / probe.bound
            if 0.2 <= share <= 0.8:
                found[unit] = weight
                break
            if share > 0.8 and weight < 1e-20:
                raise PrivacyViolation(
                    f"independence: unit {unit} alone moves the clipped sum by {share * probe.bound:.4g} even where "
                    f"its loss is multiplied by {weight:.0e}, so something other than its gradient is in the sum."
                )
            if share == 0 or weight > 1e20:
                break
            weight *= 0.1 if share > 0.8 else min(0.5 / share, 1e3)
    probe.weights = {}
    if len(found) < 2:
        raise ConfigurationError(
            "batch: fewer than two of its units have a gradient, so clipping cannot be tested with it. Pass rows on "
            "which the model is wrong."
        )
    return found


def check_sensitivity(probe: Probe, quiet: dict[int, float]) -> tuple[float, int]:
    """Remove, empty or replace one loud unit; return the largest change of the sum over the bound, and the unit."""
    everybody = list(range(probe.inputs.units))
    worst, which = 0.0, next(iter(quiet))
    for unit in quiet:
        other = next(u for u in quiet if u != unit)
        probe.weights = quiet | {unit: LOUD * quiet[unit]}
        without = [u for u in everybody if u != unit]
        for size in (None, 2):
            whole = probe.step(everybody, size=size)
            share = _moved(probe, whole, probe.step(without, size=size), 1, f"without unit {unit}")
            emptied = probe.step(everybody, size=size, emptied=[unit])
            share = max(share, _moved(probe, whole, emptied, 1, f"with unit {unit} replaced by nothing"))
            if share > worst:
                worst, which = share, unit
        replaced = [other if u == unit else u for u in everybody]
        _moved(probe, probe.step(everybody), probe.step(replaced), 2, f"with unit {unit} replaced by unit {other}")
    probe.weights = {}
    if worst < 0.5:
        raise ConfigurationError(
            f"batch: its loudest unit moves the sum by {worst:.2g} of the bound, so the bound was not tested. "
            "The mode may clip to less than its plan states."
        )
    return worst, which


def check_independence(probe: Probe, quiet: dict[int, float]) -> None:
    """Check that a unit contributes the same with any other content or padding of its physical batch."""
    units = list(quiet)
    probe.weights = dict(quiet)
    alone = {unit: probe.step([unit]).sums for unit in units}
    added = {name: torch.stack([sums[name].double() for sums in alone.values()]).sum(0) for name in alone[units[0]]}
    for size in (None, 1, 2, 3):
        together = probe.step(units, size=size).sums
        where = f"in physical batches of {size or len(units)}"
        _same(probe, together, added, len(units), f"all units together {where} and each of them alone")
    for slot, unit in enumerate(units):
        others = [s for s in range(len(units)) if s != slot]
        masked = probe.step(units, masked=others).sums
        _same(probe, masked, alone[unit], 1, f"unit {unit} next to padding that must not count, and alone")
    given = probe.inputs
    probe.inputs = given.collated(probe.module)
    for slot, unit in enumerate(units):
        others = [s for s in range(len(units)) if s != slot]
        if len(set(torch.bincount(given.unit_ids)[units].tolist())) > 1:
            break  # other units have other shapes, and so other dropout masks
        # Dropout masks are keyed by the step, so equal shapes get equal masks.
        with evaluation_mode(probe.module, train=True):
            before, after = probe.step(units, masked=others).sums, probe.step([unit] * len(units), masked=others).sums
        _same(probe, before, after, 1, f"unit {unit} in training mode next to other units and next to copies of itself")
    probe.inputs, probe.weights = given, {}


def _moved(probe: Probe, whole: Step, neighbour: Step, times: int, what: str) -> float:
    """Return how far the sum moved over the bound, before noise and again in what the optimizer got."""
    coordinates = sum(p.numel() for p in probe.parameters.values())
    # Adding the same noise to two sums rounds each of them differently.
    epsilon = max(torch.finfo(p.dtype).eps for p in probe.parameters.values())
    rounding = 8 * epsilon * probe.plan.noise_std * coordinates**0.5
    views: tuple[tuple[str, Callable[[Step], dict[str, Tensor]], float], ...] = (
        ("the clipped sum", lambda step: step.sums, 0.0),
        ("the noised sum that the optimizer gets", Step.noised_sums, rounding),
    )
    share = 0.0
    for name, view, slack in views:
        moved = gap(view(whole), view(neighbour))
        if not moved <= times * probe.bound * (1 + tolerance(probe)) + slack:
            raise PrivacyViolation(
                f"sensitivity: {name} moves by {moved:.4g} between a batch and the same batch {what}, all randomness "
                f"equal; the claim rests on at most {times * probe.bound:.4g}."
            )
        share = share or moved / probe.bound
    return share


def _same(probe: Probe, a: dict[str, Tensor], b: dict[str, Tensor], units: int, what: str) -> None:
    apart = gap(a, b)
    if not apart <= units * probe.bound * tolerance(probe):
        raise PrivacyViolation(
            f"independence: the sums of {what} differ by {apart:.4g} (the bound on one unit is {probe.bound:.4g}): "
            "what a unit contributes depends on the other units, so clipping each unit bounds nothing."
        )


def norm(sums: dict[str, Tensor]) -> float:
    """Return the L2 norm over all parameters together."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in sums.values()))
