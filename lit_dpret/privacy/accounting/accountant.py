"""`Accountant`, and searches with it: the noise for a budget, the steps within a budget, a cap of negligible cost.

Every result comes from `composition.epsilon`, the function that states the claim, at the same discretisation. Searches
run on integers (a number of steps, an index into a grid of decimals), so that a result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from scipy import stats

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.composition import check_supported, delta_at, epsilon, rough_epsilon, simplest_law
from lit_dpret.privacy.accounting.releases import GaussianRelease, Poisson, Release, SamplingLaw, TruncatedPoisson
from lit_dpret.privacy.budget import AccountantName, Neighbours, show_delta, show_epsilon


class DecimalGrid:
    """Ascending decimals with ``digits + 1`` significant digits: for 3 digits, index 0 is 1.0 and index 1 is 1.001."""

    def __init__(self, *, digits: int) -> None:
        self._digits = digits
        self._low = int(10**digits)

    def __getitem__(self, index: int) -> float:
        exponent, mantissa = divmod(index, 9 * self._low)
        return float(f"{mantissa + self._low}e{exponent - self._digits}")

    def index(self, value: float) -> int:
        """Return the index of the smallest decimal in the grid that is at least ``value``."""
        # Floats may put this guess one off; the loop below ends at the right index.
        exponent = math.floor(math.log10(value))
        index = exponent * 9 * self._low + math.floor(value / 10.0 ** (exponent - self._digits)) - self._low - 1
        while self[index] < value:
            index += 1
        return index


def boundary(
    value: Callable[[int], float], target: float, *, good: int, bad: int, place: Callable[[int], float] = float
) -> int:
    """Return the last integer from ``good`` towards ``bad`` valued at most ``target``; ``place`` is its axis."""
    known = {good: value(good), bad: value(bad)}
    slow = 0
    while abs(good - bad) > 1:
        low, high = known[good], known[bad]
        guess = (good + bad) // 2
        # Interpolation may creep along one end; after three slow steps, bisection is certain to halve the interval.
        if slow < 3 and 0 < low < high < math.inf:
            share = math.log(target / low) / math.log(high / low)
            wanted = math.exp((1 - share) * math.log(place(good)) + share * math.log(place(bad)))
            guess = _nearest_between(wanted, place, good, bad)
        width = abs(good - bad)
        known[guess] = value(guess)
        if known[guess] <= target:
            good = guess
        else:
            bad = guess
        slow = 0 if 2 * abs(good - bad) <= width else slow + 1
    return good


def least(
    value: Callable[[int], float], target: float, *, start: int, most: int, stride: int, place: Callable[[int], float]
) -> int | None:
    """Return the least integer valued at most ``target``, for falling values; None if ``most`` is too small."""
    index = start
    good: int | None = None
    bad: int | None = None
    while good is None or bad is None:
        if value(index) <= target:
            good, index = index, index - stride
        elif index >= most:
            return None
        else:
            bad, index = index, min(most, index + stride)
        stride *= 2
    return boundary(value, target, good=good, bad=bad, place=place)


def _nearest_between(wanted: float, place: Callable[[int], float], one: int, other: int) -> int:
    """Return the first integer strictly between ``one`` and ``other`` at or past ``wanted``, or else the last one."""
    low, high = min(one, other) + 1, max(one, other) - 1
    while low < high:
        middle = (low + high) // 2
        if place(middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


MOST_NOISE = 1e5
MOST_STEPS = 10_000_000

COPIES = (10, 5, 2)
"""Numbers of units: a chosen cap keeps their joint epsilon finite, for the first of these that it can."""

MOST_FOR_COPIES = 0.01
"""How much larger a cap may be for that purpose, relative."""


@dataclass(frozen=True)
class Accountant:
    """The method of accounting, fixed for a run: delta, relation and library."""

    delta: float  # the delta of every epsilon it states
    neighbours: Neighbours  # the relation of every epsilon it states
    name: AccountantName = "pld"  # ``pld``, ``rdp`` or ``prv``

    def epsilon(self, releases: Iterable[Release]) -> float:
        return epsilon(releases, delta=self.delta, neighbours=self.neighbours, accountant=self.name)

    def max_steps(
        self, release: Release, eps: float, *, already: Iterable[Release] = (), at_most: int = MOST_STEPS
    ) -> int:
        """Return how many more times ``release``, its ``count`` ignored, can be made before epsilon exceeds ``eps``.

        This uses the same function at the same discretisation as `epsilon`. One more release would exceed ``eps``,
        unless the result is ``at_most``.
        """
        already = list(already)

        # Counts are searched downwards, as negative integers: epsilon then falls as the index rises.
        def made(index: int) -> list[Release]:
            return [*already, replace(release, count=-index)]

        def spent(index: int) -> float:
            return math.inf if -index > at_most else self.epsilon(made(index))

        def rough(index: int) -> float:
            return math.inf if -index > at_most else rough_epsilon(made(index), self.delta, self.neighbours)

        if at_most < 1:
            return 0
        # First the result that calibrated noise gives: one evaluation instead of a search.
        if at_most < MOST_STEPS and spent(-at_most) <= eps:
            return at_most
        # A coarse PLD says little about what RDP will find, and RDP is fast.
        start = _aim(rough, spent, eps, start=-1, most=-1, stride=1, place=_share) if self.name != "rdp" else -1
        found = least(spent, eps, start=-1 if start is None else start, most=-1, stride=1, place=_share)
        return 0 if found is None else -found


def _share(index: int) -> float:
    """Return one over a count that is stored as a negative integer; beyond all counts, almost zero."""
    return -1 / index


def _aim(
    rough: Callable[[int], float],
    exact: Callable[[int], float],
    eps: float,
    *,
    start: int,
    most: int,
    stride: int,
    place: Callable[[int], float],
) -> int | None:
    """Return roughly where ``exact`` falls to ``eps``, using one evaluation of it and many of ``rough``."""
    guess = least(rough, eps, start=start, most=most, stride=stride, place=place)
    if guess is None or not 0 < exact(guess) < math.inf:
        return guess
    corrected = eps * rough(guess) / exact(guess)
    return least(rough, corrected, start=guess, most=most, stride=4, place=place)


def calibrate_noise(
    *,
    eps: float,
    delta: float,
    neighbours: Neighbours,
    law: SamplingLaw,
    steps: int,
    accountant: AccountantName = "pld",
    tolerance: float = 1e-3,
    already: Iterable[Release] = (),
    knob: str = "privacy.eps",
) -> float:
    """Return the least noise multiplier with which ``steps`` releases by ``law`` stay within ``eps``.

    Guarantees:
        - ``epsilon`` of the result, with ``already`` composed in, is at most ``eps``.
        - The result is a decimal of as few digits as ``tolerance`` allows, rounded up. It is at most ``tolerance``
          above the least sufficient noise, and is printed in full.
    """
    already = list(already)
    if not eps > 0:
        raise ConfigurationError(f"{knob}={eps} is not a positive number.")
    check_supported(law, accountant, neighbours)
    law = simplest_law(law)
    # Few digits: the multiplier is printed in full, and a user who types it in gets the same epsilon.
    digits = math.ceil(-math.log10(tolerance) - 1e-9)
    grid = DecimalGrid(digits=digits)
    most = grid.index(MOST_NOISE)
    start, stride = 0, int(2 * 10**digits)

    def trial(index: int) -> list[Release]:
        return [*already, GaussianRelease(noise_multiplier=grid[index], law=law, count=steps)]

    def spent(index: int) -> float:
        return epsilon(trial(index), delta=delta, neighbours=neighbours, accountant=accountant)

    def rough(index: int) -> float:
        return rough_epsilon(trial(index), delta, neighbours)

    if isinstance(law, TruncatedPoisson):
        # Truncation can only add loss, so the search starts at the noise of the plain law, which is nearly always the
        # result.
        uncapped = calibrate_noise(
            eps=eps,
            delta=delta,
            neighbours=neighbours,
            law=Poisson(sample_rate=law.sample_rate),
            steps=steps,
            tolerance=tolerance,
            already=already,
            knob=knob,
        )
        start, stride = grid.index(uncapped), 1
        if spent(start) <= eps:
            return uncapped
        corrected = eps * rough(start) / spent(start)
        start = least(rough, corrected, start=start, most=most, stride=4, place=grid.__getitem__) or start
    elif accountant != "rdp":
        guess = _aim(rough, spent, eps, start=0, most=most, stride=stride, place=grid.__getitem__)
        start, stride = (most, stride) if guess is None else (guess, 1)
    found = least(spent, eps, start=start, most=most, stride=stride, place=grid.__getitem__)
    if found is None:
        where = "privacy." if knob == "privacy.eps" else ""
        raise ConfigurationError(
            f"{knob}={eps:g} cannot be met by any noise: at a noise multiplier of {MOST_NOISE:g} the "
            f"{accountant} accountant still finds epsilon={show_epsilon(spent(most))} at delta={show_delta(delta)} for "
            f"{steps} steps"
            + (" and what was released before" if already else "")
            + f". Raise {knob} or {where}delta, plan fewer steps, or choose another {where}accountant."
        )
    return grid[found]


def truncation_delta(law: TruncatedPoisson, steps: int) -> float:
    """Return an upper bound on what truncation adds to delta over ``steps`` steps.

    A step in which the batch was cut and the unit in question remained can at worst reveal that unit. It has
    probability P[Binomial(n, q) > cap] * cap / n (the mixture of Ganesh et al. 2025, arXiv 2508.15089, which
    dp-accounting composes step by step). In every other step the unit is hidden as well as by plain Poisson sampling,
    or better.
    """
    return float(steps * stats.binom.sf(law.cap, law.n, law.sample_rate) * law.cap / law.n)


def cap_for_copies(law: TruncatedPoisson, *, steps: int, delta: float, copies: int) -> int:
    """Return the least cap, at least that of ``law``, with which truncation leaves ``copies`` units half of delta."""

    def leaves_half(cap: int) -> bool:
        return copies * truncation_delta(replace(law, cap=cap), steps) <= delta / 2

    return _first(leaves_half, law.cap, law.n)


def choose_cap(
    *,
    n: int,
    sample_rate: float,
    steps: int,
    eps: float,
    delta: float,
    neighbours: Neighbours,
    max_increase: float = 0.005,
    noise_multiplier: float | None = None,
) -> int:
    """Choose the cap of a truncated Poisson law with negligible cost in epsilon and little padding.

    The search starts at the cap that `truncation_delta` shows to be sufficient, and goes down in steps of an eighth of
    the batch's standard deviation. If up to a hundredth more gives `COPIES` units together a finite epsilon, the cap is
    raised by that much.

    Guarantees:
        - At the noise calibrated for plain Poisson sampling, epsilon under the cap is at most ``1 + max_increase``
          times epsilon without it, under the same relation.
        - The cap is never above n. It is n, which cuts nothing, where no smaller cap will do.
    """
    law = Poisson(sample_rate=sample_rate)
    if noise_multiplier is None:
        noise_multiplier = calibrate_noise(eps=eps, delta=delta, neighbours=neighbours, law=law, steps=steps)

    def released(cap: int | None) -> list[Release]:
        chosen = law if cap is None else TruncatedPoisson(sample_rate=sample_rate, cap=cap, n=n)
        return [GaussianRelease(noise_multiplier=noise_multiplier, law=chosen, count=steps)]

    allowed = (1 + max_increase) * epsilon(released(None), delta=delta, neighbours=neighbours)
    if not math.isfinite(allowed):
        return n
    # The part of delta that the larger epsilon leaves may be spent on truncation.
    spare = delta - delta_at([allowed], released(None), neighbours=neighbours)[0]
    least_cap = max(1, math.ceil(sample_rate * n))

    def surely(cap: int) -> bool:
        return truncation_delta(TruncatedPoisson(sample_rate=sample_rate, cap=cap, n=n), steps) <= spare

    enough = _first(surely, least_cap, n)
    stride = max(1, math.ceil(math.sqrt(sample_rate * (1 - sample_rate) * n) / 8))
    rough_allowed = (1 + max_increase) * rough_epsilon(released(None), delta, neighbours)

    def cap_at(index: int) -> int:
        return min(enough, least_cap + index * stride)

    def roughly(index: int) -> bool:
        return rough_epsilon(released(cap_at(index)), delta, neighbours) <= rough_allowed

    index = _first(roughly, 0, math.ceil((enough - least_cap) / stride))
    # The coarse search may be one stride off; the claim's own function decides.
    while cap_at(index) < enough and epsilon(released(cap_at(index)), delta=delta, neighbours=neighbours) > allowed:
        index += 1
    chosen = TruncatedPoisson(sample_rate=sample_rate, cap=cap_at(index), n=n)
    most = int(chosen.cap * (1 + MOST_FOR_COPIES))
    # Only zero_out has a result on several units in truncated batches.
    for copies in COPIES if neighbours == "zero_out" else ():
        wider = replace(chosen, cap=min(most, cap_for_copies(chosen, steps=steps, delta=delta, copies=copies)))
        if copies * truncation_delta(wider, steps) < delta:
            return wider.cap
    return chosen.cap


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least integer from ``low`` to ``high`` for which the monotonic ``holds`` is true; else ``high``."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
