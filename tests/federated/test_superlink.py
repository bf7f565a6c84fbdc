"""The same apps through a real SuperLink: TLS, node keys, silos that are processes of their own beside their data."""

from __future__ import annotations

import json
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_silos import PRIVATE, SIZE, SMALL, ran

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from superlink import STUB, SuperLink

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.documents import RunRequest, SiloSettings
from lit_dpret.federated.flower import components
from lit_dpret.federated.flower.components import RESULT
from lit_dpret.federated.model import AS2Maker

MAKE = AS2Maker(encoder="planted", planted=SIZE, max_query_length=8, max_sentence_length=12)
COMPONENTS = components.__name__
SHORT = replace(SMALL, stage1=replace(SMALL.stage1, warmup_rounds=0, rounds=1))


@pytest.fixture(scope="module")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    with SuperLink(tmp_path_factory.mktemp("superlink")) as running:
        yield running


def silos_of(root: Path, count: int) -> dict[str, Path]:
    return silo_folders(write_silos(root, planted_silos(replace(SIZE, clients=count)), facts={}))


def settings_file(root: Path, name: str, data: Path, **settings: object) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    chosen = SiloSettings(data=data, state=root / name, secret_file=root / "secret", **settings)  # type: ignore[arg-type]
    path = root / f"{name}.yaml"
    path.write_text(chosen.to_yaml())
    return path


def result_of(superlink: SuperLink, request: RunRequest, app: Path = STUB) -> dict[str, Any]:
    """Submit a run and wait for what its server says at its end."""
    try:
        superlink.submit(request.to_yaml(), app=app).wait(900)
        logs = {name: superlink.log(name) for name in superlink.processes}
    finally:
        superlink.end("run")
    said = [line.partition(RESULT)[2] for line in logs["run"].splitlines() if RESULT in line]
    assert said, logs
    found: dict[str, Any] = json.loads(said[0])
    return found


@pytest.mark.slow
def test_through_a_superlink_the_weights_and_measures_are_those_of_one_process(
    superlink: SuperLink, tmp_path: Path
) -> None:
    silos = silos_of(tmp_path / "silos", 2)
    expected = ran(SHORT, silos, MAKE, tmp_path / "here")
    began = time.monotonic()
    for name, data in silos.items():
        document = settings_file(tmp_path / "there", name, data, federated=SHORT, model=MAKE, share_measures=True)
        superlink.start_silo(name, document, superlink.register(name))
    request = RunRequest(name="same", federated=SHORT, model=MAKE, min_clients=2, timeout=300.0, wait=240.0)
    result = result_of(superlink, request)
    print(f"through the SuperLink: {time.monotonic() - began:.0f} s")
    assert result["faults"] == []
    shared = load_file(tmp_path / "here" / "server" / "global-000.safetensors")
    found = load_file(superlink.root / "federations" / "same" / "global-000.safetensors")
    for name, value in shared.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    for client in silos:
        personal = load_file(tmp_path / "here" / "silos" / client / "personal-fed-000.safetensors")
        other = load_file(tmp_path / "there" / client / "personal-fed-000.safetensors")
        for name, value in personal.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)
    for system, clients in expected.systems.items():
        for client, values in clients.items():
            for metric, value in values.items():
                assert result["measures"][system][client][metric] == pytest.approx(value.mean(), abs=1e-6)
    for name in silos:
        assert superlink.end(name) == 0 and not superlink.leftovers, superlink.log(name)


HOSTILE = """
from pathlib import Path
from flwr.clientapp import ClientApp
Path({marker!r}).write_text("the server's code runs beside the data")
client_app = ClientApp()
"""


def hostile_app(folder: Path, marker: Path) -> Path:
    """Our app, but for its client's part: code of whoever submits the run."""
    folder.mkdir()
    text = (STUB / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(text.replace(f"{COMPONENTS}:client_app", "hostile:client_app"))
    (folder / "hostile.py").write_text(HOSTILE.format(marker=str(marker)))
    return folder


@pytest.mark.slow
def test_a_silo_that_is_killed_in_a_round_is_named_loses_no_ledger_entry_and_comes_back_and_runs_no_foreign_code(
    superlink: SuperLink, tmp_path: Path
) -> None:
    run = replace(
        PRIVATE,
        stage1=replace(PRIVATE.stage1, warmup_rounds=0, rounds=3),
        stage2=replace(PRIVATE.stage2, epochs=0),
    )
    silos = silos_of(tmp_path / "silos", 3)
    settings = {name: settings_file(tmp_path, name, data, federated=run, model=MAKE) for name, data in silos.items()}
    keys = {name: superlink.register(f"{name}-of-three") for name in silos}
    for name, document in settings.items():
        superlink.start_silo(name, document, keys[name])
    for name in silos:  # a run begins as soon as min_clients are there, and the one to be killed has to be among them
        superlink.wait_for(name, lambda name=name: "SuperNode ID" in superlink.log(name), seconds=300)
    ledger = silos["client2"] / "ledgers" / "silo_ledger.query.jsonl"
    kept: list[bytes] = []

    def power_cut() -> None:
        superlink.wait_for("client2", lambda: ledger.is_file() and b'"reserve"' in ledger.read_bytes(), seconds=600)
        superlink.kill("client2")
        kept.append(ledger.read_bytes())
        # For two heartbeats the SuperLink takes the dead node for alive, and refuses another one with its key. A
        # supervisor (systemd, Restart=on-failure) starts it again until it is let in; so does this.
        begun = superlink.log("client2").count("SuperNode ID")
        while superlink.log("client2").count("SuperNode ID") == begun:
            superlink.start_silo("client2", settings["client2"], keys["client2"])
            while superlink.processes["client2"].poll() is None:
                if superlink.log("client2").count("SuperNode ID") > begun:
                    return
                time.sleep(0.5)
            superlink.end("client2")

    cut = threading.Thread(target=power_cut, daemon=True)
    cut.start()
    marker = tmp_path / "marker"
    app = hostile_app(tmp_path / "app", marker)
    request = RunRequest(
        name="cut", federated=run, model=MAKE, min_clients=2, timeout=120.0, wait=240.0, measure=("stage1",)
    )
    result = result_of(superlink, request, app)
    cut.join(10)
    assert kept, superlink.log("client2")
    assert result["rounds"]["0"] == ["client0", "client1"], result
    assert result["rounds"]["2"] == ["client0", "client1", "client2"], result
    assert [fault for fault in result["faults"] if fault.startswith("stage 1, round 0: client 'client2' ")], result
    assert ledger.read_bytes().startswith(kept[0]) and len(ledger.read_bytes()) > len(kept[0])
    assert not any(result["measures"].values())  # under a budget no measure leaves a silo
    unpacked = list((superlink.root / "flower").rglob("hostile.py"))
    assert unpacked and not marker.exists()
    for name in silos:
        assert superlink.end(name) == 0 and not superlink.leftovers, superlink.log(name)


def test_the_stub_holds_no_code_and_points_to_apps_that_are_there() -> None:
    app = tomllib.loads((STUB / "pyproject.toml").read_text())
    assert [path.name for path in STUB.iterdir()] == ["pyproject.toml"] and app["project"]["dependencies"] == []
    assert list(app["tool"]["flwr"]["app"]["config"]) == [components.RUN_CONFIG]
    named = app["tool"]["flwr"]["app"]["components"]
    assert {kind: getattr(components, place.partition(":")[2]) for kind, place in named.items()} == {
        "serverapp": components.server_app,
        "clientapp": components.client_app,
    }
    assert {place.partition(":")[0] for place in named.values()} == {COMPONENTS}
