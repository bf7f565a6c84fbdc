"""Book-keeping ghost clipping: exact per-unit clipping at about the cost of an ordinary step.

The engine runs one forward pass, and one backward pass that computes only the gradients of layer outputs. It derives
each unit's gradient norm from pairs of (input, output gradient) without the gradient itself, then computes one weighted
sum per parameter (Bu et al. 2023, 2210.00038). It stores a unit's gradient only where that is no larger than the
tensors it is computed from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.matmul_precision import whole_products
from lit_dpret.privacy.clipping.arithmetic import FORMATS, Format, FormatName, check_products
from lit_dpret.privacy.clipping.base import (
    LOOSE,
    ClippedSum,
    ClipSettings,
    ClipStats,
    RowLoss,
    accumulator_dtype,
    broken_units,
    check_losses,
    refuse_batch_mixing,
)
from lit_dpret.privacy.clipping.certificate import (
    Bounds,
    Certified,
    Waiting,
    certified,
    norms_from_above,
    norms_of_each,
)
from lit_dpret.privacy.clipping.contributions import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    Scaled,
    Written,
    above_each_other,
    add_weighted,
    are_small,
    by_input,
    join_dense,
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


#: How much small values may add to a unit's norm, as a share of the bound; `base.CLIP_ROUNDING` has room for it.
NEGLIGIBLE = 1e-10

Contributions = dict[str, list[Contribution]]


class GhostClipping(ClippedSum):
    """Clip without materialising the gradients; ``privacy.engine=ghost``, the default.

    docs/privacy.md lists the layers it covers; any other trainable parameter is refused by name.

    Guarantees, beyond those of ``ClippedSum``:
        - Norms and sums come from the same inputs and output gradients, so passes in bf16 leave a contribution as close
          to the bound as passes in fp32.
        - The amount added for a unit is within the bound, the rounding of its own terms included, if the device adds up
          products as `arithmetic` assumes. Its factor depends on the unit alone, except for the last digits of its
          norm.
        - A loss that couples units, a tensor whose first axis is not the batch, and a parameter used outside its module
          are refused: in the first batch and after every change of the pattern of calls, and the parameter in every
          batch.

    Args:
        verify: Check every batch, for about the cost of one more backward pass each.
        fixed_shapes: Every batch has a fixed shape (`units`), and no branch depends on a value except in the first
            batches and in a check, so that XLA compiles one program. A unit whose terms cancel is clipped by the upper
            bound of its norm; without fixed shapes, its norm would be recomputed in float64.
        **clipping: The arguments of `ClippedSum`.
    """

    #: The number formats of products, apart from float64.
    forms: ClassVar[tuple[Format, ...]] = (FORMATS["float32"],)

    def __init__(
        self, module: nn.Module, *, verify: bool = False, fixed_shapes: bool = False, **clipping: Unpack[ClipSettings]
    ) -> None:
        super().__init__(module, **clipping)
        self.fixed_shapes = fixed_shapes
        self._plan()
        self.loose = max(LOOSE[accumulator_dtype(parameter)] for parameter in self.parameters.values())
        self.forget()
        self._recording_check = RecordingCheck(always=verify)
        self._probed: set[tuple[torch.device, FormatName]] = set()
        for parameter in self.parameters.values():
            self._probe(parameter.device)

    def _probe(self, device: torch.device) -> None:
        """Check once what is assumed of the device's products; a module on the meta device has none to check."""
        for form in self.forms:
            if (device, form.name) not in self._probed and device.type != "meta":
                check_products(device, form)
                self._probed.add((device, form.name))

    def _plan(self) -> Plan:
        return make_plan(self.module, self.parameters)

    def norms_of(self, parts: Callable[[], Iterable[Contributions]], losses: Tensor) -> Tensor:
        """Return the gradient norm of every row separately, ``(rows,)`` in float64, from its contributions.

        ``parts`` makes them, some parameters at a time. The exact norm may be larger by a share of at most `loose`.
        """
        batch = self._separately(len(losses))
        found = Certified.zeros(batch.units, losses.device)
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False), whole_products():
            for part in parts():
                self._certified(part, self._write_out(part, batch), batch, found)
            broken = broken_units(losses, batch)
            norms, vague, _ = self._told_by(found, found.norms())
            vague &= ~broken
            if bool(vague.any()):
                only = batch.only(vague)
                exact = torch.stack([self._exact_squares(part, only) for part in parts()]).sum(0)
                norms = torch.where(vague, exact.sqrt(), norms)
        return torch.where(broken, torch.nan, norms)

    def columns(
        self, outputs: Callable[[], Tensor], rows: int, along: Tensor | None = None
    ) -> tuple[Tensor, list[Contributions]]:
        """Return the Jacobian of ``outputs``, (rows, dim), as contributions per column and parameter.

        A column is the derivative along one of the vectors ``along``, (columns, dim), or else by a coordinate.
        """
        self._refuse_changes()
        self._refuse_hooks()
        refuse_batch_mixing(self.module)
        batch = self._separately(rows)
        with torch.enable_grad(), uncompiled(), Recorder(self._plan()) as recorder:
            values = outputs()
            recorder.recording = False
            if values.dim() != 2 or len(values) != rows:
                raise UnsupportedModelError(f"Outputs have shape {tuple(values.shape)}; it must be ({rows}, columns).")
            if not values.requires_grad:
                return values.detach(), []
            units = torch.eye(values.shape[1]) if along is None else along
            count, units = len(units), units.to(values)
            if self._recording_check.wants_parameters:
                mixture = torch.linspace(1.0, 2.0, values.shape[1], dtype=values.dtype, device=values.device)
                units = torch.cat([mixture[None], units])
            found: list[Contributions] = []
            with torch.autocast(values.device.type, enabled=False):
                for unit in units:  # not a slice: that would look like picking rows
                    last = len(found) == len(units) - 1
                    found.append(self._backward(recorder.uses, (values * unit).sum(1), batch, keep=not last))
        recorder.uses.clear()
        return values.detach(), found[-count:]

    def _separately(self, rows: int) -> UnitRows:
        """Return every row as its own unit."""
        device = next(iter(self.parameters.values())).device
        return UnitRows.build(torch.arange(rows), torch.ones(rows, dtype=torch.bool, device=device))

    def _add(self, row_loss: RowLoss, batch: UnitRows) -> ClipStats:
        losses, contributions = self._recorded(row_loss, batch)
        if self.store is not None:
            self.store.free()
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False), whole_products():
            with phase("norms"):
                written = self._write_out(contributions, batch)
                norms, doubtful, present = self._norms(contributions, written, losses, batch)
                factors = self.factors(norms) * batch.real
            with phase("sum"), self._all_or_nothing():
                self._add_up(contributions, written, factors, doubtful, batch)
        return self.stats(norms, batch, present, factors)

    def _recorded(self, row_loss: RowLoss, batch: UnitRows) -> tuple[Tensor, Contributions]:
        with uncompiled(), Recorder(self._plan()) as recorder:
            with phase("forward"):
                losses = row_loss()
            recorder.recording = False
            check_losses(losses, batch.rows)
            self._probe(losses.device)  # the module may have been moved since
            with torch.autocast(losses.device.type, enabled=False):
                contributions = self._backward(recorder.uses, losses, batch)
        recorder.uses.clear()
        return losses.detach(), contributions

    def _add_up(
        self,
        contributions: Contributions,
        written: list[Written],
        factors: Tensor,
        doubtful: Tensor,
        batch: UnitRows,
    ) -> None:
        """Add each unit's gradient times its factor; sum a doubtful unit's gradient over positions in float64."""
        # Doubtful units are added separately: their terms cancel, so the float32 sum of all rows would lose them.
        exactly = factors * doubtful
        coefficients = (factors * ~doubtful)[:, batch.unit_of_row]
        alone: list[UnitRows | None] = [None] * len(factors)
        rows: list[Tensor | None] = [None] * len(factors)
        all_count = [False] * len(factors)
        if not batch.fixed:
            # Values that decide a branch are read for all parameters together: each read waits for the device.
            rows = not_zero(coefficients)
            present = torch.cat([group.units for group in batch.groups] or [batch.unit_of_row[:0]])
            of_all = (factors[:, present] != 0).all(1)
            some, all_count = torch.stack([(exactly > 0).any(1), of_all]).tolist()
            alone = [batch.only(each > 0) if any_of else None for each, any_of in zip(exactly, some, strict=True)]
        # Cast once, not once per parameter: the accumulators have one or two dtypes.
        cast = {dtype: coefficients.to(dtype) for dtype in set(map(accumulator_dtype, self.parameters.values()))}
        weights = {dtype: factors.to(dtype) for dtype in cast}

        scaled = Scaled()

        def add(blocks: list[Written], names: Sequence[str]) -> None:
            # Popped one by one, so that memory falls as the sum grows.
            while blocks:
                block = blocks.pop(0)
                group = self.group_of[next(iter(block.shapes))]
                block.add_to(self._sums, weights[block.value.dtype][group], all_count=all_count[group])
            for name in [name for name in names if name in contributions]:
                parameter, group = self.parameters[name], self.group_of[name]
                uses, dtype = contributions.pop(name), accumulator_dtype(parameter)
                total = self._sums.get(name)
                total = self._add_rows(
                    uses, cast[dtype][group], total, parameter.shape, dtype, rows=rows[group], fixed=batch.fixed,
                    scaled=scaled,
                )  # fmt: skip
                if (singled := alone[group]) is not None:
                    for one in (one for each in singled.groups for one in each.split(1)):
                        gradient = unit_gradients(uses, parameter.shape, one, torch.float64)[0]
                        total += gradient.mul_(exactly[group, one.units]).to(dtype)
                self._sums[name] = total

        if self.store is None:
            add(written, [*contributions])
            return
        apart: dict[str, list[Written]] = {}
        while written:
            for name, one in written.pop(0).apart():
                apart.setdefault(name, []).append(one)
        for number, names in enumerate(self.store.parts):
            add([block for name in names for block in apart.pop(name, [])], names)
            self.store.add(number, self._sums)
            self._sums.clear()

    def _backward(self, uses: list[Use], losses: Tensor, batch: UnitRows, *, keep: bool = False) -> Contributions:
        """Return the gradients of the recorded outputs by parameter, checked where due; ``keep`` retains the graph."""
        for use in uses:
            if use.axis == 0 or use.axis % batch.rows:
                raise UnsupportedModelError(
                    f"{use.site.name} ({type(use.site.module).__name__}) works on tensors whose first axis has size "
                    f"{use.axis} for a batch of {batch.rows} rows, so its gradient has no batch axis. Put the batch "
                    f"first, or expand shared tensors to the batch. {WAYS_OUT}",
                    trap="T10",
                )
            use.refuse_changed_input()
        edges = [*(use.edge for use in uses), *map(get_gradient_edge, self.parameters.values())]
        # `where` instead of a product: a padding row may have a loss of NaN.
        real = torch.where(batch.row_is_real(), losses, torch.zeros_like(losses))
        due = self._recording_check.may_be_due(uses, losses, batch)
        with phase("backward"):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                real.sum(), edges, allow_unused=True, retain_graph=due or keep
            )
        # A gradient that reaches the parameter itself, and not an alias, was seen by no rule.
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
        """Run through the graph again, down to the parameters, with a separate weight for every unit."""
        # One weight per unit: anything that couples two units shows as a wrong multiple.
        weighted = (losses * unit_weights(batch).to(losses.dtype)[batch.unit_of_row]).sum()
        tensors = [g for g in (*grads, *self.parameters.values()) if g is not None]
        tolerance, roundoff = tolerance_of(tensors), roundoff_of(tensors)
        del tensors
        aliases = [(use.site.parameters[local], alias) for use in uses for local, alias in use.aliases.items()]
        new = [(name, alias) for name, alias in aliases if self._recording_check.wants(name)]
        if self.store is not None or len(new) < len(aliases):
            return self._audited_in_parts(uses, grads, weighted, new, batch, tolerance, roundoff, keep=keep)
        leaves = [alias for _, alias in aliases]
        with phase("check_backward"), self._recording_check.watching(uses, grads, batch) as layouts:
            found: list[Tensor | None] = list(
                torch.autograd.grad(weighted, leaves, allow_unused=True, retain_graph=keep)
            )
        contributions = self._by_parameter(uses, grads, layouts, batch, audited=True)
        references: dict[str, Tensor] = {}
        for i, (name, _) in enumerate(aliases):
            reference, found[i] = found[i], None
            if reference is not None:
                self._collect(references, name, reference)
        with phase("check_parameters"):
            comparison = self._recording_check.comparison(contributions, batch)
            for name, reference in references.items():
                comparison.add(name, reference)
            comparison.settle(tolerance, roundoff)
        return contributions

    def _audited_in_parts(
        self, uses: list[Use], grads: list[Tensor | None], weighted: Tensor, aliases: list[tuple[str, Tensor]],
        batch: UnitRows, tolerance: float, roundoff: float, *, keep: bool,
    ) -> Contributions:  # fmt: skip
        """Audit without holding autograd's gradients of all parameters at once.

        First run once more to the outputs, for the layouts. Then run to the parameters of ``aliases``; each is compared
        as soon as its gradient arrives, and then freed.
        """
        edges = [use.edge for use in uses]
        with phase("check_backward"), self._recording_check.watching(uses, grads, batch, arriving=False) as layouts:
            twins = torch.autograd.grad(weighted, edges, allow_unused=True, retain_graph=keep or bool(aliases))
            self._recording_check.look_at(twins)
            del twins
        contributions = self._by_parameter(uses, grads, layouts, batch, audited=True)
        if not aliases:
            return contributions
        comparison = self._recording_check.comparison(contributions, batch)
        waiting = Counter(name for name, _ in aliases)
        held: dict[str, Tensor] = {}

        @torch.no_grad()
        def arrived(name: str, gradient: Tensor) -> Tensor | None:
            self._collect(held, name, gradient)
            waiting[name] -= 1
            if not waiting[name]:
                comparison.add(name, held.pop(name))
            # Autograd keeps the value returned here until all have arrived: zeros that take no memory.
            return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

        handles = [alias.register_hook(partial(arrived, name)) for name, alias in aliases]  # type: ignore[no-untyped-call]
        try:
            with phase("check_parameters"):
                leaves = [alias for _, alias in aliases]
                torch.autograd.grad(weighted, leaves, allow_unused=True, retain_graph=keep)
        finally:
            for handle in handles:
                handle.remove()
        for name, reference in held.items():  # another use of the parameter got no gradient
            comparison.add(name, reference)
        comparison.settle(tolerance, roundoff)
        return contributions

    def _collect(self, references: dict[str, Tensor], name: str, reference: Tensor) -> None:
        """Add autograd's gradient for one call to those of the same parameter."""
        reference = reference.to_dense() if reference.is_sparse else reference
        if reference.shape != self.parameters[name].shape:  # a scale, which had a batch axis
            reference = reference.flatten(0, -2).sum(0)
        references[name] = references[name] + reference if name in references else reference

    @torch.no_grad()
    def _by_parameter(
        self, uses: list[Use], grads: list[Tensor | None], layouts: Sequence[Layout], batch: UnitRows,
        *, audited: bool = False,
    ) -> Contributions:  # fmt: skip
        found: Contributions = {}
        for i, (use, layout) in enumerate(zip(uses, layouts, strict=True)):
            g, grads[i] = grads[i], None  # the last reference to the gradient, once a small parameter has summed it up
            if g is None:
                continue
            found_here = contributions_of(use, g, batch.rows, layout, self._dtype(use), audited=audited)
            for local, contribution in found_here:
                found.setdefault(use.site.parameters[local], []).append(contribution)
        return found

    def _add_rows(
        self, uses: Sequence[Contribution], coefficients: Tensor, total: Tensor | None, shape: torch.Size,
        dtype: torch.dtype, *, rows: Tensor | None, fixed: bool = False, scaled: Scaled | None = None,
    ) -> Tensor:  # fmt: skip
        return add_weighted(uses, coefficients, total, shape, dtype, rows=rows, fixed=fixed, scaled=scaled)

    def _dtype(self, use: Use) -> torch.dtype:
        return accumulator_dtype(self.parameters[next(iter(use.site.parameters.values()))])

    def _write_out(self, contributions: Contributions, batch: UnitRows) -> list[Written]:
        """Remove the parameters whose unit gradients are small, and compute these gradients in full instead.

        They are returned in blocks of one dtype and clipping group.
        """
        shapes = {name: self.parameters[name].shape for name in contributions}
        one_row = all(group.rows.shape[1] == 1 for group in batch.groups)
        alike: dict[tuple[int, torch.dtype, bool], Contributions] = {}
        for names in by_input(contributions):
            of_names = [contributions[name] for name in names]
            # Several terms would first have to be added up, which the bounds on a sum cover.
            dense = one_row and len(of_names[0]) == 1 and isinstance(of_names[0][0], Dense)
            if not dense and not are_small(of_names, [shapes[name] for name in names], batch):
                continue
            for name in names:
                key = self.group_of[name], accumulator_dtype(self.parameters[name]), dense
                alike.setdefault(key, {})[name] = contributions.pop(name)
        found: list[Written] = []
        for (_, dtype, dense), uses in alike.items():
            write: Any = join_dense if dense else write_out
            found.extend(write(uses, {name: shapes[name] for name in uses}, batch, dtype))
        return found

    def _form(self, name: str, uses: Sequence[Contribution]) -> Format:
        return FORMATS["float64" if accumulator_dtype(self.parameters[name]) == torch.float64 else "float32"]

    def _norms(
        self, contributions: Contributions, written: Sequence[Written], losses: Tensor, batch: UnitRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each unit's norm in each group, which units are summed in float64, and which have a gradient.

        The true norm, plus what the unit's sum may miss, exceeds the returned norm by a share of at most `loose`. A
        unit is summed in float64 if its bound is not within that share, as where terms cancel; its norm is then that of
        its gradient, computed in full in float64. In a batch of fixed shape it is clipped by the bound instead. The
        last result is needed because the bound for a unit without a gradient is above zero.
        """
        parts = [{name: contributions[name] for name in names if name in contributions} for names in self.groups]
        kept: list[list[Written]] = [[] for _ in self.groups]
        for block in written:
            kept[self.group_of[next(iter(block.shapes))]].append(block)
        broken = broken_units(losses, batch)
        each = [Certified.zeros(batch.units, batch.real.device) for _ in parts]
        for part, of_group, of_part in zip(parts, kept, each, strict=True):
            self._certified(part, of_group, batch, of_part)
        found = Certified.together(each)
        above = found.norms()
        present = found.present(above)
        norms, vague, too_large = self._told_by(found, above)
        if batch.fixed:  # no second look by value, for which XLA would recompile, and one length for all
            norms = torch.where(too_large, torch.inf, torch.maximum(norms, above / (1 + self.loose)))
        norms = norms.masked_fill_(broken, torch.nan)
        if batch.fixed:
            return norms, torch.zeros_like(vague), present
        vague &= batch.real & ~broken
        # Read for all groups together: each read waits for the device.
        for group in (g for g, some in enumerate(vague.any(1).tolist()) if some):
            exact = self._exact_squares(parts[group], batch.only(vague[group]))
            for gradients in kept[group]:
                gradients.group.add_squares_to(exact, norms_from_above(gradients.value, FORMATS["float64"]))
            norms[group] = torch.where(vague[group], exact.sqrt(), norms[group])
        return norms, vague, present

    def _certified(self, part: Contributions, written: Sequence[Written], batch: UnitRows, found: Certified) -> None:
        for gradients in written:
            form = self._form(next(iter(gradients.shapes)), ())
            norms, *rounding = norms_of_each(gradients.value, form)
            gradients.group.add_squares_to(found.estimate, norms)
            found.note_lengths(form, *rounding)
            found.note_terms(1, gradients.value.shape[1], in_pairs=False)
        by_form: dict[Format, dict[str, Sequence[Contribution]]] = {}
        for name, uses in part.items():
            by_form.setdefault(self._form(name, uses), {})[name] = uses
        outers = [use for uses in part.values() for use in uses if isinstance(use, Outer)]
        waiting = Waiting(sum(use.a.numel() + use.g.numel() for use in outers))
        for form, alike in by_form.items():
            by_width: dict[int, list[tuple[Sequence[Any], torch.Size]]] = {}
            for name in [] if batch.fixed else [*alike]:
                if all(isinstance(use, Lookup) for use in alike[name]):
                    shape = self.parameters[name].shape
                    by_width.setdefault(shape[1], []).append((alike.pop(name), shape))
            for same_width in by_width.values():
                lookups, shape = above_each_other(same_width)
                certified([lookups], shape, batch, form, found)
            for names in by_input(alike):
                each = [alike[name] for name in names]
                certified(each, self.parameters[names[0]].shape, batch, form, found, waiting)
        waiting.add_all()

    def _told_by(self, found: Certified, above: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return norms, which of them need a look in float64, and which units have values that are too large."""
        # The computed norm depends on the unit alone, up to rounding. Its bound also depends on how far the batch is
        # padded, so through the bound one unit could move the factors of all others.
        norms = found.estimate.clamp(min=0).sqrt()
        # NaN and infinity are vague too, since float64 may still give the norm.
        close = above <= (1 + self.loose) * norms + NEGLIGIBLE * self.bound
        vague = ~(close & (above < math.inf))
        if self.clip == "abadi":  # a gradient that is not clipped in any case needs no closer look
            vague &= ~(above <= self.target)
        too_large = ~(found.tiny() <= NEGLIGIBLE * self.bound)
        return norms, vague | too_large, too_large

    def _exact_squares(self, contributions: Mapping[str, Sequence[Contribution]], batch: UnitRows) -> Tensor:
        found = Certified.zeros(batch.units, batch.real.device, least=FORMATS["float64"].tiny)
        for name, uses in contributions.items():
            for one in (one for group in batch.groups for one in group.split(1)):
                Bounds(one, FORMATS["float64"], found).of_written(uses, self.parameters[name].shape)
        return found.norms().square()


class VmapClipping(GhostClipping):
    """``GhostClipping`` for the layers it covers, torch.func for the rest; ``privacy.engine=vmap``.

    It must be chosen explicitly, because for those other layers it costs one gradient per row in memory, and one more
    forward and backward pass. A module that owns a trainable parameter without a rule is run again with everything in
    it, row by row, by ``vmap`` over ``vjp``. Its outputs must be tensors (in lists or dictionaries, if there are
    several) with the batch on their first axis. So must those of its inputs that differ between rows: any other input
    is taken to be the same in every row.

    Guarantees, beyond those of ``GhostClipping``:
        - In every batch, the output of such a module for a row alone is compared with its output in the batch. So a
          module is refused if it mixes rows, with or without a gradient between them, or if it behaves differently when
          it is run again.
        - In every batch, gradients are compared with the weights of the units that they are charged to. In the first
          batch, their sum is compared with autograd's, unless a broken unit makes that NaN.
        - Anything that vmap cannot run is refused with its reason: recurrent layers, dropout, control flow, writes into
          buffers.
    """

    def __init__(self, module: nn.Module, **clipping: Unpack[ClipSettings]) -> None:
        super().__init__(module, verify=True, **clipping)

    def _plan(self) -> Plan:
        return make_plan(self.module, self.parameters, fallback=True)
