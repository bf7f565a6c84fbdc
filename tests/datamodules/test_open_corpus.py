"""A corpus from a store is the corpus in memory: the same texts, the same complaints, the same training data."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules import PairsDataModule, layouts
from lit_dpret.datamodules.layouts import CorpusSettings, open_corpus
from lit_dpret.datamodules.passage_store import PassageStore, default_cache
from lit_dpret.datamodules.readers import Problems
from lit_dpret.errors import ConfigurationError, DataError

Write = Callable[..., Path]
KEY = bytes(32)
RECORDS = [{"_id": f"p{i}", "title": "A" * (i % 2), "text": f"body {i}"} for i in range(9)]


def both(path: Path, cache: Path, **how: Any) -> tuple[Any, Any]:
    held = open_corpus(path, CorpusSettings(in_memory=True, **how))
    stored = open_corpus(path, CorpusSettings(in_memory=False, cache_dir=cache, **how))
    assert isinstance(stored.texts, PassageStore) and isinstance(held.texts, dict)
    return held, stored


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(records: list[dict[str, Any]], comma: str) -> str:
    return "\n".join(
        comma.join(values) for values in [["_id", "title", "text"], *(map(str, r.values()) for r in records)]
    )


def test_every_format_gives_the_same_store(write: Write, tmp_path: Path) -> None:
    wanted = {record["_id"]: f"{record['title']} {record['text']}".strip() for record in RECORDS}
    for path in (
        write("a.jsonl", RECORDS),
        write("b.jsonl.gz", gzip.compress(lines(RECORDS))),
        write("c.tsv", table(RECORDS, "\t")),
        write("d.csv.gz", gzip.compress(table(RECORDS, ",").encode())),
    ):
        held, stored = both(path, tmp_path / "cache")
        assert stored.texts == held.texts == wanted and list(stored.texts) == list(wanted)


def test_a_table_without_a_header_is_read_by_its_columns(write: Write, tmp_path: Path) -> None:
    path = write("collection.tsv", '0\tThe "first"\r\n1\tsecond\n\n2\t third \n')
    held, stored = both(path, tmp_path, header=("id", "text"))
    assert held.texts == stored.texts == {"0": 'The "first"', "1": "second", "2": "third"}
    with pytest.raises(DataError, match=r"\.jsonl is read without a header line, so it must be a \.tsv file"):
        open_corpus(write("collection.jsonl", RECORDS), CorpusSettings(header=("id", "text")))


BROKEN = {
    "repeated.jsonl": ([*RECORDS, RECORDS[3], RECORDS[5]], ["line 10: id 'p3'", "line 11: id 'p5'"]),
    "empty.jsonl": ([*RECORDS, {"_id": "e", "text": " "}], ["line 10: passage 'e' has an empty text"]),
    "json.jsonl": (lines(RECORDS[:2]) + b"{no\n[1]\n" + lines(RECORDS[2:]), ["line 3: malformed", "line 4: a JSON"]),
    "text.jsonl": ([{"_id": "n", "text": 7}, *RECORDS], ["line 1: 'text' is a number"]),
    "bytes.tsv": (b"_id\ttext\np1\tone\np2\t\xff\np3\tthree\np4\n", ["line 3: not UTF-8", "line 5: 1 columns, but"]),
    "cut.jsonl.gz": (gzip.compress(lines(RECORDS))[:-9], ["is not a readable gzip file"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_both_ways_complain_alike_and_an_incomplete_store_is_not_kept(name: str, write: Write, tmp_path: Path) -> None:
    content, wanted = BROKEN[name]
    path, cache = write(name, content), tmp_path / "cache"
    told = []
    for in_memory in (True, False):
        with pytest.raises(DataError) as refused:
            open_corpus(path, CorpusSettings(in_memory=in_memory, cache_dir=cache))
        problems = Problems(examples=9)
        found = open_corpus(path, CorpusSettings(in_memory=in_memory, cache_dir=cache), complain=problems)
        messages = [message for shown in problems.shown.values() for message in shown]
        assert str(refused.value) in messages and len(messages) == len(wanted) == problems.total
        assert all(any(part in message for message in messages) for part in wanted)
        assert not any("body" in message for message in messages)
        told.append((str(refused.value), problems.counts, dict(found.texts.items())))
        del found
    assert told[0][1:] == told[1][1:]
    assert not list(cache.iterdir())


def test_a_store_is_built_once_and_anew_for_a_changed_file_or_where_it_was_damaged(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("corpus.jsonl", RECORDS)
    first = open_corpus(path, CorpusSettings(in_memory=False, cache_dir=tmp_path / "cache")).texts
    with monkeypatch.context() as patch:
        patch.setattr(layouts, "build_store", lambda *_: pytest.fail("built again"))
        assert open_corpus(path, CorpusSettings(in_memory=False, cache_dir=tmp_path / "cache")).texts == first
    write("corpus.jsonl", [*RECORDS, {"_id": "new", "text": "new"}])
    second = open_corpus(path, CorpusSettings(in_memory=False, cache_dir=tmp_path / "cache")).texts
    assert isinstance(second, PassageStore) and second["new"] == "new" and "new" not in first
    second.path.write_bytes(b"")  # as after damage
    assert len(open_corpus(path, CorpusSettings(in_memory=False, cache_dir=tmp_path / "cache")).texts) == 10


def test_what_a_killed_process_left_is_cleared_away_and_what_another_writes_is_not(
    write: Write, tmp_path: Path
) -> None:
    path, cache = write("corpus.jsonl", RECORDS), tmp_path / "cache"
    how = CorpusSettings(in_memory=False, cache_dir=cache)
    store = open_corpus(path, how).texts
    assert isinstance(store, PassageStore)
    store.path.rename(cache / "elsewhere")
    for name, age in (("left", 7200), ("written", 10)):
        draft = cache / f".{store.path.name}.{name}"
        draft.touch()
        os.utime(draft, (time.time() - age, time.time() - age))
    open_corpus(path, how)
    assert sorted(path.name for path in cache.iterdir()) == sorted(
        [f".{store.path.name}.written", "elsewhere", store.path.name]
    )


def test_auto_holds_what_is_small(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = write("a.tsv", b"x" * 100), write("a.tsv.gz", b"x" * 100)
    auto = CorpusSettings(in_memory="auto")
    assert auto.holds(plain) and CorpusSettings().holds(packed) and not CorpusSettings(in_memory=False).holds(packed)
    monkeypatch.setattr(layouts, "_LARGE", 150)
    assert auto.holds(plain) and not auto.holds(packed)
    for value in ("yes", 1.0, None):
        with pytest.raises(ConfigurationError, match=r"datamodule\.in_memory="):
            PairsDataModule(folder="x", in_memory=value)  # type: ignore[arg-type]


def test_stores_lie_in_the_users_cache_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "lit-dpret" / "passages"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "lit-dpret" / "passages"


def test_training_data_is_the_same_whether_passages_are_held_or_not(harbour: Path, tmp_path: Path) -> None:
    held = PairsDataModule(folder=harbour, in_memory=True)
    stored = PairsDataModule(folder=harbour, in_memory=False, cache_dir=tmp_path)
    stored.prepare_data()
    built = list(tmp_path.iterdir())
    assert len(built) == 1
    for data in (held, stored):
        data.setup("fit")
        data.use_unit("query")
    assert isinstance(stored.public_passages(), PassageStore) and isinstance(held.public_passages(), dict)
    assert stored.pair_rows() == held.pair_rows()
    assert stored.data_fingerprint(KEY) == held.data_fingerprint(KEY)
    assert stored.public_passages() == held.public_passages()
    assert list(tmp_path.iterdir()) == built


def test_pairs_without_passage_ids_need_their_corpus_in_memory(write: Write, tmp_path: Path) -> None:
    public = write("corpus.jsonl", RECORDS)
    by_text = write("pairs.jsonl", [{"query": "q", "passage": "body 0"}])
    by_id = write("ids.jsonl", [{"query": "q", "passage_id": "p0"}])
    settings: dict[str, Any] = {"corpus": public, "in_memory": False, "cache_dir": tmp_path / "cache"}
    with pytest.raises(ConfigurationError, match=r"give passage_id, or set datamodule\.in_memory=true"):
        PairsDataModule(pairs=by_text, **settings).setup("fit")
    assert [row.passage for row in PairsDataModule(pairs=by_id, **settings).pair_rows()] == ["body 0"]
