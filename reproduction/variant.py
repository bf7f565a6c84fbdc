"""One way to train, as a comparison of several names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import PairwiseLoss
from lit_dpret.privacy.budget import require_choice
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode

Part = Literal["paper", "batch_sizes", "equal_negatives", "losses"]
# What all private variants have in common; each one's own settings stand in its `privacy`.
_SHARED = ("eps", "delta", "unit", "neighbours", "accountant", "noise", "secure_rng", "secret_file", "noise_seed")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A privacy mode with the settings that were chosen for it.

    Args:
        label: As figures and tables show it. Variants of ``batch_sizes`` share one.
        privacy: Makes the mode, given what all private variants share (``eps``, ``delta`` and so on).
        lr: Of the optimizer.
        loss: A loss of the table of similarities; null for the model's own.
        batch_size: Images of a logical batch on average; null for the task's.
        part: Which figures and tables it belongs to.
        seeds: Run the first so many of the task's seeds; null for all.

    Raises:
        ConfigurationError: A value is out of range.
    """

    label: str
    privacy: Callable[..., PrivacyMode]
    lr: float
    loss: PairwiseLoss | None = None
    batch_size: int | None = None
    part: Part = "paper"
    seeds: int | None = None

    def __post_init__(self) -> None:
        require_choice("task.variants.part", self.part, get_args(Part))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigurationError(f"task.variants: lr={self.lr} of {self.label!r} must be positive.")
        for name in ("batch_size", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"task.variants: {name}={value} of {self.label!r} must be at least 1.")

    def make_privacy(self, shared: dict[str, Any]) -> PrivacyMode:
        """A new mode; ``shared`` is of no use to one that promises nothing."""
        factory: Any = self.privacy
        plain = getattr(factory, "func", factory) is NoPrivacy
        return self.privacy() if plain else self.privacy(**shared)


def shared_settings(mode: PrivacyMode) -> dict[str, Any]:
    """What the private variants take over from the run's ``privacy``.

    Raises:
        ConfigurationError: The mode promises nothing, so there is no budget to take over.
    """
    if mode.guarantee != "dp":
        raise ConfigurationError(
            f"task=variants compares training with and without privacy by itself; privacy={mode.name} names no budget "
            "for its private variants. Choose privacy=logit_dp."
        )
    return {name: getattr(mode, name) for name in _SHARED}
