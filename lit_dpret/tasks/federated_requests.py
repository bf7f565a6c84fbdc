"""A curious silo: requests of every silo, made in each way, matched with suspected texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.audit.attacks.federated.requests import Identified, identify_requests, own_texts, pooled
from lit_dpret.datamodules import SiloDataModule
from lit_dpret.datamodules.records import normalise
from lit_dpret.errors import DataError
from lit_dpret.federated.centroids import CentroidPlan, dp_centroids
from lit_dpret.federated.fitting import attempt_folder
from lit_dpret.federated.silo_ledger import SiloLedger, silo_budget
from lit_dpret.modules import AS2DualEncoder
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.releases import FullBatch

Floats = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Asker:
    """A silo's queries, embedded by the shared query encoder; as private as the texts."""

    texts: Sequence[str]  # the train queries, which requests are made of
    sent: Floats  # their embeddings, (queries, dim)
    unsent: Floats  # of its dev and test queries that equal no train query, (queries, dim)

    def __repr__(self) -> str:
        return f"Asker({len(self.texts)} queries)"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to ask."""

    name: str
    request: str
    eps: float | None = None  # of the request alone; None for centroids without noise


def ways(request_eps: Sequence[float]) -> list[Way]:
    """From the paper's own to the one that says nothing."""
    noised = [Way(name=f"dp_centroid, eps={eps:g}", request="dp_centroid", eps=eps) for eps in request_eps]
    return [
        Way(name="exact (the paper)", request="exact"),
        Way(name="centroids without noise", request="dp_centroid"),
        *noised,
        Way(name="none", request="none"),
    ]


def asker_of(folder: Path, module: AS2DualEncoder) -> Asker:
    """Embed the queries that a silo asks with, and others that it could have asked with.

    Raises:
        DataError: It has no dev or test query to distinguish train queries from.
    """
    data = SiloDataModule(folder=folder)
    texts = list(data.evaluation_set("train")[0].values())
    known = {normalise(text) for text in texts}
    others = {
        normalise(query.text): query.text for query in data.silo.queries if normalise(query.text) not in known
    }  # fmt: skip
    if not others:
        raise DataError(
            f"{folder} has no query outside of its train split, so there is nothing to distinguish those from."
        )
    return Asker(texts, _array(module.encode_queries(texts)), _array(module.encode_queries(list(others.values()))))


def attack_requests(
    askers: Mapping[str, Asker],
    way: Way,
    folder: Path,
    *,
    plan: CentroidPlan,
    delta: float | None,
    candidates: int,
    confidence: float,
    seed: int,
) -> dict[str, Any]:
    """Make every silo's request in one way, and attack it as another silo.

    Returns:
        Facts for the report: per silo, pooled, and from rows that are another silo's.
    """
    rows = {name: _rows(asker, way, folder / name, plan, delta) for name, asker in askers.items()}
    own: dict[str, Identified] = {}
    foreign: dict[str, Identified] = {}
    near: list[dict[str, Any]] = []
    names = list(askers)
    for place, name in enumerate(names):
        asker, other = askers[name], names[(place + 1) % len(names)]
        settings: dict[str, Any] = {"candidates": candidates, "confidence": confidence, "seed": seed}
        settings["means"] = way.request == "dp_centroid"
        settings["tops"] = tuple(top for top in (1, 10) if top < candidates)
        own[name] = identify_requests(rows[name], asker.sent, asker.unsent, **settings)
        foreign[name] = identify_requests(rows[other], asker.sent, asker.unsent, **settings)
        for reader in names:
            if reader != name:
                mine = askers[reader]
                found = own_texts(rows[name], (asker.texts, asker.sent), (mine.texts, mine.sent), seed=seed)
                near += [] if found is None else [found.to_dict()]
    means = {key: float(np.mean([one[key] for one in near])) for key in near[0]} if near else None
    return {
        **asdict(way),
        "rows": sum(map(len, rows.values())),
        "pooled": _pooled(list(own.values())),
        "rows_of_another_silo": _pooled(list(foreign.values())),
        "own_texts": means,
        "silos": {name: found.to_dict() for name, found in own.items()},
    }


def _rows(asker: Asker, way: Way, folder: Path, plan: CentroidPlan, delta: float | None) -> Floats:
    """Return the rows that a silo asks with; under a budget they are charged to a ledger in ``folder``."""
    if way.request == "exact":
        return asker.sent
    if way.request == "none":
        return np.empty((0, asker.sent.shape[1]))
    queries = torch.from_numpy(asker.sent)
    if way.eps is None:
        return _array(dp_centroids(queries, plan, lambda table, _: table))
    budget = silo_budget(way.eps, delta, unit="query", neighbours="zero_out", units=len(queries))
    noise = calibrate_noise(
        eps=budget.eps, delta=budget.delta, neighbours=budget.neighbours, law=FullBatch(), steps=plan.iterations,
        accountant="pld",
    )  # fmt: skip
    # A request that was killed stays charged in its ledger; nothing of this study leaves the machine.
    ledger = SiloLedger(attempt_folder(folder), budget)
    with ledger.gaussian("fed_request", noise_multiplier=noise, count=plan.iterations) as noised:
        return _array(dp_centroids(queries, plan, noised))


def _pooled(found: Sequence[Identified]) -> dict[str, Any]:
    facts: dict[str, Any] = {"nearness": _spread([one.nearness for one in found])}
    facts["traced"] = _spread([one.traced for one in found if one.traced is not None])
    for kind in ("named", "control"):
        rates = {top: pooled([getattr(one, kind)[top] for one in found]) for top in found[0].named}
        facts[kind] = {str(top): None if one is None else one.to_dict() for top, one in rates.items()}
    return facts


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"auc": float(np.mean(values)), "auc_least": min(values), "auc_most": max(values)}


def _array(rows: Tensor) -> Floats:
    return np.asarray(rows.detach().double().cpu().numpy())
