"""One system, loaded once, that ranks any collection: a dual encoder by its name or folder, or BM25."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lit_dpret.callbacks import ProgressLine
from lit_dpret.encoders import Towers, load_towers
from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.bm25 import BM25
from lit_dpret.retrieval.runs import Ranking
from lit_dpret.retrieval.self_matches import without_self_matches
from lit_dpret.tasks.scoring import rank_embeddings


class Ranker:
    """Ranks passages for queries, best first.

    Args:
        encoder: ``minilm``, the folder of a trained encoder, a hub name, or ``bm25``.
        max_passage_length: Tokens of a passage that are read; null for what the encoder's folder says.
        max_query_length: The same for a query.
        cache_dir: Where to keep passage embeddings between runs; null keeps none.

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
    ) -> None:
        if encoder == "bm25" and (max_passage_length is not None or max_query_length is not None):
            raise ConfigurationError(
                "task.encoder=bm25 reads whole texts: set task.max_passage_length and task.max_query_length to null."
            )
        self.encoder = encoder
        self._lengths = max_query_length, max_passage_length
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
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
        texts, tower = list(passages.values()), self._towers.passage_encoder
        with ProgressLine("encoding passages") as progress:
            if self._cache_dir is None:
                embeddings = tower.encode(texts, "passage", progress=progress)
            else:
                embeddings = tower.encode_cached(texts, "passage", self._cache_dir, progress=progress)
        asked = self._towers.query_encoder.encode(list(queries.values()), "query")
        return rank_embeddings(list(queries), asked, list(passages), embeddings, k=k)

    def _load(self) -> Towers:
        towers = load_towers(self.encoder)
        of_queries, of_passages = self._lengths
        for tower in towers:
            tower.contract = replace(
                tower.contract,
                query_max_length=of_queries or tower.contract.query_max_length,
                passage_max_length=of_passages or tower.contract.passage_max_length,
            )
        return towers
