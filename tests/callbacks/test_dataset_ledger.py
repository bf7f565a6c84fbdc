"""Runs of the training loop that share one data-set ledger."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from rank_runs import Server, told
from stand_ins import Killed, Numbers, Regression, StopAfter, dp, fit, records

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.cards.text import card_markdown
from lit_dpret.errors import BudgetExceededError, ConfigurationError, LedgerError, PrivacyViolation, ResumeError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import Release, merge, release_from_dict
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger.dataset_account import DatasetAccount
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.run_ledger import charged_releases, counted_in, noise_keys
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream

DELTA = 1 / 400
ALONE: dict[str, Any] = {"dataset_ledger": None, "total_eps": None}
NOISE = 2.0  # of little noise the accounting takes longer than the runs
LIMIT = 0.45  # one run costs 0.271, two 0.400, three 0.503


def module(tmp_path: Path, total_eps: float | None = LIMIT, **settings: Any) -> Regression:
    L.seed_everything(0, verbose=False)
    chosen = {"noise_multiplier": NOISE, "dataset_ledger": tmp_path / "data.jsonl", "total_eps": total_eps}
    return Regression(privacy=dp(tmp_path, **chosen | settings))


def total(tmp_path: Path) -> Any:
    budget = PrivacyBudget(eps=1.0, delta=DELTA)
    return DatasetLedger(tmp_path / "data.jsonl", total_eps=None, budget=budget).total()


def cost(*folders: Path) -> float:
    releases: list[Release] = []
    for folder in folders:
        releases += charged_releases(records(folder))
    return epsilon(releases, delta=DELTA, neighbours="zero_out")


def entries(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]


def train(folder: Path, module: Regression, **settings: Any) -> None:
    """A run under plain Poisson sampling: no cap has to be chosen, which takes longer than the run."""
    fit(folder, module, Numbers(sampling="poisson"), **settings)


def stopped(folder: Path, module: Regression, *, after: int, extra: Sequence[L.Callback] = (), **settings: Any) -> None:
    """A run that breaks off ``after`` so many steps; all six of them are a run to its end, and none is no run."""
    if after == 6:
        train(folder, module, extra=extra, **settings)
    elif after:
        with pytest.raises(RuntimeError, match="stop"):
            train(folder, module, extra=[*extra, StopAfter(after)], **settings)


class Watch(L.Callback):
    """What stands in the ledger of the data set before each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, list[dict[str, Any]]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self.seen.extend(entries(self.folder)[-1:])


@pytest.mark.costly
def test_runs_reserve_all_steps_and_add_up_until_the_limit_refuses_one_before_anything_is_made(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name, module(tmp_path), extra=[watch := Watch(tmp_path)])
        assert watch.seen[0]["kind"] == "reserve", "before the first coin"
        [planned] = watch.seen[0]["releases"]
        assert (planned["count"], planned["noise_multiplier"]) == (6, NOISE)
    value = cost(tmp_path / "a", tmp_path / "b")
    assert total(tmp_path).epsilon == pytest.approx(value, rel=1e-12) and 0.28 < value < LIMIT
    with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps=0\.45 .* 2 other runs") as refusal:
        train(tmp_path / "c", module(tmp_path))
    assert f"{value:.4g}" in str(refusal.value)
    assert not (tmp_path / "c" / "privacy_ledger.jsonl").exists()
    assert total(tmp_path).epsilon == pytest.approx(value, rel=1e-12)


@pytest.mark.costly
def test_a_run_that_ends_early_is_counted_as_planned_until_it_goes_on_to_its_end(tmp_path: Path) -> None:
    """When it ended may follow from what it had released, which nobody but its plan bounds."""
    stopped(tmp_path / "a", module(tmp_path), after=2)
    assert entries(tmp_path)[-1]["kind"] == "settle"
    assert total(tmp_path).running == 0
    early = total(tmp_path).epsilon
    assert len(noise_keys(records(tmp_path / "a"))) == 2 and early > 1.5 * cost(tmp_path / "a")
    train(tmp_path / "a", module(tmp_path), resume=True)
    assert early == pytest.approx(cost(tmp_path / "a"), rel=1e-12) == total(tmp_path).epsilon


