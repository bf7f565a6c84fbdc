"""The gate for every release: it checks a release against the budget, records it, and only then permits it.

A training loop asks a `Guard` for a permit before it draws noise, and reports what it did. The guard sees sums,
updates, a sampler and a ledger, but no model. Rank 0 holds the `ReleaseGate`; the `SharedGate` (`shared_gate.py`)
sends its answer to every rank.
"""

from __future__ import annotations

import secrets as random_secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from lit_dpret.errors import (
    BudgetExceededError,
    ConfigurationError,
    DataError,
    LedgerError,
    ResumeError,
)
from lit_dpret.privacy.accounting.accountant import Accountant
from lit_dpret.privacy.accounting.releases import (
    GaussianRelease,
    NonPrivateRelease,
    Poisson,
    Release,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.privacy.ledger.private_run import Position, PrivateRun, sum_tag, update_hash
from lit_dpret.privacy.ledger.run_ledger import (
    SAMPLING_DEPARTURE,
    WRONG_UNITS_SEEN,
    Key,
    charged_releases,
    forthcoming_releases,
)
from lit_dpret.privacy.modes import PrivacyMode, Update
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.sampling import PrivateBatchSampler


@dataclass(frozen=True)
class Permit:
    """Permission to draw the noise of one step in one attempt.

    ``salt`` keys the noise in addition to attempt and step: a tag of the sum, or a nonce of the process. ``replay`` is
    None for a step that is paid for now. For a step that was paid for before and is repeated bit by bit, it is the
    earlier release record.
    """

    attempt: int
    step: int
    salt: str = ""
    replay: dict[str, Any] | None = field(default=None)


class Guard(Protocol):
    """The gate's interface for a training loop: it grants and records releases."""

    @property
    def stream(self) -> KeyedStream: ...
    @property
    def attempt(self) -> int: ...
    def authorise(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> Permit: ...
    def record(self, permit: Permit, update: Update) -> None: ...


def no_accountant(module: str) -> ConfigurationError:
    """Return the error for training without an accountant."""
    return ConfigurationError(
        f"{module} has no privacy accountant: nothing would be counted. Give the Trainer "
        "callbacks=[PrivacyAccountant(), PrivacyCard()] of lit_dpret, or do not remove callbacks.accountant: the first "
        "counts, the second saves the weights and writes the card.",
        trap="T7",
    )


def refuse_other_sums(trainer: Any) -> None:
    """Refuse a Trainer that would clip or accumulate the result of a private step again."""
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} would add noise to each of the "
            "batches that it accumulates. Leave it at 1: a step has datamodule.expected_batch_size units, computed "
            "datamodule.physical_batch_size at a time.",
            trap="T12",
        )
    if trainer.gradient_clip_val:
        raise ConfigurationError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val:g} clips the sum over the batch, which does "
            "not bound the effect of one unit. Leave it null, and set privacy.max_grad_norm instead.",
            trap="T16",
        )


ALWAYS = frozenset({"epoch", "step", "trainer/global_step"})
"""Names that Lightning adds by itself."""


def public_names(sources: Iterable[Any]) -> frozenset[str]:
    """Return the names that modules and callbacks declare to be computed without private rows.

    A callback that reports its numbers itself declares nothing for others that use the same name.
    """
    others = (source for source in sources if not getattr(source, "tells_itself", False))
    return frozenset().union(*(getattr(source, "public_metrics", ()) for source in others))


def tells_progress(name: str, value: Any, trainer: Any) -> bool:
    """Return whether a value logged as Lightning's epoch or step really is that number."""
    if name not in ALWAYS or trainer is None or not isinstance(value, (int, float, Tensor)):
        return False
    found = torch.as_tensor(value)
    counts = [count - behind for count in (trainer.current_epoch, trainer.global_step) for behind in (0, 1)]
    if found.is_floating_point():  # as a metric holds a count; a boolean or a short integer would wrap it around
        counts = torch.tensor(counts).to(found.dtype).tolist()
    return found.numel() == 1 and found.dtype != torch.bool and found.item() in counts


