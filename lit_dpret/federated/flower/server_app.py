"""The server's side: whom to ask, what to add up, what to pass on, and whom to go on without.

It holds no data and trains nothing. Its rounds are those of `lit_dpret.federated.inprocess`, between machines: a silo
that is gone, late, broken or sends nonsense is named in ``faults``, the round goes on with the others, and it is asked
again in the next one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import Weights, client_weights, weighted_mean
from lit_dpret.federated.fed_negatives import SENT_AS, Block, FedPool, merge_lists, pool_of
from lit_dpret.federated.flower.library import Context, Grid, RecordDict, ServerApp
from lit_dpret.federated.flower.payloads import (
    SCHEMA,
    block_of,
    digest_of,
    envelope,
    fingerprint,
    payload_bytes,
    pool_record,
    rows_of,
    rows_record,
    weights_of,
    weights_record,
)
from lit_dpret.federated.flower.roster import Roster
from lit_dpret.federated.selection import Site, select_clients
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.storage import keep_facts, save_tensors
from lit_dpret.progress import ProgressLine
from lit_dpret.whole_file import write_whole

PHASES = {
    "train.stage1": "stage 1",
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
        sent: Bytes of tensors by phase, both ways, without envelopes.
        sent_by_silo: The same for each silo.
        rounds: Whose updates each round of stage 1 that this process ran is made of.
        faults: Silos that were gone on without, when, and why.
    """

    weights: Weights = field(default_factory=dict)
    measures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    sent_by_silo: dict[str, Counter[str]] = field(default_factory=dict)
    rounds: dict[int, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """All but the weights, as plain values."""
        return {"measures": self.measures, "queries": self.queries, "sent": dict(self.sent), "rounds": self.rounds,
                "sent_by_silo": {name: dict(sent) for name, sent in self.sent_by_silo.items()},
                "faults": self.faults}  # fmt: skip

    def mean(self, system: str, metric: str) -> float:
        """Over all queries of all silos that share their measures.

        Raises:
            DataError: None does.
        """
        found = self.measures.get(system)
        if not found:
            raise DataError(f"No silo shares its measures of {system}; each has them in its own state folder.")
        total = sum(self.queries[name] for name in found)
        return sum(values[metric] * self.queries[name] for name, values in found.items()) / total


class FlowerFederation:
    """A run of PDD-AS2 as its server sees it.

    Guarantees:
        - A silo is known by the message that it replies to and never by what its reply says.
        - A round of stage 1, or an epoch of stage 2, that is finished is not made again by a server that was
          started once more.

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
        if settings.secure_sum:
            raise ConfigurationError(
                "federated.secure_sum=true is not done by messages yet: these apps would send every update in clear. "
                "Set it to false, or run all silos in one process (lit_dpret.federated.inprocess)."
            )
        if min_clients < 1:
            raise ConfigurationError(f"federated.min_clients={min_clients} must be at least 1.")
        self.start, self.folder, self.dim = dict(start), Path(folder), dim
        self.min_clients = min_clients
        self.sites = dict(sites or {})
        facts = {"seed": settings.seed, **asdict(settings.privacy)}
        began = {**facts, **asdict(settings.stage1), "start": fingerprint(self.start)}
        keep_facts(self.folder / "run.json", "server", began)
        if settings.stage2.epochs:
            kind = f"personal-{settings.stage2.negatives}"
            keep_facts(self.folder / "run.json", kind, {**facts, **asdict(settings.stage2)})
        self.result = FlowerResult()
        self._roster = Roster(self.result.faults, timeout=timeout, wait=wait)

    def run(
        self, grid: Grid, *, measure: Sequence[str] = ("bm25", "stage1", "stage2"), split: str = "test"
    ) -> FlowerResult:
        """Both stages, and what the silos say that they are worth.

        Args:
            grid: Carries the messages.
            measure: Without ``stage2`` in it stage 2 is not run, and ``bm25`` alone trains nothing.
            split: Of the questions.
        """
        self._roster.wait_for(grid, self.min_clients)
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
        """Round after round: one local epoch of every silo that is there, then the mean."""
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
        sent = weights_record(weights)
        contents: dict[str, RecordDict] = {}
        for name in self._present(grid, where):
            contents[name] = self._envelope(round=number)
            contents[name]["weights"] = sent
        updates = self._read(
            self._exchange(grid, "train.stage1", contents, where),
            lambda name, content: weights_of(content, f"client {name!r}", like=weights),
            where,
        )
        if len(updates) < self.min_clients:
            raise DataError(
                f"{where}: {len(updates)} silos sent an update, and federated.min_clients={self.min_clients}. "
                f"{' '.join(fault for fault in self.result.faults if fault.startswith(where))} Start again when they "
                "are back: what is finished is kept."
            )
        stage = self.settings.stage1
        shares = client_weights(
            {name: self._roster.examples[name] for name in updates}, stage.weighting, n_hat=stage.n_hat
        )
        self.result.rounds[number] = sorted(updates)
        return weighted_mean(updates, shares)

    # -- stage 2 -------------------------------------------------------------------------------

    def personalise(self, grid: Grid, weights: Mapping[str, Tensor]) -> None:
        """Every silo its own query encoder, negatives asked for anew before each epoch."""
        stage = self.settings.stage2
        with ProgressLine("stage 2, epochs of all silos") as progress:
            for number in range(stage.epochs):
                done = self.folder / f"personal-{stage.negatives}-{number:03}.json"
                if done.is_file():
                    continue
                where = f"stage 2, epoch {number}"
                names = self._present(grid, where)
                pools = self._pools(grid, names, weights, number) if stage.negatives == "fed" else None
                contents: dict[str, RecordDict] = {}
                for name in names if pools is None else pools:
                    contents[name] = self._global(name, weights, epoch=number)
                    if pools is not None:
                        contents[name]["pool"] = pool_record(pools[name], send_as=SENT_AS[stage.send_as])
                finished = self._exchange(grid, "train.personalise", contents, where)
                _write_json(done, {"schema": SCHEMA, "silos": sorted(finished)})
                progress(number + 1, stage.epochs)

    def _pools(self, grid: Grid, names: list[str], weights: Mapping[str, Tensor], refresh: int) -> dict[str, FedPool]:
        """What the selected silos answer to each silo's request; one message to each of them for all who ask."""
        stage, where = self.settings.stage2, f"refresh {refresh}"
        requests = {name: self._global(name, weights, refresh=refresh) for name in names}
        rows = self._read(
            self._exchange(grid, "query.fedneg_request", requests, where),
            lambda name, content: rows_of(content, f"client {name!r}", dim=self.dim),
            where,
        )
        sites = {name: self.sites.get(name, Site()) for name in names}
        seed = self.settings.seed
        askers: dict[str, list[str]] = {name: [] for name in names}
        for asker in rows:
            how, count = stage.select, stage.select_count
            for name in select_clients(asker, sites, how, count=count, seed=seed, refresh=refresh):
                askers[name].append(asker)
        asked = {name: listed for name, listed in askers.items() if listed}
        replies = self._exchange(
            grid,
            "query.fedneg_serve",
            {name: self._asking(name, weights, refresh, self._rows(rows, listed)) for name, listed in asked.items()},
            where,
        )
        blocks: dict[str, list[Block]] = {asker: [] for asker in rows}
        for name, content in replies.items():
            for asker, block in self._blocks(name, content, rows, asked[name], refresh).items():
                blocks[asker].append(block)
        exact = stage.request == "exact"
        return {
            asker: merge_lists(found, rows[asker], stage.top_k) if exact else pool_of(found, self.dim)
            for asker, found in blocks.items()
        }

    def _rows(self, rows: Mapping[str, Tensor], askers: list[str]) -> list[Tensor]:
        """The requests that go into one message; requests that say nothing are all the same one."""
        if self.settings.stage2.request == "none":
            return [torch.empty(0, self.dim)]
        return [rows[asker] for asker in askers]

    def _asking(self, name: str, weights: Mapping[str, Tensor], refresh: int, rows: list[Tensor]) -> RecordDict:
        content = self._global(name, weights, refresh=refresh, askers=len(rows))
        for place, one in enumerate(rows):
            content[f"rows.{place}"] = rows_record(one)
        return content

    def _blocks(
        self, name: str, content: RecordDict, rows: Mapping[str, Tensor], askers: list[str], refresh: int
    ) -> dict[str, Block]:
        stage = self.settings.stage2
        found: dict[str, Block] = {}
        for place, asker in enumerate(askers):
            says_nothing = stage.request == "none"
            count, limit = (1, stage.n) if says_nothing else (len(rows[asker]), stage.top_k)
            record = "block.0" if says_nothing else f"block.{place}"
            try:
                found[asker] = block_of(content, name, rows=count, dim=self.dim, limit=limit, name=record)
            except DataError as error:
                self.result.faults.append(f"refresh {refresh} of client {asker!r}: {error}")
        return found

    # -- measures ------------------------------------------------------------------------------

    def measure(self, grid: Grid, system: str, weights: Mapping[str, Tensor] | None, *, split: str = "test") -> None:
        """Every silo measures on its own collection, and keeps what it finds, or tells the means."""
        self.result.measures[system] = {}
        where = f"measures of {system}"
        contents: dict[str, RecordDict] = {}
        for name in self._present(grid, where):
            told = {"system": system, "split": split}
            contents[name] = self._envelope(**told) if weights is None else self._global(name, weights, **told)
        for name, content in self._exchange(grid, "evaluate.retrieval", contents, where).items():
            head, found = content["head"], content.metric_records.get("measures", {})
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
        """A message about the global weights, with them where the silo does not have them yet."""
        wanted = fingerprint(weights)
        content = self._envelope(weights=wanted, **facts)
        if self._roster.lacks(name, wanted):
            content["weights"] = weights_record(weights)
        return content

    def _envelope(self, **facts: Any) -> RecordDict:
        return envelope(settings=digest_of(self.settings), **facts)

    def _present(self, grid: Grid, where: str) -> list[str]:
        return self._roster.present(grid, where, self._envelope())

    def _exchange(self, grid: Grid, kind: str, contents: Mapping[str, RecordDict], where: str) -> dict[str, RecordDict]:
        """The answers of those who answered well, and the bytes that all of it took."""
        found = self._roster.exchange(grid, kind, contents, where)
        if kind in PHASES:
            for name, content in contents.items():
                size = payload_bytes(content) + (payload_bytes(found[name]) if name in found else 0)
                self.result.sent[PHASES[kind]] += size
                self.result.sent_by_silo.setdefault(name, Counter())[PHASES[kind]] += size
        return found

    def _read(
        self, contents: Mapping[str, RecordDict], read: Callable[[str, RecordDict], Any], where: str
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, content in contents.items():
            try:
                found[name] = read(name, content)
            except DataError as error:
                self.result.faults.append(f"{where}: {error}")
        return found


def build_server_app(
    federation: FlowerFederation,
    *,
    measure: Sequence[str] = ("bm25", "stage1", "stage2"),
    split: str = "test",
    on_result: Callable[[FlowerResult], None] | None = None,
) -> ServerApp:
    """The server's app: runs the federation and writes ``federation.json`` beside its weights.

    Args:
        federation: The run.
        measure: As for `FlowerFederation.run`.
        split: The same.
        on_result: Told at the end.
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
