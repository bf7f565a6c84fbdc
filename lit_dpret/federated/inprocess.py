"""PDD-AS2 with all clients in one process: Algorithm 1 of paper 004, and its second stage.

There is no server and there are no messages: what would be sent is passed on, checked and measured. The other
transports call the same methods of `lit_dpret.federated.silo.SiloClient` and the same functions in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.encoders.embedding_cache import content_hash
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import Weights, check_silos, client_weights, next_weights
from lit_dpret.federated.fed_negatives import Block, FedPool, Site, merge_lists, pool_of, select_clients
from lit_dpret.federated.settings import PHASES, PddAs2, Phase
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.storage import Traffic, keep_facts, save_tensors
from lit_dpret.progress import ProgressLine
from lit_dpret.retrieval.metrics import Values

PerClient = dict[str, dict[str, Values]]


@dataclass
class FedResult:
    """The results of a run; values are per query, and as private as the queries.

    Attributes:
        systems: The measures of each client, for each phase that was asked for.
        traffic: Bytes by phase and silo, without envelopes; stage 1 both ways, requests with every copy that the
            server passes on.
        epsilon: Spent of each silo's queries; None where nothing is promised.
        faults: Clients whose answers were left out, and why.
    """

    systems: dict[str, PerClient] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    epsilon: dict[str, float | None] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def sent(self) -> Counter[str]:
        """Bytes by phase, of all silos together."""
        return self.traffic.by_phase()

    def mean(self, system: str, metric: str) -> float:
        """Return the mean over all queries of all clients."""
        return float(np.concatenate([values[metric] for values in self.systems[system].values()]).mean())


class InProcessFederation:
    """All clients of one run.

    Guarantees:
        - A run that is started again does not repeat a finished round or refresh.
        - An answer of wrong shape or with values that are not finite is left out and reported; the round continues
          with the others.

    Args:
        clients: With different names.
        settings: Those that the clients were made with.
        start: The weights to begin with; public.
        folder: Of the server's state.
        sites: Where the clients are; null where nothing is known.
    """

    def __init__(
        self,
        clients: Sequence[SiloClient],
        settings: PddAs2,
        start: Mapping[str, Tensor],
        folder: str | Path,
        *,
        sites: Mapping[str, Site] | None = None,
    ) -> None:
        self.clients = {client.name: client for client in clients}
        if len(self.clients) != len(clients) or not clients:
            raise ConfigurationError("A federation needs at least one client, and clients of different names.")
        self.settings, self.folder = settings.check(), Path(folder)
        check_silos(settings, len(clients))
        self.start = dict(start)
        began = {name: content_hash({}, {name: value}, ()) for name, value in self.start.items()}
        facts = {"clients": sorted(self.clients), "secure_sum": settings.secure_sum, "seed": settings.seed}
        keep_facts(self.folder / "run.json", "server", {**facts, **asdict(settings.stage1), "start": began})
        self.sites = dict(sites or dict.fromkeys(self.clients, Site()))
        self.result = FedResult(traffic=Traffic(self.folder / "traffic.json"))

    def run(self, *, measure: Sequence[Phase] = PHASES, split: str = "test") -> FedResult:
        """Train and measure the given phases on each client's own questions; ``bm25`` alone trains nothing."""
        if "bm25" in measure:
            self.measure("bm25", None, personal=False, split=split)
        if "stage1" in measure or "stage2" in measure:
            weights = self.train_shared()
            if "stage1" in measure:
                self.measure("stage1", weights, personal=False, split=split)
            if "stage2" in measure and self.settings.stage2.epochs:
                self.personalise(weights)
                self.measure("stage2", weights, personal=True, split=split)
        self.result.epsilon = {name: client.epsilon() for name, client in self.clients.items()}
        return self.result

    def train_shared(self) -> Weights:
        """Run stage 1, in every round one local epoch of every client and then the mean; return the global weights."""
        weights: Mapping[str, Tensor] = self.start
        rounds = self.settings.stage1.warmup_rounds + self.settings.stage1.rounds
        done = sorted(self.folder.glob("global-*.safetensors"))
        first = 0
        if done:
            weights, first = load_file(done[-1]), int(done[-1].stem.partition("-")[2]) + 1
        total = rounds * len(self.clients)
        with ProgressLine("stage 1, rounds of all clients") as progress:
            for number in range(first, rounds):
                updates: dict[str, Weights] = {}
                for place, (name, one) in enumerate(self.clients.items()):
                    progress(number * len(self.clients) + place, total)
                    updates[name] = one.train_shared(weights, number)
                size = sum(value.numel() * value.element_size() for value in weights.values())
                self.result.traffic.note("stage 1", f"{number:03}", dict.fromkeys(updates, 2 * size))
                weights = self.aggregate(weights, updates, number)
                save_tensors(weights, self.folder / f"global-{number:03}.safetensors")
                (self.folder / f"global-{number - 1:03}.safetensors").unlink(missing_ok=True)
            if first < rounds:
                progress(total, total)
        return dict(weights)

    def aggregate(
        self, weights: Mapping[str, Tensor], updates: Mapping[str, Mapping[str, Tensor]], number: int
    ) -> Weights:
        """Return the next global weights; the last ones where the round is void.

        Raises:
            DataError: Too few updates can be used; the message says why each of the others was left out.
        """
        stage, told = self.settings.stage1, len(self.result.faults)
        shares = client_weights(
            {name: self.clients[name].examples for name in updates}, stage.weighting, n_hat=stage.n_hat
        )
        try:
            if not self.settings.secure_sum:
                where, faults = f"round {number}", self.result.faults
                return next_weights(weights, updates, shares, self.settings, where=where, faults=faults)[0]
            from lit_dpret.federated.secure_mean import secure_mean  # its package is of an extra

            return secure_mean(
                weights, updates, shares, limit=self.settings.update_limit, name=f"stage 1, round {number}",
                norm=self.settings.update_norm, threshold=self.settings.sum_threshold, faults=self.result.faults,
            )  # fmt: skip
        except DataError as error:
            if error.kind != "bad sum":
                raise DataError(" ".join([str(error), *self.result.faults[told:]]), kind=error.kind) from error
            self.result.faults.append(f"round {number}: {error}")
            return dict(weights)

    def personalise(self, weights: Mapping[str, Tensor]) -> None:
        """Run stage 2: every client trains its own query encoder, with new negatives every ``refresh_every`` epochs."""
        stage = self.settings.stage2
        turns = [(number, name) for number in range(stage.epochs) for name in self.clients]
        with ProgressLine("stage 2, epochs of all clients") as progress:
            for done, (number, name) in enumerate(turns):
                client = self.clients[name]
                if not client.has_personal(number):
                    progress(done, len(turns))
                    client.personalise(
                        weights, self.pool(name, weights, number) if stage.asks(number) else None, number
                    )
            progress(len(turns), len(turns))

    def pool(self, asker: str, weights: Mapping[str, Tensor], refresh: int) -> FedPool:
        """Collect what the selected clients answer to one client's request."""
        stage = self.settings.stage2
        asked = select_clients(
            asker, self.sites, stage.select, count=stage.select_count, seed=self.settings.seed, refresh=refresh
        )
        rows = self.clients[asker].request(weights, refresh)
        event = f"{refresh:03}/{asker}"
        self.result.traffic.note("requests", event, {asker: rows.numel() * rows.element_size() * len(asked)})
        blocks: list[Block] = []
        answered: dict[str, int] = {}
        for name in asked:
            block = self.clients[name].serve(weights, rows, refresh=refresh)
            answered[name] = block.bytes
            try:
                blocks.append(block.check(rows=max(1, len(rows)), dim=rows.shape[1]))
            except DataError as error:
                self.result.faults.append(f"refresh {refresh} of client {asker!r}: {error}")
        self.result.traffic.note("responses", event, answered)
        return merge_lists(blocks, rows, stage.top_k) if stage.request == "exact" else pool_of(blocks, rows.shape[1])

    def measure(
        self, system: str, weights: Mapping[str, Tensor] | None, *, personal: bool, split: str = "test"
    ) -> None:
        """Measure every client on its own collection."""
        self.result.systems[system] = {
            name: client.evaluate(weights, personal=personal, split=split) for name, client in self.clients.items()
        }
