"""Count the weight updates of an optimizer, by Lightning's count and its own.

A ``training_step`` of one's own may step an optimizer as often as it likes. The accountant compares each count with
the steps that were granted: an update more carries no noise and stands in no ledger.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable

import torch

#: The code that torch puts around the ``step`` of every class of optimizers that was made, and that runs the hooks.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def _is_step_of_a_base(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the hook that asks runs in a base class's ``step``, which the optimizer's own ``step`` called.

    That is a part of an update that was counted. Read off the stack, since a count of steps that are under way would
    stay wrong after one that raised. The same ``step`` within itself, as a closure may call it, is an update more.
    """
    running: list[object] = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer:
            running.append(frame.f_locals["func"])
        frame = frame.f_back
    return len(running) > 1 and running[0] not in running[1:]


class UpdateCounter:
    """Count updates, and pass each count to the check against granted steps."""

    def __init__(self, check: Callable[[int], None]) -> None:
        self._check = check
        self._counts: Counter[str] = Counter()
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def watch(self, optimizer: object, is_training: Callable[[], bool]) -> None:
        """Count the steps of the optimizer itself, including those unknown to Lightning."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            return

        def count(*_: object) -> None:
            if is_training() and not _is_step_of_a_base(optimizer):
                self.count("itself")

        self._hook = optimizer.register_step_pre_hook(count)

    def reset(self) -> None:
        self._counts.clear()

    def count(self, by: str) -> None:
        self._counts[by] += 1
        self._check(self._counts[by])

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
