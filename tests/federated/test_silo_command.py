"""`lit-dpret silo`: everything is checked before anything is started, and Flower is optional, silent and runs our app.

Wrong key, wrong authority and no TLS are told apart, in one line each, before Flower would try for ever.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_silos import PRIVATE, SIZE, SMALL, declare_public

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from superlink import SuperLink, free_port, make_authority, make_node_key, write_private

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, ResumeError
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.documents import SiloSettings, read_silo_settings
from lit_dpret.federated.flower import node
from lit_dpret.federated.flower.connection import Connection
from lit_dpret.federated.flower.library import task_commands
from lit_dpret.federated.flower.node import check_silo, node_arguments, write_commands
from lit_dpret.federated.keys import write_roster
from lit_dpret.federated.model import AS2Maker, start_of
from lit_dpret.federated.settings import PddAs2
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.tasks.silo_command import silo_command

MAKE = AS2Maker(encoder="planted", planted=SIZE, max_query_length=8, max_sentence_length=12)


def silo(root: Path, run: PddAs2 = SMALL, **settings: Any) -> SiloSettings:
    if not (root / "silos").exists():
        write_silos(root / "silos", planted_silos(SIZE), facts={})
        declare_public(root)
    data = silo_folders(root / "silos")["client0"]
    return SiloSettings(data=data, state=root / "state", federated=run, model=MAKE, secret_file=root / "s", **settings)


def document(root: Path, settings: SiloSettings) -> str:
    path = root / "silo.yaml"
    path.write_text(settings.to_yaml())
    return str(path)


@pytest.fixture
def ready(tmp_path: Path) -> dict[str, str]:
    """Options with which everything is in order."""
    return {
        "--settings": document(tmp_path, silo(tmp_path)),
        "--superlink": "127.0.0.1:1",
        "--key": str(make_node_key(tmp_path / "keys", "silo")),
        "--root-certificates": str(make_authority(tmp_path / "certificates")["ca"]),
    }


def words(options: dict[str, str | None]) -> list[str]:
    return [word for name, value in options.items() if value is not None for word in (name, value) if word]


def test_a_silo_in_order_becomes_a_supernode_that_runs_nothing_of_the_servers(
    ready: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    silo_command(words(ready))
    ((program, arguments, environment),) = started
    assert Path(program).name == "flower-supernode" and "--insecure" not in arguments
    assert arguments[arguments.index("--auth-supernode-private-key") + 1] == ready["--key"]
    assert "--allow-runtime-dependency-installation" not in arguments
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0" and environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    commands = Path(environment["PATH"].split(os.pathsep)[0])
    assert sorted(path.name for path in commands.iterdir()) == task_commands()
    for path in commands.iterdir():
        if path.name != "flwr-clientapp":
            done = subprocess.run([str(path)], capture_output=True, text=True, check=False)
            assert done.returncode == 1 and f"does not run {path.name}" in done.stderr
    kept = tmp_path / "state" / "flower" / "silo.yaml"
    assert kept.stat().st_mode & 0o077 == 0 and read_silo_settings(kept) == silo(tmp_path)
    assert "| what leaves a silo |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_check_prints_who_sees_what_and_what_is_spent_and_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = silo(tmp_path, PRIVATE)
    options = ["--settings", document(tmp_path, settings), "--check"]
    silo_command(options)
    said = capsys.readouterr().out
    assert "silo client0" in said and "eps=20" in said and "epsilon 0 of 20 is spent" in said
    assert not settings.state.exists()
    assert "the server learns no measure (share_measures: false)" in said
    assert "the server learns the means" in check_silo(silo(tmp_path, share_measures=True))
    assert "the server learns no measure" in check_silo(silo(tmp_path, PRIVATE, share_measures=True))
    client = settings.client()
    client.train_shared(start_of(MAKE), 0)
    before = {path: path.read_bytes() for path in settings.state.rglob("*") if path.is_file()}
    spent = client.epsilon()
    assert spent is not None and spent > 0
    silo_command(options)
    assert f"epsilon {show_epsilon(spent)} of 20 is spent" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in settings.state.rglob("*") if path.is_file()} == before


@pytest.mark.costly
def test_a_broken_ledger_or_another_runs_state_is_found_before_the_silo_starts(tmp_path: Path) -> None:
    settings = silo(tmp_path, PRIVATE)
    client = settings.client()
    client.request(start_of(MAKE), 0)
    with pytest.raises(ResumeError, match=r"federated\.seed=0.* 1"):
        check_silo(replace(settings, federated=replace(PRIVATE, seed=1)))
    assert client.ledger is not None
    client.ledger.path.write_bytes(client.ledger.path.read_bytes().replace(b"reserve", b"reverse"))
    with pytest.raises(LedgerError):
        check_silo(settings)


@pytest.mark.parametrize(("change", "message"), [
    ({"--superlink": None}, "--superlink HOST:PORT, or --check"),
    ({"--superlink": "hospital"}, "--superlink='hospital'"),
    ({"--key": None}, "--key is missing"),
    ({"--key": "/no/key"}, "--key=/no/key"),
    ({"--root-certificates": "/no/ca"}, "--root-certificates=/no/ca"),
    ({"--insecure": ""}, "--insecure .*--key"),
    ({"--settings": "/no/settings"}, "--settings=/no/settings"),
    ({"--settings": None}, "--settings FILE"),
    ({"--port": "many"}, "--port"),
])  # fmt: skip
def test_what_cannot_connect_is_refused_by_the_option(
    ready: dict[str, str], change: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    with pytest.raises(ConfigurationError, match=message):
        silo_command(words({**ready, **change}))


def test_keys_and_certificates_that_flower_would_stumble_over_are_named(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = make_node_key(tmp_path, "silo")
    certificate = make_authority(tmp_path)["ca"]
    good = Connection(superlink="[::1]:8000", key=key, root_certificates=certificate)
    assert good.check() is good
    other = ed25519.Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    readable = write_private(tmp_path / "readable", key.read_bytes())
    readable.chmod(0o644)
    words = write_private(tmp_path / "words", b"words")
    old = make_authority(tmp_path / "old", days=-1)["ca"]
    for change, message in (
        ({"key": readable}, "--key=.* 0644"),
        ({"key": write_private(tmp_path / "other", other)}, "--key=.*ECDSA"),
        ({"key": words}, "--key=.*passphrase"),
        ({"root_certificates": words}, "--root-certificates=.*PEM"),
        ({"root_certificates": old}, "--root-certificates=.*valid after"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            replace(good, **change).check()


OURS = "schema: lit-dpret/silo-settings/1\n"


@pytest.mark.parametrize(("text", "message"), [
    ("- a", "lit-dpret/silo-settings/1"),
    ("schema: [", "line"),
    ("schema: lit-dpret/silo-settings/9\n", "silo-settings/9"),
    (OURS, "data"),
    (f"{OURS}data: d\nstate: s\nshare: true\n", r"\.share "),
    (f"{OURS}data: d\nstate: s\nfederated: {{stage1: {{rounds: many}}}}\n", r"federated\.stage1\.rounds='many'"),
    (f"{OURS}data: d\nstate: s\nfederated: {{privacy: {{eps: 8}}}}\n", "in_batch=true"),
])  # fmt: skip
def test_a_document_that_says_something_else_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "silo.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_silo_settings(path)


def test_a_path_in_a_document_is_relative_to_it_and_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "silo.yaml"
    path.write_text(f"{OURS}data: d\nstate: s\nfederated: {{stage1: {{lr: 3e-5}}}}\n")
    found = read_silo_settings(path)
    assert found.data == tmp_path / "d" and found.state == tmp_path / "s" and found.federated.stage1.lr == 3e-5
    assert read_silo_settings(path, data=tmp_path / "e").data == tmp_path / "e"


def test_a_silo_of_a_roster_needs_its_signing_key_and_the_list_and_makes_the_key_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, roster = tmp_path / "signing", tmp_path / "roster.json"
    silo_command(["--new-signing-key", str(key)])
    public = capsys.readouterr().out.split()[-1]
    with pytest.raises(ConfigurationError, match="signing"):
        silo_command(["--new-signing-key", str(key)])
    write_roster(roster, {"client0": public, "client1": "11" * 32, "client2": "22" * 32})
    run = replace(SMALL, secure_sum=True, roster=True, stage1=replace(SMALL.stage1, weighting="uniform"))
    settings = silo(tmp_path, run, signing_key=Path("signing"), share_epsilon=True)
    with pytest.raises(ConfigurationError, match="roster_file"):
        check_silo(read_silo_settings(Path(document(tmp_path, settings))))
    whole = read_silo_settings(Path(document(tmp_path, replace(settings, roster_file=Path("roster.json")))))
    assert "what is spent of the budget (share_epsilon: true)" in check_silo(whole)
    assert "3 of the 3 silos on the roster must stay" in check_silo(whole) and "\nsecure sum: " in check_silo(whole)
    with pytest.raises(ConfigurationError, match=r"federated\.sum_threshold"):
        check_silo(replace(whole, federated=replace(run, sum_threshold=4)))
    write_roster(roster, {"client0": "33" * 32, "client1": "11" * 32, "client2": "22" * 32})
    with pytest.raises(ConfigurationError, match="client0"):
        check_silo(whole)


def test_a_folder_that_is_no_silo_and_a_flower_that_is_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="nowhere"):
        check_silo(replace(silo(tmp_path), data=tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="quotation"):
        node_arguments(tmp_path / 'a"b', Connection(superlink="a:1", insecure=True))
    monkeypatch.setattr("lit_dpret.federated.flower.library.task_commands", lambda: ["flwr-everything"])
    with pytest.raises(ConfigurationError, match=r"flwr>="):
        write_commands(tmp_path / "bin")

    def missing(_: str) -> str:
        raise node.PackageNotFoundError("flwr")

    monkeypatch.setattr(node, "version", missing)
    with pytest.raises(ConfigurationError, match=r"lit-dpret\[federated\]"):
        silo_command(["--settings", document(tmp_path, silo(tmp_path)), "--superlink", "a:1", "--insecure"])


@pytest.mark.slow
def test_another_state_folder_does_not_give_a_silo_its_budget_back(tmp_path: Path) -> None:
    first = silo(tmp_path, PRIVATE).client()
    first.train_shared(first.model[0], 0)
    again = replace(silo(tmp_path, PRIVATE), state=tmp_path / "anew")
    second = again.client()
    assert second.epsilon() == first.epsilon() != 0
    assert first.account.noise is not None and second.account.noise is not None
    assert second.account.noise.training > first.account.noise.training
    assert f"epsilon {show_epsilon(first.epsilon())} of 20 is spent" in check_silo(again)
    shutil.rmtree(again.data / "ledgers")
    with pytest.raises(LedgerError, match=r"silo_ledger\.query\.jsonl"):
        check_silo(silo(tmp_path, PRIVATE))


# -- the connection -----------------------------------------------------------------------------


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


@pytest.mark.slow
def test_a_true_superlink_tells_a_key_that_it_knows_from_one_that_it_does_not(tmp_path: Path) -> None:
    """What TLS can have wrong with it is tested without a SuperLink above."""
    with SuperLink(tmp_path) as running:
        good, bad = running.register("good"), make_node_key(tmp_path / "keys", "bad")
        known = Connection(superlink=running.address, key=good, root_certificates=running.files["ca"])
        for _ in range(2):  # the second time it has logged out again
            known.reach()
        with pytest.raises(ConfigurationError, match=f"--key={bad}"):
            replace(known, key=bad).reach()


# -- what importing Flower says and does -------------------------------------------------------

REPORTS = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED", "FLWR_DISABLE_UPDATE_CHECK")


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A new process whose environment says nothing of reports but what is given."""
    environment = {name: value for name, value in os.environ.items() if name not in REPORTS} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_flower_is_imported_with_its_reports_switched_off() -> None:
    done = python(
        "import lit_dpret.federated.flower, os; from flwr.supercore import telemetry; "
        "print(telemetry.FLWR_TELEMETRY_ENABLED, os.environ['RAY_USAGE_STATS_ENABLED']); "
        "from flwr.supercore import update_check; print(os.environ[update_check.FLWR_DISABLE_UPDATE_CHECK])"
    )
    assert done.stdout.split() == ["0", "0", "1"] and "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize(("code", "variables", "warned"), [
    ("from flwr.supercore import telemetry; ", {}, "flwr was imported before"),
    ("", {"FLWR_TELEMETRY_ENABLED": "1"}, "FLWR_TELEMETRY_ENABLED=1"),
], ids=["flwr was imported first", "somebody switched them on"])  # fmt: skip
def test_reports_that_were_decided_on_by_others_are_warned_of(
    code: str, variables: dict[str, str], warned: str
) -> None:
    assert warned in python(f"{code}import lit_dpret.federated.flower", **variables).stderr


