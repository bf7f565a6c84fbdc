"""Losses with declared bounds, and the search that refutes wrong declarations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pair_cases import DECLARED, hinge
from torch import Tensor

from lit_dpret.errors import ConfigurationError, PrivacyViolation
from lit_dpret.losses import (
    DeclaredPairLoss,
    PairwiseLoss,
    SoftmaxPairLoss,
    check_declared_bounds,
)


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
    return check_declared_bounds(loss, **{"sizes": (2, 3), "restarts": 4, "steps": 25} | settings)  # type: ignore[arg-type]


def test_softmax_declared_by_theorem_4_2_has_the_sensitivity_of_softmax() -> None:
    for n in (1, 2, 8, 100):
        wanted = SoftmaxPairLoss(temperature=1.0).sensitivity(n, relation="add_or_remove")
        assert SOFTMAX.sensitivity(n, relation="add_or_remove") == pytest.approx(wanted)
        assert SOFTMAX.sensitivity(n, relation="replace_one") == pytest.approx(2 * wanted)
    assert SOFTMAX.claim == "declared" and SOFTMAX.guaranteed


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

    with pytest.raises(PrivacyViolation, match="by their place"):
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


def test_a_check_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing to check"):
        check_declared_bounds(DECLARED, sizes=())
