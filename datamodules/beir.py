"""A BEIR set by its name: from a folder, evaluated by the protocol that its name implies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_dpret.datamodules.beir_sets import BeirSet, beir_set
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.complaints import Complain, refuse
from lit_dpret.datamodules.corpus import InMemory
from lit_dpret.datamodules.ir_source import ir_datasets_library
from lit_dpret.datamodules.layouts import find_part, folder_parts
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.readers import one_line
from lit_dpret.datamodules.records import Duplicates
from lit_dpret.datamodules.sampled import PhysicalBatchSize, RowsPerUnit, SamplingName
from lit_dpret.errors import ConfigurationError, DataError


class BeirDataModule(PairsDataModule):
    """One public BEIR set, out of ``root/NAME`` or of ``root`` itself.

    Guarantees:
        - Nothing is ever downloaded unless ``download=true`` asks for it.
        - `evaluation_split` is the split that BEIR evaluates, `drops_self_matches` whether a query's own passage
          is left out of its ranking.
        - A set that is not the published one (a sample, another version, another split) is told in a warning.

    Args:
        name: BEIR's name of the set, as ``scifact`` or ``cqadupstack/unix``, or the papers' short one.
        root: The folder that holds the set's folder, or that folder itself.
        download: Take the evaluation split from ir-datasets (extra ``beir``) instead, which downloads what it does not
            have yet. There is no train split then.
        only_evaluation: Read only the split that is evaluated; train queries of large sets take their time.
        allow_empty_passages: Accept passages without any text; several sets have some.

    The other arguments are those of `PairsDataModule`.

    Raises:
        ConfigurationError: The name is unknown or stands for several sets, or neither or both of ``root`` and
            ``download`` are given.
    """

    def __init__(
        self,
        *,
        name: str,
        root: str | Path | None = None,
        download: bool = False,
        only_evaluation: bool = False,
        lower_case_queries: bool = False,
        sampling: SamplingName = "truncated_poisson",
        expected_batch_size: int | None = None,
        sample_rate: float | None = None,
        physical_batch_size: PhysicalBatchSize = 32,
        cap: int | None = None,
        rows_per_unit: RowsPerUnit = "one",
        duplicates: Duplicates = "keep",
        max_rows_per_unit: int | None = None,
        drop_overlap: bool = False,
        allow_empty_passages: bool = True,
        in_memory: InMemory = "auto",
        cache_dir: str | Path | None = None,
        max_passages: int | None = None,
        max_train_queries: int | None = None,
        max_eval_queries: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        self.set = beir_set(name)
        if self.set.members:
            raise ConfigurationError(
                f"datamodule.name={name} is the mean of {len(self.set.members)} sets: choose one of them, as "
                f"datamodule.name={self.set.members[0]}, or task=zero_shot, which takes the mean."
            )
        if (root is None) == (not download):
            raise ConfigurationError(
                f"datamodule.root={root} and datamodule.download={str(download).lower()}: name the folder that holds "
                f"{self.set.name}, or let download=true fetch it, and not both."
            )
        self.root, self.download, self.only_evaluation = root, download, only_evaluation
        super().__init__(
            folder=self.set.source if root is None else root,
            lower_case_queries=lower_case_queries,
            sampling=sampling,
            expected_batch_size=expected_batch_size,
            sample_rate=sample_rate,
            physical_batch_size=physical_batch_size,
            cap=cap,
            rows_per_unit=rows_per_unit,
            duplicates=duplicates,
            max_rows_per_unit=max_rows_per_unit,
            drop_overlap=drop_overlap,
            drop_queries_without_passage=True,
            allow_empty_passages=allow_empty_passages,
            in_memory=in_memory,
            cache_dir=cache_dir,
            max_passages=max_passages,
            max_train_queries=max_train_queries,
            max_eval_queries=max_eval_queries,
            seed=seed,
            num_workers=num_workers,
        )

    @property
    def evaluation_split(self) -> str:
        """The split that BEIR evaluates."""
        return self.set.split

    @property
    def drops_self_matches(self) -> bool:
        """Whether a passage with the query's own id is left out of its ranking."""
        return self.set.drops_self_matches

    def _sources(self) -> dict[str, Any]:
        if self.download:
            return {}
        folder = beir_folder(str(self.root), self.set)
        if folder is None:
            raise DataError(
                f"datamodule.root={self.root} holds no {self.set.name}: neither {Path(str(self.root)) / self.set.name} "
                "nor the folder itself has a corpus. Unpack BEIR's archive there, or set datamodule.download=true "
                "(extra beir, a network)."
            )
        found = folder_parts(folder)
        if self.only_evaluation:
            found["qrels"] = {split: path for split, path in found["qrels"].items() if split == self.set.split}
        if self.set.split not in found["qrels"]:
            raise DataError(f"{folder} has no qrels of {self.set.split}, the split that BEIR evaluates.")
        return found

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """The set as it stands in its folder, or in ir-datasets."""
        return _from_ir_datasets(self.set) if self.download else super().read_collection(complain)

    def evaluation_set(self, split: str | None = None) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """Queries and graded qrels of one split, by default the one that BEIR evaluates; warns about any other.

        Raises:
            DataError: There is no such split; the message lists those there are.
        """
        split = split or self.set.split
        queries, qrels = super().evaluation_set(split)
        if told := self.departures(split, qrels):
            rank_zero_warn(f"{self.set.name}: {'; '.join(told)}. Scores are not comparable with published ones.")
        return queries, qrels

    def departures(self, split: str, qrels: dict[str, dict[str, int]]) -> list[str]:
        """What about this split and these judgements is not BEIR's protocol, one phrase each."""
        if split != self.set.split:
            return [f"split {split}, where BEIR evaluates {self.set.split}"]
        found = self.set.departures(
            passages=len(self.collection.passages), queries=len(qrels), judgements=sum(map(len, qrels.values()))
        )
        return [*found, *([self.set.note] if found and self.set.note else [])]


def beir_folder(root: str | Path, wanted: BeirSet) -> Path | None:
    """The folder of a set under ``root``, or ``root`` itself where it is one; None where there is none."""
    places = [Path(root) / wanted.name, Path(root)]
    return next((place for place in places if place.is_dir() and find_part(place, "corpus") is not None), None)


def _from_ir_datasets(wanted: BeirSet) -> Collection:
    """The evaluation split out of ir-datasets, which keeps what it has downloaded and checks its hashes."""
    library = ir_datasets_library()
    try:
        found = library.load(wanted.source)
        passages = {doc.doc_id: f"{getattr(doc, 'title', '')} {doc.text}".strip() for doc in found.docs_iter()}
        queries = {query.query_id: query.text for query in found.queries_iter()}
        qrels: dict[str, dict[str, int]] = {}
        for judged in found.qrels_iter():
            qrels.setdefault(judged.query_id, {})[judged.doc_id] = int(judged.relevance)
    except Exception as error:  # of whichever kind: a network, a disk, a hash that differs
        raise DataError(f"ir-datasets could not give {wanted.source}: {one_line(error)}") from error
    return Collection(passages=passages, queries=queries, qrels={wanted.split: qrels}, source=wanted.source)
