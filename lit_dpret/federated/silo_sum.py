"""A silo's part in the secure sum of one round, stored on its disk between messages.

A deployed silo handles each message in a new process. Its secrets of a round are in its state folder from `begin` until
the sum is unmasked or abandoned (`forget`). **An update enters one sum only**: two sums of a round over different silos
would differ by single updates. So a silo agrees to one list per round, and records it before it signs or reveals
anything.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import check_norm, client_weights
from lit_dpret.federated.keys import Credentials
from lit_dpret.federated.secure_mean import Values, vector_of, words_for
from lit_dpret.federated.secure_sum import Client, Keys, Session, Unmasking, Words, threshold_for
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.storage import keep_once, save_json, save_tensors
from lit_dpret.progress import tell_here


@dataclass(frozen=True, kw_only=True)
class SumPlan:
    """The server's facts at the start of a sum; all its keys and signatures cover them."""

    run: str  # digest of the settings
    round: int  # of stage 1
    attempt: str  # drawn by the server, so that a round that is started again is a different sum
    weights: str  # fingerprint of the global weights from which all clients start
    clients: tuple[int, ...]  # the numbers of all clients; with a roster, of all clients on it

    def session(self, least: int | None) -> Session:
        name = f"stage 1, round {self.round}, attempt {self.attempt} of run {self.run} from {self.weights}"
        try:
            return Session(name=name, clients=self.clients, threshold=threshold_for(least, len(self.clients)))
        except ConfigurationError as error:
            raise DataError(str(error), kind="too few clients") from error


def _one_at_a_time(act: Callable[..., Any]) -> Callable[..., Any]:
    """Serialise acts on a silo's state folder across all processes."""

    @wraps(act)
    def alone(self: SiloSum, *args: Any, **settings: Any) -> Any:
        folder = self._secrets.parent.parent
        folder.mkdir(parents=True, exist_ok=True)
        # Without the lock, a server that sends one message several times at once would get answers from the same state.
        with open(folder / "sum.lock", "ab") as file:
            if sys.platform != "win32":
                import fcntl

                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            return act(self, *args, **settings)

    return alone


