"""Each optimizer against its formula, written out in float64; and what reaches it in a private run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from stand_ins import KillAt, Killed, Regression, dp, fit

from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.optimizers import DPAdamBC
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, SyntheticData
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan

Array = NDArray[np.float64]
START = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
GRADIENTS = np.random.default_rng(7).normal(size=(5, 2, 3)) * np.array([0.3, 0.3, 0.3, 0.3, 1.5])[:, None, None]
NOISE_STD = 0.2


def rms(x: Array) -> float:
    return math.sqrt(float((x**2).mean()))


def sgd_by_hand(w: Array, gradients: Array) -> Array:
    velocity = np.zeros_like(w)
    for g in gradients:
        velocity = 0.9 * velocity + g
        w = w - 0.05 * velocity
    return w


def adam_by_hand(w: Array, gradients: Array) -> Array:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        w = w - 0.05 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6)
    return w


def adamw_by_hand(w: Array, gradients: Array) -> Array:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w * (1 - 0.05 * 0.1) - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


def adam_bc_by_hand(floor: float, decay: float = 0.0) -> Callable[[Array, Array], Array]:
    """Tang et al. 2023, Algorithm 1."""

    def update(w: Array, gradients: Array) -> Array:
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t, g in enumerate(gradients, 1):
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
            second = np.maximum(v / (1 - 0.95**t) - NOISE_STD**2, floor)
            w = w * (1 - 0.05 * decay) - 0.05 * (m / (1 - 0.8**t)) / np.sqrt(second)
        return w

    return update


def adafactor_by_hand(clip: float, exponent: float, lr: float = 0.05) -> Callable[[Array, Array], Array]:
    """Shazeer and Stern 2018, Algorithm 4 (without momentum), with rho_t = min(lr, 1/sqrt(t))."""

    def update(w: Array, gradients: Array) -> Array:
        rows, columns, scales = np.zeros((w.shape[0], 1)), np.zeros((1, w.shape[1])), list[float]()
        for t, g in enumerate(gradients, 1):
            keep = 1 - t**exponent
            rows = keep * rows + (1 - keep) * (g**2).mean(axis=1, keepdims=True)
            columns = keep * columns + (1 - keep) * (g**2).mean(axis=0, keepdims=True)
            u = g / np.sqrt(rows @ columns / rows.mean())
            scales.append(rms(u))
            u = u / max(1.0, rms(u) / clip)
            w = w - max(1e-3, rms(w)) * min(lr, 1 / math.sqrt(t)) * u
        assert min(scales) < clip < max(scales), "the gradients do not show whether updates are scaled down"
        return w

    return update


DEFAULT_FLOOR = NOISE_STD**2 * math.sqrt(2 * (1 - 0.95) / (1 + 0.95))
CASES: dict[str, tuple[dict[str, Any], Callable[[Array, Array], Array]]] = {
    "sgd with momentum": ({"name": "sgd", "momentum": 0.9}, sgd_by_hand),
    "adam": ({"name": "adam", "betas": (0.8, 0.95), "eps": 1e-6}, adam_by_hand),
    "adamw": ({"name": "adamw", "weight_decay": 0.1}, adamw_by_hand),
    "adam_bc": ({"name": "adam_bc", "betas": (0.8, 0.95), "min_second_moment": 0.03}, adam_bc_by_hand(0.03)),
    "adam_bc, floor from the noise": ({"name": "adam_bc", "betas": (0.8, 0.95)}, adam_bc_by_hand(DEFAULT_FLOOR)),
    "adam_bc, weight decay": (
        {"name": "adam_bc", "betas": (0.8, 0.95), "weight_decay": 0.1}, adam_bc_by_hand(DEFAULT_FLOOR, 0.1),
    ),
    "adafactor": ({"name": "adafactor"}, adafactor_by_hand(1.0, -0.8)),
    "adafactor, a learning rate above its bound": ({"name": "adafactor", "lr": 0.6}, adafactor_by_hand(1.0, -0.8, 0.6)),
    "adafactor, own knobs": (
        {"name": "adafactor", "clip_threshold": 1.2, "beta2_decay": -0.6}, adafactor_by_hand(1.2, -0.6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_takes_the_steps_of_its_formula(case: str) -> None:
    settings, by_hand = CASES[case]
    parameter = torch.nn.Parameter(torch.tensor(START))
    optimizer = OptimizerSpec(**{"lr": 0.05} | settings).build([parameter], steps=5, noise_std=NOISE_STD)
    for gradient in GRADIENTS:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    np.testing.assert_allclose(parameter.detach().numpy(), by_hand(START, GRADIENTS), rtol=1e-12)


def test_adam_bc_finds_the_second_moment_of_the_gradient_below_the_noise() -> None:
    """A constant gradient of a tenth of the noise: Adam's second moment is 101 times too large."""
    signal, noise = 0.02, 0.2
    parameter = torch.nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    spec = OptimizerSpec(name="adam_bc", betas=(0.9, 0.99))
    optimizer = spec.build([parameter], steps=0, noise_std=noise)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        drawn = torch.randn(20_000, generator=generator, dtype=torch.float64)
        parameter.grad = signal + noise * drawn
        optimizer.step()
    found = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.99**300)
    error = float(found.std()) / math.sqrt(20_000)
    assert float(found.mean()) - noise**2 == pytest.approx(signal**2, abs=4 * error) and 4 * error < signal**2 / 2
    default = optimizer.param_groups[0]["min_second_moment"]
    quiet = noise**2 * math.sqrt(2 * 0.01 / 1.99)
    assert default == pytest.approx(quiet) and float(found.std()) == pytest.approx(quiet, rel=0.2)


