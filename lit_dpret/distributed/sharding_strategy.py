"""Lightning's FSDP2 strategy with the layout that a private run needs."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from lit_dpret.distributed.handover import refuse_zero_state
from lit_dpret.errors import ConfigurationError


class ShardingStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` over all ranks of a job, however many there are.

    It differs in two defaults. All ranks share the data (``data_parallel_size``) and none shares a tensor; Lightning
    would have the devices of a node share tensors. A checkpoint is one file with the whole state, written by rank 0,
    which appears whole or not at all and resumes on any number of ranks.

    Args:
        timeout_minutes: How long ranks wait for one that is stuck. It must cover what one of them does while the
            others wait: reading its data, writing a checkpoint.
        process_group_backend: ``gloo`` or ``nccl``; null for the device's own.

    Raises:
        ConfigurationError: The timeout is no positive number.
    """

    def __init__(self, *, timeout_minutes: float = 5.0, process_group_backend: str | None = None) -> None:
        if not (math.isfinite(timeout_minutes) and timeout_minutes > 0):
            raise ConfigurationError(f"trainer.strategy.timeout_minutes={timeout_minutes} is not a positive number.")
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
        """As Lightning's; of an optimizer that has made no step yet, and that stays so.

        PyTorch makes a step of no length to have a state to write. It would stay in the optimizer, and count.
        """
        fresh = not optimizer.state
        found: dict[str, Any] = super().optimizer_state(optimizer)
        if fresh:
            optimizer.state.clear()
            for state in found.get("state", {}).values():
                state.update({k: torch.zeros_like(v) for k, v in state.items() if isinstance(v, Tensor)})
        return found
