"""The apps do by messages what one process does by calls, give a server what was planned, and outlive broken silos."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_silos import PRIVATE, SMALL, declare_public, federation

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import DIM, MASKED, NAMES, START, Drifts, InProcessGrid, Masked, Run, acting_as, only_stage1

from lit_dpret.errors import DataError, ResumeError
from lit_dpret.federated.aggregation import Weights, fingerprint
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower import payloads
from lit_dpret.federated.flower.connected import ConnectedSilos
from lit_dpret.federated.flower.library import Array, ArrayRecord, ClientApp, Context, Message, RecordDict
from lit_dpret.federated.flower.payloads import envelope, tensors_record
from lit_dpret.federated.flower.server_app import FlowerFederation
from lit_dpret.federated.negatives import Block
from lit_dpret.federated.settings import PddAs2

CLEAR = replace(MASKED, secure_sum=False, sum_threshold=None)


def rounds(count: int) -> PddAs2:
    return replace(CLEAR, stage1=replace(CLEAR.stage1, rounds=count))


def unmeasured(run: Run) -> Run:
    """The run, in which no silo is asked to measure anything."""
    run.server.measure = lambda *_, **__: None  # type: ignore[method-assign]
    return run


# -- the same as in one process -----------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize(
    ("request_", "seal", "epochs"),
    [("exact", False, 1), pytest.param("none", False, 1, marks=pytest.mark.slow),
     pytest.param("exact", True, 1, marks=pytest.mark.slow), pytest.param("exact", False, 3, marks=pytest.mark.slow),
     pytest.param("exact", True, 3, marks=pytest.mark.slow)],
)  # fmt: skip
def test_by_messages_the_same_weights_and_measures_come_out_as_in_one_process(
    request_: Any, seal: bool, epochs: int, tmp_path: Path
) -> None:
    """Of three epochs the second uses what was answered before the first."""
    two = replace(SMALL.stage2, request=request_, epochs=epochs, refresh_every=1 if epochs == 1 else 2)
    settings = replace(SMALL, stage2=two, seal=seal)
    expected = federation(tmp_path, settings).run()
    run = Run(tmp_path, settings, share=True)
    result = run.launch()
    assert not result.faults and result.rounds == {0: sorted(run.folders), 1: sorted(run.folders)}
    for name, value in load_file(tmp_path / "state" / "server" / "global-001.safetensors").items():
        torch.testing.assert_close(result.weights[name], value, rtol=0, atol=1e-6)
    for client in run.folders:
        kept = f"{client}/personal-fed-{epochs - 1:03}.safetensors"
        found = load_file(tmp_path / "flower" / kept)
        for name, value in load_file(tmp_path / "state" / kept).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
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


@pytest.mark.costly
@pytest.mark.parametrize(
    "hidden", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in clear", "masked, sealed"]
)
def test_under_a_budget_no_count_and_no_measure_leaves_a_silo_and_its_ledger_is_not_forgotten(
    hidden: bool, tmp_path: Path
) -> None:
    one_round = replace(PRIVATE.stage1, warmup_rounds=0)
    settings = replace(PRIVATE, stage1=one_round, secure_sum=hidden, seal=hidden)
    run = Run(tmp_path, settings, share=True, spent=hidden)
    declare_public(tmp_path)
    result = run.launch()
    clients = {name: run.client(run.grid.context(node)) for node, name in enumerate(run.folders, start=10)}
    spent = {name: client.epsilon() for name, client in clients.items()}
    assert result.epsilon == (spent if hidden else {})  # a silo reports it by its own choice
    assert all(0.9 * 20 < epsilon <= 20 for epsilon in spent.values())
    assert not result.faults and set(run.server.silos.examples.values()) == {1}
    assert not any(result.systems.values())
    with pytest.raises(DataError, match="stage2"):
        result.mean("stage2", "sentence/mrr@10")
    assert (tmp_path / "flower" / "client0" / "measures-stage2-test.safetensors").is_file()  # the silo knows
    # The node knows how its ledger began: without it, nothing is spent any more.
    path = clients["client0"].ledger.path
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run.server = FlowerFederation(settings, run.server.start, tmp_path / "other", dim=DIM)
    faults = run.launch().faults
    assert [fault for fault in faults if "node 10" in fault and "LedgerError" in fault]


# -- silos that do not answer as they should ----------------------------------------------------


def test_a_silo_that_fails_in_a_round_is_named_the_round_goes_on_and_it_comes_back(tmp_path: Path) -> None:
    class Breaks(Drifts):
        def train_shared(self, weights: Any, number: int) -> Weights:
            if self.name == "client1" and number == 0:
                raise RuntimeError("private words")
            return super().train_shared(weights, number)

    result = Masked(tmp_path, rounds(2), silo=Breaks).launch()
    assert result.rounds == {0: [name for name in NAMES if name != "client1"], 1: list(NAMES)}
    assert len(result.faults) == 1 and "private words" not in str(result.faults)
    assert result.faults[0].startswith("stage 1, round 0: client 'client1' failed: RuntimeError")


def test_a_silo_that_answers_late_or_is_gone_is_named_and_takes_part_again(tmp_path: Path) -> None:
    def fate(message: Message) -> Any:
        if message.metadata.message_type != "train.stage1":
            return None
        turn = (message.metadata.dst_node_id, message.content["head"]["round"])
        return {(10, 0): "late", (11, 0): "unavailable", (12, 1): "silent"}.get(turn)

    names = NAMES[:3]
    result = Masked(tmp_path, rounds(3), names=names, fate=fate, timeout=30.0).launch()
    assert result.rounds == {0: ["client2"], 1: ["client0", "client1"], 2: list(names)}
    assert [fault.split("'")[1] for fault in result.faults] == list(names)
    assert "30.0 seconds" in result.faults[0]


def test_a_round_with_too_few_updates_ends_the_run_and_a_new_start_goes_on_from_there(tmp_path: Path) -> None:
    def fate(message: Message) -> Any:
        training = message.metadata.message_type == "train.stage1"
        return "unavailable" if training and message.content["head"]["round"] == 1 else None

    with pytest.raises(DataError, match=r"stage 1, round 1: 0 silos .*client 'client0' failed"):
        Masked(tmp_path, rounds(2), fate=fate, min_clients=2).launch()
    again = Masked(tmp_path, rounds(2), min_clients=2).launch()
    assert list(again.rounds) == [1] and not again.faults
    with pytest.raises(ResumeError, match=r"federated\.stage1\.rounds=2.* 3"):
        Masked(tmp_path, rounds(3))


def test_a_silo_with_other_settings_refuses_and_the_server_hears_why(tmp_path: Path) -> None:
    run = Masked(tmp_path, CLEAR)
    run.server = FlowerFederation(replace(CLEAR, seed=1), START, tmp_path / "s", dim=DIM)
    with pytest.raises(DataError, match=r"node 10 .*DataError \(other settings\)"):
        run.launch()


# -- a server that asks for more than was planned -----------------------------------------------


class Asking:
    """A server that asks one silo for what it likes; ``run_id`` is Flower's, of its choice too."""

    def __init__(self, root: Path, settings: PddAs2, *, run_id: int = 1) -> None:
        self.run = Run(root, settings, share=True)
        self.run.grid.run_id = run_id
        self.start: Weights = self.run.server.start

    def ask(self, kind: str, weights: Weights, *, records: dict[str, Any] | None = None, **facts: Any) -> Any:
        content = {"weights": tensors_record(weights), **(records or {})}
        return self.run.ask(10, kind, content, weights=fingerprint(weights), **facts)

    def train(self, number: int, weights: Weights) -> Any:
        return self.ask("train.stage1", weights, round=number)


