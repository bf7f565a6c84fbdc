"""`task=synthesize`: from a trained generator and a public list of passages to a data set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.card import CARD_NAME, read_card
from lit_dpret.cards.tuning import TuningData
from lit_dpret.settings import Count, Natural, Settings, picked
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks.parts import Parts, by_hash, check_run_dir, say, say_unaccounted
from lit_dpret.texts import refuse_quoted

SYNTHETIC = "synthetic"


@dataclass(kw_only=True)
class Drawing(Settings):
    """Settings for drawing queries from a generator."""

    top_p: float = 0.8
    temperature: float = 1.0
    top_k: int | None = None
    max_new_tokens: int | None = 32
    min_new_tokens: int = 1
    group_size: Count = 64


@dataclass(kw_only=True)
class SetDrawing(Drawing):
    """Settings for drawing a data set for publication: also the device, and statements for its cards."""

    precision: str = "32-true"
    device: str = "auto"
    threads: Count = 1
    workers: Natural = 0
    language: str | None = None
    license: str | None = None
    tuning_data: TuningData = "unknown"
    tuning_note: str | None = None

    @property
    def device_is_elsewhere(self) -> bool:
        """Whether workers draw the queries, perhaps on other machines."""
        return self.workers > 0

    @property
    def tuning(self) -> dict[str, str]:
        """The data on which settings were chosen, for the card."""
        return {"data": self.tuning_data, "note": self.tuning_note or ""}

    def refuse_queries(self, queries: Iterable[str], folder: Path) -> None:
        """Refuse statements on the set's cards that contain a query of the log; ``folder`` names the run."""
        names = {"hydra.run.dir": folder.resolve().name, "task.language": self.language, "task.license": self.license}
        texts = {"task.tuning_note": self.tuning_note or ""}
        refuse_quoted(queries, texts, {knob: name for knob, name in names.items() if name})


@dataclass(kw_only=True)
class Synthesize(SetDrawing):
    """Write synthetic queries in BEIR's layout, with the generator's privacy card attached."""

    derives_from: ClassVar[tuple[str, ...]] = ("task.generator",)

    generator: Path
    passages_are_public: bool = False
    queries_per_passage: Count = 1
    max_passages: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings = picked(
            self, "top_p", "temperature", "top_k", "max_new_tokens", "min_new_tokens", "group_size", "precision",
            "device", "threads", "workers", "language", "license", "tuning", "passages_are_public",
            "queries_per_passage",
        )  # fmt: skip

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/synthetic``; an interrupted run resumes."""
        check_run_dir(parts.run_dir, min_free_mb=50)
        data = parts.read_data("predict")
        card, log = self.generator / CARD_NAME, getattr(data, "collection", None)
        if log is not None and card.is_file() and read_card(card)["claim"]["guarantee"] == "dp":
            self.refuse_queries(log.queries.values(), parts.run_dir)
        passages = public_sample(data.public_passages(), self.max_passages)
        with ProgressLine("generating queries") as progress:
            folder = synthesize(
                self.generator, passages, parts.run_dir / SYNTHETIC, seed=parts.seed, progress=progress,
                **self.settings,
            )  # fmt: skip
        say(f"synthetic queries: {folder}\nprivacy card: {folder / 'privacy_card.json'}")
        say_unaccounted(read_card(folder))
        return {"passages": float(len(passages))}


def public_sample(passages: dict[str, str], limit: int | None) -> dict[str, str]:
    """Return ``limit`` passages chosen by a hash of their ids, independent of all queries."""
    if limit is None or limit >= len(passages):
        return passages
    kept = set(sorted(passages, key=by_hash)[:limit])
    return {name: text for name, text in passages.items() if name in kept}
