"""Fed-SQuAD-articles: reading comprehension as answer sentence selection, one client for each article.

The positive of a question is the sentence that holds its answer. With character offsets that is one sentence;
the shared BEIR-like layout has the answers' texts only, and a text that occurs in two sentences of the
paragraph makes both positive. How many questions that concerns stands in the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_dpret.datamodules.records import stable_hash
from lit_dpret.datamodules.silo_folder import Silo, SiloQuery
from lit_dpret.errors import DataError
from lit_dpret.federated.data.collections import safe_name
from lit_dpret.federated.data.sentences import sentence_spans


@dataclass(frozen=True)
class Question:
    """A question on one passage, with what answers it: spans where they are known, else texts."""

    qid: str
    text: str = field(repr=False)
    pid: str
    answers: Sequence[str] = field(default=(), repr=False)
    spans: Sequence[tuple[int, int]] = field(default=(), repr=False)
    split: str | None = None


def silos_by_article(
    passages: Mapping[str, tuple[str, str]],
    questions: Iterable[Question],
    *,
    clients: int | None = 10,
    min_train: int = 20,
    min_test: int = 5,
) -> tuple[list[Silo], dict[str, int]]:
    """Make one client for each article, the largest first.

    Questions without a split get one by their *passage*: questions about one paragraph never stand on both
    sides.

    Returns:
        The silos, and how many questions were ``ambiguous`` (several sentences hold the answer) or ``dropped``
        (none does).

    Raises:
        DataError: A question names an unknown passage, or fewer articles than ``clients`` are large enough.
    """
    spans = {pid: sentence_spans(text) for pid, (_, text) in passages.items()}
    counts = {"ambiguous": 0, "dropped": 0}
    queries: dict[str, list[SiloQuery]] = {}
    for question in questions:
        if question.pid not in passages:
            raise DataError(f"Question {question.qid!r} is about passage {question.pid!r}, which is unknown.")
        article, text = passages[question.pid]
        places = holding(text, spans[question.pid], question)
        counts["ambiguous"] += len(places) > 1
        counts["dropped"] += not places
        if places:
            split = question.split or _split_of(question.pid)
            sids = tuple(f"{question.pid}-s{place}" for place in places)
            queries.setdefault(article, []).append(SiloQuery(question.qid, question.text, sids, split))
    enough = [name for name, found in queries.items() if _is_enough(found, min_train, min_test)]
    enough.sort(key=lambda name: (-len(queries[name]), name))
    if clients is not None and len(enough) < clients:
        raise DataError(
            f"{len(enough)} articles have {min_train} train and {min_test} test questions, and {clients} clients were "
            "asked for. Lower task.clients, task.min_train or task.min_test."
        )
    return [_silo(name, passages, spans, queries[name]) for name in enough[:clients]], counts


def holding(text: str, spans: Sequence[tuple[int, int]], question: Question) -> list[int]:
    """Return the sentences that hold an answer: of a span the one with most of it, of a text all that contain it."""
    if question.spans:
        return sorted({place for span in question.spans if (place := covering(spans, *span)) is not None})
    patterns = [
        re.compile(rf"(?<!\w){re.escape(answer.strip())}(?!\w)") for answer in question.answers if answer.strip()
    ]
    found = {
        place
        for pattern in patterns
        for match in pattern.finditer(text)
        if (place := covering(spans, match.start(), match.end())) is not None
    }
    return sorted(found)


def covering(spans: Sequence[tuple[int, int]], start: int, end: int) -> int | None:
    """Return the sentence that shares most characters with a span, the earlier of two; None where none shares any.

    Example:
        >>> covering([(0, 10), (11, 30)], 8, 20), covering([(0, 10)], 12, 14)
        (1, None)
    """
    shared = [min(b, end) - max(a, start) for a, b in spans]
    best = max(range(len(spans)), key=lambda place: (shared[place], -place), default=None)
    return best if best is not None and shared[best] > 0 else None


def squad_json(articles: Iterable[Mapping[str, Any]], *, split: str | None) -> tuple[dict[str, Any], list[Question]]:
    """Return passages and questions of the ``data`` of a SQuAD JSON file; questions without an answer are left out.

    Raises:
        DataError: The file is of another form.
    """
    passages: dict[str, tuple[str, str]] = {}
    questions: list[Question] = []
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                pid = f"p-{stable_hash(paragraph['context']).hex()[:20]}"
                passages[pid] = (str(article["title"]), str(paragraph["context"]))
                for one in paragraph["qas"]:
                    spans = [(int(a["answer_start"]), int(a["answer_start"]) + len(a["text"])) for a in one["answers"]]
                    if spans:
                        questions.append(Question(str(one["id"]), str(one["question"]), pid, spans=spans, split=split))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"This is no SQuAD file: an article lacks {error}.") from error
    return passages, questions


def _is_enough(queries: Sequence[SiloQuery], min_train: int, min_test: int) -> bool:
    splits = [query.split for query in queries]
    return splits.count("train") >= min_train and splits.count("test") >= min_test


def _split_of(pid: str) -> str:
    """Put 80 % of all passages into train, 10 % into dev and 10 % into test, by their ids alone."""
    place = int.from_bytes(stable_hash("lit-dpret silo split", "0", pid)[:8], "big") / 2**64
    return "train" if place < 0.8 else "dev" if place < 0.8 + 0.1 else "test"


def _silo(
    article: str,
    passages: Mapping[str, tuple[str, str]],
    spans: Mapping[str, Sequence[tuple[int, int]]],
    queries: Sequence[SiloQuery],
) -> Silo:
    own = {pid: text for pid, (name, text) in passages.items() if name == article}
    pairs = [
        (f"{pid}-s{place}", pid, " ".join(text[a:b].split()))
        for pid, text in own.items()
        for place, (a, b) in enumerate(spans[pid])
    ]
    return Silo(
        safe_name(article),
        dict.fromkeys(own, article),
        {sid: text for sid, _, text in pairs},
        {sid: pid for sid, pid, _ in pairs},
        list(queries),
    )
