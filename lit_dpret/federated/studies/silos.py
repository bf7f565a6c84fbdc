"""Silos of a study, made of those of a federation: fewer train queries, other sizes, more clients."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lit_dpret.datamodules.records import SPLITS
from lit_dpret.datamodules.silo_folder import Silo, SiloQuery, read_silo, silo_folders, write_silos
from lit_dpret.errors import DataError
from lit_dpret.federated.studies.point import AS_THEY_ARE, SiloChange
from lit_dpret.federated.synthetic import PUBLIC
from lit_dpret.negatives.base import coins


def changed_silos(base: Mapping[str, Path], change: SiloChange, folder: Path, *, seed: int) -> dict[str, Path]:
    """The data folder of each client after a change; those of ``base`` where there is none.

    Guarantees:
        - Collections stay as they are, and so do dev and test queries unless silos are divided.
        - What is declared public (`PUBLIC`) stays so.

    Args:
        base: The data folder of each client.
        change: What is to be others.
        folder: Where they are written, once.
        seed: Of the draw; public.
    """
    if change == AS_THEY_ARE:
        return dict(base)
    if not folder.exists():
        shares = kept_shares(base, change, seed=seed)
        made: list[Silo] = []
        public: dict[str, Path] = {}
        for name, data in base.items():
            thinned = with_share(read_silo(data), shares[name], seed=seed)
            for part in divided(thinned, change.parts):
                made.append(part)
                public[part.name] = data / PUBLIC
        draft = folder.with_name(f".{folder.name}")
        shutil.rmtree(draft, ignore_errors=True)
        write_silos(draft, made, facts={"study": change.drawn(seed)}, knob="hydra.run.dir")
        for name, found in silo_folders(draft).items():
            if public[name].is_file():
                shutil.copyfile(public[name], found / PUBLIC)
        draft.rename(folder)
    return silo_folders(folder)


def kept_shares(base: Mapping[str, Path] | Sequence[str], change: SiloChange, *, seed: int) -> dict[str, float]:
    """The share of its train queries that each silo keeps."""
    names = list(base)
    places = coins(seed, "sizes of silos").permutation(len(names))
    last = max(1, len(names) - 1)
    return {name: change.share * change.skew ** -(int(place) / last) for name, place in zip(names, places, strict=True)}


def with_share(silo: Silo, share: float, *, seed: int) -> Silo:
    """A silo with so many of its train queries, rounded up; a smaller share lies in a larger one."""
    train = sorted((query for query in silo.queries if query.split == "train"), key=lambda one: _place(seed, one))
    kept = {query.qid for query in train[: math.ceil(round(share * len(train), 9))]}
    return replace(silo, queries=[query for query in silo.queries if query.split != "train" or query.qid in kept])


def divided(silo: Silo, parts: int) -> list[Silo]:
    """Silos with the queries of one dealt among them, split by split, each with its whole collection.

    Raises:
        DataError: There are fewer queries of a split than parts.
    """
    if parts == 1:
        return [silo]
    check_divisible(silo.name, silo.counts(), parts)
    dealt: dict[str, int] = {}
    for split in SPLITS:
        listed = sorted((query for query in silo.queries if query.split == split), key=lambda one: _place(0, one))
        dealt |= {query.qid: number % parts for number, query in enumerate(listed)}
    stem = silo.name[:58]
    return [
        replace(silo, name=f"{stem}.{part}", queries=[query for query in silo.queries if dealt[query.qid] == part])
        for part in range(parts)
    ]


def check_divisible(name: str, counts: Mapping[str, int], parts: int) -> None:
    """Refuse to divide a silo into parts of which one would have no query of a split.

    Raises:
        DataError: Naming the silo, the split and the knob.
    """
    split, count = min(((split, counts[split]) for split in SPLITS), key=lambda one: one[1])
    if count < parts:
        raise DataError(
            f"Client {name!r} has {count} {split} queries, and {parts} clients are to be made of it. Lower "
            "task.values, or take more queries of each split (federated.sample)."
        )


def sizes(silos: Mapping[str, Path]) -> Counter[str]:
    """The train queries of each client; as private as the queries."""
    return Counter({name: read_silo(folder, verify=False).counts()["train"] for name, folder in silos.items()})


def _place(seed: int, query: SiloQuery) -> str:
    return hashlib.sha256(f"{seed}/{query.qid}".encode()).hexdigest()
