"""Refuse, before a run starts, settings under which its claim would be false.

One list of checks serves both a fit, which raises the first refusal, and ``task=doctor``, which reports all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch.nn.parameter import UninitializedParameter

from lit_dpret.callbacks.averages import refuse_averages
from lit_dpret.callbacks.first_come import refuse_first_come
from lit_dpret.callbacks.fixed_shapes import refuse_changing_rows, refuse_changing_shapes
from lit_dpret.callbacks.origins import refuse_cards_behind, refuse_other_weights, refuse_set_later
from lit_dpret.callbacks.own_code import (
    refuse_changed_batches,
    refuse_random_layers,
    refuse_replaced_weighting,
    refuse_saved_data,
    settings_in,
)
from lit_dpret.callbacks.strategies import (
    refuse_parted_sums,
    refuse_second_masters,
    refuse_uncut_optimizer,
    refuse_unsupported,
    refuse_zero_settings,
    strategy_name,
)
from lit_dpret.cards.file import (
    card_beside,
    card_names,
    card_of_data,
    check_dataset_card,
    names_behind,
    read_card,
    refuse_another_claim,
)
from lit_dpret.cards.start import Start
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.privacy.ledger.gate import no_accountant, refuse_other_sums
from lit_dpret.privacy.sampling import not_offered
from lit_dpret.privacy.user_code import is_library
from lit_dpret.privacy.user_generators import kept_generators
from lit_dpret.texts import queries_of, refuse_quoted

Check: TypeAlias = Callable[["Candidate"], None]

#: Quantities to monitor that follow from the plan and the number of steps, whatever the rows are. The gate of logged
#: numbers lets no other code write under these names.
_DECIDED_BEFORE = frozenset({"privacy/eps_spent", "privacy/delta", "epoch", "step"})


@dataclass(frozen=True)
class Candidate:
    """A run about to begin: the Trainer, the module and the data."""

    trainer: L.Trainer
    module: Any
    data: Any

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks of the Trainer, including those that the module will add."""
        own = self.module.configure_callbacks()
        return [*self.trainer.callbacks, *(own if isinstance(own, (list, tuple)) else [own])]  # type: ignore[attr-defined]

    def metrics(self, *, of_other_claims: bool) -> set[str]:
        """Return the declared names: those that cost nothing, or those whose epsilon is in no claim of this run."""
        found = [one for one in self.callbacks if self._spends_another_claim(one) == of_other_claims]
        return {name for callback in found for name in getattr(callback, "public_metrics", ())}

    def _spends_another_claim(self, callback: Callback) -> bool:
        """Return whether it evaluates on a synthetic set other than the one that this run's claim covers."""
        if getattr(callback, "data", None) != "synthetic":
            return False
        inherited = getattr(getattr(self.module, "privacy", None), "guarantee", "none") == "inherited"
        return not (inherited and getattr(callback, "datamodule", None) in (None, self.data))

    @property
    def choosing(self) -> list[Any]:
        return [
            callback for callback in self.callbacks
            if isinstance(callback, (EarlyStopping, ModelCheckpoint)) and callback.monitor is not None
        ]  # fmt: skip

    @property
    def checks(self) -> tuple[Check, ...]:
        guarantee = getattr(getattr(self.module, "privacy", None), "guarantee", "none")
        more = {"dp": _ANY_CLAIM + _DP, "inherited": _ANY_CLAIM + _INHERITED}.get(guarantee, ())
        return _SHAPE + _EVERY + more

    @property
    def resumes(self) -> bool:
        return any(getattr(c, "counts_releases", False) and getattr(c, "resume", False) for c in self.callbacks)

    @property
    def start(self) -> Start | None:
        counters = (callback for callback in self.callbacks if getattr(callback, "counts_releases", False))
        return next((counter.start() for counter in counters if hasattr(counter, "start")), None)


def refuse_broken_claims(trainer: L.Trainer, module: Any, data: Any) -> None:
    """Refuse a Trainer, module or DataModule with which the run would make uncounted releases."""
    candidate = Candidate(trainer, module, data)
    for check in candidate.checks:
        check(candidate)


