"""Records in order, whatever they are read from: their columns, ids, texts and grades, and problems with them.

A message shows ids, column names and grades, never a text: the records may be a private query log, and messages end up
in logs. Readers pass problems to a `Complain`: `refuse` raises them; `Problems` counts them, and the reader leaves the
record out and continues.
"""

from __future__ import annotations

import copy
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_dpret.errors import DataError
from lit_dpret.settings import is_whole

NOT_UNICODE = "holds half of a surrogate pair (\\ud800 to \\udfff alone), which is not a character; mend the text"


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
