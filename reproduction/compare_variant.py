"""One privacy mode as `task=compare_modes` trains it, and what the table says of how it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from lit_dpret.cards.text import printed_epsilon
from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import PairwiseLoss
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.frozen_dual_encoder import Negatives
from lit_dpret.privacy.budget import require_choice
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.modes.base import Guarantee


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A privacy mode with the settings that it does best with.

    Args:
        label: Name in the table.
        privacy: Makes the mode; the budget is filled in.
        optimizer: Of the head.
        steps: Logical steps.
        batch: Units of a step on average.
        temperature: Divides the similarity in the softmax, where ``loss`` is null.
        negatives: ``auto``, ``pool`` or ``batch``; see `FrozenDualEncoder`.
        pool_size: Public passages that a step draws, for the modes that are not ``public_passages``.
        loss: A loss of the table of similarities; null for the softmax.
        trials: How many settings of this variant were tried.
    """

    label: str
    privacy: partial[PrivacyMode]
    optimizer: OptimizerSpec
    steps: int
    batch: int
    temperature: float = 0.05
    negatives: Negatives = "auto"
    pool_size: int | None = None
    loss: PairwiseLoss | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"task.variants: {name}={getattr(self, name)} must be at least 1.")
        require_choice("task.variants: negatives", self.negatives, get_args(Negatives))
        if not isinstance(self.privacy, partial) or not issubclass(self.mode, PrivacyMode):
            raise ConfigurationError("task.variants: privacy must make a privacy mode; set its _partial_ to true.")

    @property
    def mode(self) -> Any:
        """The class of the privacy mode."""
        return self.privacy.func

    @property
    def guarantee(self) -> Guarantee:
        found: Guarantee = self.mode.guarantee
        return found

    @property
    def learns_from_synthetic(self) -> bool:
        return self.guarantee == "inherited"

    def make_privacy(
        self, *, eps: float | None, delta: float | None, seed: int, noise_multiplier: float | None = None
    ) -> PrivacyMode:
        """The mode with its budget; where it draws public passages, they are those of the training seed.

        Args:
            eps: Of the claim, for the modes that have one.
            delta: The same.
            seed: Of the training run.
            noise_multiplier: What an equal run was calibrated to; None calibrates, or takes the mode's own.
        """
        budget: dict[str, Any] = {"eps": eps, "delta": delta} if self.guarantee == "dp" else {}
        if noise_multiplier is not None:
            budget["noise_multiplier"] = noise_multiplier
        pool = {"pool_seed": seed} if self.mode.candidates == "pool" else {}
        return self.privacy(**budget, **pool)

    def module_settings(self, *, seed: int) -> dict[str, Any]:
        """What the retriever is given besides its privacy mode."""
        return {
            "optimizer": self.optimizer,
            "temperature": self.temperature,
            "negatives": self.negatives,
            "loss": self.loss,
            "pool_size": self.pool_size,
            "pool_seed": seed,
        }

    def describe(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """How a run was trained, in its card's words where the card says it; the same keys for every variant."""
        mechanism = card["mechanism"]
        coupling = mechanism.get("coupling") or {}
        claim = card["claim"]
        softmax = f"softmax, temperature {self.temperature:g}"
        return {
            "mode": self.mode.name,
            "loss": softmax if self.loss is None else repr(self.loss),
            "epsilon": printed_epsilon(card),
            "delta": claim["delta"],
            "clipped": mechanism.get("engine") and (coupling.get("bounded") or claim["unit"]),
            "clip_bound": mechanism.get("max_grad_norm"),
            "sensitivity": mechanism.get("sensitivity") if claim["guarantee"] == "dp" else None,
            "sigma": mechanism.get("noise_multiplier"),
            "noise_std": mechanism.get("noise_std"),
            "batch": self.batch,
            "sub_batches": coupling.get("sub_batches"),
            "n_max": coupling.get("n_max"),
            "steps": self.steps,
            "optimizer": f"{self.optimizer.name}, lr {self.optimizer.lr:g}, {self.optimizer.schedule}",
            "trials": self.trials,
        }
