"""Run points of studies and store them by what they depend on: what points or studies share is run once.

A cell is a point with a seed. Its name is a hash of its silos, model and settings, so equal cells need no declaration:
stage 1 of a study of stage 2 is one cell for all of its points, and a second study in the same folder finds it there.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.rows import SPLITS
from lit_dpret.datamodules.silo_folder import MANIFEST, Silo, SiloQuery, read_silo, silo_folders, write_silos
from lit_dpret.errors import DataError
from lit_dpret.federated.fitting import attempt_folder
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo_ledger import QUERY_LEDGER
from lit_dpret.federated.storage import copy_once, save_json
from lit_dpret.federated.synthetic import PUBLIC
from lit_dpret.federated.systems import SystemResult, as_lists, run_phase, spent_in, trained_alone
from lit_dpret.files import json_sha256
from lit_dpret.negatives.base import public_coins
from reproduction.federated.catalogue import AS_THEY_ARE, Point, SiloChange


def changed_silos(base: Mapping[str, Path], change: SiloChange, folder: Path, *, seed: int) -> dict[str, Path]:
    """Return the data folder of each client after a change, or those of ``base`` if nothing changes.

    Guarantees:
        - Collections are unchanged, and so are dev and test queries unless silos are divided.
        - What is declared public (`PUBLIC`) stays so.
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
    """Return the share of its train queries that each silo keeps."""
    names = list(base)
    places = public_coins(seed, "sizes of silos").permutation(len(names))
    last = max(1, len(names) - 1)
    return {name: change.share * change.skew ** -(int(place) / last) for name, place in zip(names, places, strict=True)}


def with_share(silo: Silo, share: float, *, seed: int) -> Silo:
    """Keep a share of a silo's train queries, rounded up; a smaller share is part of a larger one."""
    train = sorted((query for query in silo.queries if query.split == "train"), key=lambda one: _place(seed, one))
    kept = {query.qid for query in train[: math.ceil(round(share * len(train), 9))]}
    return replace(silo, queries=[query for query in silo.queries if query.split != "train" or query.qid in kept])


def divided(silo: Silo, parts: int) -> list[Silo]:
    """Divide the queries of a silo into several silos, split by split, each with the whole collection."""
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
    """Refuse to divide a silo if a part would have no query of a split."""
    split, count = min(((split, counts[split]) for split in SPLITS), key=lambda one: one[1])
    if count < parts:
        raise DataError(
            f"Client {name!r} has {count} {split} queries, too few for {parts} clients. Lower task.values, or "
            "take more queries of each split (federated.sample)."
        )


def sizes(silos: Mapping[str, Path]) -> Counter[str]:
    """Return the number of train queries of each client; as private as the queries."""
    return Counter({name: read_silo(folder, verify=False).counts()["train"] for name, folder in silos.items()})


def _place(seed: int, query: SiloQuery) -> str:
    return hashlib.sha256(f"{seed}/{query.qid}".encode()).hexdigest()


_STAGE_2 = ("customised", "fed_negative")


_KEPT_OF_STAGE_1 = ("stage1-*.safetensors", "optimizer-*.pt")  # every round of every silo: not needed to continue


