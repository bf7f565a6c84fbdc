"""Losses of one row: softmaxes over a batch, a public pool or own negatives, and margins of a teacher, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import (
    HardNegativeSoftmaxLoss,
    InBatchSoftmaxLoss,
    MarginMSELoss,
    PublicPoolSoftmaxLoss,
    false_negatives,
)
from lit_dpret.losses.similarity import SIMILARITIES, cosine, get_similarity


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def score(query: Tensor, passage: Tensor, similarity: str) -> float:
    value = float(query @ passage)
    return value / float(query.norm() * passage.norm()) if similarity == "cosine" else value


def brute_force(query: Tensor, own: Tensor, others: list[Tensor], temperature: float, similarity: str) -> float:
    """-log of the softmax share of ``own``, one exponential at a time."""
    top = math.exp(score(query, own, similarity) / temperature)
    return -math.log(top / (top + sum(math.exp(score(query, other, similarity) / temperature) for other in others)))


SETTINGS = pytest.mark.parametrize(("temperature", "similarity"), [(0.05, "cosine"), (1.0, "cosine"), (2.0, "dot")])


@SETTINGS
def test_each_row_of_the_in_batch_loss_is_a_cross_entropy_over_its_candidates(
    temperature: float, similarity: str
) -> None:
    queries, passages = draw(6, 5), draw(9, 5, seed=1)  # three extra hard negatives
    ids = ["a", "b", "a", "c", "d", "e", "b", "f", "g"]
    positives = [{"a"}, {"b", "c"}, {"a", "f"}, {"c"}, {"d", "elsewhere"}, set()]
    known, loss = false_negatives(ids[:6], ids, positives), InBatchSoftmaxLoss(temperature, similarity)
    assert known.shape == (6, 9)
    for mask in (None, known, known | torch.eye(6, 9, dtype=torch.bool)):  # a row's own positive stays in any case
        losses = loss(queries, passages, mask)
        assert losses.shape == (6,)
        for row in range(6):
            answers = set() if mask is None else positives[row] | {ids[row]}
            others = [passages[j] for j in range(9) if j != row and ids[j] not in answers]
            wanted = brute_force(queries[row], passages[row], others, temperature, similarity)
            assert float(losses[row]) == pytest.approx(wanted, rel=1e-9)
    same = false_negatives(["a", "a"], ["a", "a"])
    assert loss(draw(2, 3), draw(2, 3, seed=1), same).tolist() == [0.0, 0.0], "all candidates are right answers"


@SETTINGS
@pytest.mark.parametrize("beside", [False, True])
def test_each_row_of_the_pool_loss_is_a_cross_entropy_over_its_candidates(
    temperature: float, similarity: str, beside: bool
) -> None:
    queries, pool, own = draw(5, 4), draw(11, 4, seed=1), draw(5, 4, seed=2)
    index = torch.tensor([3, 0, 3, 10, 7])
    mask = torch.rand(5, 11, generator=torch.Generator().manual_seed(3)) < 0.3
    loss = PublicPoolSoftmaxLoss(temperature, similarity)
    target = {"positive_embeddings": own} if beside else {"positive_index": index}
    losses = loss(queries, pool, mask=mask, **target)
    for row in range(5):
        kept = [j for j in range(11) if not mask[row, j] and (beside or j != int(index[row]))]
        passage = own[row] if beside else pool[index[row]]
        wanted = brute_force(queries[row], passage, [pool[j] for j in kept], temperature, similarity)
        assert float(losses[row]) == pytest.approx(wanted, rel=1e-9)


@SETTINGS
def test_each_row_of_the_hard_negative_loss_is_a_cross_entropy_over_its_own_and_the_shared_candidates(
    temperature: float, similarity: str
) -> None:
    queries, positives, own, shared = draw(4, 5), draw(4, 5, seed=1), draw(4, 3, 5, seed=2), draw(6, 5, seed=3)
    own_mask, shared_mask = draw(4, 3, seed=4) > 0.3, draw(4, 6, seed=5) > 0.3
    loss = HardNegativeSoftmaxLoss(temperature, similarity)
    found = loss(queries, positives, own=own, own_mask=own_mask, shared=shared, shared_mask=shared_mask)
    assert own_mask.any() and shared_mask.any()
    for row in range(4):
        others = [own[row, j] for j in range(3) if not own_mask[row, j]]
        others += [shared[j] for j in range(6) if not shared_mask[row, j]]
        wanted = brute_force(queries[row], positives[row], others, temperature, similarity)
        assert float(found[row]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("k", range(4))
def test_changing_one_record_changes_its_own_row_of_the_pool_loss_and_no_other(k: int) -> None:
    """Values and gradients alike: this is what makes clipping each query enough."""

    def rows(queries: Tensor, index: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = queries.clone().requires_grad_()
        losses = PublicPoolSoftmaxLoss(0.05)(leaf, pool, index, mask=mask)
        jacobian = torch.stack([torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in losses])
        return losses.detach(), jacobian

    queries, pool, index = draw(4, 6), draw(20, 6, seed=1), torch.tensor([0, 5, 5, 19])
    mask = torch.rand(4, 20, generator=torch.Generator().manual_seed(2)) < 0.2
    losses, jacobian = rows(queries, index, mask)
    off_diagonal = ~torch.eye(4, dtype=torch.bool)
    assert jacobian[off_diagonal].eq(0).all() and jacobian[~off_diagonal].ne(0).any()
    index[k], mask[k] = 7, ~mask[k]
    others = torch.arange(4) != k
    queries[k] = draw(6, seed=9)
    changed, gradients = rows(queries, index, mask)
    assert torch.equal(changed[others], losses[others]) and changed[k] != losses[k]
    assert torch.equal(gradients[others], jacobian[others])
    queries[k] = math.nan
    poisoned, _ = rows(queries, index, mask)
    assert torch.equal(poisoned[others], losses[others]) and poisoned[k].isnan()


def test_no_gradient_reaches_the_pool_and_one_reaches_the_own_positive() -> None:
    queries, pool, own = (draw(3, 4, seed=i).requires_grad_() for i in range(3))
    PublicPoolSoftmaxLoss(0.3)(queries, pool, positive_embeddings=own).sum().backward()
    assert pool.grad is None
    assert queries.grad is not None and own.grad is not None and own.grad.ne(0).any(dim=1).all()


def test_half_precision_embeddings_give_a_float32_loss_under_autocast_too() -> None:
    queries, pool, index = draw(3, 8).bfloat16(), draw(5, 8, seed=1).bfloat16(), torch.tensor([0, 1, 2])
    loss = PublicPoolSoftmaxLoss(0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(queries, pool, index)
    assert found.dtype == torch.float32
    assert torch.allclose(found, loss(queries.float(), pool.float(), index), atol=1e-5)


# -- margins of a teacher ---------------------------------------------------------------------


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_the_margin_loss_is_the_mean_squared_error_of_the_margins(similarity: str) -> None:
    queries, own, others, margins = draw(4, 5), draw(4, 5, seed=1), draw(4, 3, 5, seed=2), draw(4, 3, seed=3)
    found = MarginMSELoss(temperature=0.5, similarity=similarity)(queries, own, others, margins)
    for i in range(4):
        right = score(queries[i], own[i], similarity)
        wrong = [score(queries[i], others[i, j], similarity) for j in range(3)]
        errors = [((right - wrong[j]) / 0.5 - float(margins[i, j])) ** 2 for j in range(3)]
        assert float(found[i]) == pytest.approx(sum(errors) / 3, rel=1e-12)


def test_what_is_masked_counts_for_nothing_and_a_row_without_labels_has_no_gradient() -> None:
    queries, own, others, margins = draw(4, 5), draw(4, 5, seed=1), draw(4, 3, 5, seed=2), draw(4, 3, seed=3)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[0, 1] = mask[2] = True
    margins[0, 1] = math.nan
    queries.requires_grad_()
    loss = MarginMSELoss(similarity="dot")
    found = loss(queries, own, others, margins, mask)
    alone = loss(queries[:1], own[:1], others[:1, [0, 2]], margins[:1, [0, 2]])
    assert found[0].item() == pytest.approx(alone.item(), rel=1e-12) and found[2].item() == 0
    found.sum().backward()
    assert queries.grad is not None and bool(torch.isfinite(queries.grad).all())
    assert float(queries.grad[2].abs().sum()) == 0 < float(queries.grad[0].abs().sum())


# -- similarities and refusals ----------------------------------------------------------------


def test_a_zero_embedding_scores_zero_and_has_a_finite_gradient() -> None:
    queries = torch.zeros(1, 3, requires_grad=True)
    scores = cosine(queries, torch.ones(2, 3))
    assert scores.tolist() == [[0.0, 0.0]]
    scores.sum().backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None and queries.grad.isfinite().all()
    assert [get_similarity(name) for name in SIMILARITIES] == list(SIMILARITIES.values())


TWO, FOUR, POOL, HARD, MARGIN = (
    torch.ones(2, 3), torch.ones(4, 3), PublicPoolSoftmaxLoss(), HardNegativeSoftmaxLoss(), MarginMSELoss()
)  # fmt: skip
EACH = torch.ones(2, 2, 3)
REFUSED: list[tuple[Callable[[], object], str]] = [
    *((lambda kind=kind, value=value: kind(value), r"model\.loss\.temperature")
      for kind in (InBatchSoftmaxLoss, PublicPoolSoftmaxLoss, MarginMSELoss)
      for value in (0.0, -1.0, math.nan, math.inf)),
    (lambda: get_similarity("euclid"), "similarity='euclid'"),
    (lambda: InBatchSoftmaxLoss()(FOUR, TWO), "2 passages"),
    (lambda: POOL(TWO, FOUR), "positive_index|exactly one"),
    (lambda: POOL(TWO, FOUR, torch.tensor([0, 1]), TWO), "exactly one"),
    *((lambda wrong=wrong: POOL(TWO, FOUR, torch.tensor(wrong)), "positive_index")
      for wrong in ([0, 4], [-1, 0], [0], [0.0, 1.0])),
    (lambda: POOL(TWO, FOUR, torch.tensor([0, 1]), mask=torch.zeros(2, 4, dtype=torch.long)), r"mask is torch\.int64"),
    (lambda: POOL(TWO, FOUR, positive_embeddings=FOUR), "positive_embeddings"),
    (lambda: HARD(TWO, TWO, own=torch.zeros(1, 1, 3)), "2 rows"),
    (lambda: HARD(TWO, TWO, own=TWO), "2 rows"),
    (lambda: HARD(TWO, TWO, shared=FOUR, shared_mask=torch.zeros(2, 2, dtype=torch.bool)), r"\(2, 4\)"),
    (lambda: HARD(TWO, TWO, own=EACH, own_mask=torch.zeros(2, 2)), r"torch\.bool"),
    (lambda: HARD(FOUR, TWO), "one positive for each query"),
    (lambda: MARGIN(TWO, TWO, EACH, torch.ones(2, 1)), r"margins \(2, 1\)"),
    (lambda: MARGIN(TWO, TWO, TWO, torch.ones(2, 2)), r"negative_embeddings has shape \(2, 3\)"),
    (lambda: MARGIN(TWO, TWO, EACH, torch.full((2, 2), math.inf)), "finite"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_what_does_not_fit_together_is_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()
