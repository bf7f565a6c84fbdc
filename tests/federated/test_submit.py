"""Handing a run to a SuperLink: what is sent, what comes back, and what is refused.

Flower's command is a stand-in here; `test_superlink.py` has a true one.
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from tiny_silos import SIZE, SMALL, ran

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from superlink import STUB, make_authority

from lit_dpret import cli
from lit_dpret.errors import ConfigurationError, DataError, ResumeError, WorkerError
from lit_dpret.federated.documents import (
    RunRequest,
    SiloSettings,
    SuperLinkTarget,
    read_run_request,
    read_silo_settings,
)
from lit_dpret.federated.flower import submit
from lit_dpret.federated.flower.components import REFUSAL, RESULT
from lit_dpret.federated.model import AS2Maker
from lit_dpret.settings import built

MAKE = AS2Maker(encoder="planted", planted=SIZE, max_query_length=8, max_sentence_length=12)
METRICS = ("mrr@10", "success@1", "success@20", "success@100", "recall@20", "recall@100")
MEANS = {f"{level}/{name}": 0.25 for level in ("sentence", "passage") for name in METRICS}
SAID: dict[str, Any] = {
    "measures": {phase: {"cdc": MEANS, "gard": MEANS} for phase in ("bm25", "stage1", "stage2")},
    "queries": {"cdc": 4, "gard": 2},
    "sent_by_silo": {"cdc": {"stage 1": 10}, "gard": {"stage 1": 30}},
    "faults": ["stage 1, round 0: client 'gard' did not answer."],
    "epsilon": {},
}


class FakeFlower:
    """A command ``flwr`` that prints lines and notes what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.program, self._calls = folder / "flwr", folder / "calls"

    def says(self, *lines: str) -> None:
        said = "".join(f"{line}\n" for line in lines)
        self.program.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"home = open(os.environ['FLWR_HOME'] + '/config.toml').read() if 'FLWR_HOME' in os.environ else ''\n"
            f"open({str(self._calls)!r}, 'a').write(json.dumps([*sys.argv[1:], home]) + '\\n')\nprint({said!r})\n"
        )
        self.program.chmod(0o700)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()] if self._calls.exists() else []


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlower:
    found = FakeFlower(tmp_path)
    found.says(RESULT + json.dumps(SAID))
    monkeypatch.setattr(submit, "flower_program", lambda _: found.program)
    return found


def run(folder: Path, *, link: dict[str, Any] | None = None, **more: Any) -> Any:
    chosen = {"superlink": "server:8000", "insecure": True, **(link or {})}
    return ran(SMALL, {}, MAKE, folder, transport="flower", link=built(SuperLinkTarget, chosen, "federated"), **more)


def test_one_run_is_handed_over_once_whatever_part_of_it_is_asked_for(flower: FakeFlower, tmp_path: Path) -> None:
    flower.says("\x1b[92mSuccessfully started run 7\x1b[0m", "stage 1, rounds: 50% 1/2", RESULT + json.dumps(SAID))
    result = run(tmp_path / "run", measure=["stage1"])
    assert set(result.systems) == {"stage1"} and result.faults == SAID["faults"]
    assert result.mean("stage1", "sentence/mrr@10") == 0.25
    assert len(result.systems["stage1"]["cdc"]["sentence/mrr@10"]) == 4
    assert result.traffic.by_silo()["gard"] == {"stage 1": 30}
    assert set(run(tmp_path / "run").systems) == {"bm25", "stage1", "stage2"}
    ((verb, app, name, option, config, stream, home),) = flower.calls
    assert (verb, option, stream) == ("run", "--run-config", "--stream")
    assert tomllib.loads(home)["superlink"][name] == {"address": "server:8000", "insecure": True}
    sent = read_run_request(tomllib.loads(Path(config).read_text())["lit-config"])
    assert sent.federated == SMALL and sent.model == MAKE and sent.measure == ("bm25", "stage1", "stage2")
    assert (Path(app) / "pyproject.toml").read_text() == (STUB / "pyproject.toml").read_text()
    assert [path.name for path in Path(app).iterdir()] == ["pyproject.toml"]


def test_a_name_is_left_to_the_users_own_flower_configuration(flower: FakeFlower, tmp_path: Path) -> None:
    run(tmp_path / "run", link={"superlink": "hospital-net", "insecure": False})
    assert flower.calls[0][2] == "hospital-net"
    certificate = make_authority(tmp_path / "certificates")["ca"]
    run(tmp_path / "other", link={"insecure": False, "root_certificates": str(certificate)})
    home = tomllib.loads(flower.calls[1][-1])
    assert home["superlink"]["lit-dpret"] == {"address": "server:8000", "root-certificates": str(certificate)}


@pytest.mark.parametrize(("line", "kind", "message"), [
    (REFUSAL + json.dumps("3 are missing."), DataError, r"pdd_as2-\w{8} .*3 are missing\."),
    ("Unable to connect", WorkerError, r"federated\.superlink=.*Unable to connect"),
])  # fmt: skip
def test_what_the_server_says_against_a_run_is_passed_on(
    flower: FakeFlower, tmp_path: Path, line: str, kind: type[Exception], message: str
) -> None:
    flower.says(line)
    with pytest.raises(kind, match=message):
        run(tmp_path / "run")


