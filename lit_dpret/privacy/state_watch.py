"""Check that a forward pass on private rows writes no parameter and no buffer: no noise would cover it.

Most writes show at once, because PyTorch counts them; one through ``.data`` is not counted, so values are compared too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lit_dpret.distributed.shards import is_sharded
from lit_dpret.distributed.xla import fetch, is_lazy, sync_device
from lit_dpret.errors import UnsupportedModelError

#: Buffers up to this many bytes are compared by value in every batch.
SMALL = 1 << 16


class _Seen(NamedTuple):
    """One tensor before the pass.

    ``alias`` shares the memory of ``tensor``; both are held, so that nothing made during the pass can take
    their place in memory and pass for them.
    """

    tensor: Tensor
    alias: Tensor | None
    version: int | None
    value: Tensor | None


class StateWatch:
    """Compare the parameters and buffers of a module before and after a forward pass.

    Guarantees:
        - A parameter or buffer that was replaced, added, removed or written in place is refused, frozen
          or trainable, also where it holds the same values again.
        - A write through ``.data`` to a buffer of up to ``SMALL`` bytes is refused in every batch.
        - A write through ``.data`` to any other buffer or to a parameter is refused in batches 1, 2, 4, 8 and so on; in
          between it is not looked for. On XLA, where values are read at a cost, that holds for small buffers too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._batches = 0
        self._seen: dict[str, _Seen] = {}
        self._read: dict[str, int] = {}

    def before(self) -> None:
        self._batches += 1
        now = self._tensors()
        self._seen, self._read = {name: self._look(tensor) for name, tensor in now.items()}, self._read_values(now)

    def after(self) -> None:
        seen, self._seen = self._seen, {}
        now = self._tensors()
        values = self._read_values(now)
        for name, tensor in now.items():
            old = seen.pop(name, None)
            if old is None:
                self._refuse(name, "added", tensor)
            if tensor is not old.tensor:
                self._refuse(name, "replaced", tensor)
            if self._differs(old) or values.get(name) != self._read.get(name):
                self._refuse(name, "written", tensor)
        for name, old in seen.items():
            self._refuse(name, "removed", old.tensor)

    def _refuse(self, name: str, how: str, tensor: Tensor) -> NoReturn:
        parameter = isinstance(tensor, nn.Parameter)
        raise UnsupportedModelError(
            f"{'Parameter' if parameter else 'Buffer'} {name} was {how} during the forward pass of private "
            f"rows of {type(self._module).__name__}, and no noise covers it. Remove it, or compute it from public data "
            "before training.",
            trap="T14" if parameter and how == "replaced" else "T11",
        )

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        parts = [("", self._module)]
        for prefix, part in parts:  # grows meanwhile; named_modules takes twice as long, twice in every batch
            for name, each in part._modules.items():
                if each is not None:
                    parts.append((f"{prefix}{name}.", each))
            for registry in (part._parameters, part._buffers):
                for name, tensor in registry.items():
                    if tensor is not None:
                        found[prefix + name] = tensor
        return found

    def _read_values(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """A checksum of every XLA tensor in batches 1, 2, 4, 8 and so on; all of them are fetched at once."""
        # A power of two has one bit: later looks get rarer, and each costs a transfer.
        if self._batches & (self._batches - 1):
            return {}
        promised = {name: tensor for name, tensor in tensors.items() if is_lazy(tensor.device)}
        return dict(zip(promised, checksums(promised.values()), strict=True))

    def _look(self, tensor: Tensor) -> _Seen:
        if not has_memory(tensor):
            return _Seen(tensor, None, _version(tensor), None)
        value = self._value(tensor)
        # `bits_of` is a view, which a write would change along; a checksum is a number of its own.
        kept = value.clone() if value is not None and self._is_small_buffer(tensor) else value
        return _Seen(tensor, tensor.detach(), _version(tensor), kept)

    def _differs(self, old: _Seen) -> bool:
        tensor = old.tensor
        if _version(tensor) != old.version:
            return True
        if old.alias is None or not has_memory(tensor):  # or no more: what is gathered again has its own values
            return False
        value = None if old.value is None else self._value(tensor)
        same = value is None or old.value is None or torch.equal(value, old.value)
        # `.data = other` swaps the memory and counts no version.
        return not (same and tensor.is_set_to(old.alias))

    def _is_small_buffer(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, nn.Parameter) and tensor.numel() * tensor.element_size() <= SMALL

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return the values of ``tensor``, or a checksum of them; None where they are not compared in this batch."""
        if self._is_small_buffer(tensor):
            return bits_of(tensor)
        return checksum(tensor) if self._batches & (self._batches - 1) == 0 else None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


#: Elements of a larger tensor that are summed at a time.
_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return for each tensor a number that changes with any single value and almost any order of the values."""
    found = list(tensors)
    if lazy := [tensor for tensor in found if is_lazy(tensor.device)]:
        sync_device(lazy[0].device)
        fetched = iter(fetch(lazy))
        found = [next(fetched) if is_lazy(tensor.device) else tensor for tensor in found]
    sums = [checksum(tensor).cpu() if has_memory(tensor) else torch.tensor(0) for tensor in found]
    return torch.stack(sums).tolist() if sums else []


def has_memory(tensor: Tensor) -> bool:
    """Return whether the values are in one separate block of memory; a shard's plain parameter may have none."""
    if tensor.layout != torch.strided or tensor.is_meta or is_lazy(tensor.device):
        return False
    return is_sharded(tensor) or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def state_of_part(part: nn.Module) -> OrderedDict[str, Any]:
    """Return what a module adds to the state dict of the module that it is a part of."""
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    part.state_dict(destination=state)
    return state  # type: ignore[no-any-return]


def copy_parts(state: dict[str, Any]) -> None:
    """Copy the tensors of a state dict that are parts of a longer memory: a file would hold all of that memory."""
    for name, value in state.items():
        plain = type(value) in (Tensor, nn.Parameter) and has_memory(value)
        if plain and value.untyped_storage().nbytes() > value.nbytes:
            state[name] = value.detach().clone()


def bits_of(tensor: Tensor) -> Tensor:
    """Return the values as flat integers, so that a NaN equals itself."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same values, where NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())


def checksum(tensor: Tensor) -> Tensor:
    """Return a number, modulo 2^64, that changes with any single value and almost any order of the values."""
    bits = bits_of(tensor)
    if len(bits) * bits.element_size() % 8 == 0 and bits.storage_offset() * bits.element_size() % 8 == 0:
        bits = bits.view(torch.int64)  # fewer to multiply
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(bits, _CHUNK):
        weights = _weights(tensor.device)[: len(part)]
        # On a CPU in one pass; elsewhere there is none for integers.
        product = torch.dot(part.long(), weights) if part.device.type == "cpu" else (part * weights).sum()
        # Horner over the pieces, so that swapped pieces change the sum; int64 wraps around, which is meant.
        total = total * 31 + product
    return total


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Fixed odd numbers, from a generator of their own: the model's random streams stay as they are."""
    drawn = torch.randint(-(1 << 62), 1 << 62, (_CHUNK,), generator=torch.Generator().manual_seed(0))
    # Odd numbers are invertible modulo 2^64, so any single change shows.
    return (drawn * 2 + 1).to(device)
