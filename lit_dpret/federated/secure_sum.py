"""A sum that a server learns without learning any summand, even if some clients drop out during the protocol.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), figure 4, with
ChaCha20 masks added modulo 2^32. ``docs/federated.md``, section Secure sum, states what is promised against whom, why
``colluders`` is the limit, and what is not promised: above all, this is not differential privacy.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.keys import (
    SECRET_BYTES,
    SHARE_BYTES,
    agreed,
    is_signed,
    join,
    key_stream,
    label,
    new_key,
    public_of,
    seal,
    sign,
    split,
    unseal,
)

Words = NDArray[np.uint32]
_SALT = b"lit-dpret secure sum/2"
_PIECE = 2**18  # words of a key stream processed at a time: one megabyte, however long the vector is


@dataclass(frozen=True, kw_only=True)
class Session:
    """The public facts on which all clients and the server of one sum agree beforehand.

    Raises:
        ConfigurationError: There are fewer than three clients, or the threshold is out of range.
    """

    name: str  # of this sum; no two sums may share one, since masks are derived from it
    clients: tuple[int, ...]  # every client's number, from 1; with a roster all clients on it, connected or not
    threshold: int = 0  # how many clients must remain at the end; more than half. 0 for more than two thirds.

    def __post_init__(self) -> None:
        count = len(self.clients)
        if len(set(self.clients)) != count or min(self.clients, default=0) < 1:
            raise ConfigurationError("federated.secure_sum: the numbers of the clients must be positive and distinct.")
        if count < 3:
            raise ConfigurationError(
                f"federated.secure_sum=true with {count} clients hides nothing: it needs at least three."
            )
        if not self.threshold:
            object.__setattr__(self, "threshold", threshold_for(None, count))
        if not count // 2 < self.threshold <= count:
            raise ConfigurationError(
                f"threshold={self.threshold} (federated.sum_threshold) must be at most the {count} clients of the sum, "
                "and more than half of them: otherwise two halves could unmask two different sums."
            )

    @property
    def colluders(self) -> int:
        """The most clients that, with a roster, can collude with the server and still learn only a sum of others."""
        return min(2 * self.threshold - len(self.clients) - 1, self.threshold - 2)


def threshold_for(least: int | None, clients: int) -> int:
    """Return the threshold for a sum begun by this many clients: always more than half."""
    return 2 * clients // 3 + 1 if least is None else max(least, clients // 2 + 1)


@dataclass(frozen=True)
class Keys:
    """A client's advertised keys; ``signature`` is empty without a roster."""

    client: int
    seal: bytes
    mask: bytes
    signature: bytes = b""


@dataclass(frozen=True)
class Unmasking:
    """The shares that a client reveals at the end, one for each of the others and itself."""

    client: int
    seeds: Mapping[int, bytes] = field(repr=False)
    keys: Mapping[int, bytes] = field(repr=False)


