"""The papers again, ablations and comparisons: each trains several variants and sets their results side by side.

It stands beside the product in a clone and is no part of the wheel; it imports `lit_dpret`, and nothing there imports
it. `python train.py experiment=paper_000` finds its choices in `reproduction/configs`. It is above its budget of 3,500
lines: the variants of paper 002, the canary study and paper 000 still run their trainings beside `Study`, and the
tables of papers 000 and 002 are still classes of their own beside `lit_dpret.report.table.Table`.
"""

from __future__ import annotations

from lit_dpret.lazy import lazy_names

_MODULES = {
    "Ablate": "ablate",
    "CanaryStudy": "canary_study",
    "CompareModes": "compare_modes",
    "CompareNegatives": "compare_negatives",
    "FederatedStudy": "federated.study",
    "Paper000": "paper_000",
    "SecondTask": "second_task",
    "Suite": "suite",
    "SuitePart": "suite",
    "Variant": "variant",
    "VariantStudy": "variant_study",
    "ZeroShot": "zero_shot",
}

__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(_MODULES)
