"""The server's side: whom to ask, what to add up, what to pass on, and whom to continue without.

It holds no data and trains nothing. Its rounds are those of `lit_dpret.federated.inprocess`, between machines: a silo
that is gone, late, broken or sends nonsense is named in ``faults``, the round continues with the others, and the silo
is asked again in the next one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import Weights, check_enough, client_weights, fingerprint, next_weights
from lit_dpret.federated.fed_negatives import Site
from lit_dpret.federated.flower.client_app import SUM_ACTS
from lit_dpret.federated.flower.connected import ConnectedSilos
from lit_dpret.federated.flower.library import Context, Grid, RecordDict, ServerApp
from lit_dpret.federated.flower.masked_round import MaskedRound
from lit_dpret.federated.flower.payloads import (
    SCHEMA,
    digest_of,
    envelope,
    payload_bytes,
    read_each,
    weights_of,
    weights_record,
)
from lit_dpret.federated.flower.relay import Relay
from lit_dpret.federated.settings import PHASES, PddAs2
from lit_dpret.federated.storage import keep_facts, save_tensors
from lit_dpret.files import write_whole
from lit_dpret.progress import ProgressLine

_TRAFFIC = {
    "train.stage1": "stage 1",
    **{f"train.{act}": "stage 1" for act in SUM_ACTS},
    "query.seal_key": "requests",
    "query.fedneg_request": "requests",
    "query.fedneg_serve": "responses",
    "train.personalise": "pools",
}


@dataclass
class FlowerResult:
    """What the server knows at the end.

    Attributes:
        weights: The global weights.
        measures: For each system the mean measures of each silo that shares them; of none under a budget.
        queries: How many queries those are means of.
        epsilon: What each silo says it has spent of its budget, of those that tell.
        sent_by_silo: Bytes of tensors of each silo by phase, both ways, without envelopes.
        rounds: Whose updates each round of stage 1 is made of, of the rounds that this process ran.
        faults: Silos that were left out, when, and why.
    """

    weights: Weights = field(default_factory=dict)
    measures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)
    epsilon: dict[str, float] = field(default_factory=dict)
    sent_by_silo: dict[str, Counter[str]] = field(default_factory=dict)
    rounds: dict[int, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def sent(self) -> Counter[str]:
        """Bytes by phase, of all silos together."""
        return sum(self.sent_by_silo.values(), Counter())

    def facts(self) -> dict[str, Any]:
        """Return everything but the weights, as plain values."""
        return {"measures": self.measures, "queries": self.queries, "epsilon": self.epsilon,
                "sent": dict(self.sent), "rounds": self.rounds,
                "sent_by_silo": {name: dict(sent) for name, sent in self.sent_by_silo.items()},
                "faults": self.faults}  # fmt: skip

    def mean(self, system: str, metric: str) -> float:
        """Return the mean over all queries of the silos that share their measures.

        Raises:
            DataError: No silo does.
        """
        found = self.measures.get(system)
        if not found:
            raise DataError(f"No silo shares its measures of {system}; each has them in its own state folder.")
        total = sum(self.queries[name] for name in found)
        return sum(values[metric] * self.queries[name] for name, values in found.items()) / total


class FlowerFederation:
    """A run of PDD-AS2 as its server sees it.

    Guarantees:
        - A silo is identified by the message that it replies to, never by what its reply says.
        - A server that is started again does not repeat a finished round of stage 1 or epoch of stage 2.

    Args:
        settings: Of the run; every silo has the same, or refuses.
        start: The weights to begin with; public.
        folder: Of the server's state.
        dim: Dimensions of an embedding.
        min_clients: Fewer updates than these end the run.
        timeout: Seconds to wait for the answers of a round; null waits as long as Flower keeps messages.
        wait: Seconds to wait at the start until so many silos are there.
        sites: Where the silos are, by name.

    Raises:
        ConfigurationError: The settings ask for what these apps do not do.
        ResumeError: The folder is that of another run.
    """

    def __init__(
        self,
        settings: PddAs2,
        start: Mapping[str, Tensor],
        folder: str | Path,
        *,
        dim: int,
        min_clients: int = 1,
        timeout: float | None = None,
        wait: float = 60.0,
        sites: Mapping[str, Site] | None = None,
    ) -> None:
        self.settings = settings.check()
        if min_clients < 1:
            raise ConfigurationError(f"federated.min_clients={min_clients} must be at least 1.")
        check_enough(settings.stage1, min_clients, "federated.min_clients")
        self.start, self.folder, self.dim = dict(start), Path(folder), dim
        self.min_clients = min_clients
        self.sites = dict(sites or {})
        facts = {"seed": settings.seed, **asdict(settings.privacy)}
        began = {
            **facts,
            **asdict(settings.stage1),
            "start": fingerprint(self.start),
            "secure_sum": settings.secure_sum,
        }
        keep_facts(self.folder / "run.json", "server", began)
        if settings.stage2.epochs:
            kind = f"personal-{settings.stage2.negatives}"
            keep_facts(self.folder / "run.json", kind, {**facts, **asdict(settings.stage2)})
        self.result = FlowerResult()
        self.silos = ConnectedSilos(self.result.faults, timeout=timeout, wait=wait, numbered=settings.roster)

    def run(self, grid: Grid, *, measure: Sequence[str] = PHASES, split: str = "test") -> FlowerResult:
        """Run both stages, and collect the measures that the silos tell.

        Args:
            grid: Carries the messages.
            measure: Without ``stage2`` in it stage 2 is not run, and ``bm25`` alone trains nothing.
            split: Of the questions.
        """
        self.silos.wait_for(grid, self.min_clients)
        if "bm25" in measure:
            self.measure(grid, "bm25", None, split=split)
        if "stage1" in measure or "stage2" in measure:
            weights = self.result.weights = self.train_shared(grid)
            if "stage1" in measure:
                self.measure(grid, "stage1", weights, split=split)
            if "stage2" in measure and self.settings.stage2.epochs:
                self.personalise(grid, weights)
                self.measure(grid, "stage2", weights, split=split)
        return self.result

    # -- stage 1 -------------------------------------------------------------------------------

    def train_shared(self, grid: Grid) -> Weights:
        """Run every round: one local epoch of every connected silo, then the mean."""
        weights: Weights = dict(self.start)
        rounds = self.settings.stage1.warmup_rounds + self.settings.stage1.rounds
        with ProgressLine("stage 1, rounds of all silos") as progress:
            for number in range(rounds):
                path = self.folder / f"global-{number:03}.safetensors"
                if path.is_file():
                    weights = load_file(path)
                    continue
                weights = self._round(grid, weights, number)
                save_tensors(weights, path)
                progress(number + 1, rounds)
        return weights

    def _round(self, grid: Grid, weights: Weights, number: int) -> Weights:
        where = f"stage 1, round {number}"
        if self.settings.secure_sum:
            return self._masked_round(grid, weights, number, where)
        sent = weights_record(weights)
        contents: dict[str, RecordDict] = {}
        for name in self._present(grid, where):
            contents[name] = self._envelope(round=number)
            contents[name]["weights"] = sent
        updates = read_each(
            self._exchange(grid, "train.stage1", contents, where),
            lambda name, content: weights_of(content, f"client {name!r}", like=weights),
            self.result.faults,
            where,
        )
        stage, examples = self.settings.stage1, self.silos.examples
        shares = client_weights({name: examples[name] for name in updates}, stage.weighting, n_hat=stage.n_hat)
        try:
            found, self.result.rounds[number] = next_weights(
                weights, updates, shares, self.settings, where=where, faults=self.result.faults, least=self.min_clients
            )
        except DataError as error:
            raise DataError(self._refused(where, str(error)), kind=error.kind) from error
        return found

    def _masked_round(self, grid: Grid, weights: Weights, number: int, where: str) -> Weights:
        numbers = self.silos.numbers(self._present(grid, where))
        try:
            masked = MaskedRound(
                settings=self.settings,
                weights=weights,
                number=number,
                numbers=numbers,
                exchange=lambda kind, contents: self._exchange(grid, kind, contents, where),
                envelope=self._envelope,
                faults=self.result.faults,
                where=where,
                min_clients=self.min_clients,
                roster=self.silos.listed,
            )
            found, self.result.rounds[number] = masked.run(self.folder / f"unmasking-{number:03}.json")
        except DataError as error:
            raise DataError(self._refused(where, str(error)), kind=error.kind) from error
        return found

    def _refused(self, where: str, why: str) -> str:
        faults = " ".join(fault for fault in self.result.faults if fault.startswith(where))
        return f"{where}: {why} {faults} Start again when they are back: what is finished is kept."

    # -- stage 2 -------------------------------------------------------------------------------

    def personalise(self, grid: Grid, weights: Mapping[str, Tensor]) -> None:
        """Let every silo train its own query encoder, with new negatives every ``refresh_every`` epochs."""
        stage = self.settings.stage2
        with ProgressLine("stage 2, epochs of all silos") as progress:
            for number in range(stage.epochs):
                done = self.folder / f"personal-{stage.negatives}-{number:03}.json"
                if done.is_file():
                    continue
                where = f"stage 2, epoch {number}"
                names = self._present(grid, where)
                relay = Relay(
                    settings=self.settings,
                    sites=self.sites,
                    dim=self.dim,
                    refresh=number,
                    exchange=lambda kind, contents, where=f"refresh {number}": (  # type: ignore[misc]
                        self._exchange(grid, kind, contents, where)
                    ),
                    message=lambda name, **facts: self._global(name, weights, **facts),
                    faults=self.result.faults,
                    numbers=self.silos.numbers(names),
                )
                pools = relay.pools() if stage.asks(number) else {name: {} for name in names}
                contents: dict[str, RecordDict] = {}
                for name, records in pools.items():
                    contents[name] = self._global(name, weights, epoch=number)
                    for kind, record in records.items():
                        contents[name][kind] = record
                finished = self._exchange(grid, "train.personalise", contents, where)
                for name, content in finished.items():
                    relay.report_refusals(name, content)
                _write_json(done, {"schema": SCHEMA, "silos": sorted(finished)})
                progress(number + 1, stage.epochs)

    # -- measures ------------------------------------------------------------------------------

    def measure(self, grid: Grid, system: str, weights: Mapping[str, Tensor] | None, *, split: str = "test") -> None:
        """Let every silo measure on its own collection; it keeps what it finds, or tells the means."""
        self.result.measures[system] = {}
        where = f"measures of {system}"
        contents: dict[str, RecordDict] = {}
        for name in self._present(grid, where):
            told = {"system": system, "split": split}
            contents[name] = self._envelope(**told) if weights is None else self._global(name, weights, **told)
        for name, content in self._exchange(grid, "evaluate.retrieval", contents, where).items():
            head, found = content["head"], content.metric_records.get("measures", {})
            epsilon = head.get("epsilon")
            if isinstance(epsilon, float) and 0 <= epsilon < float("inf"):
                self.result.epsilon[name] = epsilon
            elif epsilon is not None:
                self.result.faults.append(f"{where}: client {name!r} sent an epsilon that cannot be.")
            if head.get("withheld") is True:
                continue
            values = {metric: float(value) for metric, value in found.items() if isinstance(value, int | float)}
            count = head.get("queries")
            if not isinstance(count, int) or count < 1 or not all(0 <= value <= 1 for value in values.values()):
                self.result.faults.append(f"{where}: client {name!r} sent measures that cannot be.")
                continue
            self.result.measures[system][name], self.result.queries[name] = values, count

    # -- messages ------------------------------------------------------------------------------

    def _global(self, name: str, weights: Mapping[str, Tensor], **facts: Any) -> RecordDict:
        """Make a message about the global weights, with them where the silo does not have them yet."""
        wanted = fingerprint(weights)
        content = self._envelope(weights=wanted, **facts)
        if self.silos.lacks(name, wanted):
            content["weights"] = weights_record(weights)
        return content

    def _envelope(self, **facts: Any) -> RecordDict:
        return envelope(settings=digest_of(self.settings), **facts)

    def _present(self, grid: Grid, where: str) -> list[str]:
        return self.silos.present(grid, where, self._envelope())

    def _exchange(self, grid: Grid, kind: str, contents: Mapping[str, RecordDict], where: str) -> dict[str, RecordDict]:
        """Return the answers of the silos that answered well, and count the bytes of all messages."""
        found = self.silos.exchange(grid, kind, contents, where)
        if kind in _TRAFFIC:
            for name, content in contents.items():
                size = payload_bytes(content) + (payload_bytes(found[name]) if name in found else 0)
                self.result.sent_by_silo.setdefault(name, Counter())[_TRAFFIC[kind]] += size
        return found


def build_server_app(
    federation: FlowerFederation,
    *,
    measure: Sequence[str] = PHASES,
    split: str = "test",
    on_result: Callable[[FlowerResult], None] | None = None,
) -> ServerApp:
    """Build the server's app, which runs the federation and writes ``federation.json`` beside its weights.

    Args:
        federation: The run.
        measure: As for `FlowerFederation.run`.
        split: The same.
        on_result: Called at the end.
    """
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        result = federation.run(grid, measure=measure, split=split)
        _write_json(federation.folder / "federation.json", {"schema": SCHEMA, **result.facts()})
        if on_result is not None:
            on_result(result)

    app.main()(main)
    return app


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(facts, indent=1))
