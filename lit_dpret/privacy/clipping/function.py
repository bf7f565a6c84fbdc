"""Row-by-row gradients, by torch.func, of one call of a module that has no rule.

The module is run again under ``vmap`` on each row of its input alone. Its parameters and buffers are arguments of that
run, so the module itself does not change. The output for a row alone is compared with its output in the batch, in every
batch and also next to a broken unit: so one row's gradient cannot depend on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping.rules import WAYS_OUT

#: How much a row's output may differ between the row alone and the batch, relative to it: the rounding of two kernels.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
LOW_PRECISION_TOLERANCE = 5e-2


class FunctionCall:
    """One call of a module, with its arguments, stored for re-execution."""

    def __init__(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name, self.module, self.forward = name, module, forward
        leaves, self._structure = tree_flatten((args, kwargs))
        # Detached: the call is run again with its own gradients, and the first graph may be freed.
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES}
        self._outputs: list[Tensor | None] = []

    def returned(self, leaves: list[Any]) -> None:
        """Store the output of the call; refuse one through which a gradient could flow unwatched."""
        constants = (type(None), bool, int, float, str)
        strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *constants))]
        if strange or not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            what = f"a {type(strange[0]).__name__}, in which" if strange else "no tensor with a gradient, so"
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) returns {what} gradients cannot be followed. {WAYS_OUT}"
            )
        self._outputs = [leaf.detach() if isinstance(leaf, Tensor) else None for leaf in leaves]

    def inputs_changed(self) -> bool:
        return any(
            isinstance(leaf, Tensor) and leaf._version != version
            for leaf, version in zip(self._leaves, self._versions, strict=True)
        )

    def gradients(self, g: Tensor, output: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients, ``(rows, *shape)``, by own parameter name; ``g``, ``(rows, ...)``, is that of an output."""
        mapped = [isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == len(g) for leaf in self._leaves]
        batched = [leaf for leaf, has_rows in zip(self._leaves, mapped, strict=True) if has_rows]
        # Copies: a module that updates a buffer would update it once for every row.
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}

        def one_row(g_row: Tensor, *rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            given = iter(rows)
            # A batch of one row, because the module expects a batch.
            leaves = [next(given)[None] if m else leaf for leaf, m in zip(self._leaves, mapped, strict=True)]

            def run(values: dict[str, Tensor]) -> Tensor:
                args, kwargs = tree_unflatten(leaves, self._structure)
                with swapped(self.module, {**values, **buffers}):
                    found = tree_flatten(self.forward(*args, **kwargs))[0][output]
                if not isinstance(found, Tensor) or found.shape != (1, *g_row.shape):
                    raise RuntimeError(f"one row alone gives an output of shape {tuple(getattr(found, 'shape', ()))}")
                return found

            pulled = torch.func.vjp(run, values)
            return pulled[0][0], pulled[1](g_row[None])[0]

        values = {name: p.detach() for name, p in parameters.items()}
        try:
            # Under the autocast of the first run, or the two would be different functions.
            with torch.enable_grad(), self._as_called(g.device.type):
                alone, found = torch.func.vmap(one_row, randomness="error")(g, *batched)
        # Not a defect of the model: the caller takes a smaller batch.
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) cannot be run row by row under torch.func.vmap: "
                f"{reason[:300]}. {WAYS_OUT}"
            ) from error
        self._refuse_other_output(alone.detach(), output)
        gradients: dict[str, Tensor] = found
        return gradients

    def _refuse_other_output(self, alone: Tensor, output: int) -> None:
        """Refuse rows whose output differs between row and batch; a broken row must be broken in both."""
        whole = self._outputs[output]
        if whole is None:
            raise RuntimeError(f"No output {output} was recorded for {self.name}.")
        low, _ = self._autocast.get(whole.device.type, (False, None))
        tolerance = LOW_PRECISION_TOLERANCE if low else TOLERANCE.get(whole.dtype, LOW_PRECISION_TOLERANCE)
        alone, whole = (found.reshape(len(found), -1).double() for found in (alone, whole))
        sizes = torch.linalg.vector_norm(alone, dim=1)
        finite = sizes.isfinite()
        largest = torch.where(finite, sizes, 0).amax()
        gap = torch.linalg.vector_norm(alone - whole, dim=1)
        agree = gap <= tolerance * (sizes + 1e-3 * largest)
        # A row that is broken in both is ignored, and its unit is dropped anyway.
        both_broken = ~finite & ~torch.linalg.vector_norm(whole, dim=1).isfinite()
        if not bool(torch.where(finite, agree, both_broken).all()):
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) gives another result for a row alone than in the batch: "
                "it mixes rows (clipping cannot bound that), has inputs other than its arguments, or is not "
                f"deterministic. {WAYS_OUT}"
            )

    @contextmanager
    def _as_called(self, device: str) -> Iterator[None]:
        if device not in self._autocast:
            yield
            return
        enabled, dtype = self._autocast[device]
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield


_DEVICES = ("cpu", "cuda")


@contextmanager
def swapped(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Temporarily replace the tensors of a module and its submodules."""
    places = []
    for name in values:
        owner, _, local = name.rpartition(".")
        layer = module.get_submodule(owner)
        store: dict[str, Any] = layer._parameters if local in layer._parameters else layer._buffers
        places.append((store, local, store[local]))
    try:
        for (store, local, _), value in zip(places, values.values(), strict=True):
            store[local] = value
        yield
    finally:
        for store, local, own in places:
            store[local] = own
