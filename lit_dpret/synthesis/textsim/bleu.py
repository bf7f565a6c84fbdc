"""BLEU of synthetic queries against the original queries of the same passage, by sacrebleu.

The synthetic-query paper (section 6.2; 5.3.1 of its later version) compares each synthetic query with the one original
query of its passage, and states BLEU as a share of 1. With several original queries, all are references (Papineni et
al., 2002).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from lit_dpret.errors import DataError
from lit_dpret.synthesis.textsim.words import need


@dataclass(frozen=True, kw_only=True)
class Bleu:
    """Corpus BLEU."""

    score: float  # from 0 to 100, as sacrebleu prints it; the papers' tables show a hundredth of that
    signature: str  # sacrebleu's description of its settings; a score without it is meaningless (Post, 2018)
    precisions: tuple[float, ...]  # of 1- to 4-grams, in percent
    brevity_penalty: float  # 1 if the synthetic queries together are no shorter than their references
    scored: int  # synthetic queries with at least one original query of the same passage
    without_reference: int  # synthetic queries whose passage has no original query; not part of the score

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "precisions": list(self.precisions), "as_in_the_papers": self.score / 100}


def corpus_bleu(synthetic: Sequence[str], references: Sequence[Sequence[str]], *, lower_case: bool = False) -> Bleu:
    """Return corpus BLEU with sacrebleu's defaults and all references of each text.

    Texts without any reference are omitted and counted.
    """
    if len(synthetic) != len(references):
        raise DataError(f"{len(synthetic)} texts came with {len(references)} lists of references; give one list each.")
    pairs = [(text, list(known)) for text, known in zip(synthetic, references, strict=True) if known]
    if not pairs:
        raise DataError("No synthetic query has an original query of the same passage, so there is nothing to score.")
    metric = need("sacrebleu").BLEU(lowercase=lower_case)
    streams = [list(stream) for stream in zip_longest(*(known for _, known in pairs))]
    found = metric.corpus_score([text for text, _ in pairs], streams)
    return Bleu(
        score=float(found.score),
        signature=str(metric.get_signature()),
        precisions=tuple(float(p) for p in found.precisions),
        brevity_penalty=float(found.bp),
        scored=len(pairs),
        without_reference=len(synthetic) - len(pairs),
    )


def references_by_passage(passage_ids: Sequence[str], originals: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the original queries of each passage, in the order of ``passage_ids``; empty if there are none."""
    return [list(originals.get(name, ())) for name in passage_ids]
