"""The gate of several ranks: rank 0 grants each release, and all ranks learn of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import LedgerError, PrivacyViolation
from lit_dpret.privacy.clip_fraction import NAME
from lit_dpret.privacy.ledger.gate import Permit, ReleaseGate
from lit_dpret.privacy.ledger.noise_check import NoiseCheck
from lit_dpret.privacy.ledger.private_run import Position, sample_tag
from lit_dpret.privacy.modes import Update
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.sampling import PrivateBatchSampler


class SharedGate:
    """A `ReleaseGate` on rank 0 that all ranks query, in the same order.

    Guarantees:
        - A refused step is refused on every rank, with the same error, before any noise is drawn.
        - All ranks are in the same attempt and at the same step, and ask for the noise of the same sum.
        - The noise of every step is measured on every rank (`NoiseCheck`), before the update reaches an optimizer. If
          it is not as planned, the step is charged as a step without noise and the run ends: a measurement that is too
          small bounds the noise of no single coordinate.

    Args:
        whole: Whether every rank holds the whole sum, so that all must hold the same one.
        parts: Whether every rank adds noise to its own parts.

    Attributes:
        clip_fraction: The share of clipped units that the last step released; None if it released none.
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
        self._last_epsilon: float | None = None
        self.clip_fraction: float | None = None
        if gate is not None:
            self.attempt, self.steps_done = gate.attempt, gate.steps_done

    @property
    def own(self) -> ReleaseGate:
        if self._own is None:
            raise LedgerError(f"Rank {self.ranks.rank} holds no ledger; rank 0 does.")
        return self._own

    @property
    def position(self) -> Position:
        return Position(self._run_id, self.attempt, self.steps_done)

    def begin(self, position: Position | None, state: Callable[[], str] | None) -> None:
        """Do as `ReleaseGate.begin`; then every rank draws from the same step of the same attempt."""

        def settle() -> Position:
            self.own.begin(position, state)
            return self.own.position

        found = self.ranks.share(settle)
        self.attempt, self.steps_done = found.attempt, found.steps_done
        if self._own is None:  # a rank with a gate has already set its sampler
            self._sampler.attempt, self._sampler.next_step = found.attempt, found.steps_done

    def require_budget(self, step: int) -> None:
        self.ranks.share(lambda: self.own.require_budget(step), quick=True)

    def authorise(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> Permit:
        """Do as `ReleaseGate.authorise`; ``units`` and ``sums`` are totals over all ranks, equal on each."""
        # First, because a difference between ranks would be charged and then noised twice.
        self._refuse_parted(attempt, step, units, sums)
        permit = self.ranks.share(lambda: self.own.authorise(attempt, step, units, sums), quick=True)
        self.granted += 1
        if self._noise is not None:
            # Now, while the sums have no noise; `record` compares.
            self._noise.expect(sums)
        return permit

    def _refuse_parted(self, attempt: int, step: int, units: int, sums: dict[str, Tensor]) -> None:
        if self.ranks.world_size == 1:
            return
        tag = sample_tag(self.stream, sums) if self._whole else ""
        counted = float(sums.get(NAME, 0.0))  # every rank holds the whole count, and adds noise to it
        if len(set(self.ranks.gather((attempt, step, units, tag, counted), quick=True))) > 1:
            raise LedgerError(
                f"The ranks have different sums for step {step}, and would all add the same noise: reduce sums and "
                "counts over all ranks before calling the guard (lit_dpret.distributed.ranks.Ranks.sum_). This step "
                "was not released."
            )

    def record(self, permit: Permit, update: Update) -> None:
        """Do as `ReleaseGate.record`, after the noise was measured on every rank."""
        verdict = None if self._noise is None else self._noise.verdict(update)
        sample = self._noise.sample() if self._noise is not None and self._parts else {}
        stds, verdicts, samples = zip(*self.ranks.gather((update.noise_std, verdict, sample), quick=True), strict=True)
        wrong = next(filter(None, verdicts), None)
        if wrong is None and self._noise is not None:
            wrong = self._noise.compare(samples)
        # The weakest rank is charged; where the measurement fails, no rank's statement of its noise counts.
        update = replace(update, noise_std=min(stds) if wrong is None else 0.0)
        self.ranks.share(lambda: self.own.record(permit, update), quick=True)
        if wrong is not None:
            raise PrivacyViolation(
                f"Step {permit.step} does not have the noise that was planned: {wrong}. The privacy mode "
                "(privacy=...) does not do what it reports, so the step is charged as one without noise, the card "
                "states no epsilon, and the run ends here. Fix privatize() of the mode, and start a new run.",
                trap="T36",
            )
        self.steps_done = permit.step + 1
        self.clip_fraction = update.clip_fraction

    def void_attempt(self) -> None:
        self.ranks.share(lambda: self.own.void_attempt(), quick=True)

    def forfeit(self) -> None:
        """Give up the claim of this attempt, on a rank that detected a fault; others may not have detected it."""
        if self._own is not None:
            self._own.void_attempt()
        else:
            self.ranks.leave_word(self._forfeited)

    def take_forfeits(self) -> None:
        """Give up the claim, on rank 0, if another rank left a notice of a fault."""
        if self.ranks.word_was_left(self._forfeited):
            self.own.void_attempt()

    @property
    def _forfeited(self) -> str:
        return f"forfeited/{self._run_id}/{self.attempt}"

    def share_epsilon(self) -> float:
        self._last_epsilon = self.ranks.share(lambda: self.own.epsilon())
        return self._last_epsilon

    def epsilon(self) -> float:
        """Epsilon spent so far; on ranks other than 0, as of the last shared query."""
        if self._own is not None or self._last_epsilon is None:
            return self.own.epsilon()
        return self._last_epsilon
