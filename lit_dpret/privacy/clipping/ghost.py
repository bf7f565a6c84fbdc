"""Book-keeping ghost clipping: exact per-unit clipping at about the cost of an ordinary step.

One forward pass; one backward pass that computes the gradients of layer outputs only; each unit's gradient norm from
pairs of (input, output gradient), without the gradient; then one weighted sum per parameter (Bu et al. 2023,
2210.00038). A unit's gradient is held only where it is no larger than what it is made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.matmul_precision import whole_products
from lit_dpret.privacy.clipping.base import (
    ClippedSum,
    ClipSettings,
    ClipStats,
    RowLoss,
    accumulator_dtype,
    broken_units,
    check_losses,
    refuse_batch_mixing,
)
from lit_dpret.privacy.clipping.contributions import (
    Contribution,
    Dense,
    Written,
    add_squared_norms,
    add_weighted,
    are_small,
    by_input,
    not_zero,
    unit_gradients,
    write_out,
)
from lit_dpret.privacy.clipping.recorder import Layout, Recorder, Use, contributions_of, uncompiled
from lit_dpret.privacy.clipping.recording_check import (
    RecordingCheck,
    refuse_lost_gradients,
    roundoff_of,
    tolerance_of,
    unit_weights,
)
from lit_dpret.privacy.clipping.rules import WAYS_OUT, Plan, make_plan, refuse_functional_use
from lit_dpret.privacy.clipping.units import UnitRows

PREFIX = "lit_dpret.clipping."
Phase = Literal["forward", "backward", "check_backward", "check_parameters", "norms", "sum"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def phase(name: Phase) -> record_function:
    """Return a context that a profile shows as ``lit_dpret.clipping.<name>``."""
    return record_function(PREFIX + name)  # type: ignore[no-untyped-call]


#: A unit whose squared norm is below this share of its energy is computed in float64 ...
CANCELLATION = 0.025
#: ... and below a larger one where so many terms are added in a row that they could be off by this share of it.
ERROR, MOST_DOUBTFUL = 1e-3, 0.25
#: In float64 there is nothing wider: below this share, what rounding may have hidden is added to the squared norm.
WIDE_CANCELLATION = 1e-3
#: Operations beside the additions of a product, each off by a roundoff.
SLACK = 16

Contributions = dict[str, list[Contribution]]


class GhostClipping(ClippedSum):
    """Clip without materialising the gradients; ``privacy.engine=ghost``, the default.

    Covers nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.GroupNorm,
    nn.RMSNorm, the norms of T5, Llama, Mistral, Qwen and Gemma, GPT-2's transposed linear layer,
    T5's relative position bias, the position embeddings of BERT, DistilBERT, RoBERTa, BART and GPT-2,
    LoRA and tuned prompts of peft, weights tied between any of them, and modules called several
    times. Everything else that is trainable is refused by name.

    Guarantees, beyond those of ``ClippedSum``:
        - Norms and sums come from the same inputs and output gradients, so passes in bf16 leave a contribution as
          near to the bound as passes in fp32. What fp32 itself may lose has room (`base.CLIP_ROUNDING`) and no proof.
        - A loss that couples units, a tensor whose first axis is not the batch, and a parameter
          used outside its module are refused. The first batch and every later change of the
          pattern of calls go through ``RecordingCheck``; the last of the three is noticed in every batch.

    Args:
        module: What is trained.
        verify: Check every batch, for about the cost of one more backward pass each.
        fixed_shapes: Every batch has a fixed shape (`units`), and no branch is taken by a value but in the first
            batches and in a check, so that XLA compiles one program. A unit whose terms cancel, whose norm
            would elsewhere be computed again in float64, gets an upper bound of its norm in place of that.
        **clipping: The arguments of `ClippedSum`.
    """

    def __init__(
        self, module: nn.Module, *, verify: bool = False, fixed_shapes: bool = False, **clipping: Unpack[ClipSettings]
    ) -> None:
        super().__init__(module, **clipping)
        self.fixed_shapes = fixed_shapes
        self._plan()
        self.forget()
        self._recording_check = RecordingCheck(always=verify)

    def _plan(self) -> Plan:
        return make_plan(self.module, self.parameters)

    def norms(self, row_loss: RowLoss, rows: int) -> Tensor:
        """Return the gradient norm of every row separately, ``(rows,)`` in float64, without clipping or summing.

        A row whose loss or gradient is not finite has a norm that is not. Audited as in ``add``.
        """
        batch = self._each_row(rows)
        with torch.enable_grad():
            losses, contributions = self._recorded(row_loss, batch)
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False), whole_products():
            norms, _ = self._norms(contributions, self._write_out(contributions, batch), losses, batch)
        whole: Tensor = torch.linalg.vector_norm(norms, dim=0)
        return whole

    def columns(self, outputs: Callable[[], Tensor], rows: int) -> tuple[Tensor, list[Contributions]]:
        """Return the Jacobian of ``outputs``, (rows, columns), as contributions per column and parameter.

        One forward pass, and for every column one backward pass to the outputs of layers. The first
        time, a mixture of all columns is checked before. Where no output needs a gradient there are
        no columns.
        """
        batch = self._each_row(rows)
        with torch.enable_grad(), uncompiled(), Recorder(self._plan()) as recorder:
            values = outputs()
            recorder.recording = False
            if values.dim() != 2 or len(values) != rows:
                raise UnsupportedModelError(f"{tuple(values.shape)} outputs for {rows} rows: (rows, columns) expected.")
            if not values.requires_grad:
                return values.detach(), []
            units = torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
            if self._recording_check.wants_parameters:
                mixture = torch.linspace(1.0, 2.0, len(units), dtype=values.dtype, device=values.device)
                units = torch.cat([mixture[None], units])
            found: list[Contributions] = []
            with torch.autocast(values.device.type, enabled=False):
                for unit in units:  # not a slice: that would look like picking rows
                    last = len(found) == len(units) - 1
                    found.append(self._backward(recorder.uses, (values * unit).sum(1), batch, keep=not last))
        recorder.uses.clear()
        return values.detach(), found[-values.shape[1] :]

    def _each_row(self, rows: int) -> UnitRows:
        """Every row as a unit of its own, after the checks that come before any batch."""
        self._refuse_changes()
        self._refuse_hooks()
        refuse_batch_mixing(self.module)
        device = next(iter(self.parameters.values())).device
        return UnitRows.build(torch.arange(rows), torch.ones(rows, dtype=torch.bool, device=device))

    def _add(self, row_loss: RowLoss, batch: UnitRows) -> ClipStats:
        losses, contributions = self._recorded(row_loss, batch)
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False), whole_products():
            with phase("norms"):
                written = self._write_out(contributions, batch)
                norms, doubtful = self._norms(contributions, written, losses, batch)
                factors = torch.where(batch.real, self.factors(norms), 0)
            with phase("sum"), self._all_or_nothing():
                self._add_up(contributions, written, factors, doubtful, batch)
        return self.stats(norms, batch)

    def _recorded(self, row_loss: RowLoss, batch: UnitRows) -> tuple[Tensor, Contributions]:
        """The losses, detached, and what their recorded calls contribute."""
        with uncompiled(), Recorder(self._plan()) as recorder:
            with phase("forward"):
                losses = row_loss()
            recorder.recording = False
            check_losses(losses, batch.rows)
            with torch.autocast(losses.device.type, enabled=False):
                contributions = self._backward(recorder.uses, losses, batch)
        recorder.uses.clear()
        return losses.detach(), contributions

    def _add_up(
        self,
        contributions: Contributions,
        written: dict[str, list[Written]],
        factors: Tensor,
        doubtful: Tensor,
        batch: UnitRows,
    ) -> None:
        """Add each unit's gradient times its factor; that of a doubtful one is summed over positions in float64."""
        # Doubtful units apart: their terms cancel, so that the float32 sum of all rows would lose them.
        exactly = torch.where(doubtful, factors, 0)
        coefficients = torch.where(doubtful, 0, factors)[:, batch.unit_of_row]
        alone: list[UnitRows | None] = [None] * len(factors)
        rows: list[Tensor | None] = [None] * len(factors)
        all_count = [False] * len(factors)
        if not batch.fixed:
            # What depends on values is read for all parameters together: each reading waits for the device.
            rows = not_zero(coefficients)
            present = torch.cat([group.units for group in batch.groups] or [batch.unit_of_row[:0]])
            of_all = (factors[:, present] != 0).all(1)
            some, all_count = torch.stack([(exactly > 0).any(1), of_all]).tolist()
            alone = [batch.only(each > 0) if any_of else None for each, any_of in zip(exactly, some, strict=True)]
        # Cast once, not once for each parameter: accumulators have one dtype or two.
        cast = {dtype: coefficients.to(dtype) for dtype in set(map(accumulator_dtype, self.parameters.values()))}
        weights = {dtype: factors.to(dtype) for dtype in cast}
        # Popped one by one, so that memory falls while the sum grows.
        for name in list(written):
            group = self.group_of[name]
            for part in written.pop(name):
                factors_of = weights[part.value.dtype][group]
                self._sums[name] = part.add_to(self._sums.get(name), factors_of, all_count=all_count[group])
        for name in list(contributions):
            parameter, group = self.parameters[name], self.group_of[name]
            uses, dtype = contributions.pop(name), accumulator_dtype(parameter)
            total = self._sums.get(name)
            total = self._add_rows(
                uses, cast[dtype][group], total, parameter.shape, dtype, rows=rows[group], fixed=batch.fixed
            )
            if (singled := alone[group]) is not None:
                for one in (one for each in singled.groups for one in each.split(1)):
                    gradient = unit_gradients(uses, parameter.shape, one, torch.float64)[0]
                    total += gradient.mul_(exactly[group, one.units]).to(dtype)
            self._sums[name] = total

    def _backward(self, uses: list[Use], losses: Tensor, batch: UnitRows, *, keep: bool = False) -> Contributions:
        """Gradients of the recorded outputs, checked where due, sorted by parameter.

        Args:
            uses: The recorded calls.
            losses: One for each row.
            batch: Whose rows they are.
            keep: Leave the graph for another backward pass.
        """
        for use in uses:
            if use.axis == 0 or use.axis % batch.rows:
                raise UnsupportedModelError(
                    f"{use.site.name} ({type(use.site.module).__name__}) works on tensors whose first axis is "
                    f"{use.axis} for a batch of {batch.rows} rows, so its gradient has no batch axis. Put the batch "
                    f"first, or expand shared tensors to the batch. {WAYS_OUT}",
                    trap="T10",
                )
            use.refuse_changed_input()
        edges = [*(use.edge for use in uses), *map(get_gradient_edge, self.parameters.values())]
        # `where` and no product: a filled-in row may have a loss of NaN.
        real = torch.where(batch.row_is_real(), losses, torch.zeros_like(losses))
        due = self._recording_check.may_be_due(uses, losses, batch)
        with phase("backward"):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                real.sum(), edges, allow_unused=True, retain_graph=due or keep
            )
        # A gradient that reaches a parameter itself, and not an alias, was seen by no rule.
        refuse_functional_use(list(self.parameters), found[len(uses) :])
        grads = [None if g is None else g.reshape(use.shape) for use, g in zip(uses, found, strict=False)]
        refuse_lost_gradients(uses, grads, losses)
        if due and self._recording_check.is_due(uses, grads, batch):
            return self._audited(uses, grads, real, batch, keep=keep)
        layouts = [self._recording_check.layout(use, batch) for use in uses]
        return self._by_parameter(uses, grads, layouts, batch)

    def _audited(
        self, uses: list[Use], grads: list[Tensor | None], losses: Tensor, batch: UnitRows, *, keep: bool
    ) -> Contributions:
        """Go through the graph again, to the parameters, with a weight of its own for every unit."""
        # A weight for every unit: whatever couples two of them shows as a wrong multiple.
        weighted = (losses * unit_weights(batch).to(losses.dtype)[batch.unit_of_row]).sum()
        tensors = [g for g in (*grads, *self.parameters.values()) if g is not None]
        tolerance, roundoff = tolerance_of(tensors), roundoff_of(tensors)
        del tensors
        aliases = [(use.site.parameters[local], alias) for use in uses for local, alias in use.aliases.items()]
        leaves = [alias for _, alias in aliases]
        with phase("check_backward"), self._recording_check.watching(uses, grads, batch) as layouts:
            found: list[Tensor | None] = list(
                torch.autograd.grad(weighted, leaves, allow_unused=True, retain_graph=keep)
            )
        contributions = self._by_parameter(uses, grads, layouts, batch, audited=True)
        references: dict[str, Tensor] = {}
        for i, (name, _) in enumerate(aliases):
            reference, found[i] = found[i], None
            if reference is None:
                continue
            reference = reference.to_dense() if reference.is_sparse else reference
            if reference.shape != self.parameters[name].shape:  # a scale, which had a batch axis
                reference = reference.flatten(0, -2).sum(0)
            references[name] = references[name].add_(reference) if name in references else reference
        with phase("check_parameters"):
            self._recording_check.check_parameters(contributions, references, batch, tolerance, roundoff)
        return contributions

    @torch.no_grad()
    def _by_parameter(
        self, uses: list[Use], grads: list[Tensor | None], layouts: Sequence[Layout], batch: UnitRows,
        *, audited: bool = False,
    ) -> Contributions:  # fmt: skip
        found: Contributions = {}
        for i, (use, layout) in enumerate(zip(uses, layouts, strict=True)):
            g, grads[i] = grads[i], None  # the last reference to what a small parameter has summed up
            if g is None:
                continue
            found_here = contributions_of(use, g, batch.rows, layout, self._dtype(use), audited=audited)
            for local, contribution in found_here:
                found.setdefault(use.site.parameters[local], []).append(contribution)
        return found

    def _add_rows(
        self, uses: Sequence[Contribution], coefficients: Tensor, total: Tensor | None, shape: torch.Size,
        dtype: torch.dtype, *, rows: Tensor | None, fixed: bool = False,
    ) -> Tensor:  # fmt: skip
        """`add_weighted`, or what stands for it."""
        return add_weighted(uses, coefficients, total, shape, dtype, rows=rows, fixed=fixed)

    def _dtype(self, use: Use) -> torch.dtype:
        return accumulator_dtype(self.parameters[next(iter(use.site.parameters.values()))])

    def _write_out(self, contributions: Contributions, batch: UnitRows) -> dict[str, list[Written]]:
        """Take out the parameters whose unit gradients are small, and write these out in place of their parts."""
        found: dict[str, list[Written]] = {}
        for names in by_input(contributions):
            if not are_small([contributions[n] for n in names], [self.parameters[n].shape for n in names], batch):
                continue
            for name in names:
                parameter = self.parameters[name]
                found[name] = write_out(contributions.pop(name), parameter.shape, batch, accumulator_dtype(parameter))
        return found

    def _norms(
        self, contributions: Contributions, written: Mapping[str, list[Written]], losses: Tensor, batch: UnitRows
    ) -> tuple[Tensor, Tensor]:
        """Each unit's gradient norm in each group, and which ones cannot be told in fp32.

        Where a unit's terms cancel, its norm is computed again in float64, and its sum in fp32 would be
        off by more than rounding as well. In a batch of fixed shape it gets what rounding may have hidden on top.
        """
        # Squares in float64: of many parameters in float32, small ones would vanish beside large ones.
        squares = torch.zeros(len(self.groups), batch.units, dtype=torch.float64, device=batch.real.device)
        energy, wide = torch.zeros_like(squares), torch.zeros_like(squares)
        for name, found in written.items():
            for gradients in found:
                gradients.add_squares(squares[self.group_of[name]], accumulator_dtype(self.parameters[name]))
        parts = [{name: contributions[name] for name in names if name in contributions} for names in self.groups]
        for group, part in enumerate(parts):
            for names in by_input(part):
                dtype = accumulator_dtype(self.parameters[names[0]])
                uses = [part[name] for name in names]
                spread = (energy if dtype == torch.float32 else wide)[group]
                add_squared_norms(uses, self.parameters[names[0]].shape, batch, dtype, squares[group], spread)
        longest = torch.tensor([max(map(_positions, part.values()), default=0) for part in parts])
        most = torch.tensor([self._hidden(part, batch) for part in parts]).to(squares)[:, None] * wide
        # Upwards, for a norm that is too small would let a unit pass the bound.
        squares = torch.where(squares < WIDE_CANCELLATION * wide, squares.clamp(min=0) + most, squares)
        cancels = (longest * batch.rows_of_a_unit * torch.finfo(torch.float32).eps / ERROR).square()
        threshold = cancels.clamp(CANCELLATION, MOST_DOUBTFUL).to(squares)[:, None]
        doubtful = batch.real & ~(squares >= threshold * energy)  # NaN is doubtful too
        # No second pass by values, which XLA would compile anew: an upper bound instead.
        if batch.fixed:
            hidden = torch.tensor([self._hidden(part, batch, torch.float32) for part in parts]).to(squares)[:, None]
            squares = torch.where(doubtful, squares.clamp(min=0) + hidden * energy, squares)
            return torch.where(broken_units(losses, batch), torch.nan, squares.sqrt()), torch.zeros_like(doubtful)
        # Float32 overflowed; float64 may still tell the norm.
        doubtful |= batch.real & squares.isinf()
        for group in (g for g, some in enumerate(doubtful.any(1).tolist()) if some):
            again = batch.only(doubtful[group])
            exact = self._exact_squares(parts[group], again)
            for gradients in (each for name in self.groups[group] for each in written.get(name, ())):
                gradients.add_squares(exact, torch.float64)
            squares[group] = torch.where(doubtful[group], exact, squares[group])
        return torch.where(broken_units(losses, batch), torch.nan, squares.clamp(min=0).sqrt()), doubtful

    def _exact_squares(self, contributions: Mapping[str, Sequence[Contribution]], batch: UnitRows) -> Tensor:
        """Squared norms of gradients that are written out in float64, ``(units,)``, from above.

        A norm from pairs loses a roundoff of its energy, which can be all of it where terms cancel. Here each
        coordinate is off by a roundoff for each term, times the sum of the terms' sizes: the norm by at most that times
        the sum of their lengths, whose square is at most their number times the energy (Cauchy and Schwarz).
        """
        exact = torch.zeros(batch.units, dtype=torch.float64, device=batch.real.device)
        energy, unused = torch.zeros_like(exact), torch.zeros_like(exact)
        for name, uses in contributions.items():
            shape = self.parameters[name].shape
            add_squared_norms([uses], shape, batch, torch.float64, unused, energy)
            for one in (one for group in batch.groups for one in group.split(1)):
                one.add_to(exact, unit_gradients(uses, shape, one, torch.float64).square().sum()[None])
        terms = max(map(_positions, contributions.values()), default=0) * batch.rows_of_a_unit
        rounding = (terms + SLACK) * terms**0.5 * torch.finfo(torch.float64).eps
        norms: Tensor = exact.sqrt() + rounding * energy.sqrt()
        return norms.square()

    def _hidden(
        self, contributions: Mapping[str, Sequence[Contribution]], batch: UnitRows, dtype: torch.dtype = torch.float64
    ) -> float:
        """Bound what products in ``dtype`` may lose of squared norms, as a share of their energy.

        Products of two Gram matrices are off by a roundoff for each addition, times the squared sum of the terms'
        lengths, which is at most the number of terms times their energy (Cauchy and Schwarz).
        """
        terms = max(map(_positions, contributions.values()), default=0) * batch.rows_of_a_unit
        widths = max((sum(self.parameters[name].shape) for name in contributions), default=0)
        return terms * (2 * terms + widths + SLACK) * torch.finfo(dtype).eps


def _positions(uses: Sequence[Contribution]) -> int:
    """How many terms a unit's gradient is summed from, for each of its rows."""
    return sum(1 if isinstance(use, Dense) else use.g.shape[1] for use in uses)
