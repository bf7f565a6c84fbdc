"""Record files in any format, with error messages that name the file and the line."""

from __future__ import annotations

import codecs
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

from lit_dpret.datamodules.records import Complain, Records, kind_of, refuse, shown_columns
from lit_dpret.errors import DataError, first_line, in_words
from lit_dpret.lazy import optional

FORMATS = (".jsonl", ".tsv", ".csv", ".parquet")
_COMPRESSIONS = (".gz", ".zst")
_LONGEST_FIELD = 2**27  # csv's own limit of 131,072 characters is shorter than real articles


class RecordFile(Records):
    """The records of one file, whose name decides the format; every iteration reopens the file and closes it at the
    end.

    ``knob`` is the setting that names the file, for messages, and ``source`` the file's name there, if that is not its
    path; ``header`` names the columns of a TSV file without a header line.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        knob: str = "the path",
        header: Sequence[str] | None = None,
        complain: Complain = refuse,
        source: str = "",
    ) -> None:
        super().__init__(source or str(path), complain)
        self.path, self.header = Path(path), header
        self.lines = 0  # the number of lines, or rows, that the last iteration has read
        if not self.path.is_file():
            problem = "is a folder, not a file" if self.path.exists() else "does not exist"
            raise DataError(f"{self.path} {problem}; check {knob}.", kind="missing file")
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        self._compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
        self.format = suffixes[-1] if suffixes else ""
        self.row_word = "row" if self.format == ".parquet" else "line"
        self.column_word = "key" if self.format == ".jsonl" else "column"
        if self.format not in FORMATS or (self.format == ".parquet" and self._compression):
            raise _unreadable(
                f"{self.source} has no known format: its name must end in .jsonl, .tsv or .csv (then also .gz or "
                f".zst), or .parquet; check {knob}."
            )
        if header is not None and self.format != ".tsv":
            raise DataError(f"{self.source} is read without a header line, so it must be a .tsv file; check {knob}.")

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            if self.format == ".parquet":
                yield from self._parquet()
            elif self.format == ".jsonl":
                yield from self._jsonl()
            elif self.header is None:
                yield from self._table()
            else:
                yield from self._bare_table(self.header)
        except DataError as error:  # reading of the file ends here
            self.complain(error)

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Open the file, decompressed."""
        try:
            if self._compression == ".gz":
                with gzip.open(self.path, "rb") as unzipped:
                    yield unzipped  # type: ignore[misc]  # GzipFile reads bytes as IO[bytes] does
            elif self._compression == ".zst":
                zstandard = optional("zstandard", f"Reading {self.source}", "zstandard")
                try:
                    with self.path.open("rb") as packed:
                        yield io.BufferedReader(_ZstdStream(packed, zstandard))
                except zstandard.ZstdError as error:
                    raise _unreadable(f"{self.source} is not a readable zstd file ({error}).") from error
            else:
                with self.path.open("rb") as plain:
                    yield plain
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _unreadable(f"{self.source} is not a readable gzip file ({error}).") from error
        except OSError as error:
            raise _unreadable(f"{self.source} cannot be read ({error.strerror or error}).") from error

    def _lines(self) -> Iterator[tuple[int, str]]:
        self.lines = 0
        with self.opened() as stream:
            for number, line in enumerate(stream, start=1):
                self.lines = number
                if number == 1 and line[:2] == b"\x1f\x8b":
                    raise _unreadable(f"{self.source} is compressed with gzip; rename it to {self.path.name}.gz.")
                if number == 1 and line[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise _unreadable(f"{self.source} is UTF-16 text. Save it as UTF-8.")
                if number == 1 and not line.endswith(b"\n") and b"\r" in line[:-1]:
                    raise _unreadable(
                        f"{self.source} ends its lines with CR alone. Save it with Unix line endings (LF)."
                    )
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    problem = DataError(
                        f"{self.where(number)}: not UTF-8 text (byte {error.start + 1}).", kind="not UTF-8"
                    )
                    # A CSV record may span lines; without one of its lines it parses as another record.
                    problem.record = (self.source, number) if self.format != ".csv" else None
                    self.complain(problem)
                    continue
                yield number, text

    def _note(self, number: int, message: str, kind: str) -> None:
        self.complain_of(number, DataError(f"{self.where(number)}: {message}.", kind=kind))

    def _jsonl(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in self._lines():
            if not line.strip():
                continue
            try:
                record = json.loads(line.rstrip())  # strip: an error at the end is not on the next line
            except (ValueError, RecursionError) as error:
                reason = "a number is too long" if isinstance(error, ValueError) else "nested too deeply"
                reason = _what_json_says(error) if isinstance(error, json.JSONDecodeError) else reason
                if number == 1 and line.strip() in ("[", "{"):
                    reason = "spread over several lines; JSONL holds one object per line"
                self._note(number, f"malformed JSON ({reason})", "malformed JSON")
                continue
            if isinstance(record, dict):
                yield number, record
            else:
                expected = "a JSON object in braces is expected"
                self._note(
                    number, f"{expected}, not {kind_of(record)}; JSONL holds one object per line", "malformed JSON"
                )

    def _table(self) -> Iterator[tuple[int, dict[str, Any]]]:
        csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
        last = 0  # the last line passed to csv; lines that are not text never reach it

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
                    shown = shown_columns([repeated])[0]
                    raise DataError(f"{self.where(start)}: the header names column {shown!r} twice.")
                between, others = ("tabs", ",;|") if self.format == ".tsv" else ("commas", "\t;|")
                if len(header) == 1 and (other := next((one for one in others if one in header[0]), None)):
                    raise DataError(
                        f"{self.where(start)}: the header has {other!r} between its columns, but a {self.format} file "
                        f"needs {between}."
                    )
            elif len(values) != len(header):
                named = f"{len(header)} ({', '.join(shown_columns(header))})"
                problem = f"{len(values)} columns, but the header on the first line has {named}"
                self._note(start, problem, "wrong number of columns")
            else:
                yield start, dict(zip(header, values, strict=True))

    def _bare_table(self, header: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in self._lines():
            text = line.rstrip("\r\n")
            values = text.split("\t")
            if len(values) == len(header):
                yield number, dict(zip(header, values, strict=True))
            elif text:
                named = f"({', '.join(header)}; tabs between them, no header)"
                problem = f"{len(values)} columns, but {len(header)} are expected {named}"
                self._note(number, problem, "wrong number of columns")

    def _parquet(self) -> Iterator[tuple[int, dict[str, Any]]]:
        pyarrow = optional("pyarrow", f"Reading {self.source}", "pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
        number = self.lines = 0
        try:
            with parquet.ParquetFile(self.path) as table:
                for batch in table.iter_batches():
                    for record in batch.to_pylist():
                        self.lines = number = number + 1
                        yield number, record
        except UnicodeDecodeError as error:
            raise _unreadable(f"{self.source} row {number + 1} or one soon after it: not UTF-8 text.") from error
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(f"{self.source} is not a readable parquet file ({first_line(error)}).") from error


class _ZstdStream(io.RawIOBase):
    """Decompress zstd and, unlike zstandard's own stream reader, refuse a truncated file."""

    def __init__(self, packed: IO[bytes], zstandard: Any) -> None:
        self._packed, self._zstandard = packed, zstandard
        self._frame: Any = None
        self._ready = self._left = b""

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


def _what_json_says(error: json.JSONDecodeError) -> str:
    """Return the parser's reason with the column, without which some of its sentences end in the middle."""
    return f"{error.msg.rstrip(': ').removesuffix(' at')} at column {error.colno}"


def parse_json_file(path: Path) -> Any:
    """Read a JSON file, decompressed if its name ends in .gz."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
            return json.load(stream)
    except json.JSONDecodeError as error:
        reason = _what_json_says(error)
        raise DataError(f"{path} line {error.lineno}: malformed JSON ({reason}).", kind="malformed JSON") from error
    except RecursionError as error:
        raise DataError(f"{path}: malformed JSON (nested too deeply).", kind="malformed JSON") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _unreadable(f"{path} cannot be read: {in_words(error)}.") from error


def ir_records(source: str, records: str) -> Iterator[Any]:
    """Yield the ``docs``, ``queries`` or ``qrels`` of a data set that ir-datasets downloads and verifies."""
    instead = "Or set datamodule.download=false and name the folder of the data."
    library = optional(
        "ir_datasets", "datamodule.download=true", "lit-dpret[beir]", package="ir-datasets", instead=instead
    )
    try:
        yield from getattr(library.load(source), f"{records}_iter")()
    except Exception as error:  # of any kind: a network, a disk, a differing hash
        raise DataError(f"ir-datasets could not load {source}: {first_line(error)}") from error


def _unreadable(message: str) -> DataError:
    return DataError(message, kind="unreadable file")
