"""The folder that synthesis writes, and what it refuses to write."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_generator import PASSAGES, SETTINGS, content, generator, lines, write_parent_card

from lit_dpret.cards.card import card_sha256, read_card
from lit_dpret.errors import ConfigurationError, DataError, StorageError, UnsupportedModelError
from lit_dpret.modules.generator_folder import load_generator
from lit_dpret.privacy.budget import Neighbours
from lit_dpret.synthesis.dataset_folder import DATA_FILES, SyntheticQuery, write_dataset
from lit_dpret.synthesis.prefill import prefill
from lit_dpret.synthesis.sampler import Decoding, decode, uniforms
from lit_dpret.synthesis.writer import synthesize

# -- the folder ------------------------------------------------------------------------------


def test_every_query_has_its_passage_and_every_passage_its_text(whole: Path) -> None:
    queries, corpus = lines(whole / "queries.jsonl"), lines(whole / "corpus.jsonl")
    qrels = [row.split("\t") for row in (whole / "qrels" / "train.tsv").read_text().splitlines()]
    assert qrels[0] == ["query-id", "corpus-id", "score"]
    assert [row[0] for row in qrels[1:]] == [query["_id"] for query in queries]
    assert [query["_id"] for query in queries] == [f"genQ{n}" for n in range(1, len(queries) + 1)]
    assert [row[1] for row in qrels[1:]] == [query["metadata"]["passage_id"] for query in queries]
    assert {row[2] for row in qrels[1:]} == {"1"}
    assert {row["_id"]: row["text"] for row in corpus} == PASSAGES and len(corpus) == len(PASSAGES)
    mirror = lines(whole / "qrels" / "train.jsonl")
    assert [[str(row[key]) for key in ("query-id", "corpus-id", "score")] for row in mirror] == qrels[1:]
    pairs = lines(whole / "pairs" / "train.jsonl")
    assert list(pairs[0]) == ["query", "positive"]  # sentence-transformers reads columns by place
    assert [pair["query"] for pair in pairs] == [query["text"] for query in queries]
    assert [pair["positive"] for pair in pairs] == [PASSAGES[query["metadata"]["passage_id"]] for query in queries]


@pytest.mark.costly
def test_the_stored_log_probability_is_the_models(whole: Path, source: Path) -> None:
    loaded = load_generator(source)
    decoding = Decoding(max_new_tokens=loaded.contract.max_query_length)
    records = [record for shard in (whole / "shards").iterdir() for record in lines(shard)]
    drawn = {(record["passage_id"], record["draw"]): SyntheticQuery(**record) for record in records}
    checked = 0
    for query in lines(whole / "queries.jsonl"):
        facts = query["metadata"]
        told, text = drawn[facts["passage_id"], facts["draw"]], PASSAGES[facts["passage_id"]]
        ids = loaded.codec.queries([query["text"]])
        numbers = uniforms(SETTINGS["seed"], told.passage_id, told.draw, decoding.max_new_tokens)
        read = prefill(loaded.model, loaded.codec.passages([text]))
        (again,) = decode(loaded.model, read, numbers[None], decoding)
        if not told.finished or [*again.tokens, loaded.tokenizer.eos_token_id] != ids[0]:
            continue  # cut at the limit before its end mark, or with a special token, which no text holds
        batch = generator().collate_rows([SimpleNamespace(query=query["text"], passage=text)])
        loss = float(loaded.model(**batch).loss.detach())
        assert facts["log_prob"] == pytest.approx(-loss * len(ids[0]), rel=1e-4)
        checked += 1
    assert checked > 5


def test_the_card_is_the_generators_claim_under_its_name(whole: Path, source: Path) -> None:
    card, parent = read_card(whole), read_card(source)
    assert card["claim"]["epsilon"] == parent["claim"]["epsilon"] and card["claim"]["guarantee"] == "dp"
    assert card["parents"][0]["sha256"] == card_sha256(source)
    assert set(card["subject"]["sha256"]) == set(DATA_FILES)
    assert card["generation"]["per_doc"] == 3 and card["generation"]["seeds"] == [5]
    readme = (whole / "README.md").read_text()
    assert card["claim"]["statement"] in readme
    assert readme.startswith("---\n") and "size_categories:\n- n<1K\n" in readme


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["zero_out", "add_or_remove", "replace_one"])
def test_a_list_of_passages_that_nobody_declared_public_is_refused_and_the_assumption_depends_on_the_neighbours(
    source: Path, tmp_path: Path, relation: Neighbours
) -> None:
    """Zero-out keeps the passage of a blanked query in its place; the other two take it away or change it."""
    folder = tmp_path / "g"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("privacy_*"))
    write_parent_card(folder, neighbours=relation)
    for declared in (False, None, "yes"):
        with pytest.raises(ConfigurationError, match=r"task\.passages_are_public") as told:
            synthesize(folder, PASSAGES, tmp_path / "set", **SETTINGS | {"passages_are_public": declared})
        assert ("(neighbours=zero_out)" in str(told.value)) == (relation == "zero_out")
        assert not (tmp_path / "set").exists()
    card = read_card(synthesize(folder, PASSAGES, tmp_path / "set", **SETTINGS))
    trusted = next(one["text"] for one in card["assumptions"] if one["text"].startswith("The list of passages"))
    assert ("(zero-out)" in trusted) == (relation == "zero_out")


def test_a_generator_without_a_card_and_a_card_without_a_generator_are_refused(source: Path, tmp_path: Path) -> None:
    bare = generator().save_model(tmp_path / "g")
    with pytest.raises(DataError, match=r"privacy_card\.json"):
        synthesize(bare, PASSAGES, tmp_path / "set", **SETTINGS)
    shutil.copy(source / "privacy_card.json", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"lit_dpret_generator\.json"):
        synthesize(tmp_path, PASSAGES, tmp_path / "set", **SETTINGS)


@pytest.mark.parametrize("change", ["added", "sharded", "others"])
def test_weights_that_the_card_does_not_list_are_refused(source: Path, tmp_path: Path, change: str) -> None:
    """An adapter that lies beside the weights is loaded with them, and shards are loaded in their place."""
    swapped = tmp_path / "g"
    shutil.copytree(source, swapped)
    if change == "others":
        other = generator(seed=3).save_model(tmp_path / "other")
        shutil.copy(other / "model.safetensors", swapped / "model.safetensors")
    elif change == "added":
        (swapped / "adapter_config.json").write_text("{}")
    else:
        (swapped / "model.safetensors").rename(swapped / "model-00001-of-00001.safetensors")
    with pytest.raises(DataError, match=r"adapter_config|model"):
        synthesize(swapped, PASSAGES, tmp_path / "set", **SETTINGS)
    assert not (tmp_path / "set").exists()


def test_a_disk_that_is_too_small_is_refused_and_one_that_fills_up_keeps_what_is_finished(
    whole: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, writes = tmp_path / "set", os.fsync, iter(range(6))

    def full(descriptor: int) -> None:
        if next(writes, None) is None:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2000))
        with pytest.raises(StorageError, match="0 MB free"):
            synthesize(source, PASSAGES, out, **SETTINGS)
        assert not (out / "manifest.jsonl").exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            synthesize(source, PASSAGES, out, **SETTINGS)
    assert (out / "shards" / "000003.jsonl").exists()
    assert not list(out.rglob("*.tmp"))
    synthesize(source, PASSAGES, out, **SETTINGS)
    assert content(out) == content(whole)


def test_a_folder_that_cannot_be_written_is_another_processs_or_holds_somebody_elses_files_is_refused(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "corpus.jsonl").write_text("mine")
    for folder in (tmp_path, tmp_path / "corpus.jsonl" / "set"):
        with pytest.raises(StorageError, match=r"corpus\.jsonl"):
            synthesize(source, PASSAGES, folder, **SETTINGS)
    assert (tmp_path / "corpus.jsonl").read_text() == "mine"
    out = tmp_path / "set"

    def again(done: int, total: int) -> None:
        with pytest.raises(StorageError, match="another process"):
            synthesize(source, PASSAGES, out, **SETTINGS)

    synthesize(source, {"p": "bana", "q": " "}, out, progress=again, **SETTINGS)
    assert {query["metadata"]["passage_id"] for query in lines(out / "queries.jsonl")} == {"p"}, "q has no text"


@pytest.mark.parametrize(
    ("passages", "word"),
    [({}, "no passage"), ({"a\tb": "bana"}, "passage id"), ({"": "bana"}, "passage id"), ({"p": " "}, "any text")],
)
def test_passages_that_cannot_be_written_are_refused(source: Path, tmp_path: Path, passages: Any, word: str) -> None:
    with pytest.raises(DataError, match=word):
        synthesize(source, passages, tmp_path / "set", **SETTINGS)


@pytest.mark.parametrize(
    "change",
    [
        {"queries_per_passage": 0}, {"group_size": 0}, {"precision": "16-true"}, {"device": "abacus"},
        {"language": "English"}, {"license": "CC BY 4.0"}, {"workers": -1}, {"workers": 1.5},
        {"threads": 0},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(source: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(change))):
        synthesize(source, PASSAGES, tmp_path / "set", **SETTINGS | change)


# -- counting --------------------------------------------------------------------------------


def test_empty_queries_are_dropped_and_repeated_ones_merged(tmp_path: Path) -> None:
    def query(name: str, draw: int, text: str, finished: bool = True) -> SyntheticQuery:
        return SyntheticQuery(passage_id=name, draw=draw, text=text, log_prob=-1.0 - draw, finished=finished)

    drawn = [query("b", 0, "x"), query("b", 1, ""), query("b", 2, "x"), query("b", 3, "y", False), query("a", 0, ""),
             query("c", 0, "x")]  # fmt: skip
    counts, hashes = write_dataset(tmp_path, lambda: drawn, {"a": "A", "b": "B\ttab\nline", "c": "C"})
    assert (counts.drawn, counts.empty, counts.duplicates, counts.unfinished) == (6, 2, 1, 1)
    assert (counts.queries, counts.passages) == (3, 2)
    assert lines(tmp_path / "queries.jsonl")[0] == {
        "_id": "genQ1", "text": "x", "metadata": {"passage_id": "b", "draw": 0, "copies": 2, "log_prob": -1.0},
    }  # fmt: skip
    assert [row["_id"] for row in lines(tmp_path / "corpus.jsonl")] == ["b", "c"]
    assert lines(tmp_path / "corpus.jsonl")[0]["text"] == "B\ttab\nline"
    assert set(hashes) == set(DATA_FILES)


def test_bfloat16_writes_the_same_queries_each_time_and_says_so(source: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"precision": "bf16-true"}
    out = synthesize(source, PASSAGES, tmp_path / "a" / "set", **settings)
    assert len(lines(out / "corpus.jsonl")) == len(PASSAGES)
    assert content(synthesize(source, PASSAGES, tmp_path / "b" / "set", **settings)) == content(out)
    assert json.loads((out / "generation.json").read_text())["configuration"]["precision"] == "bf16-true"
    assert read_card(out)["environment"]["precision"] == "bf16-true"
    assert "precision bf16-true" in (out / "README.md").read_text()
