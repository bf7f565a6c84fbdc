"""Prepare read data for training: pure functions of a `Collection`.

Each states its effect on privacy. A step is *record-wise* if whether and how a training query remains depends only on
that query's own record and on public facts: adding or removing one record then never changes another one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from lit_dpret.datamodules.collection import Collection, Qrels
from lit_dpret.datamodules.rows import stable_hash
from lit_dpret.errors import DataError
from lit_dpret.texts import normalise

T = TypeVar("T")


def drop_queries_without_passage(collection: Collection) -> Collection:
    """Drop queries without a judgement, and train queries without a grade above 0. Record-wise."""
    qrels = {
        split: {
            query: judged
            for query, judged in found.items()
            if judged and (split != "train" or any(grade > 0 for grade in judged.values()))
        }
        for split, found in collection.qrels.items()
    }
    return _with_qrels(collection, qrels)


def with_units_without_rows(collection: Collection, read: Collection) -> Collection:
    """Return ``collection`` with the train queries of ``read`` that were dropped from it, without judgements.

    Which passages a train query has is protected. So a dropped query remains a unit without rows: the number of units
    is published, and `sample` must choose the same ids in any case.
    """
    train, kept = read.qrels.get("train"), collection.qrels.get("train", {})
    if train is None or train.keys() == kept.keys():
        return collection
    return read.with_qrels({**collection.qrels, "train": {query: kept.get(query, {}) for query in train}})


def lower_case_queries(collection: Collection) -> Collection:
    """Lower-case every query. Record-wise."""
    return replace(collection, queries={query: text.lower() for query, text in collection.queries.items()})


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The overlap of train and one evaluation split. The numbers come from private data: do not log them."""

    queries: int  # evaluation queries whose normalised text equals that of a train query
    passages: int  # positive passages of the split that are also positive for a train query


def report_overlap(collection: Collection) -> dict[str, Overlap]:
    """Count the overlap of each evaluation split with train; private numbers."""
    train = {query: judged for query, judged in collection.qrels.get("train", {}).items() if judged}
    texts = {normalise(collection.queries[query]) for query in train}
    passages = _positives(train)
    return {
        split: Overlap(
            queries=sum(normalise(collection.queries[query]) in texts for query in qrels),
            passages=len(passages & _positives(qrels)),
        )
        for split, qrels in collection.qrels.items()
        if split != "train"
    }


def drop_overlap(collection: Collection) -> Collection:
    """Drop the rows of train queries that repeat an evaluation query or share a positive passage with one.

    Such a query stays as a unit without rows, so that the published number of units does not reveal it. Whether its
    rows stay depends only on its own record and the evaluation splits. But one evaluation query can remove many train
    queries, so evaluation queries are not protected.
    """
    evaluation = [qrels for split, qrels in collection.qrels.items() if split != "train"]
    texts = {normalise(collection.queries[query]) for qrels in evaluation for query in qrels}
    passages = set().union(*(_positives(qrels) for qrels in evaluation))
    kept = {
        query: judged
        if normalise(collection.queries[query]) not in texts
        and not any(grade > 0 and passage in passages for passage, grade in judged.items())
        else {}
        for query, judged in collection.qrels.get("train", {}).items()
    }
    return _with_qrels(collection, {**collection.qrels, "train": kept}, "datamodule.drop_overlap")


def sample(
    collection: Collection,
    *,
    max_passages: int | None,
    max_train_queries: int | None,
    max_eval_queries: int | None,
    seed: int,
) -> Collection:
    """Return a smaller data set for a quick run, determined by the seed and independent of file order.

    The ``max_train_queries`` and ``max_passages`` whose *ids* hash lowest stay, and each query keeps its judgements on
    these passages. Then, of the evaluation queries that still have a positive, the ``max_eval_queries`` of each split
    whose ids hash lowest stay. A train query without a positive stays as a unit without rows: the number of units is
    published, and must not depend on the passages of private queries.

    Guarantees:
        - The retained passages depend on passage ids and the seed alone: their list is as public as the corpus.
        - Changing the text or the positives of one train query changes no other train query.
        - With ``max_train_queries`` unset, neither does adding or removing one. With it set, a removed query lets the
          next id move up: sound under ``zero_out``, where ids are public; refused under ``add_or_remove``, and under
          ``replace_one`` unless a unit is exactly one id.
    """
    if max_passages is None and max_train_queries is None and max_eval_queries is None:
        return collection
    passages: Mapping[str, str] = collection.passages
    qrels: dict[str, Qrels] = dict(collection.qrels)
    if max_train_queries is not None and "train" in qrels:
        qrels["train"] = _only(qrels["train"], _lowest(qrels["train"], max_train_queries, seed, "train"))
    if max_passages is not None:
        passages = _only(passages, _lowest(passages, max_passages, seed, "passages"))
        for split, found in qrels.items():
            judged = {q: {p: grade for p, grade in j.items() if p in passages} for q, j in found.items()}
            answered = {q: j for q, j in judged.items() if any(grade > 0 for grade in j.values())}
            qrels[split] = {q: answered.get(q, {}) for q in judged} if split == "train" else answered
    if max_eval_queries is not None:
        for split in qrels.keys() - {"train"}:
            qrels[split] = _only(qrels[split], _lowest(qrels[split], max_eval_queries, seed, split))
    domains = {passage: name for passage, name in collection.passage_domains.items() if passage in passages}
    smaller = replace(collection, passages=passages, passage_domains=domains)
    return _with_qrels(smaller, qrels, "datamodule.max_passages")


def _lowest(ids: Iterable[str], count: int, seed: int, label: str) -> set[str]:
    """Return the ``count`` ids with the lowest hashes; ``label`` separates choices for different purposes."""
    return set(heapq.nsmallest(count, ids, key=lambda i: stable_hash("lit-dpret sample", str(seed), label, i)))


def _only(found: Mapping[str, T], kept: set[str]) -> dict[str, T]:
    return {key: value for key, value in found.items() if key in kept}


def _positives(qrels: Qrels) -> set[str]:
    return {passage for judged in qrels.values() for passage, grade in judged.items() if grade > 0}


def _with_qrels(collection: Collection, qrels: Mapping[str, Qrels], knob: str = "") -> Collection:
    """Return ``collection`` with other qrels and only the queries that they name."""
    for split, found in collection.qrels.items():
        if knob and found and not qrels[split]:
            raise DataError(f"{collection.source}: no query of {split} remains. Raise {knob}, or set it to null.")
    return collection.with_qrels(qrels)
