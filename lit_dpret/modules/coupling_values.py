"""Compare losses and gradients of passes up to rounding, and fix their random numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: The allowed difference of two passes, relative to the largest value: kernels may add in another order. Passes run
#: without autocast, whose rounding would hide more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
LOW_PRECISION = 3e-2


class FixedCoins(TorchDispatchMode):
    """Make all secret random numbers equal, so that a row gets the same in a batch of any size; dropout drops nothing.

    The secret numbers are those of the global generators with the seeds at construction. Numbers of other generators,
    or after another seed, are left unchanged: anyone can repeat them, and which one a row gets depends on the others.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = self.drew_publicly = False
        self._seeds = _seeds()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a pass (`uncompiled`), and the guard takes longer than the operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if kwargs.get("generator") not in _global_generators() or _seeds() != self._seeds:
            self.drew_publicly = True
            return func(*args, **kwargs)
        self.drew = True
        name = func.overloadpacket.__name__
        if "dropout" in name and "attention" not in name:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if "attention" in name:
            places = [i for i, argument in enumerate(func._schema.arguments) if argument.name == "dropout_p"]
            args = tuple(0.0 if i in places else value for i, value in enumerate(args))
            return func(*args, **(kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})))
        found = func(*args, **kwargs)
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if name.startswith("randperm"):
                tensor.copy_(torch.arange(len(tensor), device=tensor.device).roll(1))
            elif isinstance(tensor, Tensor):
                tensor.fill_(1 if name.startswith("bernoulli") else 0.5 if tensor.is_floating_point() else 0)
        return found


def _global_generators() -> tuple[torch.Generator | None, ...]:
    return None, torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())  # type: ignore[no-untyped-call]


def _seeds() -> list[int]:
    return [each.initial_seed() for each in _global_generators() if each is not None]


def differ(a: Tensor, b: Tensor, floor: float = 0.0) -> bool:
    """Return whether losses differ by more than rounding explains; rows not finite in both are ignored."""
    tolerance = max(TOLERANCE.get(each.dtype, LOW_PRECISION) for each in (a, b))
    a, b = a.detach().double(), b.detach().double()
    finite = a.isfinite() & b.isfinite()
    if not bool((a.isfinite() == b.isfinite()).all()):
        return True
    a, b = a[finite], b[finite]
    if not len(a):
        return False
    return bool(((a - b).abs() > tolerance * a.abs().max() + floor).any())


def far(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> bool:
    """Return whether two gradients of all parameters differ by more than rounding explains."""
    whole, gap = norm(list(a.values())), norm(gaps(a, b))
    return math.isfinite(whole) and not gap <= tolerance * whole


def gaps(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[Tensor]:
    """Return the differences of two gradients; a parameter that one loss does not use has gradient zero there."""
    return [a[name] - b[name] if name in a and name in b else one for name, one in (a | b).items()]


def shortened(gradient: Tensor, length: int = 4096) -> Tensor:
    """Return a random projection of a gradient to at most ``length`` numbers, with fixed signs.

    It is linear, and preserves norms to about 2 percent (one standard deviation, sqrt(2 / 4096)): each number gets a
    random sign, and every ``length``-th of them are summed (Charikar et al. 2002, *Finding frequent items*).
    """
    flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
    if len(flat) <= length:
        return flat.clone()
    coins = torch.Generator(flat.device).manual_seed(0)
    total = torch.zeros(length, dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
    for part in torch.split(flat, 256 * length):
        signs = torch.randint(0, 2, part.shape, generator=coins, device=flat.device, dtype=torch.int8).mul_(2).sub_(1)
        signed = torch.nn.functional.pad(part * signs, (0, -len(part) % length))
        total += signed.view(-1, length).sum(0, dtype=total.dtype)
    return total


def norm(tensors: list[Tensor]) -> float:
    """Return the norm of all tensors together."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return float(torch.stack(norms).norm()) if norms else 0.0
