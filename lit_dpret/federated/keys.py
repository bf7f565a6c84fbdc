"""Keys, signatures, boxes, shared secrets and identities for the secure sum and for sealing.

X25519, HKDF-SHA256, ChaCha20-Poly1305 and Ed25519 from the package cryptography; keys are their 32 raw bytes. Every
derived key, signature and box is bound to a `label` that states its purpose. A silo's identity is its long-term signing
key. People write the roster of all public keys and distribute it without using the federation's server. A silo's number
is the position of its name in alphabetical order, from 1.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lit_dpret.errors import ConfigurationError, DataError, schema_problem

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:  # pragma: no cover
    raise ConfigurationError(
        'federated.secure_sum and federated.seal need cryptography. Run: pip install "lit-dpret[federated]".'
    ) from error


KEY_BYTES, SIGNATURE_BYTES = 32, 64
_NONCE_BYTES = 12
_RAW = serialization.Encoding.Raw


def label(*parts: str | int | bytes) -> bytes:
    """Concatenate the parts, each with its length, so that different parts never give the same bytes."""
    data = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in data)


def new_key() -> bytes:
    """Draw a private key for `agreed`."""
    return X25519PrivateKey.generate().private_bytes(
        _RAW, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )


def public_of(key: bytes) -> bytes:
    """Return the public half of a key for `agreed`."""
    return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes(_RAW, serialization.PublicFormat.Raw)


def agreed(key: bytes, other: bytes, *, salt: bytes, info: bytes) -> bytes:
    """Derive 32 bytes that only the two key owners can derive, each from the other's public half."""
    try:
        secret = X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise DataError("A relayed public key is not an X25519 key.", kind="bad protocol") from error
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate under a key; ``about`` is authenticated as well, but not sent."""
    # The nonce is random: one key may seal 2^32 boxes before two nonces are likely to collide.
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, about)


def unseal(key: bytes, box: bytes, about: bytes) -> bytes | None:
    """Open a box; return None if it was changed, or sealed under another key or context."""
    try:
        return ChaCha20Poly1305(key).decrypt(box[:_NONCE_BYTES], box[_NONCE_BYTES:], about)
    except (InvalidTag, ValueError):
        return None


def key_stream(key: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """Yield the ChaCha20 stream under a single-use key, in consecutive pieces of these sizes."""
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    for size in sizes:
        yield encryptor.update(bytes(size))


def new_identity() -> tuple[bytes, bytes]:
    """Draw a long-term signing key for a roster; return it and its public half."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(_RAW, serialization.PrivateFormat.Raw, serialization.NoEncryption())
    return private, identity_of(private)


def identity_of(key: bytes) -> bytes:
    """Return the public half of a signing key."""
    return Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes(_RAW, serialization.PublicFormat.Raw)


def sign(key: bytes, content: bytes) -> bytes:
    """Return a signature, 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(key).sign(content)


def is_signed(public: bytes, signature: bytes, content: bytes) -> bool:
    """Return whether the owner of a signing key signed this."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


PRIME = 2**521 - 1  # a Mersenne prime, above every 32-byte secret
SECRET_BYTES, SHARE_BYTES = 32, 66


def split(secret: bytes, *, threshold: int, holders: list[int]) -> dict[int, bytes]:
    """Split 32 bytes so that any ``threshold`` of the holders, positive numbers, recover them and fewer learn nothing.

    Shamir, "How to share a secret", 1979. Fewer shares are uniformly distributed, whatever the secret is.
    """
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]

    def value(at: int) -> int:
        return functools.reduce(lambda total, one: (total * at + one) % PRIME, reversed(coefficients), 0)

    return {holder: value(holder).to_bytes(SHARE_BYTES, "big") for holder in holders}


def join(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """Recover a secret from shares, by Lagrange interpolation at 0."""
    if len(shares) < threshold:
        raise DataError(f"{len(shares)} shares arrived and {threshold} are needed, so the secret stays unknown.")
    chosen = dict(sorted(shares.items())[:threshold])
    total = 0
    for holder, share in chosen.items():
        above = below = 1
        for other in chosen:
            if other != holder:
                above = above * -other % PRIME
                below = below * (holder - other) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    found = total % PRIME
    if found.bit_length() > 8 * SECRET_BYTES:
        raise DataError("The shares do not belong to one secret: one was changed, or is from another round.")
    return found.to_bytes(SECRET_BYTES, "big")


ROSTER_SCHEMA = "lit-dpret/federated-roster/1"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A silo's name, signing key and roster."""

    name: str
    identity: bytes = field(repr=False)
    roster: Mapping[str, bytes] = field(repr=False)

    def __post_init__(self) -> None:
        if self.roster.get(self.name) != identity_of(self.identity):
            raise ConfigurationError(
                f"The roster does not list silo {self.name!r} with the public half of its signing key. Add it, and "
                "give every silo the same roster."
            )
        if len(set(self.roster.values())) != len(self.roster):
            raise ConfigurationError(
                "The roster lists one key for two silos: give each its own, or either can sign for both."
            )

    @property
    def number(self) -> int:
        return sorted(self.roster).index(self.name) + 1

    @property
    def by_number(self) -> dict[int, bytes]:
        return {place: self.roster[name] for place, name in enumerate(sorted(self.roster), start=1)}

    def sign(self, content: bytes) -> bytes:
        return sign(self.identity, content)

    def signed_by(self, number: int, signature: bytes, content: bytes) -> bool:
        """Return whether the silo with this number made this signature."""
        public = self.by_number.get(number)
        return public is not None and is_signed(public, signature, content)


def make_identity(path: str | Path) -> str:
    """Write a new signing key that only its owner can read; return its public half in hexadecimal, for the roster."""
    private, public = new_identity()
    path = Path(path).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(private.hex() + "\n")
    except OSError as error:
        raise ConfigurationError(f"A signing key cannot be written to {path}: {error.strerror or error}.") from error
    return public.hex()


def write_roster(path: str | Path, keys: Mapping[str, str]) -> None:
    """Write a roster of public keys, given in hexadecimal by name."""
    facts = {"schema": ROSTER_SCHEMA, "silos": dict(sorted(keys.items()))}
    Path(path).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def load_credentials(name: str, key_file: str | Path, roster_file: str | Path) -> Credentials:
    """Load a silo's credentials from its two files."""
    key_path, roster_path = Path(key_file).expanduser(), Path(roster_file).expanduser()
    try:
        mode = stat.S_IMODE(key_path.stat().st_mode)
        private = key_path.read_text(encoding="ascii").strip()
        facts = json.loads(roster_path.read_text(encoding="utf-8"))
        problem = schema_problem(facts.get("schema"), ROSTER_SCHEMA)
        found = {str(silo): bytes.fromhex(public) for silo, public in facts.get("silos", {}).items()}
        identity = bytes.fromhex(private)
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, AttributeError) as error:  # its message is left out: it could contain a key
        raise ConfigurationError(f"{key_path} is not a signing key, or {roster_path} is not a roster.") from error
    if mode & 0o077:
        raise ConfigurationError(f"{key_path} has mode {mode:04o} and can be read by others. Run: chmod 600 {key_path}")
    if problem is not None:
        raise ConfigurationError(f"{roster_path} cannot be read: {problem}")
    if len(identity) != KEY_BYTES or any(len(public) != KEY_BYTES for public in found.values()):
        raise ConfigurationError(f"{key_path} or a key in {roster_path} is not {KEY_BYTES} bytes long.")
    return Credentials(name=name, identity=identity, roster=found)
