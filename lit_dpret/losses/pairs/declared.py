"""A custom loss over pairs, with bounds declared by its author (Theorem 4.2 of paper 002)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, PrivacyViolation
from lit_dpret.losses.pairs.base import LossClaim, PairwiseLoss, Relation

Bound = Callable[[int, float, float], float]
"""Maps ``(n, low, high)`` to a bound over all tables of n records with scores in ``[low, high]``."""


@dataclass(frozen=True, kw_only=True)
class DeclaredPairLoss(PairwiseLoss):
    """Any loss on the matrix of similarities, with three declared bounds.

    For every n, every table of n records in the range, and every record of it (called n):

    - ``g1(n, low, high)`` bounds the record's own row,      sum_j |c_nj|;
    - ``g2(n, low, high)`` bounds its column in other rows,  sum_{i<n} |c_in|;
    - ``l(n, low, high)`` bounds the change of other rows,   sum_{j<n} |c_ij - c'_ij| for each i < n.

    **Each bound must hold on its own**: they may be attained at different tables, and for softmax they are. The
    sensitivity is g1 + g2 + (n - 1) l (Theorem 4.2), or twice that with a replacement. It is the largest over all sizes
    up to ``n_max``, so bounds need not grow with n.

    The losses need not be functions of one row each; otherwise c_ij is the derivative of the *sum* of all rows.
    Records must be treated alike: reordering them reorders the rows and changes nothing else.

    `check_declared_bounds` searches for tables that refute the declaration; finding none is not proof.

    Example:
        >>> def hinge(table: Tensor) -> Tensor:
        ...     gaps = 0.2 + table - table.diagonal().unsqueeze(1)
        ...     return (gaps.relu() * (1 - torch.eye(len(table)))).sum(1) / 31
        >>> loss = DeclaredPairLoss(
        ...     row_loss=hinge,
        ...     g1=lambda n, low, high: 2 * (n - 1) / 31,
        ...     g2=lambda n, low, high: (n - 1) / 31,
        ...     l=lambda n, low, high: 1 / 31,
        ... )
        >>> loss.sensitivity(32, relation="add_or_remove")
        4.0
    """

    row_loss: Callable[[Tensor], Tensor]  # from scores ``(n, n)`` to losses ``(n,)``, differentiable by autograd
    g1: Bound  # on the record's own row
    g2: Bound  # on its own column
    l: Bound  # noqa: E741 (on the change of another row)

    @property
    def claim(self) -> LossClaim:
        """``declared``: the guarantee relies on its author's proof."""
        return "declared"

    def declared(self, n: int) -> tuple[float, float, float]:
        """Return the three bounds for n records; refuse one that is negative, NaN or infinite."""
        bounds = (self.g1(n, self.low, self.high), self.g2(n, self.low, self.high), self.l(n, self.low, self.high))
        for name, value in zip(("g1", "g2", "l"), bounds, strict=True):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(
                    f"{name}({n}, {self.low:g}, {self.high:g}) = {value}, but a finite bound of at least 0 is needed."
                )
        return bounds

    def _row_losses(self, table: Tensor) -> Tensor:
        if table.dim() > 2:
            return torch.stack([self._row_losses(one) for one in table])
        losses = self.row_loss(table)
        if losses.shape != table.shape[:1]:
            raise ConfigurationError(
                f"row_loss returns shape {tuple(losses.shape)} for a table of shape {tuple(table.shape)}; "
                f"it must return one loss for each row, shape {tuple(table.shape[:1])}."
            )
        return losses

    def _coefficients(self, table: Tensor) -> Tensor:
        with torch.enable_grad():
            searching = table.requires_grad
            leaf = table if searching else table.detach().requires_grad_()
            total = self._row_losses(leaf).sum()
            if not total.requires_grad:
                return torch.zeros_like(table)
            return torch.autograd.grad(total, leaf, create_graph=searching)[0]

    def _supremum(self, n: int, relation: Relation) -> float:
        largest = 0.0
        for size in range(1, n + 1):
            own_row, own_column, other_row = self.declared(size)
            largest = max(largest, own_row + own_column + (size - 1) * other_row)
        return largest if relation == "add_or_remove" else 2.0 * largest


Objective = Callable[[Tensor, Tensor | None], Tensor]
"""Maps tables ``(restarts, n, n)``, and those after a replacement, to the value to maximise, ``(restarts,)``."""


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """The largest change of the gradient found by a search."""

    movement: float  # L2 length of G - G', in units of the bound on one pair's gradient
    table: Tensor  # the scores that attain it, shape ``(n, n)``; their last record is added or removed
    replaced: Tensor | None  # with ``replace_one``, the scores with another last record