class StopBeforeTheFirstStep(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        raise RuntimeError("stop")


@pytest.mark.costly
def test_a_second_fit_with_the_same_accountant_reserves_its_steps_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        accountant = PrivacyAccountant(run_dir=tmp_path / name, eps_log_points=1)
        with pytest.raises(RuntimeError, match="stop"):
            train(tmp_path / name, module(tmp_path), accountant=accountant, extra=[StopBeforeTheFirstStep()])
        accountant.resume = True
        train(tmp_path / name, module(tmp_path), accountant=accountant)
    assert total(tmp_path).epsilon == pytest.approx(cost(tmp_path / "a", tmp_path / "b"), rel=1e-12)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "privacy_ledger.jsonl").touch()  # of a run that was killed as it began
    refused = PrivacyAccountant(run_dir=tmp_path / "c", resume=True, eps_log_points=1)
    for _ in range(2):
        with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps=0\.45"):
            train(tmp_path / "c", module(tmp_path), accountant=refused)
    assert noise_keys(records(tmp_path / "c")) == []


def test_a_step_before_any_reservation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DatasetAccount, "reserve", lambda account: None)
    with pytest.raises(BudgetExceededError, match=r"not reserved in privacy\.dataset_ledger"):
        train(tmp_path / "a", module(tmp_path))
    assert noise_keys(records(tmp_path / "a")) == []


@pytest.mark.costly
def test_a_killed_run_stays_charged_with_all_it_reserved_until_it_resumes(tmp_path: Path, server: Server) -> None:
    mode = {"name": "dp_sgd", "eps": 3.0, "delta": None, "accountant": "pld", "noise_multiplier": NOISE}
    counted = {"dataset_ledger": str(tmp_path / "data.jsonl"), "total_eps": LIMIT}
    given = {"mode": mode | counted, "dropout": 0.1, "replay": "auto", "doom": {"whose": -1, "at": 3}}
    assert server.run("fit", tmp_path / "a", world=1, **given) == [-9], told(tmp_path / "a", 0)
    whole = [release_from_dict(release) for release in entries(tmp_path)[-1]["releases"]]
    assert [release.count for release in whole] == [6] and len(noise_keys(records(tmp_path / "a"))) == 3
    assert total(tmp_path).running == 1
    assert len(list(tmp_path.glob("data.jsonl.*.lock"))) == 1, "of the killed run; nobody holds it"
    assert total(tmp_path).epsilon == epsilon(whole, delta=DELTA, neighbours="zero_out") > cost(tmp_path / "a")
    train(tmp_path / "a", module(tmp_path), resume=True)
    assert (total(tmp_path).running, total(tmp_path).runs) == (0, 1)
    assert total(tmp_path).epsilon == pytest.approx(cost(tmp_path / "a"), rel=1e-12)
    assert len(noise_keys(records(tmp_path / "a"))) == 6, "repeated bit by bit, nothing is paid twice"
    assert list(tmp_path.glob("*.lock")) == []


@pytest.mark.costly
def test_steps_repeated_with_fresh_noise_are_reserved_too(tmp_path: Path) -> None:
    settings = {"eps": 8.0}
    stopped(tmp_path / "a", module(tmp_path, **settings), after=3)
    accountant = PrivacyAccountant(run_dir=tmp_path / "a", resume=True, replay="never", eps_log_points=1)
    train(tmp_path / "a", module(tmp_path, **settings), accountant=accountant, resume=True)
    reserved = [entry for entry in entries(tmp_path) if entry["kind"] == "reserve"][-1]["releases"]
    charged = merge(charged_releases(records(tmp_path / "a")))
    assert [release["count"] for release in reserved] == [release.count for release in charged] == [7]


