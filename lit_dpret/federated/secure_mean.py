"""The weighted mean of the clients' updates by a secure sum, all roles in one process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights, check_weights
from lit_dpret.federated.fixed_point import FixedPoint, Values
from lit_dpret.federated.secure_sum import Client, Server, Session


def secure_mean(
    start: Mapping[str, Tensor],
    updates: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, float],
    *,
    limit: float,
    name: str,
    faults: list[str] | None = None,
) -> Weights:
    """``start`` plus the weighted mean of the clients' changes, of which the server sees nothing but sums.

    A client's weight is at most 1, and goes under the masks with its change, so that the server divides by the sum
    of the weights without knowing one of them.

    Args:
        start: The global weights of the round.
        updates: Each client's weights after it.
        weights: In (0, 1].
        limit: The largest change of one weight; larger ones are cut.
        name: Of the sum; no two may share one.
        faults: Told of clients that are left out.

    Raises:
        DataError: Fewer clients than the threshold are left.
    """
    names = sorted(updates)
    session = Session(name=name, clients=tuple(range(1, len(names) + 1)))
    fixed = FixedPoint(limit=max(limit, 1.0), clients=len(names))
    clients = {number: Client(session, number) for number in session.clients}
    server = Server(session)
    server.keys = {number: client.advertise() for number, client in clients.items()}
    routed = server.route({number: client.share(server.keys.values()) for number, client in clients.items()})
    for number, client in clients.items():
        who = names[number - 1]
        try:
            check_weights(f"client {who!r}", updates[who], start)
            vector = _vector(start, updates[who], weights[who], limit)
        except DataError as error:
            if faults is not None:
                faults.append(str(error))
            continue
        server.masked[number] = client.mask(fixed.encode(vector)[0], routed[number])
    answers = [clients[number].unmask(server.active, server.dead) for number in server.active]
    total = torch.from_numpy(fixed.decode(server.total(answers)))
    change, weight = total[:-1], float(total[-1])
    found: Weights = {}
    at = 0
    for key in sorted(start):
        size = start[key].numel()
        found[key] = (start[key].double() + change[at : at + size].view(start[key].shape) / weight).float()
        at += size
    return found


def _vector(start: Mapping[str, Tensor], update: Mapping[str, Tensor], weight: float, limit: float) -> Values:
    changes = [(update[key].double() - start[key].double()).flatten().clamp(-limit, limit) for key in sorted(start)]
    flat = torch.cat([*changes, torch.ones(1, dtype=torch.float64)]) * weight
    found: Values = np.asarray(flat.numpy(), dtype=np.float64)
    return found
