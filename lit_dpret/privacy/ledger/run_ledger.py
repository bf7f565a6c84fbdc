"""What a run let out, written down before it was let out.

A checkpoint says where a run stood; it cannot say what the run had already released when it was
killed. The ledger can. Before noise is drawn for a step, an *intent* is on the disk; after it, a
*release* states what was really added. Epsilon is computed from these records and from nothing
else, so that a crash, a resume or a wrong setting costs epsilon on paper as it does in fact.

Each line of ``privacy_ledger.jsonl`` is one record of a `ChainedFile`. What a chain cannot see is
that whole records were cut off its end: for that the privacy card stores the head hash and the number
of records, and ``lit_dpret.cards.card.verify_card`` compares them.

Nothing private enters: no norm, no realised batch size, no secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lit_dpret.privacy.ledger.chain import Book, ChainedFile
from lit_dpret.privacy.ledger.charges import SCHEMA, KeyBook

LEDGER_NAME = "privacy_ledger.jsonl"
KINDS = ("plan", "intent", "release", "replay", "event", "end", "repair")


class PrivacyLedger(ChainedFile):
    """An append-only, hash-chained file of everything that a run released.

    Guarantees, besides those of a `ChainedFile`:
        - A second writer is refused at once while the first is open.
        - A noise key (attempt, step) enters as an intent once. A release or a replay without an
          earlier intent is refused, and so is a replay whose hashes contradict the intent.

    Nothing was released under a record whose ``append`` had not returned, so that cutting a torn last
    line loses no charge; one that lacks nothing but its line end is charged.
    """

    kinds: ClassVar[tuple[str, ...]] = KINDS
    lock_refusal: ClassVar[str] = (
        "is open in another run. Wait for it to end, or choose another hydra.run.dir: "
        "two runs must never share one ledger."
    )

    @classmethod
    def new_book(cls) -> Book:
        return KeyBook()

    def append(self, kind: str, **facts: Any) -> dict[str, Any]:
        return super().append(kind, **({"schema": SCHEMA} if kind == "plan" else {}), **facts)


def ledger_identity(records: Sequence[Mapping[str, Any]]) -> str:
    """What the records of one ledger share with those of no other; empty where it holds no plan."""
    first = next((record for record in records if record["kind"] == "plan"), {})
    return str(first.get("nonce") or first.get("run_id") or "")