def test_less_noise_than_reserved_is_reserved_anew_and_refused_past_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, privatize = KeyedStream.normal, DPSGD.privatize

    def weaker(self: Any, *given: Any, **key: Any) -> Any:
        return replace(privatize(self, *given, **key), noise_std=0.2 * self._plan.noise_std)

    monkeypatch.setattr(KeyedStream, "normal", lambda *a, **k: honest(*a, **k) * 0.2)
    monkeypatch.setattr(DPSGD, "privatize", weaker)
    mutant = module(tmp_path, eps=500.0)
    with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps=0\.45"):
        train(tmp_path / "a", mutant)
    assert len(noise_keys(records(tmp_path / "a"))) == 1
    last = total(tmp_path)
    assert last.running == 0 and last.epsilon > cost(tmp_path / "a"), "and the steps that it did not come to"


def test_noise_that_is_not_there_leaves_no_budget_of_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = KeyedStream.normal
    with monkeypatch.context() as patch:
        patch.setattr(KeyedStream, "normal", lambda *a, **k: honest(*a, **k) * 0.0)
        with pytest.raises(PrivacyViolation):
            train(tmp_path / "a", module(tmp_path))
    assert total(tmp_path).epsilon == float("inf")
    with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps"):
        train(tmp_path / "b", module(tmp_path))


