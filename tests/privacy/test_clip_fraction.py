"""The share of clipped units: what it costs, how much noise it gets, and that it is told only where it is paid for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from stand_ins import KillAt, Killed, Line, Numbers, Regression, Words, dp, fit

from lit_dpret.audit.testing import assert_private
from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.callbacks.progress import Throughput
from lit_dpret.cards.check import verify_card
from lit_dpret.cards.file import read_card
from lit_dpret.cards.forecast import describe_plan
from lit_dpret.errors import ConfigurationError, PrivacyViolation
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.batches import Draw
from lit_dpret.privacy.budget import Neighbours, PrivacyBudget
from lit_dpret.privacy.collation import UnitCollator
from lit_dpret.privacy.modes import DPSGD, PublicPassages, StepCounts, Update
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan
from lit_dpret.tasks.plan import format_plan

SHARE = 0.1


def plan(share: float = SHARE, **changes: Any) -> PrivacyPlan:
    settings: dict[str, Any] = {
        "budget": PrivacyBudget(eps=2.0, delta=1e-5),
        "request": PlainSamplingRequest(sampling="full_batch", expected_batch_size=100),
        "steps": 1, "max_grad_norm": 0.7, "n_public": 100, "noise_multiplier": 3.0,
    }  # fmt: skip
    return PrivacyPlan.build(clip_fraction_budget=share, **settings | changes)


def attached() -> DPSGD:
    mode = DPSGD(eps=2.0)
    mode.attach(torch.nn.Linear(3, 1), plan(), KeyedStream(b"k" * 32, "run"))
    return mode


def privatized(mode: DPSGD, *, clipped: int, within: int, step: int = 0, **key: Any) -> Update:
    """The update of a step with those counts and no gradient."""
    mode.counts = StepCounts(units=clipped + within, clipped=clipped, within=within)
    sums = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)} | mode.extra_sums()
    return mode.privatize(sums, **{"attempt": 0, "step": step, "salt": "s"} | key)


def logged(folder: Path) -> dict[int, float]:
    """The share that a run wrote for each logical step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    told = {(line["step"], line["privacy/clip_fraction"]) for line in lines if "privacy/clip_fraction" in line}
    assert len(told) == len(dict(told)), "two shares for one step"
    return dict(told)


def test_a_unit_moves_gradient_and_count_together_by_the_sensitivity_and_no_more() -> None:
    bound, least = plan().sensitivity, math.inf
    for norm in torch.linspace(0, 3, 301).tolist():
        clipped = norm > 0.7
        count = clip_fraction.coordinate(int(clipped), int(not clipped), max_grad_norm=0.7, share=SHARE)
        moved = math.hypot(min(norm, 0.7), count)
        assert moved <= bound * (1 + 1e-12)
        least = min(least, bound - moved)
    assert least < 1e-12, "the bound is reached, so it is not wider than it has to be"
    assert bound == pytest.approx(0.7 / math.sqrt(0.9))
    both = [clip_fraction.coordinate(b, 1 - b, max_grad_norm=0.7, share=SHARE) for b in (0, 1)]
    assert math.hypot(1.4, both[1] - both[0]) == pytest.approx(2 * bound), "a unit that is replaced: twice that"


def test_the_budget_and_the_noise_multiplier_stay_and_the_gradient_pays_with_more_noise() -> None:
    settings = {
        "budget": PrivacyBudget(eps=1.0, delta=1e-5),
        "noise_multiplier": None,
        "request": PlainSamplingRequest(sampling="poisson", expected_batch_size=100),
        "steps": 20,
    }
    without, with_count = plan(0.0, **settings), plan(**settings)
    assert with_count.noise_multiplier == without.noise_multiplier and with_count.epsilon() == without.epsilon() <= 1.0
    assert with_count.noise_std == pytest.approx(without.noise_std / math.sqrt(1 - SHARE))
    assert without.fingerprint() != with_count.fingerprint()
    assert PrivacyPlan.from_dict(json.loads(json.dumps(with_count.to_dict()))) == with_count
    told = [format_plan(describe_plan(each)) for each in (without, with_count)]
    assert [("share of clipped" in text) for text in told] == [False, True]


