"""Detect whether products of float32 matrices use full float32, and enable it temporarily.

PyTorch has two interfaces for this: ``torch.set_float32_matmul_precision`` (for cuDNN ``allow_tf32``), and since 2.9
``fp32_precision`` of its backends. After the second is used, reading the first raises a RuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_PRODUCTS = ("cuda.matmul", "mkldnn.matmul")
# CPU only; cuDNN's operations are shortened by default, and a private step computes them in full.
_OTHERS = ("mkldnn.conv", "mkldnn.rnn")
_CUDNN = ("cudnn.conv", "cudnn.rnn")
_WHOLE = ("none", "ieee")


def shortened_products() -> str | None:
    """Return the setting that reduces the precision of float32 products; None if there is none."""
    legacy = _said(torch.get_float32_matmul_precision)
    if legacy not in (None, "highest"):
        return f"torch.set_float32_matmul_precision({legacy!r})"
    for name in (*_PRODUCTS, *_OTHERS):
        if _precision(name) not in _WHOLE:
            return f"torch.backends.{name}.fp32_precision={_precision(name)!r}"
    return None


@contextmanager
def whole_products() -> Iterator[None]:
    """Compute products of float32 matrices in full precision; restore the setting, however it was set."""
    with _whole(_PRODUCTS, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"):
        yield


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Compute products of float32 matrices in full precision, outside the caller's autocast as well."""
    autocast = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if autocast else nullcontext(), whole_products():
        yield


@contextmanager
def whole_convolutions() -> Iterator[None]:
    """Compute cuDNN operations in full precision, likewise."""
    cudnn = torch.backends.cudnn
    with _whole(_CUDNN, lambda: cudnn.allow_tf32, lambda value: setattr(cudnn, "allow_tf32", value), False):
        yield


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let CUDA round the factors of float32 matrices to TF32, even inside `whole_products`."""
    matmul: Any = torch.backends.cuda.matmul
    setting, short = ("fp32_precision", "tf32") if hasattr(torch.backends, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, setting)
    setattr(matmul, setting, short)
    try:
        yield
    finally:
        setattr(matmul, setting, before)


@contextmanager
def _whole(names: Sequence[str], get: Callable[[], Any], put: Callable[[Any], None], whole: Any) -> Iterator[None]:
    """Set full precision in both interfaces: through ``get`` and ``put``, with value ``whole``, and by backend
    ``names``.
    """
    said, before = _said(get), {name: _precision(name) for name in names}
    if said == whole and all(
        value in _WHOLE for value in before.values()
    ):  # the usual case; searches for one query are short
        yield
        return
    put(whole)
    for name in names:
        if _precision(name) not in _WHOLE:  # inherited from a setting for all backends, which `put` leaves
            _backend(name).fp32_precision = "ieee"
    try:
        yield
    finally:
        if said is not None:
            put(said)
        for name, value in before.items():
            if _precision(name) != value:
                _backend(name).fp32_precision = value


def _said(first_way: Callable[[], Any]) -> Any:
    """Return the value of the first interface; None if the second was used since."""
    try:
        return first_way()
    except RuntimeError:
        return None


def _backend(name: str) -> Any:
    family, kind = name.split(".")
    return getattr(getattr(torch.backends, family), kind, None)


def _precision(name: str) -> str:
    return getattr(_backend(name), "fp32_precision", "none")
