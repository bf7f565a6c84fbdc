"""Fed-negatives between silos, carried by the server: merged by it in clear, or sealed and only passed on.

Both ways give every silo that asked the records of its message ``train.personalise``, from one message to each silo
that is asked, for all who ask it. Sealed, the server knows who asks whom, for it decides that, and how much they send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights
from lit_dpret.federated.flower.connected import ConnectedSilos
from lit_dpret.federated.flower.library import ConfigRecord, RecordDict
from lit_dpret.federated.flower.payloads import (
    block_of,
    body_of,
    body_record,
    bytes_of,
    bytes_record,
    is_number,
    pool_record,
    rows_of,
    rows_record,
)
from lit_dpret.federated.negatives import SENT_AS, Block, merged_pool, select_clients

# Records of the message ``train.personalise``, by silo.
Pools = dict[str, dict[str, Any]]

# By sender the message with its letters' bodies, and the boxes in it by receiver.
Letters = Mapping[str, tuple[RecordDict, dict[int, bytes]]]


class Relay:
    """One refresh of all silos' negatives."""

    def __init__(
        self, silos: ConnectedSilos, names: Sequence[str], weights: Weights, refresh: int, *, dim: int
    ) -> None:
        self.silos, self.weights, self.refresh, self.dim = silos, weights, refresh, dim
        self.settings, self.numbers = silos.settings, silos.numbers(names)  # silos seal under these numbers
        self.where = f"refresh {refresh}"

    def pools(self) -> Pools:
        """Return what each silo that asked gets to train with."""
        return self._sealed() if self.settings.seal else self._in_clear()

    def report_refusals(self, name: str, content: RecordDict) -> None:
        """Report the letters that a silo says it has left out."""
        named = {number: other for other, number in self.numbers.items()}
        for number, why in content.config_records.get("refused", ConfigRecord()).items():
            other = named.get(int(number)) if is_number(number) else None
            self._fault(f"client {name!r} left out what came from client {other!r}: it {str(why)[:80]}.")

    # -- in clear ------------------------------------------------------------------------------

    def _in_clear(self) -> Pools:
        stage, names = self.settings.stage2, list(self.numbers)
        requests = {name: self._message(name) for name in names}
        rows: dict[str, Tensor] = self.silos.ask(
            "query.fedneg_request",
            requests,
            lambda name, content: rows_of(content, f"client {name!r}", dim=self.dim),
            self.where,
        )
        asked = self._askers(list(rows), names)
        serving = {name: self._asking(name, [rows[asker] for asker in listed]) for name, listed in asked.items()}
        blocks: dict[str, list[Block]] = {asker: [] for asker in rows}
        for name, content in self.silos.exchange("query.fedneg_serve", serving, self.where).items():
            for place, asker in enumerate(asked[name]):
                says_nothing = stage.request == "none"
                count, limit = (1, stage.n) if says_nothing else (len(rows[asker]), stage.top_k)
                record = "block.0" if says_nothing else f"block.{place}"
                try:
                    block = block_of(content, name, rows=count, dim=self.dim, limit=limit, name=record)
                    blocks[asker].append(block)
                except DataError as error:
                    self.silos.faults.append(f"{self.where} of client {asker!r}: {error}")
        found: Pools = {}
        for asker, answers in blocks.items():
            pool = merged_pool(answers, rows[asker], stage)
            found[asker] = {"pool": pool_record(pool, send_as=SENT_AS[stage.send_as])}
        return found

    def _asking(self, name: str, rows: list[Tensor]) -> RecordDict:
        if self.settings.stage2.request == "none":  # requests that say nothing are all the same one
            rows = [torch.empty(0, self.dim)]
        content = self._message(name, askers=len(rows))
        for place, one in enumerate(rows):
            content[f"rows.{place}"] = rows_record(one)
        return content

    # -- sealed --------------------------------------------------------------------------------

    def _sealed(self) -> Pools:
        numbers = self.numbers
        begun = {name: self._message(name, number=number) for name, number in numbers.items()}
        keys: dict[str, bytes] = self.silos.ask("query.seal_key", begun, self._own_key, self.where)
        requests = {name: self._message(name) for name in keys}
        for name, content in requests.items():
            content["keys"] = bytes_record({numbers[one]: keys[one] for one in self._selected(name, list(keys))})
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
        """Exchange messages; return the letters in the answers, and report those that silos left out."""

        def read(name: str, content: RecordDict) -> tuple[RecordDict, dict[int, bytes]]:
            self.report_refusals(name, content)
            return content, bytes_of(content, "boxes", f"client {name!r}")

        return self.silos.ask(kind, contents, read, self.where)

    def _carry(self, content: RecordDict, to: str, kind: str, letters: Letters, keys: Mapping[str, bytes]) -> None:
        """Put the letters to one silo into a message: bodies, boxes, and the keys of their senders."""
        boxes: dict[int, bytes] = {}
        for name, (sent, found) in letters.items():
            own = f"{kind}.{self.numbers[to]}"  # an answer to one silo; a request, or number 0, has one body for all
            record = kind if kind == "request" else own if own in sent.array_records else f"{kind}.0"
            try:
                content[f"{kind}.{self.numbers[name]}"] = body_record(body_of(sent, record, f"client {name!r}"))
                boxes[self.numbers[name]] = found[self.numbers[to]]
            except DataError as error:
                self._fault(str(error))
            except KeyError:
                self._fault(f"client {name!r} sealed no letter for client {to!r}.")
        content["boxes"] = bytes_record(boxes)
        content["keys"] = bytes_record({self.numbers[name]: keys[name] for name in letters})

    def _own_key(self, name: str, content: RecordDict) -> bytes:
        found = bytes_of(content, "keys", f"client {name!r}")
        if set(found) != {self.numbers[name]}:
            raise DataError(f"Client {name!r} gave a key that is not its own.", kind="bad protocol")
        return found[self.numbers[name]]

    # -- both ----------------------------------------------------------------------------------

    def _selected(self, asker: str, names: list[str]) -> list[str]:
        run = self.settings
        return select_clients(asker, names, run.stage2, seed=run.seed, refresh=self.refresh)

    def _askers(self, asking: list[str], names: list[str]) -> dict[str, list[str]]:
        """Map each silo that is asked to those who ask it."""
        askers: dict[str, list[str]] = {name: [] for name in names}
        for asker in asking:
            for name in self._selected(asker, names):
                askers[name].append(asker)
        return {name: listed for name, listed in askers.items() if listed}

    def _message(self, name: str, **facts: Any) -> RecordDict:
        return self.silos.about(self.weights, name, refresh=self.refresh, **facts)

    def _fault(self, what: str) -> None:
        self.silos.faults.append(f"{self.where}: {what}")
