"""Values that the weights of a run had after each of its steps, recognised again in this process.

The user's code may copy weights, or an average of them, after any step, and a later run may start from the copy. So
each step leaves fingerprints of a few values of every tensor: dense noise changes nearly all of them. They are stored
as 64-bit integers and compared only when a module is examined, so a step costs a dozen operations on one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.optim import Optimizer

from lit_dpret.privacy.user_code import dict_of

# How many values of a tensor are read after a step, and at the end of a run: a run without noise may change the weights
# in a few rows only.
_LOOKED_AT = 32
_AT_THE_END = 4096
# Fewer values than this may be equal by chance after rounding: they are compared in float32 only.
_FEW = 16
# Averages are in containers of a few hundred tensors; longer containers hold rows.
_MOST = 4096
_DEPTH = 4
# float32 unchanged; then its bfloat16, and the bfloat16 of its float16, so that a copy in any of the three is
# recognised.
_CASTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda drawn: drawn,
    lambda drawn: drawn.bfloat16().float(),
    lambda drawn: drawn.half().bfloat16().float(),
)

# How many tensors of an optimizer are read after a step that no run records; their values wait on the device.
_TENSORS = 16
_WAITING = 256

_Shapes = tuple[tuple[int, ...], ...]


class _Noted:
    """The fingerprints of one run, permanently in this process; it holds no tensor."""

    def __init__(self, runs: Iterable[Any], begun: np.ndarray) -> None:
        self.runs, self._begun = frozenset(runs), np.unique(begun)
        self._sorted, self._new = np.empty(0, np.int64), list[np.ndarray]()

    def add(self, digests: np.ndarray) -> None:
        self._new.append(digests.ravel())

    def __contains__(self, digest: np.int64) -> bool:
        self._sort()
        return _among(digest, self._sorted) and not _among(digest, self._begun)

    def _sort(self) -> None:
        if self._new:
            self._sorted = np.unique(np.concatenate([self._sorted, *self._new]))
            self._new.clear()

    def begin(self, digests: np.ndarray) -> None:
        """Treat these as values from before a first step, except those that another training left."""
        self._sort()
        self._begun = np.union1d(self._begun, np.setdiff1d(digests, self._sorted))

    def so_far(self) -> _Noted:
        """Return a copy to which nothing is added."""
        self._sort()
        copy = _Noted(self.runs, self._begun)
        copy._sorted = self._sorted
        return copy


_noted: list[_Noted] = []


class OutsideSteps:
    """The values that optimizers of this process gave weights in steps that no run of this package records.

    For each optimizer a few tensors are read, evenly chosen; sharded tensors are not.
    """

    def __init__(self) -> None:
        self._noted = _Noted((), np.empty(0, np.int64))
        self._chosen = WeakKeyDictionary[Optimizer, list[Tensor]]()
        self._waiting = list[tuple[Tensor, list[int], _Shapes, bool]]()
        self._off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Ignore the steps within the block: a run records them."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def before(self, optimizer: Optimizer, stepped: Container[Tensor]) -> bool:
        """Record the values of weights before their first step, if this is it; those in ``stepped`` had theirs."""
        if self._off or optimizer in self._chosen or torch.compiler.is_compiling():
            return False
        found = [each for group in optimizer.param_groups for each in group["params"] if is_readable(each)]
        self._chosen[optimizer] = chosen = found[:: -(-len(found) // _TENSORS) or 1]
        self._wait([each for each in chosen if each not in stepped], first=True)
        return True

    def after(self, optimizer: Optimizer) -> None:
        """Record the values of the weights after a step."""
        if not (self._off or torch.compiler.is_compiling()):
            self._wait([each for each in self._chosen.get(optimizer, ()) if is_readable(each)], first=False)

    def so_far(self) -> Callable[[Tensor], bool]:
        """Return a predicate: whether a tensor has the values of a tensor after one of the steps so far."""
        self._take_up()
        noted = self._noted.so_far()
        return lambda tensor: is_readable(tensor) and any(digest in noted for digest in _looked(tensor))

    def _wait(self, tensors: list[Tensor], *, first: bool) -> None:
        if tensors:
            views = [*map(_spread, tensors)]
            self._waiting.append((_joined(views).clone(), [*map(len, views)], _shapes(tensors), first))
        if len(self._waiting) >= _WAITING:
            self._take_up()

    def _take_up(self) -> None:
        for drawn, sizes, shapes, first in self._waiting:
            digests = _digests_of(torch.split(drawn, sizes), shapes)
            (self._noted.begin if first else self._noted.add)(digests.ravel())
        self._waiting.clear()


outside_steps = OutsideSteps()


class Passed:
    """The values that the weights of one run pass through, from its first step on."""

    def __init__(self, runs: Iterable[Any], begun: Iterable[Tensor]) -> None:
        self._noted = _Noted(runs, _digests([each for each in begun if is_readable(each)]))
        self._shapes: _Shapes = ()
        self._views, self._places = list[Tensor](), list[int]()

    def note(self, weights: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Record the values of ``weights``, the same tensors at each call, and of ``others``, which may change."""
        if self._noted not in _noted:
            _noted.append(self._noted)
        if weights:
            places = [each.data_ptr() for each in weights]
            if places != self._places:
                # For a non-contiguous tensor `_spread` returns a copy, which does not follow it: copies are made each
                # time.
                self._places = places if all(each.is_contiguous() for each in weights) else []
                self._views, self._shapes = [_spread(each) for each in weights], _shapes(weights)
            self._noted.add(_digests_of(self._views, self._shapes))
        if others:
            self._noted.add(_digests(others))


