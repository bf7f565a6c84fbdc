"""Public text with a licence that allows publishing weights, as (passage, question) pairs and prose.

Each reader states the licence of its text. These are left out on purpose, though the data folder has them:
WikiQA and MS MARCO (research or non-commercial terms), the TREC Million Query log (research use), Brown,
Reuters and webtext (non-commercial or unclear), OpenStax (the sample mixes CC BY with CC BY-NC-SA books and
does not say which is which), and everything of InsuranceQA, whose passages and questions are never opened.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError

PROSE_LICENCES = {
    "novels": "public domain",
    "eltec": "CC BY 4.0",
    "state_union": "public domain (US government)",
    "inaugural": "public domain (US government)",
}
QUESTION_LICENCES = {
    "nq-dev": "CC BY-SA 3.0",
    "nq-test": "CC BY-SA 3.0",
    "trivia-dev": "Apache-2.0",
    "trivia-test": "Apache-2.0",
}
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z0-9])")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Pair:
    """A question and the public passage it asks about; `anchor` is text that a cut of the passage should keep."""

    source: str
    passage: str
    question: str
    anchor: str = ""
    weight: float = 1.0


def clean(text: str) -> str:
    return _SPACE.sub(" ", text).strip().lower()


def sentences(text: str) -> list[str]:
    """Return the text split after . ! ? before a capital; good enough to choose windows."""
    return [s for s in _SENTENCE.split(_SPACE.sub(" ", text).strip()) if s]


def window(text: str, anchor: str, rng: random.Random, max_words: int) -> str:
    """Return whole sentences around the one with `anchor`, up to `max_words` words; from the start without it."""
    parts = sentences(text)
    if not parts:
        return ""
    at = next((i for i, part in enumerate(parts) if anchor and anchor.lower() in part.lower()), 0)
    low = high = at
    limit = rng.randint(max_words // 3, max_words)
    words = len(parts[at].split())
    while words < limit and (low > 0 or high < len(parts) - 1):
        before = low > 0 and (high == len(parts) - 1 or rng.random() < 0.5)
        low, high = (low - 1, high) if before else (low, high + 1)
        words += len(parts[low if before else high].split())
    return " ".join(" ".join(parts[low : high + 1]).split()[:max_words])


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path} is missing: --data must name the folder that holds it")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _qrels(folder: Path, split: str) -> list[tuple[str, str]]:
    path = folder / "qrels" / f"{split}.tsv"
    if not path.is_file():
        raise DataError(f"{path} is missing: --data must name the folder that holds it")
    with path.open(encoding="utf-8") as lines:
        return [(row[0], row[1]) for row in list(csv.reader(lines, delimiter="\t"))[1:]]


def squad(data: Path, splits: tuple[str, ...]) -> list[Pair]:
    """Return pairs of the SQuAD development set, in our splits by article. CC BY-SA 4.0."""
    folder = data / "squad_dev"
    passages = {row["_id"]: row["text"] for row in _jsonl(folder / "corpus.jsonl.gz")}
    queries = {row["_id"]: row for row in _jsonl(folder / "queries.jsonl.gz")}
    pairs = []
    for split in splits:
        for query, passage in _qrels(folder, split):
            answers = queries[query]["answers"]
            pairs.append(Pair("squad", passages[passage], queries[query]["text"], max(answers, key=len, default="")))
    for row in _jsonl(folder / "unanswerable.jsonl.gz"):
        if row["split"] in splits:
            pairs.append(Pair("squad-unanswerable", passages[row["doc"]], row["text"], weight=0.5))
    return pairs


def squad_sentences(folder: Path) -> list[Pair]:
    """Return sentence and question pairs of SQuAD's training articles, from github.com/xinyadu/nqg. CC BY-SA 4.0."""
    marks = {"-lrb- ": "(", " -rrb-": ")", "-lsb- ": "[", " -rsb-": "]", "`` ": '"', " ''": '"', " n't": "n't"}

    def undo(line: str) -> str:
        for old, new in marks.items():
            line = line.replace(old, new)
        return re.sub(r" ([.,;:?!%]|'s\b|'t\b|'re\b|')", r"\1", line).strip()

    try:
        passages = (folder / "src-test.txt").read_text(encoding="utf-8").splitlines()
        questions = (folder / "tgt-test.txt").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"--nqg must name a folder with src-test.txt and tgt-test.txt: {error}") from error
    return [Pair("squad-sentences", undo(p), undo(q)) for p, q in zip(passages, questions, strict=True)]


