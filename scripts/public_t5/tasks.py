"""From public text to (input, target) examples: four tasks that all serve "ask about this passage".

real      passage -> its real question.
salient   passage -> a question-shaped sentence of the passage's most distinctive words: it teaches to copy
          the words that distinguish this passage, as a good query does.
keywords  the content words of a real question, shuffled -> the question: how questions are worded.
spans     span corruption as in T5 (Raffel et al. 2020, section 3.1.4), 15 percent, mean length 3.

`Mixture.questions` lists every question that any task can show, so that its hash can be published.
"""

from __future__ import annotations

import bisect
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from public_t5.sources import Pair, clean, window

PROMPT = "generate_query: "
SENTINELS = 16
TASKS = ("real", "salient", "keywords", "spans")
MIN_WORDS, MAX_WORDS, GROWTH = 14, 72, 0.4

_WORD = re.compile(r"[a-z][a-z'-]*[a-z]|[a-z]|\d+")
_TOLD = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
STOP_WORDS = frozenset(_TOLD["stop_words"].split())
_PATTERNS: dict[int, list[str]] = _TOLD["patterns"]


@dataclass(frozen=True)
class Example:
    """One input and its target, lower-cased text; `task` is one of `TASKS`."""

    task: str
    source: str
    text: str
    target: str


def content_words(text: str) -> list[str]:
    return [w for w in _WORD.findall(text.lower()) if w not in STOP_WORDS]


