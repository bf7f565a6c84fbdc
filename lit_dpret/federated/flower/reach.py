"""The reason why a SuperLink would reject a connection, found before Flower tries, and reported in one line.

Flower says "connection unavailable" for a certificate of another authority, for a missing TLS and for an unexpected one
alike, or retries for ever. Temporary failures (nobody listens yet, the network is down) are left to Flower.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from lit_dpret.errors import ConfigurationError

_SECONDS = 10.0
_OTHER_NAME = (62, 64)  # of OpenSSL: the certificate is of another host name, or of another address
_EXPIRED = 10


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A way to reach a SuperLink, and the names of its settings, for the refusals.

    Args:
        address: ``HOST:PORT``.
        root_certificates: Of who signed its certificate; null for those that Flower comes with.
        insecure: No TLS.
        certificates_option: Name of the setting of ``root_certificates``.
        insecure_option: Name of the setting of ``insecure``.
    """

    address: str
    root_certificates: Path | None
    insecure: bool
    certificates_option: str
    insecure_option: str

    def check(self) -> Reach:
        """Begin TLS with the server and check its certificate.

        Raises:
            ConfigurationError: The server speaks no TLS, speaks it where none was expected, or has a certificate of
                another authority, for another name, or that has expired.
        """
        host, _, port = self.address.rpartition(":")
        try:
            raw = socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS)
        except (OSError, OverflowError):
            return self
        with raw:
            try:
                self._context().wrap_socket(raw, server_hostname=host.strip("[]")).close()
            except ssl.SSLCertVerificationError as error:
                raise ConfigurationError(self._certificate_line(error.verify_code)) from error
            except ssl.SSLError as error:
                if not self.insecure and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
                    raise ConfigurationError(
                        f"The server at {self.address} speaks no TLS: whatever is sent to it can be read and changed "
                        f"on the way. Have it started with a certificate, or say {self.insecure_option}."
                    ) from error
                return self
            except OSError:
                return self
        if self.insecure:
            raise ConfigurationError(
                f"{self.insecure_option} goes without TLS, and the server at {self.address} wants it. Leave it out, "
                f"and name {self.certificates_option}."
            )
        return self

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
        given = self.root_certificates
        said = self.certificates_option + (f"={given}" if given else " is not given")
        if code in _OTHER_NAME:
            return (
                f"The certificate of the server at {self.address} is of another host name or address. Reach it by a "
                "name that is in the certificate, or have its operator make one for this."
            )
        if code == _EXPIRED:
            return f"The certificate of the server at {self.address} has expired. Ask its operator for a new one."
        return (
            f"{said}: the certificate of the server at {self.address} was signed by another authority, or somebody is "
            "in the middle. Ask the server's operator for the certificate of who signed it."
        )


def check_key(address: str, key: Path, root_certificates: Path | None) -> None:
    """Log in with a silo's key and out again; refuse a key that the server does not accept."""
    from lit_dpret.federated.flower.library import is_registered

    if is_registered(address, key, root_certificates) is False:
        raise ConfigurationError(
            f"--key={key}: the server at {address} knows no silo with this key, or takes one for alive still "
            f"(a minute after a crash). Have it registered: flwr supernode register {key}.pub NAME-OF-THE-SUPERLINK."
        )
