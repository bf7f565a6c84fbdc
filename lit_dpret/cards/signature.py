"""Card signatures: the only protection against a chain that was rewritten completely.

An attacker who can write files, ledger and parents can recreate all of them consistently, but cannot forge a signature
of another person's key. The signature is detached (``privacy_card.sig``) and uses Ed25519 (RFC 8032) over the canonical
JSON of the card.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.amendments import versions
from lit_dpret.cards.file import CARD_NAME, MODEL_FOLDER, SIGNATURE_NAME, card_path, card_sha256, read_card
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import read_json, write_whole
from lit_dpret.privacy.ledger.chain import canonical_json

SCHEMA = "lit-dpret/privacy-card-signature/1"


@dataclass(frozen=True)
class Signed:
    """A signature that matches a card: its key's fingerprint, and the number of amendments that it does not cover."""

    key: str
    later: int


def sign_card(path: str | Path, key_file: str | Path) -> list[Path]:
    """Sign a card and its identical copies in the run folder and the model folder; return the signature files.

    ``key_file`` holds a private Ed25519 key in PEM, as ``openssl genpkey -algorithm ed25519`` writes it. Only its owner
    may be able to read it, and it must not be in the folder of the card.
    """
    path = card_path(path)
    card, name = read_card(path), card_sha256(path)
    key = _private_key(Path(key_file).expanduser(), published=path.resolve().parent)
    facts = {
        "schema": SCHEMA,
        "algorithm": "Ed25519",
        "public_key": key.public_key().public_bytes_raw().hex(),
        "signature": key.sign(_message(card)).hex(),
    }
    places = [path.parent, path.parent / MODEL_FOLDER, path.resolve().parent.parent]
    same = [one for one in places if (one / CARD_NAME).is_file() and card_sha256(one) == name]
    return [write_whole(folder / SIGNATURE_NAME, json.dumps(facts, indent=2) + "\n") for folder in same]


def check_signature(card: Mapping[str, Any], path: Path) -> Signed:
    """Return the signature in ``path`` if it matches the card, now or before amendments; raise otherwise."""
    try:
        facts = read_json(path, SCHEMA)
        raw, signature = bytes.fromhex(facts["public_key"]), bytes.fromhex(facts["signature"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path.name} is not a signature of a card ({error!r}).") from error
    ed25519, _, exceptions = _library()
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise DataError(f"{path.name} holds no Ed25519 public key.") from error
    for later, version in enumerate(versions(card)):
        try:
            key.verify(signature, _message(version))
        except exceptions.InvalidSignature:
            continue
        return Signed(_fingerprint(raw), later)
    raise DataError(f"{path.name} does not match the card: the card was changed after it was signed.")


def public_key_fingerprint(path: str | Path) -> str:
    """Return the SHA-256 of the Ed25519 public key in a PEM file."""
    return _fingerprint(_key(Path(path).expanduser(), "task.public_key", private=False).public_bytes_raw())


def _private_key(path: Path, *, published: Path) -> Any:
    key, mode = _key(path, "task.sign_with", private=True), stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigurationError(f"task.sign_with={path} has mode {mode:04o}: others can read it. Run: chmod 600.")
    if path.resolve().is_relative_to(published):
        raise ConfigurationError(f"task.sign_with={path} is in the folder of the card, which will be published.")
    return key


def _key(path: Path, knob: str, *, private: bool) -> Any:
    """Return the Ed25519 key in a PEM file; refuse any other content with the setting's name."""
    ed25519, serialization, exceptions = _library()
    try:
        data = path.read_bytes()
        if private:
            key = serialization.load_pem_private_key(data, password=None)
        else:
            key = serialization.load_pem_public_key(data)
    except OSError as error:
        raise ConfigurationError(f"{knob}={path} cannot be read: {error.strerror}.") from error
    except TypeError as error:
        raise ConfigurationError(f"{knob}={path} is encrypted. Name a key file without a password.") from error
    except (ValueError, exceptions.UnsupportedAlgorithm) as error:
        what = "private key in PEM. Make one: openssl genpkey -algorithm ed25519 -out FILE"
        raise ConfigurationError(f"{knob}={path} is not a {what if private else 'public key in PEM'}.") from error
    kind = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    if not isinstance(key, kind):
        raise ConfigurationError(f"{knob}={path} is not an Ed25519 key; no other kind is supported.")
    return key


def _library() -> Any:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigurationError(
            "A signature needs the package cryptography: pip install 'lit-dpret[sign]'."
        ) from error
    return ed25519, serialization, exceptions


def _message(card: Mapping[str, Any]) -> bytes:
    """Return the bytes to sign; the schema keeps the signature from being valid for anything else."""
    return f"{SCHEMA}\n{canonical_json(card)}".encode()


def _fingerprint(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
