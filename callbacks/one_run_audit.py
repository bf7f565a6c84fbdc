"""A one-run audit of any training: include canaries by coin flips, and guess the coins from the trained model.

Canaries are planted before the run is planned, as private units like all others, and scored before the first step and
after the last. The number of coins guessed correctly bounds epsilon from below (`lit_dpret.audit.statistics.one_run`).
If the bound contradicts the ledger, the model and the card are written first, and then the run ends with an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_dpret.audit.canaries.canary import Kind
from lit_dpret.audit.canaries.coin_flips import KNOBS, AuditScores, coins_in_run, read_scores, write_scores
from lit_dpret.audit.canaries.suite import CanarySuite
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.one_run import SHARES, Refutation, both_ends, both_ends_audit, perfect_scores, refute
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.callbacks.planning import ledger_of
from lit_dpret.callbacks.privacy_card import PrivacyCard
from lit_dpret.cards.amendments import AttackResult, add_evidence
from lit_dpret.cards.audits import ALARM, AUDIT_EVENT, BOUND
from lit_dpret.cards.claim import ClaimedCurve, claimed_curve, planned_curve
from lit_dpret.cards.file import CARD_NAME, MODEL_FOLDER, read_card
from lit_dpret.errors import ConfigurationError, PrivacyViolation, ResumeError
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.privacy.ledger.judgement import plan_of
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, events_of, noise_keys
from lit_dpret.settings import require_choice, require_whole


@dataclass(frozen=True)
class Best:
    """The outcome of perfect guesses: the bound at the claim's delta, and whether it raises (None: no claim)."""

    eps_lower: float
    alarms: bool | None

    @classmethod
    def of(cls, canaries: int, claim: ClaimedCurve | None, *, confidence: float) -> Best:
        perfect = perfect_scores(canaries)
        bound = both_ends_audit(perfect, delta=0.0 if claim is None else claim.delta, confidence=confidence)
        alarms = None if claim is None else refute(perfect, claim.pairs).contradicts(confidence=ALARM)
        return cls(bound.eps_lower, alarms)

    def describe(self, canaries: int) -> str:
        told = f"{canaries} canaries can show at most {self.eps_lower:.3g}"
        silent = f", and even perfect guesses would not contradict this claim with confidence {ALARM:g}"
        return told + silent if self.alarms is False else told


def audit_results(
    evidence: Evidence,
    *,
    canaries: int,
    counts: Sequence[tuple[int, int]],
    best: Best,
    refutation: Refutation | None,
    at_point: Evidence | None,
) -> list[AttackResult]:
    """Return the bound at the claim's delta, and the point of the claimed curve that the guesses contradict most.

    The underlying scores belong to planted rows and public words, so the numbers are post-processing of the released
    model. ``counts`` holds pairs of guesses and correct guesses, the largest number of guesses first. ``at_point`` is
    the bound at the delta of ``refutation``, at the confidence of the alarm.
    """
    guesses, right = counts[0]
    found = [
        AttackResult(
            attack="one-run audit: a fair coin decided for each canary whether it was trained on, and the coins were "
            f"guessed from what the model had learned; {best.describe(canaries)}",
            n=canaries,
            metric=f"share of right guesses among {guesses}",
            estimate=right / guesses,
            eps_lower=evidence.eps_lower,
            delta=evidence.delta,
            confidence=evidence.confidence,
            method=evidence.method,
            assumption=evidence.assumption,
        )
    ]
    if refutation is not None and at_point is not None:
        found.append(
            AttackResult(
                attack="the same guesses compared with the whole claimed curve, at the delta where they show most",
                n=canaries,
                metric=BOUND,
                estimate=at_point.eps_lower,
                eps_lower=at_point.eps_lower,
                delta=refutation.delta,
                confidence=at_point.confidence,
                method=at_point.method,
                assumption=at_point.assumption,
                ceiling=refutation.eps,
            )
        )
    return found


