"""Negatives from other clients' collections (paper 004, section 2.2): their messages, and the source that draws them.

The asker sends *request rows*, each asked client answers with a *block*, and the asker merges the blocks into a *pool*.
Transports send them. `lit_dpret.federated.trust` states what each kind reveals to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.settings import Stage2
from lit_dpret.federated.storage import save_tensors
from lit_dpret.negatives.base import PassageSource, Seat, Towers, TrainTexts, public_coins
from lit_dpret.negatives.mined import DynamicNegatives
from lit_dpret.retrieval.rows import TensorRows
from lit_dpret.retrieval.scores import canonical_scores
from lit_dpret.retrieval.search import MISSING, TopK, merged, search, unbroken


def select_clients(asker: str, names: Iterable[str], stage: Stage2, *, seed: int, refresh: int) -> list[str]:
    """Return the clients to ask (``Select`` of equation 7, unspecified in paper 004), never the asker.

    Guarantees:
        - The choice is a function of names and public coins, which ``random`` draws again at every refresh. No client's
          data decide whether it is asked.
        - At most ``select_count`` clients are chosen, or all others if it is null.
    """
    others = sorted(set(names) - {asker})
    if stage.select == "random":
        order = public_coins(seed, "select clients", asker, refresh).permutation(len(others))
        others = [others[place] for place in order]
    return others[: stage.select_count]


Who = TypeVar("Who")
SENT_AS = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, repr=False)
class Block:
    """One client's answer: every embedding once, and for each request row a ranked list of them.

    Similar requests share neighbours, so a block is several times smaller than a table.
    """

    client: str  # the client that answers
    embeddings: Tensor  # ``(unique, dim)``, in the agreed dtype
    starts: Tensor  # where each request row's entries begin, long, ``(rows + 1,)``
    entries: Tensor  # indices into ``embeddings``, int32, ``(entries,)``

    def __repr__(self) -> str:
        return f"Block(from {self.client}: {len(self.embeddings)} embeddings)"

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    @property
    def parts(self) -> dict[str, Tensor]:
        return {"embeddings": self.embeddings, "starts": self.starts, "entries": self.entries}

    @property
    def bytes(self) -> int:
        """The size when sent, without the envelope."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def table(self) -> Tensor:
        """Return the lists, padded with `MISSING`: ``(rows, longest)``."""
        lengths = self.starts.diff()
        width = max(1, int(lengths.max())) if len(lengths) else 1
        table = torch.full((self.rows, width), MISSING, dtype=torch.long)
        rows = torch.arange(self.rows).repeat_interleave(lengths)
        columns = torch.arange(len(self.entries)) - self.starts[:-1].repeat_interleave(lengths)
        table[rows, columns] = self.entries.long()
        return table

    def check(self, *, rows: int, dim: int, limit: int | None = None) -> Block:
        """Refuse a block with a wrong shape, non-finite scores, or more entries than requested."""
        starts, entries, count, wrong = self.starts, self.entries, len(self.embeddings), None
        if self.embeddings.dim() != 2 or self.embeddings.shape[1] != dim:
            wrong = f"embeddings of shape {tuple(self.embeddings.shape)} where {dim} dimensions were requested"
        elif not bool(unbroken(self.embeddings).all()):
            wrong = "embeddings that are not finite, or too long for a finite score"
        elif self.rows != rows:
            wrong = f"answers to {self.rows} rows where {rows} were sent"
        elif (
            starts.dim() != 1
            or entries.dim() != 1
            or int(starts[0]) != 0
            or int(starts[-1]) != len(entries)
            or not bool((starts.diff() >= 0).all())
            or (len(entries) > 0 and not 0 <= int(entries.min()) <= int(entries.max()) < count)
        ):
            wrong = "lists that do not fit its embeddings"
        elif limit is not None and len(entries) > max(1, rows) * limit:
            wrong = f"{len(entries)} entries where at most {limit} for each of {rows} rows were requested"
        if wrong is not None:
            raise DataError(f"The answer of client {self.client!r} has {wrong}, and is not used.", kind="bad answer")
        return self


