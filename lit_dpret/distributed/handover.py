"""How finished gradients reach the optimizer, and which part of the sums each rank completes.

One device and DDP take them in ``.grad``. A strategy with its own engine defines here how a clipping pass sees whole
parameters, how sums are reduced, and where a noised gradient goes. Gradients are clipped and noised before they are
handed over, so nothing that the strategy does with them costs privacy (post-processing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lit_dpret.distributed.ranks import Ranks
from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import ResumeError


class Handover:
    """Put gradients into ``.grad``, whole on every rank; strategies with their own engine override it.

    Calls are collective, in the same order on all ranks.
    """

    #: Whether ``add_up`` leaves each rank only its shards of the sums.
    in_shards: bool = False
    #: The flat index in its parameter at which each flat tensor of ``add_up`` begins; None for shaped ones.
    starts: Mapping[str, int] | None = None

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._module, self._ranks = module, ranks

    def whole(self) -> AbstractContextManager[object]:
        """Gather every parameter on every rank, as the same object, within the block; then restore the state."""
        return nullcontext()

    def clipping(self) -> AbstractContextManager[object]:
        """Like ``whole``, around each physical batch; parameters may stay gathered until ``add_up``."""
        return self.whole()

    def by_block(self) -> Any:
        """From now on clip block by block; return the object that keeps the sums, or None if parameters are whole."""
        return None

    def settle(self) -> bool:
        """Wait until no rank clips any more; return whether another rank restarted the step, as this one must."""
        return False

    def assembled(self, *, here: bool) -> AbstractContextManager[object]:
        """Give the module of a rank with ``here`` its whole master weights within the block, for writing."""
        return nullcontext()

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over all ranks, in float32 or wider: the part to which this rank must add noise."""
        self._ranks.sum_(sums)
        return sums

    def give(self, gradients: Mapping[str, Tensor], optimizer: object) -> None:
        """Pass noised gradients, whole or in the shards of ``add_up``, to the optimizer's next step."""
        for name, parameter in self._module.named_parameters():
            if name in gradients:
                slot = gradient_slot(optimizer, parameter)
                slot.grad = gradients[name].to(slot.dtype)


def is_zero_state(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer state in a checkpoint is ZeRO's (`lit_dpret.distributed.zero`)."""
    return set(state) == {"groups", "states", "numbers"}


def refuse_zero_state(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a ZeRO checkpoint if another strategy would continue from it."""
    if any(map(is_zero_state, checkpoint.get("optimizer_states", ()))):
        raise ResumeError(
            "The checkpoint was written under trainer=deepspeed, whose optimizer state no other trainer reads. "
            "Continue with trainer=deepspeed, under any stage and on any number of ranks."
        )


HALF = (torch.bfloat16, torch.float16)
_MASTER = "master"


def needs_masters(parameters: Iterable[Tensor]) -> bool:
    """Return whether one of the parameters has half precision."""
    return any(parameter.dtype in HALF for parameter in parameters)


class MasterWeights(torch.optim.Optimizer):
    """An optimizer of float32 copies (*masters*) of parameters in half precision.

    A bfloat16 weight has eight bits: an update of less than about 0.4 percent of it is rounded away, and most noised
    updates are that small. So masters are updated, and after each step the weights are set to the rounded masters
    (Micikevicius et al. 2018, 1710.03740, section 3.1). Rounding is post-processing: no claim depends on it.

    Guarantees:
        - The update is made in float32 from the gradient in `gradient_slot`, never from a rounded one.
        - After a step every parameter in half precision is its master, rounded to nearest.
        - ``state_dict`` holds the masters, in float32, and ``load_state_dict`` restores them bit for bit: a
          resumed run continues from its weights before they were rounded.

    Args:
        parameters: The trained parameters; those in float32 or wider are their own masters.
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
        # One set of settings and one state for all readers and writers: a schedule, Lightning, a checkpoint.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def gradient_slot(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._of.get(id(parameter), parameter)

    def masters(self) -> dict[int, nn.Parameter]:
        """Return the float32 copies, by the identity of their half-precision parameters."""
        both = zip(self._trained, self._masters, strict=True)
        return {id(own): master for own, master in both if own is not master}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
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
        """Return the inner optimizer's state, with each parameter's master weights."""
        found = self.inner.state_dict()
        found["state"] = {index: dict(state) for index, state in found["state"].items()}
        for index, (own, master) in enumerate(zip(self._trained, self._masters, strict=True)):
            if own is not master:
                found["state"].setdefault(index, {})[_MASTER] = master.detach()
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore masters and state; the parameters become the rounded masters."""
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
    """Return the tensor whose ``grad`` takes the noised gradient of ``parameter``: itself, or its float32 copy."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps optimizers
    found: nn.Parameter = inner.gradient_slot(parameter) if isinstance(inner, MasterWeights) else parameter
    return found


def keep_masters(state: dict[str, Any], module: nn.Module, optimizers: Iterable[Any]) -> None:
    """Replace rounded weights in a state dict of ``module`` by their masters."""
    masters = _masters(optimizers)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state and id(parameter) in masters:
            state[name] = masters[id(parameter)].detach()


@contextmanager
def in_float32(module: nn.Module, optimizers: Iterable[Any]) -> Iterator[None]:
    """Put the masters into the module, on the CPU, within the block, so that it can be written.

    Frozen weights in half precision are also float32 within the block, since adapters are merged into them.
    """
    masters = _masters(optimizers)
    halves = [p for p in module.parameters() if p.dtype in HALF] if masters else []
    wide = {
        id(p): nn.Parameter(masters.get(id(p), p).detach().to("cpu", torch.float32), requires_grad=p.requires_grad)
        for p in halves
    }
    with replaced(module, wide):
        yield


@contextmanager
def replaced(module: nn.Module, tensors: Mapping[int, Any]) -> Iterator[None]:
    """Replace the parameters and buffers with these ids within the block; tied ones stay tied."""
    places = [
        (store, name, tensor)
        for part in module.modules()
        for store in (part._parameters, part._buffers)
        for name, tensor in store.items()
        if id(tensor) in tensors
    ]
    try:
        for store, name, tensor in places:
            store[name] = tensors[id(tensor)]
        yield
    finally:
        for store, name, tensor in places:
            store[name] = tensor  # type: ignore[assignment]


def on_host(module: nn.Module) -> AbstractContextManager[None]:
    """Replace XLA tensors of a module by CPU copies within the block, for writing to a file."""
    copies: dict[int, Any] = {id(b): b.detach().cpu() for b in module.buffers() if is_lazy(b.device)}
    for p in module.parameters():
        if is_lazy(p.device):
            copies[id(p)] = nn.Parameter(p.detach().cpu(), p.requires_grad)
    return replaced(module, copies)


def _masters(optimizers: Iterable[Any]) -> dict[int, nn.Parameter]:
    inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    return {key: master for each in inner if isinstance(each, MasterWeights) for key, master in each.masters().items()}
