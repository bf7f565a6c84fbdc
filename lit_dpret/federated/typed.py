"""Frozen dataclasses out of plain mappings: every key known, every value of its type, what is wrong named in full."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lit_dpret.errors import ConfigurationError

T = TypeVar("T")


def built(kind: type[T], found: object, where: str) -> T:
    """An instance of a dataclass of a mapping, and of mappings in it.

    Guarantees:
        - A key that is not known, or is missing and has no default, is refused by its full name, as is a value of
          another type. Numbers may be written as YAML writes them badly (``3e-5``, which it takes for a word).

    Args:
        kind: The dataclass; its fields are words, numbers, switches, paths, choices, other dataclasses, or null.
        found: A mapping; null is an empty one.
        where: Put before each name in messages.

    Raises:
        ConfigurationError: Naming the key.
    """
    if found is None:
        found = {}
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{where} is {found!r}, and settings by name are needed.")
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]
    for key in found:
        if key not in known:
            raise ConfigurationError(f"{where}.{key} is not known; there are {', '.join(known)}.")
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in found:
            values[name] = _value(hints[name], found[name], f"{where}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigurationError(f"{where}.{name} is missing.")
    return kind(**values)


def plain(value: Any) -> Any:
    """A dataclass, or whatever is in one, as mappings and plain values that YAML and `built` read back."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _value(hint: Any, found: Any, where: str) -> Any:
    origin, choices = get_origin(hint), get_args(hint)
    if hint is Any:
        return found
    if origin in (Union, types.UnionType):
        if found is None and type(None) in choices:
            return None
        return _value(next(one for one in choices if one is not type(None)), found, where)
    if origin is Literal:
        if found not in choices:
            raise ConfigurationError(f"{where}={found!r} is not one of {', '.join(map(str, choices))}.")
        return found
    if origin is tuple and isinstance(found, list | tuple):
        return tuple(_value(choices[0], one, where) for one in found)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(found, Mapping):
        return {str(key): _value(choices[1], one, f"{where}.{key}") for key, one in found.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return built(hint, found, where)
    if hint is Path and isinstance(found, str) and found:
        return Path(found).expanduser()
    if hint is float and not isinstance(found, bool) and isinstance(found, int | float | str):
        try:
            return float(found)
        except ValueError:
            pass
    if isinstance(hint, type) and type(found) is hint:
        return found
    raise ConfigurationError(f"{where}={found!r} is no {getattr(hint, '__name__', hint)}.")
