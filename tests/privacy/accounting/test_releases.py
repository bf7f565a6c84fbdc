"""Releases are data: checked where they are made, equal when they mean the same, unchanged by JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from laws import LAWS

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    NonPrivateRelease,
    Poisson,
    Release,
    Shuffle,
    TruncatedPoisson,
    merge,
    release_from_dict,
)


@pytest.mark.parametrize(
    "release",
    [
        *(GaussianRelease(noise_multiplier=0.7296, law=law, count=7, label="histogram") for law in LAWS.values()),
        NonPrivateRelease(label="validation loss", count=3),
    ],
    ids=[*LAWS, "without protection"],
)
def test_a_release_and_its_law_survive_json_unchanged(release: Release) -> None:
    written = json.dumps(release.to_dict())
    assert release_from_dict(json.loads(written)) == release
    assert json.dumps(release_from_dict(json.loads(written)).to_dict()) == written


def test_one_and_one_point_zero_are_the_same_release() -> None:
    whole = GaussianRelease(noise_multiplier=1, law=Poisson(sample_rate=1))
    real = GaussianRelease(noise_multiplier=1.0, law=Poisson(sample_rate=1.0))
    assert whole == real
    assert json.dumps(whole.to_dict()) == json.dumps(real.to_dict())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Poisson(sample_rate=0.0), "sample_rate=0"),
        (lambda: Poisson(sample_rate=1.5), "sample_rate=1.5"),
        (lambda: Poisson(sample_rate=float("nan")), "sample_rate=nan"),
        (lambda: Poisson(sample_rate="0.1"), "sample_rate='0.1'"),  # type: ignore[arg-type]
        (lambda: TruncatedPoisson(sample_rate=0.1, cap=0, n=10), "cap=0"),
        (lambda: TruncatedPoisson(sample_rate=0.1, cap=11, n=10), "cap=11"),
        (lambda: TruncatedPoisson(sample_rate=0.1, cap=2.5, n=10), "cap=2.5"),  # type: ignore[arg-type]
        (lambda: FixedSize(batch_size=11, n=10), "batch_size=11"),
        (lambda: Shuffle(batch_size=0, n=10), "batch_size=0"),
        (lambda: Shuffle(batch_size=True, n=10), "batch_size=True"),
        (lambda: GaussianRelease(noise_multiplier=-1.0, law=FullBatch()), "noise_multiplier=-1"),
        (lambda: GaussianRelease(noise_multiplier=float("inf"), law=FullBatch()), "noise_multiplier=inf"),
        (lambda: GaussianRelease(noise_multiplier=float("nan"), law=FullBatch()), "noise_multiplier=nan"),
        (lambda: GaussianRelease(noise_multiplier=1.0, law="poisson"), "law='poisson'"),  # type: ignore[arg-type]
        (lambda: GaussianRelease(noise_multiplier=1.0, law=FullBatch(), count=0), "count=0"),
        (lambda: GaussianRelease(noise_multiplier=1.0, law=FullBatch(), label=""), "label=''"),
        (lambda: NonPrivateRelease(label="x", count=-1), "count=-1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace(".", r"\.")):
        make()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"kind": "laplace", "count": 1}, "kind='laplace'"),
        ({"count": 1}, "kind=None"),
        (Poisson(sample_rate=0.5).to_dict(), "'poisson'"),
        ({"kind": "non_private", "label": "x", "epsilon": 1.0}, "'epsilon'"),
        ({"kind": "gaussian", "noise_multiplier": 1.0}, "lacks the field law"),
        ({"kind": "gaussian", "noise_multiplier": 1.0, "law": {"kind": "bootstrap"}}, "kind='bootstrap'"),
        ({"kind": "gaussian", "noise_multiplier": 1.0, "law": {"kind": "poisson"}}, "lacks the field sample_rate"),
    ],
)
def test_an_unknown_kind_or_field_is_refused_by_name(data: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        release_from_dict(data)


def test_merging_conserves_counts_and_order_and_is_idempotent() -> None:
    train = GaussianRelease(noise_multiplier=1.0, law=Poisson(sample_rate=0.1), count=2)
    weak = GaussianRelease(noise_multiplier=0.5, law=Poisson(sample_rate=0.1))
    open_ = NonPrivateRelease(label="loss")
    other = GaussianRelease(noise_multiplier=1.0, law=Poisson(sample_rate=0.1), label="histogram")
    releases: list[Release] = [train, weak, open_, train, other, open_]
    merged = merge(releases)
    assert [(r.label, r.count) for r in merged] == [("train", 4), ("train", 1), ("loss", 2), ("histogram", 1)]
    assert merge(merged) == merged
    assert merge([]) == []


def test_shuffled_releases_are_merged_only_as_whole_epochs() -> None:
    half, whole = (GaussianRelease(noise_multiplier=1.0, law=Shuffle(batch_size=4, n=10), count=c) for c in (2, 3))
    assert merge([half, whole, half, whole]) == [half, GaussianRelease(**{**vars(whole), "count": 6}), half]


def test_shuffled_steps_begin_as_many_epochs_as_they_touch() -> None:
    law = Shuffle(batch_size=4, n=10)  # three batches, the last of two units
    assert law.steps_per_epoch == 3
    assert [law.epochs(steps) for steps in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]


def test_the_expected_batch_size_is_stated_where_public_facts_fix_it() -> None:
    assert [law.expected_batch_size for law in LAWS.values()] == [None, 40.0, 40.0, 40.0, None]
