"""Verify a recording: do the recorded calls explain the gradient, row by row?

A second backward pass weights each unit's loss by a power of two. The gradient at every recorded output must follow the
weight of its unit, and the weighted sum of the engine's gradients must equal autograd's. The check runs for the first
batch, for every new pattern of calls (`row_pattern`), and in batches 8, 64, 512 and so on; docs/derivations.md says
what it cannot see.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping.base import accumulator_dtype
from lit_dpret.privacy.clipping.contributions import Contribution, add_weighted, not_zero, rounding_of
from lit_dpret.privacy.clipping.recorder import Layout, Use
from lit_dpret.privacy.clipping.units import UnitRows

_PICKS = re.compile(
    r"(Index|Gather|Scatter|Masked(Select|Scatter)|Take|Sort|Topk|Slice|Select|Split|Unbind|PackPadded|AsStrided|Roll"
    r"|Flip|Embedding|Mm|Bmm)"
)
_SAID = ("start", "end", "step", "index", "mask", "split_size", "split_sizes", "batch_sizes", "shifts", "dims")
#: The name of the nodes of a class, and whether they pick rows: asking a node takes as long as everything else.
_READ: dict[type, tuple[str, bool]] = {}
_LEAF = "torch::autograd::AccumulateGrad"
#: Operations that may occur between a parameter and its use.
_SAME_WEIGHT = re.compile(
    r"(T|View|UnsafeView|Transpose|Permute|Reshape|Alias|ToCopy|Expand|Unsqueeze|Squeeze)Backward"
)


def ancestors(loss: Tensor) -> set[Node]:
    """Return all nodes of the graph below ``loss``."""
    return {node for node, _ in _walk(loss)}


def row_pattern(loss: Tensor, rows: int) -> int | None:
    """Return a hash of the form of the graph of ``loss`` and of how it selects rows; equal for batches treated alike.

    Operations that select on an axis other than the batch axis are left out. Return None where rows are written into
    places that the graph does not show (``out[i] = row``): such a batch equals no other.
    """
    found: list[object] = []
    names: list[str] = []
    outputs: list[tuple[int, int, int]] = []
    seen: set[Node] = set()
    queue = [loss.grad_fn]
    # `_walk`, inlined: this runs in every batch, and takes half as long.
    pop, push, see, add = queue.pop, queue.append, seen.add, names.append
    while queue:
        node = pop()
        if node in seen or node is None:
            continue
        see(node)
        name, picks = _READ.get(type(node)) or _read(node)
        add(name)
        for parent, nr in node.next_functions:
            push(parent)
            if nr:  # which of several outputs goes where distinguishes rows that a list has reordered
                outputs.append((len(names), len(queue), nr))
        if picks:
            found += _picked(node, name, rows)
    return None if "torch::autograd::CopySlices" in names else hash((*names, *outputs, *found))


def _read(node: Node) -> tuple[str, bool]:
    name = node.name()
    _refuse_hidden(name)
    found = name, _PICKS.match(name) is not None
    if name.endswith(type(node).__name__):  # else the class is a C++ extension's, whose nodes share one class
        _READ[type(node)] = found
    return found


def refuse_hidden_calls(loss: Tensor) -> None:
    """Refuse a graph partly hidden by a reentrant checkpoint, whose calls run without gradients."""
    for node, _ in _walk(loss):
        _refuse_hidden(node.name())


def _refuse_hidden(name: str) -> None:
    if name.startswith("CheckpointFunction"):
        raise UnsupportedModelError(
            "Reentrant activation checkpointing hides calls from the engine, and parameters in them would get no "
            "gradient. Use gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}).",
            trap="T13",
        )


def _walk(loss: Tensor) -> Iterator[tuple[Node, tuple[tuple[Node | None, int], ...]]]:
    # A loop instead of recursion: graphs of deep models exceed Python's limit.
    seen: set[Node] = set()
    queue = [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            inputs = node.next_functions
            yield node, inputs
            queue += [parent for parent, _ in inputs]


def _picked(node: Node, name: str, rows: int) -> list[object]:
    saved: Any = node
    if name.startswith("Embedding"):  # of words, or of rows in another order
        weight = node.next_functions[0][0]
        picks = not saved._saved_weight_sym_argsize_0 % rows and not _is_weight(weight)
        return [name, _value(saved._saved_indices)] if picks else []
    if name.startswith(("Mm", "Bmm")):
        return [name, _value(saved._saved_self)] if _mixes_rows(node, rows) else []
    sizes = getattr(saved, "_saved_self_sym_sizes", None)
    indices = getattr(saved, "_saved_indices", None)
    if isinstance(indices, (list, tuple)):  # h[...]: one index for each axis, None where it takes all
        axes = [axis for axis, index in enumerate(indices) if index is not None]
        wanted = [indices[axis] for axis in axes if _runs_over_rows(axis, sizes, rows)]
        return [name, *map(_value, wanted)] if wanted else []
    axis = getattr(saved, "_saved_dim", None)
    if isinstance(axis, int):
        # Autograd saves a negative axis as an unsigned number.
        axis = axis - 2**64 if axis >= 2**63 else axis
        if axis < 0:
            axis = None if sizes is None else axis + len(sizes)
        if axis is not None and not _runs_over_rows(axis, sizes, rows):
            return []
    values = [getattr(saved, f"_saved_{said}", None) for said in _SAID]
    return [name, *(_value(value) for value in (*values, indices))]


def _is_weight(node: Node | None) -> bool:
    """Return whether a node passes on a parameter unchanged."""
    while node is not None and _SAME_WEIGHT.match(node.name()):
        node = node.next_functions[0][0]
    return node is not None and node.name() == _LEAF


def _mixes_rows(product: Node, rows: int) -> bool:
    """Return whether a matrix that depends on no parameter may be multiplied with rows from the left."""
    (left, _), (right, _) = product.next_functions
    if left is not None or right is None or _is_weight(right):
        return False
    matrix: Any = getattr(product, "_saved_self", None)
    return matrix is not None and not matrix.shape[-1] % rows and (matrix.dim() == 2 or bool(matrix.shape[0] % rows))


def _runs_over_rows(axis: int, sizes: Any, rows: int) -> bool:
    """Return whether an axis may run over rows: the first, one as long as the batch, or one if the first cannot."""
    if axis == 0 or sizes is None:
        return axis == 0
    return bool(sizes[axis] == rows or (sizes[0] % rows and not sizes[axis] % rows))


def _value(value: Any) -> object:
    if isinstance(value, Tensor):
        # The values, since the same operation with another mask puts other rows in the same positions.
        return tuple(value.shape), hash(value.detach().cpu().contiguous().numpy().tobytes())
    return tuple(value) if isinstance(value, (list, tuple)) else value


#: How far a gradient may deviate from its unit's weight, relative to it; 0 except for nondeterministic operations.
SLIPPAGE = {torch.float64: 1e-10, torch.float32: 1e-4}

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 5e-2


def unit_weights(batch: UnitRows) -> Tensor:
    """Return a signed power of two for each slot, different for any two of 16 consecutive slots."""
    generator = torch.Generator().manual_seed(batch.units)
    # Powers of two commute with rounding, so weighted gradients can be compared nearly to the last bit.
    values = torch.tensor([sign * 2.0**e for sign in (1, -1) for e in range(-4, 4)])
    blocks = [values[torch.randperm(16, generator=generator)] for _ in range(0, batch.units, 16)]
    return torch.cat(blocks)[: batch.units].to(batch.real.device)


def tolerance_of(tensors: Iterable[Tensor]) -> float:
    """Return the tolerance between two computations in the lowest of these precisions."""
    return max((TOLERANCE.get(t.dtype, LOW_PRECISION_TOLERANCE) for t in tensors), default=0.0)


def roundoff_of(tensors: Iterable[Tensor]) -> float:
    """Return the roundoff of the lowest of these precisions."""
    return max((torch.finfo(t.dtype).eps for t in tensors), default=0.0)


#: The factor by which the number of batches grows from one verification to the next, whatever their pattern.
_SELDOM = 8


class RowPatterns:
    """Name the row pattern of each batch, and select batches 8, 64, 512 and so on to verify whatever theirs is."""

    def __init__(self) -> None:
        self._batches, self._next = 0, _SELDOM

    def of(self, loss: Tensor, batch: UnitRows) -> int | None:
        """Return the `row_pattern` of a batch; None if it must be verified in any case."""
        pattern = row_pattern(loss, batch.rows)
        self._batches += not batch.one_unit
        if self._batches < self._next:
            return pattern
        self._next *= _SELDOM
        return None


class RecordingCheck:
    """Remember which calls were verified, and their batch layouts; with ``always``, verify every batch."""

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self._layouts: dict[object, Layout] = {}
        self._patterns = RowPatterns()
        self._pattern: int | None = None
        self.parameters_checked = False
        #: Parameters for which a batch has shown that the gradients equal autograd's.
        self.compared: set[str] = set()

    def wants(self, parameter: str) -> bool:
        """Return whether to compare the gradient of a parameter with autograd's."""
        return self.wants_parameters or parameter not in self.compared

    @property
    def wants_parameters(self) -> bool:
        """Return whether to compare the gradients of all parameters with autograd's."""
        return self.always or not self.parameters_checked

    def may_be_due(self, uses: Sequence[Use], loss: Tensor, batch: UnitRows) -> bool:
        """Return whether to keep the graph for a second pass; known before the first one."""
        self._pattern = self._patterns.of(loss, batch)
        if self.wants_parameters:
            return True
        if batch.one_unit or self._all_known(uses, batch.rows):
            return False
        # A call that the loss does not depend on gets no gradient, so it needs no check.
        reached = ancestors(loss)
        return any(not self._known(use, batch) and use.edge.node in reached for use in uses)

    def is_due(self, uses: Sequence[Use], grads: Sequence[Tensor | None], batch: UnitRows) -> bool:
        """Return whether this batch contains anything unverified."""
        if self.wants_parameters:
            return True
        if batch.one_unit:
            return False
        unknown = (g for use, g in zip(uses, grads, strict=True) if g is not None and not self._known(use, batch))
        # A gradient of zeros shows nothing; the call is verified once its gradient is not zero.
        return any(bool(g.any()) for g in unknown)

    def layout(self, use: Use, batch: UnitRows) -> Layout:
        """Return the verified layout of a use's batch axis."""
        return self._layouts.get(self._key(use, batch), "row_by_row")

    @contextmanager
    def watching(
        self, uses: Sequence[Use], grads: Sequence[Tensor | None], batch: UnitRows, *, arriving: bool = True
    ) -> Iterator[list[Layout]]:
        """Inspect the gradients of the weighted pass as they arrive; yield each use's layout, complete after the block.

        If they do not come ``arriving``, pass them to `look_at`.
        """
        attribution = self._attribution = _Attribution(uses, grads, batch)
        layouts: list[Layout] = ["row_by_row"] * len(uses)
        if batch.one_unit:
            yield layouts
            return
        handles = [attribution.watch(i) for i in range(len(uses))] if arriving else []
        try:
            yield layouts
        finally:
            for handle in handles:
                handle.remove()
        attribution.settle()
        wrong = [use for i, use in enumerate(uses) if grads[i] is not None and not attribution.fitting[i]]
        if wrong:
            use = wrong[-1]  # the first in the forward pass may only pass on what the last one did
            axis = "" if use.axis == batch.rows else f" of {use.axis}"
            order = " with its rows in order" if use.axis == batch.rows else f" of {batch.rows} rows"
            raise UnsupportedModelError(
                f"The gradient at {use.site.name} ({type(use.site.module).__name__}) cannot be assigned to units: its "
                f"first axis{axis} is not the batch{order} (put the batch first, or expand shared tensors to the "
                "batch), or the loss of one unit depends on another unit (in-batch negatives, batch statistics), which "
                "clipping cannot bound, or a hook changes gradients by more than a factor (privacy.engine=loop "
                "supports one that works row by row). Compute each row's loss from that row alone, or choose a mode "
                "for coupled losses, as for lit_dpret.modules.DualEncoder (docs/modes.md). "
                f"({len(wrong)} of {len(uses)} recorded calls are affected.)",
                trap="T10",
            )
        for i, (use, fits) in enumerate(zip(uses, attribution.fitting, strict=True)):
            if fits:
                layouts[i] = fits[0]
            # Both layouts fit where few units take part; then the next batch is checked again.
            if len(fits) == 1 and attribution.contributing[i] > 1 and self._pattern is not None:
                self._layouts[self._key(use, batch)] = fits[0]

    def look_at(self, twins: Sequence[Tensor | None]) -> None:
        """Inspect the gradients of the weighted pass at all uses, within `watching`."""
        for i, twin in enumerate(twins):
            self._attribution.inspect(i, twin)

    def comparison(self, contributions: Mapping[str, Sequence[Contribution]], batch: UnitRows) -> Comparison:
        return Comparison(self, contributions, batch)

    def _all_known(self, uses: Sequence[Use], rows: int) -> bool:
        """Return whether every use is `_known`; asked in every batch, and inlined for that reason."""
        pattern, known = self._pattern, self._layouts
        if pattern is None:
            return False
        return all((u.site.name, u.call, (u.shape[0] if u.shape else 0) == rows, pattern) in known for u in uses)

    def _known(self, use: Use, batch: UnitRows) -> bool:
        return self._pattern is not None and self._key(use, batch) in self._layouts

    def _key(self, use: Use, batch: UnitRows) -> object:
        """Return what identifies a call: its place in the forward pass, its batch axis, and how rows were picked."""
        return use.site.name, use.call, use.axis == batch.rows, self._pattern


