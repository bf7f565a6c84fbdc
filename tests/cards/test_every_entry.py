"""Each entry of a card is compared, or named as one that nothing decides: no edit of any of them passes in silence."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from card_chain import Chain, make_chain
from cards import Run, make_plan, rewrite_chain, started
from planned_sweeps import begun, planned, trial_parts

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards import verification
from lit_dpret.cards.amendments import AttackResult, add_evidence, note_not_covered
from lit_dpret.cards.card import read_card, said, subject_of, verify_card, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.cards.start import note_start, read_start
from lit_dpret.cards.text import statement
from lit_dpret.cards.verification import Verification, verify_chain
from lit_dpret.privacy.ledger.assumptions import leaks
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.tasks import Fit

Place = tuple[str | int, ...]
#: Every so manieth edit where the test is not slow.
SAMPLE = 9


def private(root: Path) -> Path:
    return Run(root / "run", make_plan()).train(3).write_card().parent


def without_privacy(root: Path) -> Path:
    return Run(root / "run", None, mode="none").train(3).write_card().parent


def from_another(root: Path) -> Path:
    return started(root).write_card().parent


def derived(root: Path) -> Path:
    return make_chain(root / "runs").synthetic


def trial(root: Path) -> Path:
    """A trial of a sweep that starts from a run whose settings were chosen on private data."""
    told: Callable[[Path], list[Any]] = lambda folder: [PrivacyCard(run_dir=folder, tuning_data="private")]  # noqa: E731
    Fit(min_free_mb=1).run(trial_parts(root, root / "parent", callbacks=told))
    planned(root, trials=1, start=root / "parent", metric_data="private", metric="val/loss")
    begun(root, start=root / "parent")
    return Path(shutil.move(root / "sweep" / "trials" / "one", root / "one"))


@pytest.fixture
def by_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every card taken for one that this very version wrote, so that its words are compared too."""
    monkeypatch.setattr(verification, "_made_by_this_program", lambda card: True)


def blocks(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Each block and each entry of a card, with the names that lead to it."""
    yield place, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from blocks(inner, (*place, key))


def others(value: Any) -> list[Any]:
    """What a forger may put where ``value`` was."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [value + 1, None]
    if isinstance(value, str):
        return [f"{value} and more", None]
    if value is None:
        return [1.0, "a text"]
    if isinstance(value, dict):
        return [value | {"added": 1}, *({k: v for k, v in value.items() if k != name} for name in value)]
    longer = [*value, others(value[-1])[0] if value else "a text"]
    return [longer, value[:-1]] if value else [longer]


def edits(card: dict[str, Any]) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
    """Each card with one entry changed, emptied, left out or added; also the place and what stands there now."""
    for place, value in blocks(card):
        for other in others(value):
            edited = copy.deepcopy(card)
            if not place:
                yield place, other, other
                continue
            block: Any = edited
            for name in place[:-1]:
                block = block[name]
            block[place[-1]] = other
            yield place, other, edited


def forge(card: dict[str, Any], place: Place, folder: Path) -> None:
    """Write it with checksum, statement, banners and pages put right, as somebody who knows the program would."""
    try:
        fresh = said(card)
        if place[:1] != ("banners",):
            card["banners"] = fresh["banners"]
        if place[:1] != ("cautions",):
            card["cautions"] = fresh["cautions"]
        if place[:2] != ("claim", "statement"):
            card["claim"]["statement"] = statement(card)
        card["checksum"] = checksum(card)
        write_card(card, folder)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):  # no page can be made of it
        card["checksum"] = checksum(card)
        (folder / "privacy_card.json").write_text(json.dumps(card), encoding="utf-8")


