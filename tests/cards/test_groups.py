"""What a card says to somebody who contributed several units: a number for a declared bound, or that none is proved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cards import DELTA, LAW, NOISE, REFUTED, Run, made_from, make_plan

from lit_dpret import errors
from lit_dpret.cards.card import verify_card
from lit_dpret.cards.text import card_html, card_markdown
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    Poisson,
    SamplingLaw,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import Neighbours, show_epsilon
from lit_dpret.privacy.modes import DPSGD

PASSES = Shuffle(batch_size=100, n=1000)
RELEASES = [GaussianRelease(noise_multiplier=NOISE, law=LAW, count=10)]


def trained(folder: Path, law: SamplingLaw = LAW, **facts: Any) -> Run:
    return Run(folder / "run", make_plan(law, **facts)).train()


def of(units: int, neighbours: Neighbours = "zero_out") -> float:
    return group_epsilon(RELEASES, delta=DELTA, units=units, neighbours=neighbours)


def test_a_declared_bound_puts_the_user_level_epsilon_on_the_card(tmp_path: Path) -> None:
    card = trained(tmp_path, max_units_per_user=3).card()
    claim = card["claim"]
    assert (claim["max_units_per_user"], claim["user_level_epsilon"]) == (3, of(3))
    assert claim["epsilon"] < claim["user_level_epsilon"]
    for text in (claim["statement"], card_markdown(card), card_html(card)):
        assert "up to 3 queries" in text and show_epsilon(of(3)) in text
    assert any("more than 3 queries" in gap and "declared, not counted" in gap for gap in card["not_covered"])
    (said,) = [a for a in card["assumptions"] if "more than 3 units" in a["text"]]
    assert said["holds"] == "unverified"
    claim = trained(tmp_path / "one", max_units_per_user=1).card()["claim"]
    assert claim["user_level_epsilon"] == claim["epsilon"] and "up to 1 query, a bound" in claim["statement"]


def test_every_card_says_what_copies_of_a_text_cost(tmp_path: Path) -> None:
    card = trained(tmp_path).card()
    assert [(group["units"], group["epsilon"]) for group in card["accounting"]["groups"]] == [
        (units, of(units)) for units in (2, 5, 10)
    ]
    (gap,) = [text for text in card["not_covered"] if "same text" in text]
    for text in (gap, card_markdown(card), card_html(card)):
        assert all(show_epsilon(of(units)) in text for units in (2, 5, 10))


@pytest.mark.parametrize("unit", ["query", "pair"])
def test_copies_that_are_one_unit_are_called_no_units_of_their_own(unit: Any, tmp_path: Path) -> None:
    plan = make_plan(unit=unit)
    merged = Run(tmp_path / "run", replace(plan, budget=replace(plan.budget, duplicates="merge"))).train()
    card = merged.card()
    assert "erasing every copy of a" in card["claim"]["duplicates_policy"]
    assert not any("each copy is a separate unit" in gap for gap in card["not_covered"])
    (gap,) = [text for text in card["not_covered"] if "in other words" in text]
    assert all(show_epsilon(of(units)) in gap for units in (2, 5, 10)) and "copies" not in gap
    assert verify_card(card, merged.path) == []


def test_where_copies_have_no_number_the_line_names_a_cap_that_gives_them_one(tmp_path: Path) -> None:
    law = TruncatedPoisson(sample_rate=0.05, cap=76, n=1000)
    run = trained(tmp_path, law)
    card = run.card()
    infinite = [group for group in card["accounting"]["groups"] if group["why"] == "infinite"]
    (gap,) = [text for text in card["not_covered"] if "same text" in text]
    assert {5, 10} <= {group["units"] for group in infinite}
    for group in infinite:
        wider = group["wider"]
        fitting = replace(RELEASES[0], law=replace(law, cap=wider["cap"]))
        assert group_epsilon([fitting], delta=DELTA, units=group["units"]) == wider["epsilon"]
        for text in (gap, card_markdown(card), card_html(card)):
            assert f"datamodule.cap={wider['cap']}" in text and show_epsilon(wider["epsilon"]) in text
    assert "datamodule.cap=" not in card_markdown(made_from(run.write_card(), assumptions=REFUTED))


@pytest.mark.parametrize(
    ("law", "neighbours"),
    [
        (TruncatedPoisson(sample_rate=0.05, cap=90, n=1000), "add_or_remove"),
        (Poisson(sample_rate=0.05), "replace_one"),
    ],
)
def test_where_no_bound_is_known_the_card_names_law_and_relation_instead(
    tmp_path: Path, law: SamplingLaw, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, law, neighbours=neighbours, max_units_per_user=4)
    card = run.card()
    monkeypatch.setattr(errors, "on_command_line", False)  # where it is written, and where it is recomputed
    assert run.card()["accounting"] == card["accounting"]
    assert card["claim"]["guarantee"] == "dp" and card["claim"]["user_level_epsilon"] is None
    assert "up to 4 queries no epsilon is proved" in card["claim"]["statement"]
    for group in card["accounting"]["groups"]:
        assert group["epsilon"] is None
        assert all(word in group["why"] for word in ("not proved", law.kind, neighbours))
    assert any("by how much is not proved" in gap for gap in card["not_covered"])
    assert any("proved for 4 of them together" in gap for gap in card["not_covered"])
    assert "not proved: datamodule.sampling=" in card_markdown(card).replace("\\", "")


@pytest.mark.parametrize(
    ("planned", "ran", "charged"),
    [
        (LAW, FixedSize(batch_size=50, n=1000), 10),
        (Shuffle(batch_size=100, n=1000), Shuffle(batch_size=100, n=1000), 1),
    ],
)
def test_what_is_charged_without_amplification_is_charged_so_for_several_units_too(
    planned: SamplingLaw, ran: SamplingLaw, charged: int, tmp_path: Path
) -> None:
    card = Run(tmp_path / "run", make_plan(planned, max_units_per_user=5)).train(law=ran.to_dict()).card()
    five = GaussianRelease(noise_multiplier=NOISE / 5, law=FullBatch(), count=charged)
    assert card["claim"]["user_level_epsilon"] == pytest.approx(epsilon([five], delta=DELTA, neighbours="zero_out"))


def test_a_derived_artefact_inherits_the_user_level_epsilon_and_loses_it_with_the_claim(tmp_path: Path) -> None:
    run = trained(tmp_path, max_units_per_user=3)
    path = run.write_card()
    child, broken = made_from(path), made_from(path, assumptions=REFUTED)
    assert child["claim"]["user_level_epsilon"] == of(3) and "up to 3 queries" in child["claim"]["statement"]
    assert broken["claim"]["guarantee"] == "not_proved" and broken["claim"]["user_level_epsilon"] is None
    facts = broken["accounting"]
    assert {group["epsilon"] for group in facts["groups"]} == {None}
    assert all(facts[name] is None for name in facts if name.startswith("epsilon_"))
    assert broken["empirical"]["ceilings"] is None
    assert not any(show_epsilon(of(units)) in card_markdown(broken) for units in (2, 3, 5, 10))
    doubted = run.card(assumptions=REFUTED)
    assert doubted["claim"]["user_level_epsilon"] is None
    assert {group["epsilon"] for group in doubted["accounting"]["groups"]} == {None}
    bare = Run(tmp_path / "bare", None, mode="none").train().card()
    assert bare["claim"]["user_level_epsilon"] is None and bare["accounting"] is None


@pytest.mark.parametrize("bound", [0, 2.5, True, 10_000])
def test_a_bound_that_is_no_number_of_units_is_refused(bound: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.max_units_per_user"):
        DPSGD(eps=3.0, max_units_per_user=bound)
    with pytest.raises(ConfigurationError, match=r"privacy\.max_units_per_user"):
        make_plan(max_units_per_user=bound)
    with pytest.raises(ConfigurationError, match=r"privacy\.max_units_per_user=3 .*privacy\.unit=user"):
        DPSGD(eps=3.0, unit="user", max_units_per_user=3)
