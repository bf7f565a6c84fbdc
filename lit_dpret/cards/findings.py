"""What a verification found: each thing that was looked at, and how that ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA = "lit-dpret/verification/1"

Outcome = Literal["ok", "failed", "not_checked"]


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
