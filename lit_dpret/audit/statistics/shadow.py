"""Membership scores from shadow models, each trained on a random half.

``shadow`` holds the signal of each example under each model, shape ``(models, examples)``. ``included`` says whether
that model was trained on that example. The signal should be roughly normal: the `logit` of the likelihood per token, or
the log-likelihood minus that of a public model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from lit_dpret.audit.statistics.metrics import auc
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.settings import is_whole

Floats = NDArray[np.float64]
Spread = Literal["example", "pooled"]
Signals = Mapping[str, Floats]

FEWEST = 4
ENOUGH_FOR_OWN_SPREAD = 64
SLOPES = tuple(round(0.1 * step, 1) for step in range(11))
COMPARED = ("logit", "reference", "logit_reference")  # roughly normal, so that a normal can be fitted
_LEAST = float(np.finfo(np.float64).tiny)


def logit(log_likelihood: ArrayLike) -> Floats:
    """Return ln(p / (1 - p)) of p = exp(mean log-likelihood of a token), accurate also for p near 1."""
    values = np.asarray(log_likelihood, dtype=np.float64)
    if not (values < 0).all():
        raise DataError(f"{int((~(values < 0)).sum())} of {values.size} log-likelihoods are not below 0.")
    return np.asarray(values - np.log(-np.expm1(values)))


def lira_online(target: ArrayLike, shadow: ArrayLike, included: ArrayLike, *, spread: Spread = "example") -> Floats:
    """Return the log-likelihood ratio of membership, from normals fitted to models with and without the example.

    Carlini et al. 2022, "Membership Inference Attacks From First Principles", arXiv 2112.03570, Algorithm 1. The
    normals are centred at the medians, as in the authors' code. But each side has its own standard deviation; their
    code, with pooled deviations, uses the members' for both.

    Args:
        target: Signals under the attacked model, shape ``(examples,)``.
        shadow: Signals under the shadow models, shape ``(models, examples)``.
        included: Booleans of the same shape.
        spread: ``pooled`` fits one deviation per side for all examples, for fewer than about 64 models.

    Returns:
        Scores of shape ``(examples,)``; higher means member.
    """
    values, matrix, members = _read(target, shadow, included, sides=2)

    def log_normal(side: NDArray[np.bool_]) -> Floats:
        middle, deviation = np.nanmedian(np.where(side, matrix, np.nan), axis=0), _deviation(matrix, side, spread)
        return np.asarray(-np.log(deviation) - ((values - middle) / deviation) ** 2 / 2)

    return log_normal(members) - log_normal(~members)


def lira_offline(target: ArrayLike, shadow: ArrayLike, included: ArrayLike, *, spread: Spread = "example") -> Floats:
    """Return (signal - mean) / deviation over the models without the example, shape ``(examples,)``.

    This is the offline variant of the same paper; no shadow model needs to have seen the example. The paper applies
    Phi, which ranks alike but rounds to 1 at about eight deviations.
    """
    values, matrix, members = _read(target, shadow, included, sides=1)
    middle = np.nanmean(np.where(members, np.nan, matrix), axis=0)
    return np.asarray((values - middle) / _deviation(matrix, ~members, spread))


def rmia(
    target: ArrayLike, shadow: ArrayLike, population: ArrayLike, population_shadow: ArrayLike, *,
    gamma: float = 1.0, offline_slope: float = 0.3,
) -> Floats:  # fmt: skip
    """Return the share of a population with a smaller likelihood ratio than the example.

    Zarifzadeh, Liu and Shokri 2024, "Low-Cost High-Power Membership Inference Attacks", arXiv 2312.03262, offline. The
    likelihood p(x) of x without knowledge of the model is ((1 + a) p_out(x) + 1 - a) / 2. The score is the share of z
    with (p(x | model) / p(x)) / (p(z | model) / p(z)) >= gamma.

    Args:
        target: Probabilities of the examples under the attacked model, shape ``(examples,)``, in (0, 1].
        shadow: The same under models that saw none of them, shape ``(models, examples)``.
        population: Probabilities of other texts under the attacked model, shape ``(texts,)``.
        population_shadow: The same under those models, shape ``(models, texts)``.
        gamma: How far x must outweigh z.
        offline_slope: a, from 0 to 1; tune it on a model that you trained yourself.

    Returns:
        Scores from 0 to 1, shape ``(examples,)``.
    """
    if not gamma > 0 or not 0 <= offline_slope <= 1:
        raise ConfigurationError(f"gamma={gamma} must be above 0 and offline_slope={offline_slope} from 0 to 1.")
    examples = np.sort(_relative(population, population_shadow, offline_slope))
    weights = _relative(target, shadow, offline_slope)
    return np.searchsorted(examples, weights / gamma, side="right") / len(examples)


def counterfactual_memorisation(signal: ArrayLike, included: ArrayLike) -> Floats:
    """Return the mean signal of models with the example minus that of models without, shape ``(examples,)``.

    Zhang et al. 2023, "Counterfactual Memorization in Neural Language Models", arXiv 2112.12938, equation 1. A value
    describes one private example: inspect it internally, do not publish it.
    """
    _, matrix, members = _read(None, signal, included, sides=2)
    inside = np.where(members, matrix, 0).sum(axis=0) / members.sum(axis=0)
    return np.asarray(inside - np.where(members, 0, matrix).sum(axis=0) / (~members).sum(axis=0))


def balanced_halves(texts: int, models: int, *, seed: int) -> NDArray[np.bool_]:
    """Return which model is trained on which text, shape ``(models, texts)``.

    Guarantees:
        - Every text is in the training data of exactly half of the models, chosen at random.
        - The halves depend only on ``seed`` and the two numbers.
    """
    if not is_whole(models) or models < FEWEST or models % 2:
        raise ConfigurationError(
            f"shadows={models} must be an even number of at least {FEWEST}: each text is in half of their training "
            "data."
        )
    if texts < 1:
        raise DataError("There is no text to divide among shadow models.")
    ranks = np.random.default_rng([seed, texts, models]).random((models, texts)).argsort(axis=0)
    return np.asarray(ranks < models // 2)


@dataclass(frozen=True, eq=False, repr=False)
class ShadowMatrix:
    """Signals of texts under shadow models."""

    signals: Signals  # by name, each of shape ``(models, texts)``
    included: NDArray[np.bool_]  # whether a model was trained on a text, same shape

    def __repr__(self) -> str:
        return f"ShadowMatrix{self.included.shape}"

    @classmethod
    def stack(cls, models: Sequence[Signals], included: NDArray[np.bool_]) -> ShadowMatrix:
        """Stack the signals of several models; signals that not all of them have are dropped."""
        names = [name for name in models[0] if all(name in model for model in models)]
        return cls({name: np.stack([model[name] for model in models]) for name in names}, included)

    def outside(self, name: str) -> Floats:
        """Return a signal under models not trained on the text, shape ``(fewest such models, texts)``."""
        order = np.argsort(self.included, axis=0, kind="stable")
        fewest = int((~self.included).sum(axis=0).min())
        return np.asarray(np.take_along_axis(self.signals[name], order, axis=0)[:fewest])


def shadow_scores(target: Signals, matrix: ShadowMatrix, *, population: NDArray[np.int64]) -> dict[str, Floats]:
    """Score each text by the shadow-model attacks, shape ``(texts,)``; higher means member.

    * ``lira_online``, ``lira_offline``: of the roughly normal signals ``logit``, ``reference`` and
      ``logit_reference``, if present; with one deviation for all texts below 64 models.
    * ``rmia``: of the probability exp(loss) of a generator's token, or of the right passage under an encoder.

    Args:
        target: Signals under the attacked model, each of shape ``(texts,)``.
        matrix: The same under shadow models.
        population: Columns of texts that the target is known, or assumed, not to have been trained on, with which RMIA
            compares the others. They must not be among the attacked texts.
    """
    if not len(population):
        raise DataError("RMIA needs texts that the target was not trained on, in addition to the attacked ones.")
    spread: Spread = "example" if len(matrix.included) >= ENOUGH_FOR_OWN_SPREAD else "pooled"
    found: dict[str, Floats] = {}
    for name in COMPARED:
        if name in matrix.signals and name in target:
            values = (target[name], matrix.signals[name], matrix.included)
            found[f"lira_online_{name}"] = lira_online(*values, spread=spread)
            found[f"lira_offline_{name}"] = lira_offline(*values, spread=spread)
    if not found:
        raise DataError(f"The target has none of the signals {', '.join(COMPARED)} of the shadow models.")
    found["rmia"] = _rmia_of(target, matrix, population, offline_slope(matrix, population))
    return found


def offline_slope(matrix: ShadowMatrix, population: NDArray[np.int64]) -> float:
    """Return the RMIA slope a that leaks most when the first shadow model is attacked by the others."""
    attacked = {name: value[0] for name, value in matrix.signals.items()}
    others = ShadowMatrix({name: value[1:] for name, value in matrix.signals.items()}, matrix.included[1:])
    texts = np.setdiff1d(np.arange(matrix.included.shape[1]), population)
    aucs = [
        auc(CanaryScores.of(_rmia_of(attacked, others, population, slope)[texts], matrix.included[0, texts]))
        for slope in SLOPES
    ]
    return SLOPES[int(np.argmax(aucs))]


def _rmia_of(target: Signals, matrix: ShadowMatrix, population: NDArray[np.int64], slope: float) -> Floats:
    own = _probability(target)
    outside = _probability({name: matrix.outside(name) for name in ("loss", "logit") if name in matrix.signals})
    return rmia(own, outside, own[population], outside[:, population], offline_slope=slope)


def _probability(signals: Signals) -> Floats:
    """Return the probability that RMIA uses: of a text's token under a generator, of its passage under an encoder."""
    value = np.exp(signals["loss"]) if "loss" in signals else expit(signals["logit"])
    return np.clip(value, _LEAST, 1.0)


