"""A run that starts from another one's model claims what both of them cost, and says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cards import DELTA, LAW, NOISE, REFUTED, Run, forge, made_from, make_plan
from dp_accounting.pld.privacy_loss_distribution import from_mixture_gaussian_mechanism
from scipy import stats

from lit_dpret.cards.amendments import note_not_covered, restated
from lit_dpret.cards.card import card_sha256, read_card, subject_of, verify_card, write_card
from lit_dpret.cards.check import recheck
from lit_dpret.cards.file import CARD_NAME
from lit_dpret.cards.lineage import refuse_told_failures
from lit_dpret.cards.start import Start, note_start, read_start
from lit_dpret.cards.text import card_markdown
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import FixedSize, GaussianRelease
from lit_dpret.privacy.ledger.assumptions import RANDOM_WEIGHTS, leaks
from lit_dpret.privacy.ledger.run_ledger import FAILED, LEDGER_NAME, PrivacyLedger
from lit_dpret.privacy.ledger.siblings import note_siblings
from lit_dpret.privacy.ledger.trained import NOTE_NAME, TRAINED_KEY
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, SyntheticData

ONE = GaussianRelease(noise_multiplier=NOISE, law=LAW)


def cost(steps: int) -> float:
    return epsilon([GaussianRelease(noise_multiplier=NOISE, law=LAW, count=steps)], delta=DELTA, neighbours="zero_out")


def begun(folder: Path, start: Path | None = None, *, mode: str = "dp_sgd", public: bool = False, **plan: Any) -> Run:
    """A run whose ledger is begun as the accountant begins it."""
    folder.mkdir()
    run = Run(folder, make_plan(**plan) if mode == "dp_sgd" else None, mode=mode, planned=1)  # none ends early
    if start is not None:
        found = read_start(start, public=public)
        found.check(DPSGD(eps=8.0) if mode == "dp_sgd" else NoPrivacy())
        note_start(run.ledger, found)
    return run


def finished(run: Run, steps: int) -> dict[str, Any]:
    """Take the steps, write the model and the card."""
    run.train(steps)
    model = run.folder / "model"
    model.mkdir()
    (model / "weights").write_text(str(run.folder), encoding="utf-8")
    subject = subject_of("weights", run.folder.name, [model / "weights"], root=model)
    run.write_card(subject=subject, assumptions=leaks(run.ledger.records))
    run.ledger.close()
    return read_card(run.folder)


def test_a_start_from_random_weights_is_told_in_words(tmp_path: Path) -> None:
    card = begun(tmp_path / "run").train(2).card(pretraining={"model": RANDOM_WEIGHTS})
    told = "Training on the private data started from random weights, as declared."
    assert card["pretraining"]["start"] == told and told in card["claim"]["statement"]
    [declared] = [one for one in card["assumptions"] if "random weights" in one["text"]]
    assert "vocabulary" in declared["text"] and declared["holds"] == "unverified"
    assert "a public model" not in str(card)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    finished(begun(tmp_path / "parent"), 10)
    return tmp_path / "parent"


def test_the_claim_is_the_composition_of_both_runs_and_the_card_says_which_is_which(
    parent: Path, tmp_path: Path
) -> None:
    card = finished(begun(tmp_path / "child", parent), 5)
    assert card["claim"]["epsilon"] == pytest.approx(cost(15), rel=1e-9)
    assert cost(15) > max(cost(10), cost(5))
    parts = card["accounting"]["init_from"]
    assert parts["epsilon_of_this_run"] == pytest.approx(cost(5))
    assert parts["epsilon_of_start"] == pytest.approx(cost(10))
    assert card["parents"] == [{"name": "parent", "sha256": card_sha256(parent), "schema": read_card(parent)["schema"]}]
    assert card["mechanism"]["steps_done"] == 5, "what was done is what this run did"
    assert str(tmp_path) not in (tmp_path / "child" / LEDGER_NAME).read_text(encoding="utf-8")
    text = card_markdown(card)
    assert "about both trainings together" in text and "of its own budget of 50" in text
    ledger = tmp_path / "child" / LEDGER_NAME
    assert verify_card(read_card(tmp_path / "child"), ledger) == []
    assert "claim.epsilon" in verify_card(forge(card, epsilon=cost(5)), ledger)[0], "a claim of its own run alone"
    assert len(verify_card(forge({**card, "parents": []}), ledger)) == 1
    third = finished(begun(tmp_path / "grandchild", tmp_path / "child"), 4)
    assert third["claim"]["epsilon"] == pytest.approx(cost(19), rel=1e-9)
    assert [entry["name"] for entry in third["parents"]] == ["child", "parent"]


def test_the_card_states_what_the_claim_of_the_start_rests_on_and_leaves_open(tmp_path: Path) -> None:
    run = begun(tmp_path / "parent")
    run.resume(
        make_plan(), planned_steps=2,
        planted={"canaries": 5, "units": 5, "sha256": "0" * 64, "protocol": "file"},
        assumptions=["The number rests on bounds that were declared for this loss, and not proved here."],
    )  # fmt: skip
    note_siblings(
        run.ledger, {"runs": 2, "private_runs": 2, "without_privacy": [], "varied": ["seed"], "planned": None}
    )
    finished(run, 2)
    note_not_covered(tmp_path / "parent", "the scores of private queries", computed="private queries")
    parent = read_card(tmp_path / "parent")
    open_there = {one["text"] for one in parent["assumptions"] if one["holds"] is not True}
    assert any("declared for this loss" in text for text in open_there)
    before = "parent"
    for name in ("child", "grandchild"):
        run = begun(tmp_path / name, tmp_path / before)
        run.resume(make_plan(), run_id="s", planned_steps=2, secure_rng=True)
        card, before = finished(run, 2), name
        assert {f"Of parent: {text}" for text in open_there} <= {one["text"] for one in card["assumptions"]}
        assert card["claim"]["guarantee"] == "dp" and not card["randomness"]["secure"]
        assert "ChaCha20" in card["randomness"]["rng"] and "Philox" in card["randomness"]["rng"]
        assert any("not cryptographic" in gap for gap in card["not_covered"])
        assert any("scores of private queries" in gap for gap in card["not_covered"])
        assert any(gap.startswith("Of parent, alone: A choice among the 2 runs") for gap in card["not_covered"])
        assert "5 canaries were planted" in card["pretraining"]["start"]
        assert verify_card(card, tmp_path / name / LEDGER_NAME) == []
        for entries in ("assumptions", "not_covered"):
            silent = {**card, entries: [each for each in card[entries] if "private queries" not in str(each)
                                        and "declared for this loss" not in str(each)]}  # fmt: skip
            assert recheck(restated(silent), PrivacyLedger.read(tmp_path / name / LEDGER_NAME)).words != []


def test_a_start_that_private_rows_interrupted_is_told_and_not_handed_on(tmp_path: Path) -> None:
    run = begun(tmp_path / "parent")
    run.step(0)
    run.ledger.append("end", reason=FAILED, steps=1)
    run.step(1)
    finished(run, 0)
    card = finished(begun(tmp_path / "child", tmp_path / "parent"), 2)
    [told] = [one for one in card["assumptions"] if "No private row interrupted" in one["text"]]
    assert told["holds"] is False and card["claim"]["guarantee"] == "dp"
    assert any("No private row interrupted" in banner for banner in card["banners"])
    shutil.rmtree(tmp_path / "parent")
    with pytest.raises(DataError, match="must not be handed on"):
        refuse_told_failures(tmp_path / "child" / CARD_NAME, "task.checkpoint=child", "the weights")


def of_one_person(*runs: tuple[int, int]) -> float:
    """Epsilon by dp-accounting's own mixture, for so many units of one person in so many steps of each run."""
    total: Any = None
    for units, steps in runs:
        in_batch = stats.binom.pmf(np.arange(units + 1), units, LAW.sample_rate)
        one = from_mixture_gaussian_mechanism(NOISE, list(np.arange(units + 1.0)), list(in_batch), True, 1e-3)
        total = one.self_compose(steps) if total is None else total.compose(one.self_compose(steps))
    return float(total.get_epsilon_for_delta(DELTA))


