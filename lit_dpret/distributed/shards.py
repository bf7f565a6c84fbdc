"""Sums over several ranks that each keep a part: for strategies that shard every parameter.

A rank needs only its own shards of a clipped sum. They are reduced in float32 or wider, once, and every coordinate goes
to exactly one rank, which adds its noise. Noise belongs to coordinates, not to ranks, so the code that adds it asks
`place_of` which coordinates of the whole parameter this process holds. A plain tensor is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lit_dpret.distributed.ranks import BUCKET, Ranks
from lit_dpret.errors import UnsupportedModelError


@dataclass(frozen=True)
class Shard:
    """Coordinates ``start`` to ``start + count`` of a parameter, by flat index."""

    name: str
    start: int
    count: int


class ShardLayout:
    """The shards of each parameter on each rank.

    Guarantees:
        - Every coordinate of every parameter belongs to exactly one rank, so noise that each rank adds to its own
          shards covers everything, and nothing twice.
        - The sum of a coordinate is formed in float32 or wider.

    Args:
        layout: The shards of each rank, by rank; at most one per parameter and rank.
        sizes: The number of coordinates of each parameter.
        ranks: The ranks that take part.
    """

    def __init__(self, layout: Sequence[Sequence[Shard]], sizes: Mapping[str, int], ranks: Ranks) -> None:
        self.ranks, self.sizes = ranks, dict(sizes)
        self._layout = [[shard for shard in shards if shard.count] for shards in layout]
        self._refuse_holes(sizes)
        self.own = {shard.name: shard for shard in self._layout[ranks.rank]}
        self.starts = {name: shard.start for name, shard in self.own.items()}

    @classmethod
    def agree(cls, own: Sequence[Shard], sizes: Mapping[str, int], ranks: Ranks) -> ShardLayout:
        """Exchange the shards of this rank with the others; a collective call."""
        return cls(ranks.gather(list(own)), sizes, ranks)

    @property
    def length(self) -> int:
        """The number of coordinates that this rank keeps."""
        return sum(shard.count for shard in self.own.values())

    def named(self, own: Tensor) -> dict[str, Tensor]:
        """Return the shards in the flat vector of this rank, ``(length,)``, by name."""
        begins = accumulate((shard.count for shard in self.own.values()), initial=0)
        return {name: own[at : at + shard.count] for at, (name, shard) in zip(begins, self.own.items(), strict=False)}

    def add_up(self, sums: dict[str, Tensor], *, into: Tensor | None = None, bucket: int = BUCKET) -> dict[str, Tensor]:
        """Sum whole tensors over all ranks; return this rank's shards of the totals, flat, by name.

        There is one message per ``bucket`` of numbers, and the total of each coordinate is sent to its rank alone.
        Names, shapes and dtypes must be the same on every rank. If ``into``, ``(length,)``, is given, totals are added
        to it, and a rank may lack a tensor, which counts as zeros. ``sums`` is emptied: a tensor is freed as soon as
        it is sent.
        """
        adds, own = into is not None, into
        if own is None:
            wide = reduce(torch.promote_types, (each.dtype for each in sums.values()), torch.float32)
            own = torch.empty(self.length, dtype=wide, device=next(iter(sums.values())).device)
        world = self.ranks.world_size
        ends: dict[str, int] = {}  # the offset after which no rank sends any of a tensor
        for shards in self._layout:
            for end, shard in zip(accumulate(shard.count for shard in shards), shards, strict=True):
                ends[shard.name] = max(end, ends.get(shard.name, 0))
        longest = max(sum(shard.count for shard in shards) for shards in self._layout)
        width = max(1, bucket // world)
        for first in range(0, longest, width):
            count = min(width, longest - first)
            sent = torch.zeros(world, count, dtype=own.dtype, device=own.device)
            for row, shards in zip(sent, self._layout, strict=True):
                for place, name, part in _between(shards, first, first + count):
                    if not adds or name in sums:
                        row[place : place + part.stop - part.start] = (
                            sums[name].detach().reshape(-1)[part].to(own.dtype)
                        )
            for name in [name for name in sums if ends.get(name, 0) <= first + count]:
                del sums[name]
            kept = own[first : first + count]
            total = self.ranks.sum_rows(sent)[: len(kept)]
            _ = kept.add_(total) if adds else kept.copy_(total)
        return self.named(own)

    def collect(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the ranks' flat shards of one dtype; return whole flat tensors, on the CPU, on rank 0 alone."""
        kinds = set().union(*self.ranks.gather({tensor.dtype for tensor in own.values()}))
        dtype = next(iter(kinds)) if len(kinds) == 1 else torch.float32
        row = torch.cat([torch.empty(0, dtype=dtype), *(own[name].detach().cpu().to(dtype) for name in self.own)])
        longest = max(sum(shard.count for shard in shards) for shards in self._layout)
        width = max(1, BUCKET // self.ranks.world_size)
        whole = (
            {name: torch.empty(size, dtype=dtype) for name, size in self.sizes.items()} if self.ranks.is_first else {}
        )
        for first in range(0, longest, width):
            part = row[first : first + width]
            count = min(width, longest - first)
            gathered = self.ranks.gather_rows(torch.cat([part, part.new_zeros(count - len(part))]))
            for shards, line in zip(self._layout, [] if gathered is None else gathered, strict=False):
                for place, name, where in _between(shards, first, first + count):
                    whole[name][where] = line[place : place + where.stop - where.start]
        return whole

    def take(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: whole[name].reshape(-1)[shard.start : shard.start + shard.count] for name, shard in self.own.items()
        }

    def _refuse_holes(self, sizes: Mapping[str, int]) -> None:
        found: dict[str, list[Shard]] = {name: [] for name in sizes}
        for rank, shards in enumerate(self._layout):
            for shard in shards:
                if shard.name not in found:
                    raise UnsupportedModelError(f"Rank {rank} has a shard of {shard.name}, which is not trained.")
                found[shard.name].append(shard)
        for name, parts in found.items():
            end = 0
            for shard in sorted(parts, key=lambda shard: shard.start):
                if shard.start != end:
                    break
                end += shard.count
            if end != sizes[name] or sum(shard.count for shard in parts) != end:
                raise UnsupportedModelError(
                    f"The ranks do not have each of the {sizes[name]} coordinates of {name} exactly once, so noise "
                    "would be missing or added twice. Choose another strategy; trainer=ddp shards no parameter."
                )


def _between(shards: Sequence[Shard], first: int, last: int) -> Iterator[tuple[int, str, slice]]:
    """Yield the overlaps of joined shards with flat offsets ``first`` to ``last``: offset from first, name, slice."""
    for end, shard in zip(accumulate(shard.count for shard in shards), shards, strict=True):
        begin = end - shard.count
        low, high = max(begin, first), min(end, last)
        if low < high:
            yield low - first, shard.name, slice(shard.start + low - begin, shard.start + high - begin)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process may hold only a part of a tensor."""
    return hasattr(tensor, "device_mesh")


def place_of(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the part of a tensor that this process holds, and its flat offset in the whole one.

    Example:
        >>> import torch
        >>> local, start = place_of(torch.ones(3))
        >>> local.shape, start
        (torch.Size([3]), 0)
    """
    if not is_sharded(tensor):
        return tensor, 0
    cut: Any = tensor
    [placement] = cut.placements if len(cut.placements) == 1 else [None]
    if placement is None or not placement.is_shard(0):
        raise UnsupportedModelError(
            f"A tensor is sharded as {cut.placements}, not along its first axis alone, so it cannot be noised."
        )
    rows = -(-cut.shape[0] // cut.device_mesh.size())
    first = min(rows * cut.device_mesh.get_local_rank(), cut.shape[0])
    local: Tensor = cut.to_local()
    return local, first * (cut.numel() // max(cut.shape[0], 1))


def like(whole: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as this process's part of a tensor that is sharded like ``whole``."""
    if not is_sharded(whole):
        return local
    from torch.distributed.tensor import DTensor  # not needed by runs on one process

    cut: Any = whole
    return DTensor.from_local(
        local, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )
