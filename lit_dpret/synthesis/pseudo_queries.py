"""Pseudo-queries without privacy cost: words cut out of the passages.

A private generator has to beat a program that never saw a query. For each passage, this program takes a salient
sentence and keeps the words that are frequent in the passage and rare in the corpus (tf-idf), in the order of the text.
The only randomness is a hash of passage id and draw, and no private data are used.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_dpret.errors import ConfigurationError
from lit_dpret.synthesis.dataset_folder import (
    DataCard,
    SyntheticQuery,
    check_passages,
    passages_hash,
    write_dataset,
    write_readme,
    write_summary,
)

_STOP_LINES = """
a about above after again all also am an and any are as at be because been before being below between both but
by can could did do does doing down during each either else few for from further had has have having he her
here hers him his how i if in into is it its itself just may me might more most much must my no nor not now of
off on once one only or other our out over own same she should so some such than that the their them then
there these they this those through to too under until up upon us very was we were what when where which while
who whom whose why will with within without would you your yours
"""
STOP_WORDS = frozenset(_STOP_LINES.split())
MIN_WORDS, MAX_WORDS = 3, 10
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")


@dataclass(frozen=True)
class _Sentence:
    """Content words in text order, first occurrences only."""

    words: list[str]
    salience: float


def pseudo_queries(
    passages: Mapping[str, str], *, queries_per_passage: int = 1, min_words: int = MIN_WORDS, max_words: int = MAX_WORDS
) -> Iterator[SyntheticQuery]:
    """Yield queries from the passages alone, by passage id and draw.

    Guarantees:
        - Every word of a query is in its passage.
        - A query has between ``min_words`` and ``max_words`` words, or fewer if its passage has
          fewer content words; it is empty only if the passage has no words.
        - The queries depend only on the passages and the arguments.
    """
    if queries_per_passage < 1:
        raise ConfigurationError(f"queries_per_passage={queries_per_passage} must be at least 1.")
    if not 1 <= min_words <= max_words:
        raise ConfigurationError(
            f"min_words={min_words} and max_words={max_words}: min_words must be at least 1, and max_words at least as "
            "large."
        )
    seen_in = Counter(word for text in passages.values() for word in set(_words(text)))
    for name in sorted(passages):
        words = _words(passages[name])
        weight = {
            word: count / (count + 1) * math.log(1 + (len(passages) - seen_in[word] + 0.5) / (seen_in[word] + 0.5))
            for word, count in Counter(words).items()
        }
        sentences = _salient_sentences(passages[name], weight, min_words)
        for draw in range(queries_per_passage):
            text = ""
            if sentences:
                chosen = sentences[draw % len(sentences)]
                length = min_words + _hash(name, draw) % (max_words - min_words + 1)
                text = " ".join(_most_telling(chosen.words, weight, length))
            yield SyntheticQuery(passage_id=name, draw=draw, text=text)


def write_pseudo_queries(passages: Mapping[str, str], out: str | Path, *, queries_per_passage: int = 1) -> Path:
    """Write ``pseudo_queries`` in the layout of a synthetic data set, so that the same training can read both."""
    check_passages(passages)
    folder = Path(out)

    def queries() -> Iterator[SyntheticQuery]:
        return pseudo_queries(passages, queries_per_passage=queries_per_passage)

    counts, hashes = write_dataset(folder, queries, passages)
    configuration = {
        "generator": "pseudo_queries",
        "passages": passages_hash(passages),
        "queries_per_passage": queries_per_passage,
        "min_words": MIN_WORDS,
        "max_words": MAX_WORDS,
    }
    origin = [
        "Generator: none; words taken from the passages by tf-idf (`lit_dpret.synthesis.pseudo_queries`).",
        f"{queries_per_passage} per passage, {MIN_WORDS} to {MAX_WORDS} words; deterministic.",
    ]
    card = DataCard(title=f"Pseudo-queries: {folder.resolve().name}", origin=origin, from_passages=True)
    write_summary(folder, configuration, counts, hashes, terms=card.terms)
    write_readme(folder, card, counts, None)
    return folder


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _content(text: str) -> list[str]:
    """Return the content words, each once; all words if there is no content word."""
    words = list(dict.fromkeys(_words(text)))
    return [word for word in words if word not in STOP_WORDS] or words


def _salient_sentences(text: str, weight: Mapping[str, float], min_words: int) -> list[_Sentence]:
    """Return sentences with enough content words, most salient first; the whole text if no sentence has enough."""
    sentences = []
    for part in _SENTENCE.split(text):
        words = _content(part)
        if len(words) >= min_words:
            sentences.append(_Sentence(words, sum(weight[word] for word in words) / len(words)))
    if not sentences and (words := _content(text)):
        sentences = [_Sentence(words, 0.0)]
    return sorted(sentences, key=lambda sentence: -sentence.salience)


def _most_telling(words: list[str], weight: Mapping[str, float], count: int) -> list[str]:
    places = sorted(range(len(words)), key=lambda place: (-weight[words[place]], place))[:count]
    return [words[place] for place in sorted(places)]


def _hash(name: str, draw: int) -> int:
    data = f"{draw}\x1f{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
