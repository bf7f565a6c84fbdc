"""Embed texts on the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lit_dpret.distributed.ray_workers import ray_workers
from lit_dpret.encoders.bulk import Embedded, OneSide, Over, Piece, embed_piece
from lit_dpret.encoders.contract import Side
from lit_dpret.encoders.st_folder import cut, load_towers
from lit_dpret.encoders.text_encoder import TextEncoder
from lit_dpret.errors import WorkerError


@contextmanager
def embedding_workers(
    encoder: str | Path, tower: TextEncoder, side: Side, workers: int, *, device: str | None = None,
    stored: torch.dtype | None = None, **settings: Any,
) -> Iterator[Over | None]:  # fmt: skip
    """Yield a function that embeds pieces of texts on ``workers`` processes, or None without workers.

    Each worker loads ``encoder``, which must be ``tower`` there too, and uses as many threads as this process.

    Args:
        encoder: A folder at the same path for all workers, or a name.
        tower: The encoder that this process loaded from it.
        side: The side of the texts.
        workers: The number of processes.
        device: The device of each worker.
        stored: The dtype in which embeddings are sent; by default the dtype that the encoder returns.
        settings: ``dtype`` of `load_towers`, and ``max_length`` of `cut`.
    """
    if not workers:
        yield None
        return
    made = partial(_worker, encoder, tower.fingerprint(), side, device, stored or tower.wide, **settings)
    with ray_workers(made, workers, device=device or "cpu", threads=torch.get_num_threads()) as over:
        yield over


def _worker(
    encoder: str | Path, fingerprint: str, side: Side, device: str | None, stored: torch.dtype, *,
    dtype: str = "float32", max_length: int | None = None,
) -> Callable[[Piece], Embedded]:  # fmt: skip
    towers = cut(load_towers(encoder, dtype=dtype), **{f"{side}_max_length": max_length})
    tower = towers.query_encoder if side == "query" else towers.passage_encoder
    if tower.fingerprint() != fingerprint:
        raise WorkerError(f"{encoder} is a different encoder on a worker's machine. Put the same folder there.")
    one_side = OneSide(tower, side, device)
    one_side.__enter__()
    return partial(embed_piece, one_side, stored)
