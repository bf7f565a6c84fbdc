"""What travels in Flower's records, and what is refused of it: weights, request rows, answers and pools.

Every message has a ``head`` that states the version of this format. Weights are floating-point tensors alone: an
integer buffer has no mean. Negatives travel as every embedding once and lists of places (`Block`). Whatever comes from
another machine is checked here before anything is computed with it, and what is wrong is named with whose it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError, schema_problem
from lit_dpret.federated.aggregation import Weights, check_weights
from lit_dpret.federated.fed_negatives import Block, FedPool
from lit_dpret.federated.flower.library import Array, ArrayRecord, ConfigRecord, RecordDict
from lit_dpret.federated.settings import PddAs2
from lit_dpret.retrieval.search import MISSING

SCHEMA = "lit-dpret/federated-message/1"
_FLOATS = (torch.float16, torch.float32)


def envelope(**facts: Any) -> RecordDict:
    """A record with a head of its own: plain words and numbers."""
    return RecordDict({"head": ConfigRecord({"schema": SCHEMA, **facts})})


def head_of(content: RecordDict, whose: str) -> Mapping[str, Any]:
    """The head of a record.

    Raises:
        DataError: There is none, or it is of another version of the format.
    """
    head: Mapping[str, Any] = content.get("head", {})
    problem = schema_problem(head.get("schema") if isinstance(head, ConfigRecord) else None, SCHEMA)
    if problem is not None:
        raise DataError(f"The message of {whose} cannot be read: {problem}", kind="bad message")
    return head


def payload_bytes(content: RecordDict) -> int:
    """The size of a record's tensors on the wire, and of keys, shares and boxes beside them."""
    boxes = [record for name, record in content.config_records.items() if name != "head"]
    return sum(record.count_bytes() for record in (*content.array_records.values(), *boxes))


