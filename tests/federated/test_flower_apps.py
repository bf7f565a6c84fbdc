"""The apps do by messages what the in-process engine does by calls; and what happens when a silo does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_silos import PRIVATE, SMALL, declare_public, federation

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import DIM, Run, only_stage1

from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.federated.aggregation import fingerprint
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.flower.library import Message
from lit_dpret.federated.flower.payloads import tensors_record
from lit_dpret.federated.flower.server_app import FlowerFederation
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo import SiloClient


def personal(state: Path, settings: PddAs2) -> dict[str, torch.Tensor]:
    return load_file(state / f"personal-{settings.stage2.negatives}-{settings.stage2.epochs - 1:03}.safetensors")


@pytest.mark.parametrize(
    ("request_", "seal", "epochs"),
    [("exact", False, 1), pytest.param("none", False, 1, marks=pytest.mark.slow),
     pytest.param("exact", True, 1, marks=pytest.mark.slow), pytest.param("exact", False, 3, marks=pytest.mark.slow),
     pytest.param("exact", True, 3, marks=pytest.mark.slow)],
)  # fmt: skip
def test_by_messages_the_same_weights_and_measures_come_out_as_in_one_process(
    request_: Any, seal: bool, epochs: int, tmp_path: Path
) -> None:
    """Of three epochs the second is told from what was answered before the first."""
    two = replace(SMALL.stage2, request=request_, epochs=epochs, refresh_every=1 if epochs == 1 else 2)
    settings = replace(SMALL, stage2=two, seal=seal)
    engine = federation(tmp_path, settings)
    expected = engine.run()
    run = Run(tmp_path, settings, share=True)
    result = run.launch()
    assert not result.faults and result.rounds == {0: sorted(run.folders), 1: sorted(run.folders)}
    shared = load_file(tmp_path / "state" / "server" / "global-001.safetensors")
    for name, value in shared.items():
        torch.testing.assert_close(result.weights[name], value, rtol=0, atol=1e-6)
    for client in run.folders:
        for name, value in personal(tmp_path / "state" / client, settings).items():
            found = personal(tmp_path / "flower" / client, settings)[name]
            torch.testing.assert_close(found, value, rtol=0, atol=1e-6)
    for system in ("bm25", "stage1", "stage2"):
        for metric in ("sentence/mrr@10", "passage/success@1"):
            assert result.mean(system, metric) == pytest.approx(expected.mean(system, metric), abs=1e-6)
    assert all(result.sent[phase] > 0 for phase in ("stage 1", "requests", "responses", "pools"))
    assert (tmp_path / "flower" / "server" / "federation.json").is_file()
    # Stage 1 sends the weights in every round; after it they are sent to each silo once, with the first measures.
    down, weights = run.grid.down, sum(value.numel() * 4 for value in run.server.start.values())
    assert down["train.stage1"] > 2 * 3 * weights and down["evaluate.retrieval"] > 3 * weights
    for kind in ("query.fedneg_request", "query.fedneg_serve", "train.personalise"):
        assert down[kind] < 3 * weights, kind


def test_a_silo_that_fails_in_a_round_is_named_the_round_goes_on_and_it_comes_back(tmp_path: Path) -> None:
    class Breaks(SiloClient):
        def train_shared(self, weights: Any, number: int) -> Any:
            if self.name == "client1" and number == 0:
                raise RuntimeError("private words")
            return super().train_shared(weights, number)

    result = Run(tmp_path, only_stage1(), silo=Breaks).launch()
    assert result.rounds == {0: ["client0", "client2"], 1: ["client0", "client1", "client2"]}
    assert len(result.faults) == 1 and "private words" not in str(result.faults)
    assert result.faults[0].startswith("stage 1, round 0: client 'client1' failed: RuntimeError")


@pytest.mark.slow
def test_a_silo_that_answers_late_or_is_gone_is_named_and_takes_part_again(tmp_path: Path) -> None:
    rounds: list[str] = []

    def fate(message: Message) -> Any:
        if message.metadata.message_type != "train.stage1":
            return None
        number = message.content["head"]["round"]
        rounds.append(f"{message.metadata.dst_node_id} in round {number}")
        return {(10, 0): "late", (11, 0): "unavailable", (12, 1): "silent"}.get((message.metadata.dst_node_id, number))

    result = Run(tmp_path, only_stage1(rounds=3), fate=fate, timeout=30.0).launch()
    assert result.rounds == {0: ["client2"], 1: ["client0", "client1"], 2: ["client0", "client1", "client2"]}
    assert [fault.split("'")[1] for fault in result.faults] == ["client0", "client1", "client2"]
    assert "did not answer within 30.0 seconds" in result.faults[0] and len(rounds) == 9


@pytest.mark.slow
def test_in_stage_2_an_asker_goes_on_without_the_silo_that_does_not_serve(tmp_path: Path) -> None:
    def fate(message: Message) -> Any:
        serves = message.metadata.message_type == "query.fedneg_serve"
        return "unavailable" if serves and message.metadata.dst_node_id == 12 else None

    run = Run(tmp_path, fate=fate)
    result = run.launch()
    assert [fault.split(": client")[0] for fault in result.faults] == ["refresh 0"]
    with pytest.raises(DataError, match="No silo shares its measures of stage2"):  # they are shared by choice alone
        result.mean("stage2", "sentence/mrr@10")
    assert all(list((tmp_path / "flower" / name).glob("personal-fed-000.safetensors")) for name in run.folders)


@pytest.mark.slow
def test_a_round_with_too_few_updates_ends_the_run_and_a_new_start_goes_on_from_there(tmp_path: Path) -> None:
    def fate(message: Message) -> Any:
        training = message.metadata.message_type == "train.stage1"
        return "unavailable" if training and message.content["head"]["round"] == 1 else None

    with pytest.raises(DataError, match=r"stage 1, round 1: 0 silos sent an update, and .*client 'client0' failed"):
        Run(tmp_path, only_stage1(), fate=fate, min_clients=2).launch()
    again = Run(tmp_path, only_stage1(), min_clients=2).launch()
    assert list(again.rounds) == [1] and not again.faults
    with pytest.raises(ResumeError, match=r"begun with server\.rounds=2, and now it is 3"):
        FlowerFederation(only_stage1(rounds=3), {}, tmp_path / "flower" / "server", dim=DIM)


@pytest.mark.parametrize(
    "hidden", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in clear", "masked, sealed"]
)
def test_under_a_budget_no_count_and_no_measure_leaves_a_silo_and_its_ledger_is_not_forgotten(
    hidden: bool, tmp_path: Path
) -> None:
    settings = replace(PRIVATE, secure_sum=hidden, seal=hidden)
    run = Run(tmp_path, settings, share=True, spent=hidden)
    declare_public(tmp_path)
    result = run.launch()
    spent_by = {name: run.client(run.grid.context(node)).epsilon() for node, name in enumerate(run.folders, start=10)}
    assert result.epsilon == (spent_by if hidden else {})  # a silo tells it by its own choice
    assert not result.faults and set(run.server.silos.examples.values()) == {1}
    assert not any(result.systems.values())
    assert (tmp_path / "flower" / "client0" / "measures-stage2-test.safetensors").is_file()  # the silo knows
    client = run.client(run.grid.context(10))
    spent = client.epsilon()
    assert spent is not None and 0.9 * 20 < spent <= 20
    # The node knows how its ledger began: without it, nothing is spent any more.
    assert client.ledger is not None
    kept = client.ledger.path.read_bytes()
    client.ledger.path.write_bytes(kept[: len(kept) // 2])
    run.server = FlowerFederation(settings, run.server.start, tmp_path / "other", dim=DIM)
    with pytest.raises(DataError, match=r"node 10 did not introduce itself: failed: LedgerError"):
        run.launch()


def test_a_silo_with_other_settings_refuses_and_the_server_hears_why(tmp_path: Path) -> None:
    run = Run(tmp_path, only_stage1())
    run.server = FlowerFederation(replace(only_stage1(), seed=1), run.server.start, tmp_path / "s", dim=DIM)
    with pytest.raises(DataError, match=r"node 10 did not introduce itself: failed: DataError \(other settings\)"):
        run.launch()


def test_a_server_gets_no_round_and_no_request_that_the_silos_settings_do_not_plan(tmp_path: Path) -> None:
    run = Run(tmp_path)
    weights = run.server.start
    asked: dict[str, dict[str, int]] = {
        "train.stage1": {"round": 2},
        "query.fedneg_request": {"refresh": 1},
        "query.fedneg_serve": {"refresh": 1, "askers": 0},
        "train.personalise": {"epoch": 1},
    }
    for kind, turn in asked.items():
        reply = run.ask(10, kind, {"weights": tensors_record(weights)}, weights=fingerprint(weights), **turn)
        assert reply.error.reason == "DataError (not planned)", kind
    assert not list((tmp_path / "flower" / "client0").glob("stage1-*"))


def test_what_the_apps_do_not_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for knob, value in (("min_clients", 0), ("timeout", 0.0), ("wait", -1.0)):
        with pytest.raises(ConfigurationError, match=f"{knob}={value}"):
            FlowerFederation(SMALL, {}, tmp_path, dim=DIM, patience=Patience(**{knob: value}))
