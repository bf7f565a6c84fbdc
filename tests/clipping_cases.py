"""Small real models, and their reference: one unit at a time, by autograd; not a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.clipping.base import ClippedSum, ClipStats

Rows = dict[str, Tensor]
ENGINES = ["ghost", "vmap", "loop", "opacus"]
VOCAB = 29


@dataclass
class Case:
    """A model, its loss per row, and some rows."""

    module: nn.Module
    losses: Callable[[Rows], Tensor]
    rows: Rows

    @property
    def count(self) -> int:
        return len(next(iter(self.rows.values())))

    def take(self, index: Tensor) -> Rows:
        return {name: value[index] for name, value in self.rows.items()}

    def run(
        self, engine: ClippedSum, unit_ids: Tensor | None = None, mask: Tensor | None = None, rows: Rows | None = None
    ) -> ClipStats:
        rows = self.rows if rows is None else rows
        count = len(next(iter(rows.values())))
        unit_ids = torch.arange(count) if unit_ids is None else unit_ids
        mask = torch.ones(int(unit_ids.max()) + 1, dtype=torch.bool) if mask is None else mask

        def losses(index: Tensor | slice = slice(None)) -> Tensor:
            return self.losses({name: value[index] for name, value in rows.items()})

        return engine.add(losses, unit_ids, mask)

    def unit_gradients(self, unit_ids: Tensor | None = None, mask: Tensor | None = None) -> list[dict[str, Tensor]]:
        """Return the gradient of each unit from its own forward and backward pass, without using the engines."""
        unit_ids = torch.arange(self.count) if unit_ids is None else unit_ids
        units = int(unit_ids.max()) + 1 if mask is None else len(mask)
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        result = []
        for unit in range(units):
            index = (unit_ids == unit).nonzero().flatten()
            if not len(index) or (mask is not None and not mask[unit]):
                result.append({n: torch.zeros_like(p) for n, p in parameters.items()})
                continue
            loss = self.losses(self.take(index)).sum()
            grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            found = zip(parameters.items(), grads, strict=True)
            result.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in found})
        return result


def norm_of(gradient: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.double().square().sum() for g in gradient.values()]).sum().sqrt()


def lowered(bound: float, tensors: Iterable[Tensor] | None = None) -> float:
    """Return the norm that a unit is clipped to: below the bound by 1e-9 of it in float64, else by 5e-3."""
    wide = tensors is not None and all(tensor.dtype == torch.float64 for tensor in tensors)
    return bound / (1 + (1e-9 if wide else 5e-3))


def clipped_sum(
    gradients: list[dict[str, Tensor]], bound: float, clip: str = "abadi", groups: Sequence[Sequence[str]] | None = None
) -> dict[str, Tensor]:
    """Scale each group (by default all parameters) of each gradient to its share of the bound, and sum them.

    The bound is lowered by what rounding may add (`lowered`).
    """
    groups = [list(gradients[0])] if groups is None else groups
    bound = lowered(bound, gradients[0].values())
    share, total = bound / math.sqrt(len(groups)), {n: torch.zeros_like(g) for n, g in gradients[0].items()}
    for gradient in gradients:
        for names in groups:
            norm = float(norm_of({n: gradient[n] for n in names}))
            factor = min(1.0, share / norm) if clip == "abadi" and norm > 0 else 1.0
            factor = share / (norm + 0.01) if clip == "automatic" else factor
            for name in names:
                total[name] += factor * gradient[name]
    return total


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the L2 distance over all parameters together, relative to the expected norm."""
    assert found.keys() == expected.keys()
    gap = norm_of({n: found[n] - expected[n] for n in found})
    return float(gap / norm_of(expected))


def check_exact(
    case: Case,
    *,
    engine: str = "ghost",
    unit_ids: Tensor | None = None,
    mask: Tensor | None = None,
    clip: str = "abadi",
    clip_groups: str = "flat",
    tolerance: float = 1e-10,
    **settings: object,
) -> ClippedSum:
    """Check that norms and sum equal the reference, with a bound that clips about half of the units; twice, so that
    the first batch (which is verified) and a later one (which is not) are both compared.
    """
    gradients = case.unit_gradients(unit_ids, mask)
    norms = torch.stack([norm_of(g) for g in gradients])
    bound = 1.001 * float(norms[norms > 0].median())
    clipping = make_engine(engine, case.module, max_grad_norm=bound, clip=clip, clip_groups=clip_groups, **settings)
    expected = clipped_sum(gradients, bound, clip, clipping.groups)
    share = bound / math.sqrt(len(clipping.groups))
    above = [any(float(norm_of({n: g[n] for n in names})) > share for names in clipping.groups) for g in gradients]
    for _ in range(2):
        stats = case.run(clipping, unit_ids, mask)
        assert torch.allclose(stats.norms.double(), norms.double(), rtol=tolerance, atol=1e-14)
        assert stats.non_finite == 0
        assert stats.clipped == sum(above)
        assert difference(clipping.take(), expected) < tolerance
    return clipping


