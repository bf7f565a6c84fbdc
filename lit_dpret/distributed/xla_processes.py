"""XLA devices in several processes, one device each, connected through their hosts.

Lightning's `XLAStrategy` forks, and what a callback learns there (epsilon above all) is lost. Here the processes are
started externally, as by torchrun. They communicate through the hosts by gloo: the clipped sums once per logical step,
a transfer of the model's size, and the decisions of rank 0. No other code reduces gradients.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import require_number

#: One chip per process, which then sees no other.
_ALONE = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}


class XLAProcesses(SingleDeviceXLAStrategy):
    """One XLA device per process of a job started by torchrun or by hand.

    Guarantees:
        - All ranks begin with the weights of rank 0.
        - Only `lit_dpret.distributed.ranks.Ranks` reduces values, apart from logged ones.

    Args:
        timeout_minutes: How long ranks wait for one that is stuck.
        settings: Arguments of ``SingleDeviceXLAStrategy``.

    Raises:
        ConfigurationError: The environment does not say which rank this is, or the timeout is not a positive number.
    """

    def __init__(self, *, timeout_minutes: float = 5.0, **settings: Any) -> None:
        require_number("trainer.strategy", {"timeout_minutes": timeout_minutes})
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigurationError(
                f"trainer=tpu_processes: {', '.join(missing)} is not set in the environment, so this process does not "
                "know which one it is. Start the command with torchrun --nproc_per_node=DEVICES, or choose trainer=tpu."
            )
        self.timeout = timedelta(minutes=timeout_minutes)
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        os.environ.setdefault("TPU_VISIBLE_CHIPS", str(local_rank))
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)
        settings.setdefault("device", 0)
        super().__init__(**settings)
        self.global_rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank, self.node_rank = local_rank, int(os.environ.get("GROUP_RANK", 0))

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=self.timeout)
        super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        with torch.no_grad():
            for tensor in {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}.values():  # type: ignore[union-attr]
                on_host = tensor.detach().cpu().contiguous()
                dist.broadcast(on_host, src=0)
                tensor.copy_(on_host)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        found = [obj]
        dist.broadcast_object_list(found, src=src)
        return found[0]

    def reduce(self, tensor: Any, *args: Any, reduce_op: Any = "mean", **kwargs: Any) -> Any:
        if not isinstance(tensor, Tensor):
            tensor = torch.tensor(tensor)
        on_host = tensor.detach().cpu().clone()
        dist.all_reduce(on_host)
        if isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            on_host = on_host / self.world_size
        return on_host.to(tensor.device)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        on_host = tensor.detach().cpu().contiguous()
        found = [torch.empty_like(on_host) for _ in range(self.world_size)]
        dist.all_gather(found, on_host)
        return torch.stack(found).to(tensor.device)

    def teardown(self) -> None:
        super().teardown()
        if dist.is_initialized():
            dist.destroy_process_group()
