"""Negatives that nobody has to look for: any public passages, and those that were judged."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.negatives.base import PassageSource, Seat, Towers, coins, uniform_places
from lit_dpret.negatives.texts import TrainTexts


class RandomNegatives(PassageSource):
    """Any passages of the public list, uniformly.

    Guarantees:
        - What is drawn for a row depends on (``seed``, step) and on its own record and public data.

    Args:
        per_query: How many passages a row gets.
        shared_in_batch: Let each of them be a negative of every row of the batch; this couples rows.
        seed: Of the coins; public.
    """

    name: ClassVar[str] = "random"

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        draw = coins(self.seed, self.name, step, seat.text, self._texts.passage_ids[seat.own])
        return uniform_places(draw, self._texts.groups, self.per_query, answers=seat.answers)


class GoldNegatives(PassageSource):
    """Passages that were judged for the row's own query and found not to answer it.

    They are those of grade 0 or less in the train qrels, or those of a file, one JSON object in a line:
    GPL's ``{"qid": ..., "pos": [ids], "neg": {"<miner>": [ids]}}``, or that of msmarco-hard-negatives, whose
    entries are objects ``{"pid": id, ...}``.

    **Under a private mode a file rests on an assumption** that has to be declared: the line of a query was made
    of that query and of public data alone. A file that was mined with a model trained on all queries, or
    cleaned by what other queries were answered by, is none.

    Args:
        per_query: How many passages a row gets.
        file: Of hard negatives, ``.jsonl`` or ``.jsonl.gz``; null for the qrels.
        lines_are_independent: Declares the assumption; nothing can check it.
        shared_in_batch: Let each of them be a negative of every row of the batch; this couples rows.
        seed: Of the draws among them; public.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    name: ClassVar[str] = "gold"

    def __init__(
        self,
        *,
        per_query: int = 1,
        file: str | Path | None = None,
        lines_are_independent: bool = False,
        shared_in_batch: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(per_query=per_query, shared_in_batch=shared_in_batch, seed=seed)
        self.file = None if file is None else Path(file)
        self.is_declared = self.file is None or lines_are_independent

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        by_query: Mapping[str, Iterable[str]]
        if self.file is None:
            by_query = {
                query: [p for p, grade in judged.items() if grade <= 0] for query, judged in texts.judged.items()
            }
        else:
            by_query = read_hard_negatives(self.file)
        self._judged = {
            texts.query_place[query]: sorted({texts.place[p] for p in names if p in texts.place})
            for query, names in by_query.items()
            if query in texts.query_place
        }
        if not any(self._judged.values()):
            where = "the train qrels hold no grade of 0 or less" if self.file is None else f"{self.file} holds none"
            raise DataError(
                f"model.negatives=gold: there is no judged negative for any train query in the public list; {where}. "
                "Name a file with model.negatives.gold.file, or choose another source."
            )

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        groups = self._texts.groups
        places = [p for p in self._judged.get(seat.query, []) if int(groups[p]) not in seat.answers]
        if len(places) <= self.per_query:
            return places
        drawn = coins(self.seed, self.name, epoch, seat.text).choice(len(places), size=self.per_query, replace=False)
        return [places[i] for i in sorted(drawn.tolist())]


def read_hard_negatives(path: Path) -> dict[str, list[str]]:
    """Negative passage ids by query id, those of all miners together, from either form of the file.

    Raises:
        ConfigurationError: The file does not exist.
        DataError: A line has another form; the message tells which, and no text of it.
    """
    if not path.is_file():
        raise ConfigurationError(f"model.negatives.gold.file={path} does not exist.")
    found: dict[str, list[str]] = {}
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    query, names = _entry(line, path, number)
                    found.setdefault(query, []).extend(names)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}).") from error
    return found


def _entry(line: str, path: Path, number: int) -> tuple[str, list[str]]:
    try:
        entry: Any = json.loads(line)
        miners = entry["neg"].values()
        names = [item["pid"] if isinstance(item, Mapping) else item for items in miners for item in items]
        return str(entry["qid"]), [str(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{path} line {number} is not of the form {{"qid": ..., "neg": {{"miner": [ids or {{"pid": id}}]}}}}.'
        ) from error
