"""`task=federated_attacks`: the two attacks named in paper 004, with and without each defence.

A curious silo matches the requests of the others, built in each `Way`, with suspected texts. A curious server recovers
words from the word embeddings in the updates of one round, under each `Defence`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.audit.attacks.federated import (
    Identified,
    TokenSeparation,
    identify_requests,
    moved_rows,
    own_texts,
    pooled,
    separate_tokens,
)
from lit_dpret.audit.statistics.error_rates import Rate
from lit_dpret.audit.statistics.evidence import check_confidence
from lit_dpret.callbacks import ProgressLine
from lit_dpret.datamodules import SiloDataModule
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.datamodules.silo_folder import read_manifest, silo_folders
from lit_dpret.encoders import Side, TextEncoder
from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.federated.aggregation import Weights, take_weights
from lit_dpret.federated.centroids import CentroidPlan, dp_centroids
from lit_dpret.federated.fitting import attempt_folder
from lit_dpret.federated.model import AS2Maker
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2, Stage1, Stage2
from lit_dpret.federated.silo import MakeModule, SiloClient
from lit_dpret.federated.silo_ledger import SiloLedger, silo_budget
from lit_dpret.modules import AS2DualEncoder
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.releases import FullBatch
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.settings import Count, Least, Settings, picked
from lit_dpret.tasks.parts import Parts, check_run_dir, require_budgets, some_of
from lit_dpret.tasks.stages import Stages, settings_fingerprint
from lit_dpret.tasks.uncovered import Owner, model_of, refuse_training_data, require_owner, tell_attack
from lit_dpret.texts import normalise

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Attack = Literal["requests", "updates"]


@dataclass(kw_only=True)
class FederatedAttacks(Settings):
    """Attack a folder of silos: a silo that matches requests, and a server that reads word embeddings.

    The code that a federation runs produces the attacked messages; the model is the public one that a federation starts
    from.
    """

    silos: Path
    whose: Owner | None = None
    attacks: Sequence[Attack] = ("requests", "updates")
    encoder: str | Path = "minilm"
    layers: Count | None = None
    candidates: Annotated[int, Least(2)] = 100
    request_eps: Sequence[float] = (8.0, 4.0, 1.0)
    update_eps: Sequence[float] = (8.0, 1.0)
    delta: float | None = None
    centroids: Count = 16
    centroid_iterations: Count = 3
    batch_size: Count = 8
    negatives: Count = 8
    lr: float = 3e-5
    weight_decay: float = 0.01
    max_query_length: Annotated[int, Least(3)] = 32
    max_passage_length: Annotated[int, Least(3)] = 128
    confidence: float = 0.95
    min_free_mb: float = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_owner(self.whose, "the numbers are about these silos' queries")
        self.attacks = some_of("task.attacks", self.attacks, get_args(Attack))
        require_budgets("task.request_eps", self.request_eps)
        require_budgets("task.update_eps", self.update_eps)
        if not self.lr > 0 or not 0 <= self.weight_decay < 1:
            raise ConfigurationError(
                f"task.lr={self.lr} must be above 0, and task.weight_decay={self.weight_decay} in [0, 1)."
            )
        check_confidence(self.confidence)
        self.request_eps, self.update_eps = list(map(float, self.request_eps)), list(map(float, self.update_eps))
        self.lr = float(self.lr)

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``federated_attacks.json`` and ``.md``; ``internal_federated_attacks`` for private silos."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        folders = silo_folders(self.silos, knob="task.silos")
        counts = {name: dict(read_manifest(data)["counts"]) for name, data in folders.items()}
        self._check_sizes(counts)
        for data in folders.values() if self.whose == "public" else ():
            refuse_training_data(SiloDataModule(folder=data), self.encoder, knob="task.whose")
        stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint(parts))
        make = self._maker().check()
        about = data_facts(self.silos, {name: read_manifest(data)["sha256"] for name, data in folders.items()})
        facts = self._facts(counts) | about
        if "requests" in self.attacks:
            facts["requests"] = self._requests(parts, stages, folders, make)
        if "updates" in self.attacks:
            facts["updates"] = self._updates(parts, stages, folders, make)
        tell_attack(parts, "federated_attacks", "Attacks from inside a federation", facts, of="queries")
        scores = {}
        if facts["requests"]:
            scores["named_by_exact_requests"] = facts["requests"][0]["pooled"]["named"]["1"]["value"]
        if facts["updates"] and facts["updates"][0]["pooled"]["queries"]:
            scores["queries_told_from_collection"] = facts["updates"][0]["pooled"]["queries"]["auc"]
        return scores

    def _requests(
        self, parts: Parts, stages: Stages, folders: Mapping[str, Path], make: AS2Maker
    ) -> list[dict[str, Any]]:
        module, _ = start_weights(make)
        askers: dict[str, Asker] = {}

        def attacked(folder: Path, _: bool, way: Way) -> dict[str, Any]:
            if not askers:  # skipped if every way was attacked already
                with ProgressLine("encoding the queries of all silos") as progress:
                    for place, (name, data) in enumerate(folders.items()):
                        progress(place, len(folders))
                        askers[name] = asker_of(data, module)
                    progress(len(folders), len(folders))
            return self._attack_requests(askers, way, folder, parts.seed)

        listed = enumerate(ways(self.request_eps))
        return [stages.run(f"request-{number}", partial(attacked, way=way)) for number, way in listed]

    def _attack_requests(self, askers: Mapping[str, Asker], way: Way, folder: Path, seed: int) -> dict[str, Any]:
        """Build every silo's request in one way, and attack it as another silo; its ledgers are in ``folder``."""
        plan = CentroidPlan(count=self.centroids, iterations=self.centroid_iterations, seed=seed)
        settings: dict[str, Any] = {
            "candidates": self.candidates, "confidence": self.confidence, "seed": seed,
            "means": way.request == "dp_centroid", "tops": tuple(top for top in (1, 10) if top < self.candidates),
        }  # fmt: skip
        rows = {name: _rows(asker, way, folder / name, plan, self.delta) for name, asker in askers.items()}
        own: dict[str, Identified] = {}
        foreign: dict[str, Identified] = {}
        near: list[dict[str, Any]] = []
        names = list(askers)
        for name, other in zip(names, [*names[1:], names[0]], strict=True):
            asker = askers[name]
            own[name] = identify_requests(rows[name], asker.sent, asker.unsent, **settings)
            foreign[name] = identify_requests(rows[other], asker.sent, asker.unsent, **settings)
            for mine in (one for reader, one in askers.items() if reader != name):
                found = own_texts(rows[name], (asker.texts, asker.sent), (mine.texts, mine.sent), seed=seed)
                near += [] if found is None else [asdict(found)]
        means = {key: float(np.mean([one[key] for one in near])) for key in near[0]} if near else None
        return {
            **asdict(way),
            "rows": sum(map(len, rows.values())),
            "pooled": _pooled_requests(list(own.values())),
            "rows_of_another_silo": _pooled_requests(list(foreign.values())),
            "own_texts": means,
            "silos": {name: found.to_dict() for name, found in own.items()},
        }

    def _updates(
        self, parts: Parts, stages: Stages, folders: Mapping[str, Path], make: AS2Maker
    ) -> list[dict[str, Any]]:
        module, start = start_weights(make)
        encoder, table = module.encoder, word_table(module)
        tokens = {name: tokens_of(data, encoder) for name, data in folders.items()}

        def attacked(_: Path, __: bool, defence: Defence) -> dict[str, Any]:
            read = partial(
                attack_updates, defence, start=start[str(table)], table=str(table), tokens=tokens,
                special=encoder.tokenizer.all_special_ids, confidence=self.confidence,
            )  # fmt: skip
            if defence.frozen_words:
                if word_table(start_weights(replace(make, train_embeddings=False))[0]) is None:
                    return read(None)
                raise UnsupportedModelError(
                    "Freezing the embeddings of task.encoder left its word embeddings in the update. Choose another "
                    "task.encoder, or task.attacks=[requests]."
                )
            settings = self._round(defence, parts.seed)
            with ProgressLine(f"a round of each silo: {defence.name}") as progress:
                return read(updates_of(defence, folders, parts.run_dir / "rounds", make, start, settings, progress))

        listed = enumerate(defences(self.update_eps))
        return [stages.run(f"update-{number}", partial(attacked, defence=defence)) for number, defence in listed]

    def _round(self, defence: Defence, seed: int) -> PddAs2:
        """Return the settings of one warm-up round: all of the budget goes into the update that is attacked."""
        stage = Stage1(
            warmup_rounds=1, rounds=0, batch_size=self.batch_size, bm25_n=self.negatives,
            top_k=max(20, self.negatives), lr=self.lr, in_batch=defence.coupled,
            other_positives=int(defence.coupled), weighting="uniform",
        )  # fmt: skip
        stage2 = Stage2(epochs=0, batch_size=self.batch_size, in_batch=False)
        return PddAs2(stage1=stage, stage2=stage2, privacy=FederatedPrivacy(eps=defence.eps), seed=seed)

    def _maker(self) -> AS2Maker:
        return AS2Maker(
            encoder=str(model_of(self.encoder)), layers=self.layers, max_query_length=self.max_query_length,
            max_sentence_length=self.max_passage_length, weight_decay=self.weight_decay,
        )  # fmt: skip

    def _check_sizes(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        if len(counts) < 2:
            raise ConfigurationError(
                f"task.silos={self.silos} holds one silo, but both attacks need another's data. Build at least two."
            )
        few = min(counts, key=lambda name: counts[name]["dev"] + counts[name]["test"])
        others = counts[few]["dev"] + counts[few]["test"]
        if "requests" in self.attacks and others < 2 * (self.candidates - 1):
            raise ConfigurationError(
                f"task.candidates={self.candidates} takes {2 * (self.candidates - 1)} dev and test queries of every "
                f"silo, but {few} has {others}. Lower it, or build larger silos."
            )
        least = min(counts, key=lambda name: counts[name]["train"])
        if "updates" in self.attacks and counts[least]["train"] < self.batch_size:
            raise ConfigurationError(
                f"task.batch_size={self.batch_size} exceeds the train queries of {least} ({counts[least]['train']}). "
                "Lower it, or build larger silos."
            )

    def _facts(self, counts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        return {
            "internal": self.whose == "private",
            "encoder": Path(str(self.encoder)).name,
            "silos": counts,
            "requests": [],
            "updates": [],
            **picked(
                self, "layers", "candidates", "centroids", "batch_size", "negatives", "lr", "weight_decay", "confidence"
            ),
        }

    def _fingerprint(self, parts: Parts) -> str:
        manifest = read_manifest(self.silos, knob="task.silos")
        return settings_fingerprint(self, but=["min_free_mb"], seed=parts.seed, manifest=manifest)


# -- a curious silo -----------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Asker:
    """A silo's queries, embedded by the shared query encoder; as private as the texts."""

    texts: Sequence[str]  # the train queries, from which requests are built
    sent: Floats  # their embeddings, (queries, dim)
    unsent: Floats  # of its dev and test queries that equal no train query, (queries, dim)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One kind of request."""

    name: str
    request: str
    eps: float | None = None  # of the request alone; None for centroids without noise


def ways(request_eps: Sequence[float]) -> list[Way]:
    """List the kinds of requests, from the paper's own to an empty one."""
    noised = [Way(name=f"dp_centroid, eps={eps:g}", request="dp_centroid", eps=eps) for eps in request_eps]
    return [
        Way(name="exact (the paper)", request="exact"),
        Way(name="centroids without noise", request="dp_centroid"),
        *noised,
        Way(name="none", request="none"),
    ]


def asker_of(folder: Path, module: AS2DualEncoder) -> Asker:
    """Embed the queries of a silo's request, and other queries that it could have used."""
    data = SiloDataModule(folder=folder)
    texts = list(data.evaluation_set("train")[0].values())
    known = {normalise(text) for text in texts}
    others = {key: query.text for query in data.silo.queries if (key := normalise(query.text)) not in known}
    if not others:
        raise DataError(f"{folder} has no query outside its train split to compare those with.")
    return Asker(texts, _array(module.encode_queries(texts)), _array(module.encode_queries(list(others.values()))))


def _rows(asker: Asker, way: Way, folder: Path, plan: CentroidPlan, delta: float | None) -> Floats:
    """Return the rows that a silo sends as its request; under a budget they are charged to a ledger in ``folder``."""
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
        accountant="pld", knob="task.request_eps",
    )  # fmt: skip
    # A killed request stays charged in its ledger; that is harmless, since nothing of this study leaves the machine.
    ledger = SiloLedger(attempt_folder(folder), budget)
    with ledger.gaussian("fed_request", noise_multiplier=noise, count=plan.iterations) as noised:
        return _array(dp_centroids(queries, plan, noised))


def _pooled_requests(found: Sequence[Identified]) -> dict[str, Any]:
    facts: dict[str, Any] = {"nearness": _spread([one.nearness for one in found])}
    facts["traced"] = _spread([one.traced for one in found if one.traced is not None])
    for kind in ("named", "control"):
        facts[kind] = {str(top): _pooled([getattr(one, kind)[top] for one in found]) for top in found[0].named}
    return facts


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"auc": float(np.mean(values)), "auc_least": min(values), "auc_most": max(values)}


