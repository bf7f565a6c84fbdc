"""Parameters sharded over the ranks by FSDP2: gathered while gradients are clipped, sharded otherwise.

Clipping wants whole layers: a unit's norm is of its gradient in all of them. So the parameters are gathered before the
first physical batch of a logical step, and given up after the last one. The clipped sums are then added up in float32
or wider, and each rank noises its shard by flat index, as one process would, and steps on it; what FSDP does by itself
in a backward pass takes no part.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows
from torch.optim import Optimizer

from lit_dpret.distributed.handover import Handover, refuse_zero_state, replaced
from lit_dpret.distributed.ranks import Ranks, noticing_death
from lit_dpret.distributed.shards import Shard, ShardLayout, like
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.settings import require_number


class ShardedParameters:
    """The shards of one module's parameters, on one rank.

    Guarantees:
        - Outside of ``gather`` and ``scatter`` every parameter is a ``DTensor`` of which this rank holds a part.
        - Between them each is a plain tensor, the same object every time, so that a clipping engine knows it again.
        - Whatever a forward pass does to the gathered copies is forgotten by ``scatter``.
        - What is sharded is what rank 0 holds, whatever the others began with.

    Args:
        module: Becomes the root. Each block of a ``ModuleList`` whose parameters nobody else uses is gathered in one
            message of its own, the rest in one more.
        mesh: One-dimensional: the ranks.
        compute_dtype: What the gathered copies are in; None for that of the parameters, which stay as they are.
    """

    def __init__(self, module: nn.Module, mesh: Any, *, compute_dtype: torch.dtype | None = None) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise UnsupportedModelError(
                    f"Parameter {name} is a scalar, which cannot be sharded. Give it the shape "
                    "(1,), or choose trainer=ddp."
                )
        _as_on_rank_0(module)
        # What FSDP does in a backward pass takes no part, so a hook that it may lose there is no loss.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, cast_forward_inputs=False)
        for block in own_blocks(module):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.module, self.group, self.world = module, mesh.get_group(), mesh.size()
        self._sharded = [found for found in module.modules() if isinstance(found, FSDPModule)]
        for found in self._sharded:  # gathering is done here alone, and so is adding up
            found.set_reshard_after_backward(False, recurse=False)
            found.set_requires_gradient_sync(False, recurse=False)
        self.gathered = False

    def gather(self) -> None:
        with noticing_death():
            for found in self._sharded:
                found.unshard()  # of one that is whole, nothing; FSDP cuts them up unasked where a state dict is taken
        self.gathered = True

    def scatter(self) -> None:
        """Keep this rank's shard of every parameter, and free the rest."""
        for found in self._sharded:
            found.reshard()
        self.gathered = False

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
        """Sum whole tensors over the ranks by `ShardLayout`; return this rank's shards, cut as the parameters are.

        ``sums`` is by parameter name, of the whole parameter's shape, and is emptied. Parameters are in shards.
        """
        parameters: dict[str, Any] = {name: p for name, p in self.module.named_parameters() if name in sums}
        layout = [
            [_shard_of(name, p, rank, self.world) for name, p in parameters.items()] for rank in range(self.world)
        ]
        sizes = {name: p.numel() for name, p in parameters.items()}
        wide = reduce(torch.promote_types, (each.dtype for each in sums.values()), torch.float32)
        none = torch.empty(0, dtype=wide, device=next(iter(sums.values())).device)  # where this rank has no row
        own = ShardLayout(layout, sizes, Ranks.here()).add_up(sums)
        return {name: like(p, own.get(name, none).view(p.to_local().shape)) for name, p in parameters.items()}

    def handover(self, ranks: Ranks) -> Handover:
        return _ShardHandover(self, ranks)

    @contextmanager
    def assembled(self, *, here: bool) -> Iterator[None]:
        """Put the whole master weights, on the CPU, into the module of ranks with ``here``, for writing a model.

        All ranks enter it; one that does not say ``here`` keeps its shards. Parameters are in shards before and after.
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


class _ShardHandover(Handover):
    """Shards of the sums, as ``DTensor`` s; whole parameters from the first physical batch of a step to the last."""

    in_shards = True

    def __init__(self, shards: ShardedParameters, ranks: Ranks) -> None:
        super().__init__(shards.module, ranks)
        self._shards = shards

    def whole(self) -> AbstractContextManager[object]:
        return self._shards.whole()

    def clipping(self) -> AbstractContextManager[object]:
        self._shards.gather()
        return nullcontext()

    def assembled(self, *, here: bool) -> AbstractContextManager[object]:
        return self._shards.assembled(here=here)

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        self._shards.scatter()
        return self._shards.add_up(sums)


def own_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: elements of a top-level ``ModuleList`` with exclusive parameters."""
    users: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        users[id(parameter)] = users.get(id(parameter), 0) + 1
    found: list[nn.Module] = []
    inside: set[int] = set()
    for layer in module.modules():
        if not isinstance(layer, nn.ModuleList):
            continue
        for block in layer:
            own: dict[int, int] = {}
            for _, parameter in block.named_parameters(remove_duplicate=False):
                own[id(parameter)] = own.get(id(parameter), 0) + 1
            alone = bool(own) and all(users[key] == count for key, count in own.items())
            if alone and id(block) not in inside and any(True for _ in block.children()):
                found.append(block)
                inside.update(id(part) for part in block.modules())
    return found


def _as_on_rank_0(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, where they differ."""
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
    """Return the coordinates of a parameter that ``rank`` holds: so many rows on each, until there are none left."""
    if not isinstance(parameter, DTensor) or tuple(parameter.placements) != (Rows(0),):
        raise UnsupportedModelError(f"Parameter {name} is not cut along its first axis, so its noise has no place.")
    total = parameter.shape[0]
    row, rows = parameter.numel() // max(total, 1), -(-total // world)
    first, last = min(rank * rows, total), min((rank + 1) * rows, total)
    return Shard(name, first * row, (last - first) * row)


class ShardingStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` over all ranks of a job, for any number of ranks.

    It differs in two defaults. All ranks share the data (``data_parallel_size``) and none shares a tensor; Lightning
    would have the devices of a node share tensors. A checkpoint is one file with the whole state, written by rank 0,
    which appears whole or not at all and resumes on any number of ranks.

    Args:
        timeout_minutes: How long ranks wait for one that is stuck. It must cover what one of them does while the
            others wait: reading its data, writing a checkpoint.
        process_group_backend: ``gloo`` or ``nccl``; null for the device's own.

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
        if self.lightning_module is None:  # ranks may meet before there is a module to tell of the mesh
            self._setup_distributed()
        else:
            super().setup_environment()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        # Before Lightning takes it apart; what is mapped is not read.
        refuse_zero_state(torch.load(checkpoint_path, map_location="cpu", weights_only=True, mmap=True))
        return super().load_checkpoint(checkpoint_path, weights_only=True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return Lightning's state; also for an optimizer before its first step, unchanged.

        PyTorch makes a step of no length to have a state to write. It would stay in the optimizer, and count.
        """
        fresh = not optimizer.state
        found: dict[str, Any] = super().optimizer_state(optimizer)
        if fresh:
            optimizer.state.clear()
            for state in found.get("state", {}).values():
                state.update({k: torch.zeros_like(v) for k, v in state.items() if isinstance(v, Tensor)})
        return found