def complaints(trainer: L.Trainer, module: Any, data: Any) -> list[LitDpretError]:
    """Return every error that `refuse_broken_claims` would raise if the ones before were fixed."""
    candidate, found = Candidate(trainer, module, data), []
    for check in candidate.checks:
        try:
            check(candidate)
        except LitDpretError as error:
            found.append(error)
            if check in _SHAPE:
                break  # the other checks need what is missing
    return found


def _is_private_module(run: Candidate) -> None:
    if not hasattr(run.module, "privacy") or not hasattr(run.module, "receive_guard"):
        raise ConfigurationError(
            f"{type(run.module).__name__} is not a PrivateModule: the accountant could not see its releases. Derive it "
            "from PrivateModule, or wrap it with make_private.",
            trap="T7",
        )


def _declares_names(run: Candidate) -> None:
    for source in (run.module, *run.callbacks):
        if isinstance(names := getattr(source, "public_metrics", ()), str):
            raise ConfigurationError(
                f"{type(source).__name__}.public_metrics={names!r} is one string, of which each letter would count as "
                f"a name. Write ({names!r},)."
            )


def _is_built(run: Candidate) -> None:
    """Refuse weights without a shape: neither their initial values nor their number are known."""
    for name, parameter in run.module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigurationError(
                f"{name} of {type(run.module).__name__} has no shape yet (a lazy layer), and the run is planned now. "
                "Pass a public batch through the layer before trainer.fit, or set its sizes."
            )


def _starts_from_numbers(run: Candidate) -> None:
    """Refuse weights that are not finite: no unit would contribute, and the steps would pay for noise alone."""
    for name, parameter in run.module.named_parameters():
        if not parameter.is_meta and not bool(parameter.detach().isfinite().all()):
            raise ConfigurationError(
                f"{name} of {type(run.module).__name__} holds NaN or infinity before the first step, and the budget "
                "would be spent on noise alone. Load other weights (model.pretrained, model.encoder or init_from)."
            )


def refuse_endless_losses(module: Any) -> None:
    """Refuse a loss that is not finite on rows that are not data (`PrivateModule.probe_losses`), at no privacy cost."""
    if any(parameter.is_meta for parameter in module.parameters()):
        return
    if not is_library(type(module).setup.__module__):  # it may build what the loss needs, and is called later
        return
    try:
        losses = module.probe() if hasattr(module, "probe") else None
    except MisconfigurationException:  # the loss logs, which Lightning allows only within a step
        return
    if losses is not None and not bool(losses.isfinite().any()):
        raise ConfigurationError(
            f"The loss of {type(module).__name__} is {losses.flatten()[0].item()} on rows that are no data (random "
            "words, or public_rows), and the budget would be spent on noise alone. Correct per_row_loss or its "
            "temperature."
        )


def _is_not_compiled(run: Candidate) -> None:
    if getattr(run.module, "_compiler_ctx", None) is not None:  # set by torch.compile(module)
        raise ConfigurationError(
            f"{type(run.module).__name__} was given to trainer.fit inside torch.compile, which cannot follow a step. "
            "Build the module again and give trainer.fit the module itself."
        )


def _states_a_law(run: Candidate) -> None:
    missing = [] if run.data is None else not_offered(run.data)
    if run.data is None or missing:
        what = "there is none" if run.data is None else f"{type(run.data).__name__} lacks {', '.join(missing)}"
        raise ConfigurationError(
            f"The accountant reads the law of the batches from the DataModule, and {what}. Pass datamodule= to "
            "trainer.fit: a UnitDataModule, a PairsDataModule, or a lit_dpret.privacy.sampling.TrainingData.",
            trap="T1",
        )


def _is_counted(run: Candidate) -> None:
    if not any(getattr(callback, "counts_releases", False) for callback in run.callbacks):
        raise no_accountant(type(run.module).__name__)