def check_low_precision(
    case: Case,
    *,
    engine: str = "ghost",
    weights: torch.dtype = torch.float32,
    autocast: bool = True,
    clip_groups: str = "flat",
    norm_within: float | None = 0.1,
    floor: float = 0.0,
    least: float = lowered(1.0) * (1 - 1e-5),
) -> None:
    """Check that under bf16, by autocast or by its weights, each unit alone moves the sum by its clipped norm, in fp32.

    Norms and sums come from the same bf16 tensors, so bf16 adds nothing to the bound. The norm itself is that of
    bf16's gradient. It is within ``norm_within`` of the exact one, or within ``floor`` times the largest: the tiny
    norm of a saturated unit is known no more precisely than the others' rounding.
    """
    exact = torch.stack([norm_of(g) for g in case.unit_gradients()])
    case.module.to(weights)
    case.rows = {n: v.to(weights) if v.is_floating_point() else v for n, v in case.rows.items()}
    bound = float(exact.min()) / (3 if clip_groups == "flat" else 1e5)
    clipping = make_engine(engine, case.module, max_grad_norm=bound, clip_groups=clip_groups)
    for unit in range(case.count):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and weights == torch.float32):
            stats = case.run(clipping, mask=torch.arange(case.count) == unit)
        sums = clipping.take()
        assert all(total.dtype == torch.float32 for total in sums.values())
        share = bound / math.sqrt(len(clipping.groups))
        assert all(norm_of({n: sums[n] for n in names}) <= share for names in clipping.groups)
        reached = float(norm_of(sums))
        assert reached <= bound and (reached >= least * bound or clip_groups == "per_layer")
        near = floor * float(exact.max())
        assert norm_within is None or math.isclose(stats.norms[unit], exact[unit], rel_tol=norm_within, abs_tol=near)


def check_dropped(
    case: Case, broken: int, *, engine: str = "ghost", unit_ids: Tensor | None = None, **settings: object
) -> None:
    """Check that the unit ``broken`` adds nothing and is counted, and the others add what they add without it."""
    rest = [g for i, g in enumerate(case.unit_gradients(unit_ids)) if i != broken]
    bound = sorted(float(norm_of(g)) for g in rest)[len(rest) // 2]
    clipping = make_engine(engine, case.module, max_grad_norm=bound, **settings)
    for _ in range(2):
        stats = case.run(clipping, unit_ids)
        assert stats.non_finite == 1 and not stats.norms[broken].isfinite()
        assert stats.norms[torch.arange(len(stats.norms)) != broken].isfinite().all()
        assert difference(clipping.take(), clipped_sum(rest, bound, groups=clipping.groups)) < 1e-10


def check_refused(case: Case, words: str, *, engine: str = "ghost", unit_ids: Tensor | None = None) -> None:
    """Check that the batch is refused with this pattern, and that nothing of it is in the sum."""
    clipping = make_engine(engine, case.module, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match=words):
        case.run(clipping, unit_ids)
    assert not any(total.any() for total in clipping.take().values())


def add(clipping: ClippedSum, losses: Callable[..., Tensor], units: int) -> ClipStats:
    """Add a batch of ``units`` rows, each of which is a unit."""
    return clipping.add(losses, torch.arange(units), torch.ones(units, dtype=torch.bool))


def alone(clipping: ClippedSum, losses: Callable[[], Tensor]) -> float:
    """Return the norm that a single unit of one row adds to the sum."""
    add(clipping, lambda *_: losses(), 1)
    return float(norm_of(clipping.take()))


# --- models -----------------------------------------------------------------------------------------------------


def lengths_mask(count: int, longest: int) -> Tensor:
    """Return a mask of rows of different lengths, so that there is padding."""
    lengths = 2 + torch.arange(count) * 7 % (longest - 1)
    return (torch.arange(longest)[None, :] < lengths[:, None]).long()


def prepared(model: nn.Module) -> Any:
    """Convert to float64 and move the weights away from their initial values."""
    model.double()
    for p in model.parameters():
        if p.requires_grad:
            p.data.add_(torch.randn_like(p) * 0.2)
    return model


def case_of(model: nn.Module, *shape: int) -> Case:
    """Return a case with a loss of all outputs, for rows of this shape; the first size is their number."""
    model.double()
    x = torch.randn(*shape, dtype=torch.float64)
    return Case(model, lambda b: model(b["x"]).flatten(1).sin().sum(1), {"x": x})


def t5_config(**changes: object) -> hf.T5Config:
    values: dict[str, object] = dict(
        vocab_size=VOCAB, d_model=12, d_kv=3, d_ff=14, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5Config(**(values | changes))


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1)


def t5(rows: int = 4, query: int = 6, passage: int = 9, untied: bool = False, **changes: object) -> Case:
    config = t5_config(**changes)
    config.scale_decoder_outputs = not untied
    model = hf.T5ForConditionalGeneration(config).double()
    if untied:
        model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, config.d_model, dtype=torch.float64) * 0.3)
    prepared(model)
    attention = lengths_mask(rows, passage)
    labels = torch.randint(1, VOCAB, (rows, query))
    labels[lengths_mask(rows, query) == 0] = -100
    data = {"input_ids": torch.randint(1, VOCAB, (rows, passage)) * attention, "mask": attention, "labels": labels}

    def losses(batch: Rows) -> Tensor:
        out = model(input_ids=batch["input_ids"], attention_mask=batch["mask"], labels=batch["labels"], use_cache=False)
        return token_losses(out.logits, batch["labels"])

    return Case(model, losses, data)


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def encoder_case(encoder: nn.Module, rows: int = 5, length: int = 7) -> Case:
    prepared(encoder)
    mask = lengths_mask(rows, length)
    data = {
        "ids": torch.where(mask.bool(), torch.randint(2, VOCAB, (rows, length)), 1),
        "mask": mask,
        "target": torch.randn(rows, 12, dtype=torch.float64),
    }

    def losses(batch: Rows) -> Tensor:
        hidden = encoder(input_ids=batch["ids"], attention_mask=batch["mask"]).last_hidden_state
        return (pooled(hidden, batch["mask"]) * batch["target"]).sum(1).tanh()

    return Case(encoder, losses, data)


