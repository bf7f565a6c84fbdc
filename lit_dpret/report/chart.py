"""Bar charts with confidence intervals, as hand-written SVG without scripts or libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lit_dpret.cards.blocks import esc
from lit_dpret.report.table import RowResult, metric_names, show
from lit_dpret.retrieval.statistics import Interval

_WIDTH, _LEFT, _RIGHT = 900, 250, 640
_ROW, _HEAD, _GAP, _AXIS = 26, 26, 14, 30
_LONGEST_LABEL = 34
# The page's colours, or these if a drawing is used alone.
_ACCENT, _INK, _LINE = "var(--accent, #0072B2)", "var(--ink, #222)", "var(--line, #ccc)"


def bar_chart(rows: Sequence[RowResult]) -> str:
    """Draw a panel per metric and a bar per system, with its 95 % interval, on one scale.

    Returns:
        An ``<svg>`` element that takes its colours from the page; empty if nothing was measured.
    """
    names = metric_names(rows)
    found = [i for row in rows for i in row.metrics.values() if math.isfinite(i.mean)]
    highest = [i.high if math.isfinite(i.high) else i.mean for i in found]
    if not highest:
        return ""
    panels = {name: [(row.system, row.metrics.get(name)) for row in rows] for name in names}
    about = f"Bars of {', '.join(names)} with 95 % confidence intervals"
    return _Drawing(0.0, _round_up(max(highest)), "").svg(panels, about)


def gain_chart(panels: Mapping[str, Mapping[str, Interval]]) -> str:
    """Draw bars of gains around zero: for each panel title, the gains of its clients in the given order.

    Returns:
        An ``<svg>`` element, usable alone or in a page, whose colours it takes; empty if there are no gains.
    """
    gains = [gain for clients in panels.values() for gain in clients.values()]
    if not gains:
        return ""
    ends = [end for gain in gains for end in (gain.low, gain.mean, gain.high) if math.isfinite(end)]
    top = max(0.05, *(math.ceil(20 * abs(end)) / 20 for end in ends))
    return _Drawing(-top, top, "+").svg({title: list(one.items()) for title, one in panels.items()}, ", ".join(panels))


class _Drawing:
    """Panels of bars over one axis from ``low`` to ``top``; ``sign`` is the sign option of their number format."""

    def __init__(self, low: float, top: float, sign: str) -> None:
        self.low, self.top, self.sign = low, top, sign

    def svg(self, panels: Mapping[str, Sequence[tuple[str, Interval | None]]], about: str) -> str:
        height = sum(_HEAD + _ROW * len(bars) + _GAP for bars in panels.values()) + _AXIS
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img" aria-label="{esc(about)}" font-size="13" font-family="inherit, sans-serif">'
        ]
        for tick in range(5):
            value, bottom = self.low + (self.top - self.low) * tick / 4, height - _AXIS
            x = self._x(value)
            parts.append(
                f'<line x1="{x:.1f}" y1="{_HEAD}" x2="{x:.1f}" y2="{bottom}" stroke="{_INK if value == 0 else _LINE}"/>'
                f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:{self.sign}.4g}</text>'
            )
        y = 0.0
        for title, bars in panels.items():
            parts.append(f'<text x="{_LEFT}" y="{y + 17:.1f}" font-weight="600">{esc(title)}</text>')
            y += _HEAD
            for name, interval in bars:
                parts.append(self._bar(name, interval, y))
                y += _ROW
            y += _GAP
        return "".join(parts) + "</svg>"

    def _bar(self, name: str, interval: Interval | None, y: float) -> str:
        middle = y + _ROW / 2
        label = name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1] + "…"
        shown = show(interval, sign=self.sign)
        text = (
            f'<g><title>{esc(name)}: {esc(shown)}</title><text x="{_LEFT - 10}" y="{middle + 4.5:.1f}" '
            f'text-anchor="end">{esc(label)}</text>'
        )
        if interval is None or not math.isfinite(interval.mean):
            return f'{text}<text x="{_LEFT + 6}" y="{middle + 4.5:.1f}">not measured</text></g>'
        zero, end = self._x(0.0), self._x(interval.mean)
        text += (
            f'<rect x="{min(zero, end):.1f}" y="{y + 4:.1f}" width="{abs(end - zero):.1f}" height="{_ROW - 8}" '
            f'fill="{_ACCENT}" fill-opacity="0.75"/>'
        )
        if math.isfinite(interval.low) and math.isfinite(interval.high):
            low, high = self._x(interval.low), self._x(interval.high)
            path = f"M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 5:.1f}v10M{high:.1f} {middle - 5:.1f}v10"
            text += f'<path d="{path}" stroke="{_INK}" stroke-width="1.6" fill="none"/>'
        return f'{text}<text x="{_RIGHT + 12}" y="{middle + 4.5:.1f}">{esc(shown)}</text></g>'

    def _x(self, value: float) -> float:
        share = (min(max(value, self.low), self.top) - self.low) / (self.top - self.low)
        return _LEFT + (_RIGHT - _LEFT) * share


def _round_up(value: float) -> float:
    """Return the next number of 1, 2, 4, 6 or 8 times a power of ten, which four ticks divide evenly."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * (1 - 1e-12))
