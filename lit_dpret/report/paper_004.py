"""The numbers that paper 004 (PDD-AS2) prints in its Table 1, to stand beside ours, and what cannot be in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

#: Columns of Table 1 by our names; the paper's R@k has one positive for a query, where it is the any-hit measure.
COLUMNS: Mapping[str, str] = {
    "sentence/mrr@10": "sentence MRR@10",
    "sentence/success@1": "sentence R@1",
    "sentence/success@20": "sentence R@20",
    "sentence/success@100": "sentence R@100",
    "passage/mrr@10": "passage MRR@10",
    "passage/success@1": "passage R@1",
    "passage/success@20": "passage R@20",
    "passage/success@100": "passage R@100",
}
#: Rows in the paper's order and groups: our name, the group's heading, the paper's name, its numbers; none for a row
#: of ours.
TABLE_1: Mapping[str, tuple[str, str, tuple[float, ...] | None]] = {
    "central": ("Upper bound", "Central-training", (0.338, 0.284, 0.629, 0.781, 0.502, 0.447, 0.553, 0.821)),
    "bm25": ("Sparse retriever", "BM25", (0.172, 0.152, 0.343, 0.533, 0.343, 0.288, 0.345, 0.598)),
    "zero_shot": ("Without any query, not in the paper", "Untrained encoder", None),
    "pseudo_queries": ("Without any query, not in the paper", "Pseudo-queries of each silo's own sentences", None),
    "single_random": (
        "Dense retriever, each silo alone", "Random negatives",
        (0.194, 0.171, 0.466, 0.620, 0.376, 0.323, 0.401, 0.702),
    ),
    "single_bm25": (
        "Dense retriever, each silo alone", "BM25 negatives",
        (0.188, 0.151, 0.475, 0.639, 0.353, 0.303, 0.388, 0.679),
    ),
    "single_star": (
        "Dense retriever, each silo alone", "STAR", (0.232, 0.190, 0.535, 0.679, 0.403, 0.350, 0.421, 0.709)
    ),
    "stage1": ("Federated", "PDD-AS2 (stage 1)", (0.261, 0.217, 0.546, 0.695, 0.429, 0.395, 0.479, 0.745)),
    "customised": (
        "Federated", "+ client-customised query encoding", (0.289, 0.232, 0.556, 0.711, 0.445, 0.414, 0.489, 0.750)
    ),
    "fed_negative": ("Federated", "+ fed-negative", (0.309, 0.252, 0.577, 0.720, 0.458, 0.431, 0.504, 0.762)),
}  # fmt: skip
#: Rows that no train query has a say in, given the collections; the second learns from a silo's sentences.
WITHOUT_QUERIES: tuple[Literal["zero_shot", "pseudo_queries"], ...] = ("zero_shot", "pseudo_queries")
#: What the paper says is better than what, in its text or by its table.
ORDERS: tuple[tuple[str, str], ...] = (
    ("single_star", "single_random"),
    ("single_random", "single_bm25"),
    ("single_star", "bm25"),
    ("stage1", "single_star"),
    ("customised", "stage1"),
    ("fed_negative", "customised"),
    ("central", "fed_negative"),
)


def impossible_cells() -> list[tuple[str, str, float, float]]:
    """Rows whose passage R@k is below their sentence R@k, which equation 9 excludes.

    A passage scores as its best sentence, so the passage of a sentence among the first k is among the first k.

    Example:
        >>> impossible_cells()[0]
        ('Central-training', 'R@20', 0.629, 0.553)
    """
    names = list(COLUMNS)
    found = []
    for _, name, values in TABLE_1.values():
        if values is None:
            continue
        for level in ("success@1", "success@20", "success@100", "mrr@10"):
            sentence, passage = (values[names.index(f"{side}/{level}")] for side in ("sentence", "passage"))
            if passage < sentence:
                found.append((name, level.replace("success", "R"), sentence, passage))
    return found
