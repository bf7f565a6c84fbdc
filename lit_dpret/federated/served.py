"""What a silo has answered: every turn of a run once, so that no server gets more of them than were planned.

Without it a server could ask for rounds 0, 1, 0 with other weights each time, and get an update of the same queries for
each. A turn is written down with the hash of what was asked before anything is computed. Asked the same again, the silo
gives the answer that it gave, or computes it where it was ended before it had one; asked anything else, it refuses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import fingerprint
from lit_dpret.federated.storage import keep_once


class Served:
    """The turns of one silo, in its state folder: a new server, or a new run of Flower's, finds them there.

    Args:
        state: The silo's state folder.
    """

    def __init__(self, state: Path) -> None:
        self._folder = state / "served"

    def round(self, number: int, weights: dict[str, Tensor], answer: Path) -> None:
        """Begin a round of stage 1, or repeat it.

        Args:
            number: Of the round.
            weights: That it begins with.
            answer: Where its answer is kept.

        Raises:
            DataError: It was served with other weights; or a later one was, and the answer to this one is gone.
        """
        self._once(f"round-{number:03}", fingerprint(weights), f"round {number} with other weights")
        later = any(int(path.name.partition("-")[2]) > number for path in self._folder.glob("round-*"))
        if later and not answer.is_file():
            raise _served(f"a later round than {number}")

    def stage2(self, digest: str) -> None:
        """Take the global weights of stage 2: one set of them, for all requests, answers and measures.

        Raises:
            DataError: It has taken others.
        """
        self._once("weights", digest, "stage 2 with other weights")

    def known(self, refresh: int, asked: Sequence[Tensor]) -> list[bool]:
        """Which requests of others are among those that this refresh began with; all of them where this begins it."""
        digests = [hashlib.sha256(rows.float().numpy(force=True).tobytes()).hexdigest() for rows in asked]
        kept = json.loads(keep_once(self._folder / f"asked-{refresh:03}", json.dumps(sorted(set(digests)))))
        return [digest in kept for digest in digests]

    def _once(self, turn: str, digest: str, what: str) -> None:
        if keep_once(self._folder / turn, digest) != digest:
            raise _served(what)


def _served(what: str) -> DataError:
    return DataError(
        f"This silo has served {what} already, and serves each turn of a run once. A run whose server has lost its "
        "folder begins anew with new state folders (state), and with what is left of the budget.",
        kind="served already",
    )
