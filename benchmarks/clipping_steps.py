"""The models, and one step of each way to clip, that `clipping.py` measures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VARIANTS = ("plain", "ghost", "opacus", "opacus ghost")
LABELS = {
    "plain": "no privacy",
    "ghost": "lit-dpret ghost (all trained)",
    "opacus": "opacus hooks (positions frozen)",
    "opacus ghost": "opacus ghost (positions frozen)",
}
#: Parameters that opacus cannot do, and that its variants freeze: their gradient has no batch axis there.
FROZEN_FOR_OPACUS = ("relative_attention_bias", "position_embeddings")


@dataclass(frozen=True)
class Row:
    """A model by name, rows in the batch, and tokens of source and target (0: an encoder)."""

    model: str
    batch: int
    source: int
    target: int

    @property
    def label(self) -> str:
        """As it stands in the table."""
        return f"{self.model} {self.batch} x {self.source}" + (f"/{self.target}" if self.target else "")

    @property
    def tokens(self) -> int:
        """In a batch."""
        return self.batch * (self.source + self.target)


T5_SHAPES = {
    "t5-toy": dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=256),
    "t5-small": dict(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128),
    "t5-base": dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32128),
    "t5-large": dict(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, vocab_size=32128),
}
BERT_SHAPES = {
    "bert-toy": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=256),
    "minilm": dict(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522
    ),
}
LLAMA_SHAPES = {
    "llama-toy": dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=256,
    ),
    "smollm2": dict(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49152,
    ),
}  # fmt: skip
#: Put behind a model's name: train low-rank adapters of it alone.
LORA = "+lora"


def build_model(name: str, device: str) -> Any:
    """A model of that shape with random weights, in train mode (dropout 0.1; none in a decoder-only model)."""
    import torch
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    shape = name.removesuffix(LORA)
    if shape in T5_SHAPES:
        model: Any = T5ForConditionalGeneration(T5Config(**T5_SHAPES[shape], decoder_start_token_id=0))
    elif shape in LLAMA_SHAPES:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_SHAPES[shape], tie_word_embeddings=True))
        if name.endswith(LORA):
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=8))
    else:
        model = BertModel(BertConfig(**BERT_SHAPES[name]), add_pooling_layer=False)
    return model.train().to(device)


def build_losses(model: Any, row: Row, device: str) -> Callable[[], Any]:
    """One loss per row; bf16 autocast on a GPU."""
    import torch
    import torch.nn.functional as F

    from lit_dpret.modules.families import DecoderOnly

    ids = torch.randint(1, model.config.vocab_size, (row.batch, row.source), device=device)
    labels = torch.randint(1, model.config.vocab_size, (row.batch, max(1, row.target)), device=device)
    mask, types = torch.ones_like(ids), torch.zeros_like(ids)
    family = DecoderOnly()
    whole = {name: each.to(device) for name, each in family.collate(ids.tolist(), labels.tolist(), 0).items()}

    def losses() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
            if row.model.removesuffix(LORA) in LLAMA_SHAPES:
                logits = family.logits(model, whole)
                return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
            if row.target:
                logits = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).logits
                return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
            pooled = model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state.mean(1)
            return pooled.float().sin().sum(1)

    return losses


def build_step(variant: str, model: Any, row: Row, device: str) -> Callable[[], None]:
    """One step of a variant; its result (gradients or their sums) is freed by the next one.

    Raises:
        NotImplementedError: opacus refuses the model, here or in the first step.
    """
    import torch

    losses = build_losses(model, row, device)
    if variant == "plain":

        def plain() -> None:
            model.zero_grad(set_to_none=True)
            torch.autograd.backward(losses().sum())

        return plain
    if variant == "ghost":
        from lit_dpret.privacy.clipping import make_engine

        engine = make_engine("ghost", model, max_grad_norm=1.0)
        units, real = torch.arange(row.batch, device=device), torch.ones(row.batch, dtype=torch.bool, device=device)

        def ghost() -> None:
            engine.zero()
            engine.add(losses, units, real)

        return ghost
    warnings.filterwarnings("ignore", message="Full backward hook")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(frozen in name for frozen in FROZEN_FOR_OPACUS))
    if variant == "opacus ghost":
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping

        wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=1.0)

        def opacus_ghost() -> None:
            model.zero_grad(set_to_none=True)
            found = losses()
            torch.autograd.backward(found.sum(), retain_graph=True)
            factors = wrapped.get_clipping_coef()
            model.zero_grad(set_to_none=True)
            wrapped.disable_hooks()
            torch.autograd.backward((factors * found).sum())
            wrapped.enable_hooks()

        return opacus_ghost
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(trained, lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=row.batch
    )

    def opacus() -> None:
        optimizer.zero_grad(set_to_none=True)
        for p in trained:
            p.summed_grad = None
        torch.autograd.backward(losses().sum())
        optimizer.clip_and_accumulate()

    return opacus
