"""The server's view of a PDD-AS2 run (Algorithm 1 of paper 004, and its second stage), and its result.

Phases, rounds and the combination of updates are the same for every transport. The way silos are asked is not:
`lit_dpret.federated.transport` calls them, and `lit_dpret.federated.flower.server_app` sends messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights, client_weights, fingerprint, next_weights
from lit_dpret.federated.settings import PHASES, PddAs2, Phase
from lit_dpret.federated.storage import Traffic, keep_facts, newest_round, save_tensors
from lit_dpret.progress import ProgressLine
from lit_dpret.retrieval.metrics import Values

# The measures of each client, with one value per query.
PerClient = dict[str, dict[str, Values]]


@dataclass
class FedResult:
    """The results of a run. Values are per query, and as private as the queries."""

    # By phase and client. A server knows only the means of the silos that share them, and gives each query the mean.
    systems: dict[str, PerClient] = field(default_factory=dict)
    # The global weights; empty if they are on another machine, or nothing was trained.
    weights: Weights = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)  # bytes by phase and silo, without envelopes, both ways
    # Spent on each silo's queries, for the silos that report it; None if nothing is promised.
    epsilon: dict[str, float | None] = field(default_factory=dict)
    # The silos in each round of stage 1 that this process ran without masks, or as the server of a secure sum. That
    # server does not know whose vector holds no update.
    rounds: dict[int, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # silos that were left out, when, and why

    @property
    def sent(self) -> Counter[str]:
        return self.traffic.by_phase()

    def mean(self, system: str, metric: str) -> float:
        """Return the mean over all queries of all clients with known measures."""
        found = self.systems.get(system)
        if not found:
            raise DataError(f"No silo shares its measures of {system}; each has them in its own state folder.")
        return float(np.concatenate([values[metric] for values in found.values()]).mean())

    def facts(self) -> dict[str, Any]:
        """Return what the server knows at the end as plain values, without the weights."""
        of_silo = {name: found for shared in self.systems.values() for name, found in shared.items()}
        return {
            # A server knows only means, so all values of a silo are the same.
            "measures": {
                system: {name: {metric: float(one[0]) for metric, one in found.items()} for name, found in of.items()}
                for system, of in self.systems.items()
            },
            "queries": {name: len(next(iter(found.values()))) for name, found in of_silo.items()},
            "epsilon": self.epsilon,
            "sent": dict(self.sent),
            "rounds": self.rounds,
            "sent_by_silo": {name: dict(sent) for name, sent in self.traffic.by_silo().items()},
            "faults": self.faults,
        }

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> FedResult:
        """Return the result from a server's `facts`, with each query's value replaced by its silo's mean."""
        result = cls(faults=list(facts["faults"]), epsilon=dict(facts["epsilon"]))
        for phase, shared in facts["measures"].items():
            result.systems[phase] = {
                client: {metric: np.full(facts["queries"][client], value) for metric, value in found.items()}
                for client, found in shared.items()
            }
        for client, sent in facts.get("sent_by_silo", {}).items():
            for phase, count in sent.items():
                result.traffic.note(phase, client, {client: count})
        return result


class Federation(ABC):
    """A run of PDD-AS2, over any transport.

    Guarantees:
        - A run that is started again does not repeat a finished round or refresh.
        - An answer with a wrong shape or with values that are not finite is left out and reported. The round continues
          with the others.
    """

    steps_of_round = 1  # on the progress line

    def __init__(self, settings: PddAs2, start: Mapping[str, Tensor], folder: str | Path, **facts: object) -> None:
        self.settings, self.start, self.folder = settings.check(), dict(start), Path(folder)
        terms = {"seed": settings.seed, **asdict(settings.privacy)}
        began = {"start": fingerprint(self.start), "secure_sum": settings.secure_sum, **facts}
        keep_facts(self.folder / "run.json", "server", {**terms, **asdict(settings.stage1), **began})
        if settings.stage2.epochs:
            kind = f"personal-{settings.stage2.negatives}"
            keep_facts(self.folder / "run.json", kind, {**terms, **asdict(settings.stage2)})
        self.result = FedResult(traffic=Traffic(self.folder / "traffic.json"))

    def run(self, *, measure: Sequence[Phase] = PHASES, split: str = "test") -> FedResult:
        """Train as needed, and evaluate the given phases on each silo's own questions.

        Without ``stage2`` in ``measure`` stage 2 is not run, and ``bm25`` alone trains nothing.
        """
        if "bm25" in measure:
            self.measure("bm25", None, split=split)
        if "stage1" in measure or "stage2" in measure:
            weights = self.train_shared()
            if "stage1" in measure:
                self.measure("stage1", weights, split=split)
            if "stage2" in measure and self.settings.stage2.epochs:
                self.personalise(weights)
                self.measure("stage2", weights, split=split)
        return self.result

    def train_shared(self) -> Weights:
        """Run stage 1 and return the global weights; a round is a local epoch of every silo, then their aggregate."""
        weights, first = newest_round(self.folder, "global") or (self.start, 0)
        rounds = self.settings.stage1.warmup_rounds + self.settings.stage1.rounds
        steps = self.steps_of_round
        with ProgressLine("stage 1, rounds of all silos") as progress:
            for number in range(first, rounds):
                begun = number * steps
                weights = self.round(weights, number, lambda part, begun=begun: progress(begun + part, rounds * steps))  # type: ignore[misc]
                save_tensors(weights, self.folder / f"global-{number:03}.safetensors")
                # A restart continues from the newest weights only.
                (self.folder / f"global-{number - 1:03}.safetensors").unlink(missing_ok=True)
                progress(begun + steps, rounds * steps)
        self.result.weights = dict(weights)
        return self.result.weights

    @abstractmethod
    def round(self, weights: Weights, number: int, progress: Callable[[int], None]) -> Weights:
        """Return the next global weights; the previous ones if the round is void."""

    @abstractmethod
    def personalise(self, weights: Weights) -> None:
        """Run stage 2: every silo trains its own query encoder, with new negatives every ``refresh_every`` epochs."""

    @abstractmethod
    def measure(self, system: Phase, weights: Weights | None, *, split: str) -> None:
        """Add the measures of every silo on its own collection to the result; ``weights`` is None for BM25."""

    def combine(
        self, weights: Weights, updates: Mapping[str, Weights], examples: Mapping[str, int], number: int, *, least: int
    ) -> Weights:
        """Return the next global weights from unmasked updates."""
        stage, where = self.settings.stage1, f"stage 1, round {number}"
        shares = client_weights({name: examples[name] for name in updates}, stage.weighting, n_hat=stage.n_hat)
        with self.giving_reasons(where):
            found, self.result.rounds[number] = next_weights(
                weights, updates, shares, self.settings, where=where, faults=self.result.faults, least=least
            )
        return found

    @contextmanager
    def giving_reasons(self, where: str) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            faults = " ".join(fault for fault in self.result.faults if fault.startswith(where))
            raise DataError(
                f"{where}: {error} {faults} Start again when enough silos can take part: finished rounds are kept.",
                kind=error.kind,
            ) from error
