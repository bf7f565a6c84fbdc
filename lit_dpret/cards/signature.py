"""Card signatures: the only protection against a chain that was rewritten completely.

Whoever can write files, ledger and parents can make all of them anew, and they will agree. They cannot make the
signature of somebody else's key. It is detached (``privacy_card.sig``), by Ed25519 (RFC 8032), over the canonical JSON
of the card.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lit_dpret.cards.amendments import versions
from lit_dpret.cards.file import CARD_NAME, SIGNATURE_NAME, card_path, card_sha256, read_card
from lit_dpret.cards.start import MODEL_FOLDER
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import read_json, write_whole
from lit_dpret.privacy.ledger.chain import canonical_json

SCHEMA = "lit-dpret/privacy-card-signature/1"


@dataclass(frozen=True)
class Signed:
    """A signature that matches a card: the fingerprint of its key, and the number of uncovered amendments."""

    key: str
    later: int


def sign_card(path: str | Path, key_file: str | Path) -> list[Path]:
    """Sign a card and its copies in the run folder and beside the model; return the signatures.

    ``key_file`` holds a private Ed25519 key in PEM, as ``openssl genpkey -algorithm ed25519`` writes it; readable by
    its owner alone, and not in the folder of the card.
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
    library = _library()
    try:
        key = library.ed25519.Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise DataError(f"{path.name} holds no Ed25519 public key.") from error
    for later, version in enumerate(versions(card)):
        try:
            key.verify(signature, _message(version))
        except library.InvalidSignature:
            continue
        return Signed(_fingerprint(raw), later)
    raise DataError(f"{path.name} does not fit the card: the card was changed after it was signed.")


def public_key_fingerprint(path: str | Path) -> str:
    """Return the SHA-256 of the key in a PEM file with an Ed25519 public key."""
    library, path = _library(), Path(path).expanduser()
    try:
        key = library.serialization.load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"task.public_key={path} cannot be read: {error.strerror}.") from error
    except (ValueError, library.UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"task.public_key={path} is not a public key in PEM.") from error
    if not isinstance(key, library.ed25519.Ed25519PublicKey):
        raise ConfigurationError(f"task.public_key={path} is not an Ed25519 key; other kinds are not used here.")
    return _fingerprint(key.public_bytes_raw())


def _private_key(path: Path, *, published: Path) -> Any:
    library = _library()
    try:
        mode, data = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"task.sign_with={path} cannot be read: {error.strerror}.") from error
    if mode & 0o077:
        raise ConfigurationError(f"task.sign_with={path} has mode {mode:04o}: others can read it. Run: chmod 600.")
    if path.resolve().is_relative_to(published):
        raise ConfigurationError(f"task.sign_with={path} is in the folder of the card, which will be published.")
    try:
        key = library.serialization.load_pem_private_key(data, password=None)
    except TypeError as error:
        raise ConfigurationError(f"task.sign_with={path} is encrypted; passwords are not asked for here.") from error
    except (ValueError, library.UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"task.sign_with={path} is not a private key in PEM. Make one: "
            "openssl genpkey -algorithm ed25519 -out FILE."
        ) from error
    if not isinstance(key, library.ed25519.Ed25519PrivateKey):
        raise ConfigurationError(f"task.sign_with={path} is not an Ed25519 key; other kinds are not used here.")
    return key


def _library() -> Any:
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigurationError(
            "A signature needs the package cryptography: pip install 'lit-dpret[sign]'."
        ) from error
    return SimpleNamespace(
        ed25519=ed25519, serialization=serialization, InvalidSignature=InvalidSignature,
        UnsupportedAlgorithm=UnsupportedAlgorithm,
    )  # fmt: skip


def _message(card: Mapping[str, Any]) -> bytes:
    """Return the signed bytes; the schema keeps the signature from being one of anything else."""
    return f"{SCHEMA}\n{canonical_json(card)}".encode()


def _fingerprint(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
