"""What is written on a card after it was made changes nothing else of it, and leaves the card before traceable."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cards import Run, made_from, make_plan

from lit_dpret.cards.amendments import AttackResult, add_evidence, note_not_covered, restated, with_notes
from lit_dpret.cards.card import card_sha256, read_card, verify_card, write_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, DataError

RANKS = AttackResult(
    attack="ranks of planted secrets", n=9, metric="share of rank 1", estimate=0.25, ci=(0.1, 0.5), eps_lower=0.41,
    delta=0.0, confidence=0.95, method="rank 1 or better, one training", assumption="coins.", copies=10, ceiling=0.336,
)  # fmt: skip
PLANTED = {"canaries": 9, "units": 333, "sha256": "a" * 64}
GAP = "BLEU of set, computed from private queries: anyone who sees these numbers learns more than the claim covers."
CAUTION = "BLEU of set was computed from private queries after this card was made. Those numbers are not covered."
Amend = Callable[[Path], "Path | None"]


def note(folder: Path) -> Path | None:
    return note_not_covered(folder, "BLEU of set", computed="private queries")


def evidence(folder: Path) -> Path | None:
    return add_evidence(folder, [RANKS])


both = pytest.mark.parametrize("amend", [note, evidence])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a ledger and the card that follows from it."""
    run = Run(tmp_path / "run", make_plan()).train(3)
    run.write_card(tuning={"data": "none"})
    run.ledger.close()
    return run.folder


def test_amendments_stand_on_card_and_pages_a_note_once_and_every_earlier_card_can_be_named(folder: Path) -> None:
    names = []
    for amend in (note, evidence, note):
        names.append(card_sha256(folder))
        assert amend(folder) == folder / "privacy_card.json"
    card = read_card(folder)
    assert card["not_covered"].count(GAP) == card["cautions"].count(CAUTION) == 1
    assert [each["sha256_before"] for each in card["amendments"]] == names
    for name in ("privacy_card.md", "privacy_card.html"):
        page = (folder / name).read_text(encoding="utf-8")
        assert GAP in page and CAUTION in page
        assert "evidence of leakage at least 0.41" in page and "absence of evidence is no guarantee" in page
        assert "No attack on this artefact" not in page and "trained on the planted canaries" in page


@both
def test_the_claim_and_all_the_rest_of_the_card_stay_as_they_were(amend: Amend, folder: Path) -> None:
    before = read_card(folder)
    amend(folder)
    after: dict[str, Any] = copy.deepcopy(read_card(folder))
    assert with_notes(before, folder) == after == with_notes(after, folder), "a card made again keeps amendments"
    assert "amendments" not in before  # the argument is left alone
    assert verify_card(after, folder / "privacy_ledger.jsonl") == []
    if amend is note:
        assert (after["not_covered"].pop(), after["cautions"].pop()) == (GAP, CAUTION)
    else:
        assert after["empirical"]["results"].pop() == RANKS.to_dict()
        for card in (before, after):  # which says whether attacks were run
            card["claim"].pop("statement")
    changed = ("checksum", "amendments")
    assert {k: v for k, v in after.items() if k not in changed} == {k: v for k, v in before.items() if k not in changed}


@both
def test_a_card_that_was_edited_is_refused_and_left_alone(amend: Amend, folder: Path) -> None:
    path = folder / "privacy_card.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    card["claim"]["epsilon"] = 0.1
    path.write_text(json.dumps(card), encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(DataError, match="checksum"):
        amend(folder)
    assert path.read_bytes() == before
    path.unlink()
    assert amend(folder) is None and not path.exists(), "without a card there is nothing to write on"


def test_a_card_of_other_files_keeps_notes_alone_and_that_of_another_artefact_nothing(folder: Path) -> None:
    other_files, other = copy.deepcopy(read_card(folder)), copy.deepcopy(read_card(folder))
    note(folder)
    evidence(folder)
    other_files["subject"]["sha256"] = {"model.safetensors": "b" * 64}
    kept = with_notes(other_files, folder)
    assert kept["empirical"]["results"] == [] and GAP in kept["not_covered"]
    renamed = copy.deepcopy(other)
    renamed["subject"]["name"] = "renamed"
    assert with_notes(renamed, folder)["amendments"] == read_card(folder)["amendments"]
    other["subject"]["artifact_type"] = "dataset"
    assert "amendments" not in with_notes(other, folder)
    (folder / "privacy_card.json").write_text("{", encoding="utf-8")
    assert with_notes(other, folder) == with_notes(other, folder / "nowhere") == other, "where no card can be read"


@pytest.mark.costly
def test_what_was_derived_before_finds_an_amended_card_and_not_one_that_was_edited_too(
    folder: Path, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    write_card(made_from(folder), child)
    for amend in (evidence, note, evidence):
        amend(folder)
    found = verify_chain(child, parents=[folder])
    assert found.failed == [] and any("and was amended since" in finding.text for finding in found.findings)
    assert len(read_card(folder)["empirical"]["results"]) == 2
    assert any("BLEU of set" in text for text in made_from(folder)["not_covered"]), "derived now, it inherits the gap"
    card = read_card(folder)
    card["claim"]["epsilon"] = 0.1
    write_card(restated(card), folder)
    assert verify_chain(child, parents=[folder]).failed != []


def test_planted_canaries_stand_on_the_card_and_cannot_be_taken_off_it(tmp_path: Path) -> None:
    run = Run(tmp_path, make_plan())
    run.resume(make_plan(), planted=PLANTED)
    run.train(2).write_card(tuning={"data": "none"})
    card = read_card(tmp_path)
    assert card["empirical"]["planted"] == made_from(tmp_path)["empirical"]["planted"] == PLANTED
    assert "canaried model" in (tmp_path / "privacy_card.md").read_text(encoding="utf-8")
    del card["empirical"]["planted"]
    assert any("canaries" in problem for problem in verify_card(restated(card), run.path))


@pytest.mark.parametrize("change", [{"eps_lower": float("inf")}, {"n": 0}, {"copies": 0}, {"ci": (0.1, float("nan"))}])
def test_a_result_that_says_nothing_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        AttackResult(**{"attack": "x", "n": 1, "metric": "share", "eps_lower": 0.0} | change)  # type: ignore[arg-type]


@both
def test_the_data_card_beside_it_tells_its_readers_of_an_amendment(amend: Amend, folder: Path) -> None:
    readme = folder / "README.md"
    readme.write_text(f"---\ncard_sha256: {card_sha256(folder)}\n---\n\n## Privacy\n\nA claim.\n", encoding="utf-8")
    amend(folder)
    told = readme.read_text(encoding="utf-8")
    assert card_sha256(folder) in told and told.count("**") == 2 and told.endswith("A claim.\n")
    readme.write_text("# A project\n\n## Privacy\nWe keep no cookies.\n", encoding="utf-8")
    amend(folder)  # a README that does not name the card is somebody else's
    assert readme.read_text(encoding="utf-8") == "# A project\n\n## Privacy\nWe keep no cookies.\n"
