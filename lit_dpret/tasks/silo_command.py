"""``lit-dpret silo``: run a silo where its data are. Not a Hydra task: it has no run and no run folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lit_dpret.errors import ConfigurationError
from lit_dpret.tasks.parts import say


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"lit-dpret silo: {message}. lit-dpret silo --help lists the options.")


def silo_command(arguments: Sequence[str]) -> None:
    """Check a silo, print the trust table and the spent budget, and start it unless ``--check`` was given."""
    given = silo_parser().parse_args(arguments)
    if given.new_signing_key is not None:
        from lit_dpret.federated.keys import make_identity

        public = make_identity(given.new_signing_key)
        say(f"written: {given.new_signing_key}\nits public half, for the roster of every silo: {public}")
        return
    if given.settings is None:
        raise ConfigurationError("lit-dpret silo needs --settings FILE, the silo's settings (YAML).")
    from lit_dpret.federated.documents import read_silo_settings
    from lit_dpret.federated.flower.connection import Connection
    from lit_dpret.federated.flower.node import check_silo, flower_version, start_silo

    if given.superlink is None and not given.check:
        raise ConfigurationError("lit-dpret silo needs --superlink HOST:PORT, or --check to check only the silo.")
    connection = None
    if given.superlink is not None:
        flower_version()
        connection = Connection(
            superlink=given.superlink,
            key=_absolute(given.key),
            root_certificates=_absolute(given.root_certificates),
            insecure=given.insecure,
            port=given.port,
        ).check()
    settings = read_silo_settings(given.settings, data=_absolute(given.data), state=_absolute(given.state))
    sys.stdout.write(check_silo(settings))
    if given.check or connection is None:
        return
    if connection.insecure:
        sys.stderr.write("warning: --insecure: everything that is sent can be read and changed in transit.\n")
    start_silo(settings, connection)


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().resolve()


def silo_parser() -> argparse.ArgumentParser:
    """Return the argument parser of ``lit-dpret silo``."""
    parser = _Parser(
        prog="lit-dpret silo", description="A client of a federation, run next to its data (docs/federated.md)."
    )
    parser.add_argument("--settings", type=Path, metavar="FILE", help="the silo's settings (YAML)")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="the silo's folder, clients/NAME (default: as in --settings)"
    )
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="ledgers and personal encoder (default: as in --settings)"
    )
    parser.add_argument("--superlink", metavar="HOST:PORT", help="the federation's server")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the silo's private ECDSA key")
    parser.add_argument(
        "--root-certificates", type=Path, metavar="FILE", help="certificate of the authority that signed the server's"
    )
    parser.add_argument("--insecure", action="store_true", help="no TLS and no key: only for your own private network")
    parser.add_argument(
        "--port", type=int, metavar="N", help="port of the node's interface on 127.0.0.1 (default: a free one)"
    )
    parser.add_argument(
        "--new-signing-key", type=Path, metavar="FILE", help="write a long-term key for federated.roster, and exit"
    )
    parser.add_argument("--check", action="store_true", help="check and print, start nothing")
    return parser
