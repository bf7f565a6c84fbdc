"""The seam between a federation and what carries its messages: one function, and a table of transports by name.

A transport takes what a run is (`PddAs2`), where each silo's data lie, how the model of a round is built, and a
folder for its state; it gives back a `FedResult`. ``inprocess`` is the default and needs no server. Others register
themselves by name, as a function or as the place of one that is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.inprocess import FedResult, InProcessFederation, Phase
from lit_dpret.federated.model import start_of
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo import MakeModule, SiloClient

PHASES: tuple[Phase, ...] = ("bm25", "stage1", "stage2")


class Transport(Protocol):
    """Carries one run between a server and its silos.

    Guarantees that callers rely on:
        - Called once more with the same arguments it goes on where it was and makes nothing again that is finished.
        - Stage 1 in ``folder`` is shared by runs whose ``settings.stage2`` differ in ``negatives``.
        - Only what is in ``measure`` is measured. Without ``stage2`` in it no stage 2 is run.
    """

    def __call__(
        self,
        settings: PddAs2,
        silos: Mapping[str, Path],
        make_module: MakeModule,
        folder: Path,
        *,
        measure: Sequence[Phase],
        split: str,
        secret_file: Path | None,
    ) -> FedResult: ...


def silo_state(folder: Path, name: str) -> Path:
    """Where a silo keeps its state in the folder of a run on this machine."""
    return folder / "silos" / name


def in_process(
    settings: PddAs2,
    silos: Mapping[str, Path],
    make_module: MakeModule,
    folder: Path,
    *,
    measure: Sequence[Phase],
    split: str,
    secret_file: Path | None,
) -> FedResult:
    """All silos in this process, one after another; each has its state under ``folder``."""
    clients = [
        SiloClient(data, silo_state(folder, name), settings, make_module, secret_file=secret_file)
        for name, data in silos.items()
    ]
    federation = InProcessFederation(clients, settings, start_of(make_module), folder / "server")
    return federation.run(measure=measure, split=split)


_TRANSPORTS: dict[str, Transport | str] = {
    "inprocess": in_process,
    "simulation": "lit_dpret.federated.flower.simulation:simulation",
    "flower": "lit_dpret.federated.flower.submit:flower",
}
ELSEWHERE = ("flower",)  # the silos are other people's: no data folder is known here


def register(name: str, transport: Transport | str) -> None:
    """Make a transport known by ``name``.

    Args:
        name: As in ``federated.transport=NAME``.
        transport: The function, or ``package.module:function``, imported when it is asked for.
    """
    _TRANSPORTS[name] = transport


def transport_names() -> list[str]:
    """Every name that `run_federation` knows."""
    return sorted(_TRANSPORTS)


def check_transport(name: str) -> Callable[..., FedResult]:
    """The transport of a name.

    Raises:
        ConfigurationError: There is none.
    """
    found = _TRANSPORTS.get(name)
    if found is None:
        raise ConfigurationError(f"federated.transport={name!r} is not one of {', '.join(transport_names())}.")
    if isinstance(found, str):
        module, _, function = found.partition(":")
        found = getattr(importlib.import_module(module), function)
    return found


def run_federation(
    settings: PddAs2,
    silos: Mapping[str, Path],
    make_module: MakeModule,
    folder: str | Path,
    *,
    transport: str = "inprocess",
    measure: Sequence[Phase] = PHASES,
    split: str = "test",
    secret_file: str | Path | None = None,
    **more: Any,
) -> FedResult:
    """Run PDD-AS2 over these silos and measure it on each one's own collection.

    Args:
        settings: Of the run; checked here.
        silos: The data folder of each client by name.
        make_module: Builds the model of a round, always the same one; it can be pickled.
        folder: Of the state of the run, kept: as private as the silos.
        transport: Which one; see `transport_names`.
        measure: ``bm25``, ``stage1`` (the shared model) and ``stage2`` (the personal ones); without ``stage2`` stage 2
            is not run, with ``bm25`` alone nothing is trained.
        split: On which questions.
        secret_file: Keys the noise; null for the user's state folder.
        more: What this transport alone takes.

    Raises:
        ConfigurationError: The settings are refused, the transport is unknown, or there are no silos.
    """
    carry = check_transport(transport)
    if not silos and transport not in ELSEWHERE:
        raise ConfigurationError("A federation needs at least one silo.")
    secret = None if secret_file is None else Path(secret_file)
    return carry(
        settings.check(),
        dict(silos),
        make_module,
        Path(folder),
        measure=tuple(measure),
        split=split,
        secret_file=secret,
        **more,
    )
