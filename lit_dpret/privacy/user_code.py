"""Code from outside this package and its libraries, and the values that such code reads.

Python shows what a function reads: its closure, its defaults, and by name the globals and attributes that its code
uses. Lookups by a name that the code builds at run time are not seen.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_dpret.privacy.batches import UnitBatch

#: The libraries that this package uses: their code is not the user's.
LIBRARIES = frozenset({
    "lit_dpret", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torch", "torchmetrics",
    "transformers", "tokenizers", "sentence_transformers", "sentencepiece", "huggingface_hub", "safetensors", "peft",
    "accelerate", "opacus", "deepspeed", "dp_accounting", "numpy", "scipy", "wandb", "tensorboard", "mlflow", "hydra",
    "omegaconf", "rich", "tqdm", "bm25s", "faiss", "PIL", "fsspec", "pyarrow", "datasets", "pandas",
    "jsonargparse", "docstring_parser", "typeshed_client", "sympy", "mpmath", "networkx",
})  # fmt: skip
HOLD_NO_CODE = (str, bytes, int, float, bool, complex, type(None), Tensor, np.ndarray, torch.dtype, torch.device)
#: Classes whose own code reads nothing that a derived class stores.
_BASES = ("PrivateModule", "PrivateStep", "LightningModule", "Module", "object")
#: The maximum number of objects that are examined.
_REACHED = 5_000
#: Only this many entries of a longer list are examined.
_ENTRIES = 1_000
#: The prefix for the name of an argument or default in a `Space`.
_GIVEN = "given "
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_MODULES = frozenset(vars(nn.Module()))
#: Python's own classes of objects that hold arbitrary values of their user.
NAMESPACES = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, threading.local)
CachedFunction: Any = type(lru_cache(lambda: None))


def is_library(module: str | None) -> bool:
    """Return whether a module belongs to this package, its libraries or Python, by its name and location."""
    root = str(module).partition(".")[0]
    return (root in LIBRARIES or root in sys.stdlib_module_names) and is_installed(root)


def is_installed(module: str | None) -> bool:
    """Return whether a module is where Python or an installer put it; a project may have a package of any name."""
    root = str(module).partition(".")[0]
    found = sys.modules.get(root)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
    return file is None or root == "lit_dpret" or _is_installed_at(root, str(file))


@lru_cache(maxsize=1024)
def _is_installed_at(root: str, file: str) -> bool:
    path, names = Path(file).resolve(), ("stdlib", "platstdlib", "purelib", "platlib")
    places = [sysconfig.get_path(name) for name in names]
    places += [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    if any(path.is_relative_to(Path(place).resolve()) for place in places):
        return True
    for name in metadata.packages_distributions().get(root, ()):  # in its own folder, or as an editable clone
        found = metadata.distribution(name)
        if path.is_relative_to(Path(str(found.locate_file(""))).resolve()) or name.lower().replace("-", "_") == root:
            return True
    return False


def inside_of(function: FunctionType) -> Any:
    """Return the function that a library's decorator, such as ``torch.compile``, wraps; None for any other function."""
    by_library = is_library(function.__globals__.get("__name__"))
    return vars(function).get("__wrapped__") if by_library else None


def codes_of(function: FunctionType) -> list[CodeType]:
    """Return the code of a function and of the functions inside it."""
    codes = [function.__code__]
    for code in codes:  # grows during the loop
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return codes


def reads_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield by name what a function reads: closure, defaults, and the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from ((function.__name__, value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    for code in codes_of(function):
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)


class Space:
    """Names that code may rebind: attributes of an object, class or module, or globals and closure of a function.

    With ``attributes`` they are a function's attributes and defaults, or the arguments of a ``partial``; those are not
    rebound but their contents may change. Only the ``named`` attributes of a module are read.
    """

    def __init__(self, owner: Any, *, attributes: bool = False, named: set[str] | None = None) -> None:
        self.owner, self.key = owner, (id(owner), attributes)
        self._cells: dict[str, CellType] = {}
        self._named = set[str]() if named is None else named
        self._of_code = isinstance(owner, FunctionType) and not attributes
        if self._of_code:
            self._cells = dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=False))
            self._named = {name for code in codes_of(owner) for name in code.co_names} - self._cells.keys()

    @property
    def name(self) -> str:
        """The name of the function, class or module, or of the object's class."""
        known = isinstance(self.owner, (type, FunctionType, ModuleType))
        return str((self.owner if known else type(self.owner)).__name__)

    def read(self) -> dict[str, Any]:
        """Return the values that the names have now."""
        if self._of_code:
            space = self.owner.__globals__
            found = {name: space[name] for name in self._named if name in space}
            for name, cell in self._cells.items():
                with suppress(ValueError):  # not filled yet
                    found[name] = cell.cell_contents
            return found
        found = attributes_of(self.owner) | self._given()
        return {n: found[n] for n in self._named & found.keys()} if isinstance(self.owner, ModuleType) else found

    def _given(self) -> dict[str, Any]:
        """Return the default values of a function, or the arguments of a ``partial``."""
        if isinstance(self.owner, FunctionType):
            places, names = self.owner.__defaults__ or (), self.owner.__kwdefaults__ or {}
        elif isinstance(self.owner, partial):
            places, names = self.owner.args, self.owner.keywords
        else:
            return {}
        return {f"{_GIVEN}{name}": value for name, value in (*enumerate(places), *names.items())}

    def bind(self, name: str, values: Mapping[str, Any]) -> None:
        """Bind a name as in ``values``, or unbind it where they lack it."""
        if name in values:
            self.write({name: values[name]}, [])
        elif name in self.read():
            self.write({}, [name])

    def write(self, values: Mapping[str, Any], removed: Iterable[str]) -> None:
        """Bind names to ``values``, and unbind others."""
        if self._of_code:
            for name, value in values.items():
                if name in self._cells:
                    self._cells[name].cell_contents = value
                else:
                    self.owner.__globals__[name] = value
            for name in removed:
                self.owner.__globals__.pop(name, None)
            return
        # Bypasses setters of the owner's class and of nn.Module.
        kind: Any = next(each for each in (type, threading.local, object) if isinstance(self.owner, each))
        for name, value in values.items():
            if not name.startswith(_GIVEN):
                kind.__setattr__(self.owner, name, value)
        for name in removed:
            if not name.startswith(_GIVEN):
                kind.__delattr__(self.owner, name)


