"""Write the card within the run, from the ledger, next to its model.

This callback exports the model and writes the card as the last act of training, and again, marked as interrupted, when
a run ends early. A card written after ``fit`` could only describe the configuration.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lit_dpret.callbacks.averages import averaged, describe
from lit_dpret.callbacks.planning import accountant_of, ledger_of
from lit_dpret.callbacks.retrieval_evaluation import SHARED_BY_CHANCE
from lit_dpret.cards.amendments import with_notes
from lit_dpret.cards.card import (
    CARD_NAME,
    CardFacts,
    RunFacts,
    build_card,
    inherit_card,
    read_card,
    subject_of,
    write_card,
)
from lit_dpret.cards.file import MODEL_FOLDER
from lit_dpret.cards.provenance import (
    declared_start,
    environment_facts,
    new_protocols,
    note_protocols,
    overlap_facts,
    protocol_facts,
    text_hashes,
)
from lit_dpret.cards.text import privacy_line
from lit_dpret.cards.tuning import (
    TuningData,
    refuse_other_tuning,
    refuse_told_number,
    refuse_trials_of_no_choice,
    tuning_facts,
)
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.ledger.assumptions import Assumption, leaks
from lit_dpret.settings import require_choice
from lit_dpret.texts import train_queries

_NEEDS = "PrivacyCard needs the PrivacyAccountant callback before it: the card is made from its ledger."


class PrivacyCard(Callback):
    """Write ``model/`` and ``privacy_card.{json,md,html}`` when training ends.

    Guarantees:
        - The card's epsilon is recomputed from the ledger on disk.
        - If a callback averages the weights, the average is the model.
        - The model folder has a copy of the card, so that model and card stay together.
        - On several ranks, rank 0 writes, and the others wait for it.

    Args:
        run_dir: The run folder; null for the Trainer's ``default_root_dir``.
        tuning_data: The data that hyper-parameters were chosen on: ``none``, ``public``, ``synthetic``, ``private`` or
            ``unknown``. A choice among trainings on private data is ``private``, whatever they were scored on.
        tuning_trials: How many configurations were tried.
        tuning_note: A description of the tuning in words.
        tuning_method: ``random_stopping`` for a search on private data that kept the best of a random
            number of runs, whose cost the card then states; null for any other.
        tuning_mean_runs: The mean of that number. The number itself must stay secret.
        tuning_runs_law: Its distribution: ``geometric`` (null), ``logarithmic``, ``poisson``, or the shape of a
            truncated negative binomial.
        pretraining_overlap: The ``pretraining_overlap.json`` of `task=pretraining_overlap` on public texts; its
            findings go on the card.
        audit_protocols: Files that describe how the result will be audited; their hashes go into the ledger before
            the first release, and on the card.
    """

    def __init__(
        self,
        *,
        run_dir: str | Path | None = None,
        tuning_data: str = "unknown",
        tuning_trials: int | None = None,
        tuning_note: str | None = None,
        tuning_method: str | None = None,
        tuning_mean_runs: float | None = None,
        tuning_runs_law: str | float | None = None,
        pretraining_overlap: str | Path | None = None,
        audit_protocols: Sequence[str | Path] = (),
    ) -> None:
        require_choice("callbacks.card.tuning_data", tuning_data, get_args(TuningData))
        self.run_dir = None if run_dir is None else Path(run_dir)
        self._written = self._fits = False
        self.tuning = {
            "data": tuning_data,
            "n_trials": tuning_trials,
            "method": tuning_method or "none",
            "mean_runs": tuning_mean_runs,
            "runs_law": tuning_runs_law,
            "note": tuning_note or "",
        }
        self.audit_protocols = [Path(file) for file in audit_protocols or ()]
        protocol_facts(self.audit_protocols)  # refuse an unreadable file before the run
        self.overlap: dict[str, Any] | None = None
        self._overlapping = frozenset[str]()
        if pretraining_overlap is not None:
            self.overlap, self._overlapping = overlap_facts(pretraining_overlap)
        refuse_trials_of_no_choice(self.tuning, knob="callbacks.card.tuning_")
        tuning_facts(self.tuning)  # refuse a declaration that cannot be stated or priced before the run, not after it

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Register the protocols in the ledger that the accountant has just opened."""
        self._fits = stage == "fit"
        if not self._fits:  # the card of a finished run stays, whatever is measured with its module
            return
        self._written = False
        self._check_order(trainer)
        self._refuse_other_files(trainer, pl_module)
        if (sweep := getattr(accountant_of(trainer), "sweep", None)) is not None:
            refuse_other_tuning(self.tuning, sweep.facts["metric_data"])
        if getattr(pl_module.privacy, "dataset_ledger", None):
            refuse_told_number(self.tuning, "privacy.dataset_ledger")
        if not self.audit_protocols:
            return
        Ranks.here().share(lambda: self._register(trainer, pl_module))

    def refuse_late_protocols(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Refuse protocols not registered in a run's ledger before its first release, before it is opened."""
        new_protocols(records, self.audit_protocols)

    def refuse_protected(self, module: Any, data: Any) -> None:
        """Refuse an overlap check if over a tenth of its queries, declared public, are train queries of ``data``."""
        if not self._overlapping or module.privacy.guarantee != "dp":
            return
        trained = text_hashes(train_queries(data))
        if len(self._overlapping & set(trained)) > SHARED_BY_CHANCE * len(self._overlapping):
            raise ConfigurationError(
                "callbacks.card.pretraining_overlap was computed on queries of which over a tenth are train queries of "
                "this run: a release without noise. Compute it on other queries, or set it to null.",
                trap="T25",
            )

    def _check_order(self, trainer: L.Trainer) -> None:
        """Refuse a position before the accountant, which would extend the ledger after the card is written."""
        counting = (self, accountant_of(trainer))
        callbacks: list[Any] = [each for each in trainer.callbacks if each in counting]  # type: ignore[attr-defined]
        if len(callbacks) == 2 and callbacks[0] is self:
            raise ConfigurationError(
                "callbacks: PrivacyAccountant would write its last record after PrivacyCard has written the card. Put "
                "PrivacyAccountant first."
            )

    def _refuse_other_files(self, trainer: L.Trainer, module: Any) -> None:
        """Refuse to save the weights among other files, all of which the card would call the weights."""
        folder = self.run_dir or Path(trainer.default_root_dir)
        model, resumed = folder / MODEL_FOLDER, getattr(accountant_of(trainer), "resume", False)
        if resumed or not hasattr(module, "save_model") or not model.is_dir():
            return
        if (model / CARD_NAME).is_file():  # of an earlier fit of this run
            head = (read_card(model)["ledger"] or {}).get("head")
            ledger = ledger_of(trainer)
            if module.privacy.guarantee != "dp" or ledger is None or head in {one["hash"] for one in ledger.records}:
                return
        if (other := next((path for path in sorted(model.rglob("*")) if path.is_file()), None)) is not None:
            raise ConfigurationError(
                f"{model}, where the weights and their card go, holds other files ({other.name}). Set "
                "callbacks.card.run_dir, or the Trainer's default_root_dir, to a folder that only this run uses."
            )

    def _register(self, trainer: L.Trainer, module: Any) -> None:
        if module.privacy.guarantee == "inherited":
            raise ConfigurationError(
                f"callbacks.card.audit_protocols with privacy={module.privacy.name}: this run makes no release of its "
                "own. Give it to the run that trains on the private data."
            )
        if (ledger := ledger_of(trainer)) is None:
            raise ConfigurationError(_NEEDS)
        note_protocols(ledger, self.audit_protocols)

    def _declared(self) -> list[Assumption]:
        if self.overlap is None or self.overlap["whose"] != "public":
            return []
        text = "The queries that the overlap check looked for in its corpus are public, as declared."
        return [Assumption(text, "unverified")]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module: Any = pl_module
        if (accountant := accountant_of(trainer)) is not None:
            accountant.refuse_unseen_writes()
        assembled = module.assembled() if hasattr(module, "assembled") else nullcontext()  # a custom module may lack it
        with averaged(trainer, pl_module), assembled:
            Ranks.here().share(lambda: self._write(trainer, pl_module, finished=True))
        self._written = True

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write after a resume from the last step, where Lightning skips training and ``on_train_end``."""
        if not self._written:
            self.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._written or not self._fits:  # the card of the finished model stays
            return
        ledger = ledger_of(trainer)
        unwritten = isinstance(exception, OSError) and (not ledger or ledger.records[-1]["kind"] != "end")
        if ledger is not None and ledger.records and not unwritten:
            self._write(trainer, pl_module, finished=False)

    def _write(self, trainer: L.Trainer, module: Any, *, finished: bool) -> None:
        accountant, data = accountant_of(trainer), trainer.datamodule  # type: ignore[attr-defined]
        if accountant is None:
            raise ConfigurationError(_NEEDS)
        records = accountant.ledger.records
        folder = self.run_dir or Path(trainer.default_root_dir)
        model = folder / MODEL_FOLDER
        saved = finished and hasattr(module, "save_model")
        if saved:
            module.save_model(model)
        files = [p for p in model.rglob("*") if p.is_file() and not p.name.startswith("privacy_card.")] if saved else []
        own = type(module).__name__
        subject = subject_of("weights", own, files, root=model if saved else None)
        environment = environment_facts(device=module.device, precision=str(trainer.precision))
        mechanism, began = _mechanism(module) | describe(trainer), _name_of(getattr(module, "pretrained", None))
        if module.privacy.guarantee == "inherited":
            card = inherit_card(
                data.privacy_card_path,
                subject,
                CardFacts(
                    mechanism=mechanism | {"started_from": began},
                    tuning=self.tuning,
                    environment=environment,
                    assumptions=[*leaks(records), declared_start(began, f"training of {own}")],
                ),
                description=f"training a {own} on it",
                ledger_records=records,
            )
        else:
            card = build_card(
                records,
                subject,
                RunFacts(
                    mechanism=mechanism,
                    tuning=self.tuning,
                    environment=environment,
                    assumptions=[*leaks(records), *self._declared()],
                    pretraining={"model": began, "overlap_check": self.overlap},
                ),
            )
        for place in (folder, model):
            card = with_notes(card, place)
        write_card(card, folder)
        if saved:
            for path in folder.glob("privacy_card.*"):
                shutil.copy2(path, model / path.name)
        if finished:  # through Lightning's logger, which the command line silences: it prints its own last line
            where = f"card: {folder / 'privacy_card.md'}" + (f", weights: {model}" if saved else "")
            rank_zero_info(f"{privacy_line(card)}; {where}")


def _name_of(pretrained: str | None) -> str:
    """Name the model that training started from: a hub model in full, a folder by its last part alone."""
    if pretrained is None:
        return "unstated"
    path = Path(pretrained).expanduser()
    return path.resolve().name if path.is_absolute() or path.exists() else pretrained


def _mechanism(module: Any) -> dict[str, Any]:
    spec = getattr(module, "optimizer_spec", None)
    if spec is None:  # a custom module has its own optimizer
        used: Any = module.optimizers()
        described = type(getattr(used, "optimizer", used)).__name__
    else:
        described = f"{spec.name}, lr {spec.lr:g}, {spec.schedule} schedule"
    return {
        "optimizer": described,
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
    }
