"""Count the texts that occur in the pre-training corpus of a public model.

Noise does not hide a query that the public model read before. A text counts as found if its words occur in one document
in a row, ignoring case, punctuation and line breaks; and, more widely, if any 13 of its words do (Brown et al., 2020,
appendix C). The corpus is read once, as a stream; the share found in a sample of it is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dpret.errors import ConfigurationError
from lit_dpret.synthesis.textsim.overlap import Share
from lit_dpret.synthesis.textsim.words import check_n, check_texts, words

_CHUNK = 1_000_000  # words of the corpus that are processed together
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no digit is lost modulo 2**64

Ids = NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The found texts of one list."""

    exact: Share  # texts whose words all occur in a row in a document, of those with any word
    ngram: Share  # texts with a run of ``n`` words that occurs in a document, of those with at least ``n`` words
    n: int
    # For each text, whether it was found exactly. It reveals the caller's texts, so store it with them.
    which: tuple[bool, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the shares as JSON values, without the list of found texts."""
        return {"exact": self.exact.to_dict(), "ngram": self.ngram.to_dict(), "n": self.n}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """How much of a corpus was read."""

    documents: int
    words: int


def find_in_corpus(
    lists: Mapping[str, Sequence[str]], documents: Iterable[str], *, n: int = 13
) -> tuple[dict[str, Found], Corpus]:
    """Search one corpus once for several lists of texts, by name; return the results, and how much was read.

    Guarantees:
        - Every text that counts as found is in a document word for word: hashes only decide where to look.
        - Memory grows with the texts searched for and the longest document, not with the corpus.
        - The order of the documents does not matter, and no match crosses the end of a document.
    """
    check_n(n)
    wanted: dict[str, list[list[str]]] = {}
    for name, texts in lists.items():
        check_texts(texts, name)
        wanted[name] = [words(text) for text in texts]
        check_texts([tokens for tokens in wanted[name] if tokens], f"{name} with any word")
    index = _Index([tokens for rows in wanted.values() for tokens in rows], n)
    read = [0, 0]
    for chunk in _chunks(documents, index.number, read):
        index.look(chunk)
    found, start = {}, 0
    for name, rows in wanted.items():
        part = slice(start, start + len(rows))
        start += len(rows)
        exact, ngram = index.exact[part], index.ngram[part]
        found[name] = Found(
            exact=Share(int(exact.sum()), sum(bool(tokens) for tokens in rows)),
            ngram=Share(int(ngram.sum()), sum(len(tokens) >= n for tokens in rows)),
            n=n,
            which=tuple(exact.tolist()),
        )
    return found, Corpus(documents=read[0], words=read[1])


def bounds(found: Share, sampled: float) -> tuple[float, float]:
    """Return bounds for the whole corpus from a share found in a sample, at the level of the share's interval.

    A sample that took every document with probability ``sampled``, independently, contains a copy of each text of the
    corpus with at least that probability. So the share s of the whole and the share f expected in the sample
    satisfy f <= s <= f / sampled. Texts that share documents are found together; the interval of f is then too
    narrow.

    >>> [round(bound, 4) for bound in bounds(Share(2, 100), 0.5)]
    [0.0024, 0.1408]
    """
    if not 0 < sampled <= 1:
        raise ConfigurationError(f"A sample of {sampled} of the corpus is impossible; give a share above 0, up to 1.")
    return found.low, min(1.0, found.high / sampled)


class _Index:
    """The texts searched for, by the hashes of their first words and of their n-grams."""

    def __init__(self, texts: Sequence[Sequence[str]], n: int) -> None:
        self.number: dict[str, int] = {}  # 0 is for words of the corpus that are in no text
        self.n = n
        self._texts: list[Ids] = [
            np.array([self.number.setdefault(word, len(self.number) + 1) for word in tokens], dtype=np.uint32)
            for tokens in texts
        ]
        self.exact = np.zeros(len(texts), dtype=bool)
        self.ngram = np.zeros(len(texts), dtype=bool)
        by_length: dict[int, list[int]] = {}
        for i, ids in enumerate(self._texts):
            if len(ids):
                by_length.setdefault(min(len(ids), n), []).append(i)
        # A text is found by its first words, at most n; a run of n words by all n-grams of the text.
        self._starts = {
            length: _Table([(i, _hashes(self._texts[i][:length], length)) for i in members])
            for length, members in sorted(by_length.items())
        }
        self._runs = _Table([(i, _hashes(ids, n)) for i, ids in enumerate(self._texts)])

    def look(self, corpus: Ids) -> None:
        """Mark the texts that occur in a piece of the corpus, in which zeros separate documents."""
        for length, table in self._starts.items():
            for place, i, _ in table.candidates(_hashes(corpus, length), self.exact):
                if not self.exact[i] and np.array_equal(corpus[place : place + len(self._texts[i])], self._texts[i]):
                    self.exact[i] = True
        for place, i, at in self._runs.candidates(_hashes(corpus, self.n), self.ngram):
            if not self.ngram[i] and np.array_equal(corpus[place : place + self.n], self._texts[i][at : at + self.n]):
                self.ngram[i] = True


class _Table:
    """The hashes of texts, each with its text and its position there."""

    def __init__(self, hashed: Sequence[tuple[int, NDArray[np.uint64]]]) -> None:
        hashes = np.concatenate([each for _, each in hashed])
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._texts = np.concatenate([np.full(len(each), i, dtype=np.int64) for i, each in hashed])[order]
        self._places = np.concatenate([np.arange(len(each)) for _, each in hashed])[order]

    def candidates(self, corpus: NDArray[np.uint64], done: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
        """Yield (position in the corpus, text, position in the text) of every equal hash, except for done texts."""
        alive = ~done[self._texts]
        if not alive.all():
            self._hashes, self._texts, self._places = (
                column[alive] for column in (self._hashes, self._texts, self._places)
            )
        if not len(self._hashes) or not len(corpus):
            return
        first = np.searchsorted(self._hashes, corpus)
        hits = np.flatnonzero(self._hashes[np.minimum(first, len(self._hashes) - 1)] == corpus)
        for place in hits.tolist():
            entry = int(first[place])
            while entry < len(self._hashes) and self._hashes[entry] == corpus[place]:
                if not done[self._texts[entry]]:
                    yield place, int(self._texts[entry]), int(self._places[entry])
                entry += 1


def _hashes(ids: Ids, length: int) -> NDArray[np.uint64]:
    """Return a hash of every run of ``length`` numbers: their polynomial modulo 2**64; empty if there are fewer."""
    count = len(ids) - length + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    wide = (ids.astype(np.uint64) + np.uint64(1)) * _BASE
    wide ^= wide >> np.uint64(29)
    found = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        found = found * _BASE + wide[offset : offset + count]
    return found


def _chunks(documents: Iterable[str], number: dict[str, int], read: list[int]) -> Iterator[Ids]:
    """Yield the corpus as numbers of words, with a zero after each document; ``read`` counts documents and words."""
    held: list[int] = []
    for document in documents:
        tokens = words(document)
        read[0] += 1
        read[1] += len(tokens)
        held += [number.get(word, 0) for word in tokens]
        held.append(0)
        if len(held) >= _CHUNK:
            yield np.array(held, dtype=np.uint32)
            held = []
    if held:
        yield np.array(held, dtype=np.uint32)
