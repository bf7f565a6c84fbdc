"""Connections to a SuperLink, checked before Flower connects, with errors reported in one line.

Flower says "connection unavailable" for a certificate from another authority, for missing TLS and for unexpected TLS
alike, or retries forever. Temporary failures (the server is not listening yet, the network is down) are left to Flower.
"""

from __future__ import annotations

import re
import socket
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from lit_dpret.errors import ConfigurationError

_SECONDS = 10.0
_OTHER_NAME = (62, 64)  # of OpenSSL: the certificate is for another host name, or for another address
_EXPIRED = 10
_NEW_KEY = "ssh-keygen -t ecdsa -b 384 -N '' -f FILE"


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A connection to a SuperLink."""

    superlink: str  # ``HOST:PORT``
    key: Path | None = None  # the silo's own private ECDSA key, as written by ``ssh-keygen -t ecdsa -b 384``
    # Of the authority that signed the server's certificate; null for those that come with Flower.
    root_certificates: Path | None = None
    insecure: bool = False  # no TLS: everything that is sent can be read and changed on the way
    port: int | None = None  # of the silo's interface on the loopback address; null for a free one
    # A ``silo`` needs a key, and refusals name its options (``--key``). A submitted ``run`` needs none, and refusals
    # name its settings (``federated.insecure``).
    of: Literal["silo", "run"] = "silo"

    def check(self) -> Connection:
        """Refuse options that cannot connect, or would connect in clear by default; return the connection."""
        if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", self.superlink):
            raise ConfigurationError(
                f"{self._option('superlink')}={self.superlink!r} is not HOST:PORT, such as server.example.org:8000."
            )
        if self.insecure:
            clash = next((name for name in ("key", "root_certificates") if getattr(self, name) is not None), None)
            if clash is not None:
                raise ConfigurationError(
                    f"{self._insecure} turns TLS off, and {self._option(clash)} needs it. Leave one of them out."
                )
            return self
        if self.key is not None:
            _check_key(self.key)
        elif self.of == "silo":
            raise ConfigurationError(
                f"--key is missing. Make one ({_NEW_KEY}) and have FILE.pub registered, or pass --insecure to connect "
                "without TLS and key."
            )
        if self.root_certificates is not None:
            _check_certificates(self.root_certificates, self._option("root_certificates"))
        return self

    def reach(self) -> None:
        """Refuse a server that would reject this connection: begin TLS, check its certificate, log in and out again."""
        host, _, port = self.superlink.rpartition(":")
        try:
            raw = socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS)
        except (OSError, OverflowError):
            return
        with raw:
            try:
                self._context().wrap_socket(raw, server_hostname=host.strip("[]")).close()
            except ssl.SSLCertVerificationError as error:
                raise ConfigurationError(self._certificate_line(error.verify_code)) from error
            except ssl.SSLError as error:
                if not self.insecure and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
                    raise ConfigurationError(
                        f"The server at {self.superlink} does not use TLS. Start it with a certificate, or set "
                        f"{self._insecure}."
                    ) from error
                return
            except OSError:
                return
        if self.insecure:
            raise ConfigurationError(
                f"{self._insecure}: the server at {self.superlink} uses TLS. Leave it out, and name "
                f"{self._option('root_certificates')}."
            )
        if self.key is not None:
            from lit_dpret.federated.flower.library import is_registered

            if is_registered(self.superlink, self.key, self.root_certificates) is False:
                raise ConfigurationError(
                    f"--key={self.key} is unknown to the server at {self.superlink}, or in use (for a minute after a "
                    f"crash). Wait, or have it registered: flwr supernode register {self.key}.pub "
                    "NAME-OF-THE-SUPERLINK."
                )

    def _option(self, name: str) -> str:
        return f"federated.{name}" if self.of == "run" else f"--{name.replace('_', '-')}"

    @property
    def _insecure(self) -> str:
        return "federated.insecure=true" if self.of == "run" else "--insecure"

    def _context(self) -> ssl.SSLContext:
        if self.insecure:
            found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            found.check_hostname, found.verify_mode = False, ssl.CERT_NONE
            return found
        if self.root_certificates is not None:
            return ssl.create_default_context(cafile=str(self.root_certificates))
        import certifi  # the authorities that Flower's own client trusts

        return ssl.create_default_context(cafile=certifi.where())

    def _certificate_line(self, code: int) -> str:
        if code in _OTHER_NAME:
            return (
                f"The certificate of the server at {self.superlink} is for another host name or address. Use a name "
                "that is in the certificate, or ask its operator for a certificate with this one."
            )
        if code == _EXPIRED:
            return f"The certificate of the server at {self.superlink} has expired. Ask its operator for a new one."
        given = self.root_certificates
        return (
            f"{self._option('root_certificates')}{f'={given}' if given else ' is not given'}: another authority signed "
            f"the certificate of the server at {self.superlink}, or someone intercepts the connection. Ask its "
            "operator for the authority's certificate."
        )


def _check_key(path: Path) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    content = _read(path, "--key")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigurationError(f"--key={path} has mode {mode:04o} and can be read by others. Run: chmod 600 {path}")
    try:
        key = load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"--key={path} is not a private key without a passphrase. Make one: {_NEW_KEY}"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"--key={path} is not an ECDSA key, which Flower needs. Make one: {_NEW_KEY}")


def _check_certificates(path: Path, option: str) -> None:
    """Refuse a file without a valid, unexpired certificate; the refusal names its ``option``."""
    from cryptography import x509

    content = _read(path, option)
    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise ConfigurationError(f"{option}={path} holds no certificate (PEM).") from error
    newest = max(one.not_valid_after_utc for one in found)
    if newest < datetime.now(UTC):
        raise ConfigurationError(
            f"{option}={path} has no certificate valid after {newest:%Y-%m-%d}. Ask the server's operator for a new "
            "one."
        )


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{option}={path} cannot be read: {error.strerror}.") from error
