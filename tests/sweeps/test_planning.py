"""What a sweep plans is what its trials reserve and what their cards say, or it is refused before."""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configured import composed
from hydra.types import RunMode
from lightning.pytorch.callbacks import Callback
from planned_sweeps import begun, joined, planned, trial_parts
from tiny_generator import WORDS, generator
from tiny_tasks import parts, write_synthetic

from lit_dpret import cli
from lit_dpret.audit.canaries import CanarySuite
from lit_dpret.callbacks import OneRunAudit, PrivacyCard, RetrievalEvaluation
from lit_dpret.cards.card import read_card
from lit_dpret.cards.check import verify_card
from lit_dpret.cards.start import read_start
from lit_dpret.cli import jobs, run
from lit_dpret.datamodules import SyntheticDataModule
from lit_dpret.errors import BudgetExceededError, ConfigurationError
from lit_dpret.privacy.accounting.releases import Release, merge
from lit_dpret.privacy.budget import PrivacyBudget, show_epsilon
from lit_dpret.privacy.ledger.dataset_file import compose_across_runs
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.judgement import owed_releases
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import NoPrivacy, SyntheticData
from lit_dpret.sweeps import SweepFolder, write_result
from lit_dpret.sweeps.report import write_report
from lit_dpret.tasks import Evaluate, Fit, FitScored, Pipeline
from lit_dpret.tasks.trial import refuse_private_objective
from reproduction import Ablate


def begin_ledger(folder: Path, delta: float) -> None:
    DatasetLedger(folder / "data.jsonl", total_eps=100.0, budget=PrivacyBudget(eps=1.0, delta=delta)).begin()


# -- the delta of the limit ------------------------------------------------------------------------


def test_a_limit_at_a_larger_delta_than_the_trials_covers_no_choice_and_the_sweep_is_refused(tmp_path: Path) -> None:
    begin_ledger(tmp_path, 1e-3)
    with pytest.raises(ConfigurationError, match=r"task\.metric_data=private.*privacy\.delta"):
        planned(tmp_path, metric_data="private", settings={"delta": 1e-6})
    assert not (tmp_path / "sweep" / "sweep.json").exists()


@pytest.mark.costly
def test_each_number_of_a_plan_has_the_delta_it_holds_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin_ledger(tmp_path, 1e-3)
    facts = planned(tmp_path, metric_data="public", settings={"delta": 1e-6}).describe()
    told = capsys.readouterr().out
    assert facts["planned"]["delta"] == 1e-6 and facts["ledger_delta"] == 1e-3
    assert f"together epsilon {show_epsilon(facts['planned']['epsilon'])} at delta 1e-06" in told
    assert re.search(r"the data set then holds \S+ of 100 at delta 1e-06", told), "at the smallest of its deltas"
    card = read_card(begun(tmp_path, settings={"delta": 1e-6}))
    assert "epsilon" not in card["tuning"] and card["claim"]["delta"] == 1e-6


@pytest.mark.costly
def test_the_best_of_private_trials_costs_what_all_cost_though_public_data_score_them(tmp_path: Path) -> None:
    """The card states the limit, which holds at the delta of the claim; no other number stands beside its ledger."""
    begin_ledger(tmp_path, 1e-6)
    planned(tmp_path, metric_data="public", metric="val/bleu", settings={"delta": 1e-5})
    place = begun(tmp_path, settings={"delta": 1e-5})
    card = read_card(place)
    assert card["tuning"]["data"] == "private" and any("trials" in text for text in card["cautions"])
    assert card["tuning"]["accounted"] is True and card["tuning"]["epsilon"] == 100.0
    assert verify_card(card, place / "privacy_ledger.jsonl") == []
    for forged in ({"epsilon": 3.0}, {"data": "public", "text": "Chosen on public data, which costs no privacy."}):
        assert verify_card(card | {"tuning": card["tuning"] | forged}, place / "privacy_ledger.jsonl")


# -- who may join ----------------------------------------------------------------------------------