def movement_factors(before: Tensor, after: Tensor) -> Tensor:
    """Return the factor of every pair's gradient in G - G', ``(..., n, n)``; the sum of their absolute values bounds
    its norm.

    ``after`` has the coefficients without the last record, or with another in its place. A replaced record's old and
    new pairs have unrelated gradients, so the absolute values of their factors are added.
    """
    survivors = before[..., :-1, :-1] - after[..., : before.shape[-1] - 1, : before.shape[-1] - 1]
    own = before if after.shape != before.shape else before.abs() + after.abs()
    return torch.cat([torch.cat([survivors, own[..., :-1, -1:]], dim=-1), own[..., -1:, :]], dim=-2)


def find_worst_case(
    loss: PairwiseLoss,
    n: int,
    *,
    relation: Relation,
    dim: int | None = None,
    restarts: int = 16,
    steps: int = 100,
    seed: int = 0,
) -> WorstCase:
    """Search for a batch of n records in which one record moves the gradient most.

    With ``dim``, search over embeddings of that dimension instead of free tables: these are the scores that real
    encoders can have.
    """

    def movement(table: Tensor, replaced: Tensor | None) -> Tensor:
        after = loss._coefficients(_shrunk(table) if replaced is None else replaced)
        return movement_factors(loss._coefficients(table), after).abs().sum((-2, -1))

    search = _Search(loss, n, relation, dim=dim, restarts=restarts, steps=steps, seed=seed)
    table, replaced = search.best(movement)
    after = loss.coefficients(_shrunk(table) if replaced is None else replaced)
    found = float(movement_factors(loss.coefficients(table), after).abs().sum())
    return WorstCase(movement=found, table=table, replaced=replaced)


def check_declared_bounds(
    loss: PairwiseLoss,
    *,
    sizes: Sequence[int] = (1, 2, 3, 5),
    relations: Sequence[Relation] = ("add_or_remove", "replace_one"),
    restarts: int = 16,
    steps: int = 100,
    seed: int = 0,
    slack: float = 1e-6,
) -> dict[tuple[Relation, int], float]:
    """Try to refute the sensitivity of a loss, and each bound of a declared one, on tiny batches.

    Passing is evidence, not proof: the search is local and the batches are small. From each of ``restarts``
    points, which ``seed`` draws, ``steps`` of gradient ascent look for a table that exceeds a bound by more than
    the relative ``slack``.

    Returns:
        For every relation and size, the largest movement found divided by the declared sensitivity. Values near 1
        show that the bound is tight.

    Raises:
        PrivacyViolation: A table exceeds a bound, or shows that the loss does not treat records alike; the message
            includes the table.
    """
    if not (sizes and relations):
        raise ConfigurationError(
            f"sizes={sizes} and relations={relations} leave nothing to check. Give at least one of each."
        )
    found: dict[tuple[Relation, int], float] = {}
    for n in sizes:
        if isinstance(loss, DeclaredPairLoss):
            _check_order(loss, n, seed)
            _check_constants(loss, n, restarts=restarts, steps=steps, seed=seed, slack=slack)
        for relation in relations:
            worst = find_worst_case(loss, n, relation=relation, restarts=restarts, steps=steps, seed=seed)
            claimed = loss.sensitivity(n, relation=relation)
            _refuse_excess(f"sensitivity({n}, relation={relation!r})", claimed, worst, slack)
            found[relation, n] = worst.movement / claimed if claimed > 0 else 0.0
    return found


