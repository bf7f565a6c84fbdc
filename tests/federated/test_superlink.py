"""The same apps through a real SuperLink: TLS, node keys, silos that are processes of their own beside their data."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_silos import SIZE, SMALL

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from superlink import SuperLink

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.documents import RunRequest, SiloSettings
from lit_dpret.federated.flower.components import RESULT
from lit_dpret.federated.model import AS2Maker
from lit_dpret.federated.transport import run_federation

MAKE = AS2Maker(encoder="planted", planted=SIZE, max_query_length=8, max_sentence_length=12)
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


def result_of(output: str) -> dict[str, object]:
    return json.loads(next(line for line in output.splitlines() if RESULT in line).partition(RESULT)[2])


@pytest.mark.slow
def test_through_a_superlink_the_weights_and_measures_are_those_of_one_process(
    superlink: SuperLink, tmp_path: Path
) -> None:
    silos = silos_of(tmp_path / "silos", 2)
    expected = run_federation(SHORT, silos, MAKE, tmp_path / "here")
    began = time.monotonic()
    for name, data in silos.items():
        document = settings_file(tmp_path / "there", name, data, federated=SHORT, model=MAKE, share_measures=True)
        superlink.start_silo(name, document, superlink.register(name))
    request = RunRequest(name="same", federated=SHORT, model=MAKE, min_clients=2, timeout=300.0, wait=240.0)
    done = superlink.submit(request.to_yaml())
    assert RESULT in done.stdout, done.stdout + done.stderr + "".join(map(superlink.log, superlink.processes))
    result = result_of(done.stdout)
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
                assert result["measures"][system][client][metric] == pytest.approx(value.mean(), abs=1e-6)  # type: ignore[index]
    for name in silos:
        assert superlink.end(name) == 0 and not superlink.leftovers, superlink.log(name)
