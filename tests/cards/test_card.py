from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cards import CHILD, DELTA, LAW, NOISE, REFUTED, N, Run, forge, made_from, make_plan

from lit_dpret.cards.card import (
    Assumption,
    build_card,
    card_sha256,
    inherit_card,
    read_card,
    said,
    subject_of,
    verify_card,
    write_card,
)
from lit_dpret.cards.text import card_html, card_markdown, privacy_line
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, StorageError
from lit_dpret.privacy.accounting import composition as accounting
from lit_dpret.privacy.accounting.comparisons import underreported_epsilon
from lit_dpret.privacy.accounting.releases import FixedSize, FullBatch, GaussianRelease, Poisson, Shuffle
from lit_dpret.privacy.budget import Neighbours, PrivacyBudget, Unit, show_epsilon
from lit_dpret.privacy.ledger.dataset_file import Total
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run", make_plan()).train()


def epsilon(releases: list[Any], neighbours: Neighbours = "zero_out") -> float:
    return accounting.epsilon(releases, delta=DELTA, neighbours=neighbours)


def cost(steps: int, law: Any = LAW, noise: float = NOISE) -> float:
    return epsilon([GaussianRelease(noise_multiplier=noise, law=law, count=steps)])


# --- the number -------------------------------------------------------------------------------


def test_the_claim_is_the_accountants_answer_to_what_the_ledger_charges_whatever_else_is_said(
    run: Run, tmp_path: Path
) -> None:
    card = run.card(mechanism={"optimizer": "Adam", "noise_multiplier": 99.0, "steps_done": 1})
    assert card["claim"]["epsilon"] == cost(10) == epsilon(charged_releases(run.ledger.records))
    assert card["mechanism"]["steps_done"] == 10 and "steps_counted" not in card["mechanism"]
    assert card["banners"] == []
    # Facts of the caller fill gaps and replace nothing; nor does the budget, or how many steps were planned.
    assert card["mechanism"]["optimizer"] == "Adam" and card["mechanism"]["noise_multiplier"] == NOISE
    plan = replace(make_plan(), budget=PrivacyBudget(eps=3.0, delta=DELTA), steps=40)
    assert Run(tmp_path / "other", plan).train().card()["claim"]["epsilon"] == card["claim"]["epsilon"]


@pytest.mark.parametrize("made", [1, 9])
def test_a_run_that_ended_early_claims_the_steps_that_were_planned(tmp_path: Path, run: Run, made: int) -> None:
    early = Run(tmp_path / "early", make_plan()).train(made)
    card, whole = early.card(), run.card()
    assert card["claim"]["epsilon"] == whole["claim"]["epsilon"] > epsilon(charged_releases(early.ledger.records))
    assert [card["accounting"][name] == whole["accounting"][name] for name in ("groups", "composition")] == [True] * 2
    assert (card["mechanism"]["steps_done"], card["mechanism"]["steps_counted"]) == (made, 10)
    assert card["claim"]["statement"] != whole["claim"]["statement"]
    assert verify_card(card, early.path) == []
    cheaper = forge(card, epsilon=epsilon(charged_releases(early.ledger.records)))
    assert verify_card(cheaper, early.path) != []


def test_of_shuffled_batches_a_run_that_ended_early_says_of_which_whole_epochs_its_claim_is(tmp_path: Path) -> None:
    plan = make_plan(law=Shuffle(batch_size=50, n=500))
    card = Run(tmp_path / "early", plan, planned=15).train(3).card()
    assert card["accounting"]["composition"][0]["count"] == card["mechanism"]["steps_counted"] == 20
    assert "steps_counted" not in Run(tmp_path / "whole", plan, planned=15).train(15).card()["mechanism"]


@pytest.mark.parametrize(("law", "made", "affordable"), [(LAW, 4, 7), (Shuffle(batch_size=200, n=N), 3, 5)])
def test_steps_that_the_budget_does_not_cover_are_not_counted(
    tmp_path: Path, law: Any, made: int, affordable: int
) -> None:
    """The gate would have refused them, whatever anybody saw."""
    budget = PrivacyBudget(eps=cost(affordable, law), delta=DELTA)
    early = Run(tmp_path / "early", replace(make_plan(law), budget=budget)).train(made)
    assert early.card()["claim"]["epsilon"] == budget.eps


