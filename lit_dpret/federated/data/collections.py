"""Fed-InsuranceQA and Fed-MedQuAD: a retrieval collection whose queries have a domain, with one client per domain.

An answer is a passage of several sentences, with no label for which of them answers, so all of them count as positives.
Read the any-hit measures (`lit_dpret.federated.evaluation`).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.silo_folder import Silo, SiloQuery
from lit_dpret.errors import DataError
from lit_dpret.federated.data.sentences import sentences_of
from lit_dpret.settings import require_whole
from lit_dpret.synthesis.pseudo_queries import pseudo_queries
from lit_dpret.synthesis.textsim.words import words

Order = Callable[[str], tuple[str, str]]


def silos_by_domain(
    collection: Collection,
    *,
    clients: int | None = 10,
    min_train: int = 20,
    min_test: int = 5,
    max_train_queries: int | None = None,
    max_test_queries: int | None = None,
    max_passages: int | None = None,
    seed: int | None = None,
    where: str = "task",
) -> list[Silo]:
    """Build one client for each domain of the queries, the largest first; ``where`` precedes a setting in errors."""
    limits = {"max_train_queries": max_train_queries, "max_test_queries": max_test_queries}
    require_whole(where.partition(".")[0], {"clients": clients}, 1, null=True)
    require_whole(where, {"max_passages": max_passages, **limits}, 1, null=True)
    if not collection.domains:
        raise DataError(f"{collection.source}: no query names a domain, so no client can be formed.")
    queries = _queries(collection)
    enough = largest_clients(
        queries, clients, min_train=min_train, min_test=min_test, what=f"domains of {collection.source}", where=where
    )
    limits = {split: max_test_queries or max_train_queries for split in ("dev", "test")} | {"train": max_train_queries}
    order = partial(_place, seed)
    # A client's passages are those of its domain (`Collection.passage_domains`) and those that answer its queries. A
    # passage that answers in two domains is in both. Splits stay unchanged.
    return [_silo(collection, name, _first(queries[name], limits, order), max_passages, order) for name in enough]


def largest_clients(
    queries: Mapping[str, Sequence[SiloQuery]], clients: int | None, *, min_train: int, min_test: int, what: str,
    size: Callable[[Counter[str]], int] = lambda counts: counts["train"], where: str = "task",
) -> list[str]:  # fmt: skip
    """Return the names of the largest clients with enough queries in both splits; refuse if there are too few."""
    sizes = {name: Counter(query.split for query in found) for name, found in queries.items()}
    enough = [name for name, count in sizes.items() if count["train"] >= min_train and count["test"] >= min_test]
    enough.sort(key=lambda name: (-size(sizes[name]), name))
    if clients is not None and len(enough) < clients:
        raise DataError(
            f"{len(enough)} {what} have {min_train} train and {min_test} test queries, and {clients} clients are "
            f"needed. Lower {where.partition('.')[0]}.clients, {where}.min_train or {where}.min_test."
        )
    return enough[:clients]


def _place(seed: int | None, name: str) -> tuple[str, str]:
    """Return the sort key of a record in a sample: a function of its id and a public seed only."""
    return ("" if seed is None else hashlib.sha256(f"{seed}/{name}".encode()).hexdigest(), name)


def _queries(collection: Collection) -> dict[str, list[SiloQuery]]:
    found: dict[str, list[SiloQuery]] = {}
    for split, judged in collection.qrels.items():
        for qid in judged:
            domain = collection.domains.get(qid)
            positives = collection.positives(split, qid)
            if domain is not None and positives:
                found.setdefault(domain, []).append(SiloQuery(qid, collection.queries[qid], positives, split))
    return found


def _first(queries: list[SiloQuery], limits: Mapping[str, int | None], order: Order) -> list[SiloQuery]:
    counts: Counter[str] = Counter()
    kept = set()
    for query in sorted(queries, key=lambda one: order(one.qid)):
        counts[query.split] += 1
        limit = limits.get(query.split)
        if limit is None or counts[query.split] <= limit:
            kept.add(query.qid)
    return [query for query in queries if query.qid in kept]


def _silo(collection: Collection, domain: str, queries: list[SiloQuery], limit: int | None, order: Order) -> Silo:
    answering = {pid for query in queries for pid in query.positives}
    others = sorted(
        (pid for pid, named in collection.passage_domains.items() if named == domain and pid not in answering),
        key=order,
    )
    chosen = sorted(answering) + (others if limit is None else others[: max(0, limit - len(answering))])
    texts = {pid: collection.passages[pid] for pid in chosen}
    return silo_of(safe_name(domain), texts, queries)


def silo_of(name: str, passages: Mapping[str, str], queries: list[SiloQuery]) -> Silo:
    """Build a silo whose queries are answered by passages, and so by every sentence of those passages."""
    sentences, passage_of, of_passage = cut(passages)
    answered = [
        SiloQuery(query.qid, query.text, tuple(sid for pid in query.positives for sid in of_passage[pid]), query.split)
        for query in queries
    ]
    kept = {pid: "" for pid in passages if of_passage[pid]}
    return Silo(name, kept, sentences, passage_of, [query for query in answered if query.positives])


def cut(passages: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], dict[str, list[str]]]:
    """Split passages into sentences; return them by id, the passage of each, and the sentence ids of each passage."""
    of_passage = {pid: sentences_of(text) for pid, text in passages.items()}
    sentences = {f"{pid}-s{at}": one for pid, found in of_passage.items() for at, one in enumerate(found)}
    ids = {pid: [f"{pid}-s{at}" for at in range(len(found))] for pid, found in of_passage.items()}
    return sentences, {sid: pid for pid, sids in ids.items() for sid in sids}, ids


def safe_name(domain: str) -> str:
    """Turn a domain into a folder name.

    Example:
        >>> safe_name("7_SeniorHealth QA"), safe_name("Café/Bar")
        ('7_SeniorHealth-QA', 'Caf-Bar')
    """
    name = re.sub(r"[^A-Za-z0-9._]+", "-", domain).strip("-._")[:64]
    if not name:
        raise DataError("A domain has no letter or digit (A-Z, a-z, 0-9) that could name a client.")
    return name


def merged_silo(silos: Sequence[Silo]) -> Silo:
    """Merge silos into one, the upper bound of a federation; prefix ids with the client to make them unique."""

    def of(client: str, found: str) -> str:
        return f"{client}.{found}"

    return Silo(
        "central",
        {of(one.name, pid): title for one in silos for pid, title in one.passages.items()},
        {of(one.name, sid): text for one in silos for sid, text in one.sentences.items()},
        {of(one.name, sid): of(one.name, pid) for one in silos for sid, pid in one.passage_of.items()},
        [
            replace(query, qid=of(one.name, query.qid), positives=tuple(of(one.name, sid) for sid in query.positives))
            for one in silos
            for query in one.queries
        ],
    )


def pseudo_silo(silo: Silo) -> Silo:
    """Replace a silo's train queries by one pseudo-query per passage; dev and test queries stay.

    A pseudo-query's only answer is the sentence of its passage that contains most of its words: its source.

    Guarantees:
        - Given the sentences, the result does not depend on train queries or their answers. If a collection was chosen
          by its queries, that choice remains.
    """
    of_passage: dict[str, dict[str, str]] = {}
    for sid, text in silo.sentences.items():
        of_passage.setdefault(silo.passage_of[sid], {})[sid] = text
    asked = []
    for one in pseudo_queries({pid: "\n".join(found.values()) for pid, found in of_passage.items()}):
        if one.text:
            wanted, sentences = set(words(one.text)), of_passage[one.passage_id]
            answer = max(sentences, key=lambda sid: len(wanted.intersection(words(sentences[sid]))))
            asked.append(SiloQuery(f"pseudo-{one.passage_id}", one.text, (answer,), "train"))
    return replace(silo, queries=[*asked, *(query for query in silo.queries if query.split != "train")])
