"""Canaries are private units like all others, and nobody but the training sees them."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memoriser import large_log
from tiny_generator import generator
from tiny_images import cifar10_pickles
from tiny_tasks import trainer, write_log

from lit_dpret.audit.canaries import CanarySet, CanarySuite, plant, read_canaries, write_canaries
from lit_dpret.audit.canaries.coin_flips import (
    AuditScores,
    CoinFlips,
    coins_in_run,
    coins_of,
    read_scores,
    write_scores,
)
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


@pytest.mark.costly
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


# -- a coin for each canary: flipping one makes a neighbour under the claim, and changes nothing else


COUNT = 60


def suite(**settings: Any) -> CanarySuite:
    return CanarySuite(**{"kinds": ("echo",), "repetitions": (1,), "count": COUNT, "candidates": 2, "include": 0.5}
                       | settings)  # fmt: skip


def coins(folder: Path, **settings: Any) -> CoinFlips:
    return coins_of(suite(**{"seed": 3} | settings).make(large_log(folder)))


def in_run(folder: Path, **settings: Any) -> CoinFlips:
    run: dict[str, Any] = {"run_dir": folder / "run", "begun": False, "resume": False}
    run |= {name: settings.pop(name) for name in (*run, "reader") if name in settings}
    data = settings.pop("data", None) or large_log(folder)
    return coins_in_run(data, suite(**settings), **run)


def texts(units: list[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    return [tuple(f"{row.query}|{row.passage}" for row in unit) for unit in units]


@pytest.mark.parametrize("place", [0, 7, COUNT - 1])
@pytest.mark.parametrize("neighbours", ["zero_out", "add_or_remove", "replace_one"])
def test_flipping_a_coin_makes_one_neighbour_under_the_relation_and_is_told_by_nothing_before_the_audit(
    neighbours: str, place: int, tmp_path: Path
) -> None:
    found = coins(tmp_path)
    assert found.planted(neighbours).facts == {"canaries": COUNT, "units": COUNT, "sha256": found.facts["sha256"]}
    assert not any(str(row.query) in repr(found) for row in found.rows) and "True" not in repr(found)
    included = tuple(coin ^ (at == place) for at, coin in enumerate(found.included))
    with_it, without = sorted(
        (found, replace(found, included=included)), key=lambda one: one.included[place], reverse=True
    )
    one, other = texts(with_it.units(neighbours)), texts(without.units(neighbours))
    if neighbours == "add_or_remove":
        assert list((Counter(one) - Counter(other)).elements()) == texts([(found.rows[place],)])
        assert not Counter(other) - Counter(one)
        return
    assert len(one) == len(other) == COUNT  # n, and what follows from it, does not tell how the coins fell
    assert [at for at in range(COUNT) if one[at] != other[at]] == [place]
    assert one[place] == texts([(found.rows[place],)])[0]
    assert other[place] == (() if neighbours == "zero_out" else texts([(found.twins[place],)])[0])


def test_canaries_and_twins_are_all_different_single_and_of_fair_coins(tmp_path: Path) -> None:
    found = coins(tmp_path)
    assert len({*texts([(row,) for row in found.rows]), *texts([(row,) for row in found.twins])}) == 2 * COUNT
    with pytest.raises(ConfigurationError, match="2 copies"):
        coins(tmp_path, repetitions=(2,))
    with pytest.raises(ConfigurationError, match=r"include=1\.0"):
        coins(tmp_path, include=1.0)
    for row, twin in zip(found.rows, found.twins, strict=True):
        assert (row.passage_id, row.passage) == (twin.passage_id, twin.passage) and row.query != twin.query


def test_coins_are_fair_and_from_the_operating_system_unless_seeded(tmp_path: Path) -> None:
    large_log(tmp_path)
    drawn = [in_run(tmp_path, run_dir=tmp_path / f"{i}", count=200).included for i in range(4)]
    assert len(set(drawn)) == 4
    assert abs(np.mean(drawn) - 0.5) < 4 * 0.5 / np.sqrt(800)
    seeded = [in_run(tmp_path, run_dir=tmp_path / f"s{i}", seed=5).included for i in range(2)]
    assert seeded[0] == seeded[1]


def test_a_run_that_goes_on_has_the_same_canaries_and_coins_or_is_refused(tmp_path: Path) -> None:
    first, again = in_run(tmp_path), in_run(tmp_path, begun=True, resume=True)
    assert (first.rows, first.included, first.facts) == (again.rows, again.included, again.facts)
    assert (tmp_path / "run" / "canaries.json").stat().st_mode & 0o777 == 0o600
    for change, named in (({"count": 61}, "count was 60"), ({"kinds": ("own_passage",)}, "kinds was"),
                          ({"resume": False}, "resume=true")):  # fmt: skip
        with pytest.raises(ResumeError, match=named):
            in_run(tmp_path, **{"begun": True, "resume": True} | change)
    (tmp_path / "run" / "canaries.json").unlink()
    with pytest.raises(ResumeError, match=r"callbacks\.audit"):
        in_run(tmp_path, begun=True, resume=True)


# -- images --------------------------------------------------------------------------------------


def test_canaries_among_images_are_noise_with_a_coin_each_and_the_same_when_a_run_goes_on(tmp_path: Path) -> None:
    data = ImagesDataModule(source="cifar10", folder=cifar10_pickles(tmp_path / "cifar"))
    first = in_run(tmp_path, data=data)
    again = in_run(tmp_path, data=data, begun=True, resume=True)
    assert first.included == again.included and first.facts == again.facts
    pictures = np.stack([row.image.numpy() for row in (*first.rows, *first.twins)])
    assert pictures.shape == (2 * COUNT, *data.image_shape)
    assert (pictures == np.stack([row.image.numpy() for row in (*again.rows, *again.twins)])).all()
    assert len({picture.tobytes() for picture in pictures}) == 2 * COUNT
    with pytest.raises(ResumeError, match="count was 60 and is 50 now"):
        in_run(tmp_path, data=data, begun=True, resume=True, count=50)
    (tmp_path / "run" / "canaries.json").write_text("{}")
    with pytest.raises(DataError, match="schema"):
        in_run(tmp_path, data=data, begun=True, resume=True)


def test_planted_images_are_units_in_the_fingerprint_and_in_no_split(tmp_path: Path) -> None:
    folder = cifar10_pickles(tmp_path / "cifar")
    plain, data = (ImagesDataModule(source="cifar10", folder=folder) for _ in range(2))
    found = in_run(tmp_path, data=data)
    data.plant(found.planted("zero_out"))
    assert data.n_units == plain.n_units + COUNT
    units = data.train_units()
    assert [len(units.rows(plain.n_units + at)) for at in range(COUNT)] == [int(coin) for coin in found.included]
    assert data.data_fingerprint(b"key") != plain.data_fingerprint(b"key")
    assert data.data_fingerprint(b"key", planted=False) == plain.data_fingerprint(b"key")
    assert len(data.labelled("train")[0]) == plain.n_units
    with pytest.raises(ConfigurationError, match="planted"):
        data.plant(found.planted("zero_out"))


# -- scores --------------------------------------------------------------------------------------


def test_what_the_first_score_explains_is_taken_out_and_a_twin_takes_the_place_of_a_canary(tmp_path: Path) -> None:
    before = np.linspace(-5, -1, 40)
    members = np.arange(40) % 2 == 0
    scores = AuditScores(sha256="a", before=tuple(before), after=tuple(0.5 * before + 2 + 0.3 * members))
    learned = scores.learned()
    assert learned[members].min() > learned[~members].max()
    scores = AuditScores(
        sha256="a", before=(0.0, 0.0), after=(1.0, 0.0), twins_before=(0.0, 0.0), twins_after=(0.0, 1.0)
    )
    assert scores.learned().tolist() == [1.0, -1.0]


def test_scores_are_kept_for_the_owner_and_read_for_their_canaries_alone(tmp_path: Path) -> None:
    scores = AuditScores(sha256="a", before=(1.0, 2.0))
    path = write_scores(scores, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_scores(tmp_path, sha256="a") == scores
    with pytest.raises(ResumeError, match="other canaries"):
        read_scores(tmp_path, sha256="b")
    with pytest.raises(ResumeError, match="has not ended"):
        scores.learned()
    newer = json.dumps(json.loads(path.read_text()) | {"schema": "lit-dpret/audit-scores/2"})
    for text, told in ((newer, "audit-scores/2"), ("{}", "cannot be read")):
        path.write_text(text)
        with pytest.raises(ResumeError, match=told):
            read_scores(tmp_path, sha256="a")
