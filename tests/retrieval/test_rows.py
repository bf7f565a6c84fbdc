"""What stands around the search: rows in memory and in files, matrix products, words, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval import products as products_module
from lit_dpret.retrieval import scores as scores_module
from lit_dpret.retrieval import search as search_module
from lit_dpret.retrieval import topk as topk_module
from lit_dpret.retrieval.bm25 import BM25, BM25Settings
from lit_dpret.retrieval.products import Attempt, Products, bfloat16_pays
from lit_dpret.retrieval.rows import FileRows, TensorRows
from lit_dpret.retrieval.search import MISSING, SearchStream, TopK, lexicographic_rank, merged, search, top_k_of


def written(path: Path, embeddings: torch.Tensor) -> Path:
    path.write_bytes(embeddings.contiguous().view(torch.uint8).numpy().tobytes())
    return path


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_a_file_and_a_tensor_of_the_same_numbers_are_searched_alike(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "_CHUNK", 150)
    monkeypatch.setattr(search_module, "PASSAGE_CHUNK", 64)
    generator = torch.Generator().manual_seed(0)
    passages = torch.randn(700, 12, generator=generator).to(getattr(torch, storage))
    queries = torch.randn(9, 12, generator=generator)
    rows = FileRows(written(tmp_path / "e", passages), dim=12, storage=storage)
    assert (len(rows), rows.dim) == (700, 12)
    assert torch.equal(rows.chunk(690, 800), passages[690:])
    places = torch.tensor([3, 699, 3])
    assert torch.equal(rows.take(places), passages[places])
    assert torch.equal(TensorRows(passages).take(places), passages[places])
    for similarity in ("dot", "cosine"):
        ours = search(queries, rows, 20, similarity=similarity)  # type: ignore[arg-type]
        theirs = search(queries, passages, 20, similarity=similarity)  # type: ignore[arg-type]
        assert torch.equal(ours.indices, theirs.indices)
        assert torch.equal(ours.scores, theirs.scores)


def test_a_file_that_holds_no_whole_rows_or_became_shorter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b"x" * 10)
    with pytest.raises(DataError, match="10 bytes"):
        FileRows(tmp_path / "e", dim=3)
    with pytest.raises(DataError, match="absent"):
        FileRows(tmp_path / "absent", dim=3)
    with pytest.raises(ConfigurationError, match="storage='int8'"):
        FileRows(tmp_path / "e", dim=3, storage="int8")  # type: ignore[arg-type]
    (tmp_path / "empty").write_bytes(b"")
    assert len(FileRows(tmp_path / "empty", dim=3)) == 0
    rows = FileRows(written(tmp_path / "e", torch.ones(4, 3)), dim=3)
    (tmp_path / "e").write_bytes(b"\0" * 40)
    with pytest.raises(DataError, match="shorter"):
        rows.chunk(2, 4)
    with pytest.raises(DataError, match="shorter"):
        rows.take(torch.tensor([0, 3]))


@pytest.mark.parametrize("k", [1, 17, 300, 500])
def test_the_top_of_one_row_is_that_of_a_full_sort(k: int) -> None:
    scores = torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(7)).float()
    ids = [f"d{i * 7919 % 10007}" for i in range(300)]
    wanted = sorted(range(300), key=lambda i: (float(scores[i]), ids[i]), reverse=True)[:k]
    assert top_k_of(scores, k, lexicographic_rank(ids)).indices[0].tolist() == wanted


def stream() -> SearchStream:
    found = SearchStream(torch.ones(2, 3), 1, tie_rank=torch.arange(4))
    found.add(torch.ones(3, 3))
    return found


def ranking(rows: int) -> TopK:
    return TopK(torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.long))


GOOD, BROKEN = torch.ones(3, 2), torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: search(GOOD, GOOD, 0), ConfigurationError, "k=0"),
        (lambda: search(GOOD, torch.ones(3, 4), 1), ConfigurationError, "one model"),
        (lambda: search(GOOD, GOOD, 1, similarity="euclid"), ConfigurationError, "similarity='euclid'"),  # type: ignore[arg-type]
        (lambda: search(GOOD, GOOD, 1, tie_rank=torch.arange(2)), ConfigurationError, "tie_rank"),
        (lambda: search(GOOD, GOOD, 1, exclude=torch.arange(2)), ConfigurationError, "exclude"),
        (lambda: search(GOOD, BROKEN, 1), DataError, "1 of 2 passage embeddings"),
        (lambda: search(BROKEN, GOOD, 1), DataError, "1 of 2 query embeddings"),
        (lambda: lexicographic_rank(["b", "a", "b"]), DataError, "'b' occurs twice"),
        (lambda: stream().add(torch.ones(2, 3)), ConfigurationError, "Passages 3 to 5 of width 3"),
        (lambda: stream().add(torch.ones(1, 2)), ConfigurationError, "of width 2"),
        (lambda: merged([ranking(2), ranking(3)], 5, tie_rank=torch.arange(1)), ConfigurationError, "2 rankings"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()


# -- products, and the bounds on their rounding errors ---------------------------------------------


def vectors(count: int, dim: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)) * scale


def worst(passages: Tensor) -> Tensor:
    """Passages all of whose numbers lie half way between two of bfloat16, rounded away from zero."""
    return (passages.bfloat16().float() * (1 + 2.0**-8)).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e8])
@pytest.mark.parametrize("kind", ["random", "half way", "long and short"])
def test_no_product_is_wrong_by_more_than_its_slack(dtype: torch.dtype, scale: float, kind: str) -> None:
    queries, passages = vectors(40, 96, 1), vectors(500, 96, 2, scale)
    if kind == "half way":
        queries, passages = worst(queries), worst(passages)
    if kind == "long and short":
        passages *= torch.logspace(-3, 0, 500)[:, None]
    ready = Products(queries.double(), dtype)
    low, error = ready.passages(passages)
    exact = queries.double() @ passages.double().T
    scores = (ready.queries.double() @ low.double().T).float()
    longest = float(torch.linalg.vector_norm(passages, dim=1).max())
    wrong = (scores.double() - exact).abs()
    assert (wrong <= ready.slack(longest, error)[:, None]).all()
    rounded = torch.mm(ready.queries, low.T)
    assert (ready.at_most(rounded.float()) + ready.slack(longest, error)[:, None] >= exact).all()
    if dtype == torch.bfloat16:
        assert wrong.max() > 0.02 * ready.slack(longest, error).max()  # and it is not a bound that says nothing


def test_a_rounded_score_was_below_the_next_one_and_a_slack_that_is_unknown_is_infinite() -> None:
    ready = Products(torch.tensor([[1.0, 2.0], [1e11, 1.0]]).double(), torch.bfloat16)
    assert ready.slack(1.0, 0.01).isinf().tolist() == [False, True]
    assert ready.slack(1e11, 0.01).isinf().all()
    scores = torch.tensor([0.1, -0.1, 3.0, 0.0])
    above = ready.at_most(scores)
    assert (above > scores).all()
    assert torch.equal(above.bfloat16().float(), above)
    assert ((above - scores) <= scores.abs() * 2.0**-6 + 1e-37).all()
    assert torch.equal(Products(torch.ones(1, 2).double(), torch.float32).at_most(scores), scores)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("common", "few", "pays"), [(100.0, 0, 0), (1e6, 256, 2**62), (30.0, 256, 0)])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_passages_that_products_cannot_tell_apart_are_ranked_as_in_float64(
    similarity: str, common: float, few: int, pays: int, sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its slack the first look, in bfloat16 or for few queries, names wrong passages and believes them."""
    monkeypatch.setattr(search_module, "_FEW_QUERIES", few)
    monkeypatch.setattr(search_module, "_PAYS_LOW", pays)
    monkeypatch.setattr(search_module, "bfloat16_pays", lambda device, queries: True)
    monkeypatch.setattr(SearchStream, "_attempt", lambda self, rows: Attempt(self._low, 60, None))  # type: ignore[arg-type]
    queries = (
        vectors(9, 32, 3).bfloat16().float().repeat_interleave(2, dim=1) * sign
    )  # float64 sums of theirs are exact
    shared = torch.tensor([common, -common]).repeat(32)  # takes bits of every passage, and no part in any score
    passages = shared + vectors(900, 64, 5)
    ready = torch.nn.functional.normalize if similarity == "cosine" else torch.Tensor.double
    table = (ready(queries.double()) @ ready(passages.double()).T).float()
    expected = table.sort(dim=1, descending=True, stable=True)
    top = search(queries, passages, 30, similarity=similarity)  # type: ignore[arg-type]
    assert torch.equal(top.indices, expected.indices[:, :30])
    assert torch.equal(top.scores, expected.values[:, :30])
    monkeypatch.setattr(Products, "slack", lambda self, longest, error: torch.zeros(len(self.queries)))
    assert not torch.equal(search(queries, passages, 30, similarity=similarity).indices, top.indices)  # type: ignore[arg-type]


