"""A federation of planted silos by messages, in one process; imported by path, not a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_silos import SIZE, SMALL, maker

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower.client_app import build_client_app
from lit_dpret.federated.flower.grid import Fate, InProcessGrid
from lit_dpret.federated.flower.library import Context
from lit_dpret.federated.flower.server_app import FlowerFederation, build_server_app
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo import SiloClient

DIM = 16


class Run:
    """A federation by messages over planted silos; the same silos and the same start as `tiny_silos.federation`."""

    def __init__(
        self,
        root: Path,
        settings: PddAs2 = SMALL,
        *,
        fate: Fate | None = None,
        silo: Any = SiloClient,
        share: bool = False,
        spent: bool = False,
        **server: Any,
    ) -> None:
        if not (root / "silos").exists():
            write_silos(root / "silos", planted_silos(SIZE), facts={})
        self.folders = silo_folders(root / "silos")
        self.root, self.settings, self.silo = root, settings, silo
        self.grid = InProcessGrid(
            build_client_app(self.client, share_measures=share, share_epsilon=spent),
            {number: {"client": name} for number, name in enumerate(self.folders, start=10)},
            fate=fate,
        )
        start = self.client(self.grid.context(10)).model[0]
        self.server = FlowerFederation(settings, start, root / "flower" / "server", dim=DIM,
                                       patience=Patience(**{"min_clients": 1, "wait": 0.0, **server}))  # fmt: skip

    def client(self, context: Context) -> SiloClient:
        name = str(context.node_config["client"])
        found: SiloClient = self.silo(
            self.folders[name], self.root / "flower" / name, self.settings, maker(), secret_file=self.root / "secret"
        )
        return found

    def launch(self) -> FedResult:
        self.grid.launch(build_server_app(self.server))
        return self.server.result


def only_stage1(settings: PddAs2 = SMALL, rounds: int = 2) -> PddAs2:
    return replace(
        settings,
        stage1=replace(settings.stage1, warmup_rounds=0, rounds=rounds),
        stage2=replace(settings.stage2, epochs=0),
    )
