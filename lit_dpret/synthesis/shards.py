"""Shards of a generation on disk: finished, verified groups, from which a killed run resumes.

A shard is written to a temporary file, synced and renamed; then its SHA-256 goes into the manifest, one line per shard.
A resumed run keeps the shards that match their line and draws the others again. The first line of the manifest is the
configuration. Another configuration would mix two data sets, so it is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError, ResumeError, StorageError, schema_problem
from lit_dpret.files import SYNTHETIC_SCHEMA, append_fact, read_facts, write_whole
from lit_dpret.privacy.ledger.chain import sync_folder

MANIFEST_NAME = "manifest.jsonl"
SHARDS_NAME = "shards"
_ADVICE = (
    "What is finished there is kept: fix the cause (a full disk, for example) and run the same command again, or "
    "choose another output folder."
)


def json_line(value: object) -> str:
    """Return ``value`` as one line of JSON; keys keep their order, which readers use as column order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def write_chunks(path: Path, chunks: Iterable[str]) -> str:
    """Write a file atomically; return its SHA-256."""
    digest = hashlib.sha256()

    def data() -> Iterator[bytes]:
        for chunk in chunks:
            part = chunk.encode("utf-8", "surrogatepass")
            digest.update(part)
            yield part

    write_whole(path, data(), advice=_ADVICE)
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    return digest.hexdigest()


def unwritable(path: Path, error: OSError) -> StorageError:
    """Turn an ``OSError`` into an error that names the file, the reason, and what to do."""
    return StorageError(f"{path} cannot be written: {error.strerror or error}. {_ADVICE}")


def shard_path(folder: Path, index: int) -> Path:
    """Return the path of shard ``index`` of a generation in ``folder``."""
    return folder / SHARDS_NAME / f"{index:06d}.jsonl"


class ShardStore:
    """The shards of one generation and their manifest; ``configuration`` is everything that the content depends on.

    Guarantees:
        - Once ``add`` has returned, its shard is complete on disk.
        - A shard whose bytes differ from the recorded ones is never read as data; it counts as missing.
        - Opening with another configuration raises ``ResumeError`` and names the difference.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any], count: int) -> None:
        self.folder = folder
        self.count = count
        self._configuration = {"shards": count, **configuration}
        self._manifest = folder / MANIFEST_NAME
        self._known = self._read_manifest()
        for leftover in (folder / SHARDS_NAME).glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        self.missing = [index for index in range(count) if not self._is_whole(index)]

    def add(self, index: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write one shard and record it in the manifest."""
        sha256 = write_chunks(shard_path(self.folder, index), map(json_line, records))
        self._append({"shard": index, "sha256": sha256})
        self._known[index] = sha256

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all records of all shards in order."""
        for index in range(self.count):
            path = shard_path(self.folder, index)
            if not self._is_whole(index):
                raise DataError(f"{path} is missing or damaged. Run the same command again to recreate it.")
            with open(path, encoding="utf-8", errors="surrogatepass") as file:
                for line in file:
                    yield json.loads(line)

    def seal(self) -> None:
        """Rewrite the manifest in order, so that its bytes do not depend on interruptions."""
        lines = [self._first_line()]
        lines += [json_line({"shard": index, "sha256": self._known[index]}) for index in sorted(self._known)]
        write_chunks(self._manifest, lines)

    def _first_line(self) -> str:
        return json_line({"schema": SYNTHETIC_SCHEMA, "configuration": self._configuration})

    def _is_whole(self, index: int) -> bool:
        if index not in self._known:
            return False
        try:
            with open(shard_path(self.folder, index), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self._known[index]
        except OSError:
            return False

    def _append(self, fact: Mapping[str, Any]) -> None:
        try:
            append_fact(self._manifest, fact)
        except OSError as error:
            raise unwritable(self._manifest, error) from error

    def _read_manifest(self) -> dict[int, str]:
        """Return SHA-256 by shard. Lines torn by a crash or a full disk are skipped: their shards count as missing."""
        try:
            facts = read_facts(self._manifest)
        except FileNotFoundError:
            if (self.folder / SHARDS_NAME).is_dir() and any((self.folder / SHARDS_NAME).iterdir()):
                raise ResumeError(
                    f"{self.folder / SHARDS_NAME} has files, but no {MANIFEST_NAME} that describes them. Choose "
                    "another output folder, or delete this one."
                ) from None
            write_chunks(self._manifest, [self._first_line()])
            return {}
        except OSError as error:
            raise unwritable(self._manifest, error) from error
        first = next((fact for fact in facts if "configuration" in fact or "schema" in fact), {})
        if problem := schema_problem(first.get("schema"), SYNTHETIC_SCHEMA):
            raise ResumeError(f"{self._manifest} cannot be continued: {problem} Choose another output folder.")
        before = first.get("configuration")
        if not isinstance(before, dict):
            raise ResumeError(
                f"{self._manifest} does not state its configuration. Choose another output folder, or delete this one."
            )
        self._refuse_change(before)
        return {int(fact["shard"]): str(fact["sha256"]) for fact in facts if "shard" in fact}

    def _refuse_change(self, before: dict[str, Any]) -> None:
        for key in sorted(set(before) | set(self._configuration)):
            if before.get(key) != self._configuration.get(key):
                raise ResumeError(
                    f"{self.folder} was begun with {key}={_short(before.get(key))} and cannot continue with "
                    f"{key}={_short(self._configuration.get(key))}: it would mix two data sets. Restore it, or choose "
                    "another output folder."
                )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
