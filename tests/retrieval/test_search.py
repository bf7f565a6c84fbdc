from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval import search as search_module
from lit_dpret.retrieval.products import Attempt
from lit_dpret.retrieval.rows import Rows, TensorRows
from lit_dpret.retrieval.search import MISSING, SearchStream, TopK, lexicographic_rank, merged, search, top_k_of


@pytest.fixture(autouse=True, params=["few", "few in pieces", "few in bfloat16", "float32", "bfloat16"])
def first_attempt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every answer of this file, as for few queries, and as for many with candidates from float32 or bfloat16."""
    low = request.param.endswith("bfloat16")
    monkeypatch.setattr(search_module, "_FEW_QUERIES", 2**62 if request.param.startswith("few") else -1)
    monkeypatch.setattr(search_module, "_PAYS_LOW", 0)
    if request.param == "few in pieces":
        monkeypatch.setattr(search_module, "_AT_ONCE", 5_000)
        monkeypatch.setattr(search_module, "_ALONE", 0)
    monkeypatch.setattr(search_module, "bfloat16_pays", lambda device, queries: low)
    original = SearchStream._attempt

    def attempt(self: SearchStream, rows: Rows) -> Attempt:
        found = original(self, rows)
        if self._low is None or found.guess is not None:
            return found
        return Attempt(self._low, min(found.width + 20, len(rows)), None)  # for some queries too few

    monkeypatch.setattr(SearchStream, "_attempt", attempt)
    return str(request.param)


def brute_force(queries: Tensor, passages: Tensor, k: int, ids: list[str]) -> tuple[list[list[float]], list[list[int]]]:
    """The definition, slowly: float64 dot products as float32, ties by id descending as bytes."""
    table = (queries.double() @ passages.double().T).float().tolist()
    orders = [sorted(range(len(ids)), key=lambda i: (row[i], ids[i].encode()), reverse=True)[:k] for row in table]
    return [[row[i] for i in order] for row, order in zip(table, orders, strict=True)], orders


def with_ties(passages: int, queries: int = 23, dim: int = 8, levels: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(passages)
    draw = torch.randint(-levels, levels + 1, (passages + queries, dim), generator=generator).float()
    return draw[passages:], draw[:passages]


def names(count: int) -> list[str]:
    """Ids whose order as text is not their order as numbers, with non-ASCII among them."""
    return [f"{'é' if i % 7 == 0 else 'd'}{(i * 7919) % 10007}" for i in range(count)]


@pytest.mark.parametrize("k", [1, 10, 100, 400])
def test_the_first_k_are_the_ones_a_full_sort_gives_under_heavy_ties(k: int) -> None:
    queries, passages = with_ties(400)
    ids = names(400)
    top = search(queries, passages, k, tie_rank=lexicographic_rank(ids))
    scores, indices = brute_force(queries, passages, k, ids)
    assert top.indices.tolist() == indices
    assert top.scores.tolist() == scores


def in_chunks(monkeypatch: pytest.MonkeyPatch, queries: int, passages: int) -> None:
    monkeypatch.setattr(search_module, "QUERY_CHUNK", queries)
    monkeypatch.setattr(search_module, "PASSAGE_CHUNK", passages)
    monkeypatch.setattr(search_module, "_CPU_BLOCK", passages)


@pytest.mark.like(5)
@pytest.mark.parametrize(("query_chunk", "passage_chunk"), [(1, 1000), (5, 7), (1000, 1), (4, 333), (23, 64)])
@pytest.mark.parametrize("scale", [1.0, 0.0137])
def test_the_result_does_not_depend_on_the_chunk_sizes(
    query_chunk: int, passage_chunk: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, passages = with_ties(1000)
    queries, passages = queries * scale, passages + torch.linspace(0, 1e-6, 1000)[:, None]
    whole = search(queries, passages, 30)
    in_chunks(monkeypatch, query_chunk, passage_chunk)
    parts = search(queries, passages, 30)
    assert torch.equal(whole.indices, parts.indices)
    assert torch.equal(whole.scores, parts.scores)


def test_more_exact_ties_than_the_net_holds_are_still_broken_by_id() -> None:
    ids = names(900)
    passages = torch.ones(900, 4)
    passages[450] = 2.0
    top = search(
        torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]]), passages, 5, tie_rank=lexicographic_rank(ids)
    )
    by_id = sorted(range(900), key=lambda i: ids[i].encode(), reverse=True)
    assert top.indices[0].tolist() == [450, *[i for i in by_id if i != 450][:4]]
    assert top.indices[1].tolist() == by_id[:5]


def test_a_matrix_product_that_is_wrong_within_its_bound_does_not_change_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Near-ties closer than float32 resolves in a sum, scored by a product with another order of sums."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(1, 256, generator=generator)
    passages = base + 1e-7 * torch.randn(500, 256, generator=generator)
    queries = base.repeat(3, 1) * torch.tensor([[1.0], [3.0], [0.1]])
    ids = names(500)
    expected = search(queries, passages, 10, tie_rank=lexicographic_rank(ids))
    original = search_module._part

    def noisy(*arguments: Any) -> tuple[Tensor, float]:
        part, longest = original(*arguments)
        return part * (1 + 2.0**-22 * (torch.rand(len(part), 1, generator=generator) - 0.5)), longest

    monkeypatch.setattr(search_module, "_part", noisy)
    actual = search(queries, passages, 10, tie_rank=lexicographic_rank(ids))
    assert torch.equal(actual.indices, expected.indices)
    assert torch.equal(actual.scores, expected.scores)
    assert actual.indices.tolist() == brute_force(queries, passages, 10, ids)[1]


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


def test_cosine_is_the_dot_product_of_normalised_embeddings() -> None:
    queries, passages = with_ties(50)
    queries[0], passages[0] = 0.0, 0.0
    wide = torch.nn.functional.normalize
    expected = search(wide(queries.double(), dim=-1), wide(passages.double(), dim=-1), 50)
    actual = search(queries, passages, 50, similarity="cosine")
    assert torch.equal(actual.indices, expected.indices)
    assert torch.allclose(actual.scores, expected.scores, atol=1e-7)
    assert actual.scores[0].eq(0).all()


def test_half_precision_embeddings_are_compared_in_float32() -> None:
    generator = torch.Generator().manual_seed(5)
    queries, passages = torch.randn(4, 32, generator=generator), torch.randn(300, 32, generator=generator)
    low = search(queries.bfloat16(), passages.bfloat16(), 10)
    high = search(queries.bfloat16().float(), passages.bfloat16().float(), 10)
    assert torch.equal(low.indices, high.indices)
    assert torch.equal(low.scores, high.scores)
    assert low.scores.dtype == torch.float32


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
    assert torch.equal(actual.indices, expected.indices)
    assert torch.equal(actual.scores, expected.scores)


@pytest.mark.parametrize("k", [3, 200])
def test_an_excluded_passage_is_skipped_for_its_query_alone(k: int) -> None:
    queries, passages = with_ties(200)
    full = search(queries, passages, 200)
    exclude = full.indices[:, 0].clone()
    exclude[3] = MISSING
    top = search(queries, passages, k, exclude=exclude)
    for row in range(len(queries)):
        rest = [i for i in full.indices[row].tolist() if i != int(exclude[row])]
        wanted = (rest + [MISSING] * k)[:k]
        assert top.indices[row].tolist() == wanted
    assert top.scores[top.indices == MISSING].eq(float("-inf")).all()


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
def test_a_search_piece_by_piece_is_the_search_of_the_whole(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, passages = with_ties(600)
    rank = lexicographic_rank(names(600))
    exclude = torch.arange(23) * 20
    exclude[4] = MISSING
    whole = search(queries, passages, 30, tie_rank=rank, exclude=exclude)
    in_chunks(monkeypatch, 7, 50)
    stream = SearchStream(queries, 30, tie_rank=rank, exclude=exclude)
    for piece in passages.tensor_split(pieces):
        stream.add(piece)
    assert torch.equal(stream.result().indices, whole.indices)
    assert torch.equal(stream.result().scores, whole.scores)


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_merged_shards_are_the_search_of_the_whole(shards: int) -> None:
    queries, passages = with_ties(500)
    rank = lexicographic_rank(names(500))
    parts, start = [], 0
    for piece in passages.tensor_split(shards):
        own = search(queries, piece, 40, tie_rank=rank[start : start + len(piece)].argsort().argsort())
        parts.append(TopK(own.scores, own.indices + start))
        start += len(piece)
    whole, joined = search(queries, passages, 40, tie_rank=rank), merged(parts, 40, tie_rank=rank)
    assert torch.equal(joined.indices, whole.indices)
    assert torch.equal(joined.scores, whole.scores)
    with pytest.raises(ConfigurationError, match="cannot be merged"):
        merged([parts[0], TopK(whole.scores[:3], whole.indices[:3])], 5, tie_rank=rank)


def test_scores_that_grow_along_the_corpus_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst order for a net that keeps what is above its floor: every passage is."""
    passages = torch.linspace(-1, 1, 3000)[:, None]
    in_chunks(monkeypatch, 1024, 1000)
    top = search(torch.tensor([[1.0], [-1.0]]), passages, 50)
    assert top.indices.tolist() == [list(range(2999, 2949, -1)), list(range(50))]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_corpus_whose_scores_are_guessed_from_a_sample_is_searched_exactly(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 passages: enough that a floor is guessed. The second corpus shows the sample its best passages alone."""
    generator = torch.Generator().manual_seed(8)
    queries = torch.randint(-9, 10, (6, 4), generator=generator).float()
    passages = torch.randint(-9, 10, (10_000, 4), generator=generator).float()
    misleading = passages.clone()
    misleading[torch.linspace(0, 9_999, 2048, dtype=torch.float64).long()[::16]] *= 50
    ids, before = names(10_000), torch.get_num_threads()
    in_chunks(monkeypatch, 1024, 3000)
    torch.set_num_threads(threads)
    try:
        for corpus in (passages, misleading):
            top = search(queries, corpus, 300, tie_rank=lexicographic_rank(ids))
            scores, indices = brute_force(queries, corpus, 300, ids)
            assert top.indices.tolist() == indices
            assert top.scores.tolist() == scores
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_guess_that_is_too_high_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, passages = with_ties(500)
    expected = search(queries, passages, 20)
    too_high = torch.linspace(0, 1e3, len(queries)).bfloat16().float()
    original = SearchStream._attempt
    monkeypatch.setattr(SearchStream, "_attempt", lambda self, rows: replace(original(self, rows), guess=too_high))
    actual = search(queries, passages, 20)
    assert torch.equal(actual.indices, expected.indices) and torch.equal(actual.scores, expected.scores)


def test_pieces_that_do_not_fit_are_refused() -> None:
    stream = SearchStream(torch.ones(2, 3), 1, tie_rank=torch.arange(4))
    stream.add(torch.ones(3, 3))
    with pytest.raises(ConfigurationError, match="Passages 3 to 5 of width 3 do not fit a search of 4 passages"):
        stream.add(torch.ones(2, 3))
    with pytest.raises(ConfigurationError, match="of width 2"):
        stream.add(torch.ones(1, 2))


def test_fewer_passages_than_k_are_filled_up_with_missing() -> None:
    top = search(torch.ones(2, 3), torch.ones(2, 3), 4)
    assert top.indices.tolist() == [[0, 1, MISSING, MISSING]] * 2
    assert top.scores[:, 2:].eq(float("-inf")).all()
    assert search(torch.ones(2, 3), torch.ones(0, 3), 2).indices.eq(MISSING).all()
    assert search(torch.ones(0, 3), torch.ones(2, 3), 2).indices.shape == (0, 2)


def test_the_top_of_one_row_is_that_of_a_full_sort() -> None:
    generator = torch.Generator().manual_seed(7)
    scores = torch.randint(0, 5, (300,), generator=generator).float()
    ids = names(300)
    for k in (1, 17, 300, 500):
        top = top_k_of(scores, k, lexicographic_rank(ids))
        wanted = sorted(range(300), key=lambda i: (float(scores[i]), ids[i].encode()), reverse=True)[:k]
        assert top.indices[0].tolist() == wanted


def test_what_cannot_be_searched_is_refused_by_name() -> None:
    good = torch.ones(3, 2)
    with pytest.raises(ConfigurationError, match="k=0"):
        search(good, good, 0)
    with pytest.raises(ConfigurationError, match="one model"):
        search(good, torch.ones(3, 4), 1)
    with pytest.raises(ConfigurationError, match="similarity='euclid'"):
        search(good, good, 1, similarity="euclid")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="tie_rank"):
        search(good, good, 1, tie_rank=torch.arange(2))
    broken = good.clone()
    broken[1, 0] = float("nan")
    with pytest.raises(DataError, match="passage embeddings"):
        search(good, broken, 1)
    with pytest.raises(DataError, match="'b' occurs twice"):
        lexicographic_rank(["b", "a", "b"])


def test_arrays_of_numpy_are_searched_as_tensors_are() -> None:
    torch.manual_seed(0)
    queries, passages = torch.randn(3, 8), torch.randn(20, 8)
    found, expected = search(queries.numpy(), passages.numpy(), 5), search(queries, passages, 5)
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.scores, expected.scores)


@pytest.mark.like(3)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_question_alone_gets_the_answer_that_it_gets_among_many(threads: int) -> None:
    """Few queries share out the passages over threads, many the queries; near-ties show what either leaves out."""
    generator = torch.Generator().manual_seed(4)
    base = torch.randn(300, 24, generator=generator)
    passages = base[torch.randint(300, (9_000,), generator=generator)]
    passages = passages + 1e-7 * torch.randn(9_000, 24, generator=generator)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = search(base, passages, 10)
        for part in (slice(0, 1), slice(1, 90), slice(90, 300)):
            alone = search(base[part], passages, 10)
            assert torch.equal(alone.indices, together.indices[part])
            assert torch.equal(alone.scores, together.scores[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.like(6)
@pytest.mark.parametrize("kind", ["random", "duplicated", "nearly tied", "rising"])
@pytest.mark.parametrize("queries", [1, 10, 70])
@pytest.mark.parametrize("passages", [1, 99, 6_007])
def test_the_answer_is_that_of_a_full_sort_of_float64_scores(kind: str, queries: int, passages: int) -> None:
    """Numbers are multiples of 2**-20, so that float64 sums of their products are exact in every order."""
    generator = torch.Generator().manual_seed(queries + passages)

    def draw(count: int, most: int = 2**20) -> Tensor:
        return torch.randint(-most, most, (count, 48), generator=generator) / 2**20

    base = {"random": passages, "rising": passages, "duplicated": 1 + passages // 40, "nearly tied": 1}[kind]
    corpus = draw(base)[torch.randint(base, (passages,), generator=generator)]
    if kind == "nearly tied":  # by less than what float32 sums are wrong by
        corpus = corpus + draw(passages, 4)
    asked, k = draw(queries), min(100, 1 + passages // 2)
    if kind == "rising":
        corpus = corpus[(corpus @ asked[0]).argsort()]
    table = (asked.double() @ corpus.double().T).float()
    exclude = torch.randint(-1, passages, (queries,), generator=generator)
    for rank in (torch.arange(passages), torch.randperm(passages, generator=generator)):
        top = search(asked, corpus, k, tie_rank=rank, exclude=exclude)
        for row, banned in enumerate(exclude.tolist()):
            order = np.lexsort((rank, -table[row]))
            order = order[order != banned][:k]
            assert top.indices[row].tolist() == [*order, *[MISSING] * (k - len(order))]
            assert torch.equal(top.scores[row, : len(order)], table[row, order])


def test_rows_that_are_kept_are_searched_as_new_ones_and_after_a_change_too() -> None:
    """The second search knows the longest row; after a change it must be found again, and what broke refused."""
    queries, passages = torch.randn(3, 32), torch.randn(400, 32)
    rows = TensorRows(passages)
    for change in (None, 1e6, None):
        if change is not None:
            passages[7] *= change
        for _ in range(2):
            found, expected = search(queries, rows, 5), search(queries, passages, 5)
            assert torch.equal(found.indices, expected.indices) and torch.equal(found.scores, expected.scores)
            assert rows.longest is None or rows.longest >= float(passages.norm(dim=1).max()) * 0.999
    passages[7, 0] = float("nan")
    assert rows.longest is None
    with pytest.raises(DataError, match="passage"):
        search(queries, rows, 5)
