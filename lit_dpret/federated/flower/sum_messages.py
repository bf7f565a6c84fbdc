"""The secure sum in Flower's records, and what a silo does with them (`lit_dpret.federated.silo_sum`).

One message for each act of the protocol: a silo cannot share before it knows everybody's keys, nor mask before it has
everybody's shares, nor sign before it is known who is left, nor unmask before enough have signed. Without a roster
nothing is signed. Training is done in the first act, so that a silo that fails in it has shared nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import fingerprint
from lit_dpret.federated.fixed_point import Words
from lit_dpret.federated.flower.library import Array, ArrayRecord, ConfigRecord, RecordDict
from lit_dpret.federated.flower.payloads import digest_of, envelope, weights_of
from lit_dpret.federated.secure_sum import Keys, Unmasking
from lit_dpret.federated.shamir import SHARE_BYTES
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.silo_sum import SiloSum, SumPlan

ACTS = ("secagg_setup", "secagg_share", "secagg_masked", "secagg_sign", "secagg_unmask")
_KEY = 32
SIGNATURE = 64
_SERVER = "the server"

Answer = Callable[[SiloClient, RecordDict, Mapping[str, Any], SiloSum], RecordDict]


# -- records -----------------------------------------------------------------------------------


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


# -- what a silo does --------------------------------------------------------------------------


def secagg_setup(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 1: one local epoch from the global weights, which stays here; keys."""
    weights = weights_of(content, _SERVER, like=client.model[0])
    plan = SumPlan(
        run=digest_of(client.settings), round=whole(head, "round"), attempt=_attempt(head),
        weights=fingerprint(weights), clients=_numbers(head, "clients"),
    )  # fmt: skip
    number = whole(head, "number")
    plan.session(client.settings.sum_threshold)  # refused before anything is learned
    update = client.train_shared(weights, plan.round)
    reply = envelope()
    reply["keys"] = keys_record([sum_.begin(plan, number, weights, update, examples=client.examples)])
    return reply


def secagg_share(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 2: everybody's keys in, sealed shares out."""
    reply = envelope()
    reply["shares"] = bytes_record(sum_.share(_attempt(head), keys_of(content, _SERVER)))
    return reply


def secagg_masked(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 3: sealed shares in, the vector under its masks out."""
    reply = envelope()
    reply["masked"] = words_record(sum_.mask(_attempt(head), bytes_of(content, "shares", _SERVER)))
    return reply


def secagg_sign(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 4: who is left and who was lost in, a signature over it out."""
    if client.credentials is None:
        raise DataError("The server asks for a signature, and the settings have no roster.", kind="other settings")
    reply = envelope()
    signature = sum_.sign(_attempt(head), _numbers(head, "active"), _numbers(head, "dead"))
    reply["signatures"] = bytes_record({client.credentials.number: signature})
    return reply


def secagg_unmask(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 5: who is left, who was lost and who has signed that in, a share of one secret of each out."""
    signatures = bytes_of(content, "signatures", _SERVER, size=SIGNATURE)
    found = sum_.unmask(_attempt(head), _numbers(head, "active"), _numbers(head, "dead"), signatures)
    reply = envelope()
    reply["seeds"], reply["lost"] = bytes_record(found.seeds), bytes_record(found.keys)
    return reply


ANSWERS: dict[str, Answer] = dict(
    zip(ACTS, (secagg_setup, secagg_share, secagg_masked, secagg_sign, secagg_unmask), strict=True)
)


def answered(act: str, client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """One act of a silo, where its settings have a secure sum.

    Raises:
        DataError: They have none, or the message is not as it must be.
    """
    if not client.settings.secure_sum:
        raise DataError("The server begins a secure sum, and the settings have none.", kind="other settings")
    return ANSWERS[act](client, content, head, _sum_of(client))


def end_sum(client: SiloClient) -> None:
    """Delete what a silo keeps of a sum, where the server has gone on to something else."""
    if client.settings.secure_sum:
        _sum_of(client).forget()


def _sum_of(client: SiloClient) -> SiloSum:
    return SiloSum(client.state, client.settings, client.credentials)


def _attempt(head: Mapping[str, Any]) -> str:
    value = head.get("attempt")
    if not isinstance(value, str) or not value:
        raise DataError("The server names no attempt of the sum.", kind="bad message")
    return value


def whole(head: Mapping[str, Any], name: str) -> int:
    """A number of a message's head.

    Raises:
        DataError: It is none.
    """
    value = head.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"The server's {name} is {value!r} and no number.", kind="bad message")
    return value


def _numbers(head: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = head.get(name, [])  # Flower cannot count the bytes of an empty list, so none is sent
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise DataError(f"The server's {name} are no list of numbers.", kind="bad message")
    return tuple(value)
