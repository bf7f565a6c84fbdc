"""What hooks leave behind between two batches of a private run: nothing that a later loss could read.

A forward pass of private rows is watched while it runs (`StateWatch`). Between two of them, hooks of the module and of
callbacks have the batch and its losses at hand. What they write into a weight, a buffer or a tensor of the module
reaches later steps without noise, and without a row of its own in them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.modules.coupling_check import Looks
from lit_dpret.modules.kept_state import data_of, tensors_of
from lit_dpret.privacy.checksums import checksums


class HookWatch:
    """Compares what a module holds at the end of a batch with what it holds when the next one comes (`Looks`).

    Guarantees:
        - Refused by name is a parameter, a buffer, or an attribute of the module or of a part with tensors in it, that
          was written in between, added or removed: unless a part of its name is declared public.
        - Where each rank holds parts of the parameters, the parameters are not looked at.

    Numbers that are no tensors are not compared, since a schedule sets them too, nor are the states of torchmetrics.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from the first batch again."""
        self._looks = Looks()
        self._seen: dict[str, int] | None = None

    def note(self, module: Any, coin: int) -> None:
        """Note what ``module`` holds at the end of a batch, where the next one is looked at."""
        self._seen = _values(module) if self._looks.due(coin) else None

    def compare(self, module: Any, public: Collection[str]) -> None:
        """Compare with what was noted, before a batch does anything.

        Args:
            module: The `PrivateModule`.
            public: Names that no private row is behind.

        Raises:
            UnsupportedModelError: Something was written in between.
        """
        seen, self._seen = self._seen, None
        if seen is None:
            return
        now = _values(module)
        for name in sorted(seen.keys() | now.keys()):
            if seen.get(name) != now.get(name) and not {name, *name.split(".")} & {*public}:
                raise UnsupportedModelError(
                    f"{name} of {type(module).__name__} changed between two batches, by a hook of the module or of a "
                    "callback, or before training_step of PrivateModule began: nothing says that no private row is "
                    "in it, and no noise covers it. Remove the write. If no private row is behind it but through "
                    "trained weights, as in the average of a teacher, list its name in public_metrics of the module or "
                    "callback.",
                    trap="T11",
                )


def _values(module: Any) -> dict[str, int]:
    """A checksum by name of everything that is watched."""
    held = dict(_held(module))
    return dict(zip(held, checksums(held.values()), strict=True))


def _held(module: Any) -> Iterator[tuple[str, Tensor]]:
    if not module.in_shards:
        yield from module.named_parameters()
    yield from module.named_buffers()
    for prefix, part in module.named_modules():
        if isinstance(part, Metric):  # read by whoever logs it, which is looked at, and by no loss
            continue
        for name, value in data_of(part).items():
            for place, tensor in enumerate(tensors_of(value)):
                yield ".".join(filter(None, (prefix, name, str(place)))), tensor