@pytest.mark.costly
@pytest.mark.parametrize(
    "bounds", [(2, 10), *(pytest.param(bounds, marks=pytest.mark.slow) for bounds in ((10, 2), (1, 10)))]
)
def test_what_one_person_contributed_is_judged_by_the_bound_of_each_run(
    bounds: tuple[int, int], tmp_path: Path
) -> None:
    first, second = bounds
    finished(begun(tmp_path / "first", max_units_per_user=first), 10)
    card = finished(begun(tmp_path / "second", tmp_path / "first", max_units_per_user=second), 5)
    assert card["claim"]["user_level_epsilon"] == pytest.approx(of_one_person((first, 10), (second, 5)), rel=5e-3)
    assert (card["claim"]["max_units_per_user"], card["claim"]["max_units_before"]) == (second, [first])
    assert f"up to {first} to a run before this one" in card["claim"]["statement"]
    assert verify_card(card, tmp_path / "second" / LEDGER_NAME) == []
    third = finished(begun(tmp_path / "third", tmp_path / "second", max_units_per_user=3), 4)
    everything = of_one_person((first, 10), (second, 5), (3, 4))
    assert third["claim"]["user_level_epsilon"] == pytest.approx(everything, rel=5e-3)
    assert third["claim"]["max_units_before"] == [second, first]


