"""Record files in any format, with error messages that name the file and the line.

A message shows ids, column names and grades, never a text: the file may be a private query log, and messages end up in
logs. Readers pass problems to a `Complain`: `refuse` raises them; `Problems` counts them, and the reader leaves the
record out and continues.
"""

from __future__ import annotations

import codecs
import copy
import csv
import gzip
import importlib
import io
import json
import math
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lit_dpret.errors import DataError, first_line, in_words
from lit_dpret.lazy import optional
from lit_dpret.settings import is_whole

FORMATS = (".jsonl", ".tsv", ".csv", ".parquet")
NOT_UNICODE = "holds half of a surrogate pair (\\ud800 to \\udfff alone), which is not a character; mend the text"
_COMPRESSIONS = (".gz", ".zst")
_LONGEST_FIELD = 2**27  # csv's own limit of 131,072 characters is shorter than real articles
_MOST_FINDS = 20  # for a reader that collects problems: each find reads the file again
_KNOWN_COLUMNS = frozenset(
    {"_id", "id", "text", "title", "query", "passage", "query_id", "query-id", "passage_id", "corpus-id", "corpus_id",
     "score", "grade", "user_id", "domain", "split", "question", "answer"}
)  # fmt: skip

Complain = Callable[[DataError], None]


def refuse(problem: DataError) -> None:
    """Raise the problem: a reader that reports to this function stops at the first one."""
    raise problem


@dataclass(kw_only=True)
class Problems:
    """Problems by kind: their number, and the messages of the first few; ``found`` keeps these few in data order.

    Example:
        >>> problems = Problems(examples=1)
        >>> for line in (3, 8):
        ...     problems(DataError(f"corpus.jsonl line {line}: malformed JSON.", kind="malformed JSON"))
        >>> problems.counts, problems.shown
        ({'malformed JSON': 2}, {'malformed JSON': ['corpus.jsonl line 3: malformed JSON.']})
    """

    examples: int = 5  # number of messages to keep of each kind
    counts: dict[str, int] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)
    found: list[DataError] = field(default_factory=list, repr=False)

    def __call__(self, problem: DataError) -> None:
        self.counts[problem.kind] = self.counts.get(problem.kind, 0) + 1
        shown = self.shown.setdefault(problem.kind, [])
        if len(shown) < self.examples:
            shown.append(str(problem))
            self.found.append(problem)

    @property
    def total(self) -> int:
        """The number of problems of all kinds."""
        return sum(self.counts.values())


