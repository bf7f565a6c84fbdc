"""The same apps on Flower's simulation, on Ray."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_silos import SIZE, SMALL, ran

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.errors import ConfigurationError, WorkerError
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.flower.simulation import UntilStopped
from lit_dpret.federated.model import AS2Maker

MAKE = AS2Maker(encoder="planted", planted=SIZE, max_query_length=8, max_sentence_length=12)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (flwr[simulation])")
def test_a_simulation_gives_what_one_process_gives(tmp_path: Path) -> None:
    silos = silo_folders(write_silos(tmp_path / "silos", planted_silos(SIZE), facts={}))
    expected = ran(SMALL, silos, MAKE, tmp_path / "here")
    found = ran(SMALL, silos, MAKE, tmp_path / "there", transport="simulation")
    assert not found.faults and found.epsilon == dict.fromkeys(silos)
    for system, clients in expected.systems.items():
        assert set(found.systems[system]) == set(clients)
        for client, values in clients.items():
            for metric, value in values.items():
                np.testing.assert_allclose(found.systems[system][client][metric], value, atol=1e-6)
    shared = load_file(tmp_path / "here" / "server" / "global-001.safetensors")
    for name, value in load_file(tmp_path / "there" / "server" / "global-001.safetensors").items():
        torch.testing.assert_close(shared[name], value, rtol=0, atol=1e-6)
    assert expected.sent["stage 1"] < found.sent["stage 1"] < 1.05 * expected.sent["stage 1"]  # arrays have headers
    again = ran(SMALL, silos, MAKE, tmp_path / "there", transport="simulation", measure=["bm25"])
    assert set(again.systems) == {"bm25"} and again.sent == found.sent


def test_a_server_whose_simulation_has_ended_waits_for_nobody() -> None:
    class Deaf:
        def push_messages(self, messages: list[str]) -> list[str]:
            return messages

        def pull_messages(self, _: object) -> list[str]:
            stopped.set()
            return []

    stopped = threading.Event()
    grid: Any = UntilStopped(Deaf(), stopped)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="has ended before its silos answered"):
        grid.send_and_receive(["a message"])


def test_without_ray_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigurationError, match=r"cannot be imported .*'flwr\[simulation\].*or take federated=inprocess"
    ):
        ran(SMALL, {"a": tmp_path}, MAKE, tmp_path / "state", transport="simulation")
