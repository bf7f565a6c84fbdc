"""A server that shows each silo lists of its own, to be left with the vector of one; imported by path, not a test."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lit_dpret.errors import DataError
from lit_dpret.federated.keys import new_identity, sign
from lit_dpret.federated.secure_mean import FixedPoint
from lit_dpret.federated.secure_sum import Client, Server, Session, Unmasking, add_stream, pair_key

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
