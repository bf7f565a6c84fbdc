"""Refuse data and collations of which whoever comes first decides what all others are made of.

A vocabulary that grows, or a scale that is set at the first call, is made of private rows: one unit changes all others.
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
#: So many rows or units are asked for, and so many objects are looked at for what they hold.
FIRST, _REACHED = 8, 5_000
#: Of a longer container only what it grows by is put back, and only so many of its values are looked into.
_COPIED, _LOOKED_INTO, _BYTES = 10_000, 64, 1 << 16
#: Others of their kind may be filled in another way, or not at all.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


def refuse_first_come(module: Any, data: Any) -> None:
    """Refuse rows and a ``collate_rows`` that depend on the order of requests, such as a growing vocabulary.

    Containers, attributes, closures and globals that the user's code reaches are put back between two rounds in which
    the first rows come in opposite orders, unless an iterator or a file is among them, which nothing puts back. This
    runs before anything else reads the rows; what was set earlier is not seen.

    Numbers that change as rows are read, such as a count of tokens, tell of the rows: a warning names them. They are
    not put back while the run trains: the place in a file may be one, and belongs to what was read there.
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
    pairs = [found[at : at + 2] for at in range(0, len(found), 2)]  # a scale of a single row may be no number
    if depends_on_the_first([module], [partial(module.collate_rows, pair) for pair in pairs], numbers):
        raise UnsupportedModelError(
            f"privacy={module.privacy.name} cannot train {type(module).__name__}: the output of collate_rows for a "
            "row depends on the rows of earlier calls, as by a vocabulary or a running mean, so one unit affects all "
            "later ones. Build lookup tables and scales from public texts beforehand.",
            trap="T11",
        )
    public = getattr(module, "public_metrics", ())
    if names := ", ".join(sorted(name for name in numbers if name.rpartition(".")[2] not in public)):
        rank_zero_warn(
            f"Reading rows changes {names}, which tells of private rows. The card trusts that no schedule, optimizer "
            "or callback reads it. To count, use trainer.global_step. If no private row is behind it, list its name in "
            "public_metrics of the module."
        )


def depends_on_the_first(
    roots: Sequence[Any], calls: Sequence[Callable[[], Any]], numbers: set[str] | None = None
) -> bool:
    """Return whether the results of ``calls`` depend on their order, by what ``roots`` reach and they change.

    To ``numbers`` are added the names of those that they change.
    """
    found = list(_holders(roots))
    held = [(each, _read(each)) for each in found if not isinstance(each, _Stream)]
    moves_on = len(held) < len(found)
    with kept_generators():
        forward = [_answer(number, call) for number, call in enumerate(calls)]
        if numbers is not None:
            numbers |= {name for holder, before in held for name in _changed_numbers(holder, before)}
        if not moves_on and not _put_back(held):
            return False
        backward = [_answer(number, call) for number, call in reversed(list(enumerate(calls)))]
        if forward == backward[::-1]:
            return False  # what this round leaves stays: whatever else belongs to it, the user's code left both
        if not moves_on:
            _put_back(held)
    return True


def _answer(number: int, call: Callable[[], Any]) -> bytes | None:
    seed_everywhere(number)
    return readable_content([call()])


def _read(holder: Any) -> Any:
    """Return what a container or a `Space` holds; of a long container its length."""
    if isinstance(holder, CachedFunction):
        return holder.cache_info().currsize
    if isinstance(holder, Space):
        return holder.read()
    if isinstance(holder, Tensor):
        return holder.detach().clone()
    return holder.copy() if isinstance(holder, np.ndarray) or len(holder) <= _COPIED else len(holder)


def _changed_numbers(holder: Any, before: Any) -> Iterator[str]:
    if isinstance(holder, Space):
        for name, value in holder.read().items():
            if isinstance(value, _NUMBERS) and before.get(name, before) is not value:
                yield f"{holder.name}.{name}"


def _put_back(held: Sequence[tuple[Any, Any]]) -> bool:
    """Let holders hold what they held; return whether one of them held something else."""
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
    """Yield what ``roots`` and the user's functions reach that may come to hold something else.

    Dicts, lists, cached functions, and the `Space` of each object, class and function that is not a library's; a
    `_Stream` for each iterator and file.
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
        if hasattr(type(value), "__next__") and type(value) not in ProxyTypes:  # files have it as well
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
    """Stands for an iterator or a file, whose place nothing can put back."""


def _is_small(value: Any) -> bool:
    """Return whether a value is a tensor or an array that is written in place at little cost."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and value.nbytes <= _BYTES
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    if value.is_meta or value.is_inference() or value.is_quantized or value.is_nested:
        return False
    return value.numel() * value.element_size() <= _BYTES


def refuse_other_rows() -> NoReturn:
    """Refuse a data set whose rows of a unit follow from which unit was asked for before it."""
    raise DataError(
        "The training data set gives other rows for a unit when another one was requested before it, so one unit "
        "affects the training rows of others, which no clipping bounds. Its rows must depend only on the requested "
        "number: build a vocabulary, for example, from public texts beforehand (datamodule.train_dataloader).",
        trap="T38",
    )
