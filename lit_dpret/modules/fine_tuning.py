"""Choose the trained part of a model: parameters by name, or low-rank adapters by ``peft`` (LoRA, 2106.09685)."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lit_dpret.distributed.shards import is_sharded
from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line
from lit_dpret.lazy import optional


def refuse_two_choices(choices: Mapping[str, Any]) -> None:
    """Refuse more than one setting of ``model`` that selects the trained parameters."""
    given = [f"model.{name}" for name, value in choices.items() if value is not None]
    if len(given) > 1:
        raise ConfigurationError(
            f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} select the trained parameters. Set all but "
            "one of them to null."
        )


def freeze_all_but(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train only the parameters whose name matches a pattern."""
    parameters = dict(model.named_parameters())
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            found = {name for name in parameters if re.search(pattern, name)}
        except re.error as error:
            raise ConfigurationError(
                f"model.trainable_patterns: {pattern!r} is not a regular expression: {error}."
            ) from error
        if not found:
            raise ConfigurationError(
                f"model.trainable_patterns: {pattern!r} matches no parameter. Tied weights go by their first name; "
                f"the names begin with {', '.join(sorted({name.split('.')[0] for name in parameters}))}."
            )
        chosen |= found
    if not chosen:
        raise UnsupportedModelError(
            "model.trainable_patterns=[] selects no parameter, so nothing would be trained. Set it to null to train "
            "all."
        )
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)


def with_lora(model: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Add adapters by ``peft.LoraConfig(**settings)`` to a Hugging Face model in place, freeze the rest, return it."""
    peft = _peft()
    tied = _tied(model)
    try:
        config = peft.LoraConfig(**{str(name): value for name, value in settings.items()})
        with warnings.catch_warnings():  # peft uses a name that transformers 5 renamed
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted: nn.Module = peft.get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"model.lora={dict(settings)} gives no adapters: {first_line(error)} Its keys are the arguments of "
            "peft.LoraConfig."
        ) from error
    for name, part in adapted.named_modules():
        setting, base = None, part
        if isinstance(part, peft.tuners.lora.LoraLayer):
            setting, base = "target_modules", part.get_base_layer()
        elif isinstance(part, peft.utils.ModulesToSaveWrapper):
            setting, base = "modules_to_save", part.original_module
        uses = next((tied[id(p)] for p in base.parameters() if id(p) in tied), None) if setting else None
        if uses is not None:
            raise ConfigurationError(
                f"model.lora.{setting} names {name.removeprefix('base_model.model.')}, and {', '.join(uses)} are one "
                "weight, which the saved model stores once: an adapter on one use would split them. Leave it out, or "
                "train all uses with model.trainable_patterns instead of model.lora."
            )
        if setting == "target_modules":
            _check_merge(part, settings)
    frozen = {id(parameter) for parameter in adapted.parameters() if not parameter.requires_grad}
    if shared := [uses for key, uses in _tied(adapted).items() if key in frozen and key not in tied]:
        raise ConfigurationError(
            f"model.lora={dict(settings)} ties {' and '.join(shared[0][:2])}, which a saved model stores separately. "
            "Remove the setting that ties them, such as layer_replication."
        )
    return adapted


def _check_merge(layer: Any, settings: Mapping[str, Any]) -> None:
    """Refuse an adapter that cannot be merged into its weight: the model could not be saved."""
    if any(parameter.is_meta for parameter in layer.parameters()):
        return
    try:
        copy.deepcopy(layer).merge()
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"model.lora={dict(settings)} gives adapters that cannot be merged into the weights, as saving the model "
            f"requires: {first_line(error)} Leave out the setting that it names."
        ) from error


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter that has several, by the parameter's id.

    Empty on the ``meta`` device: a configuration may tie weights that the checkpoint stores separately, as T5 1.1 does.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            names.setdefault(id(parameter), []).append(name)
    return {key: found for key, found in names.items() if len(found) > 1}


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model with its adapters merged into a copy of the weights; itself without adapters."""
    merge: Any = getattr(model, "merge_and_unload", None)
    if merge is None:
        return model
    plain: nn.Module = _twin(model).merge_and_unload()
    return plain


def _twin(model: Any) -> Any:
    """Return a copy of a model with adapters. A model trained in shards cannot be copied, and is built again."""
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return copy.deepcopy(model)
    base = model.get_base_model()
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights that are then replaced
        fresh = type(base)(copy.deepcopy(base.config))
        for name, part in base._modules.items():
            if part is None:  # such as an encoder without its pooler
                fresh._modules[name] = None
        twin = _peft().get_peft_model(fresh, copy.deepcopy(model.peft_config[model.active_adapter]))
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin


def _peft() -> Any:
    return optional("peft", "model.lora", "lit-dpret[peft]", instead="Or set model.lora to null.")
