"""A grid in one process behaves as one between machines would, its failures included."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from in_process_grid import SUPERLINK_NODE_ID, InProcessGrid, Mishap, TaskIdentity, acting_as

from lit_dpret.federated.flower.library import (
    ArrayRecord,
    ClientApp,
    ConfigRecord,
    Context,
    ErrorCode,
    Message,
    RecordDict,
)

app = ClientApp()


@app.query("count")
def count(message: Message, context: Context) -> Message:
    """How many messages this node has had; changes what it was sent."""
    before = context.state.config_records.get("seen", ConfigRecord({"times": 0}))["times"]
    context.state["seen"] = ConfigRecord({"times": before + 1, "had": len(message.content)})
    message.content.clear()
    if context.node_config["name"] == "breaks" and before == 0:
        raise ValueError("broken")
    return Message(RecordDict({"seen": context.state["seen"]}), reply_to=message)


def grid(fate: dict[int, Mishap] | None = None) -> InProcessGrid:
    nodes = {number: {"name": name} for number, name in ((2, "a"), (3, "breaks"), (4, "c"))}
    return InProcessGrid(app, nodes, fate=lambda message: (fate or {}).get(message.metadata.dst_node_id))


def ask(found: InProcessGrid, *nodes: int, timeout: float | None = None) -> list[Message]:
    """The answers to one message to each node; all of them hold the same record."""
    shared = RecordDict({"weights": ArrayRecord({"w": torch.zeros(1000)})})
    with acting_as(run_id=1, node_id=SUPERLINK_NODE_ID):
        messages = [Message(shared, node, "query.count") for node in nodes]
        return list(found.send_and_receive(messages, timeout=timeout))


def times(message: Message) -> int:
    return int(message.content["seen"]["times"])


def test_a_node_keeps_its_state_and_shares_no_record_with_others() -> None:
    found = grid()
    replies = ask(found, 2, 4)
    assert [times(reply) for reply in replies] == [1, 1]
    assert [reply.content["seen"]["had"] for reply in replies] == [1, 1]  # though the first emptied what it was sent
    assert [times(reply) for reply in ask(found, 2)] == [2]
    found.context(2).state.clear()
    assert [times(reply) for reply in ask(found, 2)] == [3]


def test_bytes_are_counted_by_type_of_message() -> None:
    found = grid()
    ask(found, 2, 4)
    counted = found.traffic["query.count"]
    assert counted.messages == 2 and 8000 < counted.down < 9500 and 0 < counted.up < 1000


def test_a_node_that_raises_answers_with_an_error_and_its_state_stays() -> None:
    found = grid()
    (reply,) = ask(found, 3)
    assert reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert "ValueError" in reply.error.reason and reply.metadata.src_node_id == 3
    assert not found.context(3).state


@pytest.mark.parametrize(("mishap", "runs"), [("unavailable", 0), ("silent", 0), ("late", 1)])
def test_what_happens_to_a_message_happens_to_it_alone(mishap: Mishap, runs: int) -> None:
    found = grid({4: mishap})
    replies = ask(found, 2, 4, timeout=5.0)
    assert times(replies[0]) == 1
    assert len(replies) == (2 if mishap == "unavailable" else 1)
    assert len(found.context(4).state) == runs
    if mishap == "unavailable":
        assert replies[1].error.code == ErrorCode.NODE_UNAVAILABLE
        assert replies[1].metadata.src_node_id == SUPERLINK_NODE_ID  # only what it replies to says whom it is about


def test_without_a_waiting_time_late_answers_are_waited_for_and_silence_ends_in_an_error() -> None:
    assert times(ask(grid({4: "late"}), 4)[0]) == 1
    assert ask(grid({4: "silent"}), 4)[0].error.code == ErrorCode.REPLY_MESSAGE_UNAVAILABLE


def test_a_node_that_left_is_not_listed_and_comes_back_with_its_state() -> None:
    found = grid()
    ask(found, 2)
    found.leave(2)
    assert found.get_node_ids() == [3, 4] and ask(found, 2)[0].has_error()
    found.come_back(2)
    assert found.get_node_ids() == [2, 3, 4] and times(ask(found, 2)[0]) == 2


def test_who_this_process_is_for_flower_is_put_back_as_it_was() -> None:
    with acting_as(run_id=7, node_id=8), acting_as(run_id=1, node_id=2):
        assert TaskIdentity.node_id == 2
    with pytest.raises(RuntimeError, match="not set"):
        _ = TaskIdentity.node_id
