"""Silos on disk: the data of each client of a federation, in a separate, self-contained folder ``clients/NAME``.

The overall manifest is for experiments in one place; a real federation has none. Everything here is as private as the
queries: only the owner can read the folders, and no message shows a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.readers import RecordFile, parse_json_file
from lit_dpret.datamodules.records import NOT_UNICODE, Complain, as_id, is_unicode, refuse
from lit_dpret.datamodules.rows import SPLITS
from lit_dpret.datamodules.splitting import DIVISION_FILE
from lit_dpret.errors import DataError, schema_problem
from lit_dpret.files import file_sha256, new_folder

SCHEMA = "lit-dpret/silos/1"
MANIFEST = "manifest.json"
CLIENTS = "clients"
FILES = ("passages.jsonl", "sentences.jsonl", "queries.jsonl")


@dataclass(frozen=True)
class SiloQuery:
    """A question of a client, and the sentences of its collection that answer it."""

    qid: str
    text: str = field(repr=False)
    positives: tuple[str, ...] = field(repr=False)
    split: str


@dataclass(frozen=True)
class Silo:
    """All data of one client; its ``repr`` shows no text."""

    name: str  # the client's name
    passages: Mapping[str, str] = field(repr=False)  # title by passage id; its text is that of its sentences
    sentences: Mapping[str, str] = field(repr=False)  # text by sentence id
    passage_of: Mapping[str, str] = field(repr=False)  # passage id by sentence id
    queries: Sequence[SiloQuery] = field(repr=False)  # with their split

    def counts(self) -> dict[str, int]:
        """Return the numbers of passages, sentences, and queries of each split; as private as the number of queries."""
        splits = {split: sum(query.split == split for query in self.queries) for split in SPLITS}
        return {"passages": len(self.passages), "sentences": len(self.sentences), **splits}

    def contradictions(self) -> Iterator[DataError]:
        """Yield reasons why the silo is unusable: an invalid folder name, an unknown id, an empty part."""
        where = f"silo {self.name!r}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name):
            yield DataError(
                f"{where}: the name must be up to 64 letters, digits, dots, dashes or underscores, and begin with a "
                "letter or digit."
            )
        for what, found in (("passages", self.passages), ("sentences", self.sentences), ("queries", self.queries)):
            if not found:
                yield DataError(f"{where} holds no {what}.", kind="empty part")
        asked = {query.qid: query.text for query in self.queries}
        for what, texts in (("passage", self.passages), ("sentence", self.sentences), ("query", asked)):
            for key, text in texts.items():
                if not (is_unicode(key) and is_unicode(text)):
                    yield DataError(f"{where}: {what} {key!r} {NOT_UNICODE}.", kind="not Unicode text")
        for sid, text in self.sentences.items():
            if self.passage_of.get(sid) not in self.passages:
                yield DataError(f"{where}: sentence {sid!r} belongs to no known passage.", kind="unknown passage")
            if not text.strip():
                yield DataError(f"{where}: sentence {sid!r} has an empty text.", kind="empty sentence")
        seen: set[str] = set()
        for query in self.queries:
            if query.qid in seen:
                yield DataError(f"{where}: query {query.qid!r} occurs twice.", kind="repeated id")
            seen.add(query.qid)
            if query.split not in SPLITS:
                yield DataError(f"{where}: query {query.qid!r} is in none of the splits {', '.join(SPLITS)}.")
            if not query.positives:
                yield DataError(f"{where}: query {query.qid!r} has no answer.", kind="query without answer")
            unknown = next((sid for sid in query.positives if sid not in self.sentences), None)
            if unknown is not None:
                yield DataError(
                    f"{where}: query {query.qid!r} is answered by sentence {unknown!r}, which the silo does not hold.",
                    kind="unknown sentence",
                )

    def check(self) -> Silo:
        """Refuse the first contradiction; return the silo itself."""
        for problem in self.contradictions():
            raise problem
        return self


def write_silos(folder: str | Path, silos: Iterable[Silo], *, facts: Mapping[str, Any], knob: str = "folder") -> Path:
    """Write silos into a new folder that only its owner can read; ``facts`` go into the manifest.

    If ``facts`` has the ``division`` of the log by `write_split`, each silo gets its note, which its cards repeat.

    Guarantees:
        - The written data read back as the same silos.
        - The folder appears whole or not at all, and nothing is ever overwritten.
    """
    folder = Path(folder)
    clients: dict[str, Any] = {}
    with new_folder(folder, knob=knob) as draft:
        (draft / CLIENTS).mkdir(mode=0o700)
        for silo in silos:
            if silo.check().name in clients:
                raise DataError(f"Two silos are called {silo.name!r}.", kind="repeated id")
            clients[silo.name] = write_silo(draft / CLIENTS / silo.name, silo)
            if "division" in facts:
                _write_json(draft / CLIENTS / silo.name / DIVISION_FILE, {"by": facts["division"]})
        if not clients:
            raise DataError(f"There is no silo to write into {folder}.", kind="empty part")
        _write_json(draft / MANIFEST, {"schema": SCHEMA, **facts, "clients": clients})
    return folder


def write_silo(folder: Path, silo: Silo) -> dict[str, Any]:
    """Write one client's folder; return its counts."""
    folder.mkdir(mode=0o700)
    lines: tuple[Iterable[Mapping[str, Any]], ...] = (
        ({"pid": pid, "title": title} for pid, title in silo.passages.items()),
        ({"sid": sid, "pid": silo.passage_of[sid], "text": text} for sid, text in silo.sentences.items()),
        ({"qid": q.qid, "text": q.text, "pos_sids": list(q.positives), "split": q.split} for q in silo.queries),
    )
    for name, records in zip(FILES, lines, strict=True):
        with open(folder / name, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    counts = silo.counts()
    sums = {name: file_sha256(folder / name) for name in FILES}
    _write_json(folder / MANIFEST, {"schema": SCHEMA, "name": silo.name, "counts": counts, "sha256": sums})
    return counts


def read_manifest(folder: str | Path, *, knob: str = "the path") -> dict[str, Any]:
    """Read the manifest of a folder of silos, or of one client's folder."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; check {knob}. task=build_silos writes such a folder.", kind="missing file"
        )
    found = parse_json_file(path)
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object.", kind="malformed JSON")
    if problem := schema_problem(found.get("schema"), SCHEMA):
        raise DataError(f"{path}: {problem}")
    return found


def silo_folders(folder: str | Path, *, knob: str = "the path") -> dict[str, Path]:
    """Return the folder of each client by name, in the manifest's order."""
    names = read_manifest(folder, knob=knob).get("clients")
    if not isinstance(names, dict) or not names:
        raise DataError(f"{Path(folder) / MANIFEST} lists no clients.", kind="empty part")
    found = {name: Path(folder) / CLIENTS / name for name in names}
    for name, path in found.items():
        if not path.is_dir():
            raise DataError(f"{path} does not exist, but the manifest lists {name!r}; check {knob}.")
    return found


def read_silo(folder: str | Path, *, complain: Complain = refuse, verify: bool = True) -> Silo:
    """Read one client's folder, ``.../clients/NAME``; ``verify`` compares the files with the manifest first."""
    root = Path(folder)
    manifest = read_manifest(root)
    sums = manifest.get("sha256", {})
    for name in FILES:
        if not (root / name).is_file():
            raise DataError(
                f"{root / name} does not exist. Restore it, or rebuild the silos (task=build_silos).",
                kind="missing file",
            )
        if verify and sums.get(name) != file_sha256(root / name):
            raise DataError(
                f"{root / name} does not match its manifest: its SHA-256 differs. Rebuild the silos "
                "(task=build_silos), or restore the file.",
                kind="changed file",
            )
    passages = {pid: title for pid, title, _ in _records(root / FILES[0], ("pid", "title"), complain)}
    sentences: dict[str, str] = {}
    passage_of: dict[str, str] = {}
    for sid, pid, record in _records(root / FILES[1], ("sid", "pid"), complain):
        sentences[sid], passage_of[sid] = str(record.get("text", "")), as_id(pid) or ""
    queries = [
        SiloQuery(qid, text, tuple(as_id(sid) or "" for sid in record.get("pos_sids") or ()), str(record.get("split")))
        for qid, text, record in _records(root / FILES[2], ("qid", "text"), complain)
    ]
    silo = Silo(str(manifest.get("name", root.name)), passages, sentences, passage_of, queries)
    for problem in silo.contradictions():
        complain(DataError(f"{root}: {problem}", kind=problem.kind))
    return silo


def _records(path: Path, columns: tuple[str, str], complain: Complain) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield an id, a second text, and the record; complain of repeated ids and missing columns."""
    file = RecordFile(path, complain=complain)
    seen: set[str] = set()
    for number, record in file:
        try:
            name = file.id(number, record, columns[0])
            second = file.text(number, record, columns[1])
            file.unicode(number, "text", str(record.get("text", "")))
            if name in seen:
                raise DataError(f"{file.where(number)}: id {name!r} was given before.", kind="repeated id")
        except DataError as error:
            complain(error)
            continue
        seen.add(name)
        yield name, second, record


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