def test_a_copied_run_folder_does_not_run_beside_its_original(tmp_path: Path) -> None:
    stopped(tmp_path / "a", module(tmp_path), after=2)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    train(tmp_path / "a", module(tmp_path), resume=True)
    before = contents(tmp_path)
    with pytest.raises(LedgerError, match="copied or restored"):
        train(tmp_path / "copy", module(tmp_path), resume=True)
    assert contents(tmp_path) == before, "what was made from the run names its ledger and its card"
    assert total(tmp_path).epsilon == pytest.approx(cost(tmp_path / "a"), rel=1e-12)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class GoOnInACopy(L.Callback):
    """Copies the run folder in the middle of the run, and resumes the copy while the original waits."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.tmp_path, self.settings = tmp_path, settings
        self.refusal: LedgerError | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not batch.last or batch.step + 1 != 2:
            return
        shutil.copytree(self.tmp_path / "a", self.tmp_path / "copy")
        before = contents(self.tmp_path / "copy")
        accountant = PrivacyAccountant(run_dir=self.tmp_path / "copy", resume=True, replay="never", eps_log_points=1)
        try:
            train(self.tmp_path / "copy", module(self.tmp_path, **self.settings), accountant=accountant, resume=True)
        except LedgerError as error:
            self.refusal = error
        assert contents(self.tmp_path / "copy") == before


def test_a_copied_run_folder_does_not_run_while_its_original_does(tmp_path: Path) -> None:
    copying = GoOnInACopy(tmp_path, eps=8.0)
    accountant = PrivacyAccountant(run_dir=tmp_path / "a", replay="never", eps_log_points=1)
    train(tmp_path / "a", module(tmp_path, eps=8.0), accountant=accountant, extra=[copying], save_every=1)
    assert "already running, in this folder or in a copy of it" in str(copying.refusal)
    assert len(noise_keys(records(tmp_path / "copy"))) == 2, "the two steps that were copied, and no other"
    assert total(tmp_path).epsilon == pytest.approx(cost(tmp_path / "a"), rel=1e-12)
    assert list(tmp_path.glob("*.lock")) == []


@pytest.mark.costly
@pytest.mark.parametrize("other", [None, "other.jsonl"], ids=["without", "another"])
def test_a_run_does_not_leave_its_data_sets_ledger_on_resume(tmp_path: Path, other: str | None) -> None:
    stopped(tmp_path / "a", module(tmp_path), after=2)
    settings: dict[str, Any] = {"dataset_ledger": other and tmp_path / other, "total_eps": other and LIMIT}
    for _ in range(2):
        with pytest.raises(ResumeError, match=r"without the privacy\.dataset_ledger that counts this run"):
            train(tmp_path / "a", module(tmp_path, **settings), resume=True)
    assert len(noise_keys(records(tmp_path / "a"))) == 2
    assert other is None or not (tmp_path / other).exists()  # an empty one would give the next run the whole budget
    train(tmp_path / "a", module(tmp_path), resume=True)
    assert total(tmp_path).epsilon == pytest.approx(cost(tmp_path / "a"), rel=1e-12)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_is_refused_begins_no_ledger_of_its_data_set(tmp_path: Path, resume: bool) -> None:
    stopped(tmp_path / "a", module(tmp_path, **ALONE), after=2)
    settings: dict[str, Any] = {"dataset_ledger": tmp_path / "new.jsonl", "total_eps": LIMIT, "max_grad_norm": 0.123}
    with pytest.raises(ResumeError):
        train(tmp_path / "a", module(tmp_path, **settings), resume=resume)
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.costly
@pytest.mark.parametrize(("made", "raced"), [(2, False), (2, True), (6, False)])
def test_a_run_that_a_ledger_refuses_on_resume_goes_on_without_it(
    tmp_path: Path, made: int, raced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    stopped(folder, module(tmp_path, **ALONE), after=made, extra=[PrivacyCard()])
    before = {path: path.read_bytes() for path in folder.glob("privacy_*")}
    with monkeypatch.context() as patch:
        if raced:  # another run reserves what is left after the room was asked for
            patch.setattr(DatasetLedger, "require", lambda self, releases: None)
        with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps"):
            train(folder, module(tmp_path, 0.2), resume=True, extra=[PrivacyCard()])
    if not raced:
        assert {path: path.read_bytes() for path in folder.glob("privacy_*")} == before
        assert not (tmp_path / "data.jsonl").exists(), "nor is a ledger begun for a run that it refuses"
    train(folder, module(tmp_path, **ALONE), resume=True, extra=[PrivacyCard()])
    assert len(noise_keys(records(folder))) == 6 and records(folder)[-1]["reason"] == "finished"
    assert counted_in(records(folder)) == set(), "nor is it a start that the ledger counts"
    (tmp_path / "data.jsonl").unlink(missing_ok=True)
    train(folder, module(tmp_path), resume=True, extra=[PrivacyCard()])
    assert total(tmp_path).epsilon == pytest.approx(cost(folder), rel=1e-12)
    with pytest.raises(ResumeError, match=r"privacy\.dataset_ledger"):
        train(folder, module(tmp_path, **ALONE), resume=True, extra=[PrivacyCard()])


def killed_at_the_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool, resume: bool, **settings: Any
) -> None:
    """A run that dies between the record that names its data set's ledger and the reservation there, or right after."""
    reserve = DatasetLedger.reserve

    def kill(*given: Any, **facts: Any) -> Any:
        if after:
            reserve(*given, **facts)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(DatasetLedger, "reserve", kill)
        # What a kill takes with the process: the file's lock, and the hook by which others' modules are asked.
        patch.setattr(PrivacyAccountant, "on_exception", lambda self, *_: (self._allow_calls(), self._close()))
        with pytest.raises(Killed):
            train(tmp_path / "a", module(tmp_path, **settings), resume=resume)
    assert len(counted_in(records(tmp_path / "a"))) == 1


@pytest.mark.parametrize(("made", "after"), [(0, True), (2, False), (6, True)])
def test_a_run_that_was_killed_as_it_joined_a_ledger_is_counted_there_once(
    tmp_path: Path, made: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path / "a", module(tmp_path, **ALONE), after=made)
    killed_at_the_reservation(tmp_path, monkeypatch, after=after, resume=made > 0)
    before = (tmp_path / "data.jsonl").read_bytes()
    with pytest.raises(ResumeError, match=r"privacy\.dataset_ledger"):
        train(tmp_path / "a", module(tmp_path, **ALONE), resume=True)
    train(tmp_path / "a", module(tmp_path), resume=True)
    assert (tmp_path / "data.jsonl").read_bytes().startswith(before)
    assert (total(tmp_path).runs, total(tmp_path).running) == (1, 0)
    assert len(noise_keys(records(tmp_path / "a"))) == 6
    assert total(tmp_path).epsilon == pytest.approx(cost(tmp_path / "a"), rel=1e-12)


