"""One client of a federation as a DataModule: the passages for its queries are its sentences."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.records import Complain, refuse
from lit_dpret.datamodules.silo_folder import Silo, read_silo


@dataclass(kw_only=True, eq=False, repr=False)
class SiloDataModule(PairsDataModule):
    """The folder of one client, ``.../clients/NAME`` (`lit_dpret.datamodules.silo_folder`).

    *Public passages* has the meaning here that the guarantee needs: the client's collection is a fixed list that
    depends on no query. It stays inside the client; `lit_dpret.federated` decides, and accounts for, which parts are
    sent elsewhere.
    """

    folder: str | Path = field()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._silo: Silo | None = None

    @property
    def silo(self) -> Silo:
        """The content of the folder, read on first use."""
        if self._silo is None:
            self._silo = read_silo(str(self.folder))
        return self._silo

    def _sources(self) -> dict[str, Any]:
        return {"silo": Path(str(self.folder))}

    def file_columns(self) -> dict[str, tuple[str, ...]]:
        """Return the keys that are read, by file."""
        return {"sentences": ("sid", "pid", "text"), "queries": ("qid", "text", "pos_sids", "split")}

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """Read sentences as passages, with grade 1 for the queries that they answer."""
        silo = self.silo if complain is refuse else read_silo(str(self.folder), complain=complain)
        qrels: dict[str, dict[str, dict[str, int]]] = {}
        for query in silo.queries:
            qrels.setdefault(query.split, {})[query.qid] = dict.fromkeys(query.positives, 1)
        return Collection(
            passages=dict(silo.sentences),
            queries={query.qid: query.text for query in silo.queries},
            qrels=qrels,
            passage_domains=dict.fromkeys(silo.sentences, silo.name),
            query_ids="all",
            source=str(self.folder),
        )
