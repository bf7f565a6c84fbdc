"""What every source of negatives says about itself, and what one that names passages is asked.

A source is judged by two questions. Does it make a row's loss depend on another row? Then clipping each
row bounds nothing. Does it remember something of private rows between steps? Then a step is no longer a
function of the weights that were released and of the rows that were drawn, and no accountant's law is
about it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.negatives.texts import TrainTexts


class NegativeSource(ABC):
    """Where a row's negatives come from.

    Attributes:
        name: On the command line, ``negatives=NAME``, and in messages.
        couples_rows: Whether a row's loss depends on other rows of the batch, or of earlier ones.
        keeps_private_state: Whether something of private rows outlives the step.
        shared_in_batch: Whether what it finds for one row is a negative of every row; then it couples them.
        gather: Whether it takes rows of other processes.
        file: What it reads its negatives from, where it reads a file.
        is_declared: Whether what nothing can check, that a row's negatives were made of its own record and of
            public data alone, is declared where it has to be.
    """

    name: ClassVar[str]
    couples_rows: bool = False
    keeps_private_state: bool = False
    shared_in_batch: bool = False
    gather: bool = False
    file: Path | None = None
    is_declared: bool = True


class Towers(Protocol):
    """The encoders as a source may use them: without gradient and dropout, with the weights as they are."""

    @property
    def device(self) -> torch.device | None:
        """Where to compute; None for where the embeddings are."""
        ...

    def embeddings(self, texts: Sequence[str], side: str, folder: Path | None) -> Tensor:
        """float32 on the CPU, ``(texts, dim)``, whose dot product ranks; kept in ``folder`` until it is finished."""
        ...

    def fingerprint(self) -> str:
        """What the embeddings depend on, besides the texts."""
        ...


@dataclass(frozen=True)
class Seat:
    """What a source is told of the row that it chooses for: of no other row.

    Attributes:
        query: The place of its query among the train queries.
        text: The text of its query. Coins are keyed by it and not by an id, which may be the number of a line:
            without the record before it, a row would then draw other passages.
        own: The place of its passage in the public list.
        answers: The text groups of the passages that answer it, inside its own unit of privacy.
    """

    query: int
    text: str = field(repr=False)
    own: int
    answers: frozenset[int]


class PassageSource(NegativeSource):
    """A source that names passages of the public list for each row.

    Guarantees:
        - What is named for a row is a function of that row, of the public list, of public coins and of
          weights: not of the order of the rows, nor of the other rows, nor of where in a file it stands.
        - No passage that answers the row's query, and none with the text of one, is named.

    Args:
        per_query: How many passages a row gets.
        shared_in_batch: Let each of them be a negative of every row of the batch, as STAR does; this
            couples the rows.
        seed: Of the coins; public.

    Raises:
        ConfigurationError: A number is out of range.
    """

    def __init__(self, *, per_query: int = 1, shared_in_batch: bool = False, seed: int = 0) -> None:
        self.per_query, self.shared_in_batch, self.seed = per_query, shared_in_batch, seed
        self.couples_rows = shared_in_batch
        self.check_number("per_query", per_query, least=1)
        self.check_number("seed", seed, least=0)

    def check_number(self, knob: str, value: object, *, least: int) -> None:
        """Refuse a setting that is no whole number of at least ``least``."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(
                f"model.negatives.{self.name}.{knob}={value} is not a whole number of at least {least}."
            )

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        """Get ready for training: mine, or read what was mined.

        Args:
            texts: Public passages and train queries.
            towers: The encoders before the first step.
            private: Whether the queries are private, so that what is kept of them must be marked so.
        """
        self._texts = texts

    @abstractmethod
    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        """Places of at most ``per_query`` different passages for one row."""


def coins(seed: int, *key: int | str) -> np.random.Generator:
    """Public coins that depend on ``seed`` and ``key`` alone: the same in every process, whatever was drawn before."""
    digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, int.from_bytes(digest, "big")))))


def uniform_places(
    draw: np.random.Generator, groups: Sequence[int] | Tensor, count: int, *, answers: Collection[int],
    taken: Iterable[int] = (),
) -> list[int]:  # fmt: skip
    """``count`` different places of the public list, uniformly among those of which no answer has the text.

    Args:
        draw: The coins.
        groups: The text group of every passage, ``(passages,)``.
        count: How many; fewer come back where there are not so many.
        answers: Text groups that are left out.
        taken: Places that are left out.
    """
    total, out = len(groups), set(taken)
    found: list[int] = []
    for _ in range(4 * count + 16):  # nearly always the first few draws do
        if len(found) == count:
            return found
        place = int(draw.integers(total))
        if place not in out and int(groups[place]) not in answers:
            found.append(place)
            out.add(place)
    for place in draw.permutation(total).tolist():
        if len(found) == count:
            break
        if place not in out and int(groups[place]) not in answers:
            found.append(place)
    return found
