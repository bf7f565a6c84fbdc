"""A silo's identity towards the others: its long-term signing key, and the roster of everybody's public keys.

The roster is written by people, distributed over another channel than the federation's server, and the same file at
every silo. It holds only names and public keys. The number of a silo is the place of its name in alphabetical order, so
that everybody with the same roster means the same silo by a number.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lit_dpret.errors import ConfigurationError, schema_problem
from lit_dpret.federated.keys import KEY_BYTES, identity_of, is_signed, new_identity, sign

SCHEMA = "lit-dpret/federated-roster/1"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A silo's name, signing key and roster.

    Args:
        name: Of the silo, as on the roster.
        identity: Its signing key, 32 bytes.
        roster: The public signing key of every silo, by name.

    Raises:
        ConfigurationError: The roster has no such silo, or another key for it.
    """

    name: str
    identity: bytes = field(repr=False)
    roster: Mapping[str, bytes] = field(repr=False)

    def __post_init__(self) -> None:
        if self.roster.get(self.name) != identity_of(self.identity):
            raise ConfigurationError(
                f"The roster holds no silo {self.name!r} with the public half of this signing key: others would take "
                "nothing from it. Add it to the roster, at every silo."
            )
        if len(set(self.roster.values())) != len(self.roster):
            raise ConfigurationError("The roster gives one key to two silos: each of them could speak for the other.")

    @property
    def number(self) -> int:
        """The silo's own, from 1."""
        return sorted(self.roster).index(self.name) + 1

    @property
    def by_number(self) -> dict[int, bytes]:
        """Everybody's public signing key."""
        return {place: self.roster[name] for place, name in enumerate(sorted(self.roster), start=1)}

    def sign(self, content: bytes) -> bytes:
        """Sign as this silo."""
        return sign(self.identity, content)

    def signed_by(self, number: int, signature: bytes, content: bytes) -> bool:
        """Tell whether it is the signature of the silo with this number."""
        public = self.by_number.get(number)
        return public is not None and is_signed(public, signature, content)


def make_identity(path: str | Path) -> str:
    """Write a new signing key, readable by its owner only; return its public half in hexadecimal, for the roster.

    Raises:
        ConfigurationError: The file exists already, or cannot be written.
    """
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
    """Write a roster of public keys, in hexadecimal by name."""
    facts = {"schema": SCHEMA, "silos": dict(sorted(keys.items()))}
    Path(path).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def load_credentials(name: str, key_file: str | Path, roster_file: str | Path) -> Credentials:
    """Load a silo's credentials from its two files.

    Raises:
        ConfigurationError: A file cannot be read, the key can be read by others, or they do not go together.
    """
    key_path, roster_path = Path(key_file).expanduser(), Path(roster_file).expanduser()
    try:
        mode = stat.S_IMODE(key_path.stat().st_mode)
        private = key_path.read_text(encoding="ascii").strip()
        facts = json.loads(roster_path.read_text(encoding="utf-8"))
        problem = schema_problem(facts.get("schema"), SCHEMA)
        found = {str(silo): bytes.fromhex(public) for silo, public in facts.get("silos", {}).items()}
        identity = bytes.fromhex(private)
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, AttributeError) as error:  # without the words of it: they could hold a key
        raise ConfigurationError(f"{key_path} is no signing key, or {roster_path} no roster.") from error
    if mode & 0o077:
        raise ConfigurationError(f"{key_path} has mode {mode:04o} and can be read by others. Run: chmod 600 {key_path}")
    if problem is not None:
        raise ConfigurationError(f"{roster_path} cannot be read: {problem}")
    if len(identity) != KEY_BYTES or any(len(public) != KEY_BYTES for public in found.values()):
        raise ConfigurationError(f"{key_path} or a key of {roster_path} has not {KEY_BYTES} bytes.")
    return Credentials(name=name, identity=identity, roster=found)