class Client:
    """One client's side of one sum; used once, phase by phase.

    Guarantees:
        - Everything it sends before phase 5 is uniformly distributed to a party with fewer than ``threshold`` views.
        - For any other client it reveals a share of the seed or of the key, never of both.
        - With a roster it signs one list, and reveals shares only for a list that ``threshold`` of its clients signed.
        - It reveals shares only for a list in which ``threshold`` clients, itself included, claim to have an update.
          Nothing that it sends or refuses earlier depends on which clients have one.

    Args:
        session: The sum.
        number: The client's own number.
        identity: Its long-term signing key; null trusts the keys that the server relays.
        roster: Every client's public key by number; used with ``identity``.
        has_update: Whether the vector is an update, not zeros in place of one.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        *,
        identity: bytes | None = None,
        roster: Mapping[int, bytes] | None = None,
        has_update: bool = True,
    ) -> None:
        if number not in session.clients:
            raise ConfigurationError(f"Client {number} does not belong to the sum {session.name!r}.")
        if roster is not None and set(roster) != set(session.clients):
            raise DataError(
                "The server's numbers are not those of the roster: from fewer silos, it could choose its colluders.",
                kind="bad protocol",
            )
        self.session, self.number = session, number
        self._identity, self._roster = identity, roster
        self._seal, self._mask = new_key(), new_key()
        self._seed = secrets.token_bytes(SECRET_BYTES)
        self._peers: dict[int, Keys] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._with_update = {number} if has_update else set()  # among the clients whose shares arrived here
        self._masked = False
        self.done = False  # it has answered or refused phase 5, and does neither again
        self._signed = b""

    def advertise(self) -> Keys:
        sealing, mask = public_of(self._seal), public_of(self._mask)
        signature = b""
        if self._identity is not None:
            signature = sign(self._identity, self._key_words(self.number, sealing, mask))
        return Keys(self.number, sealing, mask, signature)

    def share(self, advertised: Iterable[Keys]) -> dict[int, bytes]:
        """Phase 2: return for every peer a sealed pair of shares and a flag for whether this client has an update."""
        if self._peers:
            raise DataError(
                "This client has already shared its secrets in this sum, and shares once.", kind="bad protocol"
            )
        found = list(advertised)
        peers = {keys.client: keys for keys in found}
        if len(peers) != len(found) or not set(peers) <= set(self.session.clients):
            raise DataError("The server relayed keys of unknown clients, or two of one client.", kind="bad protocol")
        own = peers.get(self.number)
        if own is None or (own.mask, own.seal) != (public_of(self._mask), public_of(self._seal)):
            raise DataError("The server relayed another key under this client's number.", kind="bad protocol")
        if len({keys.mask for keys in found} | {keys.seal for keys in found}) != 2 * len(found):
            raise DataError("The server relayed one key for two clients.", kind="bad protocol")
        self._need(len(peers), "advertised keys")
        for keys in found:
            self._verify(keys)
        self._peers = peers
        holders = sorted(peers)
        # Every client holds a share of both secrets; `unmask` reveals one of the two for each client, never both.
        seeds = split(self._seed, threshold=self.session.threshold, holders=holders)
        keys_ = split(self._mask, threshold=self.session.threshold, holders=holders)
        self._held[self.number] = (seeds[self.number], keys_[self.number])
        has_update = bytes([self.number in self._with_update])
        return {
            peer: self._sealed(peer, seeds[peer] + keys_[peer] + has_update) for peer in holders if peer != self.number
        }

    def mask(self, words: Words, sealed: Mapping[int, bytes]) -> Words:
        """Phase 3: return the vector under all its masks, given the shares of the remaining peers."""
        if self._masked:
            raise ConfigurationError(
                "A client masks one vector per sum: two under the same masks reveal their difference."
            )
        for peer, box in sealed.items():
            if peer not in self._peers or peer == self.number:
                raise DataError(f"Client {peer} shared without having advertised keys.", kind="bad protocol")
            opened = self._opened(peer, box)
            self._held[peer] = (opened[:SHARE_BYTES], opened[SHARE_BYTES:-1])
            if opened[-1]:
                self._with_update.add(peer)
        self._need(len(self._held), "shared their secrets")
        self._masked = True
        total = words.astype(np.uint32)
        add_stream(total, self._seed)
        for peer in self._held:
            if peer != self.number:
                pair = pair_key(self.session, self._mask, self._peers[peer].mask, self.number, peer)
                # The smaller number adds, the larger subtracts: the mask cancels in their sum modulo 2^32.
                add_stream(total, pair, subtract=self.number > peer)
        return total

    def statement(self, active: Iterable[int], dead: Iterable[int]) -> bytes:
        """Return the statement to sign: the lists, the sum, its clients and threshold, the roster and all keys.

        The keys also cover the sealed shares: a client shares once under its keys, and no third party can seal
        messages between two honest clients.
        """
        alive, lost = self._checked(active, dead)
        keys = [part for one in sorted(self._peers) for part in (one, self._peers[one].seal, self._peers[one].mask)]
        roster = [part for one in sorted(self._roster or {}) for part in (one, (self._roster or {})[one])]
        parts = (label(*sorted(alive)), label(*sorted(lost)), label(*keys), label(*roster))
        return _about(self.session, "lists") + hashlib.sha256(label(*parts)).digest()

    def sign(self, active: Iterable[int], dead: Iterable[int]) -> bytes:
        """Phase 4, with a roster: sign the lists; a client signs one pair of lists for each sum."""
        found = self.statement(active, dead)
        if self._signed not in (b"", found):
            raise DataError(
                "This client has already signed other lists of this sum, and signs once.", kind="signed already"
            )
        self._signed = found
        return sign(self._identity or b"", found)

    def unmask(
        self, active: Iterable[int], dead: Iterable[int], signatures: Mapping[int, bytes] | None = None
    ) -> Unmasking:
        """Phase 5: reveal a seed share of every client whose vector arrived, and a key share of every other client.

        With a roster it needs the signatures of phase 4, by client.
        """
        if self.done:
            raise DataError(
                "This client has already unmasked this sum or refused to, and answers once.", kind="bad protocol"
            )
        alive, lost = self._checked(active, dead)
        if self._roster is not None:
            found = self.statement(alive, lost)
            given = {one: signature for one, signature in (signatures or {}).items() if one in alive}
            good = sum(is_signed(self._roster[one], signature, found) for one, signature in given.items())
            if good < self.session.threshold or self._signed not in (b"", found):
                raise DataError(
                    f"{good} clients signed these lists; {self.session.threshold} are needed, and this one must not "
                    "have signed others. The server may have sent other lists to some.",
                    kind="lists not signed",
                )
        # After all other checks: this refusal reveals something about the clients of a list, and of one list only.
        self.done = True
        if len(alive & self._with_update) < self.session.threshold:
            raise DataError(
                f"{len(alive & self._with_update)} clients have an update and {self.session.threshold} are needed: the "
                f"sum {self.session.name!r} would cover too few.",
                kind="too few updates",
            )
        return Unmasking(
            self.number,
            {peer: self._held[peer][0] for peer in sorted(alive)},
            {peer: self._held[peer][1] for peer in sorted(lost)},
        )

    def _checked(self, active: Iterable[int], dead: Iterable[int]) -> tuple[set[int], set[int]]:
        alive, lost = set(active), set(dead)
        if not self._masked:
            raise DataError("This client has sent no vector in this sum.", kind="bad protocol")
        if alive & lost:
            raise DataError(
                f"Clients {sorted(alive & lost)} are listed as both active and lost, which would reveal their vectors.",
                kind="bad protocol",
            )
        if alive | lost != set(self._held) or self.number not in alive:
            raise DataError(
                "The lists must be exactly the clients that shared secrets, this one active.", kind="bad protocol"
            )
        self._need(len(alive), "sent a vector")
        return alive, lost

    def to_state(self) -> dict[str, Any]:
        """Return the client's complete state as plain values. It includes secrets: keep it on the owner's disk only."""
        peers = [[one.client, one.seal.hex(), one.mask.hex(), one.signature.hex()] for one in self._peers.values()]
        return {
            "seal": self._seal.hex(), "mask": self._mask.hex(), "seed": self._seed.hex(),
            "peers": peers, "held": [[peer, seed.hex(), key.hex()] for peer, (seed, key) in self._held.items()],
            "with_update": sorted(self._with_update),
            "masked": self._masked, "signed": self._signed.hex(), "done": self.done,
        }  # fmt: skip

    def go_on(self, state: Mapping[str, Any]) -> Client:
        """Restore the state from `to_state`, also in another process, for the same session; return the client."""
        self._seal, self._mask, self._seed = (bytes.fromhex(state[name]) for name in ("seal", "mask", "seed"))
        self._peers = {peer: Keys(peer, *map(bytes.fromhex, keys)) for peer, *keys in state["peers"]}
        self._held = {peer: (bytes.fromhex(seed), bytes.fromhex(key)) for peer, seed, key in state["held"]}
        self._with_update = set(state["with_update"])
        self._masked, self.done = bool(state["masked"]), bool(state["done"])
        self._signed = bytes.fromhex(state["signed"])
        return self

    def _need(self, count: int, what: str) -> None:
        if count < self.session.threshold:
            raise DataError(
                f"{count} clients {what} and {self.session.threshold} are needed: {self.session.name!r} is abandoned.",
                kind="too few clients",
            )

    def _key_words(self, client: int, sealing: bytes, mask: bytes) -> bytes:
        return _SALT + b"\0" + _about(self.session, "keys", client) + sealing + mask

    def _verify(self, keys: Keys) -> None:
        if self._roster is None:
            return
        known = self._roster.get(keys.client)
        if known is None or not is_signed(known, keys.signature, self._key_words(keys.client, keys.seal, keys.mask)):
            raise DataError(
                f"The keys of client {keys.client} are not signed with that client's key on the roster.",
                kind=f"bad signature of client {keys.client}",
            )

    def _box(self, peer: int) -> bytes:
        low, high = sorted((self.number, peer))
        return agreed(self._seal, self._peers[peer].seal, salt=_SALT, info=_about(self.session, "seal", low, high))

    def _sealed(self, peer: int, content: bytes) -> bytes:
        return seal(self._box(peer), content, _about(self.session, "shares", self.number, peer))

    def _opened(self, peer: int, box: bytes) -> bytes:
        found = unseal(self._box(peer), box, _about(self.session, "shares", peer, self.number))
        if found is None or len(found) != 2 * SHARE_BYTES + 1:
            raise DataError(f"The shares of client {peer} were changed on the way.", kind="bad protocol")
        return found


class Server:
    """The server's side: relay, sum, and unmask."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.keys: dict[int, Keys] = {}
        self.sharers: set[int] = set()
        self.masked: dict[int, Words] = {}

    def route(self, sealed: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """Regroup sealed shares from sender to receiver, among the clients that shared."""
        self.sharers = set(sealed)
        return {
            receiver: {sender: boxes[receiver] for sender, boxes in sealed.items() if sender != receiver}
            for receiver in sorted(self.sharers)
        }

    @property
    def active(self) -> list[int]:
        return sorted(self.masked)

    @property
    def dead(self) -> list[int]:
        """The clients that sent shares, which others used for their masks, but no vector."""
        return sorted(self.sharers - set(self.masked))

    def total(self, unmaskings: Iterable[Unmasking]) -> Words:
        """Remove the masks; return the sum of the active clients' vectors."""
        answers = {one.client: one for one in unmaskings}
        if len(answers) < self.session.threshold:
            raise DataError(
                f"{len(answers)} clients unmasked and {self.session.threshold} are needed for {self.session.name!r}.",
                kind="too few clients",
            )
        total: Words = np.zeros_like(next(iter(self.masked.values())))
        for words in self.masked.values():
            total += words
        for client in self.active:
            add_stream(total, self._joined(answers, client, "seeds"), subtract=True)
        for client in self.dead:
            key = self._joined(answers, client, "keys")
            if public_of(key) != self.keys[client].mask:
                raise DataError(f"The shares of client {client} do not give its key.", kind="bad protocol")
            for peer in self.active:
                # The peer added the mask if its number is the smaller one, and subtracted it otherwise.
                pair = pair_key(self.session, key, self.keys[peer].mask, client, peer)
                add_stream(total, pair, subtract=peer < client)
        return total

    def _joined(self, answers: Mapping[int, Unmasking], client: int, part: str) -> bytes:
        shares = {holder: getattr(one, part)[client] for holder, one in answers.items() if client in getattr(one, part)}
        return join(shares, threshold=self.session.threshold)


def add_stream(total: Words, key: bytes, *, subtract: bool = False) -> None:
    """Add the ChaCha20 key stream under ``key`` to all words, in place; use each key for one sum only."""
    starts = range(0, len(total), _PIECE)
    sizes = (4 * (min(start + _PIECE, len(total)) - start) for start in starts)
    for start, piece in zip(starts, key_stream(key, sizes), strict=True):
        words: Any = np.frombuffer(piece, dtype="<u4")
        part = total[start : start + len(words)]
        (np.subtract if subtract else np.add)(part, words, out=part)


def pair_key(session: Session, own: bytes, other: bytes, one: int, two: int) -> bytes:
    """Derive the key of the mask between two clients; both sides get the same."""
    low, high = sorted((one, two))
    return agreed(own, other, salt=_SALT, info=_about(session, "mask", low, high))


def _about(session: Session, purpose: str, *numbers: int) -> bytes:
    return label(session.name, purpose, *numbers, session.threshold, *session.clients)
