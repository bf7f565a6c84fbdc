"""Time and memory of a model that is too large to run, extrapolated from slices of it.

A slice is the model with one or three layers on a side, at its full width and lengths. The cost of a physical batch is
very nearly linear in the number of layers. So three slices, run by the real engine on this machine, give the fixed cost
and the cost of each layer of either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lit_dpret.costs.measure import Held, held_bytes, measure_step
from lit_dpret.costs.work import work_of
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.modules import OptimizerSpec, QueryGenerator
from lit_dpret.modules.language_models import PUBLIC_T5
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.plan import PrivacyPlan

_MORE = 3
"""Layers of the larger slices; a difference of two layers is measured more exactly than that of one."""

SLICES = ((1, 1), (_MORE, 1), (1, _MORE))
"""Layers of encoder and decoder of each slice."""


@dataclass(frozen=True)
class Part:
    """The cost of a part of the model."""

    seconds: float
    held: Held

    def __add__(self, other: Part) -> Part:
        return Part(self.seconds + other.seconds, self.held + other.held)

    def __mul__(self, factor: float) -> Part:
        return Part(factor * self.seconds, self.held * factor)


@dataclass(frozen=True)
class Slices:
    """The measurements of the slices."""

    rows: int
    base: Part  # the fixed cost
    encoder_layer: Part  # added by each layer of the encoder
    decoder_layer: Part  # added by each layer of the decoder
    update_seconds: float  # per trained weight: noise and optimizer
    device: str
    precision: str

    def whole(self, encoder: int, decoder: int) -> Part:
        """Return the cost of a physical batch of a model with this many layers."""
        return self.base + self.encoder_layer * encoder + self.decoder_layer * decoder


def measure_slices(
    outline: GeneratorOutline, plan: PrivacyPlan, device: torch.device, *, rows: int, precision: str = "32-true",
    secure_rng: bool = False, progress: Callable[[str], None] = lambda what: None,
) -> Slices:  # fmt: skip
    """Run three slices of the model for a few batches of random rows.

    The weights of ``outline`` are not needed. ``progress`` is called with the name of the running slice.
    """
    work = work_of(outline)  # refuses models that are not language models
    found = []
    for encoder, decoder in SLICES if work.encoder_layers else ((0, 1), (0, _MORE)):
        progress(f"{encoder} + {decoder} layers of {outline.name}")
        module = slice_of(outline, encoder, decoder)
        if precision == "bf16-true":
            module.to(torch.bfloat16)
        piece = module.outlined
        autocast = precision == "bf16-mixed"
        measured = measure_step(module, plan, device, rows=rows, autocast=autocast, secure_rng=secure_rng)
        held = held_bytes(module, plan, device, autocast=autocast)
        found.append((Part(measured.batch, held), measured.update / piece.trained))
        del module
    base, encoder_layer, decoder_layer = taken_apart([part for part, _ in found])
    return Slices(rows, base, encoder_layer, decoder_layer, found[0][1], str(device), precision)


def taken_apart(parts: Sequence[Part]) -> tuple[Part, Part, Part]:
    """Return the fixed cost, and the cost per layer of the encoder (if any) and of the decoder."""
    small, *more_encoder, more_decoder = parts
    decoder_layer = _each(small, more_decoder)
    encoder_layer = _each(small, more_encoder[0]) if more_encoder else decoder_layer * 0.0
    return small + (encoder_layer + decoder_layer) * -1.0, encoder_layer, decoder_layer


def _each(small: Part, large: Part) -> Part:
    return (large + small * -1.0) * (1 / (_MORE - 1))


def slice_of(outline: GeneratorOutline, encoder: int, decoder: int) -> QueryGenerator:
    """Return the model with this many layers and random weights."""
    config = outline.model.config.to_dict()  # type: ignore[operator, union-attr]
    if config["is_encoder_decoder"]:
        names = ("num_layers", "num_decoder_layers") if "num_layers" in config else ("encoder_layers", "decoder_layers")
        known = {key: value for key, value in config.items() if key in _SHAPE} | {names[0]: encoder, names[1]: decoder}
    else:
        depth = "num_hidden_layers" if "num_hidden_layers" in config else "n_layer"
        known = {
            key: value for key, value in config.items() if not key.endswith("_token_id") and key not in _OF_THE_WHOLE
        } | {depth: decoder}
    try:
        return QueryGenerator(
            privacy=DPSGD(eps=1.0),
            optimizer=OptimizerSpec(name=outline.optimizer if outline.optimizer != "adam_bc" else "adam"),
            pretrained=None,
            config=known,
            tokenizer=PUBLIC_T5,
            max_passage_length=outline.max_passage_length,
            max_query_length=outline.max_query_length,
            lora=outline.lora,
            prompt_tuning=outline.prompt_tuning,
            trainable_patterns=outline.trainable_patterns,
            gradient_checkpointing=outline.gradient_checkpointing,
        )
    except LitDpretError as error:
        raise ConfigurationError(
            f"{outline.name} cannot be built with a few layers for task.measure=slices: {error}"
        ) from error


# The fields that determine a layer's shape; token ids and generation settings stay with the tokenizer of the slice.
_SHAPE = {
    "model_type", "vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "feed_forward_proj", "dropout_rate",
    "tie_word_embeddings", "relative_attention_num_buckets", "relative_attention_max_distance",
    "encoder_ffn_dim", "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads", "activation_function",
    "max_position_embeddings", "dropout",
}  # fmt: skip


_OF_THE_WHOLE = ("layer_types", "architectures", "quantization_config")
