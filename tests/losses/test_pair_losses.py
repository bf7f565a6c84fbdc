"""Losses over pairs: values, coefficients, masks, refusals; and the search that refutes wrong declarations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pair_cases import DECLARED, LOSSES, by_hand, draw, hinge
from torch import Tensor

from lit_dpret.errors import ConfigurationError, PrivacyViolation
from lit_dpret.losses import (
    DeclaredPairLoss,
    KernelPairLoss,
    NullMassSoftmaxPairLoss,
    PairwiseLoss,
    SigmoidPairLoss,
    SoftmaxPairLoss,
    SpreadoutPairLoss,
    SymmetricSoftmaxPairLoss,
    check_declared_bounds,
)

EACH = pytest.mark.parametrize("loss", [*LOSSES.values(), DECLARED], ids=[*LOSSES, "declared"])


def some_mask(n: int, seed: int = 0) -> Tensor:
    return draw(n, n, seed=seed) > 0.3


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_row_losses_are_the_formulas_written_out(name: str, n: int) -> None:
    scores = draw(n, n)
    assert LOSSES[name].row_losses(scores).tolist() == pytest.approx(by_hand(name)(scores.tolist()), rel=1e-12)


@EACH
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_coefficients_are_the_derivative_of_the_summed_row_losses(loss: PairwiseLoss, masked: bool, n: int) -> None:
    scores = draw(n, n, seed=1).requires_grad_()
    mask = some_mask(n) if masked else None
    wanted = torch.autograd.grad(loss.row_losses(scores, mask).sum(), scores)[0]
    found = loss.coefficients(scores, mask)
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@EACH
def test_a_masked_pair_counts_as_the_least_score_and_has_coefficient_zero(loss: PairwiseLoss) -> None:
    scores, mask = draw(5, 5), some_mask(5)
    assert mask.diagonal().any()
    off_diagonal = mask & ~torch.eye(5, dtype=torch.bool)
    replaced = scores.masked_fill(off_diagonal, loss.low if math.isfinite(loss.low) else 0.0)
    torch.testing.assert_close(loss.row_losses(scores, mask), loss.row_losses(replaced))
    wanted = loss.coefficients(replaced).masked_fill(off_diagonal, 0.0)
    assert torch.equal(loss.coefficients(scores, mask), wanted)


@EACH
def test_a_score_outside_the_range_counts_as_its_nearest_end(loss: PairwiseLoss) -> None:
    scores = 10.0 * draw(4, 4)
    ends = scores.clamp(loss.low, loss.high)
    assert torch.equal(loss.coefficients(scores), loss.coefficients(ends))
    leaf = scores.clone().requires_grad_()
    slopes = torch.autograd.grad(loss.row_losses(leaf).sum(), leaf)[0]
    torch.testing.assert_close(slopes, loss.coefficients(ends), rtol=1e-12, atol=1e-14)


@EACH
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_record_has_no_coefficients_and_leaves_all_others_finite(loss: PairwiseLoss, broken: float) -> None:
    scores = draw(4, 4)
    scores[2, :] = scores[:, 2] = broken
    found = loss.coefficients(scores)
    assert found.isfinite().all()
    assert not found[2].any() and not found[:, 2].any()
    survivors = [0, 1, 3]
    assert found[survivors][:, survivors].any()
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[2, :] = mask[:, 2] = True
    healthy = loss.coefficients(draw(4, 4), mask)
    assert torch.equal(found[survivors][:, survivors], healthy[survivors][:, survivors])
    assert loss.row_losses(scores).isfinite().all()


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_coefficients_are_at_least_float32(loss: PairwiseLoss, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scores = draw(3, 3).to(dtype)
    assert loss.coefficients(scores).dtype == loss.row_losses(scores).dtype == wide
    torch.testing.assert_close(loss.coefficients(scores), loss.coefficients(scores.double()).to(wide))


@EACH
def test_an_empty_batch_has_no_losses_and_no_coefficients(loss: PairwiseLoss) -> None:
    assert loss.row_losses(torch.zeros(0, 0)).shape == (0,)
    assert loss.coefficients(torch.zeros(0, 0)).shape == (0, 0)


@pytest.mark.parametrize("kind", [SoftmaxPairLoss, SymmetricSoftmaxPairLoss])
def test_a_temperature_of_a_hundredth_overflows_nowhere(kind: Callable[..., PairwiseLoss]) -> None:
    loss = kind(temperature=0.01)
    table = torch.full((8, 8), -1.0)
    table[:, 7] = 1.0
    assert loss.coefficients(table).isfinite().all() and loss.row_losses(table).isfinite().all()
    assert loss.sensitivity(8, relation="add_or_remove") == pytest.approx(16 / 0.01)
    assert math.isfinite(kind(temperature=0.001).sensitivity(10**90, relation="replace_one"))


def test_an_open_normaliser_is_filled_once_and_only_where_there_is_one() -> None:
    assert SigmoidPairLoss(temperature=1.0).for_expected_size(32) == SigmoidPairLoss(temperature=1.0, n0=32)
    assert SigmoidPairLoss(temperature=1.0, n0=8).for_expected_size(32).n0 == 8
    softmax = SoftmaxPairLoss(temperature=1.0)
    assert softmax.for_expected_size(32) is softmax


@pytest.mark.parametrize(
    "open_loss",
    [
        SigmoidPairLoss(temperature=1.0),
        KernelPairLoss(temperature=1.0),
        SpreadoutPairLoss(),
        NullMassSoftmaxPairLoss(temperature=1.0),
    ],
)
def test_an_open_normaliser_is_refused_and_never_taken_from_the_batch(open_loss: PairwiseLoss) -> None:
    for use in (
        lambda: open_loss.coefficients(draw(3, 3)),
        lambda: open_loss.row_losses(draw(3, 3)),
        lambda: open_loss.sensitivity(3, relation="add_or_remove"),
    ):
        with pytest.raises(ConfigurationError, match=r"loss\.n0"):
            use()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftmaxPairLoss(temperature=0.0), r"^temperature=0.0 .*model\.temperature or model\.loss"),
        (lambda: SigmoidPairLoss(temperature=math.nan), "temperature=nan"),
        (lambda: SoftmaxPairLoss(temperature=1.0, similarity="l2"), "^model.loss.similarity='l2'"),  # type: ignore[arg-type]
        (lambda: SoftmaxPairLoss(temperature=1.0, radius=2.0), "^model.loss.radius=2"),
        (lambda: SoftmaxPairLoss(temperature=1.0, similarity="dot"), "needs model.loss.radius"),
        (lambda: SpreadoutPairLoss(similarity="dot", radius=-1.0), "^model.loss.radius=-1"),
        (lambda: SoftmaxPairLoss(temperature=1.0, sensitivity_from="guess"), "guess"),  # type: ignore[arg-type]
        (lambda: SpreadoutPairLoss(normaliser="mean"), "loss.normaliser='mean'"),  # type: ignore[arg-type]
        (lambda: SpreadoutPairLoss(n0=1), "loss.n0=1"),
        (lambda: KernelPairLoss(temperature=1.0, n0=0), "loss.n0=0"),
        (lambda: SigmoidPairLoss(temperature=1.0, bias=math.inf), "loss.bias=inf"),
        (lambda: NullMassSoftmaxPairLoss(temperature=1.0, negative_weight=0.0), "loss.negative_weight=0"),
        (lambda: LOSSES["softmax"].coefficients(torch.zeros(2, 3)), r"shape \(2, 3\)"),
        (lambda: LOSSES["softmax"].coefficients(torch.zeros(2, 2, dtype=torch.long)), "int64"),
        (lambda: LOSSES["softmax"].coefficients(torch.zeros(2, 2), torch.zeros(2, 2)), "mask is torch.float32"),
        (lambda: LOSSES["softmax"].sensitivity(0, relation="add_or_remove"), "n_max=0"),
        (lambda: LOSSES["softmax"].sensitivity(8.0, relation="add_or_remove"), "n_max=8.0"),  # type: ignore[arg-type]
        (lambda: LOSSES["softmax"].sensitivity(8, relation="zero_out"), "relation='zero_out'"),  # type: ignore[arg-type]
        (
            lambda: SoftmaxPairLoss(temperature=1.0, sensitivity_from="paper").sensitivity(8, relation="replace_one"),
            "Lemma 4.5 for add_or_remove",
        ),
        (
            lambda: DeclaredPairLoss(
                row_loss=lambda table: table.sum(), g1=lambda *_: 1.0, g2=lambda *_: 1.0, l=lambda *_: 1.0
            ).coefficients(torch.zeros(2, 2)),
            "one loss for each row",
        ),
        (
            lambda: DeclaredPairLoss(
                row_loss=torch.diagonal, g1=lambda *_: -1.0, g2=lambda *_: 1.0, l=lambda *_: 1.0
            ).sensitivity(2, relation="add_or_remove"),
            "g1",
        ),
        (lambda: check_declared_bounds(DECLARED, sizes=()), "sizes|nothing to check"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_value_and_knob(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


# -- bounds that are declared -----------------------------------------------------------------


def cross_entropy(table: Tensor) -> Tensor:
    return table.logsumexp(1) - table.diagonal()


def largest(n: int, low: float, high: float) -> float:
    return 1 / (1 + (n - 1) * math.exp(low - high))


def least(n: int, low: float, high: float) -> float:
    return 1 / (1 + (n - 1) * math.exp(high - low))


SOFTMAX = DeclaredPairLoss(
    row_loss=cross_entropy,
    g1=lambda n, low, high: 2 * (1 - least(n, low, high)),
    g2=lambda n, low, high: (n - 1) * largest(n, low, high),
    l=largest,
)
# Lemma 4.5 of paper 002: the same share in all three places.
PAPER = replace(SOFTMAX, g1=lambda n, low, high: 2 * (1 - largest(n, low, high)))


def quick(loss: PairwiseLoss, **settings: object) -> dict[tuple[str, int], float]:
    return check_declared_bounds(loss, **{"sizes": (2, 3), "restarts": 2, "steps": 20} | settings)  # type: ignore[arg-type]


def test_softmax_declared_by_theorem_4_2_has_the_sensitivity_of_softmax() -> None:
    for n in (1, 2, 8, 100):
        wanted = SoftmaxPairLoss(temperature=1.0).sensitivity(n, relation="add_or_remove")
        assert SOFTMAX.sensitivity(n, relation="add_or_remove") == pytest.approx(wanted)
        assert SOFTMAX.sensitivity(n, relation="replace_one") == pytest.approx(2 * wanted)
    assert SOFTMAX.claim == "declared" and SOFTMAX.guaranteed


@pytest.mark.costly
def test_true_declarations_pass_and_are_told_how_tight_they_are() -> None:
    found = quick(SOFTMAX)
    assert found["add_or_remove", 3] == pytest.approx(1.0, abs=0.01)
    assert 0.5 < found["replace_one", 3] < 0.8  # twice the removal is a bound and no supremum
    assert quick(DECLARED)["add_or_remove", 3] == pytest.approx(1.0, abs=0.01)


def test_the_constant_of_lemma_4_5_is_caught_with_the_table_that_refutes_it() -> None:
    with pytest.raises(PrivacyViolation, match=r"sensitivity\(2, relation='add_or_remove'\) is declared as 2,"):
        quick(SoftmaxPairLoss(temperature=1.0, sensitivity_from="paper"), relations=["add_or_remove"])
    with pytest.raises(PrivacyViolation, match=r"g1\(2, -1, 1\)") as caught:
        quick(PAPER)
    shown = re.search(r"scores \[\[(.*?)\], \[(.*?)\]\]", str(caught.value))
    assert shown is not None
    table = torch.tensor([[float(x) for x in row.split(",")] for row in shown.groups()], dtype=torch.float64)
    attained = float(PAPER.coefficients(table)[-1].abs().sum())
    assert attained > 1.5 * PAPER.g1(2, -1.0, 1.0)


@pytest.mark.parametrize("wrong", ["g1", "g2", "l"])
def test_each_wrongly_declared_bound_is_caught_by_name(wrong: str) -> None:
    for loss in (SOFTMAX, DECLARED):
        right: Callable[[int, float, float], float] = getattr(loss, wrong)
        small = replace(loss, **{wrong: lambda n, low, high, right=right: 0.9 * right(n, low, high)})
        with pytest.raises(PrivacyViolation, match=rf"^{wrong}\("):
            quick(small)


def test_a_loss_that_treats_records_by_their_place_is_caught() -> None:
    def first_counts_double(table: Tensor) -> Tensor:
        return hinge(table) * torch.tensor([2.0] + [1.0] * (len(table) - 1), dtype=table.dtype)

    with pytest.raises(PrivacyViolation, match="position of records"):
        quick(replace(DECLARED, row_loss=first_counts_double))


def test_a_loss_whose_derivative_is_not_finite_somewhere_is_caught() -> None:
    def root(table: Tensor) -> Tensor:
        return (table - table.diagonal().unsqueeze(1)).abs().sqrt().sum(1)

    with pytest.raises(PrivacyViolation, match="attains"):
        quick(replace(DECLARED, row_loss=root, g1=lambda *_: 1e6, g2=lambda *_: 1e6, l=lambda *_: 1e6))


def test_the_normaliser_of_the_realised_size_is_caught_where_a_fixed_one_was_declared() -> None:
    def mean_hinge(table: Tensor) -> Tensor:
        return hinge(table) * 3 / max(len(table) - 1, 1)

    bounds = {"g1": lambda n, *_: 2.0, "g2": lambda n, *_: 1.0, "l": lambda n, *_: 1 / (n - 1) if n > 1 else 0.0}
    with pytest.raises(PrivacyViolation, match=r"^l\(3"):
        quick(replace(DECLARED, row_loss=mean_hinge, **bounds))  # type: ignore[arg-type]


def test_declared_bounds_that_fall_with_n_count_with_their_largest() -> None:
    falling = replace(DECLARED, g1=lambda n, *_: 10.0 / n, g2=lambda *_: 0.0, l=lambda *_: 0.0)
    assert falling.sensitivity(5, relation="add_or_remove") == 10.0
