"""PDD-AS2 with all clients in one process: its arithmetic, budget, faults and resumption; and other transports."""

from __future__ import annotations

import importlib.util
import json
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
from tiny_silos import PRIVATE, SIZE, SMALL, declare_public, encoder, federation, ran

from lit_dpret.datamodules import SiloDataModule
from lit_dpret.datamodules.silo_folder import read_silo, silo_folders, write_silos
from lit_dpret.encoders import TextEncoder
from lit_dpret.errors import (
    BudgetExceededError,
    ConfigurationError,
    DataError,
    LedgerError,
    ResumeError,
    WorkerError,
)
from lit_dpret.federated import transport
from lit_dpret.federated.aggregation import client_weights, put_weights, take_weights, weighted_mean
from lit_dpret.federated.data import merged_silo, planted_silos
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.fitting import TowardsAnchor, fit_epochs
from lit_dpret.federated.model import AS2Maker, start_of
from lit_dpret.federated.negatives import FedNegatives, FedPool
from lit_dpret.federated.settings import PddAs2, Stage1, Stage2
from lit_dpret.federated.synthetic import public_sentences
from lit_dpret.federated.transport import FederationRun, InProcessFederation
from lit_dpret.modules import AS2DualEncoder, OptimizerSpec
from lit_dpret.privacy.ledger.dataset_file import DatasetFile
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.privacy.noise import KeyedStream


def one_step(
    folder: Path, run: Path, start: dict[str, torch.Tensor], **more: Any
) -> tuple[dict[str, torch.Tensor], int]:
    """The query tower after one SGD step on all train queries of a silo, and how many these are."""
    pool = FedPool(torch.randn(7, 16, generator=torch.Generator().manual_seed(5)))
    module = AS2DualEncoder(
        privacy=NoPrivacy(), optimizer=OptimizerSpec(name="sgd", lr=0.5), encoder=encoder(), towers="separate",
        passage_tower="frozen", negatives=[FedNegatives(pool, per_query=7, depth=7)],
    )  # fmt: skip
    put_weights(module, start)
    count = read_silo(folder).counts()["train"]
    data = SiloDataModule(folder=folder, sampling="shuffle", expected_batch_size=count, physical_batch_size=count)
    fit_epochs(module, data, run, **more)
    return take_weights(module), count


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("silos")
    found = planted_silos(replace(SIZE, skew=3.0))
    write_silos(root / "clients", found, facts={})
    write_silos(root / "central", [merged_silo(found)], facts={})
    return root


def first_weights() -> dict[str, torch.Tensor]:
    module = AS2DualEncoder(
        privacy=NoPrivacy(), optimizer=OptimizerSpec(), encoder=encoder(), towers="separate", passage_tower="frozen"
    )
    return take_weights(module)


