"""`task=compare_negatives`: train one dual encoder with negatives from every source, and find which of them differ.

Every row has the same encoder, steps and batches; the rows differ in the negatives of a query. Sources are added to
those that the privacy mode uses by itself, the passages of the batch or a public pool, unless a variant sets ``alone``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lit_dpret.cards.text import printed_epsilon, privacy_line
from lit_dpret.errors import ConfigurationError
from lit_dpret.negatives import InBatchNegatives, NegativeSource, PassageSource, refusal
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.retrieval.trec_runs import EvaluationResult
from lit_dpret.settings import require_whole
from reproduction.report.comparison import Headings
from reproduction.study import Cell, RetrievalStudy


@dataclass(frozen=True, kw_only=True)
class NegativesVariant:
    """Sources of negatives that are tried together."""

    # The name of the sources in the table, which adds what they are combined with. Null if there are no sources.
    label: str | None = None
    # Makes each source, under a name of your choice; empty for what the privacy mode uses by itself.
    negatives: Mapping[str, partial[NegativeSource]] = field(default_factory=dict)
    alone: bool = False  # without the passages of the batch in addition
    trials: int | None = None  # how many settings of this variant were tried

    def __post_init__(self) -> None:
        if (self.label is None) == bool(self.negatives):
            raise ConfigurationError(f"task.variants: label={self.label!r} must be set with negatives, and only then.")
        for name, source in self.negatives.items():
            if not _makes(source, NegativeSource):
                raise ConfigurationError(
                    f"task.variants: negatives.{name} must make a source of negatives; set its _partial_ to true."
                )

    def name(self, privacy: PrivacyMode) -> str:
        """Return the row's name in the table: what the mode uses by itself, and what was added to it."""
        own = "public pool" if privacy.candidates == "pool" else "in-batch"
        if self.label is None:
            return own
        return self.label if self.alone and privacy.candidates != "pool" else f"{own} and {self.label}"

    def make(self, privacy: PrivacyMode, *, seed: int) -> list[NegativeSource] | None:
        """Return the sources of one training run, drawing by its seed; None for a mode's own pool."""
        found = [source(seed=seed) if _makes(source, PassageSource) else source() for source in self.negatives.values()]
        if privacy.candidates == "batch" and not (found and self.alone):
            return [InBatchNegatives(), *found]
        return found or None


@dataclass(kw_only=True, eq=False)
class CompareNegatives(RetrievalStudy):
    """Train one dual encoder with every variant's negatives, evaluate and compare.

    A variant with a source that the run's privacy mode refuses is left out, and the report says why.
    """

    headings = Headings(
        name="compare_negatives", title="One dual encoder with negatives from every source", rows="Sources of negatives"
    )
    private_folder = "private"

    steps: int
    batch: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("task", self, 1, "steps", "batch")

    def cells(self) -> list[Cell]:
        """Return every variant that the privacy mode accepts."""
        privacy: PrivacyMode = self._parts.make_privacy()
        self._refused: dict[str, str] = {}
        for name in self.chosen:
            for source in self.variants[name].make(privacy, seed=0) or ():
                reason = refusal(source, privacy)
                if reason is not None:
                    self._refused.setdefault(name, f"{source.name} cannot go with privacy={privacy.name}: {reason}")
        left = [Cell(name) for name in self.chosen if name not in self._refused]
        if not left:
            raise ConfigurationError(
                f"task.variants leave nothing to compare under privacy={privacy.name}: "
                f"{next(iter(self._refused.values()))}."
            )
        return left

    def zero_shot(self) -> EvaluationResult:
        return self.score(self.retriever(privacy=NoPrivacy()))

    def train(self, cell: Cell, seed: int, folder: Path, resume: bool) -> EvaluationResult:
        variant: NegativesVariant = self.variants[cell.variant]

        def make_model() -> Any:
            privacy: PrivacyMode = self._parts.make_privacy()
            return self.retriever(privacy=privacy, negatives=variant.make(privacy, seed=seed))

        size: dict[str, Any] = {"steps": self.steps, "batch": self.batch, "trials": variant.trials}
        often = max(1, self.steps // 2)
        trained = self.fit(make_model, self.make_data(), folder, seed=seed, resume=resume, save_every=often, **size)
        return self.score(trained)

    def describe_row(self, cell: Cell, card: Mapping[str, Any]) -> dict[str, Any]:
        variant: NegativesVariant = self.variants[cell.variant]
        privacy: PrivacyMode = self._parts.make_privacy()
        sources = variant.make(privacy, seed=0)
        mechanism = card["mechanism"]
        return {
            "name": variant.name(privacy),
            "privacy": privacy_line(card),
            "variant": cell.variant,
            "settings": {
                "negatives": ", ".join(map(_shown, sources)) if sources else "public pool",
                "mode": mechanism["mode"],
                "epsilon": printed_epsilon(card),
                "batch": self.batch,
                "steps": self.steps,
                "trials": variant.trials,
            },
        }

    def is_private(self, cell: Cell) -> bool:
        return bool(self._parts.make_privacy().guarantee == "dp")

    def notes(self) -> Iterable[str]:
        privacy: PrivacyMode = self._parts.make_privacy()
        for name, reason in self._refused.items():
            yield f"{self.variants[name].name(privacy)} is left out: {reason}."


def _makes(source: object, kind: type[NegativeSource]) -> bool:
    made = source.func if isinstance(source, partial) else None
    return isinstance(made, type) and issubclass(made, kind)


def _shown(source: NegativeSource) -> str:
    if not isinstance(source, PassageSource):
        return source.name
    depth = f" of {source.depth}" if hasattr(source, "depth") else ""
    return f"{source.name} {source.per_query}{depth}" + (" shared" if source.shared_in_batch else "")
