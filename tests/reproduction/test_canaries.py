"""The canary study and the audit of a run, from planting to the table, the card and the exit status."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import parts

sys.path.insert(0, str(Path(__file__).parents[1] / "audit" / "canaries"))
from conftest import digit_module

from lit_dpret.audit.canaries import CANARIES, CanarySuite, read_canaries, write_canaries
from lit_dpret.cards.card import read_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError, PrivacyViolation, ResumeError
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, LogitDP, NoPrivacy
from lit_dpret.tasks import Audit, Fit
from lit_dpret.tasks.audit import Measurement
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.pipeline_stages import stage_callbacks
from reproduction import CanaryStudy, canary_study

MEASURE = Measurement(draws=2, max_new_tokens=24)
SUITE = CanarySuite(kinds=("digits", "own_passage"), repetitions=(1, 2), candidates=5, seed=7)


def study(**changes: Any) -> CanaryStudy:
    settings: dict[str, Any] = {
        "generator": partial(digit_module), "canaries": SUITE, "measure": MEASURE, "trainings": 2, "steps": 2,
        "batch": 8, "min_free_mb": 1,
    }  # fmt: skip
    return CanaryStudy(**settings | changes)


def private(tmp_path: Path, **changes: Any) -> Parts:
    return parts(tmp_path, partial(DPSGD, eps=8.0, noise_multiplier=2.0, secret_file=tmp_path / "secret"), **changes)


def run_with_canaries(tmp_path: Path, privacy: Any, *, suite: CanarySuite | None = SUITE, steps: int = 2) -> Path:
    """``task=fit`` with canaries; returns the run folder."""
    run = tmp_path / "trained"
    made = parts(tmp_path, privacy, run_dir=run)
    Fit(min_free_mb=1).run(
        replace(
            made,
            make_datamodule=lambda: PairsDataModule(folder=tmp_path / "log", sampling="poisson", expected_batch_size=8),
            make_module=partial(digit_module),
            make_trainer=partial(made.make_trainer, max_steps=steps),
            make_callbacks=lambda: stage_callbacks(run, resume=False, label="run"),
            make_canaries=lambda: suite,
        )
    )
    return run


def forgetful(**settings: Any) -> Any:
    """A generator that learns so slowly that it learns nothing."""
    return digit_module(optimizer=OptimizerSpec(name="sgd", lr=1e-9), **settings)


def test_a_model_that_stays_takes_no_canaries_from_peoples_queries(tmp_path: Path) -> None:
    suite = replace(SUITE, queries="dev")
    with pytest.raises(ConfigurationError, match=r"canaries\.queries=dev"):
        run_with_canaries(tmp_path, partial(DPSGD, eps=8.0, secret_file=tmp_path / "secret"), suite=suite)
    assert not (tmp_path / "trained" / "privacy_ledger.jsonl").exists()
    with pytest.raises(ConfigurationError, match=r"task\.canaries\.queries=dev"):
        study(canaries=suite, keep_models=True)
    with pytest.raises(ConfigurationError, match=r"^task\.canaries\.count=0 "):
        study(canaries=replace(SUITE, count=0))
    study(canaries=suite)


@pytest.mark.parametrize(
    ("side", "limits"), [("query", {"max_query_length": 9}), ("passage", {"max_passage_length": 9})]
)
def test_a_secret_that_the_model_would_cut_is_refused_before_canaries_are_written(
    side: Any, limits: dict[str, int], tmp_path: Path
) -> None:
    run, suite = tmp_path / "trained", replace(SUITE, sides=(side,))
    made = parts(tmp_path, NoPrivacy, run_dir=run)
    data = PairsDataModule(folder=tmp_path / "log", sampling="shuffle", expected_batch_size=8)
    fit = replace(
        made, make_datamodule=lambda: data, make_module=partial(digit_module, **limits), make_canaries=lambda: suite,
        make_callbacks=lambda: stage_callbacks(run, resume=False, label="run"),
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=rf"its {side} is longer than model\.max_{side}_length=9"):
        Fit(min_free_mb=1).run(fit)
    assert not (run / CANARIES).exists()


# -- the study ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_study_writes_its_table_in_every_form_with_ceilings_beside_the_private_rows(tmp_path: Path) -> None:
    made = private(tmp_path)
    told = study(generator=forgetful).run(made)
    report = json.loads((made.run_dir / "canaries.json").read_text(encoding="utf-8"))
    assert report["contradictions"] == [] and report["planted_units"] == SUITE.units == 6
    rows = report["rows"]
    assert {row["model"] for row in rows} == {"no privacy", "eps = 16"} and len(told) == len(rows) == 12
    for row in rows:
        claimed = row["model"] != "no privacy"
        assert (row["limits"]["eps"] is not None) == claimed
        assert row["trainings"] == 2 and row["canaries"] == (4 if row["kind"] == "three kinds" else 2)
        if claimed:
            assert row["group_privacy"]["eps"] == pytest.approx(row["copies"] * row["limits"]["eps"])
            assert row["group_privacy"]["delta"] >= row["limits"]["delta"]
            assert 0.2 < row["limits"]["top"] <= 1 and row["limits"]["eps"] <= 16
    with (made.run_dir / "canaries.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 12
    for suffix in ("md", "html"):
        page = (made.run_dir / f"canaries.{suffix}").read_text(encoding="utf-8")
        assert "absence of evidence is no guarantee" in page and "release none of them" in page


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = private(tmp_path)
    trained: list[Path] = []
    real = canary_study.train_retriever

    def counted(model: Any, data: Any, folder: Path, **settings: Any) -> None:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(folder)
        real(model, data, folder, **settings)

    monkeypatch.setattr(canary_study, "train_retriever", counted)
    with pytest.raises(KeyboardInterrupt):
        study(generator=forgetful).run(made)
    assert [folder.name for folder in trained] == ["none-0", "eps16-0", "none-1"]
    before = (made.run_dir / "none-0" / "stage.json").read_bytes()
    with pytest.raises(ResumeError):
        study(generator=forgetful).run(made)
    monkeypatch.setattr(canary_study, "train_retriever", real)
    study(generator=forgetful, trainings=2).run(replace(made, resume=True))
    study(generator=forgetful, trainings=3, eps=[None]).run(replace(made, resume=True))
    assert (made.run_dir / "none-0" / "stage.json").read_bytes() == before
    with pytest.raises(ResumeError, match="other settings"):
        study(generator=forgetful, steps=3).run(replace(made, resume=True))


@pytest.mark.costly
def test_every_training_has_secrets_of_its_own_and_leaves_no_model(tmp_path: Path) -> None:
    made = private(tmp_path)
    study(generator=forgetful, eps=[None]).run(made)
    secrets = [{c.secret for c in read_canaries(made.run_dir / f"none-{i}").canaries} for i in range(2)]
    assert secrets[0].isdisjoint(secrets[1])
    assert not (made.run_dir / "none-0" / "model").exists()
    assert (made.run_dir / "none-0" / CANARIES).stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_an_attack_above_its_ceiling_ends_the_study_with_an_error_after_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of a model that knows all secrets, under a claim that forbids it."""
    made = parts(tmp_path, partial(DPSGD, eps=0.5, secret_file=tmp_path / "secret"))
    monkeypatch.setattr(Measurement, "of", _known_by_heart)
    with pytest.raises(PrivacyViolation):
        study(generator=forgetful, eps=[0.5], trainings=8, steps=1).run(made)
    assert "CONTRADICTION" in (made.run_dir / "canaries.html").read_text(encoding="utf-8")


