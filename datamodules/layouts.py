"""How files become a `Collection`: three parts, in a BEIR folder or wherever they are.

Columns (JSONL keys, table headers and parquet columns alike; others are ignored):

========  ==============================================================================
corpus    ``_id`` (or ``id``); ``text``; optional ``title`` (joined in front of the text by a
          space), ``domain``
queries   ``_id`` (or ``id``); ``text``; optional ``user_id`` and ``domain``, also inside a
          ``metadata`` object
qrels     ``query-id`` (or ``query_id``); ``corpus-id`` (or ``corpus_id``, ``passage_id``);
          ``score`` (or ``grade``), a whole number
========  ==============================================================================

A folder holds ``corpus.*``, ``queries.*`` and ``qrels/{train,dev,test}.*``, as BEIR's do. Where a
folder has a file in several formats, the first of .jsonl, .jsonl.gz, .jsonl.zst, .tsv, .tsv.gz,
.csv, .csv.gz and .parquet is read (for qrels .tsv comes first).

The other layout, one file of pairs, is in `lit_dpret.datamodules.pair_file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.readers import Fields, RecordFile, as_id
from lit_dpret.datamodules.records import SPLIT_NAMES
from lit_dpret.errors import DataError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".tsv", ".tsv.gz", ".csv", ".csv.gz", ".parquet")
_QRELS_SUFFIXES = (".tsv", ".tsv.gz", *(s for s in _SUFFIXES if not s.startswith(".tsv")))
_ID = ("_id", "id")
_TEXT = ("text",)
_TITLE = ("title",)
_QUERY_ID = ("query-id", "query_id")
_PASSAGE_ID = ("corpus-id", "corpus_id", "passage_id")
_GRADE = ("score", "grade")


@dataclass
class Passages:
    """What a corpus file holds."""

    texts: dict[str, str] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)


@dataclass
class Queries:
    """What a file of queries holds."""

    texts: dict[str, str] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)


def read_corpus(path: str | Path, *, allow_empty: bool = False, knob: str = "datamodule.corpus") -> Passages:
    """All passages of a corpus file; see the module's table for its columns.

    Raises:
        DataError: A record is malformed, repeats an id or, unless ``allow_empty``, has neither title
            nor text; the message names the lines.
    """
    file = RecordFile(path, knob=knob)
    fields = Fields(file)
    found = Passages()
    for number, record in file:
        passage_id = fields.id(number, record, _ID)
        if passage_id in found.texts:
            raise _repeated(file, number, passage_id)
        title = fields.text(number, record, _TITLE, optional=True)
        text = f"{title} {fields.text(number, record, _TEXT)}".strip()
        if not text and not allow_empty:
            raise DataError(
                f"{file.where(number)}: passage {passage_id!r} has an empty text; mend it or set "
                "datamodule.allow_empty_passages=true."
            )
        found.texts[passage_id] = text
        keep(found.domains, passage_id, record.get("domain"))
    if not found.texts:
        raise DataError(f"{file.path} holds no passages.")
    return found


def read_queries(path: str | Path, *, knob: str = "datamodule.queries") -> Queries:
    """All queries of a file; see the module's table for its columns.

    Raises:
        DataError: A record is malformed or repeats an id; the message names the lines.
    """
    file = RecordFile(path, knob=knob)
    fields = Fields(file)
    found = Queries()
    for number, record in file:
        query_id = fields.id(number, record, _ID)
        if query_id in found.texts:
            raise _repeated(file, number, query_id)
        found.texts[query_id] = query_text(fields, number, record, _TEXT, query_id)
        metadata = record.get("metadata")
        more = metadata if isinstance(metadata, Mapping) else {}
        keep(found.users, query_id, record.get("user_id", more.get("user_id")))
        keep(found.domains, query_id, record.get("domain", more.get("domain")))
    if not found.texts:
        raise DataError(f"{file.path} holds no queries.")
    return found


def read_qrels(
    path: str | Path, *, passages: Mapping[str, str], queries: Mapping[str, str], knob: str = "datamodule.qrels"
) -> dict[str, dict[str, int]]:
    """The judgements of one split, ``{query_id: {passage_id: grade}}``.

    Raises:
        DataError: A record is malformed, repeats a pair, or names a passage or query that
            ``passages`` or ``queries`` do not hold; the message names the line.
    """
    file = RecordFile(path, knob=knob)
    fields = Fields(file)
    qrels: dict[str, dict[str, int]] = {}
    for number, record in file:
        query_id = fields.id(number, record, _QUERY_ID)
        passage_id = fields.id(number, record, _PASSAGE_ID)
        if query_id not in queries:
            raise DataError(f"{file.where(number)}: query {query_id!r} is not among the queries.")
        if passage_id not in passages:
            raise DataError(f"{file.where(number)}: passage {passage_id!r} is not in the corpus.")
        judged = qrels.setdefault(query_id, {})
        if passage_id in judged:
            first = file.find(number, (_QUERY_ID, query_id), (_PASSAGE_ID, passage_id))
            raise DataError(
                f"{file.where(number)}: query {query_id!r} and passage {passage_id!r} were already paired on "
                f"{file.place(first)}."
            )
        judged[passage_id] = fields.grade(number, record, _GRADE)
    if not qrels:
        raise DataError(f"{file.path} holds no qrels.")
    return qrels


def find_part(folder: Path, name: str, suffixes: tuple[str, ...] = _SUFFIXES) -> Path | None:
    """The file ``name.*`` of a folder, by the first suffix that exists."""
    return next((folder / (name + s) for s in suffixes if (folder / (name + s)).exists()), None)


def qrels_files(folder: Path) -> dict[str, Path]:
    """The qrels file of each split that ``folder`` has one for."""
    files: dict[str, Path] = {}
    for name, split in SPLIT_NAMES.items():
        path = find_part(folder, name, _QRELS_SUFFIXES)
        if path is not None and split in files:
            raise DataError(f"{folder} holds both {files[split].name} and {path.name}; keep one.")
        if path is not None:
            files[split] = path
    return files


def read_parts(
    *,
    corpus: str | Path | Passages,
    queries: str | Path,
    qrels: Mapping[str, str | Path],
    source: str,
    allow_empty_passages: bool = False,
) -> Collection:
    """A collection from its separate files (or passages at hand); ``qrels`` gives one file per split."""
    passages = corpus if isinstance(corpus, Passages) else read_corpus(corpus, allow_empty=allow_empty_passages)
    asked = read_queries(queries)
    judged: dict[str, dict[str, dict[str, int]]] = {}
    for name, path in qrels.items():
        split = split_name(name, "datamodule.qrels")
        if split in judged:
            raise DataError(f"datamodule.qrels names two files for the split {split}; keep one.")
        judged[split] = read_qrels(path, passages=passages.texts, queries=asked.texts, knob=f"datamodule.qrels.{name}")
    return Collection(
        passages=passages.texts,
        queries=asked.texts,
        qrels=judged,
        users=asked.users,
        domains=asked.domains,
        passage_domains=passages.domains,
        source=source,
    )


def folder_parts(folder: str | Path, *, corpus: str | Path | None = None, needs_corpus: bool = True) -> dict[str, Any]:
    """The files of a BEIR folder, as arguments of `read_parts`; ``corpus`` stands in for the folder's own.

    Raises:
        DataError: The folder or one of its parts is missing.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} does not exist or is not a folder; check datamodule.folder.")
    queries = find_part(root, "queries")
    qrels = qrels_files(root / "qrels")
    corpus = corpus or find_part(root, "corpus")
    for part, expected in (
        (corpus or not needs_corpus, "corpus.jsonl"),
        (queries, "queries.jsonl"),
        (qrels, "qrels/train.tsv, qrels/dev.tsv or qrels/test.tsv"),
    ):
        if not part:
            present = ", ".join(sorted(path.name for path in root.iterdir())) or "nothing"
            raise DataError(f"{root} lacks {expected} (.jsonl, .tsv, .csv, .gz, .zst, .parquet); it holds: {present}.")
    return {"corpus": corpus, "queries": queries, "qrels": qrels, "source": str(root)}


def split_name(name: str, where: str) -> str:
    """``train``, ``dev`` or ``test``; ``valid`` and ``validation`` are dev."""
    if name not in SPLIT_NAMES:
        raise DataError(f"{where}: split {name!r} is not one of {', '.join(SPLIT_NAMES)}.")
    return SPLIT_NAMES[name]


def keep(found: dict[str, str], key: str, value: object) -> None:
    """Remember an optional value; null and empty mean that there is none."""
    text = as_id(value)
    if text is not None:
        found[key] = text


def query_text(fields: Fields, number: int, record: Mapping[str, Any], names: tuple[str, ...], query_id: str) -> str:
    """The text of a query; an empty one raises DataError."""
    text = fields.text(number, record, names)
    if not text.strip():
        raise DataError(f"{fields.file.where(number)}: query {query_id!r} has an empty text.")
    return text


def _repeated(file: RecordFile, number: int, found: str) -> DataError:
    first = file.find(number, (_ID, found))
    return DataError(f"{file.where(number)}: id {found!r} was already given on {file.place(first)}.")
