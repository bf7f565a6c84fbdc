"""Loading a language model and its tokenizer: by hub name, from a folder, or new from the fields of a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line

PUBLIC_T5 = "public_t5"
# Loading never guesses. A folder that is not a sequence-to-sequence model, or lacks some of its weights (Hugging Face
# would fill them with noise and go on), is refused in one line that names it.
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, StrictDataclassError)


def load_tokenizer(source: str | Path | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer by hub name, folder, ``public_t5``, or itself.

    Raises:
        UnsupportedModelError: There is none, or it has no padding or end mark.
    """
    if isinstance(source, PreTrainedTokenizerBase):
        tokenizer = source
    else:
        place = _place(source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=_is_cached(place))
        except _LOADING_ERRORS as error:
            raise _unloadable(source, error, "tokenizer") from error
    for mark in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, mark) is None:
            raise UnsupportedModelError(
                f"The tokenizer of {source} has no {mark}: a generator pads its batches and must learn where to end."
            )
    return tokenizer


def load_seq2seq(source: str | Path, *, dropout: float | None = None) -> PreTrainedModel:
    """Return a sequence-to-sequence model by hub name, folder or ``public_t5``, its weights in float32.

    Raises:
        UnsupportedModelError: There is no such model, it is of another kind, or weights are missing.
    """
    place = _place(source)
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=_is_cached(place))
        if dropout is not None:
            _set_dropout(config, dropout)
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            place, config=config, dtype=torch.float32, output_loading_info=True, local_files_only=_is_cached(place)
        )
    except _LOADING_ERRORS as error:
        raise _unloadable(source, error, "sequence-to-sequence model") from error
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModelError(
            f"model.pretrained={source} lacks {len(missing)} of its weights ({missing[0]}, ...): they would be noise. "
            "It may be an encoder only, or a download that broke off."
        )
    return _checked(model, source)


def config_of_new(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> PretrainedConfig:
    """Return the Hugging Face config of a new model from its fields (``model_type`` defaults to ``t5``).

    Special token ids and ``vocab_size`` come from the tokenizer where they are not given.

    Raises:
        ConfigurationError: A field is unknown, or the vocabulary is smaller than the tokenizer's.
    """
    given = dict(config)
    kind = str(given.pop("model_type", "t5"))
    try:
        known = AutoConfig.for_model(kind).to_dict()
    except ValueError as error:
        raise ConfigurationError(f"model.config.model_type={kind!r} is no model that transformers knows.") from error
    if unknown := sorted(set(given) - set(known)):
        raise ConfigurationError(
            f"model.config.{unknown[0]} is no field of a {kind} config. There are: {', '.join(sorted(known))}."
        )
    if tokenizer is not None:
        given.setdefault("vocab_size", len(tokenizer))
        given.setdefault("pad_token_id", tokenizer.pad_token_id)
        given.setdefault("eos_token_id", tokenizer.eos_token_id)
        given.setdefault("decoder_start_token_id", tokenizer.pad_token_id)
        if given["vocab_size"] < len(tokenizer):
            raise ConfigurationError(
                f"model.config.vocab_size={given['vocab_size']} is smaller than the tokenizer's {len(tokenizer)} "
                "tokens."
            )
    try:
        return AutoConfig.for_model(kind, **given)
    except _LOADING_ERRORS as error:
        raise ConfigurationError(f"model.config does not describe a {kind} model: {first_line(error)}") from error


def config_of_stored(source: str | Path, *, known: Mapping[str, Mapping[str, Any]] | None = None) -> PretrainedConfig:
    """Return the config of a model by hub name, folder or ``public_t5``, without its weights.

    Args:
        source: As for `load_seq2seq`.
        known: Fields of configs by hub name, taken where the hub's own is not in the cache.

    Raises:
        UnsupportedModelError: There is no such model.
    """
    place = _place(source)
    if place in (known or {}) and not _is_cached(place):
        facts = dict((known or {})[place])
        return AutoConfig.for_model(facts.pop("model_type"), **facts)
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(place, local_files_only=_is_cached(place))
    except _LOADING_ERRORS as error:
        raise _unloadable(source, error, "sequence-to-sequence model") from error
    return found


def build_seq2seq(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, dropout: float | None = None
) -> PreTrainedModel:
    """Return a new model from the fields of its Hugging Face config (``model_type`` defaults to ``t5``).

    Special token ids and ``vocab_size`` come from the tokenizer where they are not given.

    Raises:
        ConfigurationError: A field is unknown, or the vocabulary is smaller than the tokenizer's.
    """
    full = config_of_new(config, tokenizer)
    try:
        if dropout is not None:
            _set_dropout(full, dropout)
        model = AutoModelForSeq2SeqLM.from_config(full, dtype=torch.float32)
    except _LOADING_ERRORS as error:
        raise ConfigurationError(
            f"model.config does not describe a {full.model_type} model: {first_line(error)}"
        ) from error
    return _checked(model, f"model.config ({full.model_type})")


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; the method was renamed within transformers 5."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _place(source: str | Path) -> str:
    """Return the folder or hub name that Hugging Face is asked for."""
    if str(source) == PUBLIC_T5:
        from lit_dpret.assets import public_t5_path  # here, so that only its users need the asset

        return str(public_t5_path())
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists() or path.is_absolute() or str(source).startswith((".", "~")):
        raise UnsupportedModelError(f"model.pretrained={source} is no folder. Give a model folder or a hub name.")
    return str(source)


def _is_cached(place: str) -> bool:
    """Return whether the hub need not be asked: without a network each question costs half a minute."""
    if Path(place).is_dir():
        return True
    try:
        AutoConfig.from_pretrained(place, local_files_only=True)
    except _LOADING_ERRORS:
        return False
    return True


def _checked(model: PreTrainedModel, source: object) -> PreTrainedModel:
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise UnsupportedModelError(
            f"{source} is a {type(model).__name__}, which cannot shift targets into decoder inputs. "
            "Choose a T5, BART or similar model."
        )
    return model


def _set_dropout(config: Any, dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ConfigurationError(f"model.dropout={dropout} is not in [0, 1).")
    if hasattr(config, "dropout_rate"):
        config.dropout_rate = dropout
    elif hasattr(config, "dropout"):
        config.dropout = dropout
        for name in ("attention_dropout", "activation_dropout"):
            if dropout == 0 and hasattr(config, name):
                setattr(config, name, 0.0)
    else:
        raise ConfigurationError(
            f"model.dropout={dropout} cannot be set: a {config.model_type} config names no dropout rate."
        )


def _unloadable(source: object, error: BaseException, what: str) -> Exception:
    if isinstance(error, ConfigurationError | UnsupportedModelError):
        return error
    if isinstance(source, Path) or Path(str(source)).expanduser().is_dir() or str(source) == PUBLIC_T5:
        return UnsupportedModelError(f"model.pretrained={source} holds no usable {what}: {first_line(error)}")
    return UnsupportedModelError(
        f"model.pretrained={source} is no local folder, is not in the Hugging Face cache, and could not be fetched: "
        f"{first_line(error)} Give a folder, or model.pretrained={PUBLIC_T5}."
    )
