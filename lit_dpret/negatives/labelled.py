"""Negatives with a teacher's word on how much worse they are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from lit_dpret.errors import DataError
from lit_dpret.negatives.base import PassageSource, Seat, Towers, coins
from lit_dpret.negatives.labels import read_labels
from lit_dpret.negatives.texts import TrainTexts


class LabelledNegatives(PassageSource):
    """Passages that a cross-encoder has compared with a row's own; what `MarginMSELoss` learns from.

    **Under a private mode this rests on an assumption** that has to be declared: the labels of a query were made
    of that query and of public data alone.

    Args:
        file: What ``task=pseudo_labels`` wrote, ``gpl-training-data.tsv``.
        per_query: How many passages a row gets.
        lines_are_independent: Declares the assumption; nothing can check it.
        seed: Of the draws among them; public.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    name: ClassVar[str] = "labelled"
    file: Path

    def __init__(
        self, *, file: str | Path, per_query: int = 1, lines_are_independent: bool = False, seed: int = 0
    ) -> None:
        super().__init__(per_query=per_query, seed=seed)
        self.file, self.is_declared = Path(file), lines_are_independent

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        self._labels = defaultdict[tuple[int, int], dict[int, float]](dict)
        for label in read_labels(self.file):
            own, other = texts.place.get(label.passage_id), texts.place.get(label.negative_id)
            query = texts.query_place.get(label.query_id)
            if query is not None and own is not None and other is not None:
                self._labels[query, own][other] = label.margin
        if not self._labels:
            raise DataError(
                f"model.negatives.labelled.file={self.file} labels no train query with passages of the public list. "
                "Give the file that was made for this data set."
            )

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        groups = self._texts.groups
        labelled = self._labels.get((seat.query, seat.own), {})
        places = sorted(place for place in labelled if int(groups[place]) not in seat.answers)
        if len(places) <= self.per_query:
            return places
        draw = coins(self.seed, self.name, epoch, seat.text, self._texts.passage_ids[seat.own])
        return [places[i] for i in sorted(draw.choice(len(places), size=self.per_query, replace=False).tolist())]

    def margins(self, seat: Seat, places: Sequence[int]) -> list[float]:
        """The label of each place for a row, in logits; NaN where there is none."""
        labelled = self._labels.get((seat.query, seat.own), {})
        return [labelled.get(place, math.nan) for place in places]
