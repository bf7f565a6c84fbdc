"""Settings of a run under which its claim would be false, refused before it starts.

One list of checks serves both readers: a fit raises what the first of them raises, and
``task=doctor`` tells all of them. Each check looks at a `Candidate` and raises, or returns nothing.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lit_dpret.callbacks.averages import refuse_averages
from lit_dpret.callbacks.fixed_shapes import refuse_changing_rows, refuse_changing_shapes
from lit_dpret.callbacks.own_code import refuse_changed_batches, refuse_replaced_weighting, refuse_saved_data
from lit_dpret.callbacks.strategies import (
    refuse_parted_sums,
    refuse_second_masters,
    refuse_uncut_optimizer,
    refuse_unsupported,
    refuse_zero_settings,
    strategy_name,
)
from lit_dpret.cards.file import CARD_NAME, card_above, check_dataset_card
from lit_dpret.cards.start import Start, model_folder
from lit_dpret.errors import ConfigurationError, DataError, LitDpretError
from lit_dpret.privacy.ledger.gate import uncounted
from lit_dpret.privacy.ledger.trained import held, noted_in, runs_behind
from lit_dpret.privacy.sampling import Draw, PrivateBatchSampler, answer_of
from lit_dpret.privacy.training_data import not_offered
from lit_dpret.privacy.unit_owners import UnitOwners, names_its_unit, row_keys

#: After so many units without a named row, a data set is not asked for the others.
UNNAMED = 99


@dataclass(frozen=True)
class Candidate:
    """What is about to be trained, by what, on what."""

    trainer: L.Trainer
    module: Any
    data: Any

    @property
    def callbacks(self) -> list[Callback]:
        """Those of the Trainer, and those that the module will add to them."""
        own = self.module.configure_callbacks()
        return [*self.trainer.callbacks, *(own if isinstance(own, (list, tuple)) else [own])]  # type: ignore[attr-defined]

    @property
    def public_metrics(self) -> set[str]:
        """The logged names that were computed on data declared public or synthetic: to choose by them costs nothing."""
        return {name for callback in self.callbacks for name in getattr(callback, "public_metrics", ())}

    @property
    def start(self) -> Start | None:
        """The run that this one starts from, as its accountant was told."""
        counters = (callback for callback in self.callbacks if getattr(callback, "counts_releases", False))
        return next((counter.start() for counter in counters if hasattr(counter, "start")), None)


def refuse_broken_claims(trainer: L.Trainer, module: Any, data: Any) -> None:
    """Refuse a Trainer, module or DataModule with which the run would release what nobody counts.

    Raises:
        ConfigurationError: Naming the setting and what to do instead.
        DataError: ``privacy=synthetic`` on data that its card does not describe.
    """
    candidate = Candidate(trainer, module, data)
    for check in checks_of(module):
        check(candidate)


def complaints(trainer: L.Trainer, module: Any, data: Any) -> list[LitDpretError]:
    """Everything that `refuse_broken_claims` would raise, one after the other."""
    candidate, found = Candidate(trainer, module, data), []
    for check in checks_of(module):
        try:
            check(candidate)
        except LitDpretError as error:
            found.append(error)
            if check in _SHAPE:
                break  # the other checks look at what is missing
    return found


def refuse_replaced_sampler(loader: Any, sampler: PrivateBatchSampler) -> None:
    """Refuse a training loader that does not draw by the planned law.

    Raises:
        ConfigurationError: Its batch sampler is not ``sampler``.
    """
    if getattr(loader, "batch_sampler", None) is not sampler:
        raise ConfigurationError(
            "The training loader does not draw by the planned law: its batch sampler was replaced. "
            "Set trainer.use_distributed_sampler=false, and do not override train_dataloader.",
            trap="T2",
        )


def refuse_other_units(loader: Any, sampler: PrivateBatchSampler) -> bool:
    """Ask a training data set that is not of this package for every unit once, and refuse it where units share rows.

    Ours is built unit by unit. Where rows have no names (`row_key`) nothing can be told, and asking ends early.

    Returns:
        Whether the rows of one unit are known to be all rows of one query, user or image, for they say whose they are.

    Raises:
        DataError: It has another number of units, answered for another unit, or gave rows of one query, user or image
            for two units.
    """
    dataset = loader.dataset
    if hasattr(dataset, "__len__") and len(dataset) != sampler.units:
        raise DataError(
            "The training data set does not have as many units as datamodule.n_units said when the run was planned, so "
            "epsilon would be false: len(dataset) must be datamodule.n_units (datamodule.train_dataloader).",
            trap="T38",
        )
    units = getattr(dataset, "units", dataset)
    if type(units).__module__.startswith("lit_dpret.") and type(dataset).__module__.startswith("lit_dpret."):
        if (grouped := getattr(units, "unit", sampler.unit)) != sampler.unit:
            raise DataError(
                f"The training data are grouped by {grouped} where privacy.unit={sampler.unit}, so epsilon would be "
                "false: build them by the unit that datamodule.use_unit was told.",
                trap="T38",
            )
        return True
    owners, seen, unnamed = UnitOwners(sampler.unit), False, False
    for unit in range(sampler.units):
        draw, rows = answer_of(dataset[Draw(unit, 0, 0, False)])
        if draw.unit != unit:
            raise DataError(
                f"The training data set answers for unit {draw.unit} where unit {unit} was drawn, so epsilon would be "
                "false: dataset[draw] must return the draw itself (datamodule.train_dataloader).",
                trap="T38",
            )
        keys = row_keys(rows, sampler.unit)
        seen |= bool(keys)
        unnamed |= not all(names_its_unit(row, sampler.unit) for row in rows)
        if unit == UNNAMED and not seen:
            break
        owners.note(unit, keys)
    _refuse_remembering(dataset, sampler)
    return not unnamed


def _refuse_remembering(dataset: Any, sampler: PrivateBatchSampler) -> None:
    """Refuse a data set whose rows of a unit follow from which unit was asked for before it."""
    asked = [unit for unit in range(min(sampler.units, UNNAMED)) if len(answer_of(_ask(dataset, unit))[1])][:4]
    for before, unit, other in zip(asked, asked[1:], asked[2:], strict=False):
        found = []
        for first in (before, before, other):
            _ask(dataset, first)
            found.append(_content(_ask(dataset, unit)[1]))
        # Rows that differ each time are drawn by generators of their own, and say nothing.
        if found[0] == found[1] != found[2]:
            raise DataError(
                "The training data set gives other rows for a unit when another one was asked for before it, so one "
                "unit has a say in what others train on, which no clipping bounds. dataset[draw] must depend on "
                "draw.unit alone (datamodule.train_dataloader).",
                trap="T38",
            )


def _ask(dataset: Any, unit: int) -> Any:
    """What a data set answers for a unit, with the same random numbers each time."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(unit)
        random.seed(unit)
        np.random.seed(unit)
        answer = dataset[Draw(unit, 0, 0, False)]
    random.setstate(python)
    np.random.set_state(numpy)
    return answer


