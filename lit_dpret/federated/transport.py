"""Transports by name: functions that send the messages of a federation (`FederationRun`).

``inprocess`` is the default and needs no server. A custom transport is registered as a function, or as
``package.module:function``, which is imported at first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import Weights, check_silos, client_weights
from lit_dpret.federated.documents import SuperLinkTarget
from lit_dpret.federated.federation import Federation, FedResult
from lit_dpret.federated.model import start_of
from lit_dpret.federated.negatives import FedPool, merged_pool, select_clients
from lit_dpret.federated.settings import PHASES, PddAs2, Phase
from lit_dpret.federated.silo import MakeModule, SiloClient
from lit_dpret.progress import ProgressLine


@dataclass(frozen=True, kw_only=True)
class FederationRun:
    """One run of a federation, with everything that a transport needs."""

    settings: PddAs2  # of PDD-AS2
    silos: Mapping[str, Path]  # the data folder of each client by name; empty if they are on other machines
    make_module: MakeModule  # builds the model of a round, the same one every time; can be pickled
    folder: Path  # of the run's state; as private as the silos
    transport: str = "inprocess"  # its registered name
    # ``bm25``, ``stage1`` (the shared model) and ``stage2`` (the personal ones). Without ``stage2`` stage 2 is not run;
    # with ``bm25`` alone nothing is trained.
    measure: Sequence[Phase] = PHASES
    split: str = "test"  # of the questions to measure on
    secret_file: str | Path | None = None  # keys the noise; null for the user's state folder
    link: SuperLinkTarget = field(default_factory=SuperLinkTarget)  # the SuperLink, for ``transport=flower``

    def state(self, name: str) -> Path:
        return silo_state(self.folder, name)

    def client(self, name: str) -> SiloClient:
        """Build a silo on this machine; refuse now what its rounds would refuse later."""
        return SiloClient(
            self.silos[name], self.state(name), self.settings, self.make_module, secret_file=self.secret_file
        )


Transport = Callable[[FederationRun], FedResult]
"""A function that carries one run between a server and its silos.

Guarantees that callers rely on:
    - Called again with the same run, it continues where it stopped and does not repeat what is finished.
    - Runs whose ``settings.stage2`` differ only in ``negatives`` share stage 1 in ``folder``.
    - Only the phases in ``measure`` are measured. Without ``stage2`` among them, stage 2 is not run.
"""

_TRANSPORTS: dict[str, Transport | str] = {
    "inprocess": "lit_dpret.federated.transport:in_process",
    "simulation": "lit_dpret.federated.flower.simulation:simulation",
    "flower": "lit_dpret.federated.flower.submit:flower",
}
ELSEWHERE = ("flower",)  # the silos run on their owners' machines: no data folder is known here


def silo_state(folder: Path, name: str) -> Path:
    """Return the state folder of a silo within a run's folder on this machine."""
    return folder / "silos" / name


def register(name: str, transport: Transport | str) -> None:
    """Register a transport function, or its ``package.module:function``, under a name for ``federated.transport``."""
    _TRANSPORTS[name] = transport


def check_transport(name: str) -> Transport:
    """Return the transport registered under a name; refuse an unknown name."""
    found = _TRANSPORTS.get(name)
    if found is None:
        raise ConfigurationError(f"federated.transport={name!r} is not one of {', '.join(sorted(_TRANSPORTS))}.")
    if isinstance(found, str):
        module, _, function = found.partition(":")
        carry: Transport = getattr(importlib.import_module(module), function)
        return carry
    return found


def run_federation(run: FederationRun) -> FedResult:
    """Run PDD-AS2 over silos and evaluate it on each silo's own collection."""
    carry = check_transport(run.transport)
    if not run.silos and run.transport not in ELSEWHERE:
        raise ConfigurationError("A federation needs at least one silo.")
    run.settings.check()
    return carry(run)


# -- all silos in this process
#
# There is no server and there are no messages: what would be sent is passed on, checked and measured. The other
# transports call the same methods of `SiloClient` and the same functions between the calls.


def in_process(run: FederationRun) -> FedResult:
    """Run all silos in this process, one after another; a transport (`lit_dpret.federated.transport`)."""
    clients = [run.client(name) for name in run.silos]
    federation = InProcessFederation(clients, run.settings, start_of(run.make_module), run.folder / "server")
    return federation.run(measure=run.measure, split=run.split)


