"""Atomic writes of files and folders, JSON files with a schema, and journals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from lit_dpret.errors import ConfigurationError, DataError, StorageError, schema_problem

# Names in a folder of synthetic data: the packages that write and read it may not import each other.
CARD_NAME = "privacy_card.json"
SUMMARY_NAME = "generation.json"
# Output paths of settings: `lit_dpret.tasks.parts.check_output` uses these annotations to refuse bad values early.
OutputFile: TypeAlias = Path
OutputFolder: TypeAlias = Path
SYNTHETIC_SCHEMA = "lit-dpret/synthetic-data/1"


def meant(folder: str | Path, *names: str) -> str:
    """Return the hint after a refusal of a folder without ``names``: it does not exist, or which subfolder has them."""
    place = Path(folder).expanduser()
    if not place.exists():
        return f" {place} does not exist."
    near = sorted({found.parent for name in names for found in place.glob(f"*/{name}")})
    return f" Did you mean {' or '.join(map(str, near))}?" if near else ""


def query_places(data: object) -> list[str | Path]:
    """Return where the queries and judgements of a DataModule are: what its settings name, and the files it reads."""
    qrels = getattr(data, "qrels", None)
    named = [*qrels.values()] if isinstance(qrels, Mapping) else [qrels]
    named += [getattr(data, name, None) for name in ("folder", "pairs", "queries")]
    named += data.query_files() if hasattr(data, "query_files") else []
    return [given for given in named if isinstance(given, (str, Path))]


def note_folders(folder: str) -> list[str]:
    """Return the folders in which notes on the data in ``folder`` are looked for, such as their privacy card.

    They are the folder itself, and the one above it if the folder is part of a data set, by its name.

    Example:
        >>> note_folders("https://host/set/qrels"), note_folders("/data/logs")
        (['https://host/set/qrels', 'https://host/set'], ['/data/logs'])
    """
    above, _, name = folder.rpartition("/")
    return [folder, above] if above and name in ("qrels", "pairs", "queries", "corpus") else [folder]


def notes_near(given: str | Path, name: str) -> list[Path]:
    """Return the existing notes of this name on the data in a folder, or in a file, on a local disk.

    They are looked for near the path, and near what it links to. A note that is a broken link is returned too.
    """
    place = Path(given).expanduser()
    near = [where if where.is_dir() else where.parent for where in (place.absolute(), place.resolve())]
    places = dict.fromkeys(folder for where in near for folder in note_folders(str(where)))
    return [Path(folder) / name for folder in places if os.path.lexists(f"{folder}/{name}")]


def linked_folders(folder: Path) -> list[Path]:
    """Return the folders of the model files that links in ``folder`` point to."""
    files = [path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt")]
    return list(dict.fromkeys(file.resolve().parent for file in sorted(files) if file.is_symlink()))


def write_whole(
    path: Path, content: str | bytes | Iterable[bytes], *, owner_only: bool = False, advice: str = ""
) -> Path:
    """Write a file atomically, by renaming: a reader sees the old or the new file, even after a crash.

    Args:
        path: The file; missing folders are created.
        content: A text, which is written as UTF-8, or bytes, all at once or chunk by chunk.
        owner_only: Only its owner may read the file, from its first byte on, or list its folder if that is new.
            Otherwise it gets the process's default mode for new files.
        advice: A sentence after the refusal: what is kept, and what to do.

    Raises:
        StorageError: It cannot be written; an existing file is unchanged, and no draft is left.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if owner_only else 0o777)
        with suppress(FileNotFoundError):
            draft.unlink()  # left by a killed process with the same pid, in any mode
        try:
            mode = 0o600 if owner_only else 0o666
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                data = content.encode() if isinstance(content, str) else content
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.{advice and f' {advice}'}") from error
    return path


def settle_modes(*paths: Path, owner_only: bool = False) -> None:
    """Give files, also in folders, the mode of new files; some libraries leave them readable by the owner only.

    With ``owner_only`` only the owner may read them. Only this function and `write_whole` set permissions.
    """
    for path in paths:
        mode = 0o600
        if not owner_only:
            probe = (path if path.is_dir() else path.parent) / f".{uuid.uuid4().hex}.mode"
            probe.touch(mode=0o666)  # minus the umask, which cannot be read without a race
            mode = probe.stat().st_mode & 0o777
            probe.unlink()
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file() and not file.is_symlink():
                file.chmod(mode)


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """Read a JSON object that states its schema.

    Raises:
        DataError: It is missing, is not a JSON object, or has another schema.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not JSON"
        raise DataError(f"{path} cannot be read: {reason}.") from error
    if problem := schema_problem(facts.get("schema") if isinstance(facts, dict) else None, schema):
        raise DataError(f"{path} cannot be read: {problem}")
    return dict(facts)


def json_sha256(value: object, *, default: Callable[[Any], Any] | None = None) -> str:
    """Return the SHA-256 of a value as JSON, independent of key order; ``default`` as for ``json.dumps``."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    Raises:
        DataError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def append_fact(path: Path, fact: Mapping[str, Any]) -> None:
    """Append a line of JSON to a journal, synced to disk."""
    with open(path, "ab") as file:
        file.write(json.dumps(fact, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_facts(path: Path) -> list[dict[str, Any]]:
    """Read a journal to continue it. Lines torn by a crash or a full disk are skipped, and a torn end is terminated."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")  # so that the next fact starts on its own line
    facts = []
    for line in content.splitlines():
        with suppress(ValueError):
            facts.append(json.loads(line))
    return [fact for fact in facts if isinstance(fact, dict)]


@contextmanager
def new_folder(folder: Path, *, knob: str) -> Iterator[Path]:
    """Yield a draft folder, renamed to ``folder`` if nothing fails; only its owner can read it.

    An existing folder is refused, with ``knob`` in the message; a draft that cannot be written is removed.
    """
    if folder.exists():
        raise ConfigurationError(f"{knob}={folder} exists, and nothing is overwritten. Name a new folder.")
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        draft.mkdir(parents=True, mode=0o700)
        yield draft
        os.rename(draft, folder)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{knob}={folder} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
