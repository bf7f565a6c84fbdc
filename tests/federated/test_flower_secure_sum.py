"""The secure sum by messages is the plain mean of those who stayed, whoever leaves when, and shows no single update."""

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
from lit_dpret.federated.flower.payloads import tensors_record
from lit_dpret.federated.keys import join, new_identity

CAPPED = replace(MASKED, stage1=replace(MASKED.stage1, weighting="capped", n_hat=20))
SIGNED = replace(MASKED, roster=True)


def plain(run: Masked, names: Iterable[str], number: int = 0, start: Weights | None = None) -> Weights:
    """The mean that a server which sees everything would make."""
    begin = START if start is None else start
    stage = run.settings.stage1
    counts = {name: run.client(run.grid.context(10 + NAMES.index(name))).examples for name in names}
    shares = client_weights(counts, stage.weighting, n_hat=stage.n_hat)
    return weighted_mean({name: drifted(begin, name, number) for name in names}, shares)


def assert_same(found: Weights, expected: Weights) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def gone(act: str, *nodes: int, how: str = "unavailable", rounds: tuple[int, ...] = (0,)) -> Any:
    """A fate: these nodes are gone for one act of these rounds."""
    seen: dict[int, int] = {}

    def fate(message: Message) -> str | None:
        node = message.metadata.dst_node_id
        if message.metadata.message_type != f"train.secagg_{act}":
            return None
        seen[node] = seen.get(node, -1) + 1
        return how if node in nodes and seen[node] in rounds else None

    return fate


@pytest.mark.parametrize("settings", [MASKED, CAPPED, SIGNED], ids=["uniform", "capped", "signed"])
def test_with_everybody_there_it_is_the_plain_mean_and_no_weight_is_in_clear(settings: Any, tmp_path: Path) -> None:
    run = Masked(tmp_path, settings, keys=credentials() if settings.roster else {})
    result = run.launch()
    assert not result.faults and result.rounds == {0: list(NAMES)}
    assert_same(result.weights, plain(run, NAMES))
    assert set(run.server.silos.examples.values()) == {1}  # nobody said how many queries it has
    # A round takes as many bytes as in clear, and keys and shares of a kilobyte or two for each silo.
    weights = sum(value.numel() * 4 for value in START.values())
    assert 2 * 5 * weights < result.sent["stage 1"] < 2 * 5 * weights + 5 * (6000 if settings.roster else 4500)
    size = 128 if settings.roster else 64  # the keys are signed
    assert {len(content["keys"][str(node - 9)]) for node, content in run.grid.of("train.secagg_setup").items()} == {
        size
    }


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
    assert_same(result.weights, plain(run, stayed))


def test_silos_may_leave_in_every_act_of_one_round_and_come_back_in_the_next(tmp_path: Path) -> None:
    first, second = gone("setup", 10), gone("masked", 12)

    def fate(message: Message) -> Any:
        return first(message) or second(message)

    run = Masked(tmp_path, replace(MASKED, stage1=replace(MASKED.stage1, rounds=2)), fate=fate)
    result = run.launch()
    stayed = ["client1", "client3", "client4"]
    assert result.rounds == {0: stayed, 1: list(NAMES)}
    assert_same(result.weights, plain(run, NAMES, 1, plain(run, stayed)))


@pytest.mark.parametrize(
    ("act", "message"),
    [("setup", "2 silos advertised keys and 3"), ("share", "2 silos shared their secrets and 3"),
     ("masked", "2 silos sent a vector and 3")],
)  # fmt: skip
def test_below_the_threshold_the_round_is_refused_by_name_and_begun_again_when_they_are_back(
    act: str, message: str, tmp_path: Path
) -> None:
    run = Masked(tmp_path, fate=gone(act, 10, 11, 12))
    with pytest.raises(DataError, match=rf"stage 1, round 0: {message} are needed .* nothing of it can be unmasked.*"
                       "client 'client0' failed"):  # fmt: skip
        run.launch()
    assert not run.grid.of("train.secagg_unmask")  # nobody was even asked
    again = Masked(tmp_path)
    result = again.launch()
    assert not result.faults
    assert_same(result.weights, plain(again, NAMES))


def test_a_round_that_too_few_unmask_is_lost_by_name_and_the_next_one_goes_on(tmp_path: Path) -> None:
    settings = replace(MASKED, stage1=replace(MASKED.stage1, rounds=2))
    run = Masked(tmp_path, settings, fate=gone("unmask", 10, 11, 12))
    result = run.launch()
    assert result.rounds == {0: [], 1: list(NAMES)}
    assert "2 clients unmasked and 3 are needed" in result.faults[-1] and "it is lost" in result.faults[-1]
    assert_same(result.weights, plain(run, NAMES, 1))  # from the same weights as round 0


