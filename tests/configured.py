"""Configurations as the command line composes them. Imported by path; not a test."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from hydra import compose, initialize_config_module
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

import lit_dpret.cli  # noqa: F401  # it adds the configurations of the studies to Hydra

WORDS_OF_HYDRA = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        return compose("train", overrides=["run_dir=run", *overrides])


def wrong_keys(cfg: DictConfig) -> list[str]:
    """Return the settings that are not arguments of their target; fail if there is no target."""
    found = list(_targets(OmegaConf.to_container(cfg, resolve=True)))
    assert found
    wrong = []
    for path, node in found:
        parameters = inspect.signature(get_object(node["_target_"])).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            keys = set(node) - WORDS_OF_HYDRA - set(parameters)
            wrong += [f"{path}.{key} is not an argument of {node['_target_']}" for key in sorted(keys)]
    return wrong


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping with a ``_target_`` in a resolved configuration."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}")
