"""The secure sum is the plain sum, with and without clients that go away, and shows nothing else."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_dpret.errors import ConfigurationError, DataError, LitDpretError
from lit_dpret.federated.keys import Credentials, join, new_identity, split
from lit_dpret.federated.secure_mean import FixedPoint
from lit_dpret.federated.secure_sum import Client, Keys, Server, Session, add_stream, threshold_for
from lit_dpret.federated.settings import PddAs2, Stage1
from lit_dpret.federated.silo_sum import SiloSum, SumPlan

NAMES = (1, 2, 3, 5, 8)


class Sum:
    """One run of the protocol, up to the acts that a test wants to take itself."""

    def __init__(self, vectors: dict[int, np.ndarray], *, threshold: int = 0, before: tuple[int, ...] = (),
                 after: tuple[int, ...] = (), fixed: FixedPoint | None = None) -> None:  # fmt: skip
        self.fixed = fixed or FixedPoint(limit=8.0, clients=len(vectors))
        session = Session(name="round 1", clients=tuple(vectors), threshold=threshold)
        self.clients = {name: Client(session, name) for name in vectors}
        self.server = Server(session)
        self.server.keys = {name: client.advertise() for name, client in self.clients.items()}
        sharing = {name: client for name, client in self.clients.items() if name not in before}
        routed = self.server.route({name: client.share(self.server.keys.values()) for name, client in sharing.items()})
        for name in self.server.sharers - set(after):
            words, _ = self.fixed.encode(vectors[name])
            self.server.masked[name] = self.clients[name].mask(words, routed[name])

    def total(self) -> np.ndarray:
        server = self.server
        answers = [self.clients[name].unmask(server.active, server.dead) for name in server.active]
        return self.fixed.decode(server.total(answers))


def vectors(seed: int = 0, names: tuple[int, ...] = NAMES, size: int = 50) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.uniform(-8, 8, size) for name in names}


@pytest.mark.parametrize(
    ("before", "after"), [((), ()), ((2,), ()), ((), (3,)), ((), (1,)), ((), (8,)), ((5,), (1,))],
    ids=["nobody leaves", "before sharing", "after sharing", "the first", "the last", "both"],
)  # fmt: skip
def test_the_secure_sum_is_the_plain_sum_of_those_who_stayed(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    found = vectors()
    run = Sum(found, threshold=3, before=before, after=after)
    stayed = [found[name] for name in NAMES if name not in before + after]
    encoded = [run.fixed.encode(vector)[0] for vector in stayed]
    assert np.array_equal(run.total(), run.fixed.decode(np.sum(encoded, axis=0, dtype=np.uint32)))
    assert np.abs(np.sum(stayed, axis=0) - run.fixed.decode(np.sum(encoded, axis=0, dtype=np.uint32))).max() < 1e-6


def test_a_client_that_is_another_process_after_every_act_gives_the_same_sum() -> None:
    session = Session(name="s", clients=(1, 2, 3))
    clients = {name: Client(session, name) for name in session.clients}

    def restarted(client: Client) -> Client:
        return Client(session, client.number).go_on(json.loads(json.dumps(client.to_state())))

    found, fixed = vectors(names=(1, 2, 3)), FixedPoint(limit=8.0, clients=3)
    keys = [client.advertise() for client in clients.values()]
    clients = {name: restarted(client) for name, client in clients.items()}
    server = Server(session)
    server.keys = {one.client: one for one in keys}
    routed = server.route({name: client.share(keys) for name, client in clients.items()})
    clients = {name: restarted(client) for name, client in clients.items()}
    for name, client in clients.items():
        server.masked[name] = client.mask(fixed.encode(found[name])[0], routed[name])
    clients = {name: restarted(client) for name, client in clients.items()}
    with pytest.raises(ConfigurationError, match="two under the same masks"):
        clients[1].mask(fixed.encode(found[1])[0], routed[1])
    total = server.total([client.unmask(server.active, server.dead) for client in clients.values()])
    assert np.abs(fixed.decode(total) - sum(found.values())).max() <= fixed.error
    with pytest.raises(DataError, match="does so once"):
        restarted(clients[2]).unmask((1, 2, 3), ())


def test_a_masked_vector_looks_uniform_and_equal_vectors_look_unrelated() -> None:
    run = Sum({name: np.zeros(20_000) for name in (1, 2, 3)})
    for words in run.server.masked.values():
        counts = np.bincount((words >> 24).astype(np.int64), minlength=256)
        assert ((counts - 20_000 / 256) ** 2 / (20_000 / 256)).sum() < 360  # chi-square, 255 degrees: 99.999 %
        assert abs(np.unpackbits(words.view(np.uint8)).mean() - 0.5) < 0.005
    first, second, _ = run.server.masked.values()
    assert abs(np.corrcoef(first.astype(float), second.astype(float))[0, 1]) < 0.04
    assert np.array_equal(run.total(), np.zeros(20_000))


def test_a_mask_is_the_key_stream_of_rfc_8439_whatever_the_pieces_it_is_added_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # RFC 8439, appendix A.1, test vector 1: key and nonce of zeros.
    first = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    masked = np.zeros(1000, dtype=np.uint32)
    add_stream(masked, bytes(32))
    assert masked[:8].astype("<u4").tobytes() == first
    monkeypatch.setattr("lit_dpret.federated.secure_sum._PIECE", 7)
    pieces = np.ones(1000, dtype=np.uint32)
    add_stream(pieces, bytes(32))
    assert np.array_equal(pieces, masked + 1)
    add_stream(pieces, bytes(32), subtract=True)
    assert np.array_equal(pieces, np.ones(1000, dtype=np.uint32))


# -- what a client refuses; lists and keys of a server that tries stand in `test_flower_secure_sum` ----------


def test_a_client_that_is_told_of_too_few_or_of_other_survivors_reveals_nothing() -> None:
    with pytest.raises(DataError) as refused:
        Sum(vectors(), threshold=4, before=(1, 2))
    assert refused.value.kind == "too few clients"
    client = Sum(vectors()).clients[1]
    for active, dead in ((NAMES, (2,)), ((1, 2, 3, 5), ()), ((2, 3, 5, 8), (1,)), ((1, 2, 3), (5, 8))):
        with pytest.raises(DataError):
            client.unmask(active, dead)
    client.unmask(NAMES, ())


def test_a_share_that_was_changed_or_meant_for_somebody_else_does_not_open() -> None:
    session = Session(name="s", clients=(1, 2, 3))
    clients = {name: Client(session, name) for name in session.clients}
    keys = [client.advertise() for client in clients.values()]
    sealed = {name: client.share(keys) for name, client in clients.items()}
    words = np.zeros(3, dtype=np.uint32)
    with pytest.raises(DataError, match="shares of client 2 were changed"):
        clients[1].mask(words, {2: sealed[2][3], 3: sealed[3][1]})
    broken = bytearray(sealed[2][1])
    broken[-1] ^= 1
    with pytest.raises(DataError, match="shares of client 2 were changed"):
        clients[1].mask(words, {2: bytes(broken), 3: sealed[3][1]})


def test_keys_that_are_repeated_replaced_or_unknown_are_refused() -> None:
    session = Session(name="s", clients=(1, 2, 3))
    clients = {name: Client(session, name) for name in session.clients}
    one, two, three = (client.advertise() for client in clients.values())
    for relayed, message in (
        ([one, two, replace(two, client=3)], "one key for two clients"),
        ([one, two, three, replace(three, client=7)], "unknown clients"),
        ([replace(two, client=1), two, three], "other keys than this client's own"),
        ([one, two], "2 clients advertised keys and 3 are needed"),
    ):
        with pytest.raises(DataError, match=message):
            clients[1].share(relayed)
    assert isinstance(one, Keys)


@pytest.mark.parametrize(
    ("clients", "threshold", "message"),
    [((1, 2), 0, "with 2 clients hides nothing"), ((1, 2, 3, 4), 2, "4 clients begin a sum with threshold=2"),
     ((1, 2, 3), 4, "threshold=4"), ((1, 1, 2), 0, "different positive numbers")],
)  # fmt: skip
def test_a_session_that_protects_nobody_is_refused(clients: tuple[int, ...], threshold: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Session(name="s", clients=clients, threshold=threshold)


def test_the_default_threshold_is_more_than_two_thirds_and_stands_a_third_of_colluders() -> None:
    assert [threshold_for(3, count) for count in (3, 5, 6, 10)] == [3, 3, 4, 6]
    for count in range(3, 40):
        session = Session(name="s", clients=tuple(range(1, count + 1)))
        assert 3 * session.threshold > 2 * count and (session.colluders >= (count - 1) // 3 or count < 7)
        assert 0 <= session.colluders < 2 * session.threshold - count and session.threshold - session.colluders >= 2


# -- its parts -------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_fixed_point_sums_never_wrap_and_are_off_by_rounding_alone(clients: int, limit: float, seed: int) -> None:
    fixed = FixedPoint(limit=limit, clients=clients)
    values = np.random.default_rng(seed).choice([-limit, limit, limit / 3], size=(clients, 20))
    total = np.sum([fixed.encode(row)[0] for row in values], axis=0, dtype=np.uint32)
    assert np.abs(fixed.decode(total) - values.sum(axis=0)).max() <= fixed.error * (1 + 1e-9)
    assert np.abs(fixed.decode(np.sum([fixed.encode(np.full(2, limit))[0]] * clients, axis=0, dtype=np.uint32))
                  - clients * limit).max() <= fixed.error * (1 + 1e-9)  # fmt: skip


def test_values_beyond_the_limit_are_cut_and_counted_and_nan_is_not_sent() -> None:
    fixed = FixedPoint(limit=1.0, clients=3)
    words, cut = fixed.encode(np.array([0.5, 7.0, -7.0]))
    assert cut == 2 and np.allclose(fixed.decode(words), [0.5, 1.0, -1.0], atol=1e-8)
    with pytest.raises(DataError, match="not finite"):
        fixed.encode(np.array([np.nan]))


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 7), st.integers(0, 3), st.randoms(use_true_random=False))
def test_any_threshold_of_shares_gives_the_secret_back(
    secret: bytes, threshold: int, more: int, chance: object
) -> None:
    holders = list(range(1, threshold + more + 1))
    shares = split(secret, threshold=threshold, holders=holders)
    chosen = chance.sample(holders, threshold)  # type: ignore[attr-defined]
    assert join({name: shares[name] for name in chosen}, threshold=threshold) == secret


def test_fewer_shares_than_the_threshold_look_the_same_for_two_secrets() -> None:
    means = []
    for secret in (bytes(32), b"\xff" * 32):
        leading = [split(secret, threshold=2, holders=[1, 2])[1][1] for _ in range(2000)]  # a uniform byte of the share
        means.append(float(np.mean(leading)))
    assert all(abs(mean - 127.5) < 7 for mean in means)  # four standard deviations of the mean are 6.6


# -- one message several times at once


SILOS = 5


def test_one_vector_is_masked_in_a_sum_however_many_processes_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PddAs2(stage1=Stage1(weighting="uniform"), secure_sum=True, roster=True).check()
    names = [f"silo{i}" for i in range(1, SILOS + 1)]
    pairs = {name: new_identity() for name in names}
    roster = {name: pair[1] for name, pair in pairs.items()}

    def silo(number: int) -> SiloSum:
        name = names[number - 1]
        return SiloSum(tmp_path / name, settings, Credentials(name=name, identity=pairs[name][0], roster=roster))

    plan = SumPlan(run="r", round=0, attempt="a", weights="w", clients=tuple(range(1, SILOS + 1)))
    start, update = {"w": torch.ones(50)}, {"w": torch.full((50,), 1.01)}
    server = Server(plan.session(None))
    server.keys = {i: silo(i).begin(plan, i, start, update, examples=5) for i in plan.clients}
    boxes = server.route({i: silo(i).share("a", server.keys.values()) for i in plan.clients})[1]
    asked = [boxes, *({peer: box for peer, box in boxes.items() if peer != left} for left in boxes)]

    honest, answers, refusals = Client.mask, [], []

    def slow(self: Client, *given: Any) -> Any:
        found = honest(self, *given)
        time.sleep(0.05)  # as it takes for a large model
        return found

    def ask(sealed: Any) -> None:
        try:
            answers.append(silo(1).mask("a", sealed))
        except LitDpretError as refusal:
            refusals.append(refusal)

    monkeypatch.setattr(Client, "mask", slow)
    threads = [threading.Thread(target=ask, args=(sealed,)) for sealed in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 1 and len(refusals) == len(asked) - 1
