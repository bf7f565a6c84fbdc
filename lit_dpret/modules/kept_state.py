"""The plain values that a module keeps between batches, and the choice of batches to examine."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import is_
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from lit_dpret.distributed.xla import is_lazy
from lit_dpret.privacy.ledger.trained import MARK
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.state_watch import COPIED, checksums, is_copied
from lit_dpret.privacy.user_code import ReadByLoss, Space, attributes_of, dict_of, slots_of
from lit_dpret.privacy.user_generators import own_generators

#: The attributes that `PrivateStep._leave_run` sets, and others of a run.
OF_A_RUN = frozenset({
    "_guard", "_ranks", "_shards", "_handover", "_physical", "_held_error", "_batches_seen", "_loss_sum", "_losses",
})  # fmt: skip
OWN_TO_MODULES = frozenset({*vars(nn.Module()), MARK})
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
LIBRARIES = ("torch", "lightning", "transformers", "tokenizers", "peft", "torchmetrics", "lit_dpret")
#: At most this many entries of a list are examined.
ENTRIES = 1000
_CONTAINERS = (OrderedDict, dict, list, set, deque)
#: At most this many objects below one name are compared.
_OBJECTS = 5_000
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: Their names hold no values of a batch, or other code restores them.
_NOT_COMPARED = (nn.Parameter, nn.Module)
#: The attributes of objects from these packages are not examined.
_KNOWN = ("builtins", "numpy", *LIBRARIES)


class _Still(NamedTuple):
    """The attributes of a part whose values cannot change in place, and its `KeptState.contents`."""

    names: list[str]
    values: list[Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, space: Space, values: Mapping[str, Any], owners: Collection[int]) -> _Still | None:
        kept = {name: value for name, value in values.items() if not isinstance(value, _NOT_COMPARED)}
        kind: Any = type(space.owner)
        if not isinstance(space.owner, nn.Module) or slots_of(kind):
            return None
        if any(isinstance(value, GENERATORS) for value in kept.values()):  # these change in place
            return None
        alone = (
            isinstance(v, _SCALARS) or _is_alone(v) or (id(v) in owners and not _container(v)) for v in kept.values()
        )
        if not all(alone):
            return None
        contents = {n: (type(v), v) if isinstance(v, _SCALARS) else (id(v), v) for n, v in kept.items()}
        held = vars(space.owner)
        return cls([*held], [*held.values()], contents)

    def is_now(self, held: Mapping[str, Any]) -> bool:
        return len(held) == len(self.names) and all(map(is_, held.values(), self.values)) and [*held] == self.names


class KeptState:
    """The plain values that a module keeps, so that every pass starts from the same state.

    They are in attributes of its parts and, where the code of its loss may bind names (`ReadByLoss`), in attributes of
    objects and classes, closures and globals. Values are restored in place, so that other holders of a list or a tensor
    see the same. What no code names stays as the passes leave it: if a loss depends on it, two passes in a row show it.
    """

    def __init__(self, module: nn.Module) -> None:
        read = code_of_loss(module)
        for _ in read.tensors():
            pass
        parts = list(module.modules())
        ours = {id(part) for part in parts}
        self._spaces = [*map(Space, parts), *(space for space in read.spaces if id(space.owner) not in ours)]
        self._caches = read.caches
        #: The memory of trained tensors, of which a container may hold another view: training writes to it.
        self._weights = frozenset(map(memory_of, (*module.parameters(), *module.buffers())))
        held = [_data_of(space) for space in self._spaces]
        kept = [t for values in held for t in _tensors_of(list(values.values())) if not is_copied(t)]
        self._large = [(tensor, tensor._version) for tensor in kept if not tensor.is_inference()]
        self._owners = {id(space.owner) for space in self._spaces}  # their names are examined as spaces of their own
        #: Most parts of a model are still, and examining all names of all parts takes as long as a pass of a small one.
        self._still = [_Still.of(space, _values_of(space), self._owners) for space in self._spaces]
        self._first = self._now = [self._saved_values(values) for values in held]
        self._objects = [_objects_of(space, values) for space, values in zip(self._spaces, held, strict=True)]
        self._bound = [
            {name: values.get(name) or partial(_same, value) for name, value in space.read().items()}
            for space, values in zip(self._spaces, self._first, strict=True)
        ]

    def _saved_values(self, values: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
        return {name: _saved(value, self._weights) for name, value in values.items()}

    @property
    def metrics(self) -> list[Metric]:
        """The torchmetrics metrics that the module holds, or that the code of its loss reads."""
        return [space.owner for space in self._spaces if isinstance(space.owner, Metric)]

    def begin(self) -> None:
        self._now = [
            first if self._is_still(at) else self._saved_values(_data_of(space))
            for at, (space, first) in enumerate(zip(self._spaces, self._first, strict=True))
        ]

    def _is_still(self, at: int) -> bool:
        """Return whether a part holds what it held at first."""
        still = self._still[at]
        return still is not None and still.is_now(vars(self._spaces[at].owner))

    def reset(self) -> None:
        self._install(self._first)

    @contextmanager
    def without_objects_since(self, earlier: KeptState, public: frozenset[str]) -> Iterator[list[str]]:
        """Replace objects that are new since ``earlier`` by what was there, within the block; yield their names.

        What was there is nothing, or a plain value such as None; if ``earlier`` is this state itself, it may be another
        object. Objects with ``public`` names stay.
        """
        kept = zip(earlier._spaces, earlier._first, earlier._objects, strict=True)
        before = {space.key: (values, objects) for space, values, objects in kept}
        names, undo = [], list[Callable[[], object]]()
        try:
            for space in (space for space in self._spaces if space.key in before):
                values, objects = before[space.key]
                for name, value in _objects_of(space, _data_of(space)).items():
                    is_new = objects.get(name) is not value if earlier is self else name not in objects
                    if name in public or not is_new:
                        continue
                    names.append(name)
                    undo.append(partial(space.write, {name: value}, []))
                    there = (
                        {name: values[name]()} if name in values else {name: objects[name]} if name in objects else {}
                    )
                    space.write(there, [] if there else [name])
            yield names
        finally:
            for each in undo:
                each()

    def contents(self) -> dict[tuple[int, str], Any]:
        """Return what each name of each space holds now; equal values have equal content."""
        found, seen = {}, dict[int, Any]()
        for at, (space, still) in enumerate(zip(self._spaces, self._still, strict=True)):
            if still is not None and self._is_still(at):
                found.update({(at, name): content for name, content in still.contents.items()})
                continue
            for name, value in _values_of(space).items():
                if not isinstance(value, _NOT_COMPARED):
                    elsewhere = id(value) in self._owners and _container(value) is None
                    found[at, name] = (id(value), value) if elsewhere else _content(value, seen, len(seen) + _OBJECTS)
        return found

    def names_from(self, names: Collection[tuple[int, str]], first: KeptState) -> dict[tuple[Any, ...], KeptName]:
        """Return ``names`` of `contents` by location, to be restored to their values in a ``first`` state."""
        before = {space.key: values for space, values in zip(first._spaces, first._bound, strict=True)}
        found = {}
        for at, name in names:
            space = self._spaces[at]
            give = before.get(space.key, self._bound[at]).get(name)
            found[*space.key, name] = KeptName(space, name, self._weights, give)
        return found

    def generators(self, names: Collection[tuple[int, str]]) -> list[str]:
        """Return which of the ``names`` of `contents` are random generators."""
        held = ((self._spaces[at], name) for at, name in names)
        return sorted({f"{s.name}.{name}" for s, name in held if isinstance(s.read().get(name), GENERATORS)})

    def put_back(self, public: Collection[str] = ()) -> None:
        """Restore what all names held at `begin`, except ``public`` names."""
        self._install(self._now, public)

    def refuse_writes(self, refuse: Callable[[], NoReturn]) -> None:
        if any(tensor._version != version for tensor, version in self._large):
            refuse()

    def _install(self, states: Sequence[dict[str, Callable[[], Any]]], public: Collection[str] = ()) -> None:
        for at, (space, values) in enumerate(zip(self._spaces, states, strict=True)):
            if values is self._first[at] and self._is_still(at):
                continue
            held = space.read()
            data = _data_of(space, held)
            values = {name: give for name, give in values.items() if name not in public} if public else values
            # A value that has become an object of another kind since, such as a cache that was None, stays.
            fitting = {name: give() for name, give in values.items() if name not in held or name in data}
            changed = {name: value for name, value in fitting.items() if name not in held or held[name] is not value}
            space.write(changed, data.keys() - values.keys() - {*public})
        for cache in self._caches:
            cache.cache_clear()


class KeptName:
    """A name that is restored to its value when last noted: writes by other code before that are kept."""

    def __init__(self, space: Space, name: str, weights: Collection[object], give: Callable[[], Any] | None) -> None:
        self.label = f"{space.name}.{name}"
        self._space, self._name, self._weights, self._give = space, name, weights, give

    def note(self) -> None:
        held = self._space.read()
        self._give = _saved(held[self._name], self._weights) if self._name in held else None

    def put_back(self) -> None:
        self._space.bind(self._name, {} if self._give is None else {self._name: self._give()})


def code_of_loss(module: Any) -> ReadByLoss:
    """Return a search of everything that the loss of ``module`` reads, including objects of its Trainer."""
    trainer = getattr(module, "_trainer", None)
    if trainer is None:
        return ReadByLoss(module, [])
    rates = [*trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs)]
    return ReadByLoss(module, list(trainer.callbacks), rates)


def _values_of(space: Space, held: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of names that the code of a loss may bind: no weight, no part, nothing of the run."""
    held = space.read() if held is None else held
    if isinstance(space.owner, nn.Module):
        ours = OWN_TO_MODULES | OF_A_RUN if "_couplings" in held else OWN_TO_MODULES
    else:
        ours = frozenset(("state", MARK) if isinstance(space.owner, Optimizer) else (MARK,))
    return {n: value for n, value in held.items() if n not in ours and not n[:2] == n[-2:] == "__"}