def dict_of(value: Any) -> Mapping[str, Any] | None:
    """Return ``__dict__`` of an object or class, None where it has none, whatever its ``__getattr__`` does."""
    kind: Any = type(value)
    with suppress(Exception):  # a user's property may raise anything
        found: Mapping[str, Any] = kind.__getattribute__(value, "__dict__")
        return found
    return None


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object or class itself, those in slots included."""
    found = dict(dict_of(value) or {})
    kind: Any = type(value)
    for name in () if isinstance(value, type) else slots_of(kind):
        with suppress(AttributeError):
            found[name] = object.__getattribute__(value, name)
    return found


def items_of(value: Mapping[Any, Any] | Sequence[Any], most: int | None = None) -> list[tuple[Any, Any]]:
    """Return the values of a mapping or sequence by key or index; a configuration may have values not available yet."""
    keyed = isinstance(value, Mapping)
    with suppress(Exception):
        return list(islice(value.items() if keyed else enumerate(value), most))  # type: ignore[union-attr]
    found = []
    for key in islice(value if keyed else range(len(value)), most):
        with suppress(Exception):
            found.append((key, value[key]))
    return found


@lru_cache(maxsize=1024)
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the attributes that objects of a class store outside ``__dict__``."""
    slots = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    named = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


class ReadByLoss:
    """Find the tensors and arrays that the code of a loss reads outside the parts of its module.

    The search begins with ``forward``, ``per_row_loss`` and ``__call__`` of the module's parts and of objects that they
    hold. It continues with what the code names: globals, closures, defaults, methods, and attributes of objects,
    classes and modules. Attributes that no such code names are left out, such as the counts of a callback; an attribute
    named by a string (``getattr(self, "bank")``) is not left out.
    """

    _FIRST = ("forward", "per_row_loss", "__call__", "pair_batch", "copied_loss", "coefficients")

    def __init__(self, module: nn.Module, callbacks: list[Any], rates: Sequence[Any] = ()) -> None:
        self._roots, self._callbacks, self._rates = module, callbacks, rates
        #: Filled by `tensors`: what the code may write, and the caches of functions (``functools.lru_cache``).
        self.spaces: list[Space] = []
        self.caches: list[Any] = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current tensors, under names that stay the same as long as the same objects are reached."""
        own = list(self._roots.modules())
        self._seen = {id(each) for each in own} | {id(p) for p in self._roots.parameters()}
        self._seen |= {id(buffer) for buffer in self._roots.buffers()}
        most = len(self._seen) + _REACHED
        self.spaces, self.caches, self._owners = [], [], set[int]()
        self._names, self._unnamed = set[str](), dict[str, list[tuple[str, Any]]]()
        self._waiting = deque[tuple[str, Any]]()
        used: dict[str, int] = {}
        for name in self._FIRST:
            self._name(name)
        self._offer("Trainer", "callbacks", self._callbacks)
        self._waiting += (("Trainer", each) for each in self._rates)
        for part in own:
            if any(kind.__module__.startswith("torchmetrics.") for kind in type(part).__mro__):
                continue  # its counts may change; a loss that reads them shows in its values (`CouplingCheck`)
            self._offer_all(type(part).__name__, part, tensors=False)
            self._waiting += (("hook", hook) for hooks in _HOOKS for hook in vars(part).get(hooks, {}).values())
            # A library's code does not show what it reads of the values given to it, nor does a class derived from one
            # of its own.
            if any(is_library(each.__module__) for each in type(part).__mro__ if each.__name__ not in _BASES):
                given = ((name, value) for name, value in vars(part).items() if name not in _OF_MODULES)
                self._waiting += ((name, v) for name, v in given if not isinstance(v, (*HOLD_NO_CODE, nn.Module)))
        while self._waiting and len(self._seen) < most:
            path, value = self._waiting.popleft()
            for name, tensor in self._look(path, value):
                used[name] = used.get(name, 0) + 1
                yield (name if used[name] == 1 else f"{name}.{used[name]}"), tensor

    def _name(self, name: str) -> None:
        if name not in self._names:
            self._names.add(name)
            self._waiting += self._unnamed.pop(name, ())

    def _offer(self, path: str, name: str, value: Any) -> None:
        found = (f"{path}.{name}", value)
        if name in self._names:
            self._waiting.append(found)
        else:
            self._unnamed.setdefault(name, []).append(found)

    def _offer_all(self, path: str, owner: Any, *, tensors: bool = True) -> None:
        """Offer the attributes of an object and of the user's classes among its types; ``tensors`` may be examined."""
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        own = [kind for kind in kinds if not is_library(kind.__module__)]
        held = {} if isinstance(owner, type) else attributes_of(owner)
        for each in (*own, *(() if isinstance(owner, type) else (owner,))):
            self._note(each)
        for space in (held, *map(vars, own)):
            for name, value in space.items():
                known = isinstance(owner, nn.Module) and name in _OF_MODULES
                known |= space is held and not tensors and isinstance(value, (Tensor, np.ndarray))
                if isinstance(name, str) and not known:
                    self._offer(path, name, value)

    def _note(self, owner: Any) -> None:
        if id(owner) not in self._owners:
            self._owners.add(id(owner))
            self.spaces.append(Space(owner, named=self._names if isinstance(owner, ModuleType) else None))
            if isinstance(owner, FunctionType):
                self.spaces.append(Space(owner, attributes=True))

    def _note_rule(self, rule: Any) -> None:
        """Note the places where a schedule may keep counts, and nothing that it reads."""
        if isinstance(rule, partial):
            self._note(rule)
            for each in (rule.func, *rule.args, *rule.keywords.values()):
                self._note_rule(each)
        elif isinstance(rule, MethodType):
            self._note_rule(rule.__func__)
            self._note_rule(rule.__self__)
        else:
            home = (rule if isinstance(rule, FunctionType) else type(rule)).__module__
            if not (isinstance(rule, HOLD_NO_CODE) or is_library(home)):
                self._note(rule)

    def _look(self, path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a value, and queue its contents."""
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8:
                yield path, torch.from_numpy(np.ascontiguousarray(value))
            return
        if id(value) in self._seen or (isinstance(value, HOLD_NO_CODE) and not isinstance(value, Tensor)):
            return
        self._seen.add(id(value))
        waiting = self._waiting
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, Mapping) and not isinstance(value, NAMESPACES):
            if not is_library(type(value).__module__):
                self._note(value)
            waiting += ((f"{path}.{key}", each) for key, each in items_of(value, _ENTRIES))
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            if not is_library(type(value).__module__):
                self._note(value)
            waiting += ((f"{path}.{at}", each) for at, each in enumerate(islice(list(value), _ENTRIES)))
        elif isinstance(value, partial):
            self._note(value)
            waiting += [(path, value.func), (path, value.args), (path, value.keywords)]
        elif isinstance(value, MethodType):
            self._name(value.__func__.__name__)
            waiting += [(path, value.__func__), (type(value.__self__).__name__, value.__self__)]
        elif isinstance(value, (staticmethod, classmethod)):
            waiting.append((path, value.__func__))
        elif isinstance(value, (property, cached_property)):
            waiting.append((path, value.fget if isinstance(value, property) else value.func))
        elif isinstance(value, FunctionType):
            if (wrapped := inside_of(value)) is not None:
                waiting.append((path, wrapped))
            elif not is_library(value.__module__):
                self._note(value)
                self._read(value)
        elif isinstance(value, CachedFunction):
            self.caches.append(value)
            waiting.append((path, value.__wrapped__))
        elif isinstance(value, ModuleType):
            if not is_library(value.__name__):
                self._note(value)
                for name, each in list(vars(value).items()):
                    self._offer(path, name, each)
        elif isinstance(value, nn.Module):  # not part of the trained module
            yield from ((f"{path}.{n}", t) for n, t in self._state(value))
            for part in value.modules():
                self._seen.add(id(part))
                self._offer_all(path, part)
        elif isinstance(value, (Optimizer, LRScheduler)):  # a loss may set their numbers
            self._note(value)
            parts = (each if isinstance(each, list) else [each] for each in vars(value).values())
            for each in (each for part in parts for each in part):
                if isinstance(each, LRScheduler):
                    waiting.append((path, each))
                else:
                    self._note_rule(each)
        elif isinstance(value, (*NAMESPACES, UnitBatch)):  # one that user code kept
            self._note(value)
            waiting += ((f"{path}.{name}", each) for name, each in vars(value).items())
        elif not is_library((value if isinstance(value, type) else type(value)).__module__):
            self._offer_all(path, value)

    def _state(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                yield name, tensor

    def _read(self, function: FunctionType) -> None:
        self._waiting += reads_of(function)
        for code in codes_of(function):
            for name in (*code.co_names, *(text for text in code.co_consts if isinstance(text, str))):
                self._name(name)
