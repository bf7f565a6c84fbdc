"""The model that a federation is attacked with: an encoder by name, cut down to its first layers if need be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lit_dpret.encoders import TextEncoder, load_towers
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules import AS2DualEncoder, OptimizerSpec
from lit_dpret.tasks.parts import model_folder

MakeModule = Callable[..., AS2DualEncoder]


def federated_encoder(
    encoder: str | Path, *, layers: int | None, max_query_length: int, max_passage_length: int
) -> TextEncoder:
    """The encoder that every silo starts from.

    Args:
        encoder: ``minilm``, a folder of an encoder or of its run, or a hub name.
        layers: The first so many alone; null for all.
        max_query_length: Tokens of a query that are read.
        max_passage_length: Tokens of a sentence that are read.

    Raises:
        ConfigurationError: There are fewer layers, or the encoder cannot be found.
        UnsupportedModelError: It does not show its layers.
    """
    place = model_folder(encoder) if Path(str(encoder)).is_dir() else encoder
    found = load_towers(place).query_encoder
    if layers is not None:
        _cut(found.backbone, layers)
    contract = replace(found.contract, query_max_length=max_query_length, passage_max_length=max_passage_length)
    return TextEncoder(found.backbone, found.tokenizer, contract, found.projection)


def module_maker(encoder: TextEncoder, *, weight_decay: float, **settings: Any) -> MakeModule:
    """What builds the model of a round; every time from the same weights.

    Args:
        encoder: It is copied for each.
        weight_decay: Of AdamW.
        settings: Further ones of `AS2DualEncoder`.
    """

    def make(*, privacy: Any, optimizer_lr: float, **more: Any) -> AS2DualEncoder:
        spec = OptimizerSpec(name="adamw", lr=optimizer_lr, weight_decay=weight_decay)
        return AS2DualEncoder(privacy=privacy, optimizer=spec, encoder=copy.deepcopy(encoder), **settings, **more)

    return make


def _cut(backbone: Any, layers: int) -> None:
    for part, name in (("encoder", "layer"), ("transformer", "layer"), ("", "layers")):
        holder = getattr(backbone, part, None) if part else backbone
        found = getattr(holder, name, None)
        if isinstance(found, nn.ModuleList):
            if not 1 <= layers <= len(found):
                raise ConfigurationError(f"task.layers={layers} must be from 1 to the {len(found)} of the encoder.")
            setattr(holder, name, found[:layers])
            backbone.config.num_hidden_layers = layers
            return
    raise UnsupportedModelError(
        f"task.layers={layers}: {type(backbone).__name__} does not show its layers where they are looked for. Set it "
        "to null."
    )
