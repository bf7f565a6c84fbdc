"""A keyed fingerprint of the files that a training reads beside its DataModule."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError


def fingerprint_of_files(module: Any, key: bytes) -> str | None:
    """What stands in the module's own files, if it reads any.

    Labels and hard negatives were made of private queries, so to a claim another file is another data set, and a
    resume with one is refused like a resume with another log.

    Args:
        module: With ``files_read()``, where it has any.
        key: Of the run's privacy secret; without it the fingerprint says nothing about the files.

    Raises:
        DataError: A file cannot be read.
    """
    files: list[Path] = module.files_read() if hasattr(module, "files_read") else []
    if not files:
        return None
    found = hmac.new(key, digestmod="sha256")
    for path in files:
        try:
            found.update(hmac.new(key, path.read_bytes(), digestmod="sha256").digest())
        except OSError as error:
            raise DataError(f"{path}, which model.negatives names, cannot be read: {error.strerror}.") from error
    return found.hexdigest()
