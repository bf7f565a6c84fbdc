"""Imports at first use: names of a package (PEP 562), and optional packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from shlex import quote
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports the submodule of a public name on first use."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package} has no attribute {name}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get


def optional(module: str, user: str, install: str, *, package: str = "", instead: str = "") -> Any:
    """Import a module of an optional package that ``user``, such as a setting, needs; refuse if it is missing.

    The refusal names ``package`` if that differs from the module, the ``install`` argument for pip, and what to do
    ``instead``.
    """
    try:
        return import_module(module)
    except ImportError as error:
        from lit_dpret.errors import ConfigurationError  # importing `lazy_names` alone loads nothing

        raise ConfigurationError(
            f"{user} needs {package or module}, which is not installed. Run: pip install {quote(install)}."
            f"{instead and f' {instead}'}"
        ) from error
