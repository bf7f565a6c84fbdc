"""Check that noise is on every coordinate, once, with the stated deviation, and fresh each time.

Every threshold is a quantile at a level of about one in a thousand million, so an honest mechanism passes with any
seed. The draws are keyed, so a result repeats.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping

from scipy.stats import chi2
from torch import Tensor

from lit_dpret.audit.testing.probe import Probe, Step
from lit_dpret.errors import PrivacyViolation

LEVEL = 1e-9
DEVIATIONS = 7.0
DRAWS = 64

Noise = Mapping[str, Tensor]


def check_noise_of_empty_steps(probe: Probe) -> float:
    """Check noise without data; return its measured standard deviation over the planned one."""
    std = probe.plan.noise_std
    squares: dict[str, Tensor] = {}
    steps, entries, axes, twins, besides = (Correlation() for _ in range(5))
    previous: Noise | None = None
    seen: set[bytes] = set()
    for step in range(DRAWS):
        made = probe.step([], step=step)
        noise = _noise(probe, made)
        mark = hashlib.sha256()
        for values in noise.values():
            mark.update(values.float().cpu().numpy().tobytes())
        seen.add(mark.digest())
        for name, values in noise.items():
            squares[name] = squares.get(name, 0) + values.square()
            flat = values.flatten()
            entries.add(flat[1:], flat[:-1])
            if values.dim() > 1:
                axes.add(values[1:], values[:-1])
        for a, b in itertools.pairwise(sorted(noise, key=lambda name: (tuple(noise[name].shape), name))):
            if noise[a].shape == noise[b].shape:
                twins.add(noise[a], noise[b])
        if previous is not None:
            for name in noise:
                steps.add(noise[name], previous[name])
            for name in made.beside:  # one number among many: its noise would not show among theirs
                besides.add(noise[name], previous[name])
        previous = noise
    for found in (steps, besides):
        found.check("two steps get the same noise, or noise that depends on that of the step before")
    entries.check("neighbouring coordinates of one parameter get correlated noise")
    axes.check("the rows of one parameter get correlated noise")
    twins.check("two parameters of equal shape get correlated noise")
    _check_keys(probe)
    _check_coordinates(squares, DRAWS, std)
    if len(seen) < DRAWS and sum(p.numel() for p in probe.parameters.values()) > 3:  # fewer may agree by chance
        raise PrivacyViolation(f"noise: two of the first {DRAWS} steps get the same noise.")
    return _check_deviation(squares, DRAWS, std)


def check_noise_of_full_steps(probe: Probe, sizes: tuple[int | None, ...]) -> None:
    """Check noise with data: once per logical step, for any physical batches."""
    everybody = list(range(probe.inputs.units))
    for size in sizes:
        squares: dict[str, Tensor] = {}
        draws = 8
        for step in range(draws):
            for name, values in _noise(probe, probe.step(everybody, step=step, size=size)).items():
                squares[name] = squares.get(name, 0) + values.square()
        where = f" (a batch of {len(everybody)} units in physical batches of {size or len(everybody)})"
        _check_coordinates(squares, draws, probe.plan.noise_std, where)
        _check_deviation(squares, draws, probe.plan.noise_std, where)


class Correlation:
    """The correlation of pairs; for independent pairs it is within a few standard errors of zero."""

    def __init__(self) -> None:
        self.products, self.first, self.second, self.count = 0.0, 0.0, 0.0, 0

    def add(self, a: Tensor, b: Tensor) -> None:
        self.products += float((a * b).sum())
        self.first += float(a.square().sum())
        self.second += float(b.square().sum())
        self.count += a.numel()

    def check(self, what: str) -> None:
        """Raise ``PrivacyViolation`` if the pairs are correlated; too few pairs are inconclusive."""
        if self.first * self.second == 0:
            return  # missing noise is found elsewhere
        correlation = self.products / math.sqrt(self.first * self.second)
        if abs(correlation) > DEVIATIONS / math.sqrt(self.count):
            raise PrivacyViolation(
                f"noise: {what} (correlation {correlation:.2g} in {self.count} pairs), so that it can be subtracted."
            )


def _noise(probe: Probe, step: Step) -> Noise:
    missing = sorted(probe.parameters.keys() - step.gradients.keys())
    if missing:
        raise PrivacyViolation(f"noise: parameter {missing[0]} is trainable and got no update, so no noise.")
    noise = step.noise()
    for name, values in noise.items():
        if not bool(values.isfinite().all()):
            raise PrivacyViolation(f"noise: the update of parameter {name} is not finite.")
    return noise


def _check_coordinates(squares: Noise, draws: int, std: float, where: str = "") -> None:
    coordinates = sum(values.numel() for values in squares.values())
    least = chi2.ppf(LEVEL / coordinates, draws) * std**2
    for name, values in squares.items():
        quiet = int((values <= least).sum())
        if quiet:
            raise PrivacyViolation(
                f"noise: {quiet} of {values.numel()} coordinates of parameter {name} got less than the planned noise "
                f"of {std:.4g}, or none{where}."
            )


def _check_deviation(squares: Noise, draws: int, std: float, where: str = "") -> float:
    totals = {f"parameter {name}": float(values.sum()) / std**2 for name, values in squares.items()}
    sizes = {f"parameter {name}": values.numel() * draws for name, values in squares.items()}
    totals["all parameters together"], sizes["all parameters together"] = sum(totals.values()), sum(sizes.values())
    for which, total in totals.items():
        low, high = chi2.ppf(LEVEL, sizes[which]), chi2.isf(LEVEL, sizes[which])
        if not low <= total <= high:
            measured = std * math.sqrt(total / sizes[which])
            raise PrivacyViolation(
                f"noise: {which} got noise of standard deviation {measured:.4g}, {'less' if total < low else 'more'} "
                f"than the {std:.4g} that is planned once per logical step{where}."
            )
    return math.sqrt(totals["all parameters together"] / sizes["all parameters together"])


def _check_keys(probe: Probe) -> None:
    """Check that another attempt, or another sum in the same step, gets other noise."""
    coordinates = sum(p.numel() for p in probe.parameters.values())
    draws = DRAWS if probe.step([]).beside else min(DRAWS, 1 + DRAWS // coordinates)
    pairs: dict[str, Callable[[int], Step]] = {
        "a repeated step of another attempt gets the same noise": lambda step: probe.step([], step=step, attempt=1),
        "the same step over another sum (another salt) gets the same noise": lambda step: probe.step(
            [], step=step, salt="another sum"
        ),
    }
    for what, other in pairs.items():
        found, besides = Correlation(), Correlation()
        for step in range(draws):
            made = probe.step([], step=step)
            first, second = _noise(probe, made), _noise(probe, other(step))
            for name in first:
                found.add(first[name], second[name])
            for name in made.beside:
                besides.add(first[name], second[name])
        found.check(what)
        besides.check(what)
