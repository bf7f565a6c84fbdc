"""Shadow models: the same training on other halves of the data, to know what a member looks like.

One matrix serves both families. A shadow model gives each text a few signals; the attacks read all signals of all
shadows against those of the target, and nothing here knows what a model is. How the scores are computed from the
matrix stands in `lit_dpret.audit.statistics.shadow`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from lit_dpret.audit.statistics.metrics import auc
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.audit.statistics.shadow import Spread, counterfactual_memorisation, deviations, lira_online, rmia
from lit_dpret.errors import ConfigurationError, DataError

Floats = NDArray[np.float64]
Signals = Mapping[str, Floats]

FEWEST = 4
ENOUGH_FOR_OWN_SPREAD = 64
SLOPES = tuple(round(0.1 * step, 1) for step in range(11))
COMPARED = ("logit", "reference", "logit_reference")  # roughly normal, so that a normal can be fitted to them
_LEAST = float(np.finfo(np.float64).tiny)


def balanced_halves(texts: int, models: int, *, seed: int) -> NDArray[np.bool_]:
    """Which model is trained on which text, shape ``(models, texts)``.

    Guarantees:
        - Every text is in the training data of exactly half of the models, chosen at random.
        - The halves depend on ``seed`` and the two numbers alone.

    Raises:
        ConfigurationError: The number of models is odd, or below four.
        DataError: There is no text.
    """
    if isinstance(models, bool) or not isinstance(models, int) or models < FEWEST or models % 2:
        raise ConfigurationError(
            f"shadows={models} must be an even number from {FEWEST} on: each text is in half of their training data."
        )
    if texts < 1:
        raise DataError("There is no text to divide among shadow models.")
    ranks = np.random.default_rng([seed, texts, models]).random((models, texts)).argsort(axis=0)
    return np.asarray(ranks < models // 2)


@dataclass(frozen=True, eq=False, repr=False)
class ShadowMatrix:
    """Signals of texts under shadow models.

    Args:
        signals: By name, each of shape ``(models, texts)``.
        included: Whether a model was trained on a text, of the same shape.

    Raises:
        DataError: Shapes differ, there is no signal, or a text lacks models on one side.
    """

    signals: Signals
    included: NDArray[np.bool_]

    def __post_init__(self) -> None:
        shapes = {value.shape for value in self.signals.values()} | {self.included.shape}
        if not self.signals or len(shapes) > 1 or self.included.ndim != 2:
            raise DataError(f"Signals and halves of shadow models must have one shape (models, texts), not {shapes}.")
        members = self.included.sum(axis=0)
        if (members == 0).any() or (members == len(self.included)).any():
            raise DataError("A text was in the training data of all shadow models, or of none: train more of them.")

    def __repr__(self) -> str:
        return f"ShadowMatrix{self.included.shape}"

    @classmethod
    def stack(cls, models: Sequence[Signals], included: NDArray[np.bool_]) -> ShadowMatrix:
        """Stack the signals of one model after the other; those that not all of them have are left out."""
        names = [name for name in models[0] if all(name in model for model in models)]
        return cls({name: np.stack([model[name] for model in models]) for name in names}, included)

    def columns(self, chosen: NDArray[np.int64]) -> ShadowMatrix:
        """Return the same models on some of the texts."""
        return ShadowMatrix({name: value[:, chosen] for name, value in self.signals.items()}, self.included[:, chosen])

    def without(self, model: int) -> ShadowMatrix:
        """Return the other models."""
        kept = np.arange(len(self.included)) != model
        return ShadowMatrix({name: value[kept] for name, value in self.signals.items()}, self.included[kept])

    def outside(self, name: str) -> Floats:
        """Return a signal under models that were not trained on the text, shape ``(fewest such models, texts)``."""
        order = np.argsort(self.included, axis=0, kind="stable")
        fewest = int((~self.included).sum(axis=0).min())
        return np.asarray(np.take_along_axis(self.signals[name], order, axis=0)[:fewest])

    def memorisation(self, name: str = "loss") -> Floats:
        """Counterfactual memorisation of each text: what training on it adds to the signal. Never to be published."""
        return counterfactual_memorisation(self.signals[name], self.included)


def shadow_scores(target: Signals, matrix: ShadowMatrix, *, population: NDArray[np.int64]) -> dict[str, Floats]:
    """Score each text by the attacks that need shadow models, shape ``(texts,)``; higher means member.

    * ``lira_online``, ``lira_offline``: of the signals that are roughly normal, ``logit``, ``reference`` and
      ``logit_reference`` where there are any; with one deviation for all texts below 64 models.
    * ``rmia``: of the probability exp(loss) of a generator's token, or of the right passage under an encoder.

    Args:
        target: Signals under the attacked model, each of shape ``(texts,)``.
        matrix: The same under shadow models.
        population: Columns of texts that the target is known, or assumed, not to have been trained on; those that
            RMIA weighs the others against. They must not be among the texts that are attacked.

    Raises:
        DataError: The target has none of the matrix's signals, or the population is empty.
    """
    if not len(population):
        raise DataError("RMIA needs some texts that the target was not trained on, beside those that are attacked.")
    spread: Spread = "example" if len(matrix.included) >= ENOUGH_FOR_OWN_SPREAD else "pooled"
    found: dict[str, Floats] = {}
    for name in COMPARED:
        if name in matrix.signals and name in target:
            values = (target[name], matrix.signals[name], matrix.included)
            found[f"lira_online_{name}"] = lira_online(*values, spread=spread)
            found[f"lira_offline_{name}"] = deviations(*values, spread=spread)
    if not found:
        raise DataError(f"The target has none of the signals {', '.join(COMPARED)} of the shadow models.")
    slope = offline_slope(matrix, population)
    found["rmia"] = _rmia(target, matrix, population, slope)
    return found


def offline_slope(matrix: ShadowMatrix, population: NDArray[np.int64]) -> float:
    """Return the slope a of RMIA at which the first shadow model, attacked by the others, leaks most."""
    attacked = {name: value[0] for name, value in matrix.signals.items()}
    texts = np.setdiff1d(np.arange(matrix.included.shape[1]), population)
    others = matrix.without(0)
    aucs = [
        auc(CanaryScores.of(_rmia(attacked, others, population, slope)[texts], matrix.included[0, texts]))
        for slope in SLOPES
    ]
    return SLOPES[int(np.argmax(aucs))]


def probability(signals: Signals) -> Floats:
    """Return RMIA's probability of a text: of its token under a generator, of its passage under an encoder."""
    value = np.exp(signals["loss"]) if "loss" in signals else expit(signals["logit"])
    return np.clip(value, _LEAST, 1.0)


def _rmia(target: Signals, matrix: ShadowMatrix, population: NDArray[np.int64], slope: float) -> Floats:
    own = probability(target)
    outside = probability({name: matrix.outside(name) for name in ("loss", "logit") if name in matrix.signals})
    return rmia(own, outside, own[population], outside[:, population], offline_slope=slope)
