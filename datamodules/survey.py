"""Statistics of a data set: splits, duplicates, leakage, lengths, users.

Every number here comes directly from the private data, and no guarantee covers it. It is for the owner of the data.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

import numpy as np

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.preparation import report_overlap
from lit_dpret.texts import collapse_whitespace, normalise

CAPS = (1, 2, 5, 10, 20)
ENOUGH = 0.8  # share of the rows that the recommended cap keeps: the smallest such cap, if there is one
_BATCH = 1024
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_BREAK = re.compile("[\r\n]")

Count = Callable[[Sequence[str]], Sequence[int]]


def count_splits(collection: Collection) -> dict[str, dict[str, int]]:
    """Count queries, judgements, judgements above 0, and the passages in the latter, by split."""
    return {
        split: {
            "queries": len(qrels),
            "judgements": sum(map(len, qrels.values())),
            "positives": sum(grade > 0 for judged in qrels.values() for grade in judged.values()),
            "positive_passages": len({p for judged in qrels.values() for p, grade in judged.items() if grade > 0}),
        }
        for split, qrels in collection.qrels.items()
    }


def find_duplicates(collection: Collection, *, examples: int) -> dict[str, Any]:
    """Find texts with several ids, and the overlap of evaluation splits with train.

    Query texts compare casefolded, all texts with whitespace collapsed.
    """
    return {
        "queries": _repeated(collection.queries, normalise, examples),
        "passages": _repeated(collection.passages, collapse_whitespace, examples),
        "shared_with_train": {
            split: {"queries": overlap.queries, "positive_passages": overlap.passages}
            for split, overlap in report_overlap(collection).items()
            if collection.qrels.get("train")
        },
    }


def measure_lengths(texts: Iterable[str], *, count: Count, limit: int | None, at_most: int) -> dict[str, Any]:
    """Return length quantiles of texts by ``count``, and the share that ``limit`` truncates.

    Larger sets are subsampled evenly to ``at_most`` texts.
    """
    total = len(texts) if isinstance(texts, Sized) else 0
    chosen = islice(texts, 0, None, max(1, -(-total // at_most)))
    lengths: list[int] = []
    while batch := list(islice(chosen, _BATCH)):
        lengths += count(batch)
    found = np.array(lengths, dtype=np.int64)
    facts: dict[str, Any] = {"texts": total, "measured": len(found)}
    facts |= {f"p{q}": int(np.percentile(found, q, method="higher")) for q in (50, 90, 95, 99) if len(found)}
    facts |= {"max": int(found.max(initial=0)), "mean": round(float(found.mean()), 1) if len(found) else 0.0}
    cut = float((found > limit).mean()) if limit is not None and len(found) else None
    return {**facts, "limit": limit, "share_cut": cut}


def count_users(collection: Collection) -> dict[str, Any] | None:
    """Count the rows of each train user, and the rows kept under caps; None without user ids.

    No cap is recommended if none keeps `ENOUGH`, or if a query has no user, which ``unit=user`` refuses. A row is a
    query with one positive passage, as `max_rows_per_unit` counts them under ``unit=user``.
    """
    qrels = collection.qrels.get("train", {})
    rows: Counter[str] = Counter()
    for query_id, judged in qrels.items():
        if query_id in collection.users:
            rows[collection.users[query_id]] += sum(grade > 0 for grade in judged.values())
    if not rows:
        return None
    found = np.array(list(rows.values()), dtype=np.int64)
    total, without = int(found.sum()), [query_id for query_id in qrels if query_id not in collection.users]
    caps = [
        {
            "cap": cap,
            "rows_kept": int(np.minimum(found, cap).sum()),
            "share_kept": round(float(np.minimum(found, cap).sum() / max(1, total)), 4),
            "users_cut": int((found > cap).sum()),
        }
        for cap in CAPS
    ]
    return {
        "split": "train",
        "users": len(rows),
        "rows": total,
        "queries_without_user": without,
        "rows_per_user": {f"p{q}": int(np.percentile(found, q, method="higher")) for q in (50, 90, 99)}
        | {"max": int(found.max())},
        "caps": caps,
        "recommended_cap": None if without else next((c["cap"] for c in caps if c["share_kept"] >= ENOUGH), None),
    }


def count_invisible(texts: Iterable[str], *, of_one_line: bool) -> int:
    """Count the texts with invisible characters: control, zero-width, text direction, byte order.

    If ``of_one_line``, line breaks count too.
    """
    return sum(bool(_INVISIBLE.search(text) or (of_one_line and _BREAK.search(text))) for text in texts)


def count_words(texts: Sequence[str]) -> list[int]:
    """Count the white-space separated words of each text."""
    return [len(text.split()) for text in texts]


def _repeated(texts: Mapping[str, str], normal: Callable[[str], str], examples: int) -> dict[str, Any]:
    """Find repeated texts by 64-bit hashes alone, so that a large corpus is not held in memory."""
    hashes = np.array(array("Q", (_hash(normal(text)) for text in texts.values())), dtype=np.uint64)
    distinct, counts = np.unique(hashes, return_counts=True)
    several = distinct[counts > 1]
    wanted: dict[int, list[str]] = {int(value): [] for value in several[:examples]}
    if wanted:
        for name, value in zip(texts, hashes.tolist(), strict=True):
            if value in wanted and len(wanted[value]) < examples:
                wanted[value].append(name)
    return {"texts": len(several), "ids": int(counts[counts > 1].sum()), "examples": list(wanted.values())}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
