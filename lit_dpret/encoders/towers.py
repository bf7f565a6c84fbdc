"""Both sides of a dual encoder from one folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_dpret.encoders.backbones import load_linear, load_transformer, position_limit, resolve_folder, take_pooler
from lit_dpret.encoders.contract import Contract
from lit_dpret.encoders.st_folder import Tower, read_folder
from lit_dpret.encoders.text_encoder import TextEncoder
from lit_dpret.errors import ConfigurationError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Towers(NamedTuple):
    """The two sides of a dual encoder; the same object twice where one encoder serves both."""

    query_encoder: TextEncoder
    passage_encoder: TextEncoder


def load_towers(encoder: str | Path, *, dtype: str = "float32", revision: str | None = None) -> Towers:
    """Load a dual encoder from any folder that `save_sentence_transformer` can write.

    Args:
        encoder: As for `TextEncoder.from_pretrained`.
        dtype: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
        revision: Of a model on the hub.

    Raises:
        ConfigurationError: A setting is impossible, or the model cannot be found.
        UnsupportedModelError: The folder holds no model we would compute faithfully.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}.")
    found = read_folder(resolve_folder(encoder, revision))
    backbone, tokenizer = load_transformer(found.query.transformer, _DTYPES[dtype])
    pooler = take_pooler(backbone)

    def tower(said: Tower) -> TextEncoder:
        sides = (found.query, found.passage) if found.shared_backbone else (said, said)
        query_length, passage_length = (_length(side, backbone, tokenizer) for side in sides)
        contract = Contract(
            pooling=said.pooling,
            normalise=found.normalise,
            query_max_length=query_length,
            passage_max_length=passage_length,
            query_prefix=found.query_prefix,
            passage_prefix=found.passage_prefix,
            lower_case=said.lower_case,
        )
        projection = None if said.dense is None else load_linear(said.dense, _DTYPES[dtype])
        loaded = TextEncoder(backbone, tokenizer, contract, projection)
        loaded.unused_weights = pooler
        return loaded

    query_encoder = tower(found.query)
    if found.one_encoder:
        return Towers(query_encoder, query_encoder)
    if not found.shared_backbone:
        backbone, tokenizer = load_transformer(found.passage.transformer, _DTYPES[dtype])
        pooler = take_pooler(backbone)
    return Towers(query_encoder, tower(found.passage))


def cut(towers: Towers, *, query_max_length: int | None = None, passage_max_length: int | None = None) -> Towers:
    """The same encoders, sharing their weights, reading so many tokens of a text; None leaves a length as it is.

    Raises:
        ConfigurationError: A length is not positive, or more than the model has positions for.
    """
    chosen = {"query_max_length": query_max_length, "passage_max_length": passage_max_length}
    lengths: dict[str, Any] = {name: length for name, length in chosen.items() if length is not None}

    def shorter(encoder: TextEncoder) -> TextEncoder:
        contract = replace(encoder.contract, **lengths)
        other = TextEncoder(encoder.backbone, encoder.tokenizer, contract, encoder.projection)
        other.unused_weights = encoder.unused_weights
        return other

    if not lengths:
        return towers
    query_encoder = shorter(towers.query_encoder)
    shared = towers.passage_encoder is towers.query_encoder
    return Towers(query_encoder, query_encoder if shared else shorter(towers.passage_encoder))


def _length(tower: Tower, backbone: Any, tokenizer: Any) -> int:
    """Where this tower cuts texts: as its folder says, else as tokenizer or model allow, else 512."""
    own = tokenizer.model_max_length if tokenizer.model_max_length < 1_000_000 else None
    limit = position_limit(backbone)
    length = tower.max_length or own or limit or 512
    return length if limit is None else min(length, limit)
