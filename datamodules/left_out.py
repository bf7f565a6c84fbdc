"""Count and list problems outside the evaluated split, which do not change its numbers.

Collections that others made have queries that nobody judged, judgements of texts that are not there, and splits that
overlap. For training these are refused. For a measurement of one split only that split has to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.readers import Complain, Problems
from lit_dpret.datamodules.rows import SPLITS
from lit_dpret.errors import DataError

#: Of judgements of the measured split: no system can find the passage, and none is asked to.
HARMLESS = "unknown passage of grade 0"
_ELSEWHERE = ("query without passage", "query in two splits")
_NAMED = 5


class LeftOut:
    """Collect what reading a collection for one split leaves out."""

    def __init__(self, split: str) -> None:
        self.split = split
        self.problems = {name: Problems(examples=_NAMED) for name in SPLITS}
        self._lines: list[str] = []

    def complain_of(self, split: str) -> Complain:
        """Return the receiver of problems in one split's judgements."""
        noted = self.problems[split]

        def complain(problem: DataError) -> None:
            if split == self.split and problem.kind != HARMLESS:
                raise problem
            noted(problem)

        return complain

    def checked(self, collection: Collection, *, allow_empty_passages: bool) -> Collection:
        """Return the collection without unjudged queries."""
        judged = {query for qrels in collection.qrels.values() for query, found in qrels.items() if found}
        unjudged = [query for query in collection.queries if query not in judged]
        asked = {query: text for query, text in collection.queries.items() if query in judged}
        if unjudged:
            self._lines.append(f"queries that no split judges: {len(unjudged)} ({named(unjudged)})")
        if not allow_empty_passages:
            empty = [passage for passage, text in collection.passages.items() if not text.strip()]
            if empty:
                self._lines.append(f"passages without any text, ranked as they are: {len(empty)} ({named(empty)})")
        elsewhere = self.problems["train"]
        kept = replace(collection, queries=asked)
        for contradiction in kept.contradictions(allow_empty_passages=True):
            if contradiction.kind not in _ELSEWHERE:
                raise contradiction
            elsewhere(contradiction)
        return kept

    def lines(self) -> list[str]:
        """Return what was left out or skipped, one line each."""
        found = list(self._lines)
        for split, problems in self.problems.items():
            for kind, count in problems.counts.items():
                found.append(f"{split}: {kind}, {count} times ({' '.join(problems.shown[kind])})")
        return found


def named(ids: Sequence[str]) -> str:
    """Return the first few ids, and whether there are more."""
    return ", ".join([*ids[:_NAMED], *(["..."] if len(ids) > _NAMED else [])])
