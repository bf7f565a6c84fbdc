"""Sums of which each rank gets a part: every coordinate to one rank, and the right total."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from negative_cases import NOISE, dual, in_double, lines
from pair_stand_ins import batch_of
from torch import Tensor

from lit_dpret.distributed import shards as shards_module
from lit_dpret.distributed.ranks import Ranks, all_rows
from lit_dpret.distributed.shards import Shard, ShardLayout
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.negatives import BM25Negatives, InBatchNegatives
from lit_dpret.privacy.modes import BatchClip


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


# -- negatives from other processes: loss and gradients of one process with the whole batch ----


#: Rows of each process; query 3 comes twice, in different ones, and query 1 has a second answer in neither.
PARTS = ((0, 1, 3), (3, 5))


def gradients(numbers: tuple[int, ...]) -> tuple[Any, list[Any]]:
    negatives = [InBatchNegatives(gather=True), BM25Negatives(per_query=2, depth=8)]
    module = in_double(negatives=negatives, grad_cache_rows=2)
    batch = batch_of(module.collate_rows(lines(*numbers)))
    module.before_batch(batch)
    losses = module.per_row_loss(batch.rows)
    found = torch.autograd.grad(losses.sum(), list(module.parameters()), allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(module.parameters(), found, strict=True)]
    return losses.detach(), filled


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        losses, found = gradients(PARTS[rank])
        for each in found:
            dist.all_reduce(each)
        own = torch.full((1 + rank, 2), float(rank + 1), requires_grad=True)
        everybody = all_rows(own)
        (everybody * (rank + 1)).sum().backward()
        torch.save(
            {"losses": losses, "gradients": found, "rows": everybody.detach(), "grad": own.grad}, f"{folder}/{rank}"
        )
    finally:
        dist.destroy_process_group()


def test_without_other_processes_the_rows_are_ones_own() -> None:
    rows = torch.randn(3, 2)
    assert all_rows(rows) is rows


@pytest.mark.slow
def test_two_processes_have_the_loss_and_gradients_of_one_with_the_whole_batch(tmp_path: Path) -> None:
    mp.spawn(process, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank), weights_only=True) for rank in (0, 1))
    losses, found = gradients(PARTS[0] + PARTS[1])
    torch.testing.assert_close(torch.cat([first["losses"], second["losses"]]), losses, rtol=1e-10, atol=1e-12)
    for a, b, whole in zip(first["gradients"], second["gradients"], found, strict=True):
        torch.testing.assert_close(a, whole, rtol=1e-9, atol=1e-11)
        assert torch.equal(a, b)
    assert first["rows"].tolist() == second["rows"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert first["grad"].tolist() == [[3.0, 3.0]] and second["grad"].tolist() == [[3.0, 3.0]] * 2


def test_a_private_mode_refuses_rows_of_other_processes() -> None:
    with pytest.raises(ConfigurationError, match=r"Set model\.negatives\.in_batch\.gather=false"):
        dual(BatchClip(max_grad_norm=1.0, **NOISE), negatives=[InBatchNegatives(gather=True)])
