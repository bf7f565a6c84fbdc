"""What becomes of a problem found in data: training refuses the first, a check collects them all.

Readers hand every problem to a `Complain`. `refuse` raises it, which is what training wants. `Problems`
counts it and keeps a few examples, after which the reader leaves the record out and goes on: that is how
``task=check_data`` tells everything in one go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lit_dpret.errors import DataError

Complain = Callable[[DataError], None]


def refuse(problem: DataError) -> None:
    """Raise the problem: a reader that complains to this stops at the first.

    Raises:
        DataError: Always.
    """
    raise problem


@dataclass(kw_only=True)
class Problems:
    """Problems by kind: how many of each, and the messages of the first few.

    Example:
        >>> problems = Problems(examples=1)
        >>> for line in (3, 8):
        ...     problems(DataError(f"corpus.jsonl line {line}: malformed JSON.", kind="malformed JSON"))
        >>> problems.counts, problems.shown
        ({'malformed JSON': 2}, {'malformed JSON': ['corpus.jsonl line 3: malformed JSON.']})

    Args:
        examples: How many messages to keep of each kind.
    """

    examples: int = 5
    counts: dict[str, int] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, problem: DataError) -> None:
        self.counts[problem.kind] = self.counts.get(problem.kind, 0) + 1
        shown = self.shown.setdefault(problem.kind, [])
        if len(shown) < self.examples:
            shown.append(str(problem))

    @property
    def total(self) -> int:
        """How many problems there are of all kinds."""
        return sum(self.counts.values())
