"""MS MARCO passage ranking from its own files: TSV without headers, and a collection of 8.8 million passages.

Nguyen et al., "MS MARCO: A Human Generated MAchine Reading COmprehension Dataset", 2016. The published numbers are
MRR@10 on the 6,980 queries of ``dev.small``; there is no test split with judgements. docs/data.md names the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import CorpusSettings, find_part, open_corpus, read_qrels, read_queries
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.passage_store import build_store, cached_store
from lit_dpret.datamodules.readers import ir_records
from lit_dpret.datamodules.records import Complain, refuse
from lit_dpret.errors import ConfigurationError, DataError

Dev = Literal["small", "full"]

_SOURCE = "msmarco-passage"
_SUFFIXES = (".tsv", ".tsv.gz", ".tsv.zst")
_TEXT_COLUMNS = ("id", "text")
_QRELS_COLUMNS = ("query_id", "iteration", "passage_id", "grade")


@dataclass(kw_only=True, eq=False, repr=False)
class MSMarcoDataModule(PairsDataModule):
    """MS MARCO passage ranking: ``train`` and ``dev``. The collection is copied once into a store on disk.

    Args:
        folder: The folder with the files.
        download: Take the data from ir-datasets instead (extra ``beir``), which downloads missing files and checks
            their hashes.
        dev: Which development queries: ``small``, on which numbers are published, or ``full``.
        only_evaluation: Read no train queries.
    """

    evaluation_split = "dev"

    download: bool = False
    dev: Dev = "small"
    only_evaluation: bool = False

    def __post_init__(self) -> None:
        if (self.folder is None) == (not self.download):
            raise ConfigurationError(
                f"datamodule.folder={self.folder or 'null'} and datamodule.download={str(self.download).lower()}: set "
                "exactly one, datamodule.folder to the folder with MS MARCO's files, or datamodule.download=true to "
                "fetch them."
            )
        self.folder = self.folder or _SOURCE
        super().__post_init__()
        self._check_choices(dev=Dev)

    def prepare_data(self) -> None:
        """Check that the files exist, or download them if asked for, and store the collection."""
        if self.download:
            self.read_collection()
            return
        self._store(self._sources()["collection"], self._corpus_settings())

    def _corpus_settings(self) -> CorpusSettings:
        return replace(super()._corpus_settings(), knob="datamodule.folder", header=_TEXT_COLUMNS)

    def _splits(self) -> dict[str, str]:
        """Return the splits' names in the files; ir-datasets uses a slash instead of the dot."""
        dev = {"dev": "dev.small" if self.dev == "small" else "dev"}
        return dev if self.only_evaluation else {"train": "train", **dev}

    def _sources(self) -> dict[str, Any]:
        if self.download:
            return {}
        root = Path(str(self.folder))
        if not root.is_dir():
            raise DataError(f"{root} does not exist or is not a folder; check datamodule.folder.", kind="missing file")
        names = {"collection": "collection"}
        names |= {
            f"{part}.{split}": f"{part}.{name}"
            for split, name in self._splits().items()
            for part in ("queries", "qrels")
        }
        found = {part: find_part(root, name, _SUFFIXES) for part, name in names.items()}
        if missing := [f"{names[part]}.tsv" for part, path in found.items() if path is None]:
            other = next(value for value in get_args(Dev) if value != self.dev)
            raise DataError(
                f"{root} lacks {', '.join(missing)} (or .gz, .zst); it holds: "
                f"{', '.join(sorted(path.name for path in root.iterdir())) or 'nothing'}. "
                f"datamodule.dev={other} reads the other development queries; datamodule.only_evaluation=true reads no "
                "train queries.",
                kind="missing file",
            )
        return found

    def file_columns(self) -> dict[str, tuple[str, ...]]:
        """Return the fixed columns of the files, which have no headers."""
        return {part: _QRELS_COLUMNS if part.startswith("qrels") else _TEXT_COLUMNS for part in self._sources()}

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """Read the data from the files, without queries that have no judgement."""
        if self.download:
            return self._downloaded()
        files = self._sources()
        passages = open_corpus(files["collection"], self._corpus_settings(), complain=complain)
        queries: dict[str, str] = {}
        qrels: dict[str, dict[str, dict[str, int]]] = {}
        for split in self._splits():
            asked = read_queries(files[f"queries.{split}"], header=_TEXT_COLUMNS, complain=complain)
            qrels[split] = read_qrels(
                files[f"qrels.{split}"],
                passages=passages.texts,
                queries=asked.texts,
                header=_QRELS_COLUMNS,
                complain=complain,
                repeated=self.repeated_judgements,
            )
            for query_id in qrels[split]:
                if queries.setdefault(query_id, asked.texts[query_id]) != asked.texts[query_id]:
                    complain(
                        DataError(
                            f"{files[f'queries.{split}']}: query {query_id!r} has another text in the train split.",
                            kind="query with two texts",
                        )
                    )
        return Collection(
            passages=passages.texts, queries=queries, qrels=qrels, query_ids="all", source=str(self.folder)
        )

    def _downloaded(self) -> Collection:
        def build(draft: Path) -> bool:
            build_store(draft, passages(), _refuse_repeated)
            return True

        def passages() -> Iterator[tuple[str, str]]:
            return ((doc.doc_id, doc.text) for doc in ir_records(_SOURCE, "docs"))

        texts: Mapping[str, str]
        if self.in_memory is True:
            texts = dict(passages())
        else:
            texts = cached_store(f"{_SOURCE}-ir-datasets", build, self.cache_dir)
        queries: dict[str, str] = {}
        qrels: dict[str, dict[str, dict[str, int]]] = {}
        for split, theirs in self._splits().items():
            source = f"{_SOURCE}/{theirs.replace('.', '/')}"
            judged = qrels.setdefault(split, {})
            for row in ir_records(source, "qrels"):
                judged.setdefault(row.query_id, {})[row.doc_id] = int(row.relevance)
            queries |= {r.query_id: r.text for r in ir_records(source, "queries") if r.query_id in judged}
        return Collection(passages=texts, queries=queries, qrels=qrels, query_ids="all", source=_SOURCE)


def _refuse_repeated(passage_id: str) -> None:
    raise DataError(f"{_SOURCE}: id {passage_id!r} was already given.", kind="repeated id")
