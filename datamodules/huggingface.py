"""Any Hugging Face data set of (query, passage) rows, by column names: from the hub or a folder.

A folder is read by our own readers, without the library ``datasets``; docs/data.md says which split each file belongs
to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import open_corpus
from lit_dpret.datamodules.pair_file import PairColumns, PairReader
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.readers import FORMATS, RecordFile
from lit_dpret.datamodules.records import Complain, Records, refuse
from lit_dpret.datamodules.rows import SPLIT_NAMES, SPLITS, TextUnit
from lit_dpret.errors import ConfigurationError, DataError, first_line, told
from lit_dpret.lazy import optional
from lit_dpret.settings import require_whole

#: The settings that name columns; the first two cannot be null.
_COLUMNS = ("query_column", "passage_column", "query_id_column", "passage_id_column", "user_column", "split_column")
_NEEDED = _COLUMNS[:2]
#: The settings that do not apply to a local path, and what to do instead.
_OF_THE_HUB = {
    "name": "Name the folder of that configuration in datamodule.path.",
    "revision": "Set it to null: files on the disk have no revision.",
    "streaming": "Set it to false.",
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HubRows(Records):
    """The rows of one split from ``datasets``, a ``Dataset`` or an ``IterableDataset``, in order."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], source: str, complain: Complain) -> None:
        super().__init__(source, complain)
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        rows, number = iter(self._rows), 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # of any kind: a network, a disk, a file that breaks the schema
                self.complain(_not_given(self.where(number + 1), error))
                return
            number += 1
            yield number, dict(row)


@dataclass(kw_only=True, eq=False, repr=False)
class HuggingFaceDataModule(PairsDataModule):
    """Rows with a query and a passage, under any column names; only the named columns are read.

    Args:
        path: A folder or file, read without ``datasets`` and without a network; otherwise a name on the hub (extra
            ``hf``).
        name: The configuration on the hub, for a data set that has several.
        revision: The commit on the hub; without one the data may change from run to run.
        splits: The data set's names of the splits, ``{train: train_sft, dev: holdout}``; only these are read. None
            takes ``train``, ``validation`` (or ``dev``) and ``test``.
        streaming: Fetch rows from the hub as they are read, rather than the whole data set first; needs ``max_rows``.
        max_rows: Keep only the first this many rows of each split. The owner of each row is then public, and so is the
            number of rows of each query and each user. Refused under ``add_or_remove`` and ``replace_one``.
        query_column: Texts of queries.
        passage_column: Texts of passages; a row may lack one if ``passage_id_column`` names a passage of ``corpus``.
        query_id_column: Ids of queries; None makes every row a query of its own.
        passage_id_column: Ids of passages; None makes equal texts one passage.
        user_column: Ids of users, for ``privacy.unit=user``.
        split_column: The split of each row, instead of that of its file.
        corpus: A local corpus file, the public list of passages.
    """

    path: str | Path
    name: str | None = None
    revision: str | None = None
    splits: Mapping[str, str] | None = None
    streaming: bool = False
    max_rows: int | None = None
    query_column: str = "query"
    passage_column: str = "passage"
    query_id_column: str | None = None
    passage_id_column: str | None = None
    user_column: str | None = None
    split_column: str | None = None

    def __post_init__(self) -> None:
        self.path, self.pairs = str(self.path), self.path
        self._refuse_what_is_no_name()
        super().__post_init__()
        ids = (self.query_id_column, self.passage_id_column, self.user_column, self.split_column)
        self._pair_columns = PairColumns(
            query=self.query_column, passage=self.passage_column, query_id=ids[0] or "", passage_id=ids[1] or "",
            user=ids[2] or "", domain="", split=ids[3] or "", required=tuple(filter(None, ids)),
        )  # fmt: skip
        require_whole("datamodule", self, 1, "max_rows", null=True)
        if self.streaming and self.max_rows is None:
            raise ConfigurationError(
                "datamodule.streaming=true fetches rows as they are read, and training reads all of them: limit them "
                "with datamodule.max_rows, or set datamodule.streaming=false."
            )
        if self.splits is not None and self.split_column is not None:
            raise ConfigurationError(
                "datamodule.splits and datamodule.split_column both assign rows to splits; set one."
            )
        if self.splits is not None and not set(self.splits) <= set(SPLITS):
            raise ConfigurationError(
                f"datamodule.splits={dict(self.splits)}: the keys must be among {', '.join(SPLITS)}, and each value is "
                "the data set's name of that split."
            )

    def _refuse_what_is_no_name(self) -> None:
        """Refuse columns and splits that are not names, and hub settings combined with a local path."""
        for setting in _COLUMNS:
            value = getattr(self, setting)
            if not (isinstance(value, str) and value) and not (value is None and setting not in _NEEDED):
                raise ConfigurationError(f"datamodule.{setting}={value!r} must be the name of one column.")
        if self.query_column == self.passage_column:
            raise ConfigurationError(
                f"datamodule.query_column and datamodule.passage_column are both {self.query_column!r}: name the "
                "column of the queries and that of the passages."
            )
        named = isinstance(self.splits, Mapping) and all(isinstance(name, str) for name in self.splits.values())
        if self.splits is not None and not named:
            raise ConfigurationError(
                f"datamodule.splits={self.splits!r} must map each split to the data set's name of it, such as "
                "{train: train_sft, test: holdout}."
            )
        for setting, advice in _OF_THE_HUB.items():
            if self.is_local and (value := getattr(self, setting)):
                shown = "true" if value is True else value
                raise ConfigurationError(
                    f"datamodule.{setting}={shown} is for data from the hub, but datamodule.path={self.path} is on the "
                    f"disk. {advice}"
                )

    @property
    def is_local(self) -> bool:
        """Whether the data are read from the local disk."""
        return Path(self.path).exists()

    def use_unit(self, unit: TextUnit, neighbours: str | None = None) -> None:
        self._refuse_sample(neighbours, "max_rows", several="a query or a user may have several rows")
        super().use_unit(unit, neighbours)

    def prepare_data(self) -> None:
        """Check that the files exist, or download the data set from the hub, once for all processes."""
        if self.corpus:
            self._store(self.corpus)
        self._rows(refuse)
        if not self.is_local and self.revision is None:
            rank_zero_warn(
                told(
                    f"{self.path} is read without datamodule.revision, so the data may change from run to run. Set it "
                    "to a commit of the hub."
                )
            )

    def file_columns(self) -> dict[str, tuple[str, ...]]:
        """Return the columns of the first row of each split."""
        return {split: records[0].columns() for split, records in self._rows(refuse).items()}

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """Read all rows of all splits, or the first ``max_rows`` of each."""
        passages = open_corpus(self.corpus, self._corpus_settings(), complain=complain) if self.corpus else None
        reader = PairReader(corpus=passages, columns=self._pair_columns)
        settings = {getattr(self, setting): setting for setting in reversed(_COLUMNS)}

        def naming_the_setting(problem: DataError) -> None:
            column = re.search("no (?:key|column) '([^']+)'", problem.sentence)
            if problem.kind == "missing column" and column and column[1] in settings:
                setting = f"Name the column in datamodule.{settings[column[1]]}."
                problem = DataError(f"{problem.sentence} {setting}", kind=problem.kind)
            complain(problem)

        for split, sources in self._rows(naming_the_setting).items():
            left = self.max_rows
            for records in sources:
                taken = reader.add(records, split=split, limit=left)
                left = None if left is None else left - taken
        return reader.collection(str(self.path))

    def _rows(self, complain: Complain) -> dict[str, list[Records]]:
        if not self.is_local:
            return self._hub_rows(complain)
        return {
            split: [RecordFile(path, knob="datamodule.path", complain=complain) for path in paths]
            for split, paths in self._files().items()
        }

    def query_files(self) -> list[Path]:
        """Return the files on the local disk; none for data from the hub."""
        return [file.absolute() for paths in self._files().values() for file in paths] if self.is_local else []

    def _files(self) -> dict[str, list[Path]]:
        return _local_files(Path(self.path), self.splits, named=not self._pair_columns.split)

    def _hub_rows(self, complain: Complain) -> dict[str, list[Records]]:
        if not _HUB_NAME.fullmatch(str(self.path)):
            raise DataError(f"{self.path} does not exist; check datamodule.path.", kind="missing file")
        user = f"datamodule.path={self.path} is not a file or folder here, and reading it from the hub"
        library = optional("datasets", user, "lit-dpret[hf]")
        how = {"revision": self.revision, "streaming": self.streaming}
        others: list[str] = []
        try:
            if self.splits is None:
                found = library.load_dataset(self.path, self.name, **how)
                given = {SPLIT_NAMES[theirs]: found[theirs] for theirs in found if theirs in SPLIT_NAMES}
                others = [theirs for theirs in found if theirs not in SPLIT_NAMES]
            else:
                given = {
                    split: library.load_dataset(self.path, self.name, split=theirs, **how)
                    for split, theirs in self.splits.items()
                }
        except Exception as error:  # of any kind: no network, no such name, a gated repository
            nowhere = "is not a file or folder here, and a data set of that name on the hub"
            raise _not_given(f"datamodule.path={self.path} {nowhere}", error) from error
        if not given:
            raise DataError(
                f"{self.path} has no train, validation or test split, only {', '.join(others)}; set datamodule.splits."
            )
        return {split: [HubRows(rows, f"{self.path} split {split}", complain)] for split, rows in given.items()}