def _deviation(matrix: Floats, chosen: NDArray[np.bool_], spread: Spread) -> Floats:
    if spread not in ("example", "pooled"):
        raise ConfigurationError(f"spread={spread!r} must be example or pooled.")
    masked = np.where(chosen, matrix, np.nan)
    if spread == "example":
        deviation = np.nanstd(masked, axis=0)
    else:
        deviation = np.full(matrix.shape[1], np.sqrt(np.nanmean((masked - np.nanmean(masked, axis=0)) ** 2)))
    flat = int((deviation <= 0).sum())
    if flat:
        raise DataError(
            f"{flat} of {matrix.shape[1]} examples have the same signal under every model of a side: train more "
            "models, or use spread='pooled'."
        )
    return np.asarray(deviation)


def _read(
    target: ArrayLike | None, shadow: ArrayLike, included: ArrayLike, *, sides: int
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    matrix, members = np.asarray(shadow, dtype=np.float64), np.asarray(included)
    if matrix.ndim != 2 or matrix.size == 0:
        raise DataError(f"The shadow matrix must be (models, examples), not of shape {matrix.shape}.")
    if members.shape != matrix.shape or members.dtype != np.bool_:
        raise DataError(f"included must be truth values of shape {matrix.shape}, not {members.dtype} {members.shape}.")
    values = np.zeros(matrix.shape[1]) if target is None else np.asarray(target, dtype=np.float64)
    if values.shape != matrix.shape[1:]:
        raise DataError(f"target must hold one signal for each of {matrix.shape[1]} examples, not {values.shape}.")
    if not (np.isfinite(matrix).all() and np.isfinite(values).all()):
        raise DataError("A signal is NaN or infinite.")
    lacking = int(((~members).sum(axis=0) == 0).sum()) + (sides - 1) * int((members.sum(axis=0) == 0).sum())
    if lacking:
        raise DataError(f"{lacking} of {matrix.shape[1]} examples lack models on one side. Train more shadow models.")
    return values, matrix, members


def _relative(probabilities: ArrayLike, shadow: ArrayLike, slope: float) -> Floats:
    values, matrix = np.asarray(probabilities, dtype=np.float64), np.asarray(shadow, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or matrix.ndim != 2 or matrix.shape[1:] != values.shape or not len(matrix):
        raise DataError(f"Probabilities of shape {values.shape} do not go with shadow ones of shape {matrix.shape}.")
    if not (((values > 0) & (values <= 1)).all() and ((matrix > 0) & (matrix <= 1)).all()):
        raise DataError("Probabilities must be above 0 and at most 1.")
    return np.asarray(values / (((1 + slope) * matrix.mean(axis=0) + 1 - slope) / 2))
