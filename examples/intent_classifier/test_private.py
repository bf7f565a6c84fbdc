"""`assert_private` is a pytest fixture wherever lit-dpret is installed."""

from __future__ import annotations

from typing import Any

from train import INTENTS, IntentClassifier

from lit_dpret.privacy.modes import DPSGD


class Row:
    def __init__(self, query: str, passage: str) -> None:
        self.query, self.passage = query, passage


def test_the_classifier_trains_privately(assert_private: Any) -> None:
    rows = [Row(f"words {i} of {i * 7}", INTENTS[i % 4]) for i in range(6)]
    assert_private(IntentClassifier(privacy=DPSGD(eps=3)), rows, eps=1.0, delta=1e-5)
