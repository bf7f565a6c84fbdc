"""Which passages a source names for a row: never an answer, and by nothing but the row, public texts and coins."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from negative_cases import JUDGED, PASSAGES, QUERIES, WordTowers, lines, texts

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.negatives import (
    BM25Negatives,
    GoldNegatives,
    InBatchNegatives,
    MarginFilter,
    NegativeSource,
    PassageSource,
    RandomNegatives,
    RowNegatives,
    StaticNegatives,
    TrainTexts,
)
from lit_dpret.privacy.modes import NoPrivacy


def learned(*sources: NegativeSource, data: TrainTexts | None = None) -> RowNegatives:
    made = RowNegatives(sources, NoPrivacy())
    made.learn(data or texts(), WordTowers())
    return made


def named(sources: RowNegatives, *numbers: int, step: int = 0, epoch: int = 0, rows: Any = None) -> list[list[str]]:
    """The ids of the passages that rows get."""
    assert sources.texts is not None
    keys = sources.keys(rows or lines(*numbers))
    places = sources.places(keys, step=step, epoch=epoch, embed=lambda: pytest.fail("nothing is to be embedded"))
    return [[sources.texts.passage_ids[p] for p in row if p >= 0] for row in places["own_at"].tolist()]


SOURCES: list[PassageSource] = [
    RandomNegatives(per_query=3),
    GoldNegatives(per_query=3),
    BM25Negatives(per_query=3, depth=6),
    StaticNegatives(per_query=3, depth=6),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_a_row_gets_the_same_passages_whatever_else_is_in_the_batch(source: PassageSource) -> None:
    sources = learned(source)
    together = named(sources, *range(8), step=5, epoch=2)
    assert named(sources, *reversed(range(8)), step=5, epoch=2) == together[::-1]
    assert [named(sources, i, step=5, epoch=2)[0] for i in range(8)] == together


@pytest.mark.parametrize("source", [*SOURCES, GoldNegatives(per_query=1)], ids=lambda s: f"{s.name}-{s.per_query}")
def test_judgements_texts_and_the_presence_of_other_queries_change_nothing(source: PassageSource) -> None:
    """Masking by what others were answered by would let their private records into this row.

    Logs without ids number their lines, so that all queries behind the one that is gone get another id.
    """
    for step in range(4):
        before = named(learned(source), *range(1, 8), step=step, epoch=step)
        judged = {f"q{i}": JUDGED["q1"] if i == 1 else {f"p{19 - i}": 1, "p0": 0} for i in range(8)}
        told = {name: text if name == "q1" else "life policy claim" for name, text in QUERIES.items()}
        for data in (texts(judged=judged), texts(queries=told)):
            assert named(learned(source, data=data), 1, step=step, epoch=step) == before[:1]
        queries = {f"q{i - 1}": QUERIES[f"q{i}"] for i in range(1, 8)}
        left = {f"q{i - 1}": JUDGED[f"q{i}"] for i in range(1, 8)}
        renumbered = [replace(line, query_id=f"q{i}") for i, line in enumerate(lines(*range(1, 8)))]
        without = learned(source, data=texts(PASSAGES, queries, left))
        assert named(without, rows=renumbered, step=step, epoch=step) == before


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_no_answer_and_no_copy_of_an_answers_text_is_named(source: PassageSource) -> None:
    copies = PASSAGES | {f"copy of {name}": f"  {text.upper()} " for name, text in PASSAGES.items()}
    sources = learned(source, data=texts(passages=copies))
    for step in range(12):
        for row, names in zip(lines(*range(8)), named(sources, *range(8), step=step, epoch=step), strict=True):
            assert len(set(names)) == 3
            assert not {name.removeprefix("copy of ") for name in names} & row.positives


def test_only_what_the_row_says_of_its_answers_is_left_out() -> None:
    """Under ``unit=pair`` a row knows its own passage alone; the query's other answers are other people's records."""
    (row,) = lines(1)
    alone = type(row)(row.query_id, row.query, row.passage_id, row.passage, frozenset({row.passage_id}))
    sources = learned(StaticNegatives(per_query=1, depth=20))

    def drawn(line: Any) -> set[str]:
        return {named(sources, rows=[line], epoch=epoch)[0][0] for epoch in range(200)}

    assert drawn(row) == set(PASSAGES) - {"p2", "p3"} and drawn(alone) == set(PASSAGES) - {"p2"}


def test_random_passages_are_uniform_and_drawn_anew_in_every_step() -> None:
    sources = learned(RandomNegatives(per_query=2))
    counts = Counter(name for step in range(900) for name in named(sources, 1, step=step)[0])
    allowed = set(PASSAGES) - {"p2", "p3"}
    assert set(counts) == allowed
    assert max(abs(n - 100) for n in counts.values()) < 50, "five standard deviations of a binomial are 48"


def test_mined_passages_are_drawn_uniformly_from_the_best_and_anew_in_every_epoch() -> None:
    sources = learned(BM25Negatives(per_query=1, depth=8))
    best = set(named(learned(BM25Negatives(per_query=6, depth=8)), 1)[0])
    counts = Counter(named(sources, 1, epoch=epoch)[0][0] for epoch in range(600))
    assert set(counts) == best and min(counts.values()) > 600 / len(best) * 0.6
    assert named(sources, 1, step=1) == named(sources, 1, step=2)


def test_a_query_with_too_few_is_filled_up_and_that_is_told_once() -> None:
    sources = learned(GoldNegatives(per_query=3))
    with pytest.warns(UserWarning, match="random public passages replace them") as told:
        first = named(sources, *range(8))
        named(sources, *range(8), step=1)
    assert len(told) == 1
    assert all(len(set(names)) == 3 and f"p{2 * i + 2}" in names for i, names in enumerate(first))


def test_two_sources_never_give_a_row_the_same_passage() -> None:
    sources = learned(BM25Negatives(per_query=6, depth=8), StaticNegatives(per_query=6, depth=8))
    assert all(len(set(names)) == 12 for names in named(sources, *range(8)))


def test_where_a_corpus_is_too_small_places_stay_empty() -> None:
    small = texts(passages={name: PASSAGES[name] for name in ("p0", "p1", "p2")})
    sources = RowNegatives([RandomNegatives(per_query=4)], NoPrivacy())
    sources.learn(small, WordTowers())
    places = sources.places(sources.keys(lines(0)), step=0, epoch=0, embed=lambda: torch.empty(0))["own_at"]
    assert sorted(places[0].tolist()) == [-1, -1, 1, 2]


# -- judged passages ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gpl", "msmarco"])
@pytest.mark.parametrize("zipped", [False, True])
def test_both_forms_of_a_file_of_hard_negatives_are_read(form: str, zipped: bool, tmp_path: Path) -> None:
    entries = [
        {
            "qid": f"q{i}",
            "pos": [f"p{2 * i}"],
            "neg": {"bm25": _items(form, ["p9", "p2"]), "other": _items(form, ["p7"])},
        }
        for i in range(3)
    ]
    text = "\n".join(map(json.dumps, entries)) + "\n\n"
    path = tmp_path / ("hard.jsonl.gz" if zipped else "hard.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    found = named(learned(GoldNegatives(per_query=2, file=path)), 0, 1)
    assert set(found[1]) == {"p7", "p9"}, "p2 answers query 1"
    assert set(found[0]) < {"p2", "p7", "p9"}


def _items(form: str, names: list[str]) -> list[Any]:
    return names if form == "gpl" else [{"pid": name, "score": 1.0} for name in names]


@pytest.mark.parametrize(
    "line", ["{", '{"qid": "q0"}', '{"qid": "q0", "neg": ["p1"]}', '{"qid": "q0", "neg": {"m": [{}]}}']
)
def test_a_line_of_another_form_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    (tmp_path / "hard.jsonl").write_text('{"qid": "q0", "neg": {}}\n' + line + "\n")
    with pytest.raises(DataError, match=r"hard\.jsonl line 2 is not of the form"):
        learned(GoldNegatives(file=tmp_path / "hard.jsonl"))


def test_gold_without_a_single_judged_negative_is_refused() -> None:
    kept = {query: {p: grade for p, grade in judged.items() if grade > 0} for query, judged in JUDGED.items()}
    with pytest.raises(DataError, match="no grade of 0 or less"):
        learned(GoldNegatives(), data=texts(judged=kept))


# -- margins -----------------------------------------------------------------------------------

SCORES = np.array([0.99, 0.95, 0.94, 0.8, 0.1, -0.5], dtype=np.float32)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"relative_margin": 0.05}, [1, 2, 3, 4, 5]),  # NV-Retriever's TopK-PercPos at 95 %
        ({"absolute_margin": 0.1}, [3, 4, 5]),
        ({"max_score": 0.94}, [2, 3, 4, 5]),
        ({"min_score": 0.1}, [0, 1, 2, 3, 4]),
        ({"range_min": 2}, [2, 3, 4, 5]),
        ({"relative_margin": 0.05, "range_min": 3, "min_score": 0.0}, [3, 4]),
    ],
)
def test_a_margin_keeps_what_it_says(settings: dict[str, Any], kept: list[int]) -> None:
    assert np.flatnonzero(MarginFilter(**settings).keep(SCORES, positive=1.0)).tolist() == kept


def test_a_relative_margin_below_a_negative_score_is_still_a_margin() -> None:
    assert MarginFilter(relative_margin=0.5).keep(SCORES, positive=-0.2).tolist() == [False] * 5 + [True]


def test_a_margin_compares_with_the_score_of_the_rows_own_passage() -> None:
    data, sources = texts(), learned(StaticNegatives(per_query=19, depth=20, absolute_margin=0.1))
    towers = WordTowers()
    table = towers.embeddings(data.queries, "query", None) @ towers.embeddings(data.passages, "passage", None).T
    for i in range(8):
        row = lines(i)[0]
        own = float(table[i, data.place[row.passage_id]])
        allowed = {
            name for name, place in data.place.items() if name not in row.positives and table[i, place] <= own - 0.1
        }
        names = named(sources, i)[0]
        assert set(names[: len(allowed)]) == allowed, "what comes after them fills up"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomNegatives(per_query=0), r"model\.negatives\.random\.per_query=0"),
        (lambda: BM25Negatives(depth=0), r"model\.negatives\.bm25\.depth=0"),
        (lambda: BM25Negatives(k1=-1.0), "k1=-1.0"),
        (lambda: BM25Negatives(absolute_margin=-0.1), r"model\.negatives\.bm25\.absolute_margin=-0.1 must not be"),
        (
            lambda: BM25Negatives(min_score=2.0, max_score=1.0),
            r"model\.negatives\.bm25\.min_score=2.0 .*nothing would pass",
        ),
        (lambda: StaticNegatives(max_score=float("nan")), r"model\.negatives\.static\.max_score=nan"),
        (lambda: StaticNegatives(refresh="daily"), "refresh='daily'"),  # type: ignore[arg-type]
        (lambda: RowNegatives([], NoPrivacy()), "is empty"),
        (lambda: RowNegatives([InBatchNegatives(), InBatchNegatives()], NoPrivacy()), "in_batch twice"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_row_that_nothing_was_prepared_for_is_refused() -> None:
    sources = learned(RandomNegatives())
    strange = lines(0)[0].__class__("q99", "how", "p0", "x", frozenset({"p0"}))
    with pytest.raises(DataError, match="'q99' is not among those"):
        sources.keys([strange])
    with pytest.raises(ConfigurationError, match="not prepared"):
        RowNegatives([RandomNegatives()], NoPrivacy()).keys(lines(0))


def test_the_texts_show_no_query_when_printed() -> None:
    assert repr(texts()) == "TrainTexts(20 public passages)"
