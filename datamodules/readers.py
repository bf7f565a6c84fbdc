"""One file of records, whatever its format, with every complaint naming the file and the line.

JSONL, TSV, CSV and parquet files all come out as dictionaries. The format follows the name:
``.jsonl``, ``.tsv`` and ``.csv``, each also with ``.gz`` or ``.zst`` behind it, and ``.parquet``.

- JSONL: one JSON object a line; blank lines are passed over.
- TSV: a header line, then fields between tabs. Quote marks are ordinary characters, as in BEIR and
  MS MARCO files.
- CSV: a header line, then fields between commas, quoted as spreadsheets quote them.
- Parquet: through pyarrow, where it is installed; complaints name the row, counted from 1.

A message never shows a text from the file, only ids, column names and grades: the file may be a
private query log, and messages end up in logs.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lit_dpret.errors import ConfigurationError, DataError

FORMATS = (".jsonl", ".tsv", ".csv", ".parquet")
_COMPRESSIONS = (".gz", ".zst")
_LONGEST_FIELD = 2**27  # csv's own limit of 131,072 characters is shorter than real articles


class RecordFile:
    """The records of one file, in order, each with its place.

    Iterating yields ``(number, record)``: the line (parquet: row) number, counted from 1, and a
    dictionary. The file is read anew by every iteration and closed at its end.

    Args:
        path: The file; its name decides the format.
        knob: What the user set to name this file, for messages.

    Raises:
        DataError: The file is missing, is a folder, has an unknown format, cannot be decompressed
            or decoded, or holds a line that is no record.
        ConfigurationError: The format needs a package that is not installed.
    """

    def __init__(self, path: str | Path, *, knob: str = "the path") -> None:
        self.path = Path(path)
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        self._compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
        self.format = suffixes[-1] if suffixes else ""
        if self.format not in FORMATS or (self.format == ".parquet" and self._compression):
            raise DataError(
                f"{self.path} is of no known format: name it .jsonl, .tsv or .csv "
                "(each may end in .gz or .zst), or .parquet."
            )
        if not self.path.exists():
            raise DataError(f"{self.path} does not exist; check {knob}.")
        if not self.path.is_file():
            raise DataError(f"{self.path} is not a file; check {knob}.")

    def where(self, number: int) -> str:
        """The place of record ``number``, in the words of a message."""
        return f"{self.path} {self.place(number)}"

    def place(self, number: int) -> str:
        """``line 3``, or for parquet ``row 3``."""
        return f"{'row' if self.format == '.parquet' else 'line'} {number}"

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if self.format == ".parquet":
            return self._parquet()
        return self._jsonl() if self.format == ".jsonl" else self._table()

    def find(self, before: int, *wanted: tuple[tuple[str, ...], str]) -> int:
        """The number of the first record, before ``before``, with these ids.

        Each of ``wanted`` is the names that a column goes by, and the id to look for in it. It reads
        the file again, so it serves messages alone. Returns 0 for none.
        """
        for number, record in self:
            if number >= before:
                break
            held = (next((record[name] for name in names if name in record), None) for names, _ in wanted)
            if all(as_id(value) == looked_for for value, (_, looked_for) in zip(held, wanted, strict=True)):
                return number
        return 0

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        try:
            if self._compression == ".gz":
                with gzip.open(self.path, "rb") as unzipped:
                    yield unzipped  # type: ignore[misc]  # GzipFile reads bytes as IO[bytes] does
            elif self._compression == ".zst":
                zstandard = _optional("zstandard", self.path)
                try:
                    with self.path.open("rb") as packed:
                        yield io.BufferedReader(_ZstdStream(packed, zstandard))
                except zstandard.ZstdError as error:
                    raise DataError(f"{self.path} is not a readable zstd file ({error}).") from error
            else:
                with self.path.open("rb") as plain:
                    yield plain
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self.path} is not a readable gzip file ({error}).") from error
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror or error}).") from error

    def _lines(self) -> Iterator[tuple[int, str]]:
        with self._open() as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1 and line[:2] == b"\x1f\x8b":
                    raise DataError(f"{self.path} is compressed with gzip; rename it to {self.path.name}.gz.")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(f"{self.where(number)}: not UTF-8 text (byte {error.start + 1}).") from error
                yield number, text

    def _jsonl(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in self._lines():
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
                raise DataError(f"{self.where(number)}: malformed JSON ({reason}).") from error
            if not isinstance(record, dict):
                raise DataError(
                    f"{self.where(number)}: a JSON object in braces is expected, not {_kind(record)}; "
                    "JSONL holds one object a line."
                )
            yield number, record

    def _table(self) -> Iterator[tuple[int, dict[str, Any]]]:
        csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
        lines = (line for _, line in self._lines())
        if self.format == ".tsv":
            reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            reader = csv.reader(lines, strict=True)
        header: list[str] | None = None
        while True:
            start = reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(f"{self.where(start)}: not a readable table row ({error}).") from error
            if not values:
                continue
            if header is None:
                header = [name.strip() for name in values]
                repeated = next((name for name in header if header.count(name) > 1), None)
                if repeated is not None:
                    raise DataError(f"{self.where(start)}: the header names column {repeated!r} twice.")
            elif len(values) != len(header):
                raise DataError(
                    f"{self.where(start)}: {len(values)} columns, but the header on the first line has "
                    f"{len(header)} ({', '.join(header)})."
                )
            else:
                yield start, dict(zip(header, values, strict=True))

    def _parquet(self) -> Iterator[tuple[int, dict[str, Any]]]:
        _optional("pyarrow", self.path)
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
        number = 0
        try:
            with parquet.ParquetFile(self.path) as table:
                for batch in table.iter_batches():
                    for record in batch.to_pylist():
                        number += 1
                        yield number, record
        except (pyarrow.ArrowException, OSError) as error:
            reason = one_line(error)
            raise DataError(f"{self.path} is not a readable parquet file ({reason}).") from error


class _ZstdStream(io.RawIOBase):
    """Unpacks zstd and, unlike zstandard's own stream reader, refuses a file that was cut short."""

    def __init__(self, packed: IO[bytes], zstandard: Any) -> None:
        self._packed = packed
        self._zstandard = zstandard
        self._frame: Any = None
        self._ready = b""
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            piece = self._left or self._packed.read(2**16)
            self._left = b""
            if not piece:
                if self._frame is not None:
                    raise self._zstandard.ZstdError("the file ends inside a frame")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(piece)
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, shortened: messages here are one line."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return first if len(first) <= 160 else first[:157] + "..."


