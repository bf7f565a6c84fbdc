"""The columns of a record by any of their names, with every complaint naming the place and never showing a text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from lit_dpret.datamodules.complaints import Complain
from lit_dpret.errors import DataError

_KNOWN = frozenset(
    {"_id", "id", "text", "title", "query", "passage", "query_id", "query-id", "passage_id", "corpus-id", "corpus_id",
     "score", "grade", "user_id", "domain", "split", "question", "answer"}
)  # fmt: skip


NOT_UNICODE = "holds half of a surrogate pair (\\ud800 to \\udfff alone), which is no character; mend the text"


class Records(Protocol):
    """Records in order, each with its place, and what to do about a bad one."""

    complain: Complain
    format: str

    def where(self, number: int) -> str: ...
    def place(self, number: int) -> str: ...
    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]: ...


class Fields:
    """Picks columns out of records by any of their accepted names, and complains precisely."""

    def __init__(self, file: Records) -> None:
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
            f"{self.file.where(number)}: no {word} {wanted}; found: {', '.join(shown_columns(record)) or 'none'}.",
            kind="missing column",
        )

    def id(self, number: int, record: Mapping[str, Any], names: tuple[str, ...]) -> str:
        """The id under one of ``names``; a missing, empty or non-id value raises DataError."""
        name = self.name(number, record, names)
        found = as_id(record[name])
        if found is None:
            kind = "empty" if isinstance(record[name], str) else kind_of(record[name])
            raise DataError(f"{self.file.where(number)}: {name!r} is {kind}; an id is expected.", kind="no id")
        return self.unicode(number, name, found)

    def optional_id(self, number: int, record: Mapping[str, Any], name: str) -> str | None:
        """The id under ``name``; None where there is none."""
        found = as_id(record.get(name))
        return None if found is None else self.unicode(number, name, found)

    def unicode(self, number: int, name: str, value: str) -> str:
        """Return ``value``, a text; one that cannot be written as UTF-8 raises DataError."""
        if not is_unicode(value):
            raise DataError(f"{self.file.where(number)}: {name!r} {NOT_UNICODE}.", kind="not Unicode text")
        return value

    def text(self, number: int, record: Mapping[str, Any], names: tuple[str, ...], *, optional: bool = False) -> str:
        """The text under one of ``names``; ``""`` where it is optional and missing or null."""
        if optional and all(record.get(name) is None for name in names):
            return ""
        name = self.name(number, record, names)
        value = record[name]
        if not isinstance(value, str):
            raise DataError(
                f"{self.file.where(number)}: {name!r} is {kind_of(value)}; a text is expected.", kind="no text"
            )
        return self.unicode(number, name, value)

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
                f"{self.file.where(number)}: grade {name}={shown_number(value)} is not a whole number.",
                kind="no whole-number grade",
            ) from None


def is_unicode(text: str) -> bool:
    r"""Whether a text can be written as UTF-8. JSON can say half of a surrogate pair, which is no character.

    Example:
        >>> is_unicode("\N{WAVE DASH}"), is_unicode("\ud800")
        (True, False)
    """
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def as_id(value: object) -> str | None:
    r"""An id as a string; whole numbers are ids too. None for what cannot be an id.

    Whitespace around it is no part of it, and its accents are in Unicode's composed form (NFC): who is meant does not
    depend on how an id was written.

    Example:
        >>> as_id("u1 "), as_id(7), as_id("Jose\N{COMBINING ACUTE ACCENT}") == "Jos\N{LATIN SMALL LETTER E WITH ACUTE}"
        ('u1', '7', True)
    """
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.strip()) or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return None


def shown_columns(names: Iterable[object]) -> tuple[str, ...]:
    """Names of columns for a message. In a table without a header they are private texts, which are not shown.

    They are names where each is one word, or where one of them is a name that we know; other tables have no header.

    Example:
        >>> shown_columns(["query-id", "user id", "does my policy cover a flood"])
        ('query-id', 'user id', '(a text)')
        >>> shown_columns(["insulin dose", "Ask your doctor how much."])
        ('(a text)', '(a text)')
    """
    found = [str(name) for name in names]
    most = 2 if any(name.strip().lower() in _KNOWN for name in found) else 1
    if most == 1 and any(len(name.split()) > 1 for name in found):
        most = 0
    return tuple(
        name if len(name) <= 32 and len(name.split()) <= most and is_unicode(name) else "(a text)" for name in found
    )


def shown_number(value: object) -> str:
    """A value that should be a number, for a message: itself if it looks like one, for else it is a private text.

    Example:
        >>> shown_number("1.5"), shown_number("insulin dose")
        ("'1.5'", '(a text)')
    """
    text = str(value)
    return repr(text) if re.fullmatch(r"[-+.,\deE]{0,24}|nan|inf|None|True|False", text) else "(a text)"


def kind_of(value: object) -> str:
    """What a value is, in words that do not show it."""
    names = {list: "a list", dict: "an object", str: "a string", bool: "true or false", int: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
