"""Three parts of a data set, in a BEIR folder or separate paths: corpus, queries, qrels.

docs/data.md lists their columns, the same for JSONL keys, table headers and parquet columns. If a file exists in
several formats, the first of `_SUFFIXES` is read. `lit_dpret.datamodules.pair_file` reads the other layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lit_dpret.datamodules.collection import Collection, GivenIds
from lit_dpret.datamodules.passage_store import build_store, cached_store, file_key
from lit_dpret.datamodules.records import Complain, Problems, Records, as_id, refuse
from lit_dpret.datamodules.rows import SPLIT_NAMES, SPLITS
from lit_dpret.datamodules.shards import Shards, find_shards, is_url, open_records
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import OutputFolder, meant

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".tsv", ".tsv.gz", ".csv", ".csv.gz", ".parquet")
_QRELS_SUFFIXES = (".tsv", ".tsv.gz", *(s for s in _SUFFIXES if not s.startswith(".tsv")))
_ID = ("_id", "id")
_QUERY_ID = ("query-id", "query_id")
_PASSAGE_ID = ("corpus-id", "corpus_id", "passage_id")
_GRADE = ("score", "grade")


#: A judgement of the measured split that changes no score: no system can find the passage, and none is asked to.
HARMLESS = "unknown passage of grade 0"
_ELSEWHERE = ("query without passage", "query in two splits")
_NAMED = 5


InMemory = bool | Literal["auto"]
#: Which grade to use for a pair that is judged more than once.
Repeated = Literal["refuse", "highest", "first", "last"]
_LISTED = 20

_LARGE = 2**29  # bytes of plain text; as Python strings it takes about two and a half times that
_PACKED = 4  # approximate bytes of text per byte of a compressed file


@dataclass
class Passages:
    """The content of a corpus file; a corpus on disk has no domains."""

    texts: Mapping[str, str] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)


@dataclass
class Queries:
    """The content of a file of queries."""

    texts: dict[str, str] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)
    ids: GivenIds = field(default_factory=GivenIds)


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """Settings for reading a corpus file."""

    in_memory: InMemory = True  # whether to hold its texts; ``auto`` holds up to half a gigabyte of text
    # The folder for stores on disk; None for ``~/.cache/lit-dpret/passages``. A store takes as much disk as the plain
    # text, and about 50 bytes for each passage.
    cache_dir: str | OutputFolder | None = None
    allow_empty: bool = False  # accept passages with neither title nor text
    header: Sequence[str] | None = None  # column names of a TSV file without a header line
    knob: str = "datamodule.corpus"  # the setting that names the file, for messages
    # The setting that accepts them, for messages; None where there is none.
    empty_knob: str | None = "datamodule.allow_empty_passages"

    def find(self, corpus: str | Path | Shards) -> Shards:
        """Return the files of a corpus."""
        return find_shards(corpus, knob=self.knob, cache_dir=self.cache_dir, public=True)

    def holds(self, corpus: str | Path | Shards) -> bool:
        """Return whether to keep the texts of this corpus in memory."""
        if self.in_memory != "auto":
            return self.in_memory
        found = self.find(corpus)
        packed = found.files[0].suffix.lower() in (".gz", ".zst", ".parquet")
        return found.size * (_PACKED if packed else 1) <= _LARGE


def open_corpus(
    path: str | Path | Shards, how: CorpusSettings | None = None, *, complain: Complain = refuse
) -> Passages:
    """Read all passages of a corpus, a file or shards, into memory or into a store; docs/data.md lists its columns.

    Guarantees:
        - Both ways give the same ids and texts in the same order, and the same complaints.
        - A store is built once for the same files, and not kept if a record was left out with a complaint.
    """
    how = how or CorpusSettings()
    shards = how.find(path)
    file = open_records(shards, knob=how.knob, header=how.header, complain=complain)
    last = 0

    def passages() -> Iterator[tuple[str, str, str | None]]:
        nonlocal last
        for last, record in file:
            parts = file.sound(
                last,
                partial(file.id, last, record, *_ID),
                partial(file.text, last, record, "title", optional=True),
                partial(file.text, last, record, "text"),
                partial(file.optional_id, last, record, "domain"),
            )
            if parts is None:
                continue
            passage_id, title, text, domain = parts
            if not (text := f"{title} {text}".strip()) and not how.allow_empty:
                other = "" if how.empty_knob is None else f" or set {how.empty_knob}=true"
                problem = f"{file.where(last)}: passage {passage_id!r} has an empty text; mend it{other}."
                file.complain_of(last, DataError(problem, kind="empty passage"))
                continue
            yield passage_id, text, domain

    if how.holds(shards):
        texts: dict[str, str] = {}
        domains: dict[str, str] = {}
        for passage_id, text, domain in passages():
            if passage_id in texts:
                complain(_repeated_id(file, last, passage_id))
                continue
            texts[passage_id] = text
            if domain is not None:
                domains[passage_id] = domain
        if not texts:
            raise DataError(f"{file.source} holds no passages.", kind="empty file")
        return Passages(texts, domains)

    def build(draft: Path) -> bool:
        noted: list[DataError] = []

        def note(problem: DataError) -> None:
            noted[:] = [problem]
            complain(problem)

        file.complain = refuse if complain is refuse else note
        texts = ((passage_id, text) for passage_id, text, _ in passages())
        store = build_store(draft, texts, lambda found: file.complain(_repeated_id(file, last, found)))
        if not len(store):
            raise DataError(f"{file.source} holds no passages.", kind="empty file")
        return not noted

    # The name decides how the bytes are read, so it is part of the key.
    first, *others = shards.files
    key = file_key(first, "".join(first.suffixes).lower(), how.header, how.allow_empty, *map(file_key, others))
    return Passages(cached_store(f"{first.name.split('.')[0]}-{key}", build, how.cache_dir))


def read_queries(
    path: str | Path | Shards, *, header: Sequence[str] | None = None, complain: Complain = refuse
) -> Queries:
    """Read all queries of a file; docs/data.md lists its columns.

    ``header`` names the columns of a TSV file without a header line. A record is left out if ``complain`` does not
    raise its problem.
    """
    file = open_records(path, knob="datamodule.queries", header=header, complain=complain)
    found = Queries()

    def new_id(number: int, record: Mapping[str, Any]) -> str:
        query_id = file.id(number, record, *_ID)
        if query_id in found.texts:
            raise _repeated_id(file, number, query_id)
        return query_id

    for number, record in file:
        shown = next(filter(None, map(as_id, map(record.get, _ID))), "")
        parts = file.sound(
            number,
            partial(new_id, number, record),
            partial(query_text, file, number, record, "text", shown),
            *(partial(file.optional_id, number, _with_metadata(record), name) for name in ("user_id", "domain")),
        )
        if parts is None:
            continue
        query_id, text, user, domain = parts
        found.texts[query_id] = text
        if user is not None:
            found.users[query_id] = user
        if domain is not None:
            found.domains[query_id] = domain
        found.ids.note(_with_metadata(record), named=True)
    if not found.texts:
        raise DataError(f"{file.source} holds no queries.", kind="empty file")
    return found


def read_qrels(
    path: str | Path | Shards,
    *,
    passages: Mapping[str, str],
    queries: Mapping[str, str],
    knob: str = "datamodule.qrels",
    header: Sequence[str] | None = None,
    complain: Complain = refuse,
    repeated: Repeated = "refuse",
) -> dict[str, dict[str, int]]:
    """Read the judgements of one split, ``{query_id: {passage_id: grade}}``; arguments as for `read_queries`.

    ``repeated`` says which grade to use for a pair that is judged more than once. By default all such pairs are listed.
    """
    file = open_records(path, knob=knob, header=header, complain=complain)
    qrels: dict[str, dict[str, int]] = {}
    again: list[tuple[int, str, str, int]] = []

    def known_query(number: int, record: Mapping[str, Any]) -> str:
        query_id = file.id(number, record, *_QUERY_ID)
        if query_id not in queries:
            raise DataError(f"{file.where(number)}: query {query_id!r} is not among the queries.", kind="unknown query")
        return query_id

    def known_passage(number: int, record: Mapping[str, Any]) -> str:
        passage_id = file.id(number, record, *_PASSAGE_ID)
        if passage_id not in passages:
            kind = "unknown passage" if file.grade(number, record, *_GRADE) > 0 else HARMLESS
            raise DataError(f"{file.where(number)}: passage {passage_id!r} is not in the corpus.", kind=kind)
        return passage_id

    for number, record in file:
        parts = file.sound(
            number,
            partial(known_query, number, record),
            partial(known_passage, number, record),
            partial(file.grade, number, record, *_GRADE),
        )
        if parts is None:
            continue
        query_id, passage_id, grade = parts
        judged = qrels.setdefault(query_id, {})
        if passage_id not in judged or repeated == "last":
            judged[passage_id] = grade
        elif repeated == "highest":
            judged[passage_id] = max(judged[passage_id], grade)
        elif repeated == "refuse":
            again.append((number, query_id, passage_id, grade))
    if again:
        _tell_repeated(file, again, qrels, complain)
    if not qrels:
        raise DataError(f"{file.source} holds no qrels.", kind="empty file")
    return qrels


def _tell_repeated(
    file: Records, again: Sequence[tuple[int, str, str, int]], qrels: Mapping[str, Mapping[str, int]], to: Complain
) -> None:
    """Complain of all pairs that are judged more than once, in one message."""

    def told(number: int, query_id: str, passage_id: str) -> str:
        first = file.find(number, (_QUERY_ID, query_id), (_PASSAGE_ID, passage_id))
        return (
            f"{file.where(number)}: query {query_id!r} and passage {passage_id!r} were already paired on "
            f"{file.place(first)}."
        )

    number, query_id, passage_id, _ = again[0]
    if isinstance(to, Problems):  # it counts them
        for number, query_id, passage_id, _ in again:
            to(DataError(told(number, query_id, passage_id), kind="repeated pair"))
        return
    listed = [
        f"{file.place(number)} ({query!r}, {passage!r}, grade {qrels[query][passage]} and {grade})"
        for number, query, passage, grade in again[:_LISTED]
    ]
    more = f", and {len(again) - _LISTED} more" if len(again) > _LISTED else ""
    message = (
        f"{told(number, query_id, passage_id)} Repeated: {'; '.join(listed)}{more}. Mend the file, or set "
        "datamodule.repeated_judgements to highest, first or last."
    )
    to(DataError(message, kind="repeated pair"))


def read_parts(
    *,
    corpus: str | Path | Shards | Passages,
    queries: str | Path | Shards,
    qrels: Mapping[str, str | Path | Shards],
    source: str,
    how: CorpusSettings | None = None,
    complain: Complain = refuse,
    repeated: Repeated = "refuse",
    left_out: LeftOut | None = None,
) -> Collection:
    """Read a collection from separate parts (or given passages); ``qrels`` gives one part per split.

    ``left_out``, if given, receives complaints about judgements, and then a split that is not measured may be
    unreadable.
    """
    passages = corpus if isinstance(corpus, Passages) else open_corpus(corpus, how, complain=complain)
    asked = read_queries(queries, complain=complain)
    judged: dict[str, dict[str, dict[str, int]]] = {}
    for name, path in qrels.items():
        split = split_name(name, "datamodule.qrels")
        if split in judged:
            raise DataError(f"datamodule.qrels names two files for the split {split}; keep one.")
        knob = f"datamodule.qrels.{name}"
        tell = complain if left_out is None else left_out.complain_of(split)
        try:
            judged[split] = read_qrels(
                path, passages=passages.texts, queries=asked.texts, knob=knob, complain=tell, repeated=repeated
            )
        except DataError as error:
            if left_out is None:
                raise
            tell(error)
    return Collection(
        passages=passages.texts,
        queries=asked.texts,
        qrels=judged,
        users=asked.users,
        domains=asked.domains,
        passage_domains=passages.domains,
        query_ids=asked.ids.found(),
        source=source,
    )


def find_part(folder: Path, name: str, suffixes: tuple[str, ...] = _SUFFIXES) -> Path | None:
    """Return the file ``name.*`` of a folder, with the first suffix that exists."""
    return next((folder / (name + s) for s in suffixes if (folder / (name + s)).exists()), None)


def qrels_files(folder: Path) -> dict[str, Path]:
    """Return the qrels file of each split in ``folder``."""
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
    """Find the parts of a BEIR folder, files or folders of shards, for `read_parts`; ``corpus`` replaces its own."""
    root = Path(folder)
    if is_url(folder):
        raise ConfigurationError(
            f"{knob}={folder}: a folder in BEIR's layout is read from a local disk. Name its parts instead, "
            "datamodule.corpus, datamodule.queries and datamodule.qrels: each can be a URL."
        )
    if not root.is_dir():
        raise DataError(f"{root} does not exist or is not a folder; check {knob}.", kind="missing file")
    queries, own = (
        find_part(root, name) or ((root / name) if (root / name).is_dir() else None) for name in ("queries", "corpus")
    )
    qrels = qrels_files(root / "qrels")
    corpus = corpus or own
    for part, expected in (
        (corpus or not needs_corpus, "corpus.jsonl"),
        (queries, "queries.jsonl"),
        (qrels, "qrels/train.tsv, qrels/dev.tsv or qrels/test.tsv"),
    ):
        if not part:
            present = ", ".join(sorted(path.name for path in root.iterdir())) or "nothing"
            raise DataError(
                f"{root} lacks {expected} (or .jsonl, .tsv, .csv, .parquet; also .gz, .jsonl.zst); it holds: {present}."
                f"{meant(root, 'queries.jsonl')}",
                kind="missing file",
            )
    return {"corpus": corpus, "queries": queries, "qrels": qrels, "source": str(root)}


def split_name(name: str, where: str) -> str:
    """Return ``train``, ``dev`` or ``test``; refuse other values without showing them: they may be private texts."""
    if name not in SPLIT_NAMES:
        like = len(name) <= 32 and len(name.split()) == 1 and any(known in name.lower() for known in SPLIT_NAMES)
        shown = repr(name) if like else "(text hidden)"
        raise DataError(f"{where}: split {shown} is not one of {', '.join(SPLIT_NAMES)}.")
    return SPLIT_NAMES[name]


def _with_metadata(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a query record merged with its metadata; the record's own keys take precedence."""
    metadata = record.get("metadata")
    return {**metadata, **record} if isinstance(metadata, Mapping) else record


