"""A server that tells each silo something else is left with nothing: with a roster, up to the promised colluders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from dataclasses import dataclass, field

from messages import MASKED, NAMES, START, Drifts, Masked, credentials

from lit_dpret.errors import DataError
from lit_dpret.federated.flower.payloads import bytes_of, bytes_record, tensors_record
from lit_dpret.federated.keys import SIGNATURE_BYTES, new_identity, sign
from lit_dpret.federated.secure_mean import FixedPoint
from lit_dpret.federated.secure_sum import Client, Server, Session, Unmasking, add_stream, pair_key
from lit_dpret.federated.silo_sum import SumPlan

SIGNED = replace(MASKED, roster=True)
NODES = range(10, 15)
BY_CHANCE = 5 / np.sqrt(4000)  # five standard deviations of a correlation of 4,000 pairs


# -- the protocol -------------------------------------------------------------------------------

WITHHELD = [(5, 3, 0), (10, 6, 0), (20, 11, 0), (10, 7, 2), (20, 14, 6)]
"""Silos, threshold and colluders with which a server that withholds shares reads a vector, if lists are not signed."""


@pytest.mark.parametrize(("n", "threshold", "colluders"), WITHHELD)
def test_a_server_that_shows_each_silo_other_survivors_is_refused_and_learns_nothing(
    n: int, threshold: int, colluders: int
) -> None:
    server = IsolatingServer(n, threshold, colluders)
    assert colluders <= server.session.colluders
    found = server.withhold()
    assert abs(server.correlation(found)) < BY_CHANCE
    # Not one honest silo revealed a share: each refused, and signed no list but its own.
    assert server.refusals.count("lists not signed") == n - colluders and "signed already" in server.refusals


@pytest.mark.parametrize(("n", "threshold", "colluders"), WITHHELD[::2])
def test_without_a_roster_the_same_server_reads_the_vector_as_the_docs_say(
    n: int, threshold: int, colluders: int
) -> None:
    server = IsolatingServer(n, threshold, colluders, roster=False)
    assert np.abs(server.withhold() - server.vectors[VICTIM]).max() < 1e-6


@pytest.mark.parametrize(("n", "threshold"), [(5, 3), (7, 5), (10, 7), (20, 14)])
def test_the_number_of_colluders_that_is_promised_is_exact(n: int, threshold: int) -> None:
    """With one more two lists both get their signatures, and both secrets of a silo are known."""
    bound = 2 * threshold - n
    within, beyond = IsolatingServer(n, threshold, bound - 1), IsolatingServer(n, threshold, bound)
    assert within.session.colluders == bound - 1
    assert abs(within.correlation(within.split())) < BY_CHANCE
    assert np.abs(beyond.split() - beyond.vectors[VICTIM]).max() < 1e-6


def anything(draw: np.random.Generator) -> tuple[IsolatingServer, list[set[int]]]:
    """A sum by a server that draws its lies, and the sets of honest silos whose sums it is left with."""
    n = int(draw.integers(4, 8))
    threshold = int(draw.integers(n // 2 + 1, n + 1))
    bound = Session(name="s", clients=tuple(range(1, n + 1)), threshold=threshold).colluders
    colluders = int(draw.integers(0, bound + 1))
    failing = draw.permutation(np.arange(1, n - colluders + 1))[: draw.integers(0, n - threshold + 2)]
    server = IsolatingServer(n, threshold, colluders, without=frozenset(failing.tolist()))
    everybody, honest = set(server.session.clients), sorted(server.honest)

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


def test_whatever_a_server_draws_up_it_is_left_with_one_sum_of_enough_honest_silos_or_none() -> None:
    draw, seen = np.random.default_rng(0), []
    for _ in range(150):
        server, found = anything(draw)
        assert len(found) <= 1
        seen += [(len(one - server.without) - server.threshold + server.colluders, one & server.without)
                 for one in found]  # fmt: skip
    assert min(seen)[0] == 0  # the bound is met, and no sum is of fewer updates of honest silos
    assert len(seen) > 20 and any(failing for _, failing in seen)  # many of these sums do come out


def test_what_is_signed_changes_with_lists_keys_roster_threshold_and_sum() -> None:
    def statement(*, name: str = "s", threshold: int = 3, keys: int = 0, lost: tuple[int, ...] = (), other: int = 0,
                  ) -> bytes:  # fmt: skip
        session = Session(name=name, clients=(1, 2, 3, 4), threshold=threshold)
        clients = {number: Client(session, number) for number in session.clients}
        for number, client in clients.items():
            client._seal, client._mask = bytes([number + keys]) * 32, bytes([50 + number]) * 32
        told = [client.advertise() for client in clients.values()]
        sealed = {number: client.share(told) for number, client in clients.items()}
        clients[1].mask(np.zeros(3, dtype=np.uint32), {number: sealed[number][1] for number in (2, 3, 4)})
        clients[1]._roster = {number: bytes([number + other]) * 32 for number in session.clients}
        return clients[1].statement(set(session.clients) - set(lost), lost)

    assert statement() == statement()
    changes: list[dict[str, Any]] = [
        {"name": "t"}, {"threshold": 4}, {"keys": 9}, {"lost": (2,)}, {"lost": (3,)}, {"other": 1}
    ]  # fmt: skip
    assert len({statement(), *(statement(**change) for change in changes)}) == len(changes) + 1


def test_a_silo_shares_its_secrets_once() -> None:
    server = IsolatingServer(5, 3)
    keys = [client.advertise() for client in server.clients.values()]
    server.clients[1].share(keys)
    with pytest.raises(DataError):
        server.clients[1].share(keys)


def test_a_sum_of_fewer_than_the_roster_is_refused_since_the_server_would_choose_them() -> None:
    session = Session(name="s", clients=(1, 4, 5))
    server = IsolatingServer(5, 4)
    with pytest.raises(DataError, match="roster"):
        Client(session, 1, identity=server.identities[1], roster=server.clients[1]._roster)


# -- by messages --------------------------------------------------------------------------------


class Meddling:
    """A server that asks five real silos, act by act, for what it likes."""

    def __init__(self, root: Path, *, withheld: dict[int, set[int]] | None = None, **settings: Any) -> None:
        settings = {"settings": SIGNED, "keys": credentials(), **settings}
        self.run = Masked(root, **settings).forget_between_messages()
        start = {"weights": tensors_record(START)}
        told: dict[str, Any] = {"round": 0, "clients": [1, 2, 3, 4, 5], "attempt": "a"}
        keys = {node: self.run.ask(node, "train.secagg_setup", start, number=node - 9, **told) for node in NODES}
        listed = {number: value for reply in keys.values()
                  for number, value in bytes_of(reply.content, "keys", "a silo").items()}  # fmt: skip
        shared = {node - 9: bytes_of(self.ask(node, "share", {"keys": bytes_record(listed)}).content, "shares", "")
                  for node in NODES}  # fmt: skip
        for node in NODES:
            number = node - 9
            senders = (withheld or {}).get(number, {1, 2, 3, 4, 5}) - {number}
            boxes = bytes_record({one: shared[one][number] for one in senders})
            assert not self.ask(node, "masked", {"shares": boxes}).has_error()

    def ask(self, node: int, act: str, content: dict[str, Any] | None = None, **facts: Any) -> Any:
        return self.run.ask(node, f"train.secagg_{act}", content, attempt="a", **facts)

    def lists(self, node: int, act: str, active: set[int], content: dict[str, Any] | None = None,
              dead: set[int] | None = None) -> Any:  # fmt: skip
        lost = {"dead": sorted(dead)} if dead else {}
        return self.ask(node, act, content, active=sorted(active), **lost)


def test_by_messages_a_server_that_withholds_shares_and_varies_the_lists_is_refused_by_every_silo(
    tmp_path: Path,
) -> None:
    everybody = {1, 2, 3, 4, 5}
    server = Meddling(tmp_path, withheld={1: {1, 2, 3}})
    lost = {1: set(), 2: {3}, 3: {2}, 4: {2, 3}, 5: {2, 3}}  # the keys of 2 and 3, from three silos each
    active = {number: ({1, 2, 3} if number == 1 else everybody - lost[number]) for number in lost}
    signatures = {}
    for number in lost:
        reply = server.lists(number + 9, "sign", active[number], dead=lost[number])
        signatures |= bytes_of(reply.content, "signatures", "a silo", size=SIGNATURE_BYTES)
    for number in lost:
        signed = {"signatures": bytes_record(signatures)}
        reply = server.lists(number + 9, "unmask", active[number], signed, dead=lost[number])
        assert reply.error.reason == "DataError (lists not signed)"
        assert server.lists(number + 9, "unmask", active[number], dead=lost[number]).has_error()


def test_a_silo_signs_one_list_of_a_round_also_in_another_process_and_another_attempt(tmp_path: Path) -> None:
    server = Meddling(tmp_path)
    first = server.lists(10, "sign", {1, 2, 3, 4}, dead={5})
    again = server.lists(10, "sign", {1, 2, 3, 4}, dead={5})
    assert bytes_of(first.content, "signatures", "") == bytes_of(again.content, "signatures", "")
    for act in ("sign", "unmask"):
        assert server.lists(10, act, {1, 2, 3, 4, 5}).has_error()
    told = {"round": 0, "clients": [1, 2, 3, 4, 5], "attempt": "b", "number": 1}
    reply = server.run.ask(10, "train.secagg_setup", {"weights": tensors_record(START)}, **told)
    assert reply.error.reason == "DataError (agreed already)"


def test_what_a_silo_has_signed_is_on_its_disk_before_the_signature_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Meddling(tmp_path)

    def dies(*_: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Client, "sign", dies)
        with pytest.raises(KeyboardInterrupt):
            server.lists(10, "sign", {1, 2, 3, 4}, dead={5})
    assert server.lists(10, "sign", {1, 2, 3, 4, 5}).error.reason == "DataError (agreed already)"
    assert not server.lists(10, "sign", {1, 2, 3, 4}, dead={5}).has_error()


def test_enough_signatures_over_one_list_unmask_though_one_is_false(tmp_path: Path) -> None:
    server, everybody = Meddling(tmp_path), {1, 2, 3, 4, 5}
    signatures = {}
    for node in NODES:
        signatures |= bytes_of(server.lists(node, "sign", everybody).content, "signatures", "")
    signatures[5] = bytes(SIGNATURE_BYTES)
    for good in ({1, 2, 5}, {1, 2, 3, 5}):
        content = {"signatures": bytes_record({number: signatures[number] for number in good})}
        assert server.lists(10, "unmask", everybody, content).has_error() == (len(good) == 3)


def test_a_plan_of_the_server_is_part_of_what_is_signed() -> None:
    plan = SumPlan(run="r", round=1, attempt="a", weights="w", clients=(1, 2, 3))
    names = {replace(plan, **{name: "other" if name != "round" else 2}).session(None).name
             for name in ("run", "round", "attempt", "weights")}  # fmt: skip
    assert len(names | {plan.session(None).name}) == 5


# -- silos without an update ----------------------------------------------------------------------


def failing(*names: str) -> type[Drifts]:
    """Silos of which some cannot train."""

    class Fails(Drifts):
        def train_shared(self, weights: Any, number: int) -> dict[str, torch.Tensor]:
            if self.name in names:
                raise MemoryError
            return super().train_shared(weights, number)

    return Fails


@pytest.mark.parametrize(("names", "lost", "roster"), [
    (NAMES[1:], set(), True), (NAMES[:3], {5}, True), ((NAMES[0], NAMES[2], NAMES[4]), {5}, True),
    (NAMES[1:], {5}, False), (NAMES[:3], set(), False),
])  # fmt: skip
def test_a_server_that_withholds_shares_does_not_learn_which_silos_have_no_update(
    names: tuple[str, ...], lost: set[int], roster: bool, tmp_path: Path
) -> None:
    """It decides whose shares a silo gets, and so whom a silo would count that asked for enough updates before."""
    everybody = {1, 2, 3, 4, 5}
    settings = {} if roster else {"settings": MASKED, "keys": {}}
    server = Meddling(tmp_path, silo=failing(*names), withheld={1: {1, 2, 3}, 5: {3, 4, 5}}, **settings)
    lists = {1: {1, 2, 3}, 2: everybody - lost, 3: everybody - lost, 4: everybody - lost, 5: {3, 4, 5}}
    dead = {one: lost if one in (2, 3, 4) else set() for one in lists}
    signatures = {}
    for number in lists if roster else ():
        reply = server.lists(number + 9, "sign", lists[number], dead=dead[number])
        signatures |= bytes_of(reply.content, "signatures", "a silo", size=SIGNATURE_BYTES)
    signed = {"signatures": bytes_record(signatures)} if roster else {}
    for number in (2, 3, 4):  # the one list with enough signatures
        reply = server.lists(number + 9, "unmask", lists[number], signed, dead=dead[number])
        assert reply.error.reason == "DataError (too few updates)"
        again = server.lists(number + 9, "unmask", everybody - {5} if not lost else everybody, signed)
        assert again.error.reason == "DataError (no such sum)"
        told = {"round": 0, "clients": sorted(everybody), "attempt": "b", "number": number}
        begun = server.run.ask(number + 9, "train.secagg_setup", {"weights": tensors_record(START)}, **told)
        assert begun.error.reason == "DataError (agreed already)"


@pytest.mark.parametrize(("n", "threshold", "colluders"), [(5, 3, 0), (5, 4, 2), (10, 7, 3), (10, 6, 1)])
def test_the_number_of_updates_that_is_promised_in_a_sum_is_exact(n: int, threshold: int, colluders: int) -> None:
    """Colluders say that they have one, each of them once."""
    assert colluders <= Session(name="s", clients=tuple(range(1, n + 1)), threshold=threshold).colluders
    everybody = set(range(1, n + 1))
    honest = sorted(everybody)[: n - colluders]
    for enough in (True, False):
        without = frozenset(honest[threshold - colluders - (not enough) :])
        server = IsolatingServer(n, threshold, colluders, without=without)
        found = server.sums({}, dict.fromkeys(honest, (everybody, set())))
        assert found == ([set(honest)] if enough else [])
        assert server.refusals == ([] if enough else ["too few updates"] * len(honest))


def test_a_silo_says_whether_it_has_an_update_in_a_box_of_the_same_length(tmp_path: Path) -> None:
    server = Meddling(tmp_path, silo=failing(*NAMES[:2]))
    sizes = {len(box) for content in server.run.grid.of("train.secagg_share").values()
             for box in bytes_of(content, "shares", "a silo").values()}  # fmt: skip
    assert len(sizes) == 1


# -- a server that draws up lists


VICTIM = 1
Lists = dict[int, tuple[set[int], set[int]]]
"""What each silo is told: who is active, and who was lost."""


@dataclass
class IsolatingServer:
    """One sum of ``n`` silos, the last ``colluders`` of which do as the server says.

    Two ways to the victim's vector, the silos' messages else as the protocol has them:

    - `withhold`: the victim gets as few shares as it takes, so that it masks with few; all others get all shares, and
      are told in turn that a few of the victim's peers were lost, each a few others, until their masks are known.
    - `split`: half of the silos are told that the victim is there, and the others that it was lost, so that both of
      its secrets are known. It needs two lists with ``threshold`` signatures each.
    """

    n: int
    threshold: int
    colluders: int = 0
    seed: int = 0
    roster: bool = True
    without: frozenset[int] = frozenset()  # silos that have no update, and say so to the others
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        self.fixed = FixedPoint(limit=8.0, clients=self.n)
        self.session = Session(name="round 1", clients=tuple(range(1, self.n + 1)), threshold=self.threshold)
        self.corrupt = set(range(self.n - self.colluders + 1, self.n + 1))
        self.honest = set(self.session.clients) - self.corrupt
        pairs = {number: new_identity() for number in self.session.clients}
        self.identities = {number: private for number, (private, _) in pairs.items()}
        public = {number: key for number, (_, key) in pairs.items()}
        self.vectors = {number: draw.uniform(-8, 8, 4000) for number in self.session.clients}
        self.clients = {
            number: Client(self.session, number, identity=self.identities[number], roster=public,
                           has_update=number not in self.without)
            if self.roster
            else Client(self.session, number, has_update=number not in self.without)
            for number in self.session.clients
        }  # fmt: skip

    def withhold(self) -> np.ndarray:
        """What the server makes of the victim's vector; see the class."""
        return self._play(*self.withholding())

    def withholding(self) -> tuple[dict[int, set[int]], Lists]:
        """From whom the victim gets shares, and what each silo is told."""
        few = {VICTIM, *self.corrupt}
        few |= set(sorted(self.honest - few)[: self.threshold - len(few)])
        everybody = set(self.session.clients)
        lists: Lists = {number: (set(everybody), set()) for number in self.honest}
        lists[VICTIM] = (set(few), set())
        for peer in sorted(few - self.corrupt - {VICTIM}):
            # The key of a peer needs threshold shares: whoever was told of the fewest losses is told of this one.
            told = sorted((len(lists[one][1]), one) for one in self.honest - {VICTIM, peer})
            for _, one in told[: self.threshold - self.colluders]:
                if len(lists[one][1]) < self.n - self.threshold:
                    lists[one][0].remove(peer)
                    lists[one][1].add(peer)
        return {VICTIM: few}, lists

    def split(self) -> np.ndarray:
        """What the server makes of the victim's vector; see the class."""
        return self._play(*self.splitting())

    def splitting(self) -> tuple[dict[int, set[int]], Lists]:
        """That nothing is withheld, and what each silo is told."""
        everybody = set(self.session.clients)
        half = sorted(self.honest - {VICTIM})[: (len(self.honest) + 1) // 2]
        lists: Lists = {number: (set(everybody), set()) for number in self.honest}
        for one in half:
            lists[one] = (everybody - {VICTIM}, {VICTIM})
        return {}, lists

    def sums(self, withheld: dict[int, set[int]], lists: Lists) -> list[set[int]]:
        """The sets of honest silos whose sums come out, whatever the server computes of all that it got.

        It adds up masked vectors, each so and so often. A vector whose own mask is not known is left out; so is one
        with a mask that is not known and that the other left away; two with such a mask are added equally often.
        """
        answers = self._answers_of(withheld, lists)

        def known(part: str) -> set[int]:
            shares = [one for answer in answers for one in getattr(answer, part)]
            return {number for number in self.session.clients if shares.count(number) >= self.threshold}

        seeds, keys = known("seeds"), known("keys") | self.corrupt
        open_ = self.honest - keys
        masks = {one: (withheld.get(one, set(self.session.clients)) & open_) - {one} if one in open_ else set()
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

    def correlation(self, found: np.ndarray) -> float:
        """Of what the server made and the victim's vector."""
        return float(np.corrcoef(found, self.vectors[VICTIM])[0, 1])

    def _play(self, withheld: dict[int, set[int]], lists: Lists) -> np.ndarray:
        return self._best_guess(self._answers_of(withheld, lists), withheld.get(VICTIM, set(self.session.clients)))

    def _answers_of(self, withheld: dict[int, set[int]], lists: Lists) -> list[Unmasking]:
        server = self.server = Server(self.session)
        server.keys = {number: client.advertise() for number, client in self.clients.items()}
        routed = server.route({number: one.share(server.keys.values()) for number, one in self.clients.items()})
        for number, client in self.clients.items():
            boxes = {one: box for one, box in routed[number].items() if one in withheld.get(number, routed)}
            server.masked[number] = client.mask(self.fixed.encode(self.vectors[number])[0], boxes)
        return self._answers(lists)

    def _answers(self, lists: Lists) -> list[Unmasking]:
        """What the silos reveal, each asked to sign every list, its own first, and shown what was signed of its own."""
        told = {(frozenset(active), frozenset(dead)) for active, dead in lists.values()}
        signed: dict[tuple[frozenset[int], frozenset[int]], dict[int, bytes]] = {one: {} for one in told}
        for number, (active, dead) in lists.items() if self.roster else ():
            own = (frozenset(active), frozenset(dead))
            for one in (own, *sorted(told - {own}, key=str)):
                try:
                    signed[one][number] = self.clients[number].sign(*one)
                except DataError as error:
                    self.refusals.append(error.kind)
        found = [
            Unmasking(number, {peer: held[0] for peer, held in self.clients[number]._held.items()},
                      {peer: held[1] for peer, held in self.clients[number]._held.items()})
            for number in self.corrupt
        ]  # fmt: skip
        for number, (active, dead) in lists.items():
            try:
                statement = self.clients[number].statement(active, dead) if self.roster else b""
                theirs = dict.fromkeys(self.honest, bytes(64)) | signed[frozenset(active), frozenset(dead)]
                theirs |= {one: sign(self.identities[one], statement) for one in self.corrupt}
                found.append(self.clients[number].unmask(active, dead, theirs))
            except DataError as error:
                self.refusals.append(error.kind)
        return found

    def _best_guess(self, answers: list[Unmasking], peers: set[int]) -> np.ndarray:
        """The victim's masked vector without every mask that the server can find out about."""
        server, by = self.server, {one.client: one for one in answers}
        total = server.masked[VICTIM].copy()

        def secret(client: int, part: str) -> bytes | None:
            try:
                return server._joined(by, client, part)
            except DataError:
                return None

        def own(client: int) -> bytes | None:
            return self.clients[client]._mask if client in self.corrupt else secret(client, "keys")

        if (seed := secret(VICTIM, "seeds")) is not None:
            add_stream(total, seed, subtract=True)
        whole = secret(VICTIM, "keys")
        for peer in peers - {VICTIM}:
            key, other = (whole, peer) if whole is not None else (own(peer), VICTIM)
            if key is not None:
                stream = pair_key(self.session, key, server.keys[other].mask, VICTIM, peer)
                add_stream(total, stream, subtract=peer > VICTIM)
        return self.fixed.decode(total)
