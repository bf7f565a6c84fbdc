"""`task=synthesize`: from a trained generator and a public list of passages to a data set."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

from lit_dpret.callbacks import ProgressLine
from lit_dpret.errors import ConfigurationError
from lit_dpret.generation.writer import synthesize
from lit_dpret.tasks.parts import Parts, check_run_dir

SYNTHETIC = "synthetic"


class Synthesize:
    """Write synthetic queries in BEIR's layout, with the generator's privacy card attached.

    Args:
        generator: The ``model`` folder of a generator run.
        passages_are_public: Declares that the datamodule's list of passages does not depend on
            private queries. Without the declaration nothing is generated.
        queries_per_passage: Draws for each passage.
        max_passages: Generate for a public sample of so many passages, chosen by hash of id.
        top_p: Nucleus.
        temperature: Divides the logits.
        max_new_tokens: Longest query.
        group_size: Passages decoded together; part of what makes the files reproducible.
    """

    def __init__(
        self,
        *,
        generator: str | Path,
        passages_are_public: bool = False,
        queries_per_passage: int = 1,
        max_passages: int | None = None,
        top_p: float = 0.8,
        temperature: float = 1.0,
        max_new_tokens: int = 32,
        group_size: int = 64,
    ) -> None:
        for knob, value in (("queries_per_passage", queries_per_passage), ("group_size", group_size)):
            if value < 1:
                raise ConfigurationError(f"task.{knob}={value} must be at least 1.")
        if max_passages is not None and max_passages < 1:
            raise ConfigurationError(f"task.max_passages={max_passages} must be at least 1.")
        self.generator = Path(generator)
        self.passages_are_public = passages_are_public
        self.queries_per_passage = queries_per_passage
        self.max_passages = max_passages
        self.top_p, self.temperature = top_p, temperature
        self.max_new_tokens, self.group_size = max_new_tokens, group_size

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/synthetic``; an interrupted run goes on where it stopped."""
        check_run_dir(parts.run_dir, min_free_mb=50)
        data = parts.make_datamodule()
        data.prepare_data()
        data.setup("predict")
        passages = public_sample(data.public_passages(), self.max_passages)
        with ProgressLine("generating queries") as progress:
            folder = synthesize(
                self.generator,
                passages,
                parts.run_dir / SYNTHETIC,
                passages_are_public=self.passages_are_public,
                queries_per_passage=self.queries_per_passage,
                seed=parts.seed,
                top_p=self.top_p,
                temperature=self.temperature,
                max_new_tokens=self.max_new_tokens,
                group_size=self.group_size,
                progress=progress,
            )
        sys.stdout.write(f"synthetic queries: {folder}\nprivacy card: {folder / 'privacy_card.json'}\n")
        return {"passages": float(len(passages))}


def public_sample(passages: dict[str, str], limit: int | None) -> dict[str, str]:
    """``limit`` passages chosen by a hash of their ids: a choice that no query can influence."""
    if limit is None or limit >= len(passages):
        return passages
    chosen = sorted(passages, key=lambda name: sha256(name.encode()).digest())[:limit]
    kept = set(chosen)
    return {name: text for name, text in passages.items() if name in kept}
