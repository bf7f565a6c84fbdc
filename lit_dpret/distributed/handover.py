"""Who takes the finished gradients of a step, and what part of the sums each rank finishes.

A strategy that leaves parameters, gradients and optimizer to PyTorch (one device, DDP) takes them in ``.grad``. One
that has an engine of its own says here how a clipping pass sees whole parameters, how sums come together, and where
a noised gradient goes. Everything that the claim rests on stays outside: clipping comes before, and what is handed
over is noised already, so nothing that the other side does with it costs privacy (post-processing).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from lit_dpret.distributed.master_weights import gradient_slot
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ResumeError


class Handover(Protocol):
    """What a training loop asks of whoever owns parameters, gradients and optimizer. All ranks call it in turn."""

    @property
    def in_parts(self) -> bool:
        """Whether ``add_up`` leaves each rank a part of the sums."""

    @property
    def starts(self) -> Mapping[str, int] | None:
        """At which flat index of its parameter each flat tensor of ``add_up`` begins; None for shaped ones."""

    def whole(self) -> AbstractContextManager[object]:
        """Inside, every parameter is whole on every rank, and stays the same object; afterwards it is as before."""

    def clipping(self) -> AbstractContextManager[object]:
        """As ``whole``, around each physical batch; parameters may stay whole until ``add_up``."""

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all ranks, in float32 or wider: what this rank has to noise of them."""

    def give(self, gradients: Mapping[str, Tensor], optimizer: object) -> None:
        """Put noised gradients, whole or in the pieces of ``add_up``, where the optimizer's next step takes them."""

    def assembled(self, *, here: bool) -> AbstractContextManager[object]:
        """Inside, the module of a rank that says ``here`` has its master weights, whole, for writing it."""


class GradHandover:
    """Gradients go into ``.grad``, whole on every rank.

    Args:
        module: What is trained.
        ranks: Who takes part.
    """

    in_parts: bool = False
    starts: Mapping[str, int] | None = None

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._module, self._ranks = module, ranks

    def whole(self) -> AbstractContextManager[object]:
        return nullcontext()

    def clipping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def assembled(self, *, here: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        self._ranks.sum_(sums)
        return sums

    def give(self, gradients: Mapping[str, Tensor], optimizer: object) -> None:
        for name, parameter in self._module.named_parameters():
            if name in gradients:
                slot = gradient_slot(optimizer, parameter)
                slot.grad = gradients[name].to(slot.dtype)


def is_zero_state(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state in a checkpoint is one of ZeRO's (`lit_dpret.distributed.zero`)."""
    return set(state) == {"groups", "states", "numbers"}


def refuse_zero_state(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of ZeRO where another strategy is to go on from it.

    Raises:
        ResumeError: It is one.
    """
    if any(map(is_zero_state, checkpoint.get("optimizer_states", ()))):
        raise ResumeError(
            "The checkpoint was written under trainer=deepspeed: its optimizer state lies as ZeRO keeps it, and no "
            "other trainer reads it. Go on with trainer=deepspeed, under any stage and on any number of ranks (on CPUs "
            "with trainer.accelerator=cpu)."
        )
