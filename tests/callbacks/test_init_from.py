"""`init_from` in a whole run: the model is taken over, its cost is claimed, its own budget stays its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from cards import forge
from stand_ins import Numbers, Regression, StopAfter, dp, fit, records

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.callbacks.doctor import examine
from lit_dpret.cards.amendments import note_not_covered
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.cards.start import read_start
from lit_dpret.cards.verification import verify_chain
from lit_dpret.cli import build_parts, run
from lit_dpret.errors import BudgetExceededError, ConfigurationError, LedgerError, ResumeError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.budget import EACH_ROW, PARTLY_NAMED, UNSAID, PrivacyBudget
from lit_dpret.privacy.ledger.run_ledger import charged_releases
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.plan import PrivacyPlan


class Saved(Regression):
    """A regression that starts from what another one saved, if it is given a folder."""

    def __init__(self, *, pretrained: Path | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.pretrained = None if pretrained is None else str(pretrained)
        if pretrained is not None:
            self.load_state_dict(torch.load(pretrained / "weights.pt", weights_only=True))

    def save_model(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "tower").mkdir(exist_ok=True)
        for place in (folder, folder / "tower"):
            torch.save(self.state_dict(), place / "weights.pt")


def train(
    folder: Path,
    start: Path | None = None,
    *,
    named: bool = True,
    resume: bool = False,
    tuning: dict[str, Any] | None = None,
    extra: Sequence[L.Callback] = (),
    data: Any = None,
    mode: DPSGD | None = None,
    **privacy: Any,
) -> dict[str, Any]:
    L.seed_everything(0, verbose=False)
    mode = mode or dp(folder.parent, **{"noise_multiplier": 4.0} | privacy)
    data = data or Numbers(sampling="poisson")
    module = Saved(privacy=mode, pretrained=None if start is None else start / "model")
    accountant = PrivacyAccountant(run_dir=folder, resume=resume, eps_log_points=1, init_from=start if named else None)
    card = PrivacyCard(run_dir=folder, **(tuning or {}))
    fit(folder, module, data, resume=resume, accountant=accountant, extra=[card, *extra], steps=4)
    return read_card(folder)


def rows(*, duplicates: str = "keep", unit_by: str | None = None, size: int = 200) -> Numbers:
    """Data whose equal texts may be one unit, and whose rows may be units because nothing names those of one query."""
    data = Numbers(size, sampling="poisson", expected_batch_size=20 if size == 200 else 2)
    data.duplicates, data.unit_by = duplicates, unit_by
    return data


few = partial(rows, size=8)  # its own delta, 1/16, would allow publishing twelve of the 200 units of another
merged = partial(rows, duplicates="merge")
without_ids = partial(rows, unit_by=EACH_ROW)
unsaid = partial(rows, unit_by=UNSAID)
partly_named = partial(rows, unit_by=PARTLY_NAMED)  # one record without an id does not make all others rows


def own_cost(folder: Path) -> float:
    return epsilon(charged_releases(records(folder)), delta=1 / 400, neighbours="zero_out")


@pytest.mark.costly
def test_a_run_from_a_private_run_claims_both_and_budgets_its_own(tmp_path: Path) -> None:
    parent, child = tmp_path / "parent", tmp_path / "child"
    alone = train(parent)["claim"]["epsilon"]
    with pytest.raises(ConfigurationError, match="Name its run as init_from"):
        train(tmp_path / "unnamed", parent, named=False)
    card = train(child, parent)
    assert own_cost(child) == pytest.approx(alone), "four steps each: the budget is that of this run"
    assert alone < card["claim"]["epsilon"] < 2 * alone
    assert card["accounting"]["init_from"]["epsilon_of_this_run"] == pytest.approx(alone)
    assert verify_card(card, child / "privacy_ledger.jsonl", folder=child / "model") == []
    assert read_start(parent / "model", public=False).facts == read_start(parent, public=False).facts
    again = train(child, parent, resume=True)
    assert again["claim"]["epsilon"] == card["claim"]["epsilon"]


@pytest.mark.slow
def test_a_small_second_run_states_its_claim_at_the_delta_of_the_many_behind_its_start(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    train(first)
    alone = train(tmp_path / "alone", data=few())
    assert alone["claim"]["delta"] == 1 / 16
    card = train(second, first, data=few())
    parts = [charged_releases(records(folder)) for folder in (first, second)]
    both = epsilon([*parts[0], *parts[1]], delta=1 / 400, neighbours="zero_out")
    assert (card["claim"]["delta"], card["claim"]["epsilon"]) == (1 / 400, pytest.approx(both, rel=1e-9))
    assert records(second)[0]["plan"]["budget"]["delta"] == 1 / 400, "the noise is planned for it"
    assert {n: card["accounting"]["init_from"][n] for n in ("delta", "n_public")} == {"delta": 1 / 400, "n_public": 200}
    assert verify_card(card, second / "privacy_ledger.jsonl", folder=second / "model") == []
    assert verify_chain(second, parents=[first]).failed == []
    for number, given in enumerate((None, 1e-2)):  # two runs on, and where a larger constant is declared
        claim = train(tmp_path / f"third{number}", second, data=few(), delta=given)["claim"]
        assert claim["delta"] == 1 / 400
    assert train(third, second, delta=1e-4)["claim"]["delta"] == 1e-4, "a smaller one is taken as it is"


def test_the_doctor_plans_at_the_delta_of_the_start_and_a_mode_that_does_not_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "first")
    module = Saved(privacy=dp(tmp_path, noise_multiplier=4.0), pretrained=tmp_path / "first" / "model")
    accountant = PrivacyAccountant(run_dir=tmp_path / "second", init_from=tmp_path / "first")
    trainer = L.Trainer(accelerator="cpu", max_steps=4, callbacks=[accountant], logger=False)
    planned = examine(trainer, module, few()).planned
    assert planned is not None and planned.plan is not None
    assert planned.plan.budget.delta == 1 / 400
    mode = OwnDelta(eps=3.0, noise_multiplier=4.0, max_grad_norm=1.0, secret_file=tmp_path / "secret")
    with pytest.raises(ConfigurationError, match=r"privacy\.delta=0\.05, but init_from"):
        train(tmp_path / "second", tmp_path / "first", data=few(), mode=mode)


@pytest.mark.costly
def test_a_run_whose_units_are_merged_texts_is_composed_with_none_whose_units_are_ids(tmp_path: Path) -> None:
    ids, texts = tmp_path / "ids", tmp_path / "texts"
    assert train(ids)["claim"]["duplicates"] == "keep"
    assert train(texts, data=merged())["claim"]["duplicates"] == "merge"
    for start, data in ((ids, merged()), (texts, None)):
        with pytest.raises(ConfigurationError, match=r"datamodule\.duplicates=.*, but init_from"):
            train(tmp_path / "mixed", start, data=data)
    card = train(tmp_path / "both", texts, data=merged())
    assert card["claim"]["duplicates"] == "merge" and "one unit" in card["claim"]["duplicates_policy"]
    assert verify_chain(tmp_path / "both", parents=[texts]).failed == []
    forged = forge(card, duplicates="keep")
    assert any("claim.duplicates" in one for one in verify_card(forged, tmp_path / "both" / "privacy_ledger.jsonl"))


@pytest.mark.costly
def test_units_with_ids_rows_without_and_a_log_in_which_some_records_have_one_are_not_composed(tmp_path: Path) -> None:
    ids, alone, partly = (tmp_path / name for name in ("ids", "alone", "partly"))
    train(ids)
    train(alone, data=without_ids())
    train(partly, data=partly_named())
    mixed = (
        (ids, without_ids),
        (alone, lambda: None),
        (alone, partly_named),
        (partly, without_ids),
        (partly, partly_named),
    )
    for start, data in mixed:
        with pytest.raises(ConfigurationError, match=r"datamodule\.columns"):
            train(tmp_path / "mixed", start, data=data())
    train(tmp_path / "own", data=unsaid())
    for start in (ids, tmp_path / "own"):
        with pytest.raises(ConfigurationError, match=r"unit_by"):
            train(tmp_path / "mixed", start, data=unsaid())
    train(tmp_path / "both", alone, data=without_ids())
    assert verify_chain(tmp_path / "both", parents=[alone]).failed == []


def test_rows_that_are_units_are_no_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.unit=user"):
        train(tmp_path / "users", data=without_ids(), unit="user")
    assert not (tmp_path / "users" / "privacy_ledger.jsonl").exists()


class OwnPlan(DPSGD):
    """A mode that makes its plan by itself."""

    def plan(self, request: Any, **given: Any) -> PrivacyPlan:
        plan = super().plan(request, **given)
        return replace(plan, budget=replace(plan.budget, duplicates="keep"))


def test_a_mode_whose_plan_is_about_other_units_than_the_data_is_refused(tmp_path: Path) -> None:
    mode = OwnPlan(eps=3.0, noise_multiplier=4.0, max_grad_norm=1.0, secret_file=tmp_path / "secret")
    with pytest.raises(ConfigurationError, match=r"datamodule\.duplicates=keep"):
        train(tmp_path / "run", data=merged(), mode=mode)


class OwnDelta(DPSGD):
    """A mode that makes its budget by itself."""

    def budget(self, public_units: int | None) -> PrivacyBudget:
        return PrivacyBudget(eps=self.eps, delta=0.05, unit=self.unit, neighbours=self.neighbours)


@pytest.mark.costly
def test_a_start_that_an_older_copy_of_the_ledger_does_not_know_is_refused(tmp_path: Path) -> None:
    ledger = {"dataset_ledger": tmp_path / "data.jsonl", "total_eps": 50.0}
    train(tmp_path / "other", **ledger)
    shutil.copy2(tmp_path / "data.jsonl", tmp_path / "copy.jsonl")
    train(tmp_path / "parent", **ledger)
    with pytest.raises(LedgerError, match=r"privacy\.dataset_ledger"):
        train(tmp_path / "child", tmp_path / "parent", **ledger | {"dataset_ledger": tmp_path / "copy.jsonl"})
    train(tmp_path / "child", tmp_path / "parent", **ledger)


@pytest.mark.costly
def test_a_run_goes_on_from_a_start_that_was_moved_and_whose_card_tells_more(tmp_path: Path) -> None:
    train(tmp_path / "parent")
    before = train(tmp_path / "child", tmp_path / "parent")
    for place in (tmp_path / "parent", tmp_path / "parent" / "model"):
        assert note_not_covered(place, "a score", computed="private queries")
    (tmp_path / "parent").rename(tmp_path / "moved")
    after = train(tmp_path / "child", tmp_path / "moved", resume=True)
    assert after["claim"] == before["claim"]
    assert verify_card(after, tmp_path / "child" / "privacy_ledger.jsonl", folder=tmp_path / "child" / "model") == []
    train(tmp_path / "other")
    with pytest.raises(ResumeError, match="init_from"):
        train(tmp_path / "child", tmp_path / "other", resume=True)


SEARCH = {"tuning_data": "private", "tuning_method": "random_stopping", "tuning_mean_runs": 2.0}


@pytest.mark.costly
@pytest.mark.parametrize("tuning", [{"tuning_data": "public"}, SEARCH])
def test_how_the_settings_of_the_start_were_chosen_stays_open_in_what_is_trained_from_it_unless_on_public_data(
    tmp_path: Path, tuning: dict[str, Any]
) -> None:
    train(tmp_path / "parent", tuning=tuning)
    card = train(tmp_path / "child", tmp_path / "parent", tuning={"tuning_data": "none"})
    told = (card["tuning"]["data"], card["tuning"]["accounted"])
    if tuning["tuning_data"] == "public":
        assert told == ("none", True)
        return
    assert told == (tuning["tuning_data"], False)
    assert "NOT ACCOUNTED" in card["tuning"]["text"] and card["tuning"]["text"] in card["cautions"]
    assert any("hyper-parameters" in gap for gap in card["not_covered"])
    assert verify_card(card, tmp_path / "child" / "privacy_ledger.jsonl") == []


def test_a_search_by_random_stopping_is_refused_beside_a_ledger_that_counts_its_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.dataset_ledger"):
        train(tmp_path / "run", tuning=SEARCH, dataset_ledger=tmp_path / "total.jsonl", total_eps=50.0)


def test_no_other_way_to_write_the_folder_hides_a_private_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "parent")
    inner = tmp_path / "parent" / "model"
    (tmp_path / "link").symlink_to(inner, target_is_directory=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "parent")
    tower = inner / "tower"
    assert not (tower / "privacy_card.json").is_file(), "a part of the artefact, and the card lies above"
    for number, name in enumerate((str(inner), "~/parent/model", "model", str(tmp_path / "link"), str(tower))):
        module = Saved(privacy=dp(tmp_path, noise_multiplier=4.0))
        module.pretrained = name
        with pytest.raises(ConfigurationError, match="carries a privacy card"):
            fit(tmp_path / str(number), module, Numbers(sampling="poisson"), steps=4)
    ready = Saved(privacy=dp(tmp_path, noise_multiplier=4.0))  # a model that was loaded before, as an object
    ready.part = torch.nn.Identity()
    ready.part.config = SimpleNamespace(_name_or_path=str(tower))  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="carries a privacy card"):
        fit(tmp_path / "ready", ready, Numbers(sampling="poisson"), steps=4)
    with pytest.raises(ConfigurationError, match=r"part of an artefact described by"):
        read_start(tower, public=True)


def test_links_to_private_weights_and_a_name_on_the_hub_hide_no_private_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "parent")
    inner, linked, broken = tmp_path / "parent" / "model", tmp_path / "linked", tmp_path / "broken"
    (inner / "model.safetensors").write_bytes(b"")
    for folder in (linked, broken):
        folder.mkdir()
    (linked / "model.safetensors").symlink_to(inner / "model.safetensors")
    (broken / "privacy_card.json").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "models--me--private"
    shutil.copytree(tmp_path / "parent", cached / "snapshots" / "abc", ignore=shutil.ignore_patterns("checkpoints"))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    for number, name in enumerate((str(linked), str(broken), "me/private")):
        module = Saved(privacy=dp(tmp_path, noise_multiplier=4.0))
        module.pretrained = name
        with pytest.raises(ConfigurationError, match="carries a privacy card"):
            fit(tmp_path / str(number), module, Numbers(sampling="poisson"), steps=4)
    with pytest.raises(ConfigurationError, match=r"init_from_is_public"):
        read_start(linked, public=True)
    module.pretrained = "me/public"
    fit(tmp_path / "public", module, Numbers(sampling="poisson"), steps=1)


@pytest.mark.costly
def test_a_data_set_counts_the_model_that_a_run_starts_from_once(tmp_path: Path) -> None:
    ledger = {"dataset_ledger": tmp_path / "data.jsonl", "total_eps": 50.0}
    parent, child, counted = (tmp_path / name for name in ("parent", "child", "counted"))
    train(parent)
    card = train(child, parent, **ledger)
    told = card["accounting"]["dataset_total"]["epsilon"]
    assert told == pytest.approx(card["claim"]["epsilon"], rel=1e-3), "the parent was counted nowhere else"
    train(counted, child, **ledger)
    three = [r for name in (parent, child, counted) for r in charged_releases(records(name))]
    total = read_card(counted)["accounting"]["dataset_total"]["epsilon"]
    assert total == pytest.approx(epsilon(three, delta=1 / 400, neighbours="zero_out"), rel=1e-3)
    with pytest.raises(ConfigurationError, match="the total of the data set would miss this run"):
        train(tmp_path / "outside", child)
    tight = {"dataset_ledger": tmp_path / "tight.jsonl", "total_eps": told * 0.9}
    with pytest.raises(BudgetExceededError):
        train(tmp_path / "late", parent, **tight)


@pytest.mark.costly
def test_a_start_that_was_resumed_at_its_end_is_counted_once_and_a_run_from_it_goes_on(tmp_path: Path) -> None:
    ledger = {"dataset_ledger": tmp_path / "data.jsonl", "total_eps": 50.0}
    parent, children = tmp_path / "parent", [tmp_path / "one", tmp_path / "two"]
    train(parent)
    before = train(children[0], parent, **ledger)
    train(parent, resume=True)
    assert train(children[0], parent, resume=True, **ledger)["claim"] == before["claim"]
    train(children[1], parent, **ledger)
    made = [release for folder in (parent, *children) for release in charged_releases(records(folder))]
    total = read_card(children[1])["accounting"]["dataset_total"]["epsilon"]
    assert total == pytest.approx(epsilon(made, delta=1 / 400, neighbours="zero_out"), rel=1e-9)


@pytest.mark.costly
def test_copies_of_a_start_that_went_on_by_themselves_are_counted_both(tmp_path: Path) -> None:
    ledger = {"dataset_ledger": tmp_path / "data.jsonl", "total_eps": 50.0}
    parents = [tmp_path / "parent", tmp_path / "copy"]
    with pytest.raises(RuntimeError, match="stop"):
        train(parents[0], extra=[StopAfter(2)])
    shutil.copytree(*parents)
    for number, parent in enumerate(parents):
        train(parent, resume=True)
        train(tmp_path / f"child{number}", parent, **ledger)
    assert len({records(parent)[0]["nonce"] for parent in parents}) == 1
    made = [r for name in ("parent", "copy", "child0", "child1") for r in charged_releases(records(tmp_path / name))]
    total = read_card(tmp_path / "child1")["accounting"]["dataset_total"]["epsilon"]
    assert total == pytest.approx(epsilon(made, delta=1 / 400, neighbours="zero_out"), rel=1e-9)


@pytest.mark.costly
def test_the_knob_takes_the_place_of_the_models_own_start(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_module

    def parts(*overrides: str) -> Any:
        with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
            return compose("train", overrides=["run_dir=run", *overrides])

    for model, key, file in (
        ("generator", "pretrained", "config.json"), ("dual_encoder", "encoder", "modules.json"),
        ("frozen_dual_encoder", "encoder", "config.json"), ("embedding_trainer", "encoder", "net.json"),
    ):  # fmt: skip
        (tmp_path / file).write_text("{}")
        made = build_parts(parts(f"model={model}", f"init_from={tmp_path}")).make_module
        assert made.keywords == {key: str(tmp_path)}  # type: ignore[attr-defined]
        (tmp_path / file).unlink()
    with pytest.raises(ConfigurationError, match="init_from"):
        build_parts(parts(f"init_from={tmp_path}"))
    assert parts(f"init_from={tmp_path}").callbacks.accountant.init_from == str(tmp_path)
    with pytest.raises(ConfigurationError, match="init_from_is_public=true describes init_from"):
        build_parts(parts("init_from_is_public=true"))
    with pytest.raises(ConfigurationError, match="is for task=fit"):
        run(parts("task=evaluate", f"init_from={tmp_path}"))
