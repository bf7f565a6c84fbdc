"""The server's side of a masked round, from which it learns only the sum, and of relayed negatives.

A silo may disappear before any message. One that shared nothing is left out. One that shared but sends no vector is
recovered from the others' shares. With fewer silos than the threshold, nothing is unmasked and the round is refused.
Negatives are merged by the server in clear, or sealed and only passed on.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights, fingerprint
from lit_dpret.federated.flower import payloads
from lit_dpret.federated.flower.connected import ConnectedSilos
from lit_dpret.federated.flower.library import ConfigRecord, RecordDict
from lit_dpret.federated.keys import SIGNATURE_BYTES
from lit_dpret.federated.negatives import SENT_AS, Block, merged_pool, select_clients
from lit_dpret.federated.secure_mean import mean_of, words_for
from lit_dpret.federated.secure_sum import Keys, Server
from lit_dpret.federated.silo_sum import SumPlan
from lit_dpret.federated.storage import save_json


class MaskedRound:
    """One round of stage 1 by a secure sum.

    Guarantees:
        - It returns the weighted mean of the silos whose vectors arrived, to the step of `FixedPoint`.
        - It asks each silo only for shares of the seed of every vector that arrived and of the key of every other silo.
        - Lists are signed and a round is unmasked once. If that fails, or the server is killed in the middle of it, the
          round is lost: the weights stay unchanged, and the loss is reported.
    """

    def __init__(
        self, silos: ConnectedSilos, names: Sequence[str], weights: Weights, number: int, *, least: int
    ) -> None:
        self.silos, self.weights, self.number, self.least = silos, weights, number, least
        self.settings, self.numbers = silos.settings, silos.numbers(names)
        self.where = f"stage 1, round {number}"
        clients = range(1, silos.listed + 1) if self.settings.roster else sorted(self.numbers.values())
        self._plan = SumPlan(
            run=payloads.digest_of(self.settings), round=number, attempt=secrets.token_hex(16),
            weights=fingerprint(weights), clients=tuple(clients),
        )  # fmt: skip
        self._server = Server(self._plan.session(self.settings.sum_threshold))

    def run(self, marker: Path) -> tuple[Weights, list[str]]:
        """Run all phases; return the next global weights and the names of the contributing silos.

        The file ``marker`` records that silos were asked to agree to a list of this round.
        """
        if marker.is_file():
            return self._lost("The server stopped while it unmasked this round.")
        self.gather()
        # From here on silos sign: a restarted server must not ask them for a different list of this round.
        save_json(marker, {"attempt": self._plan.attempt})
        try:
            return self.unmask()
        except DataError as error:
            return self._lost(str(error))

    def _lost(self, why: str) -> tuple[Weights, list[str]]:
        self.silos.faults.append(
            f"{self.where}: {why} Silos agree to one list per round, so the round is lost; the next one starts from "
            "the same weights."
        )
        return self.weights, []

    def gather(self) -> None:
        """Run phases 1 to 3: collect the masked vectors."""
        self._need(len(self.numbers), "are connected", least=self.least)  # before silos train for nothing
        sent, clients = {"weights": payloads.tensors_record(self.weights)}, list(self._plan.clients)
        contents = {
            name: self._message(sent, round=self.number, number=number, clients=clients)
            for name, number in self.numbers.items()
        }
        keys = self._ask("train.secagg_setup", contents, self._own_keys)
        self._server.keys = {one.client: one for one in keys.values()}
        self._need(len(keys), "advertised keys")

        advertised = {"keys": payloads.keys_record(self._server.keys.values())}
        contents = {name: self._message(advertised) for name in keys}
        shares = self._ask("train.secagg_share", contents, self._all_shares)
        routed = self._server.route({self.numbers[name]: boxes for name, boxes in shares.items()})
        self._need(len(shares), "shared their secrets")

        contents = {
            name: self._message({"shares": payloads.bytes_record(routed[self.numbers[name]])}) for name in shares
        }
        size = 1 + sum(value.numel() for value in self.weights.values())

        def words(name: str, content: RecordDict) -> Any:
            return payloads.words_of(content, f"client {name!r}", size=size)

        masked = self._ask("train.secagg_masked", contents, words)
        self._server.masked = {self.numbers[name]: words for name, words in masked.items()}
        self._need(len(masked), "sent a vector", least=self.least)

    def unmask(self) -> tuple[Weights, list[str]]:
        """Run phases 4 and 5: return the next global weights and the contributing silos."""
        active, dead = self._server.active, self._server.dead
        names = sorted(name for name, number in self.numbers.items() if number in active)
        contents = {name: self._message(active=active, **({"dead": dead} if dead else {})) for name in names}
        if self.settings.roster:
            signed = self._ask("train.secagg_sign", contents, self._signature)
            self._need(len(signed), "signed the lists")
            signatures = payloads.bytes_record({self.numbers[name]: one for name, one in signed.items()})
            for content in contents.values():
                content["signatures"] = signatures
        found = self._ask(
            "train.secagg_unmask",
            contents,
            lambda name, content: payloads.unmasking_of(content, f"client {name!r}", self.numbers[name], active, dead),
        )
        fixed = words_for(self.settings.update_limit, len(self._plan.clients))
        total = fixed.decode(self._server.total(found.values()))
        limit, norm = self.settings.update_limit, self.settings.update_norm
        return mean_of(self.weights, total, fixed, clients=len(names), limit=limit, norm=norm), names

    def _message(self, records: Mapping[str, Any] = {}, /, **facts: Any) -> RecordDict:
        return self.silos.message(records, attempt=self._plan.attempt, **facts)

    def _ask(
        self, kind: str, contents: Mapping[str, RecordDict], read: Callable[[str, RecordDict], Any]
    ) -> dict[str, Any]:
        return self.silos.ask(kind, contents, read, self.where)

    def _own_keys(self, name: str, content: RecordDict) -> Keys:
        found = payloads.keys_of(content, f"client {name!r}")
        if [one.client for one in found] != [self.numbers[name]]:
            raise DataError(f"Client {name!r} advertised keys that are not its own.", kind="bad protocol")
        return found[0]

    def _all_shares(self, name: str, content: RecordDict) -> dict[int, bytes]:
        found = payloads.bytes_of(content, "shares", f"client {name!r}")
        if set(found) != set(self._server.keys) - {self.numbers[name]}:
            raise DataError(f"Client {name!r} did not share its secrets with all others.", kind="bad protocol")
        return found

    def _signature(self, name: str, content: RecordDict) -> bytes:
        found = payloads.bytes_of(content, "signatures", f"client {name!r}", size=SIGNATURE_BYTES)
        if self.numbers[name] not in found:
            raise DataError(f"Client {name!r} signed nothing.", kind="bad protocol")
        return found[self.numbers[name]]

    def _need(self, count: int, what: str, *, least: int = 0) -> None:
        least = max(least, self._server.session.threshold)
        if count < least:
            raise DataError(
                f"{count} silos {what} and {least} are needed (federated.sum_threshold, federated.min_clients).",
                kind="too few clients",
            )


# -- negatives


# Records of the message ``train.personalise``, by silo.
Pools = dict[str, dict[str, Any]]

# By sender: the message with its letters' bodies, and the boxes in it by receiver.
Letters = Mapping[str, tuple[RecordDict, dict[int, bytes]]]


class Relay:
    """One refresh of all silos' negatives."""

    def __init__(
        self, silos: ConnectedSilos, names: Sequence[str], weights: Weights, refresh: int, *, dim: int
    ) -> None:
        self.silos, self.weights, self.refresh, self.dim = silos, weights, refresh, dim
        self.settings, self.numbers = silos.settings, silos.numbers(names)  # the numbers under which silos seal
        self.where = f"refresh {refresh}"

    def pools(self) -> Pools:
        return self._sealed() if self.settings.seal else self._in_clear()

    def report_refusals(self, name: str, content: RecordDict) -> None:
        """Report the messages that a silo says it has dropped."""
        named = {number: other for other, number in self.numbers.items()}
        for number, why in content.config_records.get("refused", ConfigRecord()).items():
            other = named.get(int(number)) if payloads.is_number(number) else None
            self._fault(f"client {name!r} left out what came from client {other!r}: {str(why)[:80]}.")

    # -- in clear ------------------------------------------------------------------------------

    def _in_clear(self) -> Pools:
        stage, names = self.settings.stage2, list(self.numbers)
        requests = {name: self._message(name) for name in names}
        rows: dict[str, Tensor] = self.silos.ask(
            "query.fedneg_request",
            requests,
            lambda name, content: payloads.rows_of(content, f"client {name!r}", dim=self.dim),
            self.where,
        )
        asked = self._askers(list(rows), names)
        serving = {name: self._asking(name, [rows[asker] for asker in listed]) for name, listed in asked.items()}
        answers: dict[str, list[tuple[str, Callable[..., Block]]]] = {asker: [] for asker in rows}
        for name, content in self.silos.exchange("query.fedneg_serve", serving, self.where).items():
            for place, asker in enumerate(asked[name]):
                record = "block.0" if stage.request == "none" else f"block.{place}"
                answers[asker].append((asker, partial(payloads.block_of, content, name, dim=self.dim, name=record)))

        def refuse(asker: str, error: DataError) -> None:
            self.silos.faults.append(f"{self.where} of client {asker!r}: {error}")

        found: Pools = {}
        for asker, given in answers.items():
            pool = merged_pool(given, rows[asker], stage, refuse)
            found[asker] = {"pool": payloads.pool_record(pool, send_as=SENT_AS[stage.send_as])}
        return found

    def _asking(self, name: str, rows: list[Tensor]) -> RecordDict:
        if self.settings.stage2.request == "none":  # empty requests are all the same, so send one
            rows = [torch.empty(0, self.dim)]
        records = {f"rows.{place}": payloads.tensors_record({"rows": one.float()}) for place, one in enumerate(rows)}
        return self._message(name, records, askers=len(rows))

    # -- sealed --------------------------------------------------------------------------------

    def _sealed(self) -> Pools:
        numbers = self.numbers
        begun = {name: self._message(name, number=number) for name, number in numbers.items()}
        keys: dict[str, bytes] = self.silos.ask("query.seal_key", begun, self._own_key, self.where)
        requests: dict[str, RecordDict] = {}
        for name in keys:
            asked = {numbers[one]: keys[one] for one in self._selected(name, list(keys))}
            requests[name] = self._message(name, {"keys": payloads.bytes_record(asked)})
        letters = self._letters("query.fedneg_request", requests)

        serving: dict[str, RecordDict] = {}
        for name, listed in self._askers(list(letters), list(keys)).items():
            serving[name] = self._message(name)
            self._carry(serving[name], name, "request", {one: letters[one] for one in listed}, keys)
        answers = self._letters("query.fedneg_serve", serving)
        found: Pools = {}
        for asker in letters:
            got = {name: letter for name, letter in answers.items() if numbers[asker] in letter[1]}
            carried = RecordDict()
            self._carry(carried, asker, "answer", got, keys)
            found[asker] = dict(carried)
        return found

    def _letters(self, kind: str, contents: Mapping[str, RecordDict]) -> Letters:
        def read(name: str, content: RecordDict) -> tuple[RecordDict, dict[int, bytes]]:
            self.report_refusals(name, content)
            return content, payloads.bytes_of(content, "boxes", f"client {name!r}")

        return self.silos.ask(kind, contents, read, self.where)

    def _carry(self, content: RecordDict, to: str, kind: str, letters: Letters, keys: Mapping[str, bytes]) -> None:
        """Put the letters to one silo into a message: bodies, boxes, and the keys of their senders."""
        boxes: dict[int, bytes] = {}
        for name, (sent, found) in letters.items():
            own = f"{kind}.{self.numbers[to]}"  # an answer to one silo; a request, or answer 0, has one body for all
            record = kind if kind == "request" else own if own in sent.array_records else f"{kind}.0"
            try:
                content[f"{kind}.{self.numbers[name]}"] = payloads.body_record(
                    payloads.body_of(sent, record, f"client {name!r}")
                )
                boxes[self.numbers[name]] = found[self.numbers[to]]
            except DataError as error:
                self._fault(str(error))
            except KeyError:
                self._fault(f"client {name!r} sealed no letter for client {to!r}.")
        content["boxes"] = payloads.bytes_record(boxes)
        content["keys"] = payloads.bytes_record({self.numbers[name]: keys[name] for name in letters})

    def _own_key(self, name: str, content: RecordDict) -> bytes:
        found = payloads.bytes_of(content, "keys", f"client {name!r}")
        if set(found) != {self.numbers[name]}:
            raise DataError(f"Client {name!r} gave a key that is not its own.", kind="bad protocol")
        return found[self.numbers[name]]

    # -- both ----------------------------------------------------------------------------------

    def _selected(self, asker: str, names: list[str]) -> list[str]:
        run = self.settings
        return select_clients(asker, names, run.stage2, seed=run.seed, refresh=self.refresh)

    def _askers(self, asking: list[str], names: list[str]) -> dict[str, list[str]]:
        askers: dict[str, list[str]] = {name: [] for name in names}
        for asker in asking:
            for name in self._selected(asker, names):
                askers[name].append(asker)
        return {name: listed for name, listed in askers.items() if listed}

    def _message(self, name: str, records: Mapping[str, Any] = {}, /, **facts: Any) -> RecordDict:
        return self.silos.about(self.weights, name, records, refresh=self.refresh, **facts)

    def _fault(self, what: str) -> None:
        self.silos.faults.append(f"{self.where}: {what}")