def _check_order(loss: DeclaredPairLoss, n: int, seed: int) -> None:
    """Refuse a loss whose coefficients depend on the order of the records."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(4):
        order = torch.randperm(n, generator=draw)
        bound = loss.high
        table = bound * (2.0 * torch.rand(n, n, generator=draw, dtype=torch.float64) - 1.0)
        moved = loss.coefficients(table)[order[:, None], order]
        again = loss.coefficients(table[order[:, None], order])
        if not torch.allclose(moved, again, rtol=1e-6, atol=1e-9, equal_nan=True):
            raise PrivacyViolation(
                f"row_loss depends on the position of records: with its records in the order {order.tolist()} it "
                f"weighs the pairs of scores {_shown(table)} differently. Any record may be the one that changes, so "
                "the declared bounds would not cover it."
            )


def _check_constants(loss: DeclaredPairLoss, n: int, *, restarts: int, steps: int, seed: int, slack: float) -> None:
    """Try to refute g1, g2 and l one by one."""

    def own_row(table: Tensor, _: Tensor | None) -> Tensor:
        return loss._coefficients(table)[..., -1, :].abs().sum(-1)

    def own_column(table: Tensor, _: Tensor | None) -> Tensor:
        return loss._coefficients(table)[..., :-1, -1].abs().sum(-1)

    def other_row(table: Tensor, _: Tensor | None) -> Tensor:
        factors = movement_factors(loss._coefficients(table), loss._coefficients(_shrunk(table)))
        return factors[..., :-1, :-1].abs().sum(-1).amax(-1)

    objectives: dict[str, Objective] = {"g1": own_row, "g2": own_column, "l": other_row}
    search = _Search(loss, n, "add_or_remove", dim=None, restarts=restarts, steps=steps, seed=seed)
    for (name, objective), claimed in zip(objectives.items(), loss.declared(n), strict=True):
        if n == 1 and name != "g1":
            continue  # there are no other rows
        table, _ = search.best(objective)
        case = WorstCase(movement=float(objective(table.unsqueeze(0), None)), table=table, replaced=None)
        _refuse_excess(f"{name}({n}, {loss.low:g}, {loss.high:g})", claimed, case, slack)


def _refuse_excess(what: str, claimed: float, case: WorstCase, slack: float) -> None:
    if math.isfinite(case.movement) and case.movement <= claimed * (1.0 + slack) + 1e-9:
        return
    tables = f"scores {_shown(case.table)}"
    if case.replaced is not None:
        tables += f", which replacement makes {_shown(case.replaced)}"
    raise PrivacyViolation(
        f"{what} is declared as {claimed:.6g}, and the last record attains {case.movement:.6g} with {tables}. "
        "Noise scaled to the declared value does not give the epsilon it is accounted for; raise the bound."
    )


def _shown(table: Tensor) -> str:
    return str([[round(float(value), 4) for value in row] for row in table])


def _shrunk(table: Tensor) -> Tensor:
    """Return the table without its last record."""
    return table[..., :-1, :-1]


class _Search:
    """Parallel restarts of a search, over free tables or over embeddings that produce them."""

    def __init__(
        self, loss: PairwiseLoss, n: int, relation: Relation, *, dim: int | None, restarts: int, steps: int, seed: int
    ) -> None:
        self.bound = loss.high if math.isfinite(loss.high) else 50.0
        self.n, self.dim, self.replacing = n, dim, relation == "replace_one"
        self.restarts, self.steps, self.seed = restarts, steps, seed

    def best(self, objective: Objective) -> tuple[Tensor, Tensor | None]:
        """Return the tables of the restart with the highest value."""
        variables = self._start()
        best = [v.detach().clone() for v in variables]
        values = torch.full((self.restarts,), -math.inf, dtype=torch.float64)
        optimizer = torch.optim.Adam(variables, lr=0.1 * (self.bound if self.dim is None else 1.0), maximize=True)
        for _ in range(self.steps + 1):
            current = objective(*self._tables(variables))
            better = self._improves(current, values)
            for kept, variable in zip(best, variables, strict=True):
                kept[better] = variable.detach()[better]
            if not current.requires_grad:
                break
            slopes = torch.autograd.grad(current.sum(), variables, allow_unused=True)
            for variable, slope in zip(variables, slopes, strict=True):
                variable.grad = None if slope is None else slope.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            optimizer.step()
            if self.dim is None:
                for variable in variables:
                    variable.data.clamp_(-self.bound, self.bound)
        if self.dim is None:
            self._try_ends(objective, best, values)
        top = int(values.argmax())
        table, replaced = self._tables([v[top : top + 1] for v in best])
        return table[0], None if replaced is None else replaced[0]

    @staticmethod
    def _improves(current: Tensor, values: Tensor) -> Tensor:
        """Return where ``current`` is higher, and update ``values``; NaN counts as highest, so that it is found."""
        seen = current.detach().nan_to_num(nan=math.inf, posinf=math.inf)
        better = seen > values
        values[better] = seen[better]
        return better

    def _try_ends(self, objective: Objective, best: list[Tensor], values: Tensor) -> None:
        """Move single entries to an end of the range wherever that helps, once over all of them; in place."""
        for variable in best:
            for i in range(self.n):
                for j in range(self.n):
                    for end in (-self.bound, self.bound):
                        old = variable[:, i, j].clone()
                        variable[:, i, j] = end
                        better = self._improves(objective(*self._tables(best)), values)
                        variable[~better, i, j] = old[~better]

    def _start(self) -> list[Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        if self.dim is not None:
            rows = [self.n, self.n, 1, 1] if self.replacing else [self.n, self.n]
            shapes = [(self.restarts, count, self.dim) for count in rows]
            return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
        tables = torch.rand(1 + self.replacing, self.restarts, self.n, self.n, generator=draw, dtype=torch.float64)
        tables = 2.0 * tables - 1.0
        tables[:, ::2] = tables[:, ::2].sign()
        return [(self.bound * table).requires_grad_() for table in tables]

    def _tables(self, variables: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        last = torch.arange(self.n) == self.n - 1
        if self.dim is None:
            own = last.unsqueeze(1) | last.unsqueeze(0)
            return variables[0], torch.where(own, variables[1], variables[0]) if self.replacing else None
        queries, passages, *new = (math.sqrt(self.bound) * v / v.norm(dim=-1, keepdim=True) for v in variables)
        table = queries @ passages.mT
        if not new:
            return table, None
        here = last.unsqueeze(1)
        return table, torch.where(here, new[0], queries) @ torch.where(here, new[1], passages).mT
