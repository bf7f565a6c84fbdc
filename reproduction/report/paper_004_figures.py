"""Figures 3 and 6 of paper 004, drawn with matplotlib, which is an extra (``pip install "lit-dpret[plot]"``)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.errors import ConfigurationError
from lit_dpret.files import write_whole
from lit_dpret.report.study_figure import can_draw

_COUNTS = {"passages": "#56B4E9", "sentences": "#0072B2", "train": "#D55E00", "dev": "#E69F00", "test": "#009E73"}
_ARMS = {
    "none": ("without embeddings", "#000000", "-"),
    "shuffled": ("with shuffled embeddings (control)", "#D55E00", "--"),
    "own": ("with the texts' own embeddings", "#0072B2", "-."),
}


def draw_silos(counts: Mapping[str, Mapping[str, int]], path: Path) -> str:
    """Figure 3: how large each client is, on a logarithmic axis; returns the caption.

    Raises:
        ConfigurationError: matplotlib is not installed.
        StorageError: The picture cannot be written.
    """
    figure, axis = _figure(8.5, 1.2 + 0.5 * len(counts))
    height = 0.8 / len(_COUNTS)
    for place, (name, colour) in enumerate(_COUNTS.items()):
        at = [client + (place - 2) * height for client in range(len(counts))]
        axis.barh(at, [found[name] for found in counts.values()], height=height, color=colour, label=_words(name))
    axis.set_yticks(range(len(counts)), list(counts))
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(left=1)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("how many")
    figure.legend(loc="outside lower center", ncols=len(_COUNTS), frameon=False)
    _save(figure, path)
    return f"Passages, sentences and questions of each of {len(counts)} clients; the axis is logarithmic."


def _words(name: str) -> str:
    return name if name in ("passages", "sentences") else f"{name} questions"


def draw_language_model_losses(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> str:
    """Figure 6: training loss of a language model with and without embeddings; returns the caption.

    Args:
        curves: By arm, ``none``, ``shuffled`` and ``own``: steps, and the mean loss of a token since the last of them.
        path: Of the PNG.

    Raises:
        ConfigurationError: matplotlib is not installed.
        StorageError: The picture cannot be written.
    """
    figure, axis = _figure(7.5, 4.6)
    for arm, (label, colour, dashes) in _ARMS.items():
        steps, losses = zip(*curves[arm], strict=True)
        axis.plot(steps, losses, color=colour, linestyle=dashes, label=label)
    axis.set_xlabel("steps")
    axis.set_ylabel("training loss of a token, nats")
    axis.legend(frameon=False)
    _save(figure, path)
    ends = "; ".join(f"{_ARMS[arm][0]} {curves[arm][-1][1]:.3f}" for arm in _ARMS)
    return f"Training loss of the language model, means over neighbouring steps. At the end: {ends} nats."


def _figure(width: float, height: float) -> tuple[Any, Any]:
    if not can_draw():
        raise ConfigurationError(
            'Figures are drawn with matplotlib, which is not installed: pip install "lit-dpret[plot]".'
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _save(figure: Any, path: Path) -> None:
    kept = io.BytesIO()
    figure.savefig(kept, dpi=110, format="png")
    write_whole(path, kept.getvalue(), owner_only=True)