def passed_in(tensor: Tensor) -> frozenset[Any]:
    """Return the runs whose weights had the values of ``tensor`` after one of their steps."""
    if not _noted or not is_readable(tensor):
        return frozenset()
    looked = _looked(tensor)
    found = [each.runs for each in _noted if any(digest in each for digest in looked)]
    return frozenset().union(*found)


def _looked(tensor: Tensor) -> list[np.int64]:
    """Return the digests that copies of a tensor share, without those that unrelated runs may have."""
    exact, rounded, _ = _digests([tensor])[:, 0]
    drawn = _spread(tensor).float()
    looked = [] if is_common(drawn) else [exact]
    if len(drawn) >= _FEW and not is_common(drawn.bfloat16()):
        looked.append(rounded)
    return looked


def is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor has its own readable values."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    plain = plain and not (tensor.is_quantized or tensor.is_nested)
    if not (plain and tensor.numel() and tensor.is_floating_point()) or is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.untyped_storage().nbytes() > 0  # FSDP2 frees what it gathered, but leaves its tensor


def held_by(objects: Iterable[object], shapes: frozenset[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of ``shapes`` in attributes of callbacks, and in modules and containers there: averages."""
    others = [each for each in objects if type(each).__module__.partition(".")[0] != "lit_dpret"]
    found = (tensor for each in others for tensor in _tensors(vars(each), _DEPTH))
    return [tensor for tensor in found if tuple(tensor.shape) in shapes and is_readable(tensor)]


def _tensors(held: object, depth: int) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, nn.Module):
        yield from held.parameters()
        yield from held.buffers()
    elif depth and (inside := _inside(held)):
        for each in inside:
            if not isinstance(each, (str, bytes, int, float, type(None))):
                yield from _tensors(each, depth - 1)


def _inside(held: object) -> Iterable[object]:
    if isinstance(held, (dict, list, tuple)):
        return () if len(held) > _MOST else held.values() if isinstance(held, dict) else held
    known = {each.__module__.partition(".")[0] for each in type(held).__mro__}
    if isinstance(held, (type, np.ndarray)) or known & {"lightning", "lit_dpret", "rich", "threading"}:
        return ()
    return tuple((dict_of(held) or {}).values())


def looked_at(tensor: Tensor) -> Tensor | None:
    """Return the values by which a tensor is recognised at the end of a run; None if it has none here."""
    return _spread(tensor, _AT_THE_END) if is_readable(tensor) else None


def fingerprint_of(values: Tensor) -> int:
    """Return a number that copies of these values share; from 16 values on, bfloat16 casts share it too."""
    exact, rounded, _ = _digests_of([values], ((),))[:, 0]
    return int(exact if len(values) < _FEW else rounded)


def is_common(values: Tensor) -> bool:
    """Return whether unrelated runs may have these values: a constant, or a short, nearly constant tensor.

    Adam's first step moves each value by the learning rate, up, down or not at all, so a short bias that was constant
    has few patterns.
    """
    distinct, count = len(torch.unique(values)), len(values)
    return distinct == 1 or (count < _LOOKED_AT and distinct < min(4, count))


def _spread(tensor: Tensor, most: int = _LOOKED_AT) -> Tensor:
    # Evenly spread, so that a change in any one region of a large tensor is seen.
    return tensor.detach().reshape(-1)[:: -(-tensor.numel() // most)]


def _digests(tensors: Sequence[Tensor]) -> np.ndarray:
    if not tensors:
        return np.empty((len(_CASTS), 0), np.int64)
    return _digests_of([*map(_spread, tensors)], _shapes(tensors))


def _shapes(tensors: Iterable[Tensor]) -> _Shapes:
    return tuple(tuple(each.shape) for each in tensors)


def _digests_of(views: Sequence[Tensor], shapes: _Shapes) -> np.ndarray:
    """Return an integer for each cast and tensor; tensors of other shapes have other integers."""
    drawn = _joined(views).cpu().float()
    segment, factors, seeds = _layout(tuple(map(len, views)), shapes)
    rows = []
    for number, cast in enumerate(_CASTS):
        bits = cast(drawn).view(torch.int32).long()
        # Rounded values get other seeds than exact ones, as a few values of a half-precision module may equal them.
        rows.append(seeds[min(number, 1)].index_add(0, segment, bits * factors))
    found: np.ndarray = torch.stack(rows).numpy()
    return found


def _joined(views: Sequence[Tensor]) -> Tensor:
    if len({each.device for each in views}) > 1:
        return torch.cat([each.cpu().float() for each in views])
    return torch.cat(list(views))


@lru_cache(maxsize=256)
def _layout(sizes: tuple[int, ...], shapes: _Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tensor each value belongs to, its factor, and two seeds for each tensor."""
    counts = torch.tensor(sizes)
    segment = torch.arange(len(sizes)).repeat_interleave(counts)
    place = torch.cat([torch.arange(size) for size in sizes])
    return segment, _FACTORS[place], torch.tensor([[_seed(cast, each) for each in shapes] for cast in ("f", "b")])


def _seed(*named: object) -> int:
    return int.from_bytes(blake2b(repr(named).encode(), digest_size=8).digest(), "little", signed=True)


_FACTORS = torch.tensor([_seed("factor", place) | 1 for place in range(_AT_THE_END)])


def _among(digest: np.int64, ordered: np.ndarray) -> bool:
    place = int(np.searchsorted(ordered, digest))
    return place < len(ordered) and bool(ordered[place] == digest)
