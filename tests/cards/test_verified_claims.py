"""`verify` refuses a card, or a copy of it, on which anything is edited that its ledger or its parent decides."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from card_chain import Chain, make_chain
from cards import Run, make_plan, rewrite_chain
from planned_sweeps import begun, planned, trial_parts

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards import verification
from lit_dpret.cards.amendments import AttackResult, add_evidence, note_not_covered
from lit_dpret.cards.card import read_card, said, subject_of, verify_card, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.cards.start import note_start, read_start
from lit_dpret.cards.text import card_html, card_markdown, statement
from lit_dpret.cards.verification import Verification, verify_chain
from lit_dpret.privacy.accounting import composition as accounting
from lit_dpret.privacy.ledger.facts import leaks
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.tasks import Fit

COMMIT = "a" * 40
NAME = "privacy_card.json"

#: What no ledger decides: what the run alone declares of itself, and which program made the card.
FREE = {
    "subject.artifact_type", "subject.name", "claim.duplicates_policy", "claim.output_released",
    "mechanism.expected_batch_size", "mechanism.optimizer", "mechanism.trainable_parameters", "accounting.library",
    "accounting.version", "tuning.n_trials", "pretraining.model", "pretraining.overlap_check", "randomness.rng",
    "tuning.note",
}  # fmt: skip
OF_THE_PROGRAM = {"checksum", "created", "package_versions", "environment", "signoff", "schema"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with one trial that starts from a run whose settings were chosen on private data."""
    root = tmp_path_factory.mktemp("sweep")
    told: Callable[[Path], list[Any]] = lambda folder: [PrivacyCard(run_dir=folder, tuning_data="private")]  # noqa: E731
    Fit(min_free_mb=1).run(trial_parts(root, root / "parent", callbacks=told))
    planned(root, trials=1, start=root / "parent", metric_data="private", metric="val/loss")
    begun(root, start=root / "parent")
    for folder in (root / "sweep" / "trials" / "one", root / "parent"):
        assert not verify(folder, root).failed
    return root