@pytest.mark.costly
def test_a_round_of_one_full_batch_of_sgd_weighted_by_examples_is_a_central_step(silos: Path, tmp_path: Path) -> None:
    start = first_weights()
    updates, counts = {}, {}
    for name, folder in silo_folders(silos / "clients").items():
        updates[name], counts[name] = one_step(folder, tmp_path / name, start)
    (central_folder,) = silo_folders(silos / "central").values()
    central, count = one_step(central_folder, tmp_path / "central", start)
    assert count == sum(counts.values()) and len(set(counts.values())) == 3
    mean = weighted_mean(updates, client_weights(counts, "examples"))
    moved = max(float((central[name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-3
    for name in start:
        torch.testing.assert_close(mean[name], central[name], rtol=0, atol=1e-4 * moved)
    uniform = weighted_mean(updates, client_weights(counts, "uniform"))
    assert max(float((uniform[name] - central[name]).abs().max()) for name in start) > 1e-3 * moved


def test_the_term_towards_an_anchor_adds_its_strength_times_the_distance_to_the_gradient(
    silos: Path, tmp_path: Path
) -> None:
    start = first_weights()
    folder = silo_folders(silos / "clients")["client2"]
    anchor = {name: value + 0.2 for name, value in start.items()}
    plain, _ = one_step(folder, tmp_path / "plain", start)
    pulled, _ = one_step(folder, tmp_path / "pulled", start, callbacks=[TowardsAnchor(anchor, 0.3)])
    for name in start:  # with learning rate 0.5 a step moves by 0.5 * 0.3 * 0.2 further
        torch.testing.assert_close(pulled[name], plain[name] + 0.03, rtol=0, atol=1e-5)


# -- whole runs ------------------------------------------------------------------------------


def test_a_state_folder_of_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    federation(tmp_path, SMALL)
    with pytest.raises(ResumeError, match=r"federated\.stage1\.lr=0\.003.* 0\.5"):
        federation(tmp_path, replace(SMALL, stage1=replace(SMALL.stage1, lr=0.5)))
    run = federation(tmp_path, SMALL)
    with pytest.raises(ResumeError, match=r"weights of federated\.model="):
        InProcessFederation(list(run.clients.values()), SMALL, {k: v + 1 for k, v in run.start.items()}, run.folder)
    federation(tmp_path, replace(SMALL, stage2=replace(SMALL.stage2, negatives="dynamic", n=2)))  # beside it


@pytest.mark.parametrize("masked", [False, True], ids=["in clear", "masked"])
def test_a_client_that_sends_nan_or_wrong_shapes_is_named_and_the_mean_is_that_of_the_others(
    masked: bool, tmp_path: Path
) -> None:
    capped = replace(SMALL.stage1, weighting="capped", n_hat=30)
    hidden = {"stage1": capped, "secure_sum": True, "sum_threshold": 3} if masked else {}
    settings = replace(SMALL, update_norm=None, **hidden)
    run = federation(tmp_path, settings, size=replace(SIZE, clients=5, skew=3.0))
    generator = torch.Generator().manual_seed(0)
    updates = {
        name: {key: value + 0.1 * torch.randn(value.shape, generator=generator) for key, value in run.start.items()}
        for name in run.clients
    }
    counts = {name: client.examples for name, client in run.clients.items()}
    shares = client_weights(counts, settings.stage1.weighting, n_hat=settings.stage1.n_hat)
    key = next(iter(run.start))
    for broken in ({}, {"client1": torch.full_like(run.start[key], float("nan")), "client2": torch.zeros(3)}):
        for name, value in broken.items():
            updates[name][key] = value
        mean = run.aggregate(run.start, updates, len(broken))
        good = {name: update for name, update in updates.items() if name not in broken}
        for name, value in weighted_mean(good, shares).items():
            torch.testing.assert_close(mean[name], value, rtol=0, atol=1e-6)
        assert [fault.split("'")[1] for fault in run.result.faults] == list(broken)
    if not masked:
        with pytest.raises(DataError, match=r"federated\.min_clients"):
            run.aggregate(run.start, {"client1": updates["client1"]}, 1)


@pytest.mark.costly
def test_under_a_budget_rounds_requests_and_stages_are_charged_to_each_silo_and_stay_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise on a grid, of which nothing floating is drawn; `test_killed_budget` has the other noise."""
    monkeypatch.delattr(KeyedStream, "normal")
    two, settings = replace(SIZE, clients=2), replace(PRIVATE, privacy=replace(PRIVATE.privacy, noise="discrete"))
    run = federation(tmp_path, settings, size=two)
    declare_public(tmp_path)
    run.personalise(run.train_shared())
    spent = {name: client.epsilon() for name, client in run.clients.items()}
    for name, epsilon in spent.items():
        assert epsilon is not None and 0.9 * 20 < epsilon <= 20, name
    again = federation(tmp_path, settings, size=two)
    client = again.clients["client0"]
    assert client.ledger is not None and client.epsilon() == spent["client0"]
    runs = [entry.name for entry in DatasetFile.read(client.ledger.path).book.entries.values()]
    assert sum("stage1" in run for run in runs) == 2
    assert sum("personal" in run for run in runs) == 1 and "fed_request" in runs
    # One round more than was planned is refused before it begins, and changes nothing.
    with pytest.raises(BudgetExceededError, match=r"^federated\.privacy\.eps=20 "):
        client.train_shared(again.start, 2)
    assert client.epsilon() == spent["client0"]
    client.ledger.path.unlink()  # without it the spending of the rounds is unknown
    with pytest.raises(LedgerError, match=r"silo_ledger\.query\.jsonl"):
        federation(tmp_path, settings, size=two)


@pytest.mark.costly
def test_centroids_of_a_private_collection_are_released_once_in_a_ledger_of_passages(tmp_path: Path) -> None:
    settings = replace(
        PRIVATE,
        stage2=replace(PRIVATE.stage2, request="none", response="dp_centroid"),
        privacy=replace(PRIVATE.privacy, collection_eps=5.0, collection_delta=1e-3),
    )
    run = federation(tmp_path, settings)
    client = run.clients["client0"]
    first = client.serve(run.start, torch.empty(0, 16), refresh=0)
    ledgers = sorted(path.name for path in (tmp_path / "state" / "client0" / "private").glob("silo_ledger.*"))
    again = federation(tmp_path, settings).clients["client0"].serve(run.start, torch.empty(0, 16), refresh=0)
    assert torch.equal(first.embeddings, again.embeddings) and ledgers == ["silo_ledger.passage.jsonl"]
    assert first.embeddings.isfinite().all() and client.epsilon() == 0.0  # nothing of the queries was read
    allows_publishing = replace(settings, privacy=replace(settings.privacy, collection_delta=0.5))
    other = federation(tmp_path, allows_publishing, state="other").clients["client0"]
    with pytest.raises(ConfigurationError, match=r"federated\.privacy\.collection_delta=0\.5"):
        other.serve(run.start, torch.empty(0, 16), refresh=0)


@pytest.mark.parametrize("response", ["public", "dp_centroid"])
def test_nothing_that_leaves_under_a_budget_is_made_of_texts_that_were_embedded_together_with_private_ones(
    response: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: set[str] = set()
    encode = TextEncoder.encode

    def noted(self: TextEncoder, texts: list[str], *arguments: Any, **settings: Any) -> torch.Tensor:
        if not settings.get("apart"):
            together.update(texts)
        return encode(self, texts, *arguments, **settings)

    settings = replace(
        PRIVATE,
        stage2=replace(PRIVATE.stage2, response=response),
        privacy=replace(PRIVATE.privacy, collection_eps=5.0, collection_delta=1e-3),
    )
    run = federation(tmp_path, settings)
    declare_public(tmp_path, count=3)
    client = run.clients["client0"]
    public = set(public_sentences(client.folder).values())
    monkeypatch.setattr(TextEncoder, "encode", noted)
    rows = client.request(run.start, 0)
    client.serve(run.start, rows, refresh=0)
    assert together == (public if response == "public" else set())


@pytest.mark.parametrize(
    ("response", "message"), [("public", "public_sids.txt"), ("synthetic", "task=federated_generators")]
)
def test_an_answer_that_rests_on_a_declaration_is_refused_without_it(
    response: Any, message: str, tmp_path: Path
) -> None:
    settings = replace(PRIVATE, stage2=replace(PRIVATE.stage2, request="none", response=response))
    with pytest.raises(DataError, match=message):
        run = federation(tmp_path, settings)
        run.clients["client0"].serve(run.start, torch.empty(0, 16), refresh=0)


@pytest.mark.slow
def test_on_planted_dialects_a_personal_query_encoder_beats_the_shared_one(tmp_path: Path) -> None:
    """Half of the dialect words mean something else at every client, which no shared encoder can know."""
    size = Planted(clients=3, entities=12, attributes=6, told=6, questions=6, phrasings=3, shared=0.5)
    settings = PddAs2(
        stage1=Stage1(warmup_rounds=1, rounds=3, batch_size=16, bm25_n=4, static_n=4, top_k=20, lr=3e-3),
        stage2=Stage2(epochs=5, batch_size=16, n=8, top_k=24, lr=3e-3, negatives="dynamic"),
    )
    result = federation(tmp_path, settings, size=size, dim=64, spread=0.1).run()
    found = {system: result.mean(system, "sentence/success@1") for system in result.systems}
    assert found["bm25"] < found["stage1"] < found["stage2"] - 0.1, found


@pytest.mark.costly
def test_a_run_without_a_budget_is_repeated_by_its_seed(tmp_path: Path) -> None:
    settings = replace(SMALL, stage1=replace(SMALL.stage1, warmup_rounds=0), stage2=replace(SMALL.stage2, epochs=0))
    two = replace(SIZE, clients=2, entities=4)
    runs = [federation(tmp_path, settings, size=two, state=name).train_shared() for name in ("a", "b")]
    other = federation(tmp_path, replace(settings, seed=1), size=two, state="c").train_shared()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert any(not torch.equal(runs[0][name], other[name]) for name in other)


@pytest.mark.slow
def test_between_two_refreshes_nobody_is_asked_and_a_run_that_goes_on_has_the_same_answers(tmp_path: Path) -> None:
    two = replace(SIZE, clients=2)
    one_round = replace(SMALL, stage1=replace(SMALL.stage1, warmup_rounds=0))
    settings = replace(one_round, stage2=replace(SMALL.stage2, epochs=3, refresh_every=2))
    whole = federation(tmp_path, settings, size=two, state="whole")
    whole.personalise(whole.train_shared())
    asked = {event for event in json.loads((tmp_path / "whole/server/traffic.json").read_text()) if "requests" in event}
    assert {event.split("/")[1] for event in asked} == {"000", "002"}

    first = federation(tmp_path, settings, size=two, state="parts")
    weights = first.train_shared()
    for name, client in first.clients.items():
        client.personalise(weights, first.pool(name, weights, 0), 0)
    second = federation(tmp_path, settings, size=two, state="parts")
    second.personalise(weights)
    for name in whole.clients:
        ends = [load_file(tmp_path / state / name / "personal-fed-002.safetensors") for state in ("whole", "parts")]
        assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_client_without_answers_between_two_refreshes_says_so(tmp_path: Path) -> None:
    run = federation(tmp_path, replace(SMALL, stage2=replace(SMALL.stage2, epochs=2, refresh_every=2)))
    with pytest.raises(DataError, match="missed a refresh"):
        run.clients["client0"].personalise(run.start, None, 1)


@pytest.mark.slow
def test_fewer_refreshes_leave_more_of_a_budget_for_training(tmp_path: Path) -> None:
    def noise(every: int) -> Any:
        stage = replace(PRIVATE.stage2, epochs=2, refresh_every=every)
        run = federation(tmp_path, replace(PRIVATE, stage2=stage), state=f"every{every}")
        return run.clients["client0"].account.noise

    often, once = noise(1), noise(2)
    assert once.request < often.request


def test_a_silo_with_fewer_queries_than_a_batch_takes_all_of_them_and_under_a_budget_is_refused(tmp_path: Path) -> None:
    large = replace(SMALL, stage1=replace(SMALL.stage1, batch_size=50), stage2=replace(SMALL.stage2, batch_size=50))
    run = federation(tmp_path, large)
    client = run.clients["client0"]
    assert client.examples < 50
    after = client.train_shared(run.start, 0)
    assert any(not torch.equal(after[name], run.start[name]) for name in after)
    with pytest.raises(ConfigurationError, match="batch_size"):
        federation(tmp_path, replace(PRIVATE, stage1=replace(PRIVATE.stage1, batch_size=50)), state="private")


# -- transports, and the model that every round begins with -------------------------------------

MAKE = AS2Maker(encoder="planted", planted=SIZE, max_query_length=8, max_sentence_length=12)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("planted") / "silos"
    return silo_folders(write_silos(folder, planted_silos(SIZE), facts={}))


@pytest.mark.slow
def test_both_kinds_of_stage_2_go_on_from_one_stage_1_and_only_what_is_asked_for_is_measured(
    planted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ran(SMALL, planted, MAKE, tmp_path, measure=["stage1"])
    assert set(first.systems) == {"stage1"} and set(first.sent) == {"stage 1"}
    monkeypatch.setattr(
        "lit_dpret.federated.silo.SiloClient.train_shared", lambda *_, **__: pytest.fail("stage 1 made again")
    )
    fed = ran(SMALL, planted, MAKE, tmp_path, measure=["stage2"])
    own = replace(SMALL, stage2=replace(SMALL.stage2, negatives="dynamic"))
    dynamic = ran(own, planted, MAKE, tmp_path, measure=["stage2"])
    assert set(fed.systems) == set(dynamic.systems) == {"stage2"}
    assert fed.sent["stage 1"] == first.sent["stage 1"] and fed.sent["requests"] > 0
    again = ran(SMALL, planted, MAKE, tmp_path, measure=["stage2"])
    assert again.traffic.by_silo() == fed.traffic.by_silo()  # an interruption counts nothing twice and loses nothing


def test_another_transport_registers_by_name_and_gets_what_the_default_gets(
    planted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[FederationRun] = []

    def carry(run: FederationRun) -> FedResult:
        seen.append(run)
        return FedResult()

    monkeypatch.setattr(transport, "_TRANSPORTS", {})
    transport.register("pigeons", carry)
    ran(SMALL, planted, MAKE, tmp_path, transport="pigeons", split="dev")
    (run,) = seen
    assert run.settings == SMALL and run.silos == planted and run.make_module is MAKE
    assert run.folder == tmp_path and run.split == "dev"
    with pytest.raises(ConfigurationError, match=r"federated\.transport='boats' .*pigeons"):
        ran(SMALL, planted, MAKE, tmp_path, transport="boats")


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
    with pytest.raises(ConfigurationError, match="model"):
        personal.put_global({key: value for key, value in weights.items() if key != name})


@pytest.mark.parametrize(("change", "message"), [
    ({"encoder": "/no/such/folder"}, "/no/such/folder"),
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
def test_a_simulation_gives_what_one_process_gives(planted: dict[str, Path], tmp_path: Path) -> None:
    expected = ran(SMALL, planted, MAKE, tmp_path / "here")
    found = ran(SMALL, planted, MAKE, tmp_path / "there", transport="simulation")
    assert not found.faults and found.epsilon == dict.fromkeys(planted)
    for system, clients in expected.systems.items():
        assert set(found.systems[system]) == set(clients)
        for client, values in clients.items():
            for metric, value in values.items():
                np.testing.assert_allclose(found.systems[system][client][metric], value, atol=1e-6)
    shared = load_file(tmp_path / "here" / "server" / "global-001.safetensors")
    for name, value in load_file(tmp_path / "there" / "server" / "global-001.safetensors").items():
        torch.testing.assert_close(shared[name], value, rtol=0, atol=1e-6)
    assert expected.sent["stage 1"] < found.sent["stage 1"] < 1.05 * expected.sent["stage 1"]  # arrays have headers
    again = ran(SMALL, planted, MAKE, tmp_path / "there", transport="simulation", measure=["bm25"])
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
    with pytest.raises(WorkerError, match="simulation"):
        grid.send_and_receive(["a message"])


def test_without_ray_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs the extra federated (flwr)")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"flwr\[simulation\].*federated=inprocess"):
        ran(SMALL, {"a": tmp_path}, MAKE, tmp_path / "state", transport="simulation")
