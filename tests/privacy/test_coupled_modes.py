"""Modes for coupled losses: what one record can do to the sum, attacked; and what they refuse."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pair_cases import LOSSES
from pair_stand_ins import (
    Pairs,
    Request,
    batch_clip,
    clipped_sum,
    duplicated,
    logit_dp,
    plan_of,
    records,
    without,
)  # fmt: skip
from stand_ins import Regression
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.losses import PairwiseLoss, SigmoidPairLoss, SoftmaxPairLoss
from lit_dpret.privacy.clipping.pairs import BruteForce
from lit_dpret.privacy.modes import BatchClip, LogitDP

#: What 0.02 is lowered to in float64, for what rounding may add.
LOWERED = 0.02 / (1 + 1e-9)


# -- what is added up ------------------------------------------------------------------------


@pytest.mark.parametrize(("norms", "separate"), [("brute_force", False), ("pair_ghost", True), ("jacobian", False)])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_logit_dp_adds_up_the_clipped_gradients_of_all_pairs(loss: PairwiseLoss, norms: str, separate: bool) -> None:
    """Algorithm 1 of the paper, written out."""
    module = Pairs(privacy=logit_dp(norms=norms), loss=loss, separate=separate)
    rows = records(4)
    plan = plan_of(module.privacy, module, n_max=6)
    found = clipped_sum(module, plan, rows)
    gradients = BruteForce(module).gradients(module.pair_batch(rows))
    flat = torch.cat([g.flatten(2) for g in gradients.values()], dim=2)
    bounded = flat * (LOWERED / flat.norm(dim=2, keepdim=True)).clamp(max=1.0)
    scores = module.embed(rows["query"], "query") @ module.embed(rows["passage"], "passage").T
    expected = torch.einsum("ij,ijp->p", module.pair_loss(6).coefficients(scores.detach()), bounded)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert bool((flat.norm(dim=2) > 0.02).any())  # something was clipped


def test_embeddings_of_a_bounded_dot_product_are_no_longer_than_the_radius_and_shorter_ones_stay() -> None:
    module = Pairs(privacy=logit_dp(), loss=SoftmaxPairLoss(temperature=1.0, similarity="dot", radius=0.8))
    features = records(20)["query"]
    raw, bounded = module.represent(features, "query").norm(dim=1), module.embed(features, "query").norm(dim=1)
    assert bool((raw > 0.8).any() and (raw < 0.8).any())
    torch.testing.assert_close(bounded, raw.clamp(max=0.8))


def test_per_example_duplicated_adds_up_clipped_gradients_of_the_in_batch_rows() -> None:
    module = Pairs(privacy=duplicated(rows_at_once=2))
    rows = records(5)
    found = clipped_sum(module, plan_of(module.privacy, module, n_max=5), rows)
    losses = module.per_row_loss(rows)
    total = torch.zeros_like(found)
    for loss in losses:
        grads = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        flat = torch.cat([g.flatten() for g in grads])
        total += flat * (LOWERED / flat.norm()).clamp(max=1.0)
    torch.testing.assert_close(found, total, rtol=1e-10, atol=1e-12)


def test_batch_clip_clips_the_gradient_of_the_mean_loss() -> None:
    module = Pairs(privacy=batch_clip())
    rows = records(4)
    found = clipped_sum(module, plan_of(module.privacy, module, n_max=4), rows)
    grads = torch.autograd.grad(module.per_row_loss(rows).mean(), list(module.parameters()))
    flat = torch.cat([g.flatten() for g in grads])
    torch.testing.assert_close(found, flat / flat.norm() * LOWERED, rtol=1e-10, atol=1e-12)


# -- how far one record reaches --------------------------------------------------------------


def moved(module: Pairs, n: int, seed: int) -> tuple[float, float]:
    """How far the sum moves for a random batch: one record taken out, and one replaced."""
    plan = plan_of(module.privacy, module, n_max=n)
    rows, other = records(n, seed), records(n, seed + 1000)
    replaced = {side: torch.cat([rows[side][:-1], other[side][-1:]]) for side in rows}
    whole = clipped_sum(module, plan, rows)
    out = float((whole - clipped_sum(module, plan, without(rows, n - 1))).norm())
    return out, float((whole - clipped_sum(module, plan, replaced)).norm())


@pytest.mark.parametrize(
    ("make", "n"),
    [(make, n) for make in (logit_dp, duplicated, batch_clip) for n in (1, 2, 5) if make != logit_dp or n > 1],
)
def test_no_random_batch_moves_the_sum_further_than_the_stated_sensitivity(make: Any, n: int) -> None:
    for seed in range(3):
        module = Pairs(privacy=make(), temperature=0.1)
        sensitivity = plan_of(module.privacy, module, n_max=n).sensitivity
        out, replaced = moved(module, n, seed)
        assert out <= sensitivity * (1 + 1e-9)
        assert replaced <= 2 * sensitivity * (1 + 1e-9)


class Turning(Pairs):
    """One number turns passages in a plane each: what the gradient of a row is can be chosen freely."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(temperature=1.0, **settings)
        self.net = None  # type: ignore[assignment]
        self.turn = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(self.turn.weight)

    def represent(self, features: Tensor, side: str) -> Tensor:
        axis, speed, start = features[:, :-2], features[:, -2:-1], features[:, -1:]
        turned = start + self.turn(speed)
        return torch.cat([turned.cos() * axis, turned.sin()], dim=1)


