"""Is a privacy card what it says? Checked by whoever holds the files, without the private data.

From the card of an artefact to the run on private data at the other end: every card on the way is the one
that the next names by SHA-256, says no more than the one before it, and lies beside the files that it
describes; and the epsilon of the first follows from its ledger. Each check ends as ``ok``, ``failed`` or
``not_checked``; the last is never counted as the first.

What hashes cannot show is a chain that was rewritten from one end to the other. A signature over the last
card can: it names all others by hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_dpret.errors import DataError, LitDpretError
from lit_dpret.privacy.card import gaps, said
from lit_dpret.privacy.card_check import changed_files, verify_card
from lit_dpret.privacy.card_facts import version_of
from lit_dpret.privacy.card_file import CARD_NAME, card_path, card_sha256, read_card
from lit_dpret.privacy.card_recheck import recheck_numbers
from lit_dpret.privacy.card_text import card_html, card_markdown, privacy_line, statement
from lit_dpret.privacy.ledger import PrivacyLedger
from lit_dpret.privacy.lineage import FoundCard, Lineage
from lit_dpret.privacy.lineage_links import link_problems
from lit_dpret.privacy.start import MODEL_FOLDER

SCHEMA = "lit-dpret/verification/1"

Outcome = Literal["ok", "failed", "not_checked"]
_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        artefact: The name of the card's subject.
        check: What was looked at, in a word or two.
        outcome: ``ok``, ``failed``, or ``not_checked`` where it could not be.
        text: What was found, or why it was not checked.
    """

    artefact: str
    check: str
    outcome: Outcome
    text: str


