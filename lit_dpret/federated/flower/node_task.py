"""One message at a silo, handled in a separate process: ``python -m lit_dpret.federated.flower.node_task``.

`lit_dpret.federated.flower.node` puts it in place of Flower's ``flwr-clientapp``, so that a silo runs the app that its
owner installed and no code from the server.
"""

from __future__ import annotations

import sys

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.flower.library import ClientApp, run_one_task


def installed_app() -> ClientApp:
    """Import the app of this installation, including torch, which is slow."""
    from lit_dpret.federated.flower.components import client_app

    return client_app


def main() -> None:
    """Answer one message, then exit."""
    try:
        run_one_task(installed_app)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
