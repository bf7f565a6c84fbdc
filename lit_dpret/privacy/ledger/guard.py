"""The contract between whoever takes a step and whoever counts it.

A training loop asks the guard for a permit before noise is drawn and reports what it did after.
The loop does not know how epsilon is computed, and the guard does not know what a model is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.modes import Update
from lit_dpret.privacy.noise import KeyedStream


@dataclass(frozen=True)
class Permit:
    """Leave to draw the noise of one step under one attempt.

    ``salt`` keys the noise beyond attempt and step: a tag of the sum, or a nonce of the process.
    ``replay`` is None for a step that is paid for now, and the earlier release record for a step
    that is repeated bit by bit and was paid for before.
    """

    attempt: int
    step: int
    salt: str = ""
    replay: dict[str, Any] | None = field(default=None)


class Guard(Protocol):
    """Who grants releases and writes them down; the ``ReleaseGate`` is one."""

    @property
    def stream(self) -> KeyedStream: ...
    @property
    def attempt(self) -> int: ...
    def authorise(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> Permit: ...
    def record(self, permit: Permit, update: Update) -> None: ...


def uncounted(module: str) -> ConfigurationError:
    """The refusal of a training without an accountant."""
    return ConfigurationError(
        f"{module} has no privacy accountant: nothing would be counted. "
        "Add lit_dpret.callbacks.PrivacyAccountant to the Trainer's callbacks.",
        trap="T7",
    )
