"""Federations by messages in one process, where a test can be the server too; imported by path, not a test."""

from __future__ import annotations

import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lit_dpret.federated.flower  # noqa: F401  (switches telemetry off before flwr is imported)

# isort: split
import numpy as np
import torch
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity
from tiny_silos import SIZE, SMALL, maker

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.federated.aggregation import Weights
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower.client_app import build_client_app
from lit_dpret.federated.flower.library import (
    ClientApp,
    Context,
    Error,
    ErrorCode,
    Grid,
    Message,
    RecordDict,
    ServerApp,
)
from lit_dpret.federated.flower.server_app import FlowerFederation, build_server_app
from lit_dpret.federated.keys import Credentials, identity_of, new_identity
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo import SiloClient, Told

Mishap = Literal["unavailable", "silent", "late"]
"""What can happen to a message: its node is gone, no answer ever comes, or it comes after the waiting time."""

Fate = Callable[[Message], Mishap | None]


@contextmanager
def acting_as(node_id: int = SUPERLINK_NODE_ID, run_id: int = 1) -> Iterator[None]:
    """Make messages as this node would; Flower keeps a process's identity in one place for the whole process."""
    before = {name: getattr(TaskIdentity, f"_{name}") for name in ("run_id", "node_id", "task_id")}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, 0
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


