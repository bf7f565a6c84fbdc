"""`task=pseudo_labels`: score margins between passages by a public cross-encoder, for training by margin-MSE."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_dpret.callbacks import ProgressLine
from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import Natural, Settings, picked
from lit_dpret.synthesis.filters.pseudo_labels import LABELS, Labelling, label
from lit_dpret.synthesis.filters.released import load_released
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.ranking import Ranker

PSEUDO_LABELS = "pseudo_labels"
_OF_LABELLING = (
    "cross_encoder", "cross_encoder_is_public", "encoder_is_public", "depth", "per_query", "batch_size", "max_length",
    "device", "workers",
)  # fmt: skip


@dataclass(kw_only=True)
class PseudoLabels(Settings):
    """Label synthetic queries against passages that a retriever confuses with their own; an interrupted run resumes."""

    data: Path
    cross_encoder: str | Path
    cross_encoder_is_public: bool = False
    encoder: str = "minilm"
    encoder_is_public: bool = False
    corpus: str | Path | None = None
    queries_are_public: bool = False
    depth: int = 50
    per_query: int = 5
    batch_size: int = 32
    max_length: int | None = None
    device: str = "cpu"
    workers: Natural = 0
    min_free_mb: float = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.per_query <= self.depth:
            raise ConfigurationError(f"task.per_query={self.per_query} must be from 1 to task.depth={self.depth}.")

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/pseudo_labels``; return the number of labelled queries."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        released = load_released(self.data, corpus=self.corpus, declared_public=self.queries_are_public)
        with ProgressLine("labelling queries") as progress:
            folder = label(
                released,
                parts.run_dir / PSEUDO_LABELS,
                Labelling(seed=parts.seed, **picked(self, *_OF_LABELLING)),
                ranker=Ranker(encoder=self.encoder, device=self.device, workers=self.workers),
                progress=progress,
            )
        say(f"labels: {folder / LABELS}")
        return {"queries": float(len(released))}
