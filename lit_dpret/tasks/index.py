"""`task=index`: build a search structure over embeddings that `task=encode` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_dpret.distributed.job import job_here
from lit_dpret.tasks.encode import told
from lit_dpret.tasks.index_folder import index_folder
from lit_dpret.tasks.parts import Parts, check_run_dir, say

INDEX = "index"


@dataclass(kw_only=True)
class Index:
    """Write an index folder, with the embeddings linked into it."""

    embeddings: Path
    search: str = "exact"
    private: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.embeddings = Path(self.embeddings)

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/index``; of several ranks, the first one does."""
        with job_here() as job:
            return job.share(lambda: self._run(parts))

    def _run(self, parts: Parts) -> dict[str, float]:
        check_run_dir(parts.run_dir, min_free_mb=50)
        made = index_folder(
            self.embeddings,
            parts.run_dir / INDEX,
            search=self.search,
            private=self.private,
            device=self.device,
            seed=parts.seed,
        )
        say(f"index: {made.folder} ({self.search}, {made.manifest.count} texts)\n{told(made)}")
        return {"texts": float(made.manifest.count)}
