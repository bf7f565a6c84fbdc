"""Split unsplit data: by user if ids are known, otherwise by query text.

A hash of its user or text (casefolded, whitespace collapsed) with a public seed assigns each query to a split. A
division by text is a function of private texts, and so is the number of train records, which cards print. So a written
split records how it was divided (`DIVISION_FILE`), and the card lists that among its assumptions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lit_dpret.datamodules.collection import GIVEN_IDS, Collection
from lit_dpret.datamodules.readers import parse_json_file
from lit_dpret.datamodules.rows import SPLITS, stable_hash
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import new_folder, notes_near
from lit_dpret.settings import is_number
from lit_dpret.texts import normalise

SplitBy = Literal["auto", "user", "text"]
PAIRS_FILE = "pairs.jsonl"
DIVISION_FILE = "division.json"
_TINY = 1e-9


def checked_fractions(fractions: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each split, in the order train, dev, test; shares of 0 are omitted."""
    knob = f"task.fractions={dict(fractions)}"
    if unknown := sorted(set(fractions) - set(SPLITS)):
        raise ConfigurationError(f"{knob}: {unknown[0]!r} is not one of {', '.join(SPLITS)}.")
    for name, share in fractions.items():
        if not is_number(share) or not 0 <= share <= 1:
            raise ConfigurationError(f"{knob}: the share of {name} is not a number from 0 to 1.")
    if not math.isclose(sum(fractions.values()), 1.0, abs_tol=_TINY):
        raise ConfigurationError(f"{knob} must add up to 1, not to {sum(fractions.values()):g}.")
    if not fractions.get("train"):
        raise ConfigurationError(f"{knob} leaves nothing to train on; give train a share.")
    return {name: float(fractions[name]) for name in SPLITS if fractions.get(name)}


def split_collection(
    collection: Collection, *, fractions: Mapping[str, float], seed: int = 0, by: SplitBy = "auto"
) -> Collection:
    """Return the queries of all splits in new splits, by shares of users or texts; see the module docstring.

    ``by`` is ``user``, ``text``, or ``auto``, which means user if any query has one; a query without a user is split by
    its text.
    """
    shares = checked_fractions(fractions)
    if by == "user" and not collection.users:
        raise ConfigurationError(
            f"task.split_by=user: no query of {collection.source} has a user id. Give a user_id column, or set "
            "task.split_by=text."
        )
    by_user = divides_by(collection, by) == "user"
    qrels: dict[str, dict[str, dict[str, int]]] = {name: {} for name in shares}
    for judgements in collection.qrels.values():
        for query_id, judged in judgements.items():
            user = collection.users.get(query_id) if by_user else None
            key = ("user", user) if user is not None else ("text", normalise(collection.queries[query_id]))
            side = qrels[_side(shares, seed, key)]
            side[query_id] = {**side.get(query_id, {}), **judged}
    for name, made in qrels.items():
        if not any(grade > 0 for grades in made.values() for grade in grades.values()):
            raise DataError(
                f"{collection.source}: a split by {'user' if by_user else 'text'} leaves {name} empty. Change "
                "task.fractions or task.split_seed, or leave data this small unsplit.",
                kind="empty split",
            )
    return replace(collection, qrels=qrels)


def divides_by(collection: Collection, by: SplitBy) -> Literal["user", "text"]:
    """Return the key that a split by ``by`` divides on."""
    return "user" if by == "user" or (by == "auto" and bool(collection.users)) else "text"


def divisions_of(*data: str | Path) -> set[str]:
    """Return the keys, ``user`` or ``text``, by which `write_split` divided these data sets, folders or files."""
    found = set()
    for note in {note for given in data for note in notes_near(given, DIVISION_FILE)}:
        read = parse_json_file(note)
        if not isinstance(read, dict) or read.get("by") not in ("user", "text"):
            raise DataError(
                f"{note} was not written by task.write_split. Write the split again, or remove the file.",
                kind="bad note",
            )
        found.add(read["by"])
    return found


