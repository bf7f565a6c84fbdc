"""Ranks share out the texts of a corpus: the folder is that of one process, whoever embedded what and whoever died."""

from __future__ import annotations

import json
from pathlib import Path

import job_ranks
import pytest
from tiny_models import tiny_bert, tiny_tokenizer

from lit_dpret.encoders import Contract, TextEncoder, embedding_cache
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.tasks.index_folder import Encoding, IndexFolder, encode_folder

WORDS = ["how", "to", "file", "a", "claim", "flood", "insurance", "cover", "my", "house"]
TEXTS = {
    f"p{i}{j}": " ".join([one, two] + ["house"] * (i % 4)) for i, one in enumerate(WORDS) for j, two in enumerate(WORDS)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a job: an encoder and texts."""
    encoder = TextEncoder(tiny_bert(0), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=8))
    save_sentence_transformer(tmp_path / "encoder", encoder, encoder)
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS), encoding="utf-8")
    return tmp_path


@pytest.fixture
def whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The folder of one process."""
    monkeypatch.setattr(embedding_cache, "_BATCHES_PER_GROUP", 1)
    encode_folder(folder / "encoder", TEXTS, folder / "whole", Encoding(batch_size=8))
    return content(folder / "whole")


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_two_ranks_write_the_embeddings_of_one_process(whole: dict[str, bytes], folder: Path) -> None:
    statuses, said = job_ranks.run("encode", folder, 2)
    assert statuses == [0, 0], said
    assert content(folder / "set") == whole
    IndexFolder(folder / "set", verify=True)


@pytest.mark.slow
@pytest.mark.parametrize("again", [1, 3])
def test_after_kill_9_of_a_rank_another_number_goes_on(whole: dict[str, bytes], folder: Path, again: int) -> None:
    statuses, said = job_ranks.run("encode", folder, 2, kill=(1, 1))
    assert statuses == [2, -9] and "Another process of this job ended" in said, said
    assert not (folder / "set" / "index.json").exists()
    statuses, said = job_ranks.run("encode", folder, again)
    assert statuses == [0] * again, said
    assert content(folder / "set") == whole


@pytest.mark.slow
def test_kill_9_of_the_first_rank_leaves_the_other_s_to_the_next_job(whole: dict[str, bytes], folder: Path) -> None:
    statuses, said = job_ranks.run("encode", folder, 2, kill=(0, 2))
    assert statuses == [-9, 2] and "WorkerError" in said, said
    left = len(list((folder / "set" / "embeddings.bin.parts").glob("*.part")))
    assert left >= 2, "parts of the rank that lived"
    statuses, said = job_ranks.run("encode", folder, 2)
    assert statuses == [0, 0], said
    assert content(folder / "set") == whole


def test_a_part_that_is_torn_or_of_another_matrix_is_not_believed(
    whole: dict[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = folder / "set" / "embeddings.bin.parts"
    parts.mkdir(parents=True)
    rows = whole["embeddings.bin"][: 8 * 16 * 4]
    (parts / f"0-0-{'0' * 16}-{embedding_cache.hashlib.sha256(rows).hexdigest()}.part").write_bytes(rows)
    monkeypatch.setattr(embedding_cache, "_BATCHES_PER_GROUP", 1)
    seen: list[int] = []
    embed = embedding_cache.WindowGroups.embed
    monkeypatch.setattr(
        embedding_cache.WindowGroups, "embed", lambda self, start: seen.append(start) or embed(self, start)
    )
    encode_folder(folder / "encoder", TEXTS, folder / "set", Encoding(batch_size=8))
    assert content(folder / "set") == whole and 0 in seen and not parts.exists()
