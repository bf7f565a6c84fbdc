"""How many bytes sealing adds to one refresh of fed-negatives; the table of docs/federated.md.

    python benchmarks/fed_sealing.py

Silos without data ask and answer with random embeddings through the apps and the grid in one process, once in clear
and once sealed. Random embeddings have no neighbours in common, so blocks are larger here than those of real texts.
About a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import options, say, write

from lit_dpret.federated.flower.client_app import build_client_app
from lit_dpret.federated.flower.grid import InProcessGrid
from lit_dpret.federated.flower.library import Context
from lit_dpret.federated.flower.server_app import FlowerFederation, build_server_app
from lit_dpret.federated.negatives import Block, FedPool, respond, respond_uniformly
from lit_dpret.federated.settings import PddAs2, Stage1, Stage2
from lit_dpret.negatives.base import public_coins

KINDS = ("query.seal_key", "query.fedneg_request", "query.fedneg_serve", "train.personalise")


class Random:
    """What the apps ask of a silo, with coins for embeddings."""

    credentials = ledger = None

    def __init__(self, name: str, folder: Path, settings: PddAs2, sizes: argparse.Namespace) -> None:
        self.name, self.state, self.settings, self._sizes = name, folder / name, settings, sizes
        self.ledgers = self.state
        self.model = ({"w": torch.zeros(1)}, sizes.dim)
        self.examples = sizes.queries

    def _drawn(self, what: str, rows: int) -> torch.Tensor:
        drawn = public_coins(0, self.name, what).standard_normal((rows, self._sizes.dim))
        return torch.from_numpy(drawn).float()

    def request(self, weights: Any, refresh: int) -> torch.Tensor:
        stage = self.settings.stage2
        rows = {"exact": self.examples, "dp_centroid": stage.centroids, "none": 0}[stage.request]
        return self._drawn("request", rows)

    def serve(self, weights: Any, rows: torch.Tensor, *, refresh: int) -> Block:
        stage, held = self.settings.stage2, self._drawn("collection", self._sizes.sentences)
        if len(rows):
            return respond(self.name, rows, held, stage.top_k, send_as=stage.send_as)
        return respond_uniformly(self.name, held, stage.n, seed=refresh, send_as=stage.send_as)

    def personalise(self, weights: Any, pool: FedPool, number: int) -> None:
        """Nothing is learned."""

    def train_shared(self, weights: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        return weights

    def evaluate(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def sent(request: Any, *, seal: bool, sizes: argparse.Namespace) -> dict[str, int]:
    """Bytes of one refresh, envelopes included: up from the silos, and down to them."""
    settings = PddAs2(
        stage1=Stage1(warmup_rounds=0, rounds=1),
        stage2=Stage2(epochs=1, request=request, n=sizes.n, top_k=sizes.n, centroids=sizes.centroids),
        seal=seal,
    )
    with tempfile.TemporaryDirectory() as folder:

        def make(context: Context) -> Any:
            return Random(str(context.node_config["client"]), Path(folder), settings, sizes)

        nodes = {10 + i: {"client": f"silo{i:02}"} for i in range(sizes.silos)}
        grid = InProcessGrid(build_client_app(make), nodes)
        server = FlowerFederation(settings, {"w": torch.zeros(1)}, Path(folder) / "server", dim=sizes.dim)
        server.measure = lambda *_, **__: None  # type: ignore[method-assign]
        grid.launch(build_server_app(server))
        if server.result.faults:
            raise SystemExit(server.result.faults[0])
    found = [grid.traffic[kind] for kind in KINDS if kind in grid.traffic]
    return {"up": sum(one.up for one in found), "down": sum(one.down for one in found)}


def main() -> None:
    parser = options(__doc__, "fed_sealing.json")
    parser.add_argument("--silos", type=int, nargs="+", default=[3, 10])
    parser.add_argument("--queries", type=int, default=200, help="of each silo")
    parser.add_argument("--sentences", type=int, default=2000, help="of each silo")
    parser.add_argument("--centroids", type=int, default=16)
    parser.add_argument("--n", type=int, default=20, help="answers for each row")
    parser.add_argument("--dim", type=int, default=256)
    arguments = parser.parse_args()
    rows = []
    lines = ["| silos | request | up: clear, sealed (MB) | down: clear, sealed (MB) |", "| ---: | --- | ---: | ---: |"]
    for silos in arguments.silos:
        for request in ("exact", "dp_centroid", "none"):
            sizes = argparse.Namespace(**{**vars(arguments), "silos": silos})
            clear, sealed = (sent(request, seal=seal, sizes=sizes) for seal in (False, True))
            rows.append({"silos": silos, "request": request, "clear": clear, "sealed": sealed})
            cells = [
                f"{clear[way] / 1e6:.2f}, {sealed[way] / 1e6:.2f} (x {sealed[way] / clear[way]:.2f})"
                for way in ("up", "down")
            ]
            lines.append(f"| {silos} | {request} | {' | '.join(cells)} |")
            sys.stderr.write(lines[-1] + "\n")
    facts = {name: value for name, value in vars(arguments).items() if name != "out"}
    write({"sizes": facts, "rows": rows}, arguments.out)
    say("\n".join(lines))


if __name__ == "__main__":
    main()
