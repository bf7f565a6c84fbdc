"""The benchmark of the clipping engines runs, on a toy."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_benchmark_reports_every_variant_over_the_plain_step() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "clipping.py"
    spec = importlib.util.spec_from_file_location("clipping_benchmark", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = benchmark.measure_time((3, 32, 8), pairs=1, quick=True)
    assert set(result) == {"plain", "ghost", "opacus"}
    assert result["plain"]["wall_ratio"] == 1.0 and result["ghost"]["cpu_seconds"] > 0
