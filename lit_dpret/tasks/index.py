"""`task=index` and `task=search`: build a search index over embeddings from `task=encode`, and query it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lit_dpret.cards.file import read_card
from lit_dpret.cards.tuning import TuningData
from lit_dpret.errors import ConfigurationError
from lit_dpret.report.page import shortened
from lit_dpret.retrieval.search import MISSING
from lit_dpret.settings import Count, Settings, picked
from lit_dpret.tasks.index_folder import IndexFolder, index_folder
from lit_dpret.tasks.parts import Parts, check_run_dir, say, say_unaccounted

_SHOWN = 200  # characters of a passage
INDEX = "index"


@dataclass(kw_only=True)
class Index(Settings):
    """Write an index folder, with the embeddings linked into it."""

    embeddings: Path
    search: str = "exact"
    private: bool = False
    device: str = "cpu"
    tuning_data: TuningData = "unknown"
    derives_from: ClassVar[tuple[str, ...]] = ("task.embeddings",)

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/index``."""
        check_run_dir(parts.run_dir, min_free_mb=50)
        how = picked(self, "search", "private", "device", "tuning_data")
        made = index_folder(self.embeddings, parts.run_dir / INDEX, seed=parts.seed, **how)
        say(f"index: {made.folder} ({self.search}, {made.manifest.count} texts)\n{made.promise}")
        if made.manifest.card:
            say_unaccounted(read_card(made.folder))
        return {"texts": float(made.manifest.count)}


@dataclass(kw_only=True)
class Search(Settings):
    """Print the passages nearest to a query; the task embeds the query in memory and writes it nowhere.

    Hydra keeps the command in the run folder (``.hydra/overrides.yaml``): do not pass a private query on the command
    line if that folder is shared.
    """

    index: Path
    query: str
    top_k: Count = 10
    encoder: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not str(self.query).strip():
            raise ConfigurationError("task.query is empty. Set it to the text to search for.")
        self.query = str(self.query)

    def run(self, parts: Parts) -> dict[str, float]:
        """Print rank, score, id and text."""
        index = IndexFolder(self.index)
        embedding = index.query_encoder(self.encoder).encode([self.query], "query", device=self.device)
        top = index.search(embedding, min(self.top_k, index.manifest.count), device=self.device)
        best = 0.0
        for rank, (score, place) in enumerate(
            zip(top.scores[0].tolist(), top.indices[0].tolist(), strict=True), start=1
        ):
            if place == MISSING:
                break
            best = max(best, score) if rank > 1 else score
            record = index.record(place)
            text = shortened(" ".join(str(record["text"]).split()), _SHOWN)
            say(f"{rank:3d}  {score:.4f}  {record['_id']}\n     {text}")
        return {"best_score": best}
