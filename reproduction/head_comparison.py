"""What comparisons share whose retriever is a frozen encoder with a head: texts are encoded once for all runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.retrieval.runs import EvaluationResult
from lit_dpret.tasks.pipeline_stages import stage_callbacks, train_retriever
from lit_dpret.tasks.ranking import score_embeddings
from lit_dpret.tasks.stages import DONE
from reproduction.compare_variant import Variant
from reproduction.comparison import C, Comparison

EMBEDDINGS = "embeddings"


class HeadComparison(Comparison[C]):
    """Train heads over the same embeddings, evaluate and compare.

    Args:
        retriever: Makes the frozen dual encoder, given its privacy mode and a variant's settings.
        delta: Of every claim; null for 1 / (2 n), n the public number of queries.
        **settings: The arguments of `Comparison`.
    """

    private_folder = EMBEDDINGS

    def __init__(self, *, retriever: Callable[..., Any], delta: float | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.make_retriever, self.delta = retriever, delta

    @abstractmethod
    def budget_of(self, cell: C) -> float | None:
        """The epsilon that a run of this row may spend by itself; None where it spends none."""

    def zero_shot(self) -> EvaluationResult:
        model = self.retriever(NoPrivacy())
        with ProgressLine("encoding passages and queries") as progress:
            model.prepare(self._searched, progress=progress)
        return self.score(model)

    def retriever(self, privacy: Any, **settings: Any) -> Any:
        """A new retriever that finds the embeddings of this run."""
        return self.make_retriever(privacy=privacy, cache_dir=self._parts.run_dir / EMBEDDINGS, **settings)

    def score(self, model: Any) -> EvaluationResult:
        """How well the questions of the split find their passages."""
        passages = dict(sorted(self._searched.public_passages().items()))
        model.prepare_texts(passages, self._queries)  # from the cache, but for the first run
        return score_embeddings(
            list(self._queries),
            model.encode_queries(list(self._queries.values())),
            list(passages),
            model.encode_passages(list(passages.values())),
            self._qrels,
        )

    def train_on(
        self, cell: C, data: PairsDataModule, seed: int, folder: Path, resume: bool, **settings: Any
    ) -> EvaluationResult:
        """One training run of the row's variant, judged; ``settings`` of the retriever go before the variant's."""
        variant: Variant = self.variants[cell.variant]
        L.seed_everything(seed, verbose=False)
        noise, cap = self._calibrated(cell)
        privacy = variant.make_privacy(
            eps=self.budget_of(cell), delta=self.claimed_delta(), seed=seed, noise_multiplier=noise
        )
        model = self.retriever(privacy, **variant.module_settings(seed=seed) | settings)
        tuning: dict[str, Any] = {"tuning_data": self.tuning_data, "tuning_note": self.tuning_note}
        label = self.run_name(cell, seed)
        data.physical_batch_size = 2 * variant.batch
        data.cap = data.cap if cap is None else cap
        train_retriever(
            model,
            data,
            folder,
            parts=self._parts,
            steps=variant.steps,
            batch=variant.batch,
            callbacks=stage_callbacks(folder, resume=resume, label=label, tuning_trials=variant.trials, **tuning),
            resume=resume,
        )
        result = self.score(model)
        self.drop_model(folder)
        return result

    def claimed_delta(self) -> float:
        """Of every claim."""
        return 1.0 / (2 * self._searched.n_units) if self.delta is None else self.delta

    def _calibrated(self, cell: C) -> tuple[float | None, int | None]:
        """Noise multiplier and cap of the row's first run, which the others need not look for again."""
        first = self._parts.run_dir / self.run_name(cell, self._parts.seed)
        if self.variants[cell.variant].guarantee != "dp" or not (first / DONE).exists():
            return None, None
        mechanism = read_card(first)["mechanism"]
        return mechanism["noise_multiplier"], mechanism["law"][0].get("cap")

    def is_private(self, cell: C) -> bool:
        return bool(self.variants[cell.variant].guarantee == "dp")
