"""The server's side, which holds no data: the rounds of `lit_dpret.federated.federation`, between machines.

A silo that is gone, late, broken or sends nonsense is named in ``faults``. The round continues with the others, and the
silo is asked again in the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from lit_dpret.federated.aggregation import Weights, check_enough
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import Federation, FedResult
from lit_dpret.federated.flower.connected import ConnectedSilos
from lit_dpret.federated.flower.exchanges import MaskedRound, Relay
from lit_dpret.federated.flower.library import Context, Grid, RecordDict, ServerApp
from lit_dpret.federated.flower.payloads import SCHEMA, tensors_record, weights_of
from lit_dpret.federated.settings import PHASES, PddAs2, Phase
from lit_dpret.files import write_whole
from lit_dpret.progress import ProgressLine

_MOST_QUERIES = 2**31


class FlowerFederation(Federation):
    """A run of PDD-AS2 by messages.

    Guarantees:
        - A silo is identified by the message to which it replies, never by the content of its reply.
        - A server that is started again does not repeat a finished round of stage 1 or epoch of stage 2.
    """

    def __init__(
        self,
        settings: PddAs2,
        start: Mapping[str, Tensor],
        folder: str | Path,
        *,
        dim: int,
        patience: Patience | None = None,
    ) -> None:
        patience = patience or Patience()
        patience.check_patience()
        check_enough(settings.check().stage1, patience.min_clients, "federated.min_clients")
        super().__init__(settings, start, folder)
        self.dim, self.min_clients = dim, patience.min_clients
        self.silos = ConnectedSilos(settings, self.result, patience)

    def serve(self, grid: Grid, *, measure: Sequence[Phase] = PHASES, split: str = "test") -> FedResult:
        """Wait for the silos, then run as `Federation.run`, collecting the measures they share.

        ``grid`` sends the messages.
        """
        self.silos.connect(grid, self.min_clients)
        return self.run(measure=measure, split=split)

    # -- stage 1 -------------------------------------------------------------------------------

    def round(self, weights: Weights, number: int, progress: Callable[[int], None]) -> Weights:
        where = f"stage 1, round {number}"
        names = self.silos.present(where)
        if self.settings.secure_sum:
            with self.giving_reasons(where):
                masked = MaskedRound(self.silos, names, weights, number, least=self.min_clients)
                found, self.result.rounds[number] = masked.run(self.folder / f"unmasking-{number:03}.json")
            return found
        sent = {"weights": tensors_record(weights)}
        contents = {name: self.silos.message(sent, round=number) for name in names}
        updates = self.silos.ask(
            "train.stage1",
            contents,
            lambda name, content: weights_of(content, f"client {name!r}", like=weights),
            where,
        )
        return self.combine(weights, updates, self.silos.examples, number, least=self.min_clients)

    # -- stage 2 -------------------------------------------------------------------------------

    def personalise(self, weights: Weights) -> None:
        stage = self.settings.stage2
        with ProgressLine("stage 2, epochs of all silos") as progress:
            for number in range(stage.epochs):
                done = self.folder / f"personal-{stage.negatives}-{number:03}.json"
                if done.is_file():
                    continue
                where = f"stage 2, epoch {number}"
                names = self.silos.present(where)
                relay = Relay(self.silos, names, weights, number, dim=self.dim)
                pools = relay.pools() if stage.asks(number) else {name: {} for name in names}
                contents = {name: self.silos.about(weights, name, pool, epoch=number) for name, pool in pools.items()}
                finished = self.silos.exchange("train.personalise", contents, where)
                for name, content in finished.items():
                    relay.report_refusals(name, content)
                write_whole(done, json.dumps({"schema": SCHEMA, "silos": sorted(finished)}))
                progress(number + 1, stage.epochs)

    # -- measures ------------------------------------------------------------------------------

    def measure(self, system: Phase, weights: Weights | None, *, split: str = "test") -> None:
        """Let every silo evaluate on its own collection; it keeps the values, or shares the means."""
        shared = self.result.systems[system] = {}
        where = f"measures of {system}"
        contents: dict[str, RecordDict] = {}
        facts = {"system": system, "split": split}
        for name in self.silos.present(where):
            contents[name] = (
                self.silos.message(**facts) if weights is None else self.silos.about(weights, name, **facts)
            )
        for name, content in self.silos.exchange("evaluate.retrieval", contents, where).items():
            head, found = content["head"], content.metric_records.get("measures", {})
            epsilon = head.get("epsilon")
            if isinstance(epsilon, float) and 0 <= epsilon < float("inf"):
                self.result.epsilon[name] = epsilon
            elif epsilon is not None:
                self.result.faults.append(f"{where}: client {name!r} sent an impossible epsilon.")
            if head.get("withheld") is True:
                continue
            values = {metric: float(value) for metric, value in found.items() if isinstance(value, int | float)}
            count = head.get("queries")
            counted = isinstance(count, int) and 0 < count < _MOST_QUERIES
            if not values or not counted or not all(0 <= value <= 1 for value in values.values()):
                self.result.faults.append(f"{where}: client {name!r} sent impossible measures.")
                continue
            shared[name] = {metric: np.broadcast_to(value, (count,)) for metric, value in values.items()}


def build_server_app(
    federation: FlowerFederation,
    *,
    measure: Sequence[Phase] = PHASES,
    split: str = "test",
    on_result: Callable[[FedResult], None] | None = None,
) -> ServerApp:
    """Build the server's app, which runs the federation and writes ``federation.json`` next to its weights."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        result = federation.serve(grid, measure=measure, split=split)
        facts = {"schema": SCHEMA, **result.facts()}
        write_whole(federation.folder / "federation.json", json.dumps(facts, indent=1))
        if on_result is not None:
            on_result(result)

    app.main()(main)
    return app