def _data_of(space: Space, held: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the names that hold plain data: no parameter, no buffer, no object."""
    return {name: value for name, value in _values_of(space, held).items() if _is_data(value)}


def _objects_of(space: Space, data: Collection[str]) -> dict[str, Any]:
    """Return the names that hold neither plain data, nor a part of a module, nor a library object."""
    values = _values_of(space).items()
    return {name: value for name, value in values if name not in data and not _is_of_a_library(value)}


def _is_of_a_library(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, (nn.Module, nn.Parameter, ModuleType, type)) or kind.__module__.split(".")[0] in LIBRARIES


def _is_data(value: Any) -> bool:
    """Return whether a value can be restored: plain values, tensors, generators, and containers."""
    if isinstance(value, _SCALARS):  # most values are, and classes of torch are slow to check
        return True
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, (Tensor, np.ndarray, *GENERATORS)):
        return True
    if _container(value) is not None:  # its content is restored, whatever it is
        return True
    return isinstance(value, tuple) and all(_is_data(each) for each in value[:ENTRIES])


def _container(value: Any) -> Any:
    """Return the Python class whose methods fill a container: those of a derived class may do something else."""
    return next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)


def _held_by(value: Any, kind: Any) -> list[Any]:
    return list(kind.values(value) if issubclass(kind, dict) else kind.__iter__(value))


def memory_of(tensor: Tensor) -> object:
    """Return the memory address of a tensor; the tensor's id if it has no address (XLA, sparse, freed)."""
    try:
        return id(tensor) if is_lazy(tensor.device) else (tensor.device, tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _tensors_of(value: Any, inside: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own, also in containers, which may contain themselves."""
    if isinstance(value, Tensor):
        if not (value.is_quantized or value.is_nested):
            yield value
    elif isinstance(value, (dict, list, tuple, set, deque)) and id(value) not in inside:
        for each in list(islice(value.values() if isinstance(value, dict) else value, ENTRIES)):
            yield from _tensors_of(each, inside | {id(value)})


def _saved(value: Any, weights: Collection[object], inside: frozenset[int] = frozenset()) -> Callable[[], Any]:
    """Return a function that returns ``value`` with its present content; ``inside`` are the containers around it.

    Content in the memory of ``weights`` is left as it is.
    """
    if (_container(value) or isinstance(value, tuple)) and id(value) not in inside:
        return partial(_refilled, value, _contents(value, weights, inside | {id(value)}))
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        # Expanded tensors and inference tensors are never written.
        strided = value.layout is torch.strided and not (value.is_quantized or value.is_nested)
        if not (strided and is_copied(value)) or value.is_inference() or value.is_meta or 0 in value.stride():
            return partial(_same, value)
        if memory_of(value) in weights:
            return partial(_same, value)
        return partial(_same, value, value.detach().copy_, value.detach().clone())
    if isinstance(value, np.ndarray) and value.flags.writeable and value.nbytes <= COPIED:
        return partial(_same, value, partial(np.copyto, value), value.copy())
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return partial(_same, value, value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(_same, value, partial(setattr, value.bit_generator, "state"), value.bit_generator.state)
    if isinstance(value, random.Random):
        return partial(_same, value, value.setstate, value.getstate())
    return partial(_same, value)


def _content(value: Any, seen: dict[int, Any], most: int) -> Any:
    """Return a key that is equal for values with equal content; a library object equals only itself."""
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, GENERATORS):
        return own_generators([value])
    if _is_alone(value):
        return id(value), value
    if id(value) in seen or len(seen) > most:
        return ()
    seen[id(value)] = value  # keeps its id from being reused
    if isinstance(value, Tensor):
        plain = is_copied(value) and not (value.is_quantized or value.is_nested or value.is_meta)
        return (value.shape, value.dtype, *checksums([value])) if plain else (id(value), value)
    if isinstance(value, np.ndarray) and value.nbytes <= COPIED:
        if value.dtype == object:
            return value.shape, *(_content(each, seen, most) for each in value.flat[:ENTRIES])
        return value.shape, value.dtype.str, value.tobytes()
    if (kind := _container(value) or (tuple if isinstance(value, tuple) else None)) is not None:
        held = [*(kind.__iter__(value) if issubclass(kind, dict) else ()), *_held_by(value, kind)]
        return type(value), len(held), *(_content(each, seen, most) for each in (*held[:ENTRIES], *held[-ENTRIES:]))
    if isinstance(value, np.ndarray):
        return id(value), value
    return type(value), *((name, _content(each, seen, most)) for name, each in attributes_of(value).items())


def _is_alone(value: Any) -> bool:
    """Return whether a value equals only itself: a weight, or an object that is not examined."""
    if isinstance(value, nn.Parameter):
        return True
    looked_into = isinstance(value, (*_SCALARS, Tensor, np.ndarray, tuple, *_CONTAINERS))
    return not looked_into and not is_foreign(value)


def _same(value: Any, write: Callable[[Any], object] | None = None, content: Any = None) -> Any:
    if write is not None:
        write(content)
    return value


def _contents(value: Any, weights: Collection[object], inside: frozenset[int]) -> list[Any]:
    """Return whether a container's content is plain, its keys, and its values: as they are if plain, else `_saved`.

    It is plain if all values are scalars, or if there are more than `ENTRIES`.
    """
    kind = _container(value) or tuple
    held = _held_by(value, kind)
    plain = len(held) > ENTRIES or all(isinstance(each, _SCALARS) for each in held)
    kept = held if plain else [_saved(each, weights, inside) for each in held]
    return [plain, list(kind.__iter__(value)) if issubclass(kind, dict) else None, kept]


def _refilled(value: Any, contents: list[Any]) -> Any:
    plain, keys, kept = contents
    held = kept if plain else [give() for give in kept]
    if (kind := _container(value)) is None:  # a tuple
        return value
    before, now = [*held[-ENTRIES:], *held[:ENTRIES]], _held_by(value, kind)
    same = len(held) == len(now) and all(map(is_, before, [*now[-ENTRIES:], *now[:ENTRIES]]))
    if same and (keys is None or len(keys) > ENTRIES or all(map(is_, keys, kind.__iter__(value)))):
        return value  # it may refuse writes
    kind.clear(value)
    if keys is not None:
        for key, each in zip(keys, held, strict=True):
            kind.__setitem__(value, key, each)
    else:
        (kind.update if kind is set else kind.extend)(value, held)
    return value


def is_foreign(value: Any) -> bool:
    """Return whether a value is a plain user-defined object."""
    if isinstance(value, (nn.Module, PrivacyMode, type, Optimizer, LRScheduler)):
        return False
    has_attributes = dict_of(value) is not None or hasattr(type(value), "__slots__")
    return has_attributes and type(value).__module__.split(".")[0] not in _KNOWN


class Looks:
    """Choose the batches to check: the first, and after the n-th one drawn at random from 1.5 n to 2.5 n.

    Without randomness, a dependence in every fourth batch might never be examined.
    """

    def __init__(self) -> None:
        self.made = self._count = 0
        self._next = 1

    def due(self, coin: int) -> bool:
        """Count a batch, and return whether to check it; ``coin`` is a random number."""
        self._count += 1
        if self._count < self._next:
            return False
        self.made += 1
        self._next = max(self._count + 1, self._count + self._count // 2 + coin % (self._count + 1))
        return True

    def again(self) -> None:
        self.made -= 1
        self._next = self._count + 1
