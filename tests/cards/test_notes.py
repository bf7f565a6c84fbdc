"""What was computed from private data after a card was made stands on the card, and changes nothing else of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cards import Run, make_plan

from lit_dpret.cards.amendments import note_not_covered, with_notes
from lit_dpret.cards.card import build_card, card_sha256, inherit_card, read_card, subject_of, verify_card, write_card
from lit_dpret.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a ledger and the card that follows from it."""
    run = Run(tmp_path, make_plan())
    for step in range(3):
        run.step(step)
    subject = subject_of("weights", "model")
    write_card(build_card(ledger_records=run.ledger.records, subject=subject, tuning={"data": "none"}), tmp_path)
    return tmp_path


def note(folder: Path) -> Path | None:
    return note_not_covered(folder, "BLEU of set", computed="private queries")


def test_the_note_stands_where_people_read_of_what_is_not_covered(folder: Path) -> None:
    assert note(folder) == folder / "privacy_card.json"
    card = read_card(folder)
    gap = (
        "BLEU of set, computed from private queries: whoever is shown these numbers is told more than the claim covers."
    )
    caution = "BLEU of set was computed from private queries after this card was made. Those numbers are not covered."
    assert card["not_covered"][-1] == gap and card["cautions"][-1] == caution
    for name in ("privacy_card.md", "privacy_card.html"):
        page = (folder / name).read_text(encoding="utf-8")
        assert gap in page and caution in page


def test_the_claim_and_all_the_rest_of_the_card_stay_as_they_were(folder: Path) -> None:
    before = read_card(folder)
    note(folder)
    after: dict[str, Any] = copy.deepcopy(read_card(folder))
    for name in ("not_covered", "cautions"):
        assert after[name][:-1] == before[name]
    changed = ("not_covered", "cautions", "checksum", "amendments")
    assert {k: v for k, v in after.items() if k not in changed} == {k: v for k, v in before.items() if k not in changed}
    assert after["claim"]["guarantee"] == "dp" and after["claim"]["epsilon"] > 0
    assert verify_card(after, folder / "privacy_ledger.jsonl") == []


def test_the_card_before_can_be_named_by_what_was_derived_from_it(folder: Path) -> None:
    first = card_sha256(folder)
    note(folder)
    second = card_sha256(folder)
    note(folder)
    assert [each["sha256_before"] for each in read_card(folder)["amendments"]] == [first, second]


def test_the_same_note_is_read_once_and_recorded_each_time(folder: Path) -> None:
    for _ in range(3):
        note(folder)
    card = read_card(folder)
    assert sum("BLEU of set" in text for text in card["not_covered"]) == 1
    assert sum("BLEU of set" in text for text in card["cautions"]) == 1
    assert len(card["amendments"]) == 3


def test_what_is_derived_from_a_noted_card_inherits_the_gap(folder: Path) -> None:
    note(folder)
    child = inherit_card(folder, subject_of("weights", "child"), description="copied", tuning={"data": "none"})
    assert any("BLEU of set" in text for text in child["not_covered"])


def test_a_folder_without_a_card_has_nothing_to_note_it_on(tmp_path: Path) -> None:
    assert note(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_card_that_was_edited_is_refused_and_left_alone(folder: Path) -> None:
    path = folder / "privacy_card.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    card["claim"]["epsilon"] = 0.1
    path.write_text(json.dumps(card), encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(DataError, match="does not match its checksum"):
        note(folder)
    assert path.read_bytes() == before


def test_a_card_that_is_made_anew_keeps_the_notes_of_the_one_it_replaces(folder: Path) -> None:
    fresh = read_card(folder)
    note(folder)
    again = with_notes(fresh, folder)
    assert again == read_card(folder)
    assert with_notes(again, folder) == again
    assert "amendments" not in fresh  # the argument is left alone


def test_the_card_of_another_artefact_takes_no_notes_over(folder: Path) -> None:
    other = copy.deepcopy(read_card(folder))
    note(folder)
    other["subject"]["name"] = "another"
    assert "amendments" not in with_notes(other, folder)


def test_where_no_card_can_be_read_there_are_no_notes_to_keep(folder: Path) -> None:
    fresh = read_card(folder)
    (folder / "privacy_card.json").write_text("{", encoding="utf-8")
    assert with_notes(fresh, folder) == fresh
    assert with_notes(fresh, folder / "nowhere") == fresh
