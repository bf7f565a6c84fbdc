"""Pairs of encoders, small and random, with some records each.

Imported by path through ``conftest.py``; not a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from clipping_cases import prepared
from tiny_models import tiny_bert, tiny_t5
from torch import Tensor, nn

from lit_dpret.privacy.clipping.pairs import PairBatch, make_pair_norms

DIM = 4
QUERY, PASSAGE = 5, 7


@dataclass(frozen=True)
class Pairs:
    """A trained module, and n records for it."""

    module: nn.Module
    batch: PairBatch

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def first(self, n: int) -> Pairs:
        """Return the first n records."""
        queries, passages = (side.take(slice(0, n)) for side in self.batch.sides)
        return replace(self, batch=replace(self.batch, queries=queries, passages=passages, n=n))


class Images(nn.Module):
    """Convolutions (strided, grouped) with GroupNorm and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 1, 1, groups=2), nn.GroupNorm(2, 6), nn.GELU(),
            nn.Conv2d(6, 6, 3, 2), nn.Flatten(), nn.Linear(6 * 3 * 3, DIM),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x), dim=1)


class Texts(nn.Module):
    """A transformer, mean pooling, and a projection."""

    def __init__(self, encoder: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, DIM, bias=False)

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        hidden = self.encoder(input_ids=rows["ids"], attention_mask=rows["mask"]).last_hidden_state
        pooled = (hidden * rows["mask"][..., None]).sum(1) / rows["mask"].sum(1, keepdim=True)
        return F.normalize(self.head(pooled), dim=1)


class Head(nn.Module):
    """A bias-free head on frozen features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).requires_grad_(False)
        self.projection = nn.Linear(8, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projection(self.features(x)), dim=1)


def mlp() -> nn.Module:
    class Normalised(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(super().forward(x), dim=1)

    return Normalised(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, DIM))


def lora(target: str) -> nn.Module:
    import peft

    base: nn.Module = tiny_bert(num_hidden_layers=1) if target == "bert" else tiny_t5(num_layers=1)
    names = ["query", "value"] if target == "bert" else ["q", "wo"]
    config = peft.LoraConfig(r=2, lora_alpha=3, lora_dropout=0.0, target_modules=names)
    adapted = Texts(peft.get_peft_model(base, config))
    adapted.head.requires_grad_(False)
    return adapted


def vectors(rows: int, salt: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def images(rows: int, salt: int) -> Tensor:
    return torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def texts(rows: int, salt: int) -> dict[str, Tensor]:
    length = QUERY if salt == 0 else PASSAGE
    lengths = 2 + torch.arange(rows) * 3 % (length - 1)
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    ids = torch.randint(2, 60, (rows, length), generator=torch.Generator().manual_seed(salt))
    return {"ids": ids * mask, "mask": mask}


ENCODERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    "mlp": (mlp, vectors),
    "conv_net": (Images, images),
    "bert": (lambda: Texts(tiny_bert()), texts),
    "t5_encoder": (lambda: Texts(tiny_t5()), texts),
    "bert_lora": (lambda: lora("bert"), texts),
    "t5_lora": (lambda: lora("t5"), texts),
    "linear_head": (Head, vectors),
}


def build(name: str, towers: str = "shared", n: int = 5) -> Pairs:
    """``towers``: shared, separate, frozen_passages, or shared_backbone (with two heads; texts only)."""
    torch.manual_seed(0)
    make, rows = ENCODERS[name]
    query = prepared(make()).eval()
    passage = query if towers == "shared" else prepared(make()).eval()
    if towers == "frozen_passages":
        passage.requires_grad_(False)
    if towers == "shared_backbone":
        passage.encoder = query.encoder
    module = query if towers == "shared" else nn.ModuleList([query, passage])
    return Pairs(module, PairBatch(rows(n, 0), rows(n, 1), query, passage, n))


MODELS = ["mlp", "conv_net", "bert", "t5_encoder", "bert_lora", "t5_lora", "linear_head"]
TOWERS = ["shared", "separate", "frozen_passages"]
JACOBIANS = ["jacobian", "k_blocks"]
#: T5's norm takes its mean square in fp32, so the sum of d cotangents equals one pass only up to fp32's rounding.
LINEAR = {"t5_encoder": 1e-6, "t5_lora": 1e-6}


def table(pairs: Pairs, norms: str, **settings: Any) -> Tensor:
    return make_pair_norms(norms, pairs.module, **settings).table(pairs.batch)  # type: ignore[arg-type]


def reference(pairs: Pairs) -> Tensor:
    """Compute the table independently: one backward pass over the whole batch for each pair."""
    batch, parameters = pairs.batch, list(pairs.trained.values())
    s = batch.embed_queries(batch.queries) @ batch.embed_passages(batch.passages).T
    found = torch.zeros(batch.n, batch.n, dtype=torch.float64)
    for i in range(batch.n):
        for j in range(batch.n):
            grads = torch.autograd.grad(s[i, j], parameters, retain_graph=True, allow_unused=True)
            found[i, j] = sum(float(g.square().sum()) for g in grads if g is not None) ** 0.5
    return found


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    assert float(((found - expected) / expected).abs().max()) < tolerance