def write_split(
    collection: Collection, folder: Path, *, public_passages: bool, by: Literal["user", "text"] = "text"
) -> dict[str, str]:
    """Write training data into the new folder ``folder``; return the ``datamodule=pairs`` settings that read it.

    If the list of passages is public, write a BEIR folder, else one file of pairs, so that copying does not make the
    list public. Each record states whether the log had query ids, unless all records had one; a note next to them
    states ``by`` which key they were divided.

    Guarantees:
        - The written data read back as the same passages, queries, users, domains and qrels.
        - Only its owner can read the folder; it appears whole or not at all, and nothing is ever overwritten.
    """
    with new_folder(folder, knob="task.write_split") as draft:
        if public_passages:
            _write_beir(collection, draft)
        else:
            _write_pairs(collection, draft / PAIRS_FILE)
        # A query without a user was divided by its text.
        everybody = all(query in collection.users for qrels in collection.qrels.values() for query in qrels)
        note = {"by": "user" if by == "user" and everybody else "text"}
        (draft / DIVISION_FILE).write_text(json.dumps(note) + "\n", encoding="utf-8")
    if public_passages:
        return {"folder": str(folder)}
    return {"pairs": str(folder / PAIRS_FILE)}


def _side(shares: dict[str, float], seed: int, key: tuple[str, str]) -> str:
    """Return the split of a user or a text: the share into which its hash, as a number from 0 to 1, falls."""
    place = int.from_bytes(stable_hash("lit-dpret split", str(seed), *key)[:8], "big") / 2**64
    reached = 0.0
    for name, share in shares.items():
        reached += share
        if place < reached:
            return name
    return next(reversed(shares))


def _write_beir(collection: Collection, folder: Path) -> None:
    for passage_id in (p for qrels in collection.qrels.values() for judged in qrels.values() for p in judged):
        _check_id(passage_id)
    domains = collection.passage_domains
    _write_lines(
        folder / "corpus.jsonl",
        (
            {"_id": name, "title": "", "text": text} | ({"domain": domains[name]} if name in domains else {})
            for name, text in sorted(collection.passages.items())  # the order of the log would reveal facts about it
        ),
        json.dumps,
    )
    named = {query_id for qrels in collection.qrels.values() for query_id in qrels}
    _write_lines(
        folder / "queries.jsonl",
        (
            {"_id": name, "text": text, "metadata": _metadata(collection, name)}
            for name, text in collection.queries.items()
            if name in named
        ),
        json.dumps,
    )
    (folder / "qrels").mkdir()
    for split, qrels in collection.qrels.items():
        rows = [("query-id", "corpus-id", "score")]
        rows += [
            (_check_id(query), passage, str(grade))
            for query, judged in qrels.items()
            for passage, grade in judged.items()
        ]
        _write_lines(folder / "qrels" / f"{split}.tsv", rows, "\t".join)


def _write_pairs(collection: Collection, path: Path) -> None:
    _write_lines(
        path,
        (
            {"query_id": query_id, "query": collection.queries[query_id], "passage_id": passage_id}
            | {"passage": collection.passages[passage_id], **_metadata(collection, query_id), "split": split}
            for split, qrels in collection.qrels.items()
            for query_id, judged in qrels.items()
            for passage_id in judged
        ),
        json.dumps,
    )


def _metadata(collection: Collection, query_id: str) -> dict[str, str]:
    known = {"user_id": collection.users, "domain": collection.domains}
    ids = {} if collection.query_ids == "all" else {GIVEN_IDS: collection.query_ids}
    return {name: found[query_id] for name, found in known.items() if query_id in found} | ids


def _check_id(name: str) -> str:
    if any(mark in name for mark in "\t\n\r"):
        raise DataError(
            f"The id {name!r} cannot be written to a qrels file: it holds a tab or a line break.", kind="no id"
        )
    return name


def _write_lines(path: Path, records: Iterable[Any], line: Callable[[Any], str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(line(record) + "\n" for record in records)
