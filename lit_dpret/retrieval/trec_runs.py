"""Runs: a system's results for every query, on disk and as numbers.

trec_eval re-sorts a run by score and ignores the rank column. So scores are written such that they read back as the
same float32 values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import write_whole
from lit_dpret.retrieval.metrics import MISSING, Metric, Qrels, Values, gains_of_ids, gains_of_indices, ideal_gains
from lit_dpret.retrieval.statistics import Interval, bootstrap_interval

if TYPE_CHECKING:
    from lit_dpret.retrieval.topk import TopK

Run = Mapping[str, Mapping[str, float]]
"""A run as plain data: query id -> passage id -> score."""

RUN = "run.trec"
JUDGEMENTS = "qrels.trec"
PER_QUERY = "per_query.tsv"
SUMMARY = "evaluation.json"

DEFAULT_METRICS = ("ndcg@10", "recall@10", "mrr@10")


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of `search`, with ids.

    Raises:
        DataError: The numbers of rows and query ids differ, a query or passage id occurs twice, a row
            returns one passage twice, an index is not that of a passage, or a score is NaN.
    """

    query_ids: Sequence[str]
    passage_ids: Sequence[str]  # the id of every passage that was searched
    top: TopK  # scores and indices of shape ``(queries, k)``, best first

    def __post_init__(self) -> None:
        if len(self.query_ids) != len(self.top.indices):
            raise DataError(f"A ranking of {len(self.top.indices)} rows has {len(self.query_ids)} query ids.")
        if len(set(self.query_ids)) != len(self.query_ids):
            raise DataError("A ranking names the same query id in more than one row.")
        if len(set(self.passage_ids)) != len(self.passage_ids):
            raise DataError("A ranking has the same passage id for more than one passage.")
        scores, indices = self.top
        if int(broken := scores.isnan().any(dim=1).sum()):
            raise DataError(f"A ranking holds a NaN score in {int(broken)} of {len(scores)} rows.")
        if indices.numel() and not MISSING <= int(indices.min()) <= int(indices.max()) < len(self.passage_ids):
            raise DataError(
                f"A ranking has an index outside {MISSING} to {len(self.passage_ids) - 1}, those of its passages."
            )
        ordered = indices.sort(dim=1).values
        if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != MISSING)).any()):
            raise DataError("A ranking returns the same passage twice for one query.")

    def to_run(self) -> dict[str, dict[str, float]]:
        """Return the ranking as plain data, without fillers."""
        run: dict[str, dict[str, float]] = {}
        rows = zip(self.query_ids, self.top.scores.tolist(), self.top.indices.tolist(), strict=True)
        for name, scores, indices in rows:
            run[name] = {self.passage_ids[i]: score for score, i in zip(scores, indices, strict=True) if i != MISSING}
        return run


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The evaluation of a run.

    ``per_query`` describes single queries: if those are private, so is it. No privacy guarantee covers ``means`` and
    ``intervals`` of private queries either.
    """

    query_ids: tuple[str, ...]  # the judged queries, in the order of the judgements
    per_query: Mapping[str, Values]  # metric name to one value per query, aligned with ``query_ids``
    means: Mapping[str, float]  # metric name to the mean over all judged queries
    intervals: Mapping[str, Interval]  # metric name to the bootstrap interval of that mean
    without_hits: int  # how many judged queries the run returned nothing for; each counts as 0
    without_relevant: int  # how many queries have no relevant passage at all; each counts as 0

    def to_dict(self) -> dict[str, Any]:
        """Return the aggregates, without any per-query value, as plain JSON values."""
        return {
            "queries": len(self.query_ids),
            "without_hits": self.without_hits,
            "without_relevant": self.without_relevant,
            "metrics": {name: asdict(interval) for name, interval in self.intervals.items()},
            "definitions": {name: Metric.parse(name).definition for name in self.intervals},
        }

    def write_per_query(self, path: str | Path) -> None:
        """Write one tab-separated line per query, with a header."""
        lines = ["\t".join(["query-id", *self.per_query])]
        for row, name in enumerate(self.query_ids):
            lines.append("\t".join([name, *(repr(float(values[row])) for values in self.per_query.values())]))
        write_whole(Path(path), "\n".join(lines) + "\n", owner_only=True)


def evaluate(
    run: Run | Ranking,
    qrels: Qrels,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> EvaluationResult:
    """Evaluate a run on the full relevance judgements.

    Guarantees:
        - Every value equals trec_eval's: graded nDCG with linear gain, uncapped recall, ``map_cut``, ``P`` and
          ``success``, ties by float32 score and then by passage id, both descending; mrr@k on the run cut at k.
        - Means are over all queries of ``qrels``, as in ``trec_eval -c``: a query without hits, or without a relevant
          passage, counts as 0. Queries outside ``qrels`` do not count.
        - A run as plain data may be in any order; a `Ranking` is taken in its own order.

    Args:
        run: Scores by query and passage id, or a `Ranking`.
        qrels: Grades by query and passage id.
        metrics: Names that `Metric.parse` reads, with any cut-offs.
        resamples: Resamples of the bootstrap.
        seed: The seed of the bootstrap.

    Raises:
        ConfigurationError: A metric is unknown, or names a rank deeper than a `Ranking` reaches.
        DataError: There are no judgements, a score is NaN, or the run answers none of the judged queries, as a run on
            another data set or split would.
    """
    wanted = [Metric.parse(name) for name in metrics]
    query_ids = tuple(qrels)
    if not query_ids:
        raise DataError("There are no relevance judgements to evaluate against.")
    if isinstance(run, Ranking):
        depth = run.top.indices.shape[1]
        too_deep = [str(metric) for metric in wanted if depth < min(metric.cutoff, len(run.passage_ids))]
        if too_deep:
            raise ConfigurationError(
                f"A ranking of the first {depth} passages is too short for {', '.join(too_deep)}. Rank more passages, "
                "or lower the cut-off."
            )
        gains, hits = _gains_of_ranking(run, query_ids, qrels)
    else:
        gains, hits = _gains(run, query_ids, qrels)
    answered = run.query_ids if isinstance(run, Ranking) else run
    if len(answered) and not set(answered) & set(query_ids):
        raise DataError(
            f"None of the {len(answered)} queries of the run is judged: {next(iter(answered))!r} is not among the "
            f"{len(query_ids)} query ids of the judgements. Are they of another data set, or another split?"
        )
    ideal = ideal_gains(query_ids, qrels)
    per_query = {str(metric): metric(gains, ideal) for metric in wanted}
    intervals = {name: bootstrap_interval(values, resamples=resamples, seed=seed) for name, values in per_query.items()}
    return EvaluationResult(
        query_ids=query_ids,
        per_query=per_query,
        means={name: interval.mean for name, interval in intervals.items()},
        intervals=intervals,
        without_hits=len(query_ids) - hits,
        without_relevant=int((ideal.sum(axis=1) == 0).sum()),
    )


def _gains_of_ranking(ranking: Ranking, query_ids: Sequence[str], qrels: Qrels) -> tuple[Any, int]:
    table = ranking.top.indices.cpu().numpy()
    row = {name: place for place, name in enumerate(ranking.query_ids)}
    chosen = np.full((len(query_ids), table.shape[1]), MISSING, dtype=np.int64)
    present = [place for place, name in enumerate(query_ids) if name in row]
    chosen[present] = table[[row[query_ids[place]] for place in present]]
    hits = int((chosen != MISSING).any(axis=1).sum())
    return gains_of_indices(chosen, query_ids, ranking.passage_ids, qrels), hits


def _gains(run: Run, query_ids: Sequence[str], qrels: Qrels) -> tuple[Any, int]:
    ranked = [_sorted_as_trec_eval(name, run.get(name, {})) for name in query_ids]
    return gains_of_ids(ranked, query_ids, qrels), sum(1 for passages in ranked if passages)


def _sorted_as_trec_eval(query: str, scores: Mapping[str, float]) -> list[str]:
    values = np.fromiter(scores.values(), dtype=np.float32, count=len(scores))
    if np.isnan(values).any():
        raise DataError(f"The run holds a NaN score for query {query!r}.")
    pairs = zip(values.tolist(), (name.encode("utf-8") for name in scores), scores, strict=True)
    return [name for _, _, name in sorted(pairs, reverse=True)]


def write_run(path: str | Path, run: Run | Ranking, tag: str = "lit-dpret") -> None:
    """Write a run as ``query Q0 passage rank score tag`` lines, best first.

    `read_run` returns the same float32 scores, and trec_eval sorts the file as we do. The file appears whole or not at
    all. The format cannot carry an id that is empty or contains white space; such an id is refused.
    """
    plain = run.to_run() if isinstance(run, Ranking) else run
    lines: list[str] = []
    for query, scores in plain.items():
        for rank, passage in enumerate(_sorted_as_trec_eval(query, scores), start=1):
            for field in (query, passage, tag):
                if len(field.split()) != 1 or field.strip() != field:
                    raise DataError(f"The run format cannot carry {field!r}: ids and tag must be one word each.")
            lines.append(f"{query} Q0 {passage} {rank} {float(np.float32(scores[passage])):.9g} {tag}\n")
    write_whole(Path(path), "".join(lines), owner_only=True)


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """Read a TREC run; rank and tag are ignored, as trec_eval ignores them. An error names the line."""
    run: dict[str, dict[str, float]] = {}
    for where, fields in _lines(path, "run"):
        if len(fields) != 6:
            raise DataError(f"{where}: {len(fields)} fields, not `query Q0 passage rank score tag`.")
        try:
            score = float(np.float32(fields[4]))
        except ValueError:
            raise DataError(f"{where}: the score {fields[4]!r} is not a number.") from None
        passages = run.setdefault(fields[0], {})
        if fields[2] in passages:
            raise DataError(f"{where}: passage {fields[2]!r} occurs twice for query {fields[0]!r}.")
        passages[fields[2]] = score
    return run


def read_qrels(path: str | Path) -> dict[str, dict[str, int]]:
    """Read the judgements of a file, ``{query_id: {passage_id: grade}}``, in file order. An error names the line."""
    qrels: dict[str, dict[str, int]] = {}
    for number, (where, fields) in enumerate(_lines(path, "judgements")):
        if number == 0 and fields[0] in ("query-id", "query_id"):
            continue
        if len(fields) not in (3, 4):
            raise DataError(f"{where}: {len(fields)} fields, not `query 0 passage grade` or `query passage grade`.")
        query, passage, grade = fields[0], fields[-2], fields[-1]
        try:
            value = int(grade)
        except ValueError:
            raise DataError(f"{where}: the grade {grade!r} is not an integer.") from None
        if passage in qrels.setdefault(query, {}):
            raise DataError(f"{where}: query {query!r} and passage {passage!r} are judged twice.")
        qrels[query][passage] = value
    if not qrels:
        raise DataError(f"{path} holds no judgements.")
    return qrels


def _lines(path: str | Path, what: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the location and the fields of each non-blank line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The {what} {path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if fields := line.split():
            yield f"{path}, line {number}", fields


def check_qrels(qrels: Qrels, *, query_ids: Collection[str], passage_ids: Collection[str]) -> None:
    """Refuse judgements of missing queries or passages: no system could answer them."""
    queries, passages = set(query_ids), set(passage_ids)
    if unknown := [query for query in qrels if query not in queries]:
        raise DataError(f"The judgements name the unknown query {unknown[0]!r} ({len(unknown)} such ids).")
    missing = [(q, p) for q, judged in qrels.items() for p, grade in judged.items() if p not in passages and grade > 0]
    if missing:
        query, passage = missing[0]
        raise DataError(
            f"The judgements of query {query!r} name the unknown passage {passage!r} as relevant ({len(missing)} such "
            "pairs): no system could find them."
        )


def without_self_matches(ranking: Ranking, k: int) -> Ranking:
    """Return the first ``k`` columns of the ranking without passages that have their query's id.

    Rank to ``k + 1`` first: each row drops its self-match or, without one, its last passage. If the ranking is shorter
    because there are no more passages, a row that dropped a self-match ends in a filler.
    """
    import torch  # takes seconds, which code that only reads run files need not spend

    from lit_dpret.retrieval.topk import TopK

    scores, indices = ranking.top
    position = {name: place for place, name in enumerate(ranking.passage_ids)}
    own = torch.tensor([position.get(name, MISSING - 1) for name in ranking.query_ids], dtype=torch.long)
    hit = indices == own.unsqueeze(1)
    kept = hit.to(torch.int8).argsort(dim=1, stable=True)[:, :k]
    filled = TopK(
        scores.masked_fill(hit, float("-inf")).gather(1, kept), indices.masked_fill(hit, MISSING).gather(1, kept)
    )
    return Ranking(query_ids=ranking.query_ids, passage_ids=ranking.passage_ids, top=filled)


def write_evaluation(
    folder: Path, *, ranking: Ranking, qrels: Qrels, result: EvaluationResult, facts: Mapping[str, Any], name: str
) -> Path:
    """Write the ranking as a TREC run, the judgements, the values per query and, last, the summary; return its path.

    If an id contains white space, which TREC's format cannot carry, run and judgements are omitted and the summary
    says so.
    """
    names = [*ranking.query_ids, *ranking.passage_ids, *qrels, *(p for judged in qrels.values() for p in judged)]
    awkward = next((one for one in names if one.split() != [one]), None)
    if awkward is None:
        write_run(folder / RUN, ranking)
        lines = [f"{q} 0 {p} {grade}\n" for q, judged in qrels.items() for p, grade in judged.items()]
        write_whole(folder / JUDGEMENTS, "".join(lines), owner_only=True)
    else:
        facts = {**facts, "run": f"not written: TREC's format cannot carry the id {awkward!r}"}
    result.write_per_query(folder / PER_QUERY)
    path = folder / name
    write_whole(path, json.dumps({**facts, **result.to_dict()}, indent=2) + "\n", owner_only=True)
    return path


def read_per_query(folder: Path, metrics: Sequence[str]) -> dict[str, Values]:
    """Return the values that `write_evaluation` wrote to a folder, one per query in order, by metric."""
    path = folder / PER_QUERY
    try:
        header, *lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        columns = header.split("\t")
        rows = [line.split("\t") for line in lines]
        return {m: np.array([float(row[columns.index(m)]) for row in rows], dtype=np.float64) for m in metrics}
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{path} does not hold the measured values of each query: {error}") from error


def find_runs(path: Path) -> dict[str, Path]:
    """Return the TREC runs at a path: the file itself, or those of a folder by data set.

    A folder of ``task=evaluate`` has one run; a folder of ``task=zero_shot`` has one in each subfolder.
    """
    if path.is_file():
        return {path.stem: path}
    if not path.is_dir():
        raise DataError(f"{path} is neither a TREC run nor a folder with one.")
    if (path / RUN).is_file():
        return {"run": path / RUN}
    found = {file.parent.relative_to(path).as_posix(): file for file in sorted(path.rglob(RUN))}
    if not found:
        raise DataError(
            f"{path} holds no {RUN}. Name a TREC run, or a folder that task=evaluate or task=zero_shot wrote."
        )
    return found