def test_a_trial_without_privacy_does_not_join_a_sweep_that_was_planned_as_private(tmp_path: Path) -> None:
    planned(tmp_path, metric_data="private")
    joined(tmp_path)
    for mode in (NoPrivacy, SyntheticData):
        with pytest.raises(ConfigurationError, match=r"trial_of=.*privacy="):
            joined(tmp_path, make_privacy=mode)
    with pytest.raises(ConfigurationError, match=r"trial_of .*Ablate"):
        joined(tmp_path, task=Ablate.__new__(Ablate))


def test_trials_on_what_others_released_are_not_within_the_limit_of_the_sweep(tmp_path: Path) -> None:
    facts = planned(tmp_path, metric_data="private", make_privacy=SyntheticData).facts
    assert facts["without_privacy"] == 2 and facts["planned"] is None


def on_release(folder: Path, name: str = "made") -> dict[str, Any]:
    """A training on synthetic queries that have a card."""
    place = folder / name / "data"
    if not place.exists():
        write_synthetic(place, parts(folder).make_datamodule())
    return {
        "make_privacy": SyntheticData,
        "make_datamodule": partial(SyntheticDataModule, folder=place, expected_batch_size=8, physical_batch_size=8),
    }


@pytest.mark.costly
def test_trials_on_one_release_have_its_claim_once_and_a_choice_on_public_data_costs_nothing(tmp_path: Path) -> None:
    sweep = planned(tmp_path, metric_data="public", metric="loss", **on_release(tmp_path))
    for name in ("one", "two"):
        card = read_card(begun(tmp_path, name, **on_release(tmp_path)))
        assert card["tuning"]["accounted"] is False and card["tuning"]["data"] == "unknown", "so it is of the release"
        assert "tuning" not in str(card["not_covered"])
        write_result(sweep.trial_folder(name), [], {"loss": 1.0})
    assert len(sweep.facts["releases"]) == 1 and sweep.facts["releases"][0] is not None
    claim = read_card(tmp_path / "made" / "data")["claim"]["epsilon"]
    text = write_report(sweep).text
    assert show_epsilon(claim) in text.splitlines()[-2] and "was private" not in text
    for other in ({}, {"make_privacy": NoPrivacy}, on_release(tmp_path, "other")):
        with pytest.raises(ConfigurationError, match=r"trial_of=.*privacy="):
            joined(tmp_path, **other)


@pytest.mark.parametrize("other", [lambda folder: {"make_privacy": NoPrivacy}, lambda f: on_release(f, "other")])
def test_a_choice_among_releases_or_beside_trials_without_privacy_is_not_accounted(tmp_path: Path, other: Any) -> None:
    first = on_release(tmp_path)
    sweep = planned(
        tmp_path, metric_data="public", metric="loss", vary=lambda one: first if one == "x=0" else other(tmp_path)
    )
    tuned = read_card(begun(tmp_path, **first))["tuning"]
    assert tuned["data"] == "private" and not tuned["accounted"]
    assert len(sweep.facts["releases"]) == 2
    write_result(sweep.trial_folder("one"), [], {"loss": 1.0})
    assert "one release." not in write_report(sweep).text


# -- on which data the choice is made --------------------------------------------------------------


def tuned(data: str) -> Any:
    return lambda folder: [PrivacyCard(run_dir=folder, tuning_data=data)]


def shown_to_all(folder: Path) -> list[Any]:
    return [RetrievalEvaluation(data="private", card_entry=True), PrivacyCard(run_dir=folder)]