def moved(weights: Weights, by: float) -> Weights:
    return {name: value + by for name, value in weights.items()}


def content_of(reply: Any) -> dict[str, Any]:
    """All arrays and measures of an answer, to the bit."""
    arrays = {(name, key): array.numpy().tobytes() for name, record in reply.content.array_records.items()
              for key, array in record.items()}  # fmt: skip
    return {**arrays, "measures": dict(reply.content.metric_records)}


def test_a_server_gets_no_round_and_no_request_that_the_silos_settings_do_not_plan(tmp_path: Path) -> None:
    asking = Asking(tmp_path, SMALL)
    for kind, turn in (
        ("train.stage1", {"round": 2}),
        ("query.fedneg_request", {"refresh": 1}),
        ("query.fedneg_serve", {"refresh": 1, "askers": 0}),
        ("train.personalise", {"epoch": 1}),
    ):
        assert asking.ask(kind, asking.start, **turn).error.reason == "DataError (not planned)", kind
    assert not list((tmp_path / "flower" / "client0").glob("stage1-*"))


@pytest.mark.costly
def test_a_round_has_one_answer_the_same_in_every_bit_also_for_another_run_of_flower(tmp_path: Path) -> None:
    first = Asking(tmp_path, only_stage1())
    one = first.train(0, first.start)
    again = Asking(tmp_path, only_stage1(), run_id=77)
    unmeasured(again.run)
    assert content_of(again.train(0, again.start)) == content_of(one)
    assert again.train(0, moved(again.start, 0.1)).error.reason == "DataError (served already)"
    assert not again.train(1, again.start).has_error()
    # Round 1 is served, the answer of round 0 is gone: it is not computed once more.
    assert again.train(0, again.start).error.reason == "DataError (served already)"
    again.run.server.folder = tmp_path / "lost"
    result = again.run.launch()  # a server that has lost its folder begins anew, and has to do without this silo
    assert all("client0" not in names for names in result.rounds.values()) and "served already" in result.faults[0]
    served = tmp_path / "flower" / "client0" / "served"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (served, *served.iterdir()))