BERT = dict(
    vocab_size=VOCAB, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=14,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1,
)  # fmt: skip


def bert(rows: int = 5, **changes: object) -> Case:
    return encoder_case(hf.BertModel(hf.BertConfig(**(BERT | changes))), rows)


def bert_lm(rows: int = 4, length: int = 6) -> Case:
    """Return a model whose output layer is tied to the word embeddings and whose bias belongs to two modules."""
    model = prepared(hf.BertForMaskedLM(hf.BertConfig(**BERT)))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    ids, mask = torch.randint(2, VOCAB, (rows, length)), lengths_mask(rows, length)

    def losses(batch: Rows) -> Tensor:
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
        return token_losses(logits, batch["ids"].masked_fill(batch["mask"] == 0, -100))

    return Case(model, losses, {"ids": ids, "mask": mask})


def minilm(rows: int = 5, **changes: object) -> Case:
    """Return a model shaped like MiniLM: narrow and deep, a BERT without its pooler."""
    shape = BERT | {"num_hidden_layers": 4, "num_attention_heads": 6} | changes
    return encoder_case(hf.BertModel(hf.BertConfig(**shape), add_pooling_layer=False), rows)


def distilbert(rows: int = 5, **changes: object) -> Case:
    values = dict(
        vocab_size=VOCAB, dim=12, n_layers=2, n_heads=3, hidden_dim=14, max_position_embeddings=16, dropout=0.0,
        attention_dropout=0.0, pad_token_id=1,
    )  # fmt: skip
    return encoder_case(hf.DistilBertModel(hf.DistilBertConfig(**(values | changes))), rows)


def roberta() -> Case:
    return encoder_case(hf.RobertaModel(hf.RobertaConfig(**BERT)))


def t5_encoder() -> Case:
    return encoder_case(hf.T5EncoderModel(t5_config()))


