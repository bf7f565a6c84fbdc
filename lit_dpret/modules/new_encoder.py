"""The encoder that a dual encoder's settings describe: loaded, or new and untrained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.errors import ConfigurationError


def make_encoder(
    encoder: str | Path | TextEncoder | None,
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    query_max_length: int,
    passage_max_length: int,
    query_prefix: str | None,
    passage_prefix: str | None,
) -> TextEncoder:
    """The shared tower that a dual encoder's settings describe, normalised, in float32.

    Raises:
        ConfigurationError: ``encoder`` and ``config`` are both given or both missing.
    """
    if isinstance(encoder, TextEncoder):
        if not encoder.contract.normalise:
            raise ConfigurationError("model.encoder does not normalise its embeddings; set normalise=True in it.")
        return encoder
    if (encoder is None) == (config is None):
        raise ConfigurationError(
            f"model.encoder={encoder} and model.config={config}: give one of them, an encoder to start from or the "
            "shape of a new one."
        )
    if encoder is not None:
        return TextEncoder.from_pretrained(
            encoder,
            normalise=True,
            query_max_length=query_max_length,
            passage_max_length=passage_max_length,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
        )
    contract = Contract(
        query_max_length=query_max_length,
        passage_max_length=passage_max_length,
        query_prefix=query_prefix or "",
        passage_prefix=passage_prefix or "",
    )
    backbone, words = _new_transformer(dict(config or {}), tokenizer)
    return TextEncoder(backbone, words, contract)


def _new_transformer(config: dict[str, Any], tokenizer: str | Path | None) -> tuple[Any, Any]:
    import transformers

    if tokenizer is None:
        raise ConfigurationError("model.encoder=null needs model.tokenizer: a new encoder has no words of its own.")
    try:
        words = transformers.AutoTokenizer.from_pretrained(tokenizer)
        shape = transformers.AutoConfig.for_model(**{"vocab_size": len(words)} | config)
        backbone = transformers.AutoModel.from_config(shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"model.config and model.tokenizer={str(tokenizer)!r} make no encoder: {reason} model.config needs "
            "model_type, for instance bert, and the fields of that type's config."
        ) from error
    if backbone.get_input_embeddings().num_embeddings < len(words):
        raise ConfigurationError(
            f"model.tokenizer has {len(words)} tokens, but model.config has embeddings for "
            f"{backbone.get_input_embeddings().num_embeddings}: they do not belong together."
        )
    return backbone.to(torch.float32), words
