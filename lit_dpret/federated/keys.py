"""Keys, signatures, boxes and shared secrets, from which the secure sum and the sealing between silos are built.

X25519 (RFC 7748), HKDF-SHA256 (RFC 5869), ChaCha20-Poly1305 (RFC 8439) and Ed25519 (RFC 8032), all of the package
cryptography; keys are their 32 raw bytes. Every derived key, signature and box is bound to a `label` that states its
purpose, so that none of them is valid anywhere else.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping

from lit_dpret.errors import ConfigurationError, DataError

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
        'federated.secure_sum and federated.seal need the package cryptography: pip install "lit-dpret[federated]".'
    ) from error


KEY_BYTES, SIGNATURE_BYTES = 32, 64


_NONCE_BYTES = 12


_RAW = serialization.Encoding.Raw


def label(*parts: str | int | bytes) -> bytes:
    """Concatenate the parts, each after its length: different parts never give the same bytes."""
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
    """Derive 32 bytes that only the owners of both keys can derive, each with the public half of the other's.

    Raises:
        DataError: The other's key is not valid, or one with which every result would be the same.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise DataError("A public key that was relayed is no X25519 key.", kind="bad protocol") from error
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate under a key; ``about`` is authenticated as well, and not sent.

    The nonce is random: one key may seal 2^32 boxes before two nonces are likely to collide.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, about)


def unseal(key: bytes, box: bytes, about: bytes) -> bytes | None:
    """Open a box; None where it was changed, or sealed under another key or about something else."""
    try:
        return ChaCha20Poly1305(key).decrypt(box[:_NONCE_BYTES], box[_NONCE_BYTES:], about)
    except (InvalidTag, ValueError):
        return None


def key_stream(key: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """Yield the ChaCha20 stream under a key of this single use, in consecutive pieces of these sizes."""
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
    """Tell whether the owner of a signing key signed this."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


PRIME = 2**521 - 1  # a Mersenne prime, above every 32-byte secret


SECRET_BYTES = 32


SHARE_BYTES = 66


def split(secret: bytes, *, threshold: int, holders: list[int]) -> dict[int, bytes]:
    """Share a secret among holders so that any ``threshold`` of them find it and fewer learn nothing.

    Shamir, "How to share a secret", 1979. Fewer shares are uniformly distributed, whatever the secret is.

    Args:
        secret: 32 bytes.
        threshold: How many shares are needed, 1 to the number of holders.
        holders: Different positive numbers.

    Raises:
        ConfigurationError: A number is out of range.
    """
    if len(secret) != SECRET_BYTES:
        raise ConfigurationError(f"A secret of {len(secret)} bytes cannot be shared; {SECRET_BYTES} are needed.")
    if len(set(holders)) != len(holders) or min(holders, default=0) < 1:
        raise ConfigurationError("The holders of shares need different positive numbers.")
    if not 1 <= threshold <= len(holders):
        raise ConfigurationError(f"threshold={threshold} must lie between 1 and {len(holders)}, the number of holders.")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {holder: _value(coefficients, holder).to_bytes(SHARE_BYTES, "big") for holder in holders}


def join(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """Recover a secret from shares, by Lagrange interpolation at 0.

    Raises:
        DataError: There are fewer shares than ``threshold``, or they are not of one secret.
    """
    if len(shares) < threshold:
        raise DataError(f"{len(shares)} shares are here and {threshold} are needed: the secret stays unknown.")
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
        raise DataError("The shares are not of one secret: one of them was changed, or is of another round.")
    return found.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: list[int], at: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * at + coefficient) % PRIME
    return total
