"""Who a silo is says the server's own list, whatever a node says of itself."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from in_process_grid import SUPERLINK_NODE_ID, InProcessGrid, acting_as

from lit_dpret.errors import DataError
from lit_dpret.federated.documents import Patience
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.flower.connected import ConnectedSilos
from lit_dpret.federated.flower.library import ClientApp, Context, Message, RecordDict
from lit_dpret.federated.flower.payloads import envelope
from lit_dpret.federated.settings import PddAs2

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
    with acting_as(run_id=1, node_id=SUPERLINK_NODE_ID):
        return roster.present("now")


def test_an_answer_is_taken_for_that_of_the_node_which_was_asked() -> None:
    _, roster = federation("a", "b", "c")
    assert present(roster) == ["a", "b", "c"] and roster.examples == {"a": 5, "b": 5, "c": 5}
    with acting_as(run_id=1, node_id=SUPERLINK_NODE_ID):
        found = roster.exchange("query.ping", {name: envelope() for name in ("a", "b", "c")}, "now")
    assert {name: content["head"]["node"] for name, content in found.items()} == {"a": 2, "b": 3}
    assert len(roster.faults) == 1 and "client 'c' sent nonsense: " in roster.faults[0]


def test_nobody_takes_the_name_of_a_silo_that_is_there_and_a_new_node_may_of_one_that_left() -> None:
    grid, roster = federation("a", "a", "b")
    assert present(roster) == ["a", "b"]
    assert roster.faults == ["now: node 3 says that it is 'a', who is there already."]
    grid.leave(2)
    assert present(roster) == ["a", "b"] and len(roster.faults) == 1  # restarted under another number
    grid.leave(4)
    assert present(roster) == ["a"] and roster.faults[1:] == ["now: client 'b' is not there."]
    grid.come_back(4)
    assert present(roster) == ["a", "b"]


def test_a_silo_that_failed_is_sent_again_what_it_was_sent_before() -> None:
    _, roster = federation("a", "b")
    present(roster)
    assert roster.lacks("a", "weights") and not roster.lacks("a", "weights") and roster.lacks("a", "others")
    with acting_as(run_id=1, node_id=SUPERLINK_NODE_ID):
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