def _content(rows: Any) -> bytes | None:
    try:
        return pickle.dumps(list(rows))
    except Exception:  # rows that no worker process could send either
        return None


def refuse_false_bound(mode: Any, data: Any) -> None:
    """Refuse a declared ``privacy.max_units_per_user`` that the user ids of the data contradict.

    Where the data name no users, nothing is known and nothing is refused.

    Raises:
        ConfigurationError: A user has more units, or shares one with somebody else.
    """
    bound = getattr(mode, "max_units_per_user", None)
    if bound is None or not hasattr(data, "train_units"):
        return
    units = data.train_units()
    if units.duplicates == "merge":
        raise ConfigurationError(
            f"privacy.max_units_per_user={bound} cannot go with datamodule.duplicates=merge: a merged unit may belong "
            "to several people, and taking one of them out changes it instead of blanking it. Set "
            "datamodule.duplicates=keep, or leave the bound null."
        )
    most = units.most_units_of_a_user()
    if most is not None and most > bound:
        raise ConfigurationError(
            f"privacy.max_units_per_user={bound} is not true of these data: a user id has more {mode.unit} units than "
            "that. Declare a bound that holds, take rows out of the data, or set privacy.unit=user."
        )


Check = Callable[[Candidate], None]


def checks_of(module: Any) -> tuple[Check, ...]:
    """The checks that the module's privacy mode calls for."""
    guarantee = getattr(getattr(module, "privacy", None), "guarantee", "none")
    return _SHAPE + {"dp": _EVERY + _ANY_CLAIM + _DP, "inherited": _EVERY + _ANY_CLAIM + _INHERITED}.get(
        guarantee, _EVERY
    )


def _is_private_module(run: Candidate) -> None:
    if not hasattr(run.module, "privacy") or not hasattr(run.module, "receive_guard"):
        raise ConfigurationError(
            f"{type(run.module).__name__} is not a PrivateModule: the accountant could not see what it releases.",
            trap="T7",
        )