def _supported_strategy(run: Candidate) -> None:
    refuse_unsupported(run.trainer, run.module.privacy)
    refuse_uncut_optimizer(run.trainer, run.module)
    refuse_second_masters(run.trainer)
    refuse_parted_sums(run.trainer, run.module)
    if strategy_name(run.trainer) == "deepspeed":
        refuse_zero_settings(run.trainer.strategy)


def _carries_a_card(run: Candidate) -> None:
    if not hasattr(run.data, "privacy_card_path"):
        raise ConfigurationError(
            f"privacy=synthetic trains on data with a privacy card, and {type(run.data).__name__} reads none. "
            "Choose datamodule=synthetic, or another privacy mode.",
            trap="T27",
        )
    check_dataset_card(run.data.privacy_card_path)


def _reads_what_its_claim_covers(run: Candidate) -> None:
    """Refuse a file read in addition to the data if its privacy card states releases that this run's claim omits."""
    files = dict(run.module.files_read()) if hasattr(run.module, "files_read") else {}
    if (keep := getattr(run.data, "keep", None)) is not None:
        files["datamodule.keep"] = keep
    for knob, file in files.items():
        if (path := card_beside(file)) is None:
            continue
        check_dataset_card(path)
        card, claim = read_card(path), card_of_data(run.data)
        names = card_names(path, card)
        if card["mechanism"].get("kind") == "post_processing":  # adds nothing to the claim of its nearest parent
            names |= {str(parent["sha256"]) for parent in card["parents"][:1]}
        if claim is None or not names & names_behind(claim, read_card(claim)):
            raise ConfigurationError(
                f"{knob}={file} carries a privacy card ({path}) that the claim of the data does not cover. Use a file "
                "derived from exactly the training queries, or from public ones.",
                trap="T27",
            )


def _starts_unseen(run: Candidate) -> None:
    counters = (callback for callback in run.callbacks if hasattr(callback, "known_runs"))
    if (counter := next(counters, None)) is not None:
        refuse_other_weights(run.module, counter, run.data)
        refuse_set_later(run.module, counter, run.data)


def _shows_nothing_beside_a_total(run: Candidate) -> None:
    """Refuse to count a run in a data-set total if its own card will prove nothing."""
    ledger = getattr(run.module.privacy, "dataset_ledger", None)
    if ledger is None:
        return
    shown = [
        f"callbacks: {type(c).__name__}(data=private)" for c in run.callbacks if getattr(c, "data", None) == "private"
    ]
    if run.module.log_private_loss:
        shown.append("model.log_private_loss=true")
    if shown:
        raise ConfigurationError(
            f"{shown[0]} shows uncounted numbers of private rows, so the total of privacy.dataset_ledger={ledger} "
            "would no longer be true. Remove one of the two."
        )


def _chooses_by_public_metrics(run: Candidate) -> None:
    known = run.metrics(of_other_claims=False) | run.metrics(of_other_claims=True) | _DECIDED_BEFORE
    if run.module.privacy.guarantee == "inherited":  # metrics of the training rows are within the claim
        known |= {"train/loss", *getattr(run.module, "public_metrics", ())}
    for callback in run.choosing:
        if callback.monitor not in known:
            raise ConfigurationError(
                f"{type(callback).__name__}(monitor={callback.monitor!r}) chooses by private data: an uncounted "
                "release. Keep the last checkpoint of a fixed trainer.max_steps, or monitor the public_metrics of a "
                f"callback (PublicValidation, RetrievalEvaluation), or one of {', '.join(sorted(_DECIDED_BEFORE))}.",
                trap="T25",
            )


def _chooses_by_no_other_claim(run: Candidate) -> None:
    spending = run.metrics(of_other_claims=True)
    for callback in run.choosing:
        if callback.monitor in spending:
            raise ConfigurationError(
                f"{type(callback).__name__}(monitor={callback.monitor!r}) chooses by synthetic queries, whose own "
                "epsilon no card would state. Keep the last checkpoint, or evaluate on public queries "
                "(callbacks.evaluation.data=public).",
                trap="T25",
            )