class SiloSum:
    """One silo's side of the secure sum, phase by phase.

    Guarantees:
        - Secrets are on the disk during the round, readable only by the silo's owner. They are deleted before the
          answer that ends the round is sent.
        - It signs one list of survivors per round and unmasks it once, also after a restart, and only if enough of
          them have an update. A server learns that too few have one for that list only; any other refusal changes
          nothing.
        - With ``federated.roster`` it takes part only in sums of the whole roster, under the numbers of the roster,
          whatever the server says, and reveals shares only for a list that enough silos have signed.
    """

    def __init__(self, state: Path, settings: PddAs2, credentials: Credentials | None = None) -> None:
        self.settings, self.credentials = settings, credentials
        self._secrets = state / "sum" / "secrets.json"
        self._words = state / "sum" / "words.safetensors"
        self._agreed = state / "sums_agreed"

    @_one_at_a_time
    def begin(
        self, plan: SumPlan, number: int, start: Mapping[str, Tensor], update: Mapping[str, Tensor] | None, *,
        examples: int,
    ) -> Keys:  # fmt: skip
        """Phase 1: store the vector of this round and advertise keys; abandon an earlier sum.

        If training failed (``update`` is None) or the update may not be sent, the vector is all zeros, weight included.
        The mean is then that of the others, and the server does not learn who has no update. The other silos do learn
        it, and unmask no sum in which too few have one.
        """
        self.forget()
        # Whichever attempt it belonged to: two sums of a round over different silos differ by single updates.
        if self._list_of(plan.round).is_file():
            raise _agreed_already(plan.round)
        vector = self._vector(plan.round, start, update, examples)
        client = self._client(plan, number, has_update=bool(vector[-1]))
        words = words_for(self.settings.update_limit, len(plan.clients)).encode(vector)
        save_tensors({"words": torch.from_numpy(words.view(np.int32))}, self._words)
        self._keep(plan, client)
        return client.advertise()

    def _vector(
        self, number: int, start: Mapping[str, Tensor], update: Mapping[str, Tensor] | None, examples: int
    ) -> Values:
        stage, limit = self.settings.stage1, self.settings.update_limit
        nothing = np.zeros(1 + sum(value.numel() for value in start.values()))
        if update is None:
            return nothing
        weight = client_weights({"": examples}, stage.weighting, n_hat=stage.n_hat)[""]
        try:
            check_norm("this silo's update", start, update, self.settings.update_norm)
            vector, cut = vector_of(start, update, weight, limit)
        except DataError as error:
            tell_here(f"Kept on this machine: round {number}: nothing is added to the sum: {error}")
            return nothing
        if cut:
            tell_here(
                f"Kept on this machine: round {number}: {cut} of {len(vector) - 1} changes were beyond "
                f"federated.update_limit={limit:g} and were clipped"
            )
        return vector

    @_one_at_a_time
    def share(self, attempt: str, keys: Iterable[Keys]) -> dict[int, bytes]:
        plan, client = self._known(attempt)
        found = client.share(keys)
        self._keep(plan, client)
        return found

    @_one_at_a_time
    def mask(self, attempt: str, sealed: Mapping[int, bytes]) -> Words:
        """Phase 3: return the masked vector, once."""
        plan, client = self._known(attempt)
        if not self._words.is_file():
            raise DataError(
                "This silo has already sent its vector in this sum, and sends it once.", kind="bad protocol"
            )
        words: Words = load_file(self._words)["words"].numpy().view(np.uint32)
        found = client.mask(words, sealed)
        self._keep(plan, client)
        self._words.unlink()
        return found

    @_one_at_a_time
    def sign(self, attempt: str, active: Iterable[int], dead: Iterable[int]) -> bytes:
        plan, client = self._known(attempt)
        alive, lost = set(active), set(dead)
        self._agree(plan, client.statement(alive, lost))
        found = client.sign(alive, lost)
        self._keep(plan, client)
        return found

    @_one_at_a_time
    def unmask(
        self, attempt: str, active: Iterable[int], dead: Iterable[int], signatures: Mapping[int, bytes] | None = None
    ) -> Unmasking:
        """Phase 5: reveal the shares that unmask the sum, and delete the silo's secrets of this round.

        A sum in which too few silos have an update is refused, and ends the same way.
        """
        plan, client = self._known(attempt)
        alive, lost = set(active), set(dead)
        statement = client.statement(alive, lost)
        try:
            return client.unmask(alive, lost, signatures)
        finally:
            if client.done:
                # On disk before any share leaves: a process that is killed in between agrees to no second list.
                self._agree(plan, statement)
                self.forget()

    def forget(self) -> None:
        for path in (self._secrets, self._words):
            path.unlink(missing_ok=True)

    def _client(self, plan: SumPlan, number: int, *, has_update: bool = False) -> Client:
        session = plan.session(self.settings.sum_threshold)
        one = self.credentials
        if one is None:
            return Client(session, number, has_update=has_update)
        if number != one.number:
            raise DataError("The server's number for this silo is not that of the roster.", kind="bad protocol")
        return Client(session, number, identity=one.identity, roster=one.by_number, has_update=has_update)

    def _keep(self, plan: SumPlan, client: Client) -> None:
        save_json(self._secrets, {"plan": asdict(plan), "number": client.number, "client": client.to_state()})

    def _known(self, attempt: str) -> tuple[SumPlan, Client]:
        if self._secrets.is_file():
            facts = json.loads(self._secrets.read_text(encoding="utf-8"))
            plan = SumPlan(**{**facts["plan"], "clients": tuple(facts["plan"]["clients"])})
            if plan.attempt == attempt:
                return plan, self._client(plan, facts["number"]).go_on(facts["client"])
        raise DataError("This silo has no secrets of this sum: it was unmasked or abandoned.", kind="no such sum")

    def _list_of(self, number: int) -> Path:
        """Return the file that records to which list of a round the silo has agreed."""
        return self._agreed / f"round-{number:03}"

    def _agree(self, plan: SumPlan, statement: bytes) -> None:
        digest = hashlib.sha256(statement).hexdigest()
        if keep_once(self._list_of(plan.round), digest) != digest:
            raise _agreed_already(plan.round)


def _agreed_already(number: int) -> DataError:
    return DataError(
        f"This silo has already agreed to a list of round {number}, and agrees once: two sums of one round could "
        "differ by a single update.",
        kind="agreed already",
    )
