"""Clip with one block of the model gathered at a time; sums are reduced and sharded block by block.

Book-keeping clipping needs weights in the forward and the backward pass alone: norms and weighted sums are computed
from inputs and output gradients. So a block is gathered, replacing the one before, when one of its modules is about to
run or the backward pass needs one of its weights. The weighted sum of a block is reduced over the ranks, each of which
keeps its shard, before that of the next block is computed.

Ranks do not make the same passes: one may have no rows, check its batch, or restart in smaller batches because memory
ran out. So before each message all ranks state what they need, and serve each other; a rank with nothing to do serves
until all are done. What a rank added cannot be taken back by that rank alone: if it restarts, all ranks do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook

from lit_dpret.distributed.ranks import BUCKET, Ranks

if TYPE_CHECKING:
    from lit_dpret.distributed.fsdp import ShardedParameters

_IDLE, _AGAIN = -1, -2


class BeganAgain(BaseException):
    """Another rank restarted the logical step, so this one must too; its sums are already discarded.

    No ``except Exception``, of a check or of the user, may continue after it: the total would lack this rank's units.
    """


class BlockByBlock:
    """Gives a clipping engine what it needs of sharded parameters: weights for its passes, and a place for its sums.

    Guarantees:
        - Besides its shards, a rank holds the weights of one block and those outside all blocks, or the weighted sum
          of one of them and a message; never all weights or the whole sum.
        - What a rank added since a step began is in the total once, or all ranks restarted.

    Attributes:
        parts: The names of trained parameters whose sums are reduced together.
    """

    def __init__(self, shards: ShardedParameters, ranks: Ranks) -> None:
        self._shards, self._ranks, self._blocks = shards, ranks, shards.blocks
        self._rest = len(self._blocks) - 1
        trained = [tuple(n for n, cut in block.cuts.items() if cut.cut.requires_grad) for block in self._blocks]
        self._trained = [name for name in shards.cuts if shards.cuts[name].cut.requires_grad]
        self.parts = [names for names in trained if names]
        self._wide = torch.float32
        for name in self._trained:
            self._wide = torch.promote_types(self._wide, shards.cuts[name].memory.dtype)
        self._block_of = {
            id(part): index for index, block in enumerate(self._blocks) for part in block.modules
            if index < self._rest or part._parameters
        }  # fmt: skip
        self._memory: dict[int, int] = {}  # by memory address, the block stored there now
        self._sums: dict[int, Tensor] = {}  # for each part that any rank added, this rank's shards in one tensor
        self._offered: dict[str, Tensor] = {}
        self._added = self._tells_again = self._settled = False
        self._has_to_begin = False  # until `forget`: a user's handler may have continued after `BeganAgain`
        largest = max(sum(shards.cuts[n].memory.numel() for n in names) for names in self.parts)
        # A quarter of the largest block, so that a message needs little additional memory.
        self._bucket = min(BUCKET, max(largest // 4, 1))
        self._layouts = [shards.layout(names) for names in self.parts]
        self._device = shards.cuts[self._trained[0]].memory.device

    # -- weights -----------------------------------------------------------------------------

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Give the module its plain parameters, without memory, as the same objects that `passes` gives it."""
        self._shards.place(whole=True)
        try:
            yield
        finally:
            self._shards.scatter()

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Let every rank make its own forward and backward passes; all leave together. A collective call."""
        self._settled = False
        with self.placed():
            handle = register_module_forward_pre_hook(self._before_forward)
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    if self._blocks[self._rest].cuts:  # the module itself may read them outside any module call
                        self._need(self._rest)
                    yield
                while not self._settled:
                    self.settle()
            finally:
                handle.remove()
                self.free()

    def free(self) -> None:
        """Free all gathered weights."""
        for block in self._blocks:
            block.free()
        self._memory.clear()

    def _need(self, index: int) -> None:
        block = self._blocks[index]
        if block.gathered:
            return
        if index < self._rest:
            for other in self._blocks[: self._rest]:
                if other.gathered:
                    other.free()
            self._memory = {place: at for place, at in self._memory.items() if at == self._rest}
        try:
            block.allocate()
            self._ask(index)
        except BaseException:
            block.free()
            raise
        for cut in block.cuts.values():
            self._memory[cut.memory.untyped_storage().data_ptr()] = index

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if (index := self._block_of.get(id(module))) is not None:
            self._need(index)

    def _pack(self, tensor: Tensor) -> Any:
        # Detached: otherwise an operation that saves its own output would keep itself, and all below it, alive.
        tensor = tensor.detach()
        if tensor.layout is torch.strided:
            index = self._memory.get(tensor.untyped_storage().data_ptr())
            if index is not None:
                return index, tensor
        return tensor, tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        tensor: Tensor
        if isinstance(packed[0], int):
            index, tensor = packed
            self._need(index)
            return tensor
        tensor, version = packed
        if tensor._version != version:  # autograd does not check this for packed tensors
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected {version}."
            )
        return tensor

    # -- sums --------------------------------------------------------------------------------

    def add(self, part: int, sums: dict[str, Tensor]) -> None:
        """Add this rank's sums of a part, which are emptied, to those of all ranks that add it at the same time."""
        self._added = True
        self._offered = sums
        try:
            self._ask(len(self._blocks) + part)
        finally:
            self._offered = {}

    def take(self) -> dict[str, Tensor]:
        """Return this rank's shards of the sums, zeros included, and begin the next step."""
        if self._has_to_begin:
            raise BeganAgain
        own = {
            name: flat for part, sums in self._sums.items() for name, flat in self._layouts[part].named(sums).items()
        }
        self._sums, self._added = {}, False
        return self._shards.as_shards(own, self._trained, self._wide)

    def forget(self) -> None:
        """Discard what this rank added in this step: if it added anything, all ranks restart."""
        self._tells_again = self._tells_again or self._added
        self._added = self._has_to_begin = False

    # -- messages ----------------------------------------------------------------------------

    def settle(self) -> bool:
        """Serve the others until no rank needs anything; return whether another rank restarted before."""
        try:
            while any(word != _IDLE for word in self._ask(_IDLE)):
                pass
        except BeganAgain:
            return True
        self._settled = True
        return False

    def _ask(self, wanted: int) -> list[int]:
        if self._has_to_begin:
            raise BeganAgain
        # Find out whether there is memory for a message before the others wait for this rank, not after.
        most = self._bucket + max(
            (each.length for n, each in enumerate(self._layouts) if n not in self._sums), default=0
        )
        room = torch.empty(most, dtype=self._wide, device=self._device)
        del room
        if self._tells_again:
            self._tells_again = False
            self._hear(_AGAIN)
        return self._hear(wanted)

    def _hear(self, wanted: int) -> list[int]:
        words = self._ranks.words(wanted)
        if _AGAIN in words:
            self._sums, self._added = {}, False
            if wanted != _AGAIN:
                self._has_to_begin = True
                raise BeganAgain
            return words
        for each in sorted({*words} - {_IDLE}):
            self._serve(each, [rank for rank, word in enumerate(words) if word == each])
        return words

    def _serve(self, asked: int, ranks: list[int]) -> None:
        if asked < len(self._blocks):
            block = self._blocks[asked]
            if len(ranks) == self._ranks.world_size:
                block.gather(self._ranks)
                return
            for cut in block.cuts.values():
                for rank in ranks:
                    self._ranks.gather_into(cut.memory, cut.own(), only=rank)
            block.gathered = block.gathered or self._ranks.rank in ranks
            return
        part = asked - len(self._blocks)
        mine = self._offered if self._ranks.rank in ranks else {}
        self._layouts[part].add_up(mine, into=self._sums_of(part), bucket=self._bucket)

    def _sums_of(self, part: int) -> Tensor:
        if part not in self._sums:
            self._sums[part] = torch.zeros(self._layouts[part].length, dtype=self._wide, device=self._device)
        return self._sums[part]