def digest_of(settings: PddAs2) -> str:
    """SHA-256 of a run's settings, by which server and clients know that they mean the same run."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()


# -- tensors -----------------------------------------------------------------------------------


def weights_record(weights: Mapping[str, Tensor]) -> ArrayRecord:
    """Weights as arrays.

    Raises:
        ConfigurationError: One is no float16 or float32 tensor.
    """
    odd = next((name for name, value in weights.items() if value.dtype not in _FLOATS), None)
    if odd is not None:
        raise ConfigurationError(
            f"{odd!r} is {weights[odd].dtype}: only float16 and float32 weights travel between clients and server. "
            "Leave buffers out (lit_dpret.federated.aggregation.take_weights)."
        )
    return _record(weights)


def weights_of(content: RecordDict, whose: str, *, like: Mapping[str, Tensor]) -> Weights:
    """The weights of a message, float32.

    Raises:
        DataError: They are missing, or names, shapes, types or values are not those of the model.
    """
    found = _tensors(content, "weights", whose)
    odd = next((name for name, value in found.items() if value.dtype not in _FLOATS), None)
    if odd is not None:
        raise DataError(f"{whose}: {odd!r} is {found[odd].dtype}, not float16 or float32.", kind="bad update")
    weights = {name: value.float() for name, value in found.items()}
    check_weights(whose, weights, like)
    return weights


def rows_record(rows: Tensor) -> ArrayRecord:
    """Request rows, ``(rows, dim)``."""
    return _record({"rows": rows.float()})


def rows_of(content: RecordDict, whose: str, *, name: str = "rows", dim: int | None = None) -> Tensor:
    """Request rows, float32, ``(rows, dim)``.

    Raises:
        DataError: They are missing, of another shape, or not finite.
    """
    return checked_rows(_tensors(content, name, whose).get("rows"), whose, dim=dim)


def checked_rows(rows: Tensor | None, whose: str, *, dim: int | None) -> Tensor:
    """Request rows, however they came, float32.

    Raises:
        DataError: They are missing, of another shape, or not finite.
    """
    if rows is None or rows.dim() != 2 or rows.dtype not in _FLOATS or (dim is not None and rows.shape[1] != dim):
        shape = None if rows is None else tuple(rows.shape)
        raise DataError(
            f"The request of {whose} has shape {shape} where (rows, {dim or 'dim'}) is needed.", kind="bad request"
        )
    if not bool(torch.isfinite(rows).all()):
        raise DataError(f"The request of {whose} holds values that are not finite.", kind="bad request")
    return rows.float()


# -- negatives ---------------------------------------------------------------------------------


def block_record(block: Block) -> ArrayRecord:
    """An answer, as its three tensors."""
    return _record({"embeddings": block.embeddings, "starts": block.starts, "entries": block.entries})


def block_of(
    content: RecordDict, client: str, *, rows: int, dim: int, limit: int | None = None, name: str = "block"
) -> Block:
    """An answer of one client; who it is says the server, not the answer.

    Raises:
        DataError: Naming the client and what is wrong (`Block.check`).
    """
    return block_of_parts(_tensors(content, name, f"client {client!r}"), client, rows=rows, dim=dim, limit=limit)


def block_of_parts(found: Mapping[str, Tensor], client: str, *, rows: int, dim: int, limit: int | None) -> Block:
    """An answer of one client, of its three tensors, however they came.

    Raises:
        DataError: Naming the client and what is wrong (`Block.check`).
    """
    parts = _named(found, client, ("embeddings", "starts", "entries"))
    block = Block(client, parts["embeddings"], parts["starts"].long(), parts["entries"].to(torch.int32))
    return block.check(rows=rows, dim=dim, limit=limit)


def pool_record(pool: FedPool, *, send_as: torch.dtype) -> ArrayRecord:
    """A pool; its lists, where it has some, without the places that hold nothing.

    Args:
        pool: To be sent.
        send_as: The type that its embeddings were answered in: sending them in it loses nothing.
    """
    parts = {"embeddings": pool.embeddings.to(send_as)}
    if pool.lists is not None:
        there = pool.lists != MISSING
        parts["starts"] = torch.cat([torch.zeros(1, dtype=torch.long), there.sum(1).cumsum(0)])
        parts["entries"] = pool.lists[there].to(torch.int32)
    return _record(parts)


def pool_of_record(content: RecordDict, whose: str, *, dim: int, rows: int | None, name: str = "pool") -> FedPool:
    """A pool, as the asker trains with it.

    Args:
        content: Of the message.
        whose: Who sent it.
        dim: Of the embeddings.
        rows: How many lists are expected; None where it is a pool without lists.
        name: Of the record.

    Raises:
        DataError: Naming what is wrong.
    """
    parts = _tensors(content, name, whose)
    if rows is None:
        embeddings = _named(parts, whose, ("embeddings",))["embeddings"]
        none = torch.zeros(1, dtype=torch.long)
        checked = Block(whose, embeddings, none, torch.empty(0, dtype=torch.int32)).check(rows=0, dim=dim)
        return FedPool(checked.embeddings.float())
    listed = _named(parts, whose, ("embeddings", "starts", "entries"))
    block = Block(whose, listed["embeddings"], listed["starts"].long(), listed["entries"].to(torch.int32))
    return FedPool(block.embeddings.float(), block.check(rows=rows, dim=dim).table())


# -- arrays ------------------------------------------------------------------------------------


def _record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    arrays = {name: Array(np.asarray(value.detach().cpu().contiguous().numpy())) for name, value in tensors.items()}
    return ArrayRecord(arrays)


def _tensors(content: RecordDict, name: str, whose: str) -> dict[str, Tensor]:
    record = content.array_records.get(name)
    if record is None:
        raise DataError(f"The message of {whose} has no {name!r}.", kind="bad message")
    try:
        return {key: torch.from_numpy(np.array(value.numpy())) for key, value in record.items()}
    except (ValueError, TypeError, OSError, EOFError, MemoryError) as error:
        raise DataError(
            f"The message of {whose}: {name!r} holds an array that cannot be read ({type(error).__name__}).",
            kind="bad message",
        ) from error


def _named(parts: Mapping[str, Tensor], whose: str, names: tuple[str, ...]) -> Mapping[str, Tensor]:
    if set(parts) != set(names):
        raise DataError(
            f"The answer of {whose!r} has {', '.join(sorted(parts)) or 'nothing'} where {', '.join(names)} are needed.",
            kind="bad answer",
        )
    odd = next((name for name in names if name != "embeddings" and parts[name].is_floating_point()), None)
    if odd is not None or parts["embeddings"].dtype not in _FLOATS:
        raise DataError(f"The answer of {whose!r}: {odd or 'embeddings'} is of the wrong type.", kind="bad answer")
    return parts