def test_no_number_for_one_person_is_stated_where_a_run_declared_no_bound(parent: Path, tmp_path: Path) -> None:
    card = finished(begun(tmp_path / "child", parent, max_units_per_user=2), 5)
    assert card["claim"]["user_level_epsilon"] is None
    assert any("declared no bound" in gap for gap in card["not_covered"])
    assert verify_chain(tmp_path / "child", parents=[parent]).failed == []
    card = finished(begun(tmp_path / "grandchild", tmp_path / "child", max_units_per_user=2), 5)
    assert card["claim"]["user_level_epsilon"] is None


def test_a_claim_at_a_delta_that_allows_publishing_somebody_behind_the_start_says_so(
    parent: Path, tmp_path: Path
) -> None:
    """As a ledger shows it whose run came to its delta by itself."""
    assert not any("1/n" in text for text in begun(tmp_path / "child", parent).train(2).card()["cautions"])
    small = replace(make_plan(), budget=replace(make_plan().budget, delta=1 / 16), n_public=8)
    loose = Run(tmp_path / "loose", small)
    note_start(loose.ledger, read_start(parent, public=False))
    assert any("1/n of the run before it" in text for text in loose.train(2).card()["cautions"])


def test_without_a_card_only_a_declaration_makes_a_start_public(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    finished(begun(tmp_path / "open", mode="none"), 1)
    for knob, advised in (("init_from", True), ("task.generator", False)):  # the latter takes no declaration
        for name in ("base", "open"):
            with pytest.raises(ConfigurationError, match=rf"{knob}=") as raised:
                read_start(tmp_path / name, public=False, knob=knob).check(DPSGD(eps=8.0))
            assert ("init_from_is_public" in str(raised.value)) is advised
    card = finished(begun(tmp_path / "child", tmp_path / "base", public=True), 5)
    assert card["claim"]["epsilon"] == pytest.approx(cost(5))
    assert "base, which was declared to be public" in card["claim"]["statement"]
    assert [a["holds"] for a in card["assumptions"] if "as declared" in a["text"]] == ["unverified"]


def note(model: Path, privacy: str) -> None:
    (model / NOTE_NAME).write_text(json.dumps({TRAINED_KEY: [["a run", privacy]]}), encoding="utf-8")


LEFT = ["card", "ledger", "card of the model", "note of the model", "note alone", "ledger of the run around"]


@pytest.mark.parametrize("left", LEFT)
def test_a_private_start_cannot_be_declared_public_while_anything_tells_of_its_run(left: str, parent: Path) -> None:
    model, start = parent / "model", parent
    if left == "card of the model":
        shutil.copy2(parent / CARD_NAME, model)
    if left != "card":
        (parent / CARD_NAME).unlink()
    if left not in ("card", "ledger", "ledger of the run around"):
        (parent / LEDGER_NAME).unlink()
    if left.startswith("note"):
        note(model, "dp_sgd")
    if left in ("note alone", "ledger of the run around"):
        start = model
    with pytest.raises(ConfigurationError, match=r"init_from=.* is declared public") as refused:
        read_start(start, public=True)
    assert refused.value.trap == "T30"
    for name in (NOTE_NAME, CARD_NAME):
        (model / name).unlink(missing_ok=True)
    for name in (LEDGER_NAME, CARD_NAME):
        (parent / name).unlink(missing_ok=True)
    assert read_start(start, public=True).facts["public"], "nothing tells of it any more: it is taken on trust"


def test_a_run_without_privacy_from_a_private_one_says_so_and_is_no_public_start(parent: Path, tmp_path: Path) -> None:
    card = finished(begun(tmp_path / "child", parent, mode="none"), 3)
    assert card["claim"]["guarantee"] == "none" and card["claim"]["epsilon"] is None
    assert card["parents"][0]["sha256"] == card_sha256(parent)
    assert verify_card(card, tmp_path / "child" / LEDGER_NAME) == []
    with pytest.raises(ConfigurationError, match="carries no privacy guarantee"):
        begun(tmp_path / "grandchild", tmp_path / "child")
    for _ in ("with its card", "without"):
        with pytest.raises(ConfigurationError, match="is declared public"):
            read_start(tmp_path / "child", public=True)
        (tmp_path / "child" / CARD_NAME).unlink(missing_ok=True)


@pytest.mark.parametrize("guarantee", ["none", "not_proved"])
def test_a_declaration_is_offered_only_where_it_may_be_accepted(guarantee: str, tmp_path: Path) -> None:
    start = Start(tmp_path, {"public": False, "guarantee": guarantee})
    with pytest.raises(ConfigurationError, match=f"no privacy guarantee .{guarantee}") as refused:
        start.check(DPSGD(eps=1.0))
    assert ("init_from_is_public" in str(refused.value)) is (guarantee == "none")


def test_a_run_without_privacy_on_declared_public_data_is_a_public_start_also_by_its_note(tmp_path: Path) -> None:
    finished(begun(tmp_path / "base", mode="none"), 3)
    with pytest.raises(ConfigurationError, match="carries no privacy guarantee"):
        begun(tmp_path / "refused", tmp_path / "base")
    model = tmp_path / "base" / "model"
    note(model, "none")
    shutil.copy2(tmp_path / "base" / CARD_NAME, model)
    assert read_start(model, public=True).facts["public"]
    card = finished(begun(tmp_path / "child", tmp_path / "base", public=True), 5)
    assert card["claim"]["epsilon"] == pytest.approx(cost(5)) and card["parents"][0]["name"] == "base"


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        (DPSGD(eps=8.0, unit="pair"), r"privacy\.unit=pair, but init_from"),
        (DPSGD(eps=8.0, delta=1e-5, neighbours="add_or_remove"), r"privacy\.neighbours=add_or_remove, but init_from"),
        (SyntheticData(), "the two claims are not composed"),
    ],
)
def test_claims_that_do_not_add_up_are_refused_before_training(mode: Any, named: str, parent: Path) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_start(parent, public=False).check(mode)


