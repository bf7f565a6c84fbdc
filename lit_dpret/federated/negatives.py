"""Two sources of negatives that only a federation has; the others are those of `lit_dpret.negatives`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.fed_negatives import FedPool
from lit_dpret.negatives.base import PassageSource, Seat, Towers, TrainTexts, coins
from lit_dpret.negatives.mined import DynamicNegatives
from lit_dpret.retrieval.search import MISSING, TopK, search

_SAME = 1 - 1e-5  # cosine from which two embeddings are taken for one sentence's; half precision loses 1e-7
_SPARE = 16  # so many of the pool's best may be a row's own answers before fewer than ``depth`` negatives are left


class OtherPositives(PassageSource):
    """The answers of other questions of the client, drawn uniformly: the paper's "gold" negatives.

    Called *gold passages* by Karpukhin et al., "Dense Passage Retrieval for Open-Domain Question Answering",
    section 3.2. **It couples rows**: the negatives of a row are other people's records, so every mode that clips
    rows refuses it.

    Args:
        per_query: How many a row gets.
        seed: Of the draws; public.
    """

    name: ClassVar[str] = "other_positives"

    def __init__(self, *, per_query: int = 1, seed: int = 0) -> None:
        super().__init__(per_query=per_query, seed=seed)
        self.couples_rows = True

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        self._answers = sorted({place for query in range(len(texts.queries)) for place in texts.positives(query)})

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        groups = self._texts.groups
        open_to_it = [place for place in self._answers if int(groups[place]) not in seat.answers]
        draw = coins(self.seed, self.name, step, seat.text)
        count = min(self.per_query, len(open_to_it))
        return [open_to_it[place] for place in sorted(draw.choice(len(open_to_it), size=count, replace=False).tolist())]


class FedNegatives(DynamicNegatives):
    """Sentences of other clients, of which only embeddings are known, in a space whose sentence side is frozen.

    With lists (an exact request) a query gets ``per_query`` of its own list; without, the pool is
    searched with the query encoder as it is at every step. Either way they are drawn uniformly from the best
    ``depth``: the paper's remedy against query hubness, where the very best are near to every query. Where a pool
    has too few, sentences of the client's own collection stand in.

    Guarantees:
        - The negatives of a row are a function of that row, the pool, public coins and weights.
        - No embedding of one of the row's own answers is a negative.

    Args:
        pool: Embeddings that other clients returned.
        queries: The query id of each list of the pool, in order; needed where it has lists.
        per_query: How many a row gets.
        depth: Among how many of the best they are drawn.
        seed: Of the draws; public.

    Raises:
        ConfigurationError: The lists do not fit the queries, or a number is out of range.
    """

    name: ClassVar[str] = "fed"

    def __init__(
        self, pool: FedPool, *, queries: list[str] | None = None, per_query: int = 10, depth: int = 50, seed: int = 0
    ) -> None:
        super().__init__(per_query=per_query, depth=depth, seed=seed)
        if pool.lists is not None and (queries is None or len(queries) != len(pool.lists)):
            raise ConfigurationError("The pool's lists need the ids of the queries that they were made for, in order.")
        self.pool = pool
        self._row_of = {name: row for row, name in enumerate(queries or [])}

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        own: Any = self.index
        if len(self.pool.embeddings) and self.pool.embeddings.shape[1] != own.shape[1]:
            raise ConfigurationError(
                f"The pool has {self.pool.embeddings.shape[1]} dimensions and the sentence encoder {own.shape[1]}: it "
                "was made with another model. Ask for negatives again."
            )
        self._own = len(own)
        self._unit = F.normalize(self.pool.embeddings, dim=-1)
        self._group_place = {group: place for place, group in reversed(list(enumerate(texts.groups.tolist())))}
        self.index = torch.cat([own, self.pool.embeddings.to(own.dtype)])

    def nearest(self, query_embeddings: Tensor, answers: int) -> TopK:
        """Return the best of the pool, in places that are numbered after the client's own sentences.

        The depth of the search does not depend on ``answers``, the most that a row of this batch has: otherwise the
        negatives of a row would depend on how many answers another row has.
        """
        pool, rows = self.pool.embeddings, len(query_embeddings)
        if self.pool.lists is not None or not len(pool):
            return TopK(torch.full((rows, 1), float("-inf")), torch.full((rows, 1), MISSING))
        top = search(query_embeddings.float().cpu(), pool, min(self.depth + _SPARE, len(pool)))
        return TopK(top.scores, torch.where(top.indices == MISSING, top.indices, top.indices + self._own))

    def choose_near(self, seat: Seat, query_embedding: Tensor, top: TopK, row: int, *, step: int) -> list[int]:
        found = top.indices[row]
        if self.pool.lists is not None:
            listed = self.pool.lists[self._row_of[self._texts.query_ids[seat.query]]]
            found = torch.where(listed == MISSING, listed, listed + self._own)
        places = found[found != MISSING]
        answers = torch.tensor([self._group_place[group] for group in sorted(seat.answers)], dtype=torch.long)
        own = F.normalize(self._ready()[answers.to(self._ready().device)].float().cpu(), dim=-1)
        places = places[((self._unit[places - self._own] @ own.T) < _SAME).all(dim=1)][: self.depth]
        if len(places) <= self.per_query:
            return [int(place) for place in places]
        drawn = coins(self.seed, self.name, step, seat.text).choice(len(places), size=self.per_query, replace=False)
        return [int(place) for place in places[torch.from_numpy(np.sort(drawn))]]
