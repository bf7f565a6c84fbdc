"""Federations by messages in one process, on which a test is the server too; imported by path, not a test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from in_process_grid import SUPERLINK_NODE_ID, Fate, InProcessGrid, acting_as
from tiny_silos import SIZE, SMALL, maker

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.federated.aggregation import Weights
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower.client_app import build_client_app
from lit_dpret.federated.flower.library import Context, Message
from lit_dpret.federated.flower.server_app import FlowerFederation, build_server_app
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo import SiloClient, Told

DIM = 16


class ByMessages:
    """Silos on the nodes 10, 11, ..., the grid between them and their server."""

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
        """The silo of a node."""
        silo = self.silo_of(str(context.node_config["client"]))
        silo.told = Told(self.share, self.spent)
        return silo

    def silo_of(self, name: str) -> Any:
        raise NotImplementedError

    def launch(self) -> FedResult:
        self.grid.launch(build_server_app(self.server))
        return self.server.result

    def ask(self, node: int, kind: str, content: Mapping[str, Any] | None = None, **facts: Any) -> Message:
        """The answer to a message of a server that does as it likes."""
        told = self.server.silos.message(**facts)
        for name, record in (content or {}).items():
            told[name] = record
        with acting_as(run_id=self.grid._run_id, node_id=SUPERLINK_NODE_ID):
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
