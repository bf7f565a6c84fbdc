"""Check that a forward pass on private rows writes no parameter and no buffer: no noise would cover it.

PyTorch counts most writes, so they show at once. It does not count a write through ``.data``, so values are compared
too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lit_dpret.distributed.shards import is_sharded
from lit_dpret.distributed.xla import fetch, is_lazy, sync_device
from lit_dpret.errors import UnsupportedModelError

#: Buffers up to this many bytes are compared by value in every batch.
SMALL = 1 << 16
#: Tensors other than parameters are copied up to this many bytes.
COPIED = 1 << 26
_VERSION, _VALUES = attrgetter("_version"), methodcaller("values")


class _Seen(NamedTuple):
    """One tensor before the pass.

    ``alias`` shares the memory of ``tensor``. Both are kept alive, so that nothing created during the pass can take
    their place in memory and be mistaken for them.
    """

    tensor: Tensor
    alias: Tensor | None
    version: int | None
    value: Tensor | None


class StateWatch:
    """Compare the parameters and buffers of a module before and after a forward pass.

    Guarantees:
        - A parameter or buffer that was replaced, added, removed or written in place is refused, frozen or trainable,
          even if it holds the same values again.
        - A write through ``.data`` to a buffer of up to ``SMALL`` bytes is refused in every batch.
        - A write through ``.data`` to any other buffer or to a parameter is refused in batches 1, 2, 4, 8 and so on; it
          is not looked for in between (`HookWatch` checks trained parameters before every update). On XLA, where
          reading values is expensive, that also applies to small buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._batches = 0
        self._note_places()
        self._seen: dict[str, _Seen] = {}
        self._valued: list[str] = []
        self._tensors: list[Tensor] = []
        self._aliases: list[Tensor] = []
        self._versions: list[int] = []
        self._read: dict[str, int] = {}

    def before(self) -> None:
        self._batches += 1
        same = self._holds_the_same()
        if not same:
            self._note_places()
        if same and self._tensors and self._are_untouched():
            self._seen |= {name: self._look(self._named[name], self._seen[name]) for name in self._valued}
        else:
            self._seen = {name: self._look(tensor, self._seen.get(name)) for name, tensor in self._named.items()}
            self._note_seen()
        self._read = self._read_values(self._named)

    def after(self) -> None:
        same = self._holds_the_same()
        if not same:
            self._refuse_others(_named_in(self._module))
        values = self._read_values(self._named)
        for name in self._valued if same and self._are_untouched() else self._seen:
            old = self._seen[name]
            if self._differs(old) or values.get(name) != self._read.get(name):
                self._refuse(name, "written", old.tensor)
        if getattr(self._module, "in_shards", False):  # weights that were gathered are freed now
            self._seen = {}
            self._note_seen()

    def _note_places(self) -> None:
        module = self._module
        #: The dicts in which all parts store their parts, parameters and buffers, and the contents of the non-empty
        #: ones.
        parts = module.modules()
        self._places: list[Any] = [d for part in parts for d in (part._modules, part._parameters, part._buffers)]
        self._lengths = [*map(len, self._places)]
        self._filled = [place for place in self._places if place]
        self._held = [*chain.from_iterable(map(_VALUES, self._filled))]
        self._named = _named_in(module)

    def _note_seen(self) -> None:
        """Divide ``_seen`` into tensors that are compared at once in most batches, and the names of the others."""
        self._valued, self._tensors, self._aliases, self._versions = [], [], [], []
        for name, seen in self._seen.items():
            if seen.alias is None or seen.version is None or seen.value is not None:
                self._valued.append(name)
                continue
            self._tensors.append(seen.tensor)
            self._aliases.append(seen.alias)
            self._versions.append(seen.version)

    def _are_untouched(self) -> bool:
        """Return whether no tensor outside ``_valued`` was written to; without their names, which take longer."""
        if self._compares_values:
            return False
        same = all(map(Tensor.is_set_to, self._tensors, self._aliases))
        return same and [*map(_VERSION, self._tensors)] == self._versions

    def _holds_the_same(self) -> bool:
        """Return whether the module has the parts and tensors of the last walk; without a walk, which takes longer."""
        if [*map(len, self._places)] != self._lengths:
            return False
        return all(map(is_, chain.from_iterable(map(_VALUES, self._filled)), self._held))

    def _refuse_others(self, now: Mapping[str, Tensor]) -> None:
        for name, tensor in now.items():
            if (old := self._seen.get(name)) is None:
                self._refuse(name, "added", tensor)
            if tensor is not old.tensor:
                self._refuse(name, "replaced", tensor)
        for name in self._seen.keys() - now.keys():
            self._refuse(name, "removed", self._seen[name].tensor)

    def _refuse(self, name: str, how: str, tensor: Tensor) -> NoReturn:
        parameter = isinstance(tensor, nn.Parameter)
        raise UnsupportedModelError(
            f"{'Parameter' if parameter else 'Buffer'} {name} was {how} during the forward pass of private "
            f"rows of {type(self._module).__name__}, and no noise covers that. Leave it unchanged there, or compute it "
            "from public data before training.",
            trap="T14" if parameter and how == "replaced" else "T11",
        )

    def _read_values(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return a checksum of every XLA tensor in batches 1, 2, 4, 8 and so on; all of them are fetched at once."""
        if not self._compares_values:
            return {}
        promised = {name: tensor for name, tensor in tensors.items() if is_lazy(tensor.device)}
        return dict(zip(promised, checksums(promised.values()), strict=True))

    def _look(self, tensor: Tensor, seen: _Seen | None) -> _Seen:
        """Return the current state of ``tensor``; the last ``seen`` state if nothing has happened since."""
        if seen is not None and not self._compares_values and self._is_untouched(tensor, seen):
            return seen
        if not has_memory(tensor):
            return _Seen(tensor, None, _version(tensor), None)
        value = self._value(tensor)
        # `bits_of` is a view, which a write would also change; a checksum is a separate number.
        kept = value.clone() if value is not None and self._is_small_buffer(tensor) else value
        return _Seen(tensor, tensor.detach(), _version(tensor), kept)

    @staticmethod
    def _is_untouched(tensor: Tensor, seen: _Seen) -> bool:
        if tensor is not seen.tensor or seen.alias is None or seen.value is not None:
            return False
        return tensor.is_set_to(seen.alias) and _version(tensor) == seen.version

    def _differs(self, old: _Seen) -> bool:
        tensor = old.tensor
        if old.version is not None and tensor._version != old.version:
            return True
        if old.alias is None or (old.value is None and tensor.is_set_to(old.alias)):
            return False
        if not has_memory(tensor):  # the memory is gone: what is gathered again has its own values
            return False
        value = None if old.value is None else self._value(tensor)
        same = value is None or old.value is None or torch.equal(value, old.value)
        # `.data = other` swaps the memory without counting a version.
        return not (same and tensor.is_set_to(old.alias))

    @property
    def _compares_values(self) -> bool:
        """Whether values are compared: checks get rarer, since each costs time, and a transfer on XLA."""
        return not self._batches & (self._batches - 1)  # a power of two has one bit

    def _is_small_buffer(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, nn.Parameter) and tensor.numel() * tensor.element_size() <= SMALL

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return the values of ``tensor``, or a checksum of them; None if they are not compared in this batch."""
        if self._is_small_buffer(tensor):
            return bits_of(tensor)
        return checksum(tensor) if self._compares_values else None


def _named_in(module: nn.Module) -> dict[str, Tensor]:
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict(every)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Restore all buffers after the block; refuse a buffer that was written and is too large to copy."""
    places = [(part._buffers, dict(part._buffers)) for part in module.modules() if part._buffers]
    held = [(name, buffer) for name, buffer in module.named_buffers() if not buffer.is_inference()]
    copied = {name: buffer.clone() for name, buffer in held if has_memory(buffer) and is_copied(buffer)}
    versions = {name: buffer._version for name, buffer in held}
    yield
    for place, before in places:
        place.clear()
        place.update(before)
    for name, buffer in held:
        if name in copied and not torch.equal(bits_of(buffer), bits_of(copied[name])):
            with torch.no_grad():
                buffer.copy_(copied[name])
        elif name not in copied and buffer._version != versions[name]:
            raise UnsupportedModelError(
                f"Buffer {name} of {type(module).__name__} was written while rows were tried, and is too large to be "
                "restored. Compute it from public data before training.",
                trap="T11",
            )


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
    sums = [_checksum_of_parts(parts_of(tensor)) for tensor in found]
    return torch.stack(sums).tolist() if sums else []


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with memory that hold the values: the tensor itself, those of a sparse one, or none."""
    if tensor.layout == torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.resolve_conj().resolve_neg()] if has_memory(tensor) else []


