"""A DataModule of one's own: questions and answers from a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Unpack

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.readers import Complain, refuse
from lit_dpret.datamodules.pairs import PairSettings
from lit_dpret.errors import DataError


class QuestionsDataModule(PairsDataModule):
    """Read a CSV file with the columns ``question``, ``answer`` and, if there is one, ``split``.

    Each question is a private query of its own. Equal answers are one passage, and the list of answers is public.

    Args:
        file: The CSV file.
        settings: As for `PairsDataModule`.
    """

    def __init__(self, *, file: str | Path, **settings: Unpack[PairSettings]) -> None:
        super().__init__(pairs=file, passages_are_public=True, **settings)
        self.file = Path(file)

    def columns(self) -> dict[str, tuple[str, ...]]:
        with self.file.open(encoding="utf-8", newline="") as lines:
            return {"file": tuple(next(csv.reader(lines), []))}

    def read_collection(self, complain: Complain = refuse) -> Collection:
        if missing := {"question", "answer"} - set(self.columns()["file"]):
            raise DataError(f"datamodule.file={self.file} lacks the column {min(missing)}.", kind="missing column")
        passages: dict[str, str] = {}
        queries: dict[str, str] = {}
        qrels: dict[str, dict[str, dict[str, int]]] = {}
        with self.file.open(encoding="utf-8", newline="") as lines:
            for number, row in enumerate(csv.DictReader(lines), start=2):
                if not (row["question"].strip() and row["answer"].strip()):
                    complain(DataError(f"{self.file}, row {number}: question or answer is empty.", kind="empty text"))
                    continue
                passage = passages.setdefault(row["answer"], f"a{len(passages)}")
                queries[f"q{number}"] = row["question"]
                qrels.setdefault(row.get("split") or "train", {})[f"q{number}"] = {passage: 1}
        texts: dict[str, Any] = {identity: text for text, identity in passages.items()}
        return Collection(passages=texts, queries=queries, qrels=qrels, source=str(self.file))
