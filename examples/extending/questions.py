"""A DataModule of one's own: questions and answers from a CSV file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.records import Complain, refuse
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.errors import DataError


@dataclass(kw_only=True, eq=False, repr=False)
class QuestionsDataModule(PairsDataModule):
    """Read a CSV file with the columns ``question``, ``answer`` and, if there is one, ``split``.

    Each question is a private query of its own. Equal answers are one passage, and the list of answers is public.

    Args:
        file: The CSV file.
    """

    file: Path
    passages_are_public: bool = True

    def __post_init__(self) -> None:
        self.pairs = self.file = Path(self.file)
        super().__post_init__()

    def file_columns(self) -> dict[str, tuple[str, ...]]:
        return {"file": RecordFile(self.file, knob="datamodule.file").columns()}

    def read_collection(self, complain: Complain = refuse) -> Collection:
        records = RecordFile(self.file, knob="datamodule.file", complain=complain)
        passages: dict[str, str] = {}
        queries: dict[str, str] = {}
        qrels: dict[str, dict[str, dict[str, int]]] = {}
        for number, record in records:
            try:
                question, answer = (records.text(number, record, name).strip() for name in ("question", "answer"))
                if not (question and answer):
                    raise DataError(f"{records.where(number)}: question or answer is empty.", kind="empty text")
            except DataError as problem:
                complain(problem)  # `task=check_data` collects all of them, and a fit refuses the first
                continue
            passage = passages.setdefault(answer, f"a{len(passages)}")
            queries[f"q{number}"] = question
            split = records.text(number, record, "split", optional=True) or "train"
            qrels.setdefault(split, {})[f"q{number}"] = {passage: 1}
        texts: dict[str, Any] = {identity: text for text, identity in passages.items()}
        return Collection(passages=texts, queries=queries, qrels=qrels, query_ids="none", source=str(self.file))