@pytest.mark.parametrize("metric_data", ["public", "synthetic", "unknown"])
def test_trials_scored_on_private_queries_are_planned_and_joined_as_such(metric_data: str, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    task = FitScored(data="private", min_free_mb=1)
    for given, knob in (({"task": task}, "task.data"), ({"callbacks": shown_to_all}, "callbacks.evaluation.data")):
        with pytest.raises(ConfigurationError, match=f"{re.escape(knob)}=private.*task.metric_data={metric_data}"):
            planned(tmp_path, metric_data=metric_data, metric="val/bleu", **given)
    assert not (tmp_path / "data.jsonl").exists()
    planned(tmp_path, metric_data=metric_data, metric="val/bleu")
    with pytest.raises(ConfigurationError, match=r"task\.data=private"):
        joined(tmp_path, task=task)


def test_a_trial_tells_of_no_other_choice_than_its_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.metric_data=none"):
        planned(tmp_path, metric_data="none", metric="val/bleu")
    for given, knob in (
        ({"callbacks": tuned("public")}, "callbacks.card.tuning_data"),
        ({"task": tuned_pipeline()}, "task.tuning_data"),
    ):
        with pytest.raises(ConfigurationError, match=rf"{re.escape(knob)}=public.*task\.metric_data=private"):
            planned(tmp_path, metric_data="private", **given)
    planned(tmp_path, metric_data="private", callbacks=tuned("private"))
    with pytest.raises(ConfigurationError, match=r"callbacks\.card\.tuning_data=public"):
        joined(tmp_path, callbacks=tuned("public"))
    with pytest.raises(ConfigurationError, match=r"callbacks\.card\.tuning_data=public"):
        begun(tmp_path, callbacks=tuned("public"))  # by whoever calls no command line


UNPROTECTED = "original queries, no privacy"


def test_no_private_trial_is_chosen_by_a_row_without_privacy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tuned_pipeline(tuning_data="unknown")
    monkeypatch.setattr(Pipeline, "planned_fits", Fit(min_free_mb=1).planned_fits)
    with pytest.raises(ConfigurationError, match=rf"metric\.name={UNPROTECTED}"):
        planned(tmp_path, task=task, metric=UNPROTECTED)
    assert not (tmp_path / "data.jsonl").exists()
    planned(tmp_path, metric=UNPROTECTED)  # of another task, which has no such row
    with pytest.raises(ConfigurationError, match=rf"metric\.name={UNPROTECTED}"):
        joined(tmp_path, task=task)


def test_trials_without_privacy_may_be_chosen_by_it_and_private_ones_do_not_tell_it(tmp_path: Path) -> None:
    task = tuned_pipeline(tuning_data="unknown")
    planned(tmp_path, task=task, metric=UNPROTECTED, make_privacy=NoPrivacy)
    reached = {UNPROTECTED: 0.9, "synthetic/nDCG@10": 0.5}
    for mode, told in ((NoPrivacy, reached), (None, {"synthetic/nDCG@10": 0.5})):
        (tmp_path / "sweep" / "sweep.json").unlink()
        planned(tmp_path, **({} if mode is None else {"make_privacy": mode}))
        trial = joined(tmp_path, task=task, **({} if mode is None else {"make_privacy": mode}))
        trial.finish([], reached)
        assert trial.sweep.results()["one"]["metrics"] == told


@pytest.mark.parametrize(
    "declared", ["tuning_data=public", "tuning_data=private tuning_method=random_stopping tuning_mean_runs=10"]
)
def test_a_sweeper_that_compares_private_runs_leaves_no_card_that_says_otherwise(tmp_path: Path, declared: str) -> None:
    words = [f"callbacks.card.{word}" for word in declared.split()]
    cfg = composed("task=fit", f"run_dir={tmp_path / 'run'}", "objective=privacy/eps_spent", *words)
    with pytest.raises(ConfigurationError, match=r"callbacks\.card\.tuning_.*objective"):
        cli.run(cfg)
    assert not (tmp_path / "run").exists()


def test_an_objective_is_no_row_without_privacy(tmp_path: Path) -> None:
    cfg = composed("task=pipeline", f"run_dir={tmp_path / 'run'}", f"objective='{UNPROTECTED}'")
    with pytest.raises(ConfigurationError, match=f"objective={UNPROTECTED}"):
        run(cfg)
    assert not (tmp_path / "run").exists()


def test_a_sweeper_is_told_no_undeclared_private_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sacrebleu")
    told: dict[str, float] = {"val/bleu": 8.5}
    monkeypatch.setattr(FitScored, "run", lambda *_: told)
    for whose in ("private", "public"):
        cfg = composed(
            "task=fit_scored", f"task.data={whose}", f"run_dir={tmp_path / 'run'}", "objective=val/bleu"
        )  # fmt: skip
        if whose == "public":
            assert run(cfg) == told
            continue
        with pytest.raises(ConfigurationError, match=r"objective=val/bleu.*task\.data=private.*trial_of"):
            run(cfg)
    assert not (tmp_path / "run").exists()


def test_a_sweeper_is_told_no_score_of_queries_unless_their_kind_is_declared() -> None:
    """By task and metric, for each kind that a sweep declares (None without one) what is refused, or nothing."""
    pytest.importorskip("sacrebleu")
    public, private = RetrievalEvaluation(data="public"), RetrievalEvaluation(data="private", card_entry=True)
    fit, scored, pipeline = Fit(min_free_mb=1), FitScored(data="private", min_free_mb=1), tuned_pipeline("unknown")
    unsaid = {None: "trial_of", "unknown": "metric_data", "public": None}
    cases: list[tuple[Any, list[Any], str, dict[str | None, str | None]]] = [
        (pipeline, [], "synthetic/nDCG@10", unsaid),
        (Evaluate(), [], "synthetic/nDCG@10", unsaid),
        (scored, [], "val/bleu", {None: r"task\.data=private", "private": None}),
        (fit, [private], "val/ndcg@10", {None: r"callbacks\.evaluation\.data=private"}),
        (scored, [public], public.public_metrics[0], {None: None, "none": r"task\.metric_data=none"}),
    ]
    for task, callbacks, metric, found in cases:
        for declared, refused in found.items():
            sweep: Any = None if declared is None else SimpleNamespace(facts={"metric_data": declared})
            if refused is None:
                assert refuse_private_objective(task, callbacks, metric, sweep) == (declared == "private")
                continue
            with pytest.raises(ConfigurationError, match=refused):
                refuse_private_objective(task, callbacks, metric, sweep)


def test_the_folder_of_such_a_multirun_is_its_owners_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweep" / "trials"
    known = SimpleNamespace(mode=RunMode.MULTIRUN, sweep=SimpleNamespace(dir=str(folder)))
    monkeypatch.setattr(jobs, "HydraConfig", SimpleNamespace(initialized=lambda: True, get=lambda: known))
    jobs.close_sweep()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def tuned_pipeline(tuning_data: str = "public") -> Pipeline:
    return Pipeline(
        generator=dict, retriever=dict, generator_steps=1, generator_batch=1, generator_physical_batch=1,
        generator_max_grad_norm=1.0, retriever_steps=1, retriever_batch=1, retriever_max_grad_norm=1.0,
        tuning_data=tuning_data,
    )  # fmt: skip


# -- what a trial reserves -------------------------------------------------------------------------


def audited(folder: Path) -> list[Any]:
    words = folder / "public_queries.txt"
    words.parent.mkdir(parents=True, exist_ok=True)
    words.write_text("\n".join(f"{WORDS[i]} {WORDS[i + 1]}" for i in range(40)) + "\n", encoding="utf-8")
    audit = OneRunAudit(run_dir=folder, canaries=32, max_share=1.0, kind="echo", queries=str(words), seed=1)
    return [PrivacyCard(run_dir=folder), audit]


ROOMY = partial(generator, seed=0, max_query_length=40, max_passage_length=40)
CANARIES = CanarySuite(kinds=("echo",), repetitions=(2,), candidates=4, query_words=2, seed=1)


@pytest.mark.costly
@pytest.mark.parametrize(
    "given",
    [
        {"callbacks": audited, "make_module": ROOMY},
        {"make_canaries": lambda: CANARIES, "make_module": ROOMY},
        {"data": {"sampling": "shuffle"}},
    ],
    ids=["audited", "canaries", "shuffle"],
)
def test_a_trial_takes_over_what_was_planned_for_it(given: dict[str, Any], tmp_path: Path) -> None:
    sweep = planned(tmp_path, trials=1, **given)
    place = begun(tmp_path, **given)
    assert reserved(tmp_path) == [sweep.facts["places"][0]] * 2, "held, and then taken over as it is"
    owed = owed_releases(PrivacyLedger.read(place / "privacy_ledger.jsonl").records)
    assert [release.to_dict() for release in owed] == sweep.facts["places"][0]
    spent = compose_across_runs(owed, delta=sweep.facts["planned"]["delta"], neighbours="zero_out")[0]
    assert sweep.facts["planned"]["epsilon"] == pytest.approx(spent)
    both = write_report(sweep).epsilon
    shutil.rmtree(place)
    assert write_report(sweep).epsilon == both is not None, "a trial whose folder is gone has been spent all the same"


def reserved(folder: Path) -> list[Any]:
    records = map(json.loads, (folder / "data.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["releases"] for record in records if record["kind"] == "reserve"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log, a secret and a private run that no ledger of the data set counts."""
    root = tmp_path_factory.mktemp("finished")
    return made_start(root).parent


def made_start(folder: Path, name: str = "parent", **settings: Any) -> Path:
    Fit(min_free_mb=1).run(trial_parts(folder, folder / name, settings=settings))
    return folder / name


@pytest.fixture
def parent(finished: Path, tmp_path: Path) -> Path:
    """The finished run in a folder of the test."""
    return Path(shutil.copytree(finished, tmp_path, dirs_exist_ok=True)) / "parent"


def held(sweep: SweepFolder) -> float:
    ledger = sweep.ledger()
    return 0.0 if ledger is None else ledger.total().epsilon


def cost(own: Sequence[Release], trials: int, *starts: Path) -> float:
    """Of so many equal trials and of each start once."""
    earlier = [release for start in starts for release in read_start(start, public=False).releases()]
    delta = read_card(starts[0])["claim"]["delta"]
    return compose_across_runs([*list(own) * trials, *earlier], delta=delta, neighbours="zero_out")[0]


@pytest.mark.slow
@pytest.mark.parametrize("counted", [True, False])
def test_an_uncounted_start_is_told_once(
    counted: bool, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if counted:
        parent = made_start(tmp_path, "counted", dataset_ledger=tmp_path / "data.jsonl", total_eps=100.0)
    before = len(reserved(tmp_path)) if counted else 0
    child: dict[str, Any] = {"start": parent}
    sweep = planned(tmp_path, trials=2, **child)
    own, earlier = sweep.places[0].own[0], read_start(parent, public=False).releases()
    assert [place.releases for place in sweep.places] == [[own] if counted else merge([own, *earlier])] * 2
    together = cost([own], 2, parent)
    assert sweep.facts["planned"]["epsilon"] == pytest.approx(together)
    told = re.search(r"together epsilon (\S+) at delta (\S+); the data set then holds (\S+) ", capsys.readouterr().out)
    assert told is not None and told[1] == told[3] == show_epsilon(together), "the plan and the ledger tell one number"
    for name in ("one", "two"):
        begun(tmp_path, name, **child)
        assert held(sweep) == pytest.approx(together), "whichever of them have begun"
    assert reserved(tmp_path)[before:] == [sweep.facts["places"][0]] * 4
    assert write_report(sweep).epsilon == pytest.approx(together)


@pytest.mark.slow
def test_a_limit_that_just_covers_start_and_trials_is_enough_and_a_smaller_one_refused(
    parent: Path, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    needed = cost(planned(tmp_path / "scratch", trials=1).places[0].own, 2, parent)
    with pytest.raises(BudgetExceededError, match=r"task\.total_eps"):
        planned(tmp_path, start=parent, total_eps=needed * (1 - 1e-4))
    assert not (tmp_path / "data.jsonl").exists()
    sweep = planned(tmp_path, start=parent, total_eps=needed * (1 + 1e-9))
    for name in ("two", "one"):
        begun(tmp_path, name, start=parent)
    assert held(sweep) == pytest.approx(needed)
    with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps"):
        later_run(tmp_path, "later", parent)


def later_run(folder: Path, name: str, start: Path) -> None:
    """A run outside the sweep, counted in the same ledger."""
    settings = {"dataset_ledger": folder / "data.jsonl"}
    Fit(min_free_mb=1).run(trial_parts(folder, folder / name, start=start, settings=settings))


class Fails(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise RuntimeError("before the first step")


@pytest.mark.costly
def test_a_start_stays_counted_when_its_first_trial_fails_and_the_others_are_given_back(
    parent: Path, tmp_path: Path
) -> None:
    sweep = planned(tmp_path, start=parent)
    with pytest.raises(RuntimeError, match="first step"):
        begun(tmp_path, start=parent, callbacks=lambda folder: [PrivacyCard(run_dir=folder), Fails()])
    ledger = sweep.ledger()
    assert ledger is not None
    assert ledger.give_back(sweep.id).epsilon >= cost([], 0, parent) * (1 - 1e-9)


@pytest.mark.slow
def test_a_run_outside_the_sweep_counts_the_same_start_once_and_another_beside_it(parent: Path, tmp_path: Path) -> None:
    other = made_start(tmp_path, "other")
    sweep = planned(tmp_path, trials=1, start=parent)
    begun(tmp_path, start=parent)
    moved = shutil.copytree(parent, tmp_path / "copy of it")
    later_run(tmp_path, "later", moved)
    assert held(sweep) == pytest.approx(cost(sweep.places[0].own, 2, parent))
    later_run(tmp_path, "another", other)
    assert held(sweep) == pytest.approx(cost(sweep.places[0].own, 3, parent, other))


@pytest.mark.costly
def test_a_start_that_another_ledger_counts_is_refused_before_anything_is_reserved(tmp_path: Path) -> None:
    parent = made_start(tmp_path, dataset_ledger=tmp_path / "other.jsonl", total_eps=100.0)
    with pytest.raises(ConfigurationError, match=r"init_from=.*privacy\.dataset_ledger"):
        planned(tmp_path, start=parent)
    assert not (tmp_path / "data.jsonl").exists()


def plants_something(folder: Path) -> list[Any]:
    class Plants(Callback):
        def plant_canaries(self, trainer: Any, module: Any, data: Any) -> None: ...

    return [Plants()]


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"callbacks": plants_something}, "Plants"),
        ({"settings": {"noise_seed": 7}}, "privacy.noise_seed=7"),
        ({"callbacks": shown_to_all, "metric_data": "private"}, "callbacks.evaluation.data=private"),
        ({"make_canaries": lambda: CanarySuite(queries="dev")}, "canaries.queries=dev"),
        ({"described": '{"model": {"log_private_loss": true}}'}, "log_private_loss=true"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(given: dict[str, Any], setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(setting)):
        planned(tmp_path, **given)
    assert not (tmp_path / "data.jsonl").exists() and not (tmp_path / "sweep" / "sweep.json").exists()


def test_trials_whose_units_are_not_the_same_thing_make_no_sweep_and_join_none(tmp_path: Path) -> None:
    def vary(setting: str) -> dict[str, Any]:
        return {"data": {"duplicates": "merge" if setting.endswith("1") else "keep"}}

    with pytest.raises(ConfigurationError, match=r"datamodule\.duplicates=keep and merge"):
        planned(tmp_path, vary=vary)
    assert not (tmp_path / "data.jsonl").exists()
    planned(tmp_path)
    with pytest.raises(ConfigurationError, match=r"datamodule\.duplicates=merge, but"):
        begun(tmp_path, data={"duplicates": "merge"})


def test_a_trial_with_a_published_seed_is_refused_by_its_name_and_has_cost_nothing(tmp_path: Path) -> None:
    sweep = planned(tmp_path)
    with pytest.raises(ConfigurationError, match=r"privacy\.noise_seed=7"):
        joined(tmp_path, settings={"noise_seed": 7})
    with pytest.raises(ConfigurationError, match=r"privacy\.noise_seed"):
        begun(tmp_path, settings={"noise_seed": 7})  # by whoever calls no command line
    assert write_report(sweep).epsilon == 0.0


def test_two_calls_that_begin_together_plan_one_sweep(tmp_path: Path) -> None:
    """Each had reserved a plan of its own, and one of them could never be given back."""
    trial_parts(tmp_path, tmp_path / "sweep")  # the log is there before both read it
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda _: planned(tmp_path), range(2)))
    assert found[0].id == found[1].id
    held = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {record["sweep"] for record in held if record["kind"] == "reserve"} == {found[0].id}
