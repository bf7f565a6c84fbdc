"""From a corpus to a folder that answers: its bytes, its claim, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import Run, make_plan
from tiny_models import tiny_bert, tiny_t5, tiny_tokenizer

from lit_dpret.cards.card import card_sha256, read_card, subject_of, write_card
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.embedding_cache import encode_to_file
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.retrieval.search import lexicographic_rank, search
from lit_dpret.tasks import index_folder as build
from lit_dpret.tasks.index_folder import Encoding, IndexFolder, encode_folder, index_folder

WORDS = ["how", "to", "file", "a", "claim", "flood", "insurance", "cover", "my", "house"]
PASSAGES = {f"p{i}{j}": f"{one} {two} house" for i, one in enumerate(WORDS) for j, two in enumerate(WORDS)}
CONTRACT = Contract(query_max_length=8, passage_max_length=8)


def saved(folder: Path, seed: int = 0, backbone: Any = None, **tokens: Any) -> Path:
    encoder = TextEncoder(backbone or tiny_bert(seed), tiny_tokenizer(**tokens), CONTRACT)
    save_sentence_transformer(folder, encoder, encoder)
    return folder


def carded(folder: Path, tmp_path: Path) -> Path:
    """An encoder's folder with the card of a private run."""
    saved(folder)
    run = Run(tmp_path / "run", make_plan()).train()
    files = [path for path in folder.rglob("*") if path.is_file()]
    write_card(run.card(subject=subject_of("weights", "encoder", files, root=folder)), folder)
    return folder


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return saved(tmp_path / "encoder")


def test_a_folder_answers_as_a_search_of_the_same_embeddings(encoder: Path, tmp_path: Path) -> None:
    made = encode_folder(encoder, PASSAGES, tmp_path / "index")
    query = made.query_encoder().encode(["flood insurance"], "query")
    top = IndexFolder(tmp_path / "index", verify=True).search(query, 7)
    passages = made.query_encoder().encode(list(PASSAGES.values()), "passage")
    expected = search(query, passages, 7, tie_rank=made.tie_rank)
    assert torch.equal(top.indices, expected.indices) and torch.equal(top.scores, expected.scores)
    assert ids_of(made) == list(PASSAGES)
    assert torch.equal(made.tie_rank, lexicographic_rank(list(PASSAGES)))
    for place in (0, 41, 99):
        assert tuple(made.record(place).values()) == list(PASSAGES.items())[place]
    assert not made.manifest.private and made.manifest.card is None


def ids_of(folder: IndexFolder) -> list[str]:
    return [record["_id"] for record in folder.records()]


