"""Three parts of a data set, in a BEIR folder or wherever they are: corpus, queries, qrels.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.complaints import Complain, refuse
from lit_dpret.datamodules.fields import Fields, as_id
from lit_dpret.datamodules.readers import RecordFile
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
    """What a corpus file holds; a corpus that is kept on disk has no domains."""

    texts: Mapping[str, str] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)


@dataclass
class Queries:
    """What a file of queries holds."""

    texts: dict[str, str] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)


def corpus_records(file: RecordFile, *, allow_empty: bool = False) -> Iterator[tuple[int, str, str, object]]:
    """Line, id, text (title and text joined) and domain of each passage of a corpus file, in order."""
    fields = Fields(file)
    for number, record in file:
        try:
            passage_id = fields.id(number, record, _ID)
            title = fields.text(number, record, _TITLE, optional=True)
            text = f"{title} {fields.text(number, record, _TEXT)}".strip()
            if not text and not allow_empty:
                raise DataError(
                    f"{file.where(number)}: passage {passage_id!r} has an empty text; mend it or set "
                    "datamodule.allow_empty_passages=true.",
                    kind="empty passage",
                )
            domain = fields.optional_id(number, record, "domain")
        except DataError as error:
            file.complain(error)
            continue
        yield number, passage_id, text, domain


def read_corpus(
    path: str | Path,
    *,
    allow_empty: bool = False,
    knob: str = "datamodule.corpus",
    columns: Sequence[str] | None = None,
    complain: Complain = refuse,
) -> Passages:
    """All passages of a corpus file; see the module's table for its columns.

    Args:
        path: The file.
        allow_empty: Accept passages with neither title nor text.
        knob: What the user set to name it, for messages.
        columns: The names of the columns of a TSV file without a header line.
        complain: Gets every problem. By default the first one is raised; else the record is left out.

    Raises:
        DataError: A record is malformed, repeats an id or, unless ``allow_empty``, has neither title
            nor text; the message names the lines. There is no passage.
    """
    file = RecordFile(path, knob=knob, columns=columns, complain=complain)
    texts: dict[str, str] = {}
    domains: dict[str, str] = {}
    for number, passage_id, text, domain in corpus_records(file, allow_empty=allow_empty):
        if passage_id in texts:
            complain(repeated_id(file, number, passage_id))
            continue
        texts[passage_id] = text
        keep(domains, passage_id, domain)
    if not texts:
        raise no_passages(file)
    return Passages(texts, domains)


def read_queries(
    path: str | Path,
    *,
    knob: str = "datamodule.queries",
    columns: Sequence[str] | None = None,
    complain: Complain = refuse,
) -> Queries:
    """All queries of a file; see the module's table for its columns, and `read_corpus` for the arguments.

    Raises:
        DataError: A record is malformed or repeats an id; the message names the lines. There is no query.
    """
    file = RecordFile(path, knob=knob, columns=columns, complain=complain)
    fields = Fields(file)
    found = Queries()
    for number, record in file:
        try:
            query_id = fields.id(number, record, _ID)
            if query_id in found.texts:
                raise repeated_id(file, number, query_id)
            text = query_text(fields, number, record, _TEXT, query_id)
            metadata = record.get("metadata")
            more = {**metadata, **record} if isinstance(metadata, Mapping) else record
            user, domain = (fields.optional_id(number, more, name) for name in ("user_id", "domain"))
        except DataError as error:
            complain(error)
            continue
        found.texts[query_id] = text
        keep(found.users, query_id, user)
        keep(found.domains, query_id, domain)
    if not found.texts:
        raise DataError(f"{file.path} holds no queries.", kind="empty file")
    return found


def read_qrels(
    path: str | Path,
    *,
    passages: Mapping[str, str],
    queries: Mapping[str, str],
    knob: str = "datamodule.qrels",
    columns: Sequence[str] | None = None,
    complain: Complain = refuse,
) -> dict[str, dict[str, int]]:
    """The judgements of one split, ``{query_id: {passage_id: grade}}``; `read_corpus` tells the arguments.

    Raises:
        DataError: A record is malformed, repeats a pair, or names a passage or query that
            ``passages`` or ``queries`` do not hold; the message names the line. There is no judgement.
    """
    file = RecordFile(path, knob=knob, columns=columns, complain=complain)
    fields = Fields(file)
    qrels: dict[str, dict[str, int]] = {}
    for number, record in file:
        try:
            query_id = fields.id(number, record, _QUERY_ID)
            passage_id = fields.id(number, record, _PASSAGE_ID)
            if query_id not in queries:
                raise DataError(
                    f"{file.where(number)}: query {query_id!r} is not among the queries.", kind="unknown query"
                )
            if passage_id not in passages:
                raise DataError(
                    f"{file.where(number)}: passage {passage_id!r} is not in the corpus.", kind="unknown passage"
                )
            if passage_id in qrels.get(query_id, ()):
                first = file.find(number, (_QUERY_ID, query_id), (_PASSAGE_ID, passage_id))
                raise DataError(
                    f"{file.where(number)}: query {query_id!r} and passage {passage_id!r} were already paired on "
                    f"{file.place(first)}.",
                    kind="repeated pair",
                )
            qrels.setdefault(query_id, {})[passage_id] = fields.grade(number, record, _GRADE)
        except DataError as error:
            complain(error)
    if not qrels:
        raise DataError(f"{file.path} holds no qrels.", kind="empty file")
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


def folder_parts(
    folder: str | Path,
    *,
    corpus: str | Path | None = None,
    needs_corpus: bool = True,
    knob: str = "datamodule.folder",
) -> dict[str, Any]:
    """The files of a BEIR folder, as `lit_dpret.datamodules.corpus.read_parts` takes them.

    ``corpus`` stands in for the folder's own; ``knob`` is the setting that a message names.

    Raises:
        DataError: The folder or one of its parts is missing.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} does not exist or is not a folder; check {knob}.", kind="missing file")
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
            raise DataError(
                f"{root} lacks {expected} (.jsonl, .tsv, .csv, .gz, .zst, .parquet); it holds: {present}.",
                kind="missing file",
            )
    return {"corpus": corpus, "queries": queries, "qrels": qrels, "source": str(root)}


def split_name(name: str, where: str) -> str:
    """``train``, ``dev`` or ``test``; ``valid`` and ``validation`` are dev. Another value may be a private text."""
    if name not in SPLIT_NAMES:
        like = len(name) <= 32 and len(name.split()) == 1 and any(known in name.lower() for known in SPLIT_NAMES)
        shown = repr(name) if like else "(a text)"
        raise DataError(f"{where}: split {shown} is not one of {', '.join(SPLIT_NAMES)}.")
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
        raise DataError(f"{fields.file.where(number)}: query {query_id!r} has an empty text.", kind="empty query")
    return text


def repeated_id(file: RecordFile, number: int, found: str) -> DataError:
    """An id that an earlier record of the file has already."""
    first = file.find(number, (_ID, found))
    return DataError(
        f"{file.where(number)}: id {found!r} was already given on {file.place(first)}.", kind="repeated id"
    )


def no_passages(file: RecordFile) -> DataError:
    """A corpus file without a single passage."""
    return DataError(f"{file.path} holds no passages.", kind="empty file")