@dataclass(frozen=True, repr=False)
class FedPool:
    """Negatives from other clients, as the asker stores them."""

    embeddings: Tensor  # float32, ``(pool, dim)``
    # Indices into the pool for each request row, best first, padded with `MISSING`, ``(rows, n)``. None if the request
    # rows were not queries: then the pool is searched instead.
    lists: Tensor | None = None

    def __repr__(self) -> str:
        return f"FedPool({len(self.embeddings)} embeddings)"


def respond(client: str, request_rows: Tensor, candidates: Tensor, n: int, *, send_as: str = "float16") -> Block:
    """Answer every request row, ``(rows, dim)``, with its ``n`` candidates of highest dot product.

    Candidates are compared in the dtype in which they are sent, so that the asker ranks them in the same order.
    """
    sent = as_sent(candidates, send_as)
    top = search(request_rows.float(), sent.float(), min(n, len(sent)))
    return _block(client, sent, [row[row != MISSING] for row in top.indices])


def respond_uniformly(client: str, candidates: Tensor, n: int, *, seed: int, send_as: str = "float16") -> Block:
    """Answer an empty request with ``n`` uniformly drawn candidates, as one list for one empty row."""
    sent = as_sent(candidates, send_as)
    drawn = public_coins(seed, "uniform answer", client).permutation(len(sent))[:n]
    return _block(client, sent, [torch.from_numpy(drawn.copy()).long()])


def as_sent(embeddings: Tensor, send_as: str) -> Tensor:
    """Convert embeddings to the dtype for sending; refuse values outside its range."""
    sent = embeddings.detach().cpu().to(SENT_AS[send_as])
    if not bool(torch.isfinite(sent).all()):
        raise ConfigurationError(
            f"federated.stage2.send_as={send_as} cannot hold these embeddings: some are too large, or not finite "
            "because training diverged. Set float32, or lower federated.stage1.lr."
        )
    return sent


def merge_lists(blocks: Sequence[Block], query_embeddings: Tensor, n: int) -> FedPool:
    """Merge answers into the asker's best ``n`` for each of its queries (``TopK`` of equation 8).

    Guarantees:
        - If every block has at least ``n`` for each row, the result is the best ``n`` of all the collections together,
          ties included, as a search of their union would give.
    """
    if not blocks:
        return FedPool(torch.empty(0, query_embeddings.shape[1]), torch.full((len(query_embeddings), n), MISSING))
    ordered = sorted(blocks, key=lambda block: block.client)
    embeddings = torch.cat([block.embeddings.float() for block in ordered])
    parts: list[TopK] = []
    offset = 0
    for block in ordered:
        table = block.table()
        places = torch.where(table == MISSING, table, table + offset)
        scores = canonical_scores(query_embeddings.double().cpu(), TensorRows(embeddings), places, cosine=False)
        parts.append(TopK(scores, places))
        offset += len(block.embeddings)
    top = merged(parts, n, tie_rank=torch.arange(len(embeddings)))
    used = torch.unique(top.indices[top.indices != MISSING])
    renumbered = torch.full((len(embeddings),), MISSING, dtype=torch.long)
    renumbered[used] = torch.arange(len(used))
    lists = torch.where(top.indices == MISSING, top.indices, renumbered[top.indices.clamp(min=0)])
    return FedPool(embeddings[used], lists)


def pool_of(blocks: Sequence[Block], dim: int) -> FedPool:
    """Merge answers into a pool that holds each embedding once, to be searched with the asker's own queries."""
    ordered = sorted(blocks, key=lambda block: block.client)
    found = [block.embeddings.float() for block in ordered]
    return FedPool(torch.unique(torch.cat(found), dim=0) if found else torch.empty(0, dim))


def merged_pool(
    answers: Iterable[tuple[Who, Callable[..., Block]]], rows: Tensor, stage: Stage2,
    refuse: Callable[[Who, DataError], None],
) -> FedPool:  # fmt: skip
    """Merge the answers to a request of ``rows`` into the asker's pool, with lists if the rows are queries.

    Each answer is read with its expected size. ``refuse`` receives those that cannot be read.
    """
    # An empty request is answered with a sample, as if it were one empty row.
    size = {"rows": 1, "limit": stage.n} if stage.request == "none" else {"rows": len(rows), "limit": stage.top_k}
    blocks: list[Block] = []
    for sender, read in answers:
        try:
            blocks.append(read(**size))
        except DataError as error:
            refuse(sender, error)
    return merge_lists(blocks, rows, stage.top_k) if stage.request == "exact" else pool_of(blocks, rows.shape[1])


