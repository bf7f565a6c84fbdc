"""Reading comprehension as answer sentence selection: one client per SQuAD article or NewsQA genre.

The positive of a question is the sentence that holds its answer. If an answer has no offsets, every sentence with its
text is positive. Fed-NewsQA (paper 004, section 2.5) is read from a user's own files, which may not be redistributed.
The paper publishes neither split nor genres: the table of sections below is ours.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.rows import SPLIT_NAMES, stable_hash
from lit_dpret.datamodules.silo_folder import Silo, SiloQuery
from lit_dpret.errors import DataError, in_words
from lit_dpret.federated.data.collections import cut, largest_clients, safe_name
from lit_dpret.federated.data.sentences import sentence_spans


@dataclass(frozen=True)
class Question:
    """A question about one passage, with its answers: spans if known, otherwise texts."""

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
    """Build one client for each article, the largest first.

    Questions without a split get one by their *passage*: questions about one paragraph are always in the same split.

    Returns:
        The silos, and how many questions were ``ambiguous`` (several sentences hold the answer) or ``dropped`` (no
        sentence does).
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
            split = question.split
            if split is None:  # 80 % of all passages to train, 10 % to dev and 10 % to test, by their ids only
                place = int.from_bytes(stable_hash("lit-dpret silo split", "0", question.pid)[:8], "big") / 2**64
                split = "train" if place < 0.8 else "dev" if place < 0.9 else "test"
            sids = tuple(f"{question.pid}-s{place}" for place in places)
            queries.setdefault(article, []).append(SiloQuery(question.qid, question.text, sids, split))
    enough = largest_clients(
        queries, clients, min_train=min_train, min_test=min_test, what="articles", size=Counter.total
    )
    return [_silo(name, passages, queries[name]) for name in enough], counts


def holding(text: str, spans: Sequence[tuple[int, int]], question: Question) -> list[int]:
    """Return the sentences with an answer: for a span the one with most of it, for a text all that contain it."""
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
    """Return the sentence with most characters of a span, the earlier one in a tie; None without overlap.

    Example:
        >>> covering([(0, 10), (11, 30)], 8, 20), covering([(0, 10)], 12, 14)
        (1, None)
    """
    shared = [min(b, end) - max(a, start) for a, b in spans]
    best = max(range(len(spans)), key=lambda place: (shared[place], -place), default=None)
    return best if best is not None and shared[best] > 0 else None


def squad_json(articles: Iterable[Mapping[str, Any]], *, split: str | None) -> tuple[dict[str, Any], list[Question]]:
    """Return passages and questions from the ``data`` of a SQuAD JSON file; drop unanswerable questions."""
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
        raise DataError(f"an article is malformed ({in_words(error)}).") from error
    return passages, questions


def _silo(article: str, passages: Mapping[str, tuple[str, str]], queries: Sequence[SiloQuery]) -> Silo:
    own = {pid: text for pid, (name, text) in passages.items() if name == article}
    sentences, passage_of, _ = cut(own)
    return Silo(safe_name(article), dict.fromkeys(own, article), sentences, passage_of, list(queries))


# -- NewsQA -------------------------------------------------------------------------------------

_SITE = re.compile(r"(?:^|/)(?:https?:/+)?(?:www\.|edition\.|us\.)?cnn\.com(?::\d+)?/(\d{4})/(.+)$", re.IGNORECASE)
_DAY = re.compile(r"^\d{2}/\d{2}/([A-Za-z][A-Za-z_-]*)/")
_SECTION = re.compile(r"^([A-Za-z][A-Za-z_-]*)/")
_SAME = {
    "opinions": "opinion",
    "tech": "technology",
    "showbiz": "entertainment",
    "sports": "sport",
    "politics": "politics",
}
_WORLD = {"asia", "asiapcf", "europe", "africa", "middleeast", "meast", "americas", "china", "world"}


