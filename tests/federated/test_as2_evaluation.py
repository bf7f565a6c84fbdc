"""Both levels of answer selection: passages follow from sentences, and the order that the paper's table breaks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_dpret.federated.evaluation import SentenceCollection

PER_PASSAGE = [3, 1, 4, 2]
SENTENCES = {f"p{p}-s{i}": f"word{p} and{i}" for p, count in enumerate(PER_PASSAGE) for i in range(count)}
OWNERS = {sid: sid.partition("-")[0] for sid in SENTENCES}
COLLECTION = SentenceCollection(SENTENCES, OWNERS)
NAMES = [f"{kind}@{k}" for kind in ("success", "mrr", "recall") for k in (1, 2, 3, 20, 100)]


def rank(scores: torch.Tensor, depth: int = 100) -> tuple[list[list[str]], list[list[str]]]:
    """Ids by rank at both levels, from a table of scores (queries, sentences)."""
    levels = COLLECTION.dense(scores, torch.eye(len(SENTENCES)), depth=depth)
    sides = ((levels.sentences, COLLECTION.sentence_ids), (levels.passages, COLLECTION.passage_ids))
    first, second = ([[ids[i] for i in row if i >= 0] for row in top.indices.tolist()] for top, ids in sides)
    return first, second


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=10, max_size=10), st.integers(1, 12))
def test_a_passage_stands_where_its_best_sentence_does(scores: list[float], depth: int) -> None:
    sentences, passages = rank(torch.tensor([scores]))
    assert passages[0] == list(dict.fromkeys(OWNERS[sid] for sid in sentences[0]))
    assert rank(torch.tensor([scores]), depth)[1][0] == passages[0][:depth]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=10, max_size=10), min_size=1, max_size=4),
    st.sets(st.sampled_from(sorted(SENTENCES)), min_size=1),
)
def test_any_hit_of_passages_is_never_below_that_of_sentences(scores: list[list[int]], relevant: set[str]) -> None:
    ids = [f"q{i}" for i in range(len(scores))]
    levels = COLLECTION.dense(torch.tensor(scores, dtype=torch.float32), torch.eye(10))
    found = COLLECTION.measure(levels, ids, {name: dict.fromkeys(relevant, 1) for name in ids}, NAMES)
    for name in NAMES:
        if not name.startswith("recall"):
            assert (found[f"passage/{name}"] >= found[f"sentence/{name}"]).all(), name


def test_the_share_of_what_is_relevant_can_fall_from_sentences_to_passages() -> None:
    scores = torch.zeros(1, 10)
    scores[0, :5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    levels = COLLECTION.dense(scores, torch.eye(10))
    qrels = {"q": dict.fromkeys(["p0-s0", "p0-s1", "p0-s2", "p3-s0"], 1)}
    found = COLLECTION.measure(levels, ["q"], qrels, ["recall@3"])
    assert found["sentence/recall@3"] == 0.75 and found["passage/recall@3"] == 0.5


def test_as_many_sentences_are_searched_as_it_takes_to_fill_the_passages() -> None:
    many = {f"a-s{i}": "x" for i in range(50)} | {"b-s0": "y", "c-s0": "z"}
    collection = SentenceCollection(many, {sid: sid[0] for sid in many})
    scores = torch.arange(52, 0, -1, dtype=torch.float32).unsqueeze(0)
    levels = collection.dense(scores, torch.eye(52), depth=2)
    assert levels.sentences.indices.shape == (1, 2)
    assert [collection.passage_ids[i] for i in levels.passages.indices[0]] == ["a", "b"]


def test_bm25_ranks_both_levels_and_an_unanswered_query_counts_as_0() -> None:
    levels = COLLECTION.bm25(["word2 and3", "nothing of it"])
    qrels = {"a": {"p2-s3": 1}, "b": {"p0-s0": 1}}
    found = COLLECTION.measure(levels, ["a", "b"], qrels)
    assert np.array_equal(found["sentence/success@1"], [1.0, 0.0]) and found["passage/mrr@10"].mean() == 0.5
