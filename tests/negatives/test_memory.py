"""A source of negatives of somebody's own that remembers other rows is refused, one that remembers its own is not."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from negative_cases import WordTowers, texts

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.negatives import (
    BM25Negatives,
    DynamicNegatives,
    GoldNegatives,
    NegativeSource,
    PassageSource,
    RandomNegatives,
    RowNegatives,
    StaticNegatives,
)
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, PrivacyMode

DP = DPSGD(eps=3.0, delta=1e-3, noise_multiplier=20.0, secret_file=Path("unused"))


def learn(source: NegativeSource, privacy: PrivacyMode = DP) -> RowNegatives:
    made = RowNegatives([source], privacy)
    made.learn(texts(), WordTowers())
    return made


class Own(PassageSource):
    """Names passages by the words of the row's own query."""

    name = "own"

    def free(self, seat: Any, start: int) -> list[int]:
        places = [(start + i) % len(self._texts.passages) for i in range(len(self._texts.passages))]
        return [place for place in places if int(self._texts.groups[place]) not in seat.answers][: self.per_query]

    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        return self.free(seat, len(seat.text) + epoch)


class OfTheEpochBefore(Own):
    """Gives every row the passages that answered the rows of the epoch before."""

    def prepare(self, *arguments: Any, **settings: Any) -> None:
        super().prepare(*arguments, **settings)
        self.seen: dict[int, list[int]] = {}

    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        self.seen.setdefault(epoch, []).append(seat.own)
        return self.free(seat, max(self.seen.get(epoch - 1, [0])))


class OfTheRowBefore(Own):
    last = 0

    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        last, self.last = self.last, seat.own
        return self.free(seat, last)


class InTurn(Own):
    """Draws from a generator of its own, which rows use in turn."""

    def prepare(self, *arguments: Any, **settings: Any) -> None:
        super().prepare(*arguments, **settings)
        self.draw = np.random.default_rng(0)

    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        drawn = self.draw.random(1 + len(seat.text))
        return self.free(seat, int(1000 * drawn[-1]))


class Inside(Own):
    """Keeps what it remembers in an object of its own."""

    def prepare(self, *arguments: Any, **settings: Any) -> None:
        super().prepare(*arguments, **settings)
        self.inner = OfTheEpochBefore(per_query=1)
        self.inner.prepare(*arguments, **settings)

    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        return self.inner.choose(seat, step=step, epoch=epoch)


class Locked(OfTheRowBefore):
    """Remembers, and holds what cannot be copied."""

    def prepare(self, *arguments: Any, **settings: Any) -> None:
        super().prepare(*arguments, **settings)
        self.lock = threading.Lock()


class Single(Own):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of these")


@pytest.mark.parametrize("kind", [OfTheEpochBefore, OfTheRowBefore, InTurn, Inside, Locked, Single])
def test_a_source_that_remembers_other_rows_is_refused(kind: type[Own]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.negatives\.own") as refused:
        learn(kind(per_query=1))
    assert refused.value.trap == "T11"
    learn(kind(per_query=1), NoPrivacy())


class Quick(Own):
    """Keeps what it found for a query, and counts what it was asked."""

    def prepare(self, *arguments: Any, **settings: Any) -> None:
        super().prepare(*arguments, **settings)
        self.known: dict[tuple[str, int], list[int]] = {}
        self.asked = 0

    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        self.asked += 1
        key = (seat.text, epoch)
        if key not in self.known:
            self.known[key] = super().choose(seat, step=step, epoch=epoch)
        return self.known[key]


class ByGlobalCoins(Own):
    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        return self.free(seat, int(torch.randint(1000, ())) + int(np.random.randint(1000)))


class Uncopyable(Own):
    def prepare(self, *arguments: Any, **settings: Any) -> None:
        super().prepare(*arguments, **settings)
        self.lock = threading.Lock()


class Cached(Own):
    def prepare(self, *arguments: Any, **settings: Any) -> None:
        super().prepare(*arguments, **settings)
        self.found = cache(lambda text: len(text))

    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        return self.free(seat, self.found(seat.text))


class Late(Own):
    """Raises in the epoch after the first one, as a file that has lines for one epoch alone."""

    def choose(self, seat: Any, *, step: int, epoch: int) -> list[int]:
        return [self.free(seat, 0)][epoch]


@pytest.mark.parametrize("kind", [Own, Quick, ByGlobalCoins, Uncopyable, Cached, Late])
def test_a_source_of_somebodys_own_without_a_memory_is_taken_and_left_as_it_was(kind: type[Own]) -> None:
    source = kind(per_query=1)
    before = torch.get_rng_state()
    learn(source)
    assert torch.equal(torch.get_rng_state(), before) and getattr(source, "asked", 0) == 0


@pytest.mark.parametrize("kind", [RandomNegatives, GoldNegatives, BM25Negatives, StaticNegatives, DynamicNegatives])
def test_the_shipped_sources_are_taken(kind: type[PassageSource]) -> None:
    learn(kind(per_query=1))
    learn(type("Derived", (kind,), {"__module__": "somebody"})(per_query=1))
