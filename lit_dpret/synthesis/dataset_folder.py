"""A synthetic data set as a folder that everybody's tools can read.

The layout is BEIR's (``corpus.jsonl``, ``queries.jsonl``, ``qrels/train.tsv``) with a JSONL mirror of
the qrels and a file of (query, positive) pairs, because Hugging Face ``datasets`` reads one file type
per repository and would take JSONL for CSV beside a TSV. ``README.md`` is the data card
(`lit_dpret.synthesis.data_card`); the privacy card lies beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError
from lit_dpret.synthesis.shards import SCHEMA, json_line, write_whole

SUMMARY_NAME = "generation.json"
DATA_FILES = ("queries.jsonl", "qrels/train.tsv", "qrels/train.jsonl", "pairs/train.jsonl", "corpus.jsonl")


@dataclass(frozen=True, kw_only=True)
class SyntheticQuery:
    """One drawn query, as a shard holds it.

    Attributes:
        log_prob: Log probability in nats of all its tokens under the generator; None where there is none.
        finished: Whether the end mark was drawn within the allowed length.
    """

    passage_id: str
    draw: int
    text: str
    log_prob: float | None = None
    finished: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Counts:
    """What happened to the drawn queries.

    Attributes:
        drawn: Queries drawn.
        empty: Of these, without any word; dropped.
        duplicates: Of these, equal to an earlier one of the same passage; merged into it.
        unfinished: Of these, cut at the longest allowed length; kept.
        queries: Queries in the data set.
        passages: Passages with at least one query.
    """

    drawn: int = 0
    empty: int = 0
    duplicates: int = 0
    unfinished: int = 0
    queries: int = 0
    passages: int = 0


@dataclass(frozen=True)
class Entry:
    """A query of the data set.

    Args:
        name: Its id.
        text: The query.
        passage_id: The passage it was written for.
        metadata: What ``queries.jsonl`` says of it.
        first: Whether it is the first of its passage.
    """

    name: str
    text: str
    passage_id: str
    metadata: Mapping[str, Any]
    first: bool


def check_passages(passages: Mapping[str, str]) -> None:
    """Refuse ids that the formats cannot carry.

    Raises:
        DataError: There is no passage, or an id is empty or holds white space that a TSV splits at.
    """
    if not passages:
        raise DataError("There are no passages to write queries for.")
    for name in passages:
        if not isinstance(name, str) or not name or any(mark in name for mark in "\t\n\r"):
            raise DataError(
                f"The passage id {name!r} cannot stand in a qrels file: it must be text without tabs or line ends."
            )


def write_dataset(
    folder: Path, queries: Callable[[], Iterable[SyntheticQuery]], passages: Mapping[str, str]
) -> tuple[Counts, dict[str, str]]:
    """Write the data files of the layout.

    Guarantees:
        - Each file is there whole or not at all, and equal input gives equal bytes.
        - Every query of ``qrels`` is in ``queries.jsonl``, and its passage in ``corpus.jsonl``.
        - A query that its passage drew several times stands there once, with ``metadata.copies``.

    Args:
        folder: Where they go.
        queries: Gives the drawn queries anew at each call, those of one passage next to each other.
        passages: Text by id; only those with a query are written.

    Returns:
        What was counted, and the SHA-256 of each file.
    """
    counts = Counts()
    for _ in _entries(queries(), counts):
        pass
    return counts, write_entries(folder, lambda: _entries(queries(), Counts()), passages)


def write_entries(folder: Path, entries: Callable[[], Iterable[Entry]], passages: Mapping[str, str]) -> dict[str, str]:
    """Write the data files of the layout from queries that have their ids.

    Args:
        folder: Where they go.
        entries: Gives them anew at each call.
        passages: Text by id; those of an entry that is the ``first`` of its passage are written.

    Returns:
        The SHA-256 of each file.
    """
    lines: tuple[Callable[[Entry], str], ...] = (
        lambda entry: json_line({"_id": entry.name, "text": entry.text, "metadata": dict(entry.metadata)}),
        lambda entry: f"{entry.name}\t{entry.passage_id}\t1\n",
        lambda entry: json_line({"query-id": entry.name, "corpus-id": entry.passage_id, "score": 1}),
        lambda entry: json_line({"query": entry.text, "positive": passages[entry.passage_id]}),
        lambda entry: (
            json_line({"_id": entry.passage_id, "title": "", "text": passages[entry.passage_id]}) if entry.first else ""
        ),
    )
    hashes = {}
    for name, line in zip(DATA_FILES, lines, strict=True):
        head = ["query-id\tcorpus-id\tscore\n"] if name.endswith(".tsv") else []
        hashes[name] = write_whole(folder / name, _lines(head, line, entries()))
    return hashes


def write_summary(
    folder: Path,
    configuration: Mapping[str, Any],
    counts: Counts,
    hashes: Mapping[str, str],
    *,
    terms: Mapping[str, str],
) -> None:
    """Write ``generation.json``: how the data set was made, what was counted, its files, its language and licence."""
    facts = {
        "schema": SCHEMA,
        "configuration": dict(configuration),
        "counts": asdict(counts),
        "sha256": dict(hashes),
        "terms": dict(terms),
    }
    write_whole(folder / SUMMARY_NAME, [json.dumps(facts, indent=2, sort_keys=True, ensure_ascii=False) + "\n"])


def _entries(queries: Iterable[SyntheticQuery], counts: Counts) -> Iterator[Entry]:
    """The queries of the data set in order, counting on the way."""
    for passage_id, drawn in groupby(queries, key=lambda query: query.passage_id):
        kept: dict[str, SyntheticQuery] = {}
        copies: dict[str, int] = {}
        for query in drawn:
            counts.drawn += 1
            if not query.text:
                counts.empty += 1
                continue
            counts.unfinished += not query.finished
            counts.duplicates += query.text in kept
            kept.setdefault(query.text, query)
            copies[query.text] = copies.get(query.text, 0) + 1
        counts.passages += bool(kept)
        for place, (text, query) in enumerate(kept.items()):
            counts.queries += 1
            metadata: dict[str, Any] = {"passage_id": passage_id, "draw": query.draw, "copies": copies[text]}
            if query.log_prob is not None:
                metadata["log_prob"] = query.log_prob
            yield Entry(f"genQ{counts.queries}", text, passage_id, metadata, place == 0)


def _lines(head: Iterable[str], line: Callable[[Entry], str], entries: Iterable[Entry]) -> Iterator[str]:
    yield from head
    for entry in entries:
        yield line(entry)
