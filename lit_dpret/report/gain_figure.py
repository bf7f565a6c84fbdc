"""What each client gains, in the form of the paper's Figure 4: a bar to the right of zero, or to the left of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lit_dpret.cards.page import esc
from lit_dpret.retrieval.statistics import Interval

_WIDTH, _LEFT, _RIGHT, _ROW, _HEAD, _AXIS = 900, 230, 720, 24, 34, 30
_COLOURS = ("var(--accent, #0072B2)", "var(--ink, #222)")


def gain_figure(title: str, gains: Mapping[str, Interval]) -> str:
    """Bars of gains by client, in the order given, with their intervals.

    Args:
        title: Above the bars.
        gains: By client; an interval without bounds has no whisker.

    Returns:
        An ``<svg>`` element that can stand alone or in a page, whose colours it takes; empty where there is no gain.
    """
    if not gains:
        return ""
    ends = [end for gain in gains.values() for end in (gain.low, gain.mean, gain.high) if math.isfinite(end)]
    top = max(0.05, *(math.ceil(20 * abs(end)) / 20 for end in ends))
    height = _HEAD + _ROW * len(gains) + _AXIS
    middle = (_LEFT + _RIGHT) / 2

    def x(value: float) -> float:
        return middle + (_RIGHT - _LEFT) / 2 * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{esc(title)}" font-size="13" font-family="inherit, sans-serif">'
        f'<text x="{_LEFT}" y="18" font-weight="600">{esc(title)}</text>'
    ]
    for tick in range(-2, 3):
        value, bottom = top * tick / 2, height - _AXIS
        stroke = _COLOURS[1] if tick == 0 else "var(--line, #ccc)"
        parts.append(
            f'<line x1="{x(value):.1f}" y1="{_HEAD - 6}" x2="{x(value):.1f}" y2="{bottom}" stroke="{stroke}"/>'
            f'<text x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{value:+.3g}</text>'
        )
    for row, (client, gain) in enumerate(gains.items()):
        parts.append(_bar(client, gain, _HEAD + row * _ROW, x))
    return "".join(parts) + "</svg>"


def _bar(client: str, gain: Interval, y: float, place: Callable[[float], float]) -> str:
    zero, end = place(0.0), place(gain.mean)
    text = (
        f'<text x="{_LEFT - 10}" y="{y + 15:.1f}" text-anchor="end">{esc(client)}</text>'
        f'<rect x="{min(zero, end):.1f}" y="{y + 4:.1f}" width="{abs(end - zero):.1f}" height="{_ROW - 8}" '
        f'fill="{_COLOURS[0]}" fill-opacity="0.75"/>'
    )
    shown = f"{gain.mean:+.3f}"
    if math.isfinite(gain.low) and math.isfinite(gain.high):
        low, high, at = place(gain.low), place(gain.high), y + _ROW / 2
        path = f"M{low:.1f} {at:.1f}H{high:.1f}M{low:.1f} {at - 4:.1f}v8M{high:.1f} {at - 4:.1f}v8"
        text += f'<path d="{path}" stroke="{_COLOURS[1]}" stroke-width="1.5" fill="none"/>'
        shown += f" [{gain.low:+.3f}, {gain.high:+.3f}]"
    return f'{text}<text x="{_RIGHT + 12}" y="{y + 15:.1f}">{esc(shown)}</text>'
