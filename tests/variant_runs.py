"""Small invented runs of a comparison, for the tests of the reports."""

from __future__ import annotations

from typing import Any

from reproduction.report.variant_runs import VariantRun


def run(variant: str = "Logit-DP", seed: int = 0, *, losses: list[float] | None = None, **fields: Any) -> VariantRun:
    """Return a run with batches of 100, one second per step, two classes and one metric."""
    shown = [4.0, 3.0, 2.0] if losses is None else losses
    made: dict[str, Any] = {
        "steps": list(range(1, len(shown) + 1)),
        "examples": [100 * step for step in range(1, len(shown) + 1)],
        "seconds": [float(step) for step in range(1, len(shown) + 1)],
        "metrics": {"accuracy": 0.5},
        "confusion": [[3, 1], [2, 4]],
        "batch_size": 100,
    }
    return VariantRun(variant=variant, seed=seed, losses=shown, **{**made, **fields})
