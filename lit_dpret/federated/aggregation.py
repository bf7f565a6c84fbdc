"""Aggregate the clients' weights: FedAvg, and robust rules against malicious silos.

``mean`` is FedAvg (McMahan et al., 1602.05629; equations 5 and 6 of paper 004): one silo can move it as far as
``federated.update_norm`` allows. The robust rules are Flower's own functions, for servers that see every update: the
median and the trimmed mean of each weight (Yin et al., 1803.01498), and Krum, the update that is nearest to its
neighbours, or the mean of the nearest (Blanchard et al., NeurIPS 2017). Only trainable floating-point tensors are sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.settings import PddAs2, Stage1, Weighting
from lit_dpret.privacy.clipping.base import trainable

Weights = dict[str, Tensor]


def client_weights(counts: Mapping[str, int], weighting: Weighting, *, n_hat: int | None = None) -> dict[str, float]:
    """Return each client's aggregation weight, not normalised.

    Args:
        counts: Train queries of each client.
        weighting: ``examples``, |D_i| as in the paper; ``uniform``; or ``capped``, min(|D_i| / n_hat, 1), which
            bounds the influence of a large client (McMahan et al., 1710.06963, section 2.1).
        n_hat: The public size at which ``capped`` stops growing.
    """
    empty = next((name for name, count in counts.items() if count < 1), None)
    if empty is not None:
        raise DataError(f"Client {empty!r} has no train query. Leave it out.")
    if weighting == "uniform":
        return dict.fromkeys(counts, 1.0)
    return {name: float(count) if n_hat is None else min(count / n_hat, 1.0) for name, count in counts.items()}


def take_weights(module: nn.Module) -> Weights:
    """Copy the trainable parameters to float32 on the CPU; copy a shared parameter once."""
    return {name: p.detach().to("cpu", torch.float32).clone() for name, p in trainable(module).items()}


def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set the trainable parameters; refuse weights that do not fit the module (`check_weights`)."""
    own = trainable(module)
    check_weights("the weights", weights, own)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}{tuple(weights[name].shape)}".encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_weights(whose: str, weights: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit the model: other names or shapes, NaN or infinity."""
    if set(weights) != set(like):
        odd = sorted(set(weights) ^ set(like))
        raise DataError(
            f"{whose}: {len(odd)} tensors are missing or unexpected, such as {odd[0]!r}.", kind="bad update"
        )
    for name, value in weights.items():
        if value.shape != like[name].shape:
            raise DataError(
                f"{whose}: {name!r} has shape {tuple(value.shape)} instead of {tuple(like[name].shape)}.",
                kind="bad update",
            )
        if not bool(torch.isfinite(value).all()):
            raise DataError(f"{whose}: {name!r} contains values that are not finite.", kind="bad update")


def check_norm(whose: str, start: Mapping[str, Tensor], update: Mapping[str, Tensor], most: float | None) -> None:
    """Refuse a change that is too large relative to the weights (L2 norm over all of them)."""
    if most is None:
        return
    length = math.sqrt(sum(float(value.double().square().sum()) for value in start.values()))
    change = math.sqrt(
        sum(float((update[name].double() - value.double()).square().sum()) for name, value in start.items())
    )
    if not change <= most * length:
        raise DataError(
            f"{whose}: the update has norm {change:.3g}, more than federated.update_norm={most:g} times the norm "
            f"{length:.3g} of the weights. If it is honest, raise that setting.",
            kind="bad update",
        )


def weighted_mean(updates: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]) -> Weights:
    """Return the weighted mean of the clients' tensors (equation 6), summed in float64.

    Guarantees:
        - Each value is between the least and the greatest of the clients' values, up to rounding.
        - The result does not depend on the order of the clients.
    """
    names = sorted(updates)
    first = updates[names[0]]
    total = sum(weights[name] for name in names)
    mean: Weights = {}
    for key, value in first.items():
        summed = sum(
            (updates[name][key].double() * weights[name] for name in names), torch.zeros((), dtype=torch.float64)
        )
        mean[key] = (summed / total).to(value.dtype)
    return mean


