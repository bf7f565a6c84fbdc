"""The seam between a federation and what carries its messages: one function, and a table of transports by name.

A transport takes the settings of a run (`PddAs2`), each silo's data folder, a maker of the model and a folder for its
state, and returns a `FedResult`. ``inprocess`` is the default and needs no server. Others are registered by name, as a
function or as ``package.module:function``, which is imported at its first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.inprocess import FedResult, InProcessFederation
from lit_dpret.federated.model import start_of
from lit_dpret.federated.settings import PHASES, PddAs2, Phase
from lit_dpret.federated.silo import MakeModule, SiloClient


class Transport(Protocol):
    """Carries one run between a server and its silos.

    Guarantees that callers rely on:
        - Called again with the same arguments, it continues where it stopped and repeats nothing that is finished.
        - Stage 1 in ``folder`` is shared by runs whose ``settings.stage2`` differ in ``negatives``.
        - Only the phases in ``measure`` are measured. Without ``stage2`` among them, stage 2 is not run.
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
    """Return where a silo keeps its state in the folder of a run on this machine."""
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
    """Run all silos in this process, one after another; each has its state under ``folder``."""
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
    """Register a transport, or ``package.module:function`` of one, under the name of ``federated.transport``."""
    _TRANSPORTS[name] = transport


def check_transport(name: str) -> Callable[..., FedResult]:
    """Return the transport that is registered under a name; refuse an unknown name."""
    found = _TRANSPORTS.get(name)
    if found is None:
        raise ConfigurationError(f"federated.transport={name!r} is not one of {', '.join(sorted(_TRANSPORTS))}.")
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
        make_module: Builds the model of a round, the same one every time; can be pickled.
        folder: Of the state of the run; as private as the silos.
        transport: Its registered name.
        measure: ``bm25``, ``stage1`` (the shared model) and ``stage2`` (the personal ones); without ``stage2`` stage 2
            is not run, with ``bm25`` alone nothing is trained.
        split: On which questions.
        secret_file: Keys the noise; null for the user's state folder.
        more: Further arguments of this transport.

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
