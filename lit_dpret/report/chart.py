"""Bars with confidence intervals, as SVG written by hand: no script, no library, sharp on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lit_dpret.cards.page import esc
from lit_dpret.report.table import RowResult, metric_names, show
from lit_dpret.retrieval.statistics import Interval

_WIDTH, _LEFT, _RIGHT = 900, 250, 640
_ROW, _HEAD, _GAP, _AXIS = 26, 26, 14, 30
_LONGEST_LABEL = 34


def bar_chart(rows: Sequence[RowResult]) -> str:
    """A panel per metric, a bar per system, a whisker over its 95 % interval; one scale for all.

    Returns:
        An ``<svg>`` element that takes its colours from the page; empty where nothing was measured.
    """
    names = metric_names(rows)
    measured = [i for row in rows for i in row.metrics.values() if math.isfinite(i.mean)]
    if not measured:
        return ""
    top = _round_up(max(_high(interval) for interval in measured))
    height = len(names) * (_HEAD + _ROW * len(rows) + _GAP) + _AXIS
    bottom = height - _AXIS
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{esc("Bars of " + ", ".join(names) + " with 95 % confidence intervals")}" '
        'font-size="13" font-family="inherit">'
    ]
    for tick in range(5):
        value = top * tick / 4
        x = _scale(value, top)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_HEAD}" x2="{x:.1f}" y2="{bottom}" stroke="var(--line)"/>'
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:.4g}</text>'
        )
    y = 0.0
    for name in names:
        parts.append(f'<text x="{_LEFT}" y="{y + 17:.1f}" font-weight="600">{esc(name)}</text>')
        y += _HEAD
        for row in rows:
            parts.append(_bar(row.system, row.metrics.get(name), y, top))
            y += _ROW
        y += _GAP
    return "".join(parts) + "</svg>"


def _bar(system: str, interval: Interval | None, y: float, top: float) -> str:
    middle = y + _ROW / 2
    label = system if len(system) <= _LONGEST_LABEL else system[: _LONGEST_LABEL - 1] + "…"
    text = (
        f'<g><title>{esc(system)}: {esc(show(interval))}</title><text x="{_LEFT - 10}" y="{middle + 4.5:.1f}" '
        f'text-anchor="end">{esc(label)}</text>'
    )
    if interval is None or not math.isfinite(interval.mean):
        return f'{text}<text x="{_LEFT + 6}" y="{middle + 4.5:.1f}">not measured</text></g>'
    end, high = _scale(interval.mean, top), _scale(_high(interval), top)
    text += (
        f'<rect x="{_LEFT}" y="{y + 4:.1f}" width="{max(0.0, end - _LEFT):.1f}" height="{_ROW - 8}" '
        'fill="var(--accent)" fill-opacity="0.75"/>'
    )
    if math.isfinite(interval.low) and math.isfinite(interval.high):
        low = _scale(interval.low, top)
        path = f"M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 5:.1f}v10M{high:.1f} {middle - 5:.1f}v10"
        text += f'<path d="{path}" stroke="var(--ink)" stroke-width="1.6" fill="none"/>'
    return f'{text}<text x="{high + 9:.1f}" y="{middle + 4.5:.1f}">{esc(show(interval))}</text></g>'


def _high(interval: Interval) -> float:
    return interval.high if math.isfinite(interval.high) else interval.mean


def _scale(value: float, top: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * min(max(value, 0.0), top) / top


def _round_up(value: float) -> float:
    """The next number of the form 1, 2, 4 or 8 times a power of ten, at least; four ticks divide it evenly."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * (1 - 1e-12))
