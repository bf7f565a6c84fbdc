"""Work that takes a third of the time of each tiny fit and does not affect what the tests check.

Imported by path through ``conftest.py``, and by programs that run fits in separate processes; not a test.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from typing import Any


def leave_out(put: Callable[[Any, str, Any], None]) -> None:
    """Replace this work by ``put(object, name, value)``, in those of its modules that are loaded.

    - Written data survive a killed process without a disk sync; `os.fstat` still refuses a closed file.
    - `torch.manual_seed` keeps a traceback for each kind of device that is missing.
    - Each Trainer searches all installed packages for callbacks.
    - Each composition parses a dozen YAML files in Python, although libyaml gives the same result.
    - Collecting garbage after running out of memory takes long among all other tests.
    - Hydra composes each command twice, first to see whether it sets ``hydra.mode``, and builds a mapping for each
      list of defaults that only a default with an interpolation needs.
    - The package caches few privacy losses, since they may be large; tests of one plan use them in turn.
    """
    put(os, "fsync", os.fstat)
    if (torch := sys.modules.get("torch")) is not None:
        for kind in ("cuda", "xpu", "mtia"):
            if not getattr(torch, kind).is_available():
                put(getattr(torch, kind), "manual_seed_all", lambda seed: None)
    if (yaml := sys.modules.get("yaml")) is not None and hasattr(yaml, "CSafeLoader"):
        put(yaml, "SafeLoader", yaml.CSafeLoader)
    if (physical := sys.modules.get("lit_dpret.modules.physical_batches")) is not None:
        put(physical, "give_back_memory", lambda: None)
    if (hydra := sys.modules.get("hydra._internal.hydra")) is not None:
        put(hydra.Hydra, "get_mode", _mode_by(hydra.Hydra.get_mode))
    if (defaults := sys.modules.get("hydra._internal.defaults_list")) is not None:
        put(defaults, "_create_interpolation_map", _map_by(defaults._create_interpolation_map))
    if (packaged := sys.modules.get("hydra._internal.core_plugins.importlib_resources_config_source")) is not None:
        source = packaged.ImportlibResourcesConfigSource
        put(source, "_read_config", _read_by(source._read_config))
    for name, kept in (("composition", ("_one_step_pld", "_part_pld", "composed_pld")), ("groups", ("_composed",))):
        if (accounting := sys.modules.get(f"lit_dpret.privacy.accounting.{name}")) is not None:
            for function in kept:
                again = getattr(accounting, function).__wrapped__
                put(accounting, function, functools.lru_cache(maxsize=64)(again))
    if (groups := sys.modules.get("lit_dpret.privacy.accounting.groups")) is not None:
        put(groups, "_composed_epsilon", _once_by_width(groups, groups._composed_epsilon))
    connector = sys.modules.get("lightning.pytorch.trainer.connectors.callback_connector")
    if connector is not None:
        put(connector, "_load_external_callbacks", functools.cache(connector._load_external_callbacks))


def _mode_by(compose: Callable[..., Any]) -> Callable[..., Any]:
    def mode(self: Any, config_name: Any, overrides: list[str]) -> Any:
        return compose(self, config_name, overrides) if any("hydra.mode" in word for word in overrides) else None

    return mode


def _map_by(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(overrides: Any, defaults_list: list[Any], self_added: bool) -> Any:
        asked = any(default.is_interpolation() for default in defaults_list)
        return make(overrides, defaults_list, self_added) if asked else None

    return made


def _read_by(read: Callable[..., Any]) -> Callable[..., Any]:
    """Read each file of the package once; return copies, because a composition changes what it gets."""
    known: dict[tuple[str, str, str], Any] = {}

    def found(self: Any, file: Any) -> Any:
        key = (str(file), self.provider, self.path)
        if key not in known:
            known[key] = read(self, file)
        return copy.deepcopy(known[key])

    return found


def _once_by_width(groups: Any, epsilon: Callable[..., float]) -> Callable[..., float]:
    """Cache epsilons by discretisation, because a test uses another one."""
    known: dict[Any, float] = {}

    def found(parts: Any, delta: float) -> float:
        key = (parts, delta, groups.FINE)
        if key not in known:
            known[key] = epsilon(parts, delta)
        return known[key]

    return found
