"""`task=encode`: embed a corpus into a searchable folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.file import card_of_data, read_card
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.distributed.job import Job, job_here
from lit_dpret.tasks.index_folder import Encoding, encode_folder
from lit_dpret.tasks.parts import Parts, check_run_dir, say, say_unaccounted
from lit_dpret.tasks.uncovered import refuse_training_data

EMBEDDINGS = "embeddings"


@dataclass(frozen=True, kw_only=True)
class Encode(Encoding):
    """Embed the datamodule's texts with the settings of `Encoding`; the same command resumes after an interruption."""

    takes_ranks: ClassVar[bool] = True
    derives_from: ClassVar[tuple[str, ...]] = ("task.encoder",)

    encoder: str = "minilm"
    split: str = "test"
    device: str = "cpu"

    @property
    def reads(self) -> str:
        """Which of the texts, for the line that names the data: passages are of no split."""
        return "passages" if self.side == "passage" else f"queries of split {self.split}"

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/embeddings``, on any number of ranks."""
        with job_here() as job:
            return self._run(parts, job)

    def _run(self, parts: Parts, job: Job) -> dict[str, float]:
        job.require_same("hydra.run.dir", str(parts.run_dir))
        job.share(lambda: check_run_dir(parts.run_dir, min_free_mb=50))
        data = parts.make_datamodule()
        job.share(data.prepare_data)
        data.setup("test")
        if self.side == "query" and self.queries == "public":
            refuse_training_data(data, self.encoder, knob="task.queries")
        texts = data.public_passages() if self.side == "passage" else data.evaluation_set(self.split)[0]
        with ProgressLine(f"encoding {len(texts)} texts") as progress:
            made = encode_folder(
                self.encoder, texts, parts.run_dir / EMBEDDINGS, self,
                progress=progress if job.is_first else None, job=job,
                claim=card_of_data(data, self.split) if self.side == "query" and self.queries == "public" else None,
                about=data_facts(data, texts),
            )  # fmt: skip
        if job.is_first:
            say(f"embeddings: {made.folder} ({made.manifest.count} x {made.manifest.dim})\n{made.promise}")
            if made.manifest.card:
                say_unaccounted(read_card(made.folder))
        return {"texts": float(made.manifest.count)}