def test_every_announced_step_is_charged_if_it_was_repeated_or_never_confirmed(tmp_path: Path) -> None:
    again, broken = (Run(tmp_path / name, make_plan()) for name in ("again", "broken"))
    for step in range(6):
        again.step(step)
    for step in range(4, 10):
        again.step(step, attempt=1)
    assert again.card()["claim"]["epsilon"] == cost(12)
    for step in range(10):
        broken.step(step, confirm=step < 9)
    card = broken.card()
    assert card["claim"]["epsilon"] == cost(10) and card["mechanism"]["steps_unconfirmed"] == 1
    assert any("1 announced step" in a["text"] and a["holds"] == "unverified" for a in card["assumptions"])


def test_the_total_of_all_runs_stands_on_the_card_where_the_ledger_notes_one(run: Run) -> None:
    alone = run.card()
    assert alone["accounting"]["dataset_total"] is None and "all runs on this data set" not in card_markdown(alone)
    total = Total(epsilon=2.5, delta=DELTA, accountant="pld", total_eps=4.0, runs=3, running=1)
    run.ledger.append("event", name="dataset_total", **total.to_dict())
    card = run.card()
    assert card["accounting"]["dataset_total"] == total.to_dict()
    assert card["claim"]["epsilon"] == alone["claim"]["epsilon"]
    assert "epsilon = 2.500" in card_markdown(card)


def test_less_noise_than_planned_raises_the_number_and_a_banner(tmp_path: Path) -> None:
    card = Run(tmp_path / "weak", make_plan()).train(noise_std=1.5).card()
    assert card["claim"]["epsilon"] == cost(10, noise=3.0) > cost(10)
    assert any("added less" in banner for banner in card["banners"])
    assert card["mechanism"]["noise_std"] == 1.5


def test_a_step_without_noise_leaves_no_guarantee(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make_plan())
    run.train(3)
    run.step(3, noise_std=0.0)
    for card in (run.card(), run.card(assumptions=REFUTED)):
        assert card["claim"]["guarantee"] == "none" and card["claim"]["epsilon"] is None
        assert "NO PRIVACY GUARANTEE" in card["banners"][0]


@pytest.mark.parametrize("steps", [0, 10])
def test_a_run_without_privacy_has_no_epsilon_and_a_red_banner(steps: int, tmp_path: Path) -> None:
    card = Run(tmp_path / "run", None, mode="none").train(steps).card()
    claim = card["claim"]
    assert (claim["epsilon"], claim["guarantee"], claim["delta"]) == (None, "none", None)
    assert claim["protected"] == [] and card["not_covered"] == ["Everything: no guarantee is claimed."]
    page = card_html(card)
    assert 'class="banner danger"' in page and "NO PRIVACY GUARANTEE" in page
    assert not re.search(r"epsilon = \d", page)
    assert "**epsilon = infinite**\n" in card_markdown(card)


def test_steps_that_nobody_announced_leave_no_guarantee(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make_plan()).train(3)
    run.ledger.append("end", reason="finished", steps=4)
    card = run.card()
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    assert "4 were made, 3 announced" in " ".join(card["banners"])


def test_a_ledger_that_makes_no_one_claim_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no plan record"):
        build_card(run.ledger.records[1:], subject_of("weights", "x"))
    run.resume(make_plan(neighbours="replace_one"))
    with pytest.raises(LedgerError, match="neighbours"):
        run.card()
    with pytest.raises(ConfigurationError, match="inherit_card"):
        Run(tmp_path / "synthetic", None, mode="synthetic").card()


# --- assumptions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "ran", "made", "charged", "banner"),
    [
        (Shuffle(batch_size=100, n=N), Shuffle(batch_size=100, n=N), 20, 2, "shuffled"),
        (LAW, Shuffle(batch_size=50, n=N), 20, 1, "20 steps drew by another law"),
        (LAW, FixedSize(batch_size=50, n=N), 10, 10, "10 steps drew by another law"),  # which no accountant judges
    ],
)
def test_what_was_not_drawn_by_a_sampling_law_that_amplifies_is_charged_without_it(
    planned: Any, ran: Any, made: int, charged: int, banner: str, tmp_path: Path
) -> None:
    card = Run(tmp_path / "run", make_plan(planned)).train(made, law=ran.to_dict()).card()
    assert card["claim"]["epsilon"] == cost(charged, FullBatch())
    assert card["accounting"]["basis"] == ("no_amplification" if isinstance(ran, FixedSize) else "as_charged")
    assert any(banner in text for text in card["banners"]) and card["mechanism"]["law"] == [ran.to_dict()]