class InProcessGrid(Grid):  # type: ignore[misc]
    """All nodes of a federation in one process.

    The same apps run on it as on a SuperLink. A difference between the two could hide errors, so nothing is shared
    here: each message is serialised and read again, a node's context is stored and read between messages, a node that
    raises answers with an error, and the server answers for a missing node. Late answers and silent nodes cost no
    time. ``nodes`` has the ``node_config`` of each node, by number.
    """

    def __init__(
        self, client_app: ClientApp, nodes: Mapping[int, Mapping[str, Any]], *, fate: Fate | None = None
    ) -> None:
        self._app, self._fate, self._run = client_app, fate, FlowerRun.create_empty(1)
        self.run_id = 1
        self._contexts = {number: self._context(number, facts) for number, facts in nodes.items()}
        self.away: set[int] = set()  # nodes that are not connected; they keep their stored state
        self.down: Counter[str] = Counter()  # bytes with envelopes, to all nodes, by type of message
        self._replies: dict[str, Message] = {}
        self._late: set[str] = set()

    # -- running and rehearsing ----------------------------------------------------------------

    def launch(self, server_app: ServerApp) -> None:
        """Run the server's app to its end on this grid."""
        with acting_as(run_id=self.run_id):
            server_app(self, self._context(SUPERLINK_NODE_ID, {}))

    def context(self, node_id: int) -> Context:
        """Return a copy of a node's stored context."""
        return copied_context(self._contexts[node_id])

    # -- Flower's grid -------------------------------------------------------------------------

    def set_run(self, run: FlowerRun) -> None:
        self._run = run

    @property
    def run(self) -> FlowerRun:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return [number for number in self._contexts if number not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return all answers that have arrived, including late ones."""
        wanted = list(message_ids)
        self._late -= set(wanted)
        return [self._replies.pop(name) for name in wanted if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send all and return the answers; with a timeout, only those that come within it."""
        names = self.push_messages(messages)
        return self.pull_messages(name for name in names if timeout is None or name not in self._late)

    # -- delivery ------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> str:
        name = uuid.uuid4().hex
        message.metadata.__dict__["_message_id"] = name
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        arrived, size = copied_message(message)
        self.down[kind] += size
        gone = node not in self._contexts or node in self.away
        mishap = "unavailable" if gone else self._fate(arrived) if self._fate else None
        if mishap == "silent":
            self._late.add(name)
            self._replies[name] = self._unavailable(message, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
            return name
        if mishap == "unavailable":
            self._replies[name] = self._unavailable(message, ErrorCode.NODE_UNAVAILABLE)
            return name
        reply, _ = copied_message(self._handled(arrived, node))
        reply.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        self._replies[name] = reply
        if mishap == "late":
            self._late.add(name)
        return name

    def _handled(self, message: Message, node: int) -> Message:
        context = copied_context(self._contexts[node])
        with acting_as(node, self.run_id):
            try:
                reply = self._app(message, context)
                self._contexts[node] = copied_context(context)
            except Exception as error:  # as Flower's runtimes do; an interruption passes through
                traceback.print_exc()
                reason = f"{type(error)}:<'{error}'>"
                return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
        return reply

    def _unavailable(self, message: Message, code: int) -> Message:
        """Answer as a SuperLink does for a node: with an error from itself."""
        reply = Message(Error(code=code, reason="The node does not answer."), reply_to=message)
        reply.metadata.__dict__.update(
            _src_node_id=SUPERLINK_NODE_ID, _dst_node_id=SUPERLINK_NODE_ID, _message_id=uuid.uuid4().hex
        )
        return reply

    def _context(self, number: int, facts: Mapping[str, Any]) -> Context:
        return Context(run_id=self.run_id, node_id=number, node_config=dict(facts), state=RecordDict(), run_config={})


# -- silos, their grid and their server ---------------------------------------------------------

DIM = 16


class ByMessages:
    """Silos on the nodes 10, 11, ..., the grid between them, and their server."""

    grid_of: type[InProcessGrid] = InProcessGrid

    def __init__(
        self, settings: PddAs2, names: Iterable[str], start: Weights, server: Path, *, fate: Fate | None = None,
        share: bool = False, spent: bool = False, **patience: Any,
    ) -> None:  # fmt: skip
        self.settings, self.share, self.spent = settings, share, spent
        nodes = {number: {"client": name} for number, name in enumerate(names, start=10)}
        self.grid: Any = self.grid_of(build_client_app(self.client), nodes, fate=fate)
        waiting = Patience(**{"min_clients": 1, "wait": 0.0, **patience})
        self.server = FlowerFederation(settings, start, server, dim=DIM, patience=waiting)

    def client(self, context: Context) -> Any:
        """Return the silo of a node."""
        silo = self.silo_of(str(context.node_config["client"]))
        silo.told = Told(self.share, self.spent)
        return silo

    def silo_of(self, name: str) -> Any:
        raise NotImplementedError

    def launch(self) -> FedResult:
        self.grid.launch(build_server_app(self.server))
        return self.server.result

    def ask(self, node: int, kind: str, content: Mapping[str, Any] | None = None, **facts: Any) -> Message:
        """Return the answer to a message of a server that does not follow the protocol."""
        told = self.server.silos.message(**facts)
        for name, record in (content or {}).items():
            told[name] = record
        with acting_as(run_id=self.grid.run_id):
            (reply,) = self.grid.send_and_receive([Message(told, node, kind)])
        return reply


class Run(ByMessages):
    """A federation over planted silos; the same silos and the same start as `tiny_silos.federation`."""

    def __init__(self, root: Path, settings: PddAs2 = SMALL, *, silo: Any = SiloClient, **more: Any) -> None:
        if not (root / "silos").exists():
            write_silos(root / "silos", planted_silos(SIZE), facts={})
        self.folders, self.root, self.silo = silo_folders(root / "silos"), root, silo
        self.settings = settings
        start = self.silo_of(next(iter(self.folders))).model[0]
        super().__init__(settings, self.folders, start, root / "flower" / "server", **more)

    def silo_of(self, name: str) -> SiloClient:
        found: SiloClient = self.silo(
            self.folders[name], self.root / "flower" / name, self.settings, maker(), secret_file=self.root / "secret"
        )
        return found


def only_stage1(settings: PddAs2 = SMALL, rounds: int = 2) -> PddAs2:
    return replace(
        settings,
        stage1=replace(settings.stage1, warmup_rounds=0, rounds=rounds),
        stage2=replace(settings.stage2, epochs=0),
    )


# -- five silos under masks, on a grid that records everything ----------------------------------

NAMES = tuple(f"client{i}" for i in range(5))
START = {"w": torch.zeros(40, 25), "b": torch.ones(7)}
MASKED = replace(
    SMALL,
    stage1=replace(SMALL.stage1, warmup_rounds=0, rounds=1, weighting="uniform"),
    stage2=replace(SMALL.stage2, epochs=0),
    secure_sum=True,
    sum_threshold=3,
    update_norm=10.0,  # the updates of these silos are longer than their first weights
)
PRIVATE_KEYS = {name: new_identity()[0] for name in NAMES}
PUBLIC_KEYS = {name: identity_of(key) for name, key in PRIVATE_KEYS.items()}


def drifted(weights: Mapping[str, torch.Tensor], name: str, number: int) -> Weights:
    """Return the weights of a silo after a round, drawn by coins that a test knows too."""
    generator = torch.Generator().manual_seed(1000 * number + int(name[-1]))
    return {key: weights[key] + 0.1 * torch.randn(weights[key].shape, generator=generator) for key in sorted(weights)}


class Drifts:
    """A silo with the interface that the apps need, but without data or learning."""

    def __init__(self, name: str, state: Path, settings: PddAs2, credentials: Credentials | None) -> None:
        self.name, self.state, self.settings, self.credentials = name, state, settings, credentials
        self.ledgers = state / "private"
        self.examples = 5 + 7 * int(name[-1])
        self.model = (START, 16)

    def accept_round(self, weights: Mapping[str, torch.Tensor], number: int) -> None:
        """Do nothing; there is nothing to record."""

    def train_shared(self, weights: Mapping[str, torch.Tensor], number: int) -> Weights:
        return drifted(weights, self.name, number)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, np.ndarray]:
        return {"sentence/mrr@10": np.ones(1)}


class WritesDown(InProcessGrid):
    """A grid that keeps what the server sent and received."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seen: list[tuple[str, int, str, RecordDict]] = []

    def _handled(self, message: Message, node: int) -> Message:
        kind = message.metadata.message_type
        self.seen.append((kind, node, "down", message.content))
        reply = super()._handled(message, node)
        if reply.has_content():
            self.seen.append((kind, node, "up", reply.content))
        return reply

    def of(self, kind: str, way: str = "up") -> dict[int, RecordDict]:
        """Return, by node, what was sent up (or down) in the last message of a kind."""
        return {node: content for found, node, found_way, content in self.seen if (found, found_way) == (kind, way)}


class Masked(ByMessages):
    """The run of five masked silos, its grid and its server."""

    grid_of = WritesDown

    def __init__(self, root: Path, settings: PddAs2 = MASKED, *, silo: Any = Drifts,
                 keys: Mapping[str, Credentials] | None = None, names: tuple[str, ...] = NAMES,
                 **more: Any) -> None:  # fmt: skip
        self.root, self._silo, self._keys = root, silo, dict(keys or {})
        super().__init__(settings, names, START, root / "server", **more)

    def silo_of(self, name: str) -> Any:
        return self._silo(name, self.root / name, self.settings, self._keys.get(name))

    def forget_between_messages(self) -> Masked:
        """Handle every later message with a new app and new silos, as a new process would."""
        handled = self.grid._handled

        def anew(message: Message, node: int) -> Message:
            self.grid._app = build_client_app(self.client)
            return handled(message, node)

        self.grid._handled = anew
        return self


def credentials(**instead: bytes) -> dict[str, Credentials]:
    """Return the credentials of all silos; another signing key is only on its own silo's copy of the roster."""
    return {
        name: Credentials(
            name=name,
            identity=instead.get(name, PRIVATE_KEYS[name]),
            roster={**PUBLIC_KEYS, name: identity_of(instead.get(name, PRIVATE_KEYS[name]))},
        )
        for name in NAMES
    }