@pytest.mark.costly
@pytest.mark.parametrize("made", [0, 6])
def test_a_run_that_was_killed_as_it_joined_a_ledger_leaves_it_where_there_is_no_room(
    tmp_path: Path, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path / "a", module(tmp_path, **ALONE), after=made)
    killed_at_the_reservation(tmp_path, monkeypatch, after=False, resume=made > 0)
    for name in ("b", "c"):
        train(tmp_path / name, module(tmp_path))
    before = entries(tmp_path)
    with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps"):
        train(tmp_path / "a", module(tmp_path), resume=True)
    assert entries(tmp_path) == before and len(noise_keys(records(tmp_path / "a"))) == made
    train(tmp_path / "a", module(tmp_path, **ALONE), resume=True)
    assert entries(tmp_path) == before and counted_in(records(tmp_path / "a")) == set()
    assert len(noise_keys(records(tmp_path / "a"))) == 6 and records(tmp_path / "a")[-1]["reason"] == "finished"


@pytest.mark.costly
def test_an_older_copy_of_a_ledger_does_not_let_go_of_a_run_that_was_counted(tmp_path: Path) -> None:
    train(tmp_path / "b", module(tmp_path))
    older = (tmp_path / "data.jsonl").read_bytes()
    stopped(tmp_path / "a", module(tmp_path), after=2)
    (tmp_path / "data.jsonl").write_bytes(older)
    train(tmp_path / "c", module(tmp_path))
    with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps"):
        train(tmp_path / "a", module(tmp_path), resume=True)
    with pytest.raises(ResumeError, match=r"privacy\.dataset_ledger"):
        train(tmp_path / "a", module(tmp_path, **ALONE), resume=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dataset_ledger": None}, r"privacy\.dataset_ledger"),
        ({"total_eps": 0.0}, r"privacy\.total_eps=0"),
        ({"total_eps": float("nan")}, r"privacy\.total_eps=nan"),
        ({"total_eps": None}, r"privacy\.total_eps"),
        ({"dataset_ledger": "a/data.jsonl"}, "inside the run folder"),
    ],
)
def test_settings_that_limit_nothing_and_a_ledger_in_the_run_folder_are_refused(
    tmp_path: Path, settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=named):
        train(tmp_path / "a", module(tmp_path, **settings))


@pytest.mark.costly
def test_the_card_states_the_total_of_one_unit_when_the_run_ended(tmp_path: Path) -> None:
    train(tmp_path / "a", module(tmp_path))
    with pytest.raises(ConfigurationError, match=r"privacy\.unit=user"):
        train(tmp_path / "other", module(tmp_path, unit="user"))
    train(tmp_path / "b", module(tmp_path), extra=[PrivacyCard(run_dir=tmp_path / "b")])
    card = read_card(tmp_path / "b" / "privacy_card.json")
    stated = card["accounting"]["dataset_total"]
    assert stated["epsilon"] == pytest.approx(cost(tmp_path / "a", tmp_path / "b"), rel=1e-12)
    assert stated["epsilon"] > card["claim"]["epsilon"]
    assert (stated["runs"], stated["running"], stated["total_eps"], stated["delta"]) == (2, 0, LIMIT, DELTA)
    told = [each["text"] for each in card["assumptions"] if "total of all runs" in each["text"]]
    assert len(told) == 1 and verify_card(card, tmp_path / "b" / "privacy_ledger.jsonl") == []
    assert "all runs on this data set" in card_markdown(card)


def test_a_total_is_refused_beside_a_loss_that_is_shown(tmp_path: Path) -> None:
    shown = module(tmp_path)
    shown.log_private_loss = True
    with pytest.raises(ConfigurationError, match="log_private_loss=true"):
        train(tmp_path / "run", shown)
    assert not (tmp_path / "data.jsonl").exists(), "before anything is counted"
