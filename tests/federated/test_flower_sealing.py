"""Sealed, silos train with the same negatives as in clear, and the server that carries them sees sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import MASKED, Drifts, Masked, credentials

from lit_dpret.federated.flower.library import Message, RecordDict
from lit_dpret.federated.flower.payloads import tensors_record
from lit_dpret.federated.keys import new_identity
from lit_dpret.federated.negatives import Block, FedPool, respond, respond_uniformly
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.storage import save_tensors

CLEAR = replace(
    MASKED, secure_sum=False, sum_threshold=None, stage2=replace(MASKED.stage2, epochs=1, top_k=6, n=4, request="exact")
)
SEALED = replace(CLEAR, seal=True)
NAMES = ("client0", "client1", "client2")
DIM = 16


def coins(name: str, what: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(10 * int(name[-1]) + what))


class Asks(Drifts):
    """Asks and answers with coins, and keeps the pool that it was given."""

    @property
    def rows(self) -> torch.Tensor:
        return torch.empty(0, DIM) if self.settings.stage2.request == "none" else coins(self.name, 0, 5)

    @property
    def queries(self) -> range:
        return range(5)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.examples = 5

    def request(self, weights: Any, refresh: int) -> torch.Tensor:
        return self.rows

    def serve(self, weights: Any, rows: torch.Tensor, *, refresh: int) -> Block:
        stage, candidates = self.settings.stage2, coins(self.name, 1, 30)
        if len(rows):
            return respond(self.name, rows, candidates, stage.top_k, send_as=stage.send_as)
        return respond_uniformly(self.name, candidates, stage.n, seed=refresh, send_as=stage.send_as)

    def personalise(self, weights: Any, pool: FedPool, number: int) -> None:
        lists = {} if pool.lists is None else {"lists": pool.lists}
        save_tensors({"embeddings": pool.embeddings, **lists}, self.state / "pool.safetensors")


def run(root: Path, settings: PddAs2, **more: Any) -> Masked:
    return Masked(root, settings, silo=more.pop("silo", Asks), names=NAMES, **more)


def pools(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: load_file(root / name / "pool.safetensors")
        for name in NAMES
        if (root / name / "pool.safetensors").exists()
    }


def with_request(settings: PddAs2, request: Any) -> PddAs2:
    return replace(settings, stage2=replace(settings.stage2, request=request))


@pytest.mark.parametrize(
    ("request_", "select"), [("exact", "all"), ("dp_centroid", "all"), ("none", "all"), ("exact", "random")]
)
def test_sealed_every_silo_gets_the_pool_that_it_gets_in_clear(request_: Any, select: Any, tmp_path: Path) -> None:
    parts = {"select": select, "select_count": 1 if select == "random" else None}
    found, sent = {}, {}
    for name, settings in (("clear", CLEAR), ("sealed", SEALED)):
        asked = with_request(replace(settings, stage2=replace(settings.stage2, **parts)), request_)
        made = run(tmp_path / name, asked)
        assert not made.launch().faults
        found[name], sent[name] = pools(tmp_path / name), made.grid.down
    assert set(found["clear"]) == set(found["sealed"]) == set(NAMES)
    for name in NAMES:
        assert set(found["sealed"][name]) == set(found["clear"][name])
        for part, value in found["clear"][name].items():
            assert len(value) and torch.equal(found["sealed"][name][part], value), part
    if (request_, select) == ("exact", "all"):  # what the server cannot merge goes down once for each answer
        assert sent["sealed"]["train.personalise"] > 1.05 * sent["clear"]["train.personalise"]


def test_every_message_may_find_a_new_process_at_the_silo(tmp_path: Path) -> None:
    run(tmp_path / "one", SEALED).launch()
    result = run(tmp_path / "many", SEALED).forget_between_messages().launch()
    assert not result.faults
    for name, found in pools(tmp_path / "many").items():
        assert all(torch.equal(value, pools(tmp_path / "one")[name][part]) for part, value in found.items())
    assert set(pools(tmp_path / "many")) == set(NAMES)


def numbers(content: RecordDict) -> Iterator[bytes]:
    """All bytes of a message's tensors."""
    for record in content.array_records.values():
        yield from (array.data for array in record.values())
    for record in content.config_records.values():
        yield from (value for value in record.values() if isinstance(value, bytes))


