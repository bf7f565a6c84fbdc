"""Each entry of a card is compared, or named as one that nothing decides: no edit of any of them passes in silence."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from card_chain import make_chain
from cards import Run, make_plan

from lit_dpret.cards import verification
from lit_dpret.cards.card import read_card, said, subject_of, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.cards.start import note_start, read_start
from lit_dpret.cards.text import statement
from lit_dpret.cards.verification import Verification, verify_chain

Place = tuple[str | int, ...]
#: Every so manieth edit where the test is not slow.
SAMPLE = 9


def private(root: Path) -> Path:
    run = Run(root / "run", make_plan()).train(3)
    write_card(run.card(), run.folder)
    return run.folder


def without_privacy(root: Path) -> Path:
    run = Run(root / "run", None, mode="none").train(3)
    write_card(run.card(), run.folder)
    return run.folder


def started(root: Path) -> Path:
    model = root / "first" / "model"
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"w")
    first = Run(root / "first", make_plan()).train(3)
    write_card(first.card(subject=subject_of("weights", "first", [model / "weights"], root=model)), first.folder)
    second = Run(root / "second", make_plan())
    note_start(second.ledger, read_start(first.folder, public=False))
    write_card(second.train(3).card(), second.folder)
    return second.folder


def derived(root: Path) -> Path:
    return make_chain(root / "runs").synthetic


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


def said_nothing(card: dict[str, Any], place: Place) -> bool:
    """Whether ``card`` had nothing at ``place`` that could be left out."""
    return dict(blocks(card)).get(place) in (None, "", [], {})


def contains(card: dict[str, Any], place: Place) -> bool:
    return place in dict(blocks(card))


def hole(place: Place, new: Any, honest: Any) -> Place:
    """The place that an edit is about: the entry that was added or left out, where it was of a whole block."""
    if isinstance(new, dict) and isinstance(honest, dict):
        return (*place, *(new.keys() ^ honest.keys()))
    if isinstance(new, list) and isinstance(honest, list):
        return (*place, min(len(new), len(honest)))
    return place


@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("make", [private, without_privacy, started, derived])
def test_no_edit_of_a_card_passes_in_silence(
    make: Callable[[Path], Path], every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_made_by_this_program", lambda card: True)
    folder = make(tmp_path)
    shutil.rmtree(folder / "model", ignore_errors=True)  # another copy of the card would show an edit of this one
    honest, before = read_card(folder), verify_chain(folder)
    del honest["checksum"]
    assert not before.failed
    silent = []
    for number, (place, new, card) in enumerate(edits(honest)):
        if number % every:
            continue
        about = hole(place, new, dict(blocks(honest))[place])
        forge(card, place, folder)
        left_out = isinstance(new, dict | list) and not contains(card, about)
        if (left_out and said_nothing(honest, about)) or card == honest | {"checksum": card["checksum"]}:
            continue
        result = verify_chain(folder)
        # An entry that nothing decides may be left out: then the card says nothing of it.
        if not (result.failed or named(result, about) or named(before, about)):
            silent.append(f"{'.'.join(map(str, about))} = {str(new)[:40]}")
    assert not silent, "\n".join(silent)


def test_what_no_check_compares_is_named_in_the_text_and_in_the_json(tmp_path: Path) -> None:
    result = verify_chain(private(tmp_path))
    (entries,) = [finding for finding in result.to_dict()["findings"] if finding["check"] == "entries"]
    assert entries["outcome"] == "not_checked"
    for name in ("created", "subject.name", "claim.duplicates_policy", "randomness.rng", "package_versions"):
        assert name in entries["text"] and name in result.format()
