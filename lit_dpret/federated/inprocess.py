"""PDD-AS2 with all clients in one process: the default transport.

There is no server and there are no messages: what would be sent is passed on, checked and measured. The other
transports call the same methods of `lit_dpret.federated.silo.SiloClient` and the same functions in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import Weights, check_silos, client_weights
from lit_dpret.federated.federation import Federation, FedResult
from lit_dpret.federated.model import start_of
from lit_dpret.federated.negatives import FedPool, merged_pool, select_clients
from lit_dpret.federated.settings import PHASES, PddAs2, Phase
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.transport import FederationRun
from lit_dpret.progress import ProgressLine


def in_process(run: FederationRun) -> FedResult:
    """Run all silos in this process, one after another; a transport (`lit_dpret.federated.transport`)."""
    clients = [run.client(name) for name in run.silos]
    federation = InProcessFederation(clients, run.settings, start_of(run.make_module), run.folder / "server")
    return federation.run(measure=run.measure, split=run.split)


class InProcessFederation(Federation):
    """All clients of one run; the guarantees are those of `Federation`."""

    def __init__(
        self, clients: Sequence[SiloClient], settings: PddAs2, start: Mapping[str, Tensor], folder: str | Path
    ) -> None:
        self.clients = {client.name: client for client in clients}
        if len(self.clients) != len(clients) or not clients:
            raise ConfigurationError("A federation needs at least one client, and clients of different names.")
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
        """Return the mean of the updates, by a secure sum where the settings ask for one."""
        examples = {name: self.clients[name].examples for name in updates}
        if not self.settings.secure_sum:
            return self.combine(weights, updates, examples, number, least=1)
        from lit_dpret.federated.secure_mean import secure_mean  # its package is of an extra

        stage, where = self.settings.stage1, f"stage 1, round {number}"
        shares = client_weights(examples, stage.weighting, n_hat=stage.n_hat)
        with self.giving_reasons(where):
            try:
                return secure_mean(weights, updates, shares, self.settings, name=where, faults=self.result.faults)
            except DataError as error:
                if error.kind != "bad sum":
                    raise
                # A void round is no reason to end the run: the next one begins with the same weights.
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
        """Collect what the selected clients answer to one client's request."""
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
