"""Serialise rows of any data set so that equal rows give equal bytes."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import UserDict
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import DataError, first_line
from lit_dpret.privacy.user_code import is_installed


class _ByValue(pickle.Pickler):
    """Pickle equal values into equal bytes, whatever device a tensor is on or order a set has in this process."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            dense = value.detach().cpu().resolve_conj().resolve_neg()
            dense = dense.dequantize() if dense.is_quantized else dense
            dense = (dense if dense.layout == torch.strided else dense.to_dense()).contiguous()
            # Through bytes, because numpy has no bfloat16.
            flat = dense.reshape(-1).view(torch.uint8) if dense.numel() else dense.new_empty(0, dtype=torch.uint8)
            return ("tensor", str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return ("array", str(value.dtype), value.shape, value.tobytes())
        if isinstance(value, (set, frozenset)):
            return ("set", sorted(content_of(each) for each in value))
        if isinstance(value, type):  # a class defined in a function cannot be found by its name
            return ("class", value.__module__, value.__qualname__)
        return None

    def reducer_override(self, value: Any) -> Any:
        """Refuse an object whose own class decides what is pickled: that may be an index alone."""
        for name in ("__reduce__", "__reduce_ex__", "__getstate__"):
            method = getattr(type(value), name, None)
            if not is_installed(getattr(method, "__module__", None)) and method is not getattr(object, name, None):
                raise pickle.PicklingError(f"{type(value).__name__}.{name} decides what is pickled of it")
        return NotImplemented


def content_of(value: Any) -> bytes:
    """Return bytes that are the same for equal values, also in another process."""
    # Without a memo, in which two equal texts differ from one text held twice; but an object that contains itself needs
    # one.
    for fast in (True, False):
        written = io.BytesIO()
        pickler = _ByValue(written, protocol=5)
        pickler.fast = fast
        try:
            pickler.dump(value)
            break
        except (ValueError, RecursionError):
            if not fast:
                raise
    return written.getvalue()


def digest_of_row(row: Any) -> bytes | None:
    """Return a digest of a row's values, whatever containers and kind of array hold them; None if it cannot be read.

    Single numbers, such as labels, take part only if the row holds nothing else.
    """
    try:
        leaves = [*_leaves(row)]
        parts = [content_of(_as_array(leaf)) for leaf in leaves if not is_number(leaf)]
        parts = parts or [content_of(leaf.item() if hasattr(leaf, "item") else leaf) for leaf in leaves]
    except Exception:  # of an object that cannot be pickled
        return None
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.digest() if parts else None


def rows_of_batch(batch: Any) -> list[Any] | None:
    """Return the rows of a batch from `default_collate`, without numbers of the whole batch; None for any other batch.

    Each row is a tuple with a value of each column.
    """
    columns: list[Any] = []
    for leaf in _leaves(batch, lists=False):
        if isinstance(leaf, (list, tuple)) or (isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim):
            columns.append(leaf)
        elif not is_number(leaf):
            return None
    if not columns or len({len(column) for column in columns}) > 1:
        return None
    return [*zip(*columns, strict=True)]


def _leaves(value: Any, *, lists: bool = True) -> Iterator[Any]:
    """Yield the values in dicts, lists and tuples; without ``lists``, a column (a list of texts or numbers) is one."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], lists=lists)
    elif isinstance(value, (list, tuple)) and (
        lists or not all(isinstance(v, (str, bytes, int, float)) for v in value)
    ):
        for each in value:
            yield from _leaves(each, lists=lists)
    else:
        yield value


def is_number(leaf: Any) -> bool:
    """Return whether a value is a single number or None, in whatever form: a label, or a number of a row."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return (leaf.numel() if isinstance(leaf, Tensor) else leaf.size) == 1
    return leaf is None or isinstance(leaf, (bool, int, float, complex, np.generic))


def _as_array(leaf: Any) -> Any:
    """Return a tensor as the array that it may be in another data set."""
    if (
        not isinstance(leaf, Tensor)
        or leaf.layout != torch.strided
        or leaf.is_quantized
        or leaf.dtype == torch.bfloat16
    ):
        return leaf
    return leaf.detach().cpu().resolve_conj().resolve_neg().numpy()


def copied_row(value: Any) -> Any:
    """Return a row whose tensors and arrays have their own memory, in plain containers and dataclasses.

    Other objects are not copied.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (tuple, list):
        return type(value)(map(copied_row, value))
    if isinstance(value, tuple) and (make := getattr(type(value), "_make", None)) is not None:  # a named tuple
        return make(map(copied_row, value))
    if type(value) is dict:
        return {name: copied_row(each) for name, each in value.items()}
    if isinstance(value, UserDict):  # as tokenizers of transformers return
        mapping = copy(value)
        mapping.data = copied_row(value.data)
        return mapping
    if is_dataclass(value) and not isinstance(value, type):
        found: Any = copy(value)
        for field in fields(value):
            object.__setattr__(found, field.name, copied_row(getattr(value, field.name)))  # also for a frozen one
        return found
    return copy(value) if isinstance(value, (dict, list, io.BytesIO, io.StringIO)) else value


def readable_content(rows: Any) -> bytes | None:
    """Return the content of some rows; None if they cannot be read (`content_of_rows`)."""
    try:
        return content_of(list(rows))
    except Exception:
        return None


def content_of_rows(rows: Any) -> bytes:
    """Return the content of rows of a training data set; refuse rows whose content cannot be compared."""
    try:
        return content_of(rows)
    except Exception as error:
        raise DataError(
            f"The rows of the training data set cannot be compared ({type(error).__name__}: {first_line(error)}), so "
            "nothing shows whether they stay the same, and whose they are. Let it return tensors, arrays, strings "
            "and numbers, in tuples, dicts or plain objects, without locks, connections, or a custom __reduce__ or "
            "__getstate__.",
            trap="T38",
        ) from error
