"""Connected silos: the server's list of them, and messages to them with failures reported by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import fingerprint
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower.library import Grid, Message, RecordDict
from lit_dpret.federated.flower.payloads import digest_of, envelope, head_of, payload_bytes, tensors_record
from lit_dpret.federated.settings import PddAs2
from lit_dpret.settings import is_whole

_LONGEST = 200  # characters shown of a node's own error message
_TRAFFIC = {
    "train.stage1": "stage 1",
    "query.seal_key": "requests",
    "query.fedneg_request": "requests",
    "query.fedneg_serve": "responses",
    "train.personalise": "pools",
}


class ConnectedSilos:
    """The silos of a run by name, with their nodes and all messages to them.

    Guarantees:
        - A silo is identified by the message to which it replies, never by its reply. It can neither answer for another
          silo nor take the name of a connected one.
        - A silo that does not answer well is named in the faults and left out of this exchange, but not of the next.
    """

    def __init__(self, settings: PddAs2, result: FedResult, patience: Patience) -> None:
        self.settings, self.result, self.faults = settings, result, result.faults
        self.timeout, self.wait = patience.timeout, patience.wait
        self.examples: dict[str, int] = {}
        self._grid: Grid  # from `connect` on
        self._numbers: dict[str, int] = {}
        self._listed: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        self._holds: dict[str, str] = {}

    def connect(self, grid: Grid, count: int) -> None:
        """Wait until this many nodes are connected; raise a DataError on timeout."""
        self._grid = grid
        until = time.monotonic() + self.wait
        while (there := len(list(grid.get_node_ids()))) < count:
            if time.monotonic() > until:
                raise DataError(
                    f"{there} silos are connected after {self.wait:g} seconds, and federated.min_clients={count}. "
                    "Start the others, or wait longer (federated.wait)."
                )
            time.sleep(0.5)

    # -- messages ------------------------------------------------------------------------------

    def message(self, records: Mapping[str, Any] = {}, /, **facts: Any) -> RecordDict:
        """Return a message of this run with these records, and facts in its head."""
        return RecordDict({**envelope(settings=digest_of(self.settings), **facts), **records})

    def about(
        self, weights: Mapping[str, Tensor], name: str, records: Mapping[str, Any] = {}, /, **facts: Any
    ) -> RecordDict:
        """Return a message about the global weights; include them if the silo does not have them yet."""
        wanted = fingerprint(weights)
        content = self.message(records, weights=wanted, **facts)
        if self.lacks(name, wanted):
            content["weights"] = tensors_record(weights)
        return content

    def lacks(self, name: str, what: str) -> bool:
        """Return whether a silo must still be sent this; from now on it counts as sent, until a failure."""
        known = self._holds.get(name)
        self._holds[name] = what
        return known != what

    def exchange(self, kind: str, contents: Mapping[str, RecordDict], where: str) -> dict[str, RecordDict]:
        """Send each silo its message of type ``kind``; return the answers, and count bytes both ways.

        Fault messages begin with ``where``.
        """
        answers = self._send(kind, {self._nodes[name]: content for name, content in contents.items()})
        within = "before Flower discarded the message" if self.timeout is None else f"within {self.timeout} seconds"
        found: dict[str, RecordDict] = {}
        for name in contents:
            answer = answers.get(self._nodes[name])
            if isinstance(answer, RecordDict):
                found[name] = answer
            else:
                self._fault(name, where, answer or f"did not answer {within} (federated.timeout)")
        phase = "stage 1" if kind.startswith("train.secagg_") else _TRAFFIC.get(kind)
        if phase is not None:
            sizes = {
                name: payload_bytes(content) + (payload_bytes(found[name]) if name in found else 0)
                for name, content in contents.items()
            }
            self.result.traffic.note(phase, f"{where}, {kind}", sizes)
        return found

    def ask(
        self, kind: str, contents: Mapping[str, RecordDict], read: Callable[[str, RecordDict], Any], where: str
    ) -> dict[str, Any]:
        """Exchange messages and decode every answer from its name and content; report those that are refused."""
        found: dict[str, Any] = {}
        for name, content in self.exchange(kind, contents, where).items():
            try:
                found[name] = read(name, content)
            except DataError as error:
                self.faults.append(f"{where}: {error}")
        return found

    # -- which silos are present ---------------------------------------------------------------

    def present(self, where: str) -> list[str]:
        """Return the names of the present silos; new ones introduce themselves, missing ones are reported."""
        here = set(self._grid.get_node_ids())
        strangers = sorted(here - set(self._nodes.values()))
        answers = self._send("query.describe", dict.fromkeys(strangers, self.message()))
        numbered = self.settings.roster
        for node in strangers:
            answer = answers.get(node)
            if not isinstance(answer, RecordDict):
                self.faults.append(f"{where}: node {node} did not introduce itself: {answer or 'no answer'}.")
                continue
            name, examples, number, listed = (
                answer["head"].get(what) for what in ("name", "examples", "number", "listed")
            )
            if not isinstance(name, str) or not name or not isinstance(examples, int) or examples < 1:
                self.faults.append(f"{where}: node {node} has no name or no train query; it is left out.")
            elif self._nodes.get(name) in here:
                self.faults.append(f"{where}: node {node} claims to be {name!r}, which is already connected.")
            elif numbered and (
                not is_whole(number)
                or number < 1
                or any(known == number for other, known in self._numbers.items() if other != name)
            ):
                self.faults.append(f"{where}: node {node} has no number on a roster of keys, or has another silo's.")
            else:
                self._nodes[name], self.examples[name] = node, examples
                self._numbers[name] = number if numbered else 0
                self._listed[name] = listed if isinstance(listed, int) else 0
                self._holds.pop(name, None)
        for name in sorted(name for name, node in self._nodes.items() if node not in here):
            self._fault(name, where, "is not connected")
        return sorted(name for name, node in self._nodes.items() if node in here)

    def numbers(self, names: Sequence[str]) -> dict[str, int]:
        """Return the numbers by which silos know each other: from the key roster, or by order of names."""
        if self.settings.roster:
            return {name: self._numbers[name] for name in names}
        return {name: place for place, name in enumerate(sorted(names), start=1)}

    @property
    def listed(self) -> int:
        """The length of the key roster, by majority of the known silos; 0 without a roster."""
        return Counter(self._listed.values()).most_common(1)[0][0] if self._listed else 0

    def _send(self, kind: str, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict | str]:
        """Map each node id to its answer or an error message; leave out nodes that did not answer in time."""
        messages = [Message(content, node, kind) for node, content in contents.items()]
        replies = list(self._grid.send_and_receive(messages, timeout=self.timeout)) if messages else []
        node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        found: dict[int, RecordDict | str] = {}
        for reply in replies:
            node = node_of.get(reply.metadata.reply_to_message_id)
            if node is None:
                continue
            if reply.has_error():
                found[node] = f"failed: {str(reply.error.reason)[:_LONGEST]} (Flower's error {reply.error.code})"
                continue
            try:
                head_of(reply.content, f"node {node}")
                found[node] = reply.content
            except DataError as error:
                found[node] = f"sent an unreadable message: {error}"
        return found

    def _fault(self, name: str, where: str, what: str) -> None:
        self.faults.append(f"{where}: client {name!r} {what.rstrip('.')}.")
        self._holds.pop(name, None)
