"""The secure sum is the plain sum of those who stay, and a server that lies is left with one sum of enough or none."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="needs the extra federated (cryptography)")

from lit_dpret.errors import ConfigurationError, DataError, LitDpretError
from lit_dpret.federated.keys import join, new_identity, sign, split
from lit_dpret.federated.secure_mean import FixedPoint
from lit_dpret.federated.secure_sum import Client, Server, Session, Unmasking, add_stream, threshold_for
from lit_dpret.federated.settings import PddAs2, Stage1
from lit_dpret.federated.silo_sum import SiloSum, SumPlan

NAMES = (1, 2, 3, 5, 8)
NOTHING = np.zeros(3, dtype=np.uint32)


class Sum:
    """One sum up to the masked vectors; ``before`` share nothing, and ``after`` send no vector."""

    def __init__(self, vectors: dict[int, np.ndarray], *, threshold: int = 0, before: tuple[int, ...] = (),
                 after: tuple[int, ...] = ()) -> None:  # fmt: skip
        self.fixed = FixedPoint(limit=8.0, clients=len(vectors))
        session = Session(name="round 1", clients=tuple(vectors), threshold=threshold)
        self.clients = {name: Client(session, name) for name in vectors}
        self.server = Server(session)
        self.server.keys = {name: client.advertise() for name, client in self.clients.items()}
        sharing = {name: client for name, client in self.clients.items() if name not in before}
        routed = self.server.route({name: client.share(self.server.keys.values()) for name, client in sharing.items()})
        for name in self.server.sharers - set(after):
            words = self.fixed.encode(vectors[name])
            self.server.masked[name] = self.clients[name].mask(words, routed[name])

    def total(self) -> np.ndarray:
        server = self.server
        answers = [self.clients[name].unmask(server.active, server.dead) for name in server.active]
        return self.fixed.decode(server.total(answers))


def vectors() -> dict[int, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.uniform(-8, 8, 50) for name in NAMES}


@pytest.mark.parametrize(
    ("before", "after"), [((), ()), ((2,), ()), ((), (3,)), ((), (1,)), ((), (8,)), ((5,), (1,))],
    ids=["nobody leaves", "before sharing", "after sharing", "the first", "the last", "both"],
)  # fmt: skip
def test_the_secure_sum_is_the_plain_sum_of_those_who_stayed(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    found = vectors()
    run = Sum(found, threshold=3, before=before, after=after)
    stayed = [found[name] for name in NAMES if name not in before + after]
    encoded = [run.fixed.encode(vector) for vector in stayed]
    expected = run.fixed.decode(np.sum(encoded, axis=0, dtype=np.uint32))
    assert np.array_equal(run.total(), expected)
    assert np.abs(np.sum(stayed, axis=0) - expected).max() < 1e-6


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


# -- what a client refuses ----------------------------------------------------------------------


def test_a_client_reveals_nothing_for_wrong_lists_and_does_each_act_once() -> None:
    with pytest.raises(DataError) as refused:
        Sum(vectors(), threshold=4, before=(1, 2))
    assert refused.value.kind == "too few clients"
    run = Sum(vectors())
    client = run.clients[1]
    for active, dead in ((NAMES, (2,)), ((1, 2, 3, 5), ()), ((2, 3, 5, 8), (1,)), ((1, 2, 3), (5, 8))):
        with pytest.raises(DataError):
            client.unmask(active, dead)
    client.unmask(NAMES, ())
    with pytest.raises(DataError):
        client.unmask(NAMES, ())
    with pytest.raises(DataError):
        client.share(run.server.keys.values())
    with pytest.raises(ConfigurationError):
        client.mask(NOTHING, {})


def test_keys_and_shares_that_are_not_as_they_were_sent_are_refused() -> None:
    session = Session(name="s", clients=(1, 2, 3))
    clients = {name: Client(session, name) for name in session.clients}
    one, two, three = keys = [client.advertise() for client in clients.values()]
    for relayed in (
        [one, two, replace(two, client=3)],  # one key for two clients
        [one, two, three, replace(three, client=7)],  # an unknown client
        [replace(two, client=1), two, three],  # another key under the client's own number
        [one, two],  # fewer than the threshold
    ):
        with pytest.raises(DataError):
            clients[1].share(relayed)
    sealed = {name: client.share(keys) for name, client in clients.items()}
    broken = bytearray(sealed[2][1])
    broken[-1] ^= 1
    for wrong in (sealed[2][3], bytes(broken)):
        with pytest.raises(DataError, match="client 2"):
            clients[1].mask(NOTHING, {2: wrong, 3: sealed[3][1]})


@pytest.mark.parametrize(
    ("clients", "threshold", "message"),
    [((1, 2), 0, "secure_sum=true with 2 clients"), ((1, 2, 3, 4), 2, "threshold=2"), ((1, 2, 3), 4, "threshold=4"),
     ((1, 1, 2), 0, "secure_sum")],
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


def test_one_vector_is_masked_in_a_sum_however_many_processes_ask_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PddAs2(stage1=Stage1(weighting="uniform"), secure_sum=True).check()
    plan = SumPlan(run="r", round=0, attempt="a", weights="w", clients=(1, 2, 3, 4, 5))
    silos = {number: SiloSum(tmp_path / str(number), settings) for number in plan.clients}
    start, update = {"w": torch.ones(50)}, {"w": torch.full((50,), 1.01)}
    server = Server(plan.session(None))
    server.keys = {number: silo.begin(plan, number, start, update, examples=5) for number, silo in silos.items()}
    boxes = server.route({number: silo.share("a", server.keys.values()) for number, silo in silos.items()})[1]
    asked = [boxes, *({peer: box for peer, box in boxes.items() if peer != left} for left in boxes)]
    honest = Client.mask

    def slow(self: Client, *given: Any) -> Any:
        found = honest(self, *given)
        time.sleep(0.05)  # as it takes for a large model
        return found

    def is_answered(sealed: dict[int, bytes]) -> bool:
        try:
            silos[1].mask("a", sealed)
        except LitDpretError:
            return False
        return True

    monkeypatch.setattr(Client, "mask", slow)
    with ThreadPoolExecutor(len(asked)) as pool:
        assert sum(pool.map(is_answered, asked)) == 1


# -- numbers and shares -------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_fixed_point_sums_never_wrap_and_are_off_by_rounding_alone(clients: int, limit: float, seed: int) -> None:
    fixed = FixedPoint(limit=limit, clients=clients)
    drawn = np.random.default_rng(seed).choice([-limit, limit, limit / 3], size=(clients, 20))
    for values in (drawn, np.full((clients, 2), limit)):
        total = np.sum([fixed.encode(row) for row in values], axis=0, dtype=np.uint32)
        assert np.abs(fixed.decode(total) - values.sum(axis=0)).max() <= fixed.error * (1 + 1e-9)


def test_values_beyond_the_limit_are_clipped() -> None:
    fixed = FixedPoint(limit=1.0, clients=3)
    assert np.allclose(fixed.decode(fixed.encode(np.array([0.5, 7.0, -7.0]))), [0.5, 1.0, -1.0], atol=1e-8)


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
    for secret in (bytes(32), b"\xff" * 32):
        leading = [split(secret, threshold=2, holders=[1, 2])[1][1] for _ in range(2000)]  # a uniform byte of the share
        assert abs(float(np.mean(leading)) - 127.5) < 7  # four standard deviations of the mean are 6.6


# -- a server that draws up lists ---------------------------------------------------------------


VICTIM = 1
Lists = dict[int, tuple[set[int], set[int]]]
"""What each silo is told: who is active, and who was lost."""


@dataclass
class IsolatingServer:
    """One sum of ``n`` silos, the last ``colluders`` of which do as the server says.

    It has two ways to the victim's vector; otherwise messages follow the protocol:

    - `withholding`: the victim gets as few shares as it takes, so that it masks with few; all others get all shares,
      and are told in turn that a few of the victim's peers were lost, each a few others, until their masks are known.
    - `splitting`: half of the silos are told that the victim is there, and the others that it was lost, so that both
      of its secrets are known. It needs two lists with ``threshold`` signatures each.
    """

    n: int
    threshold: int
    colluders: int = 0
    roster: bool = True
    without: frozenset[int] = frozenset()  # silos that have no update, and say so to the others
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = Session(name="round 1", clients=tuple(range(1, self.n + 1)), threshold=self.threshold)
        self.everybody = set(self.session.clients)
        self.corrupt = set(range(self.n - self.colluders + 1, self.n + 1))
        self.honest = self.everybody - self.corrupt
        pairs = {number: new_identity() for number in self.session.clients}
        self.identities = {number: private for number, (private, _) in pairs.items()}
        public = {number: key for number, (_, key) in pairs.items()}
        self.clients = {}
        for number in self.session.clients:
            signing = {"identity": self.identities[number], "roster": public} if self.roster else {}
            has_update = number not in self.without
            self.clients[number] = Client(self.session, number, has_update=has_update, **signing)  # type: ignore[arg-type]

    def withholding(self) -> tuple[dict[int, set[int]], Lists]:
        """From whom the victim gets shares, and what each silo is told."""
        few = {VICTIM, *self.corrupt}
        few |= set(sorted(self.honest - few)[: self.threshold - len(few)])
        lists: Lists = {number: (set(self.everybody), set()) for number in self.honest}
        lists[VICTIM] = (set(few), set())
        for peer in sorted(few - self.corrupt - {VICTIM}):
            # The key of a peer needs threshold shares: whoever was told of the fewest losses is told of this one.
            told = sorted((len(lists[one][1]), one) for one in self.honest - {VICTIM, peer})
            for _, one in told[: self.threshold - self.colluders]:
                if len(lists[one][1]) < self.n - self.threshold:
                    lists[one][0].remove(peer)
                    lists[one][1].add(peer)
        return {VICTIM: few}, lists

    def splitting(self) -> tuple[dict[int, set[int]], Lists]:
        """That nothing is withheld, and what each silo is told."""
        half = sorted(self.honest - {VICTIM})[: (len(self.honest) + 1) // 2]
        lists: Lists = {number: (set(self.everybody), set()) for number in self.honest}
        for one in half:
            lists[one] = (self.everybody - {VICTIM}, {VICTIM})
        return {}, lists

    def sums(self, withheld: dict[int, set[int]], lists: Lists) -> list[set[int]]:
        """The sets of honest silos whose sums come out, whatever the server computes of all that it got.

        It adds up masked vectors, each any number of times. A vector whose own mask is not known is left out; so is one
        with an unknown mask that its peer left out; two with such a mask are added equally often.
        """
        answers = self.answers(withheld, lists)

        def known(part: str) -> set[int]:
            shares = [one for answer in answers for one in getattr(answer, part)]
            return {number for number in self.session.clients if shares.count(number) >= self.threshold}

        seeds, keys = known("seeds"), known("keys") | self.corrupt
        open_ = self.honest - keys
        masks = {one: (withheld.get(one, self.everybody) & open_) - {one} if one in open_ else set()
                 for one in self.honest}  # fmt: skip
        found: list[set[int]] = []
        left = set(self.honest)
        while left:
            group: set[int] = set()
            rim = {left.pop()}
            while rim:
                one = rim.pop()
                group.add(one)
                rim |= {other for other in masks[one] if one in masks[other]} - group
            left -= group
            if group <= seeds and all(one in masks[other] for one in group for other in masks[one]):
                found.append(group)
        return found

    def answers(self, withheld: dict[int, set[int]], lists: Lists) -> list[Unmasking]:
        """What the silos reveal, each asked to sign every list, its own first, and shown what was signed of its own."""
        server = Server(self.session)
        server.keys = {number: client.advertise() for number, client in self.clients.items()}
        routed = server.route({number: one.share(server.keys.values()) for number, one in self.clients.items()})
        for number, client in self.clients.items():
            boxes = {one: box for one, box in routed[number].items() if one in withheld.get(number, routed)}
            server.masked[number] = client.mask(NOTHING, boxes)
        told = {(frozenset(active), frozenset(dead)) for active, dead in lists.values()}
        signed: dict[tuple[frozenset[int], frozenset[int]], dict[int, bytes]] = {one: {} for one in told}
        for number, (active, dead) in lists.items() if self.roster else ():
            own = (frozenset(active), frozenset(dead))
            for one in (own, *sorted(told - {own}, key=str)):
                try:
                    signed[one][number] = self.clients[number].sign(*one)
                except DataError as error:
                    self.refusals.append(error.kind)
        found = []
        for number in self.corrupt:
            held = self.clients[number]._held.items()
            seeds, keys = ({peer: both[part] for peer, both in held} for part in (0, 1))
            found.append(Unmasking(number, seeds, keys))
        for number, (active, dead) in lists.items():
            try:
                statement = self.clients[number].statement(active, dead) if self.roster else b""
                theirs = dict.fromkeys(self.honest, bytes(64)) | signed[frozenset(active), frozenset(dead)]
                theirs |= {one: sign(self.identities[one], statement) for one in self.corrupt}
                found.append(self.clients[number].unmask(active, dead, theirs))
            except DataError as error:
                self.refusals.append(error.kind)
        return found


@pytest.mark.parametrize(("n", "threshold", "colluders"), [(5, 3, 0), (10, 6, 0), (20, 11, 0), (10, 7, 2), (20, 14, 6)])
def test_a_server_that_shows_each_silo_other_survivors_is_refused_and_without_a_roster_reads_a_vector(
    n: int, threshold: int, colluders: int
) -> None:
    server = IsolatingServer(n, threshold, colluders)
    assert colluders <= server.session.colluders
    assert server.sums(*server.withholding()) == []
    # Not one honest silo revealed a share: each refused, and signed no list but its own.
    assert server.refusals.count("lists not signed") == n - colluders and "signed already" in server.refusals
    trusting = IsolatingServer(n, threshold, colluders, roster=False)
    assert {VICTIM} in trusting.sums(*trusting.withholding())


@pytest.mark.parametrize(("n", "threshold"), [(5, 3), (7, 5), (10, 7), (20, 14)])
def test_the_number_of_colluders_that_is_promised_is_exact(n: int, threshold: int) -> None:
    """With one more two lists both get their signatures, and both secrets of a silo are known."""
    bound = 2 * threshold - n
    within, beyond = IsolatingServer(n, threshold, bound - 1), IsolatingServer(n, threshold, bound)
    assert within.session.colluders == bound - 1
    assert within.sums(*within.splitting()) == [within.honest - {VICTIM}]
    assert {VICTIM} in beyond.sums(*beyond.splitting())


@pytest.mark.parametrize(("n", "threshold", "colluders"), [(5, 3, 0), (5, 4, 2), (10, 7, 3), (10, 6, 1)])
def test_the_number_of_updates_that_is_promised_in_a_sum_is_exact(n: int, threshold: int, colluders: int) -> None:
    """Colluders say that they have one, each of them once."""
    everybody = set(range(1, n + 1))
    honest = sorted(everybody)[: n - colluders]
    for enough in (True, False):
        without = frozenset(honest[threshold - colluders - (not enough) :])
        server = IsolatingServer(n, threshold, colluders, without=without)
        assert colluders <= server.session.colluders
        found = server.sums({}, dict.fromkeys(honest, (everybody, set())))
        assert found == ([set(honest)] if enough else [])
        assert server.refusals == ([] if enough else ["too few updates"] * len(honest))


def anything(draw: np.random.Generator) -> tuple[IsolatingServer, list[set[int]]]:
    """A sum by a server that draws its lies, and the sets of honest silos whose sums it is left with."""
    n = int(draw.integers(4, 8))
    threshold = int(draw.integers(n // 2 + 1, n + 1))
    bound = Session(name="s", clients=tuple(range(1, n + 1)), threshold=threshold).colluders
    colluders = int(draw.integers(0, bound + 1))
    failing = draw.permutation(np.arange(1, n - colluders + 1))[: draw.integers(0, n - threshold + 2)]
    server = IsolatingServer(n, threshold, colluders, without=frozenset(failing.tolist()))
    everybody, honest = server.everybody, sorted(server.honest)

    def some(of: list[int], most: int) -> set[int]:
        return set(draw.permutation(of)[: draw.integers(0, most + 1)].tolist())

    lost = some(honest, n - threshold)
    withheld = {one: everybody - (some(honest, n - threshold) - {one}) for one in some(honest, 2)}
    lists = {}
    if (kind := draw.random()) < 0.4:
        return server, server.sums(*(server.withholding() if kind < 0.2 else server.splitting()))
    for one in honest:
        held, dead = withheld.get(one, everybody), lost if draw.random() < 0.9 else some(honest, n - threshold)
        dead = (dead & held) - {one}
        lists[one] = (held - dead, dead)
    return server, server.sums(withheld, lists)


@pytest.mark.costly
def test_whatever_a_server_draws_up_it_is_left_with_one_sum_of_enough_honest_silos_or_none() -> None:
    draw, seen = np.random.default_rng(0), []
    for _ in range(150):
        server, found = anything(draw)
        assert len(found) <= 1
        seen += [(len(one - server.without) - server.threshold + server.colluders, one & server.without)
                 for one in found]  # fmt: skip
    assert min(seen)[0] == 0  # the bound is met, and no sum is of fewer updates of honest silos
    assert len(seen) > 20 and any(failing for _, failing in seen)  # many of these sums do come out


def test_what_is_signed_changes_with_lists_keys_roster_threshold_and_every_fact_of_the_sum() -> None:
    def statement(*, name: str = "s", threshold: int = 3, keys: int = 0, lost: tuple[int, ...] = (), other: int = 0,
                  ) -> bytes:  # fmt: skip
        session = Session(name=name, clients=(1, 2, 3, 4), threshold=threshold)
        clients = {number: Client(session, number) for number in session.clients}
        for number, client in clients.items():
            client._seal, client._mask = bytes([number + keys]) * 32, bytes([50 + number]) * 32
        told = [client.advertise() for client in clients.values()]
        sealed = {number: client.share(told) for number, client in clients.items()}
        clients[1].mask(NOTHING, {number: sealed[number][1] for number in (2, 3, 4)})
        clients[1]._roster = {number: bytes([number + other]) * 32 for number in session.clients}
        return clients[1].statement(set(session.clients) - set(lost), lost)

    plan = SumPlan(run="r", round=1, attempt="a", weights="w", clients=(1, 2, 3))
    plans = [plan, replace(plan, round=2), *(replace(plan, **{name: "o"}) for name in ("run", "attempt", "weights"))]
    changes: list[dict[str, Any]] = [
        {}, {"threshold": 4}, {"keys": 9}, {"lost": (2,)}, {"lost": (3,)}, {"other": 1},
        *({"name": one.session(None).name} for one in plans),
    ]  # fmt: skip
    assert statement() == statement()
    assert len({statement(**change) for change in changes}) == len(changes)
