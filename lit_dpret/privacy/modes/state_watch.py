"""What a forward pass of private rows must leave as it was: every parameter and every buffer.

Whatever is written there during the pass is published with the model, and no noise covers it: a moving
average, a codebook, an embedding that renormalises the rows that occurred. Most writes show at
once, because PyTorch counts them; one through ``.data`` is not counted, so values are compared too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.xla import cut, fetch, is_lazy

#: Buffers up to this many bytes are compared by value in every batch.
SMALL = 1 << 16
#: Elements of a larger tensor that are summed at a time.
_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


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
    """Compares the parameters and buffers of a module before and after a forward pass.

    Guarantees:
        - A parameter or buffer that was replaced, added, removed or written in place is refused, frozen
          or trainable, also where it holds the same values again.
        - A write through ``.data`` to a buffer of up to ``SMALL`` bytes is refused in every batch.
        - A write through ``.data`` to any other buffer or to a parameter is refused in batches 1, 2, 4, 8
          and so on; in between it is not looked for. On XLA, where values are read at a cost, that holds for
          small buffers too.

    Args:
        module: What is trained, with everything frozen in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._batches = 0
        self._seen: dict[str, _Seen] = {}
        self._read: dict[str, int] = {}

    def before(self) -> None:
        """Note how everything is."""
        self._batches += 1
        now = dict(self._tensors())
        self._seen, self._read = {name: self._look(tensor) for name, tensor in now.items()}, self._read_values(now)

    def after(self) -> None:
        """Compare with what was noted, and forget it.

        Raises:
            UnsupportedModelError: The pass wrote a parameter or a buffer; the message names it.
        """
        seen, self._seen = self._seen, {}
        now = dict(self._tensors())
        values = self._read_values(now)
        for name in sorted(seen.keys() | now.keys()):
            old, tensor = seen.get(name), now.get(name)
            same_value = values.get(name) == self._read.get(name)
            if old is not None and tensor is old.tensor and same_value and not self._differs(old):
                continue
            how = "added" if old is None else "removed" if tensor is None else "replaced"
            how = how if old is None or tensor is not old.tensor else "written"
            parameter = isinstance(tensor if old is None else old.tensor, nn.Parameter)
            raise UnsupportedModelError(
                f"{'Parameter' if parameter else 'Buffer'} {name} was {how} during the forward pass of private rows of "
                f"{type(self._module).__name__}, and no noise covers it. Remove it, or compute it from public data "
                "before training.",
                trap="T14" if parameter and how == "replaced" else "T11",
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, part in self._module.named_modules(remove_duplicate=False):
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor

    def _read_values(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """A checksum of every XLA tensor, by name, in batches 1, 2, 4, 8 and so on; all of them are fetched at once."""
        if self._batches & (self._batches - 1):
            return {}
        promised = {name: tensor for name, tensor in tensors.items() if is_lazy(tensor.device)}
        return dict(zip(promised, checksums(promised.values()), strict=True))

    def _look(self, tensor: Tensor) -> _Seen:
        value = self._value(tensor)
        kept = value.clone() if value is not None and self._is_small_buffer(tensor) else value
        return _Seen(tensor, tensor.detach() if _has_memory(tensor) else None, _version(tensor), kept)

    def _differs(self, old: _Seen) -> bool:
        tensor = old.tensor
        if _version(tensor) != old.version or (old.alias is not None and not tensor.is_set_to(old.alias)):
            return True
        value = None if old.value is None else self._value(tensor)
        return value is not None and old.value is not None and not torch.equal(value, old.value)

    def _is_small_buffer(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, nn.Parameter) and tensor.numel() * tensor.element_size() <= SMALL

    def _value(self, tensor: Tensor) -> Tensor | None:
        """What stands for the values of ``tensor`` in this batch; None where they are not compared."""
        if not _has_memory(tensor):
            return None
        if self._is_small_buffer(tensor):
            return _bits(tensor)
        return _checksum(tensor) if self._batches & (self._batches - 1) == 0 else None


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Of each tensor a number that changes with any single value and with the order of the values.

    A tensor without memory of its own counts as 0.
    """
    found = list(tensors)
    if lazy := [tensor for tensor in found if is_lazy(tensor.device)]:
        cut(lazy[0].device)
        fetched = iter(fetch(lazy))
        found = [next(fetched) if is_lazy(tensor.device) else tensor for tensor in found]
    sums = [_checksum(tensor).cpu() if _has_memory(tensor) else torch.tensor(0) for tensor in found]
    return torch.stack(sums).tolist() if sums else []


def _has_memory(tensor: Tensor) -> bool:
    """Whether the values lie in one piece of memory of their own."""
    return tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor.device)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _bits(tensor: Tensor) -> Tensor:
    """The values as integers, flat, so that a NaN equals itself."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def _checksum(tensor: Tensor) -> Tensor:
    """A number, modulo 2^64, that changes with any single value and with the order of the values."""
    bits = _bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(bits, _CHUNK):
        total = total * 31 + (part * _weights(tensor.device)[: len(part)]).sum()
    return total


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Fixed odd numbers, from a generator of their own: the model's random streams stay as they are."""
    drawn = torch.randint(-(1 << 62), 1 << 62, (_CHUNK,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)
