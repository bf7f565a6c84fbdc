"""What passes between the ranks of a job arrives whole, errors included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_runs import Server, told

from lit_dpret.distributed.ranks import Ranks, sendable
from lit_dpret.errors import DataError, WorkerError
from lit_dpret.privacy.accounting.releases import FixedSize, Poisson, SamplingLaw, TruncatedPoisson
from lit_dpret.privacy.batches import PADDING
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
@pytest.mark.parametrize("world", [2, 3, 50])
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
        assert len(set(parts)) == len(parts), "two physical batches of a step share a dropout seed"


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


def test_on_one_rank_the_sampler_is_what_it_was() -> None:
    alone = PrivateBatchSampler(
        Poisson(sample_rate=0.3), units=40, steps_per_epoch=9, physical_batch_size=3,
        stream=KeyedStream(b"k" * 32, "run"),
    )  # fmt: skip
    for step in range(10):
        drawn = alone.draw(step)
        parts = [[d.unit for d in batch if d.unit != PADDING] for batch in alone.physical_batches(step)]
        assert np.concatenate(parts).tolist() == drawn.tolist()
        assert [batch[0].part for batch in alone.physical_batches(step)] == list(range(len(parts)))