def test_the_server_sees_no_row_and_no_embedding_of_sealed_messages_and_all_of_them_in_clear(tmp_path: Path) -> None:
    kinds = ("query.seal_key", "query.fedneg_request", "query.fedneg_serve", "train.personalise")
    seen = {}
    for name, settings in (("clear", CLEAR), ("sealed", SEALED)):
        made = run(tmp_path / name, settings)
        made.launch()
        seen[name] = b"".join(
            data for kind, _, _, content in made.grid.seen if kind in kinds for data in numbers(content)
        )
    rows = [row.numpy().tobytes() for name in NAMES for row in coins(name, 0, 5)]
    embeddings = [row.half().numpy().tobytes() for name in NAMES for row in coins(name, 1, 30)]
    assert all(row in seen["clear"] for row in rows) and not any(row in seen["sealed"] for row in rows)
    assert sum(row in seen["clear"] for row in embeddings) > 60
    assert not any(row[:8] in seen["sealed"] for row in embeddings)


def test_a_body_for_all_is_sent_up_once_however_many_are_asked(tmp_path: Path) -> None:
    made = run(tmp_path, SEALED)
    made.server.measure = lambda *_, **__: None  # type: ignore[method-assign]  # the keys come with the first weights
    assert not made.launch().faults
    content = made.grid.of("query.fedneg_request")[10]
    assert set(content) == {"head", "request", "boxes"} and set(content["boxes"]) == {"2", "3"}
    uniform = run(tmp_path / "none", with_request(SEALED, "none"))
    uniform.launch()
    assert set(uniform.grid.of("query.fedneg_serve")[10]) == {"head", "answer.0", "boxes"}


# -- a relay that does as it likes --------------------------------------------------------------


class Meddles(Masked):
    """A relay that changes a message on its way to a node."""

    def launch(self) -> Any:
        handled = self.grid._handled

        def meddled(message: Message, node: int) -> Message:
            self.meddle(message.metadata.message_type, node, message.content)
            return handled(message, node)

        self.grid._handled = meddled  # type: ignore[method-assign]
        return super().launch()

    def meddle(self, kind: str, node: int, content: RecordDict) -> None:
        raise NotImplementedError


def tampered(kind: str, node: int, content: RecordDict) -> None:
    if kind == "train.personalise" and node == 10:
        array = content["answer.2"]["body"]
        array.data = array.data[:-1] + bytes([array.data[-1] ^ 1])


def swapped(kind: str, node: int, content: RecordDict) -> None:
    """Two answers to one silo, each under the other's name."""
    if kind == "train.personalise" and node == 10:
        for name, record in (("answer.2", content["answer.3"]), ("answer.3", content["answer.2"])):
            content[name] = record
        boxes = content["boxes"]
        boxes["2"], boxes["3"] = boxes["3"], boxes["2"]


def request_tampered(kind: str, node: int, content: RecordDict) -> None:
    if kind == "query.fedneg_serve" and node == 11:
        box = bytearray(content["boxes"]["1"])
        box[-1] ^= 1
        content["boxes"]["1"] = bytes(box)


@pytest.mark.parametrize(
    ("meddle", "faults", "missing"),
    [
        (tampered, ["'client0' left out what came from client 'client1': it was changed on the way."], {"client1"}),
        (swapped, ["'client0' left out what came from client 'client1': it is another silo's.",
                   "'client0' left out what came from client 'client2': it is another silo's."],
         {"client1", "client2"}),
        (request_tampered, ["'client1' left out what came from client 'client0': it was changed on the way."],
         {"client1"}),
    ],
)  # fmt: skip
def test_what_a_relay_meddled_with_is_left_out_by_name_and_the_others_are_used(
    meddle: Any, faults: list[str], missing: set[str], tmp_path: Path
) -> None:
    class Relay(Meddles):
        def meddle(self, kind: str, node: int, content: RecordDict) -> None:
            meddle(kind, node, content)

    made = Relay(tmp_path / "sealed", SEALED, silo=Asks, names=NAMES)
    result = made.launch()
    assert result.faults == [f"refresh 0: client {fault}" for fault in faults]
    used = pools(tmp_path / "sealed")["client0"]["embeddings"]
    for name in NAMES[1:]:
        theirs = coins(name, 1, 30).half().float()
        some = bool((used[:, None] == theirs).all(-1).any())
        assert some == (name not in missing), name
    assert set(pools(tmp_path / "sealed")) == set(NAMES)  # everybody trained


