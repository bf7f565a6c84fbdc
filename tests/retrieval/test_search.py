from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.retrieval import search as search_module
from lit_dpret.retrieval.products import Attempt
from lit_dpret.retrieval.rows import Rows, TensorRows
from lit_dpret.retrieval.search import MISSING, SearchStream, TopK, lexicographic_rank, merged, search


@pytest.fixture(autouse=True, params=["few", "few in pieces", "few in bfloat16", "float32", "bfloat16"])
def first_attempt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every answer of this file, as for few queries, and as for many with candidates from float32 or bfloat16."""
    low = request.param.endswith("bfloat16")
    monkeypatch.setattr(search_module, "_FEW_QUERIES", 2**62 if request.param.startswith("few") else -1)
    monkeypatch.setattr(search_module, "_PAYS_LOW", 0)
    if request.param == "few in pieces":
        monkeypatch.setattr(search_module, "_AT_ONCE", 5_000)
        monkeypatch.setattr(search_module, "_ALONE", 0)
        monkeypatch.setattr(search_module, "_ALONE_READ", 0)
    monkeypatch.setattr(search_module, "bfloat16_pays", lambda device, queries: low)
    original = SearchStream._attempt

    def attempt(self: SearchStream, rows: Rows) -> Attempt:
        found = original(self, rows)
        if self._low is None or found.guess is not None:
            return found
        return Attempt(self._low, min(found.width + 20, len(rows)), None)  # for some queries too few

    monkeypatch.setattr(SearchStream, "_attempt", attempt)
    return str(request.param)


def full_sort(queries: Tensor, passages: Tensor, k: int, rank: Tensor, exclude: Tensor | None = None) -> TopK:
    """The definition, slowly: float64 dot products as float32, all of them sorted, ties by rank."""
    table = (queries.double() @ passages.double().T).float()
    scores, indices = torch.full((len(table), k), float("-inf")), torch.full((len(table), k), MISSING)
    for row, values in enumerate(table):
        order = np.lexsort((rank, -values))
        order = order[order != (MISSING if exclude is None else int(exclude[row]))][:k]
        scores[row, : len(order)], indices[row, : len(order)] = values[order], torch.from_numpy(order)
    return TopK(scores, indices)


def assert_same(found: TopK, expected: TopK) -> None:
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.scores, expected.scores)


def with_ties(passages: int, queries: int = 23, dim: int = 8, levels: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(passages)
    draw = torch.randint(-levels, levels + 1, (passages + queries, dim), generator=generator).float()
    return draw[passages:], draw[:passages]


def ids_of(count: int) -> list[str]:
    """Ids whose order as text is not their order as numbers, with non-ASCII among them."""
    return [f"{'é' if i % 7 == 0 else 'd'}{(i * 7919) % 10007}" for i in range(count)]


@pytest.mark.like(4)
@pytest.mark.parametrize("kind", ["random", "duplicated", "nearly tied", "tiny", "rising", "few values", "all equal"])
@pytest.mark.parametrize(("queries", "passages"), [(1, 6_007), (3, 900), (10, 1), (70, 99), (70, 900), (10, 6_007)])
def test_the_answer_is_that_of_a_full_sort_of_float64_scores(kind: str, queries: int, passages: int) -> None:
    """Numbers are multiples of 2**-20, or tiny ones of 2**-95, so that float64 sums of products are exact in every
    order. Squares of tiny ones are zero in float32.
    """
    generator = torch.Generator().manual_seed(queries + passages)

    def draw(count: int, most: int = 2**20) -> Tensor:
        return torch.randint(-most, most, (count, 48), generator=generator) / 2**20

    different = {"duplicated": 1 + passages // 40, "nearly tied": 1, "tiny": 1, "all equal": 1}.get(kind, passages)
    corpus = draw(different)[torch.randint(different, (passages,), generator=generator)]
    if kind in ("nearly tied", "tiny"):  # by less than what float32 sums are wrong by
        corpus = (corpus + draw(passages, 4)) * (2.0**-75 if kind == "tiny" else 1)
    if kind == "few values":
        corpus = corpus.round()
    asked = draw(queries)
    asked[-1] = 0.0  # for which all passages tie, which is more than any net of candidates holds
    if kind == "rising":  # the worst order for a net that keeps what is above its floor
        corpus = corpus[(corpus @ asked[0]).argsort()]
    exclude = torch.randint(-1, passages, (queries,), generator=generator)
    names = [name.encode() for name in ids_of(passages)]
    by_id = torch.tensor(sorted(range(passages), key=names.__getitem__, reverse=True)).argsort()
    for k, rank in ((min(100, 1 + passages // 2), by_id), (min(900, passages), torch.arange(passages))):
        assert_same(
            search(asked, corpus, k, tie_rank=rank, exclude=exclude), full_sort(asked, corpus, k, rank, exclude)
        )
    assert torch.equal(lexicographic_rank(ids_of(passages)), by_id)


def in_chunks(monkeypatch: pytest.MonkeyPatch, queries: int, passages: int) -> None:
    monkeypatch.setattr(search_module, "QUERY_CHUNK", queries)
    monkeypatch.setattr(search_module, "PASSAGE_CHUNK", passages)
    monkeypatch.setattr(search_module, "_CPU_BLOCK", passages)


def test_in_chunks_pieces_or_shards_it_is_the_search_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, passages = with_ties(400)
    queries, passages = queries * 0.0137, passages + torch.linspace(0, 1e-6, 400)[:, None]
    rank = lexicographic_rank(ids_of(400))
    exclude = torch.arange(23) * 17
    exclude[4] = MISSING
    whole = search(queries, passages, 30, tie_rank=rank, exclude=exclude)
    everything = search(queries, passages, 40, tie_rank=rank)
    for shards in (1, 3, 7):
        parts, start = [], 0
        for piece in passages.tensor_split(shards):
            own = search(queries, piece, 40, tie_rank=rank[start : start + len(piece)].argsort().argsort())
            parts.append(TopK(own.scores, own.indices + start))
            start += len(piece)
        assert_same(merged(parts, 40, tie_rank=rank), everything)
    for query_chunk, passage_chunk in ((1, 1000), (5, 7), (1000, 1), (4, 333), (23, 64)):
        in_chunks(monkeypatch, query_chunk, passage_chunk)
        assert_same(search(queries, passages, 30, tie_rank=rank, exclude=exclude), whole)
    in_chunks(monkeypatch, 7, 50)
    for pieces in (1, 2, 5, 40):
        stream = SearchStream(queries, 30, tie_rank=rank, exclude=exclude)
        for piece in passages.tensor_split(pieces):
            stream.add(piece)
        assert_same(stream.result(), whole)


def test_a_matrix_product_that_is_wrong_within_its_bound_does_not_change_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Near-ties closer than float32 resolves in a sum, scored by a product with another order of sums."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(1, 256, generator=generator)
    passages = base + 1e-7 * torch.randn(500, 256, generator=generator)
    queries = base.repeat(3, 1) * torch.tensor([[1.0], [3.0], [0.1]])
    rank = lexicographic_rank(ids_of(500))
    expected = search(queries, passages, 10, tie_rank=rank)
    original = search_module._part

    def noisy(*arguments: Any) -> tuple[Tensor, float]:
        part, longest = original(*arguments)
        return part * (1 + 2.0**-22 * (torch.rand(len(part), 1, generator=generator) - 0.5)), longest

    monkeypatch.setattr(search_module, "_part", noisy)
    assert_same(search(queries, passages, 10, tie_rank=rank), expected)
    assert torch.equal(expected.indices, full_sort(queries, passages, 10, rank).indices)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_best_passage_that_its_product_puts_behind_all_others_is_found(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its product is too small by less than the bound: by itself as a piece, and behind more others than are kept."""
    passages = torch.zeros(101, 256)
    passages[:100, 0], passages[100, 0] = torch.linspace(1, 1 + 2e-6, 100), 1 + 3e-6
    original = search_module._part

    def noisy(*arguments: Any) -> tuple[Tensor, float]:
        part, longest = original(*arguments)
        return torch.where(part == passages[100, 0], part - 1e-5, part), longest

    monkeypatch.setattr(search_module, "_part", noisy)
    stream = SearchStream(passages[:1], 1, tie_rank=torch.arange(101))
    for piece in (passages,) if pieces == 1 else (passages[:100], passages[100:]):
        stream.add(piece)
    assert stream.result().indices.tolist() == [[100]]


