"""Diversity, length and question types of queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, median

from lit_dpret.synthesis.textsim.words import check_n, check_texts, ngrams, words

LONGEST = 30
"""Lengths from here on share one column of the histogram."""

QUESTION_TYPES: Mapping[str, tuple[str, ...]] = {
    "what": ("what", "whats"),
    "how": ("how", "hows"),
    "why": ("why",),
    "when": ("when",),
    "where": ("where", "wheres"),
    "which": ("which",),
    "who": ("who", "whos", "whom", "whose"),
    "is": ("is", "are", "am", "was", "were", "isnt", "arent", "wasnt", "werent"),
    "do": ("do", "does", "did", "dont", "doesnt", "didnt"),
    "can": ("can", "could", "cant", "couldnt"),
    "will": ("will", "would", "wont", "wouldnt"),
    "should": ("should", "shouldnt"),
    "have": ("have", "has", "had", "havent", "hasnt"),
}
"""Types by first word; a text with any other first word is ``other``."""

_TYPE_OF = {word: name for name, all_words in QUESTION_TYPES.items() for word in all_words}


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Return distinct n-grams divided by all n-grams of the texts together; 0 without n-grams.

    After Li et al., "A Diversity-Promoting Objective Function" (NAACL 2016), section 5.2, who divide by the number
    of words. Dividing by the number of n-grams gives 1 to texts that never repeat anything. The value falls with the
    number of texts, so compare equally many.

    >>> distinct_n(["a b a", "b a"], 1), distinct_n(["a b a", "b a"], 2)
    (0.4, 0.6666666666666666)
    """
    check_n(n)
    check_texts(texts, "texts")
    grams = [gram for text in texts for gram in ngrams(words(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def lengths(texts: Sequence[str]) -> dict[str, float]:
    """Return the mean, median and 90th percentile of the number of words."""
    check_texts(texts, "texts")
    counts = sorted(len(words(text)) for text in texts)
    return {"mean": mean(counts), "median": float(median(counts)), "p90": float(counts[int(0.9 * (len(counts) - 1))])}


def length_histogram(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of texts by number of words, from ``0`` to ``30+``."""
    check_texts(texts, "texts")
    counts = Counter(min(len(words(text)), LONGEST) for text in texts)
    return {f"{n}+" if n == LONGEST else str(n): counts[n] / len(texts) for n in range(LONGEST + 1)}


def question_type(text: str) -> str:
    """Return the type of a query by its first word.

    >>> question_type("What's covered?"), question_type("cheap car insurance")
    ('what', 'other')
    """
    found = words(text)
    return _TYPE_OF.get(found[0], "other") if found else "other"


def question_types(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of texts by type, with every type listed."""
    check_texts(texts, "texts")
    counts = Counter(question_type(text) for text in texts)
    return {name: counts[name] / len(texts) for name in (*QUESTION_TYPES, "other")}


def total_variation(p: Mapping[str, float], q: Mapping[str, float]) -> float:
    """Return half the summed difference of two histograms: the share of texts that would have to change."""
    return sum(abs(p.get(name, 0.0) - q.get(name, 0.0)) for name in {**p, **q}) / 2
