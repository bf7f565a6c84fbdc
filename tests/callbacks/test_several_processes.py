"""Two processes make the run that one process makes: the same update, the same ledger, the same end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import Server, told

# What differs between any two runs: the moment, what is hashed over it, and bits of sums that were added in turn.
_OWN = {"time", "hash", "prev", "nonce", "update_hash", "state_hash", "sum_tag"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def ledger(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in _OWN} for line in lines]


def weights(seen: dict[str, Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(v, dtype=torch.float64) for _, v in sorted(seen["weights"].items())])


def test_two_ranks_make_the_update_and_the_ledger_of_one(server: Server, tmp_path: Path) -> None:
    # 1.2 units on average: some steps leave a rank empty, and some both.
    data = {"size": 40, "expected_batch_size": None, "sample_rate": 0.03, "physical_batch_size": 2}
    for world in (1, 2):
        assert server.run("fit", tmp_path / f"{world}", world=world, data=data, steps=12) == [0] * world
    one, first, second = (told(tmp_path / name, rank) for name, rank in (("1", 0), ("2", 0), ("2", 1)))
    assert first["weights"] == second["weights"]
    assert (weights(one) - weights(first)).abs().max() < 1e-5
    assert one["eps"] == first["eps"] == second["eps"] and first["global_step"] == 12
    assert ledger(tmp_path / "1") == ledger(tmp_path / "2")
