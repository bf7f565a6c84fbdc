"""The two YAML documents of a federation between machines: a silo owner's decisions, and the request for a run.

They are kept apart. A silo's document is stored and read next to its data, and nothing in it comes from the server. A
run's document is sent by its submitter to the server's app, as one string. It names no folder for the server to write
to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lit_dpret.datamodules.silo_folder import read_silo
from lit_dpret.errors import ConfigurationError, schema_problem
from lit_dpret.federated.model import AS2Maker
from lit_dpret.federated.settings import PHASES, PddAs2, Phase
from lit_dpret.federated.silo import SiloClient, Told
from lit_dpret.settings import built, plain, require_choice, require_number, require_whole

SILO_SCHEMA = "lit-dpret/silo-settings/1"
LEDGERS = "ledgers"
RUN_SCHEMA = "lit-dpret/federated-run/1"


@dataclass(frozen=True, kw_only=True)
class SiloSettings:
    """The decisions of a silo's owner."""

    data: Path  # the silo's folder (`lit_dpret.datamodules.silo_folder`)
    state: Path  # kept between rounds and runs: ledgers, the personal query encoder; as private as the data
    # The settings under which this silo works; a server with different ones is refused.
    federated: PddAs2 = field(default_factory=PddAs2)
    model: AS2Maker = field(default_factory=AS2Maker)  # how the model of a round is built
    share_measures: bool = False  # report the means of the measures to the server; never under a budget
    share_epsilon: bool = False  # report to the server how much of the silo's budget is spent
    # The silo's long-term key (``lit-dpret silo --new-signing-key FILE``), with ``federated.roster``.
    signing_key: Path | None = None
    roster_file: Path | None = None  # the public keys of all silos, by name
    secret_file: Path | None = None  # keys the noise; null for the user's state folder
    # One folder of ledgers for all runs on these data, so that a new state folder does not reset the budget; null for
    # ``ledgers`` in ``data``.
    ledgers: Path | None = None

    def client(self) -> SiloClient:
        credentials = None
        if self.federated.roster:
            if self.signing_key is None or self.roster_file is None:
                missing = "signing_key" if self.signing_key is None else "roster_file"
                raise ConfigurationError(
                    f"federated.roster=true, but this silo's document has no {missing}. It must name signing_key (the "
                    "file of lit-dpret silo --new-signing-key) and roster_file (the public keys of all silos)."
                )
            from lit_dpret.federated.keys import load_credentials

            credentials = load_credentials(read_silo(self.data).name, self.signing_key, self.roster_file)
        return SiloClient(
            self.data, self.state, self.federated, self.model, secret_file=self.secret_file, credentials=credentials,
            ledgers=self.ledgers or self.data / LEDGERS, told=Told(self.share_measures, self.share_epsilon),
        )  # fmt: skip

    def to_yaml(self) -> str:
        return _yaml({"schema": SILO_SCHEMA, **plain(self)})


def read_silo_settings(path: Path, **given: Path | None) -> SiloSettings:
    """Read a silo's document."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"--settings={path} cannot be read: {reason}.") from error
    found = _mapping(text, f"--settings={path}", SILO_SCHEMA)
    found |= {name: str(value) for name, value in given.items() if value is not None}
    for name in ("data", "state"):
        if not found.get(name):
            raise ConfigurationError(f"--settings={path} does not contain {name}. Add it, or pass --{name} DIR.")
    settings = built(SiloSettings, found, str(path))
    settings.federated.check()
    whole = {}
    for name in ("data", "state", "secret_file", "signing_key", "roster_file", "ledgers"):
        value = getattr(settings, name)
        if value is not None:  # a path in a file is relative to that file
            whole[name] = (value if given.get(name) is not None else path.parent / value).resolve()
    return replace(settings, **whole)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The number of silos that a server needs, and how long it waits for them."""

    min_clients: int = 2
    timeout: float | None = None
    wait: float = 600.0

    def check_patience(self) -> None:
        require_whole("federated", self, 1, "min_clients")
        require_number("federated", self, "timeout", null=True)
        require_number("federated", self, "wait", zero=True)


@dataclass(frozen=True, kw_only=True)
class SuperLinkTarget(Patience):
    """The SuperLink for a run, and how long the run's server waits."""

    superlink: str | None = None
    root_certificates: Path | None = None
    insecure: bool = False
    run_name: str = "pdd_as2"

    @property
    def by_address(self) -> bool:
        return self.superlink is not None and ":" in self.superlink


@dataclass(frozen=True, kw_only=True)
class RunRequest(Patience):
    """The request for a run, sent to the server's app."""

    name: str  # of the run. A run with the same name continues what is finished, on the server and at the silos.
    federated: PddAs2 = field(default_factory=PddAs2)  # its settings
    model: AS2Maker = field(default_factory=AS2Maker)  # how the server builds the initial weights
    measure: tuple[Phase, ...] = PHASES  # which phases are measured; without ``stage2`` stage 2 is not run
    split: str = "test"  # of the questions to measure on

    def check(self) -> RunRequest:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name):
            raise ConfigurationError(
                f"name={self.name!r} of the run (federated.run_name and a hash of the settings) must be up to 64 "
                "letters, digits, dots, dashes or underscores, and begin with a letter or digit."
            )
        require_choice("split", self.split, ("train", "dev", "test"))
        self.check_patience()
        self.federated.check()
        return self

    def to_yaml(self) -> str:
        return _yaml({"schema": RUN_SCHEMA, **plain(self)})


def read_run_request(text: str) -> RunRequest:
    """Read the request for a run."""
    return built(RunRequest, _mapping(text, "lit-config", RUN_SCHEMA), "lit-config").check()


def _mapping(text: str, where: str, schema: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        raise ConfigurationError(f"{where} is not YAML{'' if line is None else f' (line {line + 1})'}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{where} holds no settings. Begin it with 'schema: {schema}'.")
    problem = schema_problem(found.pop("schema", None), schema)
    if problem is not None:
        raise ConfigurationError(f"{where} cannot be read: {problem}")
    return found


def _yaml(facts: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(facts), sort_keys=False, allow_unicode=True))
