"""The reference engine: each unit's gradient separately, by plain autograd.

Slow (one backward pass per unit) and heavy (one whole gradient at a time), but it covers every
module that autograd covers, and it is what the fast engine is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lit_dpret.privacy.clipping.base import ClippedSum, ClipStats, RowLoss, accumulator_dtype, check_losses
from lit_dpret.privacy.clipping.recording_check import ancestors, refuse_hidden_calls
from lit_dpret.privacy.clipping.units import UnitRows


class LoopClipping(ClippedSum):
    """One backward pass per unit over the graph of one forward pass; ``privacy.engine=loop``.

    It trusts that a row's loss depends on that row alone: a loss with in-batch negatives passes
    here, and its sum has no bound. ``GhostClipping`` refuses such a loss.
    """

    def _add(self, row_loss: RowLoss, batch: UnitRows) -> ClipStats:
        saved = _SavedTensors(batch.rows)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            losses = row_loss()
        check_losses(losses, batch.rows)
        refuse_hidden_calls(losses)
        finite = losses.detach().isfinite()
        saved.broken_rows = ~finite
        names, parameters = list(self.parameters), list(self.parameters.values())
        norms = torch.zeros(len(self.groups), batch.units, dtype=torch.float64, device=batch.real.device)
        with self._all_or_nothing():
            for group in batch.groups:
                for unit, rows in zip(group.units.tolist(), group.rows, strict=True):
                    if not finite[rows].all():
                        norms[:, unit] = torch.nan
                        continue
                    loss = losses[rows].sum()
                    # One graph for all units, hence kept: under dropout a pass of each unit would be another function.
                    found: Sequence[Tensor | None] = torch.autograd.grad(
                        loss, parameters, retain_graph=True, allow_unused=True
                    )
                    if any(g is not None and not _is_finite(g) for g in found):  # this unit's fault, or another's?
                        others = torch.ones_like(finite).index_fill_(0, rows, False)
                        saved.broken_rows = others
                        with _zeros_stay_zero(loss, others):
                            found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
                        saved.broken_rows = ~finite
                    grads = [
                        None if g is None else (g.to_dense() if g.is_sparse else g).to(accumulator_dtype(p))
                        for g, p in zip(found, parameters, strict=True)
                    ]
                    squares = torch.zeros_like(norms[:, unit])
                    for name, grad in zip(names, grads, strict=True):
                        if grad is not None:
                            squares[self.group_of[name]] += grad.double().square().sum()
                    norms[:, unit] = squares.sqrt()
                    factors = self.factors(norms[:, unit, None]).flatten().tolist()
                    for name, grad in zip(names, grads, strict=True):
                        factor = factors[self.group_of[name]]
                        # A factor of zero leaves the gradient out, because zero times NaN is NaN.
                        if grad is not None and factor != 0.0:
                            self._sums[name] = self._sums.get(name, 0) + factor * grad
        return self.stats(norms, batch)


def _is_finite(gradient: Tensor) -> bool:
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all())


@contextmanager
def _zeros_stay_zero(loss: Tensor, rows: Tensor) -> Iterator[None]:
    """Where nothing comes in for one of ``rows``, let nothing come out: zero times infinity is NaN."""
    count = len(rows)

    def folded(gradient: Tensor) -> Tensor | None:
        whole = gradient.dim() and not gradient.is_sparse and gradient.shape[0] and gradient.shape[0] % count == 0
        return gradient.reshape(count, -1) if whole else None

    def hook(given: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        incoming = [folded(g) for g in came if g is not None]
        silent = rows.clone()
        for g in incoming:
            if g is None:
                return None
            silent &= (g == 0).all(1)
        return tuple(g if g is None else quiet(g, silent) for g in given)

    def quiet(gradient: Tensor, silent: Tensor) -> Tensor:
        by_row = folded(gradient)
        if by_row is None:
            return gradient
        return torch.where(silent[:, None] & ~by_row.isfinite(), 0, by_row).view_as(gradient)

    handles = [node.register_hook(hook) for node in ancestors(loss)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Most derivatives are finite here; at zero that of a norm, a root or a quotient is not.
_HARMLESS = 0.5


class _SavedTensors:
    """Keep a broken unit's NaNs out of the other units' gradients.

    A weight's gradient sums over the whole batch. The other units send zeros into the broken
    unit's rows, but zero times NaN is NaN, and one broken unit would silence all others.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.broken_rows: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def unpack(self, tensor: Tensor) -> Tensor:
        broken = self.broken_rows
        if broken is None or not tensor.is_floating_point() or not broken.any():
            return tensor
        harmless = torch.full_like(tensor, _HARMLESS)
        axis = next((axis for axis, size in enumerate(tensor.shape) if size and size % self.rows == 0), None)
        if axis is None:  # whose a value is cannot be told
            return torch.where(tensor.isnan(), harmless, tensor)
        # The rows' own NaN stay: a unit that is dropped alone is dropped in any company.
        of_row = broken.repeat_interleave(tensor.shape[axis] // self.rows)
        broken = of_row.view(-1, *[1] * (tensor.dim() - axis - 1))
        return torch.where(broken & ~tensor.isfinite(), harmless, tensor)
