"""Files as a `Collection`, with the corpus in memory or, where it is larger than that should hold, in a store."""

from __future__ import annotations

import glob
import logging
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.complaints import Complain, refuse
from lit_dpret.datamodules.layouts import (
    Passages,
    corpus_records,
    no_passages,
    read_corpus,
    read_qrels,
    read_queries,
    repeated_id,
    split_name,
)
from lit_dpret.datamodules.passage_store import PassageStore, build_store, file_key, published_store
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.errors import ConfigurationError, DataError

InMemory = bool | Literal["auto"]

_LARGE = 2**29  # bytes of plain text; as Python strings it is about two and a half times that
_ABANDONED = 3600.0  # seconds
_PACKED = 4  # bytes of text in a byte of a compressed file, roughly
_log = logging.getLogger(__name__)


def check_in_memory(value: object) -> None:
    """Refuse what is neither a truth value nor ``auto``."""
    if not isinstance(value, bool) and value != "auto":
        raise ConfigurationError(f"datamodule.in_memory={value!r} is not one of true, false, auto.")


def default_cache() -> Path:
    """Where stores are kept unless ``datamodule.cache_dir`` says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lit-dpret" / "passages"


def is_held(path: str | Path, in_memory: InMemory) -> bool:
    """Whether the texts of this file are to be held in memory; ``auto`` holds half a gigabyte of text."""
    if in_memory != "auto":
        return in_memory
    file = Path(path)
    packed = file.suffix.lower() in (".gz", ".zst", ".parquet")
    return file.stat().st_size * (_PACKED if packed else 1) <= _LARGE


def open_corpus(
    path: str | Path,
    *,
    in_memory: InMemory = "auto",
    cache_dir: str | Path | None = None,
    allow_empty: bool = False,
    knob: str = "datamodule.corpus",
    columns: Sequence[str] | None = None,
    complain: Complain = refuse,
) -> Passages:
    """All passages of a corpus file, as `read_corpus` reads it, in memory or not.

    Guarantees:
        - Both ways give the same ids and texts in the same order, and the same complaints.
        - A store is built once for a file; a file that was changed gets another one.
        - What was left out of a store for a problem is never taken for the whole: such a store is not kept.

    Args:
        path: The file.
        in_memory: ``auto`` holds a corpus of up to half a gigabyte of text.
        cache_dir: Where stores are kept; None for ``~/.cache/lit-dpret/passages``. A store takes as much disk as the
            plain text, and about 30 bytes for each passage.
        allow_empty: Accept passages with neither title nor text.
        knob: What the user set to name the file, for messages.
        columns: The names of the columns of a TSV file without a header line.
        complain: As for `read_corpus`.

    Raises:
        DataError: As for `read_corpus`.
        StorageError: The cache cannot be written.
    """
    file = RecordFile(path, knob=knob, columns=columns, complain=complain)
    if is_held(file.path, in_memory):
        return read_corpus(path, allow_empty=allow_empty, knob=knob, columns=columns, complain=complain)
    # The name decides how the bytes are read, so it is part of what the file is.
    key = file_key(file.path, "".join(file.path.suffixes).lower(), columns, allow_empty)

    def draft(folder: Path) -> bool:
        return _draft(file, folder, allow_empty=allow_empty, complain=complain)

    return Passages(_stored(f"{file.path.name.split('.')[0]}-{key}", draft, cache_dir))


def store_passages(
    name: str, passages: Callable[[], Iterable[tuple[str, str]]], *, cache_dir: str | Path | None = None
) -> PassageStore:
    """Ids and texts out of any source, in the store of this name; the source is asked only where there is none yet.

    Raises:
        DataError: The source gives nothing, or an id twice.
        StorageError: The cache cannot be written.
    """

    def draft(folder: Path) -> bool:
        if repeated := build_store(folder, passages()):
            raise DataError(f"{name}: {len(repeated)} passages have an id that an earlier one has.", kind="repeated id")
        if not len(PassageStore(folder)):
            raise DataError(f"{name} holds no passages.", kind="empty file")
        return True

    return _stored(name, draft, cache_dir)


def _stored(name: str, draft: Callable[[Path], bool], cache_dir: str | Path | None) -> PassageStore:
    """The store of this name; where there is none, what ``draft`` builds, kept if that says that it is whole."""
    folder = (default_cache() if cache_dir is None else Path(cache_dir)) / name
    if folder.exists():
        try:
            return PassageStore(folder)
        except DataError:  # damaged
            shutil.rmtree(folder, ignore_errors=True)
    _log.info("Copying passages into %s, to be read from there.", folder)
    _remove_abandoned(folder)
    drafted = folder.with_name(f".{name}.{uuid.uuid4().hex[:8]}")
    try:
        whole = draft(drafted)
    except BaseException:
        shutil.rmtree(drafted, ignore_errors=True)
        raise
    if whole:
        return published_store(folder, drafted)
    store = PassageStore(drafted)
    weakref.finalize(store, shutil.rmtree, drafted, ignore_errors=True)
    return store


def _remove_abandoned(folder: Path) -> None:
    """Delete drafts of this store to which nobody has written for an hour: whoever built them was killed."""
    for draft in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        newest = max((path.stat().st_mtime for path in (draft, *draft.glob("*.*"))), default=0.0)
        if time.time() - newest > _ABANDONED:
            shutil.rmtree(draft, ignore_errors=True)


def read_parts(
    *,
    corpus: str | Path | Passages,
    queries: str | Path,
    qrels: Mapping[str, str | Path],
    source: str,
    allow_empty_passages: bool = False,
    in_memory: InMemory = True,
    cache_dir: str | Path | None = None,
    complain: Complain = refuse,
) -> Collection:
    """A collection from its separate files (or passages at hand); ``qrels`` gives one file per split."""
    if isinstance(corpus, Passages):
        passages = corpus
    else:
        passages = open_corpus(
            corpus, in_memory=in_memory, cache_dir=cache_dir, allow_empty=allow_empty_passages, complain=complain
        )
    asked = read_queries(queries, complain=complain)
    judged: dict[str, dict[str, dict[str, int]]] = {}
    for name, path in qrels.items():
        split = split_name(name, "datamodule.qrels")
        if split in judged:
            raise DataError(f"datamodule.qrels names two files for the split {split}; keep one.")
        judged[split] = read_qrels(
            path,
            passages=passages.texts,
            queries=asked.texts,
            knob=f"datamodule.qrels.{name}",
            complain=complain,
        )
    return Collection(
        passages=passages.texts,
        queries=asked.texts,
        qrels=judged,
        users=asked.users,
        domains=asked.domains,
        passage_domains=passages.domains,
        source=source,
    )


def _draft(file: RecordFile, draft: Path, *, allow_empty: bool, complain: Complain) -> bool:
    """Build a store; returns whether everything in the file is in it."""
    noted = 0

    def counting(problem: DataError) -> None:
        nonlocal noted
        noted += 1
        complain(problem)

    file.complain = counting if complain is not refuse else refuse
    repeated = build_store(draft, ((name, text) for _, name, text, _ in corpus_records(file, allow_empty=allow_empty)))
    if repeated:
        _complain_of(repeated, file, allow_empty, counting)
    if not len(PassageStore(draft)):
        raise no_passages(file)
    return not noted


def _complain_of(repeated: list[int], file: RecordFile, allow_empty: bool, complain: Complain) -> None:
    """Name the lines of repeated ids: the file is read once more, with its other problems passed over."""
    again = RecordFile(file.path, columns=file.columns, complain=lambda problem: None)
    places: Iterator[int] = iter(repeated)
    wanted = next(places)
    for index, (number, passage_id, _, _) in enumerate(corpus_records(again, allow_empty=allow_empty)):
        if index == wanted:
            complain(repeated_id(file, number, passage_id))
            wanted = next(places, -1)
