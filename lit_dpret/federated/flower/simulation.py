"""``federated=simulation``: the same apps in Flower's simulation, all silos on this machine, in Ray's worker processes.

It calls ``flwr.simulation.run_simulation``, which Flower deprecates in favour of ``flwr run`` but still ships. That
command would start its own server and return a log, whereas this returns a result.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterable

from safetensors.torch import load_file

from lit_dpret.errors import ConfigurationError, LitDpretError, WorkerError
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower.client_app import build_client_app, measures_file
from lit_dpret.federated.flower.library import Context, Grid, Message, ServerApp, run_simulation
from lit_dpret.federated.flower.server_app import FlowerFederation
from lit_dpret.federated.model import start_and_dim
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.transport import FederationRun

_POLL = 0.1  # seconds


def simulation(run: FederationRun) -> FedResult:
    """Run by messages between processes of this machine; a transport (`lit_dpret.federated.transport`).

    Silos run one after another if there is one processor, and in parallel if there are more.
    """
    try:  # if Ray cannot be imported, Flower's server would wait for nodes forever
        importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            f"federated=simulation needs Ray ({error}). Run: pip install 'flwr[simulation]>=1.41,<1.43', or choose "
            "federated=inprocess, which gives the same numbers."
        ) from error
    names = list(run.silos)

    def make_silo(context: Context) -> SiloClient:
        return run.client(names[int(context.node_config["partition-id"])])

    for name in names:
        run.client(name)  # refuses now what a round would refuse in a worker process
        for phase in run.measure:
            measures_file(run.state(name), phase, run.split).unlink(missing_ok=True)
    start, dim = start_and_dim(run.make_module)
    federation = FlowerFederation(
        run.settings, start, run.folder / "server", dim=dim, patience=Patience(min_clients=len(names), wait=60.0)
    )
    stopped = threading.Event()
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, _: Context) -> None:
        federation.serve(UntilStopped(grid, stopped), measure=run.measure, split=run.split)

    quiet = logging.getLogger("flwr")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        run_simulation(app, build_client_app(make_silo), nodes=len(names), processors=os.cpu_count() or 1)
    except LitDpretError:
        raise
    except (RuntimeError, SystemExit) as error:
        raise WorkerError(
            f"Flower's simulation failed ({str(error)[:200]}). Finished work is kept; start again, or choose "
            "federated=inprocess, which gives the same numbers."
        ) from error
    finally:
        stopped.set()
        quiet.setLevel(level)
    # The server knows no measures, but all silos are on this machine and have one owner.
    found = federation.result
    for phase in run.measure:
        found.systems[phase] = {
            name: {metric.replace(".", "/", 1): value.numpy() for metric, value in load_file(path).items()}
            for name in names
            if (path := measures_file(run.state(name), phase, run.split)).is_file()
        }
    found.epsilon = {name: run.client(name).epsilon() for name in names}
    return found


class UntilStopped:
    """A grid whose server stops waiting for answers once the simulation has ended.

    The server runs in its own thread. A waiting thread would keep the process from ending after an interrupt or a crash
    of Ray.
    """

    def __init__(self, grid: Grid, stopped: threading.Event) -> None:
        self._grid, self._stopped = grid, stopped

    def get_node_ids(self) -> list[int]:
        return list(self._grid.get_node_ids())

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        missing = set(self._grid.push_messages(messages))
        replies: list[Message] = []
        until = None if timeout is None else time.monotonic() + timeout
        while missing and (until is None or time.monotonic() < until):
            if self._stopped.wait(_POLL):
                raise WorkerError("The simulation ended before its silos answered.")
            for reply in self._grid.pull_messages(missing):
                missing.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies
