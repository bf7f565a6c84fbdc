"""From the silos' updates to the next global weights, where some of the silos may send anything.

``mean`` is FedAvg: one silo moves it as far as ``federated.update_norm`` lets it. The others are Flower's own
functions, for servers that see every update: the median and the trimmed mean of each weight (Yin et al., 1803.01498),
and Krum, the update that is nearest to its neighbours, or the mean of the nearest (Blanchard et al., NeurIPS 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import Weights, check_norm, check_weights, weighted_mean
from lit_dpret.federated.settings import PddAs2, Stage1


def updates_needed(stage: Stage1) -> int:
    """How many updates the rule needs, so that ``federated.stage1.malicious`` of them do not decide."""
    wrong = stage.malicious
    return {"mean": 1, "median": 2 * wrong + 1, "trimmed_mean": 2 * wrong + 1}.get(stage.aggregation, 2 * wrong + 3)


def check_enough(stage: Stage1, silos: int, what: str) -> None:
    """Refuse a rule for which there are too few silos, before anything is trained.

    Args:
        stage: The settings.
        silos: How many a round may be of.
        what: Which setting says so.

    Raises:
        ConfigurationError: There are too few.
    """
    if silos < (needed := updates_needed(stage)):
        raise ConfigurationError(
            f"federated.stage1.aggregation={stage.aggregation} with federated.stage1.malicious={stage.malicious} needs "
            f"{needed} updates in every round, and {what}={silos}. Raise it, or choose another rule."
        )


def check_silos(run: PddAs2, silos: int) -> None:
    """Refuse what so many silos, all of them, can never meet, before anything is trained.

    Raises:
        ConfigurationError: There are too few for the rule or for a secure sum, or the package of the latter is missing.
    """
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
    """The next global weights, and whose updates they are made of: none, where the last good weights are kept.

    Args:
        start: The global weights of the round.
        updates: Each silo's weights after it.
        shares: How much each counts under ``aggregation=mean``; the other rules count all alike.
        run: The settings.
        where: The round, for the faults.
        faults: Told of updates that are left out, by name, and of a result that is not taken.
        least: Fewer good updates than these are not combined.

    Raises:
        DataError: There are too few good updates.
    """
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
            f"{len(good)} silos sent an update, and {needed} that can be used are needed (federated.min_clients, "
            "federated.stage1.aggregation).",
            kind="too few clients",
        )
    found = weighted_mean(good, shares) if run.stage1.aggregation == "mean" else _robust(good, run.stage1)
    try:
        return good_weights(start, found, run.update_norm), sorted(good)
    except DataError as error:
        faults.append(f"{where}: {error}")
        return dict(start), []


def good_weights(start: Mapping[str, Tensor], found: Weights, most: float | None) -> Weights:
    """The result of a round, where it is one.

    Raises:
        DataError: It is not finite, or further from the weights before than one silo may go.
    """
    try:
        check_weights("the result", found, start)
        check_norm("the result", start, found, most)
    except DataError as error:
        raise DataError(
            f"{error} The round is void: the next one begins with the weights that this one began with.", kind="bad sum"
        ) from error
    return found


def _robust(updates: Mapping[str, Mapping[str, Tensor]], stage: Stage1) -> Weights:
    """Flower's rules."""
    from lit_dpret.federated.flower.library import robust_rules

    names, keys = sorted(updates), sorted(next(iter(updates.values())))
    count, wrong = len(names), stage.malicious
    rules = robust_rules()
    made: dict[str, Callable[..., list[Any]]] = {
        "median": rules["median"],
        # A quarter more than asked for: the product with the count is a whole number again, whatever its rounding.
        "trimmed_mean": partial(rules["trimmed_mean"], proportiontocut=(wrong + 0.25) / count),
        "krum": partial(rules["krum"], num_malicious=wrong, to_keep=0),
        "multi_krum": partial(rules["krum"], num_malicious=wrong, to_keep=count - wrong),
    }
    found = made[stage.aggregation](
        [([updates[name][key].float().numpy(force=True) for key in keys], 1) for name in names]
    )
    return {key: torch.from_numpy(np.asarray(value)).float() for key, value in zip(keys, found, strict=True)}