def _validates_nothing(run: Candidate) -> None:
    if type(run.module).validation_step is not L.LightningModule.validation_step:
        raise ConfigurationError(
            f"{type(run.module).__name__}.validation_step computes metrics inside a private run: uncounted releases. "
            "On public rows, compute them in a callback with public_metrics, or by make_private and PublicValidation "
            "(docs/howto/lightning.md, public validation data); or evaluate after the run.",
            trap="T25",
        )


def _validates_on_declared_data(run: Candidate) -> None:
    for callback in run.callbacks:
        if hasattr(callback, "refuse_undeclared"):
            callback.refuse_undeclared(run.module, run.data)


def refuse_protected_queries(trainer: L.Trainer, module: Any, data: Any) -> None:
    """Refuse to evaluate on, or publish, the run's protected queries; ``data`` must be set up."""
    if hasattr(module, "refuse_protected"):
        module.refuse_protected(data)
    for callback in Candidate(trainer, module, data).callbacks:
        if hasattr(callback, "refuse_protected"):
            callback.refuse_protected(module, data)
    behind = _artefacts_behind(trainer, module, data)
    for callback in Candidate(trainer, module, data).callbacks if behind else ():
        if hasattr(callback, "refuse_queries_behind"):
            callback.refuse_queries_behind(behind, data)
    if module.privacy.guarantee == "dp":
        with kept_generators():  # reading rows may draw random numbers
            refuse_quoted(queries_of(data), *_published(trainer, module, data), because=_PUBLISHED)


def _artefacts_behind(trainer: L.Trainer, module: Any, data: Any) -> list[Path]:
    """Return the folders of what this run's claim rests on: the data it inherits the claim from, or its start."""
    if module.privacy.guarantee == "inherited":
        card = getattr(data, "privacy_card_path", None)
        return [] if card is None else [Path(card).parent]
    accountants = (c for c in trainer.callbacks if getattr(c, "counts_releases", False))  # type: ignore[attr-defined]
    start = getattr(next(accountants, None), "start", lambda: None)()
    return [] if start is None or start.facts["public"] or module.privacy.guarantee == "none" else [start.folder]


_PUBLISHED = (
    "it is published, and the queries are protected. Use public words, or leave a hyper-parameter out, as with "
    "self.save_hyperparameters(ignore=[...])."
)
#: Logger attributes with one of these in their names are locations, which are not sent.
_OF_THE_MACHINE = ("dir", "path", "uri")


