"""Attacks on the modes for coupled losses that once succeeded: each test is the input that broke a promise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_cases import hinge
from pair_stand_ins import Pairs, Request, batch_clip, batch_of, duplicated, logit_dp, plan_of, records, without
from scipy import stats
from stand_ins import Numbers, fit
from torch import Tensor, nn

from lit_dpret.cards.card import build_card, subject_of
from lit_dpret.cards.forecast import describe_plan, epsilon_matrix
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.losses import DeclaredPairLoss, SoftmaxPairLoss
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.coupled_sensitivity import least_n_max
from lit_dpret.privacy.accounting.releases import GaussianRelease, Poisson
from lit_dpret.privacy.clipping.pairs import clipped_pair_factors, make_pair_norms, weighted_backward
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.tasks.plan import format_plan


def summed(module: Any, *batches: Any) -> Tensor:
    """What the mode adds up over the sub-batches of one logical step."""
    mode = module.privacy
    for batch in batches:
        mode.contribute(module, batch)
    return torch.cat([value.flatten().double() for value in mode.take().values()])


def attached(module: Any, *, n_max: int) -> Any:
    module.privacy.attach(module, plan_of(module.privacy, module, n_max=n_max), KeyedStream(b"k" * 32, "run"))
    return module


# -- what is added up ------------------------------------------------------------------------


class TwoNames(Pairs):
    """The sum of two matrices: autograd hands out one gradient tensor for both."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = None  # type: ignore[assignment]
        self.first = nn.Parameter(torch.eye(3, 4, dtype=torch.float64))
        self.second = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))

    def represent(self, features: Tensor, side: str) -> Tensor:
        return nn.functional.linear(features, self.first + self.second) if side == "query" else features[:, :3]


@pytest.mark.parametrize("bound", [0.1, 0.7])
def test_sub_batches_are_added_once_where_two_parameters_get_one_gradient_tensor(bound: float) -> None:
    module = attached(TwoNames(privacy=batch_clip(max_grad_norm=bound)), n_max=4)
    one, other = batch_of(records(4, 1)), batch_of(records(4, 2))
    apart = summed(module, one) + summed(module, other)
    torch.testing.assert_close(summed(module, one, other), apart, rtol=1e-12, atol=1e-15)


