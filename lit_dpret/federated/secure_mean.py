"""The weighted mean of the clients' updates by a secure sum: the masked vectors, and the mean from their sum.

Vectors are whole numbers modulo 2^32, in which masks cancel exactly. A client's weight is at most 1 and is masked
together with its change, so that the server divides by the sum of the weights without knowing any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights, check_norm, check_weights, good_weights
from lit_dpret.federated.keys import new_identity
from lit_dpret.federated.secure_sum import Client, Server, Session, Words, threshold_for
from lit_dpret.federated.settings import PddAs2

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """Values in [-limit, limit], with a step such that the sum of ``clients`` of them cannot wrap.

    Guarantees:
        - ``decode`` of the sum modulo 2^32 of at most ``clients`` encodings is the sum of the rounded values. It
          differs from the sum of the values by at most ``error`` in every coordinate.
    """

    limit: float  # the largest absolute value of one coordinate; larger ones are clipped
    clients: int  # the largest number of summands

    @property
    def scale(self) -> float:
        """Steps per unit, a power of two."""
        return float(2.0 ** np.floor(np.log2((2**31 - 1) / (self.clients * self.limit) - 1 / self.limit)))

    @property
    def error(self) -> float:
        """The largest rounding error of one coordinate of the sum, for values within the limit."""
        return self.clients * 0.5 / self.scale

    def encode(self, values: Values) -> Words:
        """Return finite values as integers, clipped to the limit."""
        whole = np.rint(np.clip(values, -self.limit, self.limit) * self.scale).astype(np.int64)
        return (whole & 0xFFFFFFFF).astype(np.uint32)

    def decode(self, words: Words) -> Values:
        return words.astype(np.uint32).view(np.int32).astype(np.float64) / self.scale


def vector_of(
    start: Mapping[str, Tensor], update: Mapping[str, Tensor], weight: float, limit: float
) -> tuple[Values, int]:
    """Return the vector to mask, a client's weighted change and its weight; and the number of clipped values."""
    check_weights("this client's update", update, start)
    changes = torch.cat([(update[key].double() - start[key].double()).flatten() for key in sorted(start)])
    cut = int((changes.abs() > limit).sum())
    flat = torch.cat([changes.clamp(-limit, limit), torch.ones(1, dtype=torch.float64)]) * weight
    found: Values = np.asarray(flat.numpy(), dtype=np.float64)
    return found, cut


def mean_of(
    start: Mapping[str, Tensor], total: Values, fixed: FixedPoint, *, clients: int, limit: float, norm: float | None
) -> Weights:
    """Return the next global weights, given the sum of all clients' vectors.

    Guarantees:
        - No weight moves by more than ``limit`` (before rounding to float32), whatever sum arrives.
        - If all clients keep to the limit, the change is within (1 + ``limit``) ``fixed.error`` / W of the weighted
          mean of their changes, where W is the sum of their weights as it arrives here.
    """
    size = sum(value.numel() for value in start.values())
    weight, error = (float(total[-1]) if len(total) == size + 1 else 0.0), fixed.error
    if not 0 < weight <= clients + error or float(np.abs(total[:-1]).max()) > limit * (weight + error) + error:
        raise DataError(
            "The sum cannot be one of updates within federated.update_limit: a silo sent something else, and under "
            "masks it cannot be identified. The round is void.",
            kind="bad sum",
        )
    summed = torch.from_numpy(total)
    found: Weights = {}
    at = 0
    for key in sorted(start):
        change = summed[at : at + start[key].numel()].view(start[key].shape) / weight
        # The mean of changes within the limit is within it too. If a sum has little weight, rounding can exceed it.
        found[key] = (start[key].double() + change.clamp(-limit, limit)).float()
        at += start[key].numel()
    return good_weights(start, found, norm)


def words_for(limit: float, clients: int) -> FixedPoint:
    """Return the encoding for vectors of this many clients, the same for all clients and the server."""
    return FixedPoint(limit=max(limit, 1.0), clients=clients)


def secure_mean(
    start: Mapping[str, Tensor],
    updates: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, float],
    run: PddAs2,
    *,
    name: str,
    faults: list[str],
) -> Weights:
    """Return ``start`` plus the weighted mean of the clients' changes; all roles run in this process, with new keys.

    Weights are in (0, 1], and no two sums may share a ``name``. ``faults`` receives the clients that are left out.
    """
    names = sorted(updates)
    numbers = tuple(range(1, len(names) + 1))
    limit, norm = run.update_limit, run.update_norm
    session = Session(name=name, clients=numbers, threshold=threshold_for(run.sum_threshold, len(names)))
    fixed = words_for(limit, len(names))
    pairs = {number: new_identity() for number in session.clients}
    roster = {number: public for number, (_, public) in pairs.items()}
    clients = {number: Client(session, number, identity=pairs[number][0], roster=roster) for number in pairs}
    server = Server(session)
    server.keys = {number: client.advertise() for number, client in clients.items()}
    routed = server.route({number: client.share(server.keys.values()) for number, client in clients.items()})
    for number, client in clients.items():
        who = names[number - 1]
        try:
            check_weights(f"client {who!r}", updates[who], start)
            check_norm(f"client {who!r}", start, updates[who], norm)
            vector, _ = vector_of(start, updates[who], weights[who], limit)
        except DataError as error:
            faults.append(f"{name}: {error}")
            continue
        server.masked[number] = client.mask(fixed.encode(vector), routed[number])
    lists = (server.active, server.dead)
    signatures = {number: clients[number].sign(*lists) for number in server.active}
    answers = [clients[number].unmask(*lists, signatures) for number in server.active]
    total = fixed.decode(server.total(answers))
    return mean_of(start, total, fixed, clients=len(server.active), limit=limit, norm=norm)