def _published(trainer: L.Trainer, module: Any, data: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return, by setting, the texts and names that appear on the card, in checkpoints or at a logger's service."""
    texts, folder = {}, Path(trainer.default_root_dir)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if "note" in (tuning := getattr(callback, "tuning", {})):
            texts["callbacks.card.tuning_note"] = str(tuning["note"])
        if getattr(callback, "counts_releases", False):
            folder = callback.run_dir or folder
    for knob, each in (("assumptions of the module", module), ("assumptions of the DataModule", data)):
        texts |= {f"{knob}, {i + 1}": str(text) for i, text in enumerate(getattr(each, "assumptions", list)())}
    names = {"the name of the run folder": folder.resolve().name}
    for logger in trainer.loggers:
        kept = {**vars(logger), **vars(logger).get("_wandb_init", {})}
        told = {name: text for name, text in kept.items() if not any(word in name for word in _OF_THE_MACHINE)}
        names |= {f"logger ({type(logger).__name__}), {where}": text for where, text in _strings(told)}
    for knob, each in (("model", module), ("datamodule", data)):
        names |= {f"{knob}.{where}": text for where, text in _strings(getattr(each, "hparams", {}))}
    return texts, names


def _strings(content: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts in a setting, including its keys, with their paths."""
    found = (each for each in settings_in(content, keys=True) if isinstance(each[1], str))
    for number, (where, text) in enumerate(found):
        yield (f"{where} ({number})" if where.startswith("a key of ") else where), text


def takes_whole_epochs(trainer: L.Trainer) -> bool:
    """Return whether an epoch ends with the sampler's epoch, not after fewer batches."""
    limit = trainer.limit_train_batches
    whole = limit is None or (isinstance(limit, float) and limit == 1.0)  # the int 1 means one batch
    return whole and not getattr(trainer, "overfit_batches", False)


def _whole_batches(run: Candidate) -> None:
    if not takes_whole_epochs(run.trainer):
        raise ConfigurationError(
            "trainer.limit_train_batches and trainer.overfit_batches change the sampling law. Use trainer.max_steps.",
            trap="T2",
        )


def _takes_its_steps(run: Candidate) -> None:
    """Refuse, under any mode, settings that keep a logical batch from being finished."""
    if batches := getattr(run.trainer, "fast_dev_run", False):
        raise ConfigurationError(
            f"trainer.fast_dev_run={batches} ends in the middle of a logical batch. Use trainer.max_steps, or try it "
            "without a run: task=doctor, lit_dpret.assert_private.",
            trap="T2",
        )
    every = getattr(run.trainer, "reload_dataloaders_every_n_epochs", 0)
    if every:
        raise ConfigurationError(
            f"trainer.reload_dataloaders_every_n_epochs={every} would discard prefetched parts of a logical batch. Set "
            "it to 0: the sampler draws again at each step."
        )


def _has_not_trained(run: Candidate) -> None:
    """Refuse a Trainer that continues the step count of an earlier fit, and might make no steps."""
    if run.trainer.global_step and not run.resumes:
        raise ConfigurationError(
            f"This Trainer has made {run.trainer.global_step} steps in an earlier fit, and would make fewer than are "
            "planned. Use a new Trainer for each run."
        )


def _has_fresh_callbacks(run: Candidate) -> None:
    """Refuse Lightning callbacks that hold numbers of an earlier fit, which no claim of this run covers."""
    if run.resumes:  # they get the numbers from the run's checkpoint
        return
    for callback in run.callbacks:
        kept: Any = None
        if isinstance(callback, EarlyStopping):
            kept = bool(torch.isfinite(callback.best_score)) or callback.stopped_epoch
        elif isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            kept = callback.best_k_models or callback.current_score is not None
        elif isinstance(callback, WeightAveraging):
            kept = callback._latest_update_step
        if kept:
            raise ConfigurationError(
                f"{type(callback).__name__} keeps what it measured or averaged in an earlier fit, which no claim of "
                "this run covers. Use new callbacks for each run."
            )


def _known_precision(run: Candidate) -> None:
    if str(run.trainer.precision).startswith("16"):
        raise ConfigurationError(
            f"trainer.precision={run.trainer.precision}: the loss scaler skips steps that were paid for. "
            "Choose bf16-mixed or 32-true.",
            trap="T7",
        )
    if str(run.trainer.precision) not in _PRECISIONS:
        raise ConfigurationError(
            f"trainer.precision={run.trainer.precision}: its effect on batches and updates is unknown. Choose one of "
            f"{', '.join(_PRECISIONS)}."
        )


def _tells_no_times(run: Candidate) -> None:
    """Refuse whatever records, or acts on, the duration or memory use of private steps."""
    found = type(run.trainer.profiler)  # type: ignore[attr-defined]
    if found is not PassThroughProfiler:
        raise ConfigurationError(
            f"trainer.profiler={found.__name__} writes down how long each step took, which depends on its texts. "
            "Profile under privacy=none; callbacks=with_throughput shows the speed on the terminal only.",
            trap="T35",
        )
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise ConfigurationError(
                f"{type(callback).__name__}(train_time_interval=...) saves by the clock, which reveals the duration of "
                "private steps. Set every_n_train_steps.",
                trap="T35",
            )
    for logger in run.trainer.loggers:
        if not isinstance(logger, WandbLogger):
            continue
        settings = logger._wandb_init.get("settings") or {}
        kept = settings if isinstance(settings, dict) else vars(settings)
        if kept.get("console") != "off" or kept.get("x_disable_stats") is not True:
            raise ConfigurationError(
                "W&B would record terminal output and system metrics with times. Use logger=wandb, or WandbLogger("
                'settings=wandb.Settings(console="off", x_disable_stats=True)).',
                trap="T35",
            )


def _no_accumulation(run: Candidate) -> None:
    refuse_other_sums(run.trainer)
    for callback in run.callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            raise ConfigurationError(
                f"trainer.accumulate_grad_batches={callback.scheduling} would noise each of several batches. Set "
                "datamodule.physical_batch_size instead.",
                trap="T12",
            )


_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


def _ends_for_no_private_row(run: Candidate) -> None:
    """Refuse torch's anomaly detection, which ends the run at a row that would contribute zero."""
    if getattr(run.trainer, "_detect_anomaly", False):
        raise ConfigurationError(
            "trainer.detect_anomaly=true ends the run at the first private row whose gradient is not a number, which "
            "reveals that row. Set it to false: such a row counts as zero.",
            trap="T25",
        )


_TIMES = (
    "{} records, or ends the run by, times, memory or losses of private steps, which depend on the data in them. "
    "Remove it, and set the length by trainer.max_steps; callbacks=with_throughput shows the speed on the terminal."
)
#: Lightning callbacks refused in every run under a guarantee: the classes, the trap, and the reason.
_REFUSED_CALLBACKS: tuple[tuple[tuple[type, ...], str, str], ...] = (
    (
        (LearningRateFinder, BatchSizeFinder), "T25",
        "{} trains on private data to choose a setting, which is an uncounted release. Remove it, and choose the "
        "setting beforehand.",
    ),
    (
        (BaseFinetuning, ModelPruning), "T14",
        "{} changes which parameters are trained during the run, but what is clipped and noised is fixed before the "
        "first step. Freeze parameters in the constructor of the module, and use two runs with init_from to train "
        "more of them later.",
    ),
    ((Timer,), "T35", _TIMES.replace("{}", "trainer.max_time")),
    ((DeviceStatsMonitor, ThroughputMonitor, SpikeDetection), "T35", _TIMES),
)  # fmt: skip


def _has_no_refused_callback(run: Candidate) -> None:
    for callback in run.callbacks:
        for kinds, trap, why in _REFUSED_CALLBACKS:
            if isinstance(callback, kinds):
                raise ConfigurationError(why.format(f"callbacks: {type(callback).__name__}"), trap=trap)


_SHAPE: tuple[Check, ...] = (_is_private_module, _is_built, _is_not_compiled, _states_a_law)
_EVERY: tuple[Check, ...] = (
    _is_counted,
    _declares_names,
    _supported_strategy,
    _takes_its_steps,
    lambda run: refuse_averages(run.trainer, run.module, run.callbacks),
    lambda run: refuse_changing_shapes(run.trainer, run.module),
)
_ANY_CLAIM: tuple[Check, ...] = (
    lambda run: refuse_cards_behind(run.module, run.start),
    _starts_unseen,
    _has_not_trained,
    _has_fresh_callbacks,
    _reads_what_its_claim_covers,
    _validates_on_declared_data,
    _chooses_by_no_other_claim,
)
_INHERITED: tuple[Check, ...] = (_carries_a_card, _chooses_by_public_metrics, _validates_nothing)
_DP: tuple[Check, ...] = (
    lambda run: refuse_another_claim(run.data),
    _shows_nothing_beside_a_total, _chooses_by_public_metrics, _has_no_refused_callback, _validates_nothing,
    _tells_no_times, _ends_for_no_private_row, _whole_batches, _known_precision, _no_accumulation,
    _starts_from_numbers,
    lambda run: refuse_changing_rows(run.trainer, run.module),
    lambda run: refuse_changed_batches(run.module, run.data),
    lambda run: refuse_saved_data(run.module, run.data),
    lambda run: refuse_replaced_weighting(run.module),
    lambda run: refuse_first_come(run.module, run.data),
    lambda run: refuse_random_layers(run.module),
)  # fmt: skip
