"""Copy a log of pairs without the records that training refuses.

Leaving a record out is a decision about the data that their owner makes before any guarantee begins: no epsilon covers
it, nor the numbers that `write_clean` returns. Most problems concern one record alone. Whether a record contradicts or
repeats another depends on both, so the guarantee then compares logs without such records.
"""

from __future__ import annotations

import os
import re
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.pair_file import PairColumns
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.datamodules.records import Complain, as_id, refuse
from lit_dpret.datamodules.shards import find_shards, is_url
from lit_dpret.datamodules.splitting import divisions_of
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import write_whole

_KNOB = "task.write_clean"


def check_clean(log: str | Path, out: Path) -> RecordFile:
    """Return the reader of ``log``; refuse a copy ``out`` that could not be written or would have other units."""
    if is_url(log) or len(find_shards(log, knob="datamodule.pairs").files) > 1:
        raise ConfigurationError(
            f"{_KNOB}={out} leaves lines out of one local file, but datamodule.pairs={log} is a URL or several files. "
            "Join them in one local file, and name that."
        )
    file = RecordFile(log, knob="datamodule.pairs")
    if out.exists():
        raise ConfigurationError(f"{_KNOB}={out} exists, and nothing is overwritten. Name a new file.")
    if file.format == ".parquet":
        raise ConfigurationError(
            f"{_KNOB}={out} cannot be made from {log}: parquet files have no lines to leave out. Convert it to .jsonl, "
            ".tsv or .csv."
        )
    if out.suffix.lower() != file.format:
        raise ConfigurationError(f"{_KNOB}={out} must end in {file.format}, the format of {log}.")
    if divisions_of(log):
        raise ConfigurationError(
            f"{_KNOB}={out}: {log} is a written split, and the note next to it states how it was divided. Leave lines "
            "out of the original log, and split that."
        )
    return file


def refused_records(problems: Sequence[DataError], log: str | Path) -> dict[int, str] | None:
    """Return the kind of the first problem of each record; None if a problem is not tied to one record of the log."""
    kinds: dict[int, str] = {}
    for problem in problems:
        if problem.record is None or problem.record[0] != str(log):
            return None
        kinds.setdefault(problem.record[1], problem.kind)
    return kinds


def write_clean(
    file: RecordFile,
    out: Path,
    *,
    refused: dict[int, str],
    readable: Collection,
    read: Callable[[Path, Complain], Collection],
    columns: PairColumns,
) -> dict[str, Any]:
    """Write ``out``, which only its owner can read, without the ``refused`` records; return private counts of these.

    Guarantees:
        - The kept records are copied byte for byte, in their order.
        - The copy has the same queries, texts, users, splits and pairs as the readable part of the log (``readable``);
          otherwise nothing is written, and a `DataError` says so.
        - Records without a query id keep the name of their line: an empty line replaces each line left out.
    """
    quiet = RecordFile(file.path, complain=lambda problem: None)
    records = {number: record for number, record in quiet if number in refused}
    starts = sorted({*refused, *(number for number, _ in quiet)})
    blanks = readable.query_ids != "all"
    lines = 0

    def kept() -> Iterator[bytes]:
        """Yield the lines of kept records; a record extends to the line on which the next one begins."""
        nonlocal lines
        with file.opened() as stream:
            for number, line in enumerate(stream, start=1):
                place = bisect_right(starts, number) - 1
                if place < 0 or starts[place] not in refused:  # a header comes before the first record
                    yield line
                else:
                    lines += bool(line.strip())
                    yield b"\n" * blanks

    draft = out.with_name(f".{uuid.uuid4().hex[:8]}{file.format}")
    try:
        write_whole(draft, kept(), owner_only=True)
        clean = read(draft, refuse)
        parts = [(one.queries, one.users, one.domains, one.qrels) for one in (clean, readable)]
        if parts[0] != parts[1] or any(readable.passages[name] != text for name, text in clean.passages.items()):
            raise DataError(f"the rest of {file.path} reads differently without the refused lines. Mend these lines.")
        os.replace(draft, out)
    except DataError as error:
        raise DataError(f"{_KNOB}={out} was not written: {error.sentence.replace(str(draft), str(out))}") from error
    finally:
        draft.unlink(missing_ok=True)
    less = {as_id(record.get(columns.query_id)) for record in records.values()} & set(clean.queries)
    left = set(clean.users.values())
    gone = {as_id(record.get(columns.user)) for record in records.values()} - left - {None}
    return {
        "written": str(out),
        "records": len(refused),
        "lines": lines,
        "of": len(starts),
        "kinds": dict(Counter(refused.values())),
        "compared": any(re.search("two|repeated", kind) for kind in refused.values()),  # involves other records
        "empty_lines": blanks,
        "queries_with_fewer_records": len(less),
        "users_without_records": len(gone),
        "query_ids": [readable.query_ids, clean.query_ids],
    }
