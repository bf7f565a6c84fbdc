"""Relevance judgements in a file of their own, without the texts that they speak of.

Two layouts are read: TREC's, four fields without a header (``query 0 passage grade``, also MS MARCO's),
and BEIR's, three columns under a header (``query-id corpus-id score``).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lit_dpret.errors import DataError
from lit_dpret.retrieval.metrics import Qrels


def read_qrels(path: str | Path) -> dict[str, dict[str, int]]:
    """The judgements of a file, ``{query_id: {passage_id: grade}}``, in its order.

    Raises:
        DataError: The file cannot be read or holds no judgement, a line has not three or four fields, a grade is
            no whole number, or a pair comes twice; the message has the line number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The judgements {path} cannot be read: {error}.") from error
    qrels: dict[str, dict[str, int]] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or (number == 1 and fields[0] in ("query-id", "query_id")):
            continue
        if len(fields) not in (3, 4):
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields, not `query 0 passage grade` or `query passage grade`."
            )
        query, passage, grade = fields[0], fields[-2], fields[-1]
        try:
            value = int(grade)
        except ValueError:
            raise DataError(f"{path}, line {number}: the grade {grade!r} is not a whole number.") from None
        if passage in qrels.setdefault(query, {}):
            raise DataError(f"{path}, line {number}: query {query!r} and passage {passage!r} are judged twice.")
        qrels[query][passage] = value
    if not qrels:
        raise DataError(f"{path} holds no judgements.")
    return qrels


def check_qrels(qrels: Qrels, *, query_ids: Collection[str], passage_ids: Collection[str]) -> None:
    """Refuse judgements of queries or passages that are not there: no system could answer them.

    Raises:
        DataError: Naming the first unknown id, and how many there are.
    """
    queries, passages = set(query_ids), set(passage_ids)
    if unknown := [query for query in qrels if query not in queries]:
        raise DataError(f"The judgements name the unknown query {unknown[0]!r} ({len(unknown)} such ids).")
    missing = [(q, p) for q, judged in qrels.items() for p, grade in judged.items() if p not in passages and grade > 0]
    if missing:
        query, passage = missing[0]
        raise DataError(
            f"The judgements of query {query!r} name the unknown passage {passage!r} as relevant ({len(missing)} such "
            "pairs): every system would be measured against what it cannot find."
        )
