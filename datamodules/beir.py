"""A BEIR set by name: read from a folder, evaluated by the protocol of that set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_dpret.datamodules.beir_sets import BeirSet, beir_set
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import Repeated, find_part, folder_parts
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.readers import Complain, ir_records, refuse
from lit_dpret.errors import ConfigurationError, DataError


@dataclass(kw_only=True, eq=False, repr=False)
class BeirDataModule(PairsDataModule):
    """One public BEIR set, from ``root/NAME`` or ``root`` itself.

    Guarantees:
        - `evaluation_split` is the split that BEIR evaluates, `drops_self_matches` whether a query's own passage is
          left out of its ranking.
        - A set that is not the published one (a sample, another version, another split) is reported in a warning.

    Args:
        name: BEIR's name of the set, as ``scifact`` or ``cqadupstack/unix``, or the papers' short one.
        root: The folder that holds the set's folder, or that folder itself.
        download: Take the evaluation split from ir-datasets (extra ``beir``) instead, which downloads what it does
            not have yet. There is no train split then.
        only_evaluation: Read only the split that is evaluated; train queries of large sets take their time.
        allow_empty_passages: As for `PairsDataModule`, and true unless set, for several sets have some.
    """

    name: str
    root: str | Path | None = None
    download: bool = False
    only_evaluation: bool = False
    allow_empty_passages: bool = True

    def __post_init__(self) -> None:
        self.set = beir_set(self.name)
        if self.set.members:
            raise ConfigurationError(
                f"datamodule.name={self.name} is the mean of {len(self.set.members)} sets: choose one of them, as "
                f"datamodule.name={self.set.members[0]}, or task=zero_shot, which takes the mean."
            )
        if (self.root is None) == (not self.download):
            raise ConfigurationError(
                f"datamodule.root={self.root} and datamodule.download={str(self.download).lower()}: name the folder "
                f"that holds {self.set.name}, or let download=true fetch it, and not both."
            )
        self.drop_queries_without_passage = True
        self.folder = self.set.source if self.root is None else self.root
        super().__post_init__()

    @property
    def evaluation_split(self) -> str:
        """The split that BEIR evaluates on."""
        return self.set.split

    @property
    def drops_self_matches(self) -> bool:
        """Whether a passage with the query's own id is excluded from its ranking."""
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
        """Read the set from its folder, or from ir-datasets."""
        if self.download:
            return _from_ir_datasets(self.set, self.repeated_judgements)
        return super().read_collection(complain)

    def evaluation_set(self, split: str | None = None) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """Return queries and graded qrels of one split, by default BEIR's; warn about any other.

        Raises:
            DataError: There is no such split; the message lists those there are.
        """
        split = split or self.set.split
        queries, qrels = super().evaluation_set(split)
        if found := self.departures(split, qrels):
            rank_zero_warn(f"{self.set.name}: {'; '.join(found)}. Scores are not comparable with published ones.")
        return queries, qrels

    def departures(self, split: str, qrels: dict[str, dict[str, int]]) -> list[str]:
        """Return how this split and these judgements differ from BEIR's protocol, one phrase each."""
        if split != self.set.split:
            return [f"split {split}, where BEIR evaluates {self.set.split}"]
        found = self.set.departures(
            passages=len(self.collection.passages), queries=len(qrels), judgements=sum(map(len, qrels.values()))
        )
        return [*found, *([self.set.note] if found and self.set.note else [])]


def beir_folder(root: str | Path, wanted: BeirSet) -> Path | None:
    """Return the folder of a set under ``root``, or ``root`` itself if it is one; None without one."""
    places = [Path(root) / wanted.name, Path(root)]
    return next((place for place in places if place.is_dir() and find_part(place, "corpus") is not None), None)


def _from_ir_datasets(wanted: BeirSet, repeated: Repeated) -> Collection:
    docs = ir_records(wanted.source, "docs")
    passages = {doc.doc_id: f"{getattr(doc, 'title', '')} {doc.text}".strip() for doc in docs}
    queries = {query.query_id: query.text for query in ir_records(wanted.source, "queries")}
    qrels: dict[str, dict[str, int]] = {}
    for judged in ir_records(wanted.source, "qrels"):
        grades, grade = qrels.setdefault(judged.query_id, {}), int(judged.relevance)
        if (known := grades.get(judged.doc_id)) is not None:
            if repeated == "refuse":
                raise DataError(
                    f"{wanted.source}: query {judged.query_id!r} and passage {judged.doc_id!r} are judged twice, "
                    f"{known} and {grade}. Set datamodule.repeated_judgements to highest, first or last."
                )
            grade = {"highest": max(known, grade), "first": known, "last": grade}[repeated]
        grades[judged.doc_id] = grade
    return Collection(
        passages=passages, queries=queries, qrels={wanted.split: qrels}, query_ids="all", source=wanted.source
    )
