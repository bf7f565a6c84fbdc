"""`task=pipeline` from a private log to the report, with parts that train in a blink."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from configured import composed
from lightning.pytorch.callbacks import Callback
from tiny_generator import generator
from tiny_tasks import open_to_others, parts, retriever, trainer

from lit_dpret.cards.card import read_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.cli.composition import build_parts
from lit_dpret.errors import BudgetExceededError, ConfigurationError, DataError, ResumeError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases, noise_keys
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, SyntheticData
from lit_dpret.tasks import Pipeline
from lit_dpret.tasks import pipeline as pipelines

STEPS = 3


def pipeline(**changes: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "generator": partial(generator, seed=0), "retriever": retriever, "generator_steps": STEPS,
        "generator_batch": 8, "generator_physical_batch": 8, "generator_max_grad_norm": 0.1, "retriever_steps": STEPS,
        "retriever_batch": 16, "retriever_max_grad_norm": 0.5, "min_free_mb": 1, "samples": 4, "max_passages": 20,
    }  # fmt: skip
    return Pipeline(**settings | changes)


@pytest.mark.costly
def test_without_privacy_the_chain_is_a_bound_without_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = pipeline().run(parts(tmp_path, make_privacy=NoPrivacy))
    assert "sum of their epsilons" not in " ".join(capsys.readouterr().out.split())
    assert "original queries, direct DP" not in told and 0 <= told["synthetic/nDCG@10"] <= 1
    for stage in ("generator", "synthetic/data", "from_synthetic"):
        assert read_card(tmp_path / "run" / stage)["claim"]["guarantee"] == "none"
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "without protection: original queries, no privacy; synthetic queries, no privacy. " in report
    assert pipeline().planned_fits(parts(tmp_path / "planned", make_privacy=NoPrivacy)) == []


@pytest.mark.costly
def test_the_loggers_of_a_stage_write_beside_its_card_where_its_owner_alone_reads(tmp_path: Path) -> None:
    loggers = build_parts(composed("task=pipeline", "logger=csv", f"run_dir={tmp_path / 'run'}")).make_loggers
    pipeline(only=["synthetic"]).run(parts(tmp_path, make_privacy=NoPrivacy, make_loggers=loggers))
    run = tmp_path / "run"
    written = {path.relative_to(run).as_posix() for path in run.rglob("metrics.*")}
    assert {"generator/csv/version_0/metrics.csv", "generator/metrics.jsonl"} <= written
    assert not written & open_to_others(run)
    assert (run / "generator").stat().st_mode & 0o077 == 0


def test_a_training_that_cannot_be_made_is_refused_before_another_one_spends(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected_batch_size=1000"):
        pipeline(generator_batch=1000).run(parts(tmp_path))
    assert not list((tmp_path / "run").rglob("privacy_ledger.jsonl"))


@pytest.mark.slow
def test_what_a_published_seed_leaves_without_a_claim_lies_in_folders_for_its_owner_alone(tmp_path: Path) -> None:
    made = partial(DPSGD, eps=8.0, noise_multiplier=2.0, noise_seed=7, secret_file=tmp_path / "secret")
    pipeline(only=("synthetic", "direct")).run(parts(tmp_path, make_privacy=made))
    run = tmp_path / "run"
    for stage in ("generator", "direct", "synthetic", "from_synthetic"):
        [card] = {*run.glob(f"{stage}/privacy_card.json"), *run.glob(f"{stage}/data/privacy_card.json")}
        assert read_card(card.parent)["claim"]["guarantee"] == "not_proved"
        assert card.parent.stat().st_mode & 0o077 == 0, stage


def claimed(folder: Path) -> float:
    return float(read_card(folder)["claim"]["epsilon"])


@pytest.mark.costly
def test_the_pipeline_ends_with_rows_cards_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = pipeline(tuning_data="private", tuning_note="chosen on dev").run(parts(tmp_path))
    assert "sum of their epsilons" in " ".join(capsys.readouterr().out.split()), "the cards do not say so"
    run = tmp_path / "run"
    assert list(told) == [
        "BM25", "zero-shot encoder", "original queries, no privacy", "original queries, direct DP",
        "DP synthetic queries", "pseudo-queries from the passages", "synthetic/nDCG@10",
    ]  # fmt: skip
    assert all(0 <= value <= 1 for value in told.values())
    assert told["synthetic/nDCG@10"] == told["DP synthetic queries"]
    planned = pipeline().planned_fits(parts(tmp_path / "planned"))
    for stage, fit in zip(("direct", "generator"), planned, strict=True):
        records = PrivacyLedger.read(run / stage / "privacy_ledger.jsonl").records
        assert charged_releases(records) == fit.releases, "a sweep reserves what is then released"
    for stage in ("generator", "direct"):
        records = PrivacyLedger.read(run / stage / "privacy_ledger.jsonl").records
        spent = epsilon(charged_releases(records), delta=1 / 112, neighbours="zero_out")
        assert claimed(run / stage) == pytest.approx(spent) and 0 < spent <= 8
        assert len(noise_keys(records)) == STEPS
    both = pytest.approx(cost_of(*planned))
    for told_of in ("generator", "direct", "synthetic/data", "from_synthetic"):
        tuning = read_card(run / told_of)["tuning"]
        assert "together are within epsilon" in tuning["text"] and not tuning["accounted"], told_of
    for stage in ("generator", "direct"):
        assert read_card(run / stage)["tuning"]["siblings"]["planned"]["epsilon"] == both
    assert "siblings" not in read_card(run / "original")["tuning"], "it spends nothing"
    assert claimed(run / "synthetic" / "data") == claimed(run / "from_synthetic") == claimed(run / "generator")
    assert read_card(run / "original")["claim"]["guarantee"] == "none"
    for stage in ("from_synthetic", "direct", "original"):
        assert not verify_chain(run / stage).failed, verify_chain(run / stage).format()
    for made in (run / "generator", run / "synthetic" / "data", run / "direct", run / "from_synthetic"):
        assert "chosen on dev" in read_card(made)["tuning"]["text"], made
    protected = {"direct", "generator", "synthetic", "from_synthetic", "round_trip", "pseudo_queries",
                 "pseudo_round_trip"}  # fmt: skip
    shown = {path.partition("/")[0] for path in open_to_others(run)}
    assert shown <= protected, "nothing of a model without privacy, and no table that has its row"
    assert "generator/privacy_card.json" in open_to_others(run), "what is protected can be shown"
    assert not (run / "embeddings").exists(), "embeddings of queries are as private as the queries"
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "without protection: original queries, no privacy. " in report, "that row alone"
    rows = json.loads((run / "results.json").read_text(encoding="utf-8"))
    for system in list(told)[:-1]:
        assert system in report and system in json.dumps(rows)


@pytest.mark.slow
def test_a_declared_rate_is_that_of_every_private_row_and_what_divides_its_sum_is_not_made_of_n(tmp_path: Path) -> None:
    mode = partial(
        DPSGD, eps=8.0, delta=1e-3, noise_multiplier=2.0, neighbours="add_or_remove", secret_file=tmp_path / "secret"
    )
    declared = parts(tmp_path, make_privacy=mode)
    declared = replace(declared, make_datamodule=partial(declared.make_datamodule, sample_rate=0.2))
    made = pipeline(only=("direct", "synthetic"), retriever_batch=100)
    made.run(declared)
    for stage, fit, batch in zip(("direct", "generator"), made.planned_fits(declared), (100, 8), strict=True):
        records = PrivacyLedger.read(tmp_path / "run" / stage / "privacy_ledger.jsonl").records
        assert charged_releases(records) == fit.releases, "a sweep reserves what is then released"
        plan = next(record for record in records if record["kind"] == "plan")
        assert (plan["law"]["sample_rate"], plan["plan"]["denominator"]) == (0.2, batch), stage


@pytest.mark.slow
def test_the_filter_keeps_the_queries_that_find_their_passage_and_the_report_says_how_many(tmp_path: Path) -> None:
    pipeline(round_trip_filter=5, queries_per_passage=2).run(parts(tmp_path))
    run = tmp_path / "run"
    kept = (run / "round_trip" / "kept_queries.txt").read_text(encoding="utf-8").split()
    made = [json.loads(line)["_id"] for line in (run / "synthetic" / "data" / "queries.jsonl").read_text().splitlines()]
    assert 0 < len(kept) < len(made) and set(kept) < set(made)
    plan = next(r for r in PrivacyLedger.read(run / "from_synthetic" / "privacy_ledger.jsonl").records)
    assert plan["law"]["n"] == len(kept)
    assert f"{len(kept)} of {len(made)} synthetic queries" in (run / "report.html").read_text(encoding="utf-8")
    assert claimed(run / "from_synthetic") == claimed(run / "generator"), "choosing by public means costs nothing"


@pytest.mark.costly
def test_queries_of_which_none_finds_its_passage_are_trained_on_by_a_resume_without_the_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the generator spent is not lost, and a finished stage's filter is not changed."""
    check = pipelines.check_made

    def none_found(*args: Any, **settings: Any) -> dict[str, Any]:
        return check(*args, **settings) | {"kept": 0}

    monkeypatch.setattr(pipelines, "check_made", none_found)
    with pytest.raises(DataError, match=r"task\.round_trip_filter=1"):
        pipeline(round_trip_filter=1).run(parts(tmp_path))
    pipeline().run(parts(tmp_path, resume=True))
    queries = (tmp_path / "run" / "synthetic" / "data" / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    plan = next(iter(PrivacyLedger.read(tmp_path / "run" / "from_synthetic" / "privacy_ledger.jsonl").records))
    assert plan["law"]["n"] == len(queries)
    with pytest.raises(ResumeError, match=r"task\.round_trip_filter=1"):
        pipeline(round_trip_filter=1).run(parts(tmp_path, resume=True))


class Interrupt(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if type(module).__name__ == "QueryGenerator" and batch.last and batch.step == 1:
            raise KeyboardInterrupt


def counted(tmp_path: Path, total_eps: float) -> Any:
    return partial(
        DPSGD, eps=8.0, noise_multiplier=2.0, secret_file=tmp_path / "secret", dataset_ledger=tmp_path / "spent.jsonl",
        total_eps=total_eps,
    )  # fmt: skip


def cost_of(*fits: Any) -> float:
    releases = [release for fit in fits for release in fit.releases]
    return epsilon(releases, delta=fits[0].plan.budget.delta, neighbours="zero_out")


@pytest.mark.costly
def test_an_interrupted_pipeline_goes_on_where_it_was_and_spends_nothing_twice(tmp_path: Path) -> None:
    """In a ledger of the data set that has room for its two private trainings and no more."""

    def interrupted(callbacks: Any = (), **settings: Any) -> L.Trainer:
        return trainer(callbacks=[*callbacks, Interrupt()], **settings)

    both = cost_of(*pipeline().planned_fits(parts(tmp_path)))
    privacy = counted(tmp_path, both * 1.001)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        pipeline().run(parts(tmp_path, privacy, make_trainer=interrupted))
    run = tmp_path / "run"
    direct = (run / "direct" / "privacy_ledger.jsonl").read_bytes()
    with pytest.raises(ResumeError, match="resume=true"):
        pipeline().run(parts(tmp_path, privacy))
    with pytest.raises(ResumeError, match="other settings"):
        pipeline(generator_steps=STEPS + 1).run(parts(tmp_path, privacy, resume=True))
    pipeline().run(parts(tmp_path, privacy, resume=True))
    assert (run / "direct" / "privacy_ledger.jsonl").read_bytes() == direct, "a finished stage is not run again"
    keys = noise_keys(PrivacyLedger.read(run / "generator" / "privacy_ledger.jsonl").records)
    assert len(keys) == len(set(keys)) == STEPS


def test_a_data_set_that_has_room_for_one_training_is_not_charged_for_the_first_of_two(tmp_path: Path) -> None:
    planned = pipeline().planned_fits(parts(tmp_path))
    one, both = max(map(cost_of, planned)), cost_of(*planned)
    assert one < both
    with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps"):
        pipeline().run(parts(tmp_path, counted(tmp_path, (one + both) / 2)))
    assert list((tmp_path / "run").iterdir()) == [] and not (tmp_path / "spent.jsonl").exists()


def test_a_pipeline_with_another_promise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="privacy=synthetic"):
        pipeline().run(parts(tmp_path, make_privacy=SyntheticData))