class Records:
    """Records in order, each with its location, and access to columns under any of their names.

    Iterating yields ``(number, record)``, with numbers counted from 1. The methods that take both pick a column and
    raise a `DataError` that names the location. Problems found while iterating go to ``complain``; if it does not
    raise, the record is left out.
    """

    row_word, column_word = "row", "column"

    def __init__(self, source: str, complain: Complain = refuse) -> None:
        self.source, self.complain = source, complain
        self._finds = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        raise NotImplementedError

    def where(self, number: int) -> str:
        """Return the location of record ``number`` for a message."""
        return f"{self.source} {self.place(number)}"

    def place(self, number: int) -> str:
        """Return ``line 3``, or ``row 3``; 0 means an unknown location."""
        return f"{self.row_word} {number}" if number else f"an earlier {self.row_word}"

    def sound(self, number: int, *reads: Callable[[], Any]) -> list[Any] | None:
        """Return the results of ``reads`` for record ``number``; None after complaining of each distinct fault."""
        found: list[Any] = []
        faults: dict[str, DataError] = {}
        for read in reads:
            try:
                found.append(read())
            except DataError as error:
                faults.setdefault(str(error), error)
        for fault in faults.values():
            self.complain_of(number, fault)
        return None if faults else found

    def complain_of(self, number: int, problem: DataError) -> None:
        """Complain of a problem in record ``number``."""
        problem.record = self.source, number
        self.complain(problem)

    def columns(self) -> tuple[str, ...]:
        """Return the columns of the first record, in a printable form; () without records."""
        quiet = copy.copy(self)
        quiet.complain = _ignore
        return next((shown_columns(record) for _, record in quiet), ())

    def find(self, before: int, *wanted: tuple[tuple[str, ...], str]) -> int:
        """Return the number of the first record, before ``before``, with these ids; 0 for none.

        Each of ``wanted`` is a tuple of column names, and an id. This reads the records again, so it is only for a few
        messages.
        """
        self._finds += 1
        if self.complain is not refuse and self._finds > _MOST_FINDS:
            return 0
        again = copy.copy(self)
        again.complain = _ignore
        for number, record in again:
            if number >= before:
                break
            held = (next((record[name] for name in names if name in record), None) for names, _ in wanted)
            if all(as_id(value) == looked_for for value, (_, looked_for) in zip(held, wanted, strict=True)):
                return number
        return 0

    def name(self, number: int, record: Mapping[str, Any], *names: str) -> str:
        """Return the first of ``names`` that ``record`` has."""
        for name in names:
            if name in record:
                return name
        wanted = " or ".join(repr(name) for name in names)
        found = ", ".join(shown_columns(record)) or "none"
        raise DataError(f"{self.where(number)}: no {self.column_word} {wanted}; found: {found}.", kind="missing column")

    def id(self, number: int, record: Mapping[str, Any], *names: str) -> str:
        """Return the id under one of ``names``."""
        name = self.name(number, record, *names)
        found = as_id(record[name])
        if found is None:
            kind = "empty" if isinstance(record[name], str) else kind_of(record[name])
            raise DataError(f"{self.where(number)}: {name!r} is {kind}; an id is expected.", kind="no id")
        return self.unicode(number, name, found)

    def optional_id(self, number: int, record: Mapping[str, Any], name: str) -> str | None:
        """Return the id under ``name``; None if it is missing, null, NaN or empty.

        Raises:
            DataError: The id is neither a string nor an integer: ignoring it would lose the owner of the row.
        """
        value = record.get(name)
        found = as_id(value)
        missing = value is None or isinstance(value, str) or (isinstance(value, float) and math.isnan(value))
        if found is None and not missing:
            raise DataError(f"{self.where(number)}: {name!r} is {kind_of(value)}; an id is expected.", kind="no id")
        return None if found is None else self.unicode(number, name, found)

    def text(self, number: int, record: Mapping[str, Any], *names: str, optional: bool = False) -> str:
        """Return the text under one of ``names``; ``""`` if it is optional and missing or null."""
        if optional and all(record.get(name) is None for name in names):
            return ""
        name = self.name(number, record, *names)
        value = record[name]
        if not isinstance(value, str):
            raise DataError(
                f"{self.where(number)}: {name!r} is {kind_of(value)}; a string is expected.", kind="no text"
            )
        return self.unicode(number, name, value)

    def unicode(self, number: int, name: str, value: str) -> str:
        """Return ``value``; refuse a text that cannot be encoded as UTF-8."""
        if not is_unicode(value):
            raise DataError(f"{self.where(number)}: {name!r} {NOT_UNICODE}.", kind="not Unicode text")
        return value

    def grade(self, number: int, record: Mapping[str, Any], *names: str) -> int:
        """Return the relevance grade under one of ``names``, an integer."""
        name = self.name(number, record, *names)
        value = record[name]
        try:
            if isinstance(value, bool) or value is None or (isinstance(value, float) and not value.is_integer()):
                raise ValueError
            return int(value)
        except (ValueError, TypeError):
            raise DataError(
                f"{self.where(number)}: grade {name}={shown_number(value)} is not an integer.",
                kind="no whole-number grade",
            ) from None


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


def is_unicode(text: str) -> bool:
    r"""Return whether a text can be encoded as UTF-8. JSON can contain lone surrogates.

    Example:
        >>> is_unicode("\N{WAVE DASH}"), is_unicode("\ud800")
        (True, False)
    """
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def as_id(value: object) -> str | None:
    r"""Return an id as a string; integers are ids too. Return None for invalid ids.

    Surrounding whitespace is stripped, accents are composed (NFC), and 7.0 becomes 7: the owner must not depend on how
    an id was written.

    Example:
        >>> as_id("u1 "), as_id(7), as_id("Jose\N{COMBINING ACUTE ACCENT}") == "Jos\N{LATIN SMALL LETTER E WITH ACUTE}"
        ('u1', '7', True)
    """
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.strip()) or None
    if is_whole(value):
        return str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # larger floats are ambiguous
        return str(int(value))
    return None


def shown_columns(names: Iterable[object]) -> tuple[str, ...]:
    """Return column names in a printable form: in a table without a header they are private texts.

    They count as names if each is one word, or if at least one is a known column name.

    Example:
        >>> shown_columns(["query-id", "user id", "does my policy cover a flood"])
        ('query-id', 'user id', '(text hidden)')
        >>> shown_columns(["insulin dose", "Ask your doctor how much."])
        ('(text hidden)', '(text hidden)')
    """
    found = [str(name) for name in names]
    most = 2 if any(name.strip().lower() in _KNOWN_COLUMNS for name in found) else 1
    if most == 1 and any(len(name.split()) > 1 for name in found):
        most = 0
    return tuple(
        name if len(name) <= 32 and len(name.split()) <= most and is_unicode(name) else "(text hidden)"
        for name in found
    )


def shown_number(value: object) -> str:
    """Return a supposed number in a printable form: other values may be private texts.

    Example:
        >>> shown_number("1.5"), shown_number("insulin dose")
        ("'1.5'", '(text hidden)')
    """
    text = str(value)
    return repr(text) if re.fullmatch(r"[-+.,\deE]{0,24}|nan|inf|None|True|False", text) else "(text hidden)"


def kind_of(value: object) -> str:
    """Name the type of a value, without showing it."""
    names = {list: "a list", dict: "an object", str: "a string", bool: "true or false", int: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _ignore(problem: DataError) -> None:
    """Ignore problems that the first reading has already reported."""


def _unreadable(message: str) -> DataError:
    return DataError(message, kind="unreadable file")
