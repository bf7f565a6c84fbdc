"""Serialise rows of any data set so that equal rows give equal bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor


class _ByValue(pickle.Pickler):
    """Pickle what is equal into equal bytes: wherever a tensor lies, whatever order a set has in this process."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            dense = value.detach().cpu().resolve_conj().resolve_neg()
            dense = dense.dequantize() if dense.is_quantized else dense
            dense = (dense if dense.layout == torch.strided else dense.to_dense()).contiguous()
            # Through bytes, for numpy has no bfloat16.
            flat = dense.reshape(-1).view(torch.uint8) if dense.numel() else dense.new_empty(0, dtype=torch.uint8)
            return ("tensor", str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return ("array", str(value.dtype), value.shape, value.tobytes())
        if isinstance(value, (set, frozenset)):
            return ("set", sorted(content_of(each) for each in value))
        if isinstance(value, type):  # a class of a function cannot be found again by its name
            return ("class", value.__module__, value.__qualname__)
        return None


def content_of(value: Any) -> bytes:
    """Return bytes that are the same for equal values, also in another process."""
    # Without a memo, in which two equal texts differ from one text held twice; but what holds itself needs one.
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