def test_a_server_that_was_ended_while_it_unmasked_does_not_ask_for_the_same_round_again(tmp_path: Path) -> None:
    def dies(message: Message) -> Any:
        if message.metadata.message_type == "train.secagg_unmask" and message.metadata.dst_node_id == 14:
            raise KeyboardInterrupt
        return None

    settings = replace(MASKED, stage1=replace(MASKED.stage1, rounds=2))
    with pytest.raises(KeyboardInterrupt):
        Masked(tmp_path, settings, fate=dies).launch()
    again = Masked(tmp_path, settings)
    result = again.launch()
    assert result.rounds == {0: [], 1: list(NAMES)} and "was ended while this round was unmasked" in result.faults[0]
    assert_same(result.weights, plain(again, NAMES, 1))


@pytest.mark.parametrize("factor", [float("nan"), 1e20, None], ids=["nan", "beyond the norm", "an error"])
def test_a_silo_whose_training_fails_adds_nothing_to_the_sum_and_the_server_does_not_hear_which(
    factor: float | None, tmp_path: Path
) -> None:
    class Breaks(Drifts):
        def train_shared(self, weights: Any, number: int) -> Any:
            found = super().train_shared(weights, number)
            if self.name == "client3":
                if factor is None:
                    raise ValueError("of a private query")
                next(iter(found.values())).mul_(factor)
            return found

    run = Masked(tmp_path, silo=Breaks)
    result = run.launch()
    assert result.rounds == {0: list(NAMES)} and not result.faults
    assert_same(result.weights, plain(run, [name for name in NAMES if name != "client3"]))


@pytest.mark.parametrize(("raises", "roster"), [(False, False), (True, True)], ids=["beyond the norm", "an error"])
def test_a_sum_of_fewer_updates_than_the_threshold_is_refused_by_all_silos_alike_and_the_next_round_goes_on(
    raises: bool, roster: bool, tmp_path: Path
) -> None:
    class Fails(Drifts):
        def train_shared(self, weights: Any, number: int) -> Any:
            found = super().train_shared(weights, number)
            if number == 0 and self.name in NAMES[:3]:
                if raises:
                    raise MemoryError
                next(iter(found.values())).mul_(1e9)
            return found

    settings = replace(MASKED, roster=roster, stage1=replace(MASKED.stage1, rounds=2))
    run = Masked(tmp_path, settings, keys=credentials() if roster else {}, silo=Fails)
    result = run.launch()
    assert result.rounds == {0: [], 1: list(NAMES)}
    reason = "client {!r} failed: DataError (too few updates)"
    assert all(reason.format(name) in fault for name, fault in zip(NAMES, result.faults, strict=False))
    assert "it is lost" in result.faults[-1] and len(result.faults) == len(NAMES) + 1
    assert_same(result.weights, plain(run, NAMES, 1))  # from the same weights as round 0
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
    assert_same(result.weights, plain(run, stayed))


# -- a server that tries ------------------------------------------------------------------------


def in_the_middle(root: Path, settings: Any = MASKED) -> tuple[Masked, str]:
    """A round whose vectors have all arrived and whose silos were not asked to unmask; and its attempt."""
    honest = {"still": True}

    def fate(message: Message) -> Any:
        unmasking = message.metadata.message_type == "train.secagg_unmask"
        return "unavailable" if honest["still"] and unmasking else None

    class StopsThere(Masked):
        def launch(self) -> Any:
            self.server.measure = lambda *_, **__: None  # type: ignore[method-assign]
            return super().launch()

    run = StopsThere(root, settings, fate=fate)
    run.launch()
    honest["still"] = False
    return run, str(run.grid.of("train.secagg_masked", "down")[10]["head"]["attempt"])


