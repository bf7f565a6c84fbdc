"""Keyed streams are independent where keys differ, equal where they do not, and secret; grids are paid for."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import Run, make_plan
from scipy import stats
from torch import Tensor, nn

from lit_dpret.callbacks import strategies
from lit_dpret.cards.card import build_card, subject_of
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.losses import SoftmaxPairLoss
from lit_dpret.privacy import noise
from lit_dpret.privacy.budget import ROUNDING_SHARE, NoiseName, PrivacyBudget, with_rounding_paid
from lit_dpret.privacy.histogram import histogram_plan
from lit_dpret.privacy.modes import DPSGD, BatchClip, LogitDP, PerExampleDuplicated, PublicPassages
from lit_dpret.privacy.modes.base import Update
from lit_dpret.privacy.noise import BLOCK, FloatNoise, GridNoise, KeyedStream, grid_bits, load_secret, noise_source
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan

SECRET = bytes(range(32))
STREAM = KeyedStream(SECRET, "run")


def draw(stream: KeyedStream, size: int = 10_000, **key: object) -> torch.Tensor:
    arguments = {"attempt": 0, "step": 0, "parameter": "w"} | key
    return stream.normal(torch.Size([size]), **arguments)  # type: ignore[arg-type]


def rounded(stream: KeyedStream, size: int = 10_000, **key: object) -> torch.Tensor:
    arguments = {"attempt": 0, "step": 0, "parameter": "w", "bits": 30} | key
    return stream.rounded_normal(torch.Size([size]), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("drawn", [draw, rounded])
@pytest.mark.parametrize("secure", [False, True])
def test_the_same_key_gives_the_same_noise_and_any_other_key_unrelated_noise(secure: bool, drawn: Any) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    base = drawn(stream)
    assert torch.equal(base, drawn(KeyedStream(SECRET, "run", secure_rng=secure)))
    changes: list[dict[str, Any]] = [{"step": 1}, {"attempt": 1}, {"parameter": "v"}, {"salt": "of another sum"}]
    others = [drawn(stream, **change) for change in changes]
    others += [drawn(stream, attempt=1, step=11), drawn(stream, attempt=11, step=1)]
    others += [drawn(KeyedStream(SECRET, "other", secure_rng=secure))]
    others += [drawn(KeyedStream(bytes(32), "run", secure_rng=secure))]
    correlations = torch.corrcoef(torch.stack([base, *others]).double()).fill_diagonal_(0.0)
    assert correlations.abs().max() < 0.06


def test_float64_parameters_get_float64_noise_and_bfloat16_ones_float32() -> None:
    stream = KeyedStream(SECRET, "run")
    assert stream.normal(torch.Size([2]), attempt=0, step=0, parameter="w", dtype=torch.float64).dtype == torch.float64
    assert stream.normal(torch.Size([2]), attempt=0, step=0, parameter="w", dtype=torch.bfloat16).dtype == torch.float32


def test_the_stream_cannot_be_pickled_into_a_checkpoint() -> None:
    with pytest.raises(ResumeError):
        pickle.dumps(KeyedStream(SECRET, "run"))


def test_a_secret_is_made_once_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secret"
    secret = load_secret(path)
    assert len(secret) == 32 and path.stat().st_mode & 0o777 == 0o600
    assert load_secret(path) == secret


def test_a_secret_in_the_run_folder_or_that_others_can_read_and_what_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="inside the run folder"):
        load_secret(tmp_path / "run" / "secret", run_dir=tmp_path / "run")
    load_secret(tmp_path / "secret")
    for content, mode, words in ((SECRET, 0o644, "0644"), (b"short", 0o600, "5 bytes")):
        (tmp_path / "secret").write_bytes(content)
        (tmp_path / "secret").chmod(mode)
        with pytest.raises(ConfigurationError, match=words):
            load_secret(tmp_path / "secret")


def test_a_tag_recognises_equal_bytes_and_needs_the_secret() -> None:
    stream = KeyedStream(SECRET, "run")
    assert stream.tag("t", b"ab", b"c") == stream.tag("t", b"abc")
    assert stream.tag("t", b"abc") != stream.tag("t", b"abd")
    assert stream.tag("t", b"abc") != KeyedStream(bytes(32), "run").tag("t", b"abc")


def test_seeds_that_agree_in_their_low_bits_still_give_unrelated_noise() -> None:
    """PyTorch's CPU generator keeps 32 bits of a seed; with 2000 steps of 126 tensors such seeds would collide."""
    stream = KeyedStream(SECRET, "run")
    known, seed = draw(stream, size=4), stream._digest("noise", 0, 0, "w", 0, "", 0)
    stream._digest = lambda *key, size=32: seed  # type: ignore[method-assign]
    assert torch.equal(draw(stream, size=4), known)
    stream._digest = lambda *key, size=32: seed[:4] + bytes(28)  # type: ignore[method-assign]
    assert not torch.equal(draw(stream, size=4), known)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_secure_noise_has_the_bits_of_the_cpu_whatever_its_size() -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=True)
    for size in (3, noise.FEW, noise.FEW + 1, 3_000_000):
        assert torch.equal(draw(stream, size=size, device="cuda").cpu(), draw(stream, size=size))
        assert torch.equal(rounded(stream, size, device="cuda").cpu(), rounded(stream, size))