def test_an_assumption_that_fails_always_leaves_a_banner_and_changes_the_number(run: Run) -> None:
    cautious = run.card(assumptions=[Assumption("The coins were fair.", "refuted", "no_amplification")])
    assert cautious["claim"]["epsilon"] == cost(10, FullBatch()) > 3 * cost(10)
    assert cautious["accounting"]["basis"] == "no_amplification" and "coins were fair" in cautious["banners"][0]
    nothing = run.card(assumptions=REFUTED)
    assert nothing["claim"]["epsilon"] is None and nothing["claim"]["guarantee"] == "not_proved"
    assert "NOT PROVED" in nothing["banners"][0]
    assert run.card(assumptions=[Assumption("All is well.", "holds")])["claim"]["epsilon"] == cost(10)


def test_a_claim_without_amplification_names_the_accountant_that_computed_it(tmp_path: Path) -> None:
    ran = Run(tmp_path / "run", make_plan(accountant="prv")).train()
    assert "the prv accountant of opacus" in ran.card()["claim"]["statement"]
    card = ran.card(assumptions=[Assumption("The coins were fair.", "refuted", "no_amplification")])
    assert card["claim"]["epsilon"] == cost(10, FullBatch())
    assert "the pld accountant of dp-accounting, without counting" in card["claim"]["statement"]
    assert "pld (dp-accounting)" in card_markdown(card) and "opacus" not in card["claim"]["statement"]


def test_without_known_sampling_nothing_is_proved_where_the_number_of_units_changes(tmp_path: Path) -> None:
    law = Shuffle(batch_size=50, n=N)
    card = Run(tmp_path / "run", make_plan(neighbours="add_or_remove")).train(law=law.to_dict()).card()
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None


def test_an_attempt_that_left_its_law_is_charged_for_every_step(run: Run) -> None:
    run.ledger.append("event", name="sampling_departure", attempt=0, step=9, law=Poisson(sample_rate=0.9).to_dict())
    card = run.card()
    assert card["claim"]["epsilon"] == cost(10, FullBatch())
    assert any("in attempt 0 the draws departed" in banner for banner in card["banners"])


# --- what it means ----------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["query", "pair", "user"])
@pytest.mark.parametrize("neighbours", ["zero_out", "add_or_remove", "replace_one"])
def test_a_printed_epsilon_never_stands_without_unit_neighbours_and_delta(
    tmp_path: Path, unit: Unit, neighbours: Neighbours
) -> None:
    card = Run(tmp_path / "run", make_plan(unit=unit, neighbours=neighbours)).train().card()
    terms = (show_epsilon(card["claim"]["epsilon"]), "0.0005", unit, neighbours)
    for text in (privacy_line(card), card_markdown(card), card_html(card)):
        assert all(term in text for term in terms)
    words = {"zero_out": "blanking", "add_or_remove": "adding or removing", "replace_one": "with any other"}
    units = {"query": "one query", "pair": "one (query, passage) pair", "user": "one user contributed"}
    for term in (*terms[:2], words[neighbours], units[unit]):
        assert term in card["claim"]["statement"]


def test_what_is_protected_follows_from_unit_and_neighbours(tmp_path: Path) -> None:
    zero_out = Run(tmp_path / "a", make_plan()).train().card()
    add = Run(tmp_path / "b", make_plan(neighbours="add_or_remove")).train().card()
    user = Run(tmp_path / "c", make_plan(unit="user")).train().card()
    assert any(f"n = {N}" in text for text in zero_out["claim"]["unprotected_quantities"])
    assert any("list of passages" in text for text in zero_out["claim"]["unprotected_quantities"])
    assert "the number of queries" in add["claim"]["protected"]
    assert not any("number of" in text for text in add["claim"]["unprotected_quantities"])
    assert any("declared constants" in text for text in add["claim"]["unprotected_quantities"])
    assert str(N) not in json.dumps([add["claim"], add["not_covered"], add["mechanism"]])
    assert any("People who contributed several" in text for text in zero_out["not_covered"])
    assert not any("People who contributed several" in text for text in user["not_covered"])
    assert user["claim"]["user_level_epsilon"] == user["claim"]["epsilon"]
    assert zero_out["claim"]["user_level_epsilon"] is None


