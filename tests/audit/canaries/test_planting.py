"""Canaries are private units like all others, and nobody but the training sees them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import generator
from tiny_tasks import trainer, write_log

from lit_dpret.audit.canaries import CanarySet, CanarySuite, plant, read_canaries, write_canaries
from lit_dpret.audit.canaries.suite import plant_in_run
from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.datamodules import ImagesDataModule, PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.negatives.base import TrainTexts
from lit_dpret.privacy.batches import Draw
from lit_dpret.privacy.collation import UnitCollator
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD

KEY = b"0123456789abcdef"
SUITE = CanarySuite(repetitions=(1, 3), seed=5)


def log(tmp_path: Path, **settings: Any) -> PairsDataModule:
    folder = tmp_path / "log"
    return PairsDataModule(folder=folder if folder.exists() else write_log(folder), sampling="poisson", **settings)


def planted(tmp_path: Path, suite: CanarySuite = SUITE, **settings: Any) -> tuple[PairsDataModule, CanarySet]:
    data = log(tmp_path, **settings)
    canaries = suite.make(data)
    plant(data, canaries)
    data.use_unit("query")
    return data, canaries


def test_each_copy_is_one_unit_with_an_id_of_its_own_beside_those_of_the_data(tmp_path: Path) -> None:
    plain = log(tmp_path)
    plain.use_unit("query")
    data, canaries = planted(tmp_path)
    copies = sum(canary.copies for canary in canaries.canaries)
    assert data.n_units == plain.n_units + copies == plain.n_units + SUITE.units
    units = data.train_units()
    assert [units.rows(i) for i in range(plain.n_units)] == [plain.train_units().rows(i) for i in range(plain.n_units)]
    for canary, row in zip(
        (c for c in canaries.canaries for _ in range(c.copies)),
        (units.rows(i) for i in range(plain.n_units, data.n_units)), strict=True,
    ):  # fmt: skip
        assert [(r.query, r.passage) for r in row] == [
            (canary.query_with(canary.secret), canary.passage_with(canary.secret))
        ]
    for unit in ("query", "pair"):
        data.use_unit(unit)
        ids = [row.query_id for place in range(data.n_units) for row in data.train_units().rows(place)]
        assert len(set(ids)) == len(ids) == data.n_units


def test_no_split_and_no_list_of_passages_holds_a_canary_and_the_fingerprint_covers_every_one(tmp_path: Path) -> None:
    plain, (data, canaries) = log(tmp_path), planted(tmp_path, CanarySuite(sides=("query", "passage"), seed=1))
    assert data.public_passages() == plain.public_passages()
    assert data.evaluation_set("test") == plain.evaluation_set("test")
    assert data.pair_rows("train") == plain.pair_rows("train")
    assert not any(canary.name in repr(data.collection) for canary in canaries.canaries)
    one, again, other = (planted(tmp_path, CanarySuite(repetitions=(1, 3), seed=seed))[0] for seed in (5, 5, 6))
    assert one.data_fingerprint(KEY) == again.data_fingerprint(KEY)
    assert len({each.data_fingerprint(KEY) for each in (plain, one, other)}) == 3


def test_a_canary_that_its_coin_left_out_is_a_unit_without_rows(tmp_path: Path) -> None:
    suite = CanarySuite(kinds=("own_passage",), repetitions=(2,), count=20, include=0.5, seed=3)
    data, canaries = planted(tmp_path, suite)
    out = [canary for canary in canaries.canaries if not canary.included]
    assert 0 < len(out) < 20
    units = data.train_units()
    empty = sum(not units.rows(place) for place in range(data.n_units))
    assert empty == 2 * len(out)
    all_in, _ = planted(tmp_path, CanarySuite(kinds=("own_passage",), repetitions=(2,), count=20, seed=3))
    assert data.n_units == all_in.n_units  # n, and what follows from it, does not tell how the coins fell


def test_a_planted_unit_is_in_ledger_and_plan_and_one_copy_more_changes_the_sum_by_no_more_than_the_bound(
    tmp_path: Path,
) -> None:
    """It is clipped like every other: the claim about everybody else's stands."""
    data, canaries = planted(tmp_path, expected_batch_size=8)
    mode = DPSGD(eps=8.0, noise_multiplier=1.0, max_grad_norm=0.5, secret_file=tmp_path / "secret")
    module = generator(privacy=mode, max_query_length=16, lr=1.0)
    accountant = PrivacyAccountant(run_dir=tmp_path / "run")
    run = trainer(max_steps=1, callbacks=[accountant], default_root_dir=tmp_path, logger=False)
    run.fit(module, datamodule=data)
    record = PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records[0]
    assert record["planted"]["units"] == SUITE.units
    assert record["planted"]["canaries"] == len(canaries.canaries)
    assert record["plan"]["n_public"] == data.n_units
    assert math.isclose(record["law"]["sample_rate"], 8 / data.n_units)
    assert not any(canary.secret in json.dumps(record) for canary in canaries.canaries)
    collate, units, sums = UnitCollator(module.collate_rows, "one"), data.train_units(), []
    for chosen in ([0, 1], [0, 1, data.n_units - 1]):
        draws = [Draw(unit=unit, step=0, part=0, last=True) for unit in chosen]
        module.privacy.contribute(module, collate([(draw, units.rows(draw.unit)) for draw in draws]))
        sums.append(torch.cat([value.flatten() for value in module.privacy.take().values()]))
    moved = float((sums[1] - sums[0]).norm())
    assert 0 < moved <= 0.5 * (1 + 1e-5)
    assert canaries.canaries[-1].included


def test_data_that_canaries_cannot_be_planted_in_are_refused(tmp_path: Path) -> None:
    data, canaries = planted(tmp_path)
    late, merged = log(tmp_path), log(tmp_path, duplicates="merge")
    late.attach([], list)
    false = replace(canaries.canaries[0], passage_id="p0", passage="another text")
    for target, planted_set, error, named in (
        (data, canaries, ConfigurationError, "already"),
        (late, canaries, ConfigurationError, "before fit"),
        (merged, SUITE.make(merged), ConfigurationError, "duplicates=keep"),
        (ImagesDataModule.__new__(ImagesDataModule), canaries, ConfigurationError, "ImagesDataModule"),
        (log(tmp_path), CanarySet((false,), {}, ""), DataError, "p0"),  # in the place of one of the data
    ):
        with pytest.raises(error, match=named):
            plant(target, planted_set)
    with pytest.raises(ConfigurationError, match="in_batch"):  # before negatives are mined in the train queries
        TrainTexts.of(data)


def test_a_resume_takes_the_canaries_of_the_owners_file_and_refuses_another_suite(tmp_path: Path) -> None:
    suite = CanarySuite(repetitions=(1,))  # without a seed every run has secrets of its own
    first, other = (plant_in_run(log(tmp_path), suite, tmp_path / name, resume=False) for name in ("run", "other"))
    assert {c.secret for c in first.canaries}.isdisjoint(c.secret for c in other.canaries)
    assert plant_in_run(log(tmp_path), suite, tmp_path / "run", resume=True) == first == read_canaries(tmp_path / "run")
    with pytest.raises(ResumeError, match="another suite"):
        plant_in_run(log(tmp_path), CanarySuite(repetitions=(2,)), tmp_path / "run", resume=True)
    path = write_canaries(first, tmp_path / "again")
    assert path.stat().st_mode & 0o777 == 0o600 and read_canaries(tmp_path / "again") == first
