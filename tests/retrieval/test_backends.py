from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval import backends
from lit_dpret.retrieval.backends import Faiss, check_search, make_search, search_with
from lit_dpret.retrieval.rows import TensorRows
from lit_dpret.retrieval.search import MISSING, lexicographic_rank, search

NEEDS_FAISS = pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="needs the [faiss-cpu] extra")
NEEDS_SCANN = pytest.mark.skipif(importlib.util.find_spec("scann") is None, reason="needs the [scann] extra")


def random_case(passages: int = 3000, dim: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(passages)
    draw = torch.randn(passages + 40, dim, generator=generator)
    return draw[:40], draw[40:], lexicographic_rank([f"p{i}" for i in range(passages)])


def agree(one: Any, other: Any) -> None:
    """The same ranking, except where scores differ by less than 1e-6."""
    assert (one.scores - other.scores).abs().max() < 1e-6
    assert (one.indices != other.indices).sum() <= 2


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize(
    "name", [pytest.param("faiss:Flat", marks=NEEDS_FAISS), pytest.param("scann", marks=NEEDS_SCANN)]
)
def test_brute_force_of_any_library_gives_our_ranking_with_ties_by_id(name: str, similarity: Any) -> None:
    queries, passages, rank = random_case()
    ours = search(queries, passages, 50, tie_rank=rank, similarity=similarity)
    agree(make_search(name)(queries, passages, 50, tie_rank=rank, similarity=similarity), ours)
    queries, passages, rank = queries[:9, :4].round().clamp(-1, 1), passages[:60, :4].round().clamp(-1, 1), rank[:60]
    rank = rank.argsort().argsort()
    ours = search(queries, passages, 20, tie_rank=rank)
    theirs = make_search(name)(queries, passages, 20, tie_rank=rank)
    assert torch.equal(ours.indices, theirs.indices)
    assert torch.equal(ours.scores, theirs.scores)
    top = make_search(name)(torch.ones(2, 3), torch.ones(2, 3), 4)
    assert top.indices.tolist() == [[0, 1, MISSING, MISSING]] * 2
    assert top.scores[:, 2:].eq(float("-inf")).all()
    assert make_search(name)(torch.ones(0, 3), torch.ones(2, 3), 4).indices.shape == (0, 4)


@NEEDS_FAISS
@pytest.mark.parametrize("factory", ["IVF16,Flat", "HNSW16", "SQ8", "IVF16,SQ8"])
def test_an_approximate_index_gives_a_part_of_the_ranking_with_true_scores(factory: str) -> None:
    queries, passages, rank = random_case()
    full = search(queries, passages, len(passages), tie_rank=rank)
    top = make_search(f"faiss:{factory}")(queries, passages, 10, tie_rank=rank)
    place = full.indices.argsort(dim=1)
    found = top.indices != MISSING
    assert found.sum() > 100
    true = full.scores.gather(1, place.gather(1, top.indices.clamp(min=0)))
    assert torch.equal(top.scores[found], true[found])
    order = place.gather(1, top.indices.clamp(min=0)).masked_fill(~found, len(passages))
    assert (order.diff(dim=1) >= 0).all(), "the order is that of the exact search"


@NEEDS_FAISS
def test_an_index_that_was_written_and_read_gives_the_same_ranking(tmp_path: Path) -> None:
    queries, passages, rank = random_case(800)
    exact = search(queries, passages, 7, tie_rank=rank)
    for factory, whole in (("IVF8,Flat", False), ("IVF8,Flat;nprobe=8", True), ("HNSW8;efSearch=800", True)):
        built = Faiss.build(TensorRows(passages), factory)
        built.write(tmp_path / "index")
        read = Faiss.read(tmp_path / "index")
        one, other = (search_with(index, queries, passages, 7, tie_rank=rank) for index in (built, read))
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.indices, exact.indices) == whole, "the file holds the parameters of the search"
    with pytest.raises(DataError, match="over another corpus"):
        search_with(read, queries, passages[:100], 7)
    (tmp_path / "torn").write_bytes((tmp_path / "index").read_bytes()[:200])
    with pytest.raises(DataError, match="index that faiss can read"):
        Faiss.read(tmp_path / "torn")


@NEEDS_FAISS
def test_codes_propose_more_than_is_wanted_because_their_own_order_is_rough() -> None:
    queries, passages, rank = random_case()
    index, flat = (Faiss.build(TensorRows(passages), factory) for factory in ("PQ6", "Flat"))
    assert (flat.depth(100), index.depth(100)) == (165, 464)
    exact = search(queries, passages, 100, tie_rank=rank).indices

    def recall() -> float:
        found = search_with(index, queries, passages, 100, tie_rank=rank).indices
        return sum(len({*a} & {*b}) for a, b in zip(found.tolist(), exact.tolist(), strict=True)) / exact.numel()

    rescored = recall()
    index.depth = lambda k: k  # type: ignore[method-assign]
    assert rescored > recall() + 0.2


@NEEDS_FAISS
def test_faiss_and_torch_share_a_process_with_several_threads() -> None:
    """Each brings an OpenMP of its own; both are asked to use two threads, in turn."""
    queries, passages, rank = random_case(12_000)
    faiss, before = backends.load_faiss(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        faiss.omp_set_num_threads(2)
        for _ in range(2):
            ours = search(queries, passages, 50, tie_rank=rank)
            agree(make_search("faiss:Flat")(queries, passages, 50, tie_rank=rank), ours)
    finally:
        torch.set_num_threads(before)
        faiss.omp_set_num_threads(before)


ROWS = TensorRows(torch.randn(20, 6, generator=torch.Generator().manual_seed(0)))


@NEEDS_FAISS
@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: Faiss.build(ROWS, "Nonsense"), ConfigurationError, "faiss:Nonsense"),
        (lambda: Faiss.build(ROWS, "Flat;nprobe=4"), ConfigurationError, "nprobe=4 on Flat"),
        (lambda: Faiss.build(ROWS, "IVF4,Flat;nprobe"), ConfigurationError, "nprobe on IVF4,Flat"),
        (lambda: Faiss.build(ROWS, "IVF64,Flat"), DataError, "'IVF64,Flat' of 20 passages"),
        (lambda: Faiss.build(TensorRows(torch.empty(0, 6)), "Flat"), DataError, "no passages"),
        (lambda: Faiss.build(ROWS, "Flat", device="cuda"), ConfigurationError, r"\[faiss-gpu\]"),
    ],
)
def test_what_faiss_cannot_build_is_refused_by_name(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()


def test_a_search_that_does_not_exist_or_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class GpuIndexFlat:
        pass

    with pytest.raises(ConfigurationError, match="at most 2048 passages per query, not 3000"):
        Faiss(GpuIndexFlat()).propose(torch.ones(1, 2).numpy(), 3000)
    check_search("exact")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, told in (("annoy", "search='annoy'"), ("scann", r"lit-dpret\[scann\]")):
        with pytest.raises(ConfigurationError, match=told):
            check_search(name)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "faiss", None)
        with pytest.raises(ConfigurationError, match=r"lit-dpret\[faiss-cpu\]"):
            check_search("faiss:Flat")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.15")
    with pytest.raises(ConfigurationError, match="faiss-cpu and faiss-gpu"):
        check_search("faiss:Flat")
