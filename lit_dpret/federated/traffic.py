"""What travels, in bytes of tensors without envelopes: by phase and silo, remembered over interruptions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from lit_dpret.federated.storage import save_json


class Traffic:
    """Bytes of one run, kept beside the server's state.

    Guarantees:
        - What is made again after an interruption is counted once, and what is not made again stays counted.

    Args:
        path: A JSON file; null keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        known = path is not None and path.is_file()
        self._events: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8")) if known and path else {}

    def note(self, phase: str, event: str, sent: dict[str, int]) -> None:
        """Remember what each silo sent, or received of the server, in one event of a phase.

        Args:
            phase: As ``stage 1``, ``requests`` or ``responses``.
            event: Which one of its kind; the same event once more takes the place of the first.
            sent: Bytes by silo.
        """
        self._events[f"{phase}/{event}"] = dict(sent)
        if self._path is not None:
            save_json(self._path, self._events)

    def by_silo(self) -> dict[str, Counter[str]]:
        """For each silo the bytes of each phase."""
        found: dict[str, Counter[str]] = {}
        for event, sent in self._events.items():
            for silo, count in sent.items():
                found.setdefault(silo, Counter())[event.split("/")[0]] += count
        return found

    def by_phase(self) -> Counter[str]:
        """The bytes of each phase, of all silos together."""
        return sum(self.by_silo().values(), Counter())