def kept_pool(pool: FedPool | None, path: Path) -> FedPool:
    """Write the answered pool to ``path`` and return it; between refreshes (None) read it from there."""
    if pool is not None:
        parts = {"embeddings": pool.embeddings, "lists": pool.lists}
        save_tensors({name: part for name, part in parts.items() if part is not None}, path)
    elif not path.is_file():
        raise DataError(f"{path} does not exist: a client that missed a refresh waits for the next one.")
    return FedPool(**load_file(path))


def _block(client: str, sent: Tensor, rows: Sequence[Tensor]) -> Block:
    flat = torch.cat(list(rows)) if rows else torch.empty(0, dtype=torch.long)
    used, entries = torch.unique(flat, return_inverse=True)
    starts = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0)
    return Block(client, sent[used], starts, entries.to(torch.int32))


_SAME = 1 - 1e-5  # cosine from which two embeddings count as the same sentence; half precision loses 1e-7
_SPARE = 16  # how many of the pool's best may be a row's own answers before fewer than ``depth`` negatives remain


class OtherPositives(PassageSource):
    """The answers to other questions of the client, drawn uniformly: the paper's "gold" negatives.

    Called *gold passages* by Karpukhin et al., "Dense Passage Retrieval for Open-Domain Question Answering",
    section 3.2. **It couples rows**: the negatives of a row are other people's records, so every mode that clips
    rows refuses it.
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
        draw = public_coins(self.seed, self.name, step, seat.text)
        count = min(self.per_query, len(open_to_it))
        return [open_to_it[place] for place in sorted(draw.choice(len(open_to_it), size=count, replace=False).tolist())]


class FedNegatives(DynamicNegatives):
    """Sentences of other clients, known only as embeddings, in a space with a frozen sentence side.

    With lists (an exact request) a query gets ``per_query`` of its own list. Without lists, the pool is searched with
    the current query encoder at every step. Both draw uniformly from the best ``depth``: the paper's remedy against
    query hubness, where the very best are near every query. Where a pool has too few, sentences of the client's own
    collection fill up.

    Guarantees:
        - The negatives of a row are a function of that row, the pool, public coins and weights.
        - No embedding of one of the row's own answers is a negative.
    """

    name: ClassVar[str] = "fed"

    def __init__(
        self, pool: FedPool, *, queries: list[str] | None = None, per_query: int = 10, depth: int = 50, seed: int = 0
    ) -> None:
        super().__init__(per_query=per_query, depth=depth, seed=seed)
        self.pool = pool
        self._row_of = {name: row for row, name in enumerate(queries or [])}

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        own: Any = self.index
        if len(self.pool.embeddings) and self.pool.embeddings.shape[1] != own.shape[1]:
            raise ConfigurationError(
                f"The pool has {self.pool.embeddings.shape[1]} dimensions, and the sentence encoder has "
                f"{own.shape[1]}. Request negatives again."
            )
        self._own = len(own)
        self._unit = F.normalize(self.pool.embeddings, dim=-1)
        self._group_place = {group: place for place, group in reversed(list(enumerate(texts.groups.tolist())))}
        self.index = torch.cat([own, self.pool.embeddings.to(own.dtype)])

    def nearest(self, query_embeddings: Tensor, answers: int) -> TopK:
        """Return the best of the pool, with indices after the client's own sentences."""
        pool, rows = self.pool.embeddings, len(query_embeddings)
        if self.pool.lists is not None or not len(pool):
            return TopK(torch.full((rows, 1), float("-inf")), torch.full((rows, 1), MISSING))
        # The depth of the search does not depend on ``answers``, the maximum over this batch: otherwise the negatives
        # of a row would depend on how many answers another row has.
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
        drawn = public_coins(self.seed, self.name, step, seat.text).choice(
            len(places), size=self.per_query, replace=False
        )
        return [int(place) for place in places[torch.from_numpy(np.sort(drawn))]]
