"""Results of attacks stand on a card beside the claim, change nothing of it, and leave the card before traceable."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from cards import CHILD, Run, make_plan

from lit_dpret.cards.amendments import AttackResult, add_evidence, note_not_covered, with_evidence, with_notes
from lit_dpret.cards.card import build_card, card_sha256, inherit_card, read_card, subject_of, verify_card, write_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError

RANKS = AttackResult(
    attack="ranks of planted secrets", n=9, metric="share of rank 1", estimate=0.25, ci=(0.1, 0.5), eps_lower=0.41,
    delta=0.0, confidence=0.95, method="rank 1 or better, one training", assumption="coins.", copies=10, ceiling=0.336,
)  # fmt: skip
PLANTED = {"canaries": 9, "units": 333, "sha256": "a" * 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = Run(tmp_path, make_plan()).train(3)
    subject = subject_of("weights", "model")
    write_card(build_card(ledger_records=run.ledger.records, subject=subject, tuning={"data": "none"}), tmp_path)
    run.ledger.close()
    return tmp_path


def test_results_are_added_and_nothing_of_the_claim_changes(folder: Path) -> None:
    before = read_card(folder)
    add_evidence(folder, [RANKS])
    after = copy.deepcopy(read_card(folder))
    assert after["empirical"].pop("results") == [RANKS.to_dict()]
    before["empirical"].pop("results")
    for card in (before, after):
        card["claim"].pop("statement")
    changed = ("amendments", "checksum")
    assert {k: v for k, v in after.items() if k not in changed} == {k: v for k, v in before.items() if k not in changed}
    assert verify_card(read_card(folder), folder / "privacy_ledger.jsonl") == []


def test_a_bound_is_printed_with_what_it_is_no_guarantee_of(folder: Path) -> None:
    add_evidence(folder, [RANKS])
    for name in ("privacy_card.md", "privacy_card.html"):
        page = (folder / name).read_text(encoding="utf-8")
        assert "evidence of leakage at least 0.41" in page and "absence of evidence is no guarantee" in page
        assert "No attack has been run" not in page and "trained on the planted canaries" in page


def test_a_card_with_results_passes_verification_and_what_was_derived_before_still_finds_it(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    run = Run(parent, make_plan()).train(3)
    write_card(run.card(tuning={"data": "none"}), parent)
    run.ledger.close()
    child = tmp_path / "child"
    write_card(inherit_card(parent, CHILD, description="sampling"), child)
    add_evidence(parent, [RANKS])
    note_not_covered(parent, "BLEU", computed="private queries")
    add_evidence(parent, [RANKS, RANKS])
    result = verify_chain(child, parents=[parent])
    assert result.failed == []
    assert len(read_card(parent)["empirical"]["results"]) == 3


def test_an_edited_result_breaks_the_chain(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    run = Run(parent, make_plan()).train(3)
    write_card(run.card(tuning={"data": "none"}), parent)
    run.ledger.close()
    child = tmp_path / "child"
    write_card(inherit_card(parent, CHILD, description="sampling"), child)
    add_evidence(parent, [RANKS])
    card = read_card(parent)
    card["claim"]["epsilon"] = 0.1
    write_card(with_evidence(card, []), parent)
    result = verify_chain(child, parents=[parent])
    assert result.failed != []


def test_a_card_made_anew_keeps_results_on_the_same_files_and_drops_those_on_others(folder: Path) -> None:
    fresh = read_card(folder)
    add_evidence(folder, [RANKS])
    assert with_notes(fresh, folder)["empirical"]["results"] == [RANKS.to_dict()]
    other = copy.deepcopy(fresh)
    other["subject"]["sha256"] = {"model.safetensors": "b" * 64}
    assert with_notes(other, folder)["empirical"]["results"] == []


def test_planted_canaries_stand_on_the_card_and_cannot_be_taken_off_it(tmp_path: Path) -> None:
    run = Run(tmp_path, make_plan())
    run.ledger.append("plan", run_id="r", attempt=0, mode="dp_sgd", plan=make_plan().to_dict(), planned_steps=20,
                      rows_per_unit="one", secure_rng=False, planted=PLANTED)  # fmt: skip
    run.train(2)
    write_card(run.card(tuning={"data": "none"}), tmp_path)
    card = read_card(tmp_path)
    assert card["empirical"]["planted"] == PLANTED
    assert "canaried model" in (tmp_path / "privacy_card.md").read_text(encoding="utf-8")
    child = inherit_card(tmp_path, CHILD, description="sampling")
    assert child["empirical"]["planted"] == PLANTED
    del card["empirical"]["planted"]
    silent = with_evidence(card, [])
    assert any("canaries" in problem for problem in verify_card(silent, tmp_path / "privacy_ledger.jsonl"))


def test_a_folder_without_a_card_has_nothing_to_add_to(tmp_path: Path) -> None:
    assert add_evidence(tmp_path, [RANKS]) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [{"eps_lower": float("inf")}, {"eps_lower": -1.0}, {"n": 0}, {"about": "my model"}, {"ci": (0.1, float("nan"))}],
)
def test_a_result_that_says_nothing_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        AttackResult(**{"attack": "x", "n": 1, "metric": "share", "eps_lower": 0.0} | change)  # type: ignore[arg-type]


def test_the_card_before_is_named_by_its_hash(folder: Path) -> None:
    before = card_sha256(folder)
    add_evidence(folder, [RANKS])
    assert [note["sha256_before"] for note in read_card(folder)["amendments"]] == [before]
