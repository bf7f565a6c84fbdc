"""The published JSON Schema describes the cards that are written: all of them, and every field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from card_chain import Chain
from cards import REFUTED, Run, made_from, make_plan, started

from lit_dpret.cards import card as card_module
from lit_dpret.cards.amendments import note_not_covered
from lit_dpret.cards.card import SCHEMA, read_card
from lit_dpret.cards.provenance import note_protocols
from lit_dpret.privacy.accounting.coupled_sensitivity import Coupling
from lit_dpret.privacy.accounting.releases import FixedSize, FullBatch, Shuffle, TruncatedPoisson
from lit_dpret.privacy.ledger.dataset_file import TOTAL_EVENT

jsonschema = pytest.importorskip("jsonschema", reason="the schema is held against cards by a validator")

PATH = Path(card_module.__file__).with_name("privacy_card.schema.json")
PUBLISHED: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))


def complaints(card: Mapping[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(PUBLISHED)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(card)]


def objects(schema: Any, place: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of the schema that lists properties."""
    if isinstance(schema, dict):
        if "properties" in schema and not place.endswith((".if", ".then", ".else")) and ".allOf" not in place:
            yield place, schema
        for name, part in schema.items():
            yield from objects(part, f"{place}.{name}")
    elif isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from objects(part, f"{place}[{index}]")


def test_the_schema_is_a_schema_that_a_chain_follows_and_each_of_its_fields_is_described(made: Chain) -> None:
    for link in (made.generator, made.synthetic, made.encoder, made.embeddings, made.index):
        assert complaints(read_card(link)) == [], link
    jsonschema.Draft202012Validator.check_schema(PUBLISHED)
    assert PUBLISHED["properties"]["schema"]["const"] == SCHEMA
    found = list(objects(PUBLISHED))
    assert len(found) > 20
    for place, part in found:
        for name, field in part["properties"].items():
            described = field.get("description") or "const" in field or "$ref" in field
            assert described, f"{place}.{name}"
        assert part.get("additionalProperties") is False or place == "$.$defs.law", place


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(),
        make_plan(neighbours="add_or_remove", unit="user"),
        make_plan(neighbours="replace_one", unit="pair"),
        make_plan(TruncatedPoisson(n=1000, sample_rate=0.05, cap=80), max_units_per_user=3),
        make_plan(Shuffle(n=1000, batch_size=50)),
        make_plan(FixedSize(n=1000, batch_size=50), neighbours="replace_one", accountant="rdp"),
        make_plan(FullBatch(), unit="image"),
    ],
    ids=["plain", "add or remove", "replace one", "several units", "shuffle", "rdp", "full batch"],
)
def test_a_card_of_each_law_unit_and_relation_follows_the_schema(plan: Any, tmp_path: Path) -> None:
    Run(tmp_path, plan).train(3).write_card()
    assert complaints(read_card(tmp_path)) == complaints(made_from(tmp_path)) == []


@pytest.mark.costly
def test_cards_without_a_guarantee_and_with_all_that_a_run_can_add_follow_the_schema(tmp_path: Path) -> None:
    run = Run(tmp_path / "b", make_plan()).train(2)
    cards = [
        Run(tmp_path / "a", None, mode="none").train(2).card(),
        run.card(assumptions=REFUTED),
        Run(tmp_path / "c", make_plan()).train(2, noise_std=0.0).card(),
    ]
    assert [card["claim"]["guarantee"] for card in cards] == ["none", "not_proved", "none"]
    second = started(tmp_path / "d").card()
    assert "init_from" in second["accounting"] and "start" in second["pretraining"]
    coupling = Coupling(bounded="sub_batch", sub_batches=2, n_max=8, expected=4.0)
    run = Run(tmp_path / "run", make_plan(coupling=coupling))
    note_protocols(run.ledger, [Path(__file__)])
    run.step(0)
    run.step(1, noise_std=0.1)
    run.ledger.append(
        "event", name=TOTAL_EVENT, epsilon=1.0, delta=5e-4, accountant="pld", total_eps=8.0, runs=2, running=1
    )
    search = {"data": "private", "method": "random_stopping", "mean_runs": 10}
    run.write_card(tuning=search, mechanism={"optimizer": "adam", "trainable_parameters": 3})
    note_not_covered(run.folder, "BLEU of generator", computed="the private queries")
    whole = read_card(run.folder)
    assert whole["accounting"]["dataset_total"]["runs"] == 2 and whole["tuning"]["mean_runs"] == 10
    assert whole["amendments"] and [complaints(card) for card in (*cards, second, whole)] == [[]] * 5


def test_a_field_that_is_unknown_or_malformed_does_not_follow_the_schema(tmp_path: Path) -> None:
    card = Run(tmp_path, make_plan()).train(2).card()
    claims = ({"claim": card["claim"] | claim} for claim in ({"epsilon": None}, {"guarantee": "none"}))
    for change in ({"more": 1}, {"checksum": "x"}, {"not_covered": None}, *claims):
        assert complaints(card | change), change