def test_cosine_half_precision_and_arrays_are_searched_as_the_same_numbers() -> None:
    queries, passages = with_ties(50)
    queries[0], passages[0] = 0.0, 0.0
    wide = torch.nn.functional.normalize
    expected = search(wide(queries.double(), dim=-1), wide(passages.double(), dim=-1), 50)
    actual = search(queries, passages, 50, similarity="cosine")
    assert torch.equal(actual.indices, expected.indices)
    assert torch.allclose(actual.scores, expected.scores, atol=1e-7)
    assert actual.scores[0].eq(0).all()
    generator = torch.Generator().manual_seed(5)
    queries, passages = (torch.randn(rows, 32, generator=generator).bfloat16() for rows in (4, 300))
    expected = search(queries.float(), passages.float(), 10)
    assert_same(search(queries, passages, 10), expected)
    assert_same(search(queries.float().numpy(), passages.float().numpy(), 10), expected)
    assert expected.scores.dtype == torch.float32


def test_a_lowered_matmul_precision_and_autocast_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where they would change nothing anyway, the precision in force is looked at."""
    generator = torch.Generator().manual_seed(6)
    queries, passages = torch.randn(4, 64, generator=generator), torch.randn(900, 64, generator=generator)
    expected = search(queries, passages, 10)
    original, seen = search_module._part, set()

    def watched(*arguments: Any) -> tuple[Tensor, float]:
        seen.add((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
        return original(*arguments)

    monkeypatch.setattr(search_module, "_part", watched)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = search(queries, passages, 10)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {("highest", False)}
    assert_same(actual, expected)


def test_a_large_corpus_whose_scores_are_guessed_from_a_sample_is_searched_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10,000 passages: enough that a floor is guessed. The second corpus shows the sample its best passages alone."""
    generator = torch.Generator().manual_seed(8)
    queries = torch.randint(-9, 10, (6, 4), generator=generator).float()
    passages = torch.randint(-9, 10, (10_000, 4), generator=generator).float()
    misleading = passages.clone()
    misleading[torch.linspace(0, 9_999, 2048, dtype=torch.float64).long()[::16]] *= 50
    rank, before = lexicographic_rank(ids_of(10_000)), torch.get_num_threads()
    in_chunks(monkeypatch, 1024, 3000)
    try:
        for corpus in (passages, misleading):
            expected = full_sort(queries, corpus, 300, rank)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert_same(search(queries, corpus, 300, tie_rank=rank), expected)
                assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_guess_that_is_too_high_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, passages = with_ties(500)
    expected = search(queries, passages, 20)
    too_high = torch.linspace(0, 1e3, len(queries)).bfloat16().float()
    original = SearchStream._attempt
    monkeypatch.setattr(SearchStream, "_attempt", lambda self, rows: replace(original(self, rows), guess=too_high))
    assert_same(search(queries, passages, 20), expected)


