"""Count the operations and values for one row of a language model, from its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from lit_dpret.errors import ConfigurationError


@dataclass(frozen=True, order=True)
class Product:
    """A matrix product of a linear layer."""

    tokens: int
    inputs: int
    outputs: int
    trained: bool = True
    tied: bool = False  # its weight is also that of an embedding

    @property
    def size(self) -> int:
        """The multiplications of one product."""
        return self.tokens * self.inputs * self.outputs


@dataclass(frozen=True)
class Work:
    """The work for one row."""

    products: dict[Product, int]  # linear layers, with the number of equal ones
    scores: int  # attention weights of all heads and layers
    score_products: int  # multiplications with them
    logits: int  # values of the output layer
    encoder_layers: int
    decoder_layers: int

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of a forward pass: two per weight and token, and attention."""
        return 2 * sum(count * product.size for product, count in self.products.items()) + 2 * self.score_products

    @property
    def model_flops(self) -> int:
        """Operations that a step without privacy needs: forward, gradients of inputs, gradients of trained weights.

        This is the count used for model FLOP utilisation (Chowdhery et al. 2022, 2204.02311, appendix B), including
        attention and excluding recomputation.
        """
        trained = 2 * sum(count * product.size for product, count in self.products.items() if product.trained)
        return 2 * self.forward_flops + 2 * self.score_products + trained

    @property
    def linear_values(self) -> int:
        """The number of inputs and outputs of all linear layers together."""
        return sum(count * p.tokens * (p.inputs + p.outputs) for p, count in self.products.items())


def work_of(outline: Any) -> Work:
    """Count the work of one row at full lengths; ``outline`` is a generator with or without its weights."""
    model: Any = outline.model
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ConfigurationError(f"Costs are known for language models (model=generator) only, not for {outline.name}.")
    source, target = outline.source_length, outline.max_query_length
    fields = model.config.to_dict()

    def field(*names: str) -> int:
        return int(next(fields[name] for name in names if fields.get(name) is not None))

    embedding = getattr(model.get_input_embeddings(), "weight", None)
    heads = field("num_heads", "encoder_attention_heads", "num_attention_heads", "n_head")
    width = field("d_model", "hidden_size", "n_embd")
    head_width = int(fields.get("d_kv") or fields.get("head_dim") or width // heads)
    if model.config.is_encoder_decoder:
        encoder, decoder = field("num_layers", "encoder_layers"), field("num_decoder_layers", "decoder_layers")
        scores = heads * (encoder * source**2 + decoder * (target**2 + source * target))
    else:
        encoder, decoder = 0, field("num_hidden_layers", "n_layer")
        scores = heads * decoder * (source + target - 1) ** 2
    products: Counter[Product] = Counter()
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear | Conv1D):
            continue
        if model.config.is_encoder_decoder:
            tokens = _tokens_of(name, source, target)
        else:
            tokens = target if layer is head else source + target - 1
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        products[Product(tokens, inputs, outputs, layer.weight.requires_grad, layer.weight is embedding)] += 1
    return Work(
        products=dict(products),
        scores=scores,
        score_products=2 * head_width * scores,
        logits=target * int(model.get_input_embeddings().num_embeddings),
        encoder_layers=encoder,
        decoder_layers=decoder,
    )


def _tokens_of(name: str, source: int, target: int) -> int:
    """Return how many tokens of a row pass through the named layer of an encoder-decoder model."""
    crossed = any(part in name for part in ("EncDecAttention.k", "EncDecAttention.v"))
    crossed = crossed or any(part in name for part in ("encoder_attn.k", "encoder_attn.v"))
    return source if crossed or "encoder." in f".{name}".replace("decoder.", "") else target


PASSES = 20
"""The number of elementwise reads and writes of each value of a linear layer, an attention weight or a logit."""
# Set by hand on T5-small and five T5s with 1 to 4 layers of 32 to 256 columns: 0.7 to 1.1 of the real time.


@dataclass(frozen=True)
class Accelerator:
    """One device."""

    name: str
    bf16_flops: float  # peak operations per second of dense bfloat16 products
    tf32_flops: float  # of dense products with TF32 inputs; equals the next if it has none
    fp32_flops: float  # of float32 products, without TF32
    bandwidth: float  # bytes per second of its memory
    memory: float
    link: float  # bytes per second to the other devices of a node, in one direction
    source: str  # source of the numbers


_GIB = 2**30
# As their makers describe them, from memory of the data sheets; none of these numbers was measured here.
ACCELERATORS: Mapping[str, Accelerator] = {
    each.name: each
    for each in (
        Accelerator(
            "v100-32gb", 125e12, 15.7e12, 15.7e12, 0.9e12, 32 * _GIB, 150e9,
            "NVIDIA V100 datasheet (float16: it has no bfloat16)",
        ),
        Accelerator("a100-40gb", 312e12, 156e12, 19.5e12, 1.555e12, 40 * _GIB, 300e9, "NVIDIA A100 datasheet, SXM"),
        Accelerator("a100-80gb", 312e12, 156e12, 19.5e12, 2.039e12, 80 * _GIB, 300e9, "NVIDIA A100 datasheet, SXM"),
        Accelerator("h100-80gb", 989e12, 494.5e12, 67e12, 3.35e12, 80 * _GIB, 450e9, "NVIDIA H100 datasheet, SXM"),
        Accelerator("h200-141gb", 989e12, 494.5e12, 67e12, 4.8e12, 141 * _GIB, 450e9, "NVIDIA H200 datasheet, SXM"),
        Accelerator("l4-24gb", 121e12, 60.5e12, 30.3e12, 0.3e12, 24 * _GIB, 32e9, "NVIDIA L4 datasheet, PCIe 4"),
        Accelerator(
            "tpu-v4", 275e12, 275e12 / 6, 275e12 / 6, 1.2e12, 32 * _GIB, 150e9,
            "Google Cloud TPU v4 documentation (float32 as six bfloat16 products)",
        ),
    )
}  # fmt: skip


def accelerator(name: str) -> Accelerator:
    """Return the accelerator of that name."""
    if name not in ACCELERATORS:
        raise ConfigurationError(f"task.device={name!r} is not one of {', '.join(ACCELERATORS)}.")
    return ACCELERATORS[name]
