from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cards import CHILD, Run, make_plan

from lit_dpret.cards.text import privacy_line
from lit_dpret.errors import StorageError
from lit_dpret.report.html import MAX_PASSAGE, RunReport
from lit_dpret.report.page import write_short
from lit_dpret.report.table import RowResult
from lit_dpret.retrieval.statistics import Interval

NASTY = '"><script>alert(1)</script><img src=x onerror=y>\x00\ud800\u202e'


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cards of a run under a budget and of one without."""
    private = Run(tmp_path_factory.mktemp("dp"), make_plan()).train(1).card(subject=CHILD)
    return [private, Run(tmp_path_factory.mktemp("none"), None, mode="none").train(1).card(subject=CHILD)]


class Page(HTMLParser):
    """The visible text of a page, its tags, and every address in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["style"]:
            self.text += data + " "


def full_report(folder: Path, card: dict[str, Any], text: str = "plain", passage: str = "") -> Page:
    rows = [
        RowResult(f"ours {text}", {"nDCG@10": Interval(0.4, 0.39, 0.41)}, f"epsilon {text}", f"note {text}"),
        RowResult("BM25", {"nDCG@10": Interval(0.3, 0.28, 0.32)}),
    ]
    report = RunReport(
        title=f"Report {text}", table=rows, card=card, files={f"what {text}": Path(f"where/{text}")},
        samples=[(f"id {text}", passage or f"passage {text}", f"query {text}")],
        round_trip={"recall": [0.6, 0.5, 0.7], "control": [0.01, 0.0, 0.02], "k": 10, "queries": 500},
        command=f"lit-dpret {text}", evaluated_on=f"test questions {text}", notes=[f"remark {text}"],
    )  # fmt: skip
    return Page(report.write(folder))


def test_the_report_holds_results_samples_and_the_way_to_repeat_it_in_the_cards_own_words_on_privacy(
    tmp_path: Path, cards: list[dict[str, Any]]
) -> None:
    for card in cards:
        page = full_report(tmp_path / "new" / "run", card)
        for piece in ("0.400 [0.390, 0.410]", "0.600 [0.500, 0.700]", "0.010 [0.000, 0.020]", "not stated"):
            assert piece in page.text, piece
        for piece in ("passage", "query", "where/", "lit-dpret", "test questions", "remark"):
            assert f"{piece}{'' if piece.endswith('/') else ' '}plain" in page.text, piece
        for words in (card["claim"]["statement"], privacy_line(card), *card["not_covered"]):
            assert words in page.text
        assert page.tags.count("svg") == 1


def test_no_text_becomes_markup_and_nothing_is_loaded_from_elsewhere(
    tmp_path: Path, cards: list[dict[str, Any]]
) -> None:
    page = full_report(tmp_path, cards[0], NASTY)
    assert page.addresses == []
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert "default-src 'none'" in page.source
    assert "url(" not in page.source and "@import" not in page.source
    assert "alert(1)" in page.text and "\x00" not in page.source


def test_a_long_passage_is_cut_and_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, cards: list[dict[str, Any]]
) -> None:
    assert "word …" in full_report(tmp_path, cards[0], passage="word " * MAX_PASSAGE).text
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        full_report(tmp_path / "file", cards[0])


def test_a_report_on_private_data_replaces_the_one_that_took_them_for_public(tmp_path: Path) -> None:
    write_short(tmp_path, "membership", "Membership", {"n": 1}, ["public"], internal="")
    written = write_short(tmp_path, "membership", "Membership", {"n": 1}, ["private"], internal="Internal.")
    assert sorted(tmp_path.iterdir()) == sorted(written.files)
