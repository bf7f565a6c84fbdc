"""Margins of relevance between a query's own passage and others, by a public cross-encoder.

Generative pseudo-labelling (Wang et al., "GPL", NAACL 2022, section 3): the label of a passage p- that a retriever
confuses with the query's own p+ is the difference of the cross-encoder's logits. A dual encoder learns it
(`MarginMSELoss`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lit_dpret.cards.card import CardFacts, inherit_card, write_card
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import file_sha256
from lit_dpret.negatives.drawn import LabelledNegative
from lit_dpret.synthesis.filters.by_score import Progress, Ranks
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.synthesis.filters.pair_scores import pair_workers
from lit_dpret.synthesis.filters.released import (
    ReleasedQueries,
    require_covered,
    require_of_its_folder,
    require_released,
    shown,
)
from lit_dpret.synthesis.shards import ShardStore, json_line, write_chunks

LABELS = "gpl-training-data.tsv"
NEGATIVES = "hard-negatives.jsonl"


def mine(released: ReleasedQueries, ranker: Ranks, *, depth: int, per_query: int, seed: int) -> dict[str, list[str]]:
    """Draw ``per_query`` passages for each query, uniformly from its first ``depth``, except its own.

    The draw is a function of (``seed``, query id) and of the query's ranking.
    """
    if not 1 <= per_query <= depth:
        raise ConfigurationError(f"task.per_query={per_query} is not between 1 and task.depth={depth}.")
    if len(released.passages) < 2:
        raise DataError(
            "There is only one passage, so no query has another one for comparison. Give all passages (task.corpus)."
        )
    asked = {query.query_id: query.text for query in released}
    ranking = ranker.rank(asked, released.passages, k=min(depth + 1, len(released.passages)))
    names, found = ranking.passage_ids, dict[str, list[str]]()
    for query, row in zip(released, ranking.top.indices.tolist(), strict=True):
        others = [names[i] for i in row if i >= 0 and names[i] != query.passage_id][:depth]
        key = hashlib.blake2b(f"{seed}\x1f{query.query_id}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        coins = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        chosen = coins.permutation(len(others))[:per_query]
        found[query.query_id] = [others[i] for i in sorted(chosen.tolist())]
    return found


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """Settings for labelling queries."""

    cross_encoder: str | Path  # a folder or a hub name
    cross_encoder_is_public: bool = False  # declares that nothing private went into a model without a card
    encoder_is_public: bool = False  # the same for the ranker's encoder
    depth: int = 50  # negatives are drawn from the ranks up to this one
    per_query: int = 5  # negatives per query
    seed: int = 0  # seed of those draws; public
    batch_size: int = 32  # pairs per forward pass
    max_length: int | None = None  # tokens of a pair that are read; null uses the setting of the cross-encoder's folder
    group_size: int = 256  # queries that are finished and stored together
    device: str = "cpu"  # where the cross-encoder computes
    workers: int = 0  # Ray processes that score pairs; 0 scores in this process. The files are the same


def label(
    released: ReleasedQueries, out: str | Path, how: Labelling, *, ranker: Ranks, progress: Progress | None = None
) -> Path:
    """Label released queries in GPL's files, `LABELS` and `NEGATIVES`, in the folder ``out``; return ``out``.

    Guarantees:
        - After an interruption, a second call continues and writes the same files.
        - Only released queries, public passages and models that their claim covers are read.
        - If a privacy card covers the queries, the folder gets a card that names it and makes the same claim.

    ``ranker`` finds the passages that a query is confused with; ``progress`` is called with (queries done, in total).

    Raises:
        PrivateDataError: ``released`` is not a `ReleasedQueries`, or a model is not covered by their claim.
        DataError: A label is not a finite number.
    """
    require_released(released, "label")
    require_of_its_folder(released)
    claim = (released.claim or released.folder) if released.provenance == "card" else None
    trusts = [
        *require_covered(
            how.cross_encoder, released, declared_public=how.cross_encoder_is_public, knob="task.cross_encoder"
        ),
        *require_covered(
            ranker.encoder, released, declared_public=how.encoder_is_public, knob="task.encoder", ranks=True
        ),
    ]
    load = partial(CrossEncoder.load, how.cross_encoder, max_length=how.max_length, device=how.device)
    scorer = CrossEncoder.load(how.cross_encoder, max_length=how.max_length) if how.workers else load()
    mined = mine(released, ranker, depth=how.depth, per_query=how.per_query, seed=how.seed)
    folder, size = Path(out), how.group_size
    groups = [released.queries[start : start + size] for start in range(0, len(released), size)]
    configuration = {
        "labels": 1, "cross_encoder": shown(how.cross_encoder), "encoder": shown(ranker.encoder), "depth": how.depth,
        "per_query": how.per_query, "seed": how.seed, "max_length": scorer.max_length, "group_size": size,
        "sha256_of_work": _digest(released, mined), "sha256_of_cross_encoder": scorer.fingerprint(),
    }  # fmt: skip
    store = ShardStore(folder, configuration, len(groups))
    missing = store.missing
    done = len(released) - sum(len(groups[index]) for index in missing)
    given: dict[str, Any] = {"batch_size": how.batch_size, "workers": how.workers, "device": how.device}
    with pair_workers(load if how.workers else lambda: scorer, how.cross_encoder, **given) as over:
        for index, scores in over((index, *_pairs(released, groups[index], mined)) for index in missing):
            store.add(index, (vars(one) for one in _labels(groups[index], mined, scores)))
            done += len(groups[index])
            if progress is not None:
                progress(done, len(released))
    store.seal()
    records = [LabelledNegative(**record) for record in store.records()]
    write_chunks(folder / LABELS, (record.line() for record in records))
    found = ((query, {shown(ranker.encoder): mined[query.query_id]}) for query in released)
    lines = (json_line({"qid": query.query_id, "pos": [query.passage_id], "neg": neg}) for query, neg in found)
    write_chunks(folder / NEGATIVES, lines)
    if claim is not None:
        hashes = {name: file_sha256(folder / name) for name in (LABELS, NEGATIVES)}
        subject = {"artifact_type": "dataset", "name": folder.resolve().name, "sha256": hashes}
        by = f"labels of the queries by {shown(how.cross_encoder)} and {shown(ranker.encoder)}"
        write_card(inherit_card(claim, subject, CardFacts(assumptions=trusts), description=by), folder)
    return folder


def _pairs(released: ReleasedQueries, group: Sequence[Any], mined: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Return the texts of each query of a group with its own passage, then with each passage mined for it."""
    asked, read = list[str](), list[str]()
    for query in group:
        for passage in (query.passage_id, *mined[query.query_id]):
            asked.append(query.text)
            read.append(released.passages[passage])
    return asked, read


def _labels(group: Sequence[Any], mined: dict[str, list[str]], scores: np.ndarray) -> Iterator[LabelledNegative]:
    if not np.isfinite(scores).all():
        raise DataError(
            "The cross-encoder gave scores that are not finite: its weights are broken. Choose another one."
        )
    place = 0
    for query in group:
        others = mined[query.query_id]
        own = scores[place]
        for negative, score in zip(others, scores[place + 1 : place + 1 + len(others)], strict=True):
            yield LabelledNegative(
                query_id=query.query_id, passage_id=query.passage_id, negative_id=negative, margin=float(own - score)
            )
        place += 1 + len(others)


def _digest(released: ReleasedQueries, mined: dict[str, list[str]]) -> str:
    """Return a hash of all that is scored; it also changes with the encoder under the same name."""
    digest = hashlib.sha256()
    for query in released:
        names = [query.passage_id, *mined[query.query_id]]
        record = [query.query_id, query.text, *((name, released.passages[name]) for name in names)]
        digest.update(json.dumps(record).encode() + b"\n")
    return digest.hexdigest()
