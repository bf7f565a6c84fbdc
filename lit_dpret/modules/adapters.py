"""Low-rank adapters in a text encoder or a generator: put in before training, merged into the weights afterwards."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_dpret.encoders import TextEncoder
from lit_dpret.errors import ConfigurationError


def add_lora(encoder: TextEncoder, settings: Mapping[str, Any]) -> None:
    """Freeze the encoder and train low-rank adapters of it instead (LoRA, 2106.09685, by ``peft``).

    Args:
        encoder: Changed in place. A projection after pooling stays trainable.
        settings: Arguments of ``peft.LoraConfig``.

    Raises:
        ConfigurationError: peft is missing, or refuses the settings.
    """
    encoder.backbone = with_lora(encoder.backbone, settings)


def with_lora(model: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """A Hugging Face model with low-rank adapters, everything else in it frozen.

    Args:
        model: Changed in place.
        settings: Arguments of ``peft.LoraConfig``.

    Raises:
        ConfigurationError: peft is missing, or refuses the settings.
    """
    peft = _peft()
    try:
        config = peft.LoraConfig(**{str(name): value for name, value in settings.items()})
        adapted: nn.Module = peft.get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"model.lora={dict(settings)} makes no adapters: {reason} Its keys are the arguments of peft.LoraConfig."
        ) from error
    return adapted


def without_adapters(model: nn.Module) -> nn.Module:
    """The model with its adapters merged into a copy of the weights; itself where it has none."""
    merge: Any = getattr(model, "merge_and_unload", None)
    if merge is None:
        return model
    plain: nn.Module = _twin(model).merge_and_unload()
    return plain


def _twin(model: Any) -> Any:
    """A copy of a model with adapters. One that is trained in shards cannot be copied, and is built again."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return copy.deepcopy(model)
    base = model.get_base_model()
    with torch.random.fork_rng(devices=[]):  # weights that are replaced are drawn first
        fresh = type(base)(copy.deepcopy(base.config))
        for name, part in base._modules.items():
            if part is None:  # an encoder without its pooler
                fresh._modules[name] = None
        twin = _peft().get_peft_model(fresh, copy.deepcopy(model.peft_config[model.active_adapter]))
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin


def merged(encoder: TextEncoder) -> TextEncoder:
    """The encoder with its adapters merged into the weights; itself where it has none."""
    backbone = without_adapters(encoder.backbone)
    if backbone is encoder.backbone:
        return encoder
    made = TextEncoder(backbone, encoder.tokenizer, encoder.contract, encoder.projection)
    made.unused_weights = encoder.unused_weights
    return made


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigurationError(
            "model.lora needs peft, which is not installed. Install it by pip install lit-dpret[peft], or set "
            "model.lora to null."
        ) from error
    return peft
