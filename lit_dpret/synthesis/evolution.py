"""Private selection without training: candidate queries that private queries vote for.

Private Evolution (Lin et al., ICLR 2024; for text Xie et al., ICML 2024). Every private unit votes for the candidates
nearest to its own queries. Private data enter only through the votes, released as a noised histogram: the selection,
and the source of the next candidates, are functions of noised votes, public data and a public seed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from lit_dpret.errors import DataError
from lit_dpret.synthesis.dataset_folder import SyntheticQuery

_MARK = "#"


class Candidate(SyntheticQuery):
    """A query that can receive votes; ``draw`` counts the candidates of its passage."""

    @property
    def name(self) -> str:
        return name_of(self.passage_id, self.draw)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Candidate:
        """Return the candidate drawn under its name, from a record of a shard."""
        passage_id, _, draw = str(record["passage_id"]).rpartition(_MARK)
        return cls(**{**record, "passage_id": passage_id, "draw": int(draw)})


def name_of(passage_id: str, draw: int) -> str:
    """Return the name of a candidate, which keys its random numbers."""
    return f"{passage_id}{_MARK}{draw}"


def in_turn(passages: Iterable[str]) -> Iterator[str]:
    """Yield passages for new candidates endlessly, in the order of a hash of their ids, independent of queries."""
    return cycle(sorted(passages, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()))


def numbered(sources: Iterable[str], drawn: Counter[str]) -> list[str]:
    """Return the names of new candidates of these passages; update ``drawn``, which counts those of each passage.

    Example:
        >>> numbered(["a", "b", "a"], Counter(a=3))
        ['a#3', 'b#0', 'a#4']
    """
    names = []
    for source in sources:
        names.append(name_of(source, drawn[source]))
        drawn[source] += 1
    return names


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the non-empty candidates, each text once: the first of equal texts."""
    found: dict[str, Candidate] = {}
    for each in candidates:
        if each.text.strip():
            found.setdefault(each.text, each)
    return list(found.values())


def nearest(query: np.ndarray, candidates: np.ndarray, count: int) -> list[int]:
    """Return the indices of the ``count`` candidates nearest to a query ``(dim,)``; the first of equal ones.

    Compare one query at a time: a product with many queries rounds depending on their number, so at a tie a vote
    would depend on other units.
    """
    scores = candidates @ query
    if count == 1:
        return [int(scores.argmax())]
    return [int(place) for place in np.argsort(-scores, kind="stable")[:count]]


def votes(
    owned: Sequence[Sequence[int]], queries: np.ndarray, candidates: np.ndarray, count: int
) -> Iterator[list[int]]:
    """Yield the votes of each unit, its queries' first choices before their second ones; private.

    ``owned`` holds the rows of ``queries`` that belong to each unit, in an order that depends only on the unit.
    ``count`` is how many candidates each query votes for.
    """
    for rows in owned:
        choices = [nearest(queries[row], candidates, count) for row in rows]
        yield [choice[rank] for rank in range(min(count, len(candidates))) for choice in choices]


def survivors(counts: np.ndarray, *, least: float) -> list[int]:
    """Return the indices of the candidates with more than ``least`` noised votes, best first."""
    order = [int(place) for place in np.argsort(-counts, kind="stable") if counts[place] > least]
    if not order:
        raise DataError(
            f"No candidate has more than {least:.4g} noised votes (task.threshold): the noise hides all of them. Use a "
            "smaller task.population, fewer task.generations, or a larger privacy.eps."
        )
    return order


def at_most(sources: Sequence[str], most: int | None, held: Iterable[str] = ()) -> list[int]:
    """Return the indices of passages with at most ``most`` occurrences, including those already in ``held``.

    Example:
        >>> at_most(["a", "b", "a", "a"], 2, held=["b", "b"])
        [0, 2]
    """
    if most is None:
        return list(range(len(sources)))
    taken, places = Counter(held), []
    for place, source in enumerate(sources):
        if taken[source] < most:
            taken[source] += 1
            places.append(place)
    return places


def offspring(weights: np.ndarray, total: int, *, seed: int) -> list[int]:
    """Distribute ``total`` new candidates over survivors in proportion to positive weights: systematic resampling.

    Each survivor gets its exact share rounded down or up, by one uniform number that ``seed`` keys (Kitagawa 1996).

    Example:
        >>> offspring(np.array([6.0, 3.0, 3.0]), 4, seed=0)
        [2, 1, 1]
    """
    start = np.random.Generator(np.random.Philox(key=seed)).random()
    ends = np.floor(np.cumsum(weights) / weights.sum() * total + start)
    ends[-1] = total  # rounding may leave the last one short
    ends = np.minimum(ends, total)
    numbers: list[int] = np.diff(ends, prepend=0.0).astype(int).tolist()
    return numbers