class Steep(Pairs):
    """In fp32, with gradients as large as they get."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = nn.Linear(4, 3)  # type: ignore[assignment]

    def per_row_loss(self, rows: dict[str, Any]) -> Tensor:
        return self.net(rows["query"].float()).sum(1) * 1e37


def test_a_factor_too_small_for_its_digits_drops_the_sub_batch() -> None:
    """A factor of 1e-45 is a single denormal: times a large gradient it gives a fifth more than the bound."""
    module = attached(Steep(privacy=batch_clip(max_grad_norm=3e-8)), n_max=4)
    assert float(summed(module, batch_of(records(4))).norm()) <= 3e-8 * (1 + 1e-6)
    assert module.privacy.counts.non_finite == 1


# -- emptied units ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [logit_dp, duplicated, batch_clip])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_an_emptied_unit_keeps_its_slot_and_contributes_as_if_it_were_not_there(make: Any, k: int) -> None:
    """Under zero_out the other half of every pair of neighbours has such a slot."""
    settings = {"rows_at_once": 2} if make is duplicated else {}
    module = attached(Pairs(privacy=make(**settings)), n_max=5)
    gone = batch_of(without(records(5), k))
    kept = torch.tensor([i for i in range(5) if i != k])
    emptied = replace(gone, unit_ids=kept, mask=torch.ones(5, dtype=torch.bool))
    module.privacy.contribute(module, emptied)
    assert module.privacy.counts.units == 5
    module.privacy.take()
    torch.testing.assert_close(summed(module, emptied), summed(module, gone))


# -- rows that know each other ---------------------------------------------------------------


class Centred(Pairs):
    """Embeddings minus the mean of the batch, through which no gradient flows for an audit to see."""

    def represent(self, features: Tensor, side: str) -> Tensor:
        found = self.net(features)
        return found - found.mean(0, keepdim=True).detach()


class OverRowsAsOverTime(Pairs):
    """Each embedding with those before it, as a recurrent net that takes the rows for a sequence."""

    def represent(self, features: Tensor, side: str) -> Tensor:
        found: Tensor = self.net(features)
        return found + found.detach().cumsum(0)


@pytest.mark.parametrize("net", [Centred, OverRowsAsOverTime])
@pytest.mark.parametrize("norms", ["brute_force", "pair_ghost", "jacobian", "k_blocks"])
@pytest.mark.parametrize("n", [2, 5])
def test_embeddings_that_depend_on_other_rows_are_refused(norms: str, n: int, net: type[Pairs]) -> None:
    module = attached(net(privacy=logit_dp(norms=norms)), n_max=n)
    with pytest.raises(UnsupportedModelError, match=r"when other rows are in the batch|differently in two passes"):
        summed(module, batch_of(records(n)))


# -- claims ----------------------------------------------------------------------------------


def trained(folder: Path, mode: Any, *, data: Any = None, **settings: Any) -> dict[str, Any]:
    """A run of two steps over 60 units, and its card."""
    data = data or Numbers(60, sampling="poisson", expected_batch_size=6, physical_batch_size=6)
    module = Pairs(privacy=mode, **{"temperature": 1.0, **settings})
    fit(folder, module, data, steps=2)
    records_of_run = PrivacyLedger.read(folder / LEDGER_NAME).records
    subject = subject_of("weights", "pairs", [])
    return build_card(ledger_records=records_of_run, subject=subject)


def numbers_called(found: Any, word: str, path: str = "") -> list[str]:
    """Where a number stands under a name with ``word`` in it."""
    if isinstance(found, dict):
        return [place for key, value in found.items() for place in numbers_called(value, word, f"{path}.{key}")]
    if isinstance(found, list):
        return [place for value in found for place in numbers_called(value, word, path)]
    return [path] if word in path and isinstance(found, float) else []


def test_no_epsilon_is_stated_anywhere_for_the_constant_of_the_paper(tmp_path: Path) -> None:
    mode = logit_dp(sensitivity="paper", noise_multiplier=5.0, eps=8.0, secret_file=tmp_path / "secret")
    card = trained(tmp_path / "run", mode)
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    assert card["mechanism"]["coupling"]["claim"] == "refuted" and "refuted" in json.dumps(card["assumptions"])
    assert not numbers_called(card, "epsilon") and not numbers_called(card, "ceilings")
    logged = (tmp_path / "run" / "metrics.jsonl").read_text()
    spent = [json.loads(line).get("privacy/eps_spent") for line in logged.splitlines()]
    assert set(spent) <= {None, "inf"}
    plan = plan_of(mode, Pairs(privacy=mode, temperature=1.0), n_max=8)
    assert plan.epsilon() == math.inf
    facts = describe_plan(plan)
    assert not numbers_called(facts, "epsilon")
    assert format_plan(facts).startswith("no epsilon")
    assert "epsilon" not in format_plan(facts).removeprefix("no epsilon")


def test_the_ledger_of_a_data_set_takes_no_run_whose_sensitivity_is_refuted(tmp_path: Path) -> None:
    mode = logit_dp(sensitivity="paper", dataset_ledger=tmp_path / "ledger.jsonl", total_eps=10.0)
    with pytest.raises(ConfigurationError, match=r"privacy\.dataset_ledger=.*refuted"):
        plan_of(mode, Pairs(privacy=mode, temperature=1.0), n_max=8)


# -- rounding --------------------------------------------------------------------------------


def alone(module: Any, rows: dict[str, Tensor], norms: str, bound: float) -> float:
    """The most that one pair's clipped gradient measures in the pass that sums it up, in units of the bound."""
    batch = module.pair_batch(rows)
    factors, _ = clipped_pair_factors(make_pair_norms(norms, module).table(batch), bound)  # type: ignore[arg-type]
    longest = 0.0
    for place in torch.cartesian_prod(torch.arange(batch.n), torch.arange(batch.n)):
        one = torch.zeros_like(factors)
        one[tuple(place)] = factors[tuple(place)]
        found = weighted_backward(batch, one, dict(module.named_parameters()), rows_at_once=64)
        longest = max(longest, math.hypot(*(float(g.double().norm()) for g in found.values())))
    return longest / bound


NORMS = ["brute_force", "pair_ghost", "jacobian", "k_blocks"]


