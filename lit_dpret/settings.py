"""Settings objects: refuse single settings by name; read settings from plain mappings and write them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from lit_dpret.errors import ConfigurationError


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; true and false, which Python treats as 1 and 0, are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number, including NaN and infinity; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_choice(knob: str, value: object, choices: Collection[str]) -> None:
    """Refuse ``value`` unless it is one of ``choices``; ``knob`` is its name on the command line."""
    if value not in choices:
        raise ConfigurationError(f"{knob}={value!r} is not one of {', '.join(choices)}.")


def require_switch(where: str, settings: object, *names: str) -> None:
    """Refuse settings that are not booleans; ``where`` comes before each name in the message."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise ConfigurationError(f"{where}.{name}={value!r} must be true or false.")


def require_whole(where: str, settings: object, least: int, *names: str, null: bool = False) -> None:
    """Refuse settings that are not whole numbers of at least ``least``; null passes if ``null`` allows it.

    ``settings`` is an object with attributes ``names``, or a mapping of which all values are checked; ``where`` comes
    before each name in the message.
    """
    for name, value in _named(settings, names):
        wrong = not is_whole(value) or value < least
        if wrong and not (null and value is None):
            raise ConfigurationError(
                f"{where}.{name}={value!r} must be an integer of at least {least}{', or null' if null else ''}."
            )


def require_number(where: str, settings: object, *names: str, zero: bool = False, null: bool = False) -> None:
    """Refuse settings, given as to `require_whole`, that are not positive and finite; 0 or null pass where allowed."""
    for name, value in _named(settings, names):
        wrong = not is_number(value) or not 0 <= value < float("inf")
        if (wrong or (value == 0 and not zero)) and not (null and value is None):
            raise ConfigurationError(
                f"{where}.{name}={value!r} must be a positive, finite number{', or 0' if zero else ''}"
                f"{', or null' if null else ''}."
            )


@dataclass(frozen=True)
class Least:
    """The minimum of a whole number, in the annotation of a field of `Settings`."""

    value: int


Natural = Annotated[int, Least(0)]
Count = Annotated[int, Least(1)]


def settle(settings: Any, where: str = "task") -> None:
    """Refuse fields that their annotations rule out (`Least`, ``Literal``), and convert texts to annotated paths."""
    hints = get_type_hints(type(settings), include_extras=True)
    for name in (one.name for one in fields(settings)):
        hint, value = hints[name], getattr(settings, name)
        options = set(get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,))
        if len(options - {type(None)}) > 1 or (value is None and type(None) in options):
            continue
        (kind,) = options - {type(None)}
        if kind is Path:
            object.__setattr__(settings, name, Path(value).expanduser())  # works for a frozen class, too
        elif get_origin(kind) is Literal:
            require_choice(f"{where}.{name}", value, get_args(kind))
        for bound in getattr(kind, "__metadata__", ()):
            require_whole(where, settings, bound.value, name, null=type(None) in options)


@dataclass(kw_only=True)
class Settings:
    """The settings of a task, checked by their annotations."""

    def __post_init__(self) -> None:
        settle(self)


def batch_among(batch: int | None, n: int, units: str = "the number of units") -> int:
    """Return the expected batch size; refuse one that is missing or above ``n``, which an error calls ``units``."""
    if batch is None:
        raise ConfigurationError("Neither datamodule.expected_batch_size nor datamodule.sample_rate is given: set one.")
    if batch > n:
        raise ConfigurationError(f"datamodule.expected_batch_size={batch} exceeds {units} of the data set. Lower it.")
    return batch


def _named(settings: object, names: Sequence[str]) -> Iterable[tuple[str, Any]]:
    return settings.items() if isinstance(settings, Mapping) else [(name, getattr(settings, name)) for name in names]


def picked(settings: object, *names: str) -> dict[str, Any]:
    """Return some settings by name, to pass on."""
    return {name: getattr(settings, name) for name in names}


