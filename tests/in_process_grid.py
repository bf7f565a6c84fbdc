"""A Flower grid without a server: every node in this process, one after the other; imported by path, not a test.

The same apps run on it as on a SuperLink. A difference between the two could hide errors, so nothing is shared here:
each message is serialised and read again, a node's context is stored and read between messages, a node that raises
answers with an error, and the server answers for one that is gone. Late answers and silent nodes cost no time.
"""

from __future__ import annotations

import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import lit_dpret.federated.flower  # noqa: F401  (switches telemetry off before flwr is imported)

# isort: split
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Mishap = Literal["unavailable", "silent", "late"]
"""What can happen to a message: its node is gone; nobody ever answers; the answer comes after the waiting time."""

Fate = Callable[[Message], Mishap | None]


@contextmanager
def acting_as(*, run_id: int, node_id: int, task_id: int = 0) -> Iterator[None]:
    """Make messages as this node would; Flower keeps who a process is in one place for the whole process."""
    before = {name: getattr(TaskIdentity, f"_{name}") for name in ("run_id", "node_id", "task_id")}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, task_id
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, f"_{name}", value)


def copied_message(message: Message) -> tuple[Message, int]:
    """Serialise and read a message; return what the other side gets, and its bytes on the wire."""
    wire = message_to_proto(message).SerializeToString()
    return message_from_proto(ProtoMessage.FromString(wire)), len(wire)


def copied_context(context: Context) -> Context:
    """Store and read a context."""
    return context_from_proto(ProtoContext.FromString(context_to_proto(context).SerializeToString()))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one type of message, with envelopes."""

    messages: int = 0
    down: int = 0
    up: int = 0


class InProcessGrid(Grid):  # type: ignore[misc]
    """All nodes of a federation in one process.

    Guarantees:
        - No object is shared between server and nodes, or between two messages.
        - A node's state changes only by messages that it answered without an exception.
        - Every byte that would be sent is counted, including those of failed messages.

    Args:
        client_app: The app of every node.
        nodes: The ``node_config`` of each node, by number.
        fate: Decides which mishap each message meets; for rehearsals.
        run_id: The run's id.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Mapping[int, Mapping[str, Any]],
        *,
        fate: Fate | None = None,
        run_id: int = 1,
    ) -> None:
        self._app, self._fate, self._run_id = client_app, fate, run_id
        self._run = Run.create_empty(run_id)
        self._contexts = {number: self._context(number, facts) for number, facts in nodes.items()}
        self._away: set[int] = set()
        self._replies: dict[str, Message] = {}
        self._late: set[str] = set()
        self._counts: Counter[tuple[str, str]] = Counter()

    # -- running and rehearsing ----------------------------------------------------------------

    def launch(self, server_app: ServerApp) -> None:
        """Run the server's app to its end on this grid."""
        with acting_as(run_id=self._run_id, node_id=SUPERLINK_NODE_ID):
            server_app(self, self._context(SUPERLINK_NODE_ID, {}))

    def leave(self, node_id: int) -> None:
        """Disconnect a node; it keeps what it has stored."""
        self._away.add(node_id)

    def come_back(self, node_id: int) -> None:
        """Connect a node again that left."""
        self._away.discard(node_id)

    def context(self, node_id: int) -> Context:
        """Return a copy of what a node has stored."""
        return copied_context(self._contexts[node_id])

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Bytes by type of message."""
        kinds = sorted({kind for kind, _ in self._counts})
        return {kind: Traffic(*(self._counts[kind, what] for what in ("messages", "down", "up"))) for kind in kinds}

    # -- Flower's grid -------------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return [number for number in self._contexts if number not in self._away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return all answers that have arrived, including late ones."""
        wanted = list(message_ids)
        self._late -= set(wanted)
        return [self._replies.pop(name) for name in wanted if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send all and return the answers; with a waiting time, only those that come within it."""
        names = self.push_messages(messages)
        return self.pull_messages(name for name in names if timeout is None or name not in self._late)

    # -- delivery ------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> str:
        name = uuid.uuid4().hex
        message.metadata.__dict__["_message_id"] = name
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        arrived, size = copied_message(message)
        self._counts[kind, "messages"] += 1
        self._counts[kind, "down"] += size
        gone = node not in self._contexts or node in self._away
        mishap = "unavailable" if gone else self._fate(arrived) if self._fate else None
        if mishap == "silent":
            self._late.add(name)
            self._replies[name] = self._unavailable(message, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
            return name
        if mishap == "unavailable":
            self._replies[name] = self._unavailable(message, ErrorCode.NODE_UNAVAILABLE)
            return name
        reply, size = copied_message(self._handled(arrived, node))
        reply.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        self._counts[kind, "up"] += size
        self._replies[name] = reply
        if mishap == "late":
            self._late.add(name)
        return name

    def _handled(self, message: Message, node: int) -> Message:
        context = copied_context(self._contexts[node])
        with acting_as(run_id=self._run_id, node_id=node):
            try:
                reply = self._app(message, context)
                self._contexts[node] = copied_context(context)
            except Exception as error:  # as Flower's runtimes do; an interruption goes through
                traceback.print_exc()
                reason = f"{type(error)}:<'{error}'>"
                return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
        return reply

    def _unavailable(self, message: Message, code: int) -> Message:
        """Answer as a SuperLink does in place of a node: by an error that comes from itself."""
        reply = Message(Error(code=code, reason="The node does not answer."), reply_to=message)
        reply.metadata.__dict__.update(
            _src_node_id=SUPERLINK_NODE_ID, _dst_node_id=SUPERLINK_NODE_ID, _message_id=uuid.uuid4().hex
        )
        return reply

    def _context(self, number: int, facts: Mapping[str, Any]) -> Context:
        return Context(run_id=self._run_id, node_id=number, node_config=dict(facts), state=RecordDict(), run_config={})