def test_noise_for_a_device_that_cannot_draw_it_is_drawn_on_the_cpu() -> None:
    for kind in ("xla", "mps", "meta"):
        assert noise._drawn_on(torch.device(kind), 10**9).type == "cpu"
    assert noise._drawn_on("cuda", noise.FEW + 1).type == "cuda" and noise._drawn_on("cuda:1", noise.FEW).type == "cpu"


# -- blocks ------------------------------------------------------------------------------------

PARTS = [(0, 7), (BLOCK - 3, 9), (BLOCK, BLOCK), (BLOCK + 5, BLOCK), (2 * BLOCK + 11, 30), (0, 2 * BLOCK + 41)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("secure", [False, True])
def test_a_part_of_a_parameter_gets_the_noise_that_it_has_in_the_whole(secure: bool, dtype: torch.dtype) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    whole = draw(stream, size=2 * BLOCK + 41, dtype=dtype)
    for start, count in PARTS:
        assert torch.equal(draw(stream, size=count, start=start, dtype=dtype), whole[start : start + count])
    rows = stream.normal(torch.Size([41, 3]), attempt=0, step=0, parameter="w", start=BLOCK, dtype=dtype)
    assert torch.equal(rows.flatten(), whole[BLOCK : BLOCK + 123])


@pytest.mark.parametrize("secure", [False, True])
def test_what_surrounds_the_drawing_changes_no_number(secure: bool, set_threads: Callable[[int], None]) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    known = draw(stream, 3 * BLOCK), rounded(stream, 3 * BLOCK)
    for threads in (1, 3):
        set_threads(threads)
        for surrounded in (torch.inference_mode(), torch.no_grad(), torch.device("meta")):
            with surrounded:
                found = draw(stream, 3 * BLOCK), rounded(stream, 3 * BLOCK)
            assert all(map(torch.equal, found, known)), (threads, surrounded)
            assert torch.get_num_threads() == threads
            assert not any(each.is_inference() for each in found)


@pytest.mark.costly
def test_constants_of_secure_noise_are_made_on_the_cpu() -> None:
    """A process whose first import stands under another default device."""
    code = (
        "import torch\n"
        "with torch.device('meta'):\n"
        "    from lit_dpret.privacy.noise import KeyedStream\n"
        f"    streams = [KeyedStream({SECRET!r}, 'run', secure_rng=secure) for secure in (False, True)]\n"
        "    key = {'attempt': 0, 'step': 0, 'parameter': 'w'}\n"
        "    drawn = [(s.normal(torch.Size([9]), **key), s.rounded_normal(torch.Size([9]), bits=30, **key))\n"
        "             for s in streams]\n"
        "print([[each.tolist() for each in of_one] for of_one in drawn])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    streams = [KeyedStream(SECRET, "run", secure_rng=secure) for secure in (False, True)]
    assert found.strip() == str([[draw(s, 9).tolist(), rounded(s, 9).tolist()] for s in streams])


@pytest.mark.parametrize("secure", [False, True])
def test_blocks_are_unrelated_to_one_another_and_to_the_blocks_of_other_keys(secure: bool) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    blocks = list(draw(stream, size=3 * BLOCK).split(BLOCK))
    blocks += list(draw(stream, size=3 * BLOCK, step=1).split(BLOCK))
    blocks += list(draw(stream, size=3 * BLOCK, parameter="v").split(BLOCK))
    correlations = torch.corrcoef(torch.stack(blocks).double()).fill_diagonal_(0.0)
    assert correlations.abs().max() < 6 / BLOCK**0.5
    assert stats.kstest(torch.cat(blocks).double().numpy(), "norm").pvalue > 1e-4


def test_the_noise_of_no_coordinates_and_of_a_single_number_is_drawn() -> None:
    stream = KeyedStream(SECRET, "run")
    assert draw(stream, size=0).shape == (0,)
    assert stream.normal(torch.Size([]), attempt=0, step=0, parameter="w") == draw(stream, size=1)[0]


def test_a_part_is_drawn_without_the_memory_of_the_whole() -> None:
    tracemalloc.start()
    try:
        draw(KeyedStream(SECRET, "run"), size=100, start=10**12)
        assert tracemalloc.get_traced_memory()[1] < 4 * BLOCK + 100_000
    finally:
        tracemalloc.stop()


# -- noise on a public grid: rounding is paid for, and low bits tell nothing -------------------------------------


def on_grid(total: Tensor, *, std: float = 1.0, bits: int | None = None, **key: Any) -> Tensor:
    bits = grid_bits(1.0, total.numel()) if bits is None else bits
    return GridNoise(STREAM, bits).noised(total, std=std, **{"attempt": 0, "step": 0, "parameter": "w"} | key)


def test_what_is_released_are_whole_numbers_of_grid_steps_with_normal_noise() -> None:
    total = torch.linspace(-3, 3, 50_000, dtype=torch.float64)
    noised = on_grid(total, std=0.75, bits=20)
    steps = noised / (0.75 * 2.0**-20)
    assert torch.equal(steps, steps.round())
    assert stats.kstest(((noised - total) / 0.75).numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("coordinates", [1, 100, 40_000])
@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 50.0])
def test_rounding_never_moves_neighbours_further_apart_than_was_charged(
    coordinates: int, noise_multiplier: float
) -> None:
    """Random sums, and ones beside a half of a grid step, where all coordinates are rounded apart."""
    bits = grid_bits(noise_multiplier, coordinates)
    sensitivity = 1.0
    std = noise_multiplier * with_rounding_paid(sensitivity, "discrete")
    grid, random = std * 2.0**-bits, torch.Generator().manual_seed(0)
    worst = 0.0
    for trial in range(20):
        base = torch.randn(coordinates, generator=random, dtype=torch.float64) * 10
        if trial % 2:
            base = (base / grid).floor() * grid + 0.4999 * grid
        way = torch.ones_like(base) if trial % 4 == 1 else torch.randn(base.shape, generator=random, dtype=base.dtype)
        step = way / way.norm() * sensitivity
        step = ((step / grid - 0.001).floor() + 0.001) * grid if trial % 4 == 1 else step
        moved = (on_grid(base + step, std=std, bits=bits) - on_grid(base, std=std, bits=bits)).norm()
        assert step.norm() <= sensitivity * (1 + 1e-9)
        assert moved <= with_rounding_paid(sensitivity, "discrete") * (1 + 1e-10)
        worst = max(worst, float(moved - step.norm()))
    if coordinates == 40_000:
        assert worst > 0.1 * grid * math.sqrt(coordinates), "rounding does move sums apart, or nothing was tested"


def test_the_grid_is_as_fine_as_the_charge_asks_and_no_finer() -> None:
    for coordinates in (1, 3, 1000, 10**7, 3 * 10**9):
        for noise_multiplier in (0.2, 1.0, 20.0):
            grid = noise_multiplier * (1 + ROUNDING_SHARE) * 2.0 ** -grid_bits(noise_multiplier, coordinates)
            assert 2 * grid * math.sqrt(coordinates) <= ROUNDING_SHARE < 4 * grid * math.sqrt(coordinates) * (1 + 1e-6)


@pytest.mark.parametrize("word", ["off", 0, None])
def test_a_word_that_would_be_taken_for_true_does_not_choose_the_generator(word: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.secure_rng"):
        DPSGD(eps=1.0, secure_rng=word)


def test_noise_that_needs_a_finer_grid_than_integers_hold_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.noise=gaussian"):
        grid_bits(1e9, 10**12)


def test_sums_that_are_too_large_or_no_numbers_are_cut_and_the_sum_itself_is_left_alone() -> None:
    total = torch.tensor([math.inf, -math.inf, math.nan, 1e300, 1.0], dtype=torch.float64)
    before = total.clone()
    noised = on_grid(total, bits=30)
    assert noised.isfinite().all() and noised[0] > 2.0**21 and noised[1] < -(2.0**21)
    assert abs(noised[2]) < 10 and noised[3] == pytest.approx(2.0**22, rel=1e-4)
    assert torch.equal(total.nan_to_num(), before.nan_to_num())


def test_a_part_of_a_sum_gets_the_noise_of_its_place_whatever_else_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    total = torch.randn(3 * BLOCK + 17)
    whole = on_grid(total, bits=25)
    for start, size in ((0, 5), (BLOCK - 3, 7), (BLOCK, BLOCK), (2 * BLOCK + 1, BLOCK + 16)):
        part = on_grid(total[start : start + size], bits=25, start=start)
        assert torch.equal(part, whole[start : start + size])
    monkeypatch.setattr("lit_dpret.privacy.noise._AT_ONCE", BLOCK + 5)
    assert torch.equal(on_grid(total, bits=25), whole)
    assert not torch.equal(on_grid(total, bits=25, salt="another"), whole)
    shaped = on_grid(total[:12].reshape(3, 4), bits=25)
    assert shaped.shape == (3, 4) and torch.equal(shaped.flatten(), whole[:12]) and shaped.dtype == torch.float32


# -- an attack on the low bits ----------------------------------------------------------------


def attached(noise: NoiseName, module: nn.Module | None = None, **settings: Any) -> DPSGD:
    module = nn.Linear(64, 64, bias=False) if module is None else module
    mode = DPSGD(eps=50.0, noise=noise, **settings)
    plan = PrivacyPlan.build(
        PrivacyBudget(eps=50.0, delta=1e-3), PlainSamplingRequest(sampling="poisson", expected_batch_size=64),
        steps=1, max_grad_norm=1.0, n_public=128, noise_multiplier=1.0, noise=noise,
    )  # fmt: skip
    mode.attach(module, plan, STREAM)
    return mode


def released(noise: NoiseName, value: float, step: int) -> Tensor:
    update: Update = attached(noise).privatize({"weight": torch.full((64, 64), value)}, attempt=0, step=step)
    return update.gradients["weight"].double() * update.denominator


def told_by_low_bits(output: Tensor) -> bool:
    """Whether a sum of 1 stands behind the output, by its bits below 2^-24 (Mironov 2012).

    A normal nearer to 0 than 1/4 has some; 1 plus a normal, added in float32, never does.
    """
    near = output[output.abs() < 0.25] * 2.0**24
    return bool((near == near.round()).double().mean() > 0.9)


def test_low_bits_of_floating_point_noise_tell_neighbours_apart_and_those_on_a_grid_do_not() -> None:
    found = {
        noise: [told_by_low_bits(released(noise, value, step)) for value in (0.0, 1.0) for step in range(8)]
        for noise in ("gaussian", "discrete")
    }
    assert found["gaussian"] == [False] * 8 + [True] * 8, "the attack works, so its failure means something"
    assert found["discrete"] == [False] * 16


# -- modes, plans, cards ----------------------------------------------------------------------


def settings_of(mode: type) -> dict[str, Any]:
    return {"max_logit_grad_norm": 1.0} if mode is LogitDP else {"max_grad_norm": 1.0}


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = SoftmaxPairLoss(temperature=0.5)
        self.pair_loss = lambda expected: self.loss
        self.pair_batch = None


class Asked:
    sampling, sample_rate, expected_batch_size, cap = "poisson", None, 20, None
    physical_batch_size, rows_per_unit = 20, "one"


@pytest.mark.parametrize("mode", [DPSGD, BatchClip, LogitDP, PerExampleDuplicated, PublicPassages, None])
def test_every_mode_charges_the_rounding_and_nothing_else_changes(mode: type | None) -> None:
    budget = PrivacyBudget(eps=9.0, delta=1e-5)
    plans = [
        histogram_plan(budget, noise_multiplier=5.0, noise=noise)
        if mode is None
        else mode(eps=8.0, delta=1e-4, noise_multiplier=30.0, noise=noise, **settings_of(mode)).plan(
            Asked(), units=1000, steps=3, module=Pairs()
        )
        for noise in ("gaussian", "discrete")
    ]
    assert plans[1].sensitivity == pytest.approx(plans[0].sensitivity * (1 + ROUNDING_SHARE), rel=1e-14)
    assert replace(plans[1], noise="gaussian", sensitivity=plans[0].sensitivity) == plans[0]
    assert plans[0].epsilon() == plans[1].epsilon() and plans[1].noise_std > plans[0].noise_std
    assert PrivacyPlan.from_dict(plans[1].to_dict()) == plans[1]


def test_the_source_follows_the_plan_and_its_grid_all_coordinates() -> None:
    assert isinstance(attached("gaussian")._noise, FloatNoise)
    source = attached("discrete", nn.Linear(300, 300))._noise
    assert source == noise_source("discrete", STREAM, noise_multiplier=1.0, coordinates=300 * 300 + 300 + 1)


def test_a_parameter_that_lies_on_other_processes_counts_with_all_its_coordinates() -> None:
    module = nn.Linear(300, 300)
    whole = attached("discrete", module)._noise
    for parameter in module.parameters():
        parameter.ds_numel = parameter.numel()  # as DeepSpeed leaves a parameter of ZeRO-3
        parameter.data = torch.empty(0)
    assert attached("discrete", module)._noise == whole


def test_the_count_of_clipped_units_gets_noise_on_the_grid_as_well() -> None:
    update = attached("discrete").privatize({"weight": torch.zeros(64, 64)}, attempt=0, step=0)
    assert update.clip_fraction is None
    mode = attached("discrete")
    mode._plan = replace(
        mode._plan, clip_fraction_budget=0.1, sensitivity=with_rounding_paid(1 / math.sqrt(0.9), "discrete")
    )
    counted = {"weight": torch.zeros(64, 64), **mode.extra_sums()}
    fractions = [mode.privatize(dict(counted), attempt=0, step=step).clip_fraction for step in range(3)]
    assert len(set(fractions)) == 3 and all(f is not None and math.isfinite(f) for f in fractions)


def test_an_unknown_noise_is_refused_by_name_and_an_untried_strategy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.noise"):
        DPSGD(eps=1.0, noise="laplace")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"privacy\.noise"):
        replace(make_plan(), noise="laplace")  # type: ignore[arg-type]

    trainer: Any = None
    for name in ("xla", "xla_processes"):
        monkeypatch.setattr(strategies, "strategy_name", lambda trainer, name=name: name)
        with pytest.raises(ConfigurationError, match=r"privacy\.noise=gaussian"):
            strategies.refuse_unsupported(trainer, DPSGD(eps=1.0, noise="discrete"))
        strategies.refuse_unsupported(trainer, DPSGD(eps=1.0))


def grid_plan() -> PrivacyPlan:
    plain = make_plan()
    return replace(plain, noise="discrete", sensitivity=with_rounding_paid(plain.sensitivity, "discrete"))


def card_of(folder: Path, plan: PrivacyPlan, start: dict[str, Any] | None = None) -> dict[str, Any]:
    run = Run(folder / "run", plan)
    if start is not None:
        run.ledger.append("event", name="init_from", start=start)
    run.train()
    return build_card(run.ledger.records, subject_of("weights", "x", []))


def floating(card: dict[str, Any]) -> bool:
    return any("floating-point form" in gap for gap in card["not_covered"])


def test_the_card_drops_the_attacks_on_floating_point_noise_and_says_what_it_still_rests_on(tmp_path: Path) -> None:
    plain, grid = card_of(tmp_path / "a", make_plan()), card_of(tmp_path / "b", grid_plan())
    assert (floating(plain), floating(grid)) == (True, False)
    assert [card["randomness"]["floating_point"] for card in (plain, grid)] == [True, False]
    assert [card["mechanism"]["noise"] for card in (plain, grid)] == ["gaussian", "discrete"]
    (rests,) = [a for a in grid["assumptions"] if "public grid" in a["text"]]
    assert rests["holds"] == "unverified" and "additions in floating point" in rests["text"]
    assert plain["claim"]["epsilon"] == grid["claim"]["epsilon"]


@pytest.mark.parametrize(
    ("start", "told"),
    [
        ({"public": True}, False),
        ({"randomness": {"rng": "ChaCha20", "secure": True, "floating_point": True}}, True),
        ({"randomness": {"rng": "ChaCha20", "secure": True, "floating_point": False}}, False),
        ({}, True),
    ],
)
def test_a_run_that_started_from_floating_point_noise_does_not_drop_its_attacks(
    start: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    facts = {"name": "s", "card_sha256": "0" * 64, "public": False, "guarantee": "dp", "releases": [], "parents": []}
    assert floating(card_of(tmp_path, grid_plan(), facts | start)) is told
