"""`task=evaluate`: rank a collection for its queries, and say how sure the numbers are."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from lit_dpret.callbacks import ProgressLine
from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.runs import EvaluationResult
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.scoring import score_bm25, score_embeddings


class Evaluate:
    """nDCG@10, Recall@10 and MRR@10 of an encoder, or of BM25, on one split.

    Args:
        encoder: ``minilm``, the folder of a trained encoder, a hub name, or ``bm25``.
        split: Which queries of the datamodule.
        top_k: How deep to rank.
        max_passage_length: Tokens of a passage that are read; null for what the encoder's folder says.
        max_query_length: The same for a query.
        cache_dir: Where to keep passage embeddings between runs; null keeps none.
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
    ) -> None:
        if top_k < 10:
            raise ConfigurationError(f"task.top_k={top_k} cannot answer the metrics at 10; it must be at least 10.")
        self.encoder, self.split, self.top_k = encoder, split, top_k
        self.max_passage_length, self.max_query_length = max_passage_length, max_query_length
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
        towers = load_towers(self.encoder)
        for tower in towers:
            tower.contract = replace(
                tower.contract,
                query_max_length=self.max_query_length or tower.contract.query_max_length,
                passage_max_length=self.max_passage_length or tower.contract.passage_max_length,
            )
        texts = list(passages.values())
        with ProgressLine("encoding passages") as progress:
            if self.cache_dir is None:
                passage_embeddings = towers.passage_encoder.encode(texts, "passage", progress=progress)
            else:
                passage_embeddings = towers.passage_encoder.encode_cached(
                    texts, "passage", self.cache_dir, progress=progress
                )
        query_embeddings = towers.query_encoder.encode(list(queries.values()), "query")
        return score_embeddings(
            list(queries), query_embeddings, list(passages), passage_embeddings, qrels, k=self.top_k
        )


def _table(name: str, result: EvaluationResult) -> str:
    cells = [f"{metric} {i.mean:.4f} [{i.low:.4f}, {i.high:.4f}]" for metric, i in result.intervals.items()]
    return f"{name}: " + "   ".join(cells) + f"   ({len(result.query_ids)} queries, 95% bootstrap intervals)"