def test_the_other_readings_of_the_same_noise_stand_beside_the_claim_where_they_are_proved(
    tmp_path: Path, run: Run
) -> None:
    card = run.card()
    facts, releases = card["accounting"], charged_releases(run.ledger.records)
    assert facts["epsilon_replace_one"] == epsilon(releases, "replace_one") > card["claim"]["epsilon"]
    assert facts["epsilon_rdp"] == accounting.epsilon(releases, delta=DELTA, neighbours="zero_out", accountant="rdp")
    limit = facts["epsilon_underreported_by_gdp"]
    assert limit == underreported_epsilon(releases, delta=DELTA, neighbours="zero_out") < card["claim"]["epsilon"]
    (line,) = [line for line in card_markdown(card).splitlines() if "central limit" in line]
    assert "NOT A GUARANTEE" in line and show_epsilon(limit) in line
    assert show_epsilon(limit) not in card["claim"]["statement"]
    shuffled = Run(tmp_path / "shuffled", make_plan(Shuffle(batch_size=100, n=N))).train(20).card()
    assert shuffled["accounting"]["epsilon_underreported_by_gdp"] is None
    unproved = Run(tmp_path / "unproved", make_plan(neighbours="add_or_remove")).train().card()
    assert unproved["accounting"]["epsilon_if_shuffled"] is None
    assert "no accountant supports this" in card_markdown(unproved)


def test_printed_numbers_are_rounded_up() -> None:
    assert show_epsilon(0.0) == "0" and show_epsilon(None) == show_epsilon(float("inf")) == "infinite"
    for value in (0.000123451, 0.5, 0.99999, 1.00001, 3.1415926, 77.7777, 1e-9, 124.31, 999.96, 12345.6):
        assert value <= float(show_epsilon(value)) <= value * 1.0011


# --- the files --------------------------------------------------------------------------------


def test_a_card_survives_its_file(run: Run) -> None:
    path = run.write_card()
    assert read_card(path) == read_card(run.folder) == run.card()
    assert card_sha256(run.folder) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not list(run.folder.glob(".*"))
    with pytest.raises(StorageError, match=r"privacy_card\.md/privacy_card\.json"):
        write_card(run.card(), run.folder / "privacy_card.md")


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        ({"epsilon": None}, "epsilon"), ({"epsilon": "3"}, "epsilon"), ({"epsilon": True}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"), ({"delta": 0}, "delta"), ({"unit": "batch"}, "unit"),
        ({"neighbours": None}, "neighbours"), ({"guarantee": "strong"}, "guarantee"),
        ({"guarantee": "none"}, "carries an epsilon"), ({"user_level_epsilon": "3"}, "user_level_epsilon"),
    ],
)  # fmt: skip
def test_a_claim_that_is_none_is_not_read_as_one(run: Run, claim: dict[str, Any], reason: str) -> None:
    (run.folder / "privacy_card.json").write_text(json.dumps(forge(run.card(), **claim)))
    with pytest.raises(DataError, match=reason):
        read_card(run.folder)


def test_a_false_assumption_is_not_made_harmless_by_a_zero_that_equals_it(run: Run) -> None:
    card = run.card(assumptions=[Assumption("The coins were fair.", "refuted", "charged")])
    card["assumptions"][-1]["holds"] = 0
    card["banners"] = said(card)["banners"]
    assert card["banners"] == []
    (run.folder / "privacy_card.json").write_text(json.dumps(forge(card)))
    with pytest.raises(DataError, match="assumptions"):
        read_card(run.folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "lit-dpret/privacy-card/9"}', "\x00"])
def test_what_is_no_card_is_not_read_as_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "privacy_card.json").write_text(text)
    with pytest.raises(DataError, match=r"privacy_card\.json"):
        read_card(tmp_path)


def test_the_subject_names_its_files_by_their_hash(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"abc")
    subject = subject_of("weights", "generator", [tmp_path / "model" / "weights"], root=tmp_path)
    assert subject["sha256"] == {"model/weights": hashlib.sha256(b"abc").hexdigest()}
    with pytest.raises(DataError, match="absent"):
        subject_of("weights", "generator", [tmp_path / "absent"])
    with pytest.raises(ConfigurationError, match="artifact_type"):
        subject_of("model", "generator")  # type: ignore[arg-type]


# --- verification -----------------------------------------------------------------------------


def test_a_ledger_that_went_on_or_was_cut_at_its_end_does_not_fit_the_card(run: Run) -> None:
    card, lines = run.card(), run.path.read_bytes().splitlines(keepends=True)
    run.step(10)
    (problem,) = verify_card(card, run.path)
    assert "out of date" in problem
    run.path.write_bytes(b"".join(lines[:-3]))
    assert PrivacyLedger.read(run.path).records  # the chain alone sees nothing
    (problem,) = verify_card(card, run.path)
    assert "removed from its end" in problem


@pytest.mark.parametrize(
    "claim", [{"epsilon": 0.1}, {"delta": 0.4}, {"neighbours": "add_or_remove"}, {"unit": "user"}, {"curve": []}]
)
def test_a_forged_claim_is_found_by_recomputation(run: Run, tmp_path: Path, claim: dict[str, Any]) -> None:
    [problem] = verify_card(forge(run.card(), **claim), run.path)
    assert f"claim.{next(iter(claim))}" in problem
    bare = Run(tmp_path / "bare", None, mode="none").train()
    [problem] = verify_card(forge(bare.card(), **{**run.card()["claim"], **claim}), bare.path)
    assert "claim.guarantee" in problem


