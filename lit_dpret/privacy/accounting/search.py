"""Finding where a costly monotone function crosses a limit, in few evaluations.

One evaluation of epsilon can take seconds, so the search interpolates where it can. It works on
integers (a number of steps, an index of a grid of decimals), so that its answer is exact and no
tolerance has to be explained.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class DecimalGrid:
    """The decimals of ``digits + 1`` significant digits, in order: index 0 is 1.0, the next is 1.001 for 3 digits.

    Example:
        >>> grid = DecimalGrid(digits=3)
        >>> grid[0], grid[1], grid[grid.index(0.72951)]
        (1.0, 1.001, 0.7296)
    """

    def __init__(self, *, digits: int) -> None:
        self._digits = digits
        self._low = int(10**digits)

    def __getitem__(self, index: int) -> float:
        exponent, mantissa = divmod(index, 9 * self._low)
        return float(f"{mantissa + self._low}e{exponent - self._digits}")

    def index(self, value: float) -> int:
        """The index of the least decimal of the grid that is at least ``value``."""
        exponent = math.floor(math.log10(value))
        index = exponent * 9 * self._low + math.floor(value / 10.0 ** (exponent - self._digits)) - self._low - 1
        while self[index] < value:
            index += 1
        return index


def boundary(
    value: Callable[[int], float], target: float, *, good: int, bad: int, place: Callable[[int], float] = float
) -> int:
    """The last integer from ``good`` towards ``bad`` whose value is at most ``target``.

    Interpolates on logarithms, where epsilon is almost a straight line in steps and in noise, and
    bisects where that closes in too slowly.

    Args:
        value: Monotone between ``good`` and ``bad``.
        target: The limit.
        good: An integer whose value is at most ``target``.
        bad: An integer whose value is more, on either side of ``good``.
        place: Where an integer lies on the axis to interpolate on, increasing and positive.
    """
    known = {good: value(good), bad: value(bad)}
    slow = 0
    while abs(good - bad) > 1:
        low, high = known[good], known[bad]
        guess = (good + bad) // 2
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
    value: Callable[[int], float],
    target: float,
    *,
    start: int,
    most: int,
    stride: int,
    place: Callable[[int], float],
) -> int | None:
    """The least integer whose value is at most ``target``, where values fall; None where ``most`` is too small.

    Args:
        value: Decreasing, and above ``target`` somewhere.
        target: The limit.
        start: Where to look first.
        most: The largest integer to look at.
        stride: How far to look next; doubled until the limit is passed.
        place: As for `boundary`.
    """
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
    """The first integer strictly between ``one`` and ``other`` that lies at or past ``wanted``, or the last one."""
    low, high = min(one, other) + 1, max(one, other) - 1
    while low < high:
        middle = (low + high) // 2
        if place(middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low