def medquad(data: Path, splits: tuple[str, ...]) -> list[Pair]:
    """Return NIH health answers with their templated questions; a template's weight is 1 over the root of its count.

    CC BY 4.0.
    """
    folder = data / "medquad"
    passages = {row["_id"]: row["text"] for row in _jsonl(folder / "corpus.jsonl.gz")}
    queries = {row["_id"]: row for row in _jsonl(folder / "queries.jsonl.gz")}
    counts: dict[str, int] = {}
    for row in queries.values():
        counts[row["qtype"]] = counts.get(row["qtype"], 0) + 1
    pairs = []
    for split in splits:
        for query, passage in _qrels(folder, split):
            row = queries[query]
            question = re.sub(r"\?+$", "?", row["text"].replace(" (are)", "").replace(" ?", "?"))
            pairs.append(Pair("medquad", passages[passage], question, row["focus"], 100 / counts[row["qtype"]] ** 0.5))
    return pairs


def usagov(folder: Path) -> tuple[list[Pair], list[str]]:
    """Return pairs of usa.gov sections and their headings as questions; and the prose. Public domain (17 USC 105)."""
    pages = sorted(folder.glob("*.md"))
    if not pages:
        raise DataError(f"--usagov {folder} holds no .md page (folder usagov_md of the repository)")
    pairs: list[Pair] = []
    prose: list[str] = []
    for page in pages:
        text = page.read_text(encoding="utf-8", errors="replace")
        text = text.replace("\u00e2\u0080\u0099", "'").encode("ascii", "ignore").decode()
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
        parts = re.split(r"\n([^\n]+)\n[=-]{4,}\n", text)[1:]
        for heading, body in zip(parts[::2], parts[1::2], strict=True):
            lines = [re.sub(r"^[\s*+#>-]+", "", line) for line in body.split("\n")]
            body = " ".join(line for line in lines if line and "|" not in line)
            if len(body.split()) < 25 or "Have a question" in heading:
                continue
            prose.append(body)
            heading = re.sub(r"^[\s*#>]+", "", heading).strip()
            listing = re.search(r"agenc|agency-index|states?[_.-]", page.name) or re.search(r"\([A-Z]+\)$", heading)
            if not listing and 3 <= len(heading.split()) <= 14:
                asked = heading[0].lower() + heading[1:]
                if asked.startswith("how to "):
                    asked = "how do i " + re.sub(r"\byour\b", "my", asked[len("how to ") :]) + "?"
                pairs.append(Pair("usagov", body, asked))
    return pairs, prose


def questions_alone(data: Path) -> list[str]:
    """Return real questions without passages: Natural Questions (CC BY-SA 3.0) and TriviaQA (Apache-2.0)."""
    rows = _jsonl(data / "real_queries" / "queries.jsonl.gz")
    return [row["text"] for row in rows if row["source"] in QUESTION_LICENCES and 4 <= len(row["text"].split()) <= 18]


def prose(data: Path) -> dict[str, list[str]]:
    """Return public-domain and CC BY prose by source, in chunks of at most about 250 words."""
    path = data / "pretrain_text" / "text.jsonl.zst"
    plain = path.with_suffix("")
    if plain.is_file():
        raw = plain.read_bytes()
    elif not path.is_file():
        raise DataError(f"{path} is missing: --data must name the folder that holds it")
    else:
        try:
            raw = subprocess.run(["zstd", "-dc", str(path)], capture_output=True, check=True).stdout
        except FileNotFoundError as error:
            raise DataError(f"{path} needs the zstd program on PATH, or unpack it to {plain.name}") from error
    texts: dict[str, list[str]] = {}
    for line in raw.decode().splitlines():
        row = json.loads(line)
        source = row["source"].split("/")[0]
        if source in PROSE_LICENCES:
            texts.setdefault(source, []).append(row["text"])
    return texts
