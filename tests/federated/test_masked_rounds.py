"""The secure sum by messages: the plain mean of those who stay, whoever leaves when, and no single update is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import MASKED, NAMES, START, Drifts, Masked, credentials, drifted

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import Weights, client_weights, weighted_mean
from lit_dpret.federated.flower.library import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from lit_dpret.federated.flower.payloads import bytes_of, bytes_record, tensors_record
from lit_dpret.federated.keys import SIGNATURE_BYTES, join, new_identity
from lit_dpret.federated.secure_sum import Client

CAPPED = replace(MASKED, stage1=replace(MASKED.stage1, weighting="capped", n_hat=20))
SIGNED = replace(MASKED, roster=True)
TWO_ROUNDS = replace(MASKED, stage1=replace(MASKED.stage1, rounds=2))
EVERYBODY = [1, 2, 3, 4, 5]


def assert_mean_of(names: Iterable[str], found: Weights, run: Masked, number: int = 0) -> None:
    """The weights are what a server that sees everything would make of a round from the first weights."""
    stage = run.settings.stage1
    counts = {name: run.client(run.grid.context(10 + NAMES.index(name))).examples for name in names}
    shares = client_weights(counts, stage.weighting, n_hat=stage.n_hat)
    for name, value in weighted_mean({name: drifted(START, name, number) for name in names}, shares).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def gone(act: str, *nodes: int, how: str = "unavailable") -> Any:
    """A fate: these nodes are gone for one act of the first round."""
    seen: set[int] = set()

    def fate(message: Message) -> str | None:
        node = message.metadata.dst_node_id
        if message.metadata.message_type != f"train.secagg_{act}" or node not in nodes or node in seen:
            return None
        seen.add(node)
        return how

    return fate


@pytest.mark.parametrize("settings", [MASKED, CAPPED, SIGNED], ids=["uniform", "capped", "signed"])
def test_with_everybody_there_it_is_the_plain_mean_and_no_weight_is_in_clear(settings: Any, tmp_path: Path) -> None:
    run = Masked(tmp_path, settings, keys=credentials() if settings.roster else {})
    result = run.launch()
    assert not result.faults and result.rounds == {0: list(NAMES)}
    assert_mean_of(NAMES, result.weights, run)
    assert set(run.server.silos.examples.values()) == {1}  # nobody said how many queries it has
    # A round takes as many bytes as in clear, and keys and shares of a kilobyte or two for each silo.
    weights = sum(value.numel() * 4 for value in START.values())
    assert 2 * 5 * weights < result.sent["stage 1"] < 2 * 5 * weights + 5 * (6000 if settings.roster else 4500)
    keys = {len(content["keys"][str(node - 9)]) for node, content in run.grid.of("train.secagg_setup").items()}
    assert keys == {128 if settings.roster else 64}  # with a roster they are signed
    for node, content in run.grid.of("train.secagg_masked").items():
        assert set(content) == {"head", "masked"} and set(content["head"]) == {"schema"}
        masked = content["masked"]["words"].numpy()[7:1007].astype(float)  # of "w"; "b" is before it
        update = drifted(START, NAMES[node - 10], 0)["w"].flatten().numpy()
        assert abs(np.corrcoef(masked, update)[0, 1]) < 0.14  # 99.999 % of 1000 pairs


@pytest.mark.parametrize(
    ("act", "how", "stayed"),
    [("setup", "unavailable", NAMES[1:]), ("share", "late", NAMES[1:]), ("masked", "unavailable", NAMES[1:]),
     ("unmask", "late", NAMES)],
    ids=["before advertising", "before sharing", "after sharing", "before unmasking"],
)  # fmt: skip
def test_whoever_leaves_in_an_act_is_named_and_the_sum_is_that_of_the_others(
    act: str, how: str, stayed: tuple[str, ...], tmp_path: Path
) -> None:
    run = Masked(tmp_path, CAPPED, fate=gone(act, 10, how=how), timeout=30.0)
    if how == "late":  # every message may find a new process at the silo
        run.forget_between_messages()
    result = run.launch()
    assert result.rounds == {0: list(stayed)}
    assert len(result.faults) == 1 and "stage 1, round 0: client 'client0'" in result.faults[0]
    assert_mean_of(stayed, result.weights, run)


@pytest.mark.parametrize("act", ["setup", "share", "masked"])
def test_below_the_threshold_the_round_is_refused_by_name_and_begun_again_when_they_are_back(
    act: str, tmp_path: Path
) -> None:
    run = Masked(tmp_path, fate=gone(act, 10, 11, 12))
    with pytest.raises(DataError, match=r"stage 1, round 0: 2 silos .* 3 .*client 'client0' failed"):
        run.launch()
    assert not run.grid.of("train.secagg_unmask")  # nobody was even asked
    again = Masked(tmp_path)
    result = again.launch()
    assert not result.faults
    assert_mean_of(NAMES, result.weights, again)


def test_a_round_that_too_few_unmask_is_lost_by_name_and_the_next_one_goes_on(tmp_path: Path) -> None:
    run = Masked(tmp_path, TWO_ROUNDS, fate=gone("unmask", 10, 11, 12))
    result = run.launch()
    assert result.rounds == {0: [], 1: list(NAMES)} and "2 clients unmasked and 3" in result.faults[-1]
    assert_mean_of(NAMES, result.weights, run, 1)  # from the same weights as round 0


def test_a_server_that_was_ended_while_it_unmasked_does_not_ask_for_the_same_round_again(tmp_path: Path) -> None:
    def dies(message: Message) -> Any:
        if message.metadata.message_type == "train.secagg_unmask" and message.metadata.dst_node_id == 14:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        Masked(tmp_path, TWO_ROUNDS, fate=dies).launch()
    again = Masked(tmp_path, TWO_ROUNDS)
    result = again.launch()
    assert result.rounds == {0: [], 1: list(NAMES)} and len(result.faults) == 1
    assert_mean_of(NAMES, result.weights, again, 1)


# -- silos without an update, and silos that send nonsense --------------------------------------


def failing(*names: str, factor: float | None = None, first: int = 1) -> type[Drifts]:
    """Silos of which some cannot train in the ``first`` rounds, or multiply an update by a ``factor``."""

    class Fails(Drifts):
        def train_shared(self, weights: Any, number: int) -> Weights:
            found = super().train_shared(weights, number)
            if self.name in names and number < first:
                if factor is None:
                    raise MemoryError("of a private query")
                next(iter(found.values())).mul_(factor)
            return found

    return Fails


@pytest.mark.parametrize("factor", [float("nan"), 1e20, None], ids=["nan", "beyond the norm", "an error"])
def test_a_silo_whose_training_fails_adds_nothing_to_the_sum_and_the_server_does_not_hear_which(
    factor: float | None, tmp_path: Path
) -> None:
    run = Masked(tmp_path, silo=failing("client3", factor=factor))
    result = run.launch()
    assert result.rounds == {0: list(NAMES)} and not result.faults
    assert_mean_of([name for name in NAMES if name != "client3"], result.weights, run)


@pytest.mark.parametrize(
    ("factor", "roster"), [(1e9, False), (None, True)], ids=["beyond the norm", "an error, with a roster"]
)
def test_a_sum_of_fewer_updates_than_the_threshold_is_refused_by_all_silos_alike_and_the_next_round_goes_on(
    factor: float | None, roster: bool, tmp_path: Path
) -> None:
    keys = credentials() if roster else {}
    run = Masked(tmp_path, replace(TWO_ROUNDS, roster=roster), keys=keys, silo=failing(*NAMES[:3], factor=factor))
    result = run.launch()
    assert result.rounds == {0: [], 1: list(NAMES)} and len(result.faults) == len(NAMES) + 1
    for name, fault in zip(NAMES, result.faults, strict=False):
        assert f"client {name!r} failed: DataError (too few updates)" in fault
    assert_mean_of(NAMES, result.weights, run, 1)  # from the same weights as round 0
    assert all(not list((tmp_path / name / "sum").iterdir()) for name in NAMES)


def test_a_refusal_that_no_query_has_a_say_in_is_told_before_a_silo_trains(tmp_path: Path) -> None:
    class Served(Drifts):
        def accept_round(self, weights: Any, number: int) -> None:
            if self.name == "client3":
                raise DataError("It was.", kind="served already")

    result = Masked(tmp_path, silo=Served).launch()
    assert "client 'client3' failed: DataError (served already)" in result.faults[0]


@pytest.mark.parametrize("roster", [False, True])
def test_a_threshold_that_those_who_are_there_cannot_meet_is_refused_before_one_of_them_trains(
    roster: bool, tmp_path: Path
) -> None:
    keys, names = (credentials(), NAMES[:3]) if roster else ({}, NAMES)
    settings = replace(MASKED, roster=roster, sum_threshold=4 if roster else 6)
    run = Masked(tmp_path, settings, keys=keys, names=names)
    with pytest.raises(DataError, match="sum_threshold") as refused:
        run.launch()
    assert refused.value.kind == "too few clients"
    assert not [kind for kind, *_ in run.grid.seen if kind.startswith("train.")]


def nonsense(act: str, content: RecordDict) -> None:
    """What a broken silo answers to an act."""
    if act == "setup":
        content["keys"] = ConfigRecord({"4": bytes(64)})  # somebody else's number
    if act == "share":
        del content["shares"]["2"]
    if act == "masked":
        content["masked"] = ArrayRecord({"words": Array(np.zeros(3, dtype=np.uint32))})
    if act == "unmask":
        content["seeds"] = ConfigRecord({"9" * 5000: bytes(66)})


@pytest.mark.parametrize("act", ["setup", "share", "masked", "unmask"])
def test_a_silo_that_answers_nonsense_in_an_act_is_named_and_left_out(act: str, tmp_path: Path) -> None:
    run = Masked(tmp_path)
    handled = run.grid._handled

    def meddled(message: Message, node: int) -> Message:
        reply = handled(message, node)
        if node == 10 and message.metadata.message_type == f"train.secagg_{act}":
            nonsense(act, reply.content)
        return reply

    run.grid._handled = meddled  # type: ignore[method-assign]
    result = run.launch()
    stayed = NAMES if act == "unmask" else NAMES[1:]
    assert result.rounds == {0: list(stayed)}
    assert len(result.faults) == 1 and "lient 'client0'" in result.faults[0]
    assert_mean_of(stayed, result.weights, run)


# -- a server that tries ------------------------------------------------------------------------


class Meddling:
    """A server that asks five real silos, act by act, for what it likes; all of them have sent their vectors."""

    def __init__(self, root: Path, settings: Any = SIGNED, *, withheld: dict[int, set[int]] | None = None,
                 silo: Any = Drifts) -> None:  # fmt: skip
        keys = credentials() if settings.roster else {}
        self.run = Masked(root, settings, keys=keys, silo=silo).forget_between_messages()
        keys = {}
        for number in EVERYBODY:
            keys |= bytes_of(self.setup(number).content, "keys", "a silo")
        shared = {number: bytes_of(self.ask(number, "share", {"keys": bytes_record(keys)}).content, "shares", "")
                  for number in EVERYBODY}  # fmt: skip
        for number in EVERYBODY:
            senders = (withheld or {}).get(number, {*EVERYBODY}) - {number}
            boxes = bytes_record({one: shared[one][number] for one in senders})
            assert not self.ask(number, "masked", {"shares": boxes}).has_error()

    def setup(self, number: int, **facts: Any) -> Any:
        told: dict[str, Any] = {"round": 0, "clients": EVERYBODY, "number": number, **facts}
        return self.ask(number, "setup", {"weights": tensors_record(START)}, **told)

    def ask(self, silo: int, act: str, content: dict[str, Any] | None = None, **facts: Any) -> Any:
        return self.run.ask(silo + 9, f"train.secagg_{act}", content, **{"attempt": "a", **facts})

    def lists(self, number: int, act: str, active: Iterable[int], signatures: dict[int, bytes] | None = None,
              dead: Iterable[int] = ()) -> Any:  # fmt: skip
        content = {"signatures": bytes_record(signatures)} if signatures else {}
        lost = {"dead": sorted(dead)} if dead else {}
        return self.ask(number, act, content, active=sorted(active), **lost)

    def signature(self, number: int, active: Iterable[int], dead: Iterable[int] = ()) -> dict[int, bytes]:
        reply = self.lists(number, "sign", active, dead=dead)
        return bytes_of(reply.content, "signatures", "a silo", size=SIGNATURE_BYTES)


def test_a_silo_signs_one_list_of_a_round_which_is_on_its_disk_before_the_signature_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Meddling(tmp_path)
    assert server.signature(1, {1, 2, 3, 4}, {5}) == server.signature(1, {1, 2, 3, 4}, {5})
    for act in ("sign", "unmask"):
        assert server.lists(1, act, EVERYBODY).has_error()
    assert server.setup(1, attempt="b").error.reason == "DataError (agreed already)"

    def dies(*_: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Client, "sign", dies)
        with pytest.raises(KeyboardInterrupt):
            server.lists(2, "sign", {1, 2, 3, 4}, dead={5})
    assert server.lists(2, "sign", EVERYBODY).error.reason == "DataError (agreed already)"
    assert not server.lists(2, "sign", {1, 2, 3, 4}, dead={5}).has_error()


def test_enough_signatures_over_one_list_unmask_though_one_is_false(tmp_path: Path) -> None:
    server, signatures = Meddling(tmp_path), {}
    for number in EVERYBODY:
        signatures |= server.signature(number, EVERYBODY)
    signatures[5] = bytes(SIGNATURE_BYTES)
    few = server.lists(1, "unmask", EVERYBODY, {number: signatures[number] for number in (1, 2, 5)})
    assert few.error.reason == "DataError (lists not signed)"
    enough = server.lists(1, "unmask", EVERYBODY, {number: signatures[number] for number in (1, 2, 3, 5)})
    assert not enough.has_error()


@pytest.mark.parametrize(("names", "lost", "roster"), [
    (NAMES[1:], set(), True), (NAMES[:3], {5}, True), ((NAMES[0], NAMES[2], NAMES[4]), {5}, True),
    (NAMES[1:], {5}, False), (NAMES[:3], set(), False),
])  # fmt: skip
def test_a_server_that_withholds_shares_does_not_learn_which_silos_have_no_update(
    names: tuple[str, ...], lost: set[int], roster: bool, tmp_path: Path
) -> None:
    """It decides whose shares a silo gets, and so whom a silo would count that asked for enough updates before."""
    everybody = {*EVERYBODY}
    settings = SIGNED if roster else MASKED
    server = Meddling(tmp_path, settings, silo=failing(*names), withheld={1: {1, 2, 3}, 5: {3, 4, 5}})
    sizes = {len(box) for content in server.run.grid.of("train.secagg_share").values()
             for box in bytes_of(content, "shares", "a silo").values()}  # fmt: skip
    assert len(sizes) == 1  # of boxes in which a silo says whether it has an update
    lists = {1: {1, 2, 3}, 2: everybody - lost, 3: everybody - lost, 4: everybody - lost, 5: {3, 4, 5}}
    dead = {one: lost if one in (2, 3, 4) else set() for one in lists}
    signatures: dict[int, bytes] = {}
    for number in lists if roster else ():
        signatures |= server.signature(number, lists[number], dead[number])
    for number in (2, 3, 4):  # the one list with enough signatures
        reply = server.lists(number, "unmask", lists[number], signatures, dead=dead[number])
        assert reply.error.reason == "DataError (too few updates)"
        again = server.lists(number, "unmask", everybody - {5} if not lost else everybody, signatures)
        assert again.error.reason == "DataError (no such sum)"
        assert server.setup(number, attempt="b").error.reason == "DataError (agreed already)"


def test_a_server_that_asks_for_both_secrets_of_a_silo_or_a_second_time_is_refused(tmp_path: Path) -> None:
    server, victim = Meddling(tmp_path, MASKED), 2
    for active, dead in (
        (EVERYBODY, [victim]),  # both secrets of one silo
        ([3], [1, 2, 4, 5]),  # the masks of one vector alone
        ([1, 3], [2, 4, 5]),
        ([1, 2, 3, 4], []),  # lists of other silos than those that shared
    ):
        for number in (1, 3):
            reply = server.lists(number, "unmask", active, dead=dead)
            assert reply.error.reason in ("DataError (bad protocol)", "DataError (too few clients)")
    # Every silo answers one consistent question; what the server then has of the victim is shares of one secret.
    for number in (1, 3, 4):
        reply = server.lists(number, "unmask", [1, 3, 4, 5], dead=[victim])
        assert str(victim) not in reply.content["seeds"]
        assert server.lists(number, "unmask", EVERYBODY).error.reason == "DataError (no such sum)"
    # The other two answer the other question: fewer than the threshold, so the victim's own mask stays on.
    late = {number: server.lists(number, "unmask", EVERYBODY) for number in (2, 5)}
    seeds = {number: reply.content["seeds"][str(victim)] for number, reply in late.items()}
    for threshold in (3, 2):
        with pytest.raises(DataError):
            join(seeds, threshold=threshold)


def test_one_update_is_in_one_sum_though_a_server_begins_the_round_again_with_fewer_silos(tmp_path: Path) -> None:
    run = Masked(tmp_path)
    content = {"weights": tensors_record(START)}
    facts = {"round": 0, "clients": [1, 2, 3, 4], "attempt": "another"}
    assert not run.ask(10, "train.secagg_setup", content, number=1, **facts).has_error()
    few = run.ask(10, "train.secagg_setup", content, number=1, **{**facts, "clients": [1, 2]})
    assert few.error.reason == "DataError (too few clients)"  # the silo's own threshold, whatever the server says
    run.launch()
    for node, number in ((10, 1), (11, 2)):
        reply = run.ask(node, "train.secagg_setup", content, number=number, **facts)
        assert reply.error.reason == "DataError (agreed already)"
    more = run.ask(10, "train.secagg_setup", content, number=1, **{**facts, "round": 1})
    assert more.error.reason == "DataError (not planned)"  # of one round, whatever number the server gives it
    clear = run.ask(10, "train.stage1", content, round=0)
    assert clear.error.reason == "DataError (other settings)"


def test_secrets_of_a_round_are_the_owners_alone_and_are_gone_with_the_round(tmp_path: Path) -> None:
    server = Meddling(tmp_path, MASKED)
    run = server.run
    (kept,) = (tmp_path / "client0" / "sum").iterdir()  # the vector is gone with the act that sent it
    assert kept.stat().st_mode & 0o077 == 0 and kept.parent.stat().st_mode & 0o077 == 0
    assert all(set(run.grid.context(node).state) <= {"ledgers"} for node in range(10, 15))  # Flower stores none of it
    server.lists(1, "unmask", EVERYBODY)
    run.ask(11, "query.describe")  # the server goes on to something else
    for name in ("client0", "client1"):
        assert not list((tmp_path / name / "sum").iterdir())
    assert server.lists(2, "unmask", EVERYBODY).has_error()


def test_a_silo_whose_key_is_not_on_the_others_roster_is_taken_for_somebody_in_the_middle(tmp_path: Path) -> None:
    run = Masked(tmp_path, SIGNED, keys=credentials(client2=new_identity()[0]))
    with pytest.raises(DataError, match=r"client 'client0' failed: DataError \(bad signature of client 3\)"):
        run.launch()


def test_a_message_without_its_parts_or_with_other_numbers_than_the_rosters_is_answered_by_an_error(
    tmp_path: Path,
) -> None:
    server = Meddling(tmp_path)
    for number, clients in ((2, EVERYBODY), (1, [1, 2, 3, 4, 9]), (1, [1, 2, 3]), (1, [*EVERYBODY, 6])):
        reply = server.run.ask(
            10, "train.secagg_setup", {"weights": tensors_record(START)}, round=0, attempt="b", number=number,
            clients=clients,
        )  # fmt: skip
        assert reply.error.reason == "DataError (bad protocol)"
    asked: list[tuple[str, dict[str, Any]]] = [
        ("setup", {"clients": [1, 2, 3], "number": 1, "round": 3}), ("share", {}), ("masked", {}),
        ("unmask", {"active": "all"}), ("setup", {"clients": "all"}), ("unmask", {"attempt": ""}),
    ]  # fmt: skip
    for act, facts in asked:
        reply = server.ask(1, act, {}, **{"attempt": "x", **facts})
        assert reply.has_error() and reply.error.reason.startswith("DataError ("), act
    masked = Masked(tmp_path / "no roster").ask(10, "train.secagg_sign", attempt="a", active=EVERYBODY)
    assert masked.error.reason == "DataError (other settings)"
