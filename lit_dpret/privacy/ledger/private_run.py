"""One private run across interruptions: its ledger, its streams, and its current attempt.

An *attempt* is a stretch of a run with its own noise and coins. A run continues in its attempt only if the due step can
be repeated bit by bit. Otherwise the next attempt begins and repeated steps are charged again: the same noise on two
sums would let anyone subtract them. States are functions of released updates and are hashed openly; a clipped sum gets
a keyed tag.
"""

from __future__ import annotations

import hashlib
import secrets as random_secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_dpret.errors import ResumeError, schema_problem
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.run_ledger import (
    SECRET_CHANGED,
    Key,
    PrivacyLedger,
    counted_in,
    events_of,
    ledger_identity,
    plans_of,
)
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import EVOLUTION, HISTOGRAM


def _bytes(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    for name, tensor in tensors:
        yield f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode()
        flat = tensor.detach().cpu().to_dense().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data if flat.numel() else b""


def state_hash(module: nn.Module, optimizer: torch.optim.Optimizer, *, summed: tuple[int, int] = (1, 1)) -> str:
    """Return the SHA-256 of all parameters, buffers and optimizer tensors, and of rounding settings.

    Anything else that ``get_extra_state`` returns is left out: if it changes a step, it changes the tag of the step's
    sum.

    ``summed``: the maximum number of units that are summed at once, and the number of ranks.
    """
    # The number of units summed at once decides the order of additions, and with it the last bits.
    digest = hashlib.sha256("{} units, {} ranks".format(*summed).encode())
    state_dict = sorted(module.state_dict().items())
    tensors: list[tuple[str, Tensor]] = [(name, value) for name, value in state_dict if isinstance(value, Tensor)]
    for group, content in enumerate(optimizer.state_dict()["state"].items()):
        index, state = content
        for key in sorted(state):
            value = state[key]
            tensors.append((f"optimizer.{group}.{index}.{key}", torch.as_tensor(value)))
    for chunk in _bytes(tensors):
        digest.update(chunk)
    return digest.hexdigest()


def update_hash(gradients: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a noised update; the update is released, so the hash is public."""
    digest = hashlib.sha256()
    for chunk in _bytes(sorted(gradients.items())):
        digest.update(chunk)
    return digest.hexdigest()


def sum_tag(stream: KeyedStream, sums: dict[str, Tensor]) -> str:
    """Return a keyed tag of the clipped sum, which reveals nothing without the secret."""
    return stream.tag("clipped-sum", *_bytes(sorted(sums.items())))


def sample_tag(stream: KeyedStream, sums: dict[str, Tensor], *, of_each: int = 8) -> str:
    """Return a keyed tag of sampled values of every clipped sum: cheap, and almost never equal for different sums."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for _, total in sorted(sums.items()):
        flat = total.detach().reshape(-1)
        kinds.setdefault((total.device, total.dtype), []).append(flat[:: max(1, -(-flat.numel() // of_each))])
    return stream.tag("sample-of-sum", *_bytes([(str(n), torch.cat(found)) for n, found in enumerate(kinds.values())]))


POSITION_SCHEMA = "lit-dpret/accountant-state/1"

# What the claim of a ledger was made for; a resume that differs in any of these is refused.
_FIXED = (
    "mode", "unit", "unit_name", "neighbours", "plan", "law", "planned_steps", "rows_per_unit", "secure_rng",
    "mode_facts",
)  # fmt: skip
# How a sum over single units is split into forward passes changes no claim; where units see each other, it does.
_BATCHING_KEY = "physical_batch_size"
# The settings behind the facts of a plan, causes first: the number of units decides delta and the sampling rate, the
# rate decides the number of steps in an epoch, and all of these decide noise and cap.
_SETTINGS = {
    "mode": "privacy",
    "unit": "privacy.unit",
    "unit_name": "datamodule.unit_name",
    "neighbours": "privacy.neighbours",
    "plan.budget.duplicates": "datamodule.duplicates",
    "plan.budget.unit_by": "datamodule.unit_of (what rows make one unit)",
    "plan.n_public": "number of units in the data set",
    "plan.budget.eps": "privacy.eps",
    "plan.budget.delta": "privacy.delta",
    "plan.law.kind": "datamodule.sampling",
    "plan.law.sample_rate": "datamodule.expected_batch_size (or sample_rate) as a share of the units",
    "plan.law.batch_size": "datamodule.expected_batch_size",
    "planned_steps": "trainer.max_steps (or max_epochs)",
    "plan.steps": "callbacks.accountant.resume_reserve (in planned steps)",
    "plan.accountant": "privacy.accountant",
    "plan.noise_multiplier": "privacy.noise_multiplier",
    "plan.law.cap": "datamodule.cap",
    "plan.max_grad_norm": "privacy.max_grad_norm",
}
# For a task that releases counts under a plan, without training.
_SETTINGS_OF_COUNTS = {"planned_steps": "task.generations", "plan.noise_multiplier": "task.noise_multiplier"}


@dataclass(frozen=True)
class Position:
    """The position of a checkpoint, for comparison with the ledger."""

    run_id: str
    attempt: int
    steps_done: int

    def to_dict(self) -> dict[str, Any]:
        return {"schema": POSITION_SCHEMA, **asdict(self)}

    @classmethod
    def among(cls, states: Mapping[str, Any], *, place: str) -> Position | None:
        """Return the accountant's state among the callbacks' states of a checkpoint; None without one."""
        for state in states.values():
            if isinstance(state, Mapping) and {"run_id", "attempt", "steps_done"} <= set(state):
                return cls.from_dict(state, place=place)
        return None

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], *, place: str) -> Position:
        if problem := schema_problem(facts.get("schema"), POSITION_SCHEMA):
            raise ResumeError(f"{place}: the accountant's state cannot be read: {problem}")
        try:
            return cls(str(facts["run_id"]), int(facts["attempt"]), int(facts["steps_done"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"{place}: the accountant's state is malformed ({error}).") from error


def _is_of_no_step(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a ledger is that of a run with a claim that ended before its first release."""
    kinds = {record["kind"] for record in records}
    planned = all(plan["plan"] is not None for plan in plans_of(records))
    return planned and kinds <= {"plan", "event", "end"} and bool(records) and records[-1]["kind"] == "end"


@dataclass(frozen=True, kw_only=True)
class Fingerprints:
    """Keyed hashes of a run's training data; each function takes the key."""

    data: Callable[[bytes], str]  # of the data set
    unplanted: Callable[[bytes], str] | None = None  # the same without what was planted in it; None without any
    # Of files that are read in addition to the data set; its result is None if there are none.
    files: Callable[[bytes], str | None] = lambda key: None


class PrivateRun:
    """The ledger of a run, opened for writing, with the facts that identify the run.

    Guarantees:
        - An existing ledger is continued only on request, and only for the same mechanism, law, length and data set.
        - A run counted in a data set's ledger continues with no other and not without one; a run not counted in any yet
          may join one, which then counts all of it.
        - With a new secret, or after a version of this program that drew other noise from the same secret, nothing is
          repeated: a new attempt begins.
        - With a changed ``physical_batch_size`` the run continues, except where the units of a physical batch see each
          other; steps that had already begun are then executed under a new attempt.

    Attributes:
        stream: The keyed stream of the run; its id is that of the first attempt, its key the secret.
    """

    def __init__(self, ledger: PrivacyLedger, stream: KeyedStream, run_id: str) -> None:
        self.ledger, self.stream, self.run_id = ledger, stream, run_id
        self.intents = _by_key(ledger, "intent")
        self.releases = _by_key(ledger, "release")
        begun = [record["attempt"] for record in ledger.records if record["kind"] in ("plan", "intent")]
        self.attempt = max(begun, default=0)
        # The step at which each later attempt began; an attempt that died before its first intent is recorded only
        # here.
        self._begun = {event["attempt"]: event["step"] for event in events_of(ledger.records, "fresh_attempt")}

    @property
    def identity(self) -> str:
        return ledger_identity(self.ledger.records)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        resume: bool,
        secret: bytes,
        described: Mapping[str, Any],
        fingerprints: Fingerprints,
        run_id: str | None = None,
        dataset: DatasetLedger | None = None,
    ) -> PrivateRun:
        """Start a ledger, or continue the one at ``path``.

        ``described`` is the mechanism as public JSON values, the ``plan`` record. ``dataset`` is created here, but not
        for a run that is refused: an empty ledger in place of an earlier one would start with the whole budget again.
        """
        if path.exists() and not resume:
            if _is_of_no_step(PrivacyLedger.read(path).records):
                raise ResumeError(
                    f"{path} is the ledger of a run that was refused or ended before its first step, so it records no "
                    "spending: delete it, choose another hydra.run.dir, or set resume=true and change nothing else."
                )
            raise ResumeError(
                f"{path} already holds a ledger: a second run in this folder would hide what the first one "
                "spent. Use resume=true to continue it, or choose another hydra.run.dir."
            )
        if resume:
            require_run(path)
        ledger = PrivacyLedger.open(path)
        try:
            earlier = plans_of(ledger.records)
            # The id of the first attempt, forever: it is in every key, and other streams would draw other noise.
            run_id = earlier[0]["run_id"] if earlier else run_id or random_secrets.token_hex(8)
            stream = KeyedStream(secret, run_id, secure_rng=bool(described["secure_rng"]))
            run = cls(ledger, stream, run_id)
            now = dict(described)
            now["secret_tag"], now["noise_stream"] = stream.tag("secret"), stream.noise_stream
            # Keyed, or the fingerprint in a published ledger would confirm a guess of the data set.
            key = bytes.fromhex(stream.tag("data-fingerprint"))
            now["data_fingerprint"] = fingerprints.data(key)
            if fingerprints.unplanted is not None:
                now["unplanted_fingerprint"] = fingerprints.unplanted(key)
            now["files_fingerprint"] = fingerprints.files(key)
            if earlier:
                there = {dataset.begin()} if dataset is not None and dataset.path.exists() else set()
                if counted_in(ledger.records) - there:
                    raise ResumeError(
                        "resume=true without the privacy.dataset_ledger that counts this run, or with another one: "
                        "its further spending would be missing there. Set that file, or start a new run in "
                        "another hydra.run.dir."
                    )
                run._compare_with(earlier[-1], now)
            now["dataset_ledger"] = None if dataset is None else dataset.begin()
            # With a nonce, no two ledgers have equal heads, even if they began at the same moment.
            nonce = random_secrets.token_hex(16)
            ledger.append("plan", run_id=run_id, attempt=run.attempt, nonce=nonce, **now)
        except BaseException:
            ledger.close()
            raise
        return run

    @property
    def data_fingerprint(self) -> str | None:
        """The keyed fingerprint of the training data when this attempt was planned."""
        plans = plans_of(self.ledger.records)
        return plans[-1]["data_fingerprint"] if plans else None

    def _compare_with(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        if before["plan"] is not None:
            plan = dict(before["plan"])
            if plan["coupling"] is None and isinstance(now["plan"], dict):
                plan[_BATCHING_KEY] = now["plan"].get(_BATCHING_KEY)
            before = {**before, "plan": plan}
        if difference := _difference(before, now):
            raise ResumeError(
                f"resume=true with another {difference} The ledger's claim was made for the first: restore it, or "
                "start a new run in another hydra.run.dir."
            )
        # Fingerprints are keyed by the secret, so with another secret the data cannot be compared either.
        if before["secret_tag"] != now["secret_tag"]:
            self.ledger.append(
                "event",
                name=SECRET_CHANGED,
                text="privacy.secret_file is not the one of the earlier attempt: fresh noise and coins, and the data "
                "set could not be compared",
            )
            warnings.warn(
                "The secret (privacy.secret_file) is not the one that this run began with, so nothing shows that the "
                "data set is still the same: the card states it as an assumption. For other data start a new run.",
                stacklevel=2,
            )
            self.attempt += 1
        elif before["data_fingerprint"] != now["data_fingerprint"]:
            raise ResumeError(
                "resume=true with another data set than the ledger's: the claim is about one data set. "
                "Restore it, or start a new run in another hydra.run.dir."
            )
        elif before["files_fingerprint"] != now["files_fingerprint"]:
            raise ResumeError(
                "resume=true with another file of labels or negatives than the ledger's: its content depends on "
                "private queries, and the claim is about one data set. Restore it, or start a new run in another "
                "hydra.run.dir."
            )
        elif self.intents and before["noise_stream"] != now["noise_stream"]:
            # First the old noise and then the new noise under the same sum would be two releases for one charge.
            self.ledger.append(
                "event",
                name="noise_stream_changed",
                text="another version of this program draws other noise from the same keys: no step is repeated",
            )
            self.attempt += 1

    def go_on_from(self, position: Position, *, must_be_known: bool) -> None:
        """Compare a checkpoint with the ledger.

        The ledger must hold the checkpoint's last step. It does if that step was granted under the checkpoint's
        attempt, or if that attempt began right after it. In the second case the weights are those with which an earlier
        attempt ended; they were compared with the ledger before it recorded that the attempt begins.
        """
        if position.run_id != self.run_id:
            raise ResumeError(
                f"The checkpoint belongs to run {position.run_id}, the ledger to run {self.run_id}: "
                "they must come from one run folder."
            )
        last = (position.attempt, position.steps_done - 1)
        known = last in self.intents or self._begun.get(position.attempt) == position.steps_done
        if must_be_known and position.steps_done > 0 and not known:
            raise ResumeError(
                f"The checkpoint was taken after step {position.steps_done} of attempt {position.attempt}, which the "
                "ledger does not know: the ledger is older than the checkpoint. Put the newest ledger back; an older "
                "checkpoint is fine."
            )

    def resume_or_begin_attempt(self, step: int, state: Callable[[], str] | None) -> None:
        """Repeat the steps from ``step`` on if everything matches; otherwise begin a fresh attempt."""
        steps = [known for attempt, known in self.intents if attempt == self.attempt]
        ahead = [known for known in steps if known >= step]
        if ahead:
            known = self.intents.get((self.attempt, step), {}).get("state_hash")
            # One failure is enough: a machine that rounds differently would fail at every further step.
            failed = bool(events_of(self.ledger.records, "replay_failed"))
            if state is not None and known is not None and not failed and known == state():
                return
        elif (self.attempt, step - 1) in self.intents:
            return
        elif not steps and (self.attempt == 0 or self._begun.get(self.attempt) == step):
            return  # it begins here, or began here before and released nothing
        if ahead or self.attempt in self._begun:  # each attempt begins once, so its number identifies the step
            self.attempt = max(self.attempt, *self._begun, 0) + 1
        text = f"from step {step} on with fresh noise and coins"
        if ahead:
            text = f"{len(ahead)} steps from step {step} on are executed again with fresh noise and charged again"
        # This is how `go_on_from` recognises a checkpoint that was taken before the attempt's first intent.
        self._begun[self.attempt] = step
        self.ledger.append("event", name="fresh_attempt", attempt=self.attempt, step=step, text=text)


def require_run(path: Path) -> None:
    """Refuse to resume if the run does not exist; ``path`` is that of its ledger."""
    if not path.exists():
        raise ResumeError(
            f"resume=true, and {path.parent} holds no {path.name}: a second run would begin there, on the same data. "
            "Set hydra.run.dir to the folder of the run; if no run was started yet, omit resume=true."
        )


def _by_key(ledger: PrivacyLedger, kind: str) -> dict[Key, dict[str, Any]]:
    return {(record["attempt"], record["step"]): record for record in ledger.records if record["kind"] == kind}


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Name the setting in which two records of a plan differ, with both values; None if they agree."""
    settings = _SETTINGS | (_SETTINGS_OF_COUNTS if now["mode"] in (EVOLUTION, HISTOGRAM) else {})
    for place, setting in settings.items():
        was, is_now = _at(before, place), _at(now, place)
        if was != is_now:
            longer = " To train longer, start another run with init_from, once this one has ended."
            return f"{setting}: {was!r} before, {is_now!r} now.{longer if setting.startswith('trainer.') else ''}"
    for key in _FIXED:
        if before.get(key) != now.get(key):
            return _first_difference(key, before.get(key), now.get(key))
    return None


def _at(record: Mapping[str, Any], place: str) -> Any:
    value: Any = record
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _first_difference(place: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                return _first_difference(f"{place}.{name}", before.get(name), now.get(name))
    return f"{place}: {before!r} before, {now!r} now."
