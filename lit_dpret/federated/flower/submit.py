"""``federated=flower``: submit a run to a SuperLink, follow its log, and read the server's result.

The silos are on other machines, started by their owners (``lit-dpret silo``). The result holds what the server may
know: the means of the measures that silos choose to share, bytes, and faults. The weights stay on the server.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from lit_dpret.errors import ConfigurationError, DataError, WorkerError
from lit_dpret.federated.documents import SILO_SCHEMA, RunRequest, SuperLinkTarget
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower import silent_environment
from lit_dpret.federated.flower.components import REFUSAL, RESULT, RUN_CONFIG
from lit_dpret.federated.flower.connection import Connection
from lit_dpret.federated.flower.node import flower_program
from lit_dpret.federated.flower.payloads import digest_of
from lit_dpret.federated.model import AS2Maker
from lit_dpret.federated.settings import PHASES, PddAs2
from lit_dpret.federated.storage import save_json
from lit_dpret.federated.transport import FederationRun
from lit_dpret.settings import plain

APP = """\
# A Flower app without code: both components are those of the installed package.
#   flwr run deploy/flower NAME-OF-A-SUPERLINK --run-config run.toml --stream
# run.toml holds one key, lit-config, whose value is the whole run as YAML.
[project]
name = "lit-dpret-federation"
version = "1.0.0"
description = "PDD-AS2 by the apps of an installed lit-dpret"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "lit-dpret"

[tool.flwr.app.components]
serverapp = "lit_dpret.federated.flower.components:server_app"
clientapp = "lit_dpret.federated.flower.components:client_app"

[tool.flwr.app.config]
lit-config = ""
"""
_OURS = "lit-dpret"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def connection_of(link: SuperLinkTarget) -> Connection | None:
    """Return the checked connection to an address; None for a name in the user's Flower configuration."""
    if link.by_address:
        return Connection(
            superlink=str(link.superlink), root_certificates=link.root_certificates, insecure=link.insecure, of="run"
        ).check()
    odd = next((name for name in ("root_certificates", "insecure") if getattr(link, name)), None)
    if odd is not None:
        raise ConfigurationError(
            f"federated.{odd} needs federated.superlink=HOST:PORT. For the name {link.superlink!r}, set it in the "
            "Flower configuration."
        )
    return None


def flower(run: FederationRun) -> FedResult:
    """Run on a SuperLink; a transport (`lit_dpret.federated.transport`).

    Guarantees:
        - A run whose result is already here is not submitted again, whichever part of it is requested.
        - An interrupt also stops the run on the server. The same command continues what is finished.
        - A phase whose measures no silo shares is empty in the result. What silos share of their spending, and which
          silos were left out and why, are in it nevertheless.
    """
    settings, link, folder, model = run.settings, run.link, run.folder, run.make_module
    if not isinstance(model, AS2Maker):
        raise ConfigurationError("federated=flower sends the description of the model, which must be an AS2Maker.")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    document = folder / "silo.yaml"
    if link.superlink is None:
        document.write_text(silo_document(settings, model), encoding="utf-8")
        raise ConfigurationError(
            f"federated.superlink is null. Send {document} to the silos' owners, who must agree to it, and start again "
            "with federated.superlink=HOST:PORT and resume=true."
        )
    connection = connection_of(link)
    # One run has all phases, whichever part is requested: its silos and their budgets belong to that run.
    phases = tuple(phase for phase in PHASES if phase != "stage2" or settings.stage2.epochs)
    request = RunRequest(
        name=f"{link.run_name}-{digest_of(settings)[:8]}", federated=settings, model=model,
        min_clients=link.min_clients, timeout=link.timeout, wait=link.wait, measure=phases, split=run.split,
    ).check()  # fmt: skip
    kept = folder / f"{request.name}-{run.split}.json"
    if not kept.is_file():
        if connection is not None:
            connection.reach()
        document.write_text(silo_document(settings, model), encoding="utf-8")
        save_json(kept, _run(request, folder, link))
    result = FedResult.of_facts(json.loads(kept.read_text(encoding="utf-8")))
    result.systems = {phase: result.systems.get(phase, {}) for phase in run.measure}
    return result


def silo_document(settings: PddAs2, model: AS2Maker) -> str:
    """Return the document that a silo's owner completes and approves (``lit-dpret silo --settings``)."""
    choices: dict[str, Any] = {"share_measures": False, "share_epsilon": False}
    if settings.roster:
        choices |= {"signing_key": None, "roster_file": None}
    facts = {"schema": SILO_SCHEMA, **choices, "federated": plain(settings), "model": plain(model)}
    said = "# Decide what the server may know, and start: lit-dpret silo --data DIR --state DIR --settings THIS ...\n"
    return said + str(yaml.safe_dump(facts, sort_keys=False))


def _run(request: RunRequest, folder: Path, link: SuperLinkTarget) -> dict[str, Any]:
    app, config = folder / "app", folder / "run.toml"
    app.mkdir(exist_ok=True)
    (app / "pyproject.toml").write_text(APP, encoding="utf-8")
    config.write_text(f"{RUN_CONFIG} = {json.dumps(request.to_yaml())}\n", encoding="utf-8")  # a JSON string is TOML
    environment, name = silent_environment(), str(link.superlink)
    if link.by_address:
        # Write a Flower configuration for this run, with this one address.
        home, how = folder / "flower", "insecure = true" if link.insecure else ""
        home.mkdir(exist_ok=True, mode=0o700)
        if link.root_certificates and not link.insecure:
            how = f"root-certificates = {json.dumps(str(link.root_certificates.resolve()))}"
        known = f'default = "{_OURS}"\n\n[superlink.{_OURS}]\naddress = {json.dumps(link.superlink)}\n{how}\n'
        (home / "config.toml").write_text(f"[superlink]\n{known}", encoding="utf-8")
        environment["FLWR_HOME"], name = str(home), _OURS
    program = str(flower_program("flwr"))
    command = [program, "run", str(app), name, "--run-config", str(config), "--stream"]
    lines: list[str] = []
    with (
        (folder / "flower.log").open("a", encoding="utf-8") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as flwr,
    ):
        try:
            for line in flwr.stdout or ():
                lines.append(_COLOURS.sub("", line.rstrip("\n")))
                log.write(line)
                if re.match(r"stage [12], .*%", lines[-1]):
                    sys.stderr.write(lines[-1] + "\n")
        except BaseException:
            started = next((found[1] for one in lines if (found := re.search(r"started run (\d+)", one))), None)
            if started is not None:
                subprocess.run([program, "stop", started, name], env=environment, capture_output=True, check=False)
            raise
        finally:
            flwr.terminate()
    for line in lines:
        if RESULT in line:
            facts: dict[str, Any] = json.loads(line.partition(RESULT)[2])
            return facts
        if REFUSAL in line:
            raise DataError(f"The server of {request.name} reports: {json.loads(line.partition(REFUSAL)[2])}")
    last = next((line for line in reversed(lines) if line.strip()), "nothing")
    raise WorkerError(
        f"federated.superlink={link.superlink}: the run {request.name} did not end with a result. Flower's last line: "
        f"{last.strip()[:200]} ({folder / 'flower.log'} has all of it)."
    )
