"""Refuse writes without noise: by hooks outside the steps, in files saved with the weights, or by additional updates.

A custom ``training_step`` may step an optimizer as often as it likes. The accountant compares each count with the
number of granted steps: an additional update has no noise and is in no ledger.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import lightning as L
import torch

from lit_dpret.callbacks.averages import averaging
from lit_dpret.callbacks.checkpoints import CheckpointGate
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.state_watch import checksums

#: The dtypes to which precision plugins cast all weights and buffers after their values were recorded.
_CASTS = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


class UnseenWrites:
    """Refuse writes by a hook of the module or a callback outside a step, while private rows are accessible.

    Between two steps, the module's `HookWatch` checks. ``whole`` says that this process holds whole weights under a
    guarantee. If ranks hold shards, early writes are not seen, and saved content is compared as rank 0 gathers it.
    """

    def __init__(self, trainer: L.Trainer, module: Any, ranks: Ranks, *, whole: bool) -> None:
        self._trainer, self._module, self._ranks, self._whole = trainer, module, ranks, whole
        self._looked_at_start = False
        # Only on rank 0: the other ranks get its weights before the first batch.
        self._before = self._held() if whole and ranks.is_first else None

    def expect(self, checkpoint: Mapping[str, Any]) -> None:
        """Accept the values that the run's own checkpoint loads into the module."""
        if self._before is not None:
            self._before |= self._held(checkpoint.get("current_model_state", checkpoint.get("state_dict", {})))

    def refuse_before_first_batch(self) -> None:
        """Refuse, once, writes since `setup` or since the run's checkpoint loaded; attributes are compared later."""
        if not self._looked_at_start:
            self._looked_at_start = True
            self._ranks.together(self._refuse_early)

    def refuse_after_last_batch(self) -> None:
        if hasattr(self._module, "look_at_last_hooks"):
            self._module.look_at_last_hooks(trained=averaging(self._trainer) is None)

    def refuse_before_saving(self, gate: CheckpointGate | None) -> None:
        """Refuse, before weights are saved, all such writes and, with ``gate``, other content of a state dict."""
        self.refuse_before_first_batch()  # a run resumed after its last step has no batch
        self._ranks.together(self.refuse_after_last_batch)
        if gate is not None and hasattr(self._module, "save_model"):
            self._show_saved(gate.check)

    def expect_at_saving(self, gate: CheckpointGate) -> None:
        """Record what is saved with the weights now, if a checkpoint does not hold the same; a collective call."""
        if not self._whole and hasattr(self._module, "save_model"):
            self._show_saved(gate.expect)

    def _show_saved(self, look: Callable[[Mapping[str, Any]], None]) -> None:
        """Call ``look`` with the state dict that ``save_model`` writes, on the ranks that hold all of it."""
        if self._whole:
            self._ranks.together(lambda: look({"state_dict": self._module.state_dict()}))
            return
        with self._module.assembled():
            self._ranks.share(lambda: look({"state_dict": self._module.state_dict()}))

    def _refuse_early(self) -> None:
        if self._before is None:
            return
        public = set(getattr(self._module, "public_metrics", ()))
        for name, found in self._held().items():
            if self._before.get(name) != found and public.isdisjoint({name, *name.split(".")}):
                raise UnsupportedModelError(
                    f"{name} of {type(self._module).__name__} was written before the first batch, by a hook such as "
                    "setup, which can read private rows. Set it in the constructor from public data, or list its name "
                    "in public_metrics of the module if it depends on no private row.",
                    trap="T11",
                )

    def _held(self, state: Mapping[str, Any] | None = None) -> dict[str, int]:
        """Checksum the module's tensors, or their values in ``state``, except those derived from public passages."""
        made_later = getattr(self._module, "made_of_public", ())
        tensors = chain(self._module.named_parameters(), self._module.named_buffers())
        held = {name: tensor.detach() for name, tensor in tensors if name not in made_later}
        if state is not None:
            held = {name: state[name].detach().to(tensor.dtype) for name, tensor in held.items() if name in state}
        kind = _CASTS.get(str(self._trainer.precision))
        cast = (tensor.to(kind) if kind and tensor.is_floating_point() else tensor for tensor in held.values())
        return dict(zip(held, checksums(cast), strict=True))


#: The code that torch wraps around the ``step`` of every instantiated optimizer class, and that runs the hooks.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def _is_step_of_a_base(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the hook runs in a base class's ``step``, called by the optimizer's own: one update in all.

    This reads the stack, since a counter would stay wrong after a step that raised. The same ``step`` within itself, as
    when a closure calls it, is an additional update.
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
