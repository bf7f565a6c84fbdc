"""Clipping engines: from the losses of a physical batch to a sum of bounded gradients."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_dpret.privacy.budget import ClipGroups
from lit_dpret.privacy.clipping.base import ClippedSum, ClipStats
from lit_dpret.privacy.clipping.ghost import GhostClipping, VmapClipping
from lit_dpret.privacy.clipping.loop import LoopClipping
from lit_dpret.privacy.clipping.low_precision import Bf16GhostClipping, Tf32GhostClipping
from lit_dpret.privacy.clipping.opacus import OpacusClipping
from lit_dpret.settings import require_choice

__all__ = [
    "BY_BLOCK",
    "Bf16GhostClipping",
    "ClipGroups",
    "ClipStats",
    "ClippedSum",
    "GhostClipping",
    "LoopClipping",
    "OpacusClipping",
    "Tf32GhostClipping",
    "VmapClipping",
    "make_engine",
]

ENGINES: dict[str, type[ClippedSum]] = {
    "ghost": GhostClipping,
    "ghost_tf32": Tf32GhostClipping,
    "ghost_bf16": Bf16GhostClipping,
    "vmap": VmapClipping,
    "opacus": OpacusClipping,
    "loop": LoopClipping,
}


#: Engines that need the weights only in their passes, and compute a parameter's sum from what the passes left.
BY_BLOCK = ("ghost", "ghost_tf32", "ghost_bf16")


def make_engine(name: str, module: nn.Module, **settings: Any) -> ClippedSum:
    """Return the engine called ``name`` (``privacy.engine``); ``settings`` are those of `ClippedSum` and its own."""
    require_choice("privacy.engine", name, ENGINES)
    return ENGINES[name](module, **settings)
