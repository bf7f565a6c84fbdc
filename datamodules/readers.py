"""One file of records, whatever its format, with every complaint naming the file and the line.

JSONL, TSV, CSV and parquet files all come out as dictionaries. The format follows the name:
``.jsonl``, ``.tsv`` and ``.csv``, each also with ``.gz`` or ``.zst`` behind it, and ``.parquet``.

- JSONL: one JSON object a line; blank lines are passed over.
- TSV: a header line, then fields between tabs. Quote marks are ordinary characters, as in BEIR and
  MS MARCO files. MS MARCO's have no header: there the reader is told the ``columns``.
- CSV: a header line, then fields between commas, quoted as spreadsheets quote them.
- Parquet: through pyarrow, where it is installed; complaints name the row, counted from 1.

A message never shows a text from the file, only ids, column names and grades: the file may be a
private query log, and messages end up in logs.
"""

from __future__ import annotations

import copy
import csv
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lit_dpret.datamodules.complaints import Complain, refuse
from lit_dpret.datamodules.fields import as_id, kind_of, shown_columns
from lit_dpret.errors import ConfigurationError, DataError

FORMATS = (".jsonl", ".tsv", ".csv", ".parquet")
_COMPRESSIONS = (".gz", ".zst")
_LONGEST_FIELD = 2**27  # csv's own limit of 131,072 characters is shorter than real articles
_MOST_FINDS = 20  # of a reader that collects problems: each find reads the file again


