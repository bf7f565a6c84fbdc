"""The encoders, and one step of each way to clip pairs, that `logit_dp.py` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TEMPERATURE = 1.0
BOUND = 0.5
ROWS_AT_ONCE = 64

LABELS = {
    "plain": "no privacy",
    "vmap": "all gradients (one vmap)",
    "brute_force": "all gradients (a loop)",
    "pair_ghost": "pair_ghost",
    "jacobian": "jacobian",
    "k_blocks": "k_blocks (bound)",
    "k_blocks_towers": "k_blocks (two towers, exact)",
}
#: The ways that keep n squared gradients.
MATERIALISING = ("vmap", "brute_force")


@dataclass(frozen=True)
class Row:
    """A model by name, records, and the length of an embedding."""

    model: str
    n: int
    dim: int

    @property
    def label(self) -> str:
        """As it stands in the table."""
        return f"{self.model} n={self.n} d={self.dim}"


def build_encoder(name: str, dim: int) -> Any:
    """An encoder with random weights and embeddings of length 1, in eval mode."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Normalised(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return F.normalize(self.body(rows), dim=1)

    class Pooled(nn.Module):
        def __init__(self, encoder: nn.Module, width: int) -> None:
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(width, dim, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(input_ids=ids).last_hidden_state.mean(1))

    if name == "conv":
        layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()]
        layers += [nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, dim)]
        return Normalised(nn.Sequential(*layers)).eval()
    if name == "mlp":
        return Normalised(nn.Sequential(nn.Linear(384, 256), nn.GELU(), nn.Linear(256, dim))).eval()
    from transformers import BertConfig, BertModel

    shape = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=12, intermediate_size=192, vocab_size=512)
    config = BertConfig(**shape, max_position_embeddings=32, attn_implementation="eager")
    return Normalised(Pooled(BertModel(config, add_pooling_layer=False), 48)).eval()


def build_rows(model: str, n: int) -> Any:
    """Images, features, or texts of 16 tokens."""
    import torch

    if model == "conv":
        return torch.randn(n, 3, 32, 32)
    return torch.randn(n, 384) if model == "mlp" else torch.randint(1, 512, (n, 16))


def build_module(variant: str, row: Row) -> Any:
    """The shared encoder; for two towers, both."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    count = 2 if variant.endswith("_towers") else 1
    return nn.ModuleList([build_encoder(row.model, row.dim) for _ in range(count)])


def build_step(variant: str, module: Any, row: Row) -> Callable[[], Any]:
    """One step of a variant: the gradient of an in-batch softmax, by pairs clipped to ``BOUND``."""
    import torch
    import torch.nn.functional as F

    from lit_dpret.privacy.clipping.pairs import (
        BruteForce,
        PairBatch,
        clipped_pair_factors,
        embed_all,
        make_pair_norms,
        weighted_backward,
    )

    n = row.n
    queries, passages = build_rows(row.model, n), build_rows(row.model, n)
    batch = PairBatch(queries, passages, module[0], module[-1], n)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def slopes() -> torch.Tensor:
        e, f = embed_all(batch, rows_at_once=ROWS_AT_ONCE)
        return ((e @ f.T / TEMPERATURE).softmax(1) - torch.eye(n)) / TEMPERATURE

    def plain() -> list[torch.Tensor]:
        logits = module[0](queries) @ module[-1](passages).T / TEMPERATURE
        loss = F.cross_entropy(logits, torch.arange(n), reduction="sum")
        return list(torch.autograd.grad(loss, list(trained.values()), allow_unused=True))

    def weighted(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        norms = torch.zeros(n, n)
        for gradient in gradients.values():  # a row at a time: the squares of all would be another n * n * p
            for i, of_query in enumerate(gradient):
                norms[i] += of_query.flatten(1).square().sum(1)
        weights = slopes() * clipped_pair_factors(norms.sqrt(), BOUND)[0]
        return {name: torch.tensordot(weights, gradient, dims=2) for name, gradient in gradients.items()}

    def vmap() -> dict[str, torch.Tensor]:
        values = {name: p.detach() for name, p in trained.items()}

        def similarity(values: dict[str, torch.Tensor], query: torch.Tensor, passage: torch.Tensor) -> torch.Tensor:
            sides = {name.removeprefix("0."): value for name, value in values.items()}
            e, f = (torch.func.functional_call(module[0], sides, (x[None],)) for x in (query, passage))
            return (e * f).sum()

        of_pair = torch.func.grad(similarity)
        by_passage = torch.func.vmap(of_pair, in_dims=(None, None, 0))
        return weighted(torch.func.vmap(by_passage, in_dims=(None, 0, None))(values, queries, passages))

    if variant == "plain":
        return plain
    if variant == "vmap":
        return vmap
    if variant == "brute_force":
        return lambda: weighted(BruteForce(module).gradients(batch))
    towers = variant.endswith("_towers")
    norms: Any = make_pair_norms(variant.removesuffix("_towers"), module, shared=not towers)  # type: ignore[arg-type]

    def private() -> dict[str, torch.Tensor]:
        factors, _ = clipped_pair_factors(norms.table(batch), BOUND)
        return weighted_backward(batch, slopes() * factors, trained, rows_at_once=ROWS_AT_ONCE)

    return private
