"""A private training on an XLA device: the updates and the ledger of the CPU, and no graph is compiled twice.

They run where torch_xla is installed, on the CPU as an XLA device (``scripts/xla_env.sh`` makes such an environment);
no TPU was at hand.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None,
    reason="torch_xla is not installed: scripts/xla_env.sh makes an environment in which these tests run",
)
PROGRAM = Path(__file__).parent / "private_run.py"


def told(folder: Path, **asked: Any) -> dict[str, Any]:
    """What a run in a process of its own tells."""
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(folder), json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    return found


RUNS: dict[str, dict[str, Any]] = {
    "one row of a unit": {"steps": 5},
    "all rows of a unit": {"steps": 3, "rows_per_unit": "all"},
    "per layer, untied": {
        "steps": 3, "clip_groups": "per_layer", "clip": "automatic",
        "model": {"config": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
                             "tie_word_embeddings": False}},
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS, ids=str)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run on the CPU, in batches as they come, and on XLA."""
    folder, asked = tmp_path_factory.mktemp("xla"), RUNS[request.param]
    return told(folder / "cpu", device="cpu", **asked), told(folder / "xla", device="xla", **asked)


def largest_gap(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    assert one.keys() == other.keys()
    return max(abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True))


def test_it_makes_the_updates_of_the_cpu(runs: Any) -> None:
    on_cpu, on_xla = runs
    assert {c["device"] for c in on_xla["compilations"]} == {"xla:0"}
    assert on_xla["tied"] == on_cpu["tied"]
    assert largest_gap(on_cpu["weights"], on_xla["weights"]) < 1e-5


def test_the_model_that_it_exports_is_the_one_that_it_trained(runs: Any) -> None:
    told = runs[1]
    assert told["exported"] and all(
        told["exported"][name.removeprefix("model.")] == weights for name, weights in told["weights"].items()
    )


def test_it_writes_the_ledger_of_the_cpu(runs: Any) -> None:
    changing = {"hash", "prev"}
    on_cpu, on_xla = ([{k: v for k, v in line.items() if k not in changing} for line in r["ledger"]] for r in runs)
    assert on_cpu == on_xla
    kinds = [line["kind"] for line in on_xla]
    assert kinds.count("intent") == kinds.count("release") == max(c["step"] for c in runs[1]["compilations"]) + 1


def test_after_the_second_step_nothing_is_compiled(runs: Any) -> None:
    done = runs[1]["compilations"]
    warm = max(c["compiled"] for c in done if c["step"] <= 1)
    assert {c["compiled"] for c in done if c["step"] > 1} == {warm}
    assert warm <= 12  # two of Lightning's, one check of the loss, one start, three of the audit, batch, noise, update
    assert {c["units"] for c in done} >= {0, 4}  # whole and empty batches were among them
    assert any(0 < c["units"] < 4 for c in done)


def test_a_physical_batch_is_one_graph_and_an_update_two(runs: Any) -> None:
    done = runs[1]["compilations"]
    checked = [n for n, c in enumerate((c for c in done if c["units"]), 1) if n & (n - 1) == 0]
    seen = 0
    for before, after in itertools.pairwise(done):
        seen += bool(before["units"])
        expected = bool(after["units"]) + 2 * after["last"]
        if after["units"] and seen + 1 in checked:
            expected += 1  # the losses with and without the other half of the rows
        assert after["run"] - before["run"] == expected, (before, after)


def test_no_operation_falls_back_to_the_host(runs: Any) -> None:
    done = runs[1]["compilations"]
    assert set(done[-1]["fallbacks"]) <= {"aten::_local_scalar_dense"}


def test_two_processes_of_one_device_each_make_the_update_and_the_ledger_of_one(tmp_path: Path) -> None:
    asked = {"steps": 3, "device": "xla", "expected": 6, "physical": 2}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path / str(rank)), json.dumps(asked | {"processes": True})],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][-2000:] + said[1][-2000:]
    first, second = (json.loads((tmp_path / str(rank) / "told.json").read_text(encoding="utf-8")) for rank in range(2))
    alone = told(tmp_path / "alone", **asked | {"device": "cpu"})
    assert first["weights"] == second["weights"]
    assert largest_gap(first["weights"], alone["weights"]) < 1e-5
    assert second["ledger"] == []  # rank 0 alone has one
    changing = {"hash", "prev"}
    one, two = ([{k: v for k, v in line.items() if k not in changing} for line in r["ledger"]] for r in (alone, first))
    assert one == two
    assert any(not a["units"] for a in first["compilations"] + second["compilations"])  # a rank without units goes on
    for rank in (first, second):
        assert len({c["compiled"] for c in rank["compilations"] if c["step"] > 1}) == 1
