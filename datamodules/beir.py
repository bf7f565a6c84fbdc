"""A BEIR set by name: read from a folder, evaluated by the protocol of that set.

The traps are BEIR's own (Thakur et al., 2021): MS MARCO is evaluated on ``dev``; in ArguAna and Quora every query is
itself a passage; CQADupStack is the mean over twelve forums; Touché was re-judged, and the numbers of its versions are
not comparable. The counts, from ir-datasets 0.6.3, distinguish a whole set from a sample and one version from another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import Repeated, find_part, folder_parts
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.readers import ir_records
from lit_dpret.datamodules.records import Complain, refuse
from lit_dpret.errors import ConfigurationError, DataError


@dataclass(frozen=True, kw_only=True)
class BeirSet:
    """The protocol by which BEIR evaluates one data set."""

    name: str  # BEIR's name, also the name of the folder that its archive unpacks to
    split: str = "test"  # the split that is evaluated
    passages: int = 0  # number of passages; 0 for the mean of several sets
    queries: int = 0  # number of queries in that split
    judgements: int = 0  # number of judgements in that split, including those of grade 0
    drops_self_matches: bool = False  # whether a passage with the query's own id is left out of its ranking
    members: tuple[str, ...] = ()  # for a set that is a mean, the averaged sets; empty for a set with files of its own
    source: str = ""  # its name in ir-datasets; empty if it has none
    note: str = ""  # caveats for readers of a score

    def departures(self, *, passages: int, queries: int, judgements: int) -> list[str]:
        """Return how these numbers differ from those of the published set, one phrase each; empty for the whole set."""
        found = {"passages": passages, "queries": queries, "judgements": judgements}
        wanted = {"passages": self.passages, "queries": self.queries, "judgements": self.judgements}
        return [
            f"{value:,} {name} instead of {wanted[name]:,}"
            for name, value in found.items()
            if wanted[name] and value != wanted[name]
        ]


def _set(name: str, passages: int, queries: int, judgements: int, source: str = "", **more: Any) -> BeirSet:
    return BeirSet(
        name=name, passages=passages, queries=queries, judgements=judgements, source=f"beir/{source or name}", **more
    )


_FORUMS = tuple(
    _set(f"cqadupstack/{forum}", passages, queries, judgements)
    for forum, passages, queries, judgements in (
        ("android", 22_998, 699, 1_696),
        ("english", 40_221, 1_570, 3_765),
        ("gaming", 45_301, 1_595, 2_263),
        ("gis", 37_637, 885, 1_114),
        ("mathematica", 16_705, 804, 1_358),
        ("physics", 38_316, 1_039, 1_933),
        ("programmers", 32_176, 876, 1_675),
        ("stats", 42_269, 652, 913),
        ("tex", 68_184, 2_906, 5_154),
        ("unix", 47_382, 1_072, 1_693),
        ("webmasters", 17_405, 506, 1_395),
        ("wordpress", 48_605, 541, 744),
    )
)

_SETS = (
    _set("msmarco", 8_841_823, 6_980, 7_437, "msmarco/dev", split="dev",
         note="evaluated on dev; its test split is 43 TREC-DL queries, whose scores are not comparable"),
    _set("trec-covid", 171_332, 50, 66_336),
    _set("nfcorpus", 3_633, 323, 12_334, "nfcorpus/test"),
    _set("nq", 2_681_468, 3_452, 4_201),
    _set("hotpotqa", 5_233_329, 7_405, 14_810, "hotpotqa/test"),
    _set("fiqa", 57_638, 648, 1_706, "fiqa/test"),
    _set("arguana", 8_674, 1_406, 1_406, drops_self_matches=True),
    _set("webis-touche2020", 382_545, 49, 2_214, "webis-touche2020/v2",
         note="version 2 of the judgements; 2,962 judgements would be version 1, whose scores differ"),
    BeirSet(name="cqadupstack", members=tuple(one.name for one in _FORUMS), note="mean of twelve forums"),
    *_FORUMS,
    _set("quora", 522_931, 10_000, 15_675, "quora/test", drops_self_matches=True),
    _set("dbpedia-entity", 4_635_922, 400, 43_515, "dbpedia-entity/test"),
    _set("scidocs", 25_657, 1_000, 29_928),
    _set("fever", 5_416_568, 6_666, 7_937, "fever/test"),
    _set("climate-fever", 5_416_593, 1_535, 4_681),
    _set("scifact", 5_183, 300, 339, "scifact/test"),
)  # fmt: skip

BEIR_SETS: dict[str, BeirSet] = {one.name: one for one in _SETS}

_ALIASES = {
    "cqadup": "cqadupstack", "dbpedia": "dbpedia-entity", "hotpot": "hotpotqa", "covid": "trec-covid",
    "touche": "webis-touche2020", "touche2020": "webis-touche2020", "ms-marco": "msmarco",
    "fiqa-2018": "fiqa",
}  # fmt: skip


def beir_set(name: str) -> BeirSet:
    """Return the set of this name, in any letter case; the papers' short names work too.

    Example:
        >>> beir_set("covid").name, beir_set("msmarco").split, beir_set("Quora").drops_self_matches
        ('trec-covid', 'dev', True)
    """
    key = name.strip().lower()
    found = BEIR_SETS.get(_ALIASES.get(key, key))
    if found is None:
        known = ", ".join(one for one in BEIR_SETS if "/" not in one)
        raise ConfigurationError(
            f"datamodule.name={name!r} is neither a public BEIR set ({known}) nor a forum such as cqadupstack/unix. "
            "For another collection in BEIR's layout use datamodule=pairs datamodule.folder=FOLDER."
        )
    return found


@dataclass(kw_only=True, eq=False, repr=False)
class BeirDataModule(PairsDataModule):
    """One public BEIR set, from ``root/NAME`` or ``root`` itself.

    Guarantees:
        - `evaluation_split` is the split that BEIR evaluates; `drops_self_matches` says whether a query's own passage
          is left out of its ranking.
        - A set that is not the published one (a sample, another version, another split) is reported in a warning.

    Args:
        name: BEIR's name of the set, such as ``scifact`` or ``cqadupstack/unix``, or the papers' short name.
        root: The folder that contains the set's folder, or that folder itself.
        download: Take the evaluation split from ir-datasets (extra ``beir``) instead, which downloads missing files.
            There is no train split then.
        only_evaluation: Read only the evaluated split; train queries of large sets take long to read.
        allow_empty_passages: As for `PairsDataModule`, but true by default, because several sets have empty passages.
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
                f"datamodule.name={self.name} is the mean of {len(self.set.members)} sets: choose one of them, such "
                f"as datamodule.name={self.set.members[0]}, or run task=zero_shot, which computes the mean."
            )
        if (self.root is None) == (not self.download):
            raise ConfigurationError(
                f"datamodule.root={self.root or 'null'} and datamodule.download={str(self.download).lower()}: set "
                f"exactly one, datamodule.root to the folder that holds {self.set.name}, or datamodule.download=true "
                "to fetch it."
            )
        self.drop_queries_without_passage = True
        self.folder = self.set.source if self.root is None else beir_folder(self.root, self.set) or self.root
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
                "nor the folder itself has a corpus. Unpack BEIR's archive there, or set datamodule.root=null "
                "datamodule.download=true (needs the extra beir and a network)."
            )
        found = folder_parts(folder)
        if self.only_evaluation:
            found["qrels"] = {split: path for split, path in found["qrels"].items() if split == self.set.split}
        if self.set.split not in found["qrels"]:
            raise DataError(
                f"{folder} has no qrels of {self.set.split}, the split that BEIR evaluates. Unpack all of BEIR's "
                "archive, or read the folder with datamodule=pairs."
            )
        return found

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """Read the set from its folder, or from ir-datasets."""
        if self.download:
            return _from_ir_datasets(self.set, self.repeated_judgements)
        return super().read_collection(complain)

    def evaluation_set(self, split: str | None = None) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """Return queries and graded qrels of one split, by default BEIR's; warn about any other.

        Raises:
            DataError: There is no such split; the message lists the existing ones.
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
    """Return the folder of a set under ``root``, or ``root`` itself if it is one; None if there is none."""
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
                    f"with grades {known} and {grade}. Set datamodule.repeated_judgements to highest, first or last."
                )
            grade = {"highest": max(known, grade), "first": known, "last": grade}[repeated]
        grades[judged.doc_id] = grade
    return Collection(
        passages=passages, queries=queries, qrels={wanted.split: qrels}, query_ids="all", source=wanted.source
    )
