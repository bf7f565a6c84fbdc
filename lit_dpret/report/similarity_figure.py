"""Lengths and question types of synthetic and original queries side by side, as one PNG.

Drawn with matplotlib, which is an extra (``pip install "lit-dpret[plot]"``). The two sides are told apart by
filling as well as by colour.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.errors import ConfigurationError
from lit_dpret.files import write_whole

_SIDES = (("synthetic", "#0072B2", True), ("reference", "#D55E00", False))
_TITLES = {"lengths": "words of a query", "question_types": "first word of a query"}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_similarity(diversity: Mapping[str, Any], path: Path, *, owner_only: bool) -> Path:
    """Draw the histograms of lengths and of question types.

    Args:
        diversity: The block of that name that ``task=similarity`` found.
        path: Of the PNG.
        owner_only: Nobody but its owner may read it.

    Raises:
        ConfigurationError: matplotlib is not installed.
        StorageError: The file cannot be written.
    """
    if not can_draw():
        raise ConfigurationError(
            'task.plot=true draws with matplotlib, which is not installed. Run: pip install "lit-dpret[plot]", or set '
            "task.plot=null to go without."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (name, title) in zip(figure.subplots(2, 1), _TITLES.items(), strict=True):
        labels = list(diversity["synthetic"][name])
        for offset, (side, colour, filled) in zip((-0.2, 0.2), _SIDES, strict=True):
            shares = [100 * diversity[side][name][label] for label in labels]
            places = [place + offset for place in range(len(labels))]
            axis.bar(
                places, shares, width=0.4, edgecolor=colour, facecolor=colour if filled else "none",
                label="synthetic" if side == "synthetic" else "original",
            )  # fmt: skip
        axis.set_xticks(range(len(labels)), labels)
        axis.set_xlabel(title)
        axis.set_ylabel("% of queries")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    kept = io.BytesIO()
    figure.savefig(kept, dpi=120, format="png")
    return write_whole(path, kept.getvalue(), owner_only=owner_only)
