"""Load a language model and its tokenizer: by hub name, from a folder, or new from the fields of a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_dpret.encoders.backbones import hub_answers
from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line
from lit_dpret.modules.families import require_writer
from lit_dpret.modules.smollm2 import SMOLLM2, smollm2_path

PUBLIC_T5 = "public_t5"
# Loading never guesses. A folder that is not a language model, or lacks some of its weights (Hugging Face would fill
# them with noise and continue), is refused in one line that names it.
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, StrictDataclassError)


def load_tokenizer(
    source: str | Path | PreTrainedTokenizerBase, *, knob: str = "model.pretrained"
) -> PreTrainedTokenizerBase:
    """Return a tokenizer by hub name, folder, ``public_t5``, ``smollm2``, or itself.

    A tokenizer without a padding mark, such as those of GPT-2 and Llama, pads with its end mark: padding is never read.
    ``knob`` is as for `load_language_model`.
    """
    if isinstance(source, PreTrainedTokenizerBase):
        tokenizer = source
    else:
        place = _place(source, knob)
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=_is_local(place))
        except _LOADING_ERRORS as error:
            raise _unloadable(source, error, "tokenizer", knob) from error
    if tokenizer.eos_token_id is None:
        raise UnsupportedModelError(
            f"{_said(source, knob)}: its tokenizer has no eos_token, and a generator must learn where a query ends. "
            "Choose another, or set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_language_model(
    source: str | Path, *, dropout: float | None = None, knob: str = "model.pretrained"
) -> PreTrainedModel:
    """Return the model of a hub name, folder, ``public_t5`` or ``smollm2``, in float32.

    ``knob`` is the setting that errors name; if empty, they name the source alone.
    """
    place = _place(source, knob)
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=_is_local(place))
        if dropout is not None:
            _set_dropout(config, dropout)
        model, report = _auto_class(config).from_pretrained(
            place, config=config, dtype=torch.float32, output_loading_info=True, local_files_only=_is_local(place)
        )
    except _LOADING_ERRORS as error:
        raise _unloadable(source, error, "language model", knob) from error
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModelError(
            f"{_said(source, knob)} lacks {len(missing)} of its weights ({missing[0]}, ...), which would be random. It "
            "may be an encoder alone, or an incomplete download. Choose another model, or download it again."
        )
    return _checked(model, source)


def _auto_class(config: PretrainedConfig) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def config_of_new(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> PretrainedConfig:
    """Return the Hugging Face config of a new model from its fields (``model_type`` defaults to ``t5``).

    Special token ids and ``vocab_size`` come from the tokenizer if they are not given.
    """
    given = dict(config)
    kind = str(given.pop("model_type", "t5"))
    try:
        known = AutoConfig.for_model(kind).to_dict()
    except ValueError as error:
        raise ConfigurationError(f"model.config.model_type={kind!r} is not a model that transformers knows.") from error
    if unknown := sorted(set(given) - set(known)):
        raise ConfigurationError(
            f"model.config.{unknown[0]} is not a field of a {kind} config. Its fields are {', '.join(sorted(known))}."
        )
    if tokenizer is not None:
        given.setdefault("vocab_size", len(tokenizer))
        given.setdefault("pad_token_id", tokenizer.pad_token_id)
        given.setdefault("eos_token_id", tokenizer.eos_token_id)
        if known["is_encoder_decoder"]:
            given.setdefault("decoder_start_token_id", tokenizer.pad_token_id)
        elif "bos_token_id" in known:
            given.setdefault("bos_token_id", tokenizer.bos_token_id)
        if given["vocab_size"] < len(tokenizer):
            raise ConfigurationError(
                f"model.config.vocab_size={given['vocab_size']} is smaller than the tokenizer's {len(tokenizer)} "
                "tokens. Raise it, or leave it out."
            )
    try:
        return AutoConfig.for_model(kind, **given)
    except _LOADING_ERRORS as error:
        raise ConfigurationError(f"model.config does not describe a {kind} model: {first_line(error)}") from error


def config_of_stored(source: str | Path, *, known: Mapping[str, Mapping[str, Any]] | None = None) -> PretrainedConfig:
    """Return the config of what `load_language_model` would load; from ``known`` if the cache has none."""
    shapes = known or {}
    if str(source) in shapes and (str(source) == SMOLLM2 or not _is_cached(_place(source))):
        facts = dict(shapes[str(source)])
        return AutoConfig.for_model(facts.pop("model_type"), **facts)
    place = _place(source)
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(place, local_files_only=_is_local(place))
    except _LOADING_ERRORS as error:
        raise _unloadable(source, error, "language model") from error
    return found


def build_language_model(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, dropout: float | None = None
) -> PreTrainedModel:
    """Return a new model of `config_of_new`."""
    full = config_of_new(config, tokenizer)
    try:
        if dropout is not None:
            _set_dropout(full, dropout)
        model = shaped(full)
    except _LOADING_ERRORS as error:
        raise ConfigurationError(
            f"model.config does not describe a {full.model_type} model: {first_line(error)}"
        ) from error
    return _checked(model, f"model.config ({full.model_type})")


def shaped(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a new language model of this config, on the device of the context."""
    model: PreTrainedModel = _auto_class(config).from_config(config, dtype=dtype)
    return model


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; transformers 5 renamed the method."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _place(source: str | Path, knob: str = "model.pretrained") -> str:
    if str(source) == PUBLIC_T5:
        from lit_dpret.assets import public_t5_path  # here, so that only its users need the asset

        return str(public_t5_path())
    if str(source) == SMOLLM2:
        return str(smollm2_path())
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists() or path.is_absolute() or str(source).startswith((".", "~")):
        raise UnsupportedModelError(f"{_said(source, knob)} is not a folder. Give a model folder or a hub name.")
    return str(source)