def _local_files(root: Path, splits: Mapping[str, str] | None, *, named: bool = True) -> dict[str, list[Path]]:
    """Find the files of each split in a folder, or the single file ``root``; without ``named`` all are train."""
    names = SPLIT_NAMES if splits is None else {name: split for split, name in splits.items()}
    if root.is_file() and not named:
        return {"train": [root]}
    if root.is_file():
        return {_split_in(root.name, names) or "train": [root]}
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and set(path.suffixes) & set(FORMATS)]
    if not files:
        kinds = {path.suffix for path in root.rglob("*")}
        other = " Convert files of Dataset.save_to_disk with Dataset.to_parquet." if ".arrow" in kinds else ""
        other += " Rewrite .json files as .jsonl, one object per line." if ".json" in kinds and not other else ""
        raise DataError(
            f"{root} holds no file of records (.parquet; .jsonl, .tsv or .csv, also with .gz or .zst); check "
            f"datamodule.path.{other}",
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
                f"datamodule.splits.{missing[0]}={splits[missing[0]]}: no name of a file or folder in {root} begins "
                "with that.",
                kind="missing file",
            )
        return found
    if found and unnamed:
        raise DataError(
            f"{root}: the name of {unnamed[0].relative_to(root)} names no split, but other names do. Name the splits "
            "in datamodule.splits, their column in datamodule.split_column, or a single file in datamodule.path."
        )
    return found or {"train": unnamed}


def _split_in(name: str, names: Mapping[str, str]) -> str:
    """Return the split that a path names: the outermost part that starts with a split's name; empty if none does."""
    for part in Path(name).parts:
        stem = part.split(".")[0]
        for theirs, split in names.items():
            if re.match(rf"{re.escape(theirs)}(?!_?[A-Za-z])", stem):
                return split
    return ""


def _not_given(what: str, error: Exception) -> DataError:
    return DataError(f"{what} could not be loaded: {first_line(error)}", kind="unreadable file")
