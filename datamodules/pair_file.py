"""One file of (query, passage) records, as a query log gives them, as a `Collection`.

Columns: ``query`` and ``passage``, both texts; optional ``query_id``, ``passage_id``, ``user_id``,
``domain`` and ``split``. Others are ignored. `PairColumns` gives them other names, and a `PairReader` takes
several files or any other source of records.

- Without ``query_id`` each record is a query of its own with the id ``row-<line number>``
  (``row-<file>.<line number>`` from the second file on). Ids are
  never made from a query's text, because a hash of a private text can be guessed.
- Without ``passage_id`` identical texts are one passage, and its id comes from the text.
- ``passage`` may be missing or empty where a corpus is given and ``passage_id`` names a passage of it.
- Without ``split`` every record is for training; ``valid`` and ``validation`` mean ``dev``.

Without a corpus the passages are those of the private records, so their *list* is private even
where each text is public: `PairsDataModule.public_passages` then asks for a declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.complaints import Complain, refuse
from lit_dpret.datamodules.corpus import InMemory, open_corpus
from lit_dpret.datamodules.fields import Fields, Records
from lit_dpret.datamodules.layouts import Passages, keep, query_text, split_name
from lit_dpret.datamodules.passage_store import PassageStore
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.datamodules.records import stable_hash
from lit_dpret.errors import ConfigurationError, DataError


@dataclass(frozen=True, kw_only=True)
class PairColumns:
    """What the columns of (query, passage) records are called; see the module's text.

    Args:
        query: Texts of queries.
        passage: Texts of passages.
        query_id: Optional, as are all that follow; an empty name stands for no column.
        passage_id: Ids of passages.
        user: Ids of users.
        domain: Domains of queries.
        split: Names of splits.
        required: Those of the optional columns that no record may lack.
    """

    query: str = "query"
    passage: str = "passage"
    query_id: str = "query_id"
    passage_id: str = "passage_id"
    user: str = "user_id"
    domain: str = "domain"
    split: str = "split"
    required: tuple[str, ...] = ()


def read_pairs(
    path: str | Path,
    *,
    corpus: str | Path | None = None,
    allow_empty_passages: bool = False,
    in_memory: InMemory = True,
    cache_dir: str | Path | None = None,
    complain: Complain = refuse,
) -> Collection:
    """A collection from one file of (query, passage) records; see the module's text.

    With ``corpus`` the passages are those of that file, and every pair must name one of them, by
    ``passage_id`` or by its exact text. Of it alone ``in_memory`` and ``cache_dir`` speak.

    Raises:
        DataError: A record is malformed, contradicts another (same id, other text or user or
            split), repeats a pair, or names a passage the corpus lacks.
    """
    passages = None
    if corpus:
        passages = open_corpus(
            corpus, in_memory=in_memory, cache_dir=cache_dir, allow_empty=allow_empty_passages, complain=complain
        )
    reader = PairReader(corpus=passages)
    reader.add(RecordFile(path, knob="datamodule.pairs", complain=complain))
    return reader.collection(str(path))


class PairReader:
    """Collects pairs out of one file or several.

    Args:
        corpus: The only passages that there may be; None takes those of the records.
        columns: What the columns are called.
    """

    def __init__(self, *, corpus: Passages | None = None, columns: PairColumns | None = None) -> None:
        self.columns = PairColumns() if columns is None else columns
        self.corpus = corpus
        self.passages: dict[str, str] = {}
        self._by_text: dict[str, str] | None = None if corpus else {}
        self.queries: dict[str, str] = {}
        self.users: dict[str, str] = {}
        self.domains: dict[str, str] = {}
        self.splits: dict[str, str] = {}
        self.first: dict[str, tuple[int, int]] = {}
        self.pairs: dict[tuple[str, str], tuple[int, int]] = {}
        self.qrels: dict[str, dict[str, dict[str, int]]] = {}
        self._sources: list[Records] = []

    def add(self, records: Records, *, split: str | None = None, limit: int | None = None) -> int:
        """Take the records of one source; returns how many there were.

        Args:
            records: What to read; problems go to its ``complain``, and the record is then left out.
            split: The split of records that do not name one; None for train.
            limit: Take so many records at most, the first ones.

        Raises:
            DataError: See `read_pairs`.
        """
        self._sources.append(records)
        self._fields = Fields(records)
        count = 0
        for count, (number, record) in enumerate(islice(records, limit), start=1):  # noqa: B007
            try:
                self._take(number, record, split or "train")
            except DataError as error:
                records.complain(error)
        return count

    def collection(self, source: str) -> Collection:
        """Everything that was taken.

        Raises:
            DataError: That is nothing.
        """
        if not self.pairs:
            raise DataError(f"{source} holds no pairs.", kind="empty file")
        return Collection(
            passages=self.corpus.texts if self.corpus else self.passages,
            queries=self.queries,
            qrels=self.qrels,
            users=self.users,
            domains=self.domains,
            passage_domains=self.corpus.domains if self.corpus else {},
            source=source,
        )

    def _take(self, number: int, record: Mapping[str, Any], split: str) -> None:
        for name in self.columns.required:
            self._fields.name(number, record, (name,))
        passage_id = self._passage(number, record)
        query_id = self._query(number, record, split)
        if (query_id, passage_id) in self.pairs:
            raise DataError(
                f"{self._where(number)}: query {query_id!r} and passage {passage_id!r} were already paired on "
                f"{self._there(self.pairs[query_id, passage_id])}.",
                kind="repeated pair",
            )
        self.pairs[query_id, passage_id] = self._here(number)
        self.qrels.setdefault(self.splits[query_id], {}).setdefault(query_id, {})[passage_id] = 1

    def _here(self, number: int) -> tuple[int, int]:
        return len(self._sources) - 1, number

    def _there(self, place: tuple[int, int]) -> str:
        source, number = place
        records = self._sources[source]
        return records.place(number) if records is self._sources[-1] else records.where(number)

    def _where(self, number: int) -> str:
        return self._sources[-1].where(number)

    def _query(self, number: int, record: Mapping[str, Any], split: str) -> str:
        columns, file = self.columns, len(self._sources)
        if columns.query_id in record:
            query_id = self._fields.id(number, record, (columns.query_id,))
        else:
            query_id = f"row-{number}" if file == 1 else f"row-{file}.{number}"
        text = query_text(self._fields, number, record, (columns.query,), query_id)
        where = self._where(number)
        user = self._fields.optional_id(number, record, columns.user)
        domain = self._fields.optional_id(number, record, columns.domain)
        split = split_name(self._fields.text(number, record, (columns.split,), optional=True) or split, where)
        if query_id in self.queries:
            for word, old, new in (
                ("texts", self.queries[query_id], text),
                ("users", self.users.get(query_id), user),
                ("splits", self.splits[query_id], split),
            ):
                if old != new:
                    raise DataError(
                        f"{where}: query {query_id!r} has two {word}, here and on {self._there(self.first[query_id])}.",
                        kind=f"query with two {word}",
                    )
        else:
            self.queries[query_id], self.splits[query_id] = text, split
            self.first[query_id] = self._here(number)
            keep(self.users, query_id, user)
            keep(self.domains, query_id, domain)
        return query_id

    def _passage(self, number: int, record: Mapping[str, Any]) -> str:
        where, names = self._where(number), (self.columns.passage,)
        passage_id = self._fields.optional_id(number, record, self.columns.passage_id)
        if passage_id is None or self.corpus is None:
            text = self._fields.text(number, record, names).strip()
        else:
            text = self._fields.text(number, record, names, optional=True).strip()
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
        if self.passages.setdefault(passage_id, text) != text:
            raise DataError(
                f"{where}: passage {passage_id!r} has two texts, here and further up.", kind="passage with two texts"
            )
        return passage_id

    def _ids_by_text(self) -> dict[str, str]:
        if self._by_text is None:
            texts = self.corpus.texts if self.corpus else {}
            if isinstance(texts, PassageStore):
                raise ConfigurationError(
                    f"Records without {self.columns.passage_id} are matched to the corpus by their text, for which it "
                    f"has to be in memory: give {self.columns.passage_id}, or set datamodule.in_memory=true."
                )
            self._by_text = {text: passage_id for passage_id, text in texts.items()}
        return self._by_text
