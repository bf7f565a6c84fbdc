"""What a measured system leaves in a folder, and how it is found again: run, judgements, values, summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_dpret.errors import DataError
from lit_dpret.files import write_whole
from lit_dpret.retrieval.metrics import Qrels, Values
from lit_dpret.retrieval.runs import EvaluationResult, Ranking, write_run

RUN = "run.trec"
JUDGEMENTS = "qrels.trec"
PER_QUERY = "per_query.tsv"


def write_evaluation(
    folder: Path, *, ranking: Ranking, qrels: Qrels, result: EvaluationResult, facts: Mapping[str, Any], name: str
) -> Path:
    """Write the ranking as a TREC run, the judgements, the values per query, and the summary last.

    Where an id holds white space, which TREC's format cannot carry, run and judgements are left out and the
    summary says so.

    Args:
        folder: Made where it is missing.
        ranking: What the system returned.
        qrels: What it was judged by.
        result: The values.
        facts: What to say in the summary besides the aggregates.
        name: Of the summary.

    Returns:
        The path of the summary, a JSON file.

    Raises:
        StorageError: A file cannot be written.
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
    """The values that `write_evaluation` left in a folder, one per query in order, by metric.

    Raises:
        DataError: The file is missing or lacks a metric.
    """
    path = folder / PER_QUERY
    try:
        header, *lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        columns = header.split("\t")
        rows = [line.split("\t") for line in lines]
        return {m: np.array([float(row[columns.index(m)]) for row in rows], dtype=np.float64) for m in metrics}
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{path} does not hold the values that were measured: {error}") from error


def find_runs(path: Path) -> dict[str, Path]:
    """The TREC runs that a path means: the file itself, or those of a folder by data set.

    A folder of ``task=evaluate`` has one run, that of ``task=zero_shot`` one in each subfolder.

    Raises:
        DataError: There is no such path, or no run in it.
    """
    if path.is_file():
        return {path.stem: path}
    if not path.is_dir():
        raise DataError(f"{path} is neither a TREC run nor a folder with one.")
    if (path / RUN).is_file():
        return {"run": path / RUN}
    found = {file.parent.relative_to(path).as_posix(): file for file in sorted(path.rglob(RUN))}
    if not found:
        raise DataError(f"{path} holds no {RUN}. Name a TREC run, or the folder of a task=evaluate or task=zero_shot.")
    return found
