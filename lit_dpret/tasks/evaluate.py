"""`task=evaluate`: rank a collection for its queries, and say how sure the numbers are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lit_dpret.callbacks import ProgressLine
from lit_dpret.encoders import cut, load_towers
from lit_dpret.encoders.bulk import ahead
from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.backends import check_search, make_search
from lit_dpret.retrieval.runs import EvaluationResult
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.scoring import score_bm25, score_embeddings, score_stream


class Evaluate:
    """nDCG@10, Recall@10 and MRR@10 of an encoder, or of BM25, on one split.

    Args:
        encoder: ``minilm``, the folder of a trained encoder, a hub name, or ``bm25``.
        split: Which queries of the datamodule.
        top_k: How deep to rank.
        max_passage_length: Tokens of a passage that are read; null for what the encoder's folder says.
        max_query_length: The same for a query.
        cache_dir: Where to keep passage embeddings between runs, and to go on with them after an
            interruption; null keeps none, and searches each piece of the corpus while the next is encoded.
        search: ``exact``; ``faiss:FACTORY`` (extra ``faiss-cpu`` or ``faiss-gpu``), ``scann`` (extra
            ``scann``), which hold all passages.
        dtype: In which the encoder computes: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
        batch_size: Texts per forward pass.
        device: Where to encode and search: ``cpu``, ``cuda`` and so on.
    """

    def __init__(
        self,
        *,
        encoder: str = "minilm",
        split: str = "test",
        top_k: int = 100,
        max_passage_length: int | None = None,
        max_query_length: int | None = None,
        cache_dir: str | Path | None = None,
        search: str = "exact",
        dtype: str = "float32",
        batch_size: int = 64,
        device: str = "cpu",
    ) -> None:
        check_search(search)
        if top_k < 10:
            raise ConfigurationError(f"task.top_k={top_k} cannot answer the metrics at 10; it must be at least 10.")
        self.encoder, self.split, self.top_k = encoder, split, top_k
        self.max_passage_length, self.max_query_length = max_passage_length, max_query_length
        self.search, self.dtype, self.batch_size, self.device = search, dtype, batch_size, device
        self.cache_dir = None if cache_dir is None else Path(cache_dir)

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``evaluation.json`` and per-query scores; returns the means."""
        check_run_dir(parts.run_dir, min_free_mb=50)
        data = parts.make_datamodule()
        data.prepare_data()
        data.setup("test")
        queries, qrels = data.evaluation_set(self.split)
        passages = data.public_passages()
        if self.encoder == "bm25":
            result = score_bm25(queries, passages, qrels, k=self.top_k)
        else:
            result = self._dense(queries, passages, qrels)
        facts = {"encoder": self.encoder, "split": self.split, **result.to_dict()}
        (parts.run_dir / "evaluation.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        result.write_per_query(parts.run_dir / "per_query.tsv")
        sys.stdout.write(_table(self.encoder, result) + f"\nwritten: {parts.run_dir / 'evaluation.json'}\n")
        return dict(result.means)

    def _dense(
        self, queries: dict[str, str], passages: dict[str, str], qrels: dict[str, dict[str, int]]
    ) -> EvaluationResult:
        towers = cut(
            load_towers(self.encoder, dtype=self.dtype),
            query_max_length=self.max_query_length,
            passage_max_length=self.max_passage_length,
        )
        how: dict[str, Any] = {"batch_size": self.batch_size, "device": self.device}
        query_embeddings = towers.query_encoder.encode(list(queries.values()), "query", **how)
        ids, texts, encoder = list(passages), list(passages.values()), towers.passage_encoder
        with ProgressLine("encoding passages") as progress:
            how["progress"] = progress
            if self.cache_dir is None and self.search == "exact":
                pieces = encoder.encode_stream(texts, "passage", **how)
                # On a CPU the two would only take each other's cores.
                overlapped = pieces if self.device == "cpu" else ahead(pieces)
                return score_stream(
                    list(queries), query_embeddings, ids, overlapped, qrels, k=self.top_k, device=self.device
                )
            if self.cache_dir is None:
                found = encoder.encode(texts, "passage", **how)
            else:
                found = encoder.encode_cached(texts, "passage", self.cache_dir, **how)
        find = make_search(self.search, device=self.device)
        return score_embeddings(list(queries), query_embeddings, ids, found, qrels, k=self.top_k, find=find)


def _table(name: str, result: EvaluationResult) -> str:
    cells = [f"{metric} {i.mean:.4f} [{i.low:.4f}, {i.high:.4f}]" for metric, i in result.intervals.items()]
    return f"{name}: " + "   ".join(cells) + f"   ({len(result.query_ids)} queries, 95% bootstrap intervals)"
