"""Refuse a value of a configuration whose type its constructor's annotation rules out."""

from __future__ import annotations

import re
from inspect import signature
from types import UnionType
from typing import Any, Union, get_args, get_origin

from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import OmegaConf

from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import is_number
from lit_dpret.tasks.parts import check_output


def check_types(node: Any, place: str) -> None:
    """Refuse a value whose type the constructor's annotation rules out: Python takes true for 1, any text for true."""
    found: Any = OmegaConf.to_container(node, resolve=True)

    def check(node: Any, place: str) -> None:
        if not isinstance(node, dict):
            return
        try:
            made: Any = get_object(node["_target_"]) if "_target_" in node else lambda: None
            # A constructor may pass its ``**kwargs`` on to its base.
            bases = reversed(made.__mro__) if isinstance(made, type) else ()
            makers: list[Any] = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)] or [made]
            parameters = {name: one for maker in makers for name, one in signature(maker).parameters.items()}
        except (ImportError, AttributeError, TypeError, ValueError, HydraException):
            parameters = {}  # instantiation reports the problem
        for key, value in node.items():
            if key in parameters and value != "???":
                check_type(f"{place}.{key}", value, parameters[key].annotation)
            check(value, f"{place}.{key}")

    check(found, place)


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Refuse a value where the annotation allows nothing but numbers, true and false, texts, lists or mappings."""
    kinds = _kinds(annotation) - {"None", "NoneType"}
    outputs = kinds & {"OutputFile", "OutputFolder"}
    kinds = kinds - outputs | ({"Path"} if outputs else set())
    if value is None or not kinds or (isinstance(value, dict) and "_target_" in value):  # an object, made later
        return
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    lists, mappings = ("Sequence[", "list[", "tuple["), ("Mapping[", "dict[")
    if kinds <= {"int", "float"} and not is_number(value):
        raise ConfigurationError(f"{name}={shown} must be a number.")
    if kinds == {"int"} and isinstance(value, float) and not value.is_integer():
        raise ConfigurationError(f"{name}={shown} must be a whole number.")
    if kinds == {"bool"} and not isinstance(value, bool):
        raise ConfigurationError(f"{name}={shown} must be true or false.")
    if kinds <= {"str", "Path"} and isinstance(value, list | dict):
        raise ConfigurationError(f"{name}={shown} must be a single text.")
    if kinds <= {"str", "Path"} and "Path" in kinds and isinstance(value, bool | int | float):
        raise ConfigurationError(f"{name}={shown} must be a path, written as text: \"{name}='{value}'\".")
    if outputs and isinstance(value, str):
        check_output(name, value, folder="OutputFolder" in outputs)
    if all(kind.startswith(lists) for kind in kinds) and not isinstance(value, list):
        one = f": {name}=[{value}]" if isinstance(value, bool | int | float | str) else ""
        raise ConfigurationError(f"{name}={shown} must be a list{one}.")
    if all(kind.startswith(mappings) for kind in kinds) and not isinstance(value, dict):
        raise ConfigurationError(f"{name}={shown} must be a mapping: '{name}={{NAME: VALUE}}'.")


def _kinds(annotation: Any) -> set[str]:
    """Return the alternatives of an annotation, as they are written in the code."""
    if not isinstance(annotation, str):
        several = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        return {one.__name__ if isinstance(one, type) else str(one) for one in several}
    return set(re.split(r" \| (?![^\[]*\])", annotation))  # bars inside brackets belong to the element type
