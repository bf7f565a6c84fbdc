"""The papers again, ablations and comparisons: each trains several variants and sets their results side by side.

It stands beside the product in a clone and is not part of the wheel; it imports `lit_dpret`, and nothing there imports
it. `python train.py experiment=paper_000` finds its choices in `reproduction/configs`.
Every task of several trainings is a `reproduction.study.Study`, and what a paper prints is data in `published`. It is
above its budget of 3,500 lines: three papers with every table and figure, four comparisons and six federated studies.
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