def _is_local(place: str) -> bool:
    """Return whether to skip the hub: the model is cached, or the hub does not answer (its client retries a minute)."""
    return _is_cached(place) or not hub_answers()


def _is_cached(place: str) -> bool:
    if Path(place).is_dir():
        return True
    try:
        AutoConfig.from_pretrained(place, local_files_only=True)
    except _LOADING_ERRORS:
        return False
    return True


def _checked(model: PreTrainedModel, source: object) -> PreTrainedModel:
    if getattr(model.config, "attention_type", None) == "block_sparse":
        raise UnsupportedModelError(
            f"{source} is a {type(model).__name__} with block-sparse attention, which depends on the longest text of "
            "the batch. Choose another model, or set attention_type to original_full in its config."
        )
    if not model.config.is_encoder_decoder:
        require_writer(model, source)
    elif not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise UnsupportedModelError(
            f"{source} is a {type(model).__name__}, which cannot shift targets into decoder inputs. "
            "Choose a T5, BART or similar model."
        )
    return model


# The names that Hugging Face configs give to the dropout rates of layers, and to those of attention.
_DROPOUT = ("dropout_rate", "dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop")
_ATTENTION_DROPOUT = ("attention_dropout", "activation_dropout", "attn_pdrop")


def _set_dropout(config: Any, dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ConfigurationError(f"model.dropout={dropout} is not in [0, 1).")
    rates = [name for name in _DROPOUT if hasattr(config, name)]
    for name in rates:
        setattr(config, name, dropout)
    if dropout == 0:
        for name in _ATTENTION_DROPOUT:
            if hasattr(config, name):
                setattr(config, name, 0.0)
    elif not rates:
        raise ConfigurationError(
            f"model.dropout={dropout} cannot be set: a {config.model_type} config names no dropout rate of its layers. "
            "Leave it null."
        )


def _unloadable(source: object, error: BaseException, what: str, knob: str = "model.pretrained") -> Exception:
    if isinstance(error, ConfigurationError | UnsupportedModelError):
        return error
    if isinstance(source, Path) or Path(str(source)).expanduser().is_dir() or str(source) in (PUBLIC_T5, SMOLLM2):
        return UnsupportedModelError(f"{_said(source, knob)} holds no usable {what}: {first_line(error)}")
    return UnsupportedModelError(
        f"{_said(source, knob)} is not a local folder, is not in the Hugging Face cache, and could not be downloaded: "
        f"{first_line(error)} Give a folder, or {PUBLIC_T5}."
    )


def _said(source: object, knob: str) -> str:
    """Return how an error names the source of a model or tokenizer; an object without a name goes by its setting."""
    if not isinstance(source, (str, Path)):
        return knob
    return f"{knob}={source}" if knob else str(source)
