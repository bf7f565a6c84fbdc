r"""Parameters sharded over the ranks by FSDP2: gathered while gradients are clipped, sharded otherwise.

Under ``trainer=fsdp`` each rank keeps a part of every parameter (``torch.distributed.fsdp.fully_shard``), and with it
a part of the optimizer's state, the fp32 master weights and the noise. Clipping wants whole layers: a unit's norm is
of its gradient in all of them. So the parameters are gathered before the first physical batch of a logical step, and
given up again after the last one; nothing that FSDP does by itself in a backward pass takes part:

* the clipped sums are added up over the ranks in float32 or wider, and each rank gets its shard of the total;
* each rank adds the noise of its shard, which is drawn by flat index and is what one process would add there;
* the optimizer steps on shards.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lit_dpret.distributed.handover import GradHandover, Handover, refuse_zero_state
from lit_dpret.distributed.ranks import Ranks, noticing_death
from lit_dpret.distributed.shards import like
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.settings import require_number

#: Elements that one reduction hands in: 100 MB in float32.
BUCKET = 25_000_000

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
        """Sum whole tensors over the ranks, and keep this rank's shard of the totals.

        Guarantees:
            - Sums are formed in float32 or wider.
            - A tensor is let go as soon as it is added up, so that the whole ones are not held beside copies of all.

        Args:
            sums: By parameter name, of the whole parameter's shape; it is emptied. All ranks call it, with the same
                names. Parameters are in shards.

        Returns:
            ``DTensor`` s, cut as the parameters are.
        """
        parameters = dict(self.module.named_parameters())
        found: dict[str, Tensor] = {}
        for names in _buckets(sums):
            parts = [sums.pop(name) for name in names]
            wide = torch.promote_types(parts[0].dtype, torch.float32)
            layouts = [_layout(name, parameters[name], self.world) for name in names]
            pairs = list(zip(parts, layouts, strict=True))
            sent = torch.cat([_chunk(*pair, rank).to(wide) for rank in range(self.world) for pair in pairs])
            del parts, pairs
            own = torch.empty(len(sent) // self.world, dtype=wide, device=sent.device)
            with noticing_death():
                _reduce_scatter(own, sent, group=self.group)
            del sent
            pieces = torch.split(own, [layout.padded for layout in layouts])
            for name, layout, piece in zip(names, layouts, pieces, strict=True):
                found[name] = layout.shard_of(parameters[name], piece)
        return found

    def handover(self, ranks: Ranks) -> Handover:
        return _ShardHandover(self, ranks)

    @contextmanager
    def assembled(self, *, here: bool) -> Iterator[None]:
        """Put the whole master weights, on the CPU, into the module of ranks with ``here``, for writing a model.

        All ranks enter it; one that does not say ``here`` keeps its shards. Parameters are in shards before and after.
        """
        places: list[tuple[nn.Module, str, Any]] = [
            (layer, name, parameter)
            for layer in self.module.modules()
            for name, parameter in layer._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        whole: dict[int, nn.Parameter] = {}
        for key, parameter in {id(parameter): parameter for _, _, parameter in places}.items():
            with noticing_death():
                full = parameter.detach().full_tensor()
            if here:
                whole[key] = nn.Parameter(full.cpu(), requires_grad=parameter.requires_grad)
            del full
        try:
            for layer, name, parameter in places if here else ():
                layer._parameters[name] = whole[id(parameter)]
            yield
        finally:
            for layer, name, parameter in places if here else ():
                layer._parameters[name] = parameter


class _ShardHandover(GradHandover):
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


@dataclass(frozen=True)
class _Layout:
    """How the rows of a parameter lie on the ranks: ``rows`` on each, until there are none left."""

    rows: int
    total: int
    row: int

    @property
    def padded(self) -> int:
        return self.rows * self.row

    def shard_of(self, parameter: Tensor, piece: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            raise ConfigurationError("The parameters are whole; their shards are wanted.")
        local = parameter.to_local()
        return like(parameter, piece[: local.numel()].clone().view(local.shape))


def _layout(name: str, parameter: Tensor, world: int) -> _Layout:
    if not isinstance(parameter, DTensor) or tuple(parameter.placements) != (Shard(0),):
        raise UnsupportedModelError(f"Parameter {name} is not cut along its first axis, so its noise has no place.")
    total = parameter.shape[0]
    return _Layout(-(-total // world), total, parameter.numel() // max(total, 1))


def _chunk(whole: Tensor, layout: _Layout, rank: int) -> Tensor:
    """Return the rows of ``whole`` that belong to ``rank``, flat, padded with zeros to as many as rank 0 has."""
    first = min(rank * layout.rows, layout.total)
    part = whole[first : first + layout.rows].reshape(-1)
    return part if len(part) == layout.padded else torch.cat([part, part.new_zeros(layout.padded - len(part))])


def _buckets(sums: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of tensors of one kind, in an order that is the same on every rank, as many as one message holds."""
    kinds: dict[Any, list[str]] = {}
    for name in sorted(sums):
        kinds.setdefault(str(sums[name].dtype), []).append(name)
    for names in kinds.values():
        bucket: list[str] = []
        size = 0
        for name in names:
            if bucket and size + sums[name].numel() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += sums[name].numel()
        if bucket:
            yield bucket


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
