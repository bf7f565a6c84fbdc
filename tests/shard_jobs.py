"""Jobs for the ranks of `rank_runs.Server` on which parameters are cut up (FSDP2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fsdp(world: int, **settings: Any) -> Any:
    """Lightning's strategy, as ``configs/trainer/fsdp.yaml`` builds it."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    chosen = {"data_parallel_size": world, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
    return ModelParallelStrategy(**chosen | settings)  # type: ignore[arg-type]


def fit(folder: Path, rank: int, world: int, *, trainer: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """`rank_runs.fit`, in shards where there are several ranks."""
    import rank_runs

    chosen = {"strategy": fsdp(world), "devices": world} if world > 1 else {}
    found: dict[str, Any] = rank_runs.fit(folder, rank, world, trainer=chosen | (trainer or {}), **given)
    return found
