"""Fed-negatives: who is asked, and that merging answers is searching the union; and both levels of evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from negative_cases import PASSAGES, QUERIES, WordTowers, texts

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.evaluation import SentenceCollection
from lit_dpret.federated.negatives import (
    Block,
    FedNegatives,
    FedPool,
    OtherPositives,
    as_sent,
    merge_lists,
    pool_of,
    respond,
    respond_uniformly,
    select_clients,
)
from lit_dpret.federated.settings import Stage2
from lit_dpret.negatives import RowNegatives
from lit_dpret.negatives.base import Seat
from lit_dpret.privacy.modes import DPSGD, NoPrivacy
from lit_dpret.retrieval.search import MISSING, search


def collections(sizes: list[int], dim: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Few different values, so that scores tie.
    return [torch.randint(-2, 3, (size, dim), generator=generator).float() for size in sizes]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 99),
       st.sampled_from(["float32", "float16"]))  # fmt: skip
def test_merging_the_answers_of_all_clients_is_searching_their_union(
    sizes: list[int], n: int, seed: int, send_as: str
) -> None:
    found = [part + 0.1 for part in collections(sizes, 3, seed)]
    (queries,) = collections([5], 3, seed + 1)
    blocks = [respond(f"client{i}", queries, part, n, send_as=send_as) for i, part in enumerate(found)]
    pool = merge_lists(blocks[::-1], queries, n)
    union = torch.cat([as_sent(part, send_as).float() for part in found])
    best = search(queries, union, n)
    assert pool.lists is not None
    for row in range(len(queries)):
        kept = pool.lists[row][pool.lists[row] != MISSING]
        wanted = best.indices[row][best.indices[row] != MISSING]
        scores = pool.embeddings[kept] @ queries[row]
        torch.testing.assert_close(scores, best.scores[row][: len(wanted)])
        assert torch.equal(pool.embeddings[kept], union[wanted])


def test_embeddings_that_half_precision_cannot_hold_are_refused_not_sent_as_infinity() -> None:
    with pytest.raises(ConfigurationError, match=r"send_as=float16"):
        respond("a", torch.ones(1, 2), torch.tensor([[1e6, 0.0]]), 1)


@pytest.mark.parametrize(("change", "message"), [
    ({"embeddings": torch.full((2, 3), float("nan"))}, "finite"),
    ({"embeddings": torch.zeros(2, 4)}, r"shape \(2, 4\)"),
    ({"starts": torch.tensor([0, 1])}, "1 rows where 2"),
    ({"entries": torch.tensor([0, 7], dtype=torch.int32)}, "lists"),
    ({"starts": torch.tensor([0, 2, 1])}, "lists"),
    ({"starts": torch.tensor([0, 3, 5]), "entries": torch.zeros(5, dtype=torch.int32)}, "5 entries"),
])  # fmt: skip
def test_a_broken_answer_is_named_with_its_client(change: dict[str, torch.Tensor], message: str) -> None:
    good = {"embeddings": torch.zeros(2, 3), "starts": torch.tensor([0, 1, 2]),
            "entries": torch.tensor([0, 1], dtype=torch.int32)}  # fmt: skip
    Block("good", **good).check(rows=2, dim=3, limit=2)
    with pytest.raises(DataError, match=f"client 'bad' has .*{message}"):
        Block("bad", **good | change).check(rows=2, dim=3, limit=2)


def test_without_a_request_a_uniform_sample_comes_back_and_differs_by_seed() -> None:
    sentences = torch.arange(400.0).reshape(100, 4)
    drawn = [respond_uniformly("a", sentences, 20, seed=seed, send_as="float32") for seed in range(40)]
    assert all(len(block.embeddings) == 20 and block.rows == 1 for block in drawn)
    counts = torch.stack([block.embeddings[:, 0] / 4 for block in drawn]).flatten().long().bincount(minlength=100)
    # 40 draws of 20 of 100: each place 8 times on average, variance 6.4 by the hypergeometric law.
    assert float(((counts - 8.0) ** 2 / 6.4).sum()) < 150 and counts.max() < 24


# -- who is asked ----------------------------------------------------------------------------


def asked(asker: str, *, refresh: int = 0, **select: Any) -> list[str]:
    return select_clients(asker, "abcd", Stage2(**select), seed=0, refresh=refresh)


def test_all_others_are_asked_and_never_the_asker() -> None:
    assert asked("b") == ["a", "c", "d"] and asked("b", select_count=2) == ["a", "c"]
    assert sorted(asked("b", select="random")) == ["a", "c", "d"]


def test_random_clients_change_with_the_refresh_and_not_otherwise() -> None:
    drawn = [tuple(asked("a", select="random", select_count=1, refresh=i)) for i in range(20)]
    assert set(drawn) == {("b",), ("c",), ("d",)}
    assert drawn == [tuple(asked("a", select="random", select_count=1, refresh=i)) for i in range(20)]


# -- as sources of negatives -----------------------------------------------------------------


def fed(pool: FedPool, **numbers: int) -> FedNegatives:
    queries = list(QUERIES) if pool.lists is not None else None
    source = FedNegatives(pool, queries=queries, **numbers)
    source.prepare(texts(), WordTowers(), private=True)
    return source


def chooser(source: FedNegatives, query: int) -> Callable[[int], list[int]]:
    """The negatives of one query by step."""
    known = texts()
    embedding = WordTowers().embeddings([known.queries[query]], "query", None)
    groups = frozenset(int(known.groups[place]) for place in known.positives(query))
    seat = Seat(query, known.queries[query], known.positives(query)[0], groups)
    near = source.nearest(embedding, 2)
    return lambda step: source.choose_near(seat, embedding[0], near, 0, step=step)


def chosen(source: FedNegatives, query: int, step: int = 0) -> list[int]:
    return chooser(source, query)(step)


def test_a_pool_is_searched_with_the_query_as_it_is_and_never_names_an_answer() -> None:
    towers = WordTowers()
    own = towers.embeddings(texts().passages, "passage", None)
    copy = texts().positives(1)
    others = torch.nn.functional.normalize(torch.randn(12, own.shape[1], generator=torch.Generator().manual_seed(0)))
    pool = pool_of([respond_uniformly("x", torch.cat([others, own[list(copy)]]), 14, seed=0)], own.shape[1])
    source = fed(pool, per_query=3, depth=12)
    places = [place for step in range(30) for place in chosen(source, 1, step)]
    answers = {i for i, e in enumerate(pool.embeddings) if float((e @ own[list(copy)].T).max()) > 0.9999}
    assert len(answers) == len(copy) and len(set(places)) == 12
    assert not {place - len(PASSAGES) for place in places} & answers


def test_what_a_row_is_told_from_does_not_depend_on_how_many_answers_other_rows_of_its_batch_have() -> None:
    known, towers = texts(), WordTowers()
    own = towers.embeddings(known.passages, "passage", None)
    embedding = towers.embeddings([known.queries[1]], "query", None)
    (answer, *_) = known.positives(1)
    groups = frozenset(int(known.groups[place]) for place in known.positives(1))
    seat = Seat(1, known.queries[1], answer, groups)
    # Other silos have the answer too, in embeddings that differ in their last bit: all of them are left out.
    copies = own[answer] * torch.linspace(1, 1 + 1e-6, 9).unsqueeze(1)
    others = torch.nn.functional.normalize(torch.randn(12, own.shape[1], generator=torch.Generator().manual_seed(1)))
    source = fed(FedPool(torch.cat([copies, others])), per_query=3, depth=6)
    told = [source.choose_near(seat, embedding[0], source.nearest(embedding, most), 0, step=0) for most in (1, 9)]
    assert told[0] == told[1]


def test_the_best_of_few_is_always_the_same_and_uniform_among_many() -> None:
    pool = FedPool(torch.randn(40, 20, generator=torch.Generator().manual_seed(3)))
    best = {tuple(chosen(fed(pool, per_query=4, depth=4), 0, step)) for step in range(5)}
    assert len(best) == 1
    counts = torch.zeros(20)
    source = fed(pool, per_query=5, depth=20)
    order = [place - len(PASSAGES) for place in source.nearest(
        WordTowers().embeddings([texts().queries[0]], "query", None), 0).indices[0].tolist()]  # fmt: skip
    draw = chooser(source, 0)
    for step in range(400):
        for place in draw(step):
            counts[order.index(place - len(PASSAGES))] += 1
    # Each of the best 20 is drawn 100 times on average, variance 75: chi-square of 19 degrees, 99.99 % is 50.8.
    assert float(((counts - 100) ** 2 / 75).sum()) < 50.8


def test_lists_belong_to_queries_by_id() -> None:
    lists = torch.arange(len(QUERIES)).unsqueeze(1) * 2 + torch.tensor([[0, 1]])
    pool = FedPool(torch.randn(16, 20, generator=torch.Generator().manual_seed(4)), lists)
    assert chosen(fed(pool, per_query=2, depth=2), 3) == [len(PASSAGES) + 6, len(PASSAGES) + 7]


def test_a_pool_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="dimensions"):
        fed(FedPool(torch.zeros(2, 5)))


def test_other_questions_answers_are_drawn_and_couple_rows() -> None:
    source = OtherPositives(per_query=3)
    known = texts()
    source.prepare(known, WordTowers(), private=True)
    answers = {place for query in range(len(QUERIES)) for place in known.positives(query)}
    own = frozenset(int(known.groups[place]) for place in known.positives(1))
    drawn = {place for step in range(50) for place in source.choose(Seat(1, "t", 0, own), step=step, epoch=0)}
    assert drawn <= answers and not {int(known.groups[place]) for place in drawn} & own and len(drawn) > 5
    RowNegatives([OtherPositives()], NoPrivacy())
    with pytest.raises(ConfigurationError, match=r"other_positives .*dp_sgd"):
        RowNegatives([OtherPositives()], DPSGD(eps=1.0))


# -- evaluation at both levels ------------------------------------------------------------------

PER_PASSAGE = [3, 1, 4, 2]
SENTENCES = {f"p{p}-s{i}": f"word{p} and{i}" for p, count in enumerate(PER_PASSAGE) for i in range(count)}
OWNERS = {sid: sid.partition("-")[0] for sid in SENTENCES}
COLLECTION = SentenceCollection(SENTENCES, OWNERS)


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


def test_as_many_sentences_are_searched_as_it_takes_to_fill_the_passages() -> None:
    many = {f"a-s{i}": "x" for i in range(50)} | {"b-s0": "y", "c-s0": "z"}
    collection = SentenceCollection(many, {sid: sid[0] for sid in many})
    scores = torch.arange(52, 0, -1, dtype=torch.float32).unsqueeze(0)
    levels = collection.dense(scores, torch.eye(52), depth=2)
    assert levels.sentences.indices.shape == (1, 2)
    assert [collection.passage_ids[i] for i in levels.passages.indices[0]] == ["a", "b"]


def test_bm25_ranks_both_levels_and_an_unanswered_query_counts_as_0() -> None:
    levels = COLLECTION.bm25(["word2 and3", "nothing of it"])
    qrels = {"a": {"p2-s3": 1, "p2-s0": 1}, "b": {"p0-s0": 1}}
    found = COLLECTION.measure(levels, ["a", "b"], qrels, ["success@1", "mrr@10", "recall@1"])
    assert np.array_equal(found["sentence/success@1"], [1.0, 0.0]) and found["passage/mrr@10"].mean() == 0.5
    assert np.array_equal(found["sentence/recall@1"], [0.5, 0.0])  # two sentences are relevant, of one passage
    assert np.array_equal(found["passage/recall@1"], [1.0, 0.0])