@pytest.mark.parametrize(("link", "message"), [
    ({"superlink": "name"}, r"federated\.insecure .*'name'"),
    ({"root_certificates": "/no/ca"}, r"insecure=true .*federated\.root_certificates"),
    ({"insecure": False, "root_certificates": "/no/ca"}, r"federated\.root_certificates=/no/ca"),
    ({"run_name": "a b"}, r"name='a b-\w+' .*federated\.run_name"),
])  # fmt: skip
def test_a_target_that_cannot_be_is_refused(
    flower: FakeFlower, tmp_path: Path, link: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(tmp_path / "run", link=link)
    assert not flower.calls


def test_without_a_superlink_the_document_for_the_silos_is_written_and_they_can_read_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"federated\.superlink is null.*silo\.yaml"):
        run(tmp_path / "run", link={"superlink": None, "insecure": False})
    found = read_silo_settings(tmp_path / "run" / "silo.yaml", data=tmp_path / "d", state=tmp_path / "s")
    assert found == SiloSettings(data=tmp_path / "d", state=tmp_path / "s", federated=SMALL, model=MAKE)


def test_a_request_is_read_as_it_was_written() -> None:
    request = RunRequest(name="a", federated=SMALL, model=MAKE, timeout=3.5)
    assert read_run_request(request.to_yaml()) == request
    for change, message in (({"name": "../up"}, "name='../up'"), ({"split": "all"}, "split='all'")):
        with pytest.raises(ConfigurationError, match=message):
            replace(request, **change).check()
    with pytest.raises(ConfigurationError, match="lit-config"):
        read_run_request("")


COMMAND = [
    "experiment=pdd_as2", "federated=flower", "federated.superlink=server:8000", "federated.insecure=true",
    "federated.silos=planted", "federated.model.encoder=planted", "federated.model.layers=null",
]  # fmt: skip


@pytest.mark.parametrize("knob", ["min_clients", "timeout", "wait"])
def test_a_server_that_would_wait_without_a_number_is_refused_by_name(knob: str) -> None:
    for value in ("abc", True, -1, float("nan")):
        with pytest.raises(ConfigurationError, match=rf"federated\.{knob}="):
            RunRequest(name="a", federated=SMALL, model=MAKE, **{knob: value}).check()


def command(folder: Path, *settings: str) -> Any:
    with initialize_config_module(cli.CONFIG_MODULE, version_base="1.3"):
        chosen = compose("train", overrides=[*COMMAND, *settings, f"run_dir={folder}"])
    return cli.run(chosen)


@pytest.mark.parametrize(("setting", "message"), [
    ("task.systems=[bm25,single_star]", "single_star"),
    ("task.systems=[customised,fed_negative]", "customised .*fed_negative"),
    ("task.systems=[stage1]", r"task\.seeds=\[0, 1, 2\]"),
])  # fmt: skip
def test_systems_that_a_silo_elsewhere_did_not_agree_to_are_refused(setting: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        command(tmp_path / "out", setting)
    assert not (tmp_path / "out").exists()


def test_a_finished_run_of_which_no_silo_shares_measures_ends_well_and_tells_what_was_spent_and_lost(
    flower: FakeFlower, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flower.says(RESULT + json.dumps({**SAID, "measures": {}, "queries": {}, "epsilon": {"cdc": 7.25}}))
    systems = ["bm25", "stage1", "fed_negative"]
    command(
        tmp_path / "out", f"task.systems=[{','.join(systems)}]", "task.seeds=[0]", "federated.privacy.eps=8",
        "federated.privacy.delta=0.01",
    )  # fmt: skip
    told = json.loads((tmp_path / "out" / "pdd_as2.json").read_text(encoding="utf-8"))
    assert list(told["systems"]) == systems
    for system in systems:
        row = told["systems"][system]
        assert all(cell["over_silos"].get("mean") is None for cell in row["measures"].values())
        assert row["epsilon"] == {"cdc": 7.25} and any("gard" in fault for fault in row["faults"])
    shown = capsys.readouterr().out
    assert "7.25" in shown and "gard" in shown


def test_the_folder_in_which_the_document_of_the_silos_was_written_takes_the_submission(
    flower: FakeFlower, tmp_path: Path
) -> None:
    study = ["task.seeds=[0]", "task.systems=[stage1]"]
    with pytest.raises(ConfigurationError, match=r"federated\.superlink is null"):
        command(tmp_path / "out", *study, "federated.superlink=null", "federated.insecure=false")
    with pytest.raises(ResumeError, match="other settings"):  # which are not those that the silos agreed to
        command(tmp_path / "out", *study, "federated.stage1.rounds=3", "resume=true")
    assert not flower.calls
    command(tmp_path / "out", *study, "resume=true")
    assert len(flower.calls) == 1 and (tmp_path / "out" / "pdd_as2.json").is_file()
