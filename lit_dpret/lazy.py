"""Package names that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports a public name's submodule at its first use.

    Args:
        package: the package's ``__name__``.
        modules: the submodule, without the package's name, that holds each public name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package} has no attribute {name}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
