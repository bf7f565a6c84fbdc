"""From settings to the planned run: the plan, the sampling law, the number of steps, and the agreement of all ranks.

A process with an older checkout, another file or another setting would draw other units: at best the job hangs, at
worst the claim describes nothing that happened. So each rank hashes what it is about to do, and all must agree.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

import lit_dpret
from lit_dpret.callbacks.own_code import refuse_false_bound
from lit_dpret.cards.start import Start
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, DataError, first_line, told
from lit_dpret.files import json_sha256
from lit_dpret.privacy.accounting.releases import Poisson, SamplingLaw, Shuffle
from lit_dpret.privacy.budget import EACH_ROW, LARGE_DELTA, LARGE_EPSILON, large_delta, large_epsilon, show_delta
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.sampling import PrivateBatchSampler, steps_per_epoch


def accountant_of(trainer: L.Trainer) -> Any:
    """Return the callback that counts releases; None without one."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if getattr(callback, "counts_releases", False)), None)


def ledger_of(trainer: L.Trainer) -> Any:
    """Return the ledger of the run, open for writing; None on ranks other than 0, and without an accountant."""
    return getattr(accountant_of(trainer), "ledger", None)


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a run, decided before its first step."""

    plan: PrivacyPlan | None  # the promise; None without one
    law: SamplingLaw  # the law by which batches are drawn
    units: int  # the number of units; private under ``add_or_remove``
    unit: str  # the kind of unit, ``privacy.unit``
    steps: int  # logical steps
    steps_per_epoch: int  # logical steps in one pass over the units
    sub_batches: int | None = None  # the number of parts of a logical batch within which units see each other
    ends_at: int | None = None  # the step at which a resume ends, if it asks for fewer than were planned

    @property
    def steps_to_make(self) -> int:
        """Logical steps that the Trainer will have made at its end."""
        return self.steps if self.ends_at is None else self.ends_at

    def describe(self, mode: PrivacyMode, data: Any) -> dict[str, Any]:
        return {
            "mode": mode.name,
            "unit": mode.unit,
            **({"unit_name": name} if getattr(data, "unit_of", None) and (name := data.unit_name) else {}),
            "neighbours": mode.neighbours,
            "law": self.law.to_dict(),
            "planned_steps": self.steps,
            **({} if self.ends_at is None else {"ends_at": self.ends_at}),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "plan_fingerprint": None if self.plan is None else self.plan.fingerprint(),
            "rows_per_unit": data.rows_per_unit,
            "secure_rng": mode.secure_rng,
            "noise_seed": mode.noise_seed,
        }

    def sampler(self, data: Any, stream: KeyedStream, *, ranks: Ranks | None = None) -> PrivateBatchSampler:
        """Return the law's sampler, with the batch settings of ``data``; with ``ranks``, for this rank's part."""
        n_max = None if self.plan is None or self.plan.coupling is None else self.plan.coupling.n_max
        return PrivateBatchSampler(
            self.law,
            units=self.units,
            unit=self.unit,
            steps_per_epoch=self.steps_per_epoch,
            physical_batch_size=data.physical_batch_size,
            stream=stream,
            sub_batches=None if self.sub_batches is None else (self.sub_batches, n_max),
            ranks=ranks,
        )


def begin_from(mode: PrivacyMode, start: Start | None) -> None:
    """Make ``mode`` plan a claim about ``start`` and the run together, at the smaller of their deltas."""
    if start is not None:
        start.check(mode)
    mode.delta_at_most = None if start is None else start.facts.get("delta")


def plan_run(
    trainer: L.Trainer,
    mode: PrivacyMode,
    data: Any,
    *,
    module: Any = None,
    reserve: int = 0,
    start: Start | None = None,
    begun_with: int | None = None,
    epochs: float | None = None,
) -> PlannedRun:
    """Plan the run of ``trainer`` on ``data`` under ``mode``, with budget for ``reserve`` repeated steps.

    A mode for coupled losses reads the loss of ``module``. If there is a ``start``, the claim covers it too. A run that
    was ``begun_with`` more steps than the Trainer allows now keeps its plan, and ends earlier. ``epochs``, whole or
    fractional, replace the Trainer's length.
    """
    begin_from(mode, start)
    data.use_unit(mode.unit, mode.neighbours)
    if mode.unit == "user" and mode.guarantee == "dp" and getattr(data, "unit_by", None) == EACH_ROW:
        raise ConfigurationError(
            f"privacy.unit=user, but each row of {type(data).__name__} is a unit of its own (unit_by). Group the rows "
            "by user, as UnitDataModule does by unit_of, or claim a guarantee about rows (privacy.unit=record)."
        )
    refuse_false_bound(mode, data)
    units = data.n_units
    per_epoch = steps_per_epoch(data, mode.public_units(units))
    steps = planned_steps(trainer, per_epoch) if epochs is None else max(1, round(epochs * per_epoch))
    ends_at = None
    if begun_with is not None and steps < begun_with:
        steps, ends_at = begun_with, steps
    plan = mode.plan(data, units=units, steps=steps + reserve, module=module)
    if plan is not None:
        if mode.guarantee != "dp":
            raise ConfigurationError(
                f"{type(mode).__name__} plans a release, but its guarantee is {mode.guarantee}: a card would state an "
                "epsilon that nothing checks. Set guarantee to dp, or let plan return None."
            )
        if (budget := plan.budget.of_units(data)) != plan.budget:
            knob = "duplicates" if budget.duplicates != plan.budget.duplicates else "unit_by"
            raise ConfigurationError(
                f"privacy={mode.name} plans for datamodule.{knob}={getattr(plan.budget, knob)}, and the data have "
                f"{getattr(budget, knob)}. Build the mode's plan with PrivacyPlan.build, which reads the value from "
                "the data."
            )
        if start is not None:
            start.check_plan(plan)
        return PlannedRun(plan, plan.law, units, mode.unit, steps, per_epoch, mode.sub_batches, ends_at)
    batch = data.expected_batch_size or max(1, round((data.sample_rate or 1.0) * units))
    law: SamplingLaw = Shuffle(batch_size=min(batch, units), n=units)
    if data.sampling == "poisson":
        law = Poisson(sample_rate=data.sample_rate or min(1.0, batch / units))
    return PlannedRun(None, law, units, mode.unit, steps, per_epoch, mode.sub_batches, ends_at)


def planned_steps(trainer: L.Trainer, steps_per_epoch: int) -> int:
    """Return how many logical steps ``trainer`` will take; a private run must know this before it starts."""
    epochs = trainer.max_epochs
    by_epochs = epochs * steps_per_epoch if epochs is not None and epochs > 0 else None
    by_steps = trainer.max_steps if trainer.max_steps > 0 else None
    if epochs == 0 or trainer.max_steps == 0:
        raise ConfigurationError(
            f"trainer.max_epochs={epochs} with trainer.max_steps={trainer.max_steps} trains nothing. Set one above 0."
        )
    known = [value for value in (by_epochs, by_steps) if value is not None]
    if not known:
        raise ConfigurationError("A private run must know its length: set trainer.max_steps or trainer.max_epochs.")
    return min(known)


def tell_plan(plan: PrivacyPlan | None, steps: int) -> None:
    """Log the plan, and warn of an epsilon or delta that promises little."""
    if plan is None:
        return
    budget = plan.budget
    if budget.eps > LARGE_EPSILON:
        rank_zero_warn(told(large_epsilon(budget.eps)))
    if budget.delta > LARGE_DELTA:
        rank_zero_info(told(f"note: {large_delta(budget.delta, plan.n_public)}"))
    rank_zero_info(  # the length may be Lightning's default
        f"{steps} steps with noise multiplier {plan.noise_multiplier:.4g} are planned, within epsilon = "
        f"{budget.eps:g}, delta = {show_delta(budget.delta)}, unit = {budget.unit_name}, neighbours = "
        f"{budget.neighbours}"
    )


def fingerprint_of_files(module: Any, key: bytes) -> str | None:
    """Return a keyed fingerprint of the files that the module reads besides its DataModule: they are data too."""
    files: dict[str, Path] = module.files_read() if hasattr(module, "files_read") else {}
    if not files:
        return None
    found = hmac.new(key, digestmod="sha256")
    for knob, path in files.items():
        try:
            found.update(hmac.new(key, path.read_bytes(), digestmod="sha256").digest())
        except OSError as error:
            raise DataError(f"{knob}={path} cannot be read: {error.strerror}.") from error
    return found.hexdigest()


# Settings that may differ between ranks.
_OF_ONE_RANK = ("secret_file", "dataset_ledger", "counts")


def require_agreement(
    trainer: L.Trainer, module: Any, data: Any, *, planned: PlannedRun, stream: KeyedStream, ranks: Ranks
) -> None:
    """Refuse ranks with different plans; weights may differ, because the strategy makes them equal."""
    if ranks.world_size == 1:
        return
    stated = ranks.gather(ranks.together(lambda: facts_of(trainer, module, data, planned=planned, stream=stream)))
    for rank, facts in enumerate(stated):
        differing = [name for name in stated[0] if facts[name] != stated[0][name]]
        if differing:
            raise ConfigurationError(
                f"Rank {rank} of {ranks.world_size} would train with a different {' and '.join(differing)} from rank "
                "0. All must run the same command, with the same code, on the same data; compare the commands."
            )


def facts_of(trainer: L.Trainer, module: Any, data: Any, *, planned: PlannedRun, stream: KeyedStream) -> dict[str, str]:
    """Return hashes of the facts that all ranks must share, named as in a refusal."""
    mode = {k: v for k, v in vars(module.privacy).items() if not k.startswith("_") and k not in _OF_ONE_RANK}
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    key = bytes.fromhex(stream.tag("ranks"))
    facts: dict[str, Any] = {
        "version of the code": [lit_dpret.__version__, code_sha256(), torch.__version__],
        "number of steps": [planned.steps, planned.steps_to_make, planned.steps_per_epoch],
        "privacy setting": [module.privacy.name, mode],
        "plan": [None if planned.plan is None else planned.plan.to_dict(), planned.law.to_dict(), planned.sub_batches],
        "data set": [data.n_units, data.data_fingerprint(key)],
        "file of labels or negatives": fingerprint_of_files(module, key),
        "way of batching": [data.physical_batch_size, data.rows_per_unit],
        "model": parameters,
        "optimizer": _plain(getattr(module, "optimizer_spec", None)),
        "precision": str(trainer.precision),
    }
    return {name: json_sha256(value, default=_described) for name, value in facts.items()}


@lru_cache(maxsize=1)
def code_sha256() -> str:
    """Return the SHA-256 of every Python file of this package."""
    digest = hashlib.sha256()
    root = Path(lit_dpret.__file__).parent
    folders = [root, *(root / name for name in ("callbacks", "datamodules"))]  # links in a checkout
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _described(value: Any) -> str:
    """Describe what JSON cannot represent, without object addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else _described(value)


