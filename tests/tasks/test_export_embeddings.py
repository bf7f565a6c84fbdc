"""Shards of embeddings hold what the folder holds, whole or not at all, and private ones stay where they are."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from cards import Run, make_plan
from fsspec.implementations.memory import MemoryFileSystem
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import no_parts

from lit_dpret.cards.card import CARD_NAME, read_card, subject_of, write_card
from lit_dpret.cards.file import check_artefact
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError, ResumeError, StorageError
from lit_dpret.files import file_sha256
from lit_dpret.tasks import export_embeddings
from lit_dpret.tasks.export_embeddings import MANIFEST, SHARDS, ExportEmbeddings
from lit_dpret.tasks.index_folder import Encoding, IndexFolder, encode_folder

TEXTS = {f"p{i}": f"größer claim {i} {'x' * (i % 7)}\n\u2028end" for i in range(47)}
NAMES = [f"part-{i:05d}-of-00005.parquet" for i in range(5)]


@pytest.fixture
def embeddings(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "embeddings", card: bool = False, **how: Any) -> Path:
        folder = tmp_path / f"encoder_{card}"
        if not folder.exists():
            encoder = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=8))
            save_sentence_transformer(folder, encoder, encoder)
            if card:
                files = [path for path in folder.rglob("*") if path.is_file()]
                run = Run(tmp_path / "trained", make_plan()).train()
                write_card(run.card(subject=subject_of("weights", "encoder", files, root=folder)), folder)
        return encode_folder(folder, TEXTS, tmp_path / name, Encoding(**how)).folder

    return make


def export(tmp_path: Path, given: Path, **settings: Any) -> dict[str, float]:
    return ExportEmbeddings(**{"embeddings": given, "rows_per_shard": 10} | settings).run(no_parts(tmp_path / "run"))


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("at_once", [8192, 3])
def test_what_is_read_back_is_what_the_folder_holds_bit_by_bit(
    storage: Any, at_once: int, embeddings: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_embeddings, "_AT_ONCE", at_once)
    given = embeddings(storage=storage)
    assert export(tmp_path, given) == {"texts": 47.0, "shards": 5.0}
    out = tmp_path / "run" / "export"
    assert sorted(path.name for path in (out / SHARDS).iterdir()) == NAMES
    assert [pq.read_metadata(out / SHARDS / name).num_rows for name in NAMES] == [10, 10, 10, 10, 7]
    table = ds.dataset(out / SHARDS).to_table()
    rows = IndexFolder(given).rows
    assert table.schema.types == [pa.string(), pa.string(), pa.list_(pa.float32(), rows.dim)]
    assert table.column_names == ["id", "text", "embedding"]
    assert dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)) == TEXTS
    assert table["id"].to_pylist() == list(TEXTS)
    read = np.concatenate([chunk.flatten().to_numpy() for chunk in table["embedding"].chunks]).reshape(-1, rows.dim)
    assert torch.equal(torch.from_numpy(read).view(torch.int32), rows.chunk(0, 47).float().view(torch.int32))
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["files"] == {f"{SHARDS}/{name}": file_sha256(out / SHARDS / name) for name in NAMES}
    assert (manifest["count"], manifest["storage"], manifest["card"]) == (47, "float32", None)


@pytest.mark.parametrize("out", ["near", "memory://b/far"])
def test_a_killed_export_continues_and_writes_no_finished_shard_again(
    out: str, embeddings: Callable[..., Path], tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, target = embeddings(), out if "://" in out else str(tmp_path / out)
    export(tmp_path, given, out=str(tmp_path / "whole"))
    publish, published = export_embeddings._Place.publish, list[str]()

    def killed(self: Any, name: str) -> str:
        if len(published) == 2:
            raise KeyboardInterrupt
        published.append(name)
        return publish(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(export_embeddings._Place, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            export(tmp_path, given, out=target)
    fs, root = fsspec.core.url_to_fs(target)
    assert not fs.exists(f"{root}/{MANIFEST}")
    assert published == [path.rpartition("/")[2] for path in sorted(fs.glob(f"{root}/{SHARDS}/part-*"))] == NAMES[:2]
    with monkeypatch.context() as patch:
        patch.setattr(
            export_embeddings._Place, "publish", lambda self, name: published.append(name) or publish(self, name)
        )
        export(tmp_path, given, out=target)
    assert published == NAMES
    for name in NAMES:
        assert fs.cat_file(f"{root}/{SHARDS}/{name}") == (tmp_path / "whole" / SHARDS / name).read_bytes()
    found, whole = (
        json.loads(fs.cat_file(f"{root}/{MANIFEST}")),
        json.loads((tmp_path / "whole" / MANIFEST).read_text()),
    )
    assert found["files"] == whole["files"] and str(tmp_path) not in json.dumps(found)
    assert not [path for path in fs.find(root) if path.endswith(".tmp")]


def test_a_shard_at_a_url_never_appears_in_part(
    embeddings: Callable[..., Path], tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: MemoryFileSystem, here: str, there: str, **_: Any) -> None:
        self.pipe_file(there, Path(here).read_bytes()[:100])
        raise ConnectionResetError("connection reset")

    given = embeddings()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", half)
        with pytest.raises(StorageError, match=r"task\.out=memory://b/far"):
            export(tmp_path, given, out="memory://b/far")
    assert bucket.glob(f"/b/far/{SHARDS}/part-*") == []
    export(tmp_path, given, out="memory://b/far")
    assert ds.dataset(f"/b/far/{SHARDS}", filesystem=bucket).count_rows() == 47


def test_shards_of_another_export_are_refused(embeddings: Callable[..., Path], tmp_path: Path) -> None:
    export(tmp_path, embeddings())
    with pytest.raises(ResumeError, match=r"task\.rows_per_shard"):
        export(tmp_path, embeddings(), rows_per_shard=20)
    with pytest.raises(ResumeError, match=r"task\.out"):
        export(tmp_path, embeddings("half", storage="bfloat16"))
    given = embeddings("damaged")
    (given / "embeddings.bin").write_bytes(bytes((given / "embeddings.bin").stat().st_size))
    with pytest.raises(DataError, match="SHA-256"):
        export(tmp_path, given)


def test_private_embeddings_need_a_declaration_stay_with_their_owner_and_go_to_no_url(
    embeddings: Callable[..., Path], tmp_path: Path, bucket: MemoryFileSystem
) -> None:
    given = embeddings(side="query", queries="private")
    with pytest.raises(ConfigurationError, match=r"task\.private=true"):
        export(tmp_path, given)
    for url in ("memory://b/far", (tmp_path / "near").as_uri()):
        with pytest.raises(ConfigurationError, match=r"task\.out=.* is a URL.*private"):
            export(tmp_path, given, private=True, out=url)
    assert not bucket.find("/") and not (tmp_path / "near").exists()
    export(tmp_path, given, private=True)
    out = tmp_path / "run" / "export"
    for path in (out, *out.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert json.loads((out / MANIFEST).read_text())["private"] and not (out / CARD_NAME).exists()
    with pytest.raises(ResumeError, match=r"task\.out"):  # the same bytes, declared public, would stay private
        export(tmp_path, embeddings("public", side="query", queries="public"))


@pytest.mark.parametrize("out", ["near", "memory://b/far"])
def test_the_claim_of_the_encoder_travels_with_the_shards(
    out: str, embeddings: Callable[..., Path], tmp_path: Path, bucket: MemoryFileSystem
) -> None:
    given, target = embeddings(card=True), out if "://" in out else str(tmp_path / out)
    export(tmp_path, given, out=target)
    fs, root = fsspec.core.url_to_fs(target)
    fs.get(f"{root}/", str(tmp_path / "got"), recursive=True)
    card, parent = read_card(tmp_path / "got"), read_card(given)
    assert card["claim"]["epsilon"] == parent["claim"]["epsilon"] is not None
    assert sorted(card["subject"]["sha256"]) == [f"{SHARDS}/{name}" for name in NAMES]
    (tmp_path / "got" / MANIFEST).unlink()  # describes the card, not the other way round
    check_artefact(tmp_path / "got", card)
    with pytest.raises(ConfigurationError, match=r"task\.out"):
        export(tmp_path, given, out=str(given))


def test_no_other_export_comes_beside_a_card_whose_shards_are_gone(
    embeddings: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(tmp_path, embeddings("of a run", card=True), out=str(out))
    for shard in (out / SHARDS).iterdir():
        shard.unlink()
    with pytest.raises(ConfigurationError, match=r"task\.out="):
        export(tmp_path, embeddings("public"), out=str(out))