@pytest.mark.costly
def test_a_silo_that_was_ended_in_a_round_makes_it_again_for_the_same_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = federation(tmp_path, only_stage1()).clients["client0"]
    start = client.model[0]
    with monkeypatch.context() as patch:
        patch.setattr("lit_dpret.federated.silo.save_tensors", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            client.train_shared(start, 0)
    other = federation(tmp_path, only_stage1()).clients["client0"]
    with pytest.raises(DataError, match="served"):
        other.train_shared(moved(start, 0.1), 0)
    whole = federation(tmp_path, only_stage1(), state="whole").clients["client0"].train_shared(start, 0)
    for name, value in other.train_shared(start, 0).items():
        assert torch.equal(value, whole[name])


@pytest.mark.costly
def test_requests_answers_and_measures_are_of_one_set_of_global_weights(tmp_path: Path) -> None:
    asking = Asking(tmp_path, SMALL)
    rows = {"rows.0": tensors_record({"rows": torch.ones(2, 16)})}
    messages: tuple[tuple[str, dict[str, Any]], ...] = (
        ("query.fedneg_request", {"refresh": 0}),
        ("query.fedneg_serve", {"refresh": 0, "askers": 1, "records": rows}),
        ("evaluate.retrieval", {"system": "stage1", "split": "test"}),
    )
    answers = [asking.ask(kind, asking.start, **facts) for kind, facts in messages]
    for (kind, facts), answer in zip(messages, answers, strict=True):
        other = asking.ask(kind, moved(asking.start, 0.1), **facts)
        assert other.error.reason == "DataError (served already)", kind
        assert content_of(asking.ask(kind, asking.start, **facts)) == content_of(answer)
    bad = asking.ask("evaluate.retrieval", asking.start, system="stage1", split="../../etc")
    assert bad.error.reason == "DataError (bad message)"


def test_rows_that_come_later_in_a_refresh_are_not_answered(tmp_path: Path) -> None:
    asking = Asking(tmp_path, SMALL)
    first, second = (tensors_record({"rows": torch.full((2, 16), value)}) for value in (1.0, 2.0))
    rows = {"rows.0": second, "rows.1": first}
    one = asking.ask("query.fedneg_serve", asking.start, records={"rows.0": first}, askers=1, refresh=0)
    both = asking.ask("query.fedneg_serve", asking.start, records=rows, askers=2, refresh=0)
    assert set(one.content.array_records) == {"block.0"} and set(both.content.array_records) == {"block.1"}


@pytest.mark.slow
def test_a_run_whose_server_was_ended_between_request_and_epoch_goes_on_with_the_same_requests(tmp_path: Path) -> None:
    """If some silos have used a refresh already, the others get the answers that they would have got."""

    def dies(message: Message) -> Any:
        if message.metadata.message_type == "train.personalise" and message.metadata.dst_node_id == 12:
            raise KeyboardInterrupt
        return None

    settings = replace(SMALL, stage1=replace(SMALL.stage1, warmup_rounds=0))
    engine = federation(tmp_path, settings)
    engine.personalise(engine.train_shared())
    for seal in (False, True):
        root = tmp_path / f"sealed-{seal}"
        with pytest.raises(KeyboardInterrupt):
            unmeasured(Run(root, replace(settings, seal=seal), fate=dies)).launch()
        again = unmeasured(Run(root, replace(settings, seal=seal)))
        assert not again.launch().faults
        for name in again.folders:
            kept = load_file(root / "flower" / name / "personal-fed-000.safetensors")
            for key, value in load_file(tmp_path / "state" / name / "personal-fed-000.safetensors").items():
                torch.testing.assert_close(kept[key], value, rtol=0, atol=1e-6)


@pytest.mark.costly
def test_under_a_budget_centroids_are_released_once_whatever_weights_a_server_names(tmp_path: Path) -> None:
    asking = Asking(tmp_path, PRIVATE)
    declare_public(tmp_path)
    assert not asking.ask("query.fedneg_request", asking.start, refresh=0).has_error()
    spent = asking.run.client(asking.run.grid.context(10)).epsilon()
    assert asking.ask("query.fedneg_request", moved(asking.start, 1.0), refresh=0).has_error()
    assert asking.run.client(asking.run.grid.context(10)).epsilon() == spent != 0


# -- who is connected ---------------------------------------------------------------------------

app = ClientApp()


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    return Message(envelope(**context.node_config), reply_to=message)


@app.query("ping")
def ping(message: Message, context: Context) -> Message:
    """Says that it is somebody else; one of them answers in no format at all."""
    nonsense = context.node_config["name"] == "c"
    return Message(RecordDict() if nonsense else envelope(name="a", node=context.node_id), reply_to=message)


def connected(*names: Any, examples: Any = 5) -> tuple[InProcessGrid, ConnectedSilos]:
    nodes = {number: {"name": name, "examples": examples} for number, name in enumerate(names, start=2)}
    grid, silos = InProcessGrid(app, nodes), ConnectedSilos(PddAs2(), FedResult(), Patience(wait=0.0))
    silos.connect(grid, 0)
    return grid, silos


def present(silos: ConnectedSilos) -> list[str]:
    with acting_as():
        return silos.present("now")


def test_an_answer_is_taken_for_that_of_the_node_which_was_asked() -> None:
    _, silos = connected("a", "b", "c")
    assert present(silos) == ["a", "b", "c"] and silos.examples == {"a": 5, "b": 5, "c": 5}
    with acting_as():
        found = silos.exchange("query.ping", {name: envelope() for name in ("a", "b", "c")}, "now")
    assert {name: content["head"]["node"] for name, content in found.items()} == {"a": 2, "b": 3}
    assert len(silos.faults) == 1 and "client 'c' sent an unreadable message: " in silos.faults[0]


def test_a_silo_that_never_answers_without_a_timeout_is_named_with_what_ended_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, silos = connected("a")
    assert present(silos) == ["a"]
    monkeypatch.setattr(grid, "send_and_receive", lambda *_, **__: [])
    with acting_as():
        assert silos.exchange("query.ping", {"a": envelope()}, "now") == {}
    (fault,) = silos.faults
    assert fault == "now: client 'a' did not answer before Flower discarded the message (federated.timeout)."


def test_nobody_takes_the_name_of_a_silo_that_is_there_and_a_new_node_may_of_one_that_left() -> None:
    grid, silos = connected("a", "a", "b")
    assert present(silos) == ["a", "b"]
    assert len(silos.faults) == 1 and "node 3" in silos.faults[0] and "'a'" in silos.faults[0]
    grid.away.add(2)
    assert present(silos) == ["a", "b"] and len(silos.faults) == 1  # restarted under another number
    grid.away.add(4)
    assert present(silos) == ["a"] and len(silos.faults) == 2 and "client 'b'" in silos.faults[1]
    grid.away.remove(4)
    assert present(silos) == ["a", "b"]


@pytest.mark.parametrize(("name", "examples"), [("", 5), (7, 5), ("a", 0), ("a", "many")])
def test_a_silo_without_name_or_query_is_left_out(name: Any, examples: Any) -> None:
    _, silos = connected(name, examples=examples)
    assert present(silos) == [] and len(silos.faults) == 1 and "node 2" in silos.faults[0]


def test_a_federation_whose_silos_do_not_come_is_not_waited_for_forever() -> None:
    grid, silos = connected("a")
    with pytest.raises(DataError, match=r"federated\.min_clients=2"):
        silos.connect(grid, 2)


# -- what a message holds is checked under the name of who sent it ------------------------------

MODEL = {"w": torch.randn(3, 2), "b": torch.zeros(2)}


@pytest.mark.parametrize(("changes", "named"), [
    ({"w": Array(torch.zeros(2, 3).numpy())}, "'w'"),
    ({"b": Array(torch.tensor([0.0, float("inf")]).numpy())}, "'b'"),
    ({"w": Array(torch.zeros(3, 2).long().numpy())}, "'w'"),
    ({"w": Array("float32", (3, 2), "numpy.ndarray", b"\x80\x04N.")}, "'weights'"),
], ids=["another shape", "infinity", "whole numbers", "a pickle"])  # fmt: skip
def test_weights_that_are_not_of_the_model_are_refused_by_name_and_never_unpickled(
    changes: dict[str, Array], named: str
) -> None:
    arrays = {name: Array(value.numpy()) for name, value in MODEL.items()}
    content = RecordDict({"weights": ArrayRecord(arrays)})
    assert fingerprint(payloads.weights_of(content, "client 'a'", like=MODEL)) == fingerprint(MODEL)
    content["weights"] = ArrayRecord({**arrays, **changes})
    with pytest.raises(DataError, match=f"client 'a': {named}"):
        payloads.weights_of(content, "client 'a'", like=MODEL)


@pytest.mark.parametrize("block", [
    Block("x", torch.randn(2, 3), torch.tensor([0, 1]), torch.zeros(1)),
    Block("x", torch.randn(2, 3), torch.tensor([0, 2]), torch.tensor([0, 1])),
], ids=["places that are no whole numbers", "more than was asked for"])  # fmt: skip
def test_an_answer_is_checked_under_the_name_of_who_gave_it(block: Block) -> None:
    """What else `Block.check` refuses stands in `test_negatives`."""
    content = RecordDict({"block": tensors_record(block.parts)})
    with pytest.raises(DataError, match="'b'"):
        payloads.block_of(content, "b", rows=1, dim=3, limit=1)


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 3), torch.zeros(2), torch.full((1, 4), float("nan")), torch.full((1, 4), 1e20)]
)
def test_request_rows_of_wrong_shape_or_without_values_are_refused_and_no_rows_are_a_request(
    rows: torch.Tensor,
) -> None:
    content = RecordDict({"rows": tensors_record({"rows": rows}), "none": tensors_record({"rows": torch.empty(0, 4)})})
    with pytest.raises(DataError, match="client 'a'"):
        payloads.rows_of(content, "client 'a'", dim=4)
    assert payloads.rows_of(content, "client 'a'", name="none", dim=4).shape == (0, 4)
