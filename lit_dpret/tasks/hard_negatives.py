"""`task=hard_negatives`: for some questions of a silo, the sentences that an encoder ranks above or near the answers.

The case study of paper 004 (its Table 5, "query hubness"): a person has to judge whether the best sentences of a
collection are wrong, or right and unlabelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_dpret.cards.blocks import Grid
from lit_dpret.datamodules import SiloDataModule
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.datamodules.silo_folder import Silo, SiloQuery, read_silo
from lit_dpret.encoders import Towers, load_towers
from lit_dpret.errors import ConfigurationError
from lit_dpret.report.page import write_short
from lit_dpret.retrieval.search import search
from lit_dpret.settings import Count, Settings
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.ranking import embedded_texts
from lit_dpret.tasks.uncovered import DECLARED, Owner, model_of, refuse_training_data, require_owner
from lit_dpret.texts import normalise

_INTERNAL = "Internal: private questions, word for word. Keep it where they are kept."
_SPARE = 16  # extra results for sentences that repeat an answer and are skipped


@dataclass(kw_only=True)
class HardNegatives(Settings):
    """Write ``hard_negatives.json`` and ``.md``; ``internal_hard_negatives`` for private questions."""

    silo: Path
    encoder: str | Path
    whose: Owner | None = None
    questions: Count = 4
    negatives: Count = 2
    batch_size: Count = 64
    min_free_mb: float = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        require_owner(self.whose, "the report holds the questions")

    def run(self, parts: Parts) -> dict[str, float]:
        """Return the share of questions where a negative ranks first."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        silo = read_silo(self.silo)
        if self.whose == "public":
            refuse_training_data(SiloDataModule(folder=self.silo), self.encoder, knob="task.whose")
        drawn = self._drawn(silo, parts.seed)
        cases = self._cases(silo, drawn, load_towers(model_of(self.encoder)))
        facts: dict[str, Any] = {
            "internal": self.whose == "private",
            **data_facts(self.silo, silo.sentences, {query.qid: query.text for query in drawn}),
            "silo": silo.name,
            "sentences": len(silo.sentences),
            "encoder": Path(str(self.encoder)).name,
            "command": parts.command,
            "cases": cases,
        }
        by = f"By {facts['encoder']}, among {facts['sentences']:,} sentences."
        written = write_short(
            parts.run_dir, "hard_negatives", f"Nearest sentences that are not labelled answers, in {silo.name}", facts,
            [*([] if facts["internal"] else [DECLARED.format(what="questions"), ""]), by, "",
             case_grid(facts["cases"]).markdown()],
            internal=_INTERNAL if facts["internal"] else "",
        )  # fmt: skip
        say(*written.lines)
        return {"above_the_answers": float(np.mean([case["scores"][0] > case["answer_score"] for case in cases]))}

    def _drawn(self, silo: Silo, seed: int) -> list[SiloQuery]:
        train = [query for query in silo.queries if query.split == "train"]
        if len(train) < self.questions:
            raise ConfigurationError(
                f"task.questions={self.questions}, but {self.silo} has {len(train)} train questions. Lower it."
            )
        order = np.random.default_rng(seed).permutation(len(train))
        return [train[place] for place in order[: self.questions]]

    def _cases(self, silo: Silo, queries: list[SiloQuery], towers: Towers) -> list[dict[str, Any]]:
        """Return each question with its best labelled answer, the best other sentences, and their dot products."""
        ids, texts = list(silo.sentences), list(silo.sentences.values())
        place_of = {sid: place for place, sid in enumerate(ids)}
        sentences = embedded_texts(towers.passage_encoder, texts, "passage", batch_size=self.batch_size)
        asked = towers.query_encoder.encode([query.text for query in queries], "query").float()
        most = max(len(query.positives) for query in queries)
        found = search(asked, sentences, min(self.negatives + most + _SPARE, len(ids)))
        cases = []
        for row, query in enumerate(queries):
            answers = {normalise(silo.sentences[sid]) for sid in query.positives}
            scores = asked[row] @ sentences.T
            best = max(query.positives, key=lambda sid: float(scores[place_of[sid]]))
            others = [at for at in found.indices[row].tolist() if normalise(texts[at]) not in answers][: self.negatives]
            cases.append(
                {
                    "question": query.text,
                    "answer": silo.sentences[best],
                    "answer_score": float(scores[place_of[best]]),
                    "negatives": [texts[at] for at in others],
                    "scores": [float(scores[at]) for at in others],
                }
            )
        return cases


def case_grid(cases: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the cases in the form of the paper's Table 5: one per column, with scores next to the sentences."""
    depth = max(len(case["negatives"]) for case in cases)
    rows: list[list[str]] = [
        ["Question", *(case["question"] for case in cases)],
        ["Labelled answer", *(f"{case['answer']} ({case['answer_score']:.3f})" for case in cases)],
    ]
    for place in range(depth):
        cells = [
            f"{case['negatives'][place]} ({case['scores'][place]:.3f})" if place < len(case["negatives"]) else "–"
            for case in cases
        ]
        rows.append([f"Hard negative {place + 1}", *cells])
    return Grid(("", *(f"Case {number}" for number in range(1, len(cases) + 1))), rows)
