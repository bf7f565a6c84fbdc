"""SQuAD as retrieval: find the paragraph that a question is about.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016; version 2 has questions without
an answer (Rajpurkar, Jia and Liang, 2018). Passages are the distinct paragraphs, with ids derived from their texts.
Queries are the questions, each judged 1 for its paragraph. The domain of both is the title of their article.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import find_part
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.readers import parse_json_file
from lit_dpret.datamodules.records import NOT_UNICODE, Complain, is_unicode, refuse
from lit_dpret.datamodules.rows import stable_hash
from lit_dpret.errors import DataError
from lit_dpret.texts import collapse_whitespace

Unanswerable = Literal["drop", "refuse"]

_VERSIONS = ("v1.1", "v2.0")


@dataclass(kw_only=True, eq=False, repr=False)
class SquadDataModule(PairsDataModule):
    """SQuAD from its JSON files, or a BEIR folder made from them.

    Args:
        folder: A folder with ``train-v1.1.json`` and ``dev-v1.1.json`` (or v2.0, or one of the two; each may end in
            .gz), or a BEIR folder; or one such JSON file, which is the dev split if its name begins with ``dev``, else
            the train split.
        unanswerable: How to treat questions that version 2 marks as impossible: ``drop`` or ``refuse`` them. A dropped
            train question stays a unit without rows (``drop_queries_without_passage``, which this sets).
    """

    folder: str | Path = field()
    unanswerable: Unanswerable = "drop"

    def __post_init__(self) -> None:
        self._check_choices(unanswerable=Unanswerable)
        self.drop_queries_without_passage = self.drop_queries_without_passage or self.unanswerable == "drop"
        super().__post_init__()

    @property
    def evaluation_split(self) -> str:
        """``dev``, since the test questions were never published; ``test`` for a BEIR folder that has it."""
        return "test" if self.collection.qrels.get("test") else "dev"

    def _sources(self) -> dict[str, Any]:
        root = Path(str(self.folder))
        if root.is_file():
            return {"dev" if root.name.startswith("dev") else "train": root}
        if root.is_dir() and find_part(root, "corpus") is not None:
            return super()._sources()
        files: dict[str, Any] = {}
        for split in ("train", "dev"):
            names = [f"{split}-{version}.json{packed}" for version in _VERSIONS for packed in ("", ".gz")]
            found = [root / name for name in names if (root / name).is_file()]
            if len(found) > 1:
                raise DataError(
                    f"{root} holds both {found[0].name} and {found[1].name}; keep one, or name one of them in "
                    "datamodule.folder."
                )
            if found:
                files[split] = found[0]
        if not files:
            raise DataError(
                f"{root} holds neither train-v1.1.json, dev-v1.1.json (or v2.0, or .gz) nor a BEIR corpus; check "
                "datamodule.folder.",
                kind="missing file",
            )
        return files

    def file_columns(self) -> dict[str, tuple[str, ...]]:
        """Return the keys that are read, by file."""
        files = self._sources()
        return (
            super().file_columns()
            if "corpus" in files
            else dict.fromkeys(files, ("title", "context", "id", "question"))
        )

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """Read the paragraphs, and the questions with an answer in them."""
        files = self._sources()
        if "corpus" in files:
            return super().read_collection(complain)
        passages: dict[str, str] = {}
        queries: dict[str, str] = {}
        domains: dict[str, str] = {}
        passage_domains: dict[str, str] = {}
        qrels: dict[str, dict[str, dict[str, int]]] = {}
        for split, path in files.items():
            judged = qrels.setdefault(split, {})
            for title, context, questions in _paragraphs(path, complain):
                passage_id = f"p-{stable_hash(context).hex()[:20]}"
                passages[passage_id] = context
                passage_domains.setdefault(passage_id, title)
                for question in questions:
                    try:
                        query_id, text, answered = self._question(path, question)
                        if query_id in queries:
                            raise DataError(f"{path}: question {query_id!r} occurs twice.", kind="repeated id")
                    except DataError as error:
                        complain(error)
                        continue
                    if answered or split == "train":  # a train question without an answer is a unit without rows
                        queries[query_id], domains[query_id] = text, title
                        judged[query_id] = {passage_id: 1} if answered else {}
        return Collection(
            passages=passages,
            queries=queries,
            qrels=qrels,
            domains=domains,
            passage_domains=passage_domains,
            query_ids="all",
            source=str(self.folder),
        )

    def _question(self, path: Path, question: Any) -> tuple[str, str, bool]:
        """Return the id and text of a question, and whether it has an answer."""
        query_id, text = _text(path, question, "id", "a question"), _text(path, question, "question", "a question")
        if not text.strip():
            raise DataError(f"{path}: question {query_id!r} has an empty text.", kind="empty query")
        answered = not question.get("is_impossible", False)
        if not answered and self.unanswerable == "refuse":
            raise DataError(
                f"{path}: question {query_id!r} has no answer in its paragraph (is_impossible); "
                "datamodule.unanswerable=drop leaves such questions out.",
                kind="unanswerable question",
            )
        return query_id, collapse_whitespace(text), answered


def _paragraphs(path: Path, complain: Complain) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield the article title, the text and the questions of each paragraph that has a text."""
    content = parse_json_file(path)
    articles = content.get("data") if isinstance(content, dict) else None
    if not isinstance(articles, list):
        raise DataError(f"{path} is not in SQuAD's format: an object with a list 'data' is expected.")
    for number, article in enumerate(articles, start=1):
        try:
            title = _text(path, article, "title", f"article {number}")
            paragraphs = _list(path, article, "paragraphs", f"article {number}")
        except DataError as error:
            complain(error)
            continue
        for place, paragraph in enumerate(paragraphs, start=1):
            named = f"paragraph {place} of article {number}"
            try:
                context = _text(path, paragraph, "context", named).strip()
                questions = _list(path, paragraph, "qas", named)
                if not context:
                    raise DataError(f"{path}: {named} has an empty text.", kind="empty passage")
            except DataError as error:
                complain(error)
                continue
            yield title.replace("_", " "), context, questions


def _text(path: Path, found: Any, key: str, named: str) -> str:
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, str) or (key == "id" and not value.strip()):
        raise DataError(f"{path}: {named} has no string {key!r}.", kind="missing column")
    if not is_unicode(value):
        raise DataError(f"{path}: {key!r} of {named} {NOT_UNICODE}.", kind="not Unicode text")
    return value


def _list(path: Path, found: Any, key: str, named: str) -> list[Any]:
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, list):
        raise DataError(f"{path}: {named} has no list {key!r}.", kind="missing column")
    return value
