"""Find rows of the training among other rows, by what they hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from lit_dpret.privacy.content import digest_of_row, is_number, rows_of_batch
from lit_dpret.privacy.user_generators import kept_generators, seed_everywhere

_NOT_SETS = (str, bytes, list, tuple, Mapping, set, range, Tensor, np.ndarray, nn.Module, IterableDataset)


def count_equal_rows(loader: Any, data: Any) -> tuple[int, bool]:
    """Count the rows of ``loader`` that are rows of the training data set, its held-out ones included.

    A row is compared as the loader's data set gives it, and as each one behind that does (`Subset`, `ConcatDataset`,
    and attributes that hold a data set of the same length), which finds it before a transform; and as it lies in
    attributes that hold a value for each row, such as ``data`` of torchvision's. Data sets of Hugging Face that are
    parts of one Arrow table are parts of one set. Of a loader without a data set, the rows of its batches are compared.
    Single numbers, such as labels, are left out.

    Returns:
        How many there are, and whether every row could be compared.

    Guarantees:
        - The global generators are as before.
    """
    with kept_generators():
        seed_everywhere(0)
        trained = [*_sets_behind(getattr(data, "dataset", None))]
        found = [*_forms_of(loader, {id(each) for each in trained}.union(*map(_buffers, trained)))]
        wanted = {form for forms in found for form in forms or ()}
        met = wanted.intersection(_forms_trained_on(trained, data)) if wanted else set()
    equal = sum(forms is None or not met.isdisjoint(forms) for forms in found)
    return equal, bool(found) and all(forms is None or forms for forms in found)


def _forms_of(loader: Any, own: set[int]) -> Iterator[set[bytes] | None]:
    """Yield the digests of each row in all its forms, none where they are unknown; None if one of ``own`` gives it."""
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        part = cache(lambda number: not own.isdisjoint(_buffers(known[number])))
        known: dict[int, Any] = {}
        for index in range(len(dataset)):
            places = [*_places(dataset, index)]
            known |= {id(each): each for each, _ in places}
            same = any(id(each) in own or part(id(each)) for each, _ in places)
            yield None if same else {form for each, at in places for form in _forms(each, at)}
        return
    for given in loader if dataset is None else dataset:
        rows = rows_of_batch(given) if dataset is None else [given]
        yield from [set()] if rows is None else ({form for form in [digest_of_row(row)] if form} for row in rows)


def _forms_trained_on(trained: list[Any], data: Any) -> Iterator[bytes]:
    for each in trained:
        if not isinstance(each, (Subset, ConcatDataset)):  # which give the rows of others
            for index in range(len(each)):
                yield from _forms(each, index)
    if not trained:
        units = data.train_units()
        for unit in range(len(units)):
            yield from (form for form in map(digest_of_row, units.rows(unit)) if form)


def _forms(dataset: Any, index: int) -> Iterator[bytes]:
    """Yield the digests of a row as the data set gives it, and as it lies in columns; of what can be read."""
    row = ()
    with suppress(Exception):  # a row that nobody asks for may be a broken one
        row = dataset[index]
    columns = [value for value in _attributes(dataset) if isinstance(value, (list, tuple, Tensor, np.ndarray))]
    raw = [value[index] for value in columns if getattr(value, "ndim", 1) and len(value) == len(dataset)]
    for form in (row, [value for value in raw if not is_number(value)]):
        if (digest := digest_of_row(form)) is not None:
            yield digest


def _places(dataset: Any, index: int, seen: tuple[int, ...] = ()) -> Iterator[tuple[Any, int]]:
    """Yield each data set that a row comes through, and its number there, as far as that is known."""
    yield dataset, index
    if isinstance(dataset, Subset):
        yield from _places(dataset.dataset, int(dataset.indices[index]), seen)
    elif isinstance(dataset, ConcatDataset):
        part = bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        yield from _places(dataset.datasets[part], index - before, seen)
    else:
        for inner in _inner(dataset):
            if id(inner) not in seen and len(inner) == len(dataset):
                yield from _places(inner, index, (*seen, id(dataset)))


def _buffers(dataset: Any) -> set[int]:
    """Return where the Arrow table of a data set of Hugging Face lies in memory, which its parts share."""
    table: Any = getattr(getattr(dataset, "data", None), "table", None)
    chunks = () if not hasattr(table, "itercolumns") else (c for column in table.itercolumns() for c in column.chunks)
    return {each.address for chunk in chunks for each in chunk.buffers() if each is not None and each.size}


def _sets_behind(dataset: Any) -> Iterator[Any]:
    """Yield a data set and all those that it holds, at any depth."""
    seen: set[int] = set()
    left = [] if dataset is None else [dataset]
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left.extend(_inner(each))


def _inner(dataset: Any) -> list[Any]:
    held: list[Any] = []
    for value in _attributes(dataset):
        several = isinstance(value, (list, tuple)) and 0 < len(value) <= 100
        held.extend(each for each in (value if several else [value]) if isinstance(each, Dataset) or not several)
    return [each for each in held if _is_set(each)]


def _attributes(dataset: Any) -> list[Any]:
    return [*getattr(dataset, "__dict__", {}).values()]


def _is_set(value: Any) -> bool:
    rows = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    return rows and not isinstance(value, (type, *_NOT_SETS))
