"""The check that a forward pass of private rows writes no parameter and no buffer.

Whatever is written there during the pass is published with the model, and no noise covers it: a moving
average, a codebook, an embedding that renormalises the rows that occurred. Most writes show at
once, because PyTorch counts them; one through ``.data`` is not counted, so values are compared too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.checksums import bits_of, checksum, checksums, has_memory

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
        now = self._tensors()
        self._seen, self._read = {name: self._look(tensor) for name, tensor in now.items()}, self._read_values(now)

    def after(self) -> None:
        """Compare with what was noted, and forget it.

        Raises:
            UnsupportedModelError: The pass wrote a parameter or a buffer; the message names it.
        """
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
        if self._batches & (self._batches - 1):
            return {}
        promised = {name: tensor for name, tensor in tensors.items() if is_lazy(tensor.device)}
        return dict(zip(promised, checksums(promised.values()), strict=True))

    def _look(self, tensor: Tensor) -> _Seen:
        if not has_memory(tensor):
            return _Seen(tensor, None, _version(tensor), None)
        value = self._value(tensor)
        kept = value.clone() if value is not None and self._is_small_buffer(tensor) else value
        return _Seen(tensor, tensor.detach(), _version(tensor), kept)

    def _differs(self, old: _Seen) -> bool:
        tensor = old.tensor
        if _version(tensor) != old.version:
            return True
        if old.alias is None:
            return False
        value = None if old.value is None else self._value(tensor)
        same = value is None or old.value is None or torch.equal(value, old.value)
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
