"""Fed-NewsQA from a user's own files: ten genres of CNN stories as ten clients (paper 004, section 2.5).

Neither the stories nor the questions may be redistributed, and the authors published no split, so this reads
``combined-newsqa-data-v1.json``, which the user makes with Maluuba's scripts, and the lists of story addresses
(``cnn_wayback_{training,validation,test}_urls.txt``). A story's id is the SHA-1 of its address, and the genre is
the section in it. The paper says no more than "directly from the web-link", so the table of sections below is
ours, and Figure 3's counts could not be reproduced without the data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.records import SPLIT_NAMES
from lit_dpret.errors import DataError
from lit_dpret.federated.data.squad import Question

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
    """Return the genre in a story's address; None where there is none.

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
    """Return the id of the story at an address: its SHA-1, as the makers of the CNN corpus chose."""
    return hashlib.sha1(url.strip().encode("utf-8"), usedforsecurity=False).hexdigest()


def read_genres(folder: str | Path, *, merge_world: bool = False) -> dict[str, str]:
    """Read the genre by story id, of all ``*.txt`` lists of addresses in a folder.

    Raises:
        DataError: There is no such list, or no address in them has a section.
    """
    root = Path(folder)
    lists = sorted(root.glob("*.txt")) if root.is_dir() else []
    if not lists:
        raise DataError(
            f"{root} holds no lists of CNN addresses (*.txt, one in a line); check task.cnn_urls. They are "
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
        Genre and text by story, the questions with the span that their annotators agreed on and their official
        split, and how many questions were left out: ``no_genre``, ``no_answer`` or ``bad_question``.

    Raises:
        DataError: The file is missing or of another form, or no story has a genre.
    """
    path = Path(combined)
    if not path.is_file():
        raise DataError(f"{path} does not exist; check task.newsqa.", kind="missing file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))["data"]
        counts = {"no_genre": 0, "no_answer": 0, "bad_question": 0}
        stories: dict[str, tuple[str, str]] = {}
        questions: list[Question] = []
        for story in data:
            _add_story(story, genres, stories, questions, counts)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not the combined NewsQA file: {type(error).__name__} where a story with storyId, text, type "
            "and questions was expected. Make it with Maluuba's newsqa scripts."
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
