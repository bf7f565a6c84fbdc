"""Secrets shared among n so that any t find them and fewer know nothing (Shamir, "How to share a secret", 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from lit_dpret.errors import ConfigurationError, DataError

PRIME = 2**521 - 1  # a Mersenne prime, above every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, *, threshold: int, holders: list[int]) -> dict[int, bytes]:
    """A share of ``secret`` for every holder.

    Guarantees:
        - Any ``threshold`` shares give the secret back; fewer are uniformly distributed whatever it is.

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
    """The secret, by Lagrange interpolation at 0.

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