def test_letters_of_an_earlier_refresh_or_for_another_silo_are_left_out_with_the_reason(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    class Replays(Meddles):
        def meddle(self, kind: str, node: int, content: RecordDict) -> None:
            if kind != "train.personalise":
                return
            if node == 10 and "first" in kept:  # refresh 1 gets an answer of refresh 0
                content["answer.2"], content["boxes"]["2"] = kept["first"]
            if node == 11:
                kept["other"] = (content["answer.1"], content["boxes"]["1"])
            if node == 12 and "other" in kept:  # the third silo gets what the first sealed for the second
                content["answer.1"], content["boxes"]["1"] = kept["other"]
            if node == 10 and "first" not in kept:
                kept["first"] = (content["answer.2"], content["boxes"]["2"])

    result = Replays(
        tmp_path, replace(SEALED, stage2=replace(SEALED.stage2, epochs=2)), silo=Asks, names=NAMES
    ).launch()
    told = "\n".join(result.faults)
    assert (
        "refresh 1: client 'client0' left out what came from client 'client1': it is of refresh 0 and not of 1" in told
    )
    assert "client 'client2' left out what came from client 'client0': it was meant for another silo" in told


def test_a_request_with_rows_where_none_are_agreed_on_is_answered_nothing(tmp_path: Path) -> None:
    class Curious(Asks):
        def request(self, weights: Any, refresh: int) -> torch.Tensor:
            return coins(self.name, 0, 5) if self.name == "client0" else super().request(weights, refresh)

    result = run(tmp_path, with_request(SEALED, "none"), silo=Curious).launch()
    told = [fault for fault in result.faults if "has rows, under request=none" in fault]
    assert len(told) == 2 and all("what came from client 'client0'" in fault for fault in told)
    assert set(pools(tmp_path)) == set(NAMES) and len(pools(tmp_path)["client0"]["embeddings"]) == 0


def test_a_silo_that_is_gone_while_others_seal_is_left_out_and_comes_back(tmp_path: Path) -> None:
    def fate(message: Message) -> Any:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        early = message.content.config_records.get("head", {}).get("refresh") == 0
        return "unavailable" if early and (kind, node) in (("query.seal_key", 10), ("query.fedneg_serve", 12)) else None

    settings = replace(SEALED, stage2=replace(SEALED.stage2, epochs=2))
    result = run(tmp_path, settings, fate=fate).launch()
    assert ["refresh 0: client 'client0' failed" in one for one in result.faults].count(True) == 1
    assert ["refresh 0: client 'client2' failed" in one for one in result.faults].count(True) == 1
    assert len(result.faults) == 2 and set(pools(tmp_path)) == set(NAMES)


# -- keys ---------------------------------------------------------------------------------------


def test_a_key_is_on_the_disk_while_the_refresh_lives_for_its_owner_alone(tmp_path: Path) -> None:
    seen = []

    class Looks(Asks):
        def serve(self, *args: Any, **kwargs: Any) -> Block:
            seen.append((self.state / "sealing" / "key.json").stat().st_mode & 0o777)
            return super().serve(*args, **kwargs)

    run(tmp_path, SEALED, silo=Looks).launch()
    assert seen and set(seen) == {0o600}
    assert not [path for name in NAMES for path in (tmp_path / name / "sealing").iterdir()]


def test_with_a_roster_a_silo_with_another_key_is_asked_nothing_and_told_nothing(tmp_path: Path) -> None:
    signed = replace(SEALED, roster=True)
    result = run(tmp_path / "good", signed, keys=credentials()).launch()
    assert not result.faults
    made = run(tmp_path / "bad", signed, keys=credentials(client2=new_identity()[0]))
    result = made.launch()
    assert any("client 'client0' left out what came from client 'client2': it has a key that is not signed" in one
               for one in result.faults)  # fmt: skip
    assert all("3" not in made.grid.of("query.fedneg_request")[node]["boxes"] for node in (10, 11))
    used, theirs = pools(tmp_path / "bad")["client0"]["embeddings"], coins("client2", 1, 30).half().float()
    assert len(used) and not bool((used[:, None] == theirs).all(-1).any())


def test_a_silo_that_seals_answers_no_request_in_clear(tmp_path: Path) -> None:
    made = run(tmp_path, SEALED)
    made.launch()
    weights = made.grid.of("query.fedneg_request", "down")[10]["head"]["weights"]
    asked = made.ask(10, "query.fedneg_request", weights=weights, refresh=0)
    assert asked.error.reason == "DataError (no such key)"
    rows = {"rows.0": tensors_record({"rows": torch.randn(3, DIM)})}
    served = made.ask(10, "query.fedneg_serve", rows, weights=weights, refresh=0, askers=1)
    assert not served.content.array_records
    clear = run(tmp_path / "clear", CLEAR)
    clear.launch()
    assert (
        clear.ask(10, "query.seal_key", weights=weights, refresh=0, number=1).error.reason
        == "DataError (other settings)"
    )
