"""No text that is published with a run, on its card, in a checkpoint or by a logger, holds one of its queries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from stand_ins import Numbers, Regression, dp, fit

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.modes import NoPrivacy

QUERY = "Does Medicare pay for my new teeth?"


class Log(Numbers):
    """Numbers beside the queries of a log."""

    def __init__(self, query: str = QUERY) -> None:
        super().__init__()
        self.collection = SimpleNamespace(queries={"q1": "flood insurance", "q2": query}, qrels={})


class Spoken(Regression):
    def __init__(self, kept: dict[str, Any], told: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.told = told
        self.save_hyperparameters({"about": kept})

    def assumptions(self) -> list[str]:
        return [self.told] if self.told else []


def noted(folder: Path, text: str, data: Any) -> None:
    run(folder, data, extra=[PrivacyCard(tuning_note=text)])


def in_folder(folder: Path, text: str, data: Any) -> None:
    run(folder.parent / text.replace(" ", "-"), data)


def logged(folder: Path, text: str, data: Any) -> None:
    run(folder, data, logger=[CSVLogger(folder, name=text.replace(" ", "_"))])


def kept(folder: Path, text: str, data: Any) -> None:
    run(folder, data, module=Spoken({"example": [text]}, privacy=dp(folder.parent)))


def assumed(folder: Path, text: str, data: Any) -> None:
    run(folder, data, module=Spoken({}, text, privacy=dp(folder.parent)))


def run(folder: Path, data: Any, *, module: Any = None, extra: Any = (), **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fit(folder, module or Regression(privacy=dp(folder.parent)), data, steps=1, extra=[*extra], **settings)


WAYS: dict[str, tuple[Callable[[Path, str, Any], None], str]] = {
    "tuning_note": (noted, "tuning_note"),
    "folder": (in_folder, "folder"),
    "logger": (logged, "logger"),
    "hyper-parameter": (kept, "about"),
    "assumption": (assumed, "assumptions"),
}


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("tuning_note", "does medicare pay for my new teeth"),
        *((way, "chosen on Does Medicare pay, for my new TEETH") for way in WAYS),
    ],
)
def test_a_query_of_the_run_in_a_published_text_is_refused_before_the_run(way: str, words: str, tmp_path: Path) -> None:
    act, knob = WAYS[way]
    with pytest.raises(ConfigurationError, match=knob) as refused:
        act(tmp_path / "here", words, Log())
    assert refused.value.trap == "T25"
    assert not list(tmp_path.rglob("privacy_ledger.jsonl")) and QUERY not in str(refused.value)


@pytest.mark.parametrize("way", WAYS)
def test_other_texts_and_words_that_a_short_query_shares_with_a_name_are_published(way: str, tmp_path: Path) -> None:
    WAYS[way][0](tmp_path / "here", "a study of flood insurance", Log())
    assert list(tmp_path.rglob("privacy_ledger.jsonl"))


def test_a_note_is_no_short_query_either(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tuning_note"):
        noted(tmp_path / "here", "Flood insurance!", Log())
    in_folder(tmp_path / "there", "flood insurance", Log())


def test_without_a_guarantee_nothing_is_looked_for(tmp_path: Path) -> None:
    run(tmp_path / "here", Log(), module=Regression(privacy=NoPrivacy()), extra=[PrivacyCard(tuning_note=QUERY)])
