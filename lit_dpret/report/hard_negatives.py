"""Questions with their answer and the nearest sentences that are none: JSON for programs, Markdown for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.page import Grid
from lit_dpret.report.page import Written, write_short

INTERNAL = "Internal: private questions, word for word. Keep it where they are kept."


@dataclass(frozen=True, kw_only=True)
class Case:
    """A question.

    Attributes:
        question: Its text.
        answer: Of its labelled answers the one that scores highest.
        answer_score: That score, the dot product.
        negatives: The best sentences of the collection that are no answers, best first.
        scores: Theirs.
    """

    question: str
    answer: str
    answer_score: float
    negatives: tuple[str, ...]
    scores: tuple[float, ...]


def write_cases(facts: Mapping[str, Any], folder: Path) -> Written:
    """Write ``hard_negatives``; about private questions ``internal_hard_negatives``, for its owner alone."""
    return write_short(
        folder, "hard_negatives", f"Nearest sentences that are no labelled answers, in {facts['silo']}", facts,
        [f"By {facts['encoder']}, among {facts['sentences']:,} sentences.", "", case_grid(facts["cases"]).markdown()],
        internal=INTERNAL if facts["internal"] else "",
    )  # fmt: skip


def case_grid(cases: Sequence[Mapping[str, Any]]) -> Grid:
    """The cases as the paper's Table 5 has them: one a column, scores beside the sentences."""
    depth = max(len(case["negatives"]) for case in cases)
    rows: list[list[str]] = [
        ["Question", *(case["question"] for case in cases)],
        ["Labelled answer", *(f"{case['answer']} ({case['answer_score']:.3f})" for case in cases)],
    ]
    for place in range(depth):
        cells = [
            f"{case['negatives'][place]} ({case['scores'][place]:.3f})" if place < len(case["negatives"]) else "–"
            for case in cases
        ]
        rows.append([f"Hard negative {place + 1}", *cells])
    return Grid(("", *(f"Case {number}" for number in range(1, len(cases) + 1))), rows)
