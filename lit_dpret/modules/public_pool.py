"""Public passages as candidates: which ones a step takes, decided by public coins alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError

NOBODY = -1


class PublicPool:
    """The public list of passages, and the candidates of each step among them.

    Guarantees:
        - The candidates of a step are a function of (``seed``, step) and of the number of public passages.
        - Where every passage is a candidate, nothing is drawn.

    Args:
        size: How many passages a step draws; null for all of them.
        seed: Of those draws; public.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, size: int | None, seed: int) -> None:
        if size is not None and size < 1:
            raise ConfigurationError(f"pool_size={size} must be at least 1, or null for all public passages.")
        if seed < 0:
            raise ConfigurationError(f"pool_seed={seed} must not be negative.")
        self.size, self.seed = size, seed
        self.place: dict[str, int] = {}
        self._drawn: tuple[int, Tensor | None, Tensor | None] | None = None

    def learn(self, passage_ids: Sequence[str]) -> None:
        """Take over the public list, in its order."""
        self.place = {name: place for place, name in enumerate(passage_ids)}
        self._drawn = None

    def draw(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """The candidates of logical step ``step``: their places, and for each passage its place among them or -1.

        Both are None where all passages are candidates.
        """
        if self.size is None or self.size >= len(self.place):
            return None, None
        if self._drawn is None or self._drawn[0] != step:
            coins = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, step))))
            chosen = torch.from_numpy(coins.choice(len(self.place), size=self.size, replace=False))
            place = torch.full((len(self.place),), NOBODY)
            place[chosen] = torch.arange(self.size)
            self._drawn = (step, chosen, place)
        return self._drawn[1:]

    def places(self, own: Sequence[str], positives: Sequence[Collection[str]]) -> tuple[Tensor, Tensor]:
        """Where the passages of some rows stand in the public list.

        Args:
            own: The passage id of each row.
            positives: All positive passage ids of each row's query.

        Returns:
            The place of each row's own passage, ``(rows,)``, and those of the query's further positives,
            ``(rows, most of them)``, filled up with -1.

        Raises:
            DataError: A row's passage is not in the public list.
        """
        unknown = next((name for name in own if name not in self.place), None)
        if unknown is not None:
            raise DataError(
                f"The positive passage {unknown!r} is not among the {len(self.place)} passages that were encoded; "
                "they must be the whole public list. Call prepare(datamodule) with the data that is trained on."
            )
        others = [
            sorted(self.place[name] for name in names - {first} if name in self.place)
            for first, names in zip(own, map(set, positives), strict=True)
        ]
        width = max(map(len, others), default=0)
        filled = [places + [NOBODY] * (width - len(places)) for places in others]
        positive = torch.tensor([self.place[name] for name in own], dtype=torch.long)
        return positive, torch.tensor(filled, dtype=torch.long).reshape(len(others), width)
