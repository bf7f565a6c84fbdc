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

    They are a function of (``seed``, step) and of the number of public passages; where all are candidates (``size``
    null), nothing is drawn.
    """

    def __init__(self, size: int | None, seed: int) -> None:
        require_whole("model", {"pool_size": size}, 1, null=True)
        require_whole("model", {"pool_seed": seed}, 0)
        self.size, self.seed = size, seed
        self.place: dict[str, int] = {}
        self._drawn: tuple[int, Tensor | None, Tensor | None] | None = None

    def learn(self, passage_ids: Sequence[str]) -> None:
        self.place = {name: place for place, name in enumerate(passage_ids)}
        self._drawn = None

    def draw(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the candidates of a logical step: their places, and for each passage its place among them or -1.

        Both are None where all passages are candidates.
        """
        if self.size is None or self.size >= len(self.place):
            return None, None
        if self._drawn is None or self._drawn[0] != step:
            coins = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, step))))
            chosen = torch.from_numpy(coins.choice(len(self.place), size=self.size, replace=False))
            place = torch.full((len(self.place),), NOBODY)
            place[chosen] = torch.arange(self.size)
            self._drawn = (step, chosen, place)
        return self._drawn[1:]

    def places(self, own: Sequence[str], positives: Sequence[Collection[str]]) -> tuple[Tensor, Tensor]:
        """Return the places of some rows' passages in the public list.

        The place of each row's ``own`` passage, ``(rows,)``, and those of the query's further ``positives``, ``(rows,
        most of them)``, filled up with -1.
        """
        unknown = next((name for name in own if name not in self.place), None)
        if unknown is not None:
            raise DataError(
                f"The positive passage {unknown!r} is not among the {len(self.place)} passages that were encoded; "
                "they must be the whole public list. Call prepare(datamodule) with the data that is trained on."
            )
        others = [
            sorted(self.place[name] for name in names - {first} if name in self.place)
            for first, names in zip(own, map(set, positives), strict=True)
        ]
        return torch.tensor([self.place[name] for name in own], dtype=torch.long), filled_up(others)


@dataclass(frozen=True)
class PoolCandidates:
    """The public passages of one step."""

    step: int  # the logical step
    place: Tensor | None  # for each public passage, its place among the candidates or -1; None where all are
    embeddings: Tensor | None  # without gradient, ``(count, dim)``; None where their gradient is wanted
    features: Any  # then their tokens
    count: int  # how many there are

    def add_to(self, compared: Compared, answers: Tensor, embed: Callable[[Any], Tensor]) -> None:
        """Add the candidates to rows: once for all rows, or with a copy for each if their gradient counts.

        ``answers`` are places of each row's answers in the public list, filled up with -1, ``(rows, most of them)``.
        """
        places = answers if self.place is None else torch.where(answers < 0, answers, self.place[answers])
        mask = marked(places, self.count)
        if self.embeddings is not None:
            compared.shared.append((self.embeddings, mask))
            return
        copies = torch.arange(self.count, device=mask.device).repeat(len(answers))
        features = map_rows(lambda tensor: tensor[copies], self.features)
        compared.own.append((embed(features).view(len(answers), self.count, -1), mask))


RowsLoss = Callable[[slice, Tensor], Tensor]


def row_by_row(loss: RowsLoss, embeddings: Tensor, *, rows_at_once: int) -> Tensor:
    """Return the losses of all rows, ``(rows,)``, differentiable once with respect to ``embeddings``, ``(rows, dim)``.

    The table of logits, rows x pool, is the largest thing in a step by far. Here each part of it is made, turned into
    losses and their gradient, and forgotten. ``loss`` maps a slice of rows and their embeddings to ``(part,)``; one
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
