"""The server's side of a round under masks: it learns the sum and who took part.

A silo may disappear before any of the messages. One that has shared nothing is left out; one that has shared and sends
no vector is recovered from the others' shares; one that does not unmask is not needed as long as enough do. Where fewer
than the threshold are left, nothing can be unmasked, and the round is refused by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights, fingerprint
from lit_dpret.federated.flower.connected import ConnectedSilos
from lit_dpret.federated.flower.library import RecordDict
from lit_dpret.federated.flower.payloads import (
    bytes_of,
    bytes_record,
    digest_of,
    keys_of,
    keys_record,
    unmasking_of,
    weights_record,
    words_of,
)
from lit_dpret.federated.keys import SIGNATURE_BYTES
from lit_dpret.federated.secure_mean import mean_of, words_for
from lit_dpret.federated.secure_sum import Keys, Server
from lit_dpret.federated.silo_sum import SumPlan
from lit_dpret.federated.storage import save_json


class MaskedRound:
    """One round of stage 1 by a secure sum.

    Guarantees:
        - It returns the weighted mean of the silos whose vectors arrived, to the step of `FixedPoint`.
        - It asks each silo only for shares of the seed of every vector that arrived and of the key of every other.
        - Lists are signed and a round is unmasked once. A round that fails at that, or whose server was ended in the
          middle of it, is lost: the weights stay as they were, and the loss is reported.
    """

    def __init__(
        self, silos: ConnectedSilos, names: Sequence[str], weights: Weights, number: int, *, least: int
    ) -> None:
        self.silos, self.weights, self.number, self.least = silos, weights, number, least
        self.settings, self.numbers = silos.settings, silos.numbers(names)
        self.where = f"stage 1, round {number}"
        clients = range(1, silos.listed + 1) if self.settings.roster else sorted(self.numbers.values())
        self._plan = SumPlan(
            run=digest_of(self.settings), round=number, attempt=secrets.token_hex(16),
            weights=fingerprint(weights), clients=tuple(clients),
        )  # fmt: skip
        self._server = Server(self._plan.session(self.settings.sum_threshold))

    def run(self, marker: Path) -> tuple[Weights, list[str]]:
        """Run all acts; return the next global weights, and the names of the silos that they are made of.

        The file ``marker`` records that silos were asked to agree to a list of this round.
        """
        if marker.is_file():
            return self._lost("The server was ended while this round was unmasked.")
        self.gather()
        # From here on silos sign: a server that starts again must not ask them for another list of this round.
        save_json(marker, {"attempt": self._plan.attempt})
        try:
            return self.unmask()
        except DataError as error:
            return self._lost(str(error))

    def _lost(self, why: str) -> tuple[Weights, list[str]]:
        self.silos.faults.append(
            f"{self.where}: {why} Silos agree to one list of a round, so it is lost and its updates stay unknown; the "
            "next one begins with the weights that this one began with."
        )
        return self.weights, []

    def gather(self) -> None:
        """Acts 1 to 3: collect the masked vectors."""
        self._need(len(self.numbers), "are there", least=self.least)  # before one of them trains for nothing
        sent, clients = weights_record(self.weights), list(self._plan.clients)
        contents: dict[str, RecordDict] = {}
        for name, number in self.numbers.items():
            contents[name] = self._message(round=self.number, number=number, clients=clients)
            contents[name]["weights"] = sent
        keys = self._ask("train.secagg_setup", contents, self._own_keys)
        self._server.keys = {one.client: one for one in keys.values()}
        self._need(len(keys), "advertised keys")

        advertised = keys_record(self._server.keys.values())
        contents = {name: self._message() for name in keys}
        for content in contents.values():
            content["keys"] = advertised
        shares = self._ask("train.secagg_share", contents, self._all_shares)
        routed = self._server.route({self.numbers[name]: boxes for name, boxes in shares.items()})
        self._need(len(shares), "shared their secrets")

        contents = {name: self._message() for name in shares}
        for name, content in contents.items():
            content["shares"] = bytes_record(routed[self.numbers[name]])
        size = 1 + sum(value.numel() for value in self.weights.values())
        masked = self._ask(
            "train.secagg_masked", contents, lambda name, content: words_of(content, f"client {name!r}", size=size)
        )
        self._server.masked = {self.numbers[name]: words for name, words in masked.items()}
        self._need(len(masked), "sent a vector", least=self.least)

    def unmask(self) -> tuple[Weights, list[str]]:
        """Acts 4 and 5: return the next global weights, and whose updates they are made of."""
        active, dead = self._server.active, self._server.dead
        names = sorted(name for name, number in self.numbers.items() if number in active)
        contents = {name: self._message(active=active, **({"dead": dead} if dead else {})) for name in names}
        if self.settings.roster:
            signed = self._ask("train.secagg_sign", contents, self._signature)
            self._need(len(signed), "signed who is left")
            signatures = bytes_record({self.numbers[name]: one for name, one in signed.items()})
            for content in contents.values():
                content["signatures"] = signatures
        found = self._ask(
            "train.secagg_unmask",
            contents,
            lambda name, content: unmasking_of(content, f"client {name!r}", self.numbers[name], active, dead),
        )
        fixed = words_for(self.settings.update_limit, len(self._plan.clients))
        total = fixed.decode(self._server.total(found.values()))
        limit, norm = self.settings.update_limit, self.settings.update_norm
        return mean_of(self.weights, total, fixed, clients=len(names), limit=limit, norm=norm), names

    def _message(self, **facts: Any) -> RecordDict:
        return self.silos.message(attempt=self._plan.attempt, **facts)

    def _ask(
        self, kind: str, contents: Mapping[str, RecordDict], read: Callable[[str, RecordDict], Any]
    ) -> dict[str, Any]:
        return self.silos.ask(kind, contents, read, self.where)

    def _own_keys(self, name: str, content: RecordDict) -> Keys:
        found = keys_of(content, f"client {name!r}")
        if [one.client for one in found] != [self.numbers[name]]:
            raise DataError(f"Client {name!r} advertised keys that are not its own.", kind="bad protocol")
        return found[0]

    def _all_shares(self, name: str, content: RecordDict) -> dict[int, bytes]:
        found = bytes_of(content, "shares", f"client {name!r}")
        if set(found) != set(self._server.keys) - {self.numbers[name]}:
            raise DataError(f"Client {name!r} did not share its secrets with everybody.", kind="bad protocol")
        return found

    def _signature(self, name: str, content: RecordDict) -> bytes:
        found = bytes_of(content, "signatures", f"client {name!r}", size=SIGNATURE_BYTES)
        if self.numbers[name] not in found:
            raise DataError(f"Client {name!r} signed nothing.", kind="bad protocol")
        return found[self.numbers[name]]

    def _need(self, count: int, what: str, *, least: int = 0) -> None:
        least = max(least, self._server.session.threshold)
        if count < least:
            raise DataError(
                f"{count} silos {what} and {least} are needed (federated.sum_threshold, min_clients): the round is "
                "given up, and nothing of it can be unmasked.",
                kind="too few clients",
            )
