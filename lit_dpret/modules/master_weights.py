"""Float32 copies of weights that are trained in half precision.

A bfloat16 weight has eight bits: an update of less than about 0.4 percent of it is rounded away, and a noised update
is mostly such. So the optimizer works on float32 copies (*masters*), fed with the noised gradient in float32, and the
weights are the masters, rounded, after each step (Micikevicius et al. 2018, 1710.03740, section 3.1). Rounding is
post-processing of the noised update: no claim depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
_MASTER = "master"


def needs_masters(parameters: Iterable[Tensor]) -> bool:
    """Whether one of them is kept in half precision."""
    return any(parameter.dtype in HALF for parameter in parameters)


class MasterWeights(torch.optim.Optimizer):
    """An optimizer of the float32 copies of some parameters.

    Guarantees:
        - The update is made in float32 from the gradient that `gradient_slot` was given, never from a rounded one.
        - After a step every parameter in half precision is its master, rounded to the nearest.
        - ``state_dict`` holds the masters, in float32, and ``load_state_dict`` brings them back bit for bit: a run
          that is resumed goes on from what its weights were before they were rounded.

    Args:
        parameters: Trained; those in float32 or wider are their own masters.
        make: Builds the optimizer of the masters from their list.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._trained = list(parameters)
        self._masters = [
            nn.Parameter(p.detach().float(), requires_grad=True) if p.dtype in HALF else p for p in self._trained
        ]
        self._of = {id(p): master for p, master in zip(self._trained, self._masters, strict=True)}
        self.inner = make(self._masters)
        super().__init__(self._trained, dict(self.inner.defaults))
        # One set of settings and one state, whoever reads or writes them: a schedule, Lightning, a checkpoint.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def gradient_slot(self, parameter: nn.Parameter) -> nn.Parameter:
        """Whose ``grad`` the noised gradient of ``parameter`` belongs into."""
        return self._of.get(id(parameter), parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters and round them into the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.inner.step()
        self._round()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (*self._masters, *self._trained):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """That of the inner optimizer, with the master of each parameter in its state."""
        found = self.inner.state_dict()
        found["state"] = {index: dict(state) for index, state in found["state"].items()}
        for index, (own, master) in enumerate(zip(self._trained, self._masters, strict=True)):
            if own is not master:
                found["state"].setdefault(index, {})[_MASTER] = master.detach()
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring back masters and state; the parameters become the masters, rounded."""
        state = {index: dict(each) for index, each in state_dict["state"].items()}
        for index, each in state.items():
            kept = each.pop(_MASTER, None)
            if kept is not None:
                self._masters[int(index)].copy_(kept)
        self.inner.load_state_dict({**state_dict, "state": {index: each for index, each in state.items() if each}})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._round()

    def _round(self) -> None:
        for own, master in zip(self._trained, self._masters, strict=True):
            if own is not master:
                own.copy_(master)


def gradient_slot(optimizer: Any, parameter: nn.Parameter) -> nn.Parameter:
    """The tensor whose ``grad`` takes the noised gradient of ``parameter``: itself, or its float32 copy."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps optimizers
    found: nn.Parameter = inner.gradient_slot(parameter) if isinstance(inner, MasterWeights) else parameter
    return found
