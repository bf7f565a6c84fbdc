"""Training rows grouped by owner: one item per unit of privacy.

The choice of unit decides whom the guarantee protects, so it comes from ``privacy.unit`` and never from the data
settings. docs/data.md describes the protection and the cost of ``duplicates=merge``.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.rows import Row, TextUnit, stable_hash
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.budget import Duplicates
from lit_dpret.settings import require_choice
from lit_dpret.texts import normalise


class GroupedUnitDataset:
    """The train split of a collection as units, in order of first occurrence.

    Guarantees:
        - Every row with a positive passage is in exactly one unit, unless ``max_rows_per_unit`` leaves it out: the rows
          whose query text and passage id hash lowest stay, independent of file order and query ids.
        - `rows` returns the same rows of a unit in the same order every time; a unit without a positive passage has
          none.
        - The content of a unit depends on its own records only.
        - ``planted`` units, which are in no file of the data, come after all others; they may have no rows.
    """

    def __init__(
        self,
        collection: Collection,
        *,
        unit: TextUnit,
        duplicates: Duplicates = "keep",
        max_rows_per_unit: int | None = None,
        split: str = "train",
        planted: Sequence[Sequence[Row]] = (),
    ) -> None:
        require_choice("privacy.unit", unit, get_args(TextUnit))
        require_choice("datamodule.duplicates", duplicates, get_args(Duplicates))
        if unit == "user" and duplicates == "merge":
            raise ConfigurationError(
                "datamodule.duplicates=merge cannot go with privacy.unit=user: it would put rows of different "
                "users into one unit. Set datamodule.duplicates=keep."
            )
        self.unit: TextUnit = unit
        self.duplicates: Duplicates = duplicates
        self._collection = collection
        self._split = split
        groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        for query_id in collection.split(split):
            if unit != "pair":
                groups.setdefault(self._key(query_id, ""), [])  # a unit even if a filter left it no rows
            for passage_id in collection.positives(split, query_id):
                groups.setdefault(self._key(query_id, passage_id), []).append((query_id, passage_id))
        if not any(groups.values()):
            raise DataError(
                f"{collection.source}: split {split} has no query with a positive passage. If they are set, raise "
                "datamodule.max_passages and datamodule.max_train_queries, and set datamodule.drop_overlap=false."
            )
        self._units = [_lowest(rows, max_rows_per_unit, collection.queries) for rows in groups.values()]
        self._queries = [tuple(dict.fromkeys(query for query, _ in rows)) for rows in groups.values()]
        self._planted = tuple(planted)

    def _key(self, query_id: str, passage_id: str) -> tuple[str, ...]:
        if self.unit == "user":
            if query_id not in self._collection.users:
                raise ConfigurationError(
                    f"privacy.unit=user needs a user id for every training query, but query {query_id!r} has none: "
                    "give a user_id column in datamodule.queries or datamodule.pairs (for a Hugging Face data set, "
                    "name it in datamodule.user_column), or set privacy.unit=query."
                )
            return (self._collection.users[query_id],)
        name = normalise(self._collection.queries[query_id]) if self.duplicates == "merge" else query_id
        return (name,) if self.unit == "query" else (name, passage_id)

    def __len__(self) -> int:
        """The number of units: public under ``zero_out`` and ``replace_one``, private under ``add_or_remove``."""
        return len(self._units) + len(self._planted)

    def rows(self, unit: int) -> Sequence[Row]:
        """Return all rows of unit number ``unit`` (0 to ``len(self) - 1``)."""
        if not 0 <= unit < len(self):
            raise IndexError(f"There is no unit {unit}; units are numbered from 0 to {len(self) - 1}.")
        if unit >= len(self._units):
            return self._planted[unit - len(self._units)]
        data = self._collection

        def positives(query_id: str, passage_id: str) -> frozenset[str]:
            if self.unit == "pair":
                return frozenset((passage_id,))
            queries = self._queries[unit] if self.unit == "query" else (query_id,)
            return frozenset(passage for query in queries for passage in data.positives(self._split, query))

        return tuple(
            Row(
                query_id=query_id,
                query=data.queries[query_id],
                passage_id=passage_id,
                passage=data.passages[passage_id],
                positives=positives(query_id, passage_id),
            )
            for query_id, passage_id in self._units[unit]
        )

    def most_units_of_a_user(self) -> int | None:
        """Return the most units of one user; None without user ids. Private, do not log."""
        users = self._collection.users
        counts: dict[str, int] = {}
        for queries in self._queries:
            for user in {users[query] for query in queries if query in users}:
                counts[user] = counts.get(user, 0) + 1
        return max(counts.values(), default=None)


def _lowest(rows: list[tuple[str, str]], limit: int | None, queries: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return at most ``limit`` of ``rows``, chosen by the hash of query text and passage id, in their own order."""
    if limit is None or len(rows) <= limit:
        return tuple(rows)
    kept = set(sorted(rows, key=lambda row: stable_hash("lit-dpret rows", queries[row[0]], row[1]))[:limit])
    return tuple(row for row in rows if row in kept)


@dataclass(frozen=True)
class Planted:
    """Units of no person, added to a run's training data: canaries.

    They join as units, so that sampling, n, delta and the data fingerprint describe the actual training data. A unit
    without rows is a canary that a coin flip left out: n does not reveal the coins.
    """

    # The rows of each unit, of the same kind as the data: one, or none. A canary that occurs k times in the data is k
    # units.
    units: Sequence[Sequence[Any]] = field(repr=False)
    facts: Mapping[str, Any]  # facts that may be published about them, as JSON values, for the ledger and the card

    def check(self, *, duplicates: Duplicates, passages: Mapping[str, str]) -> None:
        """Refuse planting if a row would not be a separate unit, or would contradict a passage of the data."""
        if duplicates == "merge":
            raise ConfigurationError(
                "datamodule.duplicates=merge makes equal texts one unit, but each copy of a canary must be a separate "
                "one. Set datamodule.duplicates=keep."
            )
        for row in (row for rows in self.units for row in rows):
            if row.passage_id in passages and passages[row.passage_id] != row.passage:
                raise DataError(f"A planted row has another text for passage {row.passage_id!r} than the data.")

    def fingerprint(self, key: bytes) -> str:
        """Return an HMAC-SHA256 of the units in order, 64 hexadecimal digits."""
        digest = hmac.new(key, digestmod="sha256")
        for rows in self.units:
            digest.update(len(rows).to_bytes(8, "big"))
            for row in rows:
                for part in (row.query_id, row.query, row.passage_id, row.passage):
                    data = part.encode("utf-8", "surrogatepass")
                    digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()
