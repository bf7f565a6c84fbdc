"""Any Hugging Face data set of (query, passage) rows, by the names of its columns: from the hub or from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from lightning.pytorch.utilities import rank_zero_warn

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.complaints import Complain, refuse
from lit_dpret.datamodules.corpus import open_corpus
from lit_dpret.datamodules.fields import Records
from lit_dpret.datamodules.hub_rows import first_columns, hub_rows, local_files, local_rows
from lit_dpret.datamodules.pair_file import PairColumns, PairReader
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.records import SPLITS, Unit
from lit_dpret.datamodules.settings import PairSettings
from lit_dpret.errors import ConfigurationError, DataError


class HuggingFaceDataModule(PairsDataModule):
    """Rows with a query and a passage, whatever their columns are called.

    A path that exists is read from disk, without ``datasets`` and without a network; anything else is a name on the hub
    (extra ``hf``). Only the columns that are named are read. `lit_dpret.datamodules.pair_file` says how rows become
    queries and passages, `lit_dpret.datamodules.hub_rows` which file is which split.

    Args:
        path: A folder, a file, or a name on the hub.
        name: The configuration on the hub, for a data set that has several.
        revision: The commit on the hub; without one the data may change from run to run.
        splits: What the data set calls the splits, ``{train: train_sft, dev: holdout}``; only these are read.
            None takes ``train``, ``validation`` (or ``dev``) and ``test``.
        streaming: Fetch rows from the hub as they are read, and not the whole data set first; needs ``max_rows``.
        max_rows: So many rows of each split, the first ones; refused under ``add_or_remove``.
        query_column: Texts of queries.
        passage_column: Texts of passages; a row may lack one where ``passage_id_column`` names a passage of ``corpus``.
        query_id_column: Ids of queries; None makes every row a query of its own.
        passage_id_column: Ids of passages; None makes equal texts one passage.
        user_column: Ids of users, for ``privacy.unit=user``.
        split_column: The split of each row, instead of that of its file.
        corpus: A local corpus file, the public list of passages.
        passages_are_public: As for `PairsDataModule`.
        settings: As for `PairsDataModule`.

    Raises:
        ConfigurationError: Settings that contradict each other; ``datasets`` is needed and not installed.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        name: str | None = None,
        revision: str | None = None,
        splits: Mapping[str, str] | None = None,
        streaming: bool = False,
        max_rows: int | None = None,
        query_column: str = "query",
        passage_column: str = "passage",
        query_id_column: str | None = None,
        passage_id_column: str | None = None,
        user_column: str | None = None,
        split_column: str | None = None,
        corpus: str | Path | None = None,
        passages_are_public: bool = False,
        **settings: Unpack[PairSettings],
    ) -> None:
        self.path, self.name, self.revision = str(path), name, revision
        self.splits, self.streaming, self.max_rows = splits, streaming, max_rows
        self.pair_columns = PairColumns(
            query=query_column,
            passage=passage_column,
            query_id=query_id_column or "",
            passage_id=passage_id_column or "",
            user=user_column or "",
            domain="",
            split=split_column or "",
            required=tuple(
                column for column in (query_id_column, passage_id_column, user_column, split_column) if column
            ),
        )
        super().__init__(pairs=path, corpus=corpus, passages_are_public=passages_are_public, **settings)
        self._check_whole_numbers(max_rows=1, optional=True)
        if streaming and max_rows is None:
            raise ConfigurationError(
                "datamodule.streaming=true fetches rows as they are read, and training reads all it is given: say how "
                "many with datamodule.max_rows, or set datamodule.streaming=false."
            )
        if splits is not None and split_column is not None:
            raise ConfigurationError(
                "datamodule.splits and datamodule.split_column both say which row is in which split; set one."
            )
        if splits is not None and not set(splits) <= set(SPLITS):
            raise ConfigurationError(f"datamodule.splits={dict(splits)}: the keys are {', '.join(SPLITS)}.")

    @property
    def is_local(self) -> bool:
        """Whether the data is read from this machine's disk."""
        return Path(self.path).exists()

    def use_unit(self, unit: Unit, neighbours: str | None = None) -> None:
        if neighbours == "add_or_remove" and self.max_rows is not None:
            raise ConfigurationError(
                f"datamodule.max_rows={self.max_rows} cannot go with privacy.neighbours=add_or_remove: removing one "
                "row would let another one in. Set it to null, or set privacy.neighbours=zero_out."
            )
        super().use_unit(unit, neighbours)

    def prepare_data(self) -> None:
        """Look whether the files are there, or fetch the data set from the hub, once for all processes."""
        if self.corpus:
            if not Path(self.corpus).exists():
                raise DataError(f"{self.corpus} does not exist; check datamodule.corpus.", kind="missing file")
            self._store(self.corpus)
        if not self.is_local and self.revision is None:
            rank_zero_warn(f"{self.path} is read without datamodule.revision, so it may change from run to run.")
        self._rows(refuse)

    def columns(self) -> dict[str, tuple[str, ...]]:
        """The columns of the first row of each split."""
        return {split: first_columns(records[0]) for split, records in self._rows(_pass_over).items()}

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """All rows of all splits, or the first ``max_rows`` of each."""
        passages = None
        if self.corpus:
            passages = open_corpus(
                self.corpus,
                in_memory=self.in_memory,
                cache_dir=self.cache_dir,
                allow_empty=self.allow_empty_passages,
                complain=complain,
            )
        reader = PairReader(corpus=passages, columns=self.pair_columns)
        for split, sources in self._rows(complain).items():
            left = self.max_rows
            for records in sources:
                taken = reader.add(records, split=split, limit=left)
                left = None if left is None else left - taken
        return reader.collection(self.path)

    def _rows(self, complain: Complain) -> dict[str, list[Records]]:
        if self.is_local:
            files = local_files(Path(self.path), self.splits, named=not self.pair_columns.split)
            return local_rows(files, complain)
        return hub_rows(
            self.path,
            name=self.name,
            revision=self.revision,
            splits=self.splits,
            streaming=self.streaming,
            complain=complain,
        )


def _pass_over(problem: DataError) -> None:
    """For a look at the columns alone: reading complains of the rest."""
