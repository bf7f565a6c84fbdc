"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_dpret.errors import ConfigurationError, StorageError


def write_whole(path: Path, content: str | bytes, *, owner_only: bool = False, advice: str = "") -> Path:
    """Write a file under another name and rename it: a reader sees the old one or the new one, also after a crash.

    Args:
        path: The file; folders that are missing are made.
        content: A text is written as UTF-8.
        owner_only: Nobody but its owner may read the file, from its first byte on, nor list its folder, if that is new.
            Otherwise it gets the mode that the process gives to new files.
        advice: A sentence that follows the refusal: what is kept, and what to do.

    Raises:
        StorageError: It cannot be written; what stood there before is unchanged, and no draft is left.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if owner_only else 0o777)
        with suppress(FileNotFoundError):
            draft.unlink()  # of a killed process of the same number, with whatever mode that had
        try:
            mode = 0o600 if owner_only else 0o666
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
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


@contextmanager
def new_folder(folder: Path, *, knob: str) -> Iterator[Path]:
    """Give a draft to write into, which becomes ``folder`` if nothing fails; its owner alone can read it.

    Args:
        folder: Must not exist.
        knob: The setting that names it, for messages.

    Raises:
        ConfigurationError: The folder exists.
        StorageError: It cannot be written; nothing is left of the draft.
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
