"""A curious server: one round of stage 1 of every silo, defended in each way, attacked by its word embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.audit.attacks.federated.requests import Rate, pooled
from lit_dpret.audit.attacks.federated.word_rows import MovedRows, Told, moved_rows, tell_tokens
from lit_dpret.datamodules import SiloDataModule
from lit_dpret.encoders import Side, TextEncoder
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.federated.aggregation import Weights, take_weights
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2, Stage1, Stage2
from lit_dpret.federated.silo import MakeModule, SiloClient
from lit_dpret.modules import AS2DualEncoder
from lit_dpret.privacy.modes import NoPrivacy

Ids = NDArray[np.int64]
Tell = Callable[[int, int], None]


@dataclass(frozen=True, repr=False)
class SiloTokens:
    """The tokens of a silo's texts; as private as the texts."""

    queries: Ids
    collection: Ids
    held_out: Ids  # of its dev and test queries, which no round trains on

    def __repr__(self) -> str:
        return f"SiloTokens({len(self.queries)} of queries, {len(self.collection)} of the collection)"


@dataclass(frozen=True, kw_only=True)
class Defence:
    """A defence of updates against the server."""

    name: str
    eps: float | None = None  # of one round of DP-SGD, all that the silo may spend; None without noise
    coupled: bool = False  # negatives of the batch and other questions' answers, as in the paper; no budget allows them
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


def round_of(defence: Defence, *, batch_size: int, negatives: int, lr: float, seed: int) -> PddAs2:
    """Return the settings of one round of the warm-up: the whole budget goes into the update that is attacked."""
    stage = Stage1(
        warmup_rounds=1, rounds=0, batch_size=batch_size, bm25_n=negatives, top_k=max(20, negatives), lr=lr,
        in_batch=defence.coupled, other_positives=int(defence.coupled), weighting="uniform",
    )  # fmt: skip
    privacy = FederatedPrivacy(eps=defence.eps)
    return PddAs2(
        stage1=stage, stage2=Stage2(epochs=0, batch_size=batch_size, in_batch=False), privacy=privacy, seed=seed
    )


def tokens_of(folder: Path, encoder: TextEncoder) -> SiloTokens:
    """Return the tokens of a silo's texts as the encoder reads them, without special ones."""
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
    tell: Tell,
) -> dict[str, Weights]:  # fmt: skip
    """Return the weights that the server sees for each silo after one round: its own, or under masks the mean.

    A finished round is read from ``folder``, so that masked and clear attacks share it.
    """
    state = folder / f"{'coupled' if defence.coupled else 'alone'}-{'plain' if defence.eps is None else defence.eps}"
    found: dict[str, Weights] = {}
    if defence.masked:  # its package is of an extra: asked for before anything is trained
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

    A round that was killed stays charged in its own ledger, and no budget allows it twice. Nothing of this study
    leaves the machine, so the round is repeated under another ledger.
    """
    number = 0
    while (one := folder / f"attempt-{number}").exists() and not (one / "stage1-000.safetensors").is_file():
        number += 1
    return one


def word_table(module: AS2DualEncoder) -> str | None:
    """Return the name of the word embeddings in an update; None where no update has them.

    Raises:
        UnsupportedModelError: The encoder does not say which of its parameters they are.
    """
    table = getattr(module.encoder.backbone, "get_input_embeddings", lambda: None)()
    if table is None or not hasattr(table, "weight"):
        raise UnsupportedModelError(
            f"{type(module.encoder.backbone).__name__} does not say which of its parameters are word embeddings, so "
            "the attack has nothing to read."
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    name = names[id(table.weight)]
    return name if name in take_weights(module) else None


def attack_updates(
    defence: Defence,
    updates: Mapping[str, Weights] | None,
    start: Tensor,
    table: str,
    tokens: Mapping[str, SiloTokens],
    special: Sequence[int],
    *,
    confidence: float,
) -> dict[str, Any]:
    """Attack each silo by the rows of the word embeddings."""
    facts: dict[str, Any] = {**asdict(defence), "pooled": None, "silos": {}, "anyone": None}
    if updates is None:
        return facts
    before = start.double().numpy()
    everyone = np.setdiff1d(np.arange(len(before)), special)
    told: dict[str, dict[str, Told | None]] = {}
    moved: dict[str, MovedRows] = {}
    for name, update in updates.items():
        moved[name] = moved_rows(before, update[table].double().numpy())
        told[name] = {
            kind: tell_tokens(moved[name], right, wrong, touched_alone=kind == "queries_touched", confidence=confidence)
            for kind, (right, wrong) in _questions(name, tokens, everyone, masked=defence.masked).items()
        }
    facts["silos"] = {
        name: {
            "kept": moved[name].kept,
            "touched": int(moved[name].touched.sum()),
            **{kind: None if one is None else one.to_dict() for kind, one in kinds.items()},
        }
        for name, kinds in told.items()
    }
    facts["pooled"] = {kind: _pooled([one[kind] for one in told.values()]) for kind in next(iter(told.values()))}
    if defence.masked:
        queries = np.concatenate([one.queries for one in tokens.values()])
        texts = np.concatenate([one.collection for one in tokens.values()])
        only = np.setdiff1d(queries, texts)
        nobody = np.setdiff1d(everyone, np.concatenate([queries, texts]))
        found = tell_tokens(next(iter(moved.values())), only, nobody, confidence=confidence)
        facts["anyone"] = None if found is None else found.to_dict()
    return facts


def start_weights(make: MakeModule) -> tuple[AS2DualEncoder, Weights]:
    """Build the model that a round begins with; return it and the weights that travel."""
    module = make(privacy=NoPrivacy(), optimizer_lr=1e-3)
    return module, take_weights(module)


def _questions(
    name: str, tokens: Mapping[str, SiloTokens], everyone: Ids, *, masked: bool
) -> dict[str, tuple[Ids, Ids]]:
    """Return by name what is tested about one silo: tokens to find, and tokens that must not be named."""
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


def _pooled(found: Sequence[Told | None]) -> dict[str, Any] | None:
    known = [one for one in found if one is not None]
    if not known:
        return None
    values = [one.auc for one in known]

    def facts(rates: Sequence[Rate]) -> dict[str, Any] | None:
        one = pooled(rates)
        return None if one is None else one.to_dict()

    return {
        "auc": float(np.mean(values)), "auc_least": min(values), "auc_most": max(values),
        "recall": facts([one.recall for one in known]),
        "precision": facts([one.precision for one in known if one.precision is not None]),
        "tokens": sum(one.tokens for one in known),
        "prevalence": sum(one.tokens for one in known) / sum(one.tokens + one.others for one in known),
    }  # fmt: skip
