from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval import scores as scores_module
from lit_dpret.retrieval import search as search_module
from lit_dpret.retrieval.rows import FileRows, TensorRows
from lit_dpret.retrieval.search import search


def written(path: Path, embeddings: torch.Tensor) -> Path:
    path.write_bytes(embeddings.contiguous().view(torch.uint8).numpy().tobytes())
    return path


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_a_file_and_a_tensor_of_the_same_numbers_are_searched_alike(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "_CHUNK", 150)
    monkeypatch.setattr(search_module, "PASSAGE_CHUNK", 64)
    generator = torch.Generator().manual_seed(0)
    passages = torch.randn(700, 12, generator=generator).to(getattr(torch, storage))
    queries = torch.randn(9, 12, generator=generator)
    rows = FileRows(written(tmp_path / "e", passages), dim=12, storage=storage)  # type: ignore[arg-type]
    assert len(rows) == 700 and rows.dim == 12
    assert torch.equal(rows.chunk(690, 800), passages[690:])
    places = torch.tensor([3, 699, 3])
    assert torch.equal(rows.take(places), TensorRows(passages).take(places))
    assert torch.equal(rows.take(places), passages[places])
    for similarity in ("dot", "cosine"):
        ours = search(queries, rows, 20, similarity=similarity)  # type: ignore[arg-type]
        theirs = search(queries, passages, 20, similarity=similarity)  # type: ignore[arg-type]
        assert torch.equal(ours.indices, theirs.indices) and torch.equal(ours.scores, theirs.scores)


def test_a_file_that_holds_no_whole_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b"x" * 10)
    with pytest.raises(DataError, match="10 bytes, which is not a whole number of float32 rows of 3"):
        FileRows(tmp_path / "e", dim=3)
    with pytest.raises(DataError, match="cannot be read"):
        FileRows(tmp_path / "absent", dim=3)
    with pytest.raises(ConfigurationError, match="storage='int8'"):
        FileRows(tmp_path / "e", dim=3, storage="int8")  # type: ignore[arg-type]
    (tmp_path / "empty").write_bytes(b"")
    assert len(FileRows(tmp_path / "empty", dim=3)) == 0


def test_a_file_that_became_shorter_is_refused_by_chunk_and_by_row(tmp_path: Path) -> None:
    rows = FileRows(written(tmp_path / "e", torch.ones(4, 3)), dim=3)
    (tmp_path / "e").write_bytes(b"\0" * 40)
    with pytest.raises(DataError, match="shorter"):
        rows.chunk(2, 4)
    with pytest.raises(DataError, match="shorter"):
        rows.take(torch.tensor([0, 3]))