def stands_already(result: AttackResult, known: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a card already has this result, up to the accountant's rounding, which varies."""
    told = result.to_dict()
    return any(one.keys() == told.keys() and all(_alike(one[name], told[name]) for name in told) for one in known)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


LEAST, MOST = 32, 1000

_log = logging.getLogger(__name__)


class OneRunAudit(Callback):
    """Plant coin-flipped canaries, guess the coins from the trained model, and test the claim with the guesses.

    It must come after `PrivacyAccountant`, which makes it plant, and after `PrivacyCard`, to whose card it adds its
    findings. The released model is the one trained on the canaries, and the card says so.

    Guarantees:
        - Flipping a canary's coin yields a neighbouring data set under the relation of the claim.
        - Before the first release, the ledger holds how many canaries are guessed, at which confidence, and a hash of
          canaries and coins.
        - The model, the ledger and the card with the findings are on disk before the run ends with an error.
        - A true claim is contradicted with a probability of at most 1e-4.
        - A resumed run has the same canaries, coins and first scores; other settings are refused.

    Args:
        run_dir: The run folder; null for the Trainer's ``default_root_dir``. Keep its ``canaries.json`` (secrets and
            coins) and ``audit_scores.json`` secret until the audit is over.
        resume: Continue with the canaries found there.
        canaries: Their number; null for 1 percent of the units (``max_share``), and no more than 1,000. Required under
            ``privacy.neighbours=add_or_remove``.
        max_share: Refuse more canaries than this share of the units.
        kind: The form of a text canary: ``random_passage`` (a query of public words and ten digits, with
            any public passage), ``own_passage``, or ``echo`` (rare words for digits).
        queries: The source of the words before the digits: ``pseudo`` (public passages), or a file of public
            queries: records with a ``text`` (.jsonl, .tsv, .csv, .parquet), or a text file with one query per line.
        confidence: The confidence level of the bound on the card.
        seed: The seed of canaries and coins; null takes one from the operating system. It reveals the coins.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    def __init__(
        self,
        *,
        run_dir: str | Path | None = None,
        resume: bool = False,
        canaries: int | None = None,
        max_share: float = 0.01,
        kind: Kind = "random_passage",
        queries: str = "pseudo",
        confidence: float = 0.95,
        seed: int | None = None,
    ) -> None:
        require_whole("callbacks.audit", {"canaries": canaries}, LEAST, null=True)
        require_whole("callbacks.audit", {"seed": seed}, 0, null=True)
        if not 0 < max_share <= 1:
            raise ConfigurationError(f"callbacks.audit.max_share={max_share} must be above 0 and at most 1.")
        if not 0 < confidence < 1:
            raise ConfigurationError(f"callbacks.audit.confidence={confidence} must be between 0 and 1.")
        require_choice("callbacks.audit.kind", kind, ("random_passage", "own_passage", "echo"))
        CanarySuite(queries=queries).refuse_splits(KNOBS)
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.resume = resume
        self.canaries, self.max_share = canaries, max_share
        self.kind, self.queries, self.confidence, self.seed = kind, queries, confidence, seed
        self._coins: Any = None  # the `CoinFlips` of this fit
        self._scores: Any = None  # the `AuditScores`
        self._neighbours = "zero_out"
        self._judged = False
        self._violation: PrivacyViolation | None = None

    # -- before the run ----------------------------------------------------------------------

    def plant_canaries(self, trainer: L.Trainer, module: Any, data: Any) -> None:
        """Plant the canaries in ``data``; the accountant calls this before it plans the run."""
        self._judged, self._violation, self._scores = False, None, None
        self._refuse(trainer, module, data)
        mode = module.privacy
        folder = self._folder(trainer)
        count = self.planned_units(mode, data)
        self._neighbours = mode.neighbours
        suite = CanarySuite(
            kinds=(self.kind,), repetitions=(1,), count=count, candidates=2, include=0.5, queries=self.queries,
            seed=self.seed,
        )  # fmt: skip
        begun = (folder / LEDGER_NAME).exists()
        self._coins = coins_in_run(data, suite, run_dir=folder, begun=begun, resume=self.resume, reader=module)
        data.plant(self._coins.planted(mode.neighbours))

    def planned_units(self, mode: Any, data: Any) -> int:
        data.use_unit(mode.unit, mode.neighbours)
        return self._count(data.n_units, mode.neighbours)

    def _refuse(self, trainer: L.Trainer, module: Any, data: Any) -> None:
        callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
        if any(isinstance(other, PrivacyCard) for other in callbacks[callbacks.index(self) :]):
            raise ConfigurationError(
                "OneRunAudit comes before PrivacyCard in the Trainer's callbacks. Put it after: it amends the card."
            )
        if module.privacy.guarantee == "inherited":
            raise ConfigurationError(
                f"callbacks.audit with privacy={module.privacy.name}: this run trains on released data. Audit the run "
                "that trains on the private data."
            )
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"callbacks.audit in a job of {trainer.world_size} processes: canaries are planted and scored in one "
                "process. Set trainer.devices=1 and trainer.num_nodes=1."
            )
        if not hasattr(data, "plant"):
            raise ConfigurationError(
                f"callbacks.audit: {type(data).__name__} has no plant(planted). Set callbacks.audit to null."
            )
        if getattr(data, "planted_facts", None) is not None:
            raise ConfigurationError(
                "callbacks.audit: other canaries are planted in these data (canaries=...). Set one of the two to null."
            )
        if not hasattr(module, "canary_scores"):
            raise ConfigurationError(
                f"callbacks.audit: {type(module).__name__} has no canary_scores(rows). Set callbacks.audit to null."
            )

    def _count(self, units: int, neighbours: str) -> int:
        if self.canaries is None and neighbours == "add_or_remove":
            raise ConfigurationError(
                "callbacks.audit.canaries=null cannot be derived from a number of units that is private under "
                "privacy.neighbours=add_or_remove. Set callbacks.audit.canaries."
            )
        allowed = int(self.max_share * units)
        count = min(MOST, allowed) if self.canaries is None else self.canaries
        if count > allowed or count < LEAST:
            way = "Raise that share, to train on more canaries, or plant fewer; or set callbacks.audit to null."
            raise ConfigurationError(
                f"callbacks.audit would plant at least {LEAST if self.canaries is None else count} canaries, more than "
                f"callbacks.audit.max_share={self.max_share:g} of the units. "
                f"{way if self.max_share < 1 else 'Set callbacks.audit to null, or train on more units.'}"
            )
        return count

    def _folder(self, trainer: L.Trainer) -> Path:
        return self.run_dir or Path(trainer.default_root_dir)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Register the audit in the ledger, and score the canaries with the initial model."""
        if self._coins is None:
            raise ConfigurationError(
                "callbacks.audit: nothing was planted. Put a PrivacyAccountant among the Trainer's callbacks."
            )
        ledger = ledger_of(trainer)
        self._register(ledger)
        folder, sha256 = self._folder(trainer), self._coins.facts["sha256"]
        if noise_keys(ledger.records):
            self._scores = read_scores(folder, sha256=sha256)
        else:
            before, twins = self._score(pl_module)
            self._scores = AuditScores(sha256=sha256, before=before, twins_before=twins)
            write_scores(self._scores, folder)

    def _register(self, ledger: Any) -> None:
        """Record the audit's settings before the first release; refuse a resume with other settings."""
        facts = {
            "canaries": len(self._coins.rows),
            "sha256": self._coins.facts["sha256"],
            "guessed_shares": list(SHARES),
            "confidence": self.confidence,
            "alarm": ALARM,
        }
        known = events_of(ledger.records, AUDIT_EVENT)
        if known:
            for name, value in facts.items():
                if known[0]["audit"].get(name) != value:
                    raise ResumeError(
                        f"resume=true with another audit: {name} was {known[0]['audit'].get(name)!r} and is {value!r} "
                        "now. It was fixed before the first release; restore it."
                    )
            return
        ledger.append("event", name=AUDIT_EVENT, audit=facts)
        plan, _ = plan_of(ledger.records)
        claim = None if plan is None else planned_curve(plan)
        if claim is None:
            return
        best = Best.of(len(self._coins.rows), claim, confidence=self.confidence)
        if best.eps_lower < claim.eps or not best.alarms:
            _log.warning(
                "callbacks.audit: %s, whatever the run does; epsilon %.3g is planned. Raise callbacks.audit.canaries, "
                "if "
                "callbacks.audit.max_share allows it.", best.describe(len(self._coins.rows)), claim.eps,
            )  # fmt: skip

    def _score(self, module: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the scores of the canaries and, where twins replace omitted canaries, of the twins."""
        with torch.random.fork_rng(devices=[module.device] if module.device.type == "cuda" else []):
            rows = module.canary_scores(list(self._coins.rows))
            twins = module.canary_scores(list(self._coins.twins)) if self._neighbours == "replace_one" else ()
        return tuple(map(float, rows)), tuple(map(float, twins))

    # -- after the run -----------------------------------------------------------------------

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._judge(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Audit a run resumed after its last step, and raise if the claim is contradicted."""
        if not self._judged:
            self._judge(trainer, pl_module)
        if self._violation is not None:
            raise self._violation

    def _judge(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        folder = self._folder(trainer)
        after, twins = self._score(module)
        self._scores = AuditScores(
            sha256=self._scores.sha256, before=self._scores.before, after=after,
            twins_before=self._scores.twins_before, twins_after=twins,
        )  # fmt: skip
        write_scores(self._scores, folder)
        scores = CanaryScores.of(self._scores.learned(), list(self._coins.included))
        claim = claimed_curve(ledger_of(trainer).records)
        evidence = both_ends_audit(scores, delta=0.0 if claim is None else claim.delta, confidence=self.confidence)
        refutation = None if claim is None else refute(scores, claim.pairs)
        at_point = None if refutation is None else both_ends_audit(scores, delta=refutation.delta, confidence=ALARM)
        found = audit_results(
            evidence, canaries=len(scores), counts=both_ends(scores), refutation=refutation, at_point=at_point,
            best=Best.of(len(scores), claim, confidence=self.confidence),
        )  # fmt: skip
        for place in (folder, folder / MODEL_FOLDER):
            known = read_card(place)["empirical"]["results"] if (place / CARD_NAME).is_file() else []
            add_evidence(place, [result for result in found if not stands_already(result, known)])
        self._judged = True
        if claim is not None and refutation is not None and refutation.contradicts(confidence=ALARM):
            self._violation = _violation(evidence, claim, refutation, len(scores))


def _violation(evidence: Evidence, claim: ClaimedCurve, refutation: Refutation, canaries: int) -> PrivacyViolation:
    return PrivacyViolation(
        f"The audit contradicts the claim: with {canaries} canaries, guesses as good as these have a probability of at "
        f"most {refutation.p_value:.2g} under a run that is ({show_epsilon(refutation.eps)}, "
        f"{show_delta(refutation.delta)})-DP, as the ledger says this one is. Evidence of leakage at least "
        f"{evidence.eps_lower:.4g} at delta={show_delta(claim.delta)} (confidence {evidence.confidence:g}), where "
        f"{show_epsilon(claim.eps)} is claimed. The model and its card are written, and the card says what was found: "
        "publish neither until the defect is found."
    )