def named(result: Verification, place: Place) -> bool:
    """Whether ``place``, or a block that it stands in, is among the entries that nothing decides."""
    names = list(map(str, place))
    if names[:2] == ["subject", "sha256"]:  # a file that is not on the card is named by itself
        names = names[2:]
    told = {
        name.strip()
        for finding in result.not_checked
        if finding.check in ("entries", "other files")
        for name in finding.text.partition(": ")[2].split(",")
    }
    return any(".".join(names[: length + 1]) in told for length in range(len(names)))


def hole(place: Place, new: Any, honest: Any) -> Place:
    """The place that an edit is about: the entry that was added or left out, where it was of a whole block."""
    if isinstance(new, dict) and isinstance(honest, dict):
        return (*place, *(new.keys() ^ honest.keys()))
    if isinstance(new, list) and isinstance(honest, list):
        return (*place, min(len(new), len(honest)))
    return place


@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(
    "make",
    [private, without_privacy, *(pytest.param(m, marks=pytest.mark.slow) for m in (from_another, derived, trial))],
)
def test_no_edit_of_a_card_passes_in_silence(
    make: Callable[[Path], Path], every: int, tmp_path: Path, by_this_program: None
) -> None:
    folder = make(tmp_path)
    for copied in (folder / "model").glob("privacy_card.*"):  # another copy of the card would show an edit of this one
        copied.unlink()
    honest, before = read_card(folder), verify_chain(folder)
    del honest["checksum"]
    assert not before.failed
    silent = []
    for number, (place, new, card) in enumerate(edits(honest)):
        if number % every:
            continue
        stated = dict(blocks(honest))
        about = hole(place, new, stated[place])
        forge(card, place, folder)
        left_out = isinstance(new, dict | list) and about not in dict(blocks(card))
        said_nothing = stated.get(about) in (None, "", [], {})
        if (left_out and said_nothing) or card == honest | {"checksum": card["checksum"]}:
            continue
        result = verify_chain(folder)
        # An entry that nothing decides may be left out: then the card says nothing of it.
        if not (result.failed or named(result, about) or named(before, about)):
            silent.append(f"{'.'.join(map(str, about))} = {str(new)[:40]}")
    assert not silent, "\n".join(silent)


# -- copies ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trial(tmp_path_factory.mktemp("sweep")).parent


@pytest.fixture
def run(trials: Path, tmp_path: Path, by_this_program: None) -> Path:
    """A copy of the trial to be broken; its parent lies beside it."""
    shutil.copytree(trials / "parent", tmp_path / "parent")
    folder = shutil.copytree(trials / "one", tmp_path / "one")
    assert not verify_chain(folder).failed
    return folder


def rewritten(run: Path, card: dict[str, Any], *places: str) -> None:
    """Write a card as somebody does who knows the format: checksum, pages and copies are put right."""
    card["checksum"] = checksum(card)
    for place in places or ("", "model"):
        write_card(card, run / place)


@pytest.mark.slow
def test_no_block_of_the_copy_in_the_model_folder_can_be_edited(run: Path) -> None:
    tried = set()
    for place, _, card in edits(read_card(run)):
        of_the_program = not place or place[0] in ("checksum", "package_versions", "environment", "signoff", "schema")
        if of_the_program or place in tried or len(place) > (2 if place[0] == "claim" else 1):
            continue
        tried.add(place)
        forge(card, place, run / "model")
        failed = verify_chain(run).failed
        assert {finding.check for finding in failed} == {"copy"}, place
    assert len(tried) > 30


@pytest.mark.costly
def test_a_copy_that_was_edited_by_hand_is_rejected_and_so_are_its_pages(run: Path) -> None:
    names = ("privacy_card.json", "privacy_card.md", "privacy_card.html")
    texts = {name: (run / "model" / name).read_text(encoding="utf-8") for name in names}
    halved = json.dumps(
        {**(card := read_card(run)), "claim": {**card["claim"], "epsilon": card["claim"]["epsilon"] / 2}}
    )
    for name, text in ((names[0], halved), *((name, f"{texts[name]}epsilon = 0.001") for name in names[1:])):
        (run / "model" / name).write_text(text, encoding="utf-8")
        assert {finding.check for finding in verify_chain(run).failed} == {"copy"}, name
        (run / "model" / name).write_text(texts[name], encoding="utf-8")
    assert not verify_chain(run).failed
    (run / "model" / names[0]).unlink()
    (run / "model" / names[1]).write_text("epsilon = 0.001", encoding="utf-8")
    assert {finding.check for finding in verify_chain(run).failed} == {"copy"}, "a page without its card"


