"""The gate of rank 0, as every rank of a job passes through it.

There is one ledger, so one rank asks it and all of them obey: the permit, or the refusal, reaches every rank
before any of them draws noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import LedgerError, PrivacyViolation
from lit_dpret.privacy.clip_fraction import NAME
from lit_dpret.privacy.ledger.fingerprints import sample_tag
from lit_dpret.privacy.ledger.gate import ReleaseGate
from lit_dpret.privacy.ledger.guard import Permit
from lit_dpret.privacy.ledger.noise_check import NoiseCheck
from lit_dpret.privacy.ledger.run import Position
from lit_dpret.privacy.modes import Update
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.sampling import PrivateBatchSampler


class SharedGate:
    """A `ReleaseGate` that one rank holds and all ranks ask, in the same order.

    Guarantees:
        - A step that is refused is refused on every rank, with the same error, before any noise is drawn.
        - All ranks are in the same attempt and at the same step, and ask for the noise of the same sum.
        - The noise of every step is measured on every rank (`NoiseCheck`), before the update reaches an optimizer.
          Where it is not what was planned, the step is charged as one without noise and the run ends: a
          measurement that is too small bounds the noise of no single coordinate.

    Args:
        gate: On rank 0; None on the others.
        plan: What the noise is held against; None where nothing was promised.
        stream: The keyed stream of the run.
        run_id: Of the run.
        sampler: This rank's.
        ranks: Who takes part.
        whole: Whether every rank holds the whole sum, so that all must hold the same one.
        parts: Whether every rank noises parts of its own.

    Attributes:
        attempt: The attempt that the next step belongs to.
        steps_done: Logical steps made so far.
        clip_fraction: What the last step released of how many units were clipped; None where it released nothing.
    """

    def __init__(
        self,
        gate: ReleaseGate | None,
        *,
        stream: KeyedStream,
        run_id: str,
        sampler: PrivateBatchSampler,
        ranks: Ranks,
        plan: PrivacyPlan | None = None,
        whole: bool = False,
        parts: bool = False,
    ) -> None:
        self.stream, self.ranks = stream, ranks
        self.attempt, self.steps_done = 0, 0
        self._own, self._run_id, self._sampler = gate, run_id, sampler
        self._whole, self._parts = whole, parts
        self._noise = None if plan is None else NoiseCheck(plan)
        self.granted = 0
        self._told: float | None = None
        self.clip_fraction: float | None = None
        if gate is not None:
            self.attempt, self.steps_done = gate.attempt, gate.steps_done

    @property
    def own(self) -> ReleaseGate:
        """The gate itself, on rank 0.

        Raises:
            LedgerError: On another rank, which has none.
        """
        if self._own is None:
            raise LedgerError(f"Rank {self.ranks.rank} holds no ledger; rank 0 does.")
        return self._own

    @property
    def position(self) -> Position:
        """What a checkpoint taken now has to carry."""
        return Position(self._run_id, self.attempt, self.steps_done)

    def begin(self, position: Position | None, state: Callable[[], str] | None) -> None:
        """As `ReleaseGate.begin`; then every rank draws from the same step of the same attempt."""

        def settle() -> Position:
            self.own.begin(position, state)
            return self.own.position

        found = self.ranks.share(settle)
        self.attempt, self.steps_done = found.attempt, found.steps_done
        if self._own is None:  # where there is a gate, it has set its sampler
            self._sampler.attempt, self._sampler.next_step = found.attempt, found.steps_done

    def require_budget(self, step: int) -> None:
        """As `ReleaseGate.require_budget`."""
        self.ranks.share(lambda: self.own.require_budget(step), quick=True)

    def authorise(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> Permit:
        """As `ReleaseGate.authorise`; ``units`` and ``sums`` are those of all ranks together.

        Raises:
            LedgerError: The ranks ask for different steps, or hold different sums. Nothing is charged, and no noise
                is drawn.
        """
        self._refuse_parted(attempt, step, units, sums)
        permit = self.ranks.share(lambda: self.own.authorise(attempt, step, units, sums), quick=True)
        self.granted += 1
        if self._noise is not None:
            self._noise.expect(sums)
        return permit

    def _refuse_parted(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> None:
        if self.ranks.world_size == 1:
            return
        tag = sample_tag(self.stream, sums) if self._whole else ""
        counted = float(sums.get(NAME, 0.0))  # every rank has it whole, and noises it
        if len(set(self.ranks.gather((attempt, step, units, tag, counted), quick=True))) > 1:
            raise LedgerError(
                f"The ranks do not hold the same sum for step {step}, and each would put the same noise under its own: "
                "sums and counts have to be added up over all ranks before the guard is asked "
                "(lit_dpret.distributed.ranks.Ranks.sum_). This step was not released."
            )

    def record(self, permit: Permit, update: Update) -> None:
        """As `ReleaseGate.record`, after the noise was measured on every rank.

        Raises:
            PrivacyViolation: The update does not have the noise that was planned.
        """
        verdict = None if self._noise is None else self._noise.verdict(update)
        sample = self._noise.sample() if self._noise is not None and self._parts else {}
        stds, verdicts, samples = zip(*self.ranks.gather((update.noise_std, verdict, sample), quick=True), strict=True)
        wrong = next(filter(None, verdicts), None)
        if wrong is None and self._noise is not None:
            wrong = self._noise.compare(samples)
        update = replace(update, noise_std=min(stds) if wrong is None else 0.0)
        self.ranks.share(lambda: self.own.record(permit, update), quick=True)
        if wrong is not None:
            raise PrivacyViolation(
                f"Step {permit.step} does not have the noise that was planned: {wrong}. The privacy mode "
                "(privacy=...) does something else than it says, so the step is charged as one without noise, the card "
                "states no epsilon, and the run ends here. Mend privatize() of the mode, and start a new run.",
                trap="T36",
            )
        self.steps_done = permit.step + 1
        self.clip_fraction = update.clip_fraction

    def forfeit(self) -> None:
        """As `ReleaseGate.forfeit`; called by all ranks."""
        self.ranks.share(lambda: self.own.forfeit(), quick=True)

    def share_epsilon(self) -> float:
        """Epsilon spent so far, asked for by all ranks."""
        self._told = self.ranks.share(lambda: self.own.epsilon())
        return self._told

    def epsilon(self) -> float:
        """Epsilon spent so far; on another rank than 0, as it was when all ranks last asked for it.

        Raises:
            LedgerError: On such a rank, before they did.
        """
        if self._own is not None or self._told is None:
            return self.own.epsilon()
        return self._told
