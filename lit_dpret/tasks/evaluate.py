"""`task=evaluate`: rank a collection for its queries, and report metrics with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lit_dpret.datamodules.identity import data_facts
from lit_dpret.datamodules.layouts import named
from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval import trec_runs
from lit_dpret.retrieval.metrics import Metric
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.ranking import Ranker
from lit_dpret.tasks.uncovered import Owner, refuse_training_data


@dataclass(kw_only=True)
class Evaluate(Ranker):
    """Evaluate an encoder, or BM25, on one split, with any measure at any cut-off; ranking settings as for `Ranker`."""

    encoder: str = "minilm"
    whose: Owner | None = None
    split: str | None = None
    metrics: Sequence[str] = trec_runs.DEFAULT_METRICS
    top_k: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metrics = checked_metrics(self.metrics, self.top_k)

    @property
    def undeclared_results(self) -> bool:
        """Whether the kind of the scored queries is not declared."""
        return self.whose is None

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``evaluation.json``, the run, the judgements and the values per query; return the means.

        Problems outside the split are left out and reported (`lit_dpret.datamodules.layouts`).
        """
        check_run_dir(parts.run_dir, min_free_mb=50)
        data = parts.make_datamodule()
        split = self.split or getattr(data, "evaluation_split", "test")
        left_out = data.measure(split) if hasattr(data, "measure") else None
        data.prepare_data()
        data.setup("test")
        if self.whose == "public":
            refuse_training_data(data, self.encoder, knob="task.whose")
        queries, qrels = data.evaluation_set(split)
        passages = data.public_passages()
        trec_runs.check_qrels(qrels, query_ids=queries, passage_ids=passages)
        drops = bool(getattr(data, "drops_self_matches", False))
        ranking = self.rank(queries, passages, k=self.top_k, drop_self_matches=drops)
        result = trec_runs.evaluate(ranking, qrels, self.metrics)
        told = [] if left_out is None else left_out.lines()
        if idle := [query for query, judged in qrels.items() if not any(grade > 0 for grade in judged.values())]:
            told.append(f"{split}: queries without any relevant passage, which count as 0: {len(idle)} ({named(idle)})")
        about = data_facts(data, passages, queries, qrels)
        facts: dict[str, Any] = {"encoder": self.encoder, **about, "split": split, "whose": self.whose}
        facts |= {"drops_self_matches": drops, "left_out": told}
        facts["fingerprints"] = self.fingerprints()
        if self.encoder == "bm25":
            facts["bm25"] = asdict(self._bm25)
        path = trec_runs.write_evaluation(
            parts.run_dir, ranking=ranking, qrels=qrels, result=result, facts=facts, name=trec_runs.SUMMARY
        )  # fmt: skip
        passed = "".join(f"  note: {line}\n" for line in told)
        undeclared = "their owner is not declared (task.whose=public or private)"
        owner = f"queries declared {self.whose} (task.whose)" if self.whose else undeclared
        covered = "" if self.whose == "public" else ": no epsilon covers these numbers"
        about_split = f"  split {split} of {about['data']}; {owner}{covered}\n"
        say(f"{_table(self.encoder, result)}\n{about_split}{passed}written: {path}")
        return dict(result.means)


def checked_metrics(metrics: Sequence[str], top_k: int) -> tuple[str, ...]:
    """Return the metrics under the names used in results."""
    parsed = [Metric.parse(name) for name in metrics]
    if not parsed:
        raise ConfigurationError("task.metrics is empty. Name at least one, for example [ndcg@10].")
    deepest = max(parsed, key=lambda metric: metric.cutoff)
    if top_k < deepest.cutoff:
        raise ConfigurationError(
            f"task.top_k={top_k} is too small for {deepest}. Set it to at least {deepest.cutoff}, or name other "
            "task.metrics."
        )
    return tuple(dict.fromkeys(map(str, parsed)))


def _table(name: str, result: trec_runs.EvaluationResult) -> str:
    lines = [f"{name}, {len(result.query_ids)} queries, means with 95% bootstrap intervals"]
    for metric, i in ((Metric.parse(name), i) for name, i in result.intervals.items()):
        lines.append(f"  {metric.shown:14} {i.mean:.4f} [{i.low:.4f}, {i.high:.4f}]   {metric.definition}")
    if result.without_hits or result.without_relevant:
        lines.append(
            f"  counted as 0: {result.without_hits} queries without hits, {result.without_relevant} without any "
            "relevant passage"
        )
    return "\n".join(lines)
