"""What the losses over pairs are: their values, their coefficients, their masks, their refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pair_cases import DECLARED, LOSSES, by_hand
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import (
    DeclaredPairLoss,
    KernelPairLoss,
    NullMassSoftmaxPairLoss,
    PairwiseLoss,
    SigmoidPairLoss,
    SoftmaxPairLoss,
    SpreadoutPairLoss,
    SymmetricSoftmaxPairLoss,
)

EACH = pytest.mark.parametrize("loss", [*LOSSES.values(), DECLARED], ids=[*LOSSES, "declared"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Numbers in [-1, 1]."""
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


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
        (lambda: SoftmaxPairLoss(temperature=0.0), "loss.temperature=0"),
        (lambda: SigmoidPairLoss(temperature=math.nan), "loss.temperature=nan"),
        (lambda: SoftmaxPairLoss(temperature=1.0, similarity="l2"), "loss.similarity='l2'"),  # type: ignore[arg-type]
        (lambda: SoftmaxPairLoss(temperature=1.0, radius=2.0), "loss.radius=2"),
        (lambda: SoftmaxPairLoss(temperature=1.0, similarity="dot"), "needs loss.radius"),
        (lambda: SpreadoutPairLoss(similarity="dot", radius=-1.0), "loss.radius=-1"),
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
    ],
)
def test_what_cannot_be_honoured_is_refused_by_value_and_knob(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
