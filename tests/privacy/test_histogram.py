"""What one unit can do to a histogram, what the histogram costs, and what the ledger knows of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cards import rewrite_chain
from scipy.stats import norm

from lit_dpret.errors import BudgetExceededError, ConfigurationError, DataError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease
from lit_dpret.privacy.budget import Neighbours, PrivacyBudget
from lit_dpret.privacy.histogram import (
    ReleasedHistogram,
    exact_counts,
    histogram_plan,
    histogram_sensitivity,
    release_histogram,
    shares,
    votes_plan,
)
from lit_dpret.privacy.ledger.judgement import plan_of
from lit_dpret.privacy.ledger.private_run import Fingerprints, PrivateRun
from lit_dpret.privacy.ledger.run_ledger import charged_releases
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan

UNITS, BATCH, STEPS, DELTA = 532_000, 1024, 15_586, 9.398e-7


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("relation", ["zero_out", "add_or_remove", "replace_one"])
def test_the_sensitivity_is_the_largest_distance_of_all_neighbours(
    most: int, relation: Neighbours, distinct: bool
) -> None:
    """Every unit that names up to ``most`` + 1 of six bins, repetitions included, as it is really counted."""
    units = [unit for size in range(most + 2) for unit in itertools.product(range(6), repeat=size)]
    if most == 3:
        units = [*units[::7], (0, 0, 0), (1, 1, 1)]
    rest = [(0,), (1, 2)]

    def counted(unit: tuple[int, ...]) -> np.ndarray:
        return exact_counts([*rest, unit], bins=6, max_count=most, distinct=distinct).numpy()

    found = np.unique([counted(unit) for unit in units], axis=0)
    others = found if relation == "replace_one" else [counted(())]
    largest = max(float(np.linalg.norm(one - other)) for one in found for other in others)
    moves = 2 if relation == "replace_one" else 1  # as the accountants here have it
    assert moves * histogram_sensitivity(most, relation, distinct=distinct) == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("relation", ["zero_out", "add_or_remove", "replace_one"])
@pytest.mark.parametrize(("releases", "most"), [(1, 1), (4, 1), (3, 5)])
def test_the_noise_of_several_votes_is_that_of_the_gaussian_mechanism_by_its_formula(
    relation: Neighbours, releases: int, most: int
) -> None:
    """T Gaussians of deviation s on votes that move by D are one with mu = D sqrt(T) / s (Balle and Wang 2018)."""
    budget = PrivacyBudget(eps=3.0, delta=1e-5, neighbours=relation)
    plan = votes_plan(budget, releases=releases, max_votes=most, n_public=None)
    distance = math.sqrt(2 * most if relation == "replace_one" else most)
    mu = distance * math.sqrt(releases) / plan.noise_std
    delta = norm.cdf(mu / 2 - 3.0 / mu) - math.exp(3.0) * norm.cdf(-mu / 2 - 3.0 / mu)
    assert 0.99e-5 < delta <= 1e-5, "enough, and hardly more"
    assert plan.steps == releases and plan.denominator == 1.0


@pytest.mark.parametrize("relation", ["zero_out", "add_or_remove", "replace_one"])
def test_the_accountant_charges_the_distance_between_neighbours_over_the_noise(relation: Neighbours) -> None:
    plan = histogram_plan(PrivacyBudget(eps=9.0, delta=1e-5, neighbours=relation), noise_multiplier=4.0, max_count=2)
    distance = 2 * (math.sqrt(2) if relation == "replace_one" else 1.0)
    same = GaussianRelease(noise_multiplier=plan.noise_std / distance, law=FullBatch())
    assert plan.epsilon() == pytest.approx(epsilon([same], delta=1e-5, neighbours="zero_out"), rel=1e-9)


def test_a_histogram_that_costs_more_than_its_budget_is_refused() -> None:
    with pytest.raises(BudgetExceededError, match=r"task\.noise_multiplier=1 .*privacy\.eps=0\.5"):
        histogram_plan(PrivacyBudget(eps=0.5, delta=1e-5), noise_multiplier=1.0)


@pytest.mark.parametrize(
    "wrong",
    [*({"noise_multiplier": noise} for noise in (0.0, math.inf, math.nan, "many", None, True)), {"max_count": 0}],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"task\.{next(iter(wrong))}="):
        histogram_plan(PrivacyBudget(eps=5.0, delta=1e-5), **{"noise_multiplier": 5.0} | wrong)


# -- the release ------------------------------------------------------------------------------


def planned(**settings: Any) -> PrivacyPlan:
    return histogram_plan(PrivacyBudget(eps=9.0, delta=1e-5), **{"noise_multiplier": 2.0} | settings)


def opened(folder: Path, plan: PrivacyPlan, *, resume: bool = False, secret: bytes = b"s" * 32) -> PrivateRun:
    described = {
        "mode": "histogram", "unit": "query", "neighbours": "zero_out", "law": plan.law.to_dict(), "planned_steps": 1,
        "plan": plan.to_dict(), "rows_per_unit": "one", "secure_rng": False,
    }  # fmt: skip
    return PrivateRun.open(
        folder / "privacy_ledger.jsonl", resume=resume, secret=secret, described=described,
        fingerprints=Fingerprints(data=lambda key: "data"),
    )  # fmt: skip


def made(run: PrivateRun, plan: PrivacyPlan, units: list[list[int]], spec: str = "bins", most: int = 1) -> np.ndarray:
    return release_histogram(run, plan, units, bins=4, max_count=most, spec=spec)


def test_the_noise_has_the_deviation_that_the_ledger_states(tmp_path: Path) -> None:
    plan = planned()
    with opened(tmp_path, plan).ledger as ledger:
        run = PrivateRun(ledger, opened(tmp_path / "b", plan).stream, "r")
        noised = release_histogram(run, plan, [[0]] * 500, bins=4000, max_count=1, spec="bins")
    noise = noised - np.array([500.0] + [0.0] * 3999)
    assert noise.std() == pytest.approx(math.sqrt(plan.noise_std**2 + 1 / 12), rel=0.05)  # and of rounding
    assert abs(noise.mean()) < 5 * plan.noise_std / math.sqrt(4000)
    assert (noised == np.rint(noised)).all()


def test_noise_on_a_grid_is_charged_for_its_rounding_and_never_floating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(KeyedStream, "normal")
    plan = planned(noise="discrete")
    run = opened(tmp_path, plan)
    assert np.array_equal(made(run, plan, [[0], [1]]), np.rint(made(run, plan, [[0], [1]])))
    with pytest.raises(ConfigurationError, match="sensitivity"):
        made(run, dataclasses.replace(plan, sensitivity=1.0), [[0]])
    run.ledger.close()


def test_a_unit_adds_no_more_than_its_bound(tmp_path: Path) -> None:
    plan = planned(noise_multiplier=1e-6 + 2.0, max_count=2)
    run = opened(tmp_path, plan)
    noised = made(run, plan, [[0] * 10_000], most=2)
    run.ledger.close()
    assert noised[0] < 2 + 10 * plan.noise_std


def test_a_bound_that_the_plan_does_not_cover_is_refused_before_anything_is_announced(tmp_path: Path) -> None:
    plan = planned(max_count=1)
    run = opened(tmp_path, plan)
    with pytest.raises(ConfigurationError, match="max_count=2"):
        made(run, plan, [[0, 1]], most=2)
    assert [record["kind"] for record in run.ledger.records] == ["plan"]
    run.ledger.close()


def test_counts_that_an_older_version_noised_otherwise_are_a_release_of_their_own(tmp_path: Path) -> None:
    plan, units = planned(), [[0], [1], [1]]
    first = opened(tmp_path, plan)
    made(first, plan, units)
    first.ledger.close()

    def older(record: dict[str, Any]) -> None:
        if record["kind"] == "plan":
            record["noise_stream"] = "another"

    rewrite_chain(tmp_path / "privacy_ledger.jsonl", older)
    for _ in range(2):  # this version's own noise is repeated and not paid again
        again = opened(tmp_path, plan, resume=True)
        made(again, plan, units)
        again.ledger.close()
    assert again.attempt == 1 and sum(release.count for release in charged_releases(again.ledger.records)) == 2


@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
def test_the_release_is_announced_charged_once_and_the_same_when_it_is_made_again(noise: str, tmp_path: Path) -> None:
    plan, units = planned(noise=noise), [[0], [1], [1]]
    first = opened(tmp_path, plan)
    before = made(first, plan, units)
    first.ledger.close()
    again = opened(tmp_path, plan, resume=True)
    assert np.array_equal(made(again, plan, units), before)
    again.ledger.close()
    kinds = [record["kind"] for record in again.ledger.records]
    assert kinds == ["plan", "intent", "release", "plan", "replay"]
    assert charged_releases(again.ledger.records) == [
        GaussianRelease(noise_multiplier=plan.noise_multiplier, law=FullBatch(), label="histogram")
    ]
    assert plan_of(again.ledger.records)[0] == plan


def test_releases_of_one_plan_have_noise_of_their_own_and_none_beyond_them_is_announced(tmp_path: Path) -> None:
    plan = votes_plan(PrivacyBudget(eps=3.0, delta=1e-5), releases=2)
    run = opened(tmp_path, plan)

    def voted(step: int, units: list[list[int]]) -> np.ndarray:
        return release_histogram(run, plan, units, bins=400, max_count=1, spec="b", step=step)

    first, second = voted(0, [[0], [1]]), voted(1, [[0], [1]])
    assert not np.array_equal(first, second)
    assert np.array_equal(voted(0, [[0], [1]]), first), "made again it is the same"
    for step, units in ((1, [[0], [2]]), (2, [[0], [1]])):
        with pytest.raises(BudgetExceededError, match=r"privacy\.eps=3"):
            voted(step, units)
    run.ledger.close()
    assert sum(release.count for release in charged_releases(run.ledger.records)) == 2


@pytest.mark.parametrize("change", ["counts", "bins"])
def test_other_counts_or_bins_never_get_the_same_noise_and_are_charged(tmp_path: Path, change: str) -> None:
    plan, units = planned(), [[0], [1], [1]]
    run = opened(tmp_path, plan)
    before = made(run, plan, units)
    after = made(run, plan, units[:2] if change == "counts" else units, spec="bins" if change == "counts" else "other")
    run.ledger.close()
    assert not np.array_equal(before - after, [0, 1, 0, 0] if change == "counts" else [0, 0, 0, 0])
    assert sum(release.count for release in charged_releases(run.ledger.records)) == 2


def test_an_announced_release_that_was_never_made_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    run = opened(tmp_path, plan)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.stream, "normal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(run, plan, [[0]])
    run.ledger.close()
    assert len(charged_releases(run.ledger.records)) == 1


def test_shares_of_counts_below_zero_are_zero_and_of_nothing_but_those_are_refused() -> None:
    assert shares(np.array([3.0, -1.0, 1.0])).tolist() == [0.75, 0.0, 0.25]
    with pytest.raises(DataError, match="noise hides everything"):
        shares(np.array([-3.0, -1.0, 0.0]))


def test_a_histogram_is_read_as_it_was_written_and_one_of_another_version_is_refused(tmp_path: Path) -> None:
    histogram = ReleasedHistogram(
        names=("a", "b"), counts=(4.0, -1.0), bins={"kind": "length", "edges": [3]}, noise_std=2.0, max_count=1
    )
    path = histogram.write(tmp_path)
    assert ReleasedHistogram.read(tmp_path) == histogram
    path.write_text(path.read_text().replace("private-histogram/1", "private-histogram/2"))
    with pytest.raises(DataError, match="private-histogram/2"):
        ReleasedHistogram.read(tmp_path)
    path.write_text("[]")
    with pytest.raises(DataError, match="not a histogram from task=histogram"):
        ReleasedHistogram.read(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="task=histogram"):
        ReleasedHistogram.read(tmp_path)
