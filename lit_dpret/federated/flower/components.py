"""The two apps under names for Flower's loader; ``deploy/flower/pyproject.toml`` refers to them.

The run reaches the server's app as one YAML string in its run configuration. A silo follows a document next to its
data, whose path its own operator gave (``--node-config 'silo="FILE"'``): none of it comes with a message.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.federated.documents import read_run_request, read_silo_settings
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower.client_app import build_client_app
from lit_dpret.federated.flower.library import Context, Grid, ServerApp
from lit_dpret.federated.flower.server_app import FlowerFederation, build_server_app
from lit_dpret.federated.model import start_and_dim
from lit_dpret.federated.silo import SiloClient
from lit_dpret.privacy.noise import default_secret_file

RUN_CONFIG = "lit-config"
SERVER_FOLDER = "LIT_DPRET_FEDERATIONS"
RESULT, REFUSAL = "lit-dpret result: ", "lit-dpret refusal: "


def make_silo(context: Context) -> SiloClient:
    """Build the silo of this node from its owner's document; refuse a node started without one."""
    place = context.node_config.get("silo")
    if not isinstance(place, str) or not place:
        raise ConfigurationError(
            "This SuperNode was started without --node-config 'silo=\"FILE\"'. Start it with lit-dpret silo."
        )
    return read_silo_settings(Path(place)).client()


client_app = build_client_app(make_silo)
server_app = ServerApp()


@server_app.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    """Run the request in the run configuration; print the result, or the refusal, as one line of the log."""
    try:
        text = context.run_config.get(RUN_CONFIG)
        request = read_run_request(text if isinstance(text, str) else "")
        start, dim = start_and_dim(request.model)
        chosen = os.environ.get(SERVER_FOLDER)  # set by the operator
        folder = (Path(chosen) if chosen else default_secret_file().parent / "federations") / request.name
        federation = FlowerFederation(request.federated, start, folder, dim=dim, patience=request)

        def say(result: FedResult) -> None:
            print(RESULT + json.dumps(result.facts()), file=sys.stderr, flush=True)

        build_server_app(federation, measure=request.measure, split=request.split, on_result=say)(grid, context)
    except LitDpretError as error:
        print(REFUSAL + json.dumps(str(error)), file=sys.stderr, flush=True)
        raise