def _known_by_heart(measure: Measurement, model: Path, canaries: Any, *, seed: int) -> list[dict[str, Any]]:
    return [
        {
            "score": {"name": c.name, "kind": c.kind, "side": c.side, "copies": c.copies, "included": c.included,
                      "rank": 1, "exposure": 2.3, "bits": 0.1, "margin": 90.0 if c.included else -90.0,
                      "log_probability": 0.0, "never_drawn": False},
            "leak": {"name": c.name, "draws": 2, "found": 2, "copied": None, "sample": []},
        }
        for c in canaries
    ]  # fmt: skip


def test_a_mode_that_trains_no_generator_is_refused_before_anything_runs(tmp_path: Path) -> None:
    made = parts(tmp_path, partial(LogitDP, delta=1e-5, max_logit_grad_norm=1.0, secret_file=tmp_path / "secret"))
    with pytest.raises(ConfigurationError, match="privacy=dp_sgd"):
        study().run(made)
    assert not list(made.run_dir.glob("*-0"))


# -- the audit of a run ------------------------------------------------------------------------


@pytest.mark.slow
def test_an_audit_puts_what_it_found_on_both_cards_of_the_run(tmp_path: Path, capsys: Any) -> None:
    run = run_with_canaries(tmp_path, partial(DPSGD, eps=8.0, noise_multiplier=2.0, secret_file=tmp_path / "secret"))
    audit = parts(tmp_path, run_dir=tmp_path / "audit")
    bounds = Audit(run=run, measure=MEASURE).run(audit)
    assert bounds and "absence of evidence is no guarantee" in capsys.readouterr().out
    for folder in (run, run / "model"):
        card = read_card(folder)
        results = card["empirical"]["results"]
        assert card["empirical"]["planted"]["units"] == SUITE.units
        assert {one["metric"] for one in results} == {"share of rank 1", "leaked share"}
        assert all(one["canaried"] and one["n"] == 2 for one in results)
        assert all(one["ceiling"] is not None for one in results)
    secrets = [canary.secret for canary in read_canaries(run).canaries]
    assert not any(secret in (run / "privacy_card.json").read_text(encoding="utf-8") for secret in secrets)
    assert all((tmp_path / "audit" / f"audit.{suffix}").stat().st_mode & 0o777 == 0o600 for suffix in ("json", "html"))
    assert verify_chain(run).failed == []
    Audit(run=run, measure=MEASURE).run(parts(tmp_path, run_dir=tmp_path / "again"))
    assert len(read_card(run)["empirical"]["results"]) == len(results)  # the same twice is said once


