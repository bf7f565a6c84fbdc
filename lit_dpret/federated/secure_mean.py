"""The weighted mean of the clients' updates by a secure sum: what goes under the masks, and what comes out.

A client's weight is at most 1 and goes under the masks with its change, so that the server divides by the sum of the
weights without knowing one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights, check_weights
from lit_dpret.federated.fixed_point import FixedPoint, Values
from lit_dpret.federated.secure_sum import Client, Server, Session, threshold_for


def vector_of(
    start: Mapping[str, Tensor], update: Mapping[str, Tensor], weight: float, limit: float
) -> tuple[Values, int]:
    """What a client puts under its masks: its change times its weight, and the weight; and how much of it was cut.

    Args:
        start: The global weights of the round.
        update: The client's weights after it.
        weight: In (0, 1].
        limit: The largest change of one weight; larger ones are cut to it, which is counted.

    Raises:
        DataError: The update is not of the model, or holds values that are not finite.
    """
    check_weights("this client's update", update, start)
    changes = torch.cat([(update[key].double() - start[key].double()).flatten() for key in sorted(start)])
    cut = int((changes.abs() > limit).sum())
    flat = torch.cat([changes.clamp(-limit, limit), torch.ones(1, dtype=torch.float64)]) * weight
    found: Values = np.asarray(flat.numpy(), dtype=np.float64)
    return found, cut


def mean_of(start: Mapping[str, Tensor], total: Values) -> Weights:
    """The next global weights of the sum of all clients' vectors.

    Raises:
        DataError: The sum is of another length, or of no weight.
    """
    size = sum(value.numel() for value in start.values())
    if len(total) != size + 1 or not total[-1] > 0:
        raise DataError("The sum of the updates is not one of this model: a client sent something else.")
    summed = torch.from_numpy(total)
    found: Weights = {}
    at = 0
    for key in sorted(start):
        change = summed[at : at + start[key].numel()].view(start[key].shape)
        found[key] = (start[key].double() + change / float(total[-1])).float()
        at += start[key].numel()
    return found


def words_for(limit: float, clients: int) -> FixedPoint:
    """How the vectors of so many clients are written as words: the same for all of them and the server."""
    return FixedPoint(limit=max(limit, 1.0), clients=clients)


def secure_mean(
    start: Mapping[str, Tensor],
    updates: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, float],
    *,
    limit: float,
    name: str,
    threshold: int | None = None,
    faults: list[str] | None = None,
) -> Weights:
    """``start`` plus the weighted mean of the clients' changes, all roles in one process.

    Args:
        start: The global weights of the round.
        updates: Each client's weights after it.
        weights: In (0, 1].
        limit: The largest change of one weight; larger ones are cut.
        name: Of the sum; no two may share one.
        threshold: ``federated.sum_threshold``.
        faults: Told of clients that are left out.

    Raises:
        DataError: Fewer clients than the threshold are left.
    """
    names = sorted(updates)
    numbers = tuple(range(1, len(names) + 1))
    session = Session(name=name, clients=numbers, threshold=threshold_for(threshold, len(names)))
    fixed = words_for(limit, len(names))
    clients = {number: Client(session, number) for number in session.clients}
    server = Server(session)
    server.keys = {number: client.advertise() for number, client in clients.items()}
    routed = server.route({number: client.share(server.keys.values()) for number, client in clients.items()})
    for number, client in clients.items():
        who = names[number - 1]
        try:
            check_weights(f"client {who!r}", updates[who], start)
            vector, _ = vector_of(start, updates[who], weights[who], limit)
        except DataError as error:
            if faults is not None:
                faults.append(str(error))
            continue
        server.masked[number] = client.mask(fixed.encode(vector)[0], routed[number])
    answers = [clients[number].unmask(server.active, server.dead) for number in server.active]
    return mean_of(start, fixed.decode(server.total(answers)))
