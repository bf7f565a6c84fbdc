"""Encode the content of Flower's records: weights, requests, answers, pools, keys, shares, sealed messages.

Every message has a ``head`` that states the version of this format. Everything that comes from another machine is
checked here before anything is computed with it, and refused with its sender's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import DataError, in_words, schema_problem
from lit_dpret.federated.aggregation import Weights, check_weights
from lit_dpret.federated.flower.library import Array, ArrayRecord, ConfigRecord, RecordDict
from lit_dpret.federated.keys import KEY_BYTES, SHARE_BYTES, SIGNATURE_BYTES
from lit_dpret.federated.negatives import Block, FedPool
from lit_dpret.federated.secure_sum import Keys, Unmasking, Words
from lit_dpret.federated.settings import PddAs2
from lit_dpret.files import json_sha256
from lit_dpret.retrieval.search import MISSING, unbroken
from lit_dpret.settings import is_whole

SCHEMA = "lit-dpret/federated-message/1"
_FLOATS = (torch.float16, torch.float32)


def envelope(**facts: Any) -> RecordDict:
    """Return a message with these texts and numbers in its head."""
    return RecordDict({"head": ConfigRecord({"schema": SCHEMA, **facts})})


def answer(**records: ArrayRecord | ConfigRecord) -> RecordDict:
    """Return a message with these records and an empty head."""
    return RecordDict({**envelope(), **records})


def head_of(content: RecordDict, whose: str) -> Mapping[str, Any]:
    """Return the head of a message."""
    head: Mapping[str, Any] = content.get("head", {})
    problem = schema_problem(head.get("schema") if isinstance(head, ConfigRecord) else None, SCHEMA)
    if problem is not None:
        raise DataError(f"The message of {whose} cannot be read: {problem}", kind="bad message")
    return head


def whole(head: Mapping[str, Any], name: str) -> int:
    """Return a non-negative integer from the head of a server's message."""
    value = head.get(name)
    if not is_whole(value) or value < 0:
        raise DataError(f"The server's {name}={value!r} must be an integer of at least 0.", kind="bad message")
    return value


def payload_bytes(content: RecordDict) -> int:
    """Return the size of a message's tensors, keys, shares and boxes, without its head."""
    boxes = [record for name, record in content.config_records.items() if name != "head"]
    return sum(record.count_bytes() for record in (*content.array_records.values(), *boxes))


def digest_of(settings: PddAs2) -> str:
    """Return the SHA-256 of a run's settings, with which server and silos check that they agree."""
    return json_sha256(asdict(settings))


# -- weights and request rows ------------------------------------------------------------------


def weights_of(content: RecordDict, whose: str, *, like: Mapping[str, Tensor]) -> Weights:
    """Decode weights as float32; refuse names, shapes, types or values that differ from the model ``like``."""
    found = _tensors(content, "weights", whose)
    odd = next((name for name, value in found.items() if value.dtype not in _FLOATS), None)
    if odd is not None:
        raise DataError(f"{whose}: {odd!r} is {found[odd].dtype}, not float16 or float32.", kind="bad update")
    weights = {name: value.float() for name, value in found.items()}
    check_weights(whose, weights, like)
    return weights


def rows_of(content: RecordDict, whose: str, *, name: str = "rows", dim: int) -> Tensor:
    """Decode request rows, float32, ``(rows, dim)``."""
    return checked_rows(_tensors(content, name, whose).get("rows"), whose, dim=dim)


def checked_rows(rows: Tensor | None, whose: str, *, dim: int) -> Tensor:
    """Return request rows as float32, from any transport; refuse other shapes, and rows without finite scores."""
    if rows is None or rows.dim() != 2 or rows.dtype not in _FLOATS or rows.shape[1] != dim:
        shape = None if rows is None else tuple(rows.shape)
        raise DataError(f"The request of {whose} has shape {shape} instead of (rows, {dim}).", kind="bad request")
    if not bool(unbroken(rows).all()):
        raise DataError(f"The request of {whose} holds rows without finite scores.", kind="bad request")
    return rows.float()


# -- negatives ---------------------------------------------------------------------------------


def block_of(
    content: RecordDict, client: str, *, rows: int, dim: int, limit: int | None = None, name: str = "block"
) -> Block:
    """Decode the answer of a client, whose name the server knows from the message."""
    return block_of_parts(_tensors(content, name, f"client {client!r}"), client, rows=rows, dim=dim, limit=limit)


def block_of_parts(parts: Mapping[str, Tensor], client: str, *, rows: int, dim: int, limit: int | None) -> Block:
    """Build an answer from its three tensors, from any transport; refuse what `Block.check` refuses."""
    _require_parts(parts, client, ("embeddings", "starts", "entries"))
    block = Block(client, parts["embeddings"], parts["starts"].long(), parts["entries"].to(torch.int32))
    return block.check(rows=rows, dim=dim, limit=limit)


def pool_record(pool: FedPool, *, send_as: torch.dtype) -> ArrayRecord:
    """Encode a pool losslessly, in the dtype of its answers."""
    parts = {"embeddings": pool.embeddings.to(send_as)}
    if pool.lists is not None:
        # Lists are sent without their padding.
        there = pool.lists != MISSING
        parts["starts"] = torch.cat([torch.zeros(1, dtype=torch.long), there.sum(1).cumsum(0)])
        parts["entries"] = pool.lists[there].to(torch.int32)
    return tensors_record(parts)


