"""What `-m` tells: the cost of all runs before the first of them, and a table after the last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf
from planned_sweeps import STEPS, trial_parts
from test_cli import TINY, contents, write_log

from lit_dpret import cli
from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.cli import jobs
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.ledger.dataset_file import compose_across_runs
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases
from lit_dpret.privacy.ledger.siblings import among_siblings
from lit_dpret.privacy.modes import NoPrivacy, SyntheticData
from lit_dpret.synthesis.filters import RoundTrip
from lit_dpret.synthesis.filters.bins import LengthBins
from lit_dpret.tasks import Evaluate, Evolve, Filter, Fit, Histogram, Ranker, Synthesize, trial
from lit_dpret.tasks.fit import plan_fit
from lit_dpret.tasks.multirun import Outcomes, Together, planned_together, siblings_facts, tell_cost
from lit_dpret.tasks.parts import ComposedRun, Parts

OF_THE_CHAIN = ("kind", "schema", "seq", "day", "prev", "hash", "nonce")
ROOT = Path(__file__).resolve().parent.parent.parent


def composed(made: Parts, name: str = "", task: Any = None) -> ComposedRun:
    return ComposedRun(lambda groups: name, lambda: (task or Fit(min_free_mb=1), made))


def epsilon_of(runs: Sequence[Parts]) -> float:
    plans = [
        plan for one in runs
        for plan in plan_fit(one.make_privacy(), one.read_data(), one.make_trainer(), make_module=one.make_module)
    ]  # fmt: skip
    return float(planned_together(plans)["epsilon"])


def test_the_cost_of_all_runs_is_of_all_releases_composed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        trial_parts(tmp_path, tmp_path / name, settings={"noise_multiplier": sigma})
        for name, sigma in (("a", 4.0), ("b", 2.0))
    ]
    bare = trial_parts(tmp_path, tmp_path / "c", make_privacy=NoPrivacy)
    tell_cost([composed(one, str(i)) for i, one in enumerate([*runs, bare])])
    told = capsys.readouterr().out
    each = [epsilon_of([one]) for one in runs]
    assert max(each) < epsilon_of(runs) < sum(each)
    epsilon = f"epsilon {show_epsilon(epsilon_of(runs))} at delta"
    for said in ("3 runs", "2 private", "1 runs without", epsilon, "query (zero_out)"):
        assert said in told
    assert not any((tmp_path / name).exists() for name in "abc"), "nothing began"


def test_epsilons_of_different_units_are_not_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [trial_parts(tmp_path, tmp_path / unit, settings={"unit": unit}) for unit in ("query", "pair")]
    tell_cost([composed(one, str(i)) for i, one in enumerate(runs)])
    told = capsys.readouterr().out
    assert "pair (zero_out" in told and "query (zero_out" in told and "ogether epsilon" not in told


def test_no_run_begins_where_one_of_them_or_its_data_cannot_be_made(tmp_path: Path) -> None:
    def unreadable(**settings: Any) -> Any:
        raise DataError("nope.jsonl does not exist; check datamodule.pairs.")

    good, bad = (trial_parts(tmp_path, tmp_path / "run", settings={"eps": eps}) for eps in (8.0, -1.0))
    for other, named in ((bad, r"privacy\.eps"), (replace(good, make_datamodule=unreadable), r"datamodule\.pairs")):
        with pytest.raises((ConfigurationError, DataError), match=named):
            tell_cost([composed(good, "good"), composed(other, "bad")])


@pytest.mark.parametrize("declared", ["none", "public"])
def test_private_runs_of_different_settings_leave_no_card_without_the_choice(declared: str, tmp_path: Path) -> None:
    def tell(data: str, varied: Sequence[str], **given: Any) -> None:
        cards = lambda folder: [PrivacyCard(run_dir=folder, tuning_data=data)]  # noqa: E731
        private = trial_parts(tmp_path, tmp_path / "run", callbacks=cards, **given)
        bare = trial_parts(tmp_path, tmp_path / "run", make_privacy=NoPrivacy)
        tell_cost([composed(bare, "bare"), composed(private, "private")], varied)

    for varied in (["privacy.eps"], ["seed", "model.optimizer.lr"]):
        with pytest.raises(ConfigurationError, match=rf"callbacks\.card\.tuning_data={declared}.*{varied[-1]}"):
            tell(declared, varied)
        tell("unknown", varied)
        tell("private", varied)
    tell(declared, ["seed"])
    tell(declared, [])


@pytest.mark.costly
def test_seeds_are_carded_with_what_all_cost_and_a_finished_one_is_not_kept_where_more_join(
    tmp_path: Path,
) -> None:
    cards = lambda folder: [PrivacyCard(run_dir=folder, tuning_data="none")]  # noqa: E731
    runs = [trial_parts(tmp_path, tmp_path / name, callbacks=cards) for name in ("a", "b", "c")]
    again = [composed(replace(one, resume=True), str(i)) for i, one in enumerate(runs)]
    found = tell_cost([composed(one, str(i)) for i, one in enumerate(runs[:2])], ["seed"])
    assert found.siblings is not None and found.siblings["planned"]["epsilon"] == epsilon_of(runs[:2])
    with among_siblings(found.siblings):
        Fit(min_free_mb=1).run(runs[0])
    card, before = read_card(tmp_path / "a"), contents(tmp_path / "a")
    assert card["tuning"]["siblings"] == found.siblings and card["tuning"]["accounted"] is False
    assert show_epsilon(epsilon_of(runs[:2])) in card["claim"]["statement"]
    assert card["claim"]["epsilon"] == epsilon_of(runs[:1]), "of the run itself"
    assert verify_card(card, tmp_path / "a" / "privacy_ledger.jsonl") == []
    with pytest.raises(ResumeError, match=rf"resume=true.*{tmp_path / 'a'}.*hydra\.sweep\.dir"):
        tell_cost(again, ["seed"])
    assert contents(tmp_path / "a") == before
    assert tell_cost(again[:2], ["seed"]).siblings is not None, "the same command goes on"
    assert tell_cost(again[:1], ["seed"]).siblings is None
    Fit(min_free_mb=1).run(runs[2])
    assert read_card(tmp_path / "c")["tuning"]["accounted"] is True, "one that its command started alone"
    with pytest.raises(ResumeError, match=rf"resume=true.*{tmp_path / 'c'}"):
        tell_cost([again[1], again[2]], ["seed"])


def test_several_runs_of_a_task_whose_cost_is_not_known_beforehand_know_of_each_other(tmp_path: Path) -> None:
    made = trial_parts(tmp_path, tmp_path / "run")
    found = tell_cost([composed(made, task=votes("none"))] * 2, ["seed"]).siblings
    assert found is not None and found["runs"] == 2 and found["planned"] is None
    assert siblings_facts(None, ["+seed"]) == found | {"runs": None, "private_runs": None, "without_privacy": None}


def votes(data: str) -> Evolve:
    return Evolve(passages_are_public=True, encoder_is_public=True, tuning_data=data)


def counts(data: str) -> Histogram:
    return Histogram(generator=Path("g"), bins=LengthBins(), tuning_data=data)


def drawn(data: str) -> Synthesize:
    return Synthesize(generator=Path("g"), tuning_data=data)


def filtered(data: str) -> Filter:
    return Filter(data=Path("set"), filters={"round_trip": RoundTrip(Ranker(encoder="bm25"))}, tuning_data=data)


@pytest.mark.parametrize("declared", ["none", "public"])
@pytest.mark.parametrize(
    ("make", "varied", "harmless"),
    [
        (votes, "privacy.eps", "seed"),
        (counts, "task.noise_multiplier", "seed"),
        (drawn, "task.generator", "task.top_p"),
        (filtered, "task.filters.histogram_match.histogram", "task.filters.histogram_match.keep_share"),
        (filtered, "task.filters.round_trip.ranker.encoder", "task.filters.round_trip.k"),
    ],
)
def test_no_task_hides_a_choice_there_is(make: Any, varied: str, harmless: str, declared: str, tmp_path: Path) -> None:
    made = trial_parts(tmp_path, tmp_path / "run")
    with pytest.raises(ConfigurationError, match=rf"task\.tuning_data={declared}.*{varied}"):
        tell_cost([composed(made, task=make(declared))] * 2, [varied])
    tell_cost([composed(made, task=make("unknown"))] * 2, [varied])
    tell_cost([composed(made, task=make(declared))] * 2, [harmless])


def test_models_of_several_releases_tell_of_that_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(released: Sequence[str], data: str = "none") -> None:
        card = PrivacyCard(run_dir=tmp_path, tuning_data=data)
        made = replace(
            trial_parts(tmp_path, tmp_path / "run"), make_privacy=SyntheticData, make_callbacks=lambda: [card]
        )
        read = [partial(SimpleNamespace, privacy_card_path=name) for name in released]
        runs = [composed(replace(made, make_datamodule=one), str(i)) for i, one in enumerate(read)]
        tell_cost(runs, ["datamodule.folder"])

    monkeypatch.setattr(trial, "claim_of", lambda data: data.privacy_card_path)
    with pytest.raises(ConfigurationError, match=r"tuning_data=none.*datamodule\.folder"):
        tell(["a", "b"])
    tell(["a", "b"], "unknown")
    tell(["a", "a"])


@pytest.mark.parametrize("task", [Evaluate(), Fit(min_free_mb=1, membership_coins=True)], ids=["evaluate", "coins"])
def test_an_unknown_cost_is_said_not_refused(task: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell_cost([composed(trial_parts(tmp_path, tmp_path / "run"), task=task)] * 2)
    assert "2 runs" in (told := capsys.readouterr().out) and "not known" in told


@pytest.mark.slow
def test_the_table_shows_what_differs_the_epsilon_of_each_card_and_why_a_run_failed(tmp_path: Path) -> None:
    made = trial_parts(tmp_path, tmp_path / "0-lr_1")
    Fit(min_free_mb=1).run(made)
    card = json.loads((tmp_path / "0-lr_1" / "privacy_card.json").read_text(encoding="utf-8"))
    outcomes = Outcomes(tmp_path, Together(["Three runs"], None))
    outcomes.add(tmp_path / "0-lr_1", ["model=generator", "+x.lr=1"], {"loss": 0.5, "steps": STEPS})
    outcomes.add(tmp_path / "1-lr_2", ["model=generator", "+x.lr=2"], {"loss": 0.25, "steps": STEPS})
    outcomes.add(tmp_path / "2-lr_3", ["model=generator", "+x.lr=3"], ConfigurationError("lr=3 is\ntoo much"))
    table = outcomes.table()
    assert table.header == ["run", "x.lr", "epsilon", "loss", "error"]
    assert list(table.rows[0]) == ["0-lr_1", "1", show_epsilon(card["claim"]["epsilon"]), "0.5", ""]
    assert list(table.rows[2]) == ["2-lr_3", "3", "–", "–", "lr=3 is too much"]
    outcomes.tell()
    text = (tmp_path / "multirun.md").read_text(encoding="utf-8")
    assert privacy_line(card).partition(", ")[2] in text and "Three runs." in text
    assert (tmp_path / "multirun.md").stat().st_mode & 0o077 == 0, "a result may be of private queries"


@pytest.mark.costly
@pytest.mark.parametrize("weak", [False, True])
def test_what_is_told_after_the_runs_is_what_their_ledgers_charge_and_never_less_than_was_planned(
    weak: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [trial_parts(tmp_path, tmp_path / name) for name in ("a", "b")]
    found = tell_cost([composed(one, str(i)) for i, one in enumerate(runs)], ["seed"])
    planned = epsilon_of(runs)
    assert f"Together epsilon {show_epsilon(planned)} at delta" in found.text
    outcomes = Outcomes(tmp_path, found)
    for name in ("a", "b", "stages"):
        outcomes.add(tmp_path / name, [f"seed={name}"], {})
    Fit(min_free_mb=1).run(runs[0])
    outcomes.tell()
    assert f"Together epsilon {show_epsilon(planned)} at delta" in (tmp_path / "multirun.md").read_text(
        encoding="utf-8"
    )
    records = PrivacyLedger.read(tmp_path / "a" / "privacy_ledger.jsonl").records
    [made] = charged_releases(records)
    (tmp_path / "stages" / "direct").mkdir(parents=True)
    # Two more runs, of which the second repeated all its steps; it lies where a task of several trainings puts it.
    for place, attempts in (("b", 1), ("stages/direct", 2)):
        (tmp_path / place).mkdir(exist_ok=True)
        with PrivacyLedger.open(tmp_path / place / "privacy_ledger.jsonl") as ledger:
            for record in records:
                if record["kind"] == "plan":
                    ledger.append("plan", **{k: v for k, v in record.items() if k not in OF_THE_CHAIN}, nonce=place)
            for key in ((attempt, step) for attempt in range(attempts) for step in range(STEPS)):
                ledger.announce(key, replace(made, count=1))
            if weak:
                ledger.append("event", name="private_evaluation", release=NonPrivateRelease(label="x").to_dict())
    outcomes.tell()
    text = (tmp_path / "multirun.md").read_text(encoding="utf-8")
    assert text.strip() in capsys.readouterr().out
    assert found.siblings is not None
    terms = found.siblings["planned"]
    charged, _ = compose_across_runs(
        [replace(made, count=4 * STEPS)], delta=terms["delta"], neighbours=terms["neighbours"]
    )
    assert charged > 1.2 * planned
    assert (f"Together epsilon {show_epsilon(charged)} at delta" in text) is not weak
    assert f"Together epsilon {show_epsilon(planned)}" not in text
    assert ("ogether epsilon" not in text and "no proved epsilon" in text) is weak


def test_the_folder_of_a_job_is_flat_short_and_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    varied = ["privacy.eps=3,8", "+model.lora={r:4},{r:8}", f"datamodule.pairs={'a/' * 60}x.jsonl,b.jsonl"]
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=1", *varied])
    job = ["seed=1", "privacy.eps=3", "+model.lora={r:4}", f"datamodule.pairs={'a/' * 60}x.jsonl"]
    known: Any = SimpleNamespace(
        mode=RunMode.MULTIRUN, overrides=SimpleNamespace(task=job),
        sweeper=SimpleNamespace(_target_="hydra.BasicSweeper", get=lambda name: None),
    )  # fmt: skip
    monkeypatch.setattr(jobs, "HydraConfig", SimpleNamespace(get=lambda: known))
    monkeypatch.setattr(jobs.GlobalHydra, "instance", lambda: SimpleNamespace(config_loader=lambda: None))
    first, second = jobs.job_name(0), jobs.job_name(1)
    assert first.startswith("0-eps_3-lora_r-4") and first != second
    assert first.endswith("-pairs_x.jsonl") and "a-a" not in first, "a card takes the name of the folder"
    assert len(first) <= 64 and not set(first) & set("/=,{}: ")
    names, runs = jobs.swept()
    assert names == ["privacy.eps", "+model.lora", "datamodule.pairs"] and runs is not None and len(runs) == 8
    assert runs[0] == job


@pytest.mark.parametrize(
    ("sweeper", "goes_on"),
    [
        ({"sampler": {"seed": 3}, "storage": None}, True),
        ({"sampler": {"seed": None}, "storage": None}, False),
        ({"sampler": {"_target_": "GridSampler"}}, False),
        ({"sampler": {"seed": 3}, "storage": "sqlite:///study.db"}, False),
        ({"params": {"seed": "choice(1,2)"}, "search_space": {"seed": {"seed": 1}}}, False),
        ({"optim": {"seed": 5}}, True),
    ],
)
def test_a_sweeper_goes_on_only_if_it_proposes_the_same_settings_again(
    sweeper: dict[str, Any], goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = OmegaConf.create({"sweeper": {"_target_": "x.OptunaSweeper", **sweeper}, "sweep": {"dir": str(tmp_path)}})
    monkeypatch.setattr(jobs, "HydraConfig", SimpleNamespace(get=lambda: made))
    resumed, fresh = (OmegaConf.create({"resume": value}) for value in (True, False))
    jobs.refuse_other_proposals(resumed)  # nothing was begun there
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "privacy_ledger.jsonl").touch()
    jobs.refuse_other_proposals(fresh)
    if goes_on:
        jobs.refuse_other_proposals(resumed)
        return
    with pytest.raises(ResumeError, match=r"resume=true.*hydra\.sweeper\."):
        jobs.refuse_other_proposals(resumed)
    made.sweeper._target_ = "hydra.BasicSweeper"
    jobs.refuse_other_proposals(resumed)


def multirun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""}
    log = f"datamodule.pairs={write_log(folder)}"
    return subprocess.run(
        [sys.executable, "train.py", "-m", *TINY, log, f"hydra.sweep.dir={folder / 'sweep'}", *words],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_sweep_of_optuna_goes_on_by_its_seed_and_is_refused_without_one(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    sweep = ["debug=tiny", "hydra/sweeper=optuna", "objective=privacy/eps_spent", "hydra.sweeper.n_jobs=1",
             "model.optimizer.lr=interval(0.0001,0.01)", "hydra.sweep.subdir='${hydra:job.num}'"]  # fmt: skip
    call = partial(multirun, tmp_path, *sweep)
    seeded = ["hydra.sweeper.sampler.seed=5", "hydra.sweeper.n_trials=2"]
    assert (done := call(*seeded)).returncode == 0, done.stderr
    one = tmp_path / "sweep" / "1"
    before, head = contents(tmp_path / "sweep" / "0"), (one / "privacy_ledger.jsonl").read_bytes()
    (one / "privacy_card.json").unlink()  # as if it had been interrupted
    refused = call("hydra.sweeper.n_trials=2", "resume=true")
    assert refused.returncode == cli.USER_ERROR and "hydra.sweeper.sampler.seed" in refused.stderr
    assert (one / "privacy_ledger.jsonl").read_bytes() == head
    assert (done := call(*seeded[:1], "hydra.sweeper.n_trials=3", "resume=true")).returncode == 0, done.stderr
    assert contents(tmp_path / "sweep" / "0") == before and (one / "privacy_card.json").is_file()
    assert (tmp_path / "sweep" / "2" / "privacy_card.json").is_file()


@pytest.mark.slow
def test_a_multirun_tells_cost_then_table_and_refuses_a_setting_before_the_first_run(tmp_path: Path) -> None:
    call = partial(multirun, tmp_path)
    for bad, named in (("privacy.eps=3,-1", "privacy.eps=-1"), ("trainer=cpu,gpu", "trainer cannot be built")):
        refused = call(bad, f"hydra.sweep.dir={tmp_path / 'refused'}")
        assert refused.returncode == cli.USER_ERROR and named in refused.stderr and "Traceback" not in refused.stderr
    assert not list(tmp_path.rglob("privacy_ledger.jsonl"))
    refused = call("privacy.eps=3,8", "callbacks.card.tuning_data=none")
    assert refused.returncode == cli.USER_ERROR and "callbacks.card.tuning_data=none" in refused.stderr
    assert not list(tmp_path.rglob("privacy_ledger.jsonl"))
    done = call("privacy.eps=3,8")
    assert done.returncode == 0, done.stderr
    cost, table = done.stdout.index("Together epsilon"), done.stdout.index("| run | privacy.eps |")
    assert cost < done.stdout.index("privacy card: ") < table
    assert {path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()} == {"0-eps_3", "1-eps_8"}
    seeds = call("seed=1,2", "callbacks.card.tuning_data=none", f"hydra.sweep.dir={tmp_path / 'seeds'}")
    assert seeds.returncode == 0, seeds.stderr
    for name in ("0-seed_1", "1-seed_2"):
        told = read_card(tmp_path / "seeds" / name)["tuning"]
        assert told["data"] == "none" and told["accounted"] is False and told["siblings"]["runs"] == 2
        assert f"Together epsilon {show_epsilon(told['siblings']['planned']['epsilon'])}" in seeds.stdout