T = TypeVar("T")
P = ParamSpec("P")


#: Names of an argument in other libraries or in other spellings.
_SYNONYMS = {
    "epsilon": "eps", "target_epsilon": "eps", "target_eps": "eps", "target_delta": "delta",
    "neighbors": "neighbours", "neighboring": "neighbours", "sigma": "noise_multiplier",
    "max_norm": "max_grad_norm", "clip_norm": "max_grad_norm", "l2_norm_clip": "max_grad_norm",
    "clipping": "clip", "grad_sample_mode": "engine", "secure_mode": "secure_rng",
    "loss": "per_row_loss", "loss_fn": "per_row_loss", "criterion": "per_row_loss", "model": "module",
}  # fmt: skip


def naming_arguments(
    name: str, advice: Mapping[str, str], rest: Callable[..., Any] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that refuses unknown, missing and nameless arguments with a `ConfigurationError`.

    ``advice`` describes each needed argument, and says where the value of an unknown one belongs; ``rest`` is the
    callable that receives the function's ``**kwargs``.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        takes = [one for key, one in signature.parameters.items() if key != "self"]
        listed = [one.name for one in takes if one.kind is not Parameter.VAR_KEYWORD]
        passed_on = [key for key in (inspect.signature(rest).parameters if rest else ()) if key not in listed]

        def refuse_unknown(key: str) -> None:
            known, meant = [*listed, *passed_on], _SYNONYMS.get(key, key)
            if meant in advice and meant not in known:
                raise ConfigurationError(f"{name} takes no {key}: {advice[meant]}.")
            near = [meant] if meant in known else get_close_matches(key, known, n=1)
            of_rest = f", and those of {getattr(rest, '__name__', rest)}: {', '.join(passed_on)}" if rest else ""
            raise ConfigurationError(
                f"{name} takes no {key}{f'; did you mean {near[0]}?' if near else '.'} Its arguments are "
                f"{', '.join(listed)}{of_rest}."
            )

        @wraps(function)
        def checked(*args: P.args, **named: P.kwargs) -> T:
            for key in sorted(named.keys() - {*listed, *passed_on}):
                refuse_unknown(key)
            try:
                given = signature.bind_partial(*args, **named).arguments
            except TypeError as error:
                raise ConfigurationError(
                    f"{name}: {error}. Give its arguments by name: {', '.join(listed)}."
                ) from error
            for one in takes:
                if one.name in listed and one.default is Parameter.empty and one.name not in given:
                    raise ConfigurationError(f"{name} needs {one.name}: {advice.get(one.name, 'it has no default')}.")
            return function(*args, **named)

        return checked

    return decorate


def built(kind: type[T], found: object, where: str) -> T:
    """Build a dataclass, including nested ones, from a mapping; null is an empty mapping.

    Refuse unknown keys, missing keys and values of another type by their full name, which begins with ``where``.
    ``3e-5``, which YAML reads as a string, counts as a number.

    Raises:
        ConfigurationError: Naming the key.
    """
    if found is None:
        found = {}
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{where}={found!r} must be a mapping of settings by name.")
    hints = get_type_hints(kind)
    known = {one.name: one for one in fields(kind) if one.init}  # type: ignore[arg-type]
    for key in found:
        if key not in known:
            raise ConfigurationError(f"{where}.{key} is not a setting. The settings are {', '.join(known)}.")
    values: dict[str, Any] = {}
    for name, one in known.items():
        if name in found:
            values[name] = _value(hints[name], found[name], f"{where}.{name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ConfigurationError(f"{where}.{name} is missing.")
    return kind(**values)


def plain(value: Any) -> Any:
    """Return a dataclass, or a value in one, as mappings and plain values readable by YAML and `built`."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value) if one.init}
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
    raise ConfigurationError(f"{where}={found!r} must be of type {getattr(hint, '__name__', hint)}.")
