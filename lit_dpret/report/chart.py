"""Bars with confidence intervals, as SVG written by hand: no script, no library, sharp on paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

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


# -- what each client gains: a bar to either side of zero ---------------------------------------------

_GAIN_LEFT, _GAIN_RIGHT, _GAIN_ROW, _GAIN_HEAD = 230, 720, 24, 34
_COLOURS = ("var(--accent, #0072B2)", "var(--ink, #222)")  # the page's, or these where the figure stands alone


def gain_chart(title: str, gains: Mapping[str, Interval]) -> str:
    """Bars of gains by client, in the order given, with their intervals.

    Returns:
        An ``<svg>`` element that can stand alone or in a page, whose colours it takes; empty where there is no gain.
    """
    if not gains:
        return ""
    ends = [end for gain in gains.values() for end in (gain.low, gain.mean, gain.high) if math.isfinite(end)]
    top = max(0.05, *(math.ceil(20 * abs(end)) / 20 for end in ends))
    height = _GAIN_HEAD + _GAIN_ROW * len(gains) + _AXIS
    middle = (_GAIN_LEFT + _GAIN_RIGHT) / 2

    def x(value: float) -> float:
        return middle + (_GAIN_RIGHT - _GAIN_LEFT) / 2 * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{esc(title)}" font-size="13" font-family="inherit, sans-serif">'
        f'<text x="{_GAIN_LEFT}" y="18" font-weight="600">{esc(title)}</text>'
    ]
    for tick in range(-2, 3):
        value, bottom = top * tick / 2, height - _AXIS
        stroke = _COLOURS[1] if tick == 0 else "var(--line, #ccc)"
        parts.append(
            f'<line x1="{x(value):.1f}" y1="{_GAIN_HEAD - 6}" x2="{x(value):.1f}" y2="{bottom}" stroke="{stroke}"/>'
            f'<text x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{value:+.3g}</text>'
        )
    for row, (client, gain) in enumerate(gains.items()):
        parts.append(_gain_bar(client, gain, _GAIN_HEAD + row * _GAIN_ROW, x))
    return "".join(parts) + "</svg>"


def _gain_bar(client: str, gain: Interval, y: float, place: Callable[[float], float]) -> str:
    zero, end = place(0.0), place(gain.mean)
    text = (
        f'<text x="{_GAIN_LEFT - 10}" y="{y + 15:.1f}" text-anchor="end">{esc(client)}</text>'
        f'<rect x="{min(zero, end):.1f}" y="{y + 4:.1f}" width="{abs(end - zero):.1f}" height="{_GAIN_ROW - 8}" '
        f'fill="{_COLOURS[0]}" fill-opacity="0.75"/>'
    )
    shown = f"{gain.mean:+.3f}"
    if math.isfinite(gain.low) and math.isfinite(gain.high):
        low, high, at = place(gain.low), place(gain.high), y + _GAIN_ROW / 2
        path = f"M{low:.1f} {at:.1f}H{high:.1f}M{low:.1f} {at - 4:.1f}v8M{high:.1f} {at - 4:.1f}v8"
        text += f'<path d="{path}" stroke="{_COLOURS[1]}" stroke-width="1.5" fill="none"/>'
        shown += f" [{gain.low:+.3f}, {gain.high:+.3f}]"
    return f'{text}<text x="{_GAIN_RIGHT + 12}" y="{y + 15:.1f}">{esc(shown)}</text>'