@dataclass
class Verification:
    """What was found on the way from a card to the private data.

    Attributes:
        path: The card's file.
        sha256: Of that file; empty where it cannot be read.
        claim: Its claim in a line.
        findings: In the order of the chain, the subject first.
    """

    path: Path
    sha256: str = ""
    claim: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> list[Finding]:
        """The checks that failed."""
        return [finding for finding in self.findings if finding.outcome == "failed"]

    @property
    def not_checked(self) -> list[Finding]:
        """What was not checked."""
        return [finding for finding in self.findings if finding.outcome == "not_checked"]

    def add(self, artefact: str, check: str, problems: Sequence[str], text: str) -> None:
        """Record a check: its problems, or where it has none what it confirmed."""
        self.findings += [Finding(artefact, check, "failed", problem) for problem in problems] or [
            Finding(artefact, check, "ok", text)
        ]

    def pass_over(self, artefact: str, check: str, why: str, *, failed: bool = False) -> None:
        """Record a check that could not be made; ``failed`` where it had to be."""
        self.findings.append(Finding(artefact, check, "failed" if failed else "not_checked", why))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        counts = {name: sum(f.outcome == name for f in self.findings) for name in ("ok", "failed", "not_checked")}
        return {
            "schema": SCHEMA, "card": self.path.name, "sha256": self.sha256, "claim": self.claim, "counts": counts,
            "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip

    def format(self) -> str:
        """One line for each finding."""
        words = {"ok": "ok", "failed": "FAILED", "not_checked": "not checked"}
        lines = [f"{words[f.outcome]:<12} {f.artefact}, {f.check}: {f.text}" for f in self.findings]
        return "\n".join([*([self.claim] if self.claim else []), *lines])


def verify_chain(
    path: str | Path,
    *,
    parents: Iterable[str | Path] = (),
    allow_missing_parents: bool = False,
    allow_missing_ledger: bool = False,
) -> Verification:
    """Check a card, its files, its ledger, and every card that it was derived from.

    Guarantees:
        - Nothing failed only if: each card found is the one that its child names, and unedited; each child claims no
          more than its parent; each file that a card lists and that must be there has its SHA-256; and each
          ledger that was found gives the numbers of its card.
        - A parent or a ledger that is not found is a failure, unless it was allowed to be missing; then it
          is among what was not checked.
        - Nothing is written.

    Args:
        path: A card, or the folder that holds it.
        parents: Folders or files to look for cards and ledgers in, before those around the card.
        allow_missing_parents: Accept that parents are not there.
        allow_missing_ledger: Accept that the ledger behind the claim is not there.

    Raises:
        DataError: One of ``parents`` does not exist.
    """
    lineage = Lineage(parents)
    result = Verification(card_path(path))
    try:
        found = FoundCard(result.path, read_card(path))
    except DataError as error:
        result.pass_over(result.path.name, "card", str(error), failed=True)
        return result
    result.sha256, result.claim = card_sha256(result.path), privacy_line(found.card)
    result.add(_name(found), "card", [], "unedited, by its checksum")
    try:
        _follow(result, lineage, found, allow_missing_parents, allow_missing_ledger)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        problem = f"a field is missing or malformed ({type(error).__name__}: {error})."
        result.pass_over(
            _name(found), "card", f"it, or one that it was derived from, cannot be read: {problem}", failed=True
        )
    return result


def _follow(
    result: Verification, lineage: Lineage, found: FoundCard, allow_missing_parents: bool, allow_missing_ledger: bool
) -> None:
    """From a card that can be read to the run at the other end."""
    named = list(found.card["parents"])
    if found.card["mechanism"].get("kind") == "post_processing" and not named:
        result.pass_over(_name(found), "parents", "it is derived from something, and names no parent.", failed=True)
        return
    _examine(result, lineage, found, must_have_files=True, allow_missing_ledger=allow_missing_ledger)
    child: FoundCard | None = found
    for place, parent in enumerate(named):
        met = lineage.card(str(parent["sha256"]))
        if met is None:
            result.pass_over(str(parent["name"]), "card", _not_found(parent, lineage), failed=not allow_missing_parents)
            child = None
            continue
        later = ", and was amended since" if met.amended else ""
        result.add(_name(met), "card", [], f"the one that was named, by its SHA-256{later}")
        if child is not None:
            ledger = lineage.ledger(met.card, met.path)
            problems = link_problems(child.card, met.card, named[place + 1 :], ledger)
            result.add(_name(child), "parent", problems, f"claims no more than {_name(met)}")
        _examine(result, lineage, met, must_have_files=False, allow_missing_ledger=allow_missing_ledger)
        child = met


def _examine(
    result: Verification,
    lineage: Lineage,
    found: FoundCard,
    *,
    must_have_files: bool,
    allow_missing_ledger: bool,
) -> None:
    """What can be said of one card: its files, its ledger, its words."""
    lineage.look_near(found.path)
    _check_files(result, found, required=must_have_files)
    derived = found.card["mechanism"].get("kind") == "post_processing"
    if not (derived and any(lineage.card(str(parent["sha256"])) for parent in found.card["parents"][:1])):
        _check_ledger(result, lineage, found, allow_missing=allow_missing_ledger)
    _check_words(result, found)


def _check_files(result: Verification, found: FoundCard, *, required: bool) -> None:
    digests, name = found.card["subject"]["sha256"], _name(found)
    if not digests:
        result.pass_over(name, "files", "the card lists none, as that of an unfinished run does.")
        return
    folders = [found.path.parent, found.path.parent / MODEL_FOLDER]
    folder = max(folders, key=lambda place: sum((place / file).is_file() for file in digests))
    if not required and not any((folder / file).is_file() for file in digests):
        result.pass_over(name, "files", "none of them lies beside the card; the artefact that was made from them does.")
        return
    result.add(name, "files", changed_files(digests, folder), f"{len(digests)} with the SHA-256 on the card")
    own = (CARD_NAME, "privacy_card.md", "privacy_card.html", "privacy_card.sig")
    others = [
        file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in own and file.relative_to(folder).as_posix() not in digests
    ]
    if others:
        shown = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
        result.pass_over(name, "other files", f"not on the card, so nothing is known of them: {shown}")


def _check_ledger(result: Verification, lineage: Lineage, found: FoundCard, *, allow_missing: bool) -> None:
    name, stored = _name(found), found.card["ledger"]
    ledger = lineage.ledger(found.card, found.path)
    if ledger is None:
        why = (
            f"{stored['name']} with the head {str(stored['head'])[:12]} was not found, so epsilon was not recomputed. "
            "Name its folder in task.parents=[DIR], or accept that with task.allow_missing_ledger=true."
        )
        result.pass_over(name, "ledger", why, failed=not allow_missing)
        return
    problems = verify_card(found.card, ledger)
    result.add(name, "ledger", problems, f"{stored['records']} records, whole; they give {privacy_line(found.card)}")
    if problems or found.card["mechanism"].get("kind") == "post_processing":
        return
    try:
        count, wrong = recheck_numbers(found.card, PrivacyLedger.read(ledger).records[: stored["records"]])
    except LitDpretError as error:
        count, wrong = 0, [str(error)]
    result.add(name, "numbers", wrong, f"{count} on the card, ceilings and mechanism included, follow from the ledger")


def _check_words(result: Verification, found: FoundCard) -> None:
    """The sentences, and the pages beside the card, say what the facts say."""
    card, name = found.card, _name(found)
    wrong = []
    fresh = said(card)
    if card["claim"].get("statement") != statement(card):
        wrong.append("The statement does not follow from the card's facts.")
    if card["banners"] != fresh["banners"]:
        wrong.append("The banners do not follow from the card's facts.")
    missing = [text for text in fresh["cautions"] if text not in card["cautions"]]
    if card["mechanism"].get("kind") != "post_processing":
        groups = (card["accounting"] or {}).get("groups", [])
        due = gaps(card["claim"], groups, card["tuning"], secure=bool(card["randomness"].get("secure")))
        missing += [text for text in due if text not in card["not_covered"]]
    if missing:
        wrong.append(f"{len(missing)} sentences on what is not covered are missing, the first: {missing[0]}")
    for suffix, write in ((".md", card_markdown), (".html", card_html)):
        page = found.path.with_suffix(suffix)
        if page.is_file() and page.read_text(encoding="utf-8", errors="replace") != write(card):
            wrong.append(f"{page.name} is not the page of this card. Read the JSON.")
    if wrong and card["package_versions"].get("lit-dpret") != version_of("lit-dpret"):
        result.pass_over(name, "words", "they differ from those of this version of lit-dpret; read the JSON's numbers.")
        return
    result.add(name, "words", wrong, "statement, warnings and pages follow from the facts")


def _name(found: FoundCard) -> str:
    return str(found.card["subject"]["name"])


def _not_found(parent: Mapping[str, Any], lineage: Lineage) -> str:
    text = (
        f"the card with SHA-256 {str(parent['sha256'])[:12]} was not found, in this or an earlier state. Name the "
        "folder that holds it in task.parents=[DIR], or accept the gap with task.allow_missing_parents=true."
    )
    if lineage.damaged:
        text += f" On the way, {len(lineage.damaged)} cards were met that are damaged or were edited: "
        text += ", ".join(str(path) for path in lineage.damaged[:_SHOWN])
    return text
