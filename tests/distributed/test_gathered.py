"""Negatives from other processes: loss and gradients of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from negative_cases import NOISE, dual, in_double, lines
from pair_stand_ins import batch_of

from lit_dpret.distributed.ranks import all_rows
from lit_dpret.errors import ConfigurationError
from lit_dpret.negatives import BM25Negatives, InBatchNegatives
from lit_dpret.privacy.modes import BatchClip

#: Rows of each process; query 3 comes twice, in different ones, and query 1 has a second answer in neither.
PARTS = ((0, 1, 3), (3, 5))


def gradients(numbers: tuple[int, ...]) -> tuple[Any, list[Any]]:
    negatives = [InBatchNegatives(gather=True), BM25Negatives(per_query=2, depth=8)]
    module = in_double(negatives=negatives, grad_cache_rows=2)
    batch = batch_of(module.collate_rows(lines(*numbers)))
    module.before_batch(batch)
    losses = module.per_row_loss(batch.rows)
    found = torch.autograd.grad(losses.sum(), list(module.parameters()), allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(module.parameters(), found, strict=True)]
    return losses.detach(), filled


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        losses, found = gradients(PARTS[rank])
        for each in found:
            dist.all_reduce(each)
        own = torch.full((1 + rank, 2), float(rank + 1), requires_grad=True)
        everybody = all_rows(own)
        (everybody * (rank + 1)).sum().backward()
        torch.save(
            {"losses": losses, "gradients": found, "rows": everybody.detach(), "grad": own.grad}, f"{folder}/{rank}"
        )
    finally:
        dist.destroy_process_group()


def test_without_other_processes_the_rows_are_ones_own() -> None:
    rows = torch.randn(3, 2)
    assert all_rows(rows) is rows


@pytest.mark.slow
def test_two_processes_have_the_loss_and_gradients_of_one_with_the_whole_batch(tmp_path: Path) -> None:
    mp.spawn(process, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank), weights_only=True) for rank in (0, 1))
    losses, found = gradients(PARTS[0] + PARTS[1])
    torch.testing.assert_close(torch.cat([first["losses"], second["losses"]]), losses, rtol=1e-10, atol=1e-12)
    for a, b, whole in zip(first["gradients"], second["gradients"], found, strict=True):
        torch.testing.assert_close(a, whole, rtol=1e-9, atol=1e-11)
        assert torch.equal(a, b)
    assert first["rows"].tolist() == second["rows"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert first["grad"].tolist() == [[3.0, 3.0]] and second["grad"].tolist() == [[3.0, 3.0]] * 2


def test_a_private_mode_refuses_rows_of_other_processes() -> None:
    with pytest.raises(ConfigurationError, match=r"Set model\.negatives\.in_batch\.gather=false"):
        dual(BatchClip(max_grad_norm=1.0, **NOISE), negatives=[InBatchNegatives(gather=True)])
