"""Which synthetic queries to train on: scores that look at released queries and public models alone.

Every filter gives each query a score, the higher the better, and keeps some by it. The scores may be
published, tuned on and looked at as often as one likes: they cost no privacy, because nothing private
enters them (`lit_dpret.synthesis.filters.released`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.modules.token_scores import TokenScorer
from lit_dpret.privacy.ledger.judgement import Assumption
from lit_dpret.retrieval.trec_runs import Ranking
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.synthesis.filters.released import ReleasedQueries, require_covered, require_released, shown

Progress = Callable[[int, int], None]


class Ranks(Protocol):
    """A retriever: `lit_dpret.tasks.Ranker`, or your own."""

    encoder: str

    def rank(self, queries: Mapping[str, str], passages: Mapping[str, str], *, k: int) -> Ranking: ...


class QueryFilter(ABC):
    """Keeps some of the released queries.

    Guarantees:
        - `choose` is a function of released queries, public passages and models whose training the
          queries' claim covers; anything else raises before the first query is scored.
        - Queries that score alike are treated alike, but for `BestOf` and a share, which fall back to the
          order of the data set.
    """

    name: str = "filter"
    device: str = "cpu"
    """Where it computes, for the card."""

    @abstractmethod
    def check(self, released: ReleasedQueries) -> list[Assumption]:
        """Refuse, before anything expensive, models whose training the claim of these queries does not cover.

        Returns:
            What the claim takes on trust where the filter is used.
        """

    @abstractmethod
    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        """Return one score per query, shape ``(queries,)``, higher is better; -inf for those that fail outright."""

    @abstractmethod
    def keep(self, released: ReleasedQueries, scores: np.ndarray) -> np.ndarray:
        """Return booleans ``(queries,)``: which to keep by their scores."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return its settings, for the card: plain JSON values."""

    def claim(self, released: ReleasedQueries) -> Path | None:
        """Return a folder whose card covers what is kept; None where the queries' own card still does.

        A filter that looks at one more release of private data names the card that composes both.
        """
        return None

    def choose(self, released: ReleasedQueries, progress: Progress | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return scores, and which queries to keep.

        Raises:
            PrivateDataError: ``released`` is no `ReleasedQueries`, or a model is not covered by their claim.
            DataError: A score is not a number.
        """
        require_released(released, f"The filter {self.name}")
        self.check(released)
        scores = np.asarray(self.score(released, progress), dtype=np.float64)
        if len(scores) != len(released) or np.isnan(scores).any():
            raise DataError(
                f"The filter {self.name} gave {len(scores)} scores for {len(released)} queries, "
                f"{int(np.isnan(scores).sum())} of them not a number: its model is broken."
            )
        return scores, self.keep(released, scores)


class RoundTrip(QueryFilter):
    """Keep the queries that find their own passage among the first ``k`` (Dai et al., "Promptagator", 2022, 3.2).

    The score is minus the rank, from -1 for the first place; -inf where the passage is not among the ``k``.

    Args:
        ranker: Ranks the passages of the data set for each query.
        k: How far down the own passage may stand.
        encoder_is_public: Declares that nothing private went into an encoder without privacy card.
    """

    name = "round_trip"

    def __init__(self, ranker: Ranks, *, k: int = 10, encoder_is_public: bool = False) -> None:
        if k < 1:
            raise ConfigurationError(f"k={k} of the filter round_trip must be at least 1.")
        self.ranker, self.k, self.encoder_is_public = ranker, k, encoder_is_public
        self.device = str(getattr(ranker, "device", self.device))

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        return require_covered(self.ranker.encoder, released, declared_public=self.encoder_is_public, knob="encoder")

    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        ranking = self.ranker.rank({q.query_id: q.text for q in released}, released.passages, k=self.k)
        place = {name: i for i, name in enumerate(ranking.passage_ids)}
        own = np.array([place[q.passage_id] for q in released])
        hits = ranking.top.indices.numpy() == own[:, None]
        return np.where(hits.any(axis=1), -(hits.argmax(axis=1) + 1.0), -math.inf)

    def keep(self, released: ReleasedQueries, scores: np.ndarray) -> np.ndarray:
        kept: np.ndarray = np.isfinite(scores)
        return kept

    def settings(self) -> dict[str, Any]:
        told = "minus the rank of the query's own passage"
        return {"filter": self.name, "encoder": shown(self.ranker.encoder), "k": self.k, "score": told}


class _ByThreshold(QueryFilter):
    """Keeps the best share, or all above a score."""

    def __init__(self, *, keep_share: float | None, min_score: float | None) -> None:
        if (keep_share is None) == (min_score is None):
            raise ConfigurationError(
                f"keep_share={keep_share} and min_score={min_score} of the filter {self.name}: give one of them."
            )
        if keep_share is not None and not 0 < keep_share <= 1:
            raise ConfigurationError(f"keep_share={keep_share} of the filter {self.name} is not in (0, 1].")
        self.keep_share, self.min_score = keep_share, min_score

    def keep(self, released: ReleasedQueries, scores: np.ndarray) -> np.ndarray:
        if self.min_score is not None:
            return scores >= self.min_score
        kept = np.zeros(len(scores), dtype=bool)
        wanted = math.ceil(float(self.keep_share or 1) * len(scores))
        kept[np.argsort(-scores, kind="stable")[:wanted]] = True
        return kept


class LanguageModelScore(_ByThreshold):
    """Keep the queries that a language model finds likely for their passage (Bonifacio et al., "InPars", 2022, 3).

    The score is the mean log probability in nats of the query's tokens, its end mark included, given the passage.

    Args:
        model: A sequence-to-sequence model: the folder of the generator itself, whose prompt and lengths then
            hold, or a public one. Null takes what the data set recorded, over the number of words plus one.
        model_is_public: Declares that nothing private went into a model without privacy card.
        prompt: Put before every passage, for a model that is no generator of ours.
        keep_share: The best share, in (0, 1]; InPars keeps a tenth.
        min_score: Or every query that scores as much.
        batch_size: Pairs per forward pass.
    """

    name = "language_model"

    def __init__(
        self,
        *,
        model: str | Path | None = None,
        model_is_public: bool = False,
        prompt: str = "",
        keep_share: float | None = None,
        min_score: float | None = None,
        batch_size: int = 32,
    ) -> None:
        super().__init__(keep_share=keep_share, min_score=min_score)
        self.model, self.model_is_public, self.prompt, self.batch_size = model, model_is_public, prompt, batch_size

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        if self.model is not None:
            return require_covered(self.model, released, declared_public=self.model_is_public, knob="model")
        if any(query.log_prob is None for query in released):
            raise ConfigurationError(
                "The data set records no log_prob for some of its queries, so the filter language_model needs a model "
                "to score them: set its model to a folder."
            )
        return []

    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        if self.model is None:
            return np.array([float(q.log_prob or 0.0) / (len(q.text.split()) + 1) for q in released])
        scorer = TokenScorer.load(self.model, prompt=self.prompt)
        return scorer.score(*released.pairs(), batch_size=self.batch_size, progress=progress).per_token()

    def settings(self) -> dict[str, Any]:
        return {
            "filter": self.name, "model": None if self.model is None else shown(self.model),
            "keep_share": self.keep_share, "min_score": self.min_score,
        }  # fmt: skip


class CrossEncoderScore(_ByThreshold):
    """Keep the pairs that a public cross-encoder finds relevant; the score is its logit.

    Args:
        model: The cross-encoder: a folder or a hub name.
        model_is_public: Declares that nothing private went into it.
        keep_share: The best share, in (0, 1].
        min_score: Or every pair that scores as much.
        batch_size: Pairs per forward pass.
        max_length: Tokens of a pair that are read; null for what the folder says.
    """

    name = "cross_encoder"

    def __init__(
        self,
        model: str | Path,
        *,
        model_is_public: bool = False,
        keep_share: float | None = None,
        min_score: float | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
    ) -> None:
        super().__init__(keep_share=keep_share, min_score=min_score)
        self.model, self.model_is_public = model, model_is_public
        self.batch_size, self.max_length = batch_size, max_length

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        return require_covered(self.model, released, declared_public=self.model_is_public, knob="model")

    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        scorer = CrossEncoder.load(self.model, max_length=self.max_length)
        return scorer.score(*released.pairs(), batch_size=self.batch_size, progress=progress)

    def settings(self) -> dict[str, Any]:
        return {
            "filter": self.name, "model": shown(self.model), "keep_share": self.keep_share, "min_score": self.min_score,
        }  # fmt: skip


class BestOf(QueryFilter):
    """Keep the ``n`` best queries of every passage, by the score of another filter.

    With ``task.queries_per_passage=N`` of `Synthesize` it is best-of-N sampling. Of queries that score alike the
    earlier draw wins. A query that ``by`` fails outright (-inf) is not kept, however few there are.

    Args:
        by: The filter that scores; what it would keep by itself is not asked.
        n: How many of each passage.
    """

    name = "best_of"

    def __init__(self, by: QueryFilter, *, n: int = 1) -> None:
        if n < 1:
            raise ConfigurationError(f"n={n} of the filter best_of must be at least 1.")
        self.by, self.n, self.device = by, n, by.device

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        return self.by.check(released)

    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        return self.by.score(released, progress)

    def keep(self, released: ReleasedQueries, scores: np.ndarray) -> np.ndarray:
        of_passage = defaultdict[str, list[int]](list)
        for place, query in enumerate(released):
            of_passage[query.passage_id].append(place)
        kept = np.zeros(len(scores), dtype=bool)
        for places in of_passage.values():
            kept[sorted(places, key=lambda i: -scores[i])[: self.n]] = True
        return kept & (scores > -math.inf)

    def settings(self) -> dict[str, Any]:
        return {"filter": self.name, "n": self.n, "by": self.by.settings()}
