"""A silo's ledger composes rounds across processes and begins nothing uncovered; and what its DP centroids move."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import Numbers, Regression, fit
from torch import Tensor

from lit_dpret.errors import BudgetExceededError, ConfigurationError, LedgerError
from lit_dpret.federated.centroids import CentroidPlan, dp_centroids, table_of
from lit_dpret.federated.silo_ledger import SiloLedger, silo_budget, split_budget
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease, Poisson
from lit_dpret.privacy.budget import ROUNDING_SHARE, PrivacyBudget
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.noise import KeyedStream, grid_bits

BUDGET = PrivacyBudget(eps=4.0, delta=1e-3)
TERMS = {"delta": BUDGET.delta, "neighbours": BUDGET.neighbours, "accountant": "rdp"}


def ledger(tmp_path: Path, budget: PrivacyBudget = BUDGET) -> SiloLedger:
    return SiloLedger(tmp_path / "silo", budget, accountant="rdp", secret_file=tmp_path / "secret")


def centroids(silo: SiloLedger, rows: torch.Tensor, noise_multiplier: float, iterations: int = 2) -> torch.Tensor:
    with silo.gaussian("fed_request", noise_multiplier=noise_multiplier, count=iterations) as noised:
        return dp_centroids(rows, CentroidPlan(count=3, iterations=iterations), noised)


def cost(*counts: tuple[float, int]) -> float:
    releases = [GaussianRelease(noise_multiplier=noise, law=FullBatch(), count=count) for noise, count in counts]
    return epsilon(releases, **TERMS)  # type: ignore[arg-type]


def test_requests_of_several_processes_add_up_and_one_that_the_budget_does_not_cover_draws_no_noise(
    tmp_path: Path,
) -> None:
    for _ in range(3):
        centroids(ledger(tmp_path), torch.randn(20, 4), 5.0)
    silo = ledger(tmp_path)
    before, files = silo.epsilon(), sorted((silo.folder / "releases").iterdir())
    assert before == pytest.approx(cost((5.0, 6)))
    with pytest.raises(BudgetExceededError, match=r"^federated\.privacy\.eps=4 "):
        centroids(silo, torch.randn(20, 4), 0.5)
    assert silo.epsilon() == before and sorted((silo.folder / "releases").iterdir()) == files
    account = silo.training(noise_multiplier=1.0, max_grad_norm=1.0).ledger_of_dataset(BUDGET)
    assert account is not None
    with pytest.raises(BudgetExceededError, match=r"^federated\.privacy\.eps=4 "):
        account.require([GaussianRelease(noise_multiplier=0.5, law=FullBatch(), count=2)])


def test_a_share_that_no_noise_meets_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^federated\.privacy\.request_share \* federated\.privacy\.eps="):
        split_budget(PrivacyBudget(eps=1e-9, delta=1e-300), ((FullBatch(), 1),), requests=1)


def test_every_release_is_written_down_before_and_after_and_noise_has_the_stated_size(tmp_path: Path) -> None:
    silo = ledger(tmp_path)
    with silo.gaussian("probe", noise_multiplier=3.0, count=1) as noised:
        found = noised(torch.zeros(200, 200, dtype=torch.float64), 0.5)
    assert float(found.std()) == pytest.approx(1.5, rel=0.02)
    (path,) = (silo.folder / "releases").iterdir()
    records = PrivacyLedger.read(path).records
    assert [record["kind"] for record in records] == ["plan", "intent", "release", "end"]
    assert records[2]["noise_std"] == 1.5 and records[2]["sensitivity"] == 0.5


def test_one_more_table_than_reserved_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="probe"),
        ledger(tmp_path).gaussian("probe", noise_multiplier=9.0, count=1) as noised,
    ):
        for _ in range(2):
            noised(torch.zeros(2), 1.0)


def test_what_is_broken_off_stays_charged_as_reserved(tmp_path: Path) -> None:
    silo = ledger(tmp_path)
    with pytest.raises(RuntimeError), silo.gaussian("probe", noise_multiplier=4.0, count=5) as noised:
        noised(torch.zeros(2), 1.0)
        raise RuntimeError("power cut")
    assert ledger(tmp_path).epsilon() == pytest.approx(cost((4.0, 5)))
    total = silo.total()
    assert total is not None and total.running == 1


@pytest.mark.costly
def test_rounds_of_training_and_requests_are_charged_to_one_budget(tmp_path: Path) -> None:
    silo = ledger(tmp_path)
    for number in range(2):
        module = Regression(privacy=silo.training(noise_multiplier=2.0, max_grad_norm=1.0))
        fit(tmp_path / f"round{number}", module, Numbers(sampling="poisson"), steps=3)
    centroids(silo, torch.randn(20, 4), 6.0)
    train = GaussianRelease(noise_multiplier=2.0, law=Poisson(sample_rate=0.1), count=6)
    asked = GaussianRelease(noise_multiplier=6.0, law=FullBatch(), count=2)
    assert silo.epsilon() == pytest.approx(epsilon([train, asked], **TERMS))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_planned_noise_just_fits_the_budget() -> None:
    laws = ((Poisson(sample_rate=0.05), 40), (Poisson(sample_rate=0.2), 20))
    plan = split_budget(BUDGET, laws, requests=6, request_share=0.3, accountant="rdp")
    assert plan.request is not None and cost((plan.request, 6)) <= 0.3 * 4.0
    made = [GaussianRelease(noise_multiplier=plan.training, law=law, count=steps) for law, steps in laws]
    asked = GaussianRelease(noise_multiplier=plan.request, law=FullBatch(), count=6)
    assert 0.98 * 4.0 < epsilon([*made, asked], **TERMS) <= 4.0  # type: ignore[arg-type]
    assert split_budget(BUDGET, laws, accountant="rdp").training < plan.training


@pytest.mark.parametrize(("knob", "other"), [("federated.privacy.unit", "pair"), ("datamodule.duplicates", "merge")])
def test_one_file_takes_one_kind_of_unit(knob: str, other: str, tmp_path: Path) -> None:
    centroids(ledger(tmp_path), torch.randn(20, 4), 4.0)
    terms: dict[str, Any] = {knob.rpartition(".")[2]: other}
    with pytest.raises(ConfigurationError, match=f"^{knob}={other}, "):
        centroids(ledger(tmp_path, replace(BUDGET, **terms)), torch.randn(20, 4), 4.0)


def test_delta_is_derived_where_the_number_of_units_may_be_known_and_refused_where_not() -> None:
    assert silo_budget(1.0, None, unit="query", neighbours="zero_out", units=50).delta == 0.01
    with pytest.raises(ConfigurationError, match="delta=null"):
        silo_budget(1.0, None, unit="query", neighbours="add_or_remove", units=50)
    with pytest.raises(ConfigurationError, match=r"^federated\.privacy\.delta=1\.5 "):
        silo_budget(1.0, 1.5, unit="query", neighbours="zero_out", units=50)
    with pytest.raises(ConfigurationError, match=r"^federated\.privacy\.delta=0\.1 "):
        silo_budget(1.0, 0.1, unit="query", neighbours="zero_out", units=50)


def test_a_ledger_that_was_lost_or_put_back_is_noticed_by_the_releases_that_it_does_not_know(tmp_path: Path) -> None:
    silo = ledger(tmp_path)
    centroids(silo, torch.randn(20, 4), 5.0)
    old = silo.path.read_bytes()
    centroids(silo, torch.randn(20, 4), 5.0)
    silo.path.write_bytes(old)
    with pytest.raises(LedgerError, match=r"silo_ledger\.query\.jsonl"):
        ledger(tmp_path)
    silo.path.unlink()
    with pytest.raises(LedgerError, match=r"silo_ledger\.query\.jsonl"):
        ledger(tmp_path)
    ledger(tmp_path, PrivacyBudget(eps=4.0, delta=1e-3, unit="passage"))  # what was spent of queries is not its affair


def test_a_release_whose_last_line_a_power_cut_tore_is_known_all_the_same(tmp_path: Path) -> None:
    silo = ledger(tmp_path)
    centroids(silo, torch.randn(20, 4), 5.0)
    (path,) = (silo.folder / "releases").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert ledger(tmp_path).epsilon() == silo.epsilon()


def test_noise_on_a_grid_is_charged_for_its_rounding_and_no_floating_point_noise_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silo = SiloLedger(tmp_path / "silo", BUDGET, accountant="rdp", noise="discrete", secret_file=tmp_path / "secret")
    monkeypatch.delattr(KeyedStream, "normal")
    with silo.gaussian("probe", noise_multiplier=3.0, count=1) as noised:
        found = noised(torch.zeros(200, 200, dtype=torch.float64), 0.5)
    std = 3.0 * 0.5 * (1 + ROUNDING_SHARE)
    steps = found / (std * 2.0 ** -grid_bits(3.0, 200 * 200))
    assert float(found.std()) == pytest.approx(1.5, rel=0.02) and float((steps - steps.round()).abs().max()) < 1e-6
    (path,) = (silo.folder / "releases").iterdir()
    (release,) = [record for record in PrivacyLedger.read(path).records if record["kind"] == "release"]
    assert (release["noise_std"], release["sensitivity"]) == (std, 0.5 * (1 + ROUNDING_SHARE))
    assert silo.epsilon() == pytest.approx(cost((3.0, 1)))
    assert centroids(silo, torch.randn(20, 4), 5.0).isfinite().all()
    assert silo.training(noise_multiplier=3.0, max_grad_norm=1.0).noise == "discrete"


def test_what_is_spent_is_told_at_the_delta_of_a_log_that_has_grown(tmp_path: Path) -> None:
    centroids(ledger(tmp_path), torch.zeros(4, 2), 4.0)
    grown = ledger(tmp_path, PrivacyBudget(eps=4.0, delta=1e-4))
    total = grown.total()
    assert total is not None and total.delta == 1e-4
    assert grown.epsilon() == pytest.approx(
        epsilon(grown.charged(), delta=1e-4, neighbours="zero_out", accountant="rdp")
    )


def test_another_limit_than_the_silo_began_with_is_refused_by_its_own_setting(tmp_path: Path) -> None:
    centroids(ledger(tmp_path), torch.zeros(4, 2), 4.0)
    with pytest.raises(ConfigurationError, match=r"federated\.privacy\.eps=2"):
        ledger(tmp_path, PrivacyBudget(eps=2.0, delta=1e-3))
    passages = PrivacyBudget(eps=4.0, delta=1e-3, unit="passage")
    centroids(ledger(tmp_path, passages), torch.zeros(4, 2), 4.0)
    with pytest.raises(ConfigurationError, match=r"federated\.privacy\.collection_eps=2"):
        ledger(tmp_path, replace(passages, eps=2.0))


# -- centroids ----------------------------------------------------------------------------------

ROW = st.lists(st.floats(-3, 3, allow_nan=False), min_size=2, max_size=2)


def neighbours(
    rows: list[list[float]], others: list[list[float]], units: list[int]
) -> list[tuple[int, Tensor, list[int]]]:
    """Every way to empty a unit (weight 1) or to put other rows in its place (weight 2)."""
    found = []
    for unit in set(units):
        left = [row for row, whose in zip(rows, units, strict=True) if whose != unit]
        names = [whose for whose in units if whose != unit]
        found.append((1, torch.tensor(left, dtype=torch.float64).reshape(-1, 2), names))
        for other in others:
            replaced = torch.tensor([*left, other, other, other], dtype=torch.float64)
            found.append((2, replaced, [*names, unit, unit, unit]))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5), st.lists(ROW, min_size=1, max_size=3), st.booleans(),
       st.sampled_from([0.3, 1.5]), st.integers(0, 5))  # fmt: skip
def test_no_neighbour_moves_the_table_further_than_the_sensitivity_says(
    rows: list[list[float]], others: list[list[float]], normalise: bool, radius: float, seed: int
) -> None:
    plan = CentroidPlan(count=3, normalise=normalise, radius=radius, seed=seed)
    units = [i // 2 for i in range(len(rows))]
    centroids = plan.start(2)
    table = table_of(torch.tensor(rows, dtype=torch.float64), centroids, plan, units)
    for times, other, whose in neighbours(rows, others, units):
        moved = float((table - table_of(other, centroids, plan, whose)).norm())
        assert moved <= times * plan.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("count", [5, 26, 27, 40])
def test_rows_between_two_centroids_fall_to_one_of_them_whoever_else_is_there(count: int) -> None:
    plan, coins = CentroidPlan(count=2), torch.Generator().manual_seed(count)
    side = torch.randn(6, generator=coins, dtype=torch.float64)
    rows = torch.randn(count, 6, generator=coins, dtype=torch.float64)
    rows -= (rows @ side / (side @ side))[:, None] * side
    centroids = torch.stack([side, -side])
    table = table_of(rows, centroids, plan)
    for gone in range(count):
        left = torch.cat([rows[:gone], rows[gone + 1 :]])
        assert float((table - table_of(left, centroids, plan)).norm()) <= plan.sensitivity * (1 + 1e-9)


def test_the_sensitivity_is_reached_and_not_stated_larger_than_it_is() -> None:
    plan = CentroidPlan(count=2)
    rows = torch.tensor([[5.0, 0.0], [7.0, 0.0], [0.0, 1.0]])
    full = table_of(rows, plan.start(2), plan, ["a", "a", "b"])
    gone = table_of(rows[2:], plan.start(2), plan, ["b"])
    assert float((full - gone).norm()) == pytest.approx(plan.sensitivity) == pytest.approx(math.sqrt(2))


def test_a_row_that_is_not_finite_counts_for_nothing() -> None:
    plan = CentroidPlan(count=2)
    rows = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [float("inf"), 1.0]])
    assert torch.equal(table_of(rows, plan.start(2), plan), table_of(rows[:1], plan.start(2), plan))


def test_only_what_was_noised_comes_out_and_it_is_asked_for_once_an_iteration() -> None:
    plan = CentroidPlan(count=4, iterations=3)
    asked: list[float] = []

    def nothing(table: Tensor, sensitivity: float) -> Tensor:
        asked.append(sensitivity)
        return torch.zeros_like(table)

    one = dp_centroids(torch.randn(50, 6), plan, nothing)
    two = dp_centroids(torch.randn(3, 6), plan, nothing)
    assert torch.equal(one, two) and asked == [plan.sensitivity] * 6


def test_without_noise_clusters_are_found_and_with_it_centroids_are_nearer_than_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(4, 16, generator=generator), dim=-1)
    rows = centres.repeat_interleave(100, 0) + 0.05 * torch.randn(400, 16, generator=generator)
    plan = CentroidPlan(count=12, iterations=4)

    def nearness(centroids: Tensor) -> float:
        """How near the nearest centroid is to each centre, as a cosine, on average."""
        return float((F.normalize(centroids.float(), dim=-1) @ centres.T).max(0).values.mean())

    exact = nearness(dp_centroids(rows, plan, lambda table, _: table))
    noisy = nearness(dp_centroids(rows, plan, lambda t, c: t + 2 * c * torch.randn(t.shape, generator=generator)))
    assert exact > 0.98 and noisy > 0.8 > nearness(plan.start(16)) + 0.1
