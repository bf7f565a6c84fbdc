from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import HardNegativeSoftmaxLoss, InBatchSoftmaxLoss, PublicPoolSoftmaxLoss, false_negatives
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
    losses = InBatchSoftmaxLoss(temperature, similarity)(queries, passages, false_negatives(ids[:6], ids, positives))
    assert losses.shape == (6,)
    for row in range(6):
        answers = positives[row] | {ids[row]}
        others = [passages[j] for j in range(9) if j != row and ids[j] not in answers]
        wanted = brute_force(queries[row], passages[row], others, temperature, similarity)
        assert float(losses[row]) == pytest.approx(wanted, rel=1e-9)


def test_without_ids_every_other_passage_is_a_negative_and_a_mask_leaves_some_out() -> None:
    queries, passages, loss = draw(3, 4), draw(4, 4, seed=1), InBatchSoftmaxLoss(0.5)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[0, 2] = mask[1, 1] = mask[2, 3] = True  # [1, 1] is row 1's own positive, and stays
    plain, masked = loss(queries, passages), loss(queries, passages, mask=mask)
    for row in range(3):
        others = [passages[j] for j in range(4) if j != row]
        assert float(plain[row]) == pytest.approx(brute_force(queries[row], passages[row], others, 0.5, "cosine"))
        kept = [passages[j] for j in range(4) if j != row and not mask[row, j]]
        assert float(masked[row]) == pytest.approx(brute_force(queries[row], passages[row], kept, 0.5, "cosine"))


def test_a_row_whose_candidates_are_all_right_answers_has_loss_zero() -> None:
    same = false_negatives(["a", "a"], ["a", "a"])
    losses = InBatchSoftmaxLoss()(draw(2, 3), draw(2, 3, seed=1), same)
    assert losses.tolist() == [0.0, 0.0]


@SETTINGS
@pytest.mark.parametrize("beside", [False, True])
def test_each_row_of_the_pool_loss_is_a_cross_entropy_over_its_candidates(
    temperature: float, similarity: str, beside: bool
) -> None:
    queries, pool, own = draw(5, 4), draw(11, 4, seed=1), draw(5, 4, seed=2)
    index = torch.tensor([3, 0, 3, 10, 7])
    mask = torch.rand(5, 11, generator=torch.Generator().manual_seed(3)) < 0.3
    loss = PublicPoolSoftmaxLoss(temperature, similarity)
    if beside:
        losses = loss(queries, pool, positive_embeddings=own, mask=mask)
    else:
        losses = loss(queries, pool, index, mask=mask)
    for row in range(5):
        kept = [j for j in range(11) if not mask[row, j] and (beside or j != int(index[row]))]
        target = own[row] if beside else pool[index[row]]
        wanted = brute_force(queries[row], target, [pool[j] for j in kept], temperature, similarity)
        assert float(losses[row]) == pytest.approx(wanted, rel=1e-9)


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
    queries[k] = draw(6, seed=9)
    index[k] = 7
    mask[k] = ~mask[k]
    changed, gradients = rows(queries, index, mask)
    others = torch.arange(4) != k
    assert torch.equal(changed[others], losses[others]) and changed[k] != losses[k]
    assert torch.equal(gradients[others], jacobian[others])


def test_a_poisoned_query_poisons_its_own_row_only() -> None:
    queries, pool = draw(4, 6), draw(20, 6, seed=1)
    queries[2] = float("nan")
    losses = PublicPoolSoftmaxLoss(0.1)(queries, pool, torch.tensor([0, 1, 2, 3]))
    assert losses.isnan().tolist() == [False, False, True, False]


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


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    for loss in (InBatchSoftmaxLoss, PublicPoolSoftmaxLoss):
        with pytest.raises(ConfigurationError, match=r"loss.temperature="):
            loss(temperature)


def test_what_does_not_fit_together_is_refused() -> None:
    queries, passages = draw(2, 3), draw(4, 3, seed=1)
    batch, pool = InBatchSoftmaxLoss(), PublicPoolSoftmaxLoss()
    with pytest.raises(ConfigurationError, match="2 passages cannot hold the positives of 4"):
        batch(passages, queries)
    with pytest.raises(ConfigurationError, match="exactly one"):
        pool(queries, passages)
    with pytest.raises(ConfigurationError, match="exactly one"):
        pool(queries, passages, torch.tensor([0, 1]), queries)
    for wrong in (torch.tensor([0, 4]), torch.tensor([-1, 0]), torch.tensor([0]), torch.tensor([0.0, 1.0])):
        with pytest.raises(ConfigurationError, match="positive_index"):
            pool(queries, passages, wrong)
    with pytest.raises(ConfigurationError, match=r"mask is torch.int64"):
        pool(queries, passages, torch.tensor([0, 1]), mask=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ConfigurationError, match="positive_embeddings of shape"):
        pool(queries, passages, positive_embeddings=passages)


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
        assert float(found[row]) == pytest.approx(
            brute_force(queries[row], positives[row], others, temperature, similarity), rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"own": torch.zeros(2, 1, 4)}, "are not some for each of 3 rows"),
        ({"own": torch.zeros(3, 4)}, "are not some for each of 3 rows"),
        ({"shared": torch.zeros(5, 4), "shared_mask": torch.zeros(3, 4, dtype=torch.bool)}, r"of shape \(3, 5\)"),
        ({"own": torch.zeros(3, 2, 4), "own_mask": torch.zeros(3, 2)}, r"must be torch\.bool"),
    ],
)
def test_hard_negatives_of_other_shapes_are_refused(settings: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HardNegativeSoftmaxLoss()(torch.ones(3, 4), torch.ones(3, 4), **settings)
    with pytest.raises(ConfigurationError, match="must have one positive for each query"):
        HardNegativeSoftmaxLoss()(torch.ones(3, 4), torch.ones(2, 4))


def test_a_zero_embedding_scores_zero_and_has_a_finite_gradient() -> None:
    queries = torch.zeros(1, 3, requires_grad=True)
    scores = cosine(queries, torch.ones(2, 3))
    assert scores.tolist() == [[0.0, 0.0]]
    scores.sum().backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None and queries.grad.isfinite().all()


def test_a_similarity_is_found_by_name_and_a_wrong_name_is_refused() -> None:
    assert [get_similarity(name) for name in SIMILARITIES] == list(SIMILARITIES.values())
    with pytest.raises(ConfigurationError, match="similarity='euclid' is not one of dot, cosine"):
        get_similarity("euclid")
