"""What many trainings have spent together: each ledger once, wherever it lies, and a word on those that are missing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from cards import Run, make_plan, rewrite_chain

from lit_dpret.cards.card import write_card
from reproduction.spent import spent_under


def epsilon_in(text: str) -> float:
    return float(re.findall(r"have epsilon = ([\d.]+)", text)[0])


def trained(folder: Path, *, steps: int = 10, **plan: Any) -> Run:
    """A private run with its card beside its ledger."""
    folder.mkdir(parents=True)
    run = Run(folder, make_plan(**plan)).train(steps)
    run.write_card()
    return run


def test_a_sum_counts_each_ledger_once_wherever_it_lies_and_no_claim_that_is_refuted(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "disk"
    for steps, folder in ((10, run / "one"), (11, elsewhere), (12, tmp_path / "study" / "eps16-0")):
        trained(folder, steps=steps)
    (run / "two").symlink_to(elsewhere)
    (run / "one" / "loop").symlink_to(run)
    shutil.copytree(run / "one", run / "set" / "data", symlinks=True)
    spent = spent_under(run)
    assert spent.private == 2, "a link is followed, and a copy counts once, whatever its folder is called"
    with_study = spent_under(run, taken=tmp_path / "study", taken_private=3)
    assert with_study.private == 3 and epsilon_in(with_study.text) > epsilon_in(spent.text)
    assert "ledgers of 2 of its 3 private trainings are missing" in with_study.text
    trained(run / "pairs", unit="pair")
    assert "For all of them together no epsilon is proved" in spent_under(run).text
    seeded = trained(tmp_path / "seeded", steps=3)
    (seeded.folder / "privacy_card.json").unlink()
    rewrite_chain(seeded.path, lambda record: record.update({"noise_seed": 1} if record["kind"] == "plan" else {}))
    assert "no proved epsilon" in spent_under(tmp_path / "seeded").text


def test_a_card_without_its_ledger_is_missing_from_the_sum_and_nothing_is_not_what_was_spent(tmp_path: Path) -> None:
    for name, steps in (("one", 10), ("two", 11)):
        trained(tmp_path / name, steps=steps)
    assert "is not in this sum" not in spent_under(tmp_path).text
    (tmp_path / "two" / "privacy_ledger.jsonl").unlink()
    one = spent_under(tmp_path)
    assert one.private == 1 and "The ledgers of up to 1 private training with a card here were not found" in one.text
    (tmp_path / "one" / "privacy_ledger.jsonl").unlink()
    none = spent_under(tmp_path)
    assert none.private == 0 and none.text.startswith("What was spent cannot be added up. The ledgers of up to 2")
    assert spent_under(tmp_path / "one" / "empty").text == "No private training spent anything."


def test_a_training_without_privacy_is_no_private_one_that_lost_its_ledger(tmp_path: Path) -> None:
    run = Run(tmp_path, None, mode="none").train()
    run.write_card()
    told = spent_under(tmp_path)
    assert told.bare == 1 and "1 training had no privacy at all" in told.text and "not found" not in told.text
    run.path.unlink()
    assert "not found" not in spent_under(tmp_path).text


def test_the_ledger_of_a_set_that_was_given_is_counted_where_it_lies(tmp_path: Path) -> None:
    """A retriever of given queries inherits their generator's claim, and its card names that ledger."""
    generator = trained(tmp_path / "elsewhere" / "generator", steps=12)
    trained(tmp_path / "elsewhere" / "another", steps=13)
    given = tmp_path / "elsewhere" / "synthetic" / "data"
    for place in (given, tmp_path / "run" / "row"):
        place.mkdir(parents=True)
        write_card(generator.card(), place)
    trained(tmp_path / "run" / "direct", steps=10)
    alone, both = spent_under(tmp_path / "run"), spent_under(tmp_path / "run", near=[given])
    assert alone.private == 1 and "up to 1 private training with a card here were not found" in alone.text
    assert both.private == 2 and "not found" not in both.text, "that of the set, and no other beside it"
    assert epsilon_in(both.text) > epsilon_in(alone.text)
    (tmp_path / "elsewhere" / "another" / "privacy_ledger.jsonl").write_text("not a ledger", encoding="utf-8")
    assert spent_under(tmp_path / "run", near=[given]).text == both.text, "a stranger's ledger is nobody's business"