def updates_needed(stage: Stage1) -> int:
    """Return the least number of updates with which the rule withstands ``federated.stage1.malicious`` silos."""
    wrong = stage.malicious
    return {"mean": 1, "median": 2 * wrong + 1, "trimmed_mean": 2 * wrong + 1}.get(stage.aggregation, 2 * wrong + 3)


def check_enough(stage: Stage1, silos: int, what: str) -> None:
    """Refuse a rule that needs more silos than the setting ``what`` guarantees, before any training."""
    if silos < (needed := updates_needed(stage)):
        raise ConfigurationError(
            f"federated.stage1.aggregation={stage.aggregation} with malicious={stage.malicious} needs {needed} updates "
            f"in every round, and {what}={silos}. Raise that number, lower malicious, or choose another rule."
        )


def check_silos(run: PddAs2, silos: int) -> None:
    """Refuse settings that need more silos, for the rule or for a secure sum."""
    check_enough(run.stage1, silos, "the number of clients (federated.clients)")
    if run.secure_sum:
        from lit_dpret.federated.secure_sum import Session, threshold_for

        numbers = tuple(range(1, silos + 1))
        Session(name="check", clients=numbers, threshold=threshold_for(run.sum_threshold, silos))


def next_weights(
    start: Mapping[str, Tensor],
    updates: Mapping[str, Mapping[str, Tensor]],
    shares: Mapping[str, float],
    run: PddAs2,
    *,
    where: str,
    faults: list[str],
    least: int = 1,
) -> tuple[Weights, list[str]]:
    """Return the next global weights, and the silos whose updates they contain; none if the old weights are kept."""
    good: dict[str, Mapping[str, Tensor]] = {}
    for name, update in updates.items():
        try:
            check_weights(f"client {name!r}", update, start)
            check_norm(f"client {name!r}", start, update, run.update_norm)
            good[name] = update
        except DataError as error:
            faults.append(f"{where}: {error}")
    needed = max(least, updates_needed(run.stage1))
    if len(good) < needed:
        raise DataError(
            f"{len(good)} silos sent a usable update, and {needed} are needed (federated.min_clients, "
            "federated.stage1.aggregation).",
            kind="too few clients",
        )
    # The bound also applies to the result: a rule is not trusted to stay within it.
    found = weighted_mean(good, shares) if run.stage1.aggregation == "mean" else _robust(good, run.stage1)
    try:
        return good_weights(start, found, run.update_norm), sorted(good)
    except DataError as error:
        faults.append(f"{where}: {error}")
        return dict(start), []


def good_weights(start: Mapping[str, Tensor], found: Weights, most: float | None) -> Weights:
    """Return the result of a round; refuse one that is not finite or is too far from ``start``."""
    try:
        check_weights("the result", found, start)
        check_norm("the result", start, found, most)
    except DataError as error:
        raise DataError(
            f"{error} The round is void, and the next one starts from the same weights.", kind="bad sum"
        ) from error
    return found


def _robust(updates: Mapping[str, Mapping[str, Tensor]], stage: Stage1) -> Weights:
    from lit_dpret.federated.flower.library import robust_rules

    names, keys = sorted(updates), sorted(next(iter(updates.values())))
    count, wrong = len(names), stage.malicious
    rules = robust_rules()
    made: dict[str, Callable[..., list[Any]]] = {
        "median": rules["median"],
        # A quarter more than requested: multiplied by the count, it truncates to the right number despite rounding.
        "trimmed_mean": partial(rules["trimmed_mean"], proportiontocut=(wrong + 0.25) / count),
        "krum": partial(rules["krum"], num_malicious=wrong, to_keep=0),
        "multi_krum": partial(rules["krum"], num_malicious=wrong, to_keep=count - wrong),
    }
    found = made[stage.aggregation](
        [([updates[name][key].float().numpy(force=True) for key in keys], 1) for name in names]
    )
    return {key: torch.from_numpy(np.asarray(value)).float() for key, value in zip(keys, found, strict=True)}
