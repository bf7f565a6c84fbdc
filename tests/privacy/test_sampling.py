"""The sampler does what its law says, and nothing about it depends on how the run is executed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import Line

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.coupled_sensitivity import change_of_a_sub_batch, resolve_n_max
from lit_dpret.privacy.accounting.releases import FixedSize, FullBatch, Poisson, SamplingLaw, Shuffle, TruncatedPoisson
from lit_dpret.privacy.batches import PADDING, Draw
from lit_dpret.privacy.collation import UnitCollator
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler

SECRET = b"s" * 32


def sampler(
    law: SamplingLaw, *, units: int = 50, run: str = "run", physical: int = 4, steps: int = 10
) -> PrivateBatchSampler:
    return PrivateBatchSampler(
        law, units=units, steps_per_epoch=steps, physical_batch_size=physical, stream=KeyedStream(SECRET, run)
    )


def test_every_unit_takes_part_with_the_stated_probability_and_independently_of_the_others() -> None:
    rate = 1 / 3
    drawn = sampler(Poisson(sample_rate=rate), units=6)
    steps = 4000
    taken = np.zeros((steps, 6))
    for step in range(steps):
        taken[step, drawn.draw(step)] = 1
    standard_error = (rate * (1 - rate) / steps) ** 0.5
    assert np.abs(taken.mean(axis=0) - rate).max() < 5 * standard_error, "a unit is drawn more or less often than told"
    sizes = taken.sum(axis=1)
    assert sizes.min() == 0, "empty draws are missing"
    assert abs(sizes.var() - 6 * rate * (1 - rate)) < 0.15, "sizes are not binomial"
    correlations = np.corrcoef(taken.T)[np.triu_indices(6, k=1)]
    assert np.abs(correlations).max() < 5 / steps**0.5, "units are not drawn independently of each other"


def test_a_batch_above_the_cap_loses_units_uniformly_and_not_by_file_order() -> None:
    drawn = sampler(TruncatedPoisson(sample_rate=0.9, cap=3, n=8), units=8)
    counts = np.zeros(8)
    for step in range(4000):
        units = drawn.draw(step)
        assert len(units) <= 3
        counts[units] += 1
    assert np.abs(counts / counts.sum() - 1 / 8).max() < 0.012, "the cap drops units by file order"


def test_the_draw_depends_on_secret_run_attempt_and_step_alone() -> None:
    law = Poisson(sample_rate=0.5)
    one, other = sampler(law), sampler(law, physical=7)
    assert [d.tolist() for d in map(one.draw, range(5))] == [d.tolist() for d in map(other.draw, range(5))]
    other.attempt = 1
    assert one.draw(3).tolist() != other.draw(3).tolist()
    assert one.draw(3).tolist() != sampler(law, run="another").draw(3).tolist()


def test_a_resumed_sampler_goes_on_with_the_draws_of_an_uninterrupted_one() -> None:
    whole = list(sampler(TruncatedPoisson(sample_rate=0.2, cap=20, n=50), steps=6))
    resumed = sampler(TruncatedPoisson(sample_rate=0.2, cap=20, n=50), steps=6)
    resumed.next_step = 4
    rest = [batch for batch in whole if batch[0].step >= 4]
    assert list(resumed) == rest, "a resumed sampler hands out other draws than the uninterrupted one"


def test_two_passes_hand_out_consecutive_steps() -> None:
    passes = sampler(Poisson(sample_rate=0.2), steps=3)
    steps = [[batch[0].step for batch in passes if batch[0].last] for _ in range(2)]
    assert steps == [[0, 1, 2], [3, 4, 5]]


def test_an_empty_draw_is_one_physical_batch_of_padding_that_ends_its_step() -> None:
    drawn = sampler(Poisson(sample_rate=1e-9))
    padding = [[Draw(PADDING, 0, 0, True, attempt=0)]]
    assert drawn.physical_batches(0) == padding, "an empty draw was dropped, and its step with it"


def test_a_capped_law_has_the_same_number_of_physical_batches_in_every_step() -> None:
    drawn = sampler(TruncatedPoisson(sample_rate=0.2, cap=20, n=50))
    assert {len(drawn.physical_batches(step)) for step in range(50)} == {5}
    assert len(drawn) == 10 * 5
    with pytest.raises(TypeError):
        len(sampler(Poisson(sample_rate=0.2)))


def test_physical_batches_hold_each_drawn_unit_once_and_one_last_mark() -> None:
    drawn = sampler(Poisson(sample_rate=0.4))
    for step in range(20):
        batches = drawn.physical_batches(step)
        units = [draw.unit for batch in batches for draw in batch if draw.unit != PADDING]
        assert sorted(units) == sorted(drawn.draw(step).tolist())
        assert [batch[0].last for batch in batches] == [False] * (len(batches) - 1) + [True]


def test_shuffle_takes_every_unit_once_per_epoch_and_in_another_order_the_next() -> None:
    drawn = sampler(Shuffle(batch_size=8, n=50))
    epochs = [np.concatenate([drawn.draw(7 * epoch + i) for i in range(7)]) for epoch in range(2)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(50))
    assert epochs[0].tolist() != epochs[1].tolist()


def test_fixed_size_and_full_batches_have_their_size() -> None:
    assert len(set(sampler(FixedSize(batch_size=9, n=50)).draw(0).tolist())) == 9
    assert sampler(FullBatch()).draw(0).tolist() == list(range(50))


def test_a_physical_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="physical_batch_size=0"):
        sampler(Poisson(sample_rate=0.1), physical=0)


def items() -> list[tuple[Draw, list[Line]]]:
    rows = [Line("q", "query", f"p{i}", "passage", frozenset()) for i in range(3)]
    return [
        (Draw(7, 2, 1, True, pick=4), rows),
        (Draw(PADDING, 2, 1, True), []),
        (Draw(9, 2, 1, True, pick=5), rows[:1]),
    ]


def test_one_row_per_unit_takes_the_picked_row_and_all_takes_every_row() -> None:
    names = lambda rows: [row.passage_id for row in rows]  # noqa: E731
    one = UnitCollator(names, "one")(items())
    assert one.rows == ["p1", "p0"] and one.unit_ids.tolist() == [0, 2]
    all_rows = UnitCollator(names, "all")(items())
    assert all_rows.rows == ["p0", "p1", "p2", "p0"] and all_rows.unit_ids.tolist() == [0, 0, 0, 2]
    assert all_rows.mask.tolist() == [True, False, True]
    assert (all_rows.step, all_rows.part, all_rows.last) == (2, 1, True)


def test_a_batch_of_padding_has_no_rows() -> None:
    batch = UnitCollator(lambda rows: rows)([(Draw(PADDING, 0, 0, True), [])])
    assert batch.rows is None and not batch.mask.any() and len(batch.unit_ids) == 0
    assert torch.equal(batch.to("cpu").mask, batch.mask)


# -- who shares a sub-batch with whom, and the bound on its size ---------------------------------

LAWS: list[SamplingLaw] = [
    Poisson(sample_rate=0.3),
    TruncatedPoisson(sample_rate=0.3, cap=70, n=200),
    FixedSize(batch_size=60, n=200),
    Shuffle(batch_size=60, n=200),
    FullBatch(),
]


def cut(law: SamplingLaw, **settings: Any) -> PrivateBatchSampler:
    known = {"units": 200, "steps_per_epoch": 50, "physical_batch_size": 8, "sub_batches": (4, None)}
    return PrivateBatchSampler(law, stream=KeyedStream(b"k" * 32, "run"), **{**known, **settings})


def members(found: list[list[Any]]) -> list[set[int]]:
    return [{draw.unit for draw in part if draw.unit != PADDING} for part in found]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_a_logical_batch_falls_into_sub_batches_that_hold_each_drawn_unit_once(law: SamplingLaw) -> None:
    drawn = cut(law)
    for step in range(3):
        parts = members(drawn.physical_batches(step))
        assert len(parts) == 4 == drawn.physical_batches_per_step
        assert set().union(*parts) == set(drawn.draw(step).tolist())
        assert sum(map(len, parts)) == len(drawn.draw(step))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_taking_one_unit_out_changes_exactly_one_sub_batch(law: SamplingLaw, monkeypatch: Any) -> None:
    drawn = cut(law)
    before = members(drawn.physical_batches(0))
    units = drawn.draw(0)
    monkeypatch.setattr(drawn, "draw", lambda step: np.delete(units, 5))
    after = members(drawn.physical_batches(0))
    changed = [a ^ b for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [{int(units[5])}]


def test_units_are_assigned_independently_and_evenly() -> None:
    drawn = cut(FullBatch())
    together = np.zeros((200, 200))
    for step in range(400):
        for part in members(drawn.physical_batches(step)):
            chosen = np.array(sorted(part))
            together[np.ix_(chosen, chosen)] += 1
    pairs = together[np.triu_indices(200, 1)]
    assert abs(pairs.mean() / 400 - 1 / 4) < 0.005
    assert abs(pairs.std() / np.sqrt(400 * 3 / 16) - 1) < 0.05


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_no_sub_batch_holds_more_than_n_max_and_the_rest_is_left_out_evenly(law: SamplingLaw) -> None:
    drawn = cut(law, sub_batches=(4, 9))
    took, drew = np.zeros(200), np.zeros(200)
    for step in range(300):
        parts = members(drawn.physical_batches(step))
        assert max(map(len, parts)) <= 9
        took[sorted(set().union(*parts))] += 1
        drew[drawn.draw(step)] += 1
    share = took / drew
    assert abs(share[:100].mean() - share[100:].mean()) < 0.03


def test_the_bound_on_a_sub_batch_is_hardly_ever_reached_and_no_single_one_of_a_capped_law_is_cut() -> None:
    assert resolve_n_max(None, law=LAWS[1], sub_batches=1, expected=60) == 70
    assert resolve_n_max(None, law=FullBatch(), sub_batches=1, expected=200, units=200) == 200
    capped = TruncatedPoisson(sample_rate=0.2, cap=10_500, n=50_000)
    chosen = resolve_n_max(None, law=capped, sub_batches=25, expected=10_000)
    sizes = np.random.default_rng(0).multinomial(10_500, [1 / 25] * 25, size=4000)
    assert 400 < chosen < 550 and sizes.max() <= chosen
    with pytest.raises(ConfigurationError, match=r"privacy\.n_max=14 is below the 15 units"):
        resolve_n_max(14, law=LAWS[1], sub_batches=4, expected=60)


@pytest.mark.parametrize("law", [LAWS[0], LAWS[1]], ids=lambda law: law.kind)
def test_only_under_add_or_remove_can_a_removed_unit_let_another_one_in(law: SamplingLaw) -> None:
    for neighbours in ("zero_out", "replace_one"):
        assert change_of_a_sub_batch(neighbours, law, n_max=9) == "add_or_remove"  # type: ignore[arg-type]
    assert change_of_a_sub_batch("add_or_remove", law, n_max=9) == "replace_one"
    assert change_of_a_sub_batch("add_or_remove", LAWS[1], n_max=70) == "add_or_remove"
