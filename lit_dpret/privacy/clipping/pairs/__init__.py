"""Clipping of pairwise similarity gradients: norms of all pairs, and the weighted sum of their gradients."""

from __future__ import annotations

from lit_dpret.privacy.clipping.pairs.batch import PairBatch, embed_all
from lit_dpret.privacy.clipping.pairs.blocks import JacobianNorms, KBlocks
from lit_dpret.privacy.clipping.pairs.choice import NormsName, choose_norms, costs, make_pair_norms, width_of
from lit_dpret.privacy.clipping.pairs.linear_head import LinearHead
from lit_dpret.privacy.clipping.pairs.norms import PAIRS_AT_ONCE, BruteForce, PairGhost, PairNorms
from lit_dpret.privacy.clipping.pairs.weights import clipped_pair_factors, weighted_backward

__all__ = [
    "PAIRS_AT_ONCE",
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