def test_a_server_that_asks_for_both_secrets_of_a_silo_or_a_second_time_is_refused(tmp_path: Path) -> None:
    run, attempt = in_the_middle(tmp_path)
    everybody, victim = [1, 2, 3, 4, 5], 2
    for active, dead in (
        (everybody, [victim]),  # both secrets of one silo
        ([3], [1, 2, 4, 5]),  # the masks of one vector alone
        ([1, 3], [2, 4, 5]),
        ([1, 2, 3, 4], []),  # lists of other silos than those that shared
    ):
        for node in (10, 12):
            lists = {"active": active, **({"dead": dead} if dead else {})}
            reply = run.ask(node, "train.secagg_unmask", attempt=attempt, **lists)
            assert reply.error.reason in ("DataError (bad protocol)", "DataError (too few clients)")
    # Every silo answers one consistent question; what the server then has of the victim is shares of one secret.
    answers = {node: run.ask(node, "train.secagg_unmask", attempt=attempt, active=[1, 3, 4, 5], dead=[victim])
               for node in (10, 12, 13)}  # fmt: skip
    assert all(not reply.has_error() for reply in answers.values())
    for node in answers:
        again = run.ask(node, "train.secagg_unmask", attempt=attempt, active=everybody)
        assert again.error.reason == "DataError (no such sum)"
    # The other two answer the other question: fewer than the threshold, so the victim's own mask stays on.
    late = {node: run.ask(node, "train.secagg_unmask", attempt=attempt, active=everybody) for node in (11, 14)}
    seeds = {node - 9: reply.content["seeds"][str(victim)] for node, reply in late.items()}
    assert all(str(victim) not in reply.content["seeds"] for reply in answers.values())
    with pytest.raises(DataError, match="2 shares are here and 3 are needed"):
        join(seeds, threshold=3)
    with pytest.raises(DataError, match="not of one secret"):
        join(seeds, threshold=2)


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


def test_what_the_server_saw_of_a_silo_says_nothing_of_its_update(tmp_path: Path) -> None:
    """That masked vectors look uniform stands in `test_secure_sum`."""
    run, _ = in_the_middle(tmp_path)
    vectors = {}
    for node, content in run.grid.of("train.secagg_masked").items():
        assert set(content) == {"head", "masked"} and set(content["head"]) == {"schema"}
        vectors[node] = np.array(content["masked"]["words"].numpy())
    found, update = vectors[10].astype(float), drifted(START, "client0", 0)["w"].flatten().numpy()
    assert abs(np.corrcoef(found[7 : 7 + len(update)], update)[0, 1]) < 0.14  # 99.999 % of 1000 pairs
    run_again, _ = in_the_middle(tmp_path / "again")  # the same updates: other vectors
    same = np.array(run_again.grid.of("train.secagg_masked")[10]["masked"]["words"].numpy()) == vectors[10]
    assert same.mean() < 0.01


# -- what a silo keeps --------------------------------------------------------------------------


def test_secrets_of_a_round_are_the_owners_alone_and_are_gone_with_the_round(tmp_path: Path) -> None:
    run, attempt = in_the_middle(tmp_path)
    kept = sorted((tmp_path / "client0" / "sum").iterdir())
    assert [path.name for path in kept] == ["secrets.json"]  # the vector is gone with the act that sent it
    assert kept[0].stat().st_mode & 0o077 == 0 and kept[0].parent.stat().st_mode & 0o077 == 0
    assert all(set(run.grid.context(node).state) <= {"ledgers"} for node in range(10, 15))  # Flower stores none of it
    run.ask(10, "train.secagg_unmask", attempt=attempt, active=[1, 2, 3, 4, 5])
    run.ask(11, "query.describe")  # the server goes on to something else
    for name in ("client0", "client1"):
        assert not list((tmp_path / name / "sum").iterdir())
    assert run.ask(11, "train.secagg_unmask", attempt=attempt, active=[1, 2, 3, 4, 5]).has_error()


# -- the roster ---------------------------------------------------------------------------------


def test_a_silo_whose_key_is_not_on_the_others_roster_is_taken_for_somebody_in_the_middle(tmp_path: Path) -> None:
    run = Masked(tmp_path, SIGNED, keys=credentials(client2=new_identity()[0]))
    with pytest.raises(DataError, match="1 silos shared their secrets and 3 are needed") as caught:
        run.launch()
    assert "client 'client0' failed: DataError (bad signature of client 3)" in str(caught.value)


def test_numbers_of_the_server_that_are_not_the_rosters_are_refused(tmp_path: Path) -> None:
    run = Masked(tmp_path, SIGNED, keys=credentials())
    content = {"weights": tensors_record(START)}
    for number, clients in ((2, [1, 2, 3, 4, 5]), (1, [1, 2, 3, 4, 9]), (1, [1, 2, 3]), (1, [1, 2, 3, 4, 5, 6])):
        reply = run.ask(10, "train.secagg_setup", content, round=0, attempt="a", number=number, clients=clients)
        assert reply.error.reason == "DataError (bad protocol)"


def test_a_message_without_its_parts_is_answered_by_an_error(tmp_path: Path) -> None:
    run, _ = in_the_middle(tmp_path)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("setup", {"clients": [1, 2, 3], "number": 1, "round": 3}), ("share", {}), ("masked", {}),
        ("unmask", {"active": "all"}), ("setup", {"clients": "all"}),
    ]  # fmt: skip
    for act, facts in asked:
        reply = run.ask(10, f"train.secagg_{act}", {}, **{"attempt": "x", **facts})
        assert reply.has_error() and reply.error.reason.startswith("DataError ("), act
