"""Which of some texts is this the embedding of? No training, and the strongest attack where texts can be guessed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dpret.audit.attacks.unit_rows import unit_rows
from lit_dpret.audit.statistics.binomial import rate_at_least, rate_at_most
from lit_dpret.audit.statistics.checks import check_confidence
from lit_dpret.errors import ConfigurationError, DataError

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Identified:
    """How often the right text was the nearest of its candidates.

    Attributes:
        hits: Embeddings whose own text came first, alone.
        trials: Embeddings.
        candidates: Texts to choose from, for each.
        low: Exact lower bound of the rate (Clopper and Pearson, two-sided).
        high: Exact upper bound.
        confidence: Of both.
    """

    hits: int
    trials: int
    candidates: int
    low: float
    high: float
    confidence: float

    @property
    def rate(self) -> float:
        """The share of embeddings that were named."""
        return self.hits / self.trials

    @property
    def chance(self) -> float:
        """What guessing reaches."""
        return 1 / self.candidates

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "rate": self.rate, "chance": self.chance}


def identify(
    embeddings: Floats, guesses: Floats, *, candidates: int = 100, confidence: float = 0.95, seed: int = 0
) -> Identified:
    """Name the text of each embedding among its own and others', by cosine.

    Guarantees:
        - A tie with another candidate is no hit.

    Args:
        embeddings: That are attacked, shape ``(texts, dim)``.
        guesses: What the attacker's encoder makes of the same texts, in the same order and space.
        candidates: The text itself and so many less one others, drawn for each without replacement.
        confidence: Of the interval, which takes the texts for independent.
        seed: Of the draw.

    Raises:
        DataError: The two are of different texts or spaces.
        ConfigurationError: Fewer than two candidates, or more than there are texts.
    """
    tail = check_confidence(confidence) / 2
    if embeddings.shape != guesses.shape or embeddings.ndim != 2:
        raise DataError(
            f"Embeddings of shape {embeddings.shape} and guesses of {guesses.shape} are not of the same texts in one "
            "space. An attacker with another encoder needs a map between the spaces: see align."
        )
    if not 2 <= candidates <= len(embeddings):
        raise ConfigurationError(f"task.candidates={candidates} must be from 2 to the {len(embeddings)} texts.")
    own, theirs = unit_rows(embeddings), unit_rows(guesses)
    rng, hits = np.random.default_rng(seed), 0
    for place in range(len(own)):
        others = rng.choice(len(own) - 1, candidates - 1, replace=False)
        others += others >= place
        hits += bool((theirs[others] @ own[place] < theirs[place] @ own[place]).all())
    return Identified(
        hits=hits, trials=len(own), candidates=candidates, low=float(rate_at_least(hits, len(own), tail)),
        high=float(rate_at_most(hits, len(own), tail)), confidence=confidence,
    )  # fmt: skip


def align(known: Floats, guesses: Floats, *, ridge: float = 1e-2) -> Floats:
    """The linear map that takes embeddings of known texts nearest to the attacker's own of the same texts.

    For an attacker whose encoder has another space, by training or by a secret rotation, and who knows some
    texts with their embeddings. Ridge regression in closed form.

    Args:
        known: Embeddings of the attacked space, shape ``(texts, dim)``.
        guesses: Of the attacker's space, shape ``(texts, own dim)``.
        ridge: Weight of the penalty, relative to the mean square of ``known``.

    Returns:
        Shape ``(dim, own dim)``; ``embeddings @ align(...)`` lies in the attacker's space.

    Raises:
        DataError: The two are not of the same texts.
        ConfigurationError: ``ridge`` is not above 0.
    """
    if known.ndim != 2 or guesses.ndim != 2 or len(known) != len(guesses) or not known.size:
        raise DataError(f"{known.shape} and {guesses.shape} are not embeddings of the same texts.")
    if not ridge > 0:
        raise ConfigurationError(f"ridge={ridge} must be above 0.")
    square = known.T @ known
    penalty = ridge * float(np.trace(square)) / len(square)
    return np.asarray(np.linalg.solve(square + penalty * np.eye(len(square)), known.T @ guesses))
