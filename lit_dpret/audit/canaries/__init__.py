"""Canaries: secrets planted in the training data of a run, to measure their leakage.

`CanarySuite` makes them, `plant` adds them to a DataModule as separate private units, and `lit_dpret.audit.statistics`
evaluates their ranks and scores. ``docs/canaries.md`` explains which to choose.
"""

from typing import TYPE_CHECKING

from lit_dpret.lazy import lazy_names

if TYPE_CHECKING:
    from lit_dpret.audit.canaries.canary import CANARIES, Canary, CanarySet, read_canaries, write_canaries
    from lit_dpret.audit.canaries.suite import CanarySuite, plant
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "Canary": "canary",
            "CanarySet": "canary",
            "CANARIES": "canary",
            "read_canaries": "canary",
            "write_canaries": "canary",
            "plant": "suite",
            "CanarySuite": "suite",
        },
    )

__all__ = ["CANARIES", "Canary", "CanarySet", "CanarySuite", "plant", "read_canaries", "write_canaries"]
