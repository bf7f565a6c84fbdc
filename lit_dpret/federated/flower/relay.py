"""Fed-negatives between silos, carried by the server: in clear, and merged by it; or sealed, and only passed on.

Both ways give every silo that asked what goes into its message ``train.personalise``, from one message to each silo
that is asked for all who ask it. Sealed, the server knows who asks whom, for it decides that, and how much they send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.fed_negatives import SENT_AS, Block, FedPool, Site, merge_lists, pool_of, select_clients
from lit_dpret.federated.flower.library import ConfigRecord, RecordDict
from lit_dpret.federated.flower.masked_round import Exchange
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
from lit_dpret.federated.settings import PddAs2

Pools = dict[str, dict[str, Any]]
"""Records of the message ``train.personalise``, by silo."""


@dataclass(kw_only=True)
class Relay:
    """One refresh of all silos' negatives.

    Args:
        settings: Of the run.
        sites: Where the silos are, by name.
        dim: Of an embedding.
        refresh: Its number.
        exchange: Sends and receives.
        message: Makes a message to a silo about the global weights.
        faults: Told of what was left out.
    """

    settings: PddAs2
    sites: Mapping[str, Site]
    dim: int
    refresh: int
    exchange: Exchange
    message: Callable[..., RecordDict]
    faults: list[str]

    def pools(self, names: list[str], numbers: Mapping[str, int]) -> Pools:
        """What each silo that asked gets to train with.

        Args:
            names: Of the silos that are there.
            numbers: Theirs, under which they seal.
        """
        return self._sealed(names, numbers) if self.settings.seal else self._in_clear(names)

    # -- in clear ------------------------------------------------------------------------------

    def _in_clear(self, names: list[str]) -> Pools:
        stage = self.settings.stage2
        requests = {name: self.message(name, refresh=self.refresh) for name in names}
        rows: dict[str, Tensor] = self._read(
            self.exchange("query.fedneg_request", requests),
            lambda name, content: rows_of(content, f"client {name!r}", dim=self.dim),
        )
        asked = self._askers(list(rows), names)
        replies = self.exchange(
            "query.fedneg_serve", {name: self._asking(name, self._rows(rows, listed)) for name, listed in asked.items()}
        )
        blocks: dict[str, list[Block]] = {asker: [] for asker in rows}
        for name, content in replies.items():
            for asker, block in self._blocks(name, content, rows, asked[name]).items():
                blocks[asker].append(block)
        exact, found = stage.request == "exact", {}
        for asker, listed in blocks.items():
            pool: FedPool = merge_lists(listed, rows[asker], stage.top_k) if exact else pool_of(listed, self.dim)
            found[asker] = {"pool": pool_record(pool, send_as=SENT_AS[stage.send_as])}
        return found

    def _rows(self, rows: Mapping[str, Tensor], askers: list[str]) -> list[Tensor]:
        """The requests that go into one message; requests that say nothing are all the same one."""
        if self.settings.stage2.request == "none":
            return [torch.empty(0, self.dim)]
        return [rows[asker] for asker in askers]

    def _asking(self, name: str, rows: list[Tensor]) -> RecordDict:
        content = self.message(name, refresh=self.refresh, askers=len(rows))
        for place, one in enumerate(rows):
            content[f"rows.{place}"] = rows_record(one)
        return content

    def _blocks(
        self, name: str, content: RecordDict, rows: Mapping[str, Tensor], askers: list[str]
    ) -> dict[str, Block]:
        stage = self.settings.stage2
        found: dict[str, Block] = {}
        for place, asker in enumerate(askers):
            says_nothing = stage.request == "none"
            count, limit = (1, stage.n) if says_nothing else (len(rows[asker]), stage.top_k)
            record = "block.0" if says_nothing else f"block.{place}"
            try:
                found[asker] = block_of(content, name, rows=count, dim=self.dim, limit=limit, name=record)
            except DataError as error:
                self.faults.append(f"refresh {self.refresh} of client {asker!r}: {error}")
        return found

    # -- sealed --------------------------------------------------------------------------------

    def _sealed(self, names: list[str], numbers: Mapping[str, int]) -> Pools:
        named = {number: name for name, number in numbers.items()}
        begun = {name: self.message(name, refresh=self.refresh, number=numbers[name]) for name in names}
        keys: dict[str, bytes] = self._read(
            self.exchange("query.seal_key", begun), lambda name, content: _own_key(name, content, numbers[name])
        )
        asked_of = {name: self._selected(name, list(keys)) for name in keys}
        requests = {name: self.message(name, refresh=self.refresh) for name in keys}
        for name, content in requests.items():
            content["keys"] = bytes_record({numbers[one]: keys[one] for one in asked_of[name]})
        letters = self._letters(self.exchange("query.fedneg_request", requests), "request", named)

        serving: dict[str, RecordDict] = {}
        for name, listed in self._askers(list(letters), list(keys)).items():
            serving[name] = self.message(name, refresh=self.refresh)
            self._carry(serving[name], name, "request", {one: letters[one] for one in listed}, keys, numbers)
        answers = self._letters(self.exchange("query.fedneg_serve", serving), "answer", named)
        found: Pools = {}
        for asker in letters:
            got = {name: letter for name, letter in answers.items() if numbers[asker] in letter[1]}
            carried = RecordDict()
            self._carry(carried, asker, "answer", got, keys, numbers)
            found[asker] = dict(carried)
        return found

    def _letters(
        self, replies: Mapping[str, RecordDict], kind: str, named: Mapping[int, str]
    ) -> dict[str, tuple[RecordDict, dict[int, bytes]]]:
        """By sender the message with its bodies, and the boxes in it by receiver."""
        found = {}
        for name, content in replies.items():
            self.told(name, content, named)
            try:
                found[name] = (content, bytes_of(content, "boxes", f"client {name!r}"))
            except DataError as error:
                self.faults.append(f"refresh {self.refresh}: {error}")
        return found

    def _carry(
        self, content: RecordDict, to: str, kind: str, letters: Mapping[str, tuple[RecordDict, dict[int, bytes]]],
        keys: Mapping[str, bytes], numbers: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Put the letters to one silo into a message: bodies, boxes, and the keys of their senders."""
        boxes: dict[int, bytes] = {}
        for name, (sent, found) in letters.items():
            own = f"{kind}.{numbers[to]}"  # an answer to one silo alone; a body for all is a request, or number 0
            record = kind if kind == "request" else own if own in sent.array_records else f"{kind}.0"
            try:
                content[f"{kind}.{numbers[name]}"] = body_record(body_of(sent, record, f"client {name!r}"))
                boxes[numbers[name]] = found[numbers[to]]
            except (DataError, KeyError) as error:
                why = error if isinstance(error, DataError) else f"client {name!r} sealed no letter for client {to!r}."
                self.faults.append(f"refresh {self.refresh}: {why}")
        content["boxes"] = bytes_record(boxes)
        content["keys"] = bytes_record({numbers[name]: keys[name] for name in letters})

    def told(self, name: str, content: RecordDict, named: Mapping[int, str]) -> None:
        """Name the letters that a silo says it has left out."""
        for number, why in content.config_records.get("refused", ConfigRecord()).items():
            other = named.get(int(number)) if is_number(number) else None
            self.faults.append(
                f"refresh {self.refresh}: client {name!r} left out what came from client {other!r}: it {str(why)[:80]}."
            )

    # -- both ----------------------------------------------------------------------------------

    def _selected(self, asker: str, names: list[str]) -> list[str]:
        stage = self.settings.stage2
        sites = {name: self.sites.get(name, Site()) for name in names}
        how, count, seed = stage.select, stage.select_count, self.settings.seed
        return select_clients(asker, sites, how, count=count, seed=seed, refresh=self.refresh)

    def _askers(self, asking: list[str], names: list[str]) -> dict[str, list[str]]:
        """By silo that is asked, who asks it."""
        askers: dict[str, list[str]] = {name: [] for name in names}
        for asker in asking:
            for name in self._selected(asker, names):
                askers[name].append(asker)
        return {name: listed for name, listed in askers.items() if listed}

    def _read(self, contents: Mapping[str, RecordDict], read: Callable[[str, RecordDict], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, content in contents.items():
            try:
                found[name] = read(name, content)
            except DataError as error:
                self.faults.append(f"refresh {self.refresh}: {error}")
        return found


def _own_key(name: str, content: RecordDict, number: int) -> bytes:
    found = bytes_of(content, "keys", f"client {name!r}")
    if set(found) != {number}:
        raise DataError(f"Client {name!r} gave a key that is not its own.", kind="bad protocol")
    return found[number]
