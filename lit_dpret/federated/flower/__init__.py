"""PDD-AS2 as a pair of Flower apps. The apps transfer weights and embeddings; `SiloClient` trains.

Flower and Ray report usage to their makers unless environment variables say otherwise. Flower reads these while it is
imported, and this package sets them: import it before ``flwr``.
"""

from __future__ import annotations

import os
import sys
import warnings

_REPORTS = {"FLWR_TELEMETRY_ENABLED": "Flower", "RAY_USAGE_STATS_ENABLED": "Ray"}
_UPDATE_CHECK = "FLWR_DISABLE_UPDATE_CHECK"


def silent_environment() -> dict[str, str]:
    """Return this process's environment with Flower's telemetry and update checks switched off."""
    return {**os.environ, **dict.fromkeys(_REPORTS, "0"), _UPDATE_CHECK: "1"}


def _be_silent() -> None:
    """Switch off usage reports; warn if the user switched them on."""
    os.environ.setdefault(_UPDATE_CHECK, "1")
    for variable, who in _REPORTS.items():
        if os.environ.setdefault(variable, "0") != "0":
            warnings.warn(
                f"{variable}={os.environ[variable]}: {who} reports the use of this federation to its makers. Set it to "
                "0, or leave it unset, unless you want that.",
                stacklevel=3,
            )
    read = getattr(sys.modules.get("flwr.supercore.telemetry"), "FLWR_TELEMETRY_ENABLED", "0")
    if read != "0" and os.environ["FLWR_TELEMETRY_ENABLED"] == "0":
        warnings.warn(
            "flwr was imported before lit_dpret.federated.flower, with its telemetry on, and does not check again. "
            "Import lit_dpret.federated.flower first, or set FLWR_TELEMETRY_ENABLED=0.",
            stacklevel=3,
        )


_be_silent()