def document_frequencies(passages: Sequence[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for passage in passages:
        counts.update(set(content_words(passage)))
    return counts


def salient_terms(passage: str, frequencies: Counter[str], total: int, rng: random.Random) -> list[str]:
    """Return up to three terms of one to three adjacent content words, most distinctive first (tf-idf, jittered)."""
    tokens = re.findall(r"[a-z][a-z'-]*[a-z]|[a-z]|\d+|[.,;:!?()\"]", passage.lower())
    counts = Counter(t for t in tokens if t not in STOP_WORDS)
    runs: dict[str, float] = {}
    run: list[str] = []
    for token in [*tokens, "."]:
        if token not in STOP_WORDS and token[0].isalpha():
            run.append(token)
            continue
        for size in range(1, 4):
            for i in range(len(run) - size + 1):
                part = run[i : i + size]
                scores = [counts[w] ** 0.7 * math.log(total / (1 + frequencies[w])) for w in part]
                runs[" ".join(part)] = sum(scores) / size**0.4 * rng.uniform(0.7, 1.3)
        run = []
    chosen: list[str] = []
    used: set[str] = set()
    for term in sorted(runs, key=lambda t: -runs[t]):
        if not used & set(term.split()):
            chosen.append(term)
            used |= set(term.split())
        if len(chosen) == 3:
            break
    return chosen


def salient_question(passage: str, frequencies: Counter[str], total: int, rng: random.Random) -> str | None:
    """Return a question-shaped sentence about the passage's most distinctive terms; None if it has fewer than two."""
    terms = salient_terms(passage, frequencies, total, rng)
    if len(terms) < min(_PATTERNS):
        return None
    slots = min(len(terms), rng.choices((2, 3), (0.75, 0.25))[0])
    return rng.choice(_PATTERNS[slots]).format(**dict(zip("abc", terms, strict=False)))


def corrupt_spans(text: str, rng: random.Random) -> tuple[str, str]:
    """Apply T5's span corruption to words: 15 percent in spans of mean length 3, at most `SENTINELS` - 1 spans."""
    words = text.split()
    spans = max(1, min(SENTINELS - 1, round(len(words) * 0.15 / 3)))
    starts = sorted(rng.sample(range(len(words)), min(spans, len(words))))
    source: list[str] = []
    target: list[str] = []
    at = 0
    mark = 0
    for start in starts:
        if start < at:
            continue
        end = min(len(words), start + rng.choice((1, 2, 3, 4, 5)))
        source += [*words[at:start], f"<extra_id_{mark}>"]
        target += [f"<extra_id_{mark}>", *words[start:end]]
        at, mark = end, mark + 1
    return " ".join([*source, *words[at:]]), " ".join([*target, f"<extra_id_{mark}>"])


@dataclass
class Mixture:
    """The examples of one training run; `draw` returns some, with task shares that change with the progress.

    Args:
        pairs: Passages with real questions.
        prose: Passages without questions, by source; shares are per source, not per passage.
        questions_alone: Real questions without passages.
        salient: The number of pseudo questions to prepare (each shown once or twice).
        start, end: Weights of `TASKS` at progress 0 and 1, linear in between.

    Passages grow from `MIN_WORDS` to `MAX_WORDS` words over the first `GROWTH` of the run. From short inputs a
    small model learns within minutes that copying helps, and short inputs are cheap.
    """

    pairs: list[Pair]
    prose: dict[str, list[str]]
    questions_alone: list[str]
    shares: dict[str, float]
    salient: int = 70_000
    seed: int = 0
    start: tuple[float, ...] = (0.35, 0.30, 0.30, 0.05)
    end: tuple[float, ...] = (0.80, 0.08, 0.08, 0.04)
    _salient: list[Example] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(f"salient {self.seed}")
        totals: dict[str, float] = {}
        for pair in self.pairs:
            totals[pair.source] = totals.get(pair.source, 0.0) + pair.weight
        self._weights: list[float] = []
        seen = 0.0
        for pair in self.pairs:
            seen += pair.weight * self.shares.get(pair.source, 1.0) / totals[pair.source]
            self._weights.append(seen)
        self._sources = [s for s in self.prose if self.prose[s] and self.shares.get(s, 0) > 0]
        sample = [rng.choice(self.prose[self._source(rng)]) for _ in range(20_000)]
        frequencies = document_frequencies(sample)
        for _ in range(self.salient):
            source = self._source(rng)
            words = rng.randint(MIN_WORDS, MAX_WORDS)
            passage = clean(self._cut(rng.choice(self.prose[source]), "", words, rng))
            question = salient_question(passage, frequencies, len(sample), rng)
            if question is not None:
                self._salient.append(Example("salient", source, PROMPT + passage, question))
        self._salient.sort(key=lambda example: len(example.text.split()))
        self._lengths = [len(example.text.split()) for example in self._salient]

    def _source(self, rng: random.Random) -> str:
        return rng.choices(self._sources, [self.shares[s] for s in self._sources])[0]

    @staticmethod
    def _cut(text: str, anchor: str, words_at_most: int, rng: random.Random) -> str:
        if not anchor and rng.random() < 0.5:
            words = text.split()
            at = rng.randrange(max(1, len(words) - 40))
            text = " ".join(words[at:])
        return window(text, anchor, rng, words_at_most)

    def questions(self) -> list[str]:
        """Return every question that any task can show as a target or reconstruct in its target."""
        real = [pair.question for pair in self.pairs]
        return real + self.questions_alone + [example.target for example in self._salient]

    def draw(self, count: int, progress: float, rng: random.Random) -> list[Example]:
        weights = [a + (b - a) * progress for a, b in zip(self.start, self.end, strict=True)]
        tasks = rng.choices(TASKS, weights, k=count)
        limit = round(MIN_WORDS + (MAX_WORDS - MIN_WORDS) * min(1.0, progress / GROWTH))
        return [self._one(task, limit, rng) for task in tasks]

    def _one(self, task: str, limit: int, rng: random.Random) -> Example:
        if task == "real":
            pair = rng.choices(self.pairs, cum_weights=self._weights)[0]
            head = not pair.anchor or (pair.source == "medquad" and rng.random() < 0.7)
            words = rng.randint(limit // 2, limit)
            passage = " ".join(pair.passage.split()[:words]) if head else window(pair.passage, pair.anchor, rng, limit)
            return Example(task, pair.source, PROMPT + clean(passage), clean(pair.question))
        if task == "salient":
            return self._salient[rng.randrange(max(1, bisect.bisect_right(self._lengths, limit + 1)))]
        if task == "keywords":
            question = clean(rng.choice(self.questions_alone))
            if rng.random() < 0.3:
                question = clean(rng.choices(self.pairs, cum_weights=self._weights)[0].question)
            words_of = content_words(question) or question.split()
            rng.shuffle(words_of)
            return Example(task, "questions", PROMPT + " ".join(words_of), question)
        source = self._source(rng)
        text, target = corrupt_spans(clean(self._cut(rng.choice(self.prose[source]), "", limit, rng)) or "empty", rng)
        return Example(task, source, text, target)
