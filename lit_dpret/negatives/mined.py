"""Mined negatives: passages that rank high for a query and do not answer it.

The passages mined for a query are a function of its text, of public passages and of weights that are public or
were released, so mining couples no rows. Answers are excluded by the row's own information; another
query's judgements are never used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.encoders.embedding_cache import content_hash
from lit_dpret.errors import ConfigurationError
from lit_dpret.files import OutputFolder
from lit_dpret.negatives.base import PassageSource, Seat, Towers, TrainTexts
from lit_dpret.negatives.rankings import (
    SCHEMA,
    Mined,
    MinedShards,
    Ranker,
    bm25_ranker,
    dense_ranker,
    mine,
)
from lit_dpret.retrieval.bm25 import BM25Settings
from lit_dpret.retrieval.search import TopK, lexicographic_rank, search
from lit_dpret.settings import require_choice, require_whole

Refresh = Literal["never", "epoch"]


@dataclass(kw_only=True, eq=False, repr=False)
class MarginFilter:
    """Bounds on a candidate's score, absolute and relative to the row's own passage.

    The names are those of ``mine_hard_negatives`` of sentence-transformers. ``relative_margin=0.05`` is
    TopK-PercPos at 95 % (Moreira et al., NV-Retriever, 2407.15831, section 4): a negative scores at most 95 % of
    the positive.
    """

    absolute_margin: float | None = None  # a negative scores lower than the row's own passage by at least this
    relative_margin: float | None = None  # a negative scores lower by at least this share of that passage's score
    max_score: float | None = None  # the highest score of a negative
    min_score: float | None = None  # the lowest score of a negative
    range_min: int = 0  # how many of the best candidates that are not answers are skipped

    def __post_init__(self) -> None:
        where = f"model.negatives.{self.name}." if isinstance(self, PassageSource) else ""
        for name in ("absolute_margin", "relative_margin", "max_score", "min_score", "range_min"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigurationError(f"{where}{name}={value} is not a finite number.")
        for name in ("absolute_margin", "relative_margin", "range_min"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(f"{where}{name}={value} must not be negative.")
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ConfigurationError(
                f"{where}min_score={self.min_score} is above {where}max_score={self.max_score}; nothing would pass."
            )

    def keep(self, scores: NDArray[np.float32], positive: float) -> NDArray[np.bool_]:
        """Return which candidates pass, given their scores, best first, and that of the row's own passage.

        Example:
            >>> MarginFilter(relative_margin=0.05).keep(np.array([0.99, 0.95, 0.2], dtype=np.float32), 1.0)
            array([False,  True,  True])
        """
        kept = np.arange(len(scores)) >= self.range_min
        upper = [
            bound
            for bound in (
                self.max_score,
                None if self.absolute_margin is None else positive - self.absolute_margin,
                None if self.relative_margin is None else positive - abs(positive) * self.relative_margin,
            )
            if bound is not None
        ]
        if upper:
            kept &= scores <= np.float32(min(upper))
        if self.min_score is not None:
            kept &= scores >= np.float32(self.min_score)
        return kept


@dataclass(kw_only=True, eq=False, repr=False)
class MinedSource(PassageSource, MarginFilter):
    """A uniform draw from a query's best passages, by (``seed``, epoch), its own record and public data alone.

    Drawing from the best 200 instead of taking the best avoids two problems: passages that are near every query would
    be negatives everywhere, and answers that are not marked would be taken every time.
    """

    depth: int = 200  # the number of best passages to draw from
    # Where rankings are kept for later runs; null keeps none. Those of private queries are as private as the queries.
    cache_dir: str | OutputFolder | None = None
    shard_size: int = 1024  # the number of queries that are ranked and written together

    def __post_init__(self) -> None:
        super().__post_init__()
        MarginFilter.__post_init__(self)
        require_whole(f"model.negatives.{self.name}", self, 1, "depth", "shard_size")
        self._mined: Mined | None = None

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        mined = self.mined
        positive = mined.score_of(seat.query, seat.own)
        return self.draw(seat, mined.places[seat.query], mined.scores[seat.query], positive, epoch)

    @property
    def mined(self) -> Mined:
        """The mined rankings."""
        if self._mined is None:
            raise ConfigurationError(f"model.negatives.{self.name} was not prepared. Call learn_negatives first.")
        return self._mined

    def draw(self, seat: Seat, places: Any, scores: Any, positive: float, number: int) -> list[int]:
        """Draw among the candidates that are not answers and pass the margins; ``number`` keys the coins."""
        groups = self._texts.groups.numpy()
        wanted = (places >= 0) & ~np.isin(groups[places], list(seat.answers))
        places, scores = places[wanted][: self.depth], scores[wanted][: self.depth]
        places = places[self.keep(scores, positive)]
        return self.some_of(places, number, seat.text)

    def _store(self, facts: dict[str, Any], *, private: bool) -> MinedShards | None:
        """Return the store for rankings that depend on these facts and on the texts."""
        if self.cache_dir is None:
            return None
        texts = self._texts
        content = [*texts.passage_ids, *texts.passages, *texts.query_ids, *texts.queries]
        answers = [texts.positives(i) for i in range(len(texts.queries))]
        sizes = [len(texts.passages), len(texts.queries), self.depth]
        key = content_hash({"schema": SCHEMA, "sizes": sizes, "answers": answers, **facts}, {}, content)
        return MinedShards(Path(self.cache_dir), name=self.name, key=key, count=len(texts.queries), private=private)

    def _mine(self, rank: Callable[[], Ranker], store: MinedShards | None, *, private: bool) -> Mined:
        label = f"mining {self.name} negatives"
        return mine(rank, self._texts, label=label, shard_size=self.shard_size, store=store, private=private)


@dataclass(kw_only=True, eq=False, repr=False)
class BM25Negatives(MinedSource):
    """Passages that share words with the query: the best by BM25, mined once.

    The margins bound BM25 scores, computed with the settings of `lit_dpret.retrieval.bm25.BM25Settings`.
    """

    name: ClassVar[str] = "bm25"

    k1: float = 0.9
    b: float = 0.4
    stemmer: str | None = "english"
    stopwords: str | None = "en"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings = BM25Settings(k1=self.k1, b=self.b, stemmer=self.stemmer, stopwords=self.stopwords)

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        store = self._store({"source": self.name, **asdict(self.settings)}, private=private)
        self._mined = self._mine(
            lambda: bm25_ranker(texts, depth=self.depth, settings=self.settings), store, private=private
        )


@dataclass(kw_only=True, eq=False, repr=False)
class StaticNegatives(MinedSource):
    """Passages that the model itself ranks high, by cosine: STAR's static hard negatives.

    Zhan et al., "Optimizing Dense Retrieval Model Training with Hard Negatives" (2104.08051), section 5.1:
    ``per_query=1``, ``depth=200`` and ``shared_in_batch=true`` give STAR's, trained here with a
    softmax over all candidates where the paper uses a pairwise loss. ``refresh=epoch`` is ANCE's idea
    (Xiong et al., 2007.00808).
    """

    name: ClassVar[str] = "static"

    refresh: Refresh = "never"  # mine once, with the initial weights, or at the start of every ``epoch``

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.negatives.static.refresh", self.refresh, get_args(Refresh))
        self.mined_in, self.weights = 0, ""

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        self._towers, self._private = towers, private
        self.remine(0)

    def remine(self, epoch: int) -> None:
        """Mine with the current weights, or read rankings mined with them."""
        weights = self._towers.fingerprint()
        store = self._store_of(weights)
        self._mined = self._mine(
            lambda: dense_ranker(self._texts, self._towers, depth=self.depth, store=store), store, private=self._private
        )
        self.mined_in, self.weights = epoch, weights

    def recall(self, epoch: int, weights: str) -> bool:
        """Read rankings mined with earlier weights, by fingerprint; return whether all were found."""
        store = self._store_of(weights)
        if store is None or any(store.missing(self.shard_size)):
            return False
        self._mined, self.mined_in, self.weights = store.read(), epoch, weights
        return True

    def _store_of(self, weights: str) -> MinedShards | None:
        return self._store({"source": self.name, "weights": weights}, private=self._private)


class DynamicNegatives(MinedSource):
    """Passages that the query tower ranks high in the current step, in a fixed index.

    ADORE (Zhan et al., 2104.08051, section 5.2): a frozen tower encodes the passages once, and only the query tower
    learns, each query against the passages it ranks high now. The paper trains with LambdaRank over the best 200;
    here it is a softmax over the row's passage and its candidates. A row gets ``per_query`` of the best, null
    for all of ``depth``; ``margins`` are the arguments of `MarginFilter`, in cosines.
    """

    name: ClassVar[str] = "dynamic"

    def __init__(self, *, per_query: int | None = None, depth: int = 50, seed: int = 0, **margins: Any) -> None:
        super().__init__(per_query=depth if per_query is None else per_query, depth=depth, seed=seed, **margins)
        self.index: Tensor | None = None

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        self.index = towers.embeddings(texts.passages, "passage", None)
        self._tie_rank = lexicographic_rank(texts.passage_ids)

    def nearest(self, query_embeddings: Tensor, answers: int) -> TopK:
        """Return the best of the index for some queries, on the CPU, ``(queries, depth + answers)``.

        At most ``answers`` passages answer each query, so at least ``depth`` of the best do not.
        """
        index = self._ready().to(query_embeddings.device)
        self.index, k = index, min(self.depth + answers, len(index))
        return search(query_embeddings.to(index.dtype), index, k, tie_rank=self._tie_rank)

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        raise ConfigurationError(
            "model.negatives.dynamic has no choose(): it searches with embeddings of queries, at each step."
        )

    def choose_near(self, seat: Seat, query_embedding: Tensor, top: TopK, row: int, *, step: int) -> list[int]:
        """Return the indices of passages for one row, from the result of `nearest`."""
        positive = float(query_embedding.double() @ self._ready()[seat.own].double())
        return self.draw(seat, top.indices[row].numpy(), top.scores[row].numpy(), positive, step)

    def _ready(self) -> Tensor:
        if self.index is None:
            raise ConfigurationError("model.negatives.dynamic was not prepared. Call learn_negatives first.")
        return self.index
