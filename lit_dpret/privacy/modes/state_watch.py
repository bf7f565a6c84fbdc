"""What a forward pass of private rows must leave as it was: every parameter and every buffer.

Whatever is written there during the pass is published with the model, and no noise covers it: a moving
average, a codebook, an embedding that renormalises the rows that occurred. Most writes show at
once, because PyTorch counts them; one through ``.data`` is not counted, so values are compared too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.checksums import bits_of, checksum, checksums, has_memory
from lit_dpret.privacy.xla import is_lazy

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
        return _Seen(tensor, tensor.detach() if has_memory(tensor) else None, _version(tensor), kept)

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
        if not has_memory(tensor):
            return None
        if self._is_small_buffer(tensor):
            return bits_of(tensor)
        return checksum(tensor) if self._batches & (self._batches - 1) == 0 else None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