def pool_of_record(content: RecordDict, whose: str, *, dim: int, rows: int | None) -> FedPool:
    """Decode a pool with ``rows`` lists, or without lists if ``rows`` is None."""
    parts = _tensors(content, "pool", whose)
    if rows is None:
        _require_parts(parts, whose, ("embeddings",))
        parts |= {"starts": torch.zeros(1, dtype=torch.long), "entries": torch.empty(0, dtype=torch.int32)}
    block = block_of_parts(parts, whose, rows=rows or 0, dim=dim, limit=None)
    return FedPool(block.embeddings.float(), None if rows is None else block.table())


# -- keys, shares, vectors and letters ---------------------------------------------------------


def bytes_record(found: Mapping[int, bytes]) -> ConfigRecord:
    """Encode bytes by silo number."""
    return ConfigRecord({str(number): value for number, value in found.items()})


def bytes_of(content: RecordDict, name: str, whose: str, *, size: int | None = None) -> dict[int, bytes]:
    """Decode bytes by silo number, each of ``size``; empty if the record is missing."""
    found: dict[int, bytes] = {}
    for number, value in content.config_records.get(name, {}).items():
        fits = isinstance(value, bytes) and (size is None or len(value) == size)
        if not is_number(number) or not fits:
            raise DataError(
                f"The message of {whose} has other things than silo numbers and their bytes in {name!r}.",
                kind="bad message",
            )
        found[int(number)] = value
    return found


def is_number(name: str) -> bool:
    """Return whether a name in a record is a silo's number."""
    return name.isascii() and name.isdigit() and len(name) < 10


def keys_record(keys: Iterable[Keys]) -> ConfigRecord:
    """Encode advertised keys."""
    return bytes_record({one.client: one.seal + one.mask + one.signature for one in keys})


def keys_of(content: RecordDict, whose: str) -> list[Keys]:
    """Decode advertised keys, in the order of their owners' numbers."""
    found: list[Keys] = []
    for number, value in sorted(bytes_of(content, "keys", whose).items()):
        if len(value) not in (2 * KEY_BYTES, 2 * KEY_BYTES + SIGNATURE_BYTES):
            raise DataError(f"The message of {whose} has keys of an unexpected {len(value)} bytes.", kind="bad message")
        found.append(Keys(number, value[:KEY_BYTES], value[KEY_BYTES : 2 * KEY_BYTES], value[2 * KEY_BYTES :]))
    return found


def words_of(content: RecordDict, whose: str, *, size: int) -> Words:
    """Decode a masked vector, of which only the length and type can be checked."""
    words = _tensors(content, "masked", whose).get("words")
    if words is None or words.shape != (size,) or words.dtype != torch.uint32:
        raise DataError(f"The message of {whose} has no vector of {size} words.", kind="bad update")
    return words.numpy()


def unmasking_of(content: RecordDict, whose: str, number: int, active: list[int], dead: list[int]) -> Unmasking:
    """Decode the shares that silo ``number`` reveals; refuse shares of clients that were not requested."""
    seeds, keys = (bytes_of(content, name, whose, size=SHARE_BYTES) for name in ("seeds", "lost"))
    if sorted(seeds) != active or sorted(keys) != dead:
        raise DataError(f"The message of {whose} holds shares of other clients than requested.", kind="bad update")
    return Unmasking(number, seeds, keys)


def body_of(content: RecordDict, name: str, whose: str) -> bytes:
    """Decode the body of a sealed message."""
    body = _tensors(content, name, whose).get("body")
    if body is None or body.dim() != 1 or body.dtype != torch.uint8:
        raise DataError(f"The message of {whose} has no letter {name!r}.", kind="bad message")
    return body.numpy().tobytes()


def body_record(body: bytes) -> ArrayRecord:
    """Encode the body of a sealed message."""
    return tensors_record({"body": torch.frombuffer(bytearray(body), dtype=torch.uint8)})


# -- arrays ------------------------------------------------------------------------------------


def tensors_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Encode tensors."""
    arrays = {name: Array(np.asarray(value.detach().cpu().contiguous().numpy())) for name, value in tensors.items()}
    return ArrayRecord(arrays)


def _tensors(content: RecordDict, name: str, whose: str) -> dict[str, Tensor]:
    record = content.array_records.get(name)
    if record is None:
        raise DataError(f"The message of {whose} has no {name!r}.", kind="bad message")
    try:
        return {key: torch.from_numpy(np.array(value.numpy())) for key, value in record.items()}
    except (ValueError, TypeError, OSError, EOFError, MemoryError) as error:  # TypeError: a dtype that torch lacks
        raise DataError(
            f"The message of {whose}: {name!r} holds an array that cannot be read ({in_words(error)}).",
            kind="bad message",
        ) from error


def _require_parts(parts: Mapping[str, Tensor], whose: str, names: tuple[str, ...]) -> None:
    if set(parts) != set(names):
        raise DataError(
            f"The answer of {whose!r} has {', '.join(sorted(parts)) or 'nothing'} where {', '.join(names)} are needed.",
            kind="bad answer",
        )
    odd = next((name for name in names if name != "embeddings" and parts[name].is_floating_point()), None)
    if odd is not None or parts["embeddings"].dtype not in _FLOATS:
        raise DataError(f"The answer of {whose!r}: {odd or 'embeddings'} is of the wrong type.", kind="bad answer")