class RecordFile:
    """The records of one file, in order, each with its place.

    Iterating yields ``(number, record)``: the line (parquet: row) number, counted from 1, and a
    dictionary. The file is read anew by every iteration and closed at its end.

    Args:
        path: The file; its name decides the format.
        knob: What the user set to name this file, for messages.
        columns: The names of the columns of a TSV file without a header line.
        complain: Gets every problem that iterating finds. By default the first one is raised; where it
            is only noted, a line that is no record is left out.

    Raises:
        DataError: The file is missing, is a folder or has an unknown format; while iterating, unless
            ``complain`` does otherwise: it cannot be decompressed or decoded, or holds a line that is
            no record.
        ConfigurationError: The format needs a package that is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        knob: str = "the path",
        columns: Sequence[str] | None = None,
        complain: Complain = refuse,
    ) -> None:
        self.path = Path(path)
        self.columns = columns
        self.complain = complain
        self._finds = 0
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        self._compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
        self.format = suffixes[-1] if suffixes else ""
        if self.format not in FORMATS or (self.format == ".parquet" and self._compression):
            raise DataError(
                f"{self.path} is of no known format: name it .jsonl, .tsv or .csv "
                "(each may end in .gz or .zst), or .parquet.",
                kind="unreadable file",
            )
        if columns is not None and self.format != ".tsv":
            raise DataError(f"{self.path} is read without a header line, so it must be a .tsv file; check {knob}.")
        if not self.path.exists():
            raise DataError(f"{self.path} does not exist; check {knob}.", kind="missing file")
        if not self.path.is_file():
            raise DataError(f"{self.path} is not a file; check {knob}.", kind="missing file")

    def where(self, number: int) -> str:
        """The place of record ``number``, in the words of a message."""
        return f"{self.path} {self.place(number)}"

    def place(self, number: int) -> str:
        """``line 3``, or for parquet ``row 3``; 0 stands for a place that nobody looked for."""
        if number == 0:
            return "an earlier one"
        return f"{'row' if self.format == '.parquet' else 'line'} {number}"

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            if self.format == ".parquet":
                yield from self._parquet()
            elif self.format == ".jsonl":
                yield from self._jsonl()
            else:
                yield from self._table() if self.columns is None else self._bare_table(self.columns)
        except DataError as error:  # the file ends here
            self.complain(error)

    def find(self, before: int, *wanted: tuple[tuple[str, ...], str]) -> int:
        """The number of the first record, before ``before``, with these ids.

        Each of ``wanted`` is the names that a column goes by, and the id to look for in it. It reads
        the file again, so it serves messages alone, and a few of them where problems are collected.
        Returns 0 for none.
        """
        self._finds += 1
        if self.complain is not refuse and self._finds > _MOST_FINDS:
            return 0
        again = copy.copy(self)
        again.complain = _say_nothing
        for number, record in again:
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
                    raise _unreadable(f"{self.path} is not a readable zstd file ({error}).") from error
            else:
                with self.path.open("rb") as plain:
                    yield plain
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _unreadable(f"{self.path} is not a readable gzip file ({error}).") from error
        except OSError as error:
            raise _unreadable(f"{self.path} cannot be read ({error.strerror or error}).") from error

    def _lines(self) -> Iterator[tuple[int, str]]:
        with self._open() as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1 and line[:2] == b"\x1f\x8b":
                    raise _unreadable(f"{self.path} is compressed with gzip; rename it to {self.path.name}.gz.")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    self._note(f"{self.where(number)}: not UTF-8 text (byte {error.start + 1}).", "not UTF-8", error)
                    continue
                yield number, text

    def _note(self, message: str, kind: str, cause: Exception | None = None) -> None:
        """Complain about one record; returns where the complaint was only noted."""
        error = DataError(message, kind=kind)
        error.__cause__ = cause
        self.complain(error)

    def _jsonl(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in self._lines():
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = "a number is too long" if isinstance(error, ValueError) else "nested too deeply"
                reason = error.msg if isinstance(error, json.JSONDecodeError) else reason
                self._note(f"{self.where(number)}: malformed JSON ({reason}).", "malformed JSON", error)
                continue
            if not isinstance(record, dict):
                self._note(
                    f"{self.where(number)}: a JSON object in braces is expected, not {kind_of(record)}; "
                    "JSONL holds one object a line.",
                    "malformed JSON",
                )
                continue
            yield number, record

    def _table(self) -> Iterator[tuple[int, dict[str, Any]]]:
        csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
        last = 0  # the line that csv took last; lines that are no text never reach it

        def lines() -> Iterator[str]:
            nonlocal last
            for last, line in self._lines():  # noqa: B007
                yield line

        if self.format == ".tsv":
            reader = csv.reader(lines(), delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            reader = csv.reader(lines(), strict=True)
        header: list[str] | None = None
        while True:
            before, begun = last, reader.line_num
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(f"{self.where(before + 1)}: not a readable table row ({error}).") from error
            start = last + 1 - (reader.line_num - begun)
            if not values:
                continue
            if header is None:
                header = [name.strip() for name in values]
                repeated = next((name for name in header if header.count(name) > 1), None)
                if repeated is not None:
                    raise DataError(
                        f"{self.where(start)}: the header names column {shown_columns([repeated])[0]!r} twice."
                    )
            elif len(values) != len(header):
                self._note(
                    f"{self.where(start)}: {len(values)} columns, but the header on the first line has "
                    f"{len(header)} ({', '.join(shown_columns(header))}).",
                    "wrong number of columns",
                )
            else:
                yield start, dict(zip(header, values, strict=True))

    def _bare_table(self, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in self._lines():
            text = line.rstrip("\r\n")
            values = text.split("\t")
            if len(values) == len(columns):
                yield number, dict(zip(columns, values, strict=True))
            elif text:
                self._note(
                    f"{self.where(number)}: {len(values)} columns, but {len(columns)} are expected "
                    f"({', '.join(columns)}; tabs between them, no header).",
                    "wrong number of columns",
                )

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
        except UnicodeDecodeError as error:
            raise _unreadable(f"{self.path} row {number + 1} or one soon after it: not UTF-8 text.") from error
        except (pyarrow.ArrowException, OSError) as error:
            reason = one_line(error)
            raise _unreadable(f"{self.path} is not a readable parquet file ({reason}).") from error


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


def _unreadable(message: str) -> DataError:
    return DataError(message, kind="unreadable file")


def _say_nothing(problem: DataError) -> None:
    """For a second reading of what has been complained about."""


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, shortened: messages here are one line."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return first if len(first) <= 160 else first[:157] + "..."


def _optional(package: str, path: Path) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(f"Reading {path} needs {package}: pip install {package}.") from error


def columns_of(path: str | Path) -> tuple[str, ...]:
    """The columns of the first record of a file that is one, as they may be shown; () where there is none."""
    for _, record in RecordFile(path, complain=_say_nothing):
        return shown_columns(record)
    return ()
