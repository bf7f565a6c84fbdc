"""What travels in Flower's records, and what is refused of it: weights, request rows, answers and pools.

Every message has a ``head`` that states the version of this format. Weights are floating-point tensors alone: an
integer buffer has no mean. Negatives travel as every embedding once and lists of places (`Block`). Whatever comes from
another machine is checked here before anything is computed with it, and what is wrong is named with whose it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError, schema_problem
from lit_dpret.federated.aggregation import Weights, check_weights
from lit_dpret.federated.fed_negatives import Block, FedPool
from lit_dpret.federated.flower.library import Array, ArrayRecord, ConfigRecord, RecordDict
from lit_dpret.federated.keys import SHARE_BYTES
from lit_dpret.federated.secure_sum import Keys, Unmasking, Words
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


_KEY = 32


SIGNATURE = 64


def bytes_record(found: Mapping[int, bytes]) -> ConfigRecord:
    """Bytes by a silo's number."""
    return ConfigRecord({str(number): value for number, value in found.items()})


def bytes_of(content: RecordDict, name: str, whose: str, *, size: int | None = None) -> dict[int, bytes]:
    """Bytes by a silo's number, each of ``size``; a record that is missing holds none.

    Raises:
        DataError: A name is no number, or a value is not so many bytes.
    """
    record = content.config_records.get(name, {})
    found: dict[int, bytes] = {}
    for number, value in record.items():
        fits = isinstance(value, bytes) and (size is None or len(value) == size)
        if not is_number(number) or not fits:
            raise DataError(f"The message of {whose} has no bytes by number in {name!r}.", kind="bad message")
        found[int(number)] = value
    return found


def is_number(name: str) -> bool:
    """Whether a name in a record is a silo's number."""
    return name.isascii() and name.isdigit() and len(name) < 10


def keys_record(keys: Iterable[Keys]) -> ConfigRecord:
    """Advertised keys."""
    return bytes_record({one.client: one.seal + one.mask + one.signature for one in keys})


def keys_of(content: RecordDict, whose: str) -> list[Keys]:
    """Advertised keys, in the order of their owners' numbers.

    Raises:
        DataError: Something in their place has not the length of keys.
    """
    found: list[Keys] = []
    for number, value in sorted(bytes_of(content, "keys", whose).items()):
        if len(value) not in (2 * _KEY, 2 * _KEY + SIGNATURE):
            raise DataError(f"The message of {whose} has keys of {len(value)} bytes.", kind="bad message")
        found.append(Keys(number, value[:_KEY], value[_KEY : 2 * _KEY], value[2 * _KEY :]))
    return found


def words_record(words: Words) -> ArrayRecord:
    """A vector under its masks."""
    return ArrayRecord({"words": Array(np.ascontiguousarray(words.astype("<u4")))})


def words_of(content: RecordDict, whose: str, *, size: int) -> Words:
    """A vector under its masks: there is no value that would be wrong for it, but a length and a type.

    Raises:
        DataError: It is missing, or of another length or type.
    """
    record = content.array_records.get("masked", {})
    try:
        found = np.array(record["words"].numpy()) if set(record) == {"words"} else None
    except (ValueError, TypeError, OSError, EOFError, MemoryError):
        found = None
    if found is None or found.shape != (size,) or found.dtype != np.uint32:
        raise DataError(f"The message of {whose} has no vector of {size} words.", kind="bad update")
    words: Words = found.astype(np.uint32)
    return words


def unmasking_of(content: RecordDict, whose: str, number: int, active: list[int], dead: list[int]) -> Unmasking:
    """What one silo reveals; who it is says the server's own list.

    Raises:
        DataError: A share is missing, too many, or of another length.
    """
    found = Unmasking(
        number,
        bytes_of(content, "seeds", whose, size=SHARE_BYTES),
        bytes_of(content, "lost", whose, size=SHARE_BYTES),
    )
    if sorted(found.seeds) != active or sorted(found.keys) != dead:
        raise DataError(f"The message of {whose} holds shares of other clients than were asked for.", kind="bad update")
    return found


def body_record(body: bytes) -> ArrayRecord:
    """The body of a letter."""
    return ArrayRecord({"body": Array(np.frombuffer(body, dtype=np.uint8))})


def body_of(content: RecordDict, name: str, whose: str) -> bytes:
    """The body of a letter.

    Raises:
        DataError: There is none.
    """
    record = content.array_records.get(name, {})
    try:
        found = record["body"].numpy() if set(record) == {"body"} else None
    except (ValueError, TypeError, OSError, EOFError, MemoryError):
        found = None
    if found is None or found.ndim != 1 or found.dtype != np.uint8:
        raise DataError(f"The message of {whose} has no letter {name!r}.", kind="bad message")
    return bytes(found.tobytes())