class DualEncoder(nn.Module):
    """Siamese towers: queries alone, passages folded to (rows * k), or both in one call."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(12, 6, bias=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(pooled(self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state, mask))


def siamese(together: bool = False, rows: int = 4, k: int = 3) -> Case:
    model = prepared(DualEncoder(hf.BertModel(hf.BertConfig(**BERT), add_pooling_layer=False)))
    q, p = 5, 8
    data = {
        "query": torch.randint(2, VOCAB, (rows, q)),
        "passages": torch.randint(2, VOCAB, (rows, k, p)),
        "query_mask": lengths_mask(rows, q),
        "passages_mask": lengths_mask(rows * k, p).view(rows, k, p),
    }

    def losses(batch: Rows) -> Tensor:
        n = len(batch["query"])
        if together:  # one call, queries first: the batch axis is (2, rows), not (rows, 2)
            ids = torch.cat([F.pad(batch["query"], (0, p - q), value=1), batch["passages"][:, 0]])
            mask = torch.cat([F.pad(batch["query_mask"], (0, p - q)), batch["passages_mask"][:, 0]])
            queries, passages = model(ids, mask).chunk(2)
            return (queries * passages).sum(1).sigmoid()
        queries = model(batch["query"], batch["query_mask"])
        passages = model(batch["passages"].flatten(0, 1), batch["passages_mask"].flatten(0, 1)).view(n, -1, 6)
        return -torch.einsum("nd,nkd->nk", queries, passages).log_softmax(1)[:, 0]

    return Case(model, losses, data)


class Reused(nn.Module):
    """Small layers in every kind of sharing; ``forward`` returns one loss per row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, 6, padding_idx=1, sparse=kind == "sparse")
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.RMSNorm(6)
        self.out = nn.Linear(6, VOCAB)
        self.idle = nn.Linear(6, 6)
        if kind == "tied":
            self.out.weight = self.embed.weight
        if kind == "norm_tied_to_linear":
            self.wide = nn.LayerNorm((1, 6))
            self.narrow = nn.Linear(6, 1)
            self.narrow.weight = self.wide.weight
        if kind == "two_linears":
            self.idle.weight = self.inner.weight

    def forward(self, rows: Rows) -> Tensor:
        ids = rows["ids"]
        hidden = self.norm(self.embed(ids))
        for _ in range(3 if self.kind == "loop" else 1):
            hidden = hidden + self.inner(hidden).tanh()
        if self.kind == "two_linears":
            hidden = hidden + self.idle(hidden.cos())
        if self.kind == "norm_tied_to_linear":
            hidden = self.wide(hidden[:, :, None])[:, :, 0] + self.narrow(hidden)
        if self.kind == "flat":
            hidden = self.inner(hidden.flatten(0, 1)).view_as(hidden)
        if self.kind == "wide":
            hidden = self.inner(hidden.view(len(ids), 1, 2, -1, 6)).view_as(hidden)
        if self.kind == "inplace":
            hidden = F.relu(self.inner(hidden), inplace=True)
        logits = self.out(self.scale(hidden))
        return token_losses(logits, ids.roll(1, 1))


def small(kind: str = "plain", rows: int = 5, length: int = 6) -> Case:
    model = prepared(Reused(kind))
    ids = torch.randint(0, VOCAB, (rows, length))
    ids[:, -1] = 1
    return Case(model, model, {"ids": ids})


def head(rows: int = 6) -> Case:
    model = nn.Linear(5, 3).double()
    data = {"x": torch.randn(rows, 5, dtype=torch.float64), "y": torch.arange(rows) % 3}
    return Case(model, lambda b: F.cross_entropy(model(b["x"]), b["y"], reduction="none"), data)


CASES: dict[str, Callable[[], Case]] = {
    "head": head,
    "small": small,
    "module_called_three_times": lambda: small("loop"),
    "embedding_tied_to_linear": lambda: small("tied"),
    "two_linears_with_one_weight": lambda: small("two_linears"),
    "norm_tied_to_linear": lambda: small("norm_tied_to_linear"),
    "sparse_embedding": lambda: small("sparse"),
    "tokens_flattened_into_the_batch": lambda: small("flat"),
    "five_axes": lambda: small("wide"),
    "inplace_activation": lambda: small("inplace"),
    "t5_tied_relu": t5,
    "t5_untied_relu": lambda: t5(untied=True),
    "t5_tied_gated": lambda: t5(feed_forward_proj="gated-gelu"),
    "t5_untied_gated": lambda: t5(untied=True, feed_forward_proj="gated-gelu"),
    "t5_eager": lambda: t5(attn_implementation="eager"),
    "t5_batch_equal_to_query_length": lambda: t5(rows=6, query=6, passage=6),
    "t5_encoder": t5_encoder,
    "bert": bert,
    "bert_masked_lm": bert_lm,
    "minilm": minilm,
    "distilbert": distilbert,
    "roberta": roberta,
    "siamese": siamese,
    "siamese_in_one_call": lambda: siamese(together=True),
}


