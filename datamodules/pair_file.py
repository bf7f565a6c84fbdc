"""One file of (query, passage) records, as a query log gives them, as a `Collection`.

Columns: ``query`` and ``passage``, both texts; optional ``query_id``, ``passage_id``, ``user_id``,
``domain`` and ``split``. Others are ignored.

- Without ``query_id`` each record is a query of its own with the id ``row-<line number>``. Ids are
  never made from a query's text, because a hash of a private text can be guessed.
- Without ``passage_id`` identical texts are one passage, and its id comes from the text.
- ``passage`` may be missing or empty where a corpus is given and ``passage_id`` names a passage of it.
- Without ``split`` every record is for training; ``valid`` and ``validation`` mean ``dev``.

Without a corpus the passages are those of the private records, so their *list* is private even
where each text is public: `PairsDataModule.public_passages` then asks for a declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import Passages, keep, query_text, read_corpus, split_name
from lit_dpret.datamodules.readers import Fields, RecordFile, as_id
from lit_dpret.datamodules.records import stable_hash
from lit_dpret.errors import DataError


def read_pairs(path: str | Path, *, corpus: str | Path | None = None, allow_empty_passages: bool = False) -> Collection:
    """A collection from one file of (query, passage) records; see the module's text.

    With ``corpus`` the passages are those of that file, and every pair must name one of them, by
    ``passage_id`` or by its exact text.

    Raises:
        DataError: A record is malformed, contradicts another (same id, other text or user or
            split), repeats a pair, or names a passage the corpus lacks.
    """
    passages = read_corpus(corpus, allow_empty=allow_empty_passages) if corpus else None
    return _PairReader(RecordFile(path, knob="datamodule.pairs"), passages).read(str(path))


class _PairReader:
    """Collects pairs; one object a file."""

    def __init__(self, file: RecordFile, corpus: Passages | None) -> None:
        self.file = file
        self.fields = Fields(file)
        self.corpus = corpus
        self.passages: dict[str, str] = corpus.texts if corpus else {}
        self.by_text = {text: passage_id for passage_id, text in corpus.texts.items()} if corpus else {}
        self.queries: dict[str, str] = {}
        self.users: dict[str, str] = {}
        self.domains: dict[str, str] = {}
        self.splits: dict[str, str] = {}
        self.first: dict[str, int] = {}
        self.pairs: dict[tuple[str, str], int] = {}
        self.qrels: dict[str, dict[str, dict[str, int]]] = {}

    def read(self, source: str) -> Collection:
        for number, record in self.file:
            query_id = self._query(number, record)
            passage_id = self._passage(number, record)
            where = self.file.where(number)
            if (query_id, passage_id) in self.pairs:
                raise DataError(
                    f"{where}: query {query_id!r} and passage {passage_id!r} were already paired on "
                    f"{self.file.place(self.pairs[query_id, passage_id])}."
                )
            self.pairs[query_id, passage_id] = number
            self.qrels.setdefault(self.splits[query_id], {}).setdefault(query_id, {})[passage_id] = 1
        if not self.pairs:
            raise DataError(f"{source} holds no pairs.")
        return Collection(
            passages=self.passages,
            queries=self.queries,
            qrels=self.qrels,
            users=self.users,
            domains=self.domains,
            passage_domains=self.corpus.domains if self.corpus else {},
            source=source,
        )

    def _query(self, number: int, record: Mapping[str, Any]) -> str:
        query_id = self.fields.id(number, record, ("query_id",)) if "query_id" in record else f"row-{number}"
        text = query_text(self.fields, number, record, ("query",), query_id)
        where = self.file.where(number)
        user = as_id(record.get("user_id"))
        split = split_name(self.fields.text(number, record, ("split",), optional=True) or "train", where)
        if query_id in self.queries:
            for word, old, new in (
                ("texts", self.queries[query_id], text),
                ("users", self.users.get(query_id), user),
                ("splits", self.splits[query_id], split),
            ):
                if old != new:
                    raise DataError(
                        f"{where}: query {query_id!r} has two {word}, here and on "
                        f"{self.file.place(self.first[query_id])}."
                    )
        else:
            self.queries[query_id], self.splits[query_id], self.first[query_id] = text, split, number
            keep(self.users, query_id, user)
            keep(self.domains, query_id, record.get("domain"))
        return query_id

    def _passage(self, number: int, record: Mapping[str, Any]) -> str:
        where = self.file.where(number)
        passage_id = as_id(record.get("passage_id"))
        if passage_id is None or self.corpus is None:
            text = self.fields.text(number, record, ("passage",)).strip()
        else:
            text = self.fields.text(number, record, ("passage",), optional=True).strip()
        if self.corpus is not None:
            if passage_id is None:
                passage_id = self.by_text.get(text)
            if passage_id is None or passage_id not in self.passages:
                named = "with this text" if passage_id is None else repr(passage_id)
                raise DataError(f"{where}: passage {named} is not in the corpus (datamodule.corpus).")
            if text and text != self.passages[passage_id]:
                raise DataError(f"{where}: passage {passage_id!r} has another text in the corpus.")
            return passage_id
        if not text:
            raise DataError(f"{where}: the passage has an empty text.")
        if passage_id is None:
            passage_id = self.by_text.setdefault(text, f"p-{stable_hash(text).hex()[:20]}")
        if self.passages.setdefault(passage_id, text) != text:
            raise DataError(f"{where}: passage {passage_id!r} has two texts, here and further up.")
        return passage_id