@pytest.mark.parametrize("low", [False, True])
def test_a_sample_says_how_many_candidates_low_precision_needs(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread-out scores are searched in bfloat16, crowded ones in float32, with the same answer."""
    monkeypatch.setattr(search_module, "_FEW_QUERIES", 0)
    monkeypatch.setattr(search_module, "bfloat16_pays", lambda device, queries: low)
    original, used = SearchStream._narrow, []

    def watched(self: SearchStream, rows: object, chosen: Tensor, attempt: Attempt) -> Tensor:
        used.append((attempt.products.dtype, len(chosen)))
        return original(self, rows, chosen, attempt)  # type: ignore[arg-type]

    monkeypatch.setattr(SearchStream, "_narrow", watched)
    queries, spread = vectors(30, 32, 6), vectors(9000, 32, 7)
    crowded = vectors(1, 32, 8) * 30 + spread * 1e-3
    for passages, first in ((spread, torch.bfloat16 if low else torch.float32), (crowded, torch.float32)):
        used.clear()
        top = search(queries, passages, 20)
        table = (queries.double() @ passages.double().T).float()
        assert torch.equal(top.indices, table.sort(dim=1, descending=True, stable=True).indices[:, :20])
        assert used[0] == (first, 30)


def test_bfloat16_is_used_on_processors_that_gain_by_it_and_sum_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = products_module._probe.__wrapped__
    original = torch.mm
    seconds = {torch.bfloat16: 1.0, torch.float32: 3.0}
    monkeypatch.setattr(products_module, "_seconds", lambda left, right: seconds[left.dtype])
    assert probe()
    seconds[torch.float32] = 1.1
    assert not probe()
    seconds[torch.float32] = 3.0

    def careless(left: Tensor, right: Tensor) -> Tensor:
        if left.dtype != torch.bfloat16:
            return original(left, right)
        total = torch.zeros(len(left), right.shape[1], dtype=torch.bfloat16)
        for part in range(0, left.shape[1], 16):
            total += original(left[:, part : part + 16], right[part : part + 16])
        return total

    monkeypatch.setattr(torch.Tensor, "__matmul__", careless)
    assert not probe()
    assert not bfloat16_pays(torch.device("meta"), 10_000)
    monkeypatch.setattr(products_module, "_probe", lambda: True)
    assert [bfloat16_pays(torch.device("cpu"), queries) for queries in (10, 10_000)] == [False, True]


@pytest.mark.parametrize("floors", [[0.5, 0.25, 3.0], [0.5, -0.25, 0.0], [0.0, 0.0, 0.0], [float("-inf")] * 3])
def test_bfloat16_scores_are_compared_as_numbers_are(floors: list[float]) -> None:
    scores = torch.tensor([0.0, -0.0, 0.25, -0.25, 0.5, -0.5, 3.0, -3.0, 1e-40, float("-inf")]).bfloat16().repeat(3, 1)
    floor = torch.tensor(floors).bfloat16()
    found = np.greater_equal(*topk_module._comparable(scores, floor))
    assert found.tolist() == (scores.float() >= floor.float()[:, None]).tolist()


# -- BM25 ------------------------------------------------------------------------------------------


PASSAGES = [
    "flood insurance covers water damage",
    "water water everywhere",
    "life insurance after retirement",
    "nothing in common",
    "flood insurance covers water damage",
]


def test_scores_are_those_of_the_formula() -> None:
    """Lucene's BM25, by hand: idf = ln(1 + (N - df + 0.5) / (df + 0.5)), no (k1 + 1) factor."""
    top = BM25(PASSAGES, stemmer=None).search(["water insurance"], k=5)
    tokens = [[word for word in text.split() if word != "in"] for text in PASSAGES]  # "in" is a stop word
    average = sum(map(len, tokens)) / 5

    def score(row: int) -> float:
        total = 0.0
        for word in ("water", "insurance"):
            frequency = tokens[row].count(word)
            containing = sum(word in words for words in tokens)
            idf = math.log(1 + (5 - containing + 0.5) / (containing + 0.5))
            total += idf * frequency / (frequency + 0.9 * (1 - 0.4 + 0.4 * len(tokens[row]) / average))
        return total

    for value, row in zip(top.scores[0].tolist(), top.indices[0].tolist(), strict=True):
        if row != MISSING:
            assert value == pytest.approx(score(row), rel=1e-5)
    assert sorted(top.indices[0].tolist()) == [MISSING, 0, 1, 2, 4]


def test_equal_passages_tie_by_id_and_one_that_shares_no_word_is_not_returned() -> None:
    assert BM25(PASSAGES, ["a", "b", "c", "d", "e"]).search(["flood damage"], k=2).indices.tolist() == [[4, 0]]
    assert BM25(PASSAGES, ["e", "b", "c", "d", "a"]).search(["flood damage"], k=2).indices.tolist() == [[0, 4]]
    assert BM25(PASSAGES).search(["flood damage"], k=1).indices.tolist() == [[0]]
    top = BM25(PASSAGES).search(["retirement", "unheard-of", "", "the of and"], k=3)
    assert top.indices.tolist() == [[2, MISSING, MISSING]] + [[MISSING] * 3] * 3
    assert torch.isneginf(top.scores[1:]).all()


def test_scores_that_are_asked_for_are_those_of_the_ranking_whatever_its_depth() -> None:
    index = BM25(PASSAGES)
    deep = index.search(["water insurance"], k=5)
    by_place = dict(zip(deep.indices[0].tolist(), deep.scores[0].tolist(), strict=True))
    top, scored = index.search_and_score(["water insurance", "zzz", "life"], k=1, wanted=[[4, 1, 3], [0], []])
    assert torch.equal(top.indices, index.search(["water insurance", "zzz", "life"], k=1).indices)
    assert scored[0].tolist() == [by_place[4], by_place[1], 0.0]
    assert scored[1].tolist() == [0.0] and scored[2].tolist() == []


def test_stop_words_and_stems_are_settings() -> None:
    def hits(query: str, **settings: Any) -> int:
        return int((BM25(PASSAGES, **settings).search([query], k=5).indices != MISSING).sum())

    assert (hits("in"), hits("in", stopwords=None)) == (0, 1)
    assert (hits("floods"), hits("floods", stemmer=None)) == (2, 0)


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: BM25Settings(stopwords="xx"), ConfigurationError, r"bm25\.stopwords"),
        (lambda: BM25Settings(stemmer="klingon"), ConfigurationError, r"bm25\.stemmer"),
        (lambda: BM25Settings(b=2.0), ConfigurationError, r"bm25\.b"),
        (lambda: BM25(PASSAGES).search(["x"], k=0), ConfigurationError, "k=0"),
        (lambda: BM25(["", "the"]), DataError, "None of 2 passages"),
        (lambda: BM25(PASSAGES, ["a"]), DataError, "5 passages, but 1 ids"),
    ],
)
def test_settings_of_bm25_out_of_range_are_refused_by_name(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()
