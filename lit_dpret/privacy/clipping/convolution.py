r"""A convolution is a linear layer on the patches of its input; the patches are made when they are needed.

Patches take kernel-size times the memory of the input, so what is kept is the input. The norm and
the weighted sum are both computed from patches in fp32, for a few units at a time: a convolution
kernel of cuDNN may round its products to TF32, and then the sum would not have the norm that it was
clipped by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.privacy.clipping.units import RowGroup

#: Elements of patches at a time; small on a CPU, where memory is the bound.
CHUNK = {"cpu": 1 << 22}
CHUNK_ELSEWHERE = 1 << 25


def chunk_of(device: torch.device) -> int:
    """How many elements a temporary may have."""
    return CHUNK.get(device.type, CHUNK_ELSEWHERE)


@dataclass(frozen=True)
class Geometry:
    """How a convolution slides: its settings by the names of nn.Conv, the padding as ``F.pad`` takes it."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    padding_mode: str
    groups: int

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Geometry:
        """Read the settings of a module, with ``padding="same"`` resolved."""
        return cls(
            kernel=tuple(module.kernel_size),
            stride=tuple(module.stride),
            dilation=tuple(module.dilation),
            padding=tuple(module._reversed_padding_repeated_twice),
            padding_mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
            groups=module.groups,
        )

    def patches(self, x: Tensor) -> Tensor:
        """(rows, channels, *space) as (rows, places, groups, channels of a group x kernel)."""
        x = F.pad(x, self.padding, self.padding_mode)
        for axis, (kernel, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        x = x.reshape(len(x), self.groups, -1, *x.shape[2:])
        last = 3 + len(self.kernel)
        x = x.permute(0, *range(3, last), 1, 2, *range(last, x.dim()))
        return x.flatten(last - 1).flatten(1, last - 3)


@dataclass(frozen=True)
class Convolution:
    """``x`` is (rows, folds, channels, *space), ``g`` is (rows, folds x places, out).

    The gradient is (out, channels of a group, *kernel). ``inputs`` and ``outputs`` of some units are
    (units x groups, positions, ...): a group of channels is a matrix of its own.
    """

    x: Tensor
    g: Tensor
    geometry: Geometry

    @property
    def groups(self) -> int:
        """How many matrices a unit's gradient consists of."""
        return self.geometry.groups

    def inputs(self, group: RowGroup, dtype: torch.dtype) -> Tensor:
        """The patches of a group's units."""
        x = group.join(self.x).to(dtype)
        return self._by_group(self.geometry.patches(x.flatten(0, 1)).reshape(len(x), -1, self.groups, self._width))

    def outputs(self, group: RowGroup, dtype: torch.dtype) -> Tensor:
        """The output gradients of a group's units."""
        g = group.join(self.g).to(dtype)
        return self._by_group(g.reshape(*g.shape[:2], self.groups, -1))

    def add_to(self, total: Tensor, coefficients: Tensor, rows: Tensor | None) -> None:
        """Add the gradients of ``rows`` to ``total``, each times its coefficient; None takes all rows."""
        rows = torch.arange(len(coefficients), device=total.device) if rows is None else rows
        each = self.g.shape[1] * self.groups * self._width
        matrices = total.view(self.groups, -1, self._width)
        for part in torch.split(rows, max(1, chunk_of(total.device) // max(1, each))):  # type: ignore[no-untyped-call]
            a = self.geometry.patches(self.x[part].to(total.dtype).flatten(0, 1)).flatten(0, 1)
            g = self.g[part].to(total.dtype) * coefficients[part].to(total.dtype)[:, None, None]
            g = g.reshape(len(a), self.groups, -1)
            matrices.baddbmm_(g.permute(1, 2, 0), a.transpose(0, 1))

    @property
    def _width(self) -> int:
        return self.x.shape[2] // self.groups * int(torch.Size(self.geometry.kernel).numel())

    def _by_group(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).flatten(0, 1)
