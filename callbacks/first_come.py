"""Refuse data and collations whose first rows determine how later ones are read.

A vocabulary that grows, or a scale set at the first call, is derived from private rows: one unit changes all others.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn
from weakref import ProxyTypes

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_dpret.errors import DataError, UnsupportedModelError
from lit_dpret.privacy.content import readable_content
from lit_dpret.privacy.state_watch import same_values
from lit_dpret.privacy.user_code import HOLD_NO_CODE, CachedFunction, Space, dict_of, inside_of, is_library, reads_of
from lit_dpret.privacy.user_generators import kept_generators, seed_everywhere

_NUMBERS = (int, float, complex, np.generic)
#: The number of rows or units to read, and the maximum number of objects to search for what they hold.
FIRST, _REACHED = 8, 5_000
#: A longer container is only cut back to its old length, and only this many of its values are searched.
_COPIED, _LOOKED_INTO, _BYTES = 10_000, 64, 1 << 16
#: Subclasses may be filled in another way, or not at all.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


def refuse_first_come(module: Any, data: Any) -> None:
    """Refuse rows and a ``collate_rows`` that depend on the order of requests, such as a growing vocabulary.

    The first rows are read twice, in opposite orders. In between, all containers, attributes, closures and globals that
    user code reaches are restored, unless an iterator or a file is among them, which cannot be restored. This runs
    before anything else reads the rows; earlier changes are not seen. A warning names numbers that change as rows are
    read, such as a token count. These numbers keep their values: one may be an offset in a file.
    """
    dataset = getattr(data, "dataset", None)
    if dataset is None or not hasattr(data, "train_units"):
        return
    rows = range(min(len(dataset), FIRST))
    numbers = set[str]()
    if depends_on_the_first([dataset], [partial(dataset.__getitem__, row) for row in rows], numbers):
        refuse_other_rows()
    with kept_generators():
        found = [dataset[row] for row in rows]
    pairs = [found[at : at + 2] for at in range(0, len(found), 2)]  # the scale of a single row may be NaN
    if depends_on_the_first([module], [partial(module.collate_rows, pair) for pair in pairs], numbers):
        raise UnsupportedModelError(
            f"privacy={module.privacy.name} cannot train {type(module).__name__}: what collate_rows returns for a row "
            "depends on earlier rows, as with a growing vocabulary or a running mean. Build such tables from public "
            "texts.",
            trap="T11",
        )
    public = getattr(module, "public_metrics", ())
    if names := ", ".join(sorted(name for name in numbers if name.rpartition(".")[2] not in public)):
        rank_zero_warn(
            f"Reading rows changes {names}, and the card trusts that no schedule, optimizer or callback reads it. "
            "To count, use trainer.global_step; or list its name in public_metrics if it depends on no private row."
        )


def depends_on_the_first(
    roots: Sequence[Any], calls: Sequence[Callable[[], Any]], numbers: set[str] | None = None
) -> bool:
    """Return whether the results of ``calls`` depend on their order; add names of changed numbers to ``numbers``."""
    found = list(_holders(roots))
    held = [(each, _read(each)) for each in found if not isinstance(each, _Stream)]
    moves_on = len(held) < len(found)
    with kept_generators():
        forward = [_answer(number, call) for number, call in enumerate(calls)]
        if numbers is not None:
            for holder, before in held:
                now = holder.read().items() if isinstance(holder, Space) else ()
                changed = (n for n, each in now if isinstance(each, _NUMBERS) and before.get(n, before) is not each)
                numbers |= {f"{holder.name}.{name}" for name in changed}
        if not moves_on and not _put_back(held):
            return False
        backward = [_answer(number, call) for number, call in reversed(list(enumerate(calls)))]
        if forward == backward[::-1]:
            return False  # user code kept what this round changed, and also what goes with it
        if not moves_on:
            _put_back(held)
    return True


def _answer(number: int, call: Callable[[], Any]) -> bytes | None:
    seed_everywhere(number)
    return readable_content([call()])


def _read(holder: Any) -> Any:
    """Return what a container or a `Space` holds; for a long container, its length."""
    if isinstance(holder, CachedFunction):
        return holder.cache_info().currsize
    if isinstance(holder, Space):
        return holder.read()
    if isinstance(holder, Tensor):
        return holder.detach().clone()
    return holder.copy() if isinstance(holder, np.ndarray) or len(holder) <= _COPIED else len(holder)


def _put_back(held: Sequence[tuple[Any, Any]]) -> bool:
    """Restore the contents of holders; return whether any of them had changed."""
    changed = False
    for holder, before in held:
        now = _read(holder)
        if isinstance(before, int):
            changed |= (now if isinstance(now, int) else len(now)) > before
            _cut_back(holder, before)
        elif not _are_the_same(before, now):
            changed = True
            if isinstance(holder, Space):
                others = {name: value for name, value in before.items() if now.get(name, now) is not value}
                holder.write(others, now.keys() - before.keys())
            elif isinstance(holder, (dict, set)):
                holder.clear()
                holder.update(before)
            elif isinstance(holder, Tensor):
                holder.data.copy_(before)
            else:
                holder[... if isinstance(holder, np.ndarray) else slice(None)] = before
    return changed


def _are_the_same(before: Any, now: Any) -> bool:
    if isinstance(before, (Tensor, np.ndarray)):
        return same_values(before, now) if isinstance(before, Tensor) else before.tobytes() == now.tobytes()
    if isinstance(now, int) or len(before) != len(now):
        return False
    if isinstance(before, set):
        return bool(before == now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(now[key] is value for key, value in before.items())
    return all(one is other for one, other in zip(before, now, strict=True))


def _cut_back(holder: Any, size: int) -> None:
    if isinstance(holder, CachedFunction):
        holder.cache_clear()
    elif isinstance(holder, dict):
        for key in list(islice(holder, size, None)):
            del holder[key]
    else:
        del holder[size:]


def _holders(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield everything mutable that ``roots`` and user functions reach.

    This includes dicts, lists, cached functions, and the `Space` of each object, class and function from outside
    libraries. A `_Stream` represents each iterator and file.
    """
    waiting, seen = deque(roots), set[int]()
    while waiting and len(seen) < _REACHED:  # the nearest first
        value = waiting.popleft()
        if _is_small(value) and id(value) not in seen:
            yield value
        if id(value) in seen or isinstance(value, HOLD_NO_CODE):
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS or isinstance(value, CachedFunction):
            yield value
        if hasattr(type(value), "__next__") and type(value) not in ProxyTypes:  # files have it too
            yield _Stream()
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            waiting += islice(value.values() if isinstance(value, dict) else value, _LOOKED_INTO)
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting += [value.__self__, value.__func__]
        elif isinstance(value, CachedFunction):
            waiting.append(value.__wrapped__)
        elif isinstance(value, FunctionType):
            if (wrapped := inside_of(value)) is not None:
                waiting.append(wrapped)
            elif not is_library(value.__module__):
                yield Space(value)
                waiting += [read for _, read in reads_of(value)]
        elif not isinstance(value, ModuleType):
            kinds = value.__mro__ if isinstance(value, type) else [value, *type(value).__mro__]
            own = [kind for kind in kinds if not isinstance(kind, type) or not is_library(kind.__module__)]
            waiting += [each for kind in own for each in (dict_of(kind) or {}).values()]
            if own and not is_library(getattr(value, "__module__", None) or type(value).__module__):
                yield Space(value)


class _Stream:
    """Represents an iterator or a file, whose position cannot be restored."""


def _is_small(value: Any) -> bool:
    """Return whether a value is a writeable tensor or array that is cheap to copy."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and value.nbytes <= _BYTES
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    if value.is_meta or value.is_inference() or value.is_quantized or value.is_nested:
        return False
    return value.numel() * value.element_size() <= _BYTES


def refuse_other_rows() -> NoReturn:
    """Refuse a data set whose rows of a unit depend on the unit that was requested before it."""
    raise DataError(
        "The training data set returns other rows for a unit if another unit was requested before it, which no "
        "clipping bounds. Make its rows depend only on the requested index (datamodule.train_dataloader).",
        trap="T38",
    )