def _is_built(run: Candidate) -> None:
    """Refuse weights that are not there yet: nobody could say what they start from, nor how many there are."""
    for name, parameter in run.module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigurationError(
                f"{name} of {type(run.module).__name__} has no shape before the first batch (a lazy layer), and the "
                "run is planned before it. Send a public batch through the layer before trainer.fit, or give its sizes."
            )


def _is_not_compiled(run: Candidate) -> None:
    if getattr(run.module, "_compiler_ctx", None) is not None:  # what Lightning leaves of torch.compile(module)
        raise ConfigurationError(
            f"{type(run.module).__name__} was given to trainer.fit inside torch.compile, which cannot follow the sum "
            "of clipped gradients that a step makes. Build the module anew and give trainer.fit the module itself."
        )


def _states_a_law(run: Candidate) -> None:
    missing = not_offered(run.data)
    if run.data is None or missing:
        what = "there is none" if run.data is None else f"{type(run.data).__name__} lacks {', '.join(missing)}"
        raise ConfigurationError(
            f"The accountant reads from the DataModule how batches are drawn and who is in them, and {what}. Pass "
            "datamodule= to trainer.fit: a PairsDataModule, or a class with all that "
            "lit_dpret.privacy.training_data.TrainingData lists.",
            trap="T1",
        )


def _is_counted(run: Candidate) -> None:
    if not any(getattr(callback, "counts_releases", False) for callback in run.callbacks):
        raise uncounted(type(run.module).__name__)


def _shown_strategy(run: Candidate) -> None:
    refuse_unsupported(run.trainer, run.module.privacy)
    refuse_uncut_optimizer(run.trainer, run.module)
    refuse_second_masters(run.trainer)
    refuse_parted_sums(run.trainer, run.module)
    if strategy_name(run.trainer) == "deepspeed":
        refuse_zero_settings(run.trainer.strategy, getattr(run.module, "optimizer_spec", None))


def _carries_a_card(run: Candidate) -> None:
    if not hasattr(run.data, "privacy_card_path"):
        raise ConfigurationError(
            f"privacy=synthetic trains on data that carries a privacy card, and {type(run.data).__name__} reads "
            "data that has none. Choose datamodule=synthetic, or another privacy mode.",
            trap="T27",
        )
    check_dataset_card(run.data.privacy_card_path)


def _starts_public(run: Candidate) -> None:
    """Refuse weights that were themselves trained on private data, unless their cost is composed with this run's."""
    for place in _origins(run.module, run.start):
        card = place / CARD_NAME if (place / CARD_NAME).is_file() else card_above(place)
        if card is not None:
            raise ConfigurationError(
                f"{place} carries a privacy card ({card}): its weights were trained on private data, and this run's "
                "card would forget what that cost. Name the run that it lies in as init_from, or start from a public "
                "model.",
                trap="T30",
            )


def _starts_unseen(run: Candidate) -> None:
    counters = (callback for callback in run.callbacks if hasattr(callback, "known_runs"))
    if (counter := next(counters, None)) is not None:
        refuse_other_weights(run.module, counter, run.data)


def refuse_other_weights(module: Any, counter: Any, data: Any) -> None:
    """Refuse weights that a run trained on private data whose releases this run's claim does not count.

    Args:
        module: What is to be trained.
        counter: The accountant of the run; it knows which runs are counted.
        data: The DataModule of the run.

    Raises:
        ConfigurationError: Naming that run, and the way out.
    """
    if counter.counted_by_others or module.privacy.guarantee == "none":
        return
    behind = runs_behind(module).union(*map(noted_in, _origins(module, counter.start())))
    if not behind:
        return
    known = counter.known_runs(module, data)
    unknown = sorted((not run.folder, run) for run in behind if run.run not in known)
    if not unknown:
        return
    run = unknown[0][1]
    place = f" in {run.folder}" if run.folder else ""
    way = "Build the module anew, from public weights"
    if run.folder and (Path(run.folder) / CARD_NAME).is_file():
        way += f", or start from what that run wrote: init_from={run.folder}"
    raise ConfigurationError(
        f"{type(module).__name__} holds weights that a run under privacy={run.privacy} trained{place}, and this run's "
        f"card would forget what that cost. {way}. To go on with that run itself, say resume=true in its folder.",
        trap="T30",
    )


