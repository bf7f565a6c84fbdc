"""A server gets of each silo what was planned, however often and with whatever weights it asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_silos import PRIVATE, SMALL, declare_public, federation

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import Run, only_stage1

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights, fingerprint
from lit_dpret.federated.flower.library import Message
from lit_dpret.federated.flower.payloads import tensors_record
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.storage import Served


def unmeasured(run: Run) -> Run:
    """The run, in which no silo is asked to measure anything."""
    run.server.measure = lambda *_, **__: None  # type: ignore[method-assign]
    return run


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


def updates_got(root: Path, rounds: int) -> int:
    """How many different updates a server gets that asks rounds 0, 1, 0, 2, 1, 0, ... with new weights each time."""
    asking, found = Asking(root, only_stage1(rounds=rounds)), set()
    for last in range(rounds):
        for number in range(last, -1, -1):
            reply = asking.train(number, moved(asking.start, 0.001 * len(found) + 0.01 * last))
            if not reply.has_error():
                found.add(fingerprint({name: torch.from_numpy(array.numpy().copy())
                                       for name, array in reply.content["weights"].items()}))  # fmt: skip
            else:
                assert reply.error.reason == "DataError (served already)"
    return len(found)


def test_a_server_that_asks_for_rounds_again_gets_one_update_of_each(tmp_path: Path) -> None:
    assert updates_got(tmp_path, 3) == 3  # a silo that remembers nothing gives R (R + 1) / 2


def test_the_same_question_has_the_same_answer_in_every_bit_also_from_another_run_of_flower(tmp_path: Path) -> None:
    first = Asking(tmp_path, only_stage1())
    one = first.train(0, first.start)
    again = Asking(tmp_path, only_stage1(), run_id=77)
    unmeasured(again.run)
    two = again.train(0, again.start)
    for name, array in one.content["weights"].items():
        assert array.numpy().tobytes() == two.content["weights"][name].numpy().tobytes()
    assert again.train(0, moved(again.start, 0.1)).error.reason == "DataError (served already)"
    assert not again.train(1, again.start).has_error()
    # Round 1 is served, the answer of round 0 is gone: it is not computed once more.
    assert again.train(0, again.start).error.reason == "DataError (served already)"
    again.run.server.folder = tmp_path / "lost"
    result = again.run.launch()  # a server that has lost its folder begins anew, and has to do without this silo
    assert all("client0" not in names for names in result.rounds.values()) and "served already" in result.faults[0]


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
    whole = federation(tmp_path, only_stage1(), state="whole").clients["client0"]
    for name, value in other.train_shared(start, 0).items():
        assert torch.equal(value, whole.train_shared(start, 0)[name])


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
        again = asking.ask(kind, asking.start, **facts)
        for name, record in answer.content.array_records.items():
            for key, array in record.items():
                assert array.numpy().tobytes() == again.content[name][key].numpy().tobytes()
        assert dict(answer.content.metric_records) == dict(again.content.metric_records)
    bad = asking.ask("evaluate.retrieval", asking.start, system="stage1", split="../../etc")
    assert bad.error.reason == "DataError (bad message)"


def test_rows_that_come_later_in_a_refresh_are_not_answered(tmp_path: Path) -> None:
    asking = Asking(tmp_path, SMALL)
    first, second = (tensors_record({"rows": torch.full((2, 16), value)}) for value in (1.0, 2.0))
    facts: dict[str, Any] = {"refresh": 0}
    rows = {"rows.0": second, "rows.1": first}
    one = asking.ask("query.fedneg_serve", asking.start, records={"rows.0": first}, askers=1, **facts)
    both = asking.ask("query.fedneg_serve", asking.start, records=rows, askers=2, **facts)
    assert set(one.content.array_records) == {"block.0"} and set(both.content.array_records) == {"block.1"}


@pytest.mark.slow
def test_a_run_whose_server_was_ended_between_request_and_epoch_goes_on_with_the_same_requests(tmp_path: Path) -> None:
    """Of a refresh that some silos have used already, the others get the answers that they would have got."""

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


def test_under_a_budget_centroids_are_released_once_whatever_weights_a_server_names(tmp_path: Path) -> None:
    asking = Asking(tmp_path, PRIVATE)
    declare_public(tmp_path)
    assert not asking.ask("query.fedneg_request", asking.start, refresh=0).has_error()
    spent = asking.run.client(asking.run.grid.context(10)).epsilon()
    assert asking.ask("query.fedneg_request", moved(asking.start, 1.0), refresh=0).has_error()
    assert asking.run.client(asking.run.grid.context(10)).epsilon() == spent != 0


def test_of_several_processes_at_once_one_keeps_its_own_and_all_get_the_same(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    Served(tmp_path).round(0, weights)
    Served(tmp_path).round(0, weights)
    with pytest.raises(DataError):
        Served(tmp_path).round(0, {"w": torch.zeros(2)})
    assert [path.name for path in (tmp_path / "served").iterdir()] == ["round-000"]
    assert (tmp_path / "served" / "round-000").stat().st_mode & 0o077 == 0
