"""Clipping of pairwise similarity gradients: the norms of all pairs, and the weighted sum of their gradients.

The cheapest method for the norms is chosen from public numbers alone. A bound and an exact norm clip differently, so
the choice must not look at the data. It is made once, for the maximum number of records in a sub-batch.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from torch import nn

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.clipping.pairs.batch import PairBatch, clipped_pair_factors, embed_all, weighted_backward
from lit_dpret.privacy.clipping.pairs.blocks import JacobianNorms, KBlocks, LinearHead
from lit_dpret.privacy.clipping.pairs.norms import BruteForce, PairGhost, PairNorms
from lit_dpret.settings import require_choice

__all__ = [
    "BruteForce",
    "JacobianNorms",
    "KBlocks",
    "LinearHead",
    "NormsName",
    "PairBatch",
    "PairGhost",
    "PairNorms",
    "choose_norms",
    "clipped_pair_factors",
    "costs",
    "embed_all",
    "make_pair_norms",
    "weighted_backward",
    "width_of",
]


NormsName = Literal["auto", "pair_ghost", "jacobian", "k_blocks", "linear_head", "brute_force"]

#: How many times as much as a bound exact norms may cost: a bound clips shared encoders 2 to 5 times too hard.
EXACT_IS_WORTH = 10.0
#: Practical cost of these operations, in ordinary steps: measured by benchmarks/logit_dp.py, within a factor of 2.
GHOST, BLOCKS, INNER = 1.3, 3.5, 0.5


def costs(*, n_max: int, dim: int, positions: int, width: int, shared: bool) -> dict[NormsName, float]:
    """Return the cost of each method in ordinary steps (a forward and backward pass of n queries and n passages).

    ``brute_force`` and ``linear_head`` are not among them: their costs were not fitted.

    Per linear layer of ``width`` x ``width`` and ``positions`` T: a cotangent is a third of a step, and its Gram
    products add T / h of that (for a pair's joined 2T positions: 2T / h; for a block of d cotangents: (T + d) / h).
    Inner products of all pairs take, for each parameter and by the cheapest method, 2 d^2, 4 d + 250 or 6 T^2 / h
    multiplications, of the 12 n T of a step. ``GHOST``, ``BLOCKS`` and ``INNER`` are the ratios of measured cost to
    that count.
    """
    d, t, h = dim, positions, width
    blocks = BLOCKS * d / 3 * (1 + (t + d) / h)
    inner = INNER * n_max * min(2 * d**2, 4 * d + 250, 6 * t**2 / h) / (12 * t) if shared else 0.0
    return {"pair_ghost": GHOST * n_max * (2 / 3) * (1 + t / h), "jacobian": blocks + inner, "k_blocks": blocks}


def choose_norms(
    *, n_max: int, dim: int, positions: int, width: int, shared: bool = True, linear_head: bool = False
) -> NormsName:
    """Return the method that ``norms=auto`` selects.

    That is the closed form for a linear head, and otherwise the cheapest exact method. For shared parameters, the bound
    of ``k_blocks`` is used only if exact norms cost more than ``EXACT_IS_WORTH`` times as much.
    """
    if linear_head:
        return "linear_head"
    found = costs(n_max=n_max, dim=dim, positions=positions, width=width, shared=shared)
    exact: tuple[NormsName, ...] = ("pair_ghost", "jacobian") if shared else ("pair_ghost", "k_blocks")
    best = min(exact, key=found.__getitem__)
    return best if found[best] <= EXACT_IS_WORTH * found["k_blocks"] else "k_blocks"


def width_of(module: nn.Module) -> int:
    """Return the width of a square layer with as many weights as the module's average trainable matrix."""
    sizes = [p.numel() for p in module.parameters() if p.requires_grad and p.dim() > 1]
    return max(1, round(math.sqrt(sum(sizes) / len(sizes)))) if sizes else 1


def make_pair_norms(
    norms: NormsName,
    module: nn.Module,
    *,
    n_max: int | None = None,
    dim: int | None = None,
    positions: int = 1,
    shared: bool = True,
    linear_head: bool = False,
    **settings: Any,
) -> PairNorms:
    """Return the strategy called ``norms``, for ``module``."""
    require_choice("privacy.norms", norms, get_args(NormsName))
    if norms == "auto":
        if n_max is None or dim is None:
            raise ConfigurationError(
                f"privacy.norms=auto chooses by n_max={n_max} and dim={dim}; set both, or name one of "
                f"{', '.join(get_args(NormsName)[1:])}."
            )
        norms = choose_norms(
            n_max=n_max, dim=dim, positions=positions, width=width_of(module), shared=shared, linear_head=linear_head
        )
    if norms == "jacobian":
        return JacobianNorms(module, shared=shared, **settings)
    if norms == "k_blocks":
        return KBlocks(module, shared=shared, **settings)
    if norms == "pair_ghost":
        return PairGhost(module, **settings)
    return (LinearHead if norms == "linear_head" else BruteForce)(module, **settings)
