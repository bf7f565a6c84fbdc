"""Where the rows of a Hugging Face data set come from: files in a local folder, or the hub.

A folder is read without the library ``datasets``, by our own readers: every .parquet, .jsonl, .tsv and .csv
file in it (the last three also with .gz or .zst). A file belongs to the split that its name, or that of a
folder above it, begins with: ``train-00000-of-00002.parquet``, ``validation.jsonl.gz``, ``data/test/part1.csv``.
Where no name says a split, or a column does, all are for training.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.complaints import Complain
from lit_dpret.datamodules.fields import Records, shown_columns
from lit_dpret.datamodules.readers import FORMATS, RecordFile, one_line
from lit_dpret.datamodules.records import SPLIT_NAMES
from lit_dpret.errors import ConfigurationError, DataError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HubRows:
    """The rows of one split as ``datasets`` gives them, in order, each with its place.

    Args:
        rows: What to iterate over: a ``Dataset`` or an ``IterableDataset``.
        source: Its name, for messages.
        complain: Gets what goes wrong while rows are fetched.
    """

    format = ".hub"

    def __init__(self, rows: Iterable[Mapping[str, Any]], source: str, complain: Complain) -> None:
        self._rows, self._source, self.complain = rows, source, complain

    def where(self, number: int) -> str:
        return f"{self._source} {self.place(number)}"

    def place(self, number: int) -> str:
        return f"row {number}"

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        rows, number = iter(self._rows), 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # of whichever kind: a network, a disk, a schema that a file breaks
                self.complain(_not_given(self.where(number + 1), error))
                return
            number += 1
            yield number, dict(row)


def local_files(root: Path, splits: Mapping[str, str] | None, *, named: bool = True) -> dict[str, list[Path]]:
    """The files of each split in a folder, or the one file that ``root`` is; see the module's text.

    Args:
        root: A file or a folder.
        splits: What the folder calls the splits: ``{"dev": "holdout"}``. None for the usual names.
        named: Whether names say the split; else all files are for training.

    Raises:
        DataError: There is no file, a split that was named has none, or only some of the names say a split.
    """
    names = SPLIT_NAMES if splits is None else {name: split for split, name in splits.items()}
    if root.is_file() and not named:
        return {"train": [root]}
    if root.is_file():
        return {_split_in(root.name, names) or "train": [root]}
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and set(path.suffixes) & set(FORMATS)]
    if not files:
        raise DataError(
            f"{root} holds no file of records (.parquet; .jsonl, .tsv or .csv, each also .gz or .zst).",
            kind="missing file",
        )
    if not named:
        return {"train": files}
    found: dict[str, list[Path]] = {}
    for path in files:
        found.setdefault(_split_in(str(path.relative_to(root)), names), []).append(path)
    unnamed = found.pop("", [])
    if splits is not None:
        if missing := sorted(set(splits) - set(found)):
            raise DataError(
                f"{root} holds no file of {splits[missing[0]]} (datamodule.splits.{missing[0]}).", kind="missing file"
            )
        return found
    if found and unnamed:
        raise DataError(
            f"{root}: the name of {unnamed[0].relative_to(root)} says no split, and other names do. Name the splits in "
            "datamodule.splits, the column that says it in datamodule.split_column, or a single file in "
            "datamodule.path."
        )
    return found or {"train": unnamed}


def local_rows(files: Mapping[str, list[Path]], complain: Complain) -> dict[str, list[Records]]:
    """Readers of the files of each split."""
    return {
        split: [RecordFile(path, knob="datamodule.path", complain=complain) for path in paths]
        for split, paths in files.items()
    }


def hub_rows(
    path: str,
    *,
    name: str | None,
    revision: str | None,
    splits: Mapping[str, str] | None,
    streaming: bool,
    complain: Complain,
) -> dict[str, list[Records]]:
    """The rows of each split on the hub, downloaded, or fetched as one goes where ``streaming``.

    Raises:
        ConfigurationError: ``datasets`` is not installed.
        DataError: The path is neither a file, a folder nor a name on the hub, or the hub does not give it.
    """
    if not _HUB_NAME.fullmatch(path):
        raise DataError(f"{path} does not exist; check datamodule.path.", kind="missing file")
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigurationError(
            f"datamodule.path={path} is no file or folder here, and the hub is read through datasets: pip install "
            '"lit-dpret[hf]".'
        ) from error
    try:
        if splits is None:
            found = library.load_dataset(path, name, revision=revision, streaming=streaming)
            given = {SPLIT_NAMES[theirs]: found[theirs] for theirs in found if theirs in SPLIT_NAMES}
            others = [theirs for theirs in found if theirs not in SPLIT_NAMES]
        else:
            given = {
                split: library.load_dataset(path, name, revision=revision, streaming=streaming, split=theirs)
                for split, theirs in splits.items()
            }
            others = []
    except Exception as error:  # of whichever kind: no network, no such name, a gate
        raise _not_given(f"datamodule.path={path}", error) from error
    if not given:
        raise DataError(
            f"{path} has no train, validation or test split but {', '.join(others)}; set datamodule.splits."
        )
    return {split: [HubRows(rows, f"{path} split {split}", complain)] for split, rows in given.items()}


def first_columns(records: Records) -> tuple[str, ...]:
    """The columns of the first record, as they may be shown."""
    return next((shown_columns(record) for _, record in records), ())


def _split_in(name: str, names: Mapping[str, str]) -> str:
    """The split that a path, from its outermost folder on, says by how a part of it begins; empty for none."""
    for part in Path(name).parts:
        stem = part.split(".")[0]
        for theirs, split in names.items():
            if re.match(rf"{re.escape(theirs)}(?!_?[A-Za-z])", stem):
                return split
    return ""


def _not_given(what: str, error: Exception) -> DataError:
    return DataError(f"{what} could not be had: {one_line(error)}", kind="unreadable file")
