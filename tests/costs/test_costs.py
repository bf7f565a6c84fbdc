"""Which bytes each strategy divides, and how many rows fit beside them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lit_dpret.costs.memory import STRATEGIES, Bytes, LinearCost, bytes_of, on_each_device, rows_that_fit
from lit_dpret.costs.work import ACCELERATORS, accelerator
from lit_dpret.errors import ConfigurationError

ROWS = (LinearCost(0, 70),)


def step_bytes(*, weights: int, half: bool = False, rows: int, clipped: Any, checked: Any = (), **facts: Any) -> Bytes:
    """The bytes of a step of a model of which only these numbers are known."""
    outline = SimpleNamespace(parameters=weights, **facts)
    return bytes_of(outline, half=half, rows=rows, clipped=clipped, checked=checked)


WHOLE = step_bytes(weights=3000, trained=1000, largest=10, optimizer="adam", rows=4, clipped=ROWS, half=True)


def test_a_step_holds_the_larger_of_clipping_and_updating() -> None:
    assert (WHOLE.weights, WHOLE.masters, WHOLE.states, WHOLE.sums) == (6000, 4000, 8000, 4000)
    assert WHOLE.clipping == 18_000 + 4000 + 4 * 70
    assert WHOLE.updating == 18_000 + 4000 + 4000 and WHOLE.peak == WHOLE.updating
    of_ten = {"weights": 10, "trained": 10, "largest": 1, "optimizer": "sgd", "clipped": ROWS}
    lines = (
        LinearCost(0, 100),
        LinearCost(200, 10),
    )  # while the graph is gone through again, and while parameters are compared
    for rows, least in ((1, 210), (2, 220), (4, 400)):
        checked = step_bytes(rows=rows, checked=lines, **of_ten)  # type: ignore[arg-type]
        assert checked.clipping == 40 + 40 + least and checked.row == 70


def test_the_phase_of_a_batch_that_takes_most_depends_on_the_rows() -> None:
    lines = (LinearCost(1000, 1), LinearCost(0, 100))
    part = step_bytes(weights=10, trained=1, largest=1, optimizer="sgd", rows=2, clipped=lines)
    assert part.clipping == part.lasting + 4 + 1002 and part.row == 1
    assert replace(part, rows=20).clipping == part.lasting + 4 + 2000 and replace(part, rows=20).row == 100


@pytest.mark.parametrize(("strategy", "divided"), [
    ("ddp", []), ("zero1", ["masters", "states", "gradients"]), ("zero2", ["masters", "states", "gradients"]),
    ("zero3", ["masters", "states", "gradients", "weights"]),
])  # fmt: skip
def test_a_strategy_divides_what_its_row_of_the_table_says(strategy: str, divided: list[str]) -> None:
    part = on_each_device(WHOLE, strategy=strategy, world=4)
    for name in ("masters", "states", "gradients", "weights", "sums", "row"):
        assert getattr(part, name) == getattr(WHOLE, name) // (4 if name in divided else 1), name
    assert on_each_device(WHOLE, strategy=strategy, world=1) == WHOLE
    assert set(STRATEGIES) == {"ddp", "fsdp", "zero1", "zero2", "zero3"}


def test_sharded_weights_are_whole_while_a_batch_is_clipped_and_so_is_the_sum() -> None:
    for strategy in ("zero3", "fsdp"):
        part = on_each_device(WHOLE, strategy=strategy, world=4)
        assert part.sums == WHOLE.sums and part.weights + part.gathered >= WHOLE.weights
    # Float32 shards: of the 1,000 trained weights they are the copies, of the 2,000 frozen ones all there is.
    assert on_each_device(WHOLE, strategy="fsdp", world=4).weights == 2000 * 4 // 4
    assert on_each_device(WHOLE, strategy="fsdp", world=4).gathered == 3000 * 2


def test_with_one_block_gathered_at_a_time_what_a_rank_holds_is_its_share_and_two_blocks() -> None:
    """The largest block of 800 weights; 300 are outside of any."""
    checked = (LinearCost(0, 9), LinearCost(2 * 1000 + 80, 7))
    facts: dict[str, Any] = {"weights": 3000, "largest": 10, "optimizer": "adam", "rows": 0, "clipped": ROWS}
    for half, trained, copies in ((True, 1000, 2 * 1100), (False, 3000, 4 * 1100)):
        whole = step_bytes(trained=trained, half=half, checked=checked, **facts)
        part = on_each_device(whole, strategy="fsdp", world=8, blocks=(800, 300))
        assert part.sums == whole.sums / 8 and part.lasting == (4 * 3000 + 8 * trained) / 8
        assert part.gathered == max(copies, 4 * 800) + 4 * 200 <= 2 * 4 * 800
    half_bytes = on_each_device(step_bytes(trained=1000, half=True, checked=checked, **facts), strategy="fsdp", world=8)
    assert half_bytes.checked == checked, "at once: the gradients of all, beside each other"
    by_block = on_each_device(
        step_bytes(trained=1000, half=True, checked=checked, **facts), strategy="fsdp", world=8, blocks=(80, 30)
    )
    assert by_block.checked == (checked[0], LinearCost(2 * 110 + 80, 7))


def test_rows_fill_what_is_left_and_are_none_where_nothing_is() -> None:
    assert rows_that_fit(WHOLE, 40_000) == 128  # 36,000 less 22,000 is room for 200, and 128 is a power of two
    assert rows_that_fit(WHOLE, 28_000) == 0, "the update alone takes 26,000, more than nine tenths"
    small = step_bytes(weights=10, trained=1, largest=1, optimizer="sgd", rows=1, clipped=(LinearCost(0, 5),))
    assert rows_that_fit(small, 45) == 0


def test_unknown_names_are_refused_by_their_knob() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.device='abacus' is not one of .*h100-80gb"):
        accelerator("abacus")
    with pytest.raises(ConfigurationError, match=r"task\.strategy='pipeline'"):
        on_each_device(WHOLE, strategy="pipeline", world=2)
    with pytest.raises(ConfigurationError, match=r"task\.world_size=0"):
        on_each_device(WHOLE, strategy="ddp", world=0)
    for name, device in ACCELERATORS.items():
        assert device.name == name and device.source and device.memory > 2**34
