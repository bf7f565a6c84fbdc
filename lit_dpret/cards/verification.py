"""Verify a privacy card from its files, without the private data.

The check follows the chain from an artefact's card back to the run on private data. Each parent must be the card that
its child names by SHA-256, and no child may claim more than its parent. Each card must be next to the files that it
describes, and the epsilon of the run must follow from its ledger. Hashes cannot reveal a chain that was rewritten
whole; a signature can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

import lit_dpret
from lit_dpret.audit.statistics.evidence import NO_GUARANTEE
from lit_dpret.cards.amendments import versions
from lit_dpret.cards.audits import audit_problems
from lit_dpret.cards.card import SIGNOFF, said
from lit_dpret.cards.check import Place, Recheck, changed_files, recheck
from lit_dpret.cards.claim import uncovered
from lit_dpret.cards.file import (
    CARD_FILES,
    CARD_NAME,
    MODEL_FOLDER,
    README,
    SIGNATURE_NAME,
    card_path,
    card_sha256,
    read_card,
)
from lit_dpret.cards.hub import claim_metadata
from lit_dpret.cards.lineage import FoundCard, Lineage, link_problems, passed_on
from lit_dpret.cards.provenance import CHANGED, code_commit, protocol_facts
from lit_dpret.cards.signature import check_signature, public_key_fingerprint
from lit_dpret.cards.text import card_html, card_markdown, privacy_line, statement
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, first_line, in_words

SCHEMA = "lit-dpret/verification/1"

Outcome = Literal["ok", "failed", "not_checked"]


@dataclass(frozen=True)
class CheckResult:
    """One check of an artefact, with its details; ``not_checked`` means that it could not be made."""

    artefact: str
    check: str
    outcome: Outcome
    text: str


@dataclass
class Verification:
    """The findings from a card to the private data, in chain order, the subject first.

    ``elsewhere`` lists the cards and ledgers that were used but are not in the card's folder.
    """

    path: Path
    sha256: str = ""
    claim: str = ""
    elsewhere: list[Path] = field(default_factory=list)
    findings: list[CheckResult] = field(default_factory=list)

    @property
    def failed(self) -> list[CheckResult]:
        return [finding for finding in self.findings if finding.outcome == "failed"]

    @property
    def not_checked(self) -> list[CheckResult]:
        return [finding for finding in self.findings if finding.outcome == "not_checked"]

    def add(self, artefact: str, check: str, problems: Sequence[str], text: str) -> None:
        """Record a check: its problems, or what it confirmed."""
        self.findings += [CheckResult(artefact, check, "failed", problem) for problem in problems] or [
            CheckResult(artefact, check, "ok", text)
        ]

    def pass_over(self, artefact: str, check: str, why: str, *, failed: bool = False) -> None:
        """Record a check that could not be made; ``failed`` if it was required."""
        self.findings.append(CheckResult(artefact, check, "failed" if failed else "not_checked", why))

    def signed_by(self, key: str) -> None:
        """Record that the card is now signed, replacing the earlier finding."""
        old = [f for f in self.findings if f.check == "signature" and f.artefact == self.findings[0].artefact]
        self.findings = [finding for finding in self.findings if finding not in old]
        self.add(self.findings[0].artefact, "signature", [], f"made now, by the key {key[:16]}, over this card")

    def to_dict(self) -> dict[str, Any]:
        counts = {name: sum(f.outcome == name for f in self.findings) for name in ("ok", "failed", "not_checked")}
        return {
            "schema": SCHEMA, "card": self.path.name, "sha256": self.sha256, "claim": self.claim, "counts": counts,
            "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip

    def format(self) -> str:
        """Format one line per finding, between the claim (if nothing failed) and the verdict."""
        words = {"ok": "ok", "failed": "FAILED", "not_checked": "not checked"}
        # A list: a run and the run that it started from may have the same name.
        held = [
            (f.artefact, f.text.removeprefix(_UNDECIDED).split(", ")) for f in self.findings if f.check == "entries"
        ]
        every = [place for place in (held[0][1] if held else []) if all(place in places for _, places in held)]
        others: dict[str, list[str]] = {}
        for name, places in held:
            others.setdefault(", ".join(place for place in places if place not in every), []).append(name)
        lines = [
            f"{words[f.outcome]:<12} {f.artefact}, {f.check}: {f.text}" for f in self.findings if f.check != "entries"
        ]
        if held:  # once for all cards, because most of the entries are the same
            told = [f"of {', '.join(names)} {'also ' if every else ''}{own}" for own, names in others.items() if own]
            text = "; ".join([", ".join(every), *told] if every else told)
            names = ", ".join(dict.fromkeys(name for name, _ in held))
            lines.append(f"{words['not_checked']:<12} {names}, entries: {_UNDECIDED}{text}")
        counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.to_dict()["counts"].items())
        return "\n".join([*([self.claim] if self.claim and not self.failed else []), *lines, f"checks: {counts}"])

    def used(self, path: Path) -> None:
        if path not in self.elsewhere and not path.resolve().is_relative_to(self.path.resolve().parent):
            self.elsewhere.append(path)


_SHOWN = 5
_UNDECIDED = "no check here confirms these, so only a signature protects them: "
_OPENED = re.compile(r"---[ \t]*(\n|\Z)")
_HEADER = re.compile(r"---\n(.*?)\n---(\n|\Z)", re.DOTALL)
_OF_THE_PROGRAM = ("checksum", "environment", "package_versions")


def verify_chain(
    path: str | Path,
    *,
    parents: Iterable[str | Path] = (),
    allow_missing_parents: bool = False,
    allow_missing_ledger: bool = False,
    public_key: str | Path | None = None,
    protocols: Iterable[str | Path] = (),
    self_contained: bool = False,
) -> Verification:
    """Check a card, its files, its ledger, and all its ancestors.

    Guarantees:
        - The result is free of failures only if each card found is the one that its child names, unedited, and not
          contradicted by an audit on it; each child claims no more than its parent; each listed file that must be
          there has its SHA-256; and each ledger found gives the numbers of its card.
        - A parent or a ledger that is not found is a failure, unless it was allowed to be missing; then it is
          reported as not checked.

    Args:
        path: A card, or the folder that holds it.
        parents: Folders or files to search for cards and ledgers, before those around the card.
        allow_missing_parents: Accept missing parents.
        allow_missing_ledger: Accept that the ledger behind the claim is missing.
        public_key: A PEM file with the key that must have signed the card, or one that it was derived from.
        protocols: Files that must have been registered before the first release.
        self_contained: Search for cards and ledgers only in the card's folder and ``parents``, as on a machine that
            has nothing else.
    """
    key = None if public_key is None else public_key_fingerprint(public_key)
    given = protocol_facts(protocols, knob="task.protocols")
    result = Verification(card_path(path))
    lineage = Lineage(parents, within=result.path.parent if self_contained else None)
    try:
        found = FoundCard(result.path, read_card(path))
    except DataError as error:
        result.pass_over(result.path.name, "card", str(error), failed=True)
        return result
    result.sha256, result.claim = card_sha256(result.path), privacy_line(found.card)
    result.add(found.name, "card", [], "unedited, by its checksum")
    try:
        met = _follow(result, lineage, found, allow_missing_parents, allow_missing_ledger)
        _check_protocols(result, found, given)
        _check_signatures(result, met, key)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        why = in_words(error) if isinstance(error, KeyError) else first_line(error)
        problem = f"a field is missing or malformed ({why})."
        result.pass_over(
            found.name, "card", f"it, or one that it was derived from, cannot be read: {problem}", failed=True
        )
    return result


def _follow(
    result: Verification, lineage: Lineage, found: FoundCard, allow_missing_parents: bool, allow_missing_ledger: bool
) -> list[FoundCard]:
    named = list(found.card["parents"])
    if found.card["mechanism"].get("kind") == "post_processing" and not named:
        result.pass_over(found.name, "parents", "it was derived from something, but names no parent.", failed=True)
        return [found]
    decided = _examine(result, lineage, found, must_have_files=True, allow_missing_ledger=allow_missing_ledger)
    child: FoundCard | None = found
    chain = [found]
    for place, parent in enumerate(named):
        met = lineage.card(str(parent["sha256"]))
        if met is None:
            result.pass_over(str(parent["name"]), "card", _not_found(parent, lineage), failed=not allow_missing_parents)
            child = None
            continue
        result.used(met.path)
        later = "" if met.named is None else ", and was amended since"
        own = {"name": met.name, "sha256": parent["sha256"], "schema": met.card["schema"]}
        problems = [] if parent == own else [f"{found.name} names it as {dict(parent)}, and it is {own}."]
        result.add(met.name, "card", problems, f"the one that was named, by its SHA-256{later}")
        if child is not None:
            ledger = lineage.ledger(met.card, met.path)
            problems = link_problems(child.card, met.named or met.card, named[place + 1 :], ledger)
            result.add(child.name, "parent", problems, f"claims no more than {met.name}")
            if child.card["mechanism"].get("kind") == "post_processing":
                decided |= passed_on(child.card, met.named or met.card)
            _tell_undecided(result, child, decided)
        decided = _examine(result, lineage, met, must_have_files=False, allow_missing_ledger=allow_missing_ledger)
        child = met
        chain.append(met)
    if child is not None:
        _tell_undecided(result, child, decided)
    return chain


def _tell_undecided(result: Verification, found: FoundCard, decided: frozenset[Place]) -> None:
    """Report the entries of a card that no check compared with anything."""
    if places := _undecided(found.card, decided | {("schema",), ("checksum",)}, ()):
        result.pass_over(found.name, "entries", f"{_UNDECIDED}{', '.join(places)}")


def _undecided(value: Any, decided: frozenset[Place], place: Place) -> list[str]:
    """Return the non-empty entries at or under ``place`` that are not ``decided``; name an undecided block once."""
    if place in decided or value in (None, "", [], {}):
        return []
    if not any(other[: len(place)] == place for other in decided):
        return [".".join(place)]
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [name for key, inner in items for name in _undecided(inner, decided, (*place, str(key)))]


def _examine(
    result: Verification, lineage: Lineage, found: FoundCard, *, must_have_files: bool, allow_missing_ledger: bool
) -> frozenset[Place]:
    """Check one card: its files, its ledger, its words; return the entries that were compared."""
    lineage.look_near(found.path)
    _check_files(result, lineage, found, required=must_have_files)
    derived, again = found.card["mechanism"].get("kind") == "post_processing", Recheck()
    if not (derived and any(lineage.card(str(parent["sha256"])) for parent in found.card["parents"][:1])):
        again = _check_ledger(result, lineage, found, allow_missing=allow_missing_ledger)
        _check_audits(result, lineage, found)
    said_here = _check_words(result, found, again.words)
    _check_copy(result, lineage, found)
    return again.decided | said_here | {("subject", "sha256")}


def _check_files(result: Verification, lineage: Lineage, found: FoundCard, *, required: bool) -> None:
    digests, name = found.card["subject"]["sha256"], found.name
    if not digests:
        result.pass_over(name, "files", "the card lists none: it was written for no saved model.")
        return
    folders = (found.path.parent, found.path.parent / MODEL_FOLDER)
    folder = max(folders, key=lambda place: sum((place / file).is_file() for file in digests))
    if not required and not any((folder / file).is_file() for file in digests):
        result.pass_over(name, "files", "none of them is next to the card; only those of the first card must be.")
        return
    result.add(name, "files", changed_files(digests, folder), f"{len(digests)} with the SHA-256 on the card")
    page = found.path.parent / README
    checked = [page] if _check_page(result, found, page) else []
    behind = [lineage.card(str(parent["sha256"])) for parent in found.card["parents"]]
    for one in (found, *behind):  # a ledger is checked with its own run
        if one is not None and (ledger := lineage.ledger(one.card, one.path)) is not None:
            checked.append(ledger)
    known = {file.resolve() for file in checked}
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name not in CARD_FILES]
    paths = [file.relative_to(folder).as_posix() for file in files if file.resolve() not in known]
    if folder != found.path.parent:
        paths += [f"checkpoints/{file.name}" for file in sorted((found.path.parent / "checkpoints").glob("*.ckpt"))]
    if others := [path for path in paths if path not in digests]:
        shown = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
        result.pass_over(name, "other files", f"not on the card, so nothing is known about them: {shown}")


def _check_page(result: Verification, found: FoundCard, page: Path) -> bool:
    """Check the claim in the header of ``README.md``, which a hub shows; return False if it states none."""
    try:
        text = page.read_text(encoding="utf-8-sig", errors="replace").lstrip()
    except OSError:
        return False
    if not _OPENED.match(text):
        return False
    try:  # some readers end the header at a line of dashes and blanks; inside the header it is not YAML, and fails
        stated = dict(yaml.safe_load(_HEADER.match(text)[1])).get("privacy")  # type: ignore[index]
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        result.pass_over(found.name, README, f"its header cannot be read: {first_line(error)}", failed=True)
        return True
    if stated is None:
        return False
    known = claim_metadata(found.card)  # as amended: an earlier version's page lacks the cautions added since
    problems = [] if stated == known else [f"its header states {stated}, and the card {known}."]
    told = "the claim in its header is that of the card; its other text is not compared"
    result.add(found.name, README, problems, told)
    return True


def _check_ledger(result: Verification, lineage: Lineage, found: FoundCard, *, allow_missing: bool) -> Recheck:
    name, stored = found.name, found.card["ledger"]
    ledger = lineage.ledger(found.card, found.path)
    if ledger is None:
        why = (
            f"{stored['name']} with the head {str(stored['head'])[:12]} was not found, so epsilon was not recomputed. "
            "Name its folder in task.parents=[DIR], or accept that with task.allow_missing_ledger=true."
        )
        result.pass_over(name, "ledger", why, failed=not allow_missing)
        return Recheck()
    result.used(ledger)
    try:
        again = recheck(found.card, lineage.read(ledger))
    except LedgerError as error:
        again = Recheck([str(error)])
    text = f"{stored['records']} records, complete; they give {privacy_line(found.card)}"
    result.add(name, "ledger", again.problems, text)
    if again.decided:
        told = f"{again.numbers} on the card, ceilings and mechanism included, follow from the ledger"
        result.add(name, "numbers", again.wrong, told)
    return again


def _check_audits(result: Verification, lineage: Lineage, found: FoundCard) -> None:
    """Check that no audit result contradicts the card, and that no announced result is missing from it."""
    ledger, count = lineage.ledger(found.card, found.path), found.card["ledger"]["records"]
    try:
        records = [] if ledger is None else lineage.read(ledger).records[:count]
    except LedgerError:  # the check of the ledger has reported it
        records = []
    problems, results = audit_problems(found.card, records), found.card["empirical"].get("results")
    if problems or results:
        text = f"{len(results or ())} results of attacks, none of which contradicts the claim; {NO_GUARANTEE}"
        result.add(found.name, "audit", problems, text)


def _check_words(result: Verification, found: FoundCard, more: Sequence[str] = ()) -> set[Place]:
    """Check that sentences, and pages next to the card, follow from the facts; return the entries compared."""
    card, name = found.card, found.name
    harmless = card["claim"]["guarantee"] == "dp" and all(a["holds"] is not False for a in card["assumptions"])
    banners, uncovered, _ = (card[each] for each in ("banners", "not_covered", "cautions"))  # in cards of every version
    if not uncovered or not (harmless or banners):
        result.pass_over(name, "words", "a warning that every such card carries is missing.", failed=True)
        return set()
    ours = _made_by_this_program(card)
    wrong = [*_wrong_words(found), *more]
    if wrong and not ours:
        result.pass_over(name, "words", "they differ from those of this version of lit-dpret; read the JSON's numbers.")
        return set()
    result.add(name, "words", wrong, "statement, warnings and pages follow from the facts")
    lists = {
        (key, str(index)) for key, due in _due(card).items() for index, text in enumerate(card[key]) if text in due
    }
    return lists | {("claim", "statement"), ("banners",), ("signoff",)}


def _check_copy(result: Verification, lineage: Lineage, found: FoundCard) -> None:
    """Check the copy of the card in the model folder: it agrees with the card, except for later results."""
    name, folder = found.name, found.path.parent / MODEL_FOLDER
    copy = FoundCard(folder / CARD_NAME, found.card)
    if not any(folder.glob("privacy_card.*")):
        return
    try:
        if copy.path.is_file():
            copy = FoundCard(copy.path, read_card(copy.path))
    except DataError as error:
        result.pass_over(name, "copy", str(error), failed=True)
        return
    first, other = (list(versions(card))[-1] for card in (found.card, copy.card))
    differing = [key for key in {**first, **other} if key not in _OF_THE_PROGRAM and first.get(key) != other.get(key)]
    if differing:
        why = f"{copy.path} has another {', '.join(differing)} than {found.path}: one of them was edited."
        told = any(finding.artefact == name for finding in result.failed)
        result.pass_over(name, "copy", why, failed=not told)  # if the card itself failed, the copy may be the good one
        return
    before = len(result.failed)
    if copy.card["empirical"] != found.card["empirical"]:
        _check_audits(result, lineage, copy)
    wrong = [text for text in _wrong_words(copy) if text not in _wrong_words(found)]
    ours = _made_by_this_program(found.card) or _made_by_this_program(copy.card)
    if wrong and not ours:
        result.pass_over(name, "copy", "words and pages of it differ from those of this version of lit-dpret.")
    elif len(result.failed) == before:
        result.add(name, "copy", wrong, f"{folder.name}/{CARD_NAME} says the same, and its pages are those of it")


def _wrong_words(found: FoundCard) -> list[str]:
    """List the words that differ from those this version would write."""
    card, wrong = found.card, []
    if card["claim"].get("statement") != statement(card):
        wrong.append("The statement does not follow from the card's facts.")
    if card["banners"] != said(card)["banners"]:
        wrong.append("The banners do not follow from the card's facts.")
    if card.get("signoff") != SIGNOFF:
        wrong.append("Its text on signing is not that of every card.")
    if missing := [text for key, due in _due(card).items() for text in due if text not in card[key]]:
        wrong.append(f"{len(missing)} cautions, or gaps of the claim, are missing, the first: {missing[0]}")
    for suffix, write in ((".md", card_markdown), (".html", card_html)):
        page = found.path.with_suffix(suffix)
        if page.is_file() and page.read_text(encoding="utf-8", errors="replace") != write(card):
            wrong.append(f"{page.name} is not the page of this card. Read the JSON.")
    return wrong


def _due(card: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the cautions, and the sentences on what is not covered, that follow from the facts of a card."""
    due = {"cautions": said(card)["cautions"], "not_covered": list[str]()}
    if card["mechanism"].get("kind") != "post_processing":
        groups = (card["accounting"] or {}).get("groups", [])
        due["not_covered"] = uncovered(card["claim"], groups, card["tuning"], card["randomness"])
    return due