class InProcessFederation(Federation):
    """All clients of one run, with the guarantees of `Federation`."""

    def __init__(
        self, clients: Sequence[SiloClient], settings: PddAs2, start: Mapping[str, Tensor], folder: str | Path
    ) -> None:
        self.clients = {client.name: client for client in clients}
        if len(self.clients) != len(clients) or not clients:
            raise ConfigurationError("A federation needs at least one client, and each client its own name.")
        check_silos(settings.check(), len(clients))
        super().__init__(settings, start, folder, clients=sorted(self.clients))
        self.steps_of_round = len(clients)

    def run(self, *, measure: Sequence[Phase] = PHASES, split: str = "test") -> FedResult:
        super().run(measure=measure, split=split)
        self.result.epsilon = {name: client.epsilon() for name, client in self.clients.items()}
        self.result.faults += [
            f"{name}: {why}" for name, client in self.clients.items() if (why := client.account.ended)
        ]
        return self.result

    def round(self, weights: Weights, number: int, progress: Callable[[int], None]) -> Weights:
        updates: dict[str, Weights] = {}
        for place, (name, client) in enumerate(self.clients.items()):
            progress(place)
            updates[name] = client.train_shared(weights, number)
        size = sum(value.numel() * value.element_size() for value in weights.values())
        self.result.traffic.note("stage 1", f"{number:03}", dict.fromkeys(updates, 2 * size))
        return self.aggregate(weights, updates, number)

    def aggregate(self, weights: Weights, updates: Mapping[str, Weights], number: int) -> Weights:
        """Return the mean of the updates, by a secure sum if configured."""
        examples = {name: self.clients[name].examples for name in updates}
        if not self.settings.secure_sum:
            return self.combine(weights, updates, examples, number, least=1)
        from lit_dpret.federated.secure_mean import secure_mean  # needs a package that an extra installs

        stage, where = self.settings.stage1, f"stage 1, round {number}"
        shares = client_weights(examples, stage.weighting, n_hat=stage.n_hat)
        with self.giving_reasons(where):
            try:
                return secure_mean(weights, updates, shares, self.settings, name=where, faults=self.result.faults)
            except DataError as error:
                if error.kind != "bad sum":
                    raise
                # A void round does not end the run: the next round starts from the same weights.
                self.result.faults.append(f"{where}: {error}")
        return dict(weights)

    def personalise(self, weights: Weights) -> None:
        stage = self.settings.stage2
        turns = [(number, name) for number in range(stage.epochs) for name in self.clients]
        with ProgressLine("stage 2, epochs of all silos") as progress:
            for done, (number, name) in enumerate(turns):
                client = self.clients[name]
                if not client.has_personal(number):
                    progress(done, len(turns))
                    pool = self.pool(name, weights, number) if stage.asks(number) else None
                    client.personalise(weights, pool, number)
            progress(len(turns), len(turns))

    def pool(self, asker: str, weights: Mapping[str, Tensor], refresh: int) -> FedPool:
        """Collect the selected clients' answers to one client's request."""
        stage = self.settings.stage2
        asked = select_clients(asker, self.clients, stage, seed=self.settings.seed, refresh=refresh)
        rows = self.clients[asker].request(weights, refresh)
        event = f"{refresh:03}/{asker}"
        self.result.traffic.note("requests", event, {asker: rows.numel() * rows.element_size() * len(asked)})
        blocks = {name: self.clients[name].serve(weights, rows, refresh=refresh) for name in asked}
        self.result.traffic.note("responses", event, {name: block.bytes for name, block in blocks.items()})

        def refuse(_: str, error: DataError) -> None:
            self.result.faults.append(f"refresh {refresh} of client {asker!r}: {error}")

        answers = [(name, partial(block.check, dim=rows.shape[1])) for name, block in blocks.items()]
        return merged_pool(answers, rows, stage, refuse)

    def measure(self, system: Phase, weights: Weights | None, *, split: str = "test") -> None:
        self.result.systems[system] = {
            name: client.evaluate(weights, personal=system == "stage2", split=split)
            for name, client in self.clients.items()
        }
