"""The texts that negatives are looked for in: public passages, and train queries with what was judged of each."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError

NOBODY = -1


class TrainRow(Protocol):
    """What is read of a row of a batch."""

    @property
    def query_id(self) -> str: ...
    @property
    def passage_id(self) -> str: ...
    @property
    def positives(self) -> Collection[str]: ...


class TrainTexts:
    """Public passages by place, train queries by place, and judgements.

    Its ``repr`` shows no query and no judgement.

    Args:
        passages: The public list: text by id. It is put in the order of the ids.
        queries: The train queries: text by id.
        judged: For each train query the grade of each judged passage, by ids. A source may look at the
            judgements of the row's own query, and at no others.
    """

    def __init__(
        self, passages: Mapping[str, str], queries: Mapping[str, str], judged: Mapping[str, Mapping[str, int]]
    ) -> None:
        if not passages:
            raise DataError("There are no public passages to take negatives from.")
        listed = dict(sorted(passages.items()))
        self.passage_ids, self.passages = list(listed), list(listed.values())
        self.query_ids, self.queries = list(queries), list(queries.values())
        self.judged = judged
        self.place = {name: place for place, name in enumerate(self.passage_ids)}
        self.query_place = {name: place for place, name in enumerate(self.query_ids)}
        self.groups = torch.tensor(text_groups(self.passages))
        self._group_sizes = torch.bincount(self.groups)

    def __repr__(self) -> str:
        return f"TrainTexts({len(self.passage_ids)} public passages)"

    @classmethod
    def of(cls, data: Any) -> Self:
        """Those of a DataModule that lists its public passages and hands out graded judgements.

        Queries that nothing answers have no row to train on, and are left out.

        Raises:
            ConfigurationError: The DataModule has no public list of passages, or canaries are planted in it.
        """
        if getattr(data, "planted_facts", None) is not None:
            raise ConfigurationError(
                "model.negatives take negatives for the train queries of the data, and planted canaries are not among "
                "them. Set canaries to null, or model.negatives to in_batch or a pool."
            )
        queries, judged = data.evaluation_set("train")
        answered = {query for query, grades in judged.items() if any(grade > 0 for grade in grades.values())}
        kept = {query: text for query, text in queries.items() if query in answered}
        return cls(data.public_passages(), kept, {query: judged[query] for query in kept})

    def positives(self, query: int) -> tuple[int, ...]:
        """Places of the passages that answer a query, as far as they are in the public list."""
        found = self.judged.get(self.query_ids[query], {})
        return tuple(sorted(self.place[name] for name, grade in found.items() if grade > 0 and name in self.place))

    def keys(self, rows: Sequence[TrainRow]) -> dict[str, Tensor]:
        """What rows of a batch are known by.

        Returns:
            ``query_at``, each query's place, ``(rows,)``, and ``answers_at``, the place of each row's own
            passage and then of its further positives, ``(rows, most of them)``, filled up with -1.

        Raises:
            DataError: A query or a passage is not among those that the negatives were prepared for.
        """
        for kind, known, names in (
            ("query", self.query_place, [row.query_id for row in rows]),
            ("passage", self.place, [row.passage_id for row in rows]),
        ):
            unknown = next((name for name in names if name not in known), None)
            if unknown is not None:
                raise DataError(
                    f"The {kind} {unknown!r} is not among those that negatives were prepared for. Train on the "
                    "DataModule that they were prepared with."
                )
        others = [sorted(self.place[p] for p in {*row.positives} - {row.passage_id} if p in self.place) for row in rows]
        answers = [[self.place[row.passage_id], *places] for row, places in zip(rows, others, strict=True)]
        width = max(map(len, answers), default=1)
        filled = [places + [NOBODY] * (width - len(places)) for places in answers]
        return {
            "query_at": torch.tensor([self.query_place[row.query_id] for row in rows], dtype=torch.long),
            "answers_at": torch.tensor(filled, dtype=torch.long).reshape(len(rows), width),
        }

    def copies(self, groups: Tensor) -> Tensor:
        """How many passages have one of the texts of each row, at most; ``groups`` is ``(rows, some)``, -1 for none."""
        sizes = self._group_sizes[groups.clamp(min=0)]
        return sizes.masked_fill(groups < 0, 0).sum(dim=1)

    def group_of(self, places: Tensor) -> Tensor:
        """The text group at each place, and -1 where there is none; shaped as ``places``."""
        groups = self.groups.to(places.device)
        return torch.where(places < 0, places, groups[places.clamp(min=0)])


def text_groups(texts: Sequence[str]) -> list[int]:
    """A number for each text, equal where the texts are, but for case and white space.

    Example:
        >>> text_groups(["A claim", "flood", "a  claim"])
        [0, 1, 0]
    """
    number: dict[bytes, int] = {}
    keys = (hashlib.blake2b(_plain(text), digest_size=16).digest() for text in texts)
    return [number.setdefault(key, len(number)) for key in keys]


def _plain(text: str) -> bytes:
    return " ".join(text.split()).casefold().encode("utf-8", "surrogatepass")
