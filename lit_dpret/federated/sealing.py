"""Messages between silos, sealed so that the relaying server sees only their sizes.

Each silo draws an X25519 key for every refresh and deletes it afterwards. A *letter* is one body for all its readers,
sealed under its own key, and for each reader a box with this key. A box is bound to run, refresh, weights, sender,
reader, kind and the hash of the body. With a roster, owners sign their keys; without one, the server is trusted.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lit_dpret.errors import DataError
from lit_dpret.federated.keys import KEY_BYTES, Credentials, agreed, label, new_key, public_of, seal, unseal
from lit_dpret.federated.storage import save_json

Kind = Literal["request", "answer"]
_KINDS: tuple[Kind, ...] = ("request", "answer")
_SALT = b"lit-dpret sealing/1"
_HEADER = struct.Struct(">BIII")  # kind, refresh, sender, receiver: in clear, so that a refusal can give a reason


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """The refresh to which a sealed message belongs."""

    run: str  # digest of the settings
    number: int
    weights: str  # fingerprint of the global weights


@dataclass(frozen=True)
class Letter:
    """A sealed body, and for each receiver a box with its key."""

    body: bytes
    boxes: Mapping[int, bytes]


class Sealer:
    """One silo's key for one refresh, with sealing and opening.

    Guarantees:
        - Only its readers can open a letter. All others see only its size.
        - With credentials it neither seals for nor opens from a key that is not signed by the roster.
    """

    def __init__(self, state: Path, credentials: Credentials | None = None) -> None:
        self._path, self._credentials = state / "sealing" / "key.json", credentials

    def begin(self, refresh: Refresh, number: int) -> bytes:
        """Draw a key for a refresh; return its public half, followed by a signature if there are credentials."""
        one = self._credentials
        if max(number, refresh.number) >= 2**32:
            raise DataError("The server's number for this silo or refresh is out of range.", kind="bad message")
        if one is not None and number != one.number:
            raise DataError("The server's number for this silo is not that of the roster.", kind="bad protocol")
        key = new_key()
        save_json(self._path, {"refresh": asdict(refresh), "number": number, "key": key.hex()})
        public = public_of(key)
        return public if one is None else public + one.sign(_key_of(refresh, number, public))

    def usable(self, refresh: Refresh, keys: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Return by number the keys for which messages can be sealed, and the fault of each other key."""
        good: dict[int, bytes] = {}
        bad: dict[int, str] = {}
        own = self._own(refresh)[1]
        for number, public in keys.items():
            try:
                self._shared(own, refresh, number, public)
                good[number] = public
            except DataError as error:
                bad[number] = error.kind
        return good, bad

    def seal(self, refresh: Refresh, kind: Kind, content: bytes, to: Mapping[int, bytes]) -> Letter:
        own, key = self._own(refresh), secrets.token_bytes(KEY_BYTES)
        body = seal(key, content, label("body", *_parts(refresh), kind, own[0]))
        boxes = {
            receiver: _HEADER.pack(_KINDS.index(kind), refresh.number, own[0], receiver)
            + seal(self._shared(own[1], refresh, receiver, public), key, _about(refresh, kind, own[0], receiver, body))
            for receiver, public in to.items()
        }
        return Letter(body, boxes)

    def open(self, refresh: Refresh, kind: Kind, body: bytes, box: bytes, *, sender: int, public: bytes) -> bytes:
        own = self._own(refresh)
        if len(box) < _HEADER.size:
            raise _refused(sender, "was cut")
        said_kind, said_refresh, said_sender, said_receiver = _HEADER.unpack_from(box)
        if said_refresh != refresh.number:
            raise _refused(sender, f"is of refresh {said_refresh} and not of {refresh.number}")
        if said_receiver != own[0]:
            raise _refused(sender, "was meant for another silo")
        if said_sender != sender:
            raise _refused(sender, "is another silo's")
        if said_kind != _KINDS.index(kind):
            raise _refused(sender, f"is no {kind}")
        shared = self._shared(own[1], refresh, sender, public)
        key = unseal(shared, box[_HEADER.size :], _about(refresh, kind, sender, own[0], body))
        found = None if key is None else unseal(key, body, label("body", *_parts(refresh), kind, sender))
        if found is None:
            raise _refused(sender, "was changed on the way")
        return found

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)

    def _own(self, refresh: Refresh) -> tuple[int, bytes]:
        facts = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}
        if facts.get("refresh") != asdict(refresh):
            raise DataError(f"This silo has no key for refresh {refresh.number}.", kind="no such key")
        return int(facts["number"]), bytes.fromhex(facts["key"])

    def _shared(self, own: bytes, refresh: Refresh, number: int, public: bytes) -> bytes:
        key, signature = public[:KEY_BYTES], public[KEY_BYTES:]
        one = self._credentials
        if one is not None and not one.signed_by(number, signature, _key_of(refresh, number, key)):
            raise DataError(
                f"The key of client {number} is not signed with that client's key on the roster: another party made "
                "it.",
                kind="has a key that is not signed by the roster's",
            )
        return agreed(own, key, salt=_SALT, info=label(*_parts(refresh)))


def _parts(refresh: Refresh) -> tuple[str, int, str]:
    return refresh.run, refresh.number, refresh.weights


def _key_of(refresh: Refresh, number: int, public: bytes) -> bytes:
    return label("lit-dpret sealing/1", "key", *_parts(refresh), number, public)


def _about(refresh: Refresh, kind: Kind, sender: int, receiver: int, body: bytes) -> bytes:
    return label("box", *_parts(refresh), kind, sender, receiver, hashlib.sha256(body).digest())


def _refused(sender: int, why: str) -> DataError:
    return DataError(f"The letter of client {sender} {why}, and is left out.", kind=why)
