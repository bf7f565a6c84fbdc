"""`task=verify`: verify a privacy card, from its files to the ledger of the private run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_dpret.cards.file import read_card
from lit_dpret.cards.signature import check_signature, sign_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, VerificationError
from lit_dpret.files import OutputFile, write_whole
from lit_dpret.settings import Settings, picked
from lit_dpret.tasks.parts import Parts, say


@dataclass(kw_only=True)
class Verify(Settings):
    """Check a card against its files, its ledger and its parents; write the findings to ``report``, if set."""

    card: Path
    parents: Sequence[Path] = ()
    allow_missing_parents: bool = False
    allow_missing_ledger: bool = False
    protocols: Sequence[str | Path] = ()
    public_key: str | Path | None = None
    sign_with: str | Path | None = None
    self_contained: bool = False
    report: OutputFile | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parents = [Path(parent) for parent in self.parents]

    def run(self, parts: Parts) -> dict[str, float]:
        """Print a line for each check; return the number of checks by result."""
        if not self.card.exists():
            raise ConfigurationError(
                f"task.card={self.card} does not exist: name a folder that holds a card, or its file."
            )
        if _is_dataset_ledger(self.card):
            raise ConfigurationError(
                f"task.card={self.card} is the ledger of a data set, not a card. The card of a run that names it "
                "states what all runs cost together ('all runs on this data set')."
            )
        asked = (
            "parents", "allow_missing_parents", "allow_missing_ledger", "public_key", "protocols", "self_contained"
        )  # fmt: skip
        found = verify_chain(self.card, **picked(self, *asked))
        signed = [] if found.failed or self.sign_with is None else sign_card(self.card, self.sign_with)
        if signed:
            found.signed_by(check_signature(read_card(self.card), signed[0]).key)
        say(f"{found.format()}")
        if self.report is not None:
            report = write_whole(Path(self.report), json.dumps(found.to_dict(), indent=2) + "\n")
            say(f"written: {report}")
        if found.elsewhere:
            say(
                f"found outside {found.path.parent}, so a recipient of that folder alone lacks them "
                f"(task.self_contained=true checks what they can): {', '.join(map(str, found.elsewhere))}"
            )
        if found.failed:
            raise VerificationError(
                f"{len(found.failed)} of {len(found.findings)} checks failed, the first: {found.failed[0].artefact}, "
                f"{found.failed[0].check}."
            )
        for path in signed:
            say(f"signed: {path}")
        return {name: float(count) for name, count in found.to_dict()["counts"].items()}


def _is_dataset_ledger(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return path.is_file() and json.loads(file.readline()).get("kind") == "dataset"
    except (OSError, ValueError, AttributeError):
        return False
