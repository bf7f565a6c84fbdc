"""The benchmarks run, and the bound that they print is one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def results(name: str, *words: str, out: Path) -> Any:
    """Run a benchmark in a process of its own; returns the JSON that it wrote."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text(encoding="utf-8"))


def test_the_upper_bound_of_a_median_holds_for_19_of_20_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    upper_bound = load("clipping", monkeypatch).upper_bound
    random = np.random.default_rng(0)
    for n in (5, 7, 15):
        bounds = [upper_bound(random.exponential(size=n).tolist()) for _ in range(4000)]
        assert np.mean([bound >= np.log(2) for bound in bounds]) >= 0.94
    assert upper_bound([1.0] * 4) is None, "four values are all below the median once in sixteen"


def test_every_private_way_of_the_benchmark_makes_the_same_step_as_all_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = load("logit_dp", monkeypatch)
    row = steps.Row("conv", 3, 4)

    def step(variant: str) -> Any:
        module = steps.build_module(variant, row)
        return steps.build_step(variant, module, row)()

    expected = step("brute_force")
    for variant in ("vmap", "pair_ghost", "jacobian"):
        found = step(variant)
        for name, gradient in expected.items():
            assert np.allclose(found[name].detach(), gradient.detach(), rtol=1e-3, atol=1e-5), variant


SMALL: dict[str, tuple[str, int]] = {
    "clipping": ("--quick --rounds 2 --limit-gb 0 --low-precision", 2),
    "low_precision": ("--quick --threads 1", 3),
    "compiled": ("--rounds 1 --models bert-toy", 1),
    "grad_cache": ("--rows 48 --at-once 4 --width 192 --layers 3 --threads 1", 2),
    "synthesize": ("--models public_t5 --passages 24 --batch-size 8 --rounds 2 --max-new-tokens 6", 4),
    "noise": ("--count 200000 --rounds 2", 10),
    "fsdp_memory": ("--shape t5-toy --steps 1", 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_measures_every_row_at_its_smallest_size(name: str, tmp_path: Path) -> None:
    words, count = SMALL[name]
    report = results(name, *words.split(), out=tmp_path / "report.json")
    assert len(report["rows"]) == count
    if name == "clipping":
        found = report["rows"]["t5-toy 3 x 32/8"]["time"]
        assert "tying" in found["refused"]["opacus ghost"]
        assert found["ghost_over"]["opacus"]["upper_95"] is None, "too few rounds for a bound"
    if name == "grad_cache":
        whole, chunks = report["rows"]
        assert whole["loss"] == pytest.approx(chunks["loss"], rel=1e-4)
        assert chunks["peak_bytes"] < whole["peak_bytes"] / 2


@pytest.mark.slow
def test_logit_dp_measures_every_way_with_memory_and_time_and_a_secure_sum_compares_itself(tmp_path: Path) -> None:
    report = results("logit_dp", "--quick", "--rounds", "1", out=tmp_path / "logit_dp.json")
    ways = {"plain", "vmap", "brute_force", "pair_ghost", "jacobian", "k_blocks", "k_blocks_towers"}
    for row in ("conv n=3 d=4", "mlp n=4 d=4"):
        assert set(report["time"][row]) == set(report["memory"][row]["bytes"]) == ways
    assert results("secure_sum", "--clients", "4", "--words", "1000", out=tmp_path / "sum.json")["mask_seconds"] >= 0


@pytest.mark.slow
def test_one_block_at_a_time_a_rank_holds_its_share_and_two_blocks_and_its_activations(tmp_path: Path) -> None:
    words = "--scaling --steps 1 --scaling-ranks 2 3 --scaling-layers 2 8"
    rows = results("fsdp_memory", *words.split(), out=tmp_path / "scaling.json")["rows"]
    assert len(rows) == 6
    for row in rows:
        for name in ("counted_clipping", "counted_checking"):
            beyond = row[f"{name}_beyond_share_in_blocks"]
            assert beyond < 2 if row["way"] == "fsdp, by block" else beyond > 2 * row["layers"]


@pytest.mark.slow
def test_search_is_compared_with_what_is_installed_and_finds_the_same(tmp_path: Path) -> None:
    for more in ("--passages 9000", "--memory 3000 9000", "--grid 300"):  # in one file
        words = f"--queries 50 --k 20 --dim 16 --threads 1 {more}"
        report = results("search", *words.split(), out=tmp_path / "search.json")
    assert all(run["shared_with_ours"] > 0.99 for runs in report["speed"]["runs"].values() for run in runs)
    assert [row["vectors"] for row in report["memory"]["sizes"]] == [3000, 9000]
    assert [row["queries"] for row in report["grid"]["sizes"]] == [1, 10, 100, 1000, 10000]
    assert all(row["later_seconds_over_theirs"] > 0 for row in report["grid"]["sizes"] + report["grid"]["index"])


@pytest.mark.slow
def test_kinds_of_index_are_compared_and_an_index_that_is_searched_deeper_finds_more(tmp_path: Path) -> None:
    [size] = results("index_kinds", "--sizes", "3000", "--dim", "48", "--threads", "1", out=tmp_path / "kinds.json")[
        "sizes"
    ]
    found = {(row["kind"], row["parameters"]): row["recall@100"] for row in size["rows"]}
    assert found["exact", ""] == found["exact, 4 shards", ""] == found["Flat", ""] == 1
    assert found["IVF128,Flat", "nprobe=1"] < found["IVF128,Flat", "nprobe=16"] < found["IVF128,Flat", "nprobe=64"]


def test_the_gpu_day_reports_each_part_and_why_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_day = load("gpu_day", monkeypatch)
    parts = {
        "noise": {"seconds": 60.0, "rows": {"a way": {"rate": 12.5, "ratio": None}, "another": {"ratio": 2}}},
        "run zero2": {"seconds": 1.0, "failed": "deepspeed is not installed"},
    }
    page = gpu_day.page({"device": "a CPU", "tiny": True, "parts": parts})
    assert "| a way | 12.5 |  |" in page and "| another |  | 2 |" in page, "a cell that was not measured stays empty"
    assert "deepspeed is not installed" in page and "rehearsal" in page


def test_the_gpu_day_does_not_mix_the_reports_of_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_day = load("gpu_day", monkeypatch)
    report = {"device": "NVIDIA H200", "tiny": False, "parts": {}}
    (tmp_path / "gpu_day.json").write_text(json.dumps(report), encoding="utf-8")
    with pytest.raises(SystemExit, match="--out"):
        gpu_day.begun(tmp_path / "gpu_day.json", gpu_day.Day(tmp_path, "cpu", True))


@pytest.mark.slow
def test_the_gpu_day_kills_a_run_and_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = load("gpu_day", monkeypatch)
    facts = day.resume(day.Day(tmp_path, "cpu", tiny=True))["killed and resumed"]
    assert facts["largest difference of a weight"] == 0 and facts["epsilon"] == facts["epsilon of the killed run"]
