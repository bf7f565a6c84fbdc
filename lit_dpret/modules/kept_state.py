"""What the parts of a module keep outside their parameters and buffers, so that passes can begin from the same."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

#: Tensors that a module keeps outside its parameters and buffers are copied up to this many bytes.
COPIED = 1 << 26

OWN_TO_MODULES = frozenset(vars(nn.Module()))
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


class KeptState:
    """What the parts of a module keep in plain attributes, so that every pass can begin from the same.

    While passes run, copies stand in the place of the originals. Objects of other kinds, closures and globals stay as
    the passes leave them: where a loss hangs on these, two passes in a row show it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        held = [_data_of(part) for part in self._parts]
        kept = [t for values in held for t in _tensors_of(list(values.values())) if not _is_copied(t)]
        self._large = [(tensor, tensor._version) for tensor in kept if not tensor.is_inference()]
        self._first = [{name: _copied(value) for name, value in values.items()} for values in held]
        self._now = held

    def begin(self) -> None:
        """Note how everything is now, for `put_back`."""
        self._now = [_data_of(part) for part in self._parts]

    def reset(self) -> None:
        """Let every pass find copies of what there was at first."""
        self._install([{name: _copied(value) for name, value in values.items()} for values in self._first])

    def put_back(self) -> None:
        """Put the originals back."""
        self._install(self._now)

    def refuse_writes(self, refuse: Callable[[], NoReturn]) -> None:
        """Refuse a tensor that is too large to be copied and was written."""
        if any(tensor._version != version for tensor, version in self._large):
            refuse()

    def _install(self, states: Sequence[dict[str, Any]]) -> None:
        for part, values in zip(self._parts, states, strict=True):
            data = _data_of(part)
            for name in data.keys() - values.keys():
                del part.__dict__[name]
            # What has become an object of another kind since, as a cache that was None, stays.
            part.__dict__.update({n: v for n, v in values.items() if n not in vars(part) or n in data})


def _data_of(part: nn.Module) -> dict[str, Any]:
    """The attributes of a part of a module that hold plain data: no parameter, no buffer, no object."""
    return {name: value for name, value in vars(part).items() if name not in OWN_TO_MODULES and _is_data(value)}


def _is_data(value: Any) -> bool:
    """Whether a value can be copied and put back: numbers, texts, tensors, arrays, generators, and lists of them."""
    if isinstance(value, _SCALARS):  # most are, and classes of torch answer slowly
        return True
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, (Tensor, np.ndarray, torch.Generator, *GENERATORS)):
        return True
    if isinstance(value, dict):
        return all(_is_data(v) for v in value.values())
    return isinstance(value, (list, tuple, set, deque)) and all(_is_data(v) for v in value)


def _is_copied(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= COPIED


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples, sets and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple, set, deque)):
        for each in value:
            yield from _tensors_of(each)


def _copied(value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if _is_copied(value) else value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= COPIED else value
    if isinstance(value, dict):
        found = copy.copy(value)  # keeps the class, and what it makes of missing keys
        found.update({key: _copied(each) for key, each in value.items()})
        return found
    if isinstance(value, deque):
        return deque((_copied(each) for each in value), value.maxlen)
    if isinstance(value, (list, set)) or type(value) is tuple:
        return type(value)(_copied(each) for each in value)
    return copy.deepcopy(value) if isinstance(value, GENERATORS) else value
