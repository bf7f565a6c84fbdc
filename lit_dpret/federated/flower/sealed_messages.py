"""Sealed requests and answers in Flower's records, and what a silo does with them (`lit_dpret.federated.sealing`).

The messages are those of the unsealed protocol, with one more at the beginning of a refresh for the keys. What the
server merged there it cannot merge here: every silo gets all answers to its request, and merges them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights
from lit_dpret.federated.fed_negatives import Block, FedPool, merge_lists, pool_of
from lit_dpret.federated.flower.library import Array, ArrayRecord, ConfigRecord, RecordDict
from lit_dpret.federated.flower.payloads import block_of_parts, checked_rows, digest_of, envelope
from lit_dpret.federated.flower.sum_messages import bytes_of, bytes_record, whole
from lit_dpret.federated.sealing import Kind, Refresh, Sealer
from lit_dpret.federated.served import Served
from lit_dpret.federated.silo import SiloClient

REFRESH = ("seal_key", "fedneg_request", "fedneg_serve", "personalise")
_SERVER = "the server"


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


# -- what a silo does --------------------------------------------------------------------------


def seal_key(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """A key for a new refresh, which ends the one before it."""
    if not client.settings.seal:
        raise DataError("The server begins to seal, and the settings do not.", kind="other settings")
    refresh = Refresh(run=digest_of(client.settings), number=whole(head, "refresh"), weights=str(head.get("weights")))
    reply = envelope()
    number = whole(head, "number")
    reply["keys"] = bytes_record({number: _sealer(client).begin(refresh, number)})
    return reply


def sealed_request(client: SiloClient, content: RecordDict, head: Mapping[str, Any], rows: Tensor) -> RecordDict:
    """Request rows, for the silos whose keys the server relays."""
    refresh = _refresh(client, head, whole(head, "refresh"))
    sealer = _sealer(client)
    keys, refused = sealer.usable(refresh, bytes_of(content, "keys", _SERVER))
    letter = sealer.seal(refresh, "request", save({"rows": rows.float().contiguous()}), keys)
    reply = envelope()
    reply["request"], reply["boxes"] = body_record(letter.body), bytes_record(letter.boxes)
    return refusals(reply, refused)


def sealed_answers(client: SiloClient, content: RecordDict, head: Mapping[str, Any], weights: Weights) -> RecordDict:
    """An answer for each request that opens; one for all of them where requests say nothing."""
    number, sealer, keys = whole(head, "refresh"), _sealer(client), bytes_of(content, "keys", _SERVER)
    refresh, says_nothing = _refresh(client, head, number), client.settings.stage2.request == "none"
    asked: dict[int, Tensor] = {}
    refused: dict[int, str] = {}
    for asker, opened in _opened(client, content, refresh, "request", keys, refused).items():
        try:
            rows = _tensors(opened, f"client {asker}").get("rows")
            asked[asker] = checked_rows(rows, f"client {asker}", dim=client.model[1])
            if says_nothing and len(asked[asker]):
                raise DataError(
                    f"Client {asker} asks with rows, under request=none.", kind="has rows, under request=none"
                )
        except DataError as error:
            asked.pop(asker, None)
            refused[asker] = error.kind
    askers = sorted(asked)
    for asker, known in zip(askers, Served(client.state).known(number, [asked[one] for one in askers]), strict=True):
        if not known:
            asked.pop(asker)
            refused[asker] = "came later than the others of this refresh"
    reply = envelope()
    boxes: dict[int, bytes] = {}
    alike = {0: sorted(asked)} if says_nothing and asked else {asker: [asker] for asker in sorted(asked)}
    for place, askers in alike.items():
        block = client.serve(weights, asked[askers[0]], refresh=number)
        parts = {"embeddings": block.embeddings, "starts": block.starts, "entries": block.entries}
        packed = save({name: value.contiguous() for name, value in parts.items()})
        letter = sealer.seal(refresh, "answer", packed, {asker: keys[asker] for asker in askers})
        reply[f"answer.{place}"] = body_record(letter.body)
        boxes.update(letter.boxes)
    reply["boxes"] = bytes_record(boxes)
    return refusals(reply, refused)


def sealed_pool(
    client: SiloClient, content: RecordDict, head: Mapping[str, Any], weights: Weights
) -> tuple[FedPool, dict[int, str]]:
    """The pool that this silo merges of all answers to it; and whose were refused, and why."""
    stage, number = client.settings.stage2, whole(head, "epoch")
    refresh, keys = _refresh(client, head, number), bytes_of(content, "keys", _SERVER)
    rows = client.request(weights, number)
    count, limit = (len(rows), stage.top_k) if len(rows) else (1, stage.n)
    refused: dict[int, str] = {}
    blocks: list[Block] = []
    for sender, opened in _opened(client, content, refresh, "answer", keys, refused).items():
        whose = f"{sender:06}"  # blocks are merged in the order of names
        try:
            parts = _tensors(opened, whose)
            blocks.append(block_of_parts(parts, whose, rows=count, dim=client.model[1], limit=limit))
        except DataError as error:
            refused[sender] = error.kind
    _sealer(client).forget()
    merged = merge_lists(blocks, rows, stage.top_k) if stage.request == "exact" else pool_of(blocks, client.model[1])
    return merged, refused


def end_refresh(client: SiloClient) -> None:
    """Delete the key of a refresh, where the server has gone on to something else."""
    if client.settings.seal:
        _sealer(client).forget()


def refusals(reply: RecordDict, refused: Mapping[int, str]) -> RecordDict:
    """The reply, with whose letters were left out and why."""
    if refused:
        reply["refused"] = ConfigRecord({str(number): why for number, why in refused.items()})
    return reply


def _opened(
    client: SiloClient, content: RecordDict, refresh: Refresh, kind: Kind, keys: Mapping[int, bytes],
    refused: dict[int, str],
) -> dict[int, bytes]:  # fmt: skip
    """What is in the letters of a message, by sender; those that do not open are refused, each by name."""
    sealer, found = _sealer(client), {}
    for sender, box in sorted(bytes_of(content, "boxes", _SERVER).items()):
        try:
            if sender not in keys:
                raise DataError(f"The server relays a letter of client {sender} and no key.", kind="has no key")
            body = body_of(content, f"{kind}.{sender}", _SERVER)
            found[sender] = sealer.open(refresh, kind, body, box, sender=sender, public=keys[sender])
        except DataError as error:
            if error.kind == "no such key":
                raise
            refused[sender] = error.kind
    return found


def _tensors(content: bytes, whose: str) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"The letter of {whose} holds no tensors.", kind="bad answer") from error
    return found


def _refresh(client: SiloClient, head: Mapping[str, Any], number: int) -> Refresh:
    return Refresh(run=digest_of(client.settings), number=number, weights=str(head.get("weights")))


def _sealer(client: SiloClient) -> Sealer:
    return Sealer(client.state, client.credentials)
