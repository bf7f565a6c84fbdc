"""The scores of a run's canaries before and after training: a file beside the run that stays where the run is.

The scores of a model before it was trained tell nothing. Those after it, with the coins beside them, are what an
audit rests on; they are kept so that the bound can be computed anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dpret.errors import ResumeError, schema_problem
from lit_dpret.files import write_whole

AUDIT_SCORES = "audit_scores.json"
SCHEMA = "lit-dpret/audit-scores/1"


@dataclass(frozen=True, kw_only=True)
class AuditScores:
    """What the model made of each canary, in the order of their file.

    Args:
        sha256: Of the set of canaries.
        before: Scores under the model that training began with.
        after: Under the trained one; None until it is.
        twins_before: Of the canaries' twins, where a twin takes the place of a canary; else empty.
        twins_after: The same after training.
    """

    sha256: str
    before: tuple[float, ...]
    after: tuple[float, ...] | None = None
    twins_before: tuple[float, ...] = ()
    twins_after: tuple[float, ...] = ()

    def learned(self) -> NDArray[np.float64]:
        """How much more the model knows of each canary than its first score lets expect.

        Training on other rows moves all scores, those of easy texts otherwise than those of hard ones. A line through
        (before, after) takes out what the first score explains; where twins stand in for canaries, it is laid through
        the differences. No coin has a say in it.

        Raises:
            ResumeError: There are no scores after training.
        """
        if self.after is None:
            raise ResumeError(f"{AUDIT_SCORES} holds no scores after training: the run has not ended.")
        before, after = np.array(self.before), np.array(self.after)
        if self.twins_before:
            before, after = before - np.array(self.twins_before), after - np.array(self.twins_after)
        away = before - before.mean()
        spread = float(away @ away)
        slope = float(away @ after) / spread if spread > 0 else 0.0
        rest: NDArray[np.float64] = after - after.mean() - slope * away
        return rest


def write_scores(scores: AuditScores, folder: Path) -> Path:
    """Write the file whole or not at all, readable by its owner alone.

    Raises:
        StorageError: It cannot be written.
    """
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "note": "Internal. With the coins in the file of canaries this shows how the audit was decided.",
        **{name: list(value) if isinstance(value, tuple) else value for name, value in vars(scores).items()},
    }
    return write_whole(folder / AUDIT_SCORES, json.dumps(facts) + "\n", owner_only=True)


def read_scores(folder: Path, *, sha256: str) -> AuditScores:
    """What `write_scores` wrote for this set of canaries.

    Raises:
        ResumeError: It is missing, malformed, of a newer version, or about other canaries.
    """
    path = folder / AUDIT_SCORES
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        problem = schema_problem(facts.get("schema"), SCHEMA)
        if problem is None:
            found = AuditScores(
                sha256=str(facts["sha256"]),
                before=_numbers(facts["before"]),
                after=None if facts["after"] is None else _numbers(facts["after"]),
                twins_before=_numbers(facts["twins_before"]),
                twins_after=_numbers(facts["twins_after"]),
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResumeError(
            f"{path} cannot be read, and without the scores before training there is nothing to audit. Restore the "
            "file, or start a new run in another hydra.run.dir."
        ) from error
    if problem is not None:
        raise ResumeError(f"{path} cannot be read: {problem}")
    if found.sha256 != sha256:
        raise ResumeError(f"{path} is about other canaries than those of this run: restore the file.")
    return found


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
