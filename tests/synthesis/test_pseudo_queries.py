"""Queries from the passages alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.pseudo_queries import STOP_WORDS, pseudo_queries, write_pseudo_queries

PASSAGES = {
    "tide": "The sea rises and falls twice a day. Tides are caused by the pull of the moon on the ocean. It is so.",
    "moon": "The moon is a ball of rock. Craters on the moon were made by meteorites that struck its grey surface.",
    "bread": "Bread rises because yeast makes gas. Knead the dough, let it rest, and bake the loaf in a hot oven.",
    "short": "Of the moon.",
    "none": "...",
}


def test_the_words_of_a_query_stand_in_its_passage_in_that_order_and_are_no_stop_words() -> None:
    found = list(pseudo_queries(PASSAGES, queries_per_passage=4))
    assert list(pseudo_queries(dict(reversed(PASSAGES.items())), queries_per_passage=4)) == found
    for query in found:
        words = re.findall(r"\w+", PASSAGES[query.passage_id].lower())
        place = 0
        for word in query.text.split():
            place = words.index(word, place) + 1
    assert not STOP_WORDS & {word for query in pseudo_queries(PASSAGES) for word in query.text.split()}
    first, other = pseudo_queries({"bread": PASSAGES["bread"]}, queries_per_passage=2)  # of two sentences
    assert first.text and other.text and not set(first.text.split()) & set(other.text.split())


def test_a_query_has_as_many_words_as_allowed() -> None:
    for query in pseudo_queries(PASSAGES, queries_per_passage=6, min_words=3, max_words=5):
        count = len(query.text.split())
        assert count == {"short": 1, "none": 0}.get(query.passage_id, count)
        if query.passage_id not in ("short", "none"):
            assert 3 <= count <= 5


def test_the_folder_is_that_of_a_synthetic_set_and_says_that_nothing_private_was_read(tmp_path: Path) -> None:
    folder = write_pseudo_queries(PASSAGES, tmp_path / "set", queries_per_passage=2)
    queries = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    corpus = [json.loads(line)["_id"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    assert {query["metadata"]["passage_id"] for query in queries} == set(corpus) == set(PASSAGES) - {"none"}
    assert len((folder / "qrels" / "train.tsv").read_text().splitlines()) == len(queries) + 1
    assert "No private query was read" in (folder / "README.md").read_text()
    again = write_pseudo_queries(PASSAGES, tmp_path / "again" / "set", queries_per_passage=2)
    for file in folder.rglob("*.jsonl"):
        assert file.read_bytes() == (again / file.relative_to(folder)).read_bytes()


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="min_words=5"):
        list(pseudo_queries(PASSAGES, min_words=5, max_words=4))
    with pytest.raises(ConfigurationError, match="queries_per_passage=0"):
        list(pseudo_queries(PASSAGES, queries_per_passage=0))
    with pytest.raises(DataError, match="no passages"):
        write_pseudo_queries({}, tmp_path / "set")
