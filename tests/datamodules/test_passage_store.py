"""A store of passages is the dictionary of the same passages, without holding them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_dpret.datamodules import HuggingFaceDataModule, PairsDataModule, layouts, passage_store
from lit_dpret.datamodules.layouts import CorpusSettings, open_corpus
from lit_dpret.datamodules.passage_store import PassageStore, build_store, default_cache, file_key
from lit_dpret.datamodules.records import Problems
from lit_dpret.errors import ConfigurationError, DataError, StorageError

PASSAGES = {f"p{i}": f"Passage {i}: größer\t{'x' * (i % 7)}\n" for i in range(500)} | {"": "", "10": "ten"}


def refuse(passage_id: str) -> None:
    raise AssertionError(f"{passage_id!r} is not repeated")


@pytest.fixture
def store(tmp_path: Path) -> PassageStore:
    return build_store(tmp_path / "store", PASSAGES.items(), refuse)


def test_a_store_is_the_dictionary_of_its_passages_in_its_order(store: PassageStore) -> None:
    assert store == PASSAGES and len(store) == len(PASSAGES)
    assert list(store) == list(PASSAGES)
    assert list(store.values()) == list(PASSAGES.values())
    assert list(store.items()) == list(PASSAGES.items())
    assert all(store[name] == text for name, text in PASSAGES.items())
    assert "p500" not in store and store.get("p500") is None
    with pytest.raises(KeyError, match="p500"):
        store["p500"]
    assert 10 not in store  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("part", [slice(490, 600), slice(9, 2), slice(5, None, -3), slice(-2, None)], ids=str)
def test_parts_of_the_texts_can_be_asked_for_like_those_of_a_list(store: PassageStore, part: slice) -> None:
    texts = list(PASSAGES.values())
    assert store.values()[part] == texts[part]
    assert store.values()[7] == texts[7] and store.values()[-1] == texts[-1]
    with pytest.raises(IndexError):
        store.values()[len(texts)]
    assert "ten" in store.values() and "eleven" not in store.values()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=2), st.text()), max_size=12))
def test_whatever_is_given_the_first_text_of_each_id_is_kept_and_the_others_are_reported(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[str, str]]
) -> None:
    wanted: dict[str, str] = {}
    repeated = [name for name, text in given if name in wanted or wanted.setdefault(name, text) != text]
    found: list[str] = []
    store = build_store(tmp_path_factory.mktemp("any") / "store", given, found.append)
    assert list(store.items()) == list(wanted.items()) and found == repeated
    assert all(store[name] == text for name, text in wanted.items())


def test_threads_and_other_processes_read_the_same_store(store: PassageStore) -> None:
    names = list(PASSAGES)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(store.__getitem__, names)) == list(PASSAGES.values())
    with get_context("fork").Pool(2) as forked:
        assert forked.map(store.__getitem__, names) == list(PASSAGES.values())
    assert pickle.loads(pickle.dumps(store)) == PASSAGES  # as a spawned process gets it


def test_texts_are_not_held(tmp_path: Path) -> None:
    """What four times the passages take more is a few numbers for each, and not their texts."""

    def passages(count: int) -> Iterator[tuple[str, str]]:
        return ((f"p{i}", f"{i} " + "word " * 80) for i in range(count))

    def peak(count: int) -> int:
        tracemalloc.start()
        store = build_store(tmp_path / str(count), passages(count), refuse)
        assert sum(len(text) for text in store.values()) > 400 * count
        assert len(store["p17"]) > 400
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(2_000), peak(8_000)
    assert large - small < 6_000 * 400 / 8, "at most 50 bytes of numbers for each passage"


@pytest.mark.parametrize("spoil", [lambda whole: whole[:-4096], lambda whole: b"no database", lambda whole: b""])
def test_an_unfinished_or_damaged_store_is_refused(store: PassageStore, spoil: Callable[[bytes], bytes]) -> None:
    spoiled = store.path.with_name("spoiled")
    spoiled.write_bytes(spoil(store.path.read_bytes()))
    with pytest.raises(DataError, match="delete it"):
        PassageStore(spoiled)
    with pytest.raises(DataError, match="delete it"):
        PassageStore(store.path.with_name("nowhere"))


def test_a_folder_that_cannot_be_made_names_the_knob(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(StorageError, match=r"datamodule\.cache_dir"):
        build_store(tmp_path / "file" / "store", PASSAGES.items(), refuse)


def test_a_file_that_was_changed_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passage_store, "_READ", 4)
    path = tmp_path / "corpus.tsv"
    path.write_bytes(b"0123456789")
    first = file_key(path)
    assert file_key(path) == first != file_key(path, "read in another way")
    for content in (b"0123456780", b"x123456789", b"0123456789\n"):
        stamp = path.stat()
        path.write_bytes(content)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert file_key(path) != first
    path.write_bytes(b"0123456789")
    os.utime(path, ns=(0, 0))
    assert file_key(path) != first, "the middle may have changed"


Write = Callable[..., Path]
# -- a corpus from a store, and in memory --------------------------------------------------------

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
    with pytest.raises(ConfigurationError, match=r"set datamodule\.passage_id_column, or"):
        HuggingFaceDataModule(path=by_text, **settings).setup("fit")
    assert [row.passage for row in PairsDataModule(pairs=by_id, **settings).pair_rows()] == ["body 0"]
