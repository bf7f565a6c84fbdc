"""``assert_private`` passes what is private, says what it measured, and leaves the module as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize(  # with the room that each leaves for rounding
    ("engine", "least"), [("ghost_tf32", 0.975), ("ghost_bf16", 0.985), ("loop", 0.99)]
)
def test_a_private_module_passes_with_its_own_rows(engine: str, least: float) -> None:
    passes(regression(engine=engine), least)


def passes(module: Regression, least: float) -> None:
    report = assert_private(module, lines(), 1.0, DELTA, trials=FEW)
    assert least < report.sensitivity <= 1.001, "a loud unit must reach the bound, or clipping was not tested"
    assert report.noise == pytest.approx(1.0, abs=0.06)  # 64 draws of 49 coordinates: four standard errors
    assert report.eps_lower_bound <= 1.0


@pytest.mark.parametrize(
    "settings", [{"clip": "automatic", "secure_rng": True}, {"neighbours": "replace_one", "noise": "discrete"}]
)
def test_every_way_to_clip_and_count_passes(settings: dict[str, Any]) -> None:
    assert_private(regression(**settings), lines(), 1.0, DELTA, trials=FEW)


class Doubled(DPSGD):
    """Doubles the clipped sum; ``true`` says whether its plan says so."""

    true = True

    def plan(self, request: Any, **facts: Any) -> Any:
        planned = super().plan(request, **facts)
        return replace(planned, sensitivity=2 * planned.sensitivity) if self.true else planned

    def take(self) -> dict[str, Tensor]:
        return {name: 2 * total for name, total in super().take().items()}


def test_a_mode_is_held_to_the_sensitivity_of_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = regression()
    module.privacy = Doubled(eps=3.0, max_grad_norm=0.5)
    report = assert_private(module, lines(), 1.0, DELTA, trials=FEW)
    assert 0.99 < report.sensitivity <= 1.001 and report.noise == pytest.approx(1.0, abs=0.06)
    monkeypatch.setattr(Doubled, "true", False)
    with pytest.raises(PrivacyViolation, match="sensitivity"):
        assert_private(module, lines(), 1.0, DELTA, trials=FEW)


def test_units_of_several_rows_pass() -> None:
    module = regression()
    rows = module.collate_rows(lines(7))
    assert_private(module, rows, 1.0, DELTA, unit_ids=torch.tensor([0, 0, 1, 1, 2, 3, 3]), trials=FEW)


class Tied(nn.Module):
    """Token in, token out, by one matrix; its input and output gradients point the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Embedding(11, 4)
        self.outward = nn.Linear(4, 11, bias=False)
        self.outward.weight = self.inward.weight

    def per_row(self, rows: dict[str, Tensor]) -> Tensor:
        scores = self.outward(self.inward(rows["token"]))
        return -scores.gather(1, rows["token"][:, None]).squeeze(1)


def test_any_module_with_a_loss_per_row_passes() -> None:
    torch.manual_seed(0)
    module = Tied()
    assert_private(module, {"token": torch.arange(5)}, 1.0, DELTA, per_row_loss=module.per_row, trials=FEW)


@pytest.mark.slow
def test_a_module_in_float64_passes() -> None:
    module = regression().double()
    rows = {name: value.double() for name, value in module.collate_rows(lines()).items()}
    assert assert_private(module, rows, 1.0, DELTA, trials=FEW).sensitivity <= 1 + 1e-6


def test_a_private_module_passes_and_is_left_as_it_was() -> None:
    module = regression()
    module.net[0].eval()
    mode, before = module.privacy, {n: p.detach().clone() for n, p in module.named_parameters()}
    gradient = torch.ones_like(module.net[0].weight)
    module.net[0].weight.grad = gradient
    attributes = set(module.__dict__)
    passes(module, least=0.99)
    assert module.privacy is mode and not hasattr(mode, "_plan")
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    assert module.net[0].weight.grad is gradient and module.net[3].weight.grad is None
    assert module.training and not module.net[0].training
    assert set(module.__dict__) == attributes and module._guard is None


@pytest.mark.slow
def test_the_same_seed_gives_the_same_result_and_another_one_another() -> None:
    first, again = (assert_private(regression(), lines(), 1.0, DELTA, trials=FEW) for _ in range(2))
    other = assert_private(regression(), lines(), 1.0, DELTA, trials=FEW, seed=1)
    assert first == again and other.noise != first.noise


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
        (None, lines(3), {"privacy": DPSGD(eps=1.0)}, "leave out"),
        (None, lines(3), {"rounds": 20}, "rounds"),
        (None, lines(), {"eps": 4.0}, r"trials=500 releases can show an epsilon of 3\.62 at most"),
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
    """Of the Gaussian mechanism at delta=1e-5, by bisection on Balle and Wang (2018), equation 6."""

    def delta(eps: float) -> float:
        def cdf(x: float) -> float:
            return 0.5 * math.erfc(-x / math.sqrt(2))

        return cdf(gap / 2 - eps / gap) - math.exp(eps) * cdf(-gap / 2 - eps / gap)

    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return high


@pytest.mark.parametrize("gap", [0.1, 0.5, 1.0, 2.0])
def test_the_audit_never_shows_more_than_the_exact_epsilon(gap: float) -> None:
    for p, q in (gaussians(gap), gaussians(gap)[::-1]):
        assert epsilon_lower_bound(p, q, DELTA) <= exact_epsilon(gap)


@pytest.mark.parametrize(("gap", "at_least"), [(1.0, 1.0), (2.0, 2.8), (8.0, 5.5)])
def test_the_audit_shows_a_good_part_of_it(gap: float, at_least: float) -> None:
    assert epsilon_lower_bound(*gaussians(gap), DELTA) > at_least
    assert epsilon_lower_bound(*(-x for x in gaussians(gap)), DELTA) > at_least