def _check_protocols(result: Verification, found: FoundCard, given: Sequence[Mapping[str, str]]) -> None:
    name, registered = found.name, found.card["empirical"].get("pre_registered", [])
    known = {one["sha256"] for one in registered}
    for one in given:
        missing = [] if one["sha256"] in known else [f"{one['name']} was not registered, or not with this content."]
        result.add(name, "protocol", missing, f"{one['name']} was registered before the first release")
    shown = {one["sha256"] for one in given}
    for one in registered:
        if one["sha256"] not in shown:
            why = f"{one['name']} is registered by its hash; give the file in task.protocols=[FILE] to compare it."
            result.pass_over(name, "protocol", why)


def _check_signatures(result: Verification, chain: Sequence[FoundCard], key: str | None) -> None:
    """Check the signatures next to the cards; each covers its card and all that it names by hash, not its children."""
    fitting = []
    for found in chain:
        path = found.path.with_name(SIGNATURE_NAME)
        if not path.is_file():
            continue
        try:
            signed = check_signature(found.card, path)
        except (DataError, ConfigurationError) as error:
            missing_library = isinstance(error, ConfigurationError)
            result.pass_over(found.name, "signature", str(error), failed=not missing_library)
            continue
        if key is not None and signed.key != key:
            why = f"by the key {signed.key[:16]}, which is not that of task.public_key ({key[:16]})."
            result.pass_over(found.name, "signature", why, failed=found is chain[0])
            continue
        fitting.append(found)
        text = f"by the key {signed.key[:16]}, over this card"
        if key is not None:
            result.add(found.name, "signature", [], text)
        else:
            why = f"{text}; whose key it is cannot be checked here. Give task.public_key=FILE, from a source you trust."
            result.pass_over(found.name, "signature", why)
        if signed.later:
            why = f"{signed.later} notes were added to the card after it was signed."
            result.pass_over(found.name, "signature", why)
    if chain[0].path.with_name(SIGNATURE_NAME).is_file():
        return
    if fitting:
        why = f"it is not signed itself; {fitting[0].name} is, and that covers what it was derived from."
    elif key is not None:
        why = "there is none by the key of task.public_key."
    else:
        why = (
            f"there is none ({SIGNATURE_NAME}), so a chain that was completely rewritten (ledger, files and "
            "cards) would pass too. task.sign_with=KEYFILE signs a card."
        )
    result.pass_over(chain[0].name, "signature", why, failed=key is not None and not fitting)


def _made_by_this_program(card: Mapping[str, Any]) -> bool:
    """Return whether this exact version wrote the card; unknown, so False, for a checkout with changes."""
    version, commit = card["package_versions"].get("lit-dpret"), (card.get("environment") or {}).get("code_commit")
    return version == lit_dpret.__version__ and commit == code_commit() and not str(commit).endswith(CHANGED)


def _not_found(parent: Mapping[str, Any], lineage: Lineage) -> str:
    text = (
        f"the card with SHA-256 {str(parent['sha256'])[:12]} was not found, in this or an earlier state. Name the "
        "folder that holds it in task.parents=[DIR], or accept the gap with task.allow_missing_parents=true."
    )
    if lineage.damaged:
        text += f" The search met {len(lineage.damaged)} cards that are damaged or were edited: "
        text += ", ".join(str(path) for path in lineage.damaged[:_SHOWN])
    return text