def refuse_unread_rows(module: Any, data: Any) -> None:
    """Refuse texts for a module of images, images for a module of texts, and images of a size that its net rejects.

    ``data`` must be set up. Custom modules and data that do not declare what they read and give are not checked.
    """
    reads, name = getattr(module, "reads", None), type(module).__name__
    shape = getattr(data, "image_shape", None)
    if reads == "texts" and shape is not None:
        raise ConfigurationError(
            f"{type(data).__name__} gives images, and {name} reads texts. Choose model=embedding_trainer with a "
            "model.net for images, or a datamodule of texts."
        )
    if reads == "images" and shape is None and hasattr(type(data), "collection"):
        raise ConfigurationError(
            f"{type(data).__name__} gives texts, and model.net={type(module.net).__name__} with these model.views "
            "reads images. Set model.net=null, model.views=null and model.encoder, or choose a datamodule of images."
        )
    blank = getattr(data, "blank_row", None)
    if blank is None or not hasattr(module, "try_rows") or any(weight.is_meta for weight in module.parameters()):
        return
    channels, height, width = data.image_shape
    try:
        module.try_rows([blank(), blank()])
    except (RuntimeError, ValueError, DataError) as error:
        raise ConfigurationError(
            f"model.net={type(module.net).__name__} cannot read images of {channels} x {height} x {width} (channels, "
            f"height, width): {first_line(error)}. Let a vision_folder resize them by datamodule.image_size=PIXELS, or "
            f"build the net for them (EmbeddingNet: +model.net.image_size={height} +model.net.in_channels={channels})."
        ) from error
