"""GradCache: the gradient of a large batch from small passes, dropout included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from negative_cases import NOISE, dual, lines, texts, tower
from pair_stand_ins import batch_of, clipped_sum, plan_of
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import SigmoidPairLoss
from lit_dpret.modules import DualEncoder
from lit_dpret.negatives import BM25Negatives, DynamicNegatives, InBatchNegatives
from lit_dpret.privacy.batches import rows_in_turn, take_rows
from lit_dpret.privacy.modes import BatchClip, LogitDP, PerExampleDuplicated, PublicPassages

DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
HARD = {"negatives": [InBatchNegatives(), BM25Negatives(per_query=2, depth=8)]}
CASES: dict[str, dict[str, Any]] = {
    "shared": {},
    "separate": {"towers": "separate"},
    "hard negatives": HARD,
    "shared hard negatives": {"negatives": [InBatchNegatives(), BM25Negatives(depth=8, shared_in_batch=True)]},
    "separate, hard negatives": {"towers": "separate", **HARD},
    "dynamic": {"towers": "separate", "passage_tower": "frozen", "negatives": [InBatchNegatives(), DynamicNegatives()]},
    "another loss": {"loss": SigmoidPairLoss(temperature=1.0)},
    "checkpointing inside": {"gradient_checkpointing": True},
    "lora": {"lora": {"r": 2, "lora_alpha": 4, "lora_dropout": 0.2, "target_modules": ["query", "value"]}},
}


def with_dropout(case: dict[str, Any], at_once: int | None, dtype: torch.dtype = torch.float64) -> DualEncoder:
    module = dual(encoder=tower(**DROPOUT), grad_cache_rows=at_once, **case).to(dtype).train()
    module.learn_negatives(texts())
    return module


class InOneGraph:
    """Embeds chunk after chunk as the cache does, and so with the same random numbers, but keeps the whole graph."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once

    def __call__(self, embed: Any, features: Any, *, count: int, rows_at_once: int) -> Tensor:
        return torch.cat([embed(take_rows(features, part)) for part in rows_in_turn(count, self.at_once)])


def gradients(module: DualEncoder, *, autocast: bool = False) -> list[Tensor]:
    batch = batch_of(module.collate_rows(lines(0, 1, 3, 4, 6)))
    module.before_batch(batch)
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        losses = module.per_row_loss(batch.rows)
    found = torch.autograd.grad(losses.sum(), [p for p in module.parameters() if p.requires_grad], allow_unused=True)
    return [losses, *(torch.zeros(()) if g is None else g for g in found)]


@pytest.fixture
def one_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Have the cache's place taken by a plain pass while the fixture's function is called."""

    def plain(module: DualEncoder, at_once: int, **settings: Any) -> list[Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr("lit_dpret.modules.dual_encoder.embed_in_chunks", InOneGraph(at_once))
            return gradients(module, **settings)

    yield plain


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "at_once", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_one_graph_with_dropout_on(name: str, at_once: int, one_graph: Any) -> None:
    module = with_dropout(CASES[name], at_once)
    found, expected = gradients(module), one_graph(module, at_once)
    assert any(float(g.abs().max()) > 1e-3 for g in expected[1:])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_without_dropout_they_are_those_of_a_pass_over_all_rows_at_once() -> None:
    plain = {name: 0.0 for name in DROPOUT}
    found = [gradients(dual(encoder=tower(**plain), grad_cache_rows=at_once).double().train()) for at_once in (None, 2)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_dropout_makes_a_difference_here() -> None:
    """Otherwise the tests above would pass with masks that are drawn anew."""
    module = with_dropout({}, 2)
    first = gradients(module)[0]
    torch.manual_seed(8)
    again = module.per_row_loss(module.collate_rows(lines(0, 1, 3, 4, 6)))
    assert not torch.allclose(first, again)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_they_are_the_same_in_lower_precision(autocast: bool, one_graph: Any) -> None:
    module = with_dropout(HARD, 2, torch.float32)
    found, expected = gradients(module, autocast=autocast), one_graph(module, 2, autocast=autocast)
    assert found[0].dtype == torch.float32, "the loss is taken outside of autocast"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_backward_pass_leaves_the_random_state_as_it_was() -> None:
    module = with_dropout({}, 2)
    losses = module.per_row_loss(module.collate_rows(lines(0, 1, 2)))
    before = torch.get_rng_state()
    losses.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_no_more_than_a_chunk_is_remembered() -> None:
    """What is kept for the backward pass, counted in the encoder's own tensors."""

    def kept(at_once: int | None) -> int:
        module, sizes = with_dropout({}, at_once, torch.float32), []
        rows = module.collate_rows(lines(0, 1, 2, 3, 4, 5, 6, 7))
        weights = {p.data_ptr() for p in module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(0 if tensor.data_ptr() in weights else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module.per_row_loss(rows)
        return sum(sizes)

    whole = kept(None)
    assert kept(2) < whole / 10


def test_where_no_gradient_is_wanted_nothing_is_kept() -> None:
    module = with_dropout({}, 2)
    with torch.no_grad():
        assert not module.per_row_loss(module.collate_rows(lines(0, 1, 2))).requires_grad


def test_the_sum_of_a_batch_clip_step_is_the_same() -> None:
    sums = []
    for at_once in (None, 2):
        module = dual(BatchClip(max_grad_norm=0.01, **NOISE), grad_cache_rows=at_once).double()
        rows = module.collate_rows(lines(0, 1, 2, 3, 4))
        sums.append(clipped_sum(module, plan_of(module.privacy, module, n_max=8), rows))
    assert float(sums[0].norm()) == pytest.approx(0.01)
    torch.testing.assert_close(*sums, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "mode",
    [
        PublicPassages(max_grad_norm=1.0, **NOISE),
        LogitDP(max_logit_grad_norm=1.0, **NOISE),
        PerExampleDuplicated(max_grad_norm=1.0, **NOISE),
    ],
    ids=lambda mode: mode.name,
)
def test_modes_that_clip_inside_the_batch_refuse_it(mode: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"grad_cache_rows=8 cannot go with privacy={mode.name}"):
        dual(mode, grad_cache_rows=8)


def test_it_embeds_at_least_one_row_at_a_time() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.grad_cache_rows=0"):
        dual(grad_cache_rows=0)