def _origins(module: Any, start: Start | None) -> list[Path]:
    """The folders other than the start's that weights came from.

    By the settings of whatever the module holds, and by what its transformers remember.
    """
    own = None if start is None else model_folder(start.folder).resolve()
    parts = [part for part in held(module) if isinstance(part, nn.Module)]
    remembered = (getattr(getattr(part, "config", None), "_name_or_path", None) for part in parts)
    said = (*(getattr(part, "pretrained", None) for part in parts), *remembered)
    named = dict.fromkeys(str(name) for name in said if isinstance(name, (str, Path)) and name != "")
    places = (Path(name).expanduser() for name in named)
    return [place for place in places if place.is_dir() and not (own and place.resolve().is_relative_to(own))]


def _shows_nothing_beside_a_total(run: Candidate) -> None:
    """Refuse to count a run in a total whose own card will prove nothing."""
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
            f"{shown[0]} shows numbers of the private rows that nobody counts, and privacy.dataset_ledger={ledger} "
            "adds up what all runs on these data cost: no total would hold any more. Leave one of them out."
        )


def _stops_by_a_fixed_number(run: Candidate) -> None:
    for callback in run.callbacks:
        if isinstance(callback, EarlyStopping) and callback.monitor not in run.public_metrics:
            raise ConfigurationError(
                f"EarlyStopping(monitor={callback.monitor!r}) decides by private data: that is a release "
                "nobody counts. Remove it and fix trainer.max_steps beforehand, or monitor a metric that a "
                "RetrievalEvaluation computes on public or synthetic queries.",
                trap="T25",
            )


def _keeps_the_last(run: Candidate) -> None:
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor not in (None, *run.public_metrics):
            raise ConfigurationError(
                f"ModelCheckpoint(monitor={callback.monitor!r}) chooses by private data: that is a "
                "release nobody counts. Leave monitor unset and keep the last checkpoint, or monitor a metric that a "
                "RetrievalEvaluation computes on public or synthetic queries.",
                trap="T25",
            )


def _tunes_nothing(run: Candidate) -> None:
    for callback in run.callbacks:
        if isinstance(callback, (LearningRateFinder, BatchSizeFinder)):
            raise ConfigurationError(
                f"{type(callback).__name__} trains on private data to choose a setting: that is a release nobody "
                "counts. Remove it, and fix the setting beforehand.",
                trap="T25",
            )


def _validates_nothing(run: Candidate) -> None:
    if type(run.module).validation_step is not L.LightningModule.validation_step:
        raise ConfigurationError(
            f"{type(run.module).__name__}.validation_step computes metrics inside a private run: on private rows each "
            "of them is a release nobody counts. Evaluate afterwards (task=evaluate), on public or held-out data.",
            trap="T25",
        )


def _validates_on_declared_data(run: Candidate) -> None:
    for callback in run.callbacks:
        if hasattr(callback, "refuse_undeclared"):
            callback.refuse_undeclared(run.module, run.data)


def takes_whole_epochs(trainer: L.Trainer) -> bool:
    """Whether an epoch ends where the sampler ends it, and not after fewer batches."""
    limit = trainer.limit_train_batches
    whole = limit is None or (isinstance(limit, float) and limit == 1.0)  # the int 1 means one batch
    return whole and not getattr(trainer, "overfit_batches", False)


def _whole_batches(run: Candidate) -> None:
    if not takes_whole_epochs(run.trainer):
        raise ConfigurationError(
            "trainer.limit_train_batches and trainer.overfit_batches cut a logical batch short and change "
            "the sampling law. Use trainer.max_steps.",
            trap="T2",
        )


def _takes_its_steps(run: Candidate) -> None:
    """Refuse what keeps a logical batch from ever being finished, under any mode."""
    if batches := getattr(run.trainer, "fast_dev_run", False):
        raise ConfigurationError(
            f"trainer.fast_dev_run={batches} ends after so many physical batches, in the middle of a logical one, and "
            "skips what a run writes. Use trainer.max_steps, or task=doctor, which trains nothing.",
            trap="T2",
        )
    every = getattr(run.trainer, "reload_dataloaders_every_n_epochs", 0)
    if every:
        raise ConfigurationError(
            f"trainer.reload_dataloaders_every_n_epochs={every} would throw away batches that the loader has fetched "
            "ahead, and the logical batch that is due would never come. Set it to 0: the sampler draws anew each step."
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
            f"trainer.precision={run.trainer.precision}: nobody has looked at what it keeps of a batch, or at what it "
            f"does to an update. Choose one of {', '.join(_PRECISIONS)}."
        )


