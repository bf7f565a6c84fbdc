"""Wrong key, wrong authority and no TLS are told apart, in one line each, before Flower tries for ever."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from superlink import SuperLink, free_port, make_authority, make_node_key

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.flower.connection import Connection


@contextmanager
def listening(files: dict[str, Path] | None) -> Iterator[str]:
    """A server with TLS and these certificates, or one that answers in clear; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = None
        if files is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files["server"], files["server_key"])

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with server.accept()[0] as one, suppress(OSError):
                        if context is None:
                            one.recv(1000)
                            one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        else:
                            context.wrap_socket(one, server_side=True).recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.close()


def reach(address: str, ca: Path | None = None, *, insecure: bool = False) -> Connection:
    return Connection(superlink=address, root_certificates=ca, insecure=insecure)


def test_each_way_in_which_tls_can_be_wrong_has_its_own_line(tmp_path: Path) -> None:
    ours, other = make_authority(tmp_path / "ours"), make_authority(tmp_path / "other")
    old = make_authority(tmp_path / "old", days=-1)
    found: dict[str, str] = {}

    def line(name: str, one: Connection) -> None:
        with pytest.raises(ConfigurationError) as caught:
            one.reach()
        found[name] = str(caught.value)

    with listening(ours) as address:
        reach(address, ours["ca"]).reach()
        line("authority", reach(address, other["ca"]))
        line("no authority", reach(address))
        line("TLS", reach(address, insecure=True))
        elsewhere = address.replace("127.0.0.1", "127.0.0.2")  # the same machine, under an address of no certificate
        reach(elsewhere, ours["ca"]).reach()  # where nobody listens is Flower's affair
    with listening(None) as address:
        reach(address, insecure=True).reach()
        line("no TLS", reach(address, ours["ca"]))
    with listening(old) as address:
        line("expired", reach(address, old["ca"]))
    assert len(set(found.values())) == len(found) and not any("\n" in one for one in found.values())
    assert "--root-certificates=" in found["authority"] and "--root-certificates is not given" in found["no authority"]
    assert "--insecure" in found["TLS"] and "--insecure" in found["no TLS"]
    reach(f"127.0.0.1:{free_port()}", ours["ca"]).reach()
    reach("nowhere.invalid:1", ours["ca"]).reach()


def test_a_submitted_run_names_its_own_settings(tmp_path: Path) -> None:
    ours, other = make_authority(tmp_path / "ours"), make_authority(tmp_path / "other")
    with listening(ours) as address:
        Connection(superlink=address, root_certificates=ours["ca"], of="run").check().reach()
        with pytest.raises(ConfigurationError, match=r"federated\.root_certificates"):
            Connection(superlink=address, root_certificates=other["ca"], of="run").reach()
        with pytest.raises(ConfigurationError, match=r"federated\.insecure"):
            Connection(superlink=address, insecure=True, of="run").reach()


@pytest.mark.slow
def test_with_a_true_superlink_key_authority_and_tls_are_told_apart(tmp_path: Path) -> None:
    with SuperLink(tmp_path) as running:
        good, bad = running.register("good"), make_node_key(tmp_path / "keys", "bad")
        other = make_authority(tmp_path / "other")["ca"]
        own = running.files["ca"]
        for _ in range(2):  # it has logged out again
            Connection(superlink=running.address, key=good, root_certificates=own).reach()
        for connection, option in (
            (Connection(superlink=running.address, key=bad, root_certificates=own), f"--key={bad}"),
            (Connection(superlink=running.address, key=good, root_certificates=other), f"--root-certificates={other}"),
            (Connection(superlink=running.address, insecure=True), "--insecure"),
        ):
            with pytest.raises(ConfigurationError, match=option):
                connection.reach()
        port = free_port()
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", port, "--insecure",
                   "--disable-runtime-dependency-installation"]  # fmt: skip
        running.start("in clear", command)
        address = f"127.0.0.1:{port}"
        running.wait_for("in clear", lambda: not socket.socket().connect_ex(("127.0.0.1", port)), seconds=120)
        with pytest.raises(ConfigurationError, match="--insecure"):
            Connection(superlink=address, key=good, root_certificates=own).reach()
        Connection(superlink=address, insecure=True).reach()
        Connection(superlink=f"127.0.0.1:{free_port()}", key=good, root_certificates=own).reach()  # nobody there