def _array(rows: Tensor) -> Floats:
    return np.asarray(rows.detach().double().cpu().numpy())


# -- a curious server ---------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SiloTokens:
    """The tokens of a silo's texts; as private as the texts."""

    queries: Ids
    collection: Ids
    held_out: Ids  # tokens of its dev and test queries, which no round trains on


@dataclass(frozen=True, kw_only=True)
class Defence:
    """A defence of updates against the server."""

    name: str
    eps: float | None = None  # of one round of DP-SGD, the silo's whole budget; None without noise
    coupled: bool = False  # in-batch negatives and other questions' answers, as in the paper; no budget allows them
    masked: bool = False  # a secure sum over all silos
    frozen_words: bool = False  # the embedding tables of words and positions are not trained


def defences(update_eps: Sequence[float]) -> list[Defence]:
    """List the defences, from the paper's own round to an update without words."""
    private = [Defence(name=f"DP-SGD, eps={eps:g}", eps=eps) for eps in update_eps]
    summed = [replace(one, name=f"secure sum of {one.name}", masked=True) for one in private[:1]]
    return [
        Defence(name="FedAvg (the paper)", coupled=True),
        Defence(name="negatives of the collection alone"),
        Defence(name="secure sum (the sum is attacked)", coupled=True, masked=True),
        *private,
        *summed,
        Defence(name="word embeddings frozen", frozen_words=True),
    ]


