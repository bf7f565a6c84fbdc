"""Filters for synthetic queries by scores that use only released queries and public models.

Every filter scores each query, higher is better, and keeps some queries by score. The scores may be published, tuned on
and inspected without limit: they cost no privacy, because nothing private enters them
(`lit_dpret.synthesis.filters.released`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.modules.token_scores import TokenScorer
from lit_dpret.privacy.ledger.assumptions import Assumption
from lit_dpret.retrieval.trec_runs import Ranking
from lit_dpret.settings import require_whole
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.synthesis.filters.pair_scores import pair_workers, score_pairs
from lit_dpret.synthesis.filters.released import ReleasedQueries, require_covered, require_released, shown

Progress = Callable[[int, int], None]


class Ranks(Protocol):
    """A retriever: `lit_dpret.tasks.Ranker`, or a custom one."""

    encoder: str

    def rank(self, queries: Mapping[str, str], passages: Mapping[str, str], *, k: int) -> Ranking: ...


class QueryFilter(ABC):
    """A filter that keeps some of the released queries.

    Guarantees:
        - `choose` is a function of released queries, public passages and models whose training the
          queries' claim covers; anything else raises before the first query is scored.
        - Queries with equal scores are treated alike, except by `BestOf` and by a share, which fall back to the
          order of the data set.
    """

    name: str = "filter"
    device: str = "cpu"
    """The device that it computes on, for the card."""

    @abstractmethod
    def check(self, released: ReleasedQueries) -> list[Assumption]:
        """Refuse, before expensive work, models whose training the claim of these queries does not cover.

        Returns:
            The assumptions that the claim takes on trust if the filter is used.
        """

    @abstractmethod
    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        """Return one score per query, shape ``(queries,)``, higher is better; -inf for failures."""

    @abstractmethod
    def keep(self, released: ReleasedQueries, scores: np.ndarray) -> np.ndarray:
        """Return a mask ``(queries,)`` of the queries to keep by their scores."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return its settings for the card, as plain JSON values."""

    def facts(self) -> dict[str, Any]:
        """Return its name and settings, for the card."""
        return {"filter": self.name, **self.settings()}

    def claim(self, released: ReleasedQueries) -> Path | None:
        """Return a folder whose card covers the kept queries; None if the queries' own card does.

        A filter that reads one more release of private data names the card that composes both.
        """
        return None

    def choose(self, released: ReleasedQueries, progress: Progress | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores, and a mask of the queries to keep.

        Raises:
            PrivateDataError: ``released`` is not a `ReleasedQueries`, or a model is not covered by their claim.
            DataError: A score is not a number.
        """
        require_released(released, f"The filter {self.name}")
        self.check(released)
        scores = np.asarray(self.score(released, progress), dtype=np.float64)
        if len(scores) != len(released) or np.isnan(scores).any():
            raise DataError(
                f"The filter {self.name} gave {len(scores)} scores for {len(released)} queries, "
                f"{int(np.isnan(scores).sum())} of them NaN: its model is broken. Choose another model."
            )
        return scores, self.keep(released, scores)


@dataclass(eq=False)
class RoundTrip(QueryFilter):
    """Keep queries that retrieve their own passage among the first ``k`` (Dai et al., "Promptagator", 2022, 3.2).

    The score is minus the rank, from -1 for rank 1; -inf if the passage is not among the ``k``.
    """

    name = "round_trip"

    ranker: Ranks  # ranks the passages of the data set for each query
    _: KW_ONLY
    k: int = 10  # the last rank at which the query's own passage may be
    encoder_is_public: bool = False  # declares that nothing private went into an encoder without a privacy card

    def __post_init__(self) -> None:
        require_whole("task.filters.round_trip", self, 1, "k")
        self.device = str(getattr(self.ranker, "device", self.device))

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        where = f"task.filters.{self.name}"
        return require_covered(
            self.ranker.encoder, released, declared_public=self.encoder_is_public, knob=f"{where}.ranker.encoder",
            declaration=f"{where}.encoder_is_public", ranks=True,
        )  # fmt: skip

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
        return {"encoder": shown(self.ranker.encoder), "k": self.k, "score": told}


@dataclass(eq=False, kw_only=True)
class _ByThreshold(QueryFilter):
    """Keep the best share, or all at or above a score."""

    keep_share: float | None = None  # the best share, in (0, 1]; InPars keeps a tenth
    min_score: float | None = None  # or every query with at least this score
    batch_size: int = 32  # pairs per forward pass
    device: str = "cpu"  # where the model computes
    workers: int = 0  # Ray processes that score, each with the model; 0 scores in this process

    def __post_init__(self) -> None:
        share = self.keep_share
        if (share is None) == (self.min_score is None):
            raise ConfigurationError(
                f"keep_share={share} and min_score={self.min_score} of the filter {self.name}: give exactly one of "
                "them."
            )
        if share is not None and not 0 < share <= 1:
            raise ConfigurationError(f"keep_share={share} of the filter {self.name} is not in (0, 1].")
        require_whole(f"task.filters.{self.name}", self, 0, "workers")

    def _scored(
        self, released: ReleasedQueries, load: Callable[[], Any], source: str | Path, progress: Progress | None
    ) -> np.ndarray:
        how = {"workers": self.workers, "device": self.device}
        with pair_workers(load, source, batch_size=self.batch_size, **how) as over:  # type: ignore[arg-type]
            return score_pairs(*released.pairs(), over, batch_size=self.batch_size, progress=progress)

    def keep(self, released: ReleasedQueries, scores: np.ndarray) -> np.ndarray:
        if self.min_score is not None:
            return scores >= self.min_score
        kept = np.zeros(len(scores), dtype=bool)
        wanted = math.ceil(float(self.keep_share or 1) * len(scores))
        kept[np.argsort(-scores, kind="stable")[:wanted]] = True
        return kept


@dataclass(eq=False, kw_only=True)
class LanguageModelScore(_ByThreshold):
    """Keep queries that a language model finds likely for their passage (Bonifacio et al., "InPars", 2022, 3).

    The score is the mean log probability in nats of the query's tokens, including its end mark, given the passage.
    """

    name = "language_model"

    model: str | Path | None = None
    """A sequence-to-sequence model: the folder of the generator itself, whose prompt and lengths then apply, or a
    public model. Null uses the log probability that the data set records, divided by the number of words plus one."""
    model_is_public: bool = False  # declares that nothing private went into a model without a privacy card
    prompt: str = ""  # put before every passage, for a model that is not one of our generators

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        if self.model is not None:
            knob = f"task.filters.{self.name}.model"
            return require_covered(self.model, released, declared_public=self.model_is_public, knob=knob)
        if any(query.log_prob is None for query in released):
            raise ConfigurationError(
                "The data set records no log_prob for some of its queries, so the filter language_model needs a model "
                "to score them: set task.filters.language_model.model."
            )
        return []

    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        if self.model is None:
            return np.array([float(q.log_prob or 0.0) / (len(q.text.split()) + 1) for q in released])
        load = partial(TokenScorer.load, self.model, prompt=self.prompt, device=self.device)
        return self._scored(released, load, self.model, progress)

    def settings(self) -> dict[str, Any]:
        model = None if self.model is None else shown(self.model)
        return {"model": model, "keep_share": self.keep_share, "min_score": self.min_score}


@dataclass(eq=False)
class CrossEncoderScore(_ByThreshold):
    """Keep the pairs that a public cross-encoder finds relevant; the score is its logit."""

    name = "cross_encoder"

    model: str | Path  # the cross-encoder: a folder or a hub name
    _: KW_ONLY
    model_is_public: bool = False  # declares that nothing private went into it
    max_length: int | None = None  # tokens of a pair that are read; null uses the folder's setting

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        knob = f"task.filters.{self.name}.model"
        return require_covered(self.model, released, declared_public=self.model_is_public, knob=knob)

    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        load = partial(CrossEncoder.load, self.model, max_length=self.max_length, device=self.device)
        return self._scored(released, load, self.model, progress)

    def settings(self) -> dict[str, Any]:
        return {"model": shown(self.model), "keep_share": self.keep_share, "min_score": self.min_score}


@dataclass(eq=False)
class BestOf(QueryFilter):
    """Keep the ``n`` best queries of every passage, by the score of another filter.

    With ``task.queries_per_passage=N`` of `Synthesize` it is best-of-N sampling. Of queries with equal scores, the
    earlier draw wins. A query that ``by`` fails outright (-inf) is never kept, even if fewer than ``n`` remain.
    """

    name = "best_of"

    by: QueryFilter  # the filter that scores; its own choice is not used
    _: KW_ONLY
    n: int = 1  # queries kept per passage

    def __post_init__(self) -> None:
        require_whole("task.filters.best_of", self, 1, "n")
        self.device = self.by.device

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
        return {"n": self.n, "by": self.by.facts()}