def test_fewer_passages_than_k_are_filled_up_with_missing() -> None:
    top = search(torch.ones(2, 3), torch.ones(2, 3), 4)
    assert top.indices.tolist() == [[0, 1, MISSING, MISSING]] * 2
    assert top.scores[:, 2:].eq(float("-inf")).all()
    assert search(torch.ones(2, 3), torch.ones(0, 3), 2).indices.eq(MISSING).all()
    assert search(torch.ones(0, 3), torch.ones(2, 3), 2).indices.shape == (0, 2)


@pytest.mark.like(3)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_question_alone_gets_the_answer_that_it_gets_among_many(threads: int) -> None:
    """Few queries share out the passages over threads, many the queries; near-ties show what either leaves out."""
    generator = torch.Generator().manual_seed(4)
    base = torch.randn(300, 24, generator=generator)
    passages = base[torch.randint(300, (4_000,), generator=generator)]
    passages = passages + 1e-7 * torch.randn(4_000, 24, generator=generator)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = search(base, passages, 10)
        for part in (slice(0, 1), slice(1, 90), slice(90, 300)):
            assert_same(search(base[part], passages, 10), TopK(together.scores[part], together.indices[part]))
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_kept_are_searched_as_new_ones_and_after_a_change_too() -> None:
    """The second search knows the longest row; after a change it must be found again, and what broke refused."""
    queries, passages = torch.randn(3, 32), torch.randn(400, 32)
    rows = TensorRows(passages)
    for change in (None, 1e6, None):
        if change is not None:
            passages[7] *= change
        for _ in range(2):
            assert_same(search(queries, rows, 5), search(queries, passages, 5))
            assert rows.longest is None or rows.longest >= float(passages.norm(dim=1).max()) * 0.999
    passages[7, 0] = float("nan")
    assert rows.longest is None
    with pytest.raises(DataError, match="passage"):
        search(queries, rows, 5)
