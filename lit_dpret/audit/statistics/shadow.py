"""Membership scores from shadow models: the same training again and again, each time on a random half.

Everything is read off one matrix: ``shadow`` holds a signal of each example under each model, shape
``(models, examples)``, and ``included`` says whether that model was trained on that example. The signal is to be
roughly normal; for text take `logit` of the likelihood per token, or the log-likelihood minus that of a public model.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from lit_dpret.errors import ConfigurationError, DataError

Floats = NDArray[np.float64]
Centre = Literal["median", "mean"]
Spread = Literal["example", "pooled"]


def logit(log_likelihood: ArrayLike) -> Floats:
    """ln(p / (1 - p)) of p = exp(mean log-likelihood of a token), without losing p near 1.

    Raises:
        DataError: A log-likelihood is not below 0.
    """
    values = np.asarray(log_likelihood, dtype=np.float64)
    if not (values < 0).all():
        raise DataError(f"{int((~(values < 0)).sum())} of {values.size} log-likelihoods are not below 0.")
    return np.asarray(values - np.log(-np.expm1(values)))


def lira_online(
    target: ArrayLike, shadow: ArrayLike, included: ArrayLike, *, centre: Centre = "median", spread: Spread = "example"
) -> Floats:
    """Return the log-likelihood ratio of membership, by normals fitted to models with and without the example.

    Carlini et al. 2022, "Membership Inference Attacks From First Principles", arXiv 2112.03570, Algorithm 1.

    Guarantees:
        - Each standard deviation is that of its own side; the authors' program, with pooled deviations, uses the
          members' for both.

    Args:
        target: Signals under the attacked model, shape ``(examples,)``.
        shadow: Under the shadow models, shape ``(models, examples)``.
        included: Of the same shape, truth values.
        centre: Of the normals; the authors' program takes the median.
        spread: ``pooled`` has one deviation on each side for all examples, for fewer than about 64 models.

    Returns:
        Scores of shape ``(examples,)``; higher means member.

    Raises:
        DataError: Shapes differ, a value is no number, an example lacks models on one side, or has no spread.
    """
    _check_choice(centre, spread)
    values, matrix, members = _read(target, shadow, included, sides=2)
    inside = _log_normal(values, *_fit(matrix, members, centre, spread))
    return inside - _log_normal(values, *_fit(matrix, ~members, centre, spread))


def lira_offline(
    target: ArrayLike, shadow: ArrayLike, included: ArrayLike, *, centre: Centre = "median", spread: Spread = "example"
) -> Floats:
    """One minus a p-value, in logarithms: ln Phi((signal - centre) / deviation) over the models without the example.

    The offline variant of the same paper, for which no shadow model needs to have seen the example. For
    ranking it is as good as (signal - centre) / deviation, until it rounds to 0 some eight deviations up: see
    `deviations`.

    Raises:
        DataError: As `lira_online`, but only models without the example are needed.
    """
    return np.asarray(log_ndtr(deviations(target, shadow, included, centre=centre, spread=spread)))


def deviations(
    target: ArrayLike, shadow: ArrayLike, included: ArrayLike, *, centre: Centre = "mean", spread: Spread = "example"
) -> Floats:
    """(signal - centre) / deviation over the models without the example: what `lira_offline` takes Phi of.

    Raises:
        DataError: As `lira_offline`.
    """
    _check_choice(centre, spread)
    values, matrix, members = _read(target, shadow, included, sides=1)
    middle, deviation = _fit(matrix, ~members, centre, spread)
    return np.asarray((values - middle) / deviation)


def rmia(
    target: ArrayLike, shadow: ArrayLike, population: ArrayLike, population_shadow: ArrayLike, *,
    gamma: float = 1.0, offline_slope: float = 0.3,
) -> Floats:  # fmt: skip
    """Return the share of a population that the example outweighs, in how much likelier the model makes it.

    Zarifzadeh, Liu and Shokri 2024, "Low-Cost High-Power Membership Inference Attacks", arXiv 2312.03262, offline: the
    likelihood of x without knowledge of this model is ((1 + a) p_out(x) + 1 - a) / 2, and the score is the share
    of z with (p(x | model) / p(x)) / (p(z | model) / p(z)) >= gamma.

    Args:
        target: Probabilities of the examples under the attacked model, shape ``(examples,)``, in (0, 1].
        shadow: The same under models that saw none of them, shape ``(models, examples)``.
        population: Probabilities of other texts under the attacked model, shape ``(texts,)``.
        population_shadow: The same under those models, shape ``(models, texts)``.
        gamma: How far x must outweigh z.
        offline_slope: a, to be tuned on a model of your own; from 0 to 1.

    Returns:
        Scores from 0 to 1, shape ``(examples,)``.

    Raises:
        DataError: Shapes differ, or a value is no probability above 0.
        ConfigurationError: ``gamma`` is not above 0, or ``offline_slope`` not from 0 to 1.
    """
    if not gamma > 0 or not 0 <= offline_slope <= 1:
        raise ConfigurationError(f"gamma={gamma} must be above 0 and offline_slope={offline_slope} from 0 to 1.")
    examples = np.sort(_relative(population, population_shadow, offline_slope))
    weights = _relative(target, shadow, offline_slope)
    return np.searchsorted(examples, weights / gamma, side="right") / len(examples)


def counterfactual_memorisation(signal: ArrayLike, included: ArrayLike) -> Floats:
    """Return the mean signal of models with the example minus that of models without, shape ``(examples,)``.

    Zhang et al. 2023, "Counterfactual Memorization in Neural Language Models", arXiv 2112.12938, equation 1. A value
    tells about one private example: to be looked at inside, and not to be published.

    Raises:
        DataError: Shapes differ, a value is no number, or an example lacks models on one side.
    """
    _, matrix, members = _read(None, signal, included, sides=2)
    inside = np.where(members, matrix, 0).sum(axis=0) / members.sum(axis=0)
    return np.asarray(inside - np.where(members, 0, matrix).sum(axis=0) / (~members).sum(axis=0))


def _fit(matrix: Floats, chosen: NDArray[np.bool_], centre: Centre, spread: Spread) -> tuple[Floats, Floats]:
    masked = np.where(chosen, matrix, np.nan)
    middle = np.nanmedian(masked, axis=0) if centre == "median" else np.nanmean(masked, axis=0)
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
    return middle, deviation


def _log_normal(values: Floats, middle: Floats, deviation: Floats) -> Floats:
    return np.asarray(-np.log(deviation) - ((values - middle) / deviation) ** 2 / 2)


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
        raise DataError(f"{lacking} of {matrix.shape[1]} examples lack models on one side: train more shadow models.")
    return values, matrix, members


def _check_choice(centre: Centre, spread: Spread) -> None:
    if centre not in ("median", "mean") or spread not in ("example", "pooled"):
        raise ConfigurationError(f"centre={centre!r} must be median or mean, and spread={spread!r} example or pooled.")


def _relative(probabilities: ArrayLike, shadow: ArrayLike, slope: float) -> Floats:
    values, matrix = np.asarray(probabilities, dtype=np.float64), np.asarray(shadow, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or matrix.ndim != 2 or matrix.shape[1:] != values.shape or not len(matrix):
        raise DataError(f"Probabilities of shape {values.shape} do not go with shadow ones of shape {matrix.shape}.")
    if not (((values > 0) & (values <= 1)).all() and ((matrix > 0) & (matrix <= 1)).all()):
        raise DataError("A probability does not lie above 0 and up to 1.")
    return np.asarray(values / (((1 + slope) * matrix.mean(axis=0) + 1 - slope) / 2))
