"""A private set of (query, passage) pairs as a LightningDataModule."""

from __future__ import annotations

import hmac
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from lit_dpret.datamodules import preparation
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import (
    CorpusSettings,
    InMemory,
    LeftOut,
    Repeated,
    folder_parts,
    open_corpus,
    qrels_files,
    read_parts,
)
from lit_dpret.datamodules.pair_file import PairColumns, read_pairs
from lit_dpret.datamodules.passage_store import PassageStore
from lit_dpret.datamodules.records import Complain, refuse
from lit_dpret.datamodules.rows import SPLIT_NAMES, Row, TextUnit
from lit_dpret.datamodules.sampled import SampledDataModule
from lit_dpret.datamodules.shards import Shards, find_shards, open_records
from lit_dpret.datamodules.splitting import divisions_of
from lit_dpret.datamodules.unit_dataset import GroupedUnitDataset, Planted
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import OutputFolder, query_places
from lit_dpret.privacy.budget import ALL_OF_ONE, EACH_ROW, PARTLY_NAMED, UNSAID, Duplicates
from lit_dpret.settings import require_whole


@dataclass(kw_only=True, eq=False, repr=False)
class PairsDataModule(SampledDataModule):
    """Pairs from a BEIR folder, from separate files, or from one file of pairs.

    Exactly one of ``folder``, ``queries`` with ``qrels`` and ``corpus``, or ``pairs`` says where the data is.
    `lit_dpret.datamodules.layouts` and `lit_dpret.datamodules.pair_file` list the columns. Nothing is downloaded
    unless a URL names it.

    Args:
        folder: A BEIR folder: ``corpus.*``, ``queries.*``, ``qrels/{train,dev,test}.*``.
        corpus: A corpus, like the three that follow a file, a glob or folder of shards, or an fsspec URL of these
            (`lit_dpret.datamodules.shards`). With ``folder`` it replaces the folder's own; with ``pairs`` it is the
            public list of passages.
        queries: The queries.
        qrels: The judgements of each split, ``{train: ..., test: ...}``, or a folder with a file per split.
        pairs: Records with columns ``query`` and ``passage``.
        columns: The names of these columns in ``pairs``: ``{query: question, passage: answer}``.
        repeated_judgements: Which grade to use for a pair that ``qrels`` judge more than once: ``highest``, ``first``
            or ``last``; ``refuse`` lists all such pairs.
        passages_are_public: Declare the list of passages in ``pairs`` public. Without it, `public_passages` refuses to
            derive a public list from private records. Any other corpus is public by definition.
        lower_case_queries: Lower-case every query.
        duplicates: ``keep`` or ``merge`` equal query texts under different ids; read docs/data.md before changing it.
        max_rows_per_unit: Keep at most this many rows of a unit, by hash of query text and passage id.
        drop_overlap: Leave out train queries that repeat an evaluation query or share a positive passage with one.
            Evaluation queries then decide which train queries stay and are not protected: refused with units of
            ``pair`` and ``user`` and with ``add_or_remove``.
        drop_queries_without_passage: Leave out queries without a passage instead of refusing them. Such train queries
            stay as units without rows, so that neither their number nor a sample reveals which ones have a passage.
        allow_empty_passages: Accept passages without any text (some public collections have them).
        in_memory: Whether to hold the texts of the corpus; ``auto`` holds up to half a gigabyte, and reads a larger
            corpus from a store on disk (`lit_dpret.datamodules.passage_store`).
        cache_dir: The folder for such stores; None for ``~/.cache/lit-dpret/passages``.
        max_passages: Train and evaluate on a public sample of this many passages; scores are then not comparable with
            the full corpus. See `lit_dpret.datamodules.preparation.sample`.
        max_train_queries: At most this many train queries, chosen by id. The ids are then public, and so are the
            numbers of queries per user and of copies per text. Refused with ``add_or_remove``, and with ``replace_one``
            unless the unit is a query and duplicates are kept.
        max_eval_queries: At most this many queries of each evaluation split.
    """

    folder: str | Path | None = None
    corpus: str | Path | None = None
    queries: str | Path | None = None
    qrels: str | Path | Mapping[str, str | Path] | None = None
    pairs: str | Path | None = None
    columns: Mapping[str, str] | None = None
    repeated_judgements: Repeated = "refuse"
    passages_are_public: bool = False
    lower_case_queries: bool = False
    duplicates: Duplicates = "keep"
    max_rows_per_unit: int | None = None
    drop_overlap: bool = False
    drop_queries_without_passage: bool = False
    allow_empty_passages: bool = False
    in_memory: InMemory = "auto"
    cache_dir: str | OutputFolder | None = None
    max_passages: int | None = None
    max_train_queries: int | None = None
    max_eval_queries: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pair_columns = PairColumns() if self.columns is None else PairColumns.renamed(self.columns)
        if self.columns is not None and self.pairs is None:
            raise ConfigurationError(
                f"datamodule.columns={dict(self.columns)} names columns of datamodule.pairs, which is not set."
            )
        self._unit: TextUnit | None = None
        self._collection: Collection | None = None
        self._query_files: list[Path] | None = None
        self._units: GroupedUnitDataset | None = None
        self._left_out: LeftOut | None = None
        self._check_choices(duplicates=Duplicates, repeated_judgements=Repeated)
        if not isinstance(self.in_memory, bool) and self.in_memory != "auto":
            raise ConfigurationError(f"datamodule.in_memory={self.in_memory!r} is not one of true, false, auto.")
        limits = ("max_rows_per_unit", "max_passages", "max_train_queries", "max_eval_queries")
        require_whole("datamodule", self, 1, *limits, null=True)
        self._check_one_source()

    def _check_one_source(self) -> None:
        given = [name for name in ("folder", "pairs") if getattr(self, name)]
        if self.queries or self.qrels:
            given.append("queries and qrels")
        if len(given) != 1:
            found = " and ".join(f"datamodule.{name}" for name in given) or "none of them"
            raise ConfigurationError(
                "Name the data with exactly one of datamodule.folder, datamodule.pairs, or datamodule.queries with "
                f"datamodule.qrels and datamodule.corpus. Set now: {found}."
            )
        missing = [name for name in ("queries", "qrels", "corpus") if not getattr(self, name)]
        if given == ["queries and qrels"] and missing:
            raise ConfigurationError(f"datamodule.{missing[0]} is not set; queries, qrels and corpus go together.")
        if self.max_passages is not None and not self.has_public_passages:
            raise self._no_public_list("datamodule.max_passages")

    def _no_public_list(self, wanted: str) -> ConfigurationError:
        return ConfigurationError(
            f"{wanted} needs a public list of passages, but the only passages are those of the private records. Name "
            "the public list with datamodule.corpus, or declare this one public with "
            "datamodule.passages_are_public=true."
        )

    # -- reading -----------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Check that the files exist, fetch those that a URL names, and store a large corpus."""
        if corpus := self._sources().get("corpus"):
            self._store(corpus)

    def _store(self, corpus: str | Path | Shards, how: CorpusSettings | None = None) -> None:
        """Build the store of a large corpus if none exists; one process does so before all processes set up."""
        how = how or self._corpus_settings()
        if not how.holds(corpus := how.find(corpus)):
            open_corpus(corpus, how)

    def _corpus_settings(self) -> CorpusSettings:
        return CorpusSettings(in_memory=self.in_memory, cache_dir=self.cache_dir, allow_empty=self.allow_empty_passages)

    def _sources(self) -> dict[str, Any]:
        """Find the files that the settings name, keyed by part; ``qrels`` are keyed by split."""
        if self.pairs:
            found: dict[str, Any] = {"pairs": self.pairs, "corpus": self.corpus}
        elif self.folder:
            found = folder_parts(self.folder, corpus=self.corpus)
        else:
            found = {"corpus": self.corpus, "queries": self.queries, "qrels": self._qrels_by_split()}
            found["source"] = str(self.queries)
        local = {
            name: find_shards(given, knob=f"datamodule.{name}", cache_dir=self.cache_dir, public=name == "corpus")
            for name, given in _by_name(found).items()
        }
        if "qrels" in found:
            found["qrels"] = {split: local.pop(f"qrels.{split}") for split in found["qrels"]}
        return found | local

    def query_files(self) -> list[Path]:
        """Return the files of queries and judgements: a privacy card or a note may be next to each."""
        if self._query_files is None:
            public = ("corpus", "collection", "answers")
            given = [one for name, one in _by_name(self._sources()).items() if name not in public]
            files = [file for one in given for file in (one.files if isinstance(one, Shards) else [Path(one)])]
            self._query_files = [file.absolute() for file in files]
        return self._query_files

    def _qrels_by_split(self) -> Mapping[str, str | Path]:
        if isinstance(self.qrels, Mapping):
            return self.qrels
        folder = Path(str(self.qrels))
        if not folder.is_dir():
            raise DataError(
                f"datamodule.qrels={self.qrels} is not a local folder of splits; name the split of a file or of "
                f"shards: datamodule.qrels={{train: {self.qrels}}}."
            )
        if not (files := qrels_files(folder)):
            raise DataError(f"datamodule.qrels={folder} holds none of train.tsv, dev.tsv, test.tsv.")
        return files

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """Read the data from the files. A subclass for another source overrides only this.

        ``complain`` receives every problem of a record; unless it raises, the record is left out.
        """
        found, how = self._sources(), self._corpus_settings()
        if self.pairs:
            return read_pairs(
                found["pairs"], corpus=found["corpus"], columns=self._pair_columns, how=how, complain=complain
            )
        repeated, left_out = self.repeated_judgements, self._left_out
        if left_out is not None and how.holds(found["corpus"]):  # a store on disk also serves training
            how = replace(how, allow_empty=True)
        return read_parts(**found, how=how, complain=complain, repeated=repeated, left_out=left_out)

    def file_columns(self) -> dict[str, tuple[str, ...]]:
        """Return the columns of each file's first record, keyed by part."""
        return {name: open_records(path).columns() for name, path in _by_name(self._sources()).items()}

    def setup(self, stage: str | None = None) -> None:
        """Read, check and prepare the data, once; every process gets the same result."""
        _ = self.collection

    @property
    def pair_columns(self) -> PairColumns:
        """The column names of ``pairs``."""
        return self._pair_columns

    @property
    def collection(self) -> Collection:
        """The prepared data, read on first use."""
        if self._collection is None:
            everything = read = self.read_collection()
            if self.drop_queries_without_passage:
                read = preparation.drop_queries_without_passage(read)
            if self._left_out is None:
                read.check(allow_empty_passages=self.allow_empty_passages)
                read = preparation.with_units_without_rows(read, everything)
            else:
                read = self._left_out.checked(read, allow_empty_passages=self.allow_empty_passages)
            if self.lower_case_queries:
                read = preparation.lower_case_queries(read)
            if self.drop_overlap:
                read = preparation.drop_overlap(read)
            self._collection = preparation.sample(
                read,
                max_passages=self.max_passages,
                max_train_queries=self.max_train_queries,
                max_eval_queries=self.max_eval_queries,
                seed=self.seed,
            )
        return self._collection

    def measure(self, split: str) -> LeftOut:
        """Prepare to evaluate one split; return a record of what reading leaves out.

        Data read this way are never used for training.
        """
        self._left_out = LeftOut(SPLIT_NAMES.get(split, split))
        return self._left_out

    # -- the private side --------------------------------------------------------------------

    def train_on(self, query_ids: Container[str]) -> None:
        """Train on exactly these queries of all splits; move those of another split to train.

        For experiments that hold some queries out. Queries that were left out earlier are no longer in `collection`.
        """
        if self._batch_sampler is not None:
            raise ConfigurationError(
                "train_on: a sampler over other train queries is already attached. Call it before fit."
            )
        everything = self.collection
        chosen: dict[str, Mapping[str, int]] = {}
        rest: dict[str, dict[str, Mapping[str, int]]] = {}
        for split, qrels in everything.qrels.items():
            chosen |= {query: judged for query, judged in qrels.items() if query in query_ids}
            rest[split] = {query: judged for query, judged in qrels.items() if query not in query_ids}
        if not chosen:
            raise DataError(f"{everything.source} has none of the queries that train_on names.")
        self._collection, self._units = everything.with_qrels({**rest, "train": chosen}), None

    def use_unit(self, unit: TextUnit, neighbours: str | None = None) -> None:
        """Group the rows by ``unit`` (``privacy.unit``); called for the run's privacy mode before training.

        Refuse data settings that make the claim unsound under ``neighbours``.
        """
        if unit not in get_args(TextUnit):
            raise ConfigurationError(
                f"privacy.unit={unit}: rows of texts are grouped by {', '.join(get_args(TextUnit))}. "
                "Choose one of them."
            )
        if unit == "pair" and (self.max_passages is not None or self.drop_overlap):
            raise ConfigurationError(
                "privacy.unit=pair cannot go with datamodule.max_passages or datamodule.drop_overlap: they drop rows "
                "by their content, and the number of pairs would reveal it. Set privacy.unit=query, or unset them."
            )
        if self.drop_overlap and (unit == "user" or neighbours == "add_or_remove"):
            setting = "privacy.unit=user" if unit == "user" else "privacy.neighbours=add_or_remove"
            raise ConfigurationError(
                f"datamodule.drop_overlap=true cannot go with {setting}: evaluation queries decide which train queries "
                "stay, so adding or removing one changes the rows of other units. Set datamodule.drop_overlap=false, "
                "or set privacy.unit=query with privacy.neighbours=zero_out, where evaluation queries are not "
                "protected."
            )
        several = f"privacy.unit={unit}" if unit != "query" else None
        if self.duplicates == "merge":
            several = several or "datamodule.duplicates=merge"
        self._refuse_sample(neighbours, "max_train_queries", several=several)
        if unit != self._unit:
            if self._batch_sampler is not None:
                raise ConfigurationError(
                    f"privacy.unit={unit}, but an earlier fit gave this DataModule a sampler over units of "
                    f"{self._unit}. Give each fit its own DataModule."
                )
            self._unit, self._units = unit, None

    @property
    def unit_by(self) -> str | None:
        """The rule that groups rows into a unit (`PrivacyBudget.unit_by`): each row, in a log of queries without ids;
        all rows of one user, named by its column if that was renamed.
        """
        if self._unit == "user" and self._pair_columns.user != PairColumns().user:
            return f"{ALL_OF_ONE}{self._pair_columns.user}"
        if self.duplicates == "merge" or self._unit != "query":
            return None
        by_ids = {"all": None, "some": PARTLY_NAMED, "none": EACH_ROW, "unknown": UNSAID}
        return by_ids[self.collection.query_ids]

    def train_units(self) -> GroupedUnitDataset:
        """Return the train split, one item per unit of privacy; built on first use, after `use_unit`."""
        if self._unit is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no unit of privacy yet. A run sets it from privacy.unit; without a run, "
                "call use_unit('query'), use_unit('pair') or use_unit('user')."
            )
        if self._units is None:
            self._units = GroupedUnitDataset(
                self.collection,
                unit=self._unit,
                duplicates=self.duplicates,
                max_rows_per_unit=self.max_rows_per_unit,
                planted=self._planted.units if self._planted else (),
            )
        return self._units

    def plant(self, planted: Planted) -> None:
        """Train on these units too; see `SampledDataModule.plant`. `collection` and `pair_rows` omit them."""
        planted.check(duplicates=self.duplicates, passages=self.collection.passages)
        super().plant(planted)
        self._units = None

    def _without_a_plan(self) -> str:
        return "for plain pairs in a custom loop, use pair_rows('train')"

    def assumptions(self) -> list[str]:
        """Return, for the card, what the settings exclude from the guarantee."""
        found = []
        if self.drop_overlap:
            found.append(
                "Evaluation queries are public: which train queries stay depends on them (datamodule.drop_overlap)."
            )
        if "text" in divisions_of(*query_places(self)):
            found.append(
                "The data set is the train split as it was given. The log was divided by a hash of its texts, so which "
                "records are in the train split, and how many, depends on private texts, and nothing covers that."
            )
        return found

    def data_fingerprint(self, key: bytes, *, planted: bool = True) -> str:
        """Return a keyed fingerprint of everything training reads, so that a resumed run detects changed data.

        ``key`` is the run's privacy secret; without it the fingerprint reveals nothing about the data. The fingerprint
        covers passages, train queries, users, qrels and their grouping, but not evaluation data. It covers planted
        units unless ``planted`` is false.
        """
        content = self.collection.fingerprint(key)
        grouping = f"{content} duplicates={self.duplicates} max_rows_per_unit={self.max_rows_per_unit}"
        if planted and self._planted is not None:
            grouping += f" planted={self._planted.fingerprint(key)}"
        return hmac.new(key, grouping.encode(), digestmod="sha256").hexdigest()

    def report_overlap(self) -> dict[str, preparation.Overlap]:
        """Count the overlap of each evaluation split with train; private numbers, do not log them."""
        return preparation.report_overlap(self.collection)

    # -- the public and the evaluation side --------------------------------------------------

    @property
    def has_public_passages(self) -> bool:
        """Whether the list of passages is public: false if it comes from private records alone."""
        return not self.pairs or bool(self.corpus) or self.passages_are_public

    def public_passages(self) -> Mapping[str, str]:
        """Return the declared public list of passages, text by id; it depends on no query.

        The list is sorted by id, because the order in which a log names its passages is not part of their public list.
        A corpus that is read from disk (`PassageStore`) keeps its own order.
        """
        if not self.has_public_passages:
            raise self._no_public_list("This step")
        passages = self.collection.passages
        return passages if isinstance(passages, PassageStore) else dict(sorted(passages.items()))

    def evaluation_set(self, split: str = "test") -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """Return queries and graded qrels of one split, for the evaluator."""
        qrels = {query: dict(judged) for query, judged in self.collection.split(split).items()}
        return {query: self.collection.queries[query] for query in qrels}, qrels

    def pair_rows(self, split: str = "train") -> list[Row]:
        """Return every (query, positive passage) row of a split, for training or probing without privacy."""
        units = GroupedUnitDataset(self.collection, unit="query", split=split)
        return [row for unit in range(len(units)) for row in units.rows(unit)]


def _by_name(found: Mapping[str, Any]) -> dict[str, str | Path | Shards]:
    """Return files by the setting that names each; those of ``qrels`` become ``qrels.train`` and so on."""
    plain = {name: path for name, path in found.items() if name not in ("qrels", "source") and path}
    return plain | {f"qrels.{split}": path for split, path in found.get("qrels", {}).items()}