@pytest.mark.parametrize(("small", "keep", "after"), [(2**20, None, 1), (0, None, 2), (2**20, 6399, 4), (0, 6400, 2)])
def test_embeddings_stay_in_memory_when_they_are_small_or_asked_again_and_fit(
    small: int, keep: int | None, after: int, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 embeddings of 64 bytes. They are searched as the file until the search number ``after``, or throughout."""
    monkeypatch.setattr(build, "_SMALL", small)
    made, searched = encode_folder(encoder, PASSAGES, tmp_path / "index"), []
    query = made.query_encoder().encode(["flood insurance"], "query")

    def watched(queries: Any, rows: Any, *arguments: Any, **settings: Any) -> Any:
        searched.append(type(rows).__name__)
        return search(queries, rows, *arguments, **settings)

    monkeypatch.setattr(build, "search", watched)
    folder = IndexFolder(made.folder, keep=keep)
    first, second, third = (folder.search(query, 7) for _ in range(3))
    assert searched == ["FileRows"] * (after - 1) + ["TensorRows"] * (4 - after)
    assert torch.equal(first.indices, second.indices) and torch.equal(first.scores, third.scores)


def test_encoding_again_computes_nothing_new(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()}

    encode_folder(encoder, PASSAGES, tmp_path / "index")
    before = read()
    with monkeypatch.context() as patch:
        patch.setattr(build, "encode_to_file", lambda *_, **__: pytest.fail("computed again"))
        encode_folder(encoder, PASSAGES, tmp_path / "index")
    assert read() == before
    with pytest.raises(ResumeError, match="computed with another encoder"):
        encode_folder(saved(tmp_path / "other", seed=1), PASSAGES, tmp_path / "index")
    assert read() == before
    (tmp_path / "index" / "embeddings.bin").write_bytes(bytes(100 * 16 * 4))
    encode_folder(encoder, PASSAGES, tmp_path / "index")
    assert read() == before


def test_a_folder_of_another_encoder_is_refused(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(encoding: Any, *arguments: Any, **settings: Any) -> None:
        embed, left = encoding.embed, [2]

        def counted(ids: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return embed(ids)

        encoding.embed = counted
        encode_to_file(encoding, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(build, "encode_to_file", stopped)
        with pytest.raises(KeyboardInterrupt):
            encode_folder(encoder, PASSAGES, tmp_path / "index", Encoding(batch_size=2))
    with pytest.raises(DataError, match=r"has no index\.json"):
        IndexFolder(tmp_path / "index")
    with pytest.raises(ResumeError, match="begun with another encoder"):
        encode_folder(saved(tmp_path / "other", seed=1), PASSAGES, tmp_path / "index", Encoding(batch_size=2))
    encode_folder(encoder, PASSAGES, tmp_path / "index", Encoding(batch_size=2))
    encode_folder(encoder, PASSAGES, tmp_path / "whole", Encoding(batch_size=2))
    for name in ("embeddings.bin", "texts.jsonl", "texts.offsets", "texts.rank"):
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_half_the_storage_is_ranked_by_its_own_numbers_in_float32(encoder: Path, tmp_path: Path) -> None:
    half = encode_folder(encoder, PASSAGES, tmp_path / "half", Encoding(storage="bfloat16", dtype="bfloat16"))
    assert (tmp_path / "half" / "embeddings.bin").stat().st_size == 100 * 16 * 2
    query = half.query_encoder().encode(["my house"], "query")
    expected = search(query, half.rows.chunk(0, 100).float(), 9, tie_rank=half.tie_rank)
    assert torch.equal(half.search(query, 9).indices, expected.indices)


def test_the_claim_of_an_encoder_travels_to_the_embeddings_and_on_to_the_index(tmp_path: Path) -> None:
    encoder = carded(tmp_path / "encoder", tmp_path)
    encode_folder(encoder, PASSAGES, tmp_path / "embeddings")
    made = index_folder(tmp_path / "embeddings", tmp_path / "index")
    first, second, third = (read_card(tmp_path / name) for name in ("encoder", "embeddings", "index"))
    assert third["claim"]["epsilon"] == second["claim"]["epsilon"] == first["claim"]["epsilon"] is not None
    assert third["subject"]["artifact_type"] == "index"
    assert [parent["sha256"] for parent in third["parents"]] == [
        card_sha256(tmp_path / "embeddings"),
        card_sha256(encoder),
    ]
    assert made.manifest.card == card_sha256(tmp_path / "index")
    (encoder / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match="adapter_config"):
        encode_folder(encoder, PASSAGES, tmp_path / "again")
    (encoder / "adapter_config.json").unlink()
    (encoder / "config.json").write_text((encoder / "config.json").read_text() + " ")
    with pytest.raises(DataError, match=r"config\.json"):
        encode_folder(encoder, PASSAGES, tmp_path / "again")


def test_private_queries_are_refused_until_declared_and_then_kept_to_their_owner(tmp_path: Path) -> None:
    encoder = carded(tmp_path / "encoder", tmp_path)
    queries = {"q1": "flood insurance", "q2": "my house"}
    for declared in (None, "yes"):
        with pytest.raises(ConfigurationError, match=r"task\.queries"):
            encode_folder(encoder, queries, tmp_path / "refused", Encoding(side="query", queries=declared))  # type: ignore[arg-type]
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ConfigurationError, match=r"task.side=passage"):
        encode_folder(encoder, PASSAGES, tmp_path / "refused", Encoding(queries="private"))
    made = encode_folder(encoder, queries, tmp_path / "private", Encoding(side="query", queries="private"))
    assert made.manifest.private and made.manifest.card is None
    assert not (tmp_path / "private" / "privacy_card.json").exists()
    for name in ("embeddings.bin", "texts.jsonl", "texts.offsets", "texts.rank"):
        assert stat.S_IMODE((tmp_path / "private" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700
    with pytest.raises(ConfigurationError, match=r"task.private=true"):
        index_folder(tmp_path / "private", tmp_path / "index")
    (tmp_path / "index").mkdir(mode=0o755, exist_ok=True)
    assert index_folder(tmp_path / "private", tmp_path / "index", private=True).manifest.private
    assert (tmp_path / "index").stat().st_mode & 0o077 == 0, "also where the folder was there"
    with pytest.raises(ConfigurationError, match="only passages can be searched"):
        made.query_encoder()
    public = encode_folder(encoder, queries, tmp_path / "public", Encoding(side="query", queries="public"))
    assert public.manifest.card is not None and not public.manifest.private


@pytest.mark.parametrize("first", ["public", "private"])
def test_a_declaration_that_is_put_right_leaves_no_card_of_the_former_one(first: str, tmp_path: Path) -> None:
    encoder = carded(tmp_path / "encoder", tmp_path)
    queries, second = {"q1": "flood insurance"}, {"public": "private", "private": "public"}[first]
    made = encode_folder(encoder, queries, tmp_path / "queries", Encoding(side="query", queries=first))
    with pytest.raises(ResumeError, match="private"):
        encode_folder(encoder, queries, tmp_path / "queries", Encoding(side="query", queries=second))
    other = encode_folder(encoder, queries, tmp_path / "others", Encoding(side="query", queries=second))
    index_folder(made.folder, tmp_path / "index", private=True)
    with pytest.raises(ResumeError, match="Choose another folder"):
        index_folder(other.folder, tmp_path / "index", private=True)
    assert (tmp_path / "index" / "privacy_card.json").exists() == (first == "public")


def test_a_query_is_embedded_by_the_encoder_of_its_passages_or_not_at_all(encoder: Path, tmp_path: Path) -> None:
    made = encode_folder(encoder, PASSAGES, tmp_path / "index", Encoding(max_length=4))
    assert made.manifest.encoder["contract"]["passage_max_length"] == 4
    moved = encoder.rename(tmp_path / "moved")
    assert made.query_encoder(moved).contract == CONTRACT
    with pytest.raises(ConfigurationError, match="its fingerprint differs"):
        made.query_encoder(saved(tmp_path / "other", seed=1))


def test_what_cannot_be_encoded_is_refused_in_one_line(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There are no passages to encode"):
        encode_folder(encoder, {}, tmp_path / "index")
    with pytest.raises(ConfigurationError, match="passage_max_length=0"):
        encode_folder(encoder, PASSAGES, tmp_path / "index", Encoding(max_length=0))
    t5 = saved(tmp_path / "t5", backbone=tiny_t5(), eos_only=True)
    with pytest.raises(ConfigurationError, match="T5 overflows in float16; choose bfloat16"):
        encode_folder(t5, PASSAGES, tmp_path / "index", Encoding(dtype="float16"))
    broken = tiny_bert()
    with torch.no_grad():
        broken.embeddings.word_embeddings.weight[7] = float("nan")  # the word "file"
    with pytest.raises(DataError, match=r"of 100 embeddings hold a NaN"):
        encode_folder(saved(tmp_path / "broken", backbone=broken), PASSAGES, tmp_path / "nan")


def test_a_folder_is_believed_only_as_far_as_its_manifest_goes(encoder: Path, tmp_path: Path) -> None:
    made = encode_folder(encoder, PASSAGES, tmp_path / "index")
    manifest = tmp_path / "index" / "index.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace("lit-dpret/index/1", "lit-dpret/index/2"))
    with pytest.raises(DataError, match="index/2"):
        IndexFolder(made.folder)
    manifest.write_text(json.dumps({**json.loads(whole), "count": 99}))
    with pytest.raises(DataError, match=r"holds 100 embeddings.*99"):
        IndexFolder(made.folder)
    manifest.write_text("[]")
    with pytest.raises(DataError, match=r"index\.json cannot be read"):
        IndexFolder(made.folder)
    manifest.write_text(whole)
    data = bytearray((made.folder / "embeddings.bin").read_bytes())
    data[5] ^= 1
    (made.folder / "embeddings.bin").write_bytes(data)
    IndexFolder(made.folder)
    with pytest.raises(DataError, match="SHA-256 differ"):
        IndexFolder(made.folder, verify=True)


@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="needs the [faiss-cpu] extra")
def test_an_index_of_faiss_is_kept_and_asked(encoder: Path, tmp_path: Path) -> None:
    encode_folder(encoder, PASSAGES, tmp_path / "embeddings")
    made = index_folder(tmp_path / "embeddings", tmp_path / "index", search="faiss:Flat")
    query = made.query_encoder().encode(["how to file a claim"], "query")
    exact = index_folder(tmp_path / "embeddings", tmp_path / "exact").search(query, 12)
    assert torch.equal(IndexFolder(made.folder, verify=True).search(query, 12).indices, exact.indices)
    assert made.manifest.factory == "Flat" and made.manifest.kind == "faiss"


def test_an_index_that_cannot_be_kept_is_refused(encoder: Path, tmp_path: Path) -> None:
    encode_folder(encoder, PASSAGES, tmp_path / "embeddings")
    for name in ("scann", "faiss:", "faiss"):
        with pytest.raises(ConfigurationError, match="cannot be stored as an index"):
            index_folder(tmp_path / "embeddings", tmp_path / "index", search=name)
    with pytest.raises(ConfigurationError, match="overwrite its own source"):
        index_folder(tmp_path / "embeddings", tmp_path / "embeddings")


def test_a_second_index_is_not_the_first(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {f"b{name}": f"{text} sit" for name, text in PASSAGES.items()}
    for name, texts in (("a", PASSAGES), ("b", others)):
        encode_folder(encoder, texts, tmp_path / name)
    index = tmp_path / "index"
    index_folder(tmp_path / "a", index)
    (index / "index.faiss").write_bytes(b"of an index of faiss that stood here")

    def refuse(*_: Any, **__: Any) -> Any:
        raise DataError("task.search: too few passages.")

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build.Faiss, "build", refuse)
        with pytest.raises(DataError, match=r"task\.search"):
            index_folder(tmp_path / "b", index, search="faiss:IVF4096,Flat")
    assert ids_of(IndexFolder(index, verify=True)) == list(PASSAGES)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_seal", killed)
        with pytest.raises(KeyboardInterrupt):
            index_folder(tmp_path / "b", index)
    with pytest.raises(DataError, match="unfinished"):
        IndexFolder(index)
    assert ids_of(index_folder(tmp_path / "b", index)) == list(others)
    assert not (index / "index.faiss").exists()
