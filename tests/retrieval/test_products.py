from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_dpret.retrieval import products as products_module
from lit_dpret.retrieval import search as search_module
from lit_dpret.retrieval.products import Attempt, Products, bfloat16_pays
from lit_dpret.retrieval.search import SearchStream, search


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
