"""``federated=simulation``: the same apps on Flower's simulation, all silos on this machine, in Ray's worker processes.

It calls ``flwr.simulation.run_simulation``, which Flower calls deprecated in favour of ``flwr run`` and still ships:
that command would start a server of its own and give back a log where this gives back a result.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file

from lit_dpret.errors import ConfigurationError, LitDpretError, WorkerError
from lit_dpret.federated.flower.client_app import build_client_app, measures_file
from lit_dpret.federated.flower.library import Context, Grid, Message, ServerApp, run_simulation
from lit_dpret.federated.flower.server_app import FlowerFederation
from lit_dpret.federated.inprocess import FedResult
from lit_dpret.federated.model import start_of
from lit_dpret.federated.settings import PddAs2, Phase
from lit_dpret.federated.silo import MakeModule, SiloClient
from lit_dpret.federated.storage import Traffic
from lit_dpret.federated.transport import silo_state
from lit_dpret.privacy.modes import NoPrivacy

_POLL = 0.1  # seconds


def simulation(
    settings: PddAs2,
    silos: Mapping[str, Path],
    make_module: MakeModule,
    folder: Path,
    *,
    measure: Sequence[Phase],
    split: str,
    secret_file: Path | None,
) -> FedResult:
    """Run by messages between processes of this machine; a transport (`lit_dpret.federated.transport`).

    Silos are asked one after another where there is one processor, and side by side where there are more.

    Raises:
        ConfigurationError: Ray is missing.
        DataError: Too few silos answered.
    """
    try:  # a Ray that cannot be imported would leave Flower's server waiting for nodes without end
        importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            f"federated=simulation runs on Ray, which cannot be imported ({error}). Run: pip install "
            "'flwr[simulation]>=1.41,<1.43', or take federated=inprocess, which gives the same numbers."
        ) from error
    names = list(silos)
    states = {name: silo_state(folder, name) for name in names}

    def make_silo(context: Context) -> SiloClient:
        name = names[int(context.node_config["partition-id"])]
        return SiloClient(silos[name], states[name], settings, make_module, secret_file=secret_file)

    for name in names:
        SiloClient(silos[name], states[name], settings, make_module, secret_file=secret_file)  # refused here, not there
        for phase in measure:
            measures_file(states[name], phase, split).unlink(missing_ok=True)
    module = make_module(
        privacy=NoPrivacy(), optimizer_lr=1e-3, towers="shared", passage_tower="trained", negatives=None
    )
    federation = FlowerFederation(
        settings, start_of(make_module), folder / "server", dim=module.encoder.dim, min_clients=len(names)
    )
    stopped = threading.Event()
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, _: Context) -> None:
        federation.run(UntilStopped(grid, stopped), measure=measure, split=split)

    quiet = logging.getLogger("flwr")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        run_simulation(app, build_client_app(make_silo), nodes=len(names), processors=os.cpu_count() or 1)
    except LitDpretError:
        raise
    except (RuntimeError, SystemExit) as error:
        raise WorkerError(
            f"Flower's simulation broke ({type(error).__name__}: {str(error)[:200]}). Finished work is kept; start "
            "again, or take federated=inprocess, which gives the same numbers."
        ) from error
    finally:
        stopped.set()
        quiet.setLevel(level)
    result = _found(federation, states, measure, split, folder)
    for name in names:
        client = SiloClient(silos[name], states[name], settings, make_module, secret_file=secret_file)
        result.epsilon[name] = client.epsilon()
    return result


class UntilStopped:
    """A grid whose server stops waiting for answers once the simulation has ended.

    The server runs in a thread of its own, and a waiting thread would keep the process from ending after an interrupt
    or a crash of Ray.

    Args:
        grid: Flower's.
        stopped: Set when the simulation has ended.
    """

    def __init__(self, grid: Grid, stopped: threading.Event) -> None:
        self._grid, self._stopped = grid, stopped

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(self._grid.get_node_ids())

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send all, and return the answers that come within the waiting time.

        Raises:
            WorkerError: The simulation has ended.
        """
        missing = set(self._grid.push_messages(messages))
        replies: list[Message] = []
        until = None if timeout is None else time.monotonic() + timeout
        while missing and (until is None or time.monotonic() < until):
            if self._stopped.wait(_POLL):
                raise WorkerError("The simulation has ended before its silos answered.")
            for reply in self._grid.pull_messages(missing):
                missing.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies


def _found(
    federation: FlowerFederation, states: Mapping[str, Path], measure: Sequence[Phase], split: str, folder: Path
) -> FedResult:
    """Collect what the silos kept for themselves; they are on this machine, and one person owns them all."""
    result = FedResult(traffic=Traffic(folder / "traffic.json"), faults=federation.result.faults)
    for name, sent in federation.result.sent_by_silo.items():
        for phase, count in sent.items():
            result.traffic.note(phase, name, {name: count})
    for phase in measure:
        result.systems[phase] = {
            name: {metric.replace(".", "/", 1): value.numpy() for metric, value in load_file(path).items()}
            for name, state in states.items()
            if (path := measures_file(state, phase, split)).is_file()
        }
    return result
