"""The models of the coverage list, small and random, each with one loss per row.

Imported by path through ``conftest.py``; not a test. ``lib`` is the fixture of the clipping tests.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 19


def prepared(model: nn.Module) -> nn.Module:
    model.double().train()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.2)
    return model


def text(lib: SimpleNamespace, rows: int, length: int) -> dict[str, Tensor]:
    mask = lib.lengths_mask(rows, length)
    return {"ids": torch.randint(2, VOCAB, (rows, length)) * mask + (1 - mask), "mask": mask}


def causal(lib: SimpleNamespace, model: nn.Module, rows: int = 5, length: int = 6) -> Any:
    def losses(batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False).logits
        labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
        prompt = logits.shape[1] - labels.shape[1]  # virtual tokens, if any
        return lib.token_losses(logits[:, prompt:-1], labels[:, 1:])

    return lib.Case(model, losses, text(lib, rows, length))


def gpt2(**changes: Any) -> nn.Module:
    values = dict(
        vocab_size=VOCAB, n_positions=12, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return prepared(GPT2LMHeadModel(GPT2Config(**(values | changes))))


LLAMA = dict(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, head_dim=2, pad_token_id=1, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def llama(**changes: Any) -> nn.Module:
    return prepared(LlamaForCausalLM(LlamaConfig(**(LLAMA | changes))))


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2_eager": lambda: gpt2(attn_implementation="eager"),
    "gpt2_untied": lambda: gpt2(tie_word_embeddings=False),
    "llama": llama,
    "llama_tied_with_biases": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama_eager": lambda: llama(attn_implementation="eager"),
    "mistral": lambda: prepared(MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=3))),
    "qwen2": lambda: prepared(Qwen2ForCausalLM(Qwen2Config(**LLAMA))),
    "qwen3": lambda: prepared(Qwen3ForCausalLM(Qwen3Config(**LLAMA))),
    "gemma3": lambda: prepared(Gemma3ForCausalLM(Gemma3TextConfig(**LLAMA, query_pre_attn_scalar=2))),
}


def bart(lib: SimpleNamespace, rows: int = 4, query: int = 5, passage: int = 7, **changes: Any) -> Any:
    values = dict(
        vocab_size=VOCAB, d_model=8, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=10, decoder_ffn_dim=10, max_position_embeddings=12, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, scale_embedding=True, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    model = prepared(BartForConditionalGeneration(BartConfig(**(values | changes))))
    data = text(lib, rows, passage)
    data["labels"] = torch.randint(2, VOCAB, (rows, query)).masked_fill(lib.lengths_mask(rows, query) == 0, -100)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        start = batch["labels"].roll(1, 1).clamp(min=1)
        out = model(input_ids=batch["ids"], attention_mask=batch["mask"], decoder_input_ids=start, use_cache=False)
        return lib.token_losses(out.logits, batch["labels"])

    return lib.Case(model, losses, data)


class Block(nn.Module):
    """ResNet's basic block, with GroupNorm in place of BatchNorm."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, out)
        self.down: nn.Module = nn.Identity()
        if stride > 1 or into != out:
            self.down = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.GroupNorm(2, out))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(hidden)) + self.down(x))


class ResNet18(nn.Module):
    """The eight blocks of ResNet18, narrow."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.GroupNorm(2, 4), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = [(4, 4, 1), (4, 4, 1), (4, 6, 2), (6, 6, 1), (6, 8, 2), (8, 8, 1), (8, 8, 2), (8, 8, 1)]
        self.blocks = nn.ModuleList(Block(*width) for width in widths)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.pool(self.stem(x))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.head(hidden.mean((2, 3)))


def resnet(lib: SimpleNamespace, rows: int = 4, checkpointed: bool = False) -> Any:
    model = ResNet18(checkpointed).double()
    data = {"x": torch.randn(rows, 3, 33, 32).double(), "y": torch.arange(rows) % 3}
    return lib.Case(model, lambda b: F.cross_entropy(model(b["x"]), b["y"], reduction="none"), data)


class ConvNet(nn.Module):
    """Plain convolutions with biases, strides and groups, without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=2), nn.GELU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 3 * 3, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def conv_net(lib: SimpleNamespace, rows: int = 4) -> Any:
    model = ConvNet().double()
    data = {"x": torch.randn(rows, 3, 16, 16).double(), "y": torch.arange(rows) % 3}
    return lib.Case(model, lambda b: F.cross_entropy(model(b["x"]), b["y"], reduction="none"), data)


Build = Callable[..., Any]
GATED = {"feed_forward_proj": "gated-gelu"}

#: Every model of the list, by its name; called with ``lib``, the number of rows, and changes of its configuration.
COVERED: dict[str, Build] = {
    "t5_v1.0_tied": lambda lib, rows, **changes: lib.t5(rows, **changes),
    "t5_v1.0_untied": lambda lib, rows, **changes: lib.t5(rows, untied=True, **changes),
    "t5_v1.1_tied": lambda lib, rows, **changes: lib.t5(rows, **GATED, **changes),
    "t5_v1.1_untied_as_flan": lambda lib, rows, **changes: lib.t5(rows, untied=True, **GATED, **changes),
    "bart": bart,
    "gpt2": lambda lib, rows, **changes: causal(lib, gpt2(**changes), rows),
    "llama": lambda lib, rows, **changes: causal(lib, llama(**changes), rows),
    "llama_tied": lambda lib, rows, **changes: causal(lib, llama(tie_word_embeddings=True, **changes), rows),
    "bert": lambda lib, rows, **changes: lib.bert(rows, **changes),
    "distilbert": lambda lib, rows, **changes: lib.distilbert(rows, **changes),
    "minilm": lambda lib, rows, **changes: lib.minilm(rows, **changes),
    "resnet18": resnet,
    "conv_net": conv_net,
}


# -- modules with a parameter that no rule covers ------------------------------------------------


class Scaled(nn.Module):
    """A bare parameter beside a layer that has a rule."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.temperature.exp()


class Positions(nn.Module):
    """Positions that are used directly, before a layer in a ModuleDict."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.tables = nn.ModuleDict({"a": nn.Linear(width, width)})

    def forward(self, x: Tensor) -> Tensor:
        return self.tables["a"](x + self.positions[:, : x.shape[1]]).tanh()
