"""The papers' experiments, ablations and comparisons: each trains several variants and compares their results.

This package is next to the product in a clone and is not part of the wheel. It imports `lit_dpret`, and nothing there
imports it. `python train.py experiment=paper_000` finds its choices in `reproduction/configs`. Every task of several
trainings is a `reproduction.study.Study`, and the numbers that a paper prints are data in `published`. It covers three
papers with every table and figure, four comparisons and six federated studies.
"""

from __future__ import annotations

from lit_dpret.lazy import lazy_names

_MODULES = {
    "Ablate": "ablate",
    "CanaryStudy": "canary_study",
    "CompareModes": "ablate",
    "CompareNegatives": "compare_negatives",
    "EndToEnd": "paper_000.end_to_end",
    "FederatedStudy": "federated.study",
    "Paper000": "paper_000.task",
    "SecondTask": "second_task",
    "Suite": "suite",
    "SuitePart": "suite",
    "Variant": "variant_study",
    "VariantStudy": "variant_study",
    "ZeroShot": "zero_shot",
}

__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(_MODULES)
