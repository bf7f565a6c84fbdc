"""All silos as one: what a central party could train on, the upper bound that a federation is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lit_dpret.datamodules.silo_folder import Silo


def merged_silo(silos: Sequence[Silo], *, name: str = "central") -> Silo:
    """The union of the silos; ids carry the client's name, since two clients may use one id."""

    def of(client: str, found: str) -> str:
        return f"{client}.{found}"

    return Silo(
        name,
        {of(one.name, pid): title for one in silos for pid, title in one.passages.items()},
        {of(one.name, sid): text for one in silos for sid, text in one.sentences.items()},
        {of(one.name, sid): of(one.name, pid) for one in silos for sid, pid in one.passage_of.items()},
        [
            replace(query, qid=of(one.name, query.qid), positives=tuple(of(one.name, sid) for sid in query.positives))
            for one in silos
            for query in one.queries
        ],
    )