def test_the_noise_that_is_subtracted_is_the_noise_that_arrives() -> None:
    """Measured on the update of an empty step, not read from the plan."""
    budget = PrivacyBudget(eps=2.0, delta=1e-4, unit="query", neighbours="zero_out")
    plan = PrivacyPlan.build(
        budget,
        PlainSamplingRequest(sampling="full_batch"),
        steps=1,
        max_grad_norm=0.7,
        n_public=50,
        noise_multiplier=3.0,
    )
    module = torch.nn.Linear(200, 100)
    mode = DPSGD(eps=2.0, max_grad_norm=0.7)
    mode.attach(module, plan, KeyedStream(b"s" * 32, "run"))
    update = mode.privatize(mode.take(), attempt=0, step=0)
    measured = float(update.gradients["weight"].double().std())
    assert mode.gradient_noise_std == pytest.approx(3.0 * 0.7 / 50)
    assert measured == pytest.approx(mode.gradient_noise_std, rel=0.03)  # four standard errors of 20,000 draws


@pytest.mark.costly
@pytest.mark.parametrize("name", ["adam_bc", "adafactor"])
def test_a_private_run_trains_and_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    def module() -> Regression:
        L.seed_everything(0, verbose=False)
        return Regression(privacy=dp(tmp_path), optimizer=OptimizerSpec(name=name, lr=0.05))

    def weights(trained: Regression) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in trained.parameters()])

    whole = module()
    runner = fit(tmp_path / "whole", whole)
    if name == "adam_bc":
        plan = runner.callbacks[0].plan  # type: ignore[attr-defined]
        assert runner.optimizers[0].param_groups[0]["noise_std"] == plan.noise_std / plan.denominator > 0
    assert not torch.equal(weights(whole), weights(module()))
    ledger = (tmp_path / "whole" / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "privacy_ledger.jsonl").write_text(ledger[0] + "\n", encoding="utf-8")  # the same run id, same noise
    with pytest.raises(Killed):
        fit(folder, module(), resume=True, extra=[KillAt(3)])
    resumed = module()
    fit(folder, resumed, resume=True)
    text = (folder / "privacy_ledger.jsonl").read_text(encoding="utf-8")
    assert text.count('"replay"') == 1 and "replay_failed" not in text
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("mode", [NoPrivacy(), SyntheticData()], ids=lambda mode: mode.name)
def test_without_noise_there_is_nothing_to_subtract(mode: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"privacy={mode.name} adds none"):
        Regression(privacy=mode, optimizer=OptimizerSpec(name="adam_bc"))


def test_adam_bc_is_not_built_before_the_noise_is_known() -> None:
    with pytest.raises(ConfigurationError, match=r"noise_std=0\.0"):
        OptimizerSpec(name="adam_bc").build([torch.nn.Parameter(torch.zeros(1))], steps=1)
    with pytest.raises(ConfigurationError, match="no plan yet"):
        _ = DPSGD(eps=1.0).gradient_noise_std


def test_adam_bc_refuses_parameters_in_which_the_difference_is_rounding() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    with pytest.raises(ConfigurationError, match="bfloat16"):
        DPAdamBC([parameter], lr=1e-3, noise_std=1.0)
    built = OptimizerSpec(name="adam_bc").build([parameter], steps=1, noise_std=1.0)
    assert {each.dtype for each in built.inner.param_groups[0]["params"]} == {torch.float32}, "it works on the copies"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "adam", "momentum": 0.9}, "momentum=0.9 would be ignored: it belongs to sgd"),
        ({"name": "sgd", "betas": (0.9, 0.99)}, "belongs to adam, adamw, adam_bc"),
        ({"name": "adam_bc", "eps": 1e-8}, r"eps=1e-08 would be ignored"),
        ({"name": "adam", "min_second_moment": 1e-8}, "belongs to adam_bc"),
        ({"name": "adam_bc", "min_second_moment": 0.0}, "min_second_moment=0.0"),
        ({"name": "adafactor", "clip_threshold": 0.5}, "clip_threshold=0.5 must be at least 1"),
        ({"name": "adafactor", "beta2_decay": 0.8}, r"must lie in \[-1, 0\)"),
        ({"name": "sgd", "momentum": 1.0}, r"must lie in \[0, 1\)"),
    ],
)
def test_a_knob_that_would_be_ignored_or_is_out_of_range_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        OptimizerSpec(**settings)


def test_betas_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="betas"):
        OptimizerSpec(name="adam_bc", betas=(0.9, 1.0)).build(
            [torch.nn.Parameter(torch.zeros(1))], steps=1, noise_std=1
        )
