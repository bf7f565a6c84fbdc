"""Audit protocols that are fixed before there is anything to audit.

An attack that is chosen after its results are known shows what one wants it to show. A protocol whose hash
stands in the ledger before the first release can be compared with what was done later, and nobody can add one
afterwards: the records of the releases follow it in the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import file_sha256
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger

PROTOCOL_EVENT = "audit_protocols"
"""The event that registers protocols; it counts before the first announced step only."""

_KNOB = "callbacks.card.audit_protocols"


def protocol_facts(files: Iterable[str | Path], *, knob: str = _KNOB) -> list[dict[str, str]]:
    """Name and SHA-256 of each protocol; ``knob`` is the setting that a refusal names.

    Raises:
        ConfigurationError: A file cannot be read, or is empty.
    """
    facts = []
    for file in map(Path, files):
        try:
            if not file.expanduser().stat().st_size:
                raise ConfigurationError(f"{knob}: {file} is empty, and registers nothing.")
            facts.append({"name": file.name, "sha256": file_sha256(file.expanduser())})
        except (OSError, DataError) as error:
            raise ConfigurationError(f"{knob}: {file} cannot be read. Name the file of a protocol.") from error
    return facts


def note_protocols(ledger: PrivacyLedger, files: Sequence[str | Path]) -> None:
    """Write the hashes of protocols into a ledger, before its first release.

    Guarantees:
        - When it returns, each file is registered in a record before that of the first announced step.

    Args:
        ledger: Open for writing.
        files: The protocols; those that are registered already are not written again.

    Raises:
        ConfigurationError: A file cannot be read, or is empty.
        ResumeError: A step was announced already, and a file was not registered before it.
    """
    known = {one["sha256"] for one in registered(ledger.records)}
    new = [one for one in protocol_facts(files) if one["sha256"] not in known]
    if not new:
        return
    if any(record["kind"] == "intent" for record in ledger.records):
        names = ", ".join(one["name"] for one in new)
        raise ResumeError(
            f"{_KNOB}: {names} was not registered when this run began, or was changed since. A protocol that comes "
            "after the first release is not pre-registered: restore the file, leave it out, or start a new run."
        )
    ledger.append("event", name=PROTOCOL_EVENT, protocols=new)


def registered(records: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """``name``, ``sha256`` and ``registered`` (the day) of the protocols before the first announced step."""
    found: list[dict[str, str]] = []
    for record in records:
        if record.get("kind") == "intent":
            break
        if record.get("kind") == "event" and record.get("name") == PROTOCOL_EVENT:
            found += [{**one, "registered": str(record["day"])} for one in record["protocols"]]
    return found