def section_of(url: str, *, merge_world: bool = False) -> str | None:
    """Return the genre in a story's address; None if it has none.

    Two forms are read: ``cnn.com/YYYY/SECTION/...``, and from 2013 on ``cnn.com/YYYY/MM/DD/section/...``.

    Example:
        >>> section_of("http://web.archive.org/web/2008id_/http://www.cnn.com/2008/HEALTH/05/01/x/index.html")
        'health'
        >>> section_of("http://www.cnn.com/2013/04/02/opinions/y/index.html"), section_of("http://cnn.com/video/z")
        ('opinion', None)
    """
    site = _SITE.search(url.strip())
    if site is None:
        return None
    found = _DAY.match(site[2]) or _SECTION.match(site[2])
    if found is None:
        return None
    name = found[1].casefold()
    if merge_world and name in _WORLD:
        return "world"
    return _SAME.get(name, name)


def story_id(url: str) -> str:
    """Return the id of the story at an address: the SHA-1 of the address, as in the CNN corpus."""
    return hashlib.sha1(url.strip().encode("utf-8"), usedforsecurity=False).hexdigest()


def read_genres(folder: str | Path, *, merge_world: bool = False) -> dict[str, str]:
    """Read the genres by story id, from all ``*.txt`` lists of addresses in a folder."""
    root = Path(folder)
    lists = sorted(root.glob("*.txt")) if root.is_dir() else []
    if not lists:
        raise DataError(
            f"{root} holds no lists of CNN addresses (*.txt, one per line); check task.cnn_urls. They are "
            "cnn_wayback_training_urls.txt and its siblings.",
            kind="missing file",
        )
    found: dict[str, str] = {}
    for path in lists:
        for line in path.read_text(encoding="utf-8").splitlines():
            genre = section_of(line, merge_world=merge_world) if line.strip() else None
            if genre is not None:
                found[story_id(line)] = genre
    if not found:
        raise DataError(f"No address in the lists of {root} names a section of cnn.com; check task.cnn_urls.")
    return found


def read_newsqa(
    combined: str | Path, genres: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], list[Question], dict[str, int]]:
    """Read stories and answered questions of ``combined-newsqa-data-v1.json``.

    Returns:
        Genre and text by story; the questions, with the answer span that their annotators agreed on and their official
        split; and how many questions were left out: ``no_genre``, ``no_answer`` or ``bad_question``.
    """
    path = Path(combined)
    if not path.is_file():
        raise DataError(f"task.newsqa={path} does not exist.", kind="missing file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))["data"]
        counts = {"no_genre": 0, "no_answer": 0, "bad_question": 0}
        stories: dict[str, tuple[str, str]] = {}
        questions: list[Question] = []
        for story in data:
            _add_story(story, genres, stories, questions, counts)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"task.newsqa={path} is not the combined NewsQA file ({in_words(error)}): stories with storyId, text, type "
            "and questions are expected. Make it with Maluuba's newsqa scripts."
        ) from error
    if not stories:
        raise DataError(
            f"None of the stories of {path} is in the lists of addresses. NewsQA's stories are in "
            "cnn_wayback_training_urls.txt; check task.cnn_urls."
        )
    return stories, questions, counts


def _add_story(
    story: Mapping[str, Any],
    genres: Mapping[str, str],
    stories: dict[str, tuple[str, str]],
    questions: list[Question],
    counts: dict[str, int],
) -> None:
    name = Path(str(story["storyId"])).stem
    asked: Iterable[tuple[int, Any]] = enumerate(story["questions"])
    if name not in genres:
        counts["no_genre"] += len(story["questions"])
        return
    stories[name] = (genres[name], str(story["text"]))
    for number, one in asked:
        agreed = one.get("consensus") or {}
        if agreed.get("badQuestion"):
            counts["bad_question"] += 1
        elif agreed.get("noAnswer") or "s" not in agreed or "e" not in agreed:
            counts["no_answer"] += 1
        else:
            span = (int(agreed["s"]), int(agreed["e"]))
            questions.append(
                Question(f"{name}-q{number}", str(one["q"]), name, spans=[span], split=SPLIT_NAMES[str(story["type"])])
            )
