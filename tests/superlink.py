"""A real SuperLink on the loopback address, with its certificates, keys and silos; all processes end on exit.

Imported by path through ``conftest.py``; not a test.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lit_dpret.federated.flower import silent_environment

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "deploy" / "flower"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_private(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def make_authority(folder: Path, *, days: int = 1) -> dict[str, Path]:
    """Make a new certificate authority, and the server's certificate for 127.0.0.1 signed by it."""
    now = datetime.now(UTC)

    def signed(subject: str, issuer: str, key: Any, signer: Any, *, authority: bool) -> x509.Certificate:
        name, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (subject, issuer))
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(by).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=3)).not_valid_after(now + timedelta(days=days))
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        aki = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(aki, critical=False)
        if not authority:
            names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        else:
            usage = dict.fromkeys(("digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
                                   "key_agreement", "encipher_only", "decipher_only"), False)  # fmt: skip
            builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        return builder.sign(signer, hashes.SHA256())

    ca_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    pem = serialization.Encoding.PEM
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.pem" for name in ("ca", "server", "server_key")}
    files["ca"].write_bytes(signed("our own", "our own", ca_key, ca_key, authority=True).public_bytes(pem))
    files["server"].write_bytes(signed("localhost", "our own", key, ca_key, authority=False).public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(files["server_key"], private)
    return files


def make_node_key(folder: Path, name: str) -> Path:
    """Write a key as ``ssh-keygen -t ecdsa -b 384`` does: FILE, and FILE.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    folder.mkdir(parents=True, exist_ok=True)
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public)
    return write_private(folder / name, content)


class SuperLink:
    """A SuperLink with TLS and node keys, and the processes started with it.

    Every process has a separate session and is ended with all that it started, even if the test failed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = make_authority(root / "certificates")
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = silent_environment() | {
            "FLWR_HOME": str(root / "flower"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LIT_DPRET_FEDERATIONS": str(root / "federations"),
            "OMP_NUM_THREADS": "1",
        }
        (root / "flower").mkdir()
        (root / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "loop"\n\n[superlink.loop]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.files["ca"]}"\n'
        )

    def __enter__(self) -> SuperLink:
        host, port = self.address.split(":")
        files = self.files
        self.start(
            "superlink",
            ["flower-superlink", "--host", host, "--port", port, "--disable-runtime-dependency-installation",
             "--enable-supernode-auth", "--ssl-ca-certfile", files["ca"], "--ssl-certfile", files["server"],
             "--ssl-keyfile", files["server_key"], "--database", self.root / "superlink.db"],
        )  # fmt: skip
        try:
            self.wait_for("superlink", self.listens, seconds=120)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self.processes)):
            self.end(name)
        assert not self.alive(), self.alive()

    # -- processes -----------------------------------------------------------------------------

    def start(self, name: str, command: list[Any], **variables: str) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, cwd=self.root, env=self.environment | variables,
            )  # fmt: skip

    def end(self, name: str, how: signal.Signals = signal.SIGTERM, *, seconds: float = 30) -> int:
        """End a process, and by force those it leaves; return its exit status."""
        process = self.processes.pop(name)
        if process.poll() is None:
            process.send_signal(how)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = -9
        deadline = time.monotonic() + 30
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.leftovers = members(process.pid)
        for pid in self.leftovers:
            os.kill(pid, signal.SIGKILL)
        process.wait(10)
        return status

    def alive(self) -> list[int]:
        return [pid for process in self.processes.values() for pid in members(process.pid)]

    def kill(self, name: str) -> None:
        """Kill all processes of a name at once and without notice, like a power cut."""
        process = self.processes.pop(name)
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(10)

    def wait_for(self, name: str, ready: Any, *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{name} is not ready:\n{self.log(name)}")
            time.sleep(0.05)

    def listens(self) -> bool:
        host, port = self.address.split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    # -- the operator's actions ----------------------------------------------------------------

    def flwr(self, *arguments: Any, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "flwr"), *map(str, arguments)]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False, cwd=self.root
        )

    def register(self, name: str) -> Path:
        """Make a key for a silo and register it with the SuperLink."""
        key = make_node_key(self.root / "keys", name)
        done = self.flwr("supernode", "register", f"{key}.pub", "loop")
        assert done.returncode == 0, done.stdout + done.stderr
        return key

    def start_silo(self, name: str, settings: Path, key: Path, **variables: str) -> None:
        command = [sys.executable, "-m", "lit_dpret", "silo", "--settings", settings, "--superlink", self.address]
        self.start(name, [*command, "--key", key, "--root-certificates", self.files["ca"]], **variables)

    def submit(self, document: str, *, app: Path = STUB) -> subprocess.Popen[bytes]:
        """Start a run; its log goes to ``run.log``."""
        config = self.root / "run.toml"
        config.write_text(f"lit-config = '''\n{document}'''\n")
        (self.root / "run.log").unlink(missing_ok=True)
        self.start("run", ["flwr", "run", app, "loop", "--run-config", config, "--stream"])
        return self.processes["run"]


def members(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found
