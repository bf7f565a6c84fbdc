"""The public passages of one step, as candidates of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_dpret.modules.row_by_row import marked
from lit_dpret.modules.step_negatives import Compared
from lit_dpret.privacy.sampling import map_rows


@dataclass(frozen=True)
class PoolCandidates:
    """The public passages of one step.

    Args:
        step: The logical step.
        place: For each public passage, its place among the candidates or -1; None where all are.
        embeddings: Without gradient, ``(count, dim)``; None where their gradient is wanted.
        features: Then their tokens.
        count: How many there are.
    """

    step: int
    place: Tensor | None
    embeddings: Tensor | None
    features: Any
    count: int

    def add_to(self, compared: Compared, answers: Tensor, embed: Callable[[Any], Tensor]) -> None:
        """Have rows compared with them: once for all rows, or with a copy for each where their gradient counts.

        Args:
            compared: What the rows are compared with so far.
            answers: Places of each row's answers in the public list, filled up with -1, ``(rows, most of them)``.
            embed: Of the features.
        """
        places = answers if self.place is None else torch.where(answers < 0, answers, self.place[answers])
        mask = marked(places, self.count)
        if self.embeddings is not None:
            compared.shared.append((self.embeddings, mask))
            return
        copies = torch.arange(self.count, device=mask.device).repeat(len(answers))
        features = map_rows(lambda tensor: tensor[copies], self.features)
        compared.own.append((embed(features).view(len(answers), self.count, -1), mask))
