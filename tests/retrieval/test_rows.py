"""What search stands on: rows in memory and in files, the top of one row, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval import scores as scores_module
from lit_dpret.retrieval import search as search_module
from lit_dpret.retrieval.rows import FileRows, TensorRows
from lit_dpret.retrieval.search import SearchStream, TopK, lexicographic_rank, merged, search, top_k_of


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
