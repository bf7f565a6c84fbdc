r"""Which parameters are clipped together.

*Flat* clipping bounds one unit's gradient over all parameters at once. *Per-layer* clipping (He et
al. 2023, 2212.01539; McMahan et al. 2018, 1710.06963) bounds each of K layers on its own, by
:math:`C / \sqrt K`: by Pythagoras a unit's whole contribution stays within C, so noise and
accounting are the same. A layer with small gradients is then no longer scaled down because another
one has large ones, and no layer can use the share of the bound that another one leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

ClipGroups = Literal["flat", "per_layer"]


def group_parameters(names: Iterable[str], clip_groups: ClipGroups) -> tuple[tuple[str, ...], ...]:
    """The parameters in groups, in their order.

    A layer is the module that owns a parameter; of several that share it, the first, after which
    ``named_parameters`` calls it. So every parameter is in one group, and a tied weight is one.

    Example:
        >>> group_parameters(["embed.weight", "out.weight", "out.bias"], "per_layer")
        (('embed.weight',), ('out.weight', 'out.bias'))
        >>> group_parameters(["embed.weight", "out.weight", "out.bias"], "flat")
        (('embed.weight', 'out.weight', 'out.bias'),)
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = "" if clip_groups == "flat" else name.rpartition(".")[0]
        groups.setdefault(layer, []).append(name)
    return tuple(map(tuple, groups.values()))
