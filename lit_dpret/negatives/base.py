"""The interface of sources of negatives: their declarations, and the methods of sources that name passages.

Two properties matter for privacy. If a source makes a row's loss depend on another row, clipping each row bounds
nothing. If it remembers private rows between steps, a step is no longer a function of released weights and of the rows
that were drawn.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.settings import require_whole
from lit_dpret.texts import normalise


class NegativeSource(ABC):
    """A source of negatives for rows.

    Attributes:
        name: The name on the command line, ``negatives=NAME``, and in messages.
        couples_rows: Whether a row's loss depends on other rows of this batch or of earlier ones.
        keeps_private_state: Whether information about private rows outlives the step.
        shared_in_batch: Whether the passages for one row are negatives of every row, which couples the rows.
        gather: Whether it uses rows of other processes.
        file: The file that it reads its negatives from, if any.
        is_declared: Whether the required declaration was made that a row's negatives come from its own record and
            from public data alone, which cannot be checked.
    """

    name: ClassVar[str]
    couples_rows: bool = False
    keeps_private_state: bool = False
    shared_in_batch: bool = False
    gather: bool = False
    file: str | Path | None = None
    is_declared: bool = True


class Towers(Protocol):
    """The encoders that a source may use: without gradient and dropout, with the current weights."""

    @property
    def device(self) -> torch.device | None:
        """The device for computation; None for the device of the embeddings."""
        ...

    def embeddings(self, texts: Sequence[str], side: str, folder: Path | None) -> Tensor:
        """Return float32 ``(texts, dim)`` on the CPU, ranked by dot product; ``folder`` keeps unfinished work."""
        ...

    def fingerprint(self) -> str:
        """Return a fingerprint of everything that determines the embeddings besides the texts."""
        ...


@dataclass(frozen=True)
class Seat:
    """All information that a source gets about its row, and none about other rows."""

    query: int  # the index of its query among the train queries
    # The text of its query. It keys the coins instead of an id, which may be a line number: without the preceding
    # record, a row would then draw other passages.
    text: str = field(repr=False)
    own: int  # the index of its passage in the public list
    answers: frozenset[int]  # the text groups of the passages that answer it, within its own unit of privacy


@dataclass(kw_only=True, eq=False, repr=False)
class PassageSource(NegativeSource):
    """A source that chooses passages of the public list for each row.

    Guarantees:
        - The choice for a row is a function of that row, of the public list, of public coins and of
          weights. It does not depend on other rows, their order, or the row's position in a file.
        - It never contains a passage that answers the row's query, or one with the same text.
    """

    per_query: int = 1  # the number of passages for each row
    shared_in_batch: bool = False  # use each as a negative of every row of the batch, as in STAR; couples the rows
    seed: int = 0  # of the coins; public

    def __post_init__(self) -> None:
        self.couples_rows = self.shared_in_batch
        require_whole(f"model.negatives.{self.name}", self, 1, "per_query")
        require_whole(f"model.negatives.{self.name}", self, 0, "seed")

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        """Prepare for training: before the first step, mine with the encoders, or read mined rankings.

        Data kept about ``private`` queries must be marked as private.
        """
        self._texts = texts

    @abstractmethod
    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        """Return the indices of at most ``per_query`` different passages for one row."""

    def some_of(self, places: Sequence[int], *key: int | str) -> list[int]:
        """Draw ``per_query`` of some indices uniformly, keyed by ``key``; return all if there are no more."""
        if len(places) <= self.per_query:
            return [int(place) for place in places]
        drawn = public_coins(self.seed, self.name, *key).choice(len(places), size=self.per_query, replace=False)
        return [int(places[i]) for i in sorted(drawn.tolist())]


def public_coins(seed: int, *key: int | str) -> np.random.Generator:
    """Return a generator that depends only on ``seed`` and ``key``; it is public, so not for private draws or noise."""
    digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, int.from_bytes(digest, "big")))))


def uniform_places(
    draw: np.random.Generator, groups: Sequence[int] | Tensor, count: int, *, answers: Collection[int],
    taken: Iterable[int] = (),
) -> list[int]:  # fmt: skip
    """Draw ``count`` different indices of the public list uniformly; fewer if there are too few.

    ``groups`` is the text group of every passage. Groups in ``answers``, and indices in ``taken``, are never drawn.
    """
    total, out = len(groups), set(taken)
    found: list[int] = []
    for _ in range(4 * count + 16):  # nearly always enough
        if len(found) == count:
            return found
        place = int(draw.integers(total))
        if place not in out and int(groups[place]) not in answers:
            found.append(place)
            out.add(place)
    left = [p for p in draw.permutation(total).tolist() if p not in out and int(groups[p]) not in answers]
    return found + left[: count - len(found)]


NOBODY = -1


class TrainRow(Protocol):
    """The fields read from a row of a batch."""

    @property
    def query_id(self) -> str: ...
    @property
    def passage_id(self) -> str: ...
    @property
    def positives(self) -> Collection[str]: ...


class TrainTexts:
    """Public passages in the order of their ids, train queries and judgements; its ``repr`` shows none of them.

    ``judged`` is the grade of each judged passage for each train query. A source may only look at the judgements of
    the row's own query.
    """

    def __init__(
        self, passages: Mapping[str, str], queries: Mapping[str, str], judged: Mapping[str, Mapping[str, int]]
    ) -> None:
        if not passages:
            raise DataError("The data set has no public passages to take negatives from.")
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
        """Read the public passages and judgements of a DataModule, and the queries that some passage answers."""
        if getattr(data, "planted_facts", None) is not None:
            raise ConfigurationError(
                "model.negatives finds negatives for the train queries of the data set, and planted canaries are not "
                "among them. Set canaries to null, or model.negatives to in_batch, or to null for the mode's default."
            )
        queries, judged = data.evaluation_set("train")
        answered = {query for query, grades in judged.items() if any(grade > 0 for grade in grades.values())}
        kept = {query: text for query, text in queries.items() if query in answered}
        return cls(data.public_passages(), kept, {query: judged[query] for query in kept})

    def positives(self, query: int) -> tuple[int, ...]:
        """Return the indices of a query's answers that are in the public list."""
        found = self.judged.get(self.query_ids[query], {})
        return tuple(sorted(self.place[name] for name, grade in found.items() if grade > 0 and name in self.place))

    def keys(self, rows: Sequence[TrainRow]) -> dict[str, Tensor]:
        """Return the numbers by which sources identify the rows of a batch.

        Returns:
            ``query_at``, the index of each query, ``(rows,)``, and ``answers_at``, the index of each row's own passage
            followed by its other positives, ``(rows, most of them)``, padded with -1.
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
        return {
            "query_at": torch.tensor([self.query_place[row.query_id] for row in rows], dtype=torch.long),
            "answers_at": filled_up(answers, least=1),
        }

    def copies(self, groups: Tensor) -> Tensor:
        """Return, for each row, the number of passages that have one of its texts; ``groups`` is ``(rows, some)``."""
        sizes = self._group_sizes[groups.clamp(min=0)]
        return sizes.masked_fill(groups < 0, 0).sum(dim=1)

    def group_of(self, places: Tensor) -> Tensor:
        """Return the text group at each index, -1 for none; shaped like ``places``."""
        groups = self.groups.to(places.device)
        return torch.where(places < 0, places, groups[places.clamp(min=0)])


def filled_up(rows: Sequence[Sequence[int]], *, least: int = 0) -> Tensor:
    """Return lists of indices as one tensor ``(rows, longest)``, padded with -1.

    Example:
        >>> filled_up([[4, 5], [6]]).tolist()
        [[4, 5], [6, -1]]
    """
    width = max([least, *map(len, rows)])
    filled = [[*places, *[NOBODY] * (width - len(places))] for places in rows]
    return torch.tensor(filled, dtype=torch.long).reshape(len(rows), width)


def text_groups(texts: Sequence[str]) -> list[int]:
    """Number texts; texts that are equal up to case and white space get equal numbers."""
    number: dict[bytes, int] = {}
    plain = (normalise(text).encode("utf-8", "surrogatepass") for text in texts)
    keys = (hashlib.blake2b(each, digest_size=16).digest() for each in plain)
    return [number.setdefault(key, len(number)) for key in keys]


@dataclass(kw_only=True, eq=False, repr=False)
class InBatchNegatives(NegativeSource):
    """The passages of the other rows of the batch."""

    name: ClassVar[str] = "in_batch"
    couples_rows = True

    gather: bool = False  # also use the passages of all other processes of ``torch.distributed``


class PreBatchNegatives(NegativeSource):
    """The passages of the previous ``batches``, with their embeddings from then.

    A queue of embeddings costs nothing to compare with, but is as many steps stale as it is long (Wang et al.,
    SimKGC, 2203.02167, section 3.3). It is remembered between steps, so no private mode accepts it.
    """

    name: ClassVar[str] = "pre_batch"
    couples_rows = True
    keeps_private_state = True

    def __init__(self, *, batches: int = 2) -> None:
        require_whole("model.negatives.pre_batch", {"batches": batches}, 1)
        self.batches = batches
        self._queue: deque[tuple[Tensor, Tensor]] = deque(maxlen=batches)

    def remembered(self) -> tuple[Tensor, Tensor] | None:
        """Return embeddings and text groups of previous batches; None before the first batch."""
        if not self._queue:
            return None
        return torch.cat([e for e, _ in self._queue]), torch.cat([g for _, g in self._queue])

    def remember(self, embeddings: Tensor, groups: Tensor) -> None:
        """Add a batch and drop the oldest."""
        self._queue.append((embeddings.detach(), groups))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the queue for a checkpoint."""
        return [{"embeddings": e.cpu(), "groups": g.cpu()} for e, g in self._queue]

    def load_state_dict(self, state: list[dict[str, Any]], device: torch.device) -> None:
        """Restore what `state_dict` returned."""
        self._queue.clear()
        self._queue.extend((each["embeddings"].to(device), each["groups"].to(device)) for each in state)
