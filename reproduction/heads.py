"""Studies whose retriever is a frozen encoder with a head: texts are encoded once for all runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import lightning as L

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import printed_epsilon
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import PairwiseLoss
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.frozen_dual_encoder import Negatives
from lit_dpret.privacy.budget import require_choice
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.privacy.modes.base import Guarantee
from lit_dpret.retrieval.runs import EvaluationResult
from lit_dpret.synthesis.filters import ReleasedQueries
from lit_dpret.tasks.pipeline_stages import check_round_trip
from lit_dpret.tasks.ranking import score_embeddings
from reproduction.study import Cell, RetrievalStudy, TrainingRun

EMBEDDINGS = "embeddings"


@dataclass(frozen=True, kw_only=True)
class HeadVariant:
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
        shared = {name: getattr(self, name) for name in ("optimizer", "temperature", "negatives", "loss", "pool_size")}
        return shared | {"pool_seed": seed}

    def describe(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """Tell how a run was trained, in its card's words where it has them; the same keys for every variant."""
        mechanism, claim = card["mechanism"], card["claim"]
        coupling = mechanism.get("coupling") or {}
        return {
            "mode": self.mode.name,
            "loss": f"softmax, temperature {self.temperature:g}" if self.loss is None else repr(self.loss),
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


@dataclass(kw_only=True, eq=False)
class HeadStudy(RetrievalStudy):
    """Train heads over the same embeddings, evaluate and compare."""

    private_folder = EMBEDDINGS

    delta: float | None = None

    @abstractmethod
    def budget_of(self, cell: Cell) -> float | None:
        """Return the epsilon that a run of this row may spend by itself; None where it spends none."""

    def is_private(self, cell: Cell) -> bool:
        return bool(self.variants[cell.variant].guarantee == "dp")

    def zero_shot(self) -> EvaluationResult:
        return self.score(self.prepared(self._searched, "encoding passages and queries"))

    def make_retriever(self, privacy: Any, **settings: Any) -> Any:
        """Make a retriever that finds the embeddings of this run."""
        return self.retriever(privacy=privacy, cache_dir=self._parts.run_dir / EMBEDDINGS, **settings)

    def prepared(self, data: PairsDataModule, label: str) -> Any:
        """Make the untrained retriever, with the texts of ``data`` encoded."""
        model = self.make_retriever(NoPrivacy())
        with ProgressLine(label) as progress:
            model.prepare(data, progress=progress)
        return model

    def score(self, model: Any) -> EvaluationResult:
        passages = dict(sorted(self._passages().items()))
        model.prepare_texts(passages, self._queries)  # from the cache, but for the first run
        queries = model.encode_queries(list(self._queries.values()))
        found = model.encode_passages(list(passages.values()))
        return score_embeddings(list(self._queries), queries, list(passages), found, self._qrels)

    def train_on(self, data: PairsDataModule, run: TrainingRun, **settings: Any) -> EvaluationResult:
        """Do one training run of its row's variant; ``settings`` of the retriever go before the variant's."""
        cell, seed = run.cell, run.seed
        variant: HeadVariant = self.variants[cell.variant]
        L.seed_everything(seed, verbose=False)
        noise, cap = self._calibrated(cell)
        privacy = variant.make_privacy(
            eps=self.budget_of(cell), delta=self.claimed_delta(), seed=seed, noise_multiplier=noise
        )
        model = self.make_retriever(privacy, **variant.module_settings(seed=seed) | settings)
        data.cap = data.cap if cap is None else cap
        size: dict[str, Any] = {"steps": variant.steps, "batch": variant.batch, "trials": variant.trials}
        return self.fit(model, data, run, **size)

    def claimed_delta(self) -> float:
        """Return the delta of every claim."""
        return 1.0 / (2 * self._searched.n_units) if self.delta is None else self.delta

    def _calibrated(self, cell: Cell) -> tuple[float | None, int | None]:
        """Noise multiplier and cap of the row's first run, which the others need not look for again."""
        first = cell.run(self._parts.seed)
        if not self.is_private(cell) or not self._stages.is_done(first):
            return None, None
        mechanism = read_card(self._parts.run_dir / first)["mechanism"]
        return mechanism["noise_multiplier"], mechanism["law"][0].get("cap")

    def round_trip(
        self, data: SyntheticDataModule, released: ReleasedQueries, stage: Path, *, k: int, label: str
    ) -> dict[str, Any]:
        """Keep the synthetic queries that find their own passage among ``k`` results of the untrained encoder."""
        data.setup("fit")
        return check_round_trip(self.prepared(data, label), released, stage, k=k, seed=self._parts.seed)
