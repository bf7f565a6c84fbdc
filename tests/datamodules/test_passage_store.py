"""A store of passages is the dictionary of the same passages, without holding them."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_dpret.datamodules import passage_store
from lit_dpret.datamodules.passage_store import PassageStore, build_store, file_key
from lit_dpret.errors import DataError, StorageError

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