WORDS = "".join(f"{number:03d}\n" for number in range(100))
COINS: dict[str, Any] = {"kinds": ("own_passage",), "count": 100, "candidates": 5, "include": 0.5}
RANKS: dict[str, Any] = {"count": 8, "candidates": 100}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("planted", "delta"), [(COINS, 1e-7), (RANKS, 1e-9)], ids=["by coins, in the one-run audit", "by ranks"]
)
def test_a_model_that_knows_every_secret_contradicts_a_small_claim_and_its_card_says_so(
    planted: dict[str, Any], delta: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.txt").write_text(WORDS, encoding="utf-8")
    words = {"queries": str(tmp_path / "words.txt")} if planted is COINS else {}
    suite = CanarySuite(repetitions=(1,), seed=1, **planted | words)
    mode = partial(DPSGD, eps=0.2, delta=delta, secret_file=tmp_path / "secret")
    run = run_with_canaries(tmp_path, mode, suite=suite, steps=1)
    monkeypatch.setattr(Measurement, "of", _known_by_heart)
    with pytest.raises(PrivacyViolation, match="contradicts the claim"):
        Audit(run=run, measure=MEASURE).run(parts(tmp_path, run_dir=tmp_path / "audit"))
    for folder in (run, run / "model"):
        card = read_card(folder)
        assert "AN AUDIT CONTRADICTS THIS CLAIM" in card["claim"]["statement"]
        found = card["empirical"]["results"]
        if planted is COINS:
            bounds = [one for one in found if "one-run" in one["attack"]]
            assert [one["n"] for one in bounds] == [100, 100] and bounds[0]["eps_lower"] > bounds[1]["eps_lower"] > 0.2
        else:
            worst = [one for one in found if one["confidence"] > 0.999]
            assert {one["metric"] for one in worst} == {"lower bound on epsilon", "the leaked share"}
            for one in worst:
                is_bound = one["metric"] == "lower bound on epsilon"
                assert (one["eps_lower"] if is_bound else one["ci"][0]) > one["ceiling"]
                assert one["delta"] == 1e-9 or not is_bound
    assert (tmp_path / "audit" / "audit.html").is_file()


@pytest.mark.costly
def test_without_a_guarantee_there_are_no_ceilings_and_other_canaries_than_the_ledgers_are_refused(
    tmp_path: Path,
) -> None:
    run = run_with_canaries(tmp_path, NoPrivacy)
    before = (run / CANARIES).read_bytes()
    with pytest.raises(ResumeError, match="earlier run"):
        run_with_canaries(tmp_path, NoPrivacy)
    assert (run / CANARIES).read_bytes() == before, "a second run does not write over them"
    again = parts(tmp_path, run_dir=tmp_path / "audit")
    Audit(run=run, measure=MEASURE).run(again)
    assert all(one["ceiling"] is None for one in read_card(run)["empirical"]["results"])
    write_canaries(replace(read_canaries(run), nonce="another"), run)
    with pytest.raises(DataError, match="chosen afterwards"):
        Audit(run=run, measure=MEASURE).run(again)
    (run / CANARIES).unlink()
    with pytest.raises(DataError, match="no canaries"):
        Audit(run=run, measure=MEASURE).run(again)
