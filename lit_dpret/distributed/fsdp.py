"""Parameters sharded over the ranks as in FSDP2: gathered while gradients are clipped, sharded otherwise.

Each parameter is a ``DTensor``, split along its first axis. This module gathers it, not the hooks of ``fully_shard``,
which assume that all ranks make the same passes; here one rank may make more than another
(`lit_dpret.distributed.block_by_block`). Clipped sums are reduced in float32 or wider. Each rank noises its shard by
flat index, as one process would, and steps on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows
from torch.optim import Optimizer

from lit_dpret.distributed.block_by_block import BlockByBlock
from lit_dpret.distributed.blocks import own_blocks
from lit_dpret.distributed.handover import Handover, refuse_zero_state, replaced
from lit_dpret.distributed.ranks import Ranks, noticing_death
from lit_dpret.distributed.shards import Shard, ShardLayout, like
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.settings import require_number


class CutParameter:
    """One parameter: the shard of this rank, and a plain tensor for the whole parameter, which has memory at times.

    Attributes:
        cut: This rank's rows, as a ``DTensor``; the optimizer steps on it, and a checkpoint holds it.
        whole: The same object throughout, so that a clipping engine recognises it.
        memory: The flat memory of ``whole``; padding rows at its end may make all shards equally large.
    """

    def __init__(
        self, parameter: Tensor, places: Sequence[tuple[nn.Module, str]], mesh: Any, dtype: torch.dtype | None
    ) -> None:
        world, shape = mesh.size(), parameter.shape
        rows = -(-shape[0] // world)
        first = min(mesh.get_local_rank() * rows, shape[0])
        device = _device_of(mesh)
        own = parameter.detach()[first : first + rows].contiguous().to(device, copy=True)
        stride = torch.empty(shape, device="meta").stride()
        placed: Any = DTensor.from_local(own, mesh, [Rows(0)], run_check=False, shape=shape, stride=stride)
        self.cut: Any = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        self.count = rows * (parameter.numel() // max(shape[0], 1))  # elements of a shard, including padding
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        self.memory = torch.empty(world * self.count, dtype=kind, device=device)
        # Set to the same memory, not a view of it: writes to the memory then leave the parameter's version unchanged.
        plain = torch.empty(0, dtype=kind, device=device).set_(self.memory.untyped_storage(), 0, shape, stride)  # type: ignore[call-overload]
        self.whole = nn.Parameter(plain, requires_grad=parameter.requires_grad)
        self._places = places
        self.free()
        self.place(whole=False)

    def allocate(self) -> None:
        self.memory.untyped_storage().resize_(self.memory.numel() * self.memory.element_size())

    def free(self) -> None:
        self.memory.untyped_storage().resize_(0)

    def place(self, *, whole: bool) -> None:
        """Put the plain tensor, with or without memory, or the shard into the module."""
        for store, name in self._places:
            setattr(store, name, self.whole if whole else self.cut)

    def own(self) -> Tensor:
        """Return this rank's shard, flat, padded with zeros, in the dtype of the gathered copies."""
        mine = self.cut.to_local().detach().to(self.memory.dtype).reshape(-1)
        return mine if mine.numel() == self.count else torch.cat([mine, mine.new_zeros(self.count - mine.numel())])


class Block:
    """Parameters that are gathered and freed together, by name."""

    def __init__(self, modules: Sequence[nn.Module], cuts: Mapping[str, CutParameter]) -> None:
        self.modules, self.cuts = modules, cuts
        self.gathered = False

    def allocate(self) -> None:
        for each in self.cuts.values():
            each.allocate()

    def free(self) -> None:
        for each in self.cuts.values():
            each.free()
        self.gathered = False

    def gather(self, ranks: Ranks) -> None:
        """Fill the memory from all ranks; a collective call."""
        for each in self.cuts.values():
            ranks.gather_into(each.memory, each.own())
        self.gathered = True


