"""``assert_private`` passes what is private, says what it measured, and leaves the module as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from stand_ins import Line, Regression
from torch import Tensor, nn

from lit_dpret.audit.testing import PrivacyViolation, assert_private
from lit_dpret.audit.testing.epsilon_audit import epsilon_lower_bound
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.modes import DPSGD, NoPrivacy

DELTA = 1e-5
FEW = 60  # releases; enough to refute eps=1


def lines(count: int = 6) -> list[Line]:
    return [Line(f"q{i}", str(i), f"p{i}", str(i % 3), frozenset()) for i in range(count)]


def regression(**settings: Any) -> Regression:
    torch.manual_seed(0)
    return Regression(privacy=DPSGD(**{"eps": 3.0, "max_grad_norm": 0.5} | settings))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("settings", "least"),  # with the room that each leaves for rounding
    [
        ({"engine": "ghost_tf32"}, 0.975),
        ({"engine": "ghost_bf16"}, 0.985),
        ({"engine": "loop"}, 0.99),
        ({"clip": "automatic", "secure_rng": True}, 0.99),
        ({"neighbours": "replace_one", "noise": "discrete"}, 0.99),
    ],
    ids=str,
)
def test_a_private_module_passes_however_it_clips_and_counts(settings: dict[str, Any], least: float) -> None:
    report = assert_private(regression(**settings), lines(), 1.0, DELTA, trials=FEW)
    assert least < report.sensitivity <= 1.001, "a loud unit must reach the bound, or clipping was not tested"
    assert report.noise == pytest.approx(1.0, abs=0.06)  # 64 draws of 49 coordinates: four standard errors
    assert report.eps_lower_bound <= 1.0


class Doubled(DPSGD):
    """Doubles the clipped sum; ``true`` says whether its plan says so."""

    true = True

    def plan(self, request: Any, **facts: Any) -> Any:
        planned = super().plan(request, **facts)
        return replace(planned, sensitivity=2 * planned.sensitivity) if self.true else planned

    def take(self) -> dict[str, Tensor]:
        return {name: 2 * total for name, total in super().take().items()}


@pytest.mark.costly
def test_a_mode_is_held_to_the_sensitivity_of_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = regression()
    module.privacy = Doubled(eps=3.0, max_grad_norm=0.5)
    report = assert_private(module, lines(), 1.0, DELTA, trials=FEW)
    assert 0.99 < report.sensitivity <= 1.001 and report.noise == pytest.approx(1.0, abs=0.06)
    monkeypatch.setattr(Doubled, "true", False)
    with pytest.raises(PrivacyViolation, match="sensitivity"):
        assert_private(module, lines(), 1.0, DELTA, trials=FEW)


@pytest.mark.costly
def test_units_of_several_rows_pass() -> None:
    module = regression()
    rows = module.collate_rows(lines(7))
    assert_private(module, rows, 1.0, DELTA, unit_ids=torch.tensor([0, 0, 1, 1, 2, 3, 3]), trials=FEW)


@pytest.mark.slow
def test_a_module_in_float64_passes() -> None:
    module = regression().double()
    rows = {name: value.double() for name, value in module.collate_rows(lines()).items()}
    assert assert_private(module, rows, 1.0, DELTA, trials=FEW).sensitivity <= 1 + 1e-6


@pytest.mark.costly
def test_a_private_module_is_left_as_it_was_and_the_same_seed_gives_the_same_result() -> None:
    module = regression()
    module.net[0].eval()
    mode, before = module.privacy, {n: p.detach().clone() for n, p in module.named_parameters()}
    gradient = torch.ones_like(module.net[0].weight)
    module.net[0].weight.grad = gradient
    attributes = set(module.__dict__)
    report = assert_private(module, lines(), 1.0, DELTA, trials=FEW)
    assert module.privacy is mode
    assert not hasattr(mode, "_plan")
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    assert module.net[0].weight.grad is gradient
    assert module.net[3].weight.grad is None
    assert module.training
    assert not module.net[0].training
    assert set(module.__dict__) == attributes
    assert module._guard is None
    assert assert_private(module, lines(), 1.0, DELTA, trials=FEW) == report
    assert assert_private(module, lines(), 1.0, DELTA, trials=FEW, seed=1).noise != report.noise


def test_a_mode_that_promises_nothing_is_no_private_one() -> None:
    assert issubclass(PrivacyViolation, AssertionError)
    with pytest.raises(PrivacyViolation, match="privacy=none adds no noise"):
        assert_private(Regression(privacy=NoPrivacy()), lines(), 1.0, DELTA)


class Loose(Regression):
    def collate_rows(self, rows: list[Any]) -> Any:
        return tuple(super().collate_rows(rows).values())


NET, ZEROS = nn.Linear(2, 1), {"x": torch.zeros(4, 2)}


@pytest.mark.parametrize(
    ("module", "batch", "settings", "words"),
    [
        (None, lines(1), {}, "fewer than two units"),
        (None, torch.ones(3), {}, "batch is a Tensor"),
        (None, {"inputs": torch.ones(3, 4), "target": torch.ones(2)}, {}, "differ in the length"),
        (None, lines(3), {"unit_ids": torch.tensor([0, 2, 2])}, "counted from 0 without gaps"),
        (None, lines(3), {"unit_ids": torch.tensor([0, 1])}, "each of the 3 rows a unit"),
        (None, lines(3), {"trials": 20}, "could not refute eps=1"),
        (None, lines(3), {"privacy": DPSGD(eps=1.0)}, "Leave out"),
        (None, lines(3), {"rounds": 20}, "rounds"),
        (None, lines(), {"eps": 4.0}, r"trials=500 releases can show an epsilon of at most 3\.62"),
        (Loose(privacy=DPSGD(eps=1.0)), lines(), {}, "collate_rows returned a tuple"),
        (NET, ZEROS, {"per_row_loss": lambda rows: 0 * NET(rows["x"])[:, 0]}, "fewer than two of its units have a"),
        (NET, ZEROS, {}, "per_row_loss"),
    ],
)
def test_a_test_that_could_not_fail_is_refused(module: Any, batch: Any, settings: dict[str, Any], words: str) -> None:
    arguments = {"eps": 1.0, "delta": DELTA} | settings
    with pytest.raises(ConfigurationError, match=words):
        assert_private(regression() if module is None else module, batch, **arguments)


# -- the statistical audit by itself, on Gaussians whose epsilon is known --------------------------


def gaussians(gap: float, trials: int = 4000) -> tuple[Any, Any]:
    generator = np.random.default_rng(3)
    return generator.normal(gap, 1.0, trials), generator.normal(0.0, 1.0, trials)


def exact_epsilon(gap: float) -> float:
    """Of the Gaussian mechanism at delta=1e-5 (Balle and Wang 2018, equation 6)."""

    def beyond(eps: float) -> float:
        return float(norm.cdf(gap / 2 - eps / gap) - math.exp(eps) * norm.cdf(-gap / 2 - eps / gap)) - DELTA

    return float(brentq(beyond, 0.0, 200.0))


@pytest.mark.parametrize(("gap", "at_least"), [(0.1, -1.0), (0.5, -1.0), (1.0, 1.0), (2.0, 2.8), (8.0, 5.5)])
def test_the_audit_shows_a_good_part_of_the_exact_epsilon_and_never_more(gap: float, at_least: float) -> None:
    p, q = gaussians(gap)
    for one, other in ((p, q), (q, p), (-p, -q)):
        assert at_least < epsilon_lower_bound(one, other, DELTA) <= exact_epsilon(gap)
