"""One system, loaded once, that ranks any collection: a dual encoder by its name or folder, or BM25."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.callbacks import ProgressLine
from lit_dpret.encoders import Towers, cut, load_towers
from lit_dpret.encoders.bulk import ahead, in_order
from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.backends import check_search, make_search
from lit_dpret.retrieval.bm25 import BM25
from lit_dpret.retrieval.runs import Ranking, without_self_matches
from lit_dpret.tasks.scoring import rank_embeddings, rank_stream


class Ranker:
    """Ranks passages for queries, best first.

    Args:
        encoder: ``minilm``, the folder of a trained encoder, a hub name, or ``bm25``.
        max_passage_length: Tokens of a passage that are read; null for what the encoder's folder says.
        max_query_length: The same for a query.
        cache_dir: Where to keep passage embeddings between runs; null keeps none, and searches each piece of
            the corpus while the next is encoded.
        search: ``exact``, ``faiss:FACTORY`` or ``scann``; the last two hold all passages.
        dtype: In which the encoder computes.
        batch_size: Texts per forward pass.
        device: Where to encode and search.

    Raises:
        ConfigurationError: A setting of encoders is given for ``bm25``.
    """

    def __init__(
        self,
        encoder: str,
        *,
        max_passage_length: int | None = None,
        max_query_length: int | None = None,
        cache_dir: str | Path | None = None,
        search: str = "exact",
        dtype: str = "float32",
        batch_size: int = 64,
        device: str = "cpu",
    ) -> None:
        check_search(search)
        if encoder == "bm25" and (max_passage_length is not None or max_query_length is not None):
            raise ConfigurationError(
                "task.encoder=bm25 reads whole texts: set task.max_passage_length and task.max_query_length to null."
            )
        self.encoder = encoder
        self._lengths = max_query_length, max_passage_length
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._search, self._dtype = search, dtype
        self.device = device
        self._how: dict[str, Any] = {"batch_size": batch_size, "device": device}
        self._towers: Towers | None = None

    def rank(
        self, queries: Mapping[str, str], passages: Mapping[str, str], *, k: int, drop_self_matches: bool = False
    ) -> Ranking:
        """The first ``k`` passages of every query, texts by id.

        Args:
            queries: The texts to rank for.
            passages: The texts to rank.
            k: How many; fewer where there are fewer passages.
            drop_self_matches: Never return the passage that has the query's own id.
        """
        wanted = min(k + drop_self_matches, len(passages))
        ranking = (self._words if self.encoder == "bm25" else self._nearest)(queries, passages, wanted)
        return without_self_matches(ranking, k) if drop_self_matches else ranking

    def _words(self, queries: Mapping[str, str], passages: Mapping[str, str], k: int) -> Ranking:
        ids = list(passages)
        top = BM25(list(passages.values()), ids).search(list(queries.values()), k)
        return Ranking(query_ids=list(queries), passage_ids=ids, top=top)

    def _nearest(self, queries: Mapping[str, str], passages: Mapping[str, str], k: int) -> Ranking:
        if self._towers is None:
            self._towers = self._load()
        device = self._how["device"]
        asked = self._towers.query_encoder.encode(list(queries.values()), "query", **self._how)
        ids, texts, tower = list(passages), in_order(passages), self._towers.passage_encoder
        with ProgressLine("encoding passages") as progress:
            if self._cache_dir is None and self._search == "exact":
                pieces = tower.encode_stream(texts, "passage", progress=progress, **self._how)
                # On a CPU the two would only take each other's cores.
                pieces = pieces if device == "cpu" else ahead(pieces)
                return rank_stream(list(queries), asked, ids, pieces, k=k, device=device)
            if self._cache_dir is None:
                found = tower.encode(texts, "passage", progress=progress, **self._how)
            else:
                found = tower.encode_cached(texts, "passage", self._cache_dir, progress=progress, **self._how)
        find = make_search(self._search, device=device)
        return rank_embeddings(list(queries), asked, ids, found, k=k, find=find)

    def _load(self) -> Towers:
        of_queries, of_passages = self._lengths
        towers = load_towers(self.encoder, dtype=self._dtype)
        return cut(towers, query_max_length=of_queries, passage_max_length=of_passages)
