"""`task=encode`: embed a corpus into a folder that can be searched."""

from __future__ import annotations

import sys
from pathlib import Path

from lit_dpret.callbacks import ProgressLine
from lit_dpret.distributed.job import Job, job_here
from lit_dpret.encoders import Side
from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.rows import Storage
from lit_dpret.tasks.index_folder import Declared, IndexFolder, encode_folder
from lit_dpret.tasks.parts import Parts, check_run_dir, require_whole
from lit_dpret.tasks.uncovered import refuse_training_data

EMBEDDINGS = "embeddings"


class Encode:
    """Embed the datamodule's passages; the same command goes on after an interruption.

    Args:
        encoder: ``minilm``, the folder of a trained encoder, or a hub name.
        side: ``passage``, or ``query`` for the queries of ``split``.
        split: Which queries.
        queries: Where ``side=query``: ``public`` or ``private``, to be declared.
        dtype: In which the encoder computes: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
        storage: ``float32`` or ``bfloat16``.
        batch_size: Texts per forward pass.
        max_length: Tokens of a text that are read; null for what the encoder's folder says.
        device: ``cpu``, ``cuda`` and so on.
    """

    takes_ranks = True

    def __init__(
        self,
        *,
        encoder: str = "minilm",
        side: Side = "passage",
        split: str = "test",
        queries: Declared | None = None,
        dtype: str = "float32",
        storage: Storage = "float32",
        batch_size: int = 64,
        max_length: int | None = None,
        device: str = "cpu",
    ) -> None:
        if side not in ("passage", "query"):
            raise ConfigurationError(f"task.side={side!r} is neither passage nor query.")
        require_whole(batch_size=(batch_size, 1))
        self.encoder, self.side, self.split, self.queries = encoder, side, split, queries
        self.dtype, self.storage, self.batch_size = dtype, storage, batch_size
        self.max_length, self.device = max_length, device

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/embeddings``, on however many ranks."""
        with job_here() as job:
            return self._run(parts, job)

    def _run(self, parts: Parts, job: Job) -> dict[str, float]:
        job.require_same("hydra.run.dir", str(parts.run_dir))
        job.share(lambda: check_run_dir(parts.run_dir, min_free_mb=50))
        data = parts.make_datamodule()
        job.share(data.prepare_data)
        data.setup("test")
        if self.side == "query" and self.queries == "public":
            refuse_training_data(data, Path(self.encoder), knob="task.queries")
        texts = data.public_passages() if self.side == "passage" else data.evaluation_set(self.split)[0]
        with ProgressLine(f"encoding {len(texts)} texts") as progress:
            made = encode_folder(
                self.encoder,
                texts,
                parts.run_dir / EMBEDDINGS,
                side=self.side,
                queries=self.queries,
                dtype=self.dtype,
                storage=self.storage,
                batch_size=self.batch_size,
                max_length=self.max_length,
                device=self.device,
                progress=progress if job.is_first else None,
                job=job,
            )
        if job.is_first:
            sys.stdout.write(f"embeddings: {made.folder} ({made.manifest.count} x {made.manifest.dim})\n{told(made)}\n")
        return {"texts": float(made.manifest.count)}


def told(index: IndexFolder) -> str:
    """Say what a folder of embeddings promises, in a sentence."""
    if index.manifest.private:
        return (
            "PRIVATE: these are embeddings of private queries, from which texts can be guessed. No guarantee covers "
            "them; do not publish the folder."
        )
    if index.manifest.card:
        path = Path(index.folder) / "privacy_card.json"
        return f"privacy card: {path} (embeddings of public texts are post-processing: the claim is the encoder's)"
    return (
        "The encoder has no privacy card: nothing is claimed. If it saw no private data, neither did these embeddings."
    )
