"""One data set: passages, queries, and which passage answers which query.

Passages are public. Queries, and the qrels that pair them with passages, are private wherever
their split is trained on. The ``repr`` therefore shows no query, no id and no count of queries.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Protocol

from lit_dpret.datamodules.records import NOT_UNICODE, as_id, is_unicode
from lit_dpret.datamodules.rows import SPLITS
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.settings import is_whole

Qrels = Mapping[str, Mapping[str, int]]

_SHORTEST_KEY = 16


QueryIds = Literal["all", "some", "none", "unknown"]
#: The key under which a written record states which records of its log had ids, if not all had.
GIVEN_IDS = "query_ids"


@dataclass(frozen=True, kw_only=True, repr=False)
class Collection:
    """A retrieval data set."""

    # Text of each passage (title and text joined) by id: a dictionary, or a
    # `lit_dpret.datamodules.passage_store.PassageStore` for corpora too large for memory.
    passages: Mapping[str, str]
    queries: Mapping[str, str]  # text of each query of every split by id
    # For each split (``train``, ``dev``, ``test``) the graded judgements ``{query_id: {passage_id: grade}}``. A grade
    # above 0 makes the passage a positive.
    qrels: Mapping[str, Qrels]
    # User id by query id, where users are known; private. Ids are normalised like those in files (`as_id`).
    users: Mapping[str, str] = field(default_factory=dict)
    domains: Mapping[str, str] = field(default_factory=dict)  # domain by query id, where domains are known
    passage_domains: Mapping[str, str] = field(default_factory=dict)  # domain by passage id, where domains are known
    # Which records had an id; each record without one is a query of its own. Unless a reader sets this, runs on its
    # data are not composed with others: one of their queries may be several here.
    query_ids: QueryIds = "unknown"
    source: str = "the data set"  # where the data came from, for messages

    def __post_init__(self) -> None:
        users = {query_id: as_id(user) for query_id, user in self.users.items()}
        object.__setattr__(self, "users", {query_id: user for query_id, user in users.items() if user is not None})

    def __repr__(self) -> str:
        return f"Collection({self.source}: {len(self.passages)} passages; splits {', '.join(self.qrels) or 'none'})"

    def check(self, *, allow_empty_passages: bool = False) -> Collection:
        """Refuse the first contradiction found; return the collection itself.

        Guarantees, after it returns:
            - There is at least one passage, one query and one judged query, and no text is empty (except passages with
              ``allow_empty_passages``).
            - Every qrel names a known query and a known passage, with an integer grade.
            - Every query is judged in some split, and every train query has a positive passage.
            - No query is both trained on and evaluated on.

        Raises:
            DataError: One line with the ids concerned; never a text.
        """
        for contradiction in self.contradictions(allow_empty_passages=allow_empty_passages):
            raise contradiction
        return self

    def contradictions(self, *, allow_empty_passages: bool = False) -> Iterator[DataError]:
        """Yield every contradiction, in the order of `check`."""
        for problem, found in (
            ("holds no passages", self.passages),
            ("holds no queries", self.queries),
            ("holds no qrels: no query is paired with a passage", any(self.qrels.values())),
        ):
            if not found:
                yield DataError(f"{self.source} {problem}.", kind="empty part")
                return
        for kind, problem in chain(self._bad_texts(allow_empty_passages), self._bad_qrels(), self._bad_queries()):
            yield DataError(f"{self.source}: {problem}.", kind=kind)

    def _bad_texts(self, allow_empty_passages: bool) -> Iterator[tuple[str, str]]:
        for passage_id, text in self.passages.items() if not allow_empty_passages else ():
            if not text.strip():
                advice = "mend the corpus or set datamodule.allow_empty_passages=true"
                yield "empty passage", f"passage {passage_id!r} has an empty text; {advice}"
        for query_id, text in self.queries.items():
            if not text.strip():
                yield "empty query", f"query {query_id!r} has an empty text"
        held = self.passages if isinstance(self.passages, dict) else {}  # a store is always valid UTF-8
        for what, texts in (
            ("passage", held), ("query", self.queries), ("the user of query", self.users),
            ("the domain of query", self.domains), ("the domain of passage", self.passage_domains),
        ):  # fmt: skip
            for key, text in texts.items():
                if not (is_unicode(text) and is_unicode(key)):
                    yield "not Unicode text", f"{what} {key!r} {NOT_UNICODE}"

    def _bad_qrels(self) -> Iterator[tuple[str, str]]:
        for split, qrels in self.qrels.items():
            if split not in SPLITS:
                yield "unknown split", f"split {split!r} is not one of {', '.join(SPLITS)}"
            for query_id, judged in qrels.items():
                if query_id not in self.queries:
                    yield "unknown query", f"qrels of {split} name an unknown query {query_id!r}"
                for passage_id, grade in judged.items():
                    pair = f"qrels of {split} pair query {query_id!r} with"
                    if passage_id not in self.passages:
                        yield "unknown passage", f"{pair} an unknown passage {passage_id!r}"
                    if not is_whole(grade):
                        problem = f"the grade {grade!r}, which is not an integer"
                        yield "no whole-number grade", f"{pair} passage {passage_id!r} and {problem}"

    def _bad_queries(self) -> Iterator[tuple[str, str]]:
        advice = "datamodule.drop_queries_without_passage=true leaves such queries out"
        for query_id in self.queries:
            if not any(qrels.get(query_id) for qrels in self.qrels.values()):
                yield "query without passage", f"query {query_id!r} has no passage in the qrels. Add one; {advice}"
        for query_id, judged in self.qrels.get("train", {}).items():
            if not any(isinstance(grade, int) and grade > 0 for grade in judged.values()):
                why = f"all its grades in train are below 1; {advice}"
                yield "query without passage", f"query {query_id!r} has no passage: {why}"
            for split in ("dev", "test"):
                if query_id in self.qrels.get(split, {}):
                    yield "query in two splits", f"query {query_id!r} is in train and in {split}, an evaluation split"

    def with_qrels(self, qrels: Mapping[str, Qrels]) -> Collection:
        """Return the collection with other qrels and only the queries that they name."""
        named = set().union(*qrels.values())
        parts = {"queries": self.queries, "users": self.users, "domains": self.domains}
        kept = {part: {name: of[name] for name in of if name in named} for part, of in parts.items()}
        return replace(self, qrels=qrels, **kept)  # type: ignore[arg-type]

    def split(self, name: str) -> Qrels:
        """Return the qrels of one split; a `DataError` lists the existing splits."""
        if not self.qrels.get(name):
            raise DataError(
                f"{self.source} has no split {name!r}; it has: {', '.join(s for s in self.qrels if self.qrels[s])}."
            )
        return self.qrels[name]

    def positives(self, split: str, query_id: str) -> tuple[str, ...]:
        """Return the ids of the passages with a grade above 0, in the order of the qrels."""
        return tuple(passage for passage, grade in self.split(split)[query_id].items() if grade > 0)

    def fingerprint(self, key: bytes) -> str:
        """Return an HMAC-SHA256 of everything training reads: passages and train split, in order; 64 hexadecimal
        digits.

        An unkeyed hash of private text would let anyone test a guess at the text. Keyed with the run's privacy secret
        (at least 16 bytes), it only lets a resumed run notice that its data changed. Evaluation queries are left out,
        since they change no claim.
        """
        if len(key) < _SHORTEST_KEY:
            raise ConfigurationError(
                f"The fingerprint key has {len(key)} bytes; at least {_SHORTEST_KEY} are needed, or private "
                "texts could be guessed from the fingerprint. Use the run's privacy secret."
            )
        digest = hmac.new(key, digestmod="sha256")

        def add(parts: Iterable[str]) -> None:
            for part in parts:
                data = part.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "big") + data)

        add((str(len(self.passages)),))
        for passage_id, text in self.passages.items():
            add((passage_id, text))
        for query_id, judged in self.qrels.get("train", {}).items():
            add((query_id, self.queries[query_id], self.users.get(query_id, ""), str(len(judged))))
            for passage_id, grade in judged.items():
                add((passage_id, str(grade)))
        return digest.hexdigest()


class GivenIds:
    """Collect which records have query ids, as a value of `Collection.query_ids`."""

    def __init__(self) -> None:
        self._met: set[QueryIds] = set()

    def note(self, record: Mapping[str, Any], *, named: bool) -> None:
        """Count a record that is ``named``, unless it states that it got its name when a split was written."""
        said = record.get(GIVEN_IDS)
        words: tuple[QueryIds, ...] = ("some", "none", "unknown")  # no log writes "all" into its records
        told = next((word for word in words if isinstance(said, str) and word == said), None)
        self._met.add(told or ("all" if named else "none"))

    def found(self) -> QueryIds:
        """Return the value for all records."""
        return next(iter(self._met)) if len(self._met) == 1 else "unknown" if "unknown" in self._met else "some"


class TextData(Protocol):
    """The DataModule interface for `task=check_data`.

    It may also have ``file_columns()``, ``pair_columns``, a setting that names its source, ``expected_batch_size``, and
    the passage switches of `lit_dpret.datamodules.pairs.PairsDataModule`.
    """

    def read_collection(self, complain: Callable[[DataError], None] = ...) -> Collection:
        """Read the data from the files; ``complain`` receives every problem of a record."""