def undeclared_metric(what: str, module: Any) -> ConfigurationError:
    """Return the error for showing ``what``, an uncounted number, in the training of ``module``."""
    return ConfigurationError(
        f"{what} is logged inside a run with privacy={module.privacy.name}: a number computed on private rows "
        "is an uncounted release. Remove it. If it depends on no private row, list its name in public_metrics of the "
        f"module or callback that logs it; or {way_to_declare(module)}, and the card will name it and state no "
        "epsilon.",
        trap="T25",
    )


def way_to_declare(module: Any) -> str:
    """Return how the user of a module declares a leak, for messages; `make_private` has no such argument."""
    return getattr(module, "way_to_declare", "set model.log_private_loss=true")


class ReleaseGate:
    """Grant the steps of one run, in order, while the budget covers them; without a ``plan`` nothing was promised.

    Guarantees:
        - No noise is drawn before the ledger on disk records it.
        - A step that would overspend is refused before it runs.
        - A step is repeated with its old noise only if state and clipped sum are bit for bit the same.
        - Batches that the sampler did not draw, or drew out of order, are refused; draws with more units than the law
          allows are charged without amplification and end the run.

    Attributes:
        departures: The number of steps so far that cost more than planned: less noise, or another law.
        reserved_until: The data set's ledger has reserved all steps before this one; None if there is no such ledger,
            and 0 until a reservation is made.
    """

    def __init__(
        self,
        run: PrivateRun,
        plan: PrivacyPlan | None,
        mode: PrivacyMode,
        sampler: PrivateBatchSampler,
        *,
        reserved_until: int | None = None,
    ) -> None:
        self.run, self.plan, self.sampler = run, plan, sampler
        self.steps_done = self._began_at = 0
        self.departures = 0
        self.reserved_until = reserved_until
        self._guarantee = mode.guarantee
        self._state: Callable[[], str] | None = None
        # Where no sum can be tagged, the noise is tied to this process: a copy of the run folder draws other noise.
        self._nonce = random_secrets.token_hex(16)
        self._release: GaussianRelease | NonPrivateRelease = NonPrivateRelease(label="train")
        self._seen, self._seen_steps = 0, 0
        if plan is not None:
            self._release = plan.release()
            self._accountant = Accountant(
                delta=plan.budget.delta, neighbours=plan.budget.neighbours, name=plan.accountant
            )
            self._steps_left = self._affordable()

    @property
    def stream(self) -> KeyedStream:
        return self.run.stream

    @property
    def attempt(self) -> int:
        return self.run.attempt

    @property
    def position(self) -> Position:
        return Position(self.run.run_id, self.run.attempt, self.steps_done)

    def begin(self, position: Position | None, state: Callable[[], str] | None) -> None:
        """Decide where to continue and under which attempt, before the first random draw."""
        self._state = state
        # Before the first coin: the attempt keys the coins, and it may change here.
        if position is not None:
            self.run.go_on_from(position, must_be_known=self._guarantee != "inherited")
            self.steps_done = position.steps_done
        self._began_at = self.steps_done
        self.run.resume_or_begin_attempt(self.steps_done, state)
        self.sampler.next_step = self.steps_done
        self.sampler.attempt = self.run.attempt

    def require_budget(self, step: int) -> None:
        """Refuse ``step`` before its forward pass if the budget does not cover it."""
        key = (self.run.attempt, step)
        self._require_reservation(step)
        # A step that was announced before is paid for, and may be repeated beyond the budget.
        if self.plan is not None and key not in self.run.intents and not self._covers(key):
            self._refuse_overspending(self.plan)

    def authorise(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> Permit:
        # Out of order, the sampling law would differ from the one that is charged.
        if step != self.steps_done or attempt != self.run.attempt:
            raise DataError(
                f"A batch of step {step}, attempt {attempt}, arrived, but step {self.steps_done}, attempt "
                f"{self.run.attempt}, was due: the loader does not return the sampler's draws in order, or a batch was "
                "left out. Return the loader of the DataModule unchanged (datamodule.train_dataloader).",
                trap="T38",
            )
        key = (attempt, step)
        if self._guarantee == "inherited":
            return Permit(*key)
        tag = state = None
        if self._state is not None:
            tag, state = sum_tag(self.run.stream, sums), self._state()
        # The noise of a step depends on the sum it is added to, or else on this process alone.
        salt = tag or self._nonce
        intent = self.run.intents.get(key)
        if intent is not None:
            # The same noise under another sum would let anybody subtract the two.
            same_state = intent.get("state_hash") == state
            if tag is None or intent.get("sum_tag") != tag or not same_state:
                self.run.ledger.append("event", name="replay_failed", attempt=attempt, step=step)
                what = "clipped sum" if same_state else "state of model and optimizer"
                raise ResumeError(
                    f"Step {step} could not be repeated bit by bit on this machine (another {what}), so its noise must "
                    "not be used again. Run the same command once more: it will continue with fresh noise, and charge "
                    "it."
                )
            self.run.ledger.append("replay", attempt=attempt, step=step)
            return Permit(*key, salt, replay=self.run.releases.get(key) or {})
        self._require_reservation(step)
        if self.plan is not None and not self._covers(key):
            self._refuse_overspending(self.plan)
        # Before the intent: draws that break the law are charged by an event, and the noise of this step is never
        # drawn.
        self._check_sampling(step, units)
        self.run.intents[key] = self.run.ledger.announce(key, self._release, state_hash=state, sum_tag=tag)
        if self.plan is not None:
            self._steps_left -= 1
        return Permit(*key, salt)

    def record(self, permit: Permit, update: Update) -> None:
        """Record what the step did; a repeated step must have done the same."""
        self.steps_done = permit.step + 1
        if self._guarantee == "inherited":
            return
        found = None if self._state is None else update_hash(update.gradients)
        if permit.replay is not None:
            known = permit.replay.get("update_hash")
            if known is not None and known != found:
                self.run.ledger.append("event", name="replay_failed", attempt=permit.attempt, step=permit.step)
                raise ResumeError(
                    f"The repeated update of step {permit.step} differs from the recorded one. Run the same command "
                    "once more: it will continue with fresh noise, and charge it."
                )
            if permit.replay:
                return  # the first execution was confirmed already
        self.run.ledger.confirm(
            (permit.attempt, permit.step),
            noise_std=update.noise_std,
            sensitivity=update.sensitivity,
            denominator=update.denominator,
            law=self.sampler.law,
            update_hash=found,
        )
        # The step is charged for what it did, so fewer steps are left than planned.
        if self.plan is not None and update.noise_std < self.plan.noise_std:
            self.departures += 1
            self._steps_left = self._affordable()

    def void_attempt(self) -> None:
        """Charge every step of this attempt as a step without noise: which units took part is unknown."""
        self.run.ledger.append("event", name=WRONG_UNITS_SEEN, attempt=self.run.attempt, step=self.steps_done)

    def epsilon(self) -> float:
        """Epsilon spent so far, from the ledger; infinite if none may be stated."""
        if self._guarantee == "none" or not (self.plan is None or self.plan.proved):
            return float("inf")
        if self.plan is None:
            return 0.0
        return self._accountant.epsilon(charged_releases(self.run.ledger.records))

    def forthcoming(self, until: int) -> list[Release]:
        """Return the ledger's total charge after the planned steps before ``until``."""
        first = self.steps_done
        # The records already contain later steps that an earlier process announced.
        while (self.run.attempt, first) in self.run.intents:
            first += 1
        return forthcoming_releases(
            self.run.ledger.records, self._release, first=first, until=until, attempt=self.run.attempt
        )

    def _require_reservation(self, step: int) -> None:
        if self.reserved_until is not None and step >= self.reserved_until:
            raise BudgetExceededError(
                f"Step {step} was not reserved in privacy.dataset_ledger: the run reserved {self.reserved_until}. "
                "It ends here; a longer one must be planned as such (trainer.max_steps)."
            )

    def _affordable(self) -> int:
        """Return how many more such steps the budget covers, at most the planned number."""
        if self.plan is None or not isinstance(self._release, GaussianRelease):
            return 0
        already = charged_releases(self.run.ledger.records)
        return self._accountant.max_steps(self._release, self.plan.budget.eps, already=already, at_most=self.plan.steps)

    def _covers(self, key: Key) -> bool:
        # Counted down instead of composed again: one composition may take longer than a step.
        if self.plan is None or not isinstance(self.plan.law, Shuffle):
            return self._steps_left > 0
        # A shuffled epoch is charged as a whole, so what a step adds depends on its position in its epoch.
        due = {"kind": "intent", "attempt": key[0], "step": key[1], "release": self._release.to_dict()}
        return self._accountant.epsilon(charged_releases([*self.run.ledger.records, due])) <= self.plan.budget.eps

    def _refuse_overspending(self, plan: PrivacyPlan) -> NoReturn:
        if not plan.proved:
            raise BudgetExceededError(
                f"The noise was calibrated for the steps that were planned, and {self.steps_done} have been made. The "
                f"run ends here.{self._way_to_finish()} In a new run plan more steps, or pay in advance with "
                "callbacks.accountant.resume_reserve."
            )
        after = self._accountant.epsilon([*charged_releases(self.run.ledger.records), plan.release()])
        budget, charged = plan.budget, len(self.run.intents)
        made = f"{charged} steps"
        if charged > self.steps_done:
            made += (
                f", some of them twice, since this attempt began after step {self._began_at}: continue from a later "
                "checkpoint if there is one (trainer.fit(ckpt_path=))"
            )
        raise BudgetExceededError(
            f"The next step would bring epsilon to {show_epsilon(after)} at delta={show_delta(budget.delta)} "
            f"(unit={budget.unit_name}, neighbours={budget.neighbours}), over the budget privacy.eps={budget.eps:g} "
            f"(already spent: {show_epsilon(self.epsilon())} in {made}). The run ends here.{self._way_to_finish()} In "
            "a new run raise privacy.noise_multiplier, plan fewer steps, or pay in advance with "
            "callbacks.accountant.resume_reserve."
        )

    def _way_to_finish(self) -> str:
        """Return a sentence on how to get the model and card of a run that has no budget for another step."""
        if not self.steps_done:
            return ""
        return (
            f" To get the model of the steps that it made, resume it with trainer.max_steps={self.steps_done} and all "
            "else unchanged."
        )

    def _check_sampling(self, step: int, units: int) -> None:
        """Compare the number of units that took part with the law; if it is too high, charge it and end the run."""
        self._seen += units
        self._seen_steps += 1
        law = self.sampler.law
        if self.plan is None or not isinstance(self._release, GaussianRelease):
            return
        if law != self._release.law:
            self.departures += 1
            self._release = replace(self._release, law=law)
            # The smaller one: a law that costs less must not lengthen a run beyond the plan.
            self._steps_left = min(self._steps_left, self._affordable())
        if not isinstance(law, (Poisson, TruncatedPoisson)) or self.plan.budget.neighbours == "add_or_remove":
            return
        trials = self.sampler.units * self._seen_steps
        rate = self._seen / trials
        sd = (law.sample_rate * (1 - law.sample_rate) / trials) ** 0.5
        # Eight deviations, so false alarms are all but impossible. Too few units do no harm: they are overcharged.
        if rate > law.sample_rate + 8 * sd + 1 / trials:
            self.run.ledger.append(
                "event",
                name=SAMPLING_DEPARTURE,
                attempt=self.run.attempt,
                step=step,
                law=Poisson(sample_rate=min(1.0, rate)).to_dict(),
                text=f"{self._seen} units took part in {self._seen_steps} steps, more than the law allows",
            )
            raise LedgerError(
                f"The loader draws {rate:.3g} of the units per step, but the plan says {law.sample_rate:.3g}: "
                "the claim would be false. The card charges what was drawn. Return the loader of the DataModule "
                "unchanged (datamodule.train_dataloader)."
            )