def tokens_of(folder: Path, encoder: TextEncoder) -> SiloTokens:
    """Return the tokens of a silo's texts as the encoder reads them, without special tokens."""
    data = SiloDataModule(folder=folder)
    split = {"train": list[str](), "other": list[str]()}
    for query in data.silo.queries:
        split["train" if query.split == "train" else "other"].append(query.text)

    def ids(texts: Sequence[str], side: Side) -> Ids:
        found = encoder.tokenize(texts, side)["input_ids"] if texts else np.empty(0)
        return np.setdiff1d(np.asarray(found).reshape(-1), encoder.tokenizer.all_special_ids).astype(np.int64)

    return SiloTokens(
        ids(split["train"], "query"), ids(list(data.silo.sentences.values()), "passage"), ids(split["other"], "query")
    )


def updates_of(
    defence: Defence, folders: Mapping[str, Path], folder: Path, make: MakeModule, start: Weights, settings: PddAs2,
    tell: Callable[[int, int], None],
) -> dict[str, Weights]:  # fmt: skip
    """Return the weights that the server sees for each silo after one round: the silo's own, or under masks the mean.

    A finished round is read from ``folder``, so that masked and clear attacks share it.
    """
    state = folder / f"{'coupled' if defence.coupled else 'alone'}-{'plain' if defence.eps is None else defence.eps}"
    found: dict[str, Weights] = {}
    if defence.masked:  # imports an optional extra: fail before anything is trained
        from lit_dpret.federated.secure_mean import secure_mean
    for number, (name, data) in enumerate(folders.items()):
        tell(number, len(folders))
        found[name] = SiloClient(data, _state(state / name), settings, make).train_shared(start, 0)
    tell(len(folders), len(folders))
    if not defence.masked:
        return found
    unchecked = replace(settings, update_norm=None, sum_threshold=None)  # every update is attacked
    name = f"attacked round of {state.name}"
    mean = secure_mean(start, found, dict.fromkeys(found, 1.0), unchecked, name=name, faults=[])
    return dict.fromkeys(found, mean)