class ShardedParameters:
    """The shards of one module's parameters, on one rank.

    Guarantees:
        - Outside of ``gather`` and ``scatter`` every parameter is a ``DTensor`` of which this rank holds a part.
        - Between them each is a plain tensor, the same object every time, so that a clipping engine recognises it.
        - Whatever a forward pass does to the gathered copies is discarded by ``scatter``.
        - The sharded values are those of rank 0, whatever the other ranks started with.

    Args:
        module: Each block of a ``ModuleList`` with exclusive parameters is gathered by itself (``blocks``), the
            rest together (the last of ``blocks``).
        mesh: A one-dimensional mesh of the ranks.
        compute_dtype: The dtype of the gathered copies; None for that of the parameters, which keep theirs.
    """

    def __init__(self, module: nn.Module, mesh: Any, *, compute_dtype: torch.dtype | None = None) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise UnsupportedModelError(
                    f"Parameter {name} is a scalar, which cannot be sharded. Give it the shape "
                    "(1,), or choose trainer=ddp."
                )
        _as_on_rank_0(module)
        self.module, self.world = module, mesh.size()
        self._ranks = Ranks(mesh.get_local_rank(), mesh.size())
        alone = own_blocks(module)
        inside = {id(part): index for index, block in enumerate(alone) for part in block.modules()}
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        of_block: dict[int, int] = {}
        for part in module.modules():
            for local, held in part._parameters.items():
                if held is not None:
                    places.setdefault(id(held), []).append((part, local))
                    of_block[id(held)] = inside.get(id(part), len(alone))
        found: list[dict[str, CutParameter]] = [{} for _ in range(len(alone) + 1)]
        left = list(module.named_parameters())
        names = [name for name, _ in left]
        while left:  # drop the last reference to each, so that memory falls while shards are created
            name, parameter = left.pop(0)
            key = id(parameter)
            found[of_block[key]][name] = CutParameter(parameter, places[key], mesh, compute_dtype)
        rest = [part for part in module.modules() if id(part) not in inside]
        groups = [list(block.modules()) for block in alone] + [rest]
        self.blocks = [Block(modules, cuts) for modules, cuts in zip(groups, found, strict=True)]
        by_name = {name: cut for block in self.blocks for name, cut in block.cuts.items()}
        self.cuts = {name: by_name[name] for name in names}
        self.gathered = False
        for buffer in module.buffers():
            buffer.data = buffer.to(_device_of(mesh))
        for each in (module, *alone):  # a state dict always holds shards, whoever takes it at any time
            each.register_state_dict_pre_hook(_InShards(self))  # type: ignore[no-untyped-call]

    def place(self, *, whole: bool) -> None:
        """Put plain tensors, with or without memory, or the shards into the module."""
        for each in self.cuts.values():
            each.place(whole=whole)
        self.gathered = whole

    def gather(self) -> None:
        with noticing_death():
            for block in self.blocks:
                if not block.gathered:
                    block.allocate()
                    block.gather(self._ranks)
        self.place(whole=True)

    def scatter(self) -> None:
        """Keep this rank's shard of every parameter, and free the rest."""
        for block in self.blocks:
            block.free()
        self.place(whole=False)

    @contextmanager
    def whole(self) -> Iterator[None]:
        before = self.gathered
        self.gather()
        try:
            yield
        finally:
            if not before:
                self.scatter()

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum whole tensors over the ranks by `ShardLayout`; return this rank's shards, split as the parameters are.

        ``sums`` is by parameter name, with the whole parameter's shape, and is emptied.
        """
        wide = reduce(torch.promote_types, (each.dtype for each in sums.values()), torch.float32)
        names = [name for name in self.cuts if name in sums]
        return self.as_shards(self.layout(names).add_up(sums), names, wide)

    def layout(self, names: Sequence[str]) -> ShardLayout:
        """Return the shards of some parameters on each rank."""
        shards = [[_shard_of(n, self.cuts[n].cut, rank, self.world) for n in names] for rank in range(self.world)]
        return ShardLayout(shards, {name: self.cuts[name].cut.numel() for name in names}, self._ranks)

    def as_shards(self, own: Mapping[str, Tensor], names: Sequence[str], wide: torch.dtype) -> dict[str, Tensor]:
        """Return flat shards as ``DTensor`` s, with zeros for missing ones."""
        found = {}
        for name in names:
            cut = self.cuts[name].cut
            local = cut.to_local()
            flat = own[name] if name in own else torch.zeros(local.numel(), dtype=wide, device=local.device)
            found[name] = like(cut, flat.view(local.shape))
        return found

    def handover(self, ranks: Ranks) -> Handover:
        return _ShardHandover(self, ranks)

    @contextmanager
    def assembled(self, *, here: bool) -> Iterator[None]:
        """Put the whole master weights, on the CPU, into the module of ranks with ``here``, for writing a model.

        A collective call; ranks without ``here`` keep their shards. Parameters are in shards before and after.
        """
        whole: dict[int, nn.Parameter] = {}
        for parameter in self.module.parameters():
            if isinstance(parameter, DTensor):
                with noticing_death():
                    full: Any = parameter.full_tensor()
                if here:
                    whole[id(parameter)] = nn.Parameter(full.cpu(), requires_grad=parameter.requires_grad)
                del full
        with replaced(self.module, whole):
            yield


class _InShards:
    """A hook that puts the shards into a module before its state dict is taken; copies of the module exclude it."""

    def __init__(self, shards: ShardedParameters | None) -> None:
        self._shards = shards

    def __call__(self, *_: object) -> None:
        if self._shards is not None and self._shards.gathered:
            self._shards.scatter()

    def __deepcopy__(self, memory: object) -> _InShards:
        return _InShards(None)

    def __reduce__(self) -> Any:
        return _InShards, (None,)


class _ShardHandover(Handover):
    """Shards of the sums, as ``DTensor`` s; whole parameters from the first physical batch of a step to the last.

    After ``by_block``, parameters are gathered block by block instead.
    """

    in_shards = True

    def __init__(self, shards: ShardedParameters, ranks: Ranks) -> None:
        super().__init__(shards.module, ranks)
        self._shards = shards
        self._by_block: BlockByBlock | None = None

    def whole(self) -> AbstractContextManager[object]:
        return self._shards.whole()

    def by_block(self) -> BlockByBlock | None:
        if self._ranks.world_size > 1:
            self._by_block = BlockByBlock(self._shards, self._ranks)
        return self._by_block

    def clipping(self) -> AbstractContextManager[object]:
        if self._by_block is not None:
            return self._by_block.passes()
        self._shards.gather()
        return nullcontext()

    def settle(self) -> bool:
        return self._by_block is not None and self._by_block.settle()

    def assembled(self, *, here: bool) -> AbstractContextManager[object]:
        return self._shards.assembled(here=here)

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._by_block is not None:
            return sums  # already summed over all ranks
        self._shards.scatter()
        return self._shards.add_up(sums)


def _device_of(mesh: Any) -> torch.device:
    """Return the device of this process in a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _as_on_rank_0(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, if they differ."""
    ranks = Ranks.here()
    tensors = sorted([*module.named_parameters(), *module.named_buffers()], key=lambda named: named[0])
    digest = hashlib.blake2b()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if len(set(ranks.gather(digest.hexdigest()))) > 1:
        for _, tensor in tensors:
            tensor.detach().copy_(ranks.share(tensor.detach().cpu))


def _shard_of(name: str, parameter: Tensor, rank: int, world: int) -> Shard:
    """Return the coordinates of a parameter on ``rank``: equally many rows on each rank, until none are left."""
    if not isinstance(parameter, DTensor) or tuple(parameter.placements) != (Rows(0),):
        raise UnsupportedModelError(f"Parameter {name} is not sharded along its first axis, so it cannot be noised.")
    total = parameter.shape[0]
    row, rows = parameter.numel() // max(total, 1), -(-total // world)
    first, last = min(rank * rows, total), min((rank + 1) * rows, total)
    return Shard(name, first * row, (last - first) * row)


class ShardingStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` over all ranks of a job, for any number of ranks.

    It differs in two defaults. All ranks share the data (``data_parallel_size``) and no tensor; Lightning would make
    the devices of a node share tensors. A checkpoint is one file with the whole state, written atomically by rank 0,
    and resumes on any number of ranks.

    Args:
        timeout_minutes: How long ranks wait for one that is stuck. It must cover what one rank does while the
            others wait, such as reading its data or writing a checkpoint.
        process_group_backend: ``gloo`` or ``nccl``; null for the device's default.

    Raises:
        ConfigurationError: The timeout is not a positive number.
    """

    def __init__(self, *, timeout_minutes: float = 5.0, process_group_backend: str | None = None) -> None:
        require_number("trainer.strategy", {"timeout_minutes": timeout_minutes})
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        if self.lightning_module is None:  # ranks may connect before there is a module that needs the mesh
            self._setup_distributed()
        else:
            super().setup_environment()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        # Checked before Lightning shards it; memory-mapped values are not read.
        found = torch.load(checkpoint_path, map_location="cpu", weights_only=True, mmap=True)
        refuse_zero_state(found)
        states, own = found.get("optimizer_states", []), self.optimizers
        if not states or any(state["state"] for state in states):
            return super().load_checkpoint(checkpoint_path, weights_only=True)
        # Lightning looks for the first parameter with a state, and plain SGD has none.
        self.optimizers = []
        try:
            loaded = super().load_checkpoint(checkpoint_path, weights_only=True)
        finally:
            self.optimizers = own
        for optimizer, state in zip(own, states, strict=True):
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({name: value for name, value in saved.items() if name != "params"})
        return loaded

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return Lightning's state, without changing an optimizer that has not stepped yet.

        PyTorch makes an empty step to create a state to write. It would stay in the optimizer, and count.
        """
        fresh = not optimizer.state
        found: dict[str, Any] = super().optimizer_state(optimizer)
        if fresh:
            optimizer.state.clear()
            for state in found.get("state", {}).values():
                state.update({k: torch.zeros_like(v) for k, v in state.items() if isinstance(v, Tensor)})
        return found
