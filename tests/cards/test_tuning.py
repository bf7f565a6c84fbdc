"""A card never lets a search for hyper-parameters pass for free, and states its cost where one is proved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cards import DELTA, LAW, NOISE, REFUTED, Run, made_from, make_plan

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import verify_card, write_card
from lit_dpret.cards.text import card_html, card_markdown, without_repetition
from lit_dpret.cards.tuning import hides_earlier_tuning, tuning_facts, with_earlier_tuning
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.releases import FixedSize, FullBatch, GaussianRelease, SamplingLaw, TruncatedPoisson
from lit_dpret.privacy.accounting.selection import RandomStopping, selection_epsilon
from lit_dpret.privacy.budget import Neighbours, show_epsilon
from lit_dpret.privacy.ledger.siblings import note_siblings, siblings_of

TRUNCATED = TruncatedPoisson(sample_rate=0.05, cap=90, n=1000)
SEARCH: dict[str, Any] = {"data": "private", "method": "random_stopping", "mean_runs": 10, "runs_law": "geometric"}


def trained(folder: Path, law: SamplingLaw = LAW, neighbours: Neighbours = "zero_out") -> Run:
    return Run(folder / "run", make_plan(law, neighbours=neighbours)).train()


def cost(law: SamplingLaw = LAW, mean: float = 10) -> float:
    run = GaussianRelease(noise_multiplier=NOISE, law=law, count=10)
    return selection_epsilon([run], RandomStopping(mean), delta=DELTA, neighbours="zero_out")


def test_a_declared_search_is_priced_beside_the_claim_and_not_instead_of_it(tmp_path: Path) -> None:
    run = trained(tmp_path)
    card, alone = run.card(tuning=SEARCH), run.card(tuning={"data": "private"})
    assert card["tuning"]["epsilon"] == cost() > card["claim"]["epsilon"] == alone["claim"]["epsilon"]
    assert card["tuning"]["accounted"] is True and alone["tuning"]["accounted"] is False
    for text in (card["claim"]["statement"], card["cautions"][0], card_markdown(card), card_html(card)):
        assert f"epsilon = {show_epsilon(cost())}" in text and "geometric distribution of mean 10" in text
        assert "NOT ACCOUNTED" not in text
    assert any("scored are not covered at all" in gap and show_epsilon(cost()) in gap for gap in card["not_covered"])
    unstated = {key: value for key, value in SEARCH.items() if key != "runs_law"}
    assert run.card(tuning=unstated)["tuning"]["epsilon"] == cost(), "the law is geometric unless it is stated"
    assert run.card(tuning=SEARCH | {"runs_law": 0.0})["tuning"]["epsilon"] < cost()
    doubted = run.card(tuning=SEARCH, assumptions=REFUTED)["tuning"]
    assert doubted["epsilon"] is None and doubted["accounted"] is False, "without a guarantee there is no price"


@pytest.mark.parametrize(("law", "neighbours"), [(TRUNCATED, "add_or_remove"), (LAW, "replace_one")])
def test_a_search_whose_cost_nobody_proved_is_said_to_be_so(
    tmp_path: Path, law: SamplingLaw, neighbours: Neighbours
) -> None:
    card = trained(tmp_path, law, neighbours).card(tuning=SEARCH)
    assert card["claim"]["guarantee"] == "dp"
    assert card["tuning"]["epsilon"] is None and card["tuning"]["accounted"] is False
    for word in ("NOT ACCOUNTED", "not proved", law.kind, neighbours):
        assert word in card["claim"]["statement"]
    assert any("is not accounted" in gap for gap in card["not_covered"])


@pytest.mark.parametrize(
    ("planned", "ran", "charged"),
    [(TRUNCATED, TRUNCATED, TRUNCATED), (LAW, FixedSize(batch_size=50, n=1000), FullBatch())],
)
def test_a_search_is_priced_by_what_its_run_is_charged_with(
    planned: SamplingLaw, ran: SamplingLaw, charged: SamplingLaw, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", make_plan(planned)).train(law=ran.to_dict())
    assert run.card(tuning=SEARCH)["tuning"]["epsilon"] == pytest.approx(cost(charged))


def test_a_derived_artefact_keeps_its_parents_price_in_what_is_not_covered(tmp_path: Path) -> None:
    run = trained(tmp_path)
    path = run.write_card(tuning=SEARCH)
    child, searched = made_from(path, tuning={"data": "none"}), made_from(path, tuning=SEARCH)
    assert any(show_epsilon(cost()) in gap for gap in child["not_covered"])
    assert (child["tuning"]["data"], child["tuning"]["epsilon"]) == ("private", cost()), "post-processing of the chosen"
    assert searched["tuning"]["epsilon"] is None and "NOT ACCOUNTED" in searched["cautions"][0]
    assert "synthetic queries" in searched["not_covered"][0]
    assert verify_card(child, run.path) == verify_card(searched, run.path) == []


@pytest.mark.parametrize("own", ["none", "public", "unknown", "private"])
def test_a_derived_artefact_without_a_claim_states_no_price_of_its_parents_search(own: str, tmp_path: Path) -> None:
    child = made_from(trained(tmp_path).write_card(tuning=SEARCH), tuning={"data": own}, assumptions=REFUTED)
    assert child["claim"]["guarantee"] == "not_proved"
    assert child["tuning"]["accounted"] is False and child["tuning"].get("epsilon") is None
    assert "private data" in child["tuning"]["text"] and "NOT ACCOUNTED" in child["tuning"]["text"]
    for text in (json.dumps(child), card_markdown(child), card_html(child)):
        assert f"epsilon = {show_epsilon(cost())}" not in text


SWEEP: dict[str, Any] = {
    "id": "ab", "trials": 10, "private_runs": 10, "without_privacy": 0, "varied": ["model.optimizer.lr"],
    "metric": None, "total_eps": 80.0, "ledger_delta": DELTA,
    "planned": {"epsilon": 60.0, "delta": DELTA, "unit": "query", "neighbours": "zero_out", "accountant": "pld"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("scored", "own"),
    [*((data, "none") for data in ("none", "public", "private", "synthetic", "unknown")),
     ("private", "public"), ("private", "unknown"), ("unknown", "unknown")],
)  # fmt: skip
def test_what_is_made_from_a_trial_tells_of_the_choice_among_trials(scored: str, own: str, tmp_path: Path) -> None:
    run = trained(tmp_path)
    run.ledger.append("event", name="trial_of", sweep=SWEEP | {"metric_data": scored})
    child = made_from(run.write_card(), tuning={"data": own})
    assert "one of the 10 trials of sweep ab" in child["tuning"]["text"]
    assert child["tuning"]["data"] == ("unknown" if scored == "unknown" else "private")
    bounded = scored in ("none", "public", "private") and own != "unknown"
    assert child["tuning"]["accounted"] is bounded and child["tuning"].get("epsilon") == (80.0 if bounded else None)
    assert bounded or "NOT ACCOUNTED" in child["tuning"]["text"]
    assert any("hyper-parameters" in gap for gap in child["not_covered"])
    assert verify_card(child, run.path) == []


SIBLINGS: dict[str, Any] = {
    "runs": 3, "varied": ["seed"], "private_runs": 3, "without_privacy": 0,
    "planned": {"epsilon": 61.0, "delta": DELTA, "unit": "query", "neighbours": "zero_out", "accountant": "pld"},
}  # fmt: skip


@pytest.mark.parametrize("declared", ["none", "public", "unknown", "private"])
def test_a_card_of_one_of_several_seeds_states_what_a_choice_among_them_costs(declared: Any, tmp_path: Path) -> None:
    run = trained(tmp_path)
    alone = run.card(tuning={"data": declared})
    note_siblings(run.ledger, SIBLINGS)
    note_siblings(run.ledger, SIBLINGS)
    card = run.card(tuning={"data": declared})
    assert card["tuning"]["accounted"] is False and card["tuning"]["data"] == declared
    assert card["tuning"]["siblings"] == SIBLINGS and card["claim"]["epsilon"] == alone["claim"]["epsilon"]
    for text in (card["claim"]["statement"], card["cautions"][0], card_markdown(card), card_html(card)):
        assert "one of 3 that one command started" in text and "epsilon = 61.00" in text
        assert "none of the others spent more than planned" in text
    assert any("61.00" in gap for gap in card["not_covered"])
    assert verify_card(card, run.path) == []
    hidden = json.loads(json.dumps(card)) | {"tuning": alone["tuning"]}
    assert verify_card(hidden, run.path), "the ledger knows of the others"
    child = made_from(write_card(card, run.folder), tuning={"data": "none"})
    assert child["tuning"]["accounted"] is False and "epsilon = 61.00" in child["claim"]["statement"]
    assert not hides_earlier_tuning(child["tuning"], card["tuning"], composed=False)
    if declared in ("none", "public"):
        assert hides_earlier_tuning(alone["tuning"] | {"accounted": False}, card["tuning"], composed=False)
    later = with_earlier_tuning(tuning_facts({"data": "none"}), card["tuning"], "the model", composed=True)
    assert later["accounted"] is False and "epsilon = 61.00" in later["text"]


@pytest.mark.costly
@pytest.mark.parametrize("beyond", ["repeated", "less noise"])
def test_a_run_that_spent_more_than_planned_does_not_state_what_was_planned_for_all(
    beyond: str, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", make_plan())
    note_siblings(run.ledger, SIBLINGS)
    for step in range(6):
        run.step(step)
    for step in range(4, 10) if beyond == "repeated" else range(6, 10):
        weak = {} if beyond == "repeated" else {"noise_std": 0.4}
        run.step(step, attempt=1 if beyond == "repeated" else 0, **weak)
    run.ledger.append("end", reason="finished", steps=10)
    card = run.card(tuning={"data": "none"})
    assert card["claim"]["guarantee"] == "dp" and card["tuning"]["accounted"] is False
    assert card["tuning"]["siblings"]["planned"] is None
    assert "of different ones do not add up" in card["tuning"]["text"]
    child = made_from(write_card(card, run.folder), tuning={"data": "none"})
    for told in (card, child):
        for text in (json.dumps(told), card_markdown(told), card_html(told)):
            assert "61.0" not in text and "more than was planned" in text
        assert ("repeated steps" in told["claim"]["statement"]) is (beyond == "repeated")
    assert verify_card(card, run.path) == verify_card(child, run.path) == []
    stated = json.loads(json.dumps(card))
    stated["tuning"]["siblings"] = SIBLINGS
    assert verify_card(stated, run.path), "the ledger refutes it"


def test_steps_that_the_plan_had_room_for_leave_what_was_planned_for_all(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make_plan())
    note_siblings(run.ledger, SIBLINGS)
    for attempt, steps in ((0, range(3)), (1, range(1, 8))):
        for step in steps:
            run.step(step, attempt=attempt)
    run.ledger.append("end", reason="finished", steps=8)
    # Ten noised sums were planned for and ten are charged, but the run itself goes on to its tenth step.
    assert run.card(tuning={"data": "none"})["tuning"]["siblings"]["planned"] is None
    short = Run(tmp_path / "short", make_plan()).train(4)
    note_siblings(short.ledger, SIBLINGS)
    assert short.card(tuning={"data": "none"})["tuning"]["siblings"] == SIBLINGS


def test_a_run_that_several_commands_went_on_with_is_one_of_the_largest_number(tmp_path: Path) -> None:
    run = trained(tmp_path)
    assert siblings_of(run.ledger.records) is None
    for runs in (2, None, 5):
        note_siblings(run.ledger, SIBLINGS | {"runs": runs, "planned": None})
    card = run.card(tuning={"data": "none"})
    assert card["tuning"]["siblings"]["runs"] is None and "one of several" in card["tuning"]["text"]
    assert "not computed" in card["tuning"]["text"] and verify_card(card, run.path) == []
    told = run.card(tuning=SEARCH)["tuning"]
    assert told["epsilon"] is None and told["accounted"] is False, "its proof needs a secret number of runs"


@pytest.mark.parametrize(
    ("tuning", "accounted", "words"),
    [
        (None, False, "not stated"),
        ({"data": "private", "n_trials": 12}, False, "NOT ACCOUNTED.*12"),
        ({"data": "public", "n_trials": 40}, True, "public data"),
        ({"data": "synthetic"}, False, "NOT ACCOUNTED.*synthetic"),
        ({"data": "none", "n_trials": 1, "note": "Values from the paper."}, True, "Values from the paper"),
    ],
)
def test_how_hyper_parameters_were_chosen_is_said_plainly(
    tmp_path: Path, tuning: dict[str, Any] | None, accounted: bool, words: str
) -> None:
    card = trained(tmp_path).card(tuning=tuning)
    assert card["tuning"]["accounted"] is accounted
    assert re.search(words, card["claim"]["statement"])
    assert bool(card["cautions"]) is not accounted
    assert any("hyper-parameters" in text for text in card["not_covered"]) is not accounted


NONE = {"data": "none", "method": None, "mean_runs": None, "runs_law": None}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (NONE | {"data": "dev"}, r"tuning.data='dev'"),
        (NONE | {"n_trials": 40}, "tuning_trials=40"),
        ({"data": "public"}, "tuning_data=public"),
        ({"mean_runs": None}, "tuning_mean_runs"),
        ({"mean_runs": 0.5}, "tuning_mean_runs"),
        ({"runs_law": "uniform"}, "tuning_runs_law"),
        ({"n_trials": 12}, "tuning_trials"),
        ({"method": "grid"}, "grid"),
        ({"method": "none"}, "tuning_mean_runs"),
    ],
)
def test_a_choice_declared_by_halves_or_with_its_number_told_is_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    run = trained(tmp_path)
    with pytest.raises(ConfigurationError, match=named):
        run.card(tuning=SEARCH | change)
    settings = {"trials" if key == "n_trials" else key: value for key, value in (SEARCH | change).items()}
    with pytest.raises(ConfigurationError, match=named.replace("tuning.", "tuning_")):
        PrivacyCard(**{f"tuning_{key}": value for key, value in settings.items()})


def test_a_reader_is_told_once_what_holds_of_the_tuning_of_several_artefacts() -> None:
    def block(note: str) -> dict[str, Any]:
        own = {"data": "private", "accounted": False, "note": note, "epsilon": None}
        return own | {"text": f"NOT ACCOUNTED: chosen on private data. {note}"}

    start = with_earlier_tuning(block("By hand."), block("By a sweep."), "data", composed=True)
    card = with_earlier_tuning(block("By hand.") | {"data": "unknown"}, start, "start", composed=True)
    assert card["text"].count("By hand.") == 2
    assert without_repetition(card["text"]) == (
        "NOT ACCOUNTED: chosen on private data. By hand. Of data: NOT ACCOUNTED: chosen on private data. By a sweep. "
        "The same is true of start."
    )
    assert without_repetition("Fixed before, as declared.") == "Fixed before, as declared."