@pytest.fixture
def trial(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the trial, which this very version wrote, to be broken; its parent lies beside it."""
    monkeypatch.setattr(verification, "code_commit", lambda: COMMIT)
    shutil.copytree(made / "parent", tmp_path / "parent")
    folder = shutil.copytree(made / "sweep" / "trials" / "one", tmp_path / "one")
    card = read_card(folder)
    card["environment"]["code_commit"] = COMMIT
    rewritten(folder, card)
    assert not verify(folder, tmp_path).failed
    return folder


def verify(folder: Path, root: Path) -> Verification:
    return verify_chain(folder, parents=[root / "parent"])


def rewritten(run: Path, card: dict[str, Any], *places: str) -> None:
    """Write a card as somebody does who knows the format: words, checksum, pages and copies are put right."""
    card["checksum"] = checksum(card)
    for place in places or ("", "model"):
        write_card(card, run / place)


def leaves(part: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(part, dict):
        for name, inner in part.items():
            yield from leaves(inner, (*place, name))
        return
    yield place, part
    if isinstance(part, list):
        for index, inner in enumerate(part):
            yield from leaves(inner, (*place, index))


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 0.5 if value else 1
    if isinstance(value, list):
        return value[:-1] if len(value) > 1 or (value and isinstance(value[0], str)) else [*value, "x"]
    return f"{value}x" if isinstance(value, str) else "x"


def edited(card: dict[str, Any], place: tuple[Any, ...]) -> dict[str, Any] | None:
    """The card with one place changed and all that follows from it put right; None where no card can say that."""
    changed = copy.deepcopy(card)
    part: Any = changed
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = other(part[place[-1]])
    try:
        if place[0] != "banners":
            changed["banners"] = said(changed)["banners"]
        if place[0] != "cautions":
            changed["cautions"] = [*changed["cautions"], *said(changed)["cautions"]]
        if place[:2] != ("claim", "statement"):
            changed["claim"]["statement"] = statement(changed)
        card_markdown(changed), card_html(changed)
    except (KeyError, TypeError, ValueError):
        return None
    return changed


def test_no_claim_of_a_trial_that_started_from_another_run_can_be_edited(trial: Path, tmp_path: Path) -> None:
    good, passed = read_card(trial), set[str]()
    tried = 0
    for place, _ in leaves(good):
        if place[0] in OF_THE_PROGRAM or (changed := edited(good, place)) is None:
            continue
        rewritten(trial, changed)
        tried += 1
        if not verify(trial, tmp_path).failed:
            passed.add(".".join(map(str, place[:2])))
    assert tried > 150 and passed <= FREE, sorted(passed - FREE)


# -- copies ------------------------------------------------------------------------------------


def test_no_block_of_the_copy_in_the_model_folder_can_be_edited(trial: Path, tmp_path: Path) -> None:
    good = read_card(trial)
    for place, _ in leaves(good):
        deep = len(place) > (2 if place[0] == "claim" else 1)
        if place[0] in OF_THE_PROGRAM - {"created"} or deep or (changed := edited(good, place)) is None:
            continue
        rewritten(trial, changed, "model")
        failed = verify(trial, tmp_path).failed
        assert {finding.check for finding in failed} == {"copy"}, place
        assert place[0] in failed[0].text


def halve(folder: Path) -> None:
    card = read_card(folder)
    card["claim"]["epsilon"] /= 2
    (folder / NAME).write_text(json.dumps(card), encoding="utf-8")


def add_to(name: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        path = folder / name
        path.write_text(path.read_text(encoding="utf-8") + "epsilon = 0.001", encoding="utf-8")

    return add


def page_alone(folder: Path) -> None:
    (folder / NAME).unlink()
    add_to("privacy_card.md")(folder)


@pytest.mark.parametrize("break_it", [halve, add_to("privacy_card.md"), add_to("privacy_card.html"), page_alone])
def test_a_copy_that_was_edited_by_hand_is_rejected_and_so_are_its_pages(
    break_it: Callable[[Path], None], trial: Path, tmp_path: Path
) -> None:
    break_it(trial / "model")
    assert {finding.check for finding in verify(trial, tmp_path).failed} == {"copy"}


def test_a_copy_may_be_gone_or_have_notes_and_results_of_its_own(trial: Path, tmp_path: Path) -> None:
    note_not_covered(trial / "model", "BLEU of it", computed="the private queries")
    assert not verify(trial, tmp_path).failed
    result = AttackResult(attack="membership", n=10, metric="auc", estimate=0.5)
    add_evidence(trial, [result])
    assert not verify(trial, tmp_path).failed
    for path in (trial / "model").glob("privacy_card.*"):
        path.unlink()
    assert not verify(trial, tmp_path).failed


def test_an_edited_copy_of_a_derived_card_and_of_a_parent_is_rejected(tmp_path: Path) -> None:
    chain: Chain = make_chain(tmp_path / "runs")
    for link in (chain.encoder, chain.generator):
        card = read_card(link)
        rewritten(link, card | {"pretraining": card["pretraining"] | {"model": "another"}}, "model")
        assert ("copy", "pretraining") in [
            (finding.check, "pretraining" if "pretraining" in finding.text else "")
            for finding in verify_chain(link).failed
        ]
        rewritten(link, card)
    rewritten(chain.generator, read_card(chain.generator) | {"created": "2000-01-01"}, "model")
    assert {finding.check for finding in verify_chain(chain.index).failed} == {"copy"}


def test_the_epsilon_is_not_computed_for_a_copy_again(
    trial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    epsilon = accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda *given, **more: calls.append(1) or epsilon(*given, **more))
    verify(trial, tmp_path)
    with_copy = len(calls)
    for path in [*(trial / "model").glob("privacy_card.*"), *(tmp_path / "parent" / "model").glob("privacy_card.*")]:
        path.unlink()
    verify(trial, tmp_path)
    assert len(calls) == 2 * with_copy > 0


# -- how settings were chosen ------------------------------------------------------------------


def tuned(root: Path, own: str, earlier: str) -> Path:
    """A run whose settings were chosen on ``own``, from the model of one whose settings were chosen on ``earlier``."""
    for name, data in (("parent", earlier), ("child", own)):
        model = root / name / "model"
        model.mkdir(parents=True)
        (model / "weights").write_bytes(b"w")
        run = Run(root / name, make_plan())
        if name == "child":
            note_start(run.ledger, read_start(root / "parent", public=False))
        subject = subject_of("weights", name, [model / "weights"], root=model)
        write_card(run.train(3).card(subject=subject, tuning={"data": data}), run.folder)
        run.ledger.close()
    return root / "child"


DATA = ("none", "public", "synthetic", "private", "unknown")


@pytest.mark.parametrize("own", DATA)
@pytest.mark.parametrize("earlier", DATA)
def test_a_card_hides_no_choice_that_the_run_it_started_from_made(own: str, earlier: str, tmp_path: Path) -> None:
    folder = tuned(tmp_path, own, earlier)
    assert not verify(folder, tmp_path).failed
    good = read_card(folder)
    open_data = earlier in ("private", "unknown")
    for data in DATA:
        plain = Run(tmp_path / data, make_plan()) if (tmp_path / data).mkdir() is None else None
        assert plain is not None
        words = plain.train(1).card(tuning={"data": data})["tuning"]
        plain.ledger.close()
        card = copy.deepcopy(good) | {"tuning": words}
        card["cautions"] = said(card)["cautions"]
        rewritten(folder, card, "")
        hidden = open_data and not (data == "private" or data == earlier)
        hidden = hidden or (open_data and data == "private" != earlier)  # which says nothing of the other choice
        found = {finding.check for finding in verify(folder, tmp_path).failed} - {"words"}
        assert found == ({"ledger", "parent"} if hidden else set()), data


def test_an_accounted_choice_and_a_price_are_not_made_up(tmp_path: Path) -> None:
    folder = tuned(tmp_path, "private", "none")
    good = read_card(folder)
    for change in ({"accounted": True}, {"epsilon": 0.5}, {"accounted": True, "epsilon": 0.5}, {"data": "privat"}):
        rewritten(folder, good | {"tuning": good["tuning"] | change}, "")
        assert verify(folder, tmp_path).failed, change


def test_a_ledger_that_was_rewritten_without_the_choice_of_its_start_is_held_against_the_card_of_that(
    tmp_path: Path,
) -> None:
    folder = tuned(tmp_path, "public", "private")

    def forget(record: dict[str, Any]) -> None:
        if record.get("name") == "init_from":
            record["start"]["tuning"] = {"data": "public", "accounted": True, "text": ""}

    rewrite_chain(folder / "privacy_ledger.jsonl", forget)
    run = Run.__new__(Run)
    run.ledger = PrivacyLedger.read(folder / "privacy_ledger.jsonl")  # type: ignore[assignment]
    write_card(run.card(subject=read_card(folder)["subject"], tuning={"data": "public"}), folder)
    assert [finding.check for finding in verify(folder, tmp_path).failed] == ["parent"]


def test_a_derived_card_hides_no_choice_of_its_parent(tmp_path: Path) -> None:
    chain = make_chain(tmp_path / "runs", card={"tuning_data": "private"})
    assert not verify_chain(chain.index).failed
    good = read_card(chain.synthetic)
    public = {"data": "public", "text": "On public data.", "accounted": True}
    for tuning in (good["tuning"] | public, good["tuning"] | {"accounted": True}, good["tuning"] | {"data": "unknown"}):
        rewritten(chain.synthetic, good | {"tuning": tuning, "cautions": []}, "")
        assert "parent" in {finding.check for finding in verify_chain(chain.synthetic).failed}


# -- what the ledger refutes -------------------------------------------------------------------


def test_a_card_that_leaves_out_what_its_ledger_says_was_shown_claims_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, make_plan())
    run.ledger.append(
        "event", name="private_evaluation", release={"kind": "non_private", "label": "recall", "count": 1}
    )
    run.train(3)
    assert any(assumption.holds is False for assumption in leaks(run.ledger.records))
    honest = run.card(assumptions=leaks(run.ledger.records))
    assert honest["claim"]["guarantee"] == "not_proved" and verify_card(honest, run.path) == []
    assert verify_card(run.card(), run.path)