class Comparison:
    """Compare the engine's weighted sum with autograd's, parameter by parameter.

    A batch with a broken unit decides nothing, since the unit breaks autograd's sum. Neither does a batch whose terms
    cancel so far that rounding explains the difference. In both cases the next batch is checked instead. Once a batch
    has shown that the two sums are equal, a later difference is due to rounding, as in a row whose gradient is all
    rounding. The bound does not depend on this check: what is added is what was clipped.
    """

    def __init__(
        self, check: RecordingCheck, contributions: Mapping[str, Sequence[Contribution]], batch: UnitRows
    ) -> None:
        self._check, self._contributions, self._batch = check, contributions, batch
        self._coefficients = (unit_weights(batch) * batch.real)[batch.unit_of_row]
        self._rows = None if batch.fixed else not_zero(self._coefficients[None])[0]
        self._seen: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._norms: list[Tensor] = []
        self._gaps: list[Tensor] = []

    def add(self, name: str, reference: Tensor) -> None:
        """Compare the sum for one parameter with ``reference``, autograd's."""
        shape, dtype = reference.shape, accumulator_dtype(reference)
        uses = self._contributions.get(name, ())
        found = add_weighted(uses, self._coefficients, None, shape, dtype, rows=self._rows, fixed=self._batch.fixed)
        # Read together in `settle`: each read waits for the device.
        self._norms.append(torch.linalg.vector_norm(reference, dtype=torch.float64))
        self._gaps.append(found.sub_(reference).norm().double())
        self._seen[name] = shape, dtype

    def settle(self, tolerance: float, roundoff: float) -> None:
        """Refuse a parameter whose sums differ by more than rounding explains."""
        norms = torch.stack(self._norms).tolist() if self._norms else []
        whole = math.hypot(*norms)
        if not math.isfinite(whole):
            return
        decided = True
        gaps = torch.stack(self._gaps).tolist() if self._gaps else []
        for (name, (shape, dtype)), norm, gap in zip(self._seen.items(), norms, gaps, strict=True):
            # `not <=`, so that NaN is refused; a share of the whole, for gradients that are all rounding.
            if not gap <= tolerance * (norm + 1e-3 * whole):
                uses = self._contributions.get(name, ())
                known = name in self._check.compared
                if known or gap <= roundoff * float(rounding_of(uses, self._coefficients, shape, dtype)):
                    decided = False
                    continue
                raise UnsupportedModelError(
                    f"Parameter {name}: its recorded calls give another gradient than autograd. A hook or an unusual "
                    "forward pass changes it, or it is all rounding error, as when numbers of 1e4 or more saturate an "
                    "attention. Remove the hook, freeze the parameter, scale the numbers in the rows to about 1, or "
                    "choose privacy.engine=loop (with privacy=logit_dp privacy.norms=brute_force).",
                    trap="T13",
                )
            if norm:
                self._check.compared.add(name)
        self._check.parameters_checked |= decided


