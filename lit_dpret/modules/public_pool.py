"""Public passages as candidates of each step, chosen by public coins alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.modules.step_negatives import Compared
from lit_dpret.negatives.base import NOBODY, filled_up
from lit_dpret.privacy.batches import map_rows
from lit_dpret.settings import require_whole


class PublicPool:
    """The public list of passages, and the candidates of each step among them.

    The candidates are a function of (``seed``, step) and of the number of public passages. If all passages are
    candidates (``size`` null), nothing is drawn.
    """

    def __init__(self, size: int | None, seed: int) -> None:
        require_whole("model", {"pool_size": size}, 1, null=True)
        require_whole("model", {"pool_seed": seed}, 0)
        self.size, self.seed = size, seed
        self.place: dict[str, int] = {}
        self._drawn: tuple[tuple[int, torch.device], Candidates] | None = None

    def learn(self, passage_ids: Sequence[str]) -> None:
        self.place = {name: place for place, name in enumerate(passage_ids)}
        self._drawn = None

    def draw(self, step: int, device: torch.device) -> Candidates:
        """Return a logical step's candidates, with their tensors on ``device``."""
        if self.size is None or self.size >= len(self.place):
            return Candidates(step, len(self.place))
        if self._drawn is None or self._drawn[0] != (step, device):
            coins = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, step))))
            chosen = torch.from_numpy(coins.choice(len(self.place), size=self.size, replace=False))
            place = torch.full((len(self.place),), NOBODY)
            place[chosen] = torch.arange(self.size)
            self._drawn = (step, device), Candidates(step, self.size, chosen.to(device), place.to(device))
        return self._drawn[1]

    def places(self, own: Sequence[str], positives: Sequence[Collection[str]]) -> tuple[Tensor, Tensor]:
        """Return the indices of some rows' passages in the public list.

        The first is the index of each row's ``own`` passage, ``(rows,)``. The second has the indices of the query's
        other ``positives``, ``(rows, most of them)``, padded with -1.
        """
        unknown = next((name for name in own if name not in self.place), None)
        if unknown is not None:
            raise DataError(
                f"The positive passage {unknown!r} is not among the {len(self.place)} known passages, which must be "
                "the whole public list. Call prepare(datamodule) with the data to train on, or learn_public_passages "
                "of a DualEncoder."
            )
        others = [
            sorted(self.place[name] for name in names - {first} if name in self.place)
            for first, names in zip(own, map(set, positives), strict=True)
        ]
        return torch.tensor([self.place[name] for name in own], dtype=torch.long), filled_up(others)


@dataclass(frozen=True)
class Candidates:
    """The public passages of one step."""

    step: int  # the logical step
    count: int  # how many they are
    chosen: Tensor | None = None  # their indices in the public list; None if all passages are candidates
    place: Tensor | None = None  # each public passage's position among them, or -1; None like ``chosen``
    embeddings: Tensor | None = None  # without gradient, ``(count, dim)``
    features: Any = None  # the tokens, if the gradient of the embeddings is needed

    def of(self, passages: Tensor) -> Tensor:
        """Return their rows of a table of all public passages."""
        return passages if self.chosen is None else passages[self.chosen.to(passages.device)]

    def mask(self, answers: Tensor) -> Tensor:
        """Return which of them answer each row, ``(rows, count)``.

        ``answers`` are indices of each row's answers in the public list, padded with -1, ``(rows, most of them)``.
        """
        places = answers if self.place is None else torch.where(answers < 0, answers, self.place[answers])
        return marked(places, self.count)

    def add_to(self, compared: Compared, answers: Tensor, embed: Callable[[Any], Tensor]) -> None:
        """Add them to rows: once for all rows, or with a copy for each if their gradient counts."""
        mask = self.mask(answers)
        if self.embeddings is not None:
            compared.shared.append((self.embeddings, mask))
            return
        copies = torch.arange(self.count, device=mask.device).repeat(len(answers))
        features = map_rows(lambda tensor: tensor[copies], self.features)
        compared.own.append((embed(features).view(len(answers), self.count, -1), mask))


RowsLoss = Callable[[slice, Tensor], Tensor]


def row_by_row(loss: RowsLoss, embeddings: Tensor, *, rows_at_once: int) -> Tensor:
    """Return the losses of all rows, ``(rows,)``, differentiable once with respect to ``embeddings``, ``(rows, dim)``.

    The table of logits, rows x pool, is by far the largest object of a step. Here each part of it is computed, turned
    into losses and their gradient, and freed. ``loss`` maps a slice of rows and their embeddings to ``(part,)``; a loss
    that couples rows would get a wrong gradient.
    """
    losses: Tensor = _RowByRow.apply(embeddings, loss, max(1, rows_at_once))  # type: ignore[no-untyped-call]
    return losses


def marked(places: Tensor, width: int) -> Tensor:
    """Return booleans ``(rows, width)``, True at each row's ``places``; -1 marks nothing.

    Example:
        >>> marked(torch.tensor([[2, -1], [-1, -1]]), 3)
        tensor([[False, False,  True],
                [False, False, False]])
    """
    marks = torch.zeros(len(places), width + 1, dtype=torch.bool, device=places.device)
    marks.scatter_(1, torch.where(places < 0, width, places), True)
    return marks[:, :width]


class _RowByRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, loss: RowsLoss, rows_at_once: int) -> Tensor:
        wanted = bool(ctx.needs_input_grad[0])
        losses, grads = [], []
        for start in range(0, len(embeddings), rows_at_once):
            part = slice(start, start + rows_at_once)
            with torch.set_grad_enabled(wanted):
                leaf = embeddings[part].detach().requires_grad_(wanted)
                found = loss(part, leaf)
            losses.append(found.detach())
            if wanted:
                grads.append(torch.autograd.grad(found, leaf, torch.ones_like(found))[0])
        if grads:
            ctx.save_for_backward(torch.cat(grads))
        return torch.cat(losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (saved,) = ctx.saved_tensors
        return grad.to(saved.dtype).unsqueeze(1) * saved, None, None