class Cells:
    """A runner of points that runs each once per seed.

    Guarantees:
        - A finished cell is not run again, whichever study asks for it; an interrupted one continues.
        - Stage 1 is run once for all cells that differ only in stage 2, unless there is a budget: its noise then
          depends on what else is planned.
    """

    def __init__(self, plan: FederationPlan, base: Mapping[str, Path], folder: Path, *, split: str) -> None:
        self.plan, self.base, self.folder, self.split = plan, dict(base), folder, split
        self._data = {name: _contents(data) for name, data in self.base.items()}

    def is_done(self, point: Point, seed: int) -> bool:
        return self._result_path(point, seed).is_file()

    def result(self, point: Point, seed: int) -> SystemResult:
        """Return the result of a cell, running it if it is not finished."""
        path = self._result_path(point, seed)
        if not path.is_file():
            began = time.process_time()
            found = self._run(point, seed)
            found.cpu_seconds = time.process_time() - began
            save_json(path, asdict(found))
        return SystemResult(**json.loads(path.read_text(encoding="utf-8")))

    def _result_path(self, point: Point, seed: int) -> Path:
        return self.folder / "results" / f"{point.system}-{self._key(point, seed)}.json"

    def _run(self, point: Point, seed: int) -> SystemResult:
        silos = self.silos(point, seed)
        settings = point.settings(self.plan.settings(seed))
        state = self.folder / "state" / f"{point.system}-{self._key(point, seed)}"
        if point.system == "stage1":
            found = self._stage1(settings, silos, point, seed)
        elif point.system in _STAGE_2:
            self._stage1(settings, silos, point, seed)
            copy_once(self._stage1_folder(settings, point, seed) / "state", state)
            found = run_phase(self.plan, settings, silos, state, "stage2", split=self.split)
        else:
            measured = trained_alone(point.system, settings, silos, self.plan.model, state, split=self.split)
            found = SystemResult(as_lists(measured))
        self._keep_ledgers(state)
        shutil.rmtree(state, ignore_errors=True)
        return found

    def _keep_ledgers(self, state: Path) -> None:
        """Move the ledgers of a finished state aside: what was released about a silo outlasts its files."""
        aside = attempt_folder(self.folder / "ledgers" / state.name)  # never overwrites those of an earlier try
        for path in sorted(state.glob("silos/*/private/silo_ledger.*.jsonl")):
            kept = aside / path.relative_to(state)
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.rename(kept)

    def spent(self, *, ledger: str = QUERY_LEDGER) -> dict[str, float]:
        """Return by client the joint cost of all private runs of all studies in this folder, each counted once."""
        kept = [*self.folder.glob("ledgers/*/attempt-*"), *self.folder.glob("state/shared-*/state")]
        running = [path for path in self.folder.glob("state/*") if not path.name.startswith((".", "shared-"))]
        # The queries of a divided client are in one of its parts at each point, so everything that its parts released
        # counts for each query.
        return spent_in(
            [*kept, *running], accountant=self.plan.privacy.accountant, ledger=ledger, client=self._client_of
        )

    def _client_of(self, silo: str) -> str:
        stems = {name[:58]: name for name in self.base}
        return silo if silo in self.base else stems.get(silo.rpartition(".")[0], silo)

    def _stage1(self, settings: PddAs2, silos: Mapping[str, Path], point: Point, seed: int) -> SystemResult:
        """Run and measure stage 1, once for all cells that continue from it."""
        folder = self._stage1_folder(settings, point, seed)
        path = folder / "result.json"
        if not path.is_file():
            run = settings if settings.privacy.eps is not None else _stage_1_alone(settings)
            found = run_phase(self.plan, run, silos, folder / "state", "stage1", split=self.split)
            save_json(path, asdict(found))
            for pattern in _KEPT_OF_STAGE_1:
                for file in (folder / "state").rglob(pattern):
                    file.unlink()
        return SystemResult(**json.loads(path.read_text(encoding="utf-8")))

    def _stage1_folder(self, settings: PddAs2, point: Point, seed: int) -> Path:
        private = settings.privacy.eps is not None
        facts = {**self._facts(point, seed), "run": asdict(settings if private else _stage_1_alone(settings))}
        return self.folder / "state" / f"shared-stage1-{_hash(facts)}"

    def silos(self, point: Point, seed: int) -> dict[str, Path]:
        drawn = _hash({"data": self._data, "change": point.silos.drawn(seed)})
        return changed_silos(self.base, point.silos, self.folder / "silos" / drawn, seed=seed)

    def _key(self, point: Point, seed: int) -> str:
        settings = point.settings(self.plan.settings(seed))
        facts = {**self._facts(point, seed), "system": point.system, "split": self.split}
        run = settings if point.system in _STAGE_2 or settings.privacy.eps is not None else _stage_1_alone(settings)
        return _hash({**facts, "run": asdict(run)})

    def _facts(self, point: Point, seed: int) -> dict[str, Any]:
        made = {"model": repr(self.plan.model), "transport": self.plan.transport}
        return {"data": self._data, "silos": point.silos.drawn(seed), **made}


def _stage_1_alone(settings: PddAs2) -> PddAs2:
    return replace(settings, stage2=replace(type(settings.stage2)(), epochs=0, in_batch=False))


def _contents(folder: Path) -> str:
    parts = [path.read_bytes() for path in (folder / MANIFEST, folder / PUBLIC) if path.is_file()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _hash(facts: Mapping[str, Any]) -> str:
    return json_sha256(facts, default=repr)[:20]