def text(rows: int, length: int) -> dict[str, Tensor]:
    mask = lengths_mask(rows, length)
    return {"ids": torch.randint(2, VOCAB, (rows, length)) * mask + (1 - mask), "mask": mask}


def causal(model: nn.Module, rows: int = 5, length: int = 6) -> Case:
    def losses(batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False).logits
        labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
        prompt = logits.shape[1] - labels.shape[1]  # virtual tokens, if any
        return token_losses(logits[:, prompt:-1], labels[:, 1:])

    return Case(model, losses, text(rows, length))


def gpt2(**changes: Any) -> nn.Module:
    values = dict(
        vocab_size=VOCAB, n_positions=12, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return prepared(hf.GPT2LMHeadModel(hf.GPT2Config(**(values | changes))))


LLAMA = dict(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, head_dim=2, pad_token_id=1, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def llama(**changes: Any) -> nn.Module:
    return prepared(hf.LlamaForCausalLM(hf.LlamaConfig(**(LLAMA | changes))))


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2_untied": lambda: gpt2(tie_word_embeddings=False),
    "llama": llama,
    "llama_tied_with_biases": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mistral": lambda: prepared(hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=3))),
    "qwen2": lambda: prepared(hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA))),
    "qwen3": lambda: prepared(hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA))),
    "gemma3": lambda: prepared(hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**LLAMA, query_pre_attn_scalar=2))),
}


def bart(rows: int = 4, query: int = 5, passage: int = 7, **changes: Any) -> Any:
    values = dict(
        vocab_size=VOCAB, d_model=8, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=10, decoder_ffn_dim=10, max_position_embeddings=12, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, scale_embedding=True, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    model = prepared(hf.BartForConditionalGeneration(hf.BartConfig(**(values | changes))))
    data = text(rows, passage)
    data["labels"] = torch.randint(2, VOCAB, (rows, query)).masked_fill(lengths_mask(rows, query) == 0, -100)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        start = batch["labels"].roll(1, 1).clamp(min=1)
        out = model(input_ids=batch["ids"], attention_mask=batch["mask"], decoder_input_ids=start, use_cache=False)
        return token_losses(out.logits, batch["labels"])

    return Case(model, losses, data)


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


def resnet(rows: int = 4, checkpointed: bool = False) -> Any:
    model = ResNet18(checkpointed).double()
    data = {"x": torch.randn(rows, 3, 33, 32).double(), "y": torch.arange(rows) % 3}
    return Case(model, lambda b: F.cross_entropy(model(b["x"]), b["y"], reduction="none"), data)


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


def conv_net(rows: int = 4) -> Any:
    model = ConvNet().double()
    data = {"x": torch.randn(rows, 3, 16, 16).double(), "y": torch.arange(rows) % 3}
    return Case(model, lambda b: F.cross_entropy(model(b["x"]), b["y"], reduction="none"), data)


Build = Callable[..., Any]
GATED = {"feed_forward_proj": "gated-gelu"}

#: The covered models by name; called with the number of rows and changes of the configuration.
COVERED: dict[str, Build] = {
    "t5_v1.0_tied": lambda rows, **changes: t5(rows, **changes),
    "t5_v1.0_untied": lambda rows, **changes: t5(rows, untied=True, **changes),
    "t5_v1.1_tied": lambda rows, **changes: t5(rows, **GATED, **changes),
    "t5_v1.1_untied_as_flan": lambda rows, **changes: t5(rows, untied=True, **GATED, **changes),
    "bart": bart,
    "gpt2": lambda rows, **changes: causal(gpt2(**changes), rows),
    "llama": lambda rows, **changes: causal(llama(**changes), rows),
    "llama_tied": lambda rows, **changes: causal(llama(tie_word_embeddings=True, **changes), rows),
    "bert": lambda rows, **changes: bert(rows, **changes),
    "distilbert": lambda rows, **changes: distilbert(rows, **changes),
    "minilm": lambda rows, **changes: minilm(rows, **changes),
    "resnet18": resnet,
    "conv_net": conv_net,
}


# -- modules with a parameter that no rule covers ------------------------------------------------


class Scaled(nn.Module):
    """A bare parameter next to a layer that has a rule."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.temperature.exp()


class Positions(nn.Module):
    """Position parameters that are used directly, before a layer in a ModuleDict."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.tables = nn.ModuleDict({"a": nn.Linear(width, width)})

    def forward(self, x: Tensor) -> Tensor:
        return self.tables["a"](x + self.positions[:, : x.shape[1]]).tanh()
