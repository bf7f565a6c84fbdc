"""The numbers of paper 004's Tables 2 and 4, by line and label of our studies; its Figures 4 and 5 have none."""

from __future__ import annotations

from collections.abc import Mapping

from lit_dpret.report.paper_004 import COLUMNS

_TABLE_2 = ("sentence/success@1", "passage/success@1")

_NEGATIVES = {
    ("single client, BM25 negatives", "n=2"): (0.143, 0.123, 0.302, 0.489, 0.310, 0.247, 0.311, 0.582),
    ("single client, BM25 negatives", "n=8"): (0.172, 0.151, 0.343, 0.533, 0.343, 0.288, 0.345, 0.598),
    ("single client, STAR", "n=2"): (0.201, 0.160, 0.506, 0.655, 0.352, 0.305, 0.379, 0.705),
    ("single client, STAR", "n=8"): (0.232, 0.191, 0.535, 0.679, 0.403, 0.350, 0.421, 0.709),
    ("PDD-AS2, stage 1", "n=2"): (0.242, 0.193, 0.516, 0.645, 0.392, 0.354, 0.432, 0.719),
    ("PDD-AS2, stage 1", "n=8"): (0.261, 0.217, 0.546, 0.695, 0.429, 0.395, 0.479, 0.745),
    ("+ customised", "n=10"): (0.272, 0.233, 0.557, 0.705, 0.431, 0.415, 0.487, 0.746),
    ("+ customised", "n=200"): (0.289, 0.251, 0.576, 0.711, 0.445, 0.434, 0.489, 0.75),
}
_HUBNESS = {
    ("PDD-AS2, stage 1", "k=10"): (0.121, 0.235),
    ("PDD-AS2, stage 1", "k=50"): (0.202, 0.379),
    ("PDD-AS2, stage 1", "k=100"): (0.211, 0.352),
    ("PDD-AS2, stage 1", "k=300"): (0.217, 0.395),
}


def paper_numbers(study: str, line: str, label: str) -> Mapping[str, float]:
    """The paper's numbers for a point, by measure; empty where it has none.

    Example:
        >>> paper_numbers("hubness", "PDD-AS2, stage 1", "k=10")
        {'sentence/success@1': 0.121, 'passage/success@1': 0.235}
    """
    if study == "hubness":
        return dict(zip(_TABLE_2, _HUBNESS.get((line, label), ()), strict=False))
    return dict(zip(COLUMNS, _NEGATIVES.get((line, label), ()), strict=False)) if study == "negatives" else {}
