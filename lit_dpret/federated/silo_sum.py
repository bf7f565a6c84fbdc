"""A silo's part in the secure sum of one round, on its disk between one message and the next.

A deployed silo runs each message in a new process, so its secrets of a round have to be somewhere. They are in one
folder of its state, readable by its owner alone, from `begin` until the sum is unmasked, a new one begins, or the
server goes on to something else (`forget`). A deleted file may still lie on the medium: that is the disk's affair.

**One update is in one sum.** Two sums of the same round over different silos would differ by single updates. So a
silo answers the last act of a round once, whatever sum it belongs to, and remembers that beyond the round's life.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import client_weights
from lit_dpret.federated.credentials import Credentials
from lit_dpret.federated.fixed_point import Words
from lit_dpret.federated.secure_mean import vector_of, words_for
from lit_dpret.federated.secure_sum import Client, Keys, Session, Unmasking, threshold_for
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.storage import save_json, save_tensors

log = logging.getLogger("lit_dpret.federated")


@dataclass(frozen=True, kw_only=True)
class SumPlan:
    """What the server says of a sum when it begins; part of every key and signature of it.

    Args:
        run: Digest of the settings.
        round: Of stage 1.
        attempt: Drawn by the server, so that a round that is begun again is another sum.
        weights: Fingerprint of the global weights that all begin with.
        clients: Everybody's number.
    """

    run: str
    round: int
    attempt: str
    weights: str
    clients: tuple[int, ...]

    def session(self, least: int | None) -> Session:
        """The sum, with the threshold that follows from the settings (``sum_threshold``).

        Raises:
            DataError: So few silos, or such a threshold, would protect nobody.
        """
        name = f"stage 1, round {self.round}, attempt {self.attempt} of run {self.run} from {self.weights}"
        try:
            return Session(name=name, clients=self.clients, threshold=threshold_for(least, len(self.clients)))
        except ConfigurationError as error:
            raise DataError(str(error), kind="too few clients") from error


class SiloSum:
    """One silo's side, act by act.

    Guarantees:
        - Secrets are on the disk while the round lives, for the owner of the silo alone, and are deleted before the
          answer that ends it is given.
        - It unmasks each round once; what it refuses changes nothing.
        - Under ``federated.roster`` it takes part with silos of the roster alone, under the numbers that this gives
          them, whatever the server says.

    Args:
        state: The silo's state folder.
        settings: Of the run.
        credentials: With ``federated.roster=true``.
    """

    def __init__(self, state: Path, settings: PddAs2, credentials: Credentials | None = None) -> None:
        self.settings, self.credentials = settings, credentials
        self._secrets = state / "sum" / "secrets.json"
        self._words = state / "sum" / "words.safetensors"
        self._unmasked = state / "sums_unmasked.json"

    def begin(
        self, plan: SumPlan, number: int, start: Mapping[str, Tensor], update: Mapping[str, Tensor], *, examples: int
    ) -> Keys:
        """Act 1: keep the vector of this round, and advertise keys; a sum that was begun before is given up.

        Args:
            plan: Of the server.
            number: This silo's, as the server says.
            start: The global weights.
            update: The silo's weights after the round.
            examples: Its train queries, for its weight; they go under the masks alone.

        Raises:
            DataError: The silo has unmasked this round already, is not who the server says, or sent no numbers.
        """
        self.forget()
        self._once(plan.round)
        stage = self.settings.stage1
        weight = client_weights({"": examples}, stage.weighting, n_hat=stage.n_hat)[""]
        vector, cut = vector_of(start, update, weight, self.settings.update_limit)
        if cut:
            log.warning("round %d: %d of %d changes were beyond federated.update_limit=%g and were cut",
                        plan.round, cut, len(vector) - 1, self.settings.update_limit)  # fmt: skip
        words, _ = words_for(self.settings.update_limit, len(plan.clients)).encode(vector)
        client = self._client(plan, number)
        save_tensors({"words": torch.from_numpy(words.view(np.int32))}, self._words)
        self._keep(plan, client)
        return client.advertise()

    def share(self, attempt: str, keys: Iterable[Keys]) -> dict[int, bytes]:
        """Act 2: sealed shares of the silo's secrets, by receiver."""
        plan, client = self._known(attempt)
        found = client.share(keys)
        self._keep(plan, client)
        return found

    def mask(self, attempt: str, sealed: Mapping[int, bytes]) -> Words:
        """Act 3: the vector under its masks, once."""
        plan, client = self._known(attempt)
        words: Words = load_file(self._words)["words"].numpy().view(np.uint32)
        found = client.mask(words, sealed)
        self._keep(plan, client)
        self._words.unlink()
        return found

    def unmask(self, attempt: str, active: Iterable[int], dead: Iterable[int]) -> Unmasking:
        """Act 4: shares of what takes the masks off the sum; the silo's secrets of this round are gone after it."""
        plan, client = self._known(attempt)
        self._once(plan.round)
        found = client.unmask(active, dead)
        save_json(self._unmasked, {**self._done(), plan.attempt: plan.round})
        self.forget()
        return found

    def forget(self) -> None:
        """Delete what is left of a sum."""
        for path in (self._secrets, self._words):
            path.unlink(missing_ok=True)

    def _client(self, plan: SumPlan, number: int) -> Client:
        session = plan.session(self.settings.sum_threshold)
        one = self.credentials
        if one is None:
            return Client(session, number)
        if number != one.number or not set(plan.clients) <= set(one.by_number):
            raise DataError(
                "The server's numbers are not those of the roster: it counts somebody who is not on it.",
                kind="bad protocol",
            )
        return Client(session, number, identity=one.identity, roster=one.by_number)

    def _keep(self, plan: SumPlan, client: Client) -> None:
        save_json(self._secrets, {"plan": asdict(plan), "number": client.number, "client": client.to_state()})

    def _known(self, attempt: str) -> tuple[SumPlan, Client]:
        if self._secrets.is_file():
            facts = json.loads(self._secrets.read_text(encoding="utf-8"))
            plan = SumPlan(**{**facts["plan"], "clients": tuple(facts["plan"]["clients"])})
            if plan.attempt == attempt:
                return plan, self._client(plan, facts["number"]).go_on(facts["client"])
        if attempt in self._done():
            self._once(self._done()[attempt])
        raise DataError(
            "This silo has no secrets of the sum that the server names: it was unmasked, or given up.",
            kind="no such sum",
        )

    def _done(self) -> dict[str, int]:
        """The round of every sum that this silo has unmasked, by its attempt."""
        if not self._unmasked.is_file():
            return {}
        found: dict[str, int] = json.loads(self._unmasked.read_text(encoding="utf-8"))
        return found

    def _once(self, number: int) -> None:
        if number in self._done().values():
            raise DataError(
                f"This silo has unmasked round {number} already, and does so once: two sums of one round could differ "
                "by a single update.",
                kind="unmasked already",
            )
