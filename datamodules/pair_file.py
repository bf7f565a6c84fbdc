"""Read (query, passage) records, such as a query log, into a `Collection`; docs/data.md lists the columns.

Ids are never derived from a query's text, because a hash of a private text can be guessed: a record without
``query_id`` is named after its line, ``row-3`` (``row-2.3`` in the second file). A passage's id may be derived from its
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.collection import Collection, GivenIds
from lit_dpret.datamodules.layouts import CorpusSettings, Passages, open_corpus, query_text, split_name
from lit_dpret.datamodules.passage_store import PassageStore
from lit_dpret.datamodules.records import Complain, Records, as_id, refuse
from lit_dpret.datamodules.rows import stable_hash
from lit_dpret.datamodules.shards import Shards, open_records
from lit_dpret.errors import ConfigurationError, DataError


@dataclass(frozen=True, kw_only=True)
class PairColumns:
    """Column names of (query, passage) records; see the module docstring."""

    query: str = "query"  # texts of queries
    passage: str = "passage"  # texts of passages
    query_id: str = "query_id"  # optional, like all that follow; an empty name means no column
    passage_id: str = "passage_id"  # ids of passages
    user: str = "user_id"  # ids of users
    domain: str = "domain"  # domains of queries
    split: str = "split"  # names of splits
    required: tuple[str, ...] = ()  # the optional columns that every record must have

    @classmethod
    def renamed(cls, names: Mapping[str, str]) -> PairColumns:
        """Return the columns with other names: ``{"query": "question", "user_id": "author"}``."""
        known = {**{name: name for name in ("query", "passage", "query_id", "passage_id", "domain", "split")},
                 "user_id": "user"}  # fmt: skip
        for column, name in names.items():
            if column not in known or not isinstance(name, str) or not name:
                raise ConfigurationError(
                    f"datamodule.columns={dict(names)}: {column}: {name!r} does not name a column; the keys are "
                    f"{', '.join(known)}, and each value is that column's name in the file."
                )
        return cls(**{known[column]: name for column, name in names.items()}, required=tuple(names.values()))


def read_pairs(
    path: str | Path | Shards,
    *,
    corpus: str | Path | Shards | None = None,
    columns: PairColumns | None = None,
    how: CorpusSettings | None = None,
    complain: Complain = refuse,
) -> Collection:
    """Read a collection from a file, or shards, of (query, passage) records; see the module docstring.

    With ``corpus``, its passages, read with the settings ``how``, are the only ones, and every pair must name one of
    them by ``passage_id`` or by its exact text.
    """
    reader = PairReader(corpus=open_corpus(corpus, how, complain=complain) if corpus else None, columns=columns)
    records = open_records(path, knob="datamodule.pairs", complain=complain)
    reader.add(records)
    return reader.collection(records.source)


class PairReader:
    """Collect pairs from one or several files; with a ``corpus``, only its passages are allowed."""

    def __init__(self, *, corpus: Passages | None = None, columns: PairColumns | None = None) -> None:
        self.columns = PairColumns() if columns is None else columns
        self.corpus = corpus
        self._passages: dict[str, str] = {}
        self._by_text: dict[str, str] | None = None if corpus else {}
        self._queries: dict[str, str] = {}
        self._users: dict[str, str] = {}
        self._domains: dict[str, str] = {}
        self._splits: dict[str, str] = {}
        # The location (source, number) of the first record of each query, and of each pair.
        self._first: dict[str, tuple[int, int]] = {}
        self._pairs: dict[tuple[str, str], tuple[int, int]] = {}
        self._qrels: dict[str, dict[str, dict[str, int]]] = {}
        self._sources: list[Records] = []
        self._ids = GivenIds()

    def add(self, records: Records, *, split: str | None = None, limit: int | None = None) -> int:
        """Add at most ``limit`` records of one source; return their number. Records without a split go to ``split``."""
        self._sources.append(records)
        count = 0
        for count, (number, record) in enumerate(islice(records, limit), start=1):  # noqa: B007
            self._take(records, number, record, split or "train")
        return count

    def _unnamed(self, number: int) -> str:
        """Return an id for a query without one."""
        file = len(self._sources)
        return f"row-{number}" if file == 1 else f"row-{file}.{number}"

    def collection(self, source: str) -> Collection:
        """Return everything that was added."""
        if not self._pairs:
            raise DataError(f"{source} holds no pairs.", kind="empty file")
        return Collection(
            passages=self.corpus.texts if self.corpus else self._passages,
            queries=self._queries,
            qrels=self._qrels,
            users=self._users,
            domains=self._domains,
            passage_domains=self.corpus.domains if self.corpus else {},
            query_ids=self._ids.found(),
            source=source,
        )

    def _take(self, records: Records, number: int, record: Mapping[str, Any], split: str) -> None:
        """Add one record, or complain of every faulty part of it."""
        columns, named = self.columns, self.columns.query_id in record
        self._ids.note(record, named=named)
        shown = as_id(record.get(columns.query_id)) or self._unnamed(number)
        parts = records.sound(
            number,
            *(partial(records.name, number, record, name) for name in columns.required),
            lambda: records.id(number, record, columns.query_id) if named else self._unnamed(number),
            partial(query_text, records, number, record, columns.query, shown),
            *(partial(records.optional_id, number, record, name) for name in (columns.user, columns.domain)),
            lambda: split_name(
                records.text(number, record, columns.split, optional=True) or split, records.where(number)
            ),
            partial(self._passage, records, number, record),
        )
        if parts is None:
            return
        *_, query_id, text, user, domain, split, passage_id = parts
        try:
            self._query(records, number, query_id, text, user, domain, split)
            self._pair(records, number, query_id, passage_id)
        except DataError as error:
            records.complain_of(number, error)

    def _pair(self, records: Records, number: int, query_id: str, passage_id: str) -> None:
        if (query_id, passage_id) in self._pairs:
            raise DataError(
                f"{records.where(number)}: query {query_id!r} and passage {passage_id!r} were already paired on "
                f"{self._there(self._pairs[query_id, passage_id])}.",
                kind="repeated pair",
            )
        self._pairs[query_id, passage_id] = len(self._sources) - 1, number
        self._qrels.setdefault(self._splits[query_id], {}).setdefault(query_id, {})[passage_id] = 1

    def _there(self, place: tuple[int, int]) -> str:
        """Name the location of an earlier record, with its file if that differs."""
        source, number = place
        records = self._sources[source]
        return records.place(number) if records is self._sources[-1] else records.where(number)

    def _query(
        self, records: Records, number: int, query_id: str, text: str, user: str | None, domain: str | None, split: str
    ) -> None:
        if query_id not in self._queries:
            self._queries[query_id], self._splits[query_id] = text, split
            self._first[query_id] = len(self._sources) - 1, number
            if user is not None:
                self._users[query_id] = user
            if domain is not None:
                self._domains[query_id] = domain
            return
        for word, old, new in (
            ("texts", self._queries[query_id], text),
            ("users", self._users.get(query_id), user),
            ("splits", self._splits[query_id], split),
        ):
            if old != new:
                places = f"here and on {self._there(self._first[query_id])}"
                raise DataError(
                    f"{records.where(number)}: query {query_id!r} has two {word}, {places}.",
                    kind=f"query with two {word}",
                )

    def _passage(self, records: Records, number: int, record: Mapping[str, Any]) -> str:
        where = records.where(number)
        passage_id = records.optional_id(number, record, self.columns.passage_id)
        is_named = passage_id is not None and self.corpus is not None
        text = records.text(number, record, self.columns.passage, optional=is_named).strip()
        if self.corpus is not None:
            known = self.corpus.texts
            if passage_id is None:
                passage_id = self._ids_by_text().get(text)
            if passage_id is None or passage_id not in known:
                named = "with this text" if passage_id is None else repr(passage_id)
                raise DataError(
                    f"{where}: passage {named} is not in the corpus (datamodule.corpus).", kind="unknown passage"
                )
            if text and text != known[passage_id]:
                raise DataError(
                    f"{where}: passage {passage_id!r} has another text in the corpus.", kind="passage with two texts"
                )
            return passage_id
        if not text:
            raise DataError(f"{where}: the passage has an empty text.", kind="empty passage")
        if passage_id is None:
            passage_id = self._ids_by_text().setdefault(text, f"p-{stable_hash(text).hex()[:20]}")
        if self._passages.setdefault(passage_id, text) != text:
            raise DataError(
                f"{where}: passage {passage_id!r} has two texts, here and in an earlier record.",
                kind="passage with two texts",
            )
        return passage_id

    def _ids_by_text(self) -> dict[str, str]:
        if self._by_text is None:
            texts = self.corpus.texts if self.corpus else {}
            if isinstance(texts, PassageStore):
                column = self.columns.passage_id
                advice = f"give {column}" if column else "set datamodule.passage_id_column"
                raise ConfigurationError(
                    "Records without passage ids are matched to the corpus by text, so the corpus must be in memory: "
                    f"{advice}, or set datamodule.in_memory=true."
                )
            self._by_text = {text: passage_id for passage_id, text in texts.items()}
        return self._by_text