def _checksum_of_parts(parts: Sequence[Tensor]) -> Tensor:
    total = torch.tensor(0)
    for part in parts:
        total = total * 31 + checksum(part).cpu()
    return total


def is_copied(tensor: Tensor) -> bool:
    """Return whether a tensor is small enough to be copied in every check."""
    return tensor.numel() * tensor.element_size() <= COPIED


def has_memory(tensor: Tensor) -> bool:
    """Return whether the values are in one separate block of memory; a shard's plain parameter may have none."""
    if tensor.layout != torch.strided or tensor.is_meta or is_lazy(tensor.device):
        return False
    return is_sharded(tensor) or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def state_of_part(part: nn.Module) -> OrderedDict[str, Any]:
    """Return what a module adds to the state dict of the module that contains it."""
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    part.state_dict(destination=state)
    return state  # type: ignore[no-any-return]


def copy_parts(state: dict[str, Any]) -> None:
    """Copy tensors of a state dict that are parts of a larger memory: a file would store all of that memory."""
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
        # On a CPU in one pass; elsewhere integers have no dot product.
        product = torch.dot(part.long(), weights) if part.device.type == "cpu" else (part * weights).sum()
        # Horner over the pieces, so that swapping pieces changes the sum; int64 wraps around, as intended.
        total = total * 31 + product
    return total


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return fixed odd numbers from a separate generator: the model's random streams are not changed."""
    drawn = torch.randint(-(1 << 62), 1 << 62, (_CHUNK,), generator=torch.Generator().manual_seed(0))
    # Odd numbers are invertible modulo 2^64, so any single change shows.
    return (drawn * 2 + 1).to(device)