def _tells_no_times(run: Candidate) -> None:
    """Refuse what writes down, or acts by, how long private steps take or how much memory they need."""
    found = type(run.trainer.profiler)  # type: ignore[attr-defined]
    if found is not PassThroughProfiler:
        raise ConfigurationError(
            f"trainer.profiler={found.__name__} writes down how long each step took, which tells how long the texts in "
            "it were: that is a release nobody counts. Profile under privacy=none; callbacks=with_throughput tells the "
            "speed on the terminal alone.",
            trap="T35",
        )
    for callback in run.callbacks:
        name = type(callback).__name__
        if isinstance(callback, _TIMED):
            knob = "trainer.max_time" if isinstance(callback, Timer) else f"callbacks: {name}"
            raise ConfigurationError(
                f"{knob} writes down, or ends the run by, times, memory or losses of private steps, which depend on "
                "the texts in them. Remove it, and fix the length by trainer.max_steps; callbacks=with_throughput "
                "tells the speed on the terminal alone.",
                trap="T35",
            )
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise ConfigurationError(
                f"{name}(train_time_interval=...) saves by the clock, and which step is saved tells how long private "
                "steps took. Set every_n_train_steps.",
                trap="T35",
            )
    for logger in run.trainer.loggers:
        if isinstance(logger, WandbLogger) and not _is_quiet(logger._wandb_init.get("settings")):
            raise ConfigurationError(
                "W&B would keep what the terminal shows and measure the machine, with the time of each: that tells how "
                "long private steps took. Take lit_dpret.callbacks.PublicWandbLogger (logger=wandb), or give the "
                'WandbLogger settings=wandb.Settings(console="off", x_disable_stats=True).',
                trap="T35",
            )


def _is_quiet(settings: Any) -> bool:
    """Whether W&B neither keeps the terminal nor measures the machine."""
    found = settings if isinstance(settings, dict) else vars(settings) if settings is not None else {}
    return found.get("console") == "off" and found.get("x_disable_stats") is True


def _no_accumulation(run: Candidate) -> None:
    scheduled = any(isinstance(c, GradientAccumulationScheduler) and c.going_to_accumulate_grad_batches()
                    for c in run.callbacks)  # fmt: skip
    if run.trainer.accumulate_grad_batches != 1 or scheduled:
        raise ConfigurationError(
            f"trainer.accumulate_grad_batches={run.trainer.accumulate_grad_batches} divides by a number of batches and "
            "would noise each of them. A logical batch is cut to fit by datamodule.physical_batch_size instead.",
            trap="T12",
        )


def _no_clipping_of_the_sum(run: Candidate) -> None:
    if run.trainer.gradient_clip_val:
        raise ConfigurationError(
            f"trainer.gradient_clip_val={run.trainer.gradient_clip_val:g} clips the sum over the batch, which bounds "
            "nothing that one unit does. Set privacy.max_grad_norm, and leave this null.",
            trap="T16",
        )


def _averages_weights(run: Candidate) -> None:
    refuse_averages(run.trainer, run.module, run.callbacks)


def _leaves_batches_alone(run: Candidate) -> None:
    refuse_changed_batches(run.module, run.data)
    refuse_saved_data(run.module, run.data)
    refuse_replaced_weighting(run.module)


def _one_shape_where_it_compiles(run: Candidate) -> None:
    refuse_changing_shapes(run.trainer, run.module)


def _rows_that_keep_their_gradients(run: Candidate) -> None:
    refuse_changing_rows(run.trainer, run.module)


_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
_TIMED = (Timer, DeviceStatsMonitor, ThroughputMonitor, SpikeDetection)

_SHAPE: tuple[Check, ...] = (_is_private_module, _is_built, _is_not_compiled, _states_a_law)
_EVERY: tuple[Check, ...] = (
    _is_counted,
    _shown_strategy,
    _takes_its_steps,
    _averages_weights,
    _one_shape_where_it_compiles,
)
_ANY_CLAIM: tuple[Check, ...] = (_starts_public, _starts_unseen, _validates_on_declared_data)
_INHERITED: tuple[Check, ...] = (_carries_a_card,)
_DP: tuple[Check, ...] = (
    _shows_nothing_beside_a_total, _stops_by_a_fixed_number, _keeps_the_last, _tunes_nothing, _validates_nothing,
    _tells_no_times, _whole_batches, _known_precision, _no_accumulation, _no_clipping_of_the_sum,
    _rows_that_keep_their_gradients, _leaves_batches_alone,
)  # fmt: skip
