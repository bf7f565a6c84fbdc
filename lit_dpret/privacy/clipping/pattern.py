"""How the rows of a batch were picked and put back, read off the graph of the losses.

A recorder trusts that the first axis of what it sees runs over the rows in order, once an audit has
found it so. Operations that pick rows by values (``h[mask]``, sorting by length, slices of a ragged
batch) can keep that axis equally long and change whose rows stand there. So they are part of what an
audit is remembered by: a batch in which they pick otherwise is a batch not seen before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from lit_dpret.errors import UnsupportedModelError

_PICKS = re.compile(
    r"(Index|Gather|Scatter|Masked(Select|Scatter)|Take|Sort|Topk|Slice|Select|Split|Unbind|PackPadded|AsStrided|Roll)"
)
_SAID = ("start", "end", "step", "index", "mask", "split_size", "split_sizes", "batch_sizes", "shifts")


def ancestors(loss: Tensor) -> set[Node]:
    """All nodes of the graph below ``loss``."""
    return set(_walk(loss))


def row_pattern(loss: Tensor, rows: int) -> tuple[object, ...]:
    """What picked rows on the way to ``loss``, in a fixed order; equal for two batches that were treated alike.

    Empty for a model that never picks rows. Operations on another axis than the batch's are left out.

    Raises:
        UnsupportedModelError: A part of the graph is hidden.
    """
    found: list[object] = []
    for node in _walk(loss):
        name = node.name()
        _refuse_hidden(name)
        if _PICKS.match(name):
            found += _picked(node, name, rows)
    return tuple(found)


def refuse_hidden_calls(loss: Tensor) -> None:
    """Refuse a graph of which a reentrant checkpoint hides a part: its calls run without gradients.

    Raises:
        UnsupportedModelError: Saying what to use instead.
    """
    for node in _walk(loss):
        _refuse_hidden(node.name())


def _refuse_hidden(name: str) -> None:
    if name.startswith("CheckpointFunction"):
        raise UnsupportedModelError(
            "Reentrant activation checkpointing hides calls from the engine, and what is trained in them would get no "
            "gradient. Use gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}).",
            trap="T13",
        )


def _walk(loss: Tensor) -> Iterator[Node]:
    seen: set[Node] = set()
    queue = [] if loss.grad_fn is None else [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            yield node
            queue.extend(parent for parent, _ in node.next_functions if parent is not None)


def _picked(node: Node, name: str, rows: int) -> list[object]:
    saved: Any = node
    sizes = getattr(saved, "_saved_self_sym_sizes", None)
    indices = getattr(saved, "_saved_indices", None)
    if isinstance(indices, (list, tuple)):  # h[...]: one index for each axis, None where it takes all
        axes = [axis for axis, index in enumerate(indices) if index is not None]
        wanted = [indices[axis] for axis in axes if _runs_over_rows(axis, sizes, rows)]
        return [name, *map(_value, wanted)] if wanted else []
    axis = getattr(saved, "_saved_dim", None)
    if isinstance(axis, int):
        axis = axis - 2**64 if axis >= 2**63 else axis
        if axis < 0:
            axis = None if sizes is None else axis + len(sizes)
        if axis is not None and not _runs_over_rows(axis, sizes, rows):
            return []
    values = [getattr(saved, f"_saved_{said}", None) for said in _SAID]
    return [name, *(_value(value) for value in (*values, indices))]


def _runs_over_rows(axis: int, sizes: Any, rows: int) -> bool:
    """The first axis does, and one that is as long as the batch; another one where the first cannot."""
    if axis == 0 or sizes is None:
        return axis == 0
    return bool(sizes[axis] == rows or (sizes[0] % rows and not sizes[axis] % rows))


def _value(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), hash(value.detach().cpu().contiguous().numpy().tobytes())
    return tuple(value) if isinstance(value, (list, tuple)) else value
