"""What `task=ablate` and `task=compare_modes` train: a retriever in one way, and the generators that it learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from lit_dpret.cards.start import model_folder, read_start
from lit_dpret.cards.text import printed_epsilon
from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import PairwiseLoss
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.frozen_dual_encoder import Head, Negatives
from lit_dpret.modules.generator_folder import is_generator, weights_hash
from lit_dpret.privacy.budget import require_choice
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.modes.base import Guarantee
from lit_dpret.settings import picked

PSEUDO = "pseudo"
RowsPerUnit = Literal["one", "all"]
Part = Literal["recipe", "baseline", "bound"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train the retriever: a privacy mode, what it learns from, and the settings that it does best with."""

    label: str  # name in the table
    privacy: partial[PrivacyMode]  # makes the mode; the budget is filled in
    optimizer: OptimizerSpec  # of the head
    steps: int  # logical steps
    batch: int  # units of a step on average
    temperature: float = 0.05  # divides the similarity in the softmax, where ``loss`` is null
    negatives: Negatives = "auto"  # ``auto``, ``pool`` or ``batch``; see `FrozenDualEncoder`
    pool_size: int | None = None  # public passages that a step draws, for the modes that are not ``public_passages``
    loss: PairwiseLoss | None = None  # a loss of the table of similarities; null for the softmax
    trials: int | None = None  # how many settings of this recipe were tried
    head: Head = "query"  # ``query``, ``both`` or ``shared``; see `FrozenDualEncoder`
    head_dim: int | None = None  # in how many principal directions of the public passages it learns; null for all
    rows_per_unit: RowsPerUnit = "one"  # ``one`` passage of a drawn query, or ``all`` of them
    # What is learned from: null for the private queries, or under ``privacy=synthetic`` for the sets of
    # ``task.synthetic``; ``pseudo`` for words of the passages; or the name of one of ``task.generators``, whose queries
    # are written again for every run.
    queries: str | None = None
    queries_per_passage: int = 1  # how many are made for each passage
    # Learn from the synthetic queries that find their passage among so many results of the zero-shot encoder; null for
    # what ``task.round_trip_filter`` says.
    round_trip_filter: int | None = None
    # Learn the margins that ``task.teacher`` gives each synthetic query, between its passage and so many others,
    # instead of which passage is its own; null learns that.
    pseudo_labels: int | None = None
    # ``bound`` for what may be reached without privacy, to which shares are taken; ``baseline`` for what every recipe
    # is tested against; else ``recipe``.
    part: Part = "recipe"

    def __post_init__(self) -> None:
        for name, choices in (
            ("negatives", Negatives), ("head", Head), ("rows_per_unit", RowsPerUnit), ("part", Part),
        ):  # fmt: skip
            require_choice(f"task.variants: {name}", getattr(self, name), get_args(choices))
        for name in ("steps", "batch", "queries_per_passage", "round_trip_filter", "pseudo_labels", "head_dim"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigurationError(f"task.variants: {name}={number} must be at least 1.")
        if not isinstance(self.privacy, partial) or not issubclass(self.mode, PrivacyMode):
            raise ConfigurationError("task.variants: privacy must make a privacy mode; set its _partial_ to true.")
        if self.queries not in (None, PSEUDO) and not self.learns_from_synthetic:
            raise ConfigurationError(
                f"task.variants: queries={self.queries} cannot go with privacy={self.mode.name}. Queries of a DP "
                "generator are learned from under privacy=synthetic, and only they are."
            )
        if self.queries == PSEUDO and self.guarantee != "none":
            raise ConfigurationError(
                f"task.variants: queries=pseudo are public, and privacy={self.mode.name} would protect nobody. "
                "Choose privacy=none."
            )
        if self.pseudo_labels is not None and (self.queries is None or self.head != "query"):
            raise ConfigurationError(
                f"task.variants: pseudo_labels={self.pseudo_labels} cannot go with queries={self.queries} and head="
                f"{self.head}. A teacher reads synthetic queries alone, and its margins train a query head. Set "
                "queries, and head=query."
            )

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

    @property
    def learns_from_given(self) -> bool:
        """Whether it learns from a set of ``task.synthetic``."""
        return self.learns_from_synthetic and self.queries is None

    def make_privacy(
        self, *, eps: float | None, delta: float, seed: int, noise_multiplier: float | None
    ) -> PrivacyMode:
        """Make the mode with its budget; where it draws public passages, they are those of the training seed."""
        budget: dict[str, Any] = {"eps": eps, "delta": delta} if self.guarantee == "dp" else {}
        if noise_multiplier is not None:
            budget["noise_multiplier"] = noise_multiplier
        pool = {"pool_seed": seed} if self.mode.candidates == "pool" else {}
        return self.privacy(**budget, **pool)

    def module_settings(self, *, seed: int) -> dict[str, Any]:
        """Return what the retriever is given besides its privacy mode."""
        names = ("optimizer", "temperature", "negatives", "loss", "pool_size", "head", "head_dim")
        return picked(self, *names) | {"pool_seed": seed}

    def describe(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """Describe how a run was trained, in its card's words where it has them; the same keys for every recipe."""
        mechanism, claim = card["mechanism"], card["claim"]
        coupling = mechanism.get("coupling") or {}
        loss = f"softmax, temperature {self.temperature:g}" if self.loss is None else repr(self.loss)
        if self.pseudo_labels is not None:
            loss = f"margins of a teacher, temperature {self.temperature:g}"
        made = self.queries is not None
        return {
            "mode": self.mode.name,
            "loss": loss,
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
            "queries": self.queries or ("synthetic" if self.learns_from_given else "private"),
            "per_passage": self.queries_per_passage if made else None,
            "round_trip": self.round_trip_filter,
            "pseudo_labels": self.pseudo_labels,
            "head": self.head,
            "head_dim": self.head_dim,
            "passages_of_a_query": None if made or self.learns_from_given else self.rows_per_unit,
        }


@dataclass(frozen=True, kw_only=True)
class GeneratorRecipe:
    """A way to train the query generator, and to draw from it."""

    label: str  # name in the table
    model: partial[Any]  # makes the generator, given ``privacy``
    privacy: partial[PrivacyMode]  # makes the privacy mode; the budget is filled in
    steps: int  # logical steps
    batch: int  # units of a step on average
    physical_batch: int = 32  # units that go through the model together
    top_p: float = 0.8  # nucleus
    temperature: float = 1.0  # divides the logits when queries are drawn
    trials: int | None = None  # how many settings were tried
    # The folder of an earlier run whose model training starts from, in place of the model's own ``pretrained``. It is
    # declared public: nothing private may have gone into it, and the cards say from where they started. Null starts
    # from ``model.pretrained``.
    public_start: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "physical_batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"task.generators: {name}={getattr(self, name)} must be at least 1.")
        for name in ("model", "privacy"):
            if not isinstance(getattr(self, name), partial):
                raise ConfigurationError(f"task.generators: {name} must make an object; set its _partial_ to true.")
        mode: Any = self.privacy.func
        if mode.guarantee != "dp":
            raise ConfigurationError(
                f"task.generators: privacy={mode.name} promises nothing, and what is made from it could "
                "not stand beside the budget. Choose privacy=dp_sgd."
            )

    def missing_start(self) -> Path | None:
        """Return the model folder that training would start from and that is not there."""
        if self.public_start is None:
            return None
        folder = model_folder(self.public_start)
        return None if is_generator(folder) else folder

    def check_start(self) -> None:
        """Refuse a start that cannot be public, before anything is trained."""
        if self.public_start is not None:
            read_start(self.public_start, public=True, knob="task.generators: public_start")

    def describe(self) -> str:
        """Return what may not change between a generator and its resumption."""
        start = "" if self.public_start is None else f" start={weights_hash(model_folder(self.public_start))}"
        return repr(self) + start
