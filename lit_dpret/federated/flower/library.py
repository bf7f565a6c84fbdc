"""All imports from Flower (the extra ``federated``); no other file imports it.

``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp`` are its public Message API. The rest is internal and may move in
any release.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lit_dpret.federated.flower  # noqa: F401  (switches telemetry off before flwr is imported)
from lit_dpret.errors import ConfigurationError

KNOWN = ">=1.41,<1.43"

try:
    FLWR_VERSION = version("flwr")
except PackageNotFoundError as error:
    raise ConfigurationError(
        'A federation by messages needs Flower. Run: pip install "lit-dpret[federated]", or choose federated=inprocess.'
    ) from error

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.common.constant import ErrorCode
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise ConfigurationError(
        f"flwr {FLWR_VERSION} lacks something that lit-dpret uses ({error}). Run: pip install 'flwr{KNOWN}'."
    ) from error

__all__ = [
    "FLWR_VERSION", "Array", "ArrayRecord", "ClientApp", "ConfigRecord", "Context", "Error", "ErrorCode", "Grid",
    "Message", "MetricRecord", "RecordDict", "ServerApp", "is_registered", "robust_rules", "run_one_task",
    "run_simulation", "task_commands",
]  # fmt: skip


def task_commands() -> list[str]:
    """Return all commands that a server may make a SuperNode start for a message."""
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    return sorted(str(name) for name in TASK_TYPE_TO_COMMAND.values())


def is_registered(address: str, key: Path, root_certificates: Path | None) -> bool | None:
    """Return whether a SuperLink accepts a silo with this key; None if it cannot be determined."""
    try:
        import httpx
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
        from flwr.supercore.error import ApiErrorCode, FlowerError
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        refused = int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)
    except (ImportError, AttributeError):
        return None
    private = load_ssh_private_key(key.read_bytes(), None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        return None
    public = private.public_key()
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(private, public)
    ]  # fmt: skip
    roots = None if root_certificates is None else str(root_certificates)
    asked = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
    try:
        with FleetHttpClient.from_server_address(address, False, roots, interceptors=interceptors) as client:
            node = client.ActivateNode(asked).node_id
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
    except httpx.HTTPStatusError as error:
        answer = FlowerError.from_json(error.response.text)
        return False if answer is not None and int(answer.code) == refused else None
    except (httpx.HTTPError, OSError, ValueError, RuntimeError):
        return None
    return True


def robust_rules() -> dict[str, Callable[..., Any]]:
    """Return Flower's robust aggregation rules; refuse a Flower version that has moved them."""
    try:
        from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg
    except ImportError as error:
        raise ConfigurationError(
            f"flwr {FLWR_VERSION} lacks its aggregation rules ({error}). Run: pip install 'flwr{KNOWN}', or set "
            "federated.stage1.aggregation=mean."
        ) from error
    return {"median": aggregate_median, "trimmed_mean": aggregate_trimmed_avg, "krum": aggregate_krum}


def run_one_task(load: Callable[[], ClientApp]) -> None:
    """Run Flower's ``flwr-clientapp`` for one message, with our app instead of the one from the server.

    A SuperNode unpacks the app that comes with the message and imports what it names, which can be any code. Here none
    of it is unpacked or imported. ``load`` returns our app and should contain slow imports: Flower must report that it
    is alive within 30 seconds of the task's start.
    """
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    loads = ("install_from_fab", "get_load_client_app_fn", "install_app_dependencies")
    if not all(callable(getattr(runtime, name, None)) for name in loads):
        raise ConfigurationError(
            f"flwr {FLWR_VERSION} loads apps in an unknown way, and could run the server's code. Run: pip install "
            f"'flwr{KNOWN}'."
        )

    def refuse(*_: object, **__: object) -> None:
        raise ConfigurationError("A silo installs nothing that the server asks for.")

    runtime.install_from_fab = lambda *_, **__: None
    runtime.get_load_client_app_fn = lambda *_, **__: lambda *_, **__: load()
    runtime.install_app_dependencies = refuse
    flwr_clientapp()


def run_simulation(server_app: ServerApp, client_app: ClientApp, *, nodes: int, processors: int) -> None:
    """Run both apps on Ray, with one processor for each busy node and no GPU."""
    from flwr.simulation import run_simulation as simulated

    started = {"num_cpus": processors, "log_to_driver": False, "include_dashboard": False}
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": started}
    simulated(server_app, client_app, num_supernodes=nodes, backend_name="ray", backend_config=resources)