# --- inheritance ------------------------------------------------------------------------------


def test_a_derived_artefact_has_its_parents_claim_and_names_the_whole_line(run: Run, tmp_path: Path) -> None:
    parent = run.write_card()
    child = made_from(parent)
    middle = write_card(child, tmp_path / "set")
    grandchild = inherit_card(middle, {**CHILD, "name": "retriever"}, description="training", parent_ledger=run.path)
    for card in (child, grandchild):
        for name in ("epsilon", "delta", "unit", "neighbours", "guarantee", "curve"):
            assert card["claim"][name] == run.card()["claim"][name]
        assert card["mechanism"]["kind"] == "post_processing"
        assert verify_card(card, run.path) == []
    assert any(gap.startswith(f"{CHILD['name']}: ") for gap in child["not_covered"])
    again = inherit_card(middle, CHILD, description="again", parent_ledger=run.path)
    assert again["not_covered"] == child["not_covered"], "a gap that parent and child share stands there once"
    assert [p["sha256"] for p in grandchild["parents"]] == [card_sha256(middle), card_sha256(parent)]
    assert [p["name"] for p in grandchild["parents"]] == ["synthetic queries", "generator"]
    assert show_epsilon(run.card()["claim"]["epsilon"]) in privacy_line(grandchild)


def test_a_parent_that_is_missing_edited_or_forged_is_refused_and_one_that_is_refuted_passes_that_on(
    run: Run, tmp_path: Path
) -> None:
    path = run.write_card(assumptions=REFUTED)
    child = made_from(path)
    assert child["claim"]["guarantee"] == "not_proved" and child["claim"]["epsilon"] is None
    with pytest.raises(DataError, match="no readable privacy card"):
        made_from(tmp_path / "absent.json")
    path.write_text(path.read_text().replace('"not_proved"', '"dp"'))
    with pytest.raises(DataError, match="checksum"):
        made_from(path)
    forged = forge(run.card(), epsilon=0.1)
    with pytest.raises(DataError, match=r"claim\.epsilon"):
        made_from(write_card(forged, run.folder))
    away = write_card(forged, tmp_path / "away")
    holds = {a["text"]: a["holds"] for a in made_from(away)["assumptions"]}
    assert holds["The parent's epsilon follows from the parent's ledger."] == "unverified", "there is none to check"
    with pytest.raises(DataError, match="does not exist"):
        inherit_card(away, CHILD, description="x", parent_ledger=tmp_path / "absent.jsonl")


def test_data_beside_somebody_elses_card_are_refused(run: Run) -> None:
    data = run.folder / "queries.jsonl"
    data.write_text("a")
    path = run.write_card(subject=subject_of("dataset", "set", [data], root=run.folder))
    made_from(path)
    data.write_text("b")
    with pytest.raises(DataError, match=r"queries\.jsonl is not the file"):
        made_from(path)


def test_a_run_with_releases_is_no_post_processing(run: Run) -> None:
    with pytest.raises(ConfigurationError, match="its own releases"):
        inherit_card(run.write_card(), CHILD, description="x", ledger_records=run.ledger.records)


# --- the pages --------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects tags, outside addresses and the nesting of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        if tag not in ("meta", "br", "line", "path", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


NASTY = '"><script>alert(1)</script><img src=x onerror=y>|`*_[a](http://b)\n# <b>&amp;\x00\ud800'


def test_no_text_becomes_markup_and_nothing_is_loaded_from_elsewhere(run: Run) -> None:
    card = run.card(
        subject={"artifact_type": "weights", "name": NASTY, "sha256": {NASTY: "0"}},
        tuning={"data": "none", "note": NASTY},
        pretraining={"model": NASTY},
        mechanism={NASTY: NASTY},
        assumptions=[Assumption(NASTY, "refuted")],
    )
    page = Page(card_html(card))
    assert page.open == [] and page.addresses == []
    assert not {"script", "img", "b", "link", "iframe"} & set(page.tags)
    assert "url(" not in card_html(card) and "@import" not in card_html(card)
    text = card_markdown(card)
    assert "<script" not in text.replace(r"\<script", "") and "\n# <b>" not in text
    assert "](http" not in text.replace(r"\](http", "")
    for line in text.splitlines():
        if line.startswith("|") and "---" not in line:
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4)
