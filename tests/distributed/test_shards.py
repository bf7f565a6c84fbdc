"""Sums of which each rank gets a part: every coordinate to one rank, and the right total."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_dpret.distributed import shards as shards_module
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.distributed.shards import Shard, ShardLayout
from lit_dpret.errors import UnsupportedModelError


class Wire(Ranks):
    """Ranks that speak through lists: what each sends is kept, and what it gets is the sum of what all sent."""

    def __init__(self, rank: int, world_size: int, sent: list[list[Tensor]]) -> None:
        super().__init__(rank, world_size)
        object.__setattr__(self, "sent", sent)
        object.__setattr__(self, "turn", 0)

    def sum_rows(self, rows: Tensor) -> Tensor:
        sent: list[list[Tensor]] = self.sent  # type: ignore[attr-defined]
        turn: int = self.turn  # type: ignore[attr-defined]
        object.__setattr__(self, "turn", turn + 1)
        sent[self.rank].append(rows.clone())
        known = [messages[turn] for messages in sent if len(messages) > turn]
        return torch.stack(known).sum(0)[self.rank]


def add_up(layout: Sequence[Sequence[Shard]], sums: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What each rank gets: a first pass for what is sent, a second one that knows all of it."""
    sizes = {name: tensor.numel() for name, tensor in sums[0].items()}
    world = len(layout)
    sent: list[list[Tensor]] = [[] for _ in layout]
    for rank in range(world):
        ShardLayout(layout, sizes, Wire(rank, world, sent)).add_up(dict(sums[rank]))
    found = []
    for rank in range(world):
        known = [list(messages) for messages in sent]
        wire = Wire(rank, world, known)
        known[rank] = []  # sends it again
        found.append(ShardLayout(layout, sizes, wire).add_up(dict(sums[rank])))
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_each_rank_gets_its_part_of_the_total_however_parameters_are_cut(
    numels: list[int], world: int, bucket: int, coins: object
) -> None:
    generator = torch.Generator().manual_seed(len(numels) * 100 + world)
    sums = [{f"p{i}": torch.randn(n, generator=generator) for i, n in enumerate(numels)} for _ in range(world)]
    layout: list[list[Shard]] = [[] for _ in range(world)]
    for i, n in enumerate(numels):  # cut in places of chance, dealt to the ranks in an order of chance
        cuts = [0, *sorted(coins.randint(0, n) for _ in range(world - 1)), n]  # type: ignore[attr-defined]
        ranks = list(range(world))
        coins.shuffle(ranks)  # type: ignore[attr-defined]
        for rank, start, end in zip(ranks, cuts, cuts[1:], strict=False):
            layout[rank].append(Shard(f"p{i}", start, end - start))
    before, shards_module.BUCKET = shards_module.BUCKET, bucket
    try:
        found = add_up(layout, sums)
    finally:
        shards_module.BUCKET = before
    for rank, shards in enumerate(layout):
        for shard in shards:
            total = sum(each[shard.name] for each in sums)[shard.start : shard.start + shard.count]
            assert shard.count == 0 or torch.allclose(found[rank][shard.name], total, atol=1e-6)


def test_bfloat16_sums_are_added_up_in_float32() -> None:
    small = [{"w": torch.tensor([1.0], dtype=torch.bfloat16)}, {"w": torch.tensor([1 / 512], dtype=torch.bfloat16)}]
    first, _ = add_up([[Shard("w", 0, 1)], []], small)
    assert first["w"].dtype == torch.float32 and float(first["w"]) == 1 + 1 / 512


@pytest.mark.parametrize(
    "layout",
    [
        [[Shard("w", 0, 3)], [Shard("w", 4, 2)]],
        [[Shard("w", 0, 4)], [Shard("w", 3, 3)]],
        [[Shard("w", 0, 6)], [Shard("w", 0, 6)]],
        [[], []],
        [[Shard("w", 0, 6)], [Shard("other", 0, 1)]],
    ],
    ids=["a hole", "an overlap", "held twice", "held by none", "not trained"],
)
def test_a_cut_that_would_miss_noise_or_add_it_twice_is_refused(layout: list[list[Shard]]) -> None:
    with pytest.raises(UnsupportedModelError):
        ShardLayout(layout, {"w": 6}, Ranks(0, 2))