IMPORTS_THE_LIBRARY = """
from lit_dpret.errors import ConfigurationError
try:
    import lit_dpret.federated.flower.library
except ConfigurationError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_flower_all_else_imports_and_one_sentence_says_what_to_install() -> None:
    hidden = """
import sys, importlib.metadata as m; real = m.version
def version(name):
    if name == 'flwr': raise m.PackageNotFoundError(name)
    return real(name)
m.version = version; sys.modules['flwr'] = None
import lit_dpret.federated.transport, lit_dpret.federated.flower
"""
    done = python(hidden + IMPORTS_THE_LIBRARY)
    assert 'pip install "lit-dpret[federated]"' in done.stdout, done.stderr


def test_a_flower_that_moved_its_parts_is_named_with_the_versions_that_work() -> None:
    moved = "import lit_dpret.federated.flower, sys; sys.modules['flwr.supercore.task_identity'] = None"
    done = python(moved + IMPORTS_THE_LIBRARY)
    assert "flwr>=1.41,<1.43" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_task_runs_the_installed_app_whatever_the_server_sent() -> None:
    # In a process of its own, since Flower's functions are replaced in it.
    code = (
        "import sys, flwr.supernode.cli, flwr.supernode.runtime.run_clientapp as runtime\n"
        "from lit_dpret.federated.flower.library import run_one_task, ConfigurationError\n"
        "def task():\n"
        "    runtime.install_from_fab(b'code of the server', skip_prompt=True)\n"
        "    load = runtime.get_load_client_app_fn(default_app_ref='', app_path=None, multi_app=True)\n"
        "    print(load('their/app', '1.0.0', 'hash'))\n"
        "    try:\n"
        "        runtime.install_app_dependencies('folder')\n"
        "    except ConfigurationError as error:\n"
        "        print(error)\n"
        "sys.modules['flwr.supernode.cli.flwr_clientapp'].flwr_clientapp = task\n"
        "run_one_task(lambda: 'our app')\n"
        "del runtime.install_from_fab\n"
        "try:\n"
        "    run_one_task(lambda: 'our app')\n"
        "except ConfigurationError as error:\n"
        "    print(error)\n"
    )
    done = python(code)
    lines = done.stdout.splitlines()
    assert lines[0] == "our app" and "installs nothing" in lines[1] and "flwr>=" in lines[2], done.stderr
