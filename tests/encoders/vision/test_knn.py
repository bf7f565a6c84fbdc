"""k-NN and its scores, against scikit-learn and against cases counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.encoders.vision.knn import ClassificationScores, confusion_matrix, evaluate_knn, nearest, votes
from lit_dpret.errors import ConfigurationError, DataError


def embeddings(count: int, *, dim: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def labels(count: int, *, classes: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 3, 4, 7])
def test_predictions_are_those_of_scikit_learn(k: int) -> None:
    neighbors = pytest.importorskip("sklearn.neighbors")
    train, known, queries = embeddings(200), labels(200), embeddings(80, seed=1)
    reference = neighbors.KNeighborsClassifier(n_neighbors=k, metric="cosine", algorithm="brute")
    reference.fit(train.double().numpy(), known.numpy())
    predicted, _ = votes(train, known, queries, classes=4, k=k, chunk_size=17)
    assert predicted["lowest"].tolist() == reference.predict(queries.double().numpy()).tolist()


def test_equal_neighbours_are_taken_in_order_whatever_the_chunks() -> None:
    train = embeddings(5).repeat(20, 1)  # each embedding twenty times
    queries = embeddings(9, seed=1)
    whole = nearest(train, queries, k=3)
    assert torch.equal(whole, nearest(train, queries, k=3, chunk_size=1))
    assert whole[:, 0].max() < 5 and torch.equal(whole, whole[:, :1] + torch.tensor([0, 5, 10]))


@pytest.mark.parametrize(
    ("known", "nearest_wins", "lowest"),
    [([2, 1, 3], 2, 1), ([3, 1, 1], 1, 1), ([3, 2, 1, 2, 1], 2, 1), ([3, 2, 1, 1, 2], 2, 1), ([0, 2, 1], 0, 0)],
)
def test_an_even_vote_goes_to_the_nearest_of_the_tied_or_to_the_lowest_label(
    known: list[int], nearest_wins: int, lowest: int
) -> None:
    train = torch.tensor([[1.0, 0.1 * i] for i in range(len(known))])
    predicted, _ = votes(train, torch.tensor(known), torch.tensor([[1.0, 0.0]]), classes=4, k=len(known))
    assert (predicted["nearest"].tolist(), predicted["lowest"].tolist()) == ([nearest_wins], [lowest])


def test_both_rules_are_scored_and_ties_are_counted() -> None:
    class Same(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            return batch.flatten(1)[:, :2].float()

    points = torch.tensor([[100, 0], [100, 10], [100, 20], [0, 100], [1, 100], [2, 100]], dtype=torch.uint8)
    train = (points.view(6, 1, 1, 2), torch.tensor([2, 1, 3, 0, 0, 1]))
    test = (points[[0, 3]].view(2, 1, 1, 2), torch.tensor([2, 0]))
    found = evaluate_knn(Same(), train=train, test=test, classes=4)
    assert (found.scores.accuracy, found.lowest.accuracy, found.tied) == (1.0, 0.5, 0.5)
    assert found.confusion[2].tolist() == [0, 0, 1, 0]


def test_broken_embeddings_and_impossible_k_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="k=4 neighbours cannot be found among 3"):
        nearest(embeddings(3), embeddings(1), k=4)
    with pytest.raises(DataError, match="diverged"):
        nearest(embeddings(3), torch.full((1, 6), float("nan")), k=1)
    with pytest.raises(DataError, match="cannot be compared"):
        nearest(embeddings(3), embeddings(1, dim=5), k=1)
    with pytest.raises(DataError, match=r"labels of shape \(2,\)"):
        votes(embeddings(3), labels(2), embeddings(1), classes=4, k=1)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_scores_are_those_of_scikit_learn(beta: float) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    # Class 4 is never predicted, class 5 never occurs.
    true, predicted = labels(60, classes=5), labels(60, classes=4, seed=1)
    predicted[:3] = 5
    confusion = confusion_matrix(true, predicted, classes=6)
    assert confusion.tolist() == metrics.confusion_matrix(true, predicted, labels=range(6)).tolist()
    scores = ClassificationScores.of(confusion, beta=beta)
    assert scores.accuracy == pytest.approx(metrics.accuracy_score(true, predicted))
    for average, prefix, reduce in (("macro", "", float), (None, "best_", max)):
        precision, recall, f_beta, _ = metrics.precision_recall_fscore_support(
            true, predicted, beta=beta, average=average, labels=range(6), zero_division=0
        )
        assert getattr(scores, f"{prefix}precision") == pytest.approx(reduce(precision))
        assert getattr(scores, f"{prefix}recall") == pytest.approx(reduce(recall))
        assert getattr(scores, f"{prefix}f_beta") == pytest.approx(reduce(f_beta))


def test_labels_outside_the_classes_and_empty_matrices_are_refused() -> None:
    with pytest.raises(DataError, match="label is outside 0 to 1"):
        confusion_matrix(torch.tensor([0, 2]), torch.tensor([0, 1]), classes=2)
    with pytest.raises(DataError, match="prediction is outside"):
        confusion_matrix(torch.tensor([0, 1]), torch.tensor([0, -1]), classes=2)
    with pytest.raises(DataError, match="not all zero"):
        ClassificationScores.of(torch.zeros(2, 2))
    with pytest.raises(ConfigurationError, match="beta=0"):
        ClassificationScores.of(torch.eye(2), beta=0)