def test_the_noise_in_the_share_is_what_the_sensitivity_asks_for_and_new_every_time() -> None:
    mode, count = attached(), 400
    seen = []
    for step in range(count):
        update = privatized(mode, clipped=30, within=70, step=step)
        assert update.clip_fraction is not None and update.noise_std == mode._plan.noise_std
        seen.append((update.clip_fraction, float(update.gradients["bias"])))
    errors, gradients = torch.tensor(seen, dtype=torch.float64).unbind(1)
    stated = clip_fraction.deviation(3.0, share=SHARE, denominator=100.0)
    squares = float(((errors - 0.3) / stated).square().sum())
    assert chi2.ppf(1e-6, count) < squares < chi2.ppf(1 - 1e-6, count)
    assert abs(float(torch.corrcoef(torch.stack([errors, gradients]))[0, 1])) < 5 / math.sqrt(count)
    assert len(set(errors.tolist())) == count
    keys = ((0, "s"), (1, "s"), (0, "t"), (0, "s"))
    once = [privatized(mode, clipped=30, within=70, attempt=a, salt=salt).clip_fraction for a, salt in keys]
    assert once[0] == once[3] == seen[0][0] and len(set(once)) == 3


def test_a_count_that_the_guard_was_not_shown_is_not_released() -> None:
    mode = attached()
    mode.counts = StepCounts(units=10, clipped=3, within=7)
    with pytest.raises(ConfigurationError, match=r"add privacy\.extra_sums\(\) to the sums"):
        mode.privatize({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, attempt=0, step=0)


def summed(mode: DPSGD, units: list[bool], neighbours: Neighbours) -> tuple[dict[str, torch.Tensor], PrivacyPlan]:
    """The sums of one physical batch of units that have rows or none; equal weights and numbers each time."""
    torch.manual_seed(0)
    module = Regression(privacy=mode, dropout=0.0)
    module.takes_public_passages = True  # type: ignore[assignment]
    agreed = plan(budget=PrivacyBudget(eps=2.0, delta=1e-5, neighbours=neighbours), max_grad_norm=mode.max_grad_norm,
                  engine=mode.engine, clip=mode.clip, clip_groups=mode.clip_groups, mode=mode.name)  # fmt: skip
    stream = KeyedStream(b"k" * 32, "run")
    mode.attach(module, agreed, stream)
    module.receive_guard(SimpleNamespace(stream=stream, attempt=0))
    mode.candidates = "pool"  # type: ignore[misc]
    items = [
        (Draw(unit, 0, 0, unit == len(units) - 1), [Line(f"q{unit}", f"{unit}", f"p{unit}", "1", frozenset())] * rows)
        for unit, rows in enumerate(units)
    ]
    module._contribute(UnitCollator(module.collate_rows)(items), 0)
    return mode.take() | mode.extra_sums(), agreed


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


MECHANISMS: dict[str, tuple[type[DPSGD], dict[str, Any]]] = {
    **{f"{engine}, {groups}, {clip}": (DPSGD, {"engine": engine, "clip_groups": groups, "clip": clip})
       for engine in ("ghost", "vmap", "opacus", "loop") for groups in ("flat", "per_layer")
       for clip in ("abadi", "automatic")},
    **{f"full pool, {at} at once": (PublicPassages, {"passage_gradient": "full", "units_at_once": at})
       for at in (1, 2, 8)},
}  # fmt: skip


@pytest.mark.like(4)
@pytest.mark.parametrize("name", list(MECHANISMS))
@pytest.mark.parametrize("bound", [1e-3, 1e3])
def test_no_unit_moves_the_sum_further_whether_it_is_emptied_or_taken_out(name: str, bound: float) -> None:
    kind, settings = MECHANISMS[name]

    def of(units: list[bool], neighbours: Neighbours) -> tuple[dict[str, torch.Tensor], PrivacyPlan]:
        chosen = {"eps": 2.0, "max_grad_norm": bound, "clip_fraction_budget": SHARE} | settings
        return summed(kind(**chosen), units, neighbours)

    for company in ([], [False] * 5, [True] * 3, [True, False, True, False]):
        whole, agreed = of([*company, True], "zero_out")
        emptied, _ = of([*company, False], "zero_out")
        without, _ = of(company, "add_or_remove") if company else (emptied, agreed)
        for neighbour in (emptied, without):
            moved = apart(whole, neighbour) / agreed.sensitivity
            assert moved <= 1 + 1e-5
            # automatic clipping keeps below its bound by a share that depends on the norm
            least = 0.9 if settings.get("clip") == "automatic" else 0.99
            assert bound > 1 or moved > least, "clipping and the count are put to the test"


@pytest.mark.slow
@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
def test_the_sum_of_a_module_with_its_count_keeps_the_bound(clip_groups: Any) -> None:
    targets = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    rows = {"token": torch.arange(6) % 5, "target": targets}
    report = assert_private(Words(clip_fraction_budget=SHARE, clip_groups=clip_groups), rows, 1.0, 1e-5, trials=60)
    # Without its bit the loudest unit would move the sum by sqrt(0.9) = 0.949 of the bound at most.
    # In float32 it is clipped to 1 / 1.005 of it, so that rounding stays within.
    assert clip_groups == "per_layer" or report.sensitivity > 0.995


@pytest.mark.costly
def test_a_count_that_is_too_large_for_its_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = clip_fraction.coordinate
    monkeypatch.setattr(clip_fraction, "coordinate", lambda *args, **facts: 2 * real(*args, **facts))
    with pytest.raises(PrivacyViolation, match="sensitivity"):
        Words(clip_fraction_budget=SHARE).check()


@pytest.mark.costly
@pytest.mark.parametrize(("bound", "expected"), [(1e-4, 1.0), (1e4, 0.0)])
def test_a_run_tells_the_share_under_noise_and_its_ledger_and_card_stand_for_it(
    bound: float, expected: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    mode = dp(tmp_path, max_grad_norm=bound, clip_fraction_budget=SHARE)
    data = Numbers(size=400, expected_batch_size=200, physical_batch_size=64)
    mode.noise_multiplier, mode.eps = 6.0, 50.0
    fit(folder, Regression(privacy=mode), data, steps=6, extra=[PrivacyCard(run_dir=folder), Throughput(every=3)])
    seen = list(logged(folder).values())
    # 200 units on average: the share is seen with 0.047 by its noise, and moves by 0.025 with how many were drawn.
    assert len(seen) == 6 and abs(sum(seen) / 6 - expected) < 6 * 0.055 / math.sqrt(6)
    assert len({round(value, 9) for value in seen}) == 6 and not {0.0, 1.0} & set(seen)
    assert capsys.readouterr().err.count("of the units clipped (noised)") == 2
    records = [json.loads(line) for line in (folder / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    released = [record for record in records if record["kind"] == "release"]
    assert [record["sensitivity"] for record in released] == pytest.approx([bound / math.sqrt(1 - SHARE)] * 6)
    assert [record["noise_std"] / record["sensitivity"] for record in released] == pytest.approx([6.0] * 6)
    assert all("clipped" not in record for record in records)
    card = read_card(folder)
    assert card["mechanism"]["clip_fraction"] == {
        "budget": SHARE,
        "standard_deviation": pytest.approx(0.04743, rel=1e-3),
    }
    assert verify_card(card, folder / "privacy_ledger.jsonl", folder=folder / "model") == []


@pytest.mark.slow
def test_a_run_that_does_not_pay_for_the_share_tells_nothing_of_it(tmp_path: Path) -> None:
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), extra=[PrivacyCard(run_dir=tmp_path / "run")])
    assert not logged(tmp_path / "run")
    text = "".join(f.read_text(encoding="utf-8") for f in (tmp_path / "run").glob("*.*l*"))
    assert '"clip_fraction"' not in text and '"clipped' not in text and "share of clipped" not in text


@pytest.mark.slow
def test_a_step_that_is_repeated_tells_the_share_that_it_told_before(tmp_path: Path) -> None:
    def run(name: str, *, resume: bool = True, **settings: Any) -> dict[int, float]:
        torch.manual_seed(0)
        module = Regression(privacy=dp(tmp_path, clip_fraction_budget=SHARE))
        accountant = PrivacyAccountant(run_dir=tmp_path / name, resume=resume, eps_log_points=1)
        try:
            fit(tmp_path / name, module, accountant=accountant, resume=resume, **settings)
        except Killed:
            accountant.ledger.close()
        return logged(tmp_path / name)

    first = run("run", resume=False, extra=[KillAt(3)])
    again = run("run")
    (tmp_path / "whole").mkdir()
    begun = (tmp_path / "run" / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "whole" / "privacy_ledger.jsonl").write_text(begun[0] + "\n", encoding="utf-8")
    assert '"replay"' in "".join(begun) and len(first) == 3 and len(again) == 6
    assert first.items() < again.items() and again == run("whole")


@pytest.mark.parametrize("share", [0, -0.1, 0.2, math.nan, math.inf, True, "much"])
def test_a_share_that_makes_no_sense_is_refused_by_name(share: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.clip_fraction_budget="):
        DPSGD(eps=1.0, clip_fraction_budget=share)


def test_a_plan_whose_sensitivity_leaves_the_count_out_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not cover the count"):
        replace(plan(), sensitivity=0.7)
    with pytest.raises(ConfigurationError, match="clip_fraction_budget"):
        replace(plan(0.0), clip_fraction_budget=0.5)