def flipping_batch(n: int) -> dict[str, Tensor]:
    """With record n the gradient of every row is large and positive, without it those of the others negative."""
    queries, passages = torch.zeros(n, n + 1, dtype=torch.float64), torch.zeros(n, n + 1, dtype=torch.float64)
    queries[: n - 1, : n - 1] = torch.eye(n - 1)
    towards = torch.full((n - 1,), 1 / math.sqrt(n - 1), dtype=torch.float64)
    queries[n - 1, : n - 1] = -towards
    passages[:, -1] = math.pi / 4
    passages[: n - 1, : n - 1] = torch.eye(n - 1)
    passages[: n - 1, -2] = -1.0
    passages[n - 1, : n - 1] = towards
    passages[n - 1, -2] = -1000.0
    return {"query": queries, "passage": passages}


@pytest.mark.parametrize(
    ("make", "n", "worth", "within"), [(duplicated, 3, 5, 0.01), (duplicated, 8, 15, 0.01), (batch_clip, 3, 2, 1e-6)]
)
def test_a_constructed_batch_attains_the_sensitivity(make: Any, n: int, worth: int, within: float) -> None:
    module = Turning(privacy=make(max_grad_norm=1e-3))
    plan = plan_of(module.privacy, module, n_max=n)
    rows = flipping_batch(n)
    out = float((clipped_sum(module, plan, rows) - clipped_sum(module, plan, without(rows, n - 1))).norm())
    assert plan.sensitivity == pytest.approx(worth * 1e-3)
    assert out == pytest.approx(plan.sensitivity, rel=within)
    assert out <= plan.sensitivity * (1 + 1e-9)


# -- the plan --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_sensitivity_of_the_plan_is_the_loss_times_the_bound(loss: PairwiseLoss) -> None:
    module = Pairs(privacy=logit_dp(), loss=loss)
    plan = plan_of(module.privacy, module, n_max=8)
    known = loss.for_expected_size(8).sensitivity(8, relation="add_or_remove")
    assert plan.sensitivity == pytest.approx(0.02 * known)
    assert plan.noise_std == pytest.approx(plan.noise_multiplier * 0.02 * known)


def test_a_total_sensitivity_gives_the_bound_on_a_pair() -> None:
    module = Pairs(privacy=logit_dp(max_logit_grad_norm=None, l2_sensitivity=1e-5), temperature=1.0)
    plan = plan_of(module.privacy, module, n_max=8)
    assert plan.sensitivity == 1e-5
    assert plan.max_grad_norm == pytest.approx(1e-5 / 9.1513, rel=1e-4)


@pytest.mark.parametrize(("make", "worth"), [(duplicated, 2 * 7), (batch_clip, 2)])
def test_where_a_removed_record_lets_another_one_in_the_replacement_counts(make: Any, worth: float) -> None:
    """Under add_or_remove a cut sub-batch trades one record for another."""
    mode = make(neighbours="add_or_remove", n_max=7, max_grad_norm=1.0)
    plan = mode.plan(Request(4, 4, "poisson", 0.01), units=1, steps=1, module=Pairs(privacy=mode))
    assert plan.sensitivity == pytest.approx(worth)


def test_the_noise_does_not_depend_on_how_many_records_were_drawn() -> None:
    module = Pairs(privacy=logit_dp())
    plan = plan_of(module.privacy, module, n_max=8)
    found = []
    for rows in (None, records(1), records(8)):
        clipped_sum(module, plan, rows)
        sums = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        found.append(module.privacy.privatize(sums, attempt=0, step=0))
    assert len({update.noise_std for update in found}) == len({update.sensitivity for update in found}) == 1
    for name in found[0].gradients:
        assert torch.equal(found[0].gradients[name], found[2].gradients[name])


def test_the_constant_of_the_paper_can_be_chosen_and_is_marked_as_refuted() -> None:
    module = Pairs(privacy=logit_dp(sensitivity="paper"), temperature=1.0)
    plan = plan_of(module.privacy, module, n_max=8)
    assert plan.sensitivity == pytest.approx(0.02 * 8.162, rel=1e-3)
    assert plan.coupling is not None and plan.coupling.claim == "refuted"


# -- broken records --------------------------------------------------------------------------