@pytest.mark.slow
def test_an_accountant_that_cannot_judge_the_start_is_refused(tmp_path: Path) -> None:
    law = FixedSize(batch_size=50, n=1000)
    run = begun(tmp_path / "parent", law=law, neighbours="replace_one", accountant="rdp")
    finished(run, 2)
    with pytest.raises(ConfigurationError, match=r"privacy\.accountant=pld"):
        read_start(tmp_path / "parent", public=False).check(DPSGD(eps=8.0, neighbours="replace_one"))


def change_ledger(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / LEDGER_NAME
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "other weights": lambda folder: (folder / "model" / "weights").write_text("others", encoding="utf-8"),
    "more weights": lambda folder: (folder / "model" / "more_weights").write_text("others", encoding="utf-8"),
    "ledger edited": lambda folder: change_ledger(folder, lambda text: text.replace('"step":3', '"step":30', 1)),
    "ledger cut": lambda folder: change_ledger(folder, lambda text: "".join(text.splitlines(keepends=True)[:-4])),
    "ledger lost": lambda folder: (folder / LEDGER_NAME).unlink(),
    "claim forged": lambda folder: write_card(forge(read_card(folder), epsilon=0.01), folder),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_start_whose_card_does_not_agree_with_what_lies_there_is_refused(damage: str, parent: Path) -> None:
    DAMAGES[damage](parent)
    with pytest.raises(DataError, match="its card does not"):
        read_start(parent, public=False)


def test_the_model_folder_of_a_run_is_as_good_a_start_as_the_run(parent: Path, tmp_path: Path) -> None:
    for name in ("privacy_card.json", "privacy_card.md", "privacy_card.html"):  # as a run leaves it
        shutil.copy2(parent / name, parent / "model" / name)
    start, whole = (read_start(each, public=False) for each in (parent / "model", parent))
    assert (start.facts, start.ledger) == (whole.facts, whole.ledger)
    copied = shutil.copytree(parent / "model", tmp_path / "copied")
    with pytest.raises(DataError, match=LEDGER_NAME) as refused:
        read_start(copied, public=False)
    assert "does not match" not in str(refused.value)


def test_a_resume_with_another_start_is_refused(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base, private = read_start(tmp_path / "base", public=True), read_start(parent, public=False)
    run = begun(tmp_path / "child")
    note_start(run.ledger, None)
    note_start(run.ledger, private)  # killed between the plan and this record, and resumed: nothing was released
    note_start(run.ledger, private)
    assert sum(record.get("name") == "init_from" for record in run.ledger.records) == 1
    run.step(0)
    for other in (base, None):
        with pytest.raises(ResumeError, match="another init_from: the ledger's run started from parent"):
            note_start(run.ledger, other)
    late = begun(tmp_path / "late")
    late.step(0)
    with pytest.raises(ResumeError, match="started from nothing"):
        note_start(late.ledger, private)


def test_what_is_made_from_the_model_inherits_both_and_shows_no_number_where_nothing_is_proved(
    parent: Path, tmp_path: Path
) -> None:
    finished(begun(tmp_path / "child", parent), 5)
    model, ledger = tmp_path / "child", tmp_path / "child" / "privacy_ledger.jsonl"
    made = made_from(model)
    assert made["claim"]["epsilon"] == pytest.approx(cost(15), rel=1e-9) and verify_card(made, ledger) == []
    assert [entry["name"] for entry in made["parents"]] == ["child", "parent"]
    doubted = made_from(model, assumptions=REFUTED)
    parts = doubted["accounting"]["init_from"]
    assert (parts["epsilon_of_this_run"], parts["epsilon_of_start"]) == (None, None)
    assert "start" not in doubted["pretraining"] and doubted["claim"]["epsilon"] is None
