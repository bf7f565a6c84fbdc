"""How near a written-out text is to the one that was embedded: words, exact matches, and meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lit_dpret.errors import DataError
from lit_dpret.synthesis.textsim.bleu import corpus_bleu
from lit_dpret.synthesis.textsim.words import words


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Scores of written texts against the originals, means over texts.

    Attributes:
        bleu: Of the corpus, from 0 to 100, by sacrebleu.
        token_f1: Harmonic mean of precision and recall of the sets of words.
        exact: The share that equals its original, case and punctuation aside.
        cosine: Of the written text's embedding and the attacked one; None where nobody embedded the texts anew.
        texts: How many.
    """

    bleu: float
    token_f1: float
    exact: float
    cosine: float | None
    texts: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def token_set_f1(written: str, original: str) -> float:
    """F1 of the two sets of words.

    >>> round(token_set_f1("a claim on my house", "file a claim"), 4)
    0.5
    """
    found, wanted = set(words(written)), set(words(original))
    shared = len(found & wanted)
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


def recovered(written: Sequence[str], originals: Sequence[str], *, cosines: Sequence[float] | None = None) -> Recovered:
    """Hold written texts against the originals.

    Raises:
        DataError: There are not as many, or none.
        ConfigurationError: sacrebleu is not installed.
    """
    if len(written) != len(originals) or not originals:
        raise DataError(f"{len(written)} written texts do not go with {len(originals)} originals.")
    return Recovered(
        bleu=corpus_bleu(written, [[text] for text in originals], lower_case=True).score,
        token_f1=float(np.mean([token_set_f1(a, b) for a, b in zip(written, originals, strict=True)])),
        exact=float(np.mean([words(a) == words(b) for a, b in zip(written, originals, strict=True)])),
        cosine=None if cosines is None else float(np.mean(cosines)),
        texts=len(originals),
    )