def refuse_lost_gradients(uses: Sequence[Use], grads: Sequence[Tensor | None], loss: Tensor) -> None:
    """Refuse a call that the loss depends on if no gradient arrived where it was expected."""
    silent = [use for use, g in zip(uses, grads, strict=True) if g is None and use.function is None]
    reached = ancestors(loss) if silent else set()
    for use in silent:
        if any(get_gradient_edge(alias).node in reached for alias in use.aliases.values()):
            raise UnsupportedModelError(
                f"The output of {use.site.name} ({type(use.site.module).__name__}) was changed in place in a way "
                "that hides its gradient. Use the out-of-place operation."
            )


class _Attribution:
    """Find the layouts that explain how the gradient at each use follows the units' weights."""

    def __init__(self, uses: Sequence[Use], grads: Sequence[Tensor | None], batch: UnitRows) -> None:
        self.uses, self.grads, self.batch = uses, grads, batch
        self.weights = unit_weights(batch)
        self.tolerance = max((SLIPPAGE.get(g.dtype, 2e-2) for g in grads if g is not None), default=0.0)
        self.sizes = [None if g is None else _row_norms(g) for g in grads]
        maxima = [s.nan_to_num(0, 0, 0).max().double() for s in self.sizes if s is not None]
        self.largest = torch.stack(maxima).max() if maxima else 0.0
        self.verdicts: list[tuple[int, Layout, Tensor, Tensor]] = []
        self.fitting: list[list[Layout]] = [[] for _ in uses]
        self.contributing = [0] * len(uses)

    def watch(self, i: int) -> RemovableHandle:
        """Inspect every gradient that arrives at use ``i`` from now on."""
        use = self.uses[i]
        if use.site.kind == "scale":  # a leaf: its node only collects, and is not run
            leaf: Any = use.aliases["weight"]
            handle: RemovableHandle = leaf.register_hook(lambda twin: self.inspect(i, twin))
            return handle
        return use.edge.node.register_prehook(lambda arrived: self.inspect(i, arrived[use.edge.output_nr]))

    def inspect(self, i: int, twin: Tensor | None) -> None:
        g, size = self.grads[i], self.sizes[i]
        if twin is None or g is None or size is None:
            return
        finite = size.isfinite()
        for layout, units in self._units_of(self.uses[i]).items():
            weights = self.weights[units]
            own = weights.abs() * size
            # In addition to the row's own size: what rounding of the largest row and gradient may leave in it.
            allowed = own + 1e-3 * torch.where(finite, own, 0).amax() + 1e-6 * self.largest
            rows = g.reshape(len(g), -1)  # the losses themselves have one axis
            error = _row_norms(twin.reshape(rows.shape) - rows * weights.to(g.dtype)[:, None])
            fits = ((error <= self.tolerance * allowed) | ~finite).all()
            taking_part = torch.zeros(self.batch.units, dtype=torch.int32, device=units.device)
            taking_part.index_add_(0, units, ((size > 0) & finite).int())
            self.verdicts.append((i, layout, fits, (taking_part > 0).sum()))

    def settle(self) -> None:
        """Read the verdicts: the layouts that fit each use, and how many units took part in it."""
        if not self.verdicts:
            return
        found = torch.stack([torch.stack([fits.long(), units]) for _, _, fits, units in self.verdicts]).tolist()
        for (i, layout, _, _), (fits, units) in zip(self.verdicts, found, strict=True):
            if fits:
                self.fitting[i].append(layout)
                self.contributing[i] = units

    def _units_of(self, use: Use) -> dict[Layout, Tensor]:
        folds = use.axis // self.batch.rows
        units: dict[Layout, Tensor] = {"row_by_row": self.batch.unit_of_row.repeat_interleave(folds)}
        if folds > 1:
            units["turn_by_turn"] = self.batch.unit_of_row.repeat(folds)
        return units


def _row_norms(tensor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(
        tensor.reshape(len(tensor), -1), dim=1, dtype=torch.promote_types(tensor.dtype, torch.float32)
    )
    return norms
