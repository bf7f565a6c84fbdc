"""The seam between a federation and what carries its messages: one function of a `FederationRun`, found by its name.

``inprocess`` is the default and needs no server. A transport of your own is registered as a function, or as
``package.module:function``, which is imported at its first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.documents import SuperLinkTarget
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.settings import PHASES, PddAs2, Phase
from lit_dpret.federated.silo import MakeModule, SiloClient


@dataclass(frozen=True, kw_only=True)
class FederationRun:
    """One run of a federation, and everything that a transport has to know of it."""

    settings: PddAs2  # of PDD-AS2
    silos: Mapping[str, Path]  # the data folder of each client by name; none where they are on other machines
    make_module: MakeModule  # builds the model of a round, the same one every time; can be pickled
    folder: Path  # of the state of the run; as private as the silos
    transport: str = "inprocess"  # its registered name
    # ``bm25``, ``stage1`` (the shared model) and ``stage2`` (the personal ones); without ``stage2`` stage 2 is not run,
    # with ``bm25`` alone nothing is trained.
    measure: Sequence[Phase] = PHASES
    split: str = "test"  # on which questions
    secret_file: str | Path | None = None  # keys the noise; null for the user's state folder
    link: SuperLinkTarget = field(default_factory=SuperLinkTarget)  # the SuperLink, for ``transport=flower``

    def state(self, name: str) -> Path:
        """Return where a silo on this machine keeps its state."""
        return silo_state(self.folder, name)

    def client(self, name: str) -> SiloClient:
        """Build a silo on this machine; refuses what its rounds would refuse."""
        return SiloClient(
            self.silos[name], self.state(name), self.settings, self.make_module, secret_file=self.secret_file
        )


Transport = Callable[[FederationRun], FedResult]
"""Carries one run between a server and its silos.

Guarantees that callers rely on:
    - Called again with the same run, it continues where it stopped and repeats nothing that is finished.
    - Stage 1 in ``folder`` is shared by runs whose ``settings.stage2`` differ in ``negatives``.
    - Only the phases in ``measure`` are measured. Without ``stage2`` among them, stage 2 is not run.
"""

_TRANSPORTS: dict[str, Transport | str] = {
    "inprocess": "lit_dpret.federated.inprocess:in_process",
    "simulation": "lit_dpret.federated.flower.simulation:simulation",
    "flower": "lit_dpret.federated.flower.submit:flower",
}
ELSEWHERE = ("flower",)  # the silos are other people's: no data folder is known here


def silo_state(folder: Path, name: str) -> Path:
    """Return where a silo keeps its state in the folder of a run on this machine."""
    return folder / "silos" / name


def register(name: str, transport: Transport | str) -> None:
    """Register a transport, or ``package.module:function`` of one, under the name of ``federated.transport``."""
    _TRANSPORTS[name] = transport


def check_transport(name: str) -> Transport:
    """Return the transport that is registered under a name; refuse an unknown name."""
    found = _TRANSPORTS.get(name)
    if found is None:
        raise ConfigurationError(f"federated.transport={name!r} is not one of {', '.join(sorted(_TRANSPORTS))}.")
    if isinstance(found, str):
        module, _, function = found.partition(":")
        carry: Transport = getattr(importlib.import_module(module), function)
        return carry
    return found


def run_federation(run: FederationRun) -> FedResult:
    """Run PDD-AS2 over silos and measure it on each one's own collection."""
    carry = check_transport(run.transport)
    if not run.silos and run.transport not in ELSEWHERE:
        raise ConfigurationError("A federation needs at least one silo.")
    run.settings.check()
    return carry(run)
