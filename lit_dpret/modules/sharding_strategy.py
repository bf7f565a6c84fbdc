"""Lightning's FSDP2 strategy with the layout that a private run needs."""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch.strategies import ModelParallelStrategy


class ShardingStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` over all ranks of a job, however many there are.

    It differs in two defaults. All ranks share the data (``data_parallel_size``) and none shares a tensor; Lightning
    would have the devices of a node share tensors. A checkpoint is one file with the whole state, written by rank 0,
    which appears whole or not at all and resumes on any number of ranks.

    Args:
        timeout_seconds: How long a rank waits for the others in a message before the job ends with an error.
        process_group_backend: null for NCCL on GPUs and gloo on CPUs.
    """

    def __init__(self, *, timeout_seconds: float = 1800, process_group_backend: str | None = None) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        if self.lightning_module is None:  # ranks may meet before there is a module to tell of the mesh
            self._setup_distributed()
        else:
            super().setup_environment()