def test_a_copy_may_be_gone_or_have_notes_and_results_of_its_own(run: Path) -> None:
    note_not_covered(run / "model", "BLEU of it", computed="the private queries")
    assert not verify_chain(run).failed
    result = AttackResult(attack="membership", n=10, metric="auc", estimate=0.5)
    add_evidence(run, [result])
    assert not verify_chain(run).failed
    for path in (run / "model").glob("privacy_card.*"):
        path.unlink()
    assert not verify_chain(run).failed


def test_an_edited_copy_of_a_derived_card_and_of_a_parent_is_rejected(chain: Chain) -> None:
    for link in (chain.encoder, chain.generator):
        card = read_card(link)
        rewritten(link, card | {"pretraining": card["pretraining"] | {"model": "another"}}, "model")
        assert any(one.check == "copy" and "pretraining" in one.text for one in verify_chain(link).failed)
        rewritten(link, card)
    rewritten(chain.generator, read_card(chain.generator) | {"created": "2000-01-01"}, "model")
    assert {finding.check for finding in verify_chain(chain.index).failed} == {"copy"}


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
        run.train(3).write_card(subject=subject, tuning={"data": data})
        run.ledger.close()
    return root / "child"


DATA = ("none", "public", "synthetic", "private", "unknown")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a card says of settings that were chosen on each kind of data."""
    run = Run(tmp_path_factory.mktemp("words"), make_plan()).train(1)
    return {data: run.card(tuning={"data": data})["tuning"] for data in DATA}


#: What the run itself was chosen on changes no more than what an edit puts in its place; each is there once.
@pytest.mark.parametrize(("own", "earlier"), [*zip(DATA, DATA, strict=True), *(("none", data) for data in DATA[1:])])
def test_a_card_hides_no_choice_that_the_run_it_started_from_made(
    own: str, earlier: str, tmp_path: Path, words: dict[str, Any]
) -> None:
    folder = tuned(tmp_path, own, earlier)
    assert not verify_chain(folder).failed
    good = read_card(folder)
    open_data = earlier in ("private", "synthetic", "unknown")
    for data in DATA:
        card = copy.deepcopy(good) | {"tuning": words[data]}
        card["cautions"] = said(card)["cautions"]
        rewritten(folder, card, "")
        hidden = open_data and data != earlier  # also where it says something graver, which tells of another choice
        found = {finding.check for finding in verify_chain(folder).failed} - {"words"}
        assert found == ({"ledger", "parent"} if hidden else set()), data


def test_an_accounted_choice_and_a_price_are_not_made_up(tmp_path: Path) -> None:
    folder = tuned(tmp_path, "private", "none")
    good = read_card(folder)
    for change in ({"accounted": True}, {"epsilon": 0.5}, {"accounted": True, "epsilon": 0.5}, {"data": "privat"}):
        rewritten(folder, good | {"tuning": good["tuning"] | change}, "")
        assert verify_chain(folder).failed, change


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
    assert [finding.check for finding in verify_chain(folder).failed] == ["parent"]


def test_a_derived_card_hides_no_choice_of_its_parent(chain: Chain) -> None:
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
    assert any(assumption.refuted for assumption in leaks(run.ledger.records))
    honest = run.card(assumptions=leaks(run.ledger.records))
    assert honest["claim"]["guarantee"] == "not_proved" and verify_card(honest, run.path) == []
    assert verify_card(run.card(), run.path)
