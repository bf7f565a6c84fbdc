"""A keyed fingerprint of all that a training reads of private data, the files beside the DataModule among it."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError


def fingerprint_of_inputs(module: Any, data: Any, key: bytes, *, planted: bool = True) -> str:
    """The DataModule's fingerprint, and with it what the module reads from files of its own.

    Labels and hard negatives were made of private queries, so another file is another data set to a claim, and a
    resume with one is refused like a resume with another log. Without such files it is the DataModule's alone.

    Args:
        module: With ``files_read()``, where it has any.
        data: With ``data_fingerprint(key)``.
        key: Of the run's privacy secret; without it the fingerprint says nothing about the data.
        planted: Whether what is planted in the data counts.

    Raises:
        DataError: A file cannot be read.
    """
    own: str = data.data_fingerprint(key) if planted else data.data_fingerprint(key, planted=False)
    files: list[Path] = module.files_read() if hasattr(module, "files_read") else []
    if not files:
        return own
    found = hmac.new(key, own.encode(), digestmod="sha256")
    for path in files:
        try:
            found.update(hmac.new(key, path.read_bytes(), digestmod="sha256").digest())
        except OSError as error:
            raise DataError(f"{path}, which model.negatives names, cannot be read: {error.strerror}.") from error
    return found.hexdigest()