def _optional(package: str, path: Path) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(f"Reading {path} needs {package}: pip install {package}.") from error


def _kind(value: object) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "true or false", int: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def as_id(value: object) -> str | None:
    """An id as a string; whole numbers are ids too. None for what cannot be an id."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return None


class Fields:
    """Picks columns out of records by any of their accepted names, and complains precisely."""

    def __init__(self, file: RecordFile) -> None:
        self.file = file

    def name(self, number: int, record: Mapping[str, Any], names: tuple[str, ...]) -> str:
        """The first of ``names`` that ``record`` has.

        Raises:
            DataError: It has none; the message lists those it has.
        """
        for name in names:
            if name in record:
                return name
        wanted = " or ".join(repr(name) for name in names)
        word = "key" if self.file.format == ".jsonl" else "column"
        raise DataError(
            f"{self.file.where(number)}: no {word} {wanted}; found: {', '.join(map(str, record)) or 'none'}."
        )

    def id(self, number: int, record: Mapping[str, Any], names: tuple[str, ...]) -> str:
        """The id under one of ``names``; a missing, empty or non-id value raises DataError."""
        name = self.name(number, record, names)
        found = as_id(record[name])
        if found is None:
            kind = "empty" if isinstance(record[name], str) else _kind(record[name])
            raise DataError(f"{self.file.where(number)}: {name!r} is {kind}; an id is expected.")
        return found

    def text(self, number: int, record: Mapping[str, Any], names: tuple[str, ...], *, optional: bool = False) -> str:
        """The text under one of ``names``; ``""`` where it is optional and missing or null."""
        if optional and all(record.get(name) is None for name in names):
            return ""
        name = self.name(number, record, names)
        value = record[name]
        if not isinstance(value, str):
            raise DataError(f"{self.file.where(number)}: {name!r} is {_kind(value)}; a text is expected.")
        return value

    def grade(self, number: int, record: Mapping[str, Any], names: tuple[str, ...]) -> int:
        """The relevance grade under one of ``names``: a whole number."""
        name = self.name(number, record, names)
        value = record[name]
        try:
            if isinstance(value, bool) or value is None or (isinstance(value, float) and not value.is_integer()):
                raise ValueError
            return int(value)
        except (ValueError, TypeError):
            raise DataError(
                f"{self.file.where(number)}: grade {name}={str(value)[:40]!r} is not a whole number."
            ) from None
