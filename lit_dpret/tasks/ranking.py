"""Rankings: from embeddings or words to a scored ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from lit_dpret.callbacks import ProgressLine
from lit_dpret.encoders import Side, TextEncoder, Towers, cut, load_towers
from lit_dpret.encoders.bulk import ahead, in_order
from lit_dpret.encoders.remote import embedding_workers
from lit_dpret.errors import ConfigurationError
from lit_dpret.files import OutputFolder
from lit_dpret.retrieval.backends import check_search, make_search
from lit_dpret.retrieval.bm25 import BM25, BM25Settings
from lit_dpret.retrieval.metrics import Qrels
from lit_dpret.retrieval.search import SearchStream, TopK, lexicographic_rank, search
from lit_dpret.retrieval.trec_runs import EvaluationResult, Ranking, evaluate, without_self_matches
from lit_dpret.settings import Natural, Settings, built


def rank_embeddings(
    query_ids: Sequence[str], query_embeddings: Tensor, passage_ids: Sequence[str], passage_embeddings: Tensor, *,
    k: int = 100, find: Callable[..., TopK] = search,
) -> Ranking:  # fmt: skip
    """Return the ``k`` nearest passages of every query by dot product, using the search ``find``."""
    top = find(query_embeddings, passage_embeddings, min(k, len(passage_ids)), tie_rank=lexicographic_rank(passage_ids))
    return Ranking(query_ids=query_ids, passage_ids=passage_ids, top=top)


def score_embeddings(
    query_ids: Sequence[str], query_embeddings: Tensor, passage_ids: Sequence[str], passage_embeddings: Tensor,
    qrels: Qrels,
) -> EvaluationResult:  # fmt: skip
    """Rank the first 100 passages, and evaluate on the full qrels."""
    return evaluate(rank_embeddings(query_ids, query_embeddings, passage_ids, passage_embeddings), qrels)


def embedded_texts(
    tower: TextEncoder, texts: Sequence[str], side: Side, *, batch_size: int, device: str = "cpu"
) -> Tensor:
    """Return the embeddings of texts in float32, shape ``(texts, dim)``, with a progress line."""
    with ProgressLine(f"encoding {len(texts)} texts") as progress:
        return tower.encode(texts, side, batch_size=batch_size, device=device, progress=progress).float()


def rank_stream(
    query_ids: Sequence[str], query_embeddings: Tensor, passage_ids: Sequence[str], pieces: Iterable[Tensor], *,
    k: int = 100, device: str | None = None,
) -> Ranking:  # fmt: skip
    """Return the ``k`` nearest passages, whose embeddings arrive in pieces and are not stored."""
    stream = SearchStream(
        query_embeddings, min(k, len(passage_ids)), tie_rank=lexicographic_rank(passage_ids), device=device
    )
    for piece in pieces:
        stream.add(piece)
    return Ranking(query_ids=query_ids, passage_ids=passage_ids, top=stream.result())


def rank_bm25(queries: Mapping[str, str], passages: Mapping[str, str], *, k: int, **settings: Any) -> Ranking:
    """Return the ``k`` best passages of every query by BM25; ``settings`` are those of `BM25Settings`."""
    ids = list(passages)
    top = BM25(list(passages.values()), ids, **settings).search(list(queries.values()), min(k, len(ids)))
    return Ranking(query_ids=list(queries), passage_ids=ids, top=top)


def score_bm25(queries: Mapping[str, str], passages: Mapping[str, str], qrels: Qrels) -> EvaluationResult:
    """Evaluate BM25 (k1 0.9, b 0.4, English stop words and stems) on the same passages."""
    return evaluate(rank_bm25(queries, passages, k=100), qrels)


@dataclass(kw_only=True)
class Ranker(Settings):
    """Rank passages for queries, best first."""

    encoder: str  # ``minilm``, the folder of a trained encoder, a hub name, or ``bm25``
    max_passage_length: int | None = None  # maximum tokens read of a passage; null for the encoder folder's value
    max_query_length: int | None = None  # the same for a query
    # The folder that keeps passage embeddings between runs and across interruptions; null keeps none, and searches each
    # piece of the corpus while the next is encoded.
    cache_dir: str | OutputFolder | None = None
    # ``exact``; ``faiss:FACTORY`` (extra ``faiss-cpu`` or ``faiss-gpu``) or ``scann`` (extra ``scann``), which hold all
    # passages in memory.
    search: str = "exact"
    # The encoder's computing precision: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
    dtype: str = "float32"
    batch_size: int = 64  # texts per forward pass
    device: str = "cpu"  # where to encode and search
    # Processes of a Ray cluster that embed passages, each with the encoder; 0 embeds in this process. The result is the
    # same.
    workers: Natural = 0
    # Fields of `lit_dpret.retrieval.bm25.BM25Settings`, for ``bm25``.
    bm25: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bm25 = built(BM25Settings, self.bm25, "task.bm25")
        check_search(self.search)
        if self.encoder == "bm25" and (self.max_passage_length is not None or self.max_query_length is not None):
            raise ConfigurationError(
                "task.encoder=bm25 reads whole texts: set task.max_passage_length and task.max_query_length to null."
            )
        self._towers: Towers | None = None

    def rank(
        self, queries: Mapping[str, str], passages: Mapping[str, str], *, k: int, drop_self_matches: bool = False
    ) -> Ranking:
        """Return the first ``k`` passages of every query, texts by id."""
        wanted = min(k + drop_self_matches, len(passages))
        if self.encoder == "bm25":
            ranking = rank_bm25(queries, passages, k=wanted, **asdict(self._bm25))
        else:
            ranking = self._nearest(queries, passages, wanted)
        return without_self_matches(ranking, k) if drop_self_matches else ranking

    def fingerprints(self) -> list[str]:
        """Return the fingerprints of the ranking encoders, query side first; empty for ``bm25``."""
        return [] if self._towers is None else fingerprints(self._towers)

    def _nearest(self, queries: Mapping[str, str], passages: Mapping[str, str], k: int) -> Ranking:
        if self._towers is None:
            towers = load_towers(self.encoder, dtype=self.dtype)
            lengths = {"query_max_length": self.max_query_length, "passage_max_length": self.max_passage_length}
            self._towers = cut(towers, **lengths)
        how: dict[str, Any] = {"batch_size": self.batch_size, "device": self.device}
        asked = self._towers.query_encoder.encode(list(queries.values()), "query", **how)
        ids, texts, tower = list(passages), in_order(passages), self._towers.passage_encoder
        given: dict[str, Any] = {"dtype": self.dtype, "max_length": self.max_passage_length, "device": self.device}
        with (
            ProgressLine("encoding passages") as progress,
            embedding_workers(self.encoder, tower, "passage", self.workers, **given) as over,
        ):
            if self.cache_dir is None and self.search == "exact":
                pieces = tower.encode_stream(texts, "passage", progress=progress, over=over, **how)
                # On a CPU, encoding and searching would only compete for cores.
                pieces = pieces if self.device == "cpu" else ahead(pieces)
                return rank_stream(list(queries), asked, ids, pieces, k=k, device=self.device)
            found = tower.encode(texts, "passage", progress=progress, cache_dir=self.cache_dir, over=over, **how)
        find = make_search(self.search, device=self.device)
        return rank_embeddings(list(queries), asked, ids, found, k=k, find=find)


def fingerprints(towers: Towers) -> list[str]:
    """Return the fingerprints of weights and contracts of both sides, query side first."""
    query, passage = towers
    first = query.fingerprint()
    return [first, first if passage is query else passage.fingerprint()]
