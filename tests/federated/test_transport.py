"""The seam between a run of PDD-AS2 and what carries it, and the model that every round begins with."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_silos import SIZE, SMALL, ran

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.errors import ConfigurationError, WorkerError
from lit_dpret.federated import transport
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.model import AS2Maker, start_of
from lit_dpret.federated.transport import FederationRun
from lit_dpret.privacy.modes import NoPrivacy

MAKE = AS2Maker(encoder="planted", planted=SIZE, max_query_length=8, max_sentence_length=12)


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("silos") / "planted"
    return silo_folders(write_silos(folder, planted_silos(SIZE), facts={}))


@pytest.mark.slow
def test_both_kinds_of_stage_2_go_on_from_one_stage_1_and_only_what_is_asked_for_is_measured(
    silos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ran(SMALL, silos, MAKE, tmp_path, measure=["stage1"])
    assert set(first.systems) == {"stage1"} and set(first.sent) == {"stage 1"}
    monkeypatch.setattr(
        "lit_dpret.federated.silo.SiloClient.train_shared", lambda *_, **__: pytest.fail("stage 1 made again")
    )
    fed = ran(SMALL, silos, MAKE, tmp_path, measure=["stage2"])
    own = replace(SMALL, stage2=replace(SMALL.stage2, negatives="dynamic"))
    dynamic = ran(own, silos, MAKE, tmp_path, measure=["stage2"])
    assert set(fed.systems) == set(dynamic.systems) == {"stage2"}
    assert fed.sent["stage 1"] == first.sent["stage 1"] and fed.sent["requests"] > 0
    again = ran(SMALL, silos, MAKE, tmp_path, measure=["stage2"])
    assert again.traffic.by_silo() == fed.traffic.by_silo()  # an interruption counts nothing twice and loses nothing


def test_another_transport_registers_by_name_and_gets_what_the_default_gets(
    silos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[FederationRun] = []

    def carry(run: FederationRun) -> FedResult:
        seen.append(run)
        return FedResult()

    monkeypatch.setattr(transport, "_TRANSPORTS", {})
    transport.register("pigeons", carry)
    ran(SMALL, silos, MAKE, tmp_path, transport="pigeons", split="dev")
    (run,) = seen
    assert run.settings == SMALL and run.silos == silos and run.make_module is MAKE
    assert run.folder == tmp_path and run.split == "dev"
    with pytest.raises(ConfigurationError, match=r"federated\.transport='boats' is not one of pigeons"):
        ran(SMALL, silos, MAKE, tmp_path, transport="boats")


def test_a_maker_that_was_sent_elsewhere_builds_the_same_start() -> None:
    sent = pickle.loads(pickle.dumps(MAKE))
    here, there = start_of(MAKE), start_of(sent)
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_frozen_embedding_tables_do_not_travel_and_do_not_change() -> None:
    frozen = replace(MAKE, train_embeddings=False)
    assert not [name for name in start_of(frozen) if "embeddings" in name]
    assert [name for name in start_of(MAKE) if "word_embeddings" in name]
    personal = frozen(privacy=NoPrivacy(), optimizer_lr=1e-3, towers="separate", passage_tower="frozen")
    weights = {name: value + 1 for name, value in start_of(frozen).items()}
    personal.put_global(weights)  # both towers, without a row for a word among the weights
    name = next(iter(weights))
    for side in ("encoder", "passage_encoder"):
        torch.testing.assert_close(
            personal.get_parameter(name.replace("encoder.", f"{side}.", 1)).detach(), weights[name]
        )
    with pytest.raises(ConfigurationError, match="of another model"):
        personal.put_global({key: value for key, value in weights.items() if key != name})


@pytest.mark.parametrize(("change", "message"), [
    ({"encoder": "/no/such/folder"}, "is not a folder on this machine"),
    ({"layers": 9}, "1 to 1 layers"),
    ({"max_query_length": 0}, r"federated\.model\.max_query_length=0"),
    ({"planted": None}, r"federated\.model\.encoder=planted"),
])  # fmt: skip
def test_an_encoder_that_cannot_be_had_is_refused_at_once(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(MAKE, **change).check()


# -- Flower's simulation, on Ray


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
    pytest.importorskip("flwr", reason="needs the extra federated (flwr)")
    from lit_dpret.federated.flower.simulation import UntilStopped

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
    pytest.importorskip("flwr", reason="needs the extra federated (flwr)")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigurationError, match=r"cannot be imported .*'flwr\[simulation\].*or take federated=inprocess"
    ):
        ran(SMALL, {"a": tmp_path}, MAKE, tmp_path / "state", transport="simulation")
