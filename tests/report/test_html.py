from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.cards.card import build_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.errors import StorageError
from lit_dpret.privacy.accounting.releases import NonPrivateRelease, Poisson
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.report.html import MAX_PASSAGE, RunReport
from lit_dpret.report.page import write_short
from lit_dpret.report.table import RowResult
from lit_dpret.retrieval.statistics import Interval

NASTY = '"><script>alert(1)</script><img src=x onerror=y>\x00\ud800\u202e'


def make_card(folder: Path, *, private: bool) -> dict[str, Any]:
    plan = PrivacyPlan(
        budget=PrivacyBudget(eps=3.0, delta=1e-4),
        law=Poisson(sample_rate=0.05),
        steps=2,
        noise_multiplier=4.0,
        max_grad_norm=1.0,
        sensitivity=1.0,
        denominator=50.0,
        physical_batch_size=8,
        n_public=1000,
    )
    release = plan.release() if private else NonPrivateRelease(label="train")
    with PrivacyLedger.open(folder / "privacy_ledger.jsonl") as ledger:
        ledger.append("plan", mode="dp_sgd" if private else "none", plan=plan.to_dict() if private else None)
        ledger.append("intent", attempt=0, step=0, release=release.to_dict())
        subject = {"artifact_type": "dataset", "name": "synthetic queries", "sha256": {}}
        return build_card(ledger_records=ledger.records, subject=subject)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_card(tmp_path_factory.mktemp("dp"), private=True)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_card(tmp_path_factory.mktemp("none"), private=False)


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
    path = RunReport(
        title=f"Report {text}",
        table=[
            RowResult(f"ours {text}", {"nDCG@10": Interval(0.4, 0.39, 0.41)}, f"epsilon {text}", f"note {text}"),
            RowResult("BM25", {"nDCG@10": Interval(0.3, 0.28, 0.32)}),
        ],
        card=card,
        samples=[(f"id {text}", passage or f"passage {text}", f"query {text}")],
        round_trip={"recall": [0.6, 0.5, 0.7], "control": [0.01, 0.0, 0.02], "k": 10, "queries": 500},
        files={f"what {text}": Path(f"where/{text}")},
        command=f"lit-dpret {text}",
        evaluated_on=f"test questions {text}",
        notes=[f"remark {text}"],
    ).write(folder)
    return Page(path)


def test_the_report_holds_results_samples_round_trip_and_the_way_to_repeat_it(tmp_path: Path, card: Any) -> None:
    page = full_report(tmp_path / "new" / "run", card)
    for piece in (
        "0.400 [0.390, 0.410]",
        "0.600 [0.500, 0.700]",
        "0.010 [0.000, 0.020]",
        "passage plain",
        "query plain",
        "where/plain",
        "lit-dpret plain",
        "test questions plain",
        "remark plain",
        "not stated",
    ):
        assert piece in page.text, piece
    assert page.tags.count("svg") == 1


def test_the_privacy_statement_and_the_gaps_are_the_cards_own_words(tmp_path: Path, card: Any, bare: Any) -> None:
    for one in (card, bare):
        page = full_report(tmp_path, one)
        for words in (one["claim"]["statement"], privacy_line(one), *one["not_covered"]):
            assert words in page.text


def test_no_text_becomes_markup_and_nothing_is_loaded_from_elsewhere(tmp_path: Path, card: Any) -> None:
    page = full_report(tmp_path, card, NASTY)
    assert page.addresses == []
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert "default-src 'none'" in page.source
    assert "url(" not in page.source and "@import" not in page.source
    assert "alert(1)" in page.text and "\x00" not in page.source


def test_a_long_passage_is_cut_and_a_folder_that_cannot_be_written_is_named(tmp_path: Path, card: Any) -> None:
    assert "word …" in full_report(tmp_path, card, passage="word " * MAX_PASSAGE).text
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        full_report(tmp_path / "file", card)


def test_a_report_on_private_data_replaces_the_one_that_took_them_for_public(tmp_path: Path) -> None:
    write_short(tmp_path, "membership", "Membership", {"n": 1}, ["public"], internal="")
    written = write_short(tmp_path, "membership", "Membership", {"n": 1}, ["private"], internal="Internal.")
    assert sorted(tmp_path.iterdir()) == sorted(written.files)