def _state(folder: Path) -> Path:
    """Return the state folder of a finished round, or a new one.

    A killed round stays charged in its ledger. Nothing of this study leaves the machine, so a new one can start.
    """
    number = 0
    while (one := folder / f"attempt-{number}").exists() and not (one / "stage1-000.safetensors").is_file():
        number += 1
    return one


def start_weights(make: MakeModule) -> tuple[AS2DualEncoder, Weights]:
    """Build the initial model of a round; return it and the weights to send."""
    module = make(privacy=NoPrivacy(), optimizer_lr=1e-3)
    return module, take_weights(module)


def word_table(module: AS2DualEncoder) -> str | None:
    """Return the name of the word embeddings in an update; None if no update has them."""
    table = getattr(module.encoder.backbone, "get_input_embeddings", lambda: None)()
    if table is None or not hasattr(table, "weight"):
        raise UnsupportedModelError(
            f"{type(module.encoder.backbone).__name__} does not identify its word embeddings, which the attack reads. "
            "Choose another task.encoder, or task.attacks=[requests]."
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    name = names[id(table.weight)]
    return name if name in take_weights(module) else None


def attack_updates(
    defence: Defence, updates: Mapping[str, Weights] | None, start: Tensor, table: str,
    tokens: Mapping[str, SiloTokens], special: Sequence[int], *, confidence: float,
) -> dict[str, Any]:  # fmt: skip
    """Attack each silo through the rows of the word embeddings."""
    facts: dict[str, Any] = {**asdict(defence), "pooled": None, "silos": {}, "anyone": None}
    if updates is None:
        return facts
    before = start.double().numpy()
    everyone = np.setdiff1d(np.arange(len(before)), special)
    told: dict[str, dict[str, TokenSeparation | None]] = {}
    moved = {name: moved_rows(before, update[table].double().numpy()) for name, update in updates.items()}
    for name, rows in moved.items():
        told[name] = {
            kind: separate_tokens(rows, right, wrong, touched_alone=kind == "queries_touched", confidence=confidence)
            for kind, (right, wrong) in _questions(name, tokens, everyone, masked=defence.masked).items()
        }
        shown = {kind: None if one is None else one.to_dict() for kind, one in told[name].items()}
        facts["silos"][name] = {"kept": rows.kept, "touched": int(rows.touched.sum()), **shown}
    facts["pooled"] = {kind: _pooled_tokens([one[kind] for one in told.values()]) for kind in next(iter(told.values()))}
    if defence.masked:
        queries = np.concatenate([one.queries for one in tokens.values()])
        texts = np.concatenate([one.collection for one in tokens.values()])
        only = np.setdiff1d(queries, texts)
        nobody = np.setdiff1d(everyone, np.concatenate([queries, texts]))
        found = separate_tokens(next(iter(moved.values())), only, nobody, confidence=confidence)
        facts["anyone"] = None if found is None else found.to_dict()
    return facts


def _questions(
    name: str, tokens: Mapping[str, SiloTokens], everyone: Ids, *, masked: bool
) -> dict[str, tuple[Ids, Ids]]:
    """Return, by test name, the tokens to find in one silo and the tokens that must not be named."""
    own = tokens[name]
    mine = np.union1d(own.queries, own.collection)
    others = np.concatenate([one.queries for other, one in tokens.items() if other != name] or [own.queries[:0]])
    read = [one for other, one in tokens.items() if masked or other == name]  # silos whose texts are in the update
    inside = np.unique(np.concatenate([part for one in read for part in (one.queries, one.collection)]))
    absent = np.setdiff1d(everyone, np.union1d(inside, own.held_out))
    collection_alone = np.setdiff1d(own.collection, own.queries)
    return {
        "queries": (own.queries, collection_alone),
        "queries_touched": (own.queries, collection_alone),
        "queries_only": (np.setdiff1d(own.queries, own.collection), np.setdiff1d(everyone, mine)),
        "whose": (np.setdiff1d(own.queries, others), np.setdiff1d(others, own.queries)),
        "control": (np.setdiff1d(own.held_out, inside), absent),
    }


def _pooled_tokens(found: Sequence[TokenSeparation | None]) -> dict[str, Any] | None:
    known = [one for one in found if one is not None]
    if not known:
        return None
    tokens = sum(one.tokens for one in known)
    return {
        **(_spread([one.auc for one in known]) or {}),
        "recall": _pooled([one.recall for one in known]),
        "precision": _pooled([one.precision for one in known if one.precision is not None]),
        "tokens": tokens,
        "prevalence": tokens / sum(one.tokens + one.others for one in known),
    }


def _pooled(rates: Sequence[Rate]) -> dict[str, Any] | None:
    one = pooled(rates)
    return None if one is None else one.to_dict()