def query_text(file: Records, number: int, record: Mapping[str, Any], name: str, query_id: str) -> str:
    """Return the text of a query; refuse an empty one."""
    text = file.text(number, record, name)
    if not text.strip():
        raise DataError(f"{file.where(number)}: query {query_id!r} has an empty text.", kind="empty query")
    return text


def _repeated_id(file: Records, number: int, found: str) -> DataError:
    first = file.find(number, (_ID, found))
    return DataError(
        f"{file.where(number)}: id {found!r} was already given on {file.place(first)}.", kind="repeated id"
    )


class LeftOut:
    """Count and list problems outside the evaluated split, which do not change its numbers.

    Public collections have queries without judgements, judgements of unknown texts, and splits that overlap. Training
    refuses these; to measure one split, only that split has to be right.
    """

    def __init__(self, split: str) -> None:
        self.split = split
        self.problems = {name: Problems(examples=_NAMED) for name in SPLITS}
        self._lines: list[str] = []

    def complain_of(self, split: str) -> Complain:
        """Return the receiver of problems in one split's judgements."""
        noted = self.problems[split]

        def complain(problem: DataError) -> None:
            if split == self.split and problem.kind != HARMLESS:
                raise problem
            noted(problem)

        return complain

    def checked(self, collection: Collection, *, allow_empty_passages: bool) -> Collection:
        """Return the collection without unjudged queries."""
        judged = {query for qrels in collection.qrels.values() for query, found in qrels.items() if found}
        unjudged = [query for query in collection.queries if query not in judged]
        asked = {query: text for query, text in collection.queries.items() if query in judged}
        if unjudged:
            self._lines.append(f"queries that no split judges: {len(unjudged)} ({named(unjudged)})")
        if not allow_empty_passages:
            empty = [passage for passage, text in collection.passages.items() if not text.strip()]
            if empty:
                self._lines.append(f"passages without any text, ranked as they are: {len(empty)} ({named(empty)})")
        elsewhere = self.problems["train"]
        kept = replace(collection, queries=asked)
        for contradiction in kept.contradictions(allow_empty_passages=True):
            if contradiction.kind not in _ELSEWHERE:
                raise contradiction
            elsewhere(contradiction)
        return kept

    def lines(self) -> list[str]:
        """Return what was left out or skipped, one line each."""
        found = list(self._lines)
        for split, problems in self.problems.items():
            for kind, count in problems.counts.items():
                found.append(f"{split}: {kind}, {count} times ({' '.join(problems.shown[kind])})")
        return found


def named(ids: Sequence[str]) -> str:
    """Return the first few ids, with an ellipsis if there are more."""
    return ", ".join([*ids[:_NAMED], *(["..."] if len(ids) > _NAMED else [])])
