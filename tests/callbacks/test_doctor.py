"""Every trap that can be refused is refused by name, by the doctor and by a fit: the same checks, told and raised."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_runs import BAD, Case, bare, case_of
from pair_stand_ins import Pairs, data_module
from stand_ins import Numbers, Regression, dp

from lit_dpret.callbacks import examine
from lit_dpret.callbacks.traps import TRAPS
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.privacy.modes import LogitDP, NoPrivacy
from lit_dpret.tasks.doctor import Doctor
from lit_dpret.tasks.parts import Parts


@pytest.mark.costly
@pytest.mark.parametrize(("trap", "words", "change"), BAD, ids=[f"{trap}-{words[:30]}" for trap, words, _ in BAD])
def test_a_trap_is_refused_by_the_doctor_and_by_a_fit_in_the_same_words(
    trap: str, words: str, change: Any, tmp_path: Path
) -> None:
    found = case_of(tmp_path, change).examined()
    assert [finding.trap for finding in found.refused] == [trap], found.format()
    with pytest.raises(LitDpretError, match=words) as raised:
        case_of(tmp_path, change).fitted()
    assert raised.value.trap == trap
    told, said = (re.sub(r"\d+", "#", text) for text in (found.refused[0].text, str(raised.value)))
    assert told == said, "both may meet the same mistake in another row or another batch"
    assert not (tmp_path / "run" / "privacy_card.json").exists()


def test_every_trap_that_is_looked_for_has_a_bad_run_here() -> None:
    assert {trap.name for trap in TRAPS if trap.stage not in ("construction", "elsewhere")} == {t for t, _, _ in BAD}
    numbers = [int(trap.name.removeprefix("T")) for trap in TRAPS]
    assert numbers == sorted(set(numbers))


def test_an_honest_run_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    case = Case(tmp_path)
    module, data = case.module(), case.data_module()
    before, random = [p.detach().clone() for p in module.parameters()], torch.get_rng_state()
    trainer = case.make_trainer(default_root_dir=tmp_path / "run", callbacks=case.all_callbacks())
    found = examine(trainer, module, data)
    assert not found.refused
    statuses = {finding.trap: finding.status for finding in found.findings}
    unseen = {"construction": "by construction", "elsewhere": "yours"}
    large_delta = {"T29": "yours"}  # 1/(2n) of these units
    assert statuses == {trap.name: unseen.get(trap.stage, "passed") for trap in TRAPS} | large_delta
    assert {finding.trap: finding.severity for finding in found.findings} == {t.name: t.severity for t in TRAPS}
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(module.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not list((tmp_path / "run").glob("*")), "nothing was released, so nothing is in the ledger"
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 2


def test_all_refusals_are_told_at_once(tmp_path: Path) -> None:
    found = Case(tmp_path, trainer={"gradient_clip_val": 1.0, "limit_train_batches": 0.5}, wrap=bare).examined()
    assert [finding.trap for finding in found.refused] == ["T2", "T13", "T16"]
    reached = {finding.trap: finding.status for finding in found.findings}
    assert reached["T9"] == "not reached" and reached["T1"] == "passed"


def test_a_refusal_that_is_no_trap_is_told_too(tmp_path: Path) -> None:
    found = Case(tmp_path, mode={"noise_multiplier": 0.01}).examined()
    assert [(f.trap, f.text.split("=")[0]) for f in found.refused] == [("other", "privacy.noise_multiplier")]
    assert found.planned is None and {f.trap: f.status for f in found.findings}["T1"] == "not reached"


def test_a_data_set_of_one_unit_is_not_said_to_couple_nothing(tmp_path: Path) -> None:
    found = Case(tmp_path, data={"size": 1, "expected_batch_size": 1}, mode={"noise_multiplier": 40.0}).examined()
    assert {f.trap: f.status for f in found.findings}["T11"] == "not reached"


def logging(module: Regression) -> Regression:
    module.log_private_loss = True
    return module


@pytest.mark.parametrize(("trap", "change"), [("T25", {"wrap": logging}), ("T21", {"mode": {"noise_seed": 0}})])
def test_a_leak_that_a_setting_asks_for_is_told_without_being_refused(
    trap: str, change: dict[str, Any], tmp_path: Path
) -> None:
    found = case_of(tmp_path, change).examined()
    assert not found.refused
    assert [f.trap for f in found.findings if f.status == "declared"] == [trap]


def test_a_run_without_a_claim_has_none_to_lose(tmp_path: Path) -> None:
    found = Case(tmp_path, make_mode=NoPrivacy, trainer={"limit_train_batches": 0.5}).examined()
    assert not found.refused and {f.trap: f.status for f in found.findings}["T25"] == "does not apply"


def test_python_is_told_of_settings_by_its_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_dpret.errors.on_command_line", False)
    found = Case(tmp_path, wrap=logging, mode={"noise_seed": 0, "noise_multiplier": 0.01}).examined()
    texts = {finding.trap: finding.text for finding in found.findings}
    assert (
        "; secure_rng=True uses" in texts["T22"] and "(PrivacyCard(tuning_method=...), lit-dpret task=" in texts["T28"]
    )
    assert texts["other"].startswith("noise_multiplier=0.01 ")
    found = Case(tmp_path, wrap=logging, mode={"noise_seed": 0}).examined()
    texts = {finding.trap: finding.text for finding in found.findings}
    assert texts["T25"].startswith("log_private_loss=True ") and texts["T21"].startswith("noise_seed=0 ")
    assert "Set delta=" in texts["T29"] and "Set delta=" in found.to_dict()["cautions"][0]
    none = Case(tmp_path, make_mode=NoPrivacy).examined()
    assert "privacy=NoPrivacy makes no claim" in {finding.trap: finding.text for finding in none.findings}["T25"]


@pytest.mark.parametrize("bad", [False, True])
def test_the_task_writes_its_findings_and_raises_where_something_is_refused(
    bad: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path, trainer={"limit_train_batches": 0.5} if bad else {})
    parts = Parts(
        run_dir=tmp_path / "run",
        make_privacy=lambda: dp(tmp_path, noise_multiplier=4.0),
        make_datamodule=lambda: Numbers(sampling="poisson"),
        make_module=Regression,
        make_trainer=case.make_trainer,
        make_callbacks=case.all_callbacks,
    )
    if bad:
        with pytest.raises(ConfigurationError, match=r"would be refused \(T2\)"):
            Doctor().run(parts)
    else:
        assert Doctor().run(parts)["passed"] > 10
    report = json.loads((tmp_path / "run" / "doctor.json").read_text(encoding="utf-8"))
    assert report["verdict"] == ("refused" if bad else "passed") and report["privacy"] == "dp_sgd"
    assert report["plan"]["noise_multiplier"] == 4.0
    told = capsys.readouterr().out
    assert all(f"{trap.name:5} " in told and trap.title in told for trap in TRAPS) and ("REFUSED" in told) is bad
    assert "Planned: 2 steps by Poisson sampling" in told
    assert report["cautions"] and all(f"note: {caution}" in told for caution in report["cautions"])
    # 1/(2n) of these units is more than usual: not plainly passed.
    (of_delta,) = [finding for finding in report["findings"] if finding["trap"] == "T29"]
    assert of_delta["status"] == "yours" and "privacy.delta" in of_delta["text"]
    yours = [finding["trap"] for finding in report["findings"] if finding["status"] == "yours"]
    assert f": {', '.join(yours)}." in told


@pytest.mark.parametrize(("rule", "status"), [("proof", "passed"), ("paper", "declared")])
def test_a_loss_that_couples_units_is_told_with_what_bounds_it(rule: Any, status: str, tmp_path: Path) -> None:
    mode = LogitDP(
        eps=3.0, delta=1e-3, noise_multiplier=20.0, max_logit_grad_norm=0.1, sensitivity=rule, n_max=4,
        secret_file=tmp_path / "secret",
    )  # fmt: skip
    sampling = {"sampling": "truncated_poisson", "cap": 4, "expected_batch_size": 4, "physical_batch_size": 4}
    data = data_module(tmp_path / "data", **sampling)
    trainer = Case(tmp_path).make_trainer(default_root_dir=tmp_path / "run", callbacks=Case(tmp_path).all_callbacks())
    found = examine(trainer, Pairs(privacy=mode), data)
    assert not found.refused, found.format()
    told = next(finding for finding in found.findings if finding.trap == "T11")
    assert told.status == status
    assert "at most 4 units" in told.text and "one unit moves the sum" in told.text
    assert ("refuted" in told.text) == (rule == "paper")
