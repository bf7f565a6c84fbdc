"""A silo's node: the checks before it joins a federation, and the start of Flower's SuperNode.

Stock Flower takes the client's app from the server, with the message, and so runs any code where the data are. Here
tasks start through our own commands, which answer only with the installed app. SuperNode and task talk over the
loopback address without a password, so the other users of the silo's machine are trusted.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lit_dpret.errors import ConfigurationError, StorageError
from lit_dpret.federated.documents import SiloSettings
from lit_dpret.federated.flower import silent_environment
from lit_dpret.federated.flower.connection import Connection
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.synthetic import GENERATOR
from lit_dpret.federated.trust import trust_table
from lit_dpret.privacy.budget import show_delta, show_epsilon

ANSWERS = "flwr-clientapp"  # the only command that answers


def check_silo(settings: SiloSettings) -> str:
    """Build the silo as a round would, on a copy of its state; return the trust table and the spent budget."""
    settings.model.check()
    with tempfile.TemporaryDirectory(prefix="lit-dpret-silo-") as scratch:
        rehearsal = Path(scratch) / "state"
        rehearsal.mkdir(mode=0o700)
        for name in ("run.json", "noise.json", GENERATOR):
            kept = settings.state / name
            if kept.is_dir():
                shutil.copytree(kept, rehearsal / name)
            elif kept.is_file():
                shutil.copy2(kept, rehearsal / name)
        client = replace(settings, state=rehearsal).client()
        if client.ledger is not None:
            client.ledger.require_whole(settings.state)
        told = settings.share_measures and settings.federated.privacy.eps is None
        measures = "the means of its measures and the number of questions" if told else "no measure"
        spent = "what is spent of the budget" if settings.share_epsilon else "nothing of what is spent"
        said = (
            f"the server learns {measures} (share_measures: {str(settings.share_measures).lower()}), and {spent} "
            f"(share_epsilon: {str(settings.share_epsilon).lower()})"
        )
        lines = [said, _budget_line(client), *_sum_line(client)]
        return f"silo {client.name}\n\n{trust_table(settings.federated)}\n\n" + "\n".join(lines) + "\n"


def start_silo(settings: SiloSettings, connection: Connection) -> None:
    """Become this silo's SuperNode; never returns."""
    connection.check()
    program = flower_program("flower-supernode")
    connection.reach()
    settings.client()  # with the real state folder: one that belongs to another run is refused now, not in a round
    home = settings.state / "flower"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        document = home / "silo.yaml"
        document.write_text(settings.to_yaml(), encoding="utf-8")
        document.chmod(0o600)
        commands = write_commands(home / "bin")
    except OSError as error:
        raise StorageError(f"{home} cannot be written: {error.strerror}.") from error
    environment = silent_environment() | {"FLWR_HOME": str(home / "home")}
    environment["PATH"] = f"{commands}{os.pathsep}{program.parent}{os.pathsep}{environment.get('PATH', '')}"
    sys.stdout.flush()
    # It replaces this process, so that the process that started it (a shell, systemd) ends it with SIGINT or SIGTERM.
    # Its tasks end with it. A round that is interrupted stays charged.
    os.execve(program, [str(program), *node_arguments(document, connection)], environment)


def node_arguments(document: Path, connection: Connection) -> list[str]:
    """Return the arguments of ``flower-supernode``."""
    if '"' in str(document):
        raise ConfigurationError(
            f"{document}: Flower cannot take a path with a quotation mark. Choose another state folder."
        )
    found = ["--superlink", connection.superlink, "--node-config", f'silo="{document}"', "--host", "127.0.0.1"]
    port = connection.port
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    found += ["--port", str(port)]
    if connection.insecure:
        return [*found, "--insecure"]
    if connection.root_certificates is not None:
        found += ["--root-certificates", str(connection.root_certificates)]
    return [*found, "--auth-supernode-private-key", str(connection.key)]


def write_commands(folder: Path) -> Path:
    """Write all commands with which a SuperNode starts tasks: one answers, the others refuse."""
    from lit_dpret.federated.flower.library import task_commands

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    names = task_commands()
    if ANSWERS not in names:
        raise ConfigurationError(
            f"flwr {flower_version()} starts tasks in an unknown way, and could run the server's code. Run: pip "
            "install 'flwr>=1.41,<1.43'."
        )
    for name in names:
        line = f'exec {shlex.quote(sys.executable)} -m lit_dpret.federated.flower.node_task "$@"'
        if name != ANSWERS:
            line = f"echo 'error: this silo does not run {name}.' >&2; exit 1"
        script = folder / name
        script.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        script.chmod(0o700)
    return folder


def flower_version() -> str:
    """Return the version of the installed Flower; refuse a machine without it."""
    try:
        return version("flwr")
    except PackageNotFoundError as error:
        raise ConfigurationError('A silo needs Flower. Run: pip install "lit-dpret[federated]".') from error


def flower_program(name: str) -> Path:
    """Return the path of one of Flower's commands, next to this Python or on the search path."""
    flower_version()
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ConfigurationError(f"flwr is installed without its command {name}. Run: pip install 'flwr>=1.41,<1.43'.")
    return Path(found)


def _budget_line(client: SiloClient) -> str:
    if client.ledger is None:
        return "no budget: nothing is promised about what leaves this silo (federated.privacy.eps is null)"
    budget, total = client.ledger.budget, client.ledger.total()
    spent, delta = (0.0, budget.delta) if total is None else (total.epsilon, total.delta)
    left = "nothing" if spent >= budget.eps else f"{budget.eps - spent:.4g}"
    return (
        f"budget: epsilon {show_epsilon(spent)} of {budget.eps:.4g} is spent at delta={show_delta(delta)}, "
        f"unit {budget.unit}, {budget.neighbours}; {left} is left"
    )


def _sum_line(client: SiloClient) -> list[str]:
    """State what the secure sum of this roster withstands; refuse a roster that is too small for one."""
    if not client.settings.secure_sum or client.credentials is None:
        return []
    from lit_dpret.federated.secure_sum import Session, threshold_for

    listed = len(client.credentials.roster)
    least = threshold_for(client.settings.sum_threshold, listed)
    one = Session(name="check", clients=tuple(client.credentials.by_number), threshold=least)
    return [
        f"secure sum: {one.threshold} of the {listed} silos on the roster must stay (federated.sum_threshold), and "
        f"{one.colluders} may collude with the server without learning more than a sum of the others"
    ]
