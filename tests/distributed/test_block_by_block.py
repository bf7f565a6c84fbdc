"""Ranks that clip with one block of the model gathered at a time make the sum of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_runs import Server, ledger, told, weights

from lit_dpret.distributed.block_by_block import BeganAgain, BlockByBlock

BY_BLOCK: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks": (2, {}), "three ranks": (3, {}), "checkpointing": (2, {"checkpointing": True}),
    "per layer": (2, {"clip_groups": "per_layer"}), "bfloat16": (2, {"half": True}),
    "ghost_tf32": (2, {"engine_name": "ghost_tf32"}), "ghost_bf16": (2, {"engine_name": "ghost_bf16"}),
    "memory runs out in a forward pass": (2, {"breaks": "forward"}),
    "memory runs out in the sum": (3, {"breaks": "sum"}),
}  # fmt: skip
# Each has one of its kind among the others.
SLOW = ("three ranks", "ghost_tf32", "memory runs out in a forward pass")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "given"),
    [pytest.param(*one, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, one in BY_BLOCK.items()],
)
def test_sums_that_are_added_up_block_by_block_are_those_of_one_process(
    world: int, given: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    """Other numbers of batches on each rank, none on one, a unit that would dominate, tied weights."""
    assert server.run("shard_jobs:by_block", tmp_path, world=world, timeout=60, **given) == [0] * world
    for rank in range(world):
        seen = told(tmp_path, rank)
        assert max(seen["gaps"]) < 1e-6 * seen["largest"], "in three steps, each after the one before was taken"
        assert seen["alive"][2] <= seen["alive"][1], "nothing of a step is left after it"
        assert 0.09 < seen["norm"] <= 0.1 and seen["types"] == ["DTensor"] and seen["after"] == 0
        idle = world == 3 and rank == 2
        room = seen["padding"]
        assert seen["rest"] < seen["held"]["weights"] <= seen["rest"] + seen["block"] + room < seen["all"] or idle
        assert 0 < seen["held"]["sums"] <= max(seen["rest"], seen["block"]) or idle
    if "breaks" in given:
        calls = [told(tmp_path, rank)["calls"] for rank in range(world)]
        assert calls[0] > 9 and all(count > 9 for count in calls[1:]), "what is in the total cannot be taken back alone"


def test_no_handler_of_errors_goes_on_after_another_rank_began_again() -> None:
    with pytest.raises(BeganAgain):
        try:
            raise BeganAgain
        except Exception:  # as a check has that meets code of the user's
            pass
    store = object.__new__(BlockByBlock)  # of which a bare `except:` in code of the user's asks for more
    store._has_to_begin, store._added, store._tells_again = True, False, False
    for ask in (lambda: store._ask(-1), store.take):
        with pytest.raises(BeganAgain):
            ask()
    store.forget()
    assert not store._has_to_begin


@pytest.mark.costly
def test_where_blocks_are_gathered_one_by_one_all_ranks_begin_again_with_it(server: Server, tmp_path: Path) -> None:
    assert server.run("shard_jobs:generate", tmp_path / "whole") == [0, 0]
    assert server.run("shard_jobs:generate", tmp_path / "short", short_at=9) == [0, 0]
    short, before = ([told(tmp_path / name, rank) for rank in (0, 1)] for name in ("short", "whole"))
    assert short[0]["in_blocks"] and short[0]["weights"] == short[1]["weights"]
    assert (
        short[1]["passes"] > before[1]["passes"] and float((weights(short[0]) - weights(before[0])).abs().max()) < 1e-5
    )
    assert ledger(tmp_path / "whole") == ledger(tmp_path / "short")