def test_a_broken_record_adds_nothing_under_logit_dp_and_harms_nobody() -> None:
    module = Pairs(privacy=logit_dp(), loss=SigmoidPairLoss(temperature=1.0))
    plan = plan_of(module.privacy, module, n_max=4)
    rows = records(4)
    whole = clipped_sum(module, plan, without(rows, 2))
    rows["query"][2] = rows["passage"][2] = torch.nan
    torch.testing.assert_close(clipped_sum(module, plan, rows), whole, rtol=1e-10, atol=1e-14)


SEEN = {"highest": 0.0}


class Curriculum(SigmoidPairLoss):
    """Weighs the pairs alone that score about as high as those of the batch before did."""

    def _coefficients(self, table: Tensor) -> Tensor:
        kept = super()._coefficients(table).masked_fill(table < SEEN["highest"], 0.0)
        SEEN["highest"] = float(table.max())
        return kept


class Twice(SigmoidPairLoss):
    def _coefficients(self, table: Tensor) -> Tensor:
        return 2 * super()._coefficients(table)


class Declared(SigmoidPairLoss):
    """Of one's own, and right."""


def test_coefficients_that_are_not_the_derivative_of_the_loss_are_refused() -> None:
    for kind in (Declared, Curriculum, Twice):
        module = Pairs(privacy=logit_dp(), loss=kind(temperature=1.0))
        with nullcontext() if kind is Declared else pytest.raises(UnsupportedModelError, match="derivative"):
            clipped_sum(module, plan_of(module.privacy, module, n_max=6), records(6))


def test_a_batch_with_a_broken_record_adds_zero_under_batch_clip() -> None:
    module = Pairs(privacy=batch_clip())
    plan = plan_of(module.privacy, module, n_max=4)
    rows = records(4)
    rows["query"][2] = torch.nan
    assert not clipped_sum(module, plan, rows).any()
    assert module.privacy.counts.non_finite == 1


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [logit_dp, duplicated, batch_clip])
def test_a_sub_batch_above_n_max_is_refused(make: Any) -> None:
    module = Pairs(privacy=make())
    plan = plan_of(module.privacy, module, n_max=3)
    with pytest.raises(DataError, match=r"more than privacy\.n_max=3 units"):
        clipped_sum(module, plan, records(4))


@pytest.mark.parametrize("make", [logit_dp, duplicated, batch_clip])
def test_batch_norm_is_refused_by_name(make: Any) -> None:
    module = Pairs(privacy=make())
    module.net.insert(1, nn.BatchNorm1d(5).double())
    with pytest.raises(UnsupportedModelError, match=r"net\.1.*BatchNorm1d"):
        clipped_sum(module, plan_of(module.privacy, module, n_max=3), records(3))


class Learned(Pairs):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale = nn.Parameter(torch.ones(()))

    def pair_parameters(self) -> list[nn.Parameter]:
        return [p for p in super().pair_parameters() if p is not self.scale]


def summed(module: Any, n_max: int = 3, **request: Any) -> Tensor:
    return clipped_sum(module, plan_of(module.privacy, module, n_max=n_max, **request), records(n_max))


@pytest.mark.parametrize(
    ("start", "setting"),
    [
        (lambda: LogitDP(eps=1.0, max_logit_grad_norm=1.0), r"privacy\.delta=null"),
        (lambda: BatchClip(eps=1.0, delta=1e-6), r"privacy\.max_grad_norm"),
        (lambda: batch_clip(l2_sensitivity=1.0), r"privacy\.max_grad_norm"),
        (lambda: batch_clip(max_grad_norm=-1.0), r"privacy\.max_grad_norm"),
        (lambda: summed(Pairs(privacy=logit_dp(n_max=3)), expected=8), r"privacy\.n_max=3 is below the 8 units"),
        (lambda: summed(Pairs(privacy=logit_dp()), n_max=1), r"privacy\.n_max=1.*no gradient"),
        (lambda: summed(Pairs(privacy=duplicated(), loss=SigmoidPairLoss(temperature=1.0))), "SigmoidPairLoss"),
        (lambda: summed(Regression(privacy=batch_clip())), "Regression"),
        (lambda: summed(Learned(privacy=logit_dp())), r"scale is not part of them.*temperature"),
    ],
    ids=[
        "no delta", "no bound", "two bounds", "a negative bound", "fewer units than on average", "nothing to contrast",
        "rows of another loss than the softmax", "a module without pairs", "a learned temperature",
    ],
)  # fmt: skip
def test_what_a_mode_cannot_bound_is_refused_by_name(start: Any, setting: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=setting):
        start()


def test_batches_of_one_record_and_of_none_are_fine() -> None:
    for make in (logit_dp, duplicated, batch_clip):
        module = Pairs(privacy=make())
        plan = plan_of(module.privacy, module, n_max=3)
        assert clipped_sum(module, plan, records(1)).isfinite().all()
        assert not clipped_sum(module, plan, None).any()
