"""The ledgers of a run: its own, that of its data set, and that of the run it starts from.

The run's own ledger is opened once the run is planned and every check has passed. Its first records state what was
planned, on which data and from which start; the gate records what is released.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_dpret.callbacks.fixed_shapes import precision_assumptions
from lit_dpret.callbacks.origins import assumed_weights, claim_of
from lit_dpret.callbacks.own_code import trusted_code
from lit_dpret.callbacks.planning import PlannedRun, fingerprint_of_files, plan_run, refuse_unread_rows
from lit_dpret.callbacks.refusals import refuse_broken_claims, refuse_endless_losses, refuse_protected_queries
from lit_dpret.cards.start import Start, note_start, read_start
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.privacy.ledger.dataset_account import DatasetAccount, require_room
from lit_dpret.privacy.ledger.dataset_file import EarlierRun
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger, note_sweep
from lit_dpret.privacy.ledger.private_run import Fingerprints, PrivateRun
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, ledger_identity, plans_of
from lit_dpret.privacy.ledger.shared_gate import SharedGate
from lit_dpret.privacy.ledger.siblings import note_siblings, siblings_now
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.noise import load_secret, published_secret
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.sweeps.folder import SweepFolder, trial_ledger


class RunLedgers(Callback):
    """Open the ledger of a run, the run it starts from, and the ledger of its data set.

    ``PrivacyAccountant`` documents the settings.
    """

    _ranks: Ranks
    _gate: SharedGate
    _run: PrivateRun
    _identity: str
    planned_steps: int

    def __init__(
        self,
        *,
        run_dir: str | Path | None,
        resume: bool,
        resume_reserve: int,
        init_from: str | Path | None,
        init_from_is_public: bool,
        trial_of: str | Path | None,
    ) -> None:
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.resume, self.resume_reserve = resume, resume_reserve
        self.init_from, self.init_from_is_public = init_from, init_from_is_public
        self.sweep = None if trial_of is None else SweepFolder.read(trial_of)
        self._siblings = siblings_now()
        self.plan: PrivacyPlan | None = None
        self._start: Start | None = None
        self._dataset: DatasetLedger | None = None
        self._account: DatasetAccount | None = None

    @property
    def ledger(self) -> PrivacyLedger:
        """The run's ledger, on rank 0; open for writing during ``fit``."""
        if "_run" not in vars(self):
            raise AttributeError("This rank has no ledger open: rank 0 has, during fit.")
        return self._run.ledger

    @property
    def _ledger_path(self) -> Path:
        return Path(self.run_dir or ".") / LEDGER_NAME

    def start(self) -> Start | None:
        """Return the run that this one starts from, with its card checked against its ledger; read once."""
        if self._start is None and self.init_from is not None:
            self._start = read_start(self.init_from, public=self.init_from_is_public)
        return self._start

    def known_runs(self, module: Any, data: Any) -> list[str]:
        """Return the runs that this claim counts: this run, its start, and the claim of its data."""
        start = self.start()
        known = [] if start is None else list(start.facts["runs"])
        if module.privacy.guarantee == "inherited" and getattr(data, "privacy_card_path", None) is not None:
            known.append(claim_of(data))
        if "_identity" in vars(self):
            known.append(self._identity)
        elif self.resume and self.run_dir is not None and self._ledger_path.is_file():
            known.append(ledger_identity(PrivacyLedger.read(self._ledger_path).records))
        return known

    def _begun_with(self) -> int | None:
        if not self.resume or not self._ledger_path.exists():
            return None
        plans = plans_of(PrivacyLedger.read(self._ledger_path).records)
        return int(plans[-1]["planned_steps"]) if plans else None

    def _planned(self, trainer: L.Trainer, module: Any, data: Any, begun_with: int | None) -> PlannedRun:
        refuse_broken_claims(trainer, module, data)
        if self._ranks.is_first:
            refuse_unread_rows(module, data)
            refuse_protected_queries(trainer, module, data)
            self._secret(module.privacy)  # a bad secret file is refused before a long calibration
            if module.privacy.guarantee == "dp":
                refuse_endless_losses(module)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "plant_canaries"):  # an audit: before planning, because n counts the canaries
                callback.plant_canaries(trainer, module, data)
        reserve = self.resume_reserve
        return plan_run(
            trainer, module.privacy, data, module=module, reserve=reserve, start=self.start(), begun_with=begun_with
        )

    def _secret(self, mode: PrivacyMode) -> bytes:
        if mode.noise_seed is None:
            return load_secret(mode.secret_file, run_dir=self.run_dir)
        return published_secret(mode.noise_seed)

    def _open(self, trainer: L.Trainer, module: Any, data: Any, planned: PlannedRun, secret: bytes) -> str:
        mode: PrivacyMode = module.privacy
        self._dataset = self._dataset_ledger(mode)
        if self.resume and self._ledger_path.exists():  # a refusal leaves the folder unchanged
            records = PrivacyLedger.read(self._ledger_path).records
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if hasattr(callback, "refuse_late_protocols"):
                    callback.refuse_late_protocols(records)
        planted = getattr(data, "planted_facts", None)
        self._run = PrivateRun.open(
            self._ledger_path,
            resume=self.resume,
            secret=secret,
            described={
                **planned.describe(mode, data),
                "log_private_loss": bool(module.log_private_loss),
                "assumptions": [
                    *getattr(module, "assumptions", list)(),
                    *getattr(data, "assumptions", list)(),
                    *precision_assumptions(trainer, module),
                    *assumed_weights(module, self),
                    *(trusted_code(trainer, module, data) if mode.guarantee != "none" else ()),
                ],
                "planted": planted,
                **({"mode_facts": facts} if (facts := mode.recorded_facts()) else {}),
            },
            fingerprints=Fingerprints(
                data=data.data_fingerprint,
                unplanted=partial(data.data_fingerprint, planted=False) if planted else None,
                files=partial(fingerprint_of_files, module),
            ),
            run_id=None if mode.noise_seed is None else "seeded",
            dataset=self._dataset,
        )
        note_start(self._run.ledger, self.start())
        note_sweep(self._run.ledger, None if self.sweep is None else self.sweep.describe())
        if self.sweep is None and self.plan is not None:
            note_siblings(self._run.ledger, self._siblings)
        return self._run.run_id

    def _dataset_ledger(self, mode: PrivacyMode) -> DatasetLedger | None:
        if self.plan is None:
            return None
        ledger = mode.ledger_of_dataset(self.plan.budget, run_dir=self.run_dir)
        if self.sweep is not None:
            ledger = trial_ledger(self.sweep, self.plan.budget, own=ledger, mode=mode.name)
        uncounted = self._uncounted(ledger)
        if ledger is not None:
            release = self.plan.release()
            require_room(ledger, self._ledger_path, release, steps=self.planned_steps, earlier=uncounted)
        return ledger

    def _uncounted(self, ledger: DatasetLedger | None) -> tuple[EarlierRun, ...]:
        """Return the run whose model this one starts from, if the data set's ledger does not count it."""
        start = self.start()
        return () if start is None else start.uncounted(ledger)

    def _reserve(self) -> None:
        if self._dataset is not None:
            earlier = self._uncounted(self._dataset)
            self._account = DatasetAccount(self._dataset, self._gate.own, steps=self.planned_steps, earlier=earlier)
            self._account.reserve()

    def _keep_covered(self) -> None:
        if self._account is not None:
            self._account.keep_covered()

    def _close_account(self) -> None:
        if self._account is not None:
            self._account.close()
