"""`task=fit_scored`: train a query generator, and score it by BLEU on held-out queries, for a search over settings.

A score on public or synthetic queries may be published. No epsilon covers a score on private ones, so it stays in the
run folder, readable by its owner alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch

from lit_dpret.callbacks import ProgressLine
from lit_dpret.callbacks.retrieval_evaluation import trains_on
from lit_dpret.cards.file import MODEL_FOLDER
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import write_whole
from lit_dpret.modules.generator_folder import load_generator
from lit_dpret.settings import Count
from lit_dpret.synthesis.groups import canonical_groups, draw_group, fixed_arithmetic
from lit_dpret.synthesis.sampler import Decoding
from lit_dpret.synthesis.textsim.bleu import corpus_bleu, references_by_passage
from lit_dpret.synthesis.textsim.words import need
from lit_dpret.tasks.fit import Fit
from lit_dpret.tasks.parts import Parts, say
from lit_dpret.tasks.synthesize import public_sample
from lit_dpret.tasks.uncovered import Whose, check_synthetic

BLEU = "val/bleu"
SCORE = "validation_score.json"


@dataclass(kw_only=True)
class FitScored(Fit):
    """Train like ``task=fit``, then draw a query for passages of a validation split and compare."""

    data: Whose | None = None
    datamodule: Any = None
    split: str = "dev"
    max_passages: Count | None = 500
    top_p: float = 0.8
    temperature: float = 1.0
    group_size: Count = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is None:
            raise ConfigurationError(
                "task.data=null: declare the validation queries as public, synthetic or private. The first two cost "
                "nothing; a score on private ones stays in the run folder, and choosing settings by it has a cost "
                "(docs/sweeps.md)."
            )
        need("sacrebleu")  # fails before hours of training

    def run(self, parts: Parts) -> dict[str, float]:
        """Train and score; loggers receive the score unless it uses private queries."""
        held = self._held_out(parts)  # read first, so that a missing split is refused before the training
        loggers = parts.make_loggers()
        result = super().run(replace(parts, make_loggers=lambda: loggers))
        score = self._bleu(parts, held)
        facts = {BLEU: score, "data": self.data, "split": self.split, "passages": len(held[0])}
        private = self.data == "private"
        file = write_whole(parts.run_dir / SCORE, f"{json.dumps(facts, indent=1)}\n", owner_only=private)
        say(f"{BLEU} {score:.2f}, with one query for each of {len(held[0])} passages: {file}")
        for logger in () if private else loggers:
            logger.log_metrics({BLEU: score})
            logger.finalize("success")  # again, for metrics logged since the training
        return {**result, BLEU: score}

    def _held_out(self, parts: Parts) -> tuple[dict[str, str], dict[str, list[str]]]:
        """Return passages with validation queries, and those queries."""
        data = parts.make_datamodule() if self.datamodule is None else self.datamodule
        data.prepare_data()
        data.setup("test")
        if self.data == "synthetic":
            check_synthetic(data, self.split)
        queries, qrels = data.evaluation_set(self.split)
        if self.data == "public" and (mode := parts.make_privacy()).guarantee == "dp":
            own = data if self.datamodule is None else parts.read_data("test")
            if trains_on(own, queries, users_of=data if mode.unit == "user" else None):
                raise ConfigurationError(
                    f"task.data=public with task.split={self.split}: over a tenth of these queries are ones that the "
                    "run protects, or from their users. Choose another task.split or task.datamodule, or set "
                    "task.data=private."
                )
        asked: dict[str, list[str]] = {}
        for query, judged in qrels.items():
            for passage, grade in judged.items():
                if grade > 0:
                    asked.setdefault(passage, []).append(queries[query])
        if not asked:
            raise DataError(f"task.split={self.split} has no query with a passage, so there is nothing to score on.")
        texts = data.public_passages()
        return public_sample({name: texts[name] for name in asked}, self.max_passages), asked

    def _bleu(self, parts: Parts, held: tuple[dict[str, str], dict[str, list[str]]]) -> float:
        passages, asked = held
        generator = load_generator(parts.run_dir / MODEL_FOLDER)
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        generator.model.to(place)
        decoding = Decoding(
            top_p=self.top_p, temperature=self.temperature, top_k=None,
            max_new_tokens=generator.contract.max_query_length, min_new_tokens=1,
        )  # fmt: skip
        made: list[tuple[str, str]] = []
        groups = canonical_groups(generator.codec, passages, self.group_size)
        with fixed_arithmetic(1), ProgressLine("drawing validation queries") as progress:
            for group in groups:
                drawn = draw_group(generator, {name: passages[name] for name in group}, 1, parts.seed, decoding)
                made += [(query.passage_id, query.text) for query in drawn]
                progress(len(made), len(passages))
        references = references_by_passage([passage for passage, _ in made], asked)
        return corpus_bleu([text for _, text in made], references).score
