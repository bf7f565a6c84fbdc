"""Who a silo is says the server's own list, whatever a node says of itself."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

import torch
from messages import InProcessGrid, acting_as

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import fingerprint
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower import payloads
from lit_dpret.federated.flower.connected import ConnectedSilos
from lit_dpret.federated.flower.library import Array, ArrayRecord, ClientApp, ConfigRecord, Context, Message, RecordDict
from lit_dpret.federated.flower.payloads import envelope
from lit_dpret.federated.negatives import Block, FedPool, merge_lists, respond
from lit_dpret.federated.settings import PddAs2
from lit_dpret.retrieval.search import MISSING

app = ClientApp()


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    return Message(envelope(**context.node_config), reply_to=message)


@app.query("ping")
def ping(message: Message, context: Context) -> Message:
    """Says that it is somebody else; one of them answers in no format at all."""
    nonsense = context.node_config["name"] == "c"
    return Message(RecordDict() if nonsense else envelope(name="a", node=context.node_id), reply_to=message)


def federation(*names: Any, examples: Any = 5) -> tuple[InProcessGrid, ConnectedSilos]:
    nodes = {number: {"name": name, "examples": examples} for number, name in enumerate(names, start=2)}
    grid, roster = InProcessGrid(app, nodes), ConnectedSilos(PddAs2(), FedResult(), Patience(wait=0.0))
    roster.connect(grid, 0)
    return grid, roster


def present(roster: ConnectedSilos) -> list[str]:
    with acting_as():
        return roster.present("now")


def test_an_answer_is_taken_for_that_of_the_node_which_was_asked() -> None:
    _, roster = federation("a", "b", "c")
    assert present(roster) == ["a", "b", "c"] and roster.examples == {"a": 5, "b": 5, "c": 5}
    with acting_as():
        found = roster.exchange("query.ping", {name: envelope() for name in ("a", "b", "c")}, "now")
    assert {name: content["head"]["node"] for name, content in found.items()} == {"a": 2, "b": 3}
    assert len(roster.faults) == 1 and "client 'c' sent nonsense: " in roster.faults[0]


def test_nobody_takes_the_name_of_a_silo_that_is_there_and_a_new_node_may_of_one_that_left() -> None:
    grid, roster = federation("a", "a", "b")
    assert present(roster) == ["a", "b"]
    assert roster.faults == ["now: node 3 says that it is 'a', who is there already."]
    grid.away.add(2)
    assert present(roster) == ["a", "b"] and len(roster.faults) == 1  # restarted under another number
    grid.away.add(4)
    assert present(roster) == ["a"] and roster.faults[1:] == ["now: client 'b' is not there."]
    grid.away.remove(4)
    assert present(roster) == ["a", "b"]


def test_a_silo_that_failed_is_sent_again_what_it_was_sent_before() -> None:
    _, roster = federation("a", "b")
    present(roster)
    assert roster.lacks("a", "weights") and not roster.lacks("a", "weights") and roster.lacks("a", "others")
    with acting_as():
        roster.exchange("query.unheard_of", {"a": envelope()}, "now")
    assert "client 'a' failed" in roster.faults[0] and roster.lacks("a", "others")


@pytest.mark.parametrize(("name", "examples"), [("", 5), (7, 5), ("a", 0), ("a", "many")])
def test_a_silo_without_name_or_query_is_left_out(name: Any, examples: Any) -> None:
    _, roster = federation(name, examples=examples)
    assert present(roster) == []
    assert roster.faults == ["now: node 2 has no name or no train query; it is left out."]


def test_a_federation_whose_silos_do_not_come_is_not_waited_for_forever() -> None:
    grid, roster = federation("a")
    with pytest.raises(DataError, match=r"1 silos are there after 0 seconds, and federated\.min_clients=2"):
        roster.connect(grid, 2)


# -- the content of messages


MODEL = {"w": torch.randn(3, 2), "b": torch.zeros(2), "none": torch.empty(0, 4)}


def with_weights(weights: dict[str, torch.Tensor]) -> RecordDict:
    content = payloads.envelope(round=1)
    content["weights"] = payloads.tensors_record(weights)
    return content


def changed(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**MODEL, **tensors}


def test_weights_come_out_as_they_went_in() -> None:
    found = payloads.weights_of(with_weights(MODEL), "client 'a'", like=MODEL)
    assert set(found) == set(MODEL) and all(torch.equal(found[name], MODEL[name]) for name in MODEL)
    assert fingerprint(found) == fingerprint(MODEL) != fingerprint(changed(b=torch.ones(2)))


def test_weights_that_are_not_of_the_model_are_refused_by_name() -> None:
    for wrong, named in ((changed(w=torch.zeros(2, 3)), "'w'"), (changed(b=torch.tensor([0.0, float("inf")])), "'b'")):
        with pytest.raises(DataError, match=f"client 'a': {named}"):
            payloads.weights_of(with_weights(wrong), "client 'a'", like=MODEL)


@pytest.mark.parametrize(("array", "message"), [
    (Array(torch.arange(3).numpy()), r"'w' is torch\.int64"),
    (Array("float32", (3,), "numpy.ndarray", b"\x80\x04N."), "'weights' holds an array that cannot be read"),
])  # fmt: skip
def test_what_is_no_array_of_floats_is_refused_and_never_unpickled(array: Array, message: str) -> None:
    content = payloads.envelope()
    content["weights"] = ArrayRecord({"w": array})
    with pytest.raises(DataError, match=f"client 'a': {message}"):
        payloads.weights_of(content, "client 'a'", like={"w": torch.zeros(3)})


def test_a_message_of_a_newer_format_or_of_none_is_refused() -> None:
    assert payloads.head_of(payloads.envelope(round=3), "the server")["round"] == 3
    newer = RecordDict({"head": ConfigRecord({"schema": payloads.SCHEMA.replace("/1", "/2")})})
    with pytest.raises(DataError, match=r"client 'a' cannot be read: .*federated-message/2"):
        payloads.head_of(newer, "client 'a'")
    with pytest.raises(DataError, match="its schema is None"):
        payloads.head_of(RecordDict(), "client 'a'")


def test_an_answer_and_a_pool_come_out_as_they_went_in() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, candidates = torch.randn(5, 4, generator=generator), torch.randn(9, 4, generator=generator)
    block = respond("b", queries, candidates, 3)
    content = payloads.envelope()
    content["block"] = payloads.tensors_record(block.parts)
    found = payloads.block_of(content, "b", rows=5, dim=4, limit=3)
    for part in ("embeddings", "starts", "entries"):
        assert torch.equal(getattr(found, part), getattr(block, part))
    pool = merge_lists([block], queries, 4)  # one place more than was answered: MISSING in every list
    content["pool"] = payloads.pool_record(pool, send_as=torch.float16)
    back = payloads.pool_of_record(content, "the server", dim=4, rows=5)
    assert pool.lists is not None and back.lists is not None and bool((pool.lists[:, 3] == MISSING).all())
    assert torch.equal(back.embeddings, pool.embeddings) and torch.equal(back.lists, pool.lists[:, :3])
    content["pool"] = payloads.pool_record(FedPool(pool.embeddings), send_as=torch.float16)
    bare = payloads.pool_of_record(content, "the server", dim=4, rows=None)
    assert bare.lists is None and torch.equal(bare.embeddings, pool.embeddings)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Block("x", torch.randn(2, 3), torch.tensor([0, 1]), torch.zeros(1)), "'b'.*entries is of the wrong type"),
        (Block("x", torch.randn(2, 3), torch.tensor([0, 2]), torch.tensor([0, 1])), "client 'b'.*at most 1 for each"),
    ],
)
def test_an_answer_is_checked_under_the_name_of_who_gave_it(block: Block, message: str) -> None:
    """What `Block.check` refuses stands in `test_negatives`."""
    content = payloads.envelope()
    content["block"] = payloads.tensors_record(block.parts)
    with pytest.raises(DataError, match=message):
        payloads.block_of(content, "b", rows=1, dim=3, limit=1)


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 3), torch.zeros(2), torch.full((1, 4), float("nan")), torch.full((1, 4), 1e20)]
)
def test_request_rows_of_wrong_shape_or_without_values_are_refused_and_no_rows_are_a_request(
    rows: torch.Tensor,
) -> None:
    content = payloads.envelope()
    content["rows"] = payloads.tensors_record({"rows": rows})
    with pytest.raises(DataError, match="The request of client 'a'"):
        payloads.rows_of(content, "client 'a'", dim=4)
    content["rows"] = payloads.tensors_record({"rows": torch.empty(0, 4)})
    assert payloads.rows_of(content, "client 'a'", dim=4).shape == (0, 4)
