"""`task=encode`: embed a corpus into a searchable folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.file import card_of_data, read_card
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.tasks.index_folder import Encoding, encode_folder
from lit_dpret.tasks.parts import Parts, check_run_dir, say, say_unaccounted
from lit_dpret.tasks.uncovered import refuse_training_data

EMBEDDINGS = "embeddings"


@dataclass(frozen=True, kw_only=True)
class Encode(Encoding):
    """Embed the datamodule's texts with the settings of `Encoding`; the same command resumes after an interruption."""

    derives_from: ClassVar[tuple[str, ...]] = ("task.encoder",)

    encoder: str = "minilm"
    split: str = "test"
    device: str = "cpu"

    @property
    def device_is_elsewhere(self) -> bool:
        """Whether workers embed, perhaps on other machines."""
        return self.workers > 0

    @property
    def reads(self) -> str:
        """The texts in use, for the line that names the data; passages belong to no split."""
        return "passages" if self.side == "passage" else f"queries of split {self.split}"

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/embeddings``."""
        check_run_dir(parts.run_dir, min_free_mb=50)
        data = parts.read_data("test")
        if self.side == "query" and self.queries == "public":
            refuse_training_data(data, self.encoder, knob="task.queries")
        texts = data.public_passages() if self.side == "passage" else data.evaluation_set(self.split)[0]
        with ProgressLine(f"encoding {len(texts)} texts") as progress:
            made = encode_folder(
                self.encoder, texts, parts.run_dir / EMBEDDINGS, self,
                progress=progress,
                claim=card_of_data(data, self.split) if self.side == "query" and self.queries == "public" else None,
                about=data_facts(data, texts),
            )  # fmt: skip
        say(f"embeddings: {made.folder} ({made.manifest.count} x {made.manifest.dim})\n{made.promise}")
        if made.manifest.card:
            say_unaccounted(read_card(made.folder))
        return {"texts": float(made.manifest.count)}
