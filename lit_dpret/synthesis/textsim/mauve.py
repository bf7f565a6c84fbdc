"""MAUVE: the similarity of two distributions of texts, from samples of both.

Written from Pillutla et al., "MAUVE: Measuring the Gap Between Neural Text and Human Text using Divergence Frontiers"
(NeurIPS 2021), section 2. docs/similarity.md has the definition, and the details that the paper leaves open.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim.words import need

SCALING = 5.0
"""The paper's c."""

_VARIANCE = 0.9
_WEIGHTS = 25
_EDGE = 1e-6  # the outermost weights are this far from 0 and 1
_TEXTS_PER_BUCKET = 10

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Mauve:
    """MAUVE over several runs of k-means."""

    values: tuple[float, ...]  # one per seed
    seeds: tuple[int, ...]  # seeds of k-means; the data are the same
    buckets: int
    texts: tuple[int, int]
    components: int  # principal components kept
    featuriser: str
    scaling: float = SCALING

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.values))

    @property
    def sd(self) -> float | None:
        """The standard deviation over seeds of k-means; None for one seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return fields, mean and sd as JSON values."""
        lists = {name: list(getattr(self, name)) for name in ("values", "seeds", "texts")}
        return {"mean": self.mean, "sd": self.sd, **asdict(self), **lists}


def mauve(
    p_features: ArrayLike,
    q_features: ArrayLike,
    *,
    featuriser: str,
    seeds: Sequence[int] = range(5),
    buckets: int | None = None,
    restarts: int = 5,
    scaling: float = SCALING,
) -> Mauve:
    """Return MAUVE of two samples of features ``(p, dim)`` and ``(q, dim)``, computed by ``featuriser``.

    Guarantees:
        - Equal input and seeds give equal values on one machine; no global random state is read or written.
        - Every value is between 0 and 1.

    Each of ``seeds`` gives one value, from k-means with the best of ``restarts`` runs. ``buckets`` is by default a
    tenth of the smaller sample. ``scaling`` is the paper's c.
    """
    p, q = _table(p_features, "p_features"), _table(q_features, "q_features")
    if p.shape[1] != q.shape[1]:
        raise DataError(
            f"p_features have {p.shape[1]} columns and q_features {q.shape[1]}; use one featuriser for both."
        )
    if not seeds or restarts < 1 or not scaling > 0:
        raise ConfigurationError(
            f"MAUVE needs at least one seed, restarts of at least 1 and a positive scaling, not seeds={list(seeds)}, "
            f"restarts={restarts}, scaling={scaling}."
        )
    fewest = min(len(p), len(q))
    k = fewest // _TEXTS_PER_BUCKET if buckets is None else buckets
    if k < 2 or k > fewest:
        raise DataError(
            f"MAUVE with {k} buckets cannot be computed from {len(p)} and {len(q)} texts: it needs at least two "
            f"buckets, and no more buckets than texts. Pass more texts (buckets=None needs {2 * _TEXTS_PER_BUCKET} of "
            "each), or other buckets."
        )
    points = principal_components(np.concatenate([p, q]))
    values = []
    for seed in seeds:
        bucket = _k_means(points, k, restarts, seed)
        first, second = np.bincount(bucket[: len(p)], minlength=k), np.bincount(bucket[len(p) :], minlength=k)
        values.append(curve_area(first / len(p), second / len(q), scaling=scaling))
    return Mauve(
        values=tuple(values),
        seeds=tuple(int(seed) for seed in seeds),
        buckets=k,
        texts=(len(p), len(q)),
        components=points.shape[1],
        featuriser=featuriser,
        scaling=scaling,
    )


def divergence_curve(p: ArrayLike, q: ArrayLike, *, scaling: float = SCALING) -> Floats:
    """Return the divergence curve of two histograms with its end points, from (1, 0) to (0, 1); ``(weights + 2, 2)``.

    Both histograms are shares that sum to 1, shape ``(buckets,)``.
    """
    first, second = _histogram(p), _histogram(q)
    if len(first) != len(second):
        raise DataError(f"Histograms of {len(first)} and {len(second)} buckets cannot be compared.")
    points = [(1.0, 0.0)]
    for weight in np.linspace(_EDGE, 1 - _EDGE, _WEIGHTS):
        mixed = weight * first + (1 - weight) * second
        points.append(
            (np.exp(-scaling * rel_entr(second, mixed).sum()), np.exp(-scaling * rel_entr(first, mixed).sum()))
        )
    return np.array([*points, (0.0, 1.0)])


def curve_area(p: ArrayLike, q: ArrayLike, *, scaling: float = SCALING) -> float:
    """Return the area under `divergence_curve`, by trapezia: MAUVE of two histograms.

    >>> curve_area([0.5, 0.5], [0.5, 0.5])
    1.0
    >>> round(curve_area([1.0, 0.0], [0.0, 1.0]), 4)  # 1/252, but for the trapezia
    0.0041
    """
    x, y = divergence_curve(p, q, scaling=scaling).T
    return float(np.clip(-np.trapezoid(y, x), 0.0, 1.0))


def principal_components(features: Floats) -> Floats:
    """Return rows of length 1, centred, on the fewest principal components with 90 % of the variance."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    rows = features / np.where(lengths > 0, lengths, 1.0)
    rows = rows - rows.mean(axis=0)
    variances, axes = np.linalg.eigh(rows.T @ rows)
    variances, axes = np.clip(variances[::-1], 0.0, None), axes[:, ::-1]
    total = variances.sum()
    kept = int((np.cumsum(variances) < _VARIANCE * total).sum()) + 1 if total > 0 else 1
    projected: Floats = rows @ axes[:, :kept]
    return projected


def _k_means(points: Floats, k: int, restarts: int, seed: int) -> NDArray[np.int64]:
    """Return the bucket of every row."""
    need("sklearn")
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct texts than buckets: some stay empty
        found = KMeans(k, init="random", n_init=restarts, max_iter=500, random_state=seed).fit(
            points.astype(np.float32)
        )
    return np.asarray(found.labels_, dtype=np.int64)


def _table(features: ArrayLike, name: str) -> Floats:
    table = np.asarray(features, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise DataError(f"{name} must be a table with one row per text, not an array of shape {table.shape}.")
    if not np.isfinite(table).all():
        raise DataError(f"{name} hold NaN or infinity in {int((~np.isfinite(table)).any(axis=1).sum())} rows.")
    return table


def _histogram(shares: ArrayLike) -> Floats:
    found = np.asarray(shares, dtype=np.float64)
    if found.ndim != 1 or not len(found) or not (found >= 0).all() or abs(found.sum() - 1) > 1e-9:
        raise DataError("A histogram must be a list of non-negative shares that sum to 1.")
    return found