class Wide(Pairs):
    """In fp32; a network that is about as deep as rounding needs to show."""

    def __init__(self, scale: float, **settings: Any) -> None:
        super().__init__(**settings)
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        for parameter in self.net[2].parameters():
            nn.init.normal_(parameter, std=0.1 * scale)

    def represent(self, features: Tensor, side: str) -> Tensor:
        return self.net(features).float()


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize(("scale", "bound"), [(1.0, 1e-6), (1e-5, 1e-2)])
def test_a_query_that_is_its_own_passage_stays_within_the_bound_in_fp32(norms: str, scale: float, bound: float) -> None:
    """Its gradient is zero, what is computed of it is rounding errors, and those of one pass do not bound the other."""
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(4, 16, generator=generator)
    near = queries + 1e-7 * torch.randn(4, 16, generator=generator)
    for passages in (queries, near):
        rows = {"query": queries, "passage": passages}
        assert alone(Wide(scale, privacy=logit_dp()), rows, norms, bound) <= 1 + 1e-4


def declared() -> DeclaredPairLoss:
    """As it is made anew in every process: its functions have other addresses."""
    return DeclaredPairLoss(
        row_loss=lambda table: hinge(table),
        g1=lambda n, low, high: 2 * (n - 1) / 3,
        g2=lambda n, low, high: (n - 1) / 3,
        l=lambda n, low, high: 1 / 3,
    )


def test_a_declared_loss_gives_the_same_plan_in_every_process() -> None:
    """A plan with the address of a function in it cannot be resumed."""
    kept = [Pairs(privacy=logit_dp(), loss=declared()) for _ in range(2)]
    first, second = (plan_of(module.privacy, module, n_max=8) for module in kept)
    assert first.fingerprint() == second.fingerprint()


@dataclass(frozen=True, kw_only=True)
class Optimistic(SoftmaxPairLoss):
    """Somebody's own loss, with a sensitivity that nobody here has proved."""

    def _supremum(self, n: int, relation: str) -> float:
        return 1e-3


def test_the_sensitivity_of_a_loss_from_outside_counts_as_declared_and_not_as_proved() -> None:
    module = Pairs(privacy=logit_dp(), loss=Optimistic(temperature=1.0))
    plan = plan_of(module.privacy, module, n_max=8)
    assert plan.coupling is not None and plan.coupling.claim == "declared"
    assert SoftmaxPairLoss(temperature=1.0).claim == "proved"


def test_a_loss_that_was_exchanged_after_the_plan_is_refused() -> None:
    module = Pairs(privacy=logit_dp(), loss=SoftmaxPairLoss(temperature=1.0))
    plan = plan_of(module.privacy, module, n_max=8)
    module.loss = SoftmaxPairLoss(temperature=0.1)
    with pytest.raises(ConfigurationError, match=r"planned for SoftmaxPairLoss.*temperature=1\.0"):
        module.privacy.attach(module, plan, KeyedStream(b"k" * 32, "run"))


# -- sub-batches that are cut ----------------------------------------------------------------


def planned(sampling: str, mode: Any, steps: int = 3) -> Any:
    """A plan for ten of two hundred units at a time."""
    return mode.plan(Request(10, 10, sampling), units=200, steps=steps, module=Pairs(privacy=mode))


def delta_of_a_step(eps: float, *, units: int, rate: float, n_max: int, noise: float) -> float:
    """The least delta of one step with one sub-batch, for a record at +1 among others at -1, in units of the
    sensitivity: emptied it is at 0. How many others were drawn is told, as it is where they point elsewhere too.
    """
    x = torch.linspace(-14, 14, 20_001, dtype=torch.float64)

    def at(mean: float) -> Tensor:
        return torch.exp(-(((x - mean) / noise) ** 2) / 2) / (math.sqrt(2 * math.pi) * noise) * (x[1] - x[0])

    total = 0.0
    for others in range(units):
        with_it, without_it = at(1.0), at(0.0)
        absent = without_it
        if others >= n_max:  # it takes the place of another one, if it is not the one that is left out
            absent, kept = at(-1.0), n_max / (others + 1)
            with_it, without_it = kept * with_it + (1 - kept) * absent, kept * without_it + (1 - kept) * absent
        gap = (1 - rate) * absent * (1 - math.exp(eps)) + rate * (with_it - math.exp(eps) * without_it)
        total += float(stats.binom.pmf(others, units - 1, rate)) * float(gap.clamp(min=0).sum())
    return total


