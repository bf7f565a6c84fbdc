"""What passes between the ranks of a job arrives whole, errors included."""

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
from rank_runs import Server, told
from torch import Tensor

from lit_dpret.distributed import shards as shards_module
from lit_dpret.distributed.ranks import Ranks, all_rows, sendable
from lit_dpret.distributed.shards import Shard, ShardLayout
from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError, WorkerError
from lit_dpret.negatives import BM25Negatives, InBatchNegatives
from lit_dpret.privacy.accounting.releases import FixedSize, Poisson, SamplingLaw, TruncatedPoisson
from lit_dpret.privacy.batches import PADDING
from lit_dpret.privacy.modes import BatchClip
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler


@pytest.fixture(scope="module")
def seen(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    assert server.run("shared", folder) == [0, 0]
    return [told(folder, rank) for rank in (0, 1)]


def test_every_rank_holds_the_same_sums_in_the_shape_and_type_it_gave(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["sums"] == seen[1]["sums"]
    sums = seen[0]["sums"]
    assert sums["wide"] == (torch.arange(24.0).reshape(4, 6) * 3).tolist()
    assert sums["turned"] == (torch.arange(6.0).reshape(2, 3) * 3).T.tolist()
    assert sums["exact"] == [2 + 1e-12] * 2, "float64 was narrowed on the way"
    assert sums["scalar"] == 1.0 and sums["none"] == []
    assert seen[0]["counts"] == [1, 21]


def test_what_the_first_rank_found_or_refused_reaches_all(seen: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(seen):
        assert one["ranks"] == [rank, 2, rank == 0]
        assert one["shared"] == {"from": 0}
        assert one["gathered"] == [0, 2]
        assert one["shared_error"] == ["DataError", "rank 0", "T1"]
        assert one["interrupted"][0] == "KeyboardInterrupt"
        assert one["together"] == ["DataError", "bad rows", "T1"], "an error of one rank must be raised on all"
    assert seen[1]["unsendable"] == ["WorkerError", "Unsendable: words", None]


def test_one_rank_sends_nothing() -> None:
    alone = Ranks.here()
    assert alone == Ranks(0, 1) and alone.is_first
    tensors = {"a": torch.ones(3)}
    alone.sum_(tensors, torch.ones(1))
    assert tensors["a"].tolist() == [1, 1, 1]
    assert alone.share(lambda: 3) == alone.together(lambda: 3) == 3
    rows = torch.randn(3, 2)
    assert all_rows(rows) is rows


def test_an_error_that_cannot_be_rebuilt_is_sent_in_its_words() -> None:
    class Local(Exception):
        pass

    assert isinstance(sendable(Local("words")), WorkerError) and str(sendable(Local("words"))) == "Local: words"
    refused = DataError("rows", kind="empty", trap="T5")
    assert sendable(refused) is refused


# -- the draw, dealt to ranks --------------------------------------------------------------------

LAWS = [
    Poisson(sample_rate=0.2), Poisson(sample_rate=0.02), TruncatedPoisson(sample_rate=0.2, cap=17, n=40),
    FixedSize(batch_size=7, n=40),
]  # fmt: skip


def dealt(law: SamplingLaw, world: int, rank: int, **settings: Any) -> PrivateBatchSampler:
    known = {"units": 40, "steps_per_epoch": 9, "physical_batch_size": 3} | settings
    return PrivateBatchSampler(law, stream=KeyedStream(b"k" * 32, "run"), ranks=Ranks(rank, world), **known)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("world", [1, 2, 3, 50])
def test_the_ranks_share_out_one_draw_and_wait_for_none(law: SamplingLaw, world: int) -> None:
    samplers = [dealt(law, world, rank) for rank in range(world)]
    whole = dealt(law, 1, 0)
    for step in range(30):
        batches = [sampler.physical_batches(step) for sampler in samplers]
        assert len({len(own) for own in batches}) == 1, "ranks hand out different numbers of physical batches"
        known = samplers[0].physical_batches_per_step
        assert known is None or known == len(batches[0])
        units = [[d.unit for batch in own for d in batch if d.unit != PADDING] for own in batches]
        drawn = whole.draw(step).tolist()
        assert units == [drawn[rank::world] for rank in range(world)]
        picks = {d.unit: d.pick for own in batches for batch in own for d in batch if d.unit != PADDING}
        assert picks == {d.unit: d.pick for batch in whole.physical_batches(step) for d in batch if d.unit != PADDING}
        for own in batches:
            assert [batch[0].last for batch in own] == [False] * (len(own) - 1) + [True]
            assert all(1 <= len(batch) <= 3 for batch in own)
        parts = [batch[0].part for own in batches for batch in own]
        assert sorted(parts) == [*range(len(parts))], "two physical batches of a step share a dropout seed"


@pytest.mark.parametrize("sub_batches", [1, 2, 5])
@pytest.mark.parametrize("world", [2, 3])
def test_sub_batches_are_dealt_whole(sub_batches: int, world: int) -> None:
    law = Poisson(sample_rate=0.3)
    whole = dealt(law, 1, 0, sub_batches=(sub_batches, 6))
    for step in range(20):
        told_whole = [[d.unit for d in batch] for batch in whole.physical_batches(step)]
        found: list[list[int]] = []
        for rank in range(world):
            own = dealt(law, world, rank, sub_batches=(sub_batches, 6)).physical_batches(step)
            assert len(own) == -(-sub_batches // world)
            found += [[d.unit for d in batch] for batch in own if batch[0].part < sub_batches]
            for batch in own:
                expected = told_whole[batch[0].part] if batch[0].part < sub_batches else [PADDING]
                assert [d.unit for d in batch] == expected
        assert sorted(found) == sorted(told_whole)


# -- sums of which each rank gets a part: every coordinate to one rank, and the right total ----


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