def test_a_cut_sub_batch_costs_many_times_what_plain_sampling_does_and_is_refused() -> None:
    rate, delta = 0.05, 1e-4
    release = GaussianRelease(noise_multiplier=1.0, law=Poisson(sample_rate=rate))
    claimed = epsilon([release], delta=delta, neighbours="zero_out")
    cut = delta_of_a_step(claimed, units=200, rate=rate, n_max=10, noise=1.0)
    assert cut > 10 * delta
    least = least_n_max(release.law, sub_batches=1, steps=1, units=200, delta=delta)
    assert delta_of_a_step(claimed, units=200, rate=rate, n_max=least, noise=1.0) <= delta * (1 + 2e-6)
    with pytest.raises(ConfigurationError, match=rf"privacy\.n_max=10.*to {least} or more"):
        planned("poisson", logit_dp(n_max=10, delta=delta, noise_multiplier=5.0), steps=1)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("neighbours", ["zero_out", "replace_one"])
def test_the_bound_that_is_chosen_is_cut_less_often_than_delta_allows(parts: int, neighbours: Any) -> None:
    mode = logit_dp(sub_batches=parts, neighbours=neighbours, delta=1e-4, noise_multiplier=50.0)
    plan = planned("poisson", mode, steps=100)
    assert plan.coupling is not None
    reached = stats.binom.sf(plan.coupling.n_max - 1, 199, 0.05 / parts)
    assert 100 * 0.05 * reached <= 1e-6 * 1e-4


# -- the same noise under other laws and relations -------------------------------------------


NOISY: dict[str, Any] = {"delta": 1e-4, "noise_multiplier": 50.0}


@pytest.mark.parametrize(
    ("sampling", "make", "known", "unknown"),
    [
        # Shuffled, replacing one is worth 2C and half of it the sensitivity; taking one out is worth 2C as well.
        ("shuffle", lambda: batch_clip(neighbours="replace_one", **NOISY), "shuffle replace_one", None),
        # Taking a record out may let another one in, which moves a sum of pairs further.
        ("poisson", lambda: logit_dp(**NOISY), "poisson zero_out, poisson replace_one", "poisson add_or_remove"),
        # Batches by coins are larger now and then, and the sensitivity is that of the largest.
        ("shuffle", lambda: duplicated(**NOISY), "shuffle zero_out, shuffle replace_one",
         "poisson zero_out, truncated_poisson zero_out"),
    ],
    ids=["half a replacement", "an emptied record", "shuffled sub-batches"],
)  # fmt: skip
def test_noise_for_one_change_is_not_read_as_noise_for_a_larger_one(
    sampling: str, make: Any, known: str, unknown: str | None
) -> None:
    rows = {
        f"{row['sampling']} {row['neighbours']}": row["epsilon"] for row in epsilon_matrix(planned(sampling, make()))
    }
    told = {key for key, value in rows.items() if value is not None}
    assert set(known.split(", ")) <= told and not told & set((unknown or "").split(", "))
    assert unknown is not None or told == {known}


@pytest.mark.costly
def test_task_plan_names_no_number_where_a_coupled_loss_has_another_sensitivity() -> None:
    facts = describe_plan(planned("shuffle", batch_clip(neighbours="replace_one", **NOISY)))
    told = {(row["sampling"], row["neighbours"]) for row in facts["epsilon_by"] if row["epsilon"] is not None}
    assert told == {("shuffle", "replace_one")}
    assert "moves the sum further than planned" in " ".join(format_plan(facts).split())


def test_the_card_reads_no_replacement_where_a_cut_sub_batch_would_forbid_it(tmp_path: Path) -> None:
    class Private(Numbers):
        def __init__(self) -> None:
            super().__init__(60, sampling="poisson", expected_batch_size=6, physical_batch_size=6, sample_rate=0.1)

    mode = logit_dp(neighbours="add_or_remove", n_max=6, **NOISY, secret_file=tmp_path / "secret")
    card = trained(tmp_path / "run", mode, data=Private())
    assert card["claim"]["epsilon"] > 0
    assert card["accounting"]["epsilon_replace_one"] is None
